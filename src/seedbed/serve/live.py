"""What changed, told to open pages over a socket: one look at the files per second, however many pages are open."""

import asyncio
import contextlib
import json
from collections.abc import Iterator
from typing import Any

import anyio
from starlette.concurrency import run_in_threadpool
from starlette.websockets import WebSocket, WebSocketDisconnect

from seedbed.serve.shelf import Shelf, is_name

PERIOD = 0.7
# A page that takes nothing for this long is let go: what waits for it would fill our memory.
PATIENCE = 10.0
MAX_WATCHED = 32
PARTS = ("config", "status", "rows", "events", "lock", "console")


class Live:
    """All open pages. The clock that looks at the files runs while there is one."""

    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf
        self._beat = asyncio.Event()
        self._clock: asyncio.Task[None] | None = None
        self._num_pages = 0
        self._watched: dict[str, int] = {}
        self._stamps: dict[str, Any] = {}

    async def page(self, socket: WebSocket) -> None:
        """One open page: it says once what it watches, and hears of changes until it leaves."""
        await socket.accept()
        try:
            asked = json.loads(await asyncio.wait_for(socket.receive_text(), PATIENCE))
            watched = [name for name in asked.get("runs", []) if isinstance(name, str) and is_name(name)][:MAX_WATCHED]
            wants_list, version = bool(asked.get("list")), int(asked.get("version") or 0)
        except (ValueError, AttributeError, TypeError, TimeoutError, WebSocketDisconnect):
            return await _close(socket, 1003)
        with self._attending(watched):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_until_closed, socket, tasks.cancel_scope)
                with contextlib.suppress(WebSocketDisconnect, RuntimeError, TimeoutError):
                    await self._tell(socket, watched, wants_list, version)
                tasks.cancel_scope.cancel()
        await _close(socket)

    async def _tell(self, socket: WebSocket, watched: list[str], wants_list: bool, version: int) -> None:
        seen = {name: await run_in_threadpool(self.shelf.stamp, name) for name in watched}
        while True:
            await self._beat.wait()
            news: dict[str, Any] = {}
            if wants_list and self.shelf.version > version:
                version, changed, gone = await run_in_threadpool(self.shelf.since, version)
                news["list"] = {"version": version, "runs": changed, "gone": gone}
            for name in watched:
                stamp = self._stamps.get(name, seen[name])
                parts = [part for part, old, new in zip(PARTS, seen[name], stamp, strict=True) if old != new]
                if parts:
                    seen[name] = stamp
                    news.setdefault("runs", {})[name] = parts
            if news:
                await asyncio.wait_for(socket.send_text(json.dumps(news)), PATIENCE)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(PERIOD)
            with contextlib.suppress(OSError):  # a disk that hiccups is looked at again
                self._stamps = await run_in_threadpool(self._read, list(self._watched))
            beat, self._beat = self._beat, asyncio.Event()
            beat.set()

    def _read(self, names: list[str]) -> dict[str, Any]:
        self.shelf.refresh()
        return {name: self.shelf.stamp(name) for name in names}

    @contextlib.contextmanager
    def _attending(self, watched: list[str]) -> Iterator[None]:
        for name in watched:
            self._watched[name] = self._watched.get(name, 0) + 1
        self._num_pages += 1
        if self._clock is None or self._clock.done():
            self._clock = asyncio.ensure_future(self._look())
        try:
            yield
        finally:
            self._num_pages -= 1
            for name in watched:
                self._watched[name] -= 1
                if not self._watched[name]:
                    del self._watched[name]
            if not self._num_pages and self._clock is not None:
                self._clock.cancel()
                self._clock = None


async def _until_closed(socket: WebSocket, visit: anyio.CancelScope) -> None:
    """Pages say nothing after their first word; anything else, and the end of the connection, ends the visit."""
    with contextlib.suppress(WebSocketDisconnect, KeyError):
        await socket.receive_text()
    visit.cancel()


async def _close(socket: WebSocket, code: int = 1000) -> None:
    """Say goodbye to a page that may have gone without one."""
    with contextlib.suppress(RuntimeError, WebSocketDisconnect, TimeoutError):
        await asyncio.wait_for(socket.close(code), 1.0)
