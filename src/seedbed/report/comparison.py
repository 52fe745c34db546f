"""Better, worse or equal: two runs of one task by an evaluation, over what both have trained, against the noise of seeds."""

import contextlib
import math
import statistics
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from seedbed.config import diff, flat
from seedbed.errors import UserError
from seedbed.report import facts
from seedbed.track.run import Run
from seedbed.track.run_names import run_names
from seedbed.track.text import duration, number

Word = Literal["better", "worse", "equal", "unknown"]
Axis = Literal["step", "seconds"]
# Settings of the data that change how it is read or learned, and not what an evaluation measures.
_NOT_TASK = ("data.cache", "data.flip", "data.curriculum.", "data.test")
# Quantiles of Student's t at 99 %, by degrees of freedom from 1: so 1 % of equal pairs are called better, and 1 % worse.
_T99 = (31.82, 6.965, 4.541, 3.747, 3.365, 3.143, 2.998, 2.896, 2.821, 2.764)
_Z99 = 2.326


@dataclass(frozen=True)
class Curve:
    """The evaluations of a metric in one run, over steps or training seconds."""

    x: Sequence[float]
    y: Sequence[float]

    def at(self, x: float) -> float:
        """The value at x, interpolated; that of the nearest end outside of the range."""
        right = min(bisect_left(self.x, x), len(self.x) - 1)
        left = max(right - 1, 0)
        share = (x - self.x[left]) / ((self.x[right] - self.x[left]) or 1.0)
        return self.y[left] + min(max(share, 0.0), 1.0) * (self.y[right] - self.y[left])

    def fluctuation(self, end: float) -> tuple[float, int]:
        """Standard deviation about the trend over the later half up to `end`, and from how many values; NaN from too few."""
        known = [y for x, y in zip(self.x, self.y, strict=True) if end / 2 <= x <= end]
        # Second differences: a straight trend leaves nothing in them, and noise has six times its variance.
        bends = [a - 2 * b + c for a, b, c in zip(known, known[1:], known[2:], strict=False)]
        return (math.sqrt(statistics.fmean(b * b for b in bends) / 6) if bends else math.nan), len(bends)


@dataclass(frozen=True)
class Outcome:
    """The verdict on a run against another one, and the numbers behind it; `change` is by how much its value is larger."""

    word: Word
    why: str
    metric: str = ""
    change: float = math.nan
    band: float = math.nan
    end: float = math.nan
    num_seeds: tuple[int, int] = (1, 1)


def compare(
    mine: Run,
    base: Run,
    known: Iterable[tuple[Run, dict[str, Any]]],
    *,
    metric: str | None = None,
    axis: Axis = "step",
    events_of: Callable[[Run], list[dict[str, Any]]] = Run.events,
) -> Outcome:
    """The verdict by the metric that decides `best`, or another one. `known` are runs with their config.json, to find seeds."""
    configs = mine.config_json(), base.config_json()
    if reason := other_task(*configs):
        return Outcome("unknown", reason)
    (name, _), (theirs, _) = (facts.evaluations(events_of(run), metric) for run in (mine, base))
    if name is None or name != theirs:
        return Outcome("unknown", "no evaluation of the same metric")
    # Where settings are equal, the code is what is compared.
    by_code = _settings(configs[0]) == _settings(configs[1])
    if by_code and _code(mine) == _code(base):
        return Outcome("equal", "the same settings, so that seeds make the difference", name)
    known = list(known)
    groups = [seeds_of(run, known, by_code) for run in (mine, base)]
    first, second = ([curve(events_of(run), name, axis) for run in group] for group in groups)
    return judge(first, second, facts.is_higher_better(events_of(mine), name), name, axis)


def against(run: Run, parent: Run, metric: str | None = None) -> tuple[str, str]:
    """A title in a few words, and the numbers: at equal steps, and at equal time where that gives another verdict."""
    known = list(read_runs(run.path.parent))
    found, timed = (compare(run, parent, known, metric=metric, axis=axis) for axis in ("step", "seconds"))
    titles = {"better": "better than", "worse": "negative result: worse than", "equal": "no clear difference from"}
    title = f"{titles[found.word]} {parent.name}" if found.word in titles else f"done, not decided against {parent.name}"
    text = found.why
    if math.isfinite(found.change):
        side = "lower" if found.change < 0 else "higher"
        text = f"{found.metric} {number(abs(found.change))} {side} than {parent.name} {text}"
    if timed.word != found.word and math.isfinite(timed.change):
        text += f"; {timed.why}" if timed.word == "unknown" else f"; {timed.word} {timed.why}"  # why says unknown itself
    return title, text


