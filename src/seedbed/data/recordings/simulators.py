"""Simulators that play themselves: any source by its name, and the loop that records one frame, one control at a time.

Shape suffixes: A control axes.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from seedbed.data.meter import Meter
from seedbed.data.prepare import cache_folder
from seedbed.data.recording import FORMAT, Recording, find_recording, write_recording
from seedbed.data.recordings.take import motions
from seedbed.data.store import digest
from seedbed.errors import UserError

HELP = "box, doom, atari:NAME or gym:ID"
# An episode that goes on is cut here, so that validation and test get episodes of their own.
MAX_EPISODE = 512
HELD = (4, 16)  # frames for which a control is held


class Simulator(Protocol):
    """One that can be recorded. `reset` begins an episode; `step` acts and says whether it goes on; `frame` draws."""

    name: str
    axes: tuple[tuple[str, str], ...]
    seconds: float  # from frame to frame
    has_pose: bool  # then the controls are motion, and what is recorded of them is what came of it, beside what was asked for

    def reset(self, seed: int) -> None: ...
    def frame(self) -> np.ndarray: ...
    def choose(self, rng: np.random.Generator) -> np.ndarray: ...
    def step(self, action_A: np.ndarray) -> bool: ...
    def pose(self) -> np.ndarray: ...
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
    """A recording of a simulator by its name: the one that exists, or a new one. `device` draws the box world."""
    kind, _, name = source.partition(":")
    if source == "box":
        from seedbed.data.recordings.box import record_box

        return record_box(num_frames, height, width, seed, out=out, cache=cache, device=device)
    if source != "doom" and (kind not in ("atari", "gym") or not name):
        raise UserError(f"there is no simulator {source}; choose {HELP}")
    key = digest([FORMAT, source, num_frames, height, width, seed])
    label = "".join(c if c.isalnum() else "-" for c in source)
    path = (out or cache_folder(cache) / f"{label}-{height}x{width}-{num_frames}-{key[:12]}").expanduser().absolute()
    found = find_recording(path, key)
    if found:
        return found
    simulator = _open(kind, name, height, width)
    try:
        return _play(simulator, path, num_frames, seed, {"name": source, "seed": seed}, key)
    finally:
        simulator.close()


def _open(kind: str, name: str, height: int, width: int) -> Simulator:
    if kind == "doom":
        from seedbed.data.recordings.doom import Doom

        return Doom(height, width)
    from seedbed.data.recordings import gym

    return gym.Atari(name, height, width) if kind == "atari" else gym.Gym(name, height, width)


def _play(simulator: Simulator, path: Path, num_frames: int, seed: int, source: dict[str, Any], key: str) -> Recording:
    actions: list[np.ndarray] = []
    asked: list[np.ndarray] = []
    episodes: list[int] = []
    times: list[float] = []
    poses: list[np.ndarray] = []

    def frames() -> Iterator[np.ndarray]:
        rng = np.random.Generator(np.random.PCG64([2, seed]))
        meter = Meter("recording", "frames")
        for episode, moment, frame, action_A in _moments(simulator, rng, num_frames):
            # The frame that was there before the step owns the control.
            actions.append(action_A)
            episodes.append(episode)
            times.append(moment * simulator.seconds)
            if simulator.has_pose:
                poses.append(simulator.pose())
            yield frame
            meter(len(actions), num_frames)
        meter.close()
        if simulator.has_pose:
            asked[:] = actions
            actions[:] = motions(np.stack(poses), np.array(times), np.array(episodes))

    made, tables = {"name": simulator.name, "seed": seed}, (actions, times, episodes, simulator.axes)
    posed: dict[str, Any] = {"pose": poses, "command": asked} if simulator.has_pose else {}
    return write_recording(path, frames(), *tables, **posed, source=source, simulator=made, key=key)


def _moments(
    simulator: Simulator, rng: np.random.Generator, num_frames: int
) -> Iterator[tuple[int, int, np.ndarray, np.ndarray]]:
    """Episode, place in it, frame and the control that is applied next; nothing of another episode stands between."""
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
            # What the last control led to.
            yield episode, moment, simulator.frame(), np.zeros_like(action_A)
            given += 1
        short = short + 1 if moment < 2 else 0
        if short > 100:
            raise UserError(f"{simulator.name}: episodes end as soon as they begin; there is nothing to record")
        episode += 1
