"""What a sweep varies: axes read from the command line, and their cells, corners first."""

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from seedbed import config as configs
from seedbed.config import Config, keys
from seedbed.errors import UserError
from seedbed.track.text import format_value

MAX_TRIALS = 10_000

_NUMBER = r"[+-]?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})(?:\.\.({_NUMBER}))?(?:x(\d+))?")
_SPELLINGS = "write 1..4, 1..9..2 or, evenly spaced by factors, 1e-4..1e-2x5"


@dataclass(frozen=True)
class Axis:
    key: str
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Span:
    """A key and the range that a suggester chooses from; `log` when its ends are a factor of ten or more apart."""

    key: str
    low: float
    high: float
    step: int | None
    log: bool

    def value(self, number: float) -> Any:
        return int(number) if self.step else float(f"{number:.6g}")


@dataclass(frozen=True)
class Grid:
    axes: tuple[Axis, ...]
    spans: tuple[Span, ...]
    fixed: dict[str, Any]

    @property
    def num_cells(self) -> int:
        return math.prod(len(axis.values) for axis in self.axes)


def words(settings: dict[str, Any]) -> list[str]:
    return [f"{key}={format_value(value)}" for key, value in settings.items()]


def read(base: Config, assignments: Sequence[str], num_seeds: int | None, suggest: bool = False) -> Grid:
    """The grid of a command line; with `suggest`, plain ranges are left to the suggester."""
    axes: list[Axis] = []
    spans: list[Span] = []
    fixed: dict[str, Any] = {}
    seen: set[str] = set()
    for word in assignments:
        key, equals, text = word.partition("=")
        if not equals:
            configs.override(base, [word])
        if key in seen:
            raise UserError(f"{key} is given twice; put all its values into one list: {key}=a,b,c")
        seen.add(key)
        found = _read_one(base, key, text, suggest)
        if isinstance(found, Span):
            spans.append(found)
        elif len(found) > 1:
            axes.append(Axis(key, tuple(found)))
        else:
            fixed[key] = found[0]
    return _with_seeds(base, Grid(tuple(axes), tuple(spans), fixed), num_seeds)


def _with_seeds(base: Config, grid: Grid, num_seeds: int | None) -> Grid:
    if num_seeds is None:
        return grid
    if num_seeds < 1:
        raise UserError("--seeds 0 leaves nothing to train; name one or more")
    if any(part.key == "seed" for part in (*grid.axes, *grid.spans)):
        raise UserError("seed=... and --seeds both name seeds; give one of them")
    fixed = dict(grid.fixed)
    first = fixed.pop("seed", base.seed)
    if num_seeds == 1:
        return Grid(grid.axes, grid.spans, {**fixed, "seed": first})
    return Grid((*grid.axes, Axis("seed", tuple(range(first, first + num_seeds)))), grid.spans, fixed)


def _read_one(base: Config, key: str, text: str, suggest: bool) -> list[Any] | Span:
    kind = keys.kind_of(base, key)
    kinds = {kind, *get_args(kind)}
    if not text and not kinds & {str}:
        raise UserError(f"{key}= names no values; write {key}=a,b,c")
    parts = _parts(kind, text)
    if suggest and len(parts) == 1 and (found := _RANGE.fullmatch(parts[0])) and not found[4]:
        return _span(key, parts[0], found, whole=float not in kinds)
    texts = [value for part in parts for value in _expanded(key, part, bool(kinds & {int, float}))]
    if len(texts) > 1 and not all(texts):
        raise UserError(f"{key}={text} has an empty value")
    values = [configs.parsed(base, key, value) for value in texts]
    for value in values:
        if values.count(value) > 1:
            raise UserError(f"{key}={text} names {format_value(value)} twice")
    return values


def _parts(kind: Any, text: str) -> list[str]:
    """The listed values: separated by commas, or by | where values contain commas."""
    if "|" in text:
        return text.split("|")
    is_tuple = any(getattr(k, "__origin__", k) is tuple for k in (kind, *get_args(kind)))
    return [text] if is_tuple else text.split(",")


def takes_commas(base: Config, assignments: Sequence[str]) -> list[str]:
    """The assignments whose commas belong to one value, because the key holds several."""
    pairs = [word.partition("=") for word in assignments]
    return [
        f"{key}={text}"
        for key, _, text in pairs
        if "," in text and "|" not in text and len(_parts(keys.kind_of(base, key), text)) == 1
    ]


