"""The frame memory: past frames at one or several sizes, packed by the same code in training, play and export.

Shape suffixes: B batch, T frames, C colours, H W pixels, M remembered numbers of a pixel (frames x colours, newest last),
P numbers of a pose.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

LEVELS = 127.5  # a byte b stands for b / 127.5 - 1
POSE = "pose"  # the name of the pose among the inputs


@dataclass(frozen=True)
class Layout:
    """How many frames are kept at which size: `scales` maps a reduction of height and width to a number of frames."""

    scales: tuple[tuple[int, int], ...]

    @property
    def num_frames(self) -> int:
        """How many frames back the memory reaches."""
        return max(num for _, num in self.scales)

    def names(self) -> list[str]:
        return [name_of(reduction) for reduction, _ in self.scales]

    def shapes(self, height: int, width: int) -> dict[str, tuple[int, int, int]]:
        """The shape of every entry of `Memory.tensors()`, without the batch."""
        return {name_of(r): (3 * num, height // r, width // r) for r, num in self.scales}


def name_of(reduction: int) -> str:
    return f"m{reduction}"


def quantise(x: Tensor) -> Tensor:
    """Clamp to [-1, 1] and round to 256 levels. Truncation would darken the image at every step."""
    return ((x.clamp(-1.0, 1.0) + 1.0) * LEVELS).round() / LEVELS - 1.0


def to_float(frames_HWC: Tensor) -> Tensor:
    """Bytes (..., H, W, 3) to numbers (..., 3, H, W) in [-1, 1]; `to_bytes` gives the same bytes back."""
    return frames_HWC.movedim(-1, -3).to(torch.float32) / LEVELS - 1.0


def to_bytes(frames_CHW: Tensor) -> Tensor:
    """Numbers (..., 3, H, W) to bytes (..., H, W, 3)."""
    return ((frames_CHW.float().clamp(-1.0, 1.0) + 1.0) * LEVELS).round().to(torch.uint8).movedim(-3, -1)


def reduce(frames_BMHW: Tensor, reduction: int) -> Tensor:
    """The mean over squares of pixels, rounded to 256 levels.

    Taken over levels, whose sums are exact: a half is the same half on every device and in a browser.
    """
    if reduction == 1:
        return frames_BMHW
    levels_BMHW = ((frames_BMHW.clamp(-1.0, 1.0) + 1.0) * LEVELS).round()
    return F.avg_pool2d(levels_BMHW, reduction).round() / LEVELS - 1.0


@dataclass(frozen=True)
class Memory:
    """Frames in [-1, 1] as they enter the network, and the pose of the newest with pose tracking.

    Immutable: `push` returns a new one.
    """

    layout: Layout
    kept: dict[str, Tensor]
    pose_BP: Tensor | None = None

    @classmethod
    def start(cls, frames_BTCHW: Tensor, layout: Layout, pose_BP: Tensor | None = None) -> "Memory":
        """From true frames, oldest first; at least as many as the memory reaches back."""
        assert frames_BTCHW.shape[1] >= layout.num_frames, "too few frames to fill the memory"
        kept = {name_of(r): reduce(frames_BTCHW[:, -num:].flatten(1, 2), r) for r, num in layout.scales}
        return cls(layout, kept, pose_BP)

    def push(self, frame_BCHW: Tensor, pose_BP: Tensor | None = None) -> "Memory":
        """With one more frame, seen from this pose, and without the oldest.

        The frame is clamped and rounded here and nowhere else.
        """
        frame_BCHW = quantise(frame_BCHW)
        new = {name_of(r): reduce(frame_BCHW, r) for r, _ in self.layout.scales}
        kept = {name: torch.cat((old_BMHW[:, 3:], new[name]), dim=1) for name, old_BMHW in self.kept.items()}
        return Memory(self.layout, kept, pose_BP)

    def tensors(self) -> dict[str, Tensor]:
        """The network's inputs, by name."""
        return self.kept if self.pose_BP is None else {**self.kept, POSE: self.pose_BP}

    def of(self, tensors: Iterable[Tensor]) -> "Memory":
        """A memory like this one that holds other tensors, in the order of `tensors()`."""
        given = dict(zip(self.tensors(), tensors, strict=True))
        return Memory(self.layout, {name: given[name] for name in self.kept}, given.get(POSE))

    def roll(self) -> "Memory":
        """Each row with the memory of the one before it."""
        return self.of(tensor.roll(1, 0) for tensor in self.tensors().values())

    @property
    def last(self) -> Tensor:
        return self.kept["m1"][:, -3:]
