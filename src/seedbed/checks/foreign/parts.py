"""What trains a model: given by the user, or asked of a Lightning module or a transformers model. Imports neither package."""

from __future__ import annotations

import contextlib
import copy
import inspect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from seedbed.errors import UserError

# Batches of a validation loader that one evaluation uses.
VALID_BATCHES = 8


@dataclass
class Parts:
    """A copy of the user's model with all that trains it."""

    model: nn.Module
    loss: Callable[[nn.Module, Any], Any]
    batches: Any
    optimizers: list[Optimizer]
    schedulers: list[Any]
    evaluate: Callable[[nn.Module], Mapping[str, float]] | None
    sample: Callable[[nn.Module], Any] | None
    valid: Any = None
    causal: bool = False
    shifts_targets: bool = False


def make_parts(model: Any, loss: Any, batches: Any, optimizer: Any, scheduler: Any, evaluate: Any, sample: Any) -> Parts:
    """Copies the model, its optimizers and schedulers together, and adds what a framework's module tells about itself."""
    if not isinstance(model, nn.Module):
        raise UserError(f"model is a {type(model).__name__}, not a torch.nn.Module")
    if isinstance(loss, nn.Module):
        example = "lambda model, batch: criterion(model(batch[0]), batch[1])"
        raise UserError(f"loss is called with the model and a batch; wrap the {type(loss).__name__}: {example}")
    try:
        made = copy.deepcopy((model, _listed(optimizer), _listed(scheduler)))
    except Exception as error:
        raise UserError(f"the model cannot be copied, and is not checked without that: {type(error).__name__}: {error}") from None
    parts = Parts(made[0].cpu(), loss, batches, made[1], made[2], evaluate, sample)
    if hasattr(model, "training_step"):
        _ask_lightning(parts)
    elif hasattr(getattr(model, "config", None), "model_type"):  # of transformers; causal ones shift their labels by one
        is_decoder = not getattr(model.config, "is_encoder_decoder", False)
        parts.causal = is_decoder and type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
        parts.shifts_targets = parts.causal and loss is None
        parts.loss = loss or (lambda model, batch: model(**batch))
    if parts.loss is None or parts.batches is None:
        raise UserError("loss(model, batch), which returns a scalar tensor, and batches, a list or a loader, are both needed")
    return parts


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def scalar(value: Any) -> Tensor:
    """The loss in what a loss function or a training step returned."""
    found = value.get("loss") if isinstance(value, Mapping) else value[0] if isinstance(value, tuple) and value else value
    if not isinstance(found, Tensor):
        raise UserError(f"the loss function returned {type(found).__name__}; return the scalar tensor itself, without item()")
    return found


def _ask_lightning(parts: Parts) -> None:
    """A LightningModule, or a module with the same methods: training_step, configure_optimizers, loaders, validation_step."""
    model: Any = parts.model
    if not getattr(model, "automatic_optimization", True):
        raise UserError("training_step optimises by itself (automatic_optimization=False): give a loss(model, batch) of one step")
    parts.loss = parts.loss or (lambda model, batch: _step(model.training_step, batch))
    with contextlib.suppress(Exception):  # it may need a trainer, or be missing: Lightning raises errors of its own
        if not parts.optimizers:
            parts.optimizers, parts.schedulers = _configured(model.configure_optimizers())
    with contextlib.suppress(Exception):
        parts.batches = model.train_dataloader() if parts.batches is None else parts.batches
    with contextlib.suppress(Exception):
        parts.valid = _listed(model.val_dataloader())[0]
        batches = list(itertools.islice(parts.valid, VALID_BATCHES))
        parts.evaluate = parts.evaluate or (lambda model: _validate(model, batches))


def _step(method: Any, batch: Any, number: int = 0) -> Any:
    return method(batch, number) if len(inspect.signature(method).parameters) > 1 else method(batch)


def _configured(value: Any) -> tuple[list[Optimizer], list[Any]]:
    """Optimizers and schedulers in any of the forms that configure_optimizers may return."""
    if isinstance(value, tuple) and len(value) == 2 and all(isinstance(part, list | tuple) for part in value):
        value = [*value[0], *({"lr_scheduler": scheduler} for scheduler in value[1])]
    found = [entry if isinstance(entry, Mapping) else {"optimizer": entry} for entry in _listed(value)]
    schedulers = [entry["lr_scheduler"] for entry in found if entry.get("lr_scheduler") is not None]
    named = [scheduler["scheduler"] if isinstance(scheduler, Mapping) else scheduler for scheduler in schedulers]
    return [entry["optimizer"] for entry in found if "optimizer" in entry], named


@torch.no_grad()
def _validate(model: Any, batches: list[Any]) -> dict[str, float]:
    """What validation_step returns or logs, in evaluation mode, as a trainer runs it."""
    seen: dict[str, float] = {}

    def log(name: str, value: Any, *args: Any, **options: Any) -> None:
        seen[f"{name} {len(seen)}"] = float(value) if isinstance(value, Tensor | float) else 0.0

    model.eval().log = log
    for number, batch in enumerate(batches):
        log("validation_step", _step(model.validation_step, batch, number))
    del model.train().log
    return seen
