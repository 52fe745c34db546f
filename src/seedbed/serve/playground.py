"""The playground: samples from a trained run in a separate process, streamed to the page over a websocket.

The process keeps torch and the weights out of this server, and is stopped when it has been idle.
"""

import asyncio
import contextlib
import json
import time
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.websockets import WebSocket, WebSocketDisconnect

from seedbed import isolated
from seedbed.errors import UserError
from seedbed.serve import views
from seedbed.serve.messages import read_object, receive_text
from seedbed.serve.run_index import RunIndex, is_name

MAX_PROCESSES = 3
IDLE_SECONDS = 300.0
SEND_SECONDS = 10.0
# Longest line that a process may send.
_MAX_LINE = 1 << 20


class Playground:
    """The worker processes of all runs with an open playground."""

    def __init__(self, index: RunIndex) -> None:
        self.index = index
        self._workers: dict[str, SampleWorker] = {}

    async def page(self, socket: WebSocket) -> None:
        """Serve one open page: requests, streamed answers, and `stop`."""
        await socket.accept()
        name = socket.path_params["name"]
        try:
            worker = await self._worker_of(name)
            async with worker.lock:
                await worker.start()
            await _send(socket, {"ready": worker.ready})
            await self._serve_requests(socket, name)
        except UserError as problem:
            with contextlib.suppress(RuntimeError, WebSocketDisconnect, TimeoutError):
                await _send(socket, {"error": str(problem), "final": True})
                await socket.close()
        except (WebSocketDisconnect, RuntimeError, TimeoutError):
            pass

    async def _serve_requests(self, socket: WebSocket, name: str) -> None:
        early: str | None = None
        while True:
            asked = read_object(early or await receive_text(socket)) or {}
            early = None
            if "request" not in asked:
                continue
            worker = await self._worker_of(name)
            if worker.lock.locked():
                await _send(socket, {"wait": "waiting for another request"})
            async with worker.lock:
                await worker.start()
                early = await self._answer(socket, worker, asked["request"])

    async def _answer(self, socket: WebSocket, worker: "SampleWorker", options: Any) -> str | None:
        """Stream one answer. A disconnect or `stop` ends it early; the process's messages are read to the end either way.

        Returns what the page sent in the meantime, which may be its next request.
        """
        await worker.send({"request": options})
        leaving = asyncio.ensure_future(receive_text(socket))
        stopped = asyncio.ensure_future(_stop_on_message(leaving, worker))
        gone: Exception | None = None
        try:
            async for message in worker.answer():
                if "end" in message:
                    addresses = [views.address("runs", worker.name, path) for path in message["end"].get("files", [])]
                    message = {"end": {**message["end"], "files": addresses}}
                if gone is None:
                    try:
                        await _send(socket, message)
                    except (WebSocketDisconnect, RuntimeError, TimeoutError) as error:
                        gone = error
                        await worker.send({"stop": True})
        finally:
            for task in (leaving, stopped):
                task.cancel()
            found = await asyncio.gather(leaving, stopped, return_exceptions=True)
        if gone is not None or isinstance(found[0], WebSocketDisconnect):
            raise gone or WebSocketDisconnect()
        return found[0] if isinstance(found[0], str) else None

    async def _worker_of(self, name: str) -> "SampleWorker":
        if name in self._workers:
            return self._workers[name]
        page = await run_in_threadpool(views.run_page, self.index, name) if is_name(name) else {}
        if not page.get("opens", {}).get("playground"):
            raise UserError(f"run {name} cannot be sampled here; try: seedbed sample {name}")
        if len(self._workers) >= MAX_PROCESSES:
            free = [worker for worker in self._workers.values() if not worker.lock.locked()]
            if not free:
                raise UserError(f"{MAX_PROCESSES} runs are generating already; try again later")
            await self._remove(min(free, key=lambda worker: worker.used))
        return self._workers.setdefault(name, SampleWorker(self.index, name))

    async def _remove(self, worker: "SampleWorker") -> None:
        self._workers.pop(worker.name, None)
        await worker.stop()

    async def stop_idle(self) -> None:
        while True:
            await asyncio.sleep(IDLE_SECONDS / 10)
            for worker in list(self._workers.values()):
                if not worker.lock.locked() and time.monotonic() - worker.used > IDLE_SECONDS:
                    await self._remove(worker)

    async def close(self) -> None:
        for worker in self._workers.values():
            await worker.stop()
        self._workers.clear()


class SampleWorker:
    """The worker process of one run; it handles one request at a time."""

    def __init__(self, index: RunIndex, name: str) -> None:
        self.index, self.name = index, name
        self.lock = asyncio.Lock()
        self.used = time.monotonic()
        self.ready: dict[str, Any] = {}
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the process, unless it runs; a UserError says why the run cannot be loaded."""
        if self._process is not None and self._process.returncode is None:
            return
        words = process_for(self.index, self.name)
        pipes: dict[str, Any] = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE, "limit": _MAX_LINE}
        self._process = await asyncio.create_subprocess_exec(*words, stderr=asyncio.subprocess.DEVNULL, **pipes)
        message = await self._receive()
        if "ready" not in message:
            await self.stop()
            raise UserError(str(message.get("error") or "the run could not be loaded"))
        self.ready = message["ready"]

    async def send(self, words: dict[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        self.used = time.monotonic()
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(json.dumps(words).encode() + b"\n")
            await self._process.stdin.drain()

    async def _receive(self) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        try:
            line = await self._process.stdout.readline()
            return json.loads(line)
        except ValueError:
            await self.stop()
            return {"error": "the process of the model has ended; send the request again to restart it"}

    async def answer(self):
        """The messages of the process for one request, to the last one."""
        while True:
            message = await self._receive()
            self.used = time.monotonic()
            yield message
            if "end" in message or "error" in message:
                return

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def process_for(index: RunIndex, name: str) -> list[str]:
    return isolated.command("seedbed.launch.sample_worker", str(index.root), name)


async def _stop_on_message(leaving: asyncio.Future[str], worker: SampleWorker) -> None:
    """Stop the answer when the page disconnects or sends anything but a new request."""
    await asyncio.wait({leaving})
    if not leaving.cancelled() and (leaving.exception() or "request" not in (read_object(leaving.result()) or {})):
        await worker.send({"stop": True})


async def _send(socket: WebSocket, words: dict[str, Any]) -> None:
    await asyncio.wait_for(socket.send_text(json.dumps(words)), SEND_SECONDS)
