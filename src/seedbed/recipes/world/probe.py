"""Probe of the world system for the checks, by the code of training. B windows, A control axes, H W pixels, N numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from seedbed.recipes.world.memory import POSE
from seedbed.recipes.world.objective import field_loss, field_targets, l1, open_window, rows_of
from seedbed.train.engine import EvalEngine
from seedbed.train.probe import Batch, Probe

if TYPE_CHECKING:
    from seedbed.recipes.world.emulator import Emulator
    from seedbed.recipes.world.system import World

# Standard deviation of an untrained field's colours. Measured: 0.06 to 0.13.
FAINT = 0.1


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
        at_init=lambda b: _noisy_persistence(system, b),
        # The training baseline is the noisy last frame, the evaluation baseline the clean one.
        baselines=lambda b: {
            "last frame with noise": _noisy_persistence(system, b),
            "persistence": l1(b["last"], b["target"]).item() + _untrained_field(system, b),
        },
        held=held_where_gradients_stop(system, batch),
    )


def held_where_gradients_stop(system: Emulator, batch: Batch) -> Callable[[], Callable[[], Tensor]] | None:
    """The training loss with the detached values of the fine pass held fixed: its images and its sample positions."""
    field = system.trunk.field
    if field is None or field.detail is None:
        return None

    engine = EvalEngine(system, system.config, next(system.parameters()).device)

    def held() -> Callable[[], Tensor]:
        edges, shown, render = Replayed(field._fine_edges), Replayed(lambda pictures: pictures), field.render_before_and_after

        def loss() -> Tensor:
            edges.turn = shown.turn = 0
            field._fine_edges = edges  # type: ignore[method-assign, assignment]
            field.render_before_and_after = lambda *given: (s := render(*given))._replace(rendered_B6HW=shown(s.rendered_B6HW))  # type: ignore[method-assign]
            try:
                return system.loss(batch, engine)[0]
            finally:
                del field._fine_edges, field.render_before_and_after

        with torch.no_grad():
            loss()
        return loss

    return held


class Replayed:
    """Records a function's results on the first pass and returns them, call by call, on later ones."""

    def __init__(self, real: Callable[..., Any]) -> None:
        self.real, self.turn = real, 0
        self.given: list[Any] = []

    def __call__(self, *given: Any) -> Any:
        if self.turn == len(self.given):
            self.given.append(self.real(*given))
        self.turn += 1
        return self.given[self.turn - 1]


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
