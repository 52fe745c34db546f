"""What the generator is trained on: one step on true memories, and rollouts on its own frames, each step with its own control.

Shape suffixes: B windows, T frames of a window, A control axes, H W pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from seedbed.nn import dice
from seedbed.recipes.world.data import BLANK, CONTEXT, OWN, Dust
from seedbed.recipes.world.memory import Layout, Memory, to_float

UNTOLD = 0.03  # noise on the memory that the network is not told of


@dataclass(frozen=True)
class Window:
    """A batch opened: the memory at its first prediction, then a control and a target for every step."""

    memory: Memory
    actions: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    index_B: Tensor


def open_window(batch: dict[str, Tensor], layout: Layout, num_steps: int, rows: slice) -> Window:
    """Action t takes frame t to frame t + 1: the first prediction uses the control of the newest remembered frame."""
    before = layout.num_frames
    frames = to_float(batch["frames"][rows, : before + num_steps])
    actions_BTA = batch["action"][rows]
    return Window(
        Memory.start(frames[:, :before], layout),
        tuple(actions_BTA[:, before - 1 + j] for j in range(num_steps)),
        tuple(frames[:, before + j] for j in range(num_steps)),
        batch["index"][rows],
    )


@dataclass(frozen=True)
class Noises:
    """The noise of a step on the memory, told to the network, and the network's own; all by sample counters."""

    dust: Dust
    highest: float
    blank: float

    def context(self, memory: Memory, index_B: Tensor, level_B: Tensor, turn: int) -> dict[str, Tensor]:
        """The memory as the network sees it in training; coarse memories are hidden now and then.

        There is always a little more noise than is told, so that a network that is told of none does not take its memory for
        clean: one that does keeps its own errors and makes them larger at every step.
        """
        seen = {}
        for number, (name, kept_BMHW) in enumerate(memory.tensors().items()):
            if self.highest:
                drawn = self.dust(index_B, CONTEXT, 8 * turn + number, tuple(kept_BMHW.shape[1:]))
                kept_BMHW = torch.addcmul(kept_BMHW, drawn, (level_B + UNTOLD)[:, None, None, None])
            if self.blank and name != "m1":
                hidden_B = dice.uniform(dice.keys(self.dust.seed, index_B, BLANK + 64 * number), 1)[:, 0] < self.blank
                kept_BMHW = kept_BMHW * (~hidden_B)[:, None, None, None]
            seen[name] = kept_BMHW
        return seen

    def own(self, index_B: Tensor, turn: int, height: int, width: int) -> Tensor:
        return self.dust(index_B, OWN, turn, (1, height, width))


def shares(num: int, length: int, longest: int) -> tuple[int, int]:
    """Rows on true memories, and rows of rollouts: half of a step's predictions each at the longest rollout.

    The numbers do not follow the length, so that a compiled network meets few shapes.
    """
    return (num, 0) if length == 1 else ((num + 1) // 2, max(1, num // (2 * longest)))


Step = Callable[[dict[str, Tensor], Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Rollout:
    """Predictions of consecutive steps, the memory before the last of them, and the last step's inputs."""

    frames: list[Tensor]
    memory: Memory
    errors: list[Tensor]


def roll(net: Step, window: Window, noises: Noises) -> Rollout:
    """Step by step on its own frames: no gradient through time, every step with its own true control and target."""
    memory, frames, errors = window.memory, [], []
    level_B = noises.dust.level(window.index_B, noises.highest)
    height, width = window.targets[0].shape[-2:]
    for turn, (action_BA, target_B3HW) in enumerate(zip(window.actions, window.targets, strict=True)):
        if turn:
            memory = memory.push(frames[-1].detach())
        seen = noises.context(memory, window.index_B, level_B, turn)
        frame_B3HW = net(seen, action_BA, level_B, noises.own(window.index_B, turn, height, width))
        frames.append(frame_B3HW)
        errors.append(l1(frame_B3HW, target_B3HW))
    return Rollout(frames, memory, errors)


def l1(frame_B3HW: Tensor, target_B3HW: Tensor) -> Tensor:
    """The mean absolute error of the unclamped prediction, in float32."""
    return (frame_B3HW.float() - target_B3HW).abs().mean()
