"""What a recipe offers to somebody who wants to walk through it: a player for the run, and a dream for every visitor.

Shape suffixes: A control axes, H W pixels, C colours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np

    from seedbed.data.recording import Axis

# What may stand beside the dream: nothing, the simulator that was recorded, or the recording itself, which then steers.
NOTHING, SIMULATOR, RECORDING = "nothing", "simulator", "recording"


class Dream(Protocol):
    """One visitor's walk: it begins at a real frame and goes on from its own. Nothing of it is shared with another's."""

    frame_HWC: np.ndarray  # uint8, what was dreamed last
    action_A: np.ndarray  # the control that led to it, in recorded units
    done_A: np.ndarray  # what the simulator made of it: a wall may have been in the way
    pose_44: np.ndarray | None  # where the simulator stands
    seed: int
    num_steps: int  # since the last reset
    level: float  # of noise on the memory, as the network is told
    locked: bool  # the same noise at every step

    @property
    def beside_HWC(self) -> np.ndarray | None:
        """uint8, what really happens there; None when nobody asked."""
        ...

    def reset(self, seed: int, beside: str = NOTHING) -> None:
        """Back to the real frames of this seed."""
        ...

    def step(self, action_A: np.ndarray) -> bool:
        """One frame further. False, and nothing happens, where the recording that steers has come to its end."""
        ...

    def anchor(self) -> None:
        """Put what really happened into the memory, where it is known."""
        ...

    def memory_pictures(self) -> list[np.ndarray]:
        """The memory exactly as the network gets it: for every scale the frames from oldest to newest, uint8 [N, H, W, 3]."""
        ...


class Player(Protocol):
    """A trained run, ready to be entered by any number of visitors."""

    axes: tuple[Axis, ...]
    height: int
    width: int
    num_seeds: int
    besides: tuple[str, ...]  # what can stand beside the dream here

    def facts(self) -> dict[str, Any]:
        """What a page needs to know beside the axes, as plain values."""
        ...

    def enter(self) -> Dream:
        """A walk of its own, at the first seed."""
        ...

    def simulator(self) -> dict[str, Any] | None:
        """How the simulator is rebuilt, for a recording made of what it showed."""
        ...
