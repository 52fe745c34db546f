"""What a change should do to the speed, said before it is measured: a step's parts on paper, times measured rates."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from seedbed import config as configs
from seedbed.config import Config
from seedbed.data.feed import Data
from seedbed.tune.ablate.rates import SHORTEST_KERNEL, Rates
from seedbed.tune.ablate.tally import Tally, count
from seedbed.tune.bench import Bench

# Of the bytes and the calls of plain code, what a compiler leaves; and what it leaves when it sees the backward pass only.
FUSED = (0.4, 0.3)
FUSED_BACKWARD = (0.65, 0.6)
# How much faster 8-bit products are than 16-bit ones once their scales are counted; torchao states 1.2 to 1.5 for whole models.
FLOAT8_GAIN = 1.4
# Below this difference a prediction is that nothing happens.
NOTHING = 0.005

_WHY_NOTHING = {
    "compile_optimizer": "the update is one fused pass already, and a small part of the step",
    "compile_autograd": "backward passes of compiled modules are compiled already",
}


@dataclass(frozen=True)
class Prediction:
    """A ratio of items per second against the baseline, and why."""

    ratio: float
    basis: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Parts:
    """The seconds of a step on paper, by what they are spent on."""

    matmul: float
    attention: float
    memory: float
    launches: float
    update: float

    @property
    def total(self) -> float:
        return sum(getattr(self, part.name) for part in fields(self))

    def told(self) -> str:
        shares = {part.name: getattr(self, part.name) / self.total for part in fields(self)}
        return ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= NOTHING)


class Oracle:
    """Predicts the rows of one report. Shapes are counted once per model, and every shape's rate is measured once."""

    def __init__(self, bench: Bench, data_of: Callable[[Config], Data]) -> None:
        self.bench, self.data_of, self.rates = bench, data_of, Rates(bench.device)
        self._tallies: dict[str, Tally] = {}

    def predict(self, axis: str, config: Config) -> Prediction:
        """The ratio for a config, with its reason; that nothing will happen is a prediction too."""
        base = self.bench.config
        if config.float8 and not self.tally(config).float8_share:
            return Prediction(1.0, "no effect expected: 0 layers are large enough to be converted")
        work = self.flops_per_item(config) / (self.flops_per_item(base) or 1.0)
        try:
            before, after = self.parts(base), self.parts(config)
        except torch.OutOfMemoryError:
            return Prediction(1.0 / (work or 1.0), f"executed FLOP per item x{work:.2f} alone: its parts do not fit to be timed")
        ratio = (config.batch / after.total) / (base.batch / before.total)
        if abs(ratio - 1.0) < NOTHING:
            return Prediction(1.0, f"no effect expected: {self._why_nothing(axis)}")
        told = f"executed FLOP per item x{work:.2f}; " if abs(work - 1.0) >= NOTHING else ""
        steps = f"{before.total * 1e3:.3g} -> {after.total * 1e3:.3g} ms"
        return Prediction(ratio, f"{told}step on paper {steps} at measured rates ({after.told()})")

    def _why_nothing(self, axis: str) -> str:
        if axis == "capture":
            cuda = self.bench.device.type == "cuda"
            return "on paper the host keeps ahead of the device" if cuda else "there are no CUDA graphs here"
        return _WHY_NOTHING.get(axis, "the same work on paper")

    def flops_per_item(self, config: Config) -> float:
        """Of the matrix products and attentions that really run, those of recomputation included."""
        return self.tally(config).flops / config.batch

    def overhead(self, config: Config) -> float:
        """By how much recomputation multiplies the FLOP of a step."""
        plain = self.tally(dataclasses.replace(config, recompute="none"))
        return self.tally(config).flops / (plain.flops or 1.0)

    def tally(self, config: Config) -> Tally:
        """The shapes of a step. They do not depend on how it is run, except for what is recomputed."""
        settings = [word for word in configs.PLAIN if not word.startswith("recompute=")]
        plain = configs.override(config, [*settings, "device=cpu"])
        key = configs.digest(plain)
        if key not in self._tallies:
            self._tallies[key] = count(self.bench.recipe, plain, self.data_of(config))
        return self._tallies[key]

    def parts(self, config: Config) -> Parts:
        """A step taken apart, each part at the rate that was measured for its shape."""
        rates, tally, precision = self.rates, self.tally(config), config.precision
        matmul = _sum(tally.products, lambda product: rates.product(product, precision))
        if config.float8:
            matmul *= 1.0 - tally.float8_share * (1.0 - 1.0 / FLOAT8_GAIN)
        attention = _sum(tally.attended, lambda call: rates.attended(call, precision, config.attention))
        bytes_left, calls_left = _left_over(config)
        memory = tally.bytes * bytes_left / rates.bandwidth
        update = _sum(tally.update_products, lambda product: rates.product(product, precision))
        update += tally.update_bytes / rates.bandwidth
        busy = matmul + attention + memory + update
        return Parts(matmul, attention, memory, self._launches(config, calls_left, busy), update)

    def _launches(self, config: Config, calls_left: float, busy: float) -> float:
        """The time in which nothing is computed: on a host that of every call, on a GPU what the host is behind."""
        cuda, calls = self.bench.device.type == "cuda", self.tally(config).num_ops * calls_left
        if cuda and config.capture != "off":
            return calls * SHORTEST_KERNEL
        host = calls * self.rates.per_op
        if config.recompute != "none" and config.compile == "off":
            again = self.tally(config).num_ops - self.tally(dataclasses.replace(config, recompute="none")).num_ops
            host += again * self.rates.recomputed(config.recompute)
        return max(calls * SHORTEST_KERNEL, host - busy) if cuda else host


def product(ratios: Iterable[float], names: Iterable[str]) -> Prediction:
    """What changes should give together if each gives what it gave alone."""
    total = 1.0
    for ratio in ratios:
        total *= ratio
    return Prediction(total, f"the product of what was measured one by one: {', '.join(names)}")


def _left_over(config: Config) -> tuple[float, float]:
    if config.compile != "off":
        return FUSED
    return FUSED_BACKWARD if config.compile_autograd else (1.0, 1.0)


def _sum(calls: list[Any], seconds: Callable[[Any], float]) -> float:
    return sum(seconds(call) * num for call, num in Counter(calls).items())
