"""The examination of a world: shared and compiled rollouts give what rollouts made one by one give."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from world_samples import made, valid

from seedbed.recipes.world import controls, examine
from seedbed.recipes.world.curriculum import Stage
from seedbed.recipes.world.emulator import Emulator
from seedbed.recipes.world.evaluate import Trajectories, free_run, teacher_forced
from seedbed.recipes.world.metrics import psnr

KINDS = {
    "direct": [],
    "direct, no map": ["model.pose_tracking=false", "model.channels_last=true"],
    "edm": ["model.kind=edm", "model.rollout=2"],
}


@pytest.fixture(params=KINDS)
def trained(request: pytest.FixtureRequest) -> Iterator[tuple[Emulator, Any, Any]]:
    """A system after a few steps, so that its frames are not copies of the last one."""
    system, engine, feed = made(*KINDS[request.param])
    engine.variant = Stage("closed", 2)
    for _ in range(3):
        engine.step(feed.part)
    yield system, engine, feed


# ---- the measurements, each with rollouts of its own -----------------------------------------------------------------------


def last_frame(
    system: Emulator, traj: Trajectories, step: int, actions: list[Tensor] | None = None, level: float = 0.0
) -> Tensor:
    return [frame for _, frame in free_run(system, traj, step, actions, level)][-1]


def decibels(frame: Tensor, traj: Trajectories, step: int) -> float:
    return psnr(frame, traj.target(step)).mean().item()


def deafness_alone(system: Emulator, traj: Trajectories, step: int) -> float:
    others = [traj.action(s).roll(1, 0) for s in range(1, step + 1)]
    return decibels(last_frame(system, traj, step), traj, step) - decibels(last_frame(system, traj, step, others), traj, step)


def memory_gap_alone(system: Emulator, traj: Trajectories, step: int) -> tuple[float, float, float]:
    mixed = teacher_forced(system, traj, step)
    if step > 1:
        newest = system.predict_frame(traj.memory(system, step - 1), traj.action(step - 1), traj.index_B, step - 1)
        memory = system.advance(traj.memory(system, step - 1), traj.action(step - 1), newest)
        mixed = system.predict_frame(memory, traj.action(step), traj.index_B, step)
    frames = (teacher_forced(system, traj, step), mixed, last_frame(system, traj, step))
    return tuple(decibels(frame, traj, step) for frame in frames)  # type: ignore[return-value]


def held_alone(system: Emulator, traj: Trajectories, raw_A: np.ndarray, num: int) -> Tensor:
    return last_frame(system, traj, num, controls.held(system, raw_A, num, traj.action(1)))


@torch.no_grad()
def test_shared_rollouts_measure_what_single_ones_measure(trained) -> None:
    system, _, _ = trained
    traj = examine.trajectory_batch(system, valid(system), 6, 32)
    own = examine.rollout_frames(system, traj, 24)
    assert examine.action_sensitivity(system, traj, own, (1, 4)) == pytest.approx(
        {k: deafness_alone(system, traj, k) for k in (1, 4)}
    )
    gap = examine.memory_gap(system, traj, own)
    for step in (1, 2, 8):
        assert [gap[name][step - 1] for name in gap] == pytest.approx(memory_gap_alone(system, traj, step), abs=6e-4)
    for level in (0.0, 0.05):
        alone = decibels(last_frame(system, traj, 16, level=level), traj, 16)
        assert examine.by_level(system, traj, own, level) == pytest.approx(alone)
    axis = controls.steerable(system.data.recording)[0]
    raw_A = controls.raw_action(system.data.recording, axis, axis.full[1])
    frames = controls._held_frames(system, traj, raw_A)
    for num in controls.HELD:
        torch.testing.assert_close(frames[num], held_alone(system, traj, raw_A, num))


# ---- compiled for training ---------------------------------------------------------------------------------------------------


def compiled(system: Emulator) -> list[int]:
    """Compile the network by a compiler that changes nothing; the rows of every call of compiled code, and -1 per compilation."""
    calls: list[int] = []

    def compiler(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        calls.append(-1)

        def run(*args: Tensor) -> Any:
            calls.append(max(len(a) for a in args if isinstance(a, Tensor) and a.ndim == 4 and not a.requires_grad))
            return graph.forward(*args)

        return run

    torch.compiler.reset()
    system.get_submodule("net").compile(backend=compiler, dynamic=False)
    return calls


def test_rollouts_use_what_was_compiled_for_training_and_compile_nothing(trained) -> None:
    system, engine, feed = trained
    traj = examine.trajectory_batch(system, valid(system), 11, 4)  # 8 rows and 3, where training has 8
    assert system.trained_rows == 8
    calls = compiled(system)
    modes = {name: module.training for name, module in system.named_modules()}
    engine.step(feed.part)
    assert calls and calls[0] == -1
    num_compiled, steps = calls.count(-1), len(calls)
    with engine.evaluating(), system.with_compiled_graph():
        frames = examine.rollout_frames(system, traj, 4)
    assert calls.count(-1) == num_compiled, "a shape met a few times is not worth compiling"
    assert set(calls[steps:]) == {8}, "in calls of as many rows as training has"
    assert {name: module.training for name, module in system.named_modules()} == modes
    assert all(not frame.requires_grad for frame in frames) and len(frames[0]) == 11
    torch.compiler.reset()


def test_rows_of_a_chunk_do_not_change_a_prediction(trained) -> None:
    system, engine, _ = trained
    with engine.evaluating():
        traj = examine.trajectory_batch(system, valid(system), 11, 4)
        whole = examine.rollout_frames(system, traj, 3)
        system._chunk = 4
        parts = examine.rollout_frames(system, traj, 3)
        system._chunk = 0
    for a, b in zip(whole, parts, strict=True):
        # Quantised to 256 levels: another order of summation moves a few pixels by one of them.
        assert (a - b).abs().max() <= 2.1 / 127.5 and ((a - b).abs() > 1e-6).float().mean() < 0.02


def test_long_rollouts_equal_others_where_nothing_can_be_recorded(trained) -> None:
    system, engine, _ = trained
    traj = examine.trajectory_batch(system, valid(system), 5, 4)
    with engine.evaluating():
        plain = examine.rollout_frames(system, traj, 4)
        with system.long_rollouts():
            other = examine.rollout_frames(system, traj, 4)
    assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))


def test_rollout_copies_the_counters_of_its_noise_once() -> None:
    system, _, _ = made()
    traj = examine.trajectory_batch(system, valid(system), 3, 4)
    assert traj.index_B is traj.index_B
