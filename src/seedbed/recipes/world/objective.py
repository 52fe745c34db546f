"""Training windows: one-step predictions on true memories, rollouts on predicted frames, and the noise on both.

Shape suffixes: B windows, P rollouts, T frames of a window, A control axes, H W pixels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seedbed.nn import rng
from seedbed.recipes.world.data import BLANK, CONTEXT, LOST, OWN, CounterNoise
from seedbed.recipes.world.memory import POSE, Layout, Memory, to_bytes, to_float
from seedbed.recipes.world.radiance_field import RAY_STRIDE

HIDDEN_NOISE = 0.03  # noise on the memory beyond the level that is the network's input
MEMORY_DROPOUT = 0.25  # share of true memories that are zeroed for a network with pose tracking
AGE = 1 << 40  # larger than any sample counter, so counters of different ages differ


@dataclass(frozen=True)
class Window:
    """A prediction for every row: memory, control and target frame."""

    memory: Memory
    action_BA: Tensor
    target_B3HW: Tensor
    index_B: Tensor
    age_B: Tensor
    num_own: int = 0  # the last rows are rollouts

    @property
    def counter_B(self) -> Tensor:
        """Counter of the noise: by window and rollout age."""
        return self.index_B + self.age_B * AGE


class Rows(NamedTuple):
    """Windows with following frames; frames before `before + age` are the memory, later ones are true targets."""

    frames_BTHWC: Tensor
    action_BTA: Tensor
    pose_BTP: Tensor  # of width 0 without pose tracking
    index_B: Tensor
    age_B: Tensor


def rows_of(batch: dict[str, Tensor]) -> Rows:
    """The windows of a batch, at age 0."""
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
    """Rollouts on predicted frames that continue from one training step to the next, by one frame each.

    Long rollouts thus cost no more than one-step predictions, all rows in one pass. Rows restart in turn from windows of the
    current batch; no gradient flows through time.
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
        self.register_buffer("age_P", torch.full((num,), span, dtype=torch.int64))  # beyond any length: all restart
        self.register_buffer("turn", torch.zeros((), dtype=torch.int64))

    def next_rows(self, fresh: Rows, length: int) -> Rows:
        """The rollouts at their next frame; finished ones, and some in turn, are replaced by fresh windows."""
        num = len(fresh.index_B)
        age_P = self.age_P[:num]
        over_P = (age_P >= length) | ((self.turn + torch.arange(num, device=age_P.device)) % length == 0)

        def pick(new: Tensor, old: Tensor) -> Tensor:
            return torch.where(over_P.view(-1, *[1] * (new.ndim - 1)), new, old[:num])

        old = (self.frames_PTHWC, self.action_PTA, self.pose_PT12, self.index_P, self.age_P)
        return Rows(*(pick(a, b) for a, b in zip(fresh, old, strict=True)))

    @torch.no_grad()
    def keep(self, rows: Rows, before: int, frame_P3HW: Tensor) -> None:
        """Store the predicted frames in place of the true ones, as memory of the next step."""
        num = len(rows.index_B)
        self.frames_PTHWC[:num] = rows.frames_BTHWC
        self.frames_PTHWC[torch.arange(num, device=rows.age_B.device), rows.age_B + before] = to_bytes(frame_P3HW)
        self.action_PTA[:num], self.pose_PT12[:num] = rows.action_BTA, rows.pose_BTP
        self.index_P[:num], self.age_P[:num] = rows.index_B, rows.age_B + 1
        self.turn += 1


@dataclass(frozen=True)
class TrainingNoise:
    """Noise on the memory, whose level is an input, and the generator's own noise; all by sample counters."""

    noise_table: CounterNoise
    highest: float
    memory_dropout: float

    def levels(self, window: Window) -> tuple[Tensor, Tensor]:
        """The noise level given to the network for every row, and the actual one: higher, and zero in rollouts.

        The actual level is always a little higher, so that a network given level 0 does not trust its memory fully: one that
        does amplifies its own errors at every step. Rollouts have errors of their own.
        """
        level_B = self.noise_table.level(window.index_B, self.highest)
        noisy_B = (torch.arange(len(level_B), device=level_B.device) < len(level_B) - window.num_own).to(level_B)
        return level_B * noisy_B, (level_B + HIDDEN_NOISE) * noisy_B

    def context(self, window: Window, real_B: Tensor) -> dict[str, Tensor]:
        """The memory as the training input; coarse memories are dropped at random.

        With pose tracking the whole memory of some rows is zeroed: they are predicted from the radiance field alone, which
        trains it; one-step predictions from true frames hardly need it.
        """
        seen = {}
        for number, (name, kept_BMHW) in enumerate(window.memory.kept.items()):
            if self.highest:
                drawn = self.noise_table(window.counter_B, CONTEXT, number, tuple(kept_BMHW.shape[1:]))
                kept_BMHW = torch.addcmul(kept_BMHW, drawn, real_B[:, None, None, None])
            if self.memory_dropout and name != "m1":
                drawn_B = rng.uniform(rng.keys(self.noise_table.seed, window.index_B, BLANK + 64 * number), 1)[:, 0]
                kept_BMHW = kept_BMHW * (drawn_B >= self.memory_dropout)[:, None, None, None]
            seen[name] = kept_BMHW
        if window.memory.pose_BP is None:
            return seen
        drawn_B = rng.uniform(rng.keys(self.noise_table.seed, window.index_B, LOST), 1)[:, 0]
        own_B = torch.arange(len(drawn_B), device=drawn_B.device) >= len(drawn_B) - window.num_own
        kept_B = (drawn_B >= MEMORY_DROPOUT) | own_B
        return {name: frames * kept_B[:, None, None, None] for name, frames in seen.items()} | {POSE: window.memory.pose_BP}

    def own(self, window: Window) -> Tensor:
        return self.noise_table(window.counter_B, OWN, 0, (1, *window.target_B3HW.shape[-2:]))


def l1(frame_B3HW: Tensor, target_B3HW: Tensor) -> Tensor:
    """The mean absolute error of the unclamped prediction, in float32."""
    return (frame_B3HW.float() - target_B3HW).abs().mean()


def field_targets(target_B3HW: Tensor) -> tuple[Tensor, Tensor]:
    """Targets of the field's images: coarse and full size."""
    return F.avg_pool2d(target_B3HW, RAY_STRIDE), target_B3HW


def field_loss(pictures: Sequence[Tensor], target_B3HW: Tensor) -> Tensor:
    coarse, *finer = (l1(shown, wanted) for shown, wanted in zip(pictures, field_targets(target_B3HW), strict=False))
    return coarse + finer[0] if finer else coarse
