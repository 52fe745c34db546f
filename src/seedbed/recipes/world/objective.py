"""What the generator is trained on: one step on true memories, and rollouts on its own frames, each step with its own control.

Shape suffixes: B windows, P rollouts, T frames of a window, A control axes, H W pixels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from seedbed.nn import dice
from seedbed.recipes.world.data import BLANK, CONTEXT, LOST, OWN, Dust
from seedbed.recipes.world.memory import POSE, Layout, Memory, to_bytes, to_float

UNTOLD = 0.03  # noise on the memory that the network is not told of
BLACKOUT = 0.25  # share of true memories that are hidden from a network with an odometer
AGE = 1 << 40  # no sample's counter is so large: counters of one window at different ages differ


@dataclass(frozen=True)
class Window:
    """A prediction for every row: what is remembered, the control, and the frame it leads to."""

    memory: Memory
    action_BA: Tensor
    target_B3HW: Tensor
    index_B: Tensor
    age_B: Tensor
    num_own: int = 0  # the last rows are rollouts

    @property
    def counter_B(self) -> Tensor:
        """Names the draws of noise: by window, and by how many frames of its own it has seen."""
        return self.index_B + self.age_B * AGE


class Rows(NamedTuple):
    """Windows with the frames that follow; below `before + age` the frames are what is remembered, above the truth to come."""

    frames_BTHWC: Tensor
    action_BTA: Tensor
    pose_BTP: Tensor  # of no width where nobody asks for it
    index_B: Tensor
    age_B: Tensor


def rows_of(batch: dict[str, Tensor]) -> Rows:
    """The windows of a batch, all true."""
    pose_BTP = batch[POSE] if POSE in batch else batch["action"][..., :0]
    return Rows(batch["frames"], batch["action"], pose_BTP, batch["index"], torch.zeros_like(batch["index"]))


def open_window(rows: Rows, layout: Layout, num_own: int = 0) -> Window:
    """Action t takes frame t to frame t + 1: a prediction uses the control of the newest remembered frame."""
    before = layout.num_frames
    row_B1, from_B = torch.arange(len(rows.age_B), device=rows.age_B.device)[:, None], rows.age_B
    at_BT = from_B[:, None] + torch.arange(before + 1, device=from_B.device)
    frames = to_float(rows.frames_BTHWC[row_B1, at_BT])
    newest = (row_B1[:, 0], from_B + before - 1)
    memory = Memory.start(frames[:, :before], layout, rows.pose_BTP[newest] if rows.pose_BTP.shape[2] else None)
    return Window(memory, rows.action_BTA[newest], frames[:, before], rows.index_B, from_B, num_own)


class Rollouts(nn.Module):
    """Walks on the network's own frames that go on from one step of training to the next, a frame each.

    So a rollout may be long while a step stays as cheap as on true memories, all rows in one pass. Rows begin anew in turn,
    from windows of the present batch; no gradient goes through time.
    """

    frames_PTHWC: Tensor
    action_PTA: Tensor
    pose_PT12: Tensor
    index_P: Tensor
    age_P: Tensor
    turn: Tensor

    def __init__(self, num: int, span: int, height: int, width: int, num_axes: int, numbers: int = 0) -> None:
        super().__init__()
        self.register_buffer("frames_PTHWC", torch.zeros(num, span, height, width, 3, dtype=torch.uint8))
        self.register_buffer("action_PTA", torch.zeros(num, span, num_axes))
        self.register_buffer("pose_PT12", torch.zeros(num, span, numbers), persistent=numbers > 0)
        self.register_buffer("index_P", torch.zeros(num, dtype=torch.int64))
        self.register_buffer("age_P", torch.full((num,), span, dtype=torch.int64))  # over: all begin anew
        self.register_buffer("turn", torch.zeros((), dtype=torch.int64))

    def go_on(self, fresh: Rows, length: int) -> Rows:
        """The rollouts at their next frame; those that are over, or whose turn it is, are replaced by fresh windows."""
        num = len(fresh.index_B)
        age_P = self.age_P[:num]
        over_P = (age_P >= length) | ((self.turn + torch.arange(num, device=age_P.device)) % length == 0)

        def pick(new: Tensor, old: Tensor) -> Tensor:
            return torch.where(over_P.view(-1, *[1] * (new.ndim - 1)), new, old[:num])

        old = (self.frames_PTHWC, self.action_PTA, self.pose_PT12, self.index_P, self.age_P)
        return Rows(*(pick(a, b) for a, b in zip(fresh, old, strict=True)))

    @torch.no_grad()
    def keep(self, rows: Rows, before: int, frame_P3HW: Tensor) -> None:
        """Write the network's own frames where the true ones were: they are remembered from now on."""
        num = len(rows.index_B)
        self.frames_PTHWC[:num] = rows.frames_BTHWC
        self.frames_PTHWC[torch.arange(num, device=rows.age_B.device), rows.age_B + before] = to_bytes(frame_P3HW)
        self.action_PTA[:num], self.pose_PT12[:num] = rows.action_BTA, rows.pose_BTP
        self.index_P[:num], self.age_P[:num] = rows.index_B, rows.age_B + 1
        self.turn += 1


