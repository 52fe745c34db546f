"""Export of the generator to ONNX, with noise as an input, and everything that a web page needs to run it.

The folder holds golden inputs and outputs: the page verifies them, with packing and rounding, before it plays.
Shape suffixes: A control axes, H W pixels, S seeds, K steps, M remembered numbers of a pixel.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from seedbed.errors import UserError
from seedbed.recipes.world.memory import POSE, Memory, to_bytes
from seedbed.recipes.world.model import WorldNet
from seedbed.recipes.world.radiance_field import POSE_SIZE
from seedbed.recipes.world.recording.recording import scale_actions
from seedbed.train.export_onnx import Function, needs, write_module
from seedbed.train.exports import new_folder

if TYPE_CHECKING:
    from seedbed.recipes.world.emulator import Emulator
    from seedbed.recipes.world.player import WorldPlayer

FORMAT = 1
MODEL, MANIFEST, ARRAYS = "network.onnx", "manifest.json", "arrays.bin"
NUM_GOLDEN = 16
FLOATS_AT = (0, 7, 15)  # golden steps whose output is kept unrounded
MAX_SEED_BYTES = 4 << 20
MAX_SEEDS = 12
TOLERANCE = 1e-3


def _net(system: Emulator) -> WorldNet:
    if not isinstance(system.net, WorldNet):
        raise UserError("only the generator, which takes one pass per frame, runs as ONNX; play this run with --runtime torch")
    return system.net


def write_onnx(net: WorldNet, path: Path) -> None:
    """One file, batch of one, float32, on the CPU. With pose tracking the next pose is an output too."""
    example = {"action": torch.zeros(1, net.num_axes), "level": torch.zeros(1), "noise": torch.zeros(1, 1, net.height, net.width)}
    memory = {name: torch.zeros(1, *shape) for name, shape in net.layout.shapes(net.height, net.width).items()}
    field, outputs = net.trunk.field, ["frame"]
    if field is not None:
        memory[POSE] = torch.eye(4)[:3].reshape(1, POSE_SIZE)
        outputs.append("pose_after")

    def step(action_1A: Tensor, level_1: Tensor, noise_11HW: Tensor, *kept: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        frame_13HW = net(dict(zip(memory, kept, strict=True)), action_1A, level_1, noise_11HW)
        return frame_13HW if field is None else (frame_13HW, field.next_pose(kept[-1], action_1A))

    inputs = example | memory
    write_module(Function(net, step), list(inputs.values()), list(inputs), outputs, path)


class OnnxNet:
    """The generator in ONNX Runtime on one core. Memory and noise are computed by the system."""

    def __init__(self, system: Emulator) -> None:
        needs("onnx", "onnx", "onnxscript", "onnxruntime")
        import onnxruntime

        self.own_noise = system.own_noise
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / MODEL
            write_onnx(_net(system), path)
            self.session = onnxruntime.InferenceSession(path.read_bytes(), options, providers=["CPUExecutionProvider"])

    def predict_frame(self, memory: Memory, action_BA: Tensor, index_B: Tensor, turn: int, level: float = 0.0) -> Tensor:
        given = {"action": action_BA, "noise": self.own_noise(index_B, turn), **memory.tensors()}
        feed = {name: tensor.numpy() for name, tensor in given.items()} | {"level": np.full(1, level, np.float32)}
        return torch.from_numpy(self.session.run(["frame"], feed)[0])


def export_web(player: WorldPlayer, folder: Path) -> list[Path]:
    """Write the network, its manifest and its arrays."""
    net = _net(player.system)
    with new_folder(folder) as aside:
        write_onnx(net, aside / MODEL)
        # Start memories as bytes: per scale [S, N, H, W, 3], oldest frame first.
        rollout, seeds = player.new_rollout(), defaultdict(list)
        num_bytes = sum(picture.nbytes for picture in rollout.memory_images())
        num = min(player.num_seeds, max(2, min(MAX_SEEDS, MAX_SEED_BYTES // num_bytes)))
        for seed in np.linspace(0, player.num_seeds - 1, num).astype(int):
            rollout.reset(int(seed))
            for name, pictures in zip(net.layout.names(), rollout.memory_images(), strict=True):
                seeds[f"seed_{name}"].append(pictures)
            if rollout.memory.pose_BP is not None:
                seeds[f"seed_{POSE}"].append(rollout.memory.pose_BP[0].cpu().numpy())
        arrays = {name: np.stack(rows) for name, rows in seeds.items()} | _golden(player)
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
            "files": {name: hashlib.sha256((aside / name).read_bytes()).hexdigest() for name in (MODEL, ARRAYS)},
        }
        (aside / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return sorted(folder.iterdir())


@torch.inference_mode()
def _golden(player: WorldPlayer) -> dict[str, np.ndarray]:
    """A rollout from the first start with the recorded controls: inputs, some raw outputs, and all frames as bytes."""
    system, recording = player.system, player.recording
    first = int(player.starts[0])
    rows = np.minimum(np.arange(first, first + NUM_GOLDEN), recording.num_frames - 1)
    index_1 = torch.zeros(1, dtype=torch.long, device=player.device)
    noise_11HW = system.own_noise(index_1, 0)
    raw_KA = np.array(recording.actions_TA[rows])
    scaled_KA = scale_actions(raw_KA, player.axes)
    memory, frames, floats = player.new_rollout().memory, [], []
    packed = {f"packed_{name}": kept.cpu().numpy()[0] for name, kept in memory.tensors().items()}
    for number, action_1A in enumerate(torch.from_numpy(scaled_KA).to(player.device).split(1)):
        frame_13HW = system.predict_frame(memory, action_1A, index_1, 0)
        memory = system.advance(memory, action_1A, frame_13HW)
        frames.append(to_bytes(memory.last)[0].cpu().numpy())
        if number in FLOATS_AT:
            floats.append(frame_13HW[0].cpu().numpy())
    last = {f"last_{name}": kept.cpu().numpy()[0] for name, kept in memory.tensors().items() if name != "m1"}
    golden = {"raw": raw_KA, "scaled": scaled_KA, "noise": noise_11HW[0].cpu().numpy()}
    return {**golden, **packed, **last, "frames": np.stack(frames), "floats": np.stack(floats)}


def _write_arrays(path: Path, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Raw little-endian arrays, each aligned to 8 bytes; returns their offsets."""
    places: dict[str, Any] = {}
    with open(path, "wb") as file:
        for name, array in arrays.items():
            file.write(b"\0" * (-file.tell() % 8))
            assert array.dtype in (np.uint8, np.float32), array.dtype
            places[name] = {"at": file.tell(), "dtype": array.dtype.name, "shape": list(array.shape)}
            file.write(array.tobytes())
    return places
