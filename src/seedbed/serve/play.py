"""The player's page and its socket: every visitor walks through a run with a dream of their own.

torch is loaded when the first visitor comes, in a worker thread: a workbench that only shows runs stays light.
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
from seedbed.serve.play_visit import Visit
from seedbed.track.run import Run

if TYPE_CHECKING:
    from starlette.requests import Request

    from seedbed.train.playing import Player

STATIC = Path(__file__).parent / "static" / "play"
KINDS = {".js": "text/javascript", ".css": "text/css"}
# Runs kept in memory, steps computed at once, and visitors let in at once.
MAX_PLAYERS, MAX_THREADS, MAX_VISITORS = 3, 4, 16
REFUSED = 4000  # our own code: the reason was sent before closing


def play_routes(root: Path, house: House | None = None) -> list[BaseRoute]:
    """`/play/RUN`, its socket and its files. They stand behind the doors like everything else."""
    house = house or House(root)

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
        WebSocketRoute("/play/{run}/walk", house.receive),
    ]


def play(house: House, name: str, **where: Any) -> int:
    """Serve one run's page until Ctrl-C. What is wrong with the run is said here, before anything is opened."""
    from starlette.applications import Starlette
    from starlette.responses import RedirectResponse

    from seedbed.serve.run import serve_app

    name = Run.open(house.root, name).name
    house.player(name)
    address = f"/play/{quote(name)}"
    routes = [Route("/", lambda request: RedirectResponse(address)), *play_routes(house.root, house)]
    return serve_app(Starlette(routes=routes), path=address, what=f"walk through {name}", **where)


class House:
    """The loaded runs, the threads that compute their frames, and the visitors."""

    def __init__(self, root: Path, runtime: str = "torch", checkpoint: str = "") -> None:
        self.root, self.runtime, self.checkpoint = root, runtime, checkpoint
        self.num_visitors = 0
        self._players: OrderedDict[str, tuple[str, Player]] = OrderedDict()
        self._loading = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    async def receive(self, socket: WebSocket) -> None:
        """One visitor, from the handshake to the closed tab."""
        await socket.accept()
        self.num_visitors += 1
        try:
            with contextlib.suppress(WebSocketDisconnect, ConnectionError):
                await self._converse(socket, socket.path_params["run"])
        finally:
            self.num_visitors -= 1

    async def _converse(self, socket: WebSocket, name: str) -> None:
        try:
            if self.num_visitors > MAX_VISITORS:
                raise UserError(f"{MAX_VISITORS} visitors are here already; try again when one has left")
            await socket.send_json({"loading": name})
            visit = await self._in_thread(self._visit, name)
        except UserError as problem:
            await socket.send_json({"trouble": str(problem), "fatal": True})
            return await socket.close(REFUSED)
        try:
            await socket.send_json(visit.hello())
            while (message := await socket.receive())["type"] != "websocket.disconnect":
                await _send(socket, await self._in_thread(visit.answer, message.get("text")))
        finally:
            # Not awaited: a server that stops cancels what waits, but its threads finish what they have begun.
            self._threads().submit(visit.close)

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="play")
        return self._pool

    async def _in_thread(self, act: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads(), act, *arguments)

    def _visit(self, name: str) -> Visit:
        return Visit(name, self.player(name), Run.open(self.root, name).path)

    def player(self, name: str) -> Player:
        """The run's player, loaded once, and again when training has found a better checkpoint since."""
        from seedbed.launch import local
        from seedbed.train import checkpoint

        path = Run.open(self.root, name).path
        with self._loading:
            best = checkpoint.best(path / "checkpoints")
            weights = self.checkpoint or (best.name if best else "")
            if self._players.get(name, ("",))[0] != weights or not weights:
                self._players[name] = (weights, local.player(self.root, name, self.checkpoint, self.runtime))
            self._players.move_to_end(name)
            while len(self._players) > MAX_PLAYERS:
                self._players.popitem(last=False)
            return self._players[name][1]


async def _send(socket: WebSocket, answer: bytes | dict[str, Any]) -> None:
    if isinstance(answer, bytes):
        await socket.send_bytes(answer)
    else:
        await socket.send_text(json.dumps(answer))