@dataclass(frozen=True)
class Noises:
    """The noise of a step on the memory, told to the network, and the network's own; all by sample counters."""

    dust: Dust
    highest: float
    blank: float

    def levels(self, window: Window) -> tuple[Tensor, Tensor]:
        """The level that the network is told for every row, and the one that is there: more, and none at all in rollouts.

        There is always a little more noise than is told, so that a network that is told of none does not take its memory for
        clean: one that does keeps its own errors and makes them larger at every step. Rollouts have errors of their own, and
        are what play is.
        """
        told_B = self.dust.level(window.index_B, self.highest)
        noisy_B = (torch.arange(len(told_B), device=told_B.device) < len(told_B) - window.num_own).to(told_B)
        return told_B * noisy_B, (told_B + UNTOLD) * noisy_B

    def context(self, window: Window, real_B: Tensor) -> dict[str, Tensor]:
        """The memory as the network sees it in training; coarse memories are hidden now and then.

        Where the camera's pose is known the whole memory is, for some: they are drawn from what was learned of the place, and
        that it is learned at all is due to them, since one step from true frames needs little of it.
        """
        seen = {}
        for number, (name, kept_BMHW) in enumerate(window.memory.kept.items()):
            if self.highest:
                drawn = self.dust(window.counter_B, CONTEXT, number, tuple(kept_BMHW.shape[1:]))
                kept_BMHW = torch.addcmul(kept_BMHW, drawn, real_B[:, None, None, None])
            if self.blank and name != "m1":
                hidden_B = dice.uniform(dice.keys(self.dust.seed, window.index_B, BLANK + 64 * number), 1)[:, 0] < self.blank
                kept_BMHW = kept_BMHW * (~hidden_B)[:, None, None, None]
            seen[name] = kept_BMHW
        if window.memory.pose_BP is None:
            return seen
        drawn_B = dice.uniform(dice.keys(self.dust.seed, window.index_B, LOST), 1)[:, 0]
        kept_B = (drawn_B >= BLACKOUT) | (torch.arange(len(drawn_B), device=drawn_B.device) >= len(drawn_B) - window.num_own)
        return {name: frames * kept_B[:, None, None, None] for name, frames in seen.items()} | {POSE: window.memory.pose_BP}

    def own(self, window: Window) -> Tensor:
        return self.dust(window.counter_B, OWN, 0, (1, *window.target_B3HW.shape[-2:]))


def l1(frame_B3HW: Tensor, target_B3HW: Tensor) -> Tensor:
    """The mean absolute error of the unclamped prediction, in float32."""
    return (frame_B3HW.float() - target_B3HW).abs().mean()
