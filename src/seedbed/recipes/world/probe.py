"""The world system opened up for the checks, by the code that trains it. B windows, A control axes, H W pixels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from seedbed.recipes.world.memory import POSE
from seedbed.recipes.world.objective import l1, open_window, rows_of
from seedbed.train.probe import Batch, Probe

if TYPE_CHECKING:
    from seedbed.recipes.world.system import World


def open_up(system: World, batch: Batch) -> Probe:
    """One step on true memories with the noise of training; the target is not among what the network is given."""
    window = open_window(rows_of(batch), system.layout)
    level_B, real_B = system.noises.levels(window)
    seen = system.noises.context(window, real_B)
    opened = {
        **seen,
        "action": window.action_BA,
        "level": level_B,
        "noise": system.noises.own(window),
        "target": window.target_B3HW,
        "last": window.memory.last,
    }
    return Probe(
        batch=opened,
        predict=lambda b: _predict(system, b),
        objective=lambda y_B3HW, b: l1(y_B3HW, b["target"]),
        inputs="m1",
        targets="target",
        ranges={"frames": (0, 255), "action": (-4.0, 4.0)},
        oracle=lambda b: b["target"],
        lower_bound=0.0,
        uses=("action",),
        at_init=_as_given,
        # Training sees noise, so its loss is held against the frame as given; evaluation against the clean one.
        baselines=lambda b: {"last frame as given": _as_given(b), "copy-last": l1(b["last"], b["target"]).item()},
    )


def _as_given(b: Batch) -> float:
    """The last frame with its noise: what the network answers at birth, when all it adds is zero."""
    return l1(b["m1"][:, -3:], b["target"]).item()


def _predict(system: World, b: Batch) -> Tensor:
    memory = {name: b[name] for name in (*system.layout.names(), POSE) if name in b}
    return system.net(memory, b["action"], b["level"], b["noise"])
