"""One visitor's conversation: a message comes in, pictures or a sentence go out. Wrong messages change nothing.

Shape suffixes: A control axes, N frames, H W pixels, C colours.
"""

from __future__ import annotations

import contextlib
import io
import json
import struct
import time
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from seedbed.errors import UserError
from seedbed.serve.play_record import Recorder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from seedbed.train.playing import Player

MAX_MESSAGE = 1 << 14
# Small pictures are shown enlarged, where losses would be seen, and are quick to pack without any.
LOSSLESS_PIXELS = 96 * 96
QUALITY = 90
MAX_CONTROL = 1e6
MAX_LEVEL = 2.0


class Visit:
    """A dream, what is recorded of it, and the messages that move it."""

    def __init__(self, name: str, player: Player, folder: Path) -> None:
        self.name, self.player, self.folder = name, player, folder
        self.dream = player.enter()
        self.recorder: Recorder | None = None
        self._acts: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "step": self._step,
            "reset": self._reset,
            "anchor": self._anchor,
            "set": self._set,
            "record": self._record,
            "save": self._save,
        }

    def hello(self) -> dict[str, Any]:
        """Everything the page needs to draw itself."""
        player = self.player
        axes = [asdict(axis) | {"is_time": axis.is_time} for axis in player.axes]
        size = {"height": player.height, "width": player.width, "num_seeds": player.num_seeds}
        return {"hello": self.name, "axes": axes, **size, "besides": list(player.besides), **player.facts()}

    def answer(self, text: str | None) -> bytes | dict[str, Any]:
        """Pictures, or a line on what was wrong; in that case the walk stands where it stood."""
        number = None
        try:
            message = _read(text)
            number = message.get("id")
            act = self._acts.get(str(message.get("do")))
            if act is None:
                raise UserError(f"the player knows {', '.join(self._acts)}, not {str(message.get('do'))[:40]!r}")
            begun = time.perf_counter()
            said = act(message)
            took = {"id": number if isinstance(number, int) else None, "ms": 1e3 * (time.perf_counter() - begun)}
            return self._packet(took | said, with_memory=message.get("memory") is True)
        except UserError as problem:
            return {"trouble": str(problem), "id": number if isinstance(number, int) else None}

    def close(self) -> None:
        """The tab is gone: what was being recorded is kept, if there is enough of it."""
        if self.recorder is not None:
            with contextlib.suppress(UserError):
                self._save({})

    # ---- what a message may ask ------------------------------------------------------------------------------------------

    def _step(self, message: dict[str, Any]) -> dict[str, Any]:
        action_A = _controls(message.get("controls"), len(self.player.axes))
        if not self.dream.step(action_A):
            return {"ended": True}
        if self.recorder is not None:
            with self._giving_up():
                self.recorder.add(self.dream)
            if self.recorder.full:
                return self._save(message)
        return {}

    def _reset(self, message: dict[str, Any]) -> dict[str, Any]:
        seed = _whole(message, "seed", 0, self.player.num_seeds - 1)
        beside = message.get("beside", self.player.besides[0])
        if beside not in self.player.besides:
            raise UserError(f"beside the dream can stand: {', '.join(self.player.besides)}; not {str(beside)[:40]!r}")
        if self.recorder is not None and self.recorder.of == "simulator" and beside != "simulator":
            raise UserError("the simulator is being recorded; save the recording first")
        self.dream.reset(seed, beside)
        if self.recorder is not None:
            self.recorder.begin(self.dream)
        return {}

    def _anchor(self, message: dict[str, Any]) -> dict[str, Any]:
        self.dream.anchor()
        if self.recorder is not None:
            self.recorder.begin(self.dream)  # the picture jumped: no control leads there
        return {}

    def _set(self, message: dict[str, Any]) -> dict[str, Any]:
        level, locked = message.get("level", self.dream.level), message.get("locked", self.dream.locked)
        if not _is_number(level) or not 0 <= level <= MAX_LEVEL:
            raise UserError(f"the noise level is a number from 0 to {MAX_LEVEL:g}")
        if not isinstance(locked, bool):
            raise UserError("locked is true or false")
        self.dream.level, self.dream.locked = float(level), locked
        return {}

    def _record(self, message: dict[str, Any]) -> dict[str, Any]:
        of = message.get("of")
        if of not in ("dream", "simulator"):
            raise UserError("what is recorded is the dream or the simulator")
        if of == "simulator" and self.dream.pose_44 is None:
            raise UserError("the simulator is not running beside the dream; switch it on to record it")
        if self.recorder is not None:
            raise UserError("a recording is under way already; save it first")
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S-%f")[:-3]
        self.recorder = Recorder(self.folder / "recordings" / stamp, self.player, of, self.name)
        self.recorder.begin(self.dream)
        return {}

    def _save(self, message: dict[str, Any]) -> dict[str, Any]:
        if self.recorder is None:
            raise UserError("nothing is being recorded")
        with self._giving_up():
            path, num_frames = self.recorder.save()
        self.recorder = None
        return {"saved": str(path), "num_frames": num_frames}

    @contextlib.contextmanager
    def _giving_up(self) -> Iterator[None]:
        """A recording that cannot be written is dropped with a sentence; the walk goes on."""
        try:
            yield
        except (UserError, OSError) as problem:
            assert self.recorder is not None
            self.recorder.discard()
            self.recorder = None
            if isinstance(problem, OSError):
                raise UserError(f"the recording was given up: {problem.strerror or problem}") from None
            raise

    # ---- pictures --------------------------------------------------------------------------------------------------------

    def _packet(self, said: dict[str, Any], with_memory: bool) -> bytes:
        """Header length, header (JSON), pictures one after another in the order the header names."""
        begun = time.perf_counter()
        dream = self.dream
        pictures = [("dream", dream.frame_HWC, 1)]
        if dream.beside_HWC is not None:
            pictures.append(("beside", dream.beside_HWC, 1))
        if with_memory:
            pictures += [("memory", _strip(frames_NHWC), len(frames_NHWC)) for frames_NHWC in dream.memory_pictures()]
        packed = [(kind, num, *encode(picture_HWC)) for kind, picture_HWC, num in pictures]
        header = {
            **said,
            "pictures": [{"kind": kind, "num": num, "type": form, "bytes": len(data)} for kind, num, form, data in packed],
            "action": [float(value) for value in dream.action_A],
            "seed": dream.seed,
            "steps": dream.num_steps,
            "recorded": self.recorder.num_frames if self.recorder is not None else None,
            "encode_ms": 1e3 * (time.perf_counter() - begun),
        }
        head = json.dumps(header, allow_nan=False).encode()
        return b"".join([struct.pack("<I", len(head)), head, *(data for *_, data in packed)])