def _code(run: Run) -> Any:
    """What identifies the code that a run was trained by: commit, uncommitted changes, and the source of this package."""
    patch = run.path / "code.patch"
    return [run.code_json().get(key) for key in ("commit", "source")], patch.read_bytes() if patch.is_file() else b""


def judge(mine: Sequence[Curve], base: Sequence[Curve], higher: bool, metric: str = "", axis: Axis = "step") -> Outcome:
    """Two settings by the best value up to where both first runs have come; the others are the same with other seeds."""
    end = min((curve.x[-1] if curve.x else 0.0) for curve in (mine[0], base[0]))
    if end <= 0:
        return Outcome("unknown", "they share no evaluation after step 0", metric)
    # The coarser grid of both: who evaluates more often has no more tries.
    places = min(([x for x in curve.x if 0 < x < end] for curve in (mine[0], base[0])), key=len)
    pick = max if higher else min
    values = [[pick(map(one.at, [*places, end])) for one in group if one.x and one.x[-1] >= 0.98 * end] for group in (mine, base)]
    change = statistics.fmean(values[0]) - statistics.fmean(values[1])
    num_seeds = len(values[0]), len(values[1])
    about = partial(Outcome, metric=metric, change=change, end=end, num_seeds=num_seeds)
    where = f"at {'step ' + number(end) if axis == 'step' else 'equal time, ' + duration(end)}"
    if (num_free := sum(num_seeds) - 2) < 1:
        noise, num = max((one[0].fluctuation(end) for one in (mine, base)), key=lambda found: (found[1] > 0, found[0]))
        band = quantile(num) * noise * math.sqrt(2) if num else math.nan
        if abs(change) <= band or not change:
            return about("equal", f"{where}: within the noise of evaluations of ±{number(band)} (one seed)", band=band)
        return about("unknown", f"{where}: one seed: unknown", band=band)
    spread = math.sqrt(sum((v - statistics.fmean(group)) ** 2 for group in values for v in group) / num_free)
    band = quantile(num_free) * spread * math.sqrt(1 / num_seeds[0] + 1 / num_seeds[1])
    seeds = f"({num_seeds[0]} and {num_seeds[1]} seeds)"
    if abs(change) <= band:
        return about("equal", f"{where}: within the noise band of ±{number(band)} {seeds}", band=band)
    word: Word = "better" if (change > 0) == higher else "worse"
    return about(word, f"{where}: outside the noise band of ±{number(band)} {seeds}", band=band)


def quantile(num_free: int) -> float:
    """Student's t at 99 %."""
    if num_free <= len(_T99):
        return _T99[num_free - 1]
    return _Z99 + (_Z99**3 + _Z99) / (4 * num_free) + (5 * _Z99**5 + 16 * _Z99**3 + 3 * _Z99) / (96 * num_free**2)


def other_task(mine: dict[str, Any], base: dict[str, Any]) -> str:
    """In what the tasks of two runs differ, by their config.json; empty where both are the same."""
    if mine["recipe"] != base["recipe"]:
        return f"another recipe: {mine['recipe']} and {base['recipe']}"
    apart = diff(flat(base["config"]), flat(mine["config"]))
    keys = [key for key in apart if key.startswith("data.") and not key.startswith(_NOT_TASK)]
    return f"another task: {', '.join(keys[:3])} differ{'s' if len(keys) == 1 else ''}" if keys else ""


def read_runs(root: Path) -> Iterator[tuple[Run, dict[str, Any]]]:
    """Every run of a folder with its config.json; damaged ones are left out."""
    for run in (Run(root / name) for name in run_names(root)):
        with contextlib.suppress(UserError):
            yield run, run.config_json()


def seeds_of(run: Run, known: Iterable[tuple[Run, dict[str, Any]]], by_code: bool = False) -> list[Run]:
    """The run, and further ones whose config (and code) differs in nothing but the seed, one for each seed."""
    own = run.config_json()
    found = {own["config"].get("seed"): run}
    for other, config in known:
        if _settings(config) == _settings(own) and (not by_code or _code(other) == _code(run)):
            found.setdefault(config["config"].get("seed"), other)
    return list(found.values())


def _settings(config: dict[str, Any]) -> Any:
    return config["recipe"], {**config["config"], "seed": None}


def curve(events: Iterable[dict[str, Any]], metric: str, axis: Axis = "step") -> Curve:
    """The evaluations of one metric; a resumed run may have repeated some, of which the last ones count."""
    both = [e for e in events if e.get("kind") == "eval" and all(facts.is_number(e.get(key)) for key in (axis, metric))]
    found = sorted({event[axis]: event[metric] for event in both}.items())
    return Curve(*zip(*found, strict=True)) if found else Curve((), ())
