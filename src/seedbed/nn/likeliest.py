"""Sampling among the likeliest tokens: the first k, or those that together reach a probability. B rows, V vocabulary."""

import math

from torch import Tensor

from seedbed.nn.decoding import Sampling


def only_likeliest(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """Minus infinity for all tokens that `top_k` and `top_p` leave out."""
    if 0 < sampling.top_k < logits_BV.shape[-1]:
        floor_B1 = logits_BV.topk(sampling.top_k).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < floor_B1, -math.inf)
    if sampling.top_p < 1.0:
        # The smallest logit among the likeliest tokens that together reach `top_p`.
        sorted_BV = logits_BV.sort(dim=-1, descending=True).values
        probs_BV = sorted_BV.softmax(-1)
        before_BV = probs_BV.cumsum(-1) - probs_BV
        last_B1 = (before_BV < sampling.top_p).sum(-1, keepdim=True) - 1
        logits_BV = logits_BV.masked_fill(logits_BV < sorted_BV.gather(-1, last_B1.clamp_min(0)), -math.inf)
    return logits_BV
