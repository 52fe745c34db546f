"""Parts of world models written a second time. B windows, T frames, A control axes, C colours, H W pixels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from seedbed.recipes.world import evaluate, metrics, player
from seedbed.recipes.world.critic import Critic, critic_loss
from seedbed.recipes.world.curriculum import Curriculum
from seedbed.recipes.world.data import NUM_FITTED, CounterNoise, WindowSource, WorldData
from seedbed.recipes.world.memory import POSE, Layout, Memory, to_float
from seedbed.recipes.world.model import STILL, TAPS, WorldNet, hold_still, transport
from seedbed.recipes.world.objective import HIDDEN_NOISE, TrainingNoise, open_window, rows_of
from seedbed.recipes.world.presets import NEVER
from seedbed.recipes.world.radiance_field import DENSITY_SCALE, flat_poses, ray_weights
from seedbed.recipes.world.recording.recording import CLIP, scale_actions
from seedbed.train.player import RECORDING

if TYPE_CHECKING:
    from seedbed.recipes.world.emulator import Emulator

Batch = dict[str, Tensor]
NUM = 64


def of(system: Emulator, batch: Batch) -> dict[str, Callable[[], Iterator[tuple]]]:
    parts = {"data": data, "model": model, "evaluation": scores, "inference": play}
    return {place: lambda part=part: part(system) for place, part in parts.items()} | {"objective": lambda: loss(system, batch)}


def data(system: Emulator) -> Iterator[tuple]:
    """Controls in units of their axes, the newest frames in a memory, and all arrays of a window from the same rows."""
    recording, source, axes = system.data.recording, system.data.train, system.data.recording.axes
    assert isinstance(source, WindowSource)
    share_T1, scale_A = np.array([[-1.7], [0.5], [9.0]]), np.array([axis.scale for axis in axes])
    raw_TA = (share_T1 + np.array([axis.is_time for axis in axes])) * scale_A
    yield "scaled controls", scale_actions, scale_actions(raw_TA, axes), share_T1.clip(-CLIP, CLIP).repeat(len(axes), 1).tolist()
    frame_BT = torch.arange(9.0).expand(2, 9)[:, :, None, None, None].expand(2, 9, 3, 4, 4) / 8.0 - 1.0
    kept = Memory.start(frame_BT, Layout(((1, 2), (4, 5)))).kept
    found = [kept[name][0, ::3, 0, 0] for name in ("m1", "m4")]
    yield "frames of a memory", Memory.start, torch.cat(found), [n / 8.0 - 1.0 for n in (7, 8, 4, 5, 6, 7, 8)], 0.02
    part = slice(source.low, source.low + 8)
    parts = {"frames": recording.frames_THWC[part], "action": scale_actions(recording.actions_TA[part], axes)}
    parts |= {POSE: flat_poses(recording)[part]} if POSE in source.arrays else {}
    for name in parts.keys() & source.arrays.keys():
        yield f"{name} of the windows", WindowSource.__init__, source.arrays[name][:8].tolist(), parts[name].tolist()


def loss(system: Emulator, batch: Batch) -> Iterator[tuple]:
    """The noise level that the network is given is that of its memory, less what is hidden from it."""
    window, noise = open_window(rows_of(batch), system.layout), TrainingNoise(system.noise_table, 0.5, 0.0)
    given_B, real_B = noise.levels(window)
    seen = noise.context(window, real_B)
    used = seen["m1"].flatten(1).any(1)  # the memory of a row may be blank
    std_B, code = (seen["m1"] - window.memory.kept["m1"]).flatten(1).std(1), (TrainingNoise.levels, TrainingNoise.context)
    yield "noise in the memory", code, std_B[used], (given_B + HIDDEN_NOISE)[used], 0.3
    own = 1.0 + torch.stack(noise.levels(open_window(rows_of(batch), system.layout, len(given_B))))
    yield "noise in rollouts of the model's own frames", TrainingNoise.levels, own, torch.ones_like(own)
    one, other = (system.own_noise(torch.arange(NUM), turn).flatten(1) for turn in (1, 2))
    found = [one.std(), 1.0 + (one * other).mean(), 1.0 + (one[1:] * one[:-1]).mean()]
    yield "spread of the own noise, and what two frames and two windows share", CounterNoise.forward, found, [1.0] * 3, 0.1
    stages, seen = Curriculum(replace(system.config.model, closed=0.0, adversarial=NEVER, rollout=64)), list[int]()
    for gap in (1.0, 1.0, 1.0, 1.0, 9.0):
        stages.measured(gap, 9.0, 1.0, 40.0)
        seen += [stages.stage(step, 100).length for step in range(3)]
    yield "lengths of rollouts after evaluations", Curriculum.stage, seen, [n for n in (4, 16, 64, 64, 16) for _ in range(3)]
    yield from _penalties()
    level_B = 1.0 + system.noise_table.level(torch.arange(4096), 0.5)
    yield "range of the levels", CounterNoise.level, [level_B.min(), level_B.mean(), level_B.max()], [1.0, 1.25, 1.5], 0.02


def _penalties() -> Iterator[tuple]:
    """The critic's loss with its penalties, by double backward."""
    critic, rng, gamma = Critic(2, 2, 1.0), torch.Generator().manual_seed(2), 0.7
    for param in critic.parameters():
        param.data = 0.3 * torch.randn(param.shape, generator=rng)
    both, memory, action = (torch.randn(6, *shape, generator=rng) for shape in ((3, 8, 8), (6, 8, 8), (2,)))
    memory, action = memory[:3].repeat(2, 1, 1, 1), action[:3].repeat(2, 1)
    found = critic_loss(critic, both[:3], both[3:], memory[:3], action[:3], gamma)["loss_critic"]
    score_B = critic(both.requires_grad_(), memory, action)
    (slope,) = torch.autograd.grad(score_B.sum(), both, create_graph=True)
    wanted = F.softplus(score_B[3:] - score_B[:3]).mean() + 0.5 * gamma * slope.square().sum() / 3
    grads = [torch.cat([g.flatten() for g in torch.autograd.grad(one, [*critic.parameters()])]) for one in (found, wanted)]
    yield "gradient of the critic's loss with its penalties", critic_loss, *grads, 1e-3


