"""Sampling of the next token from logits, and the start of the context window. B rows, V vocabulary."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from seedbed.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn: temperature 0 takes the likeliest; top_k 0 and top_p 1 are off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < math.inf:
            raise UserError(f"temperature={self.temperature} is out of range: 0 is greedy, 1 samples as trained")
        if self.top_k < 0:
            raise UserError(f"top_k={self.top_k} is out of range: 0 keeps all tokens, 40 the forty likeliest")
        if not 0.0 < self.top_p <= 1.0:
            raise UserError(f"top_p={self.top_p} is out of range: it must be above 0 and at most 1 (1 keeps all tokens)")


def pick(logits_BV: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """One token per row by the Gumbel-max trick: no division, no host, one shape."""
    if sampling.temperature == 0.0:
        return logits_BV.argmax(-1)
    logits_BV = logits_BV.float() / sampling.temperature
    if 0 < sampling.top_k < logits_BV.shape[-1]:
        floor_B1 = logits_BV.topk(sampling.top_k).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < floor_B1, -math.inf)
    if sampling.top_p < 1.0:
        logits_BV = logits_BV.masked_fill(logits_BV < _nucleus_floor(logits_BV, sampling.top_p), -math.inf)
    waits_BV = torch.empty_like(logits_BV).exponential_(generator=generator).clamp_min(1e-20)
    return (logits_BV - waits_BV.log()).argmax(-1)


def _nucleus_floor(logits_BV: Tensor, top_p: float) -> Tensor:
    """The smallest logit among the likeliest tokens that together reach `top_p`."""
    sorted_BV = logits_BV.sort(dim=-1, descending=True).values
    probs_BV = sorted_BV.softmax(-1)
    before_BV = probs_BV.cumsum(-1) - probs_BV
    last_B1 = (before_BV < top_p).sum(-1, keepdim=True) - 1
    return sorted_BV.gather(-1, last_B1.clamp_min(0))


def window_start(start: int, num_tokens: int, context: int) -> int:
    """Where the context window begins when a row holds `num_tokens`; a full window is reduced to its last half."""
    return start if num_tokens - start <= context else num_tokens - max(1, context // 2)
