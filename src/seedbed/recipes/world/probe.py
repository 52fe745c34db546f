"""Probe of the world system for the checks, by the code of training. B windows, A control axes, H W pixels, N numbers."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from seedbed.recipes.world import objective as training
from seedbed.recipes.world.curriculum import OPEN, Stage
from seedbed.recipes.world.data import WorldData
from seedbed.recipes.world.evaluate import Trajectories, free_run
from seedbed.recipes.world.memory import LEVELS, POSE, Layout, Memory, to_float
from seedbed.recipes.world.objective import field_loss, field_targets, l1, open_window, rows_of
from seedbed.recipes.world.presets import NEVER
from seedbed.recipes.world.recording.lag_estimation import estimate_lag
from seedbed.train.probe import Alignment, Batch, OdeSampler, Probe, Rollouts, Velocity
from seedbed.train.stop_gradient import held_loss

if TYPE_CHECKING:
    from seedbed.recipes.world.edm import Denoiser, Factors
    from seedbed.recipes.world.emulator import Emulator
    from seedbed.recipes.world.system import World

# Standard deviation of an untrained field's colours. Measured: 0.06 to 0.13.
FAINT = 0.1
NUM_ALIGNED = 900  # frames in which controls are compared with image motion


def open_probe(system: World, batch: Batch) -> Probe:
    """One step on true memories with training noise; the target is not an input.

    A prediction is the frame and, where there is one, the field's own images, in one row of numbers.
    """
    window = open_window(rows_of(batch), system.layout)
    level_B, real_B = system.training_noise.levels(window)
    seen = system.training_noise.context(window, real_B)
    opened = {
        **seen,
        "action": window.action_BA,
        "level": level_B,
        "noise": system.training_noise.own(window),
        "target": window.target_B3HW,
        "last": window.memory.last,
    }

    def predict(b: Batch) -> Tensor:
        frame_B3HW = system.net(memory_of(system, b), b["action"], b["level"], b["noise"])
        return in_rows([frame_B3HW, *pictures(system, b)])

    return Probe(
        batch=opened,
        predict=predict,
        objective=lambda y_BN, b: objective(system, y_BN, b["target"]),
        inputs="m1",
        targets="target",
        ranges={"frames": (0, 255)},  # controls are clipped at 4 scales, which need not be reached
        oracle=lambda b: in_rows([b["target"], *field_targets_of(system, b["target"])]),
        lower_bound=0.0,
        uses=("action",),
        critic="critic" if system.critic is not None else "",
        at_init=lambda b: _noisy_persistence(system, b),
        # The training baseline is the noisy last frame, the evaluation baseline the clean one.
        baselines=lambda b: {
            "last frame with noise": _noisy_persistence(system, b),
            "persistence": l1(b["last"], b["target"]).item() + _untrained_field(system, b),
        },
        rollouts=counting_world(system, batch) if system.config.model.closed < NEVER else None,
        **common_facts(system, batch),
    )


def common_facts(system: Emulator, batch: Batch) -> dict[str, Any]:
    """What holds for every kind of network; a perfect one follows its controls without errors."""
    from seedbed.recipes.world import definitions

    level_HW3 = torch.arange(256, dtype=torch.uint8).view(1, 16, 16, 1).expand(-1, -1, -1, 3)
    is_staged = len(system.variants(system.config.steps)) > 1
    learned = {"free_l1": 0.01, "gap": 1.0, "listens": 10.0, "free_4": 40.0}
    return {
        "definitions": definitions.of(system, batch),
        "quantise": (to_float(level_HW3), {"the memory of play": remembered, "the rollouts of training": kept}),
        "held": lambda: held_loss(system, batch),
        "alignment": lambda data: alignment(system, data),
        "terms": ("loss", "loss_closed", *(["loss_map"] if system.trunk.field is not None else [])),
        "perfect": (lambda: patch("seedbed.recipes.world.emulator.quick", lambda *given: dict(learned))) if is_staged else None,
    }


def remembered(frame_B3HW: Tensor) -> Tensor:
    """A frame as the newest one of a memory."""
    return Memory(Layout(((1, 1),)), {"m1": frame_B3HW}).push(frame_B3HW).last


def kept(frame_B3HW: Tensor) -> Tensor:
    """A frame as the rollouts of training keep it."""
    height, width = frame_B3HW.shape[-2:]
    rollouts, zero_1 = training.Rollouts(1, 2, height, width, 1), torch.zeros(1, dtype=torch.int64)
    rollouts.keep(training.Rows(rollouts.frames_PTHWC, rollouts.action_PTA, rollouts.pose_PT12, zero_1, zero_1), 1, frame_B3HW)
    return to_float(rollouts.frames_PTHWC[:, 1])


def alignment(system: Emulator, data: WorldData) -> Alignment:
    """Lag and signs of the controls that training reads, and the error of dead reckoning with them."""
    source, recording, axes = data.train, data.recording, data.recording.axes
    frames_NHWC, action_NA = (source.arrays[name][:NUM_ALIGNED] for name in ("frames", "action"))
    rows = slice(source.low, source.low + len(frames_NHWC))
    raw_NA = (action_NA + np.array([float(axis.is_time) for axis in axes])) * np.array([axis.scale for axis in axes])
    times = {"time_T": recording.time_T[rows], "episode_T": recording.episode_T[rows]}
    found = estimate_lag(replace(recording, frames_THWC=frames_NHWC, actions_TA=raw_NA, **times))
    off, field, own = 0.0, system.trunk.field, system.data.train.arrays  # the field knows the ground of its own data
    if POSE in own and field is not None:
        row_B = np.flatnonzero(np.abs(own["action"][:-1]).max(1) > 0)  # where an episode ends, controls are zero
        given = (own[POSE][row_B], own[POSE][row_B + 1], own["action"][row_B])
        pose_BP, after_BP, action_BA = (torch.from_numpy(np.array(x)).to(field.motion_A6) for x in given)
        off = (field.next_pose(pose_BP, action_BA) - after_BP).abs().amax(1).quantile(0.9).item()
    return Alignment(found.lag, found.is_clear, found.summary, found.wrong_axes, off, field and type(field).next_pose)


def counting_world(system: World, batch: Batch) -> Rollouts:
    """Frame t of row b has level 20 + 7 b + t, and every control after it that level as well."""
    before, (num, span) = system.layout.num_frames, batch["action"].shape[:2]
    level_BT, control, noise = 20 + 7 * torch.arange(num)[:, None] + torch.arange(span), 1.0 / 256, system.training_noise
    frames = level_BT[:, :, None, None, None].expand(batch["frames"].shape).to(torch.uint8)
    action_BTA = (level_BT * control).to(batch["action"])[:, :, None].expand(batch["action"].shape).contiguous()
    traj = Trajectories(to_float(frames), action_BTA, np.zeros(num, np.int64), before, system.data.recording.pose_T44)

    @contextlib.contextmanager
    def replaced(step: Callable[[list[Tensor], Tensor], Tensor]) -> Iterator[None]:
        def forward(memory: dict[str, Tensor], action_BA: Tensor, *rest: Tensor) -> Tensor:
            return step([memory[name].unflatten(1, (-1, 3)) for name in system.layout.names()], action_BA)

        silent = training.TrainingNoise(noise.noise_table, 0.0, 0.0)
        with patch.object(system.net, "forward", forward), patch.object(system, "training_noise", silent):
            yield

    def play(num_steps: int) -> list[Tensor]:
        rollout, shown = system.play("torch").new_rollout(), []
        rollout.memory = Memory.start(traj.frames_BTCHW[:1, :before], system.layout, system.pose_of(np.zeros(1, np.int64)))
        scale_A, shift_A = (np.array([f(a) for a in rollout.player.axes]) for f in (lambda a: a.scale, lambda a: a.is_time))
        for step in range(1, num_steps + 1):
            rollout.step((traj.action(step)[0].double().numpy() + shift_A) * scale_A)
            shown.append(to_float(torch.from_numpy(rollout.frame_HWC))[None])
        return shown

    return Rollouts(
        batch={**batch, "frames": frames, "action": action_BTA},
        level=1.0 / LEVELS,
        control=control,
        replaced=replaced,
        windows=open_window,
        stage=lambda length: Stage("closed", length) if length > 1 else OPEN,
        error="loss_closed",
        free={"evaluation": lambda num_steps: [frame for _, frame in free_run(system, traj, num_steps)], "play": play},
        true=lambda num_steps: [traj.target(step) for step in range(1, num_steps + 1)],
    )


def denoising_ode(system: Denoiser, window: training.Window, offset: float, highest: float) -> OdeSampler:
    """`sample_frame` in the time 1 - sigma / highest."""
    index_B = torch.arange(16)
    seen = {name: kept[:1].expand(16, *kept.shape[1:]) for name, kept in window.memory.tensors().items()}
    action_BA, level_B = torch.ones(16, system.num_axes).to(window.action_BA), torch.zeros(16).to(window.action_BA)

    def run(velocity: Velocity, sampler: str, steps: int, guidance: float) -> Tensor:
        def denoise(noisy: Tensor, by: Factors, *rest: Any) -> tuple[Tensor, Tensor]:
            share_B = ((8.0 * by.noise).exp() - offset**2).clamp_min(0.0).sqrt() / highest
            return noisy + share_B[:, None, None, None] * velocity(noisy, 1.0 - share_B, index_B), noisy

        config = replace(system.config, model=replace(system.config.model, samples=steps))
        with patch.object(system, "denoise", denoise), patch.object(system, "config", config):
            return system.sample_frame(seen, action_BA, level_B, index_B, 0)

    return OdeSampler({"euler": 1}, run, index_B)


def _noisy_persistence(system: World, b: Batch) -> float:
    """Loss of the noisy last frame, which is the prediction at initialisation, with an untrained field."""
    return l1(b["m1"][:, -3:], b["target"]).item() + _untrained_field(system, b)


def _untrained_field(system: Emulator, b: Batch) -> float:
    """The own loss of an untrained field: faint colours in the coarse image, grey in the fine one."""
    coarse, *finer = (*field_targets_of(system, b["target"][:: system.row_stride()]), None)
    if coarse is None:
        return 0.0
    share = coarse / (FAINT * math.sqrt(2.0))  # the mean distance to a normal variable
    off = FAINT * math.sqrt(2.0 / math.pi) * (-share.square()).exp() + coarse * share.erf()
    return off.mean().item() + sum(part.abs().mean().item() for part in finer if part is not None)


def field_targets_of(system: Emulator, target_B3HW: Tensor) -> tuple[Tensor, ...]:
    """Targets of the field's images, as many as it renders."""
    field = system.trunk.field
    return () if field is None else field_targets(target_B3HW)[: 1 if field.detail is None else 2]


def objective(system: Emulator, y_BN: Tensor, target_B3HW: Tensor, raw_B3HW: Tensor | None = None) -> Tensor:
    """The error of the frame (or the squared error of the raw output), and the field's own loss."""
    shapes = [target_B3HW.shape, *(part.shape for part in field_targets_of(system, target_B3HW))]
    parts = zip(y_BN.split([shape[1:].numel() for shape in shapes], dim=1), shapes, strict=True)
    frame, *shown = (part.view(shape) for part, shape in parts)
    rows = slice(None, None, system.row_stride())
    error = l1(frame, target_B3HW) if raw_B3HW is None else (frame - raw_B3HW).square().mean()
    return error + field_loss([picture[rows] for picture in shown], target_B3HW[rows]) if shown else error


def memory_of(system: Emulator, b: Batch) -> dict[str, Tensor]:
    return {name: b[name] for name in (*system.layout.names(), POSE) if name in b}


def pictures(system: Emulator, b: Batch) -> tuple[Tensor, ...]:
    """The field's own images, for all rows."""
    return () if system.trunk.field is None else system.render_field(b[POSE], b["action"])


def in_rows(parts: list[Tensor]) -> Tensor:
    return torch.cat([part.flatten(1) for part in parts], dim=1)
