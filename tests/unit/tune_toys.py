"""Small systems for the tests of the instruments: a regression with every kind of state, and a tiny language model."""

import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from seedbed.config import Config, Schedule
from seedbed.data.feed import Data, Source
from seedbed.recipes import Recipe
from seedbed.train.system import System
from seedbed.tune.workload import Workload

CPU = torch.device("cpu")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Rows(Source):
    """Points on a noisy plane."""

    def __init__(self, num_items: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(num_items, 4)).astype(np.float32)
        y = x @ np.array([1.0, -2.0, 0.5, 3.0], np.float32) + 0.1 * rng.normal(size=num_items).astype(np.float32)
        self.num_items = num_items
        self.arrays = {"x": x, "y": y.astype(np.float32)[:, None]}
        self.spans = {"x": 0, "y": 0}


class Regression(System):
    """A network with dropout, buffers that move, and state of its own: everything an instrument could leave disturbed."""

    def __init__(self, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, 1))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.calls = 0

    def loss(self, batch, engine):
        self.calls += 1
        self.seen += 1
        self.scratch += torch.rand_like(self.scratch)
        return F.mse_loss(self.net(batch["x"]), batch["y"]), {}

    def state(self):
        return {"calls": self.calls}

    def load_state(self, state):
        self.calls = state["calls"]


class Hungry(Regression):
    """Takes up to `most` items, then fails as it is told."""

    def __init__(self, most: int, error: Exception) -> None:
        super().__init__()
        self.most, self.error = most, error

    def loss(self, batch, engine):
        if len(batch["x"]) > self.most:
            raise self.error
        return super().loss(batch, engine)


class Talker(System):
    """One attention block and a head over a vocabulary; its formula counts every product once forward and twice backward."""

    def __init__(self, width: int = 32, heads: int = 2, vocab: int = 48, length: int = 16, wrong: float = 1.0) -> None:
        super().__init__()
        self.shape, self.wrong = (width, heads, vocab, length), wrong
        self.embed = nn.Embedding(vocab, width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.head = nn.Linear(width, vocab, bias=False)

    def loss(self, batch, engine):
        _, heads, vocab, length = self.shape
        tokens = batch["tokens"].long()
        x = self.embed(tokens[:, :-1])
        q, k, v = self.qkv(x).view(len(x), length, 3, heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        logits = self.head(x + self.out(y))
        return F.cross_entropy(logits.view(-1, vocab), tokens[:, 1:].reshape(-1)), {}

    def num_targets(self, batch):
        return batch["tokens"][:, 1:].numel()

    def flops_per_item(self):
        width, _, vocab, length = self.shape
        return self.wrong * length * (6 * (4 * width * width + vocab * width) + 12 * width * length)


class Windows(Source):
    def __init__(self, num_items: int, length: int, vocab: int) -> None:
        self.num_items = num_items
        self.arrays = {"tokens": np.random.default_rng(0).integers(0, vocab, num_items * length + 1).astype(np.uint8)}
        self.spans = {"tokens": length + 1}
        self.length = length

    def locate(self, epoch_B, index_B):
        return index_B * self.length


@dataclass(frozen=True)
class Model:
    width: int = 16
    dropout: float = 0.0


def config(**changes) -> Config:
    base = Config(model=Model(), data=None, schedule=Schedule(kind="constant", warmup=0.0), batch=8, steps=50, device="cpu")
    return dataclasses.replace(base, **changes)


def recipe(build, data) -> Recipe:
    """A recipe made of two functions of the config."""
    module = SimpleNamespace(open_data=data, build=build)
    return Recipe("toy", {"plain": config}, lambda part: module)


def workload(make=None, num_items: int = 256, where: torch.device = CPU, **changes) -> Workload:
    """A workbench around a regression, or around what `make(config)` returns."""
    cfg = config(**changes)
    build = make or (lambda c: Regression(c.model.width, c.model.dropout))
    data = Data(Rows(num_items), Rows(32, seed=1), {})
    return Workload("toy/plain", recipe(lambda c, d: build(c), lambda c: data), cfg, data, where)


def talker_recipe(**shape) -> tuple[Recipe, Data]:
    talker = Talker(**shape)
    _, _, vocab, length = talker.shape
    data = Data(Windows(40, length, vocab), Windows(4, length, vocab), {})
    return recipe(lambda c, d: Talker(**shape), lambda c: data), data