def model(system: Emulator) -> Iterator[tuple]:
    """Transport by kernels of one tap: the image moves by as many strides along its rows, then its columns."""
    density_BD11 = torch.linspace(-1.0, 3.0, 8).view(2, 4, 1, 1)
    passes_BD = (-DENSITY_SCALE * 0.1 * F.softplus(density_BD11 - 1.0)).exp()[..., 0, 0]
    wanted = [[float(row_D[:n].prod() * (1.0 - row_D[n])) for n in range(4)] for row_D in passes_BD]
    yield "weights of a ray's samples", ray_weights, ray_weights(density_BD11, torch.full((4, 1, 1), 0.1))[0][..., 0, 0], wanted
    net: Any = getattr(system, "net", None)
    memory, share_B = {"m1": torch.linspace(-1.0, 1.0, 54).view(3, 18, 1, 1)}, torch.tensor([0.0, 0.5, 1.0])
    shown = hold_still(torch.zeros(3, 3, 1, 1), memory, share_B[:, None] * STILL)[..., 0, 0]
    yield (
        "last frame where nothing moves, half of it, none",
        hold_still,
        shown,
        memory["m1"][:, -3:, 0, 0] * (1 - share_B)[:, None],
    )
    strides = net.strides if isinstance(net, WorldNet) else ()
    x = torch.randn(1, 3, 2 * (size := 12), 2 * size, generator=torch.Generator().manual_seed(1))
    weights, at, row, column = torch.zeros(1, 2 * TAPS * len(strides), size, size), torch.arange(2 * size), 0, 0
    for n, stride in enumerate(strides):
        for axis, tap in enumerate((TAPS // 2 + 1, TAPS // 2 - 2)):
            weights[:, (2 * n + axis) * TAPS + tap] = 1e6
        column, row = column + stride, row - 2 * stride
        moved = x
        for one in strides[: n + 1]:
            moved = moved[..., (at + one).clamp(0, 2 * size - 1)][:, :, (at - 2 * one).clamp(0, 2 * size - 1)]
        yield f"image moved by {column} and {row} pixels", (WorldNet.moved, transport), net.moved(x, weights), moved, 1e-3


def scores(system: Emulator) -> Iterator[tuple]:
    """Metrics of images with known differences, and of rollouts of a network that adds its controls to the last frame."""
    one, two = (torch.full((1, 3, 16, 16), level / 127.5 - 1.0) for level in (100, 110))
    yield "PSNR of 10 levels", metrics.psnr, metrics.psnr(two, one), [20.0 * math.log10(25.5)], 1e-3
    ramp = torch.linspace(-1, 1, 16).expand(1, 3, 16, 16)
    yield "sharpness of two ramps", metrics.sharpness, metrics.sharpness(torch.cat((ramp, ramp.mT))), [2.0 / 15.0] * 2
    source, before = system.data.valid, system.layout.num_frames
    horizon = source.available_horizon(before, evaluate.QUICK_HORIZON)
    start_N = source.windows(evaluate.NUM_QUICK["cpu"], before, horizon)
    recording, rows_BT = system.data.recording, start_N[:, None] + np.arange(before + horizon)
    frames = torch.from_numpy(np.ascontiguousarray(recording.frames_THWC[rows_BT]))
    action = torch.from_numpy(scale_actions(recording.actions_TA[rows_BT], recording.axes))
    true, mean = to_float(frames), torch.from_numpy(system.data.mean_frame).movedim(-1, 0) / 127.5 - 1.0
    step = lambda frame, action_BA: metrics.quantise(frame + 0.02 * action_BA.sum(1)[:, None, None, None])  # noqa: E731
    free, other, errors, wanted = true[:, before - 1], true[:, before - 1], [], {}
    for n in range(1, horizon + 1):
        target, action_BA = true[:, before - 1 + n], action[:, before - 2 + n]
        forced, free = step(true[:, before - 2 + n], action_BA), step(free, action_BA)
        errors.append((free - target).abs().mean())
        if n == min(evaluate.NEAR, horizon):
            wanted["gap"] = errors[-1] / (forced - target).abs().mean()
        if n in (1, 4, 16):
            last, share = true[:, before - 1], system.data.fade(n)
            rest = {"copy": last, "mean": mean.expand_as(target), "fade": share * last + (1.0 - share) * mean}
            wanted |= {f"{name}_{n}": metrics.psnr(shown, target).mean() for name, shown in ({"free": free} | rest).items()}
        other = step(other, action_BA.roll(1, 0))
        if n == (4 if horizon >= 4 else 1):
            wanted["listens"] = metrics.psnr(free, target).mean() - metrics.psnr(other, target).mean()
    wanted["free_l1"] = torch.stack(errors[len(errors) // 2 :]).mean()
    start_N = system.data.train.windows(NUM_FITTED, 1, horizon)
    pair = (torch.from_numpy(recording.frames_THWC[start_N + n] - system.data.mean_frame) for n in (0, horizon))
    last, target = (frames.flatten(1) for frames in pair)
    errors_S = torch.stack([(n / 40 * last - target).square().sum(1).clamp_min(1.0).log().mean() for n in range(41)])
    yield "best weight of the last frame against the mean", WorldData.fade, system.data.fade(horizon), errors_S.argmin() / 40
    predict = lambda memory, action_BA, *rest: step(memory.last, action_BA)  # noqa: E731
    with patch.object(system, "predict_frame", predict):
        found = evaluate.quick(system, source)
    for name, value in wanted.items():
        yield f"{name} of an evaluation", (evaluate.quick, WindowSource.read), found[name], value, 1e-3


def play(system: Emulator) -> Iterator[tuple]:
    """Play follows a recording as evaluation does: frames, controls and poses; what is played is recorded in the same order."""
    from seedbed.recipes.world.player import Recorder, WorldPlayer, WorldRollout

    with patch.object(player.copy, "deepcopy", lambda value, memo=None: value):
        shown = WorldPlayer(system, "torch")
    recording, steps = system.data.recording, 3
    seeds = [n for n, at in enumerate(shown.starts) if all(recording.holds(int(at) + step) for step in range(1, steps + 2))]
    predict = lambda memory, action_BA, index_B, turn, level=0.0: (memory.last + 0.01 * action_BA.sum() + level).clamp(-1, 1)  # noqa: E731
    rollout: Any = WorldRollout(shown)
    rollout.level = 0.1
    for seed in seeds[:1]:
        at = int(shown.starts[seed])
        scaled_TA = torch.from_numpy(scale_actions(recording.actions_TA[at : at + steps], recording.axes))
        frames = torch.from_numpy(np.array(recording.frames_THWC[at - system.layout.num_frames + 1 : at + 1]))
        memory = Memory.start(to_float(frames)[None], system.layout, system.pose_of(np.array([at])))
        keeper = Recorder(player.Path("nowhere"), shown, "rollout", "check")
        with patch.object(shown, "predict", predict):
            rollout.reset(seed, RECORDING)
            keeper.begin(rollout)
            for step in range(steps):
                action_1A = scaled_TA[step : step + 1]
                memory = system.advance(memory, action_1A, predict(memory, action_1A, None, 0, 0.1))
                if not rollout.step(np.full(len(recording.axes), 7.0, np.float32)):
                    return
                keeper.add(rollout)
                for name, wanted in memory.tensors().items():
                    yield f"{name} after frame {step + 1} of play", WorldRollout.step, rollout.memory.tensors()[name], wanted
                truth = recording.frames_THWC[at + step + 1].tolist()
                yield "frame of the recording beside it", WorldRollout.step, rollout.reference_HWC, truth
        free = patch.object(player.shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 62))
        with patch.object(player, "write_recording") as write, patch.object(player, "MIN_FRAMES", 1), free:
            keeper.save()
        wanted = [*recording.actions_TA[at : at + steps].tolist(), [0.0] * len(recording.axes)]
        yield "controls of a played recording, by frame", (Recorder.add, Recorder.save), write.call_args.args[2], wanted
