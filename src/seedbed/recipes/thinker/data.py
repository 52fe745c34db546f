"""Generated samples as a source: a batch is a pure function of its sample counters, the seed and the curriculum's limit.

Shape suffixes: B samples, N input tokens, M output tokens.
"""

import copy
import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from seedbed import config as configs
from seedbed.config import Config
from seedbed.data.feed import Data, Source
from seedbed.data.store import digest
from seedbed.nn import rng
from seedbed.recipes.thinker import curriculum
from seedbed.recipes.thinker.addition import Addition
from seedbed.recipes.thinker.presets import CurriculumConfig, DataConfig
from seedbed.recipes.thinker.task import Samples, Task
from seedbed.recipes.thinker.tasks import find_task

# Streams of randomness, (samples, lengths) each. The model's own draws take numbers from FREE_STREAM on.
TRAIN_STREAMS, VALID_STREAMS, FREE_STREAM = (0, 1), (2, 3), 16
# Every run is evaluated on the same samples, whatever its seed.
VALID_SEED = 0


class TaskSource(Source):
    """An endless generator. `limit`, when a system sets it, gives the curriculum's longest length as a tensor."""

    num_items = 0

    def __init__(self, task: Task, lengths: CurriculumConfig, seed: int, streams: tuple[int, int]) -> None:
        self.task, self.curriculum, self.seed, self.streams = task, lengths, seed, streams
        self.length = task.length
        self.shape = task.shape(task.length)
        self.period = 0
        self.limit: Callable[[], Tensor | None] = lambda: None

    def make(self, index_B: Tensor, seed: Tensor | int, limit: Tensor | None = None) -> dict[str, Tensor]:
        """The samples with these counters: x (B, N), y (B, M), keep and learn (B, M), length and index (B)."""
        index_B = index_B % self.period if self.period else index_B
        sample, size = self.streams
        # The stage is where its system is, which need not be where samples are wanted.
        limit_or_all = self.length if limit is None else limit.to(index_B.device)
        length_B = curriculum.lengths(rng.keys(seed, index_B, size), limit_or_all, self.curriculum, self.length)
        made = self.task.make(rng.keys(seed, index_B, sample), length_B, self.shape)
        return _named(made, length_B, index_B)

    def batch(self, raw: dict[str, Tensor]) -> dict[str, Tensor]:
        return self.make(raw["index"], self.seed, self.limit())

    def first(self, num: int) -> "TaskSource":
        """The first `num` samples over and over."""
        part = copy.copy(self)
        part.period = min(num, self.period or num)
        return part

    def at(self, length: int) -> "TaskSource":
        """Samples of exactly this length, which may exceed what training shows."""
        part = copy.copy(self)
        part.curriculum = dataclasses.replace(self.curriculum, kind="fixed")
        part.length, part.shape = length, self.task.shape(length)
        return part

    @property
    def num_pairs(self) -> int:
        """How many pairs of operands there are to add; 0 for other tasks, whose samples are too many to list."""
        return self.task.num_pairs if isinstance(self.task, Addition) else 0

    def all_pairs(self, start: int, count: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """The pairs with the numbers start .. start + count - 1 as a batch, and `held`: whether training never shows them."""
        assert isinstance(self.task, Addition) and start >= 0 and start + count <= self.num_pairs
        number_B = torch.arange(start, start + count, device=device)
        a_B, b_B = self.task.pairs(number_B)
        made = self.task.write(a_B, b_B, self.task.shape(self.task.length))
        return _named(made, self.task.sample_lengths(a_B, b_B), number_B) | {"held": self.task.is_held(a_B, b_B)}

    def example(self) -> str:
        batch = self.make(torch.tensor([0]), self.seed)
        x, y = (self.task.to_text(batch[name][0].tolist()) for name in ("x", "y"))
        return f"x: {x} -> y: {y}"


def _named(made: Samples, length_B: Tensor, index_B: Tensor) -> dict[str, Tensor]:
    return {"x": made.x_BN, "y": made.y_BM, "keep": made.keep_BM, "learn": made.learn_BM, "length": length_B, "index": index_B}


def _fingerprint(wanted: DataConfig) -> str:
    """The hash of everything that samples depend on; evaluation settings are not part of it."""
    values = configs.to_json(wanted)
    used = {name: values[name] for name in ("task", "length", "vocab", "base", "max_value", "held", "curriculum")}
    return digest(used)[:16]


def open_data(config: Config) -> Data:
    """The task of `config.data`, for training and for evaluation, from independent streams."""
    wanted = config.data
    task = find_task(wanted.task, wanted.vocab, wanted.length, wanted.base, wanted.max_value, wanted.held)
    shown, hidden = (task.picking("free"), task.picking("held")) if isinstance(task, Addition) else (task, task)
    train = TaskSource(shown, wanted.curriculum, config.seed, TRAIN_STREAMS)
    valid = TaskSource(hidden, wanted.curriculum, VALID_SEED, VALID_STREAMS)
    facts = {
        "name": task.name,
        "fingerprint": _fingerprint(wanted),
        "example": train.example(),
        "length": task.length,
        **dataclasses.asdict(train.shape),
    }
    return Data(train, valid, facts)
