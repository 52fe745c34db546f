"""The play page and its WebSocket: every connection gets a session with a rollout of its own.

torch is loaded in a worker thread when the first client connects, so a workbench that only shows runs stays light.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from seedbed.errors import UserError
from seedbed.serve.play_session import PlaySession
from seedbed.track.run import Run

if TYPE_CHECKING:
    from starlette.requests import Request

    from seedbed.train.player import Player

STATIC = Path(__file__).parent / "static" / "play"
KINDS = {".js": "text/javascript", ".css": "text/css"}
# Runs kept in memory, steps computed in parallel, and sessions open at once.
MAX_PLAYERS, MAX_THREADS, MAX_SESSIONS = 3, 4, 16
REFUSED = 4000  # our own code: the reason was sent before closing


def play_routes(root: Path, server: PlayServer | None = None) -> list[BaseRoute]:
    """`/play/RUN`, its WebSocket and its files. The same authentication applies as to every other page."""
    server = server or PlayServer(root)

    async def page(request: Request) -> Response:
        try:
            Run.open(root, request.path_params["run"])
        except UserError as problem:
            return PlainTextResponse(f"{problem}\n", 404)
        return FileResponse(STATIC / "index.html", media_type="text/html")

    async def file(request: Request) -> Response:
        path = STATIC / request.path_params["name"]
        if path.suffix not in KINDS or path.parent != STATIC or not path.is_file():
            return PlainTextResponse("there is no such file\n", 404)
        return FileResponse(path, media_type=KINDS[path.suffix])

    return [
        Route("/static/play/{name}", file),
        Route("/play/{run}", page),
        WebSocketRoute("/play/{run}/socket", server.receive),
    ]


def play(server: PlayServer, name: str, **where: Any) -> int:
    """Serve one run's page until Ctrl-C. Problems with the run are raised before a port is opened."""
    from starlette.applications import Starlette
    from starlette.responses import RedirectResponse

    from seedbed.serve.server import serve_app

    name = Run.open(server.root, name).name
    server.player(name)
    address = f"/play/{quote(name)}"
    routes = [Route("/", lambda request: RedirectResponse(address)), *play_routes(server.root, server)]
    return serve_app(Starlette(routes=routes), path=address, what=f"play {name}", **where)


class PlayServer:
    """The loaded runs, the threads that compute their frames, and the open sessions."""

    def __init__(self, root: Path, runtime: str = "torch", checkpoint: str = "") -> None:
        self.root, self.runtime, self.checkpoint = root, runtime, checkpoint
        self.num_sessions = 0
        self._players: OrderedDict[str, tuple[str, Player]] = OrderedDict()
        self._loading = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    async def receive(self, socket: WebSocket) -> None:
        """One connection, from the handshake to the closed tab."""
        await socket.accept()
        self.num_sessions += 1
        try:
            with contextlib.suppress(WebSocketDisconnect, ConnectionError):
                await self._run_session(socket, socket.path_params["run"])
        finally:
            self.num_sessions -= 1

    async def _run_session(self, socket: WebSocket, name: str) -> None:
        try:
            if self.num_sessions > MAX_SESSIONS:
                raise UserError(f"{MAX_SESSIONS} sessions are open already; try again when one has ended")
            await socket.send_json({"loading": name})
            session = await self._in_thread(lambda: PlaySession(name, self.player(name), Run.open(self.root, name).path))
        except UserError as problem:
            await socket.send_json({"error": str(problem), "fatal": True})
            return await socket.close(REFUSED)
        try:
            await socket.send_json(session.hello())
            while (message := await socket.receive())["type"] != "websocket.disconnect":
                await _send(socket, await self._in_thread(session.answer, message.get("text")))
        finally:
            # Not awaited: a server that stops cancels coroutines, but its threads finish.
            self._threads().submit(session.close)

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="play")
        return self._pool

    async def _in_thread(self, act: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads(), act, *arguments)

    def player(self, name: str) -> Player:
        """The run's player, loaded once, and again when there is a better checkpoint."""
        from seedbed import inference
        from seedbed.train import checkpoint

        path = Run.open(self.root, name).path
        with self._loading:
            best = checkpoint.best(path / "checkpoints")
            weights = self.checkpoint or (best.name if best else "")
            if self._players.get(name, ("",))[0] != weights or not weights:
                self._players[name] = (weights, inference.player(self.root, name, self.checkpoint, self.runtime))
            self._players.move_to_end(name)
            while len(self._players) > MAX_PLAYERS:
                self._players.popitem(last=False)
            return self._players[name][1]


async def _send(socket: WebSocket, answer: bytes | dict[str, Any]) -> None:
    if isinstance(answer, bytes):
        await socket.send_bytes(answer)
    else:
        await socket.send_text(json.dumps(answer))