def _expanded(key: str, part: str, numeric: bool) -> list[str]:
    """A range as a list of values; anything else unchanged."""
    found = _RANGE.fullmatch(part)
    if not found:
        if numeric and ".." in part:
            raise UserError(f"{key}={part} is not a range; {_SPELLINGS}")
        return [part]
    low, high, step, num = found.groups()
    if step and num:
        raise UserError(f"{key}={part}: a range has a step or a number of values, not both")
    if not float(low) < float(high):
        raise UserError(f"{key}={part} is an empty range: {low} is not below {high}")
    if num:
        return _by_factors(key, part, low, high, int(num))
    return _by_steps(key, part, low, high, step or "1")


def _by_steps(key: str, part: str, *ends: str) -> list[str]:
    if not all(float(end).is_integer() for end in ends):
        raise UserError(f"{key}={part} runs between numbers that are not whole; say how many values: {key}={part}x5")
    low, high, step = (int(float(end)) for end in ends)
    if step < 1:
        raise UserError(f"{key}={part}: a step of {step} leads nowhere; {_SPELLINGS}")
    if (high - low) // step >= MAX_TRIALS:
        raise UserError(f"{key}={part} has more than {MAX_TRIALS:,} values")
    return [str(value) for value in range(low, high + 1, step)]


def _by_factors(key: str, part: str, low: str, high: str, num: int) -> list[str]:
    first, last = float(low), float(high)
    if first <= 0 or not 2 <= num <= MAX_TRIALS:
        raise UserError(f"{key}={part}: values apart by a factor need two or more of them and a range above 0")
    inner = [first * (last / first) ** (i / (num - 1)) for i in range(1, num - 1)]
    whole = all(float(end).is_integer() for end in (low, high))
    return [low, *(str(round(value)) if whole else f"{value:.3g}" for value in inner), high]


def _span(key: str, part: str, found: re.Match[str], whole: bool) -> Span:
    low, high = float(found[1]), float(found[2])
    if not low < high:
        raise UserError(f"{key}={part} is an empty range: {found[1]} is not below {found[2]}")
    if not whole:
        if found[3]:
            raise UserError(f"{key}={part}: a step is for whole numbers; list the values instead: {key}=a,b,c")
        return Span(key, low, high, None, log=low > 0 and high / low >= 10)
    step = float(found[3] or 1)
    if not (low.is_integer() and high.is_integer() and step.is_integer() and step >= 1):
        raise UserError(f"{key}={part}: the ends and the step of this range must be whole numbers")
    return Span(key, low, high, int(step), log=False)


def cells(grid: Grid) -> list[dict[str, Any]]:
    """Every combination; for each seed the corners come first, then the edges, then the interior."""
    if grid.num_cells > MAX_TRIALS:
        raise UserError(f"that makes {grid.num_cells:,} trials; {MAX_TRIALS:,} at most")
    axes = grid.axes

    def rank(place: Sequence[int]) -> tuple[Any, ...]:
        seed = sum(i for axis, i in zip(axes, place, strict=True) if axis.key == "seed")
        inner = sum(0 < i < len(axis.values) - 1 for axis, i in zip(axes, place, strict=True) if axis.key != "seed")
        return seed, inner, *place

    found = sorted(itertools.product(*(range(len(axis.values)) for axis in axes)), key=rank)
    return [{axis.key: axis.values[i] for axis, i in zip(axes, place, strict=True)} for place in found]


def config_of(base: Config, grid: Grid, settings: dict[str, Any]) -> Config:
    """The config of one cell; errors name the cell."""
    try:
        return configs.override(base, words({**grid.fixed, **settings}))
    except UserError as problem:
        raise UserError(f"the cell {' '.join(words(settings))} cannot be trained: {problem}") from None


def to_json(grid: Grid) -> dict[str, Any]:
    spans = {s.key: {"low": s.low, "high": s.high, "step": s.step, "log": s.log} for s in grid.spans}
    return {"axes": {axis.key: list(axis.values) for axis in grid.axes}, "spans": spans, "fixed": grid.fixed}


def from_json(values: dict[str, Any]) -> Grid:
    axes = tuple(Axis(key, tuple(map(_hashable, found))) for key, found in values["axes"].items())
    spans = tuple(Span(key, **found) for key, found in values["spans"].items())
    return Grid(axes, spans, {key: _hashable(value) for key, value in values["fixed"].items()})


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
