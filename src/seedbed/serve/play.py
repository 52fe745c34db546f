"""The play page and its WebSocket: every connection gets a session with a rollout of its own.

torch is loaded in a worker thread when the first client connects, so a workbench that only shows runs stays light.
Shape suffixes: A control axes, N frames, H W pixels, C colours.
"""

import asyncio
import contextlib
import io
import json
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from PIL import Image
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from seedbed.errors import UserError
from seedbed.serve.server import serve_app
from seedbed.track.run import Run
from seedbed.train.player import Player, Recorder

STATIC = Path(__file__).parent / "static" / "play"
KINDS = {".js": "text/javascript", ".css": "text/css"}
# Runs kept in memory, steps computed in parallel, and sessions open at once.
MAX_PLAYERS, MAX_THREADS, MAX_SESSIONS = 3, 4, 16
REFUSED = 4000  # our own code: the reason was sent before closing

MAX_MESSAGE = 1 << 14
# Small images are shown enlarged, where compression artefacts would be visible, and are quick to encode without loss.
LOSSLESS_PIXELS = 96 * 96
QUALITY = 90
MAX_CONTROL = 1e6
MAX_LEVEL = 2.0


def play_routes(root: Path, server: "PlayServer | None" = None) -> list[BaseRoute]:
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


def play(server: "PlayServer", name: str, **where: Any) -> int:
    """Serve one run's page until Ctrl-C. Problems with the run are raised before a port is opened."""
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
        self._pool = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="play")

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
                answer = await self._in_thread(session.answer, message.get("text"))
                if isinstance(answer, bytes):
                    await socket.send_bytes(answer)
                else:
                    await socket.send_text(json.dumps(answer))
        finally:
            # Not awaited: a server that stops cancels coroutines, but its threads finish.
            self._pool.submit(session.close)

    async def _in_thread(self, act: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._pool, act, *arguments)

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


