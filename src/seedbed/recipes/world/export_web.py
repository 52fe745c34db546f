"""The generator for other runtimes: an ONNX network whose noise is an input, and all that a web page needs to run it.

The folder carries golden inputs and outputs: the page repeats them before anybody plays, packing and rounding included.
Shape suffixes: A control axes, H W pixels, S seeds, K steps, M remembered numbers of a pixel.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from seedbed.errors import UserError
from seedbed.recipes.world.memory import POSE, Memory, to_bytes
from seedbed.recipes.world.place import NUMBERS

if TYPE_CHECKING:
    from seedbed.recipes.world.emulator import Emulator
    from seedbed.recipes.world.model import WorldNet
    from seedbed.recipes.world.player import WorldPlayer

FORMAT = 1
OPSET = 18
MODEL, MANIFEST, ARRAYS = "network.onnx", "manifest.json", "arrays.bin"
NUM_GOLDEN = 16
FLOATS_AT = (0, 7, 15)  # golden steps whose output is kept unrounded
MAX_SEED_BYTES = 4 << 20
MAX_SEEDS = 12
TOLERANCE = 1e-3


class _Flat(nn.Module):
    """The generator with its memory as plain inputs, as runtimes want it; with an odometer also the pose after the control."""

    def __init__(self, net: WorldNet) -> None:
        super().__init__()
        self.net, self.names = net, [*net.layout.names(), *([POSE] if net.trunk.place is not None else [])]

    def forward(self, action_1A: Tensor, level_1: Tensor, noise_11HW: Tensor, *memory: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        frame_13HW = self.net(dict(zip(self.names, memory, strict=True)), action_1A, level_1, noise_11HW)
        place = self.net.trunk.place
        return frame_13HW if place is None else (frame_13HW, place.after(memory[-1], action_1A))


def _net(system: Emulator) -> WorldNet:
    from seedbed.recipes.world.model import WorldNet

    net = getattr(system, "net", None)
    if not isinstance(net, WorldNet):
        raise UserError("only the generator, which takes one pass per frame, runs as ONNX; play this run with --runtime torch")
    return net


def write_onnx(net: WorldNet, path: Path) -> None:
    """One file, batch of one, float32, on the CPU."""
    needs_onnx("onnx", "onnxscript")
    shapes = net.layout.shapes(net.height, net.width)
    example = (torch.zeros(1, net.num_axes), torch.zeros(1), torch.zeros(1, 1, net.height, net.width))
    memory = [torch.zeros(1, *shape) for shape in shapes.values()]
    names, outputs = ["action", "level", "noise", *shapes], ["frame"]
    if net.trunk.place is not None:
        memory.append(torch.eye(4)[:3].reshape(1, NUMBERS))
        names, outputs = [*names, POSE], [*outputs, "pose_after"]
    with _quietly(), torch.no_grad():
        program = torch.onnx.export(
            _Flat(net).eval(),
            (*example, *memory),
            dynamo=True,
            opset_version=OPSET,
            input_names=names,
            output_names=outputs,
            verbose=False,
        )
        assert program is not None
        program.save(str(path), external_data=False)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """The exporter speaks of its own internals, and of packages that nobody here needs."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def needs_onnx(*packages: str) -> None:
    import importlib.util

    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(f'this needs {" and ".join(missing)}: pip install "seedbed[onnx]"')


class OnnxNet:
    """The generator through ONNX Runtime on one core. Memory and noise are those of the system: one implementation."""

    def __init__(self, system: Emulator) -> None:
        needs_onnx("onnx", "onnxscript", "onnxruntime")
        import onnxruntime

        self.own_noise = system.own_noise
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / MODEL
            write_onnx(_net(system), path)
            self.session = onnxruntime.InferenceSession(path.read_bytes(), options, providers=["CPUExecutionProvider"])

    def dream(self, memory: Memory, action_BA: Tensor, index_B: Tensor, turn: int, level: float = 0.0) -> Tensor:
        """As the system's: the next frame, unclamped."""
        given = {"action": action_BA, "noise": self.own_noise(index_B, turn), **memory.tensors()}
        feed = {name: tensor.numpy() for name, tensor in given.items()} | {"level": np.full(1, level, np.float32)}
        return torch.from_numpy(self.session.run(["frame"], feed)[0])


