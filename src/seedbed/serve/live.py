"""Live updates over websockets: the files are polled once per period for all open pages."""

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import anyio
from starlette.concurrency import run_in_threadpool
from starlette.websockets import WebSocket, WebSocketDisconnect

from seedbed.serve.messages import read_object, receive_text, to_text
from seedbed.serve.run_index import RunIndex, is_name

PERIOD = 0.7
# A page that does not read for so many seconds is disconnected, to bound the memory of its queue.
SEND_SECONDS = 10.0
MAX_WATCHED = 32
PARTS = ("config", "status", "rows", "events", "lock", "console")


class Live:
    """All open pages. The polling task runs while there is at least one."""

    def __init__(self, index: RunIndex) -> None:
        self.index = index
        self._next_poll = asyncio.Event()
        self._polling: asyncio.Task[None] | None = None
        self._num_pages = 0
        self._watched: dict[str, int] = {}
        self._stamps: dict[str, Any] = {}

    async def page(self, socket: WebSocket) -> None:
        """Serve one page: it subscribes once and receives changes until it disconnects."""
        await socket.accept()
        try:
            watched, wants_list, version = read_request(await asyncio.wait_for(receive_text(socket), SEND_SECONDS))
        except (ValueError, TimeoutError, WebSocketDisconnect):
            return await _close(socket, 1003)
        with self._subscribed(watched):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_until_closed, socket, tasks.cancel_scope)
                with contextlib.suppress(WebSocketDisconnect, RuntimeError, TimeoutError):
                    await self._send_changes(socket, watched, wants_list, version)
                tasks.cancel_scope.cancel()
        await _close(socket)

    async def _send_changes(self, socket: WebSocket, watched: list[str], wants_list: bool, version: int) -> None:
        seen = {name: await run_in_threadpool(self.index.stamp, name) for name in watched}
        while True:
            await self._next_poll.wait()
            changes: dict[str, Any] = {}
            if wants_list and self.index.version > version:
                version, changed, gone = await run_in_threadpool(self.index.since, version)
                changes["list"] = {"version": version, "runs": changed, "gone": gone}
            for name in watched:
                stamp = self._stamps.get(name, seen[name])
                parts = [part for part, old, new in zip(PARTS, seen[name], stamp, strict=True) if old != new]
                if parts:
                    seen[name] = stamp
                    changes.setdefault("runs", {})[name] = parts
            if changes:
                await asyncio.wait_for(socket.send_text(to_text(changes)), SEND_SECONDS)

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(PERIOD)
            with contextlib.suppress(OSError):  # retried in the next period
                self._stamps = await run_in_threadpool(self._read, list(self._watched))
            finished, self._next_poll = self._next_poll, asyncio.Event()
            finished.set()

    def _read(self, names: list[str]) -> dict[str, Any]:
        self.index.refresh()
        return {name: self.index.stamp(name) for name in names}

    @contextlib.contextmanager
    def _subscribed(self, watched: list[str]) -> Iterator[None]:
        for name in watched:
            self._watched[name] = self._watched.get(name, 0) + 1
        self._num_pages += 1
        if self._polling is None or self._polling.done():
            self._polling = asyncio.ensure_future(self._poll())
        try:
            yield
        finally:
            self._num_pages -= 1
            for name in watched:
                self._watched[name] -= 1
                if not self._watched[name]:
                    del self._watched[name]
            if not self._num_pages and self._polling is not None:
                self._polling.cancel()
                self._polling = None


def read_request(text: str) -> tuple[list[str], bool, int]:
    """Parse a subscription: run names, whether the list is wanted, and after which version. ValueError for anything else."""
    asked = read_object(text)
    if asked is None:
        raise ValueError("not a JSON object")
    names, version = asked.get("runs", []), asked.get("version") or 0
    if not isinstance(names, list) or not isinstance(version, int):
        raise ValueError("runs is a list, version a whole number")
    return [name for name in names if isinstance(name, str) and is_name(name)][:MAX_WATCHED], bool(asked.get("list")), version


async def _until_closed(socket: WebSocket, scope: anyio.CancelScope) -> None:
    """A page sends nothing after its subscription; any message, or the end of the connection, ends it."""
    with contextlib.suppress(WebSocketDisconnect):
        await receive_text(socket)
    scope.cancel()


async def _close(socket: WebSocket, code: int = 1000) -> None:
    """Close a socket that may already be closed."""
    with contextlib.suppress(RuntimeError, WebSocketDisconnect, TimeoutError):
        await asyncio.wait_for(socket.close(code), 1.0)
