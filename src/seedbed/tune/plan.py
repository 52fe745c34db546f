"""plan: parameters, items, FLOP and memory of a run, and its hours and cost per GPU."""

import datetime
import difflib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from seedbed.config import Config
from seedbed.data.feed import Data
from seedbed.errors import UserError
from seedbed.recipes import Recipe
from seedbed.report.facts import is_number, median
from seedbed.track.flops import GPUS, TERA, Gpu
from seedbed.track.run import Run
from seedbed.tune.estimate import Estimate, estimate_costs

CHINCHILLA = 20.0
ASSUMED_MFU = 0.40
TOLERANCE = 0.01
GIB = 2**30
# In addition to the step: the CUDA context and libraries, and fragmentation.
CONTEXT, WASTE = 1 * GIB, 1.1
# Below this a step is bound by launches, not by arithmetic.
SHORT_STEP = 2e-3


@dataclass(frozen=True)
class Prices:
    """Dollars per GPU-hour by name, with the date of the user's file."""

    date: str
    by_gpu: dict[str, float]


@dataclass(frozen=True)
class Rate:
    """The MFU of a run: assumed, or measured in a named run."""

    mfu: float
    source: str

    @property
    def assumed(self) -> bool:
        return self.source == "assumed"


@dataclass(frozen=True)
class Cost:
    """One line of the table of GPUs."""

    gpu: str
    fits: bool
    hours: float
    steps: int
    dollars: float | None


@dataclass(frozen=True)
class Plan:
    estimate: Estimate
    items: int
    unique_items: int
    memory: dict[str, int]
    rate: Rate
    costs: list[Cost]
    prices: Prices | None
    notes: list[str]

    @property
    def flops_difference(self) -> float | None:
        """Relative difference between formula and count; None where one is missing."""
        estimate = self.estimate
        if not estimate.flops_formula or not estimate.flops_counted:
            return None
        return estimate.flops_formula / estimate.flops_counted - 1.0

    @property
    def needed(self) -> int:
        return int(sum(self.memory.values()) * WASTE) + CONTEXT

    def tokens(self) -> dict[str, float]:
        """Targets seen and unique, in all and per parameter, and the Chinchilla-optimal number."""
        each, num = self.estimate.targets_per_item, self.estimate.num_params
        seen, unique = self.items * each, self.unique_items * each
        return {
            "per_item": each,
            "seen": seen,
            "unique": unique,
            "seen_per_parameter": seen / num,
            "unique_per_parameter": unique / num,
            "chinchilla": CHINCHILLA * num,
        }

    def to_json(self) -> dict[str, Any]:
        extra = {"tokens": self.tokens(), "flops_difference": self.flops_difference, "memory_needed": self.needed}
        return {**asdict(self), **extra}


def read_prices(path: Path) -> Prices:
    """A file of the user's: {"date": "2026-05-01", "H100 SXM": 2.5}. Prices never come from code: they would be stale."""
    try:
        values = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"prices file {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"prices file {path} is not JSON: {error}") from None
    if not isinstance(values, dict) or "date" not in values:
        raise UserError(f'prices file {path} needs a date and prices per hour, such as {{"date": "2026-05-01", "H100 SXM": 2.5}}')
    date = str(values.pop("date"))
    try:
        datetime.date.fromisoformat(date)
    except ValueError:
        raise UserError(f"prices file {path}: date {date!r} is no day such as 2026-05-01") from None
    names = [gpu.name for gpu in GPUS]
    for name, price in values.items():
        if name not in names:
            near = [n for n in names if name.lower() in n.lower()] or difflib.get_close_matches(name, names, 1, 0.4)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise UserError(f"prices file {path} names {name!r}, which is not in the table{hint}\nthere are: {', '.join(names)}")
        if not is_number(price) or price <= 0:
            raise UserError(f"prices file {path}: {name} costs {price!r}, which is no price per hour")
    return Prices(date, {name: float(price) for name, price in values.items()})


def measured_rate(run: Run) -> Rate:
    """The median MFU of a run's rows."""
    found = median(run.rows(), "mfu")
    if not found:
        raise UserError(f"run {run.name} has no MFU in its rows: it is measured on a known GPU in bf16 or fp16 only")
    return Rate(found, f"measured in run {run.name}")


def make(recipe: Recipe, config: Config, data: Data, *, rate: Rate | None = None, prices: Prices | None = None) -> Plan:
    """Estimates the costs, then extrapolates to the run."""
    estimate = estimate_costs(recipe, config, data)
    rate = rate or Rate(ASSUMED_MFU, "assumed")
    memory = estimate.memory(config.batch // config.accum, sum(array.nbytes for array in data.train.arrays.values()))
    flops = estimate.flops_formula or estimate.flops_counted
    plan = Plan(estimate, config.steps * config.batch, data.train.num_items, memory, rate, costs=[], prices=prices, notes=[])
    plan.costs.extend(cost(gpu, plan.needed, flops, config, rate.mfu, prices) for gpu in GPUS)
    notes, difference = plan.notes, plan.flops_difference
    if difference is not None and abs(difference) > TOLERANCE:
        notes.append(f"formula and count differ by {difference:+.1%}, more than {TOLERANCE:.0%}: flops_per_item() is wrong")
    if not flops:
        notes.append("the system states no flops_per_item() and none could be counted: no times")
    if config.precision in ("fp32", "tf32"):
        words = f"the table's peaks are for bf16 and this config trains in {config.precision}"
        notes.append(f"{words}: expect several times the hours")
    slowest = min(gpu.bf16 for gpu in GPUS) * TERA * plan.rate.mfu
    if flops and flops * config.batch / slowest < SHORT_STEP:
        notes.append("a step is so small that launches bound it and not arithmetic: the hours are a lower limit")
    if not plan.estimate.fake_tensors:
        notes.append("the system needs real values, so it was run with one and two items")
    return plan


def cost(gpu: Gpu, needed: int, flops: float, config: Config, mfu: float, prices: Prices | None) -> Cost:
    """Hours for the run's steps on one GPU; with a time budget, the steps that it allows there."""
    per_step = flops * config.batch / (gpu.bf16 * TERA * mfu)
    steps = config.steps if not config.budget else int(config.budget / per_step) if per_step else 0
    hours = (config.budget or config.steps * per_step) / 3600.0
    price = prices.by_gpu.get(gpu.name) if prices else None
    return Cost(gpu.name, needed <= gpu.gib * GIB, hours, steps, None if price is None else hours * price)
