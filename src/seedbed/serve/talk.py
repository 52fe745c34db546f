"""The playground: a trained run in a process of its own, asked over a socket, its words passed on as they come.

The process keeps torch and the weights out of this server, and takes them with it when nobody has asked for a while.
"""

import asyncio
import contextlib
import json
import sys
import time
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.websockets import WebSocket, WebSocketDisconnect

from seedbed.errors import UserError
from seedbed.serve import views
from seedbed.serve.shelf import Shelf, is_name

MAX_PROCESSES = 3
IDLE_SECONDS = 300.0
PATIENCE = 10.0
# A line of a process is a piece of text or a few facts.
_MAX_LINE = 1 << 20


def process_for(shelf: Shelf, name: str) -> tuple[str, ...]:
    """The command that loads a run and answers on its pipes."""
    return sys.executable, "-m", "seedbed.launch.talker", str(shelf.root), name


class Talker:
    """One run's process, for one question at a time."""

    def __init__(self, shelf: Shelf, name: str) -> None:
        self.shelf, self.name = shelf, name
        self.turn = asyncio.Lock()
        self.used = time.monotonic()
        self.ready: dict[str, Any] = {}
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Load the run, if it is not loaded; a UserError says why it cannot be."""
        if self._process is not None and self._process.returncode is None:
            return
        words = process_for(self.shelf, self.name)
        pipes: dict[str, Any] = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE, "limit": _MAX_LINE}
        self._process = await asyncio.create_subprocess_exec(*words, stderr=asyncio.subprocess.DEVNULL, **pipes)
        said = await self._hear()
        if "ready" not in said:
            await self.stop()
            raise UserError(str(said.get("error") or "the run could not be loaded"))
        self.ready = said["ready"]

    async def say(self, words: dict[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        self.used = time.monotonic()
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(json.dumps(words).encode() + b"\n")
            await self._process.stdin.drain()

    async def _hear(self) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        try:
            line = await self._process.stdout.readline()
            return json.loads(line)
        except ValueError:
            await self.stop()
            return {"error": "the process that held the model has ended; ask again to load it anew"}

    async def answer(self):
        """What the process says to a question, to its end."""
        while True:
            said = await self._hear()
            self.used = time.monotonic()
            yield said
            if "end" in said or "error" in said:
                return

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    @property
    def is_idle(self) -> bool:
        return not self.turn.locked() and time.monotonic() - self.used > IDLE_SECONDS


class Talks:
    """The processes of all runs that are being talked to."""

    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf
        self._talkers: dict[str, Talker] = {}

    async def page(self, socket: WebSocket) -> None:
        """A playground that is open: questions come, answers go, and `stop` ends an answer early."""
        await socket.accept()
        name = socket.path_params["name"]
        try:
            talker = await self._talker(name)
            async with talker.turn:
                await talker.start()
            await _send(socket, {"ready": talker.ready})
            await self._converse(socket, name)
        except UserError as problem:
            with contextlib.suppress(RuntimeError, WebSocketDisconnect, TimeoutError):
                await _send(socket, {"error": str(problem), "final": True})
                await socket.close()
        except (WebSocketDisconnect, RuntimeError, TimeoutError):
            pass

    async def _converse(self, socket: WebSocket, name: str) -> None:
        early: str | None = None
        while True:
            asked = _read(early or await socket.receive_text())
            early = None
            if "ask" not in asked:
                continue
            talker = await self._talker(name)
            if talker.turn.locked():
                await _send(socket, {"wait": "somebody else's answer comes first"})
            async with talker.turn:
                await talker.start()
                early = await self._answer(socket, talker, asked["ask"])

    async def _answer(self, socket: WebSocket, talker: Talker, options: Any) -> str | None:
        """Pass one answer on. Whoever leaves or says stop ends it; the process is heard to its end either way.

        Gives back what the page said in the meantime, which may be its next question.
        """
        await talker.say({"ask": options})
        leaving = asyncio.ensure_future(socket.receive_text())
        stopped = asyncio.ensure_future(_stop_when(leaving, talker))
        gone: Exception | None = None
        try:
            async for said in talker.answer():
                if gone is None:
                    try:
                        await _send(socket, self._told(talker.name, said))
                    except (WebSocketDisconnect, RuntimeError, TimeoutError) as error:
                        gone = error
                        await talker.say({"stop": True})
        finally:
            for task in (leaving, stopped):
                task.cancel()
            found = await asyncio.gather(leaving, stopped, return_exceptions=True)
        if gone is not None or isinstance(found[0], WebSocketDisconnect):
            raise gone or WebSocketDisconnect()
        return found[0] if isinstance(found[0], str) else None

    def _told(self, name: str, said: dict[str, Any]) -> dict[str, Any]:
        """Paths of files become addresses."""
        if "end" not in said:
            return said
        end = said["end"]
        return {"end": {**end, "files": [views.address("runs", name, path) for path in end.get("files", [])]}}

    async def _talker(self, name: str) -> Talker:
        if name in self._talkers:
            return self._talkers[name]
        if not is_name(name) or not (await run_in_threadpool(views.run_page, self.shelf, name)).get("opens", {}).get("talk"):
            raise UserError(f"run {name} cannot be asked from here; try: seedbed sample {name}")
        if len(self._talkers) >= MAX_PROCESSES:
            free = [talker for talker in self._talkers.values() if not talker.turn.locked()]
            if not free:
                raise UserError(f"{MAX_PROCESSES} runs are answering already; try again in a moment")
            await self._dismiss(min(free, key=lambda talker: talker.used))
        return self._talkers.setdefault(name, Talker(self.shelf, name))

    async def _dismiss(self, talker: Talker) -> None:
        self._talkers.pop(talker.name, None)
        await talker.stop()

    async def tend(self) -> None:
        """Let go of processes that nobody has asked for a while."""
        while True:
            await asyncio.sleep(IDLE_SECONDS / 10)
            for talker in [talker for talker in self._talkers.values() if talker.is_idle]:
                await self._dismiss(talker)

    async def close(self) -> None:
        for talker in self._talkers.values():
            await talker.stop()
        self._talkers.clear()


async def _stop_when(leaving: "asyncio.Future[str]", talker: Talker) -> None:
    """Whatever the page says while an answer comes means stop, unless it is a question; and so does its leaving."""
    await asyncio.wait({leaving})
    if not leaving.cancelled() and (leaving.exception() or "ask" not in _read(leaving.result())):
        await talker.say({"stop": True})


async def _send(socket: WebSocket, words: dict[str, Any]) -> None:
    await asyncio.wait_for(socket.send_text(json.dumps(words)), PATIENCE)


def _read(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
