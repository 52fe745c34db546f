"""Errors in a recipe that training finds: methods under old names, metrics that are no tensors or that less would not improve."""

from typing import Any, NoReturn

import torch
from torch import Tensor

from seedbed.errors import UserError

RENAMED = {
    "players": "named_optimizers",
    "why_one_rank": "single_rank_reason",
    "working": "rank_local_buffers",
    "think": "inference_curve",
    "packs": "packable_keys",
    "envelope": "padded_config",
    "dials": "settings_tensors",
    "lesson": "stage_metric",
}


def refuse_old_names(cls: type) -> None:
    """Refuse a `System` that defines a method which has another name now: it would never be called."""
    for old in RENAMED.keys() & vars(cls).keys():
        raise UserError(f"{cls.__name__}.{old} is now called {RENAMED[old]}; rename it in the recipe")


def as_tensor(name: str, value: Any, device: torch.device) -> Tensor:
    """A measurement that a recipe gives as a Python number."""
    if not isinstance(value, int | float):
        raise UserError(f"the metric `{name}` is of type {type(value).__name__}; return a number, or a tensor of one element")
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # The graph would repeat the number of this step in all others.
        raise UserError(f"the metric `{name}` is a Python number, which a captured step cannot measure; set capture=off")
    return torch.full((), float(value), device=device)


def refuse_score(metric: str) -> NoReturn:
    """The error for a metric that is called a score, decides `best` and would be minimised."""
    fix = f'write higher_is_better = ("{metric}",) in the System, or return first a number of which less is better'
    raise UserError(f"evaluate: {metric} decides `best`, and its lowest value would count as the best; {fix}")
