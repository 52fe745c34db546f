"""Registry of simulators, and the loop that records one of them under random controls.

Shape suffixes: A control axes.
"""

import contextlib
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from seedbed.cache import cache_folder
from seedbed.data.store import Progress, digest
from seedbed.errors import UserError
from seedbed.recipes.world.recording.capture import motions
from seedbed.recipes.world.recording.recording import FORMAT, Recording, find_recording, write_recording

# Longest episode, so that validation and test get episodes of their own.
MAX_EPISODE = 512
HELD = (4, 16)  # frames for which a control is held


@dataclass(frozen=True)
class Entry:
    """A registered simulator: a class of `Simulator`, or a function that records by itself, as MODULE:NAME of this package."""

    target: str
    argument: str = ""  # what must follow the name and a colon
    records_itself: bool = False
    responds_late: bool = False  # frames may respond later than the control: cars have inertia


def _of_files(folder: Path) -> dict[str, Entry]:
    """A file `ramp.py` with a class `Ramp` is the simulator `ramp`."""
    names = sorted(path.stem for path in folder.glob("*.py"))
    return {name: Entry(f"{name}:{name.capitalize()}") for name in names if not name.startswith("_")}


# Files with more than one simulator, or with one that records itself.
_OTHERS = {
    "box": Entry("box:record_box", records_itself=True),
    "room": Entry("box:record_room", records_itself=True),
    "atari": Entry("gym:Atari", argument="NAME", responds_late=True),
    "gym": Entry("gym:Gym", argument="ID", responds_late=True),
}
REGISTRY = _of_files(Path(__file__).parent) | _OTHERS
HELP = ", ".join(f"{name}:{entry.argument}" if entry.argument else name for name, entry in REGISTRY.items())


class Simulator(Protocol):
    """Interface of a recordable simulator. `step` applies a control and returns whether the episode continues."""

    name: str
    axes: tuple[tuple[str, str], ...]
    seconds: float  # from frame to frame
    has_pose: bool  # then controls are motion; the applied and the requested one are both recorded

    def reset(self, seed: int) -> None: ...
    def frame(self) -> np.ndarray: ...
    def choose(self, rng: np.random.Generator) -> np.ndarray: ...
    def step(self, action_A: np.ndarray) -> bool: ...
    def pose(self) -> np.ndarray: ...  # only with has_pose
    def close(self) -> None: ...


def record(
    source: str,
    num_frames: int,
    height: int,
    width: int,
    seed: int,
    *,
    out: Path | None = None,
    cache: str = "",
    device: str = "cpu",
) -> Recording:
    """A recording of a simulator by its name: the existing one, or a new one. `device` renders the box world."""
    kind, _, name = source.partition(":")
    entry = REGISTRY.get(kind)
    if entry is None or bool(name) != bool(entry.argument):
        raise UserError(f"there is no simulator {source}; choose one of {HELP}")
    module, _, attribute = entry.target.partition(":")
    target = getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
    if entry.records_itself:
        return target(num_frames, height, width, seed, out=out, cache=cache, device=device)
    key = digest([FORMAT, source, num_frames, height, width, seed])
    label = "".join(c if c.isalnum() else "-" for c in source)
    path = (out or cache_folder(cache) / f"{label}-{height}x{width}-{num_frames}-{key[:12]}").expanduser().absolute()
    if found := find_recording(path, key):
        return found
    try:
        simulator: Simulator = target(name, height, width)
    except ImportError as error:
        # The extra of a package has the name of its simulator.
        raise UserError(f'{source} needs {error.name}: pip install "seedbed[{kind}]"') from None
    with contextlib.closing(simulator):
        return _play(simulator, path, num_frames, seed, {"name": source, "seed": seed}, key)


def _play(simulator: Simulator, path: Path, num_frames: int, seed: int, source: dict[str, Any], key: str) -> Recording:
    actions, requested, episodes, times, poses = [], [], [], [], []

    def frames() -> Iterator[np.ndarray]:
        rng = np.random.Generator(np.random.PCG64([2, seed]))
        progress = Progress("recording", "frames")
        for episode, moment, frame, action_A in _steps(simulator, rng, num_frames):
            # A control belongs to the frame before the step.
            actions.append(action_A)
            episodes.append(episode)
            times.append(moment * simulator.seconds)
            if simulator.has_pose:
                poses.append(simulator.pose())
            yield frame
            progress(len(actions), num_frames)
        progress.close()
        if simulator.has_pose:
            requested[:] = actions
            actions[:] = motions(np.stack(poses), np.array(times), np.array(episodes))

    made, tables = {"name": simulator.name, "seed": seed}, (actions, times, episodes, simulator.axes)
    posed: dict[str, Any] = {"pose": poses, "command": requested} if simulator.has_pose else {}
    return write_recording(path, frames(), *tables, **posed, source=source, simulator=made, key=key)


def _steps(simulator: Simulator, rng: np.random.Generator, num_frames: int) -> Iterator[tuple[int, int, np.ndarray, np.ndarray]]:
    """Episode, index in it, frame and the control that is applied next."""
    given, episode, short = 0, 0, 0
    while given < num_frames:
        simulator.reset(int(rng.integers(2**31)))
        moment, alive, left, action_A = 0, True, 0, np.zeros(len(simulator.axes))
        while alive and moment < MAX_EPISODE and given < num_frames:
            if left == 0:
                action_A, left = simulator.choose(rng), int(rng.integers(*HELD))
            yield episode, moment, simulator.frame(), action_A
            given, moment, left = given + 1, moment + 1, left - 1
            alive = simulator.step(action_A)
        if not alive and given < num_frames:
            # The frame that the last control led to.
            yield episode, moment, simulator.frame(), np.zeros_like(action_A)
            given += 1
        short = short + 1 if moment < 2 else 0
        if short > 100:
            raise UserError(f"{simulator.name}: episodes end at their first step; there is nothing to record")
        episode += 1
