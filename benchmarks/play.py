"""Frames per second of playing from one processor core, the whole loop: controls, memory, network, rounding, picture.

`python benchmarks/play.py` takes the generator of world/log5m at 192x256 pixels through ONNX Runtime and through torch.
The target is 30 frames per second through ONNX Runtime. CPU time stands beside wall time, to tell a busy machine.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

LIMIT = 30.0
FRAMES = 1000  # enough for every part of a recording to hold a memory


def one_core() -> None:
    """Before torch is loaded: one thread, on one core."""
    os.environ["OMP_NUM_THREADS"] = "1"
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def recorded(folder: Path, height: int, width: int) -> Path:
    """Pictures of noise with the box world's controls: speed does not depend on what is seen."""
    import numpy as np

    from seedbed.recipes.world.recording.capture import POSE_AXES
    from seedbed.recipes.world.recording.recording import write_recording
    from seedbed.recipes.world.simulators.box import BoxWorld

    rng = np.random.default_rng(0)
    small = rng.integers(0, 256, (FRAMES, height // 16, width // 16, 3), dtype=np.uint8)
    frames = (np.kron(one, np.ones((16, 16, 1), np.uint8)) for one in small)
    actions = rng.normal(size=(FRAMES, 7)) * 0.05
    actions[:, 6] = BoxWorld.FRAME_SECONDS
    time_T, episode_T = np.arange(FRAMES) * BoxWorld.FRAME_SECONDS, np.zeros(FRAMES)
    path = folder / "noise"
    write_recording(path, frames, actions, time_T, episode_T, POSE_AXES, source={"name": "noise"})
    return path


def built(preset: str, folder: Path, settings: list[str]):
    """The preset's emulator, untrained: speed does not depend on what it has learned."""
    from seedbed import config as configs
    from seedbed.recipes import find

    recipe, _ = find(preset)
    config = recipe.preset(preset.partition("/")[2])
    config = configs.override(config, ["device=cpu", "model.rollout=1", *settings])
    noise = recorded(folder, config.data.height, config.data.width)
    config = configs.override(config, [f"data.recording={noise}"])
    return recipe.build(config, recipe.open_data(config)).eval()


def measure(player, folder: Path, num: int) -> dict[str, float]:
    """Medians over `num` steps, in milliseconds."""
    from seedbed.serve.play import PlaySession

    visit = PlaySession("benchmark", player, folder)
    controls = [axis.scale if axis.is_time else axis.half[1] for axis in player.axes]
    message = json.dumps({"do": "step", "controls": controls})
    wall, cpu, net, bytes_ = [], [], [], 0
    for number in range(num + 3):
        begun, used = time.perf_counter(), time.process_time()
        packet = visit.answer(message)
        if number >= 3:
            wall.append(1e3 * (time.perf_counter() - begun))
            cpu.append(1e3 * (time.process_time() - used))
            assert isinstance(packet, bytes)
            net.append(json.loads(packet[4 : 4 + int.from_bytes(packet[:4], "little")])["encode_ms"])
            bytes_ = len(packet)
    row = {
        "wall_ms": statistics.median(wall),
        "best_ms": min(wall),
        "cpu_ms": statistics.median(cpu),
        "picture_ms": statistics.median(net),
    }
    row |= {"fps": 1e3 / row["wall_ms"], "fps_by_cpu_time": 1e3 / row["cpu_ms"], "packet_kb": bytes_ / 1e3}
    return {name: round(value, 2) for name, value in row.items()}


def verdict(row: dict[str, float]) -> str:
    busy = row["fps"] < LIMIT <= row["fps_by_cpu_time"]
    word = "ok by CPU time, the machine was busy" if busy else "ok" if row["fps"] >= LIMIT else "MISSED"
    return f"ONNX Runtime: {row['fps']:.1f} fps, {row['fps_by_cpu_time']:.1f} by CPU time, limit {LIMIT:g}: {word}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("preset", nargs="?", default="world/log5m")
    parser.add_argument("settings", nargs="*", help="key=value, as for seedbed train")
    parser.add_argument("--num", type=int, default=60, help="frames to play")
    parser.add_argument("--runtime", choices=("onnx", "torch", "both"), default="both")
    given = parser.parse_args()
    one_core()
    import torch
    from _report import write_result

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        system = built(given.preset, Path(folder), given.settings)
        net = system.net
        size = sum(p.numel() for p in net.parameters())
        figures: dict = {"preset": given.preset, "pixels": f"{system.width}x{system.height}", "parameters": size}
        figures["gflop"] = round(net.flops() / 1e9, 3)
        print(f"{given.preset}: {size / 1e6:.2f} M parameters, {figures['gflop']} GFLOP a frame, {figures['pixels']} pixels")
        for runtime in ("onnx", "torch") if given.runtime == "both" else (given.runtime,):
            row = figures[runtime] = measure(system.play(runtime), Path(folder), given.num)
            shown = f"{row['wall_ms']:.1f} ms, best {row['best_ms']:.1f}, {row['cpu_ms']:.1f} of CPU time"
            print(f"{runtime:<6} {row['fps']:6.1f} fps ({shown})")
    if "onnx" in figures:
        print(verdict(figures["onnx"]))
    write_result("play-cpu", figures)


if __name__ == "__main__":
    main()
