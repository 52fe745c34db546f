"""The curriculum of sample lengths: pure functions over one small tensor, the stage, kept on the device and in checkpoints.

Shape suffixes: B samples, S entries of the stage.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from seedbed.nn import rng
from seedbed.recipes.thinker.presets import CurriculumConfig

STAGED = ("gated", "mixed")


class Stage(NamedTuple):
    """The entries of a stage by name, in the order of the tensor."""

    longest: Tensor  # n_max: the longest samples shown at this stage
    hits: Tensor  # right answers on samples of that length in the present window
    count: Tensor  # how many such samples there were
    age: Tensor  # steps since the last promotion
    promotions: Tensor
    accuracy: Tensor  # of the last whole window


def first(config: CurriculumConfig, length: int) -> Tensor:
    """The stage before step 0, for samples up to `length` in the end."""
    return torch.tensor([min(config.start, length) if config.kind in STAGED else length, 0, 0, 0, 0, 0], dtype=torch.float32)


def read(stage_S: Tensor) -> Stage:
    return Stage(*stage_S.unbind(-1))


def limit(stage_S: Tensor) -> Tensor:
    """The longest length of the stage as int64."""
    return stage_S[..., 0].to(torch.int64)


def lengths(key_B: Tensor, limit: Tensor | int, config: CurriculumConfig, length: int) -> Tensor:
    """The length of each sample: at most `limit`, except for the share of a mixed curriculum that is drawn from the full range;
    for `mostly`, all but that share have the full length."""
    if config.kind == "fixed":
        return torch.full_like(key_B, length)
    word_B2 = rng.bits(key_B, 2)
    wide_B = word_B2[..., 1] < int(config.share * 2**32)
    if config.kind == "mixed":
        limit = torch.where(wide_B, length, limit)
    drawn_B = 1 + (word_B2[..., 0] * limit >> 32)
    return torch.where(wide_B, drawn_B, length) if config.kind == "mostly" else drawn_B


def on_longest(length_B: Tensor, stage_S: Tensor) -> Tensor:
    """Which samples have the longest length of the stage: those that decide about a promotion."""
    return length_B == limit(stage_S)


def advance(stage_S: Tensor, hits: Tensor, count: Tensor, config: CurriculumConfig, length: int) -> Tensor:
    """The stage after a step with `hits` right among `count` samples of the longest length.

    At the end of every window its accuracy decides; a window without such a sample does not promote.
    """
    if config.kind not in STAGED:
        return stage_S
    old = read(stage_S)
    hits, count, age = old.hits + hits, old.count + count, old.age + 1
    full = age % config.window == 0
    accuracy = torch.where(full, hits / count.clamp_min(1), old.accuracy)
    # Scaled by the count, so that no quotient is rounded.
    passed = full & (count > 0) & (hits >= config.threshold * count) & (age >= config.min_steps) & (old.longest < length)
    new = Stage(
        longest=old.longest + passed,
        hits=torch.where(full, 0, hits),
        count=torch.where(full, 0, count),
        age=torch.where(passed, 0, age),
        promotions=old.promotions + passed,
        accuracy=accuracy,
    )
    return torch.stack([entry.to(stage_S.dtype) for entry in new], -1)