def export_web(player: WorldPlayer, folder: Path) -> list[Path]:
    """Write the network, its manifest and its arrays, all at once: the folder is built aside and renamed."""
    net = _net(player.system)
    aside = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        write_onnx(net, aside / MODEL)
        arrays = {**_seeds(player), **_golden(player)}
        manifest = {
            "format": FORMAT,
            "height": player.height,
            "width": player.width,
            "scales": [list(scale) for scale in net.layout.scales],
            "axes": [asdict(axis) | {"is_time": axis.is_time} for axis in player.axes],
            **player.facts(),
            "num_seeds": len(arrays["seed_m1"]),
            "floats_at": list(FLOATS_AT),
            "tolerance": TOLERANCE,
            "arrays": _write_arrays(aside / ARRAYS, arrays),
            "files": {name: _sha256(aside / name) for name in (MODEL, ARRAYS)},
        }
        (aside / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        if folder.exists():
            folder.rmdir()
        os.replace(aside, folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return sorted(folder.iterdir())


def _seeds(player: WorldPlayer) -> dict[str, np.ndarray]:
    """Memories to start from, as bytes: for each scale [S, N, H, W, 3], oldest frame first."""
    dream, shown, poses = player.enter(), [], []
    num_bytes = sum(picture.nbytes for picture in dream.memory_pictures())
    num = max(2, min(MAX_SEEDS, player.num_seeds, MAX_SEED_BYTES // num_bytes))
    for seed in np.linspace(0, player.num_seeds - 1, min(num, player.num_seeds)).astype(int):
        dream.reset(int(seed))
        shown.append(dream.memory_pictures())
        poses += [] if dream.memory.pose_BP is None else [dream.memory.pose_BP[0].cpu().numpy()]
    names = player.system.layout.names()
    seeds = {f"seed_{name}": np.stack([pictures[n] for pictures in shown]) for n, name in enumerate(names)}
    return {**seeds, f"seed_{POSE}": np.stack(poses)} if poses else seeds


@torch.inference_mode()
def _golden(player: WorldPlayer) -> dict[str, np.ndarray]:
    """A rollout from the first seed with the recorded controls: inputs, some outputs as they are, all of them as bytes."""
    system, recording = player.system, player.recording
    dream = player.enter()
    first = int(player.starts[0])
    rows = np.minimum(np.arange(first, first + NUM_GOLDEN), recording.num_frames - 1)
    index_1 = torch.zeros(1, dtype=torch.long, device=player.device)
    noise_11HW = system.own_noise(index_1, 0)
    raw_KA = np.array(recording.actions_TA[rows])
    memory, frames, floats = dream.memory, [], []
    packed = {f"packed_{name}": kept.cpu().numpy()[0] for name, kept in memory.tensors().items()}
    for number, row in enumerate(raw_KA):
        frame_13HW = system.dream(memory, dream.scaled(row), index_1, 0)
        memory = system.onward(memory, dream.scaled(row), frame_13HW)
        frames.append(to_bytes(memory.last)[0].cpu().numpy())
        if number in FLOATS_AT:
            floats.append(frame_13HW[0].cpu().numpy())
    last = {f"last_{name}": kept.cpu().numpy()[0] for name, kept in memory.tensors().items() if name != "m1"}
    scaled_KA = np.concatenate([dream.scaled(row).cpu().numpy() for row in raw_KA])
    golden = {"raw": raw_KA, "scaled": scaled_KA, "noise": noise_11HW[0].cpu().numpy()}
    return {**golden, **packed, **last, "frames": np.stack(frames), "floats": np.stack(floats)}


def _write_arrays(path: Path, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Raw little-endian arrays one after another, each on a boundary of 8 bytes; where they lie."""
    places: dict[str, Any] = {}
    with open(path, "wb") as file:
        for name, array in arrays.items():
            file.write(b"\0" * (-file.tell() % 8))
            kind = {"uint8": "uint8", "float32": "float32"}[array.dtype.name]
            places[name] = {"at": file.tell(), "dtype": kind, "shape": list(array.shape)}
            file.write(np.ascontiguousarray(array).tobytes())
    return places


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