def encode(picture_HWC: np.ndarray) -> tuple[str, bytes]:
    """A picture for the browser: PNG when it is small, else JPEG with colours at full resolution."""
    out = io.BytesIO()
    image = Image.fromarray(picture_HWC)
    if picture_HWC.shape[0] * picture_HWC.shape[1] <= LOSSLESS_PIXELS:
        image.save(out, "PNG", compress_level=1)
        return "image/png", out.getvalue()
    image.save(out, "JPEG", quality=QUALITY, subsampling=0)
    return "image/jpeg", out.getvalue()


def _strip(frames_NHWC: np.ndarray) -> np.ndarray:
    """Frames side by side, oldest left."""
    num, height, width, _ = frames_NHWC.shape
    return np.ascontiguousarray(frames_NHWC.transpose(1, 0, 2, 3).reshape(height, num * width, 3))


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
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_CONTROL


def _controls(values: Any, num_axes: int) -> np.ndarray:
    # A comparison with NaN is false, so it fails here too.
    if not isinstance(values, list) or len(values) != num_axes or not all(_is_number(value) for value in values):
        raise UserError(f"controls are {num_axes} finite numbers, one for each axis")
    return np.array(values, np.float32)


def _whole(message: dict[str, Any], key: str, low: int, high: int) -> int:
    value = message.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise UserError(f"{key} is a whole number from {low} to {high}")
    return value