class PlaySession:
    def __init__(self, name: str, player: Player, folder: Path) -> None:
        self.name, self.player, self.folder = name, player, folder
        self.rollout = player.new_rollout()
        self.recorder: Recorder | None = None
        known = (self._step, self._reset, self._anchor, self._set, self._record, self._save)
        self._acts = {act.__name__.removeprefix("_"): act for act in known}

    def hello(self) -> dict[str, Any]:
        player = self.player
        axes = [asdict(axis) | {"is_time": axis.is_time} for axis in player.axes]
        size = {"height": player.height, "width": player.width, "num_seeds": player.num_seeds}
        return {"hello": self.name, "axes": axes, **size, "references": list(player.references), **player.facts()}

    def answer(self, text: str | None) -> bytes | dict[str, Any]:
        """Images, or one line on what was wrong; the session then is unchanged."""
        number = None
        try:
            message = _read(text)
            number = message["id"] if isinstance(message.get("id"), int) else None
            act = self._acts.get(str(message.get("do")))
            if act is None:
                raise UserError(f"the player knows {', '.join(self._acts)}, not {str(message.get('do'))[:40]!r}")
            begun = time.perf_counter()
            reply = act(message)
            took = {"id": number, "ms": 1e3 * (time.perf_counter() - begun)}
            return self._packet(took | reply, with_memory=message.get("memory") is True)
        except UserError as problem:
            return {"error": str(problem), "id": number}

    def close(self) -> None:
        """The client has gone: a recording under way is saved if it is long enough."""
        if self.recorder is not None:
            with contextlib.suppress(UserError):
                self._save({})

    def _step(self, message: dict[str, Any]) -> dict[str, Any]:
        controls, num_axes = message.get("controls"), len(self.player.axes)
        if not isinstance(controls, list) or len(controls) != num_axes or not all(map(_is_number, controls)):
            raise UserError(f"controls are {num_axes} finite numbers, one for each axis")
        if not self.rollout.step(np.array(controls, np.float32)):
            return {"ended": True}
        if self.recorder is not None:
            with self._dropping_on_error():
                self.recorder.add(self.rollout)
            if self.recorder.full:
                return self._save(message)
        return {}

    def _reset(self, message: dict[str, Any]) -> dict[str, Any]:
        seed, last = message.get("seed"), self.player.num_seeds - 1
        if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed <= last:
            raise UserError(f"seed is a whole number from 0 to {last}")
        reference = message.get("reference", self.player.references[0])
        if reference not in self.player.references:
            raise UserError(f"reference is one of {', '.join(self.player.references)}; not {str(reference)[:40]!r}")
        if self.recorder is not None and self.recorder.of == "simulator" and reference != "simulator":
            raise UserError("the simulator is being recorded; save the recording first")
        self.rollout.reset(seed, reference)
        if self.recorder is not None:
            self.recorder.begin(self.rollout)
        return {}

    def _anchor(self, message: dict[str, Any]) -> dict[str, Any]:
        self.rollout.anchor()
        if self.recorder is not None:
            self.recorder.begin(self.rollout)  # the frame jumped: no control leads there
        return {}

    def _set(self, message: dict[str, Any]) -> dict[str, Any]:
        level, locked = message.get("level", self.rollout.level), message.get("locked", self.rollout.locked)
        if not _is_number(level) or not 0 <= level <= MAX_LEVEL:
            raise UserError(f"the noise level is a number from 0 to {MAX_LEVEL:g}")
        if not isinstance(locked, bool):
            raise UserError("locked is true or false")
        self.rollout.level, self.rollout.locked = float(level), locked
        return {}

    def _record(self, message: dict[str, Any]) -> dict[str, Any]:
        of = message.get("of")
        if of not in ("rollout", "simulator"):
            raise UserError("`of` is rollout or simulator")
        if of == "simulator" and self.rollout.pose_44 is None:
            raise UserError("the simulator is not running; choose it as the reference to record it")
        if self.recorder is not None:
            raise UserError("a recording is under way already; save it first")
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S-%f")[:-3]
        self.recorder = self.player.recorder(self.folder / "recordings" / stamp, of, self.name)
        self.recorder.begin(self.rollout)
        return {}

    def _save(self, message: dict[str, Any]) -> dict[str, Any]:
        if self.recorder is None:
            raise UserError("nothing is being recorded")
        with self._dropping_on_error():
            path, num_frames = self.recorder.save()
        self.recorder = None
        return {"saved": str(path), "num_frames": num_frames}

    @contextlib.contextmanager
    def _dropping_on_error(self) -> Iterator[None]:
        """A recording that cannot be written is dropped with an error; the session continues."""
        try:
            yield
        except (UserError, OSError) as problem:
            assert self.recorder is not None
            self.recorder.discard()
            self.recorder = None
            if isinstance(problem, OSError):
                raise UserError(f"the recording was stopped: {problem.strerror or problem}") from None
            raise

    def _packet(self, header: dict[str, Any], with_memory: bool) -> bytes:
        """Header length, header (JSON), then the images in the order that the header names."""
        begun = time.perf_counter()
        rollout = self.rollout
        images = [("rollout", rollout.frame_HWC, 1)]
        if rollout.reference_HWC is not None:
            images.append(("reference", rollout.reference_HWC, 1))
        for frames_NHWC in rollout.memory_images() if with_memory else ():
            images.append(("memory", np.concatenate(frames_NHWC, axis=1), len(frames_NHWC)))  # side by side, oldest left
        packed = [(kind, num, *encode(image_HWC)) for kind, image_HWC, num in images]
        header = {
            **header,
            "images": [{"kind": kind, "num": num, "type": form, "bytes": len(data)} for kind, num, form, data in packed],
            "action": [float(value) for value in rollout.action_A],
            "seed": rollout.seed,
            "steps": rollout.num_steps,
            "recorded": self.recorder.num_frames if self.recorder is not None else None,
            "encode_ms": 1e3 * (time.perf_counter() - begun),
        }
        head = json.dumps(header, allow_nan=False).encode()
        return b"".join([struct.pack("<I", len(head)), head, *(data for *_, data in packed)])


def encode(image_HWC: np.ndarray) -> tuple[str, bytes]:
    """An image for the browser: PNG when it is small, else JPEG without chroma subsampling."""
    out, image = io.BytesIO(), Image.fromarray(image_HWC)
    is_small = image.width * image.height <= LOSSLESS_PIXELS
    form, options = ("png", {"compress_level": 1}) if is_small else ("jpeg", {"quality": QUALITY, "subsampling": 0})
    image.save(out, form, **options)
    return f"image/{form}", out.getvalue()


def _read(text: str | None) -> dict[str, Any]:
    if text is None:
        raise UserError("messages are text: JSON objects")
    if len(text) > MAX_MESSAGE:
        raise UserError(f"a message of {len(text):,} characters is too long; {MAX_MESSAGE:,} are allowed")
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        raise UserError("the message is not JSON") from None
    if not isinstance(message, dict):
        raise UserError("the message is not a JSON object")
    return message


def _is_number(value: Any) -> bool:
    # A comparison with NaN is false, so it is no number.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_CONTROL
