"""The report of a sweep as text and as HTML: settings ranked over their seeds, noise, a heat-map, the command of the best."""

import itertools
import math
import os
import shlex
import statistics
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seedbed.report import html_page, html_report, journal
from seedbed.report.comparison import quantile
from seedbed.report.heatmap import Panel, draw_panels
from seedbed.report.html_page import card, embedded, folded, pairs, section, text
from seedbed.track import code, files, jsonl
from seedbed.track.run import Run
from seedbed.track.text import clip, format_value, number, one_line, table
from seedbed.tune.sweep.folder import DIVERGED, Sweep, TrialStatus
from seedbed.tune.sweep.grid import Axis, words

LEAST_CELLS = 4
MAX_PANELS = 12
_NUM_CURVES = 6


@dataclass(frozen=True)
class Cell:
    """All seeds of one setting."""

    settings: dict[str, Any]
    seeds: tuple[TrialStatus, ...]

    @property
    def values(self) -> list[float]:
        return [s.best for s in self.seeds if s.state in ("done", "stopped early") and s.best is not None]

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values) if self.values else None

    @property
    def sd(self) -> float | None:
        """The standard deviation over seeds; None for a single one."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def num_diverged(self) -> int:
        return sum(s.state in DIVERGED for s in self.seeds)

    def rank(self) -> tuple[Any, ...]:
        """Best first; settings with a diverged seed last."""
        return self.mean is None, self.num_diverged > 0, self.seeds[0].sign * (self.mean or 0.0)

    def to_json(self) -> dict[str, Any]:
        spread = {"min": min(self.values, default=None), "max": max(self.values, default=None)}
        counts = {"num_seeds": len(self.seeds), "num_ended": len(self.values), "num_spoiled": self.num_diverged}
        trials = [s.trial.number for s in self.seeds]
        return {"settings": self.settings, "mean": self.mean, "sd": self.sd, **spread, **counts, "trials": trials}


@dataclass(frozen=True)
class Report:
    sweep: Sweep
    statuses: tuple[TrialStatus, ...]
    cells: tuple[Cell, ...]

    @property
    def metric(self) -> str:
        return next((s.metric for s in self.statuses if s.metric), "best")

    @property
    def sign(self) -> int:
        """-1 where more of the metric is better."""
        return min((s.sign for s in self.statuses), default=1)

    @property
    def goal(self) -> str:
        return f"{self.metric}, {'higher' if self.sign < 0 else 'lower'} is better"

    @property
    def counts(self) -> dict[str, int]:
        return dict(Counter(s.state for s in self.statuses))

    @property
    def best(self) -> Cell | None:
        return self.cells[0] if self.cells and self.cells[0].mean is not None else None

    def notes(self) -> list[str]:
        """Which differences are significant, in sentences."""
        best, known = self.best, [cell for cell in self.cells if cell.mean is not None]
        if best is None and (metrics := {name for s in self.statuses for name in s.metrics}):
            return [f"no trial has evaluated {self.metric}; there are: {', '.join(sorted(metrics))}"]
        if best is None or len(known) < 2:
            return []
        same = sum(cell.mean == best.mean for cell in known)
        if same > 1:
            return [f"{same} settings share the best value"]
        pairs = [(len(cell.values) - 1, cell.sd) for cell in known if cell.sd is not None]
        if not pairs:
            return ["one seed per setting: the noise is not known; --seeds 3 would measure it"]
        # The standard deviation over seeds, pooled over the settings.
        noise = math.sqrt(math.fsum(n * sd * sd for n, sd in pairs) / sum(n for n, _ in pairs))
        apart = quantile(sum(n for n, _ in pairs))
        near = [cell for cell in known[1:] if _is_near(best, cell, apart * noise) and not cell.num_diverged]
        size = f"seeds vary by ±{number(noise)}"
        if not near:
            return [f"the best setting is significant: {size}, and the next differs by more"]
        names = ", ".join(" ".join(words(cell.settings)) for cell in near[:3])
        names += f" and {len(near) - 3} more" if len(near) > 3 else ""
        return [f"not distinguishable from the best ({size}): {names}"]

    def command(self) -> str | None:
        """The command that trains the best trial again."""
        if self.best is None:
            return None
        ended = [s for s in self.best.seeds if s.best is not None and s.state in ("done", "stopped early")]
        best = min(ended, key=lambda s: (s.sign * (s.best or 0.0), s.trial.number))
        return shlex.join(["seedbed", "train", self.sweep.title(), *words({**self.sweep.grid.fixed, **best.trial.settings})])

    def to_json(self) -> dict[str, Any]:
        kept = ("recipe", "preset", "axes", "spans", "fixed", "patience", "sampler", "why", "created")
        best = {**self.best.to_json(), "command": self.command()} if self.best else None
        return {
            "name": self.sweep.name,
            **{key: self.sweep.facts.get(key) for key in kept},
            "path": str(self.sweep.path),
            "metric": self.metric,
            "higher_is_better": self.sign < 0,
            "counts": self.counts,
            "best": best,
            "notes": self.notes(),
            "cells": [cell.to_json() for cell in self.cells],
            "trials": [s.to_json() for s in self.statuses],
        }


def read_report(sweep: Sweep, metric: str | None = None) -> Report:
    statuses = tuple(sweep.statuses(metric))
    return Report(sweep, statuses, tuple(sorted(cells_of(statuses), key=Cell.rank)))


def cells_of(statuses: Sequence[TrialStatus]) -> list[Cell]:
    cells: dict[tuple[Any, ...], list[TrialStatus]] = {}
    for found in statuses:
        cells.setdefault(tuple((k, v) for k, v in found.trial.settings.items() if k != "seed"), []).append(found)
    return [Cell(dict(key), tuple(seeds)) for key, seeds in cells.items()]


def _is_near(best: Cell, other: Cell, band: float) -> bool:
    assert best.mean is not None and other.mean is not None
    return abs(other.mean - best.mean) <= band * math.sqrt(1 / len(best.values) + 1 / len(other.values))


# ---- tables ----------------------------------------------------------------------------------------------------------


# A header, rows, and which columns are numbers.
Rows = tuple[list[str], list[list[str]], Sequence[int]]


def trial_rows(report: Report) -> Rows:
    order = sorted(report.statuses, key=trial_rank)
    keys = list(dict.fromkeys(key for s in order for key in s.trial.settings))
    header = ["trial", *keys, "state", "step", "loss", report.metric, ""]
    return header, [trial_cells(s, keys) for s in order], range(len(keys) + 2, len(keys) + 5)


def trial_cells(found: TrialStatus, keys: Sequence[str]) -> list[str]:
    settings = [clip(format_value(found.trial.settings.get(key)), 24) for key in keys]
    step = number(found.step) + (f"/{found.last_step}" if found.last_step and found.state == "running" else "")
    return [f"{found.trial.number:04d}", *settings, found.state, step, number(found.loss), number(found.best), found.error]


def trial_rank(found: TrialStatus) -> tuple[Any, ...]:
    ended = found.state in ("done", "stopped early") and found.best is not None
    later = ("running", "waiting", *DIVERGED, "failed")
    rank = found.sign * (found.best or 0.0) if ended else later.index(found.state) if found.state in later else 0
    return not ended, rank, found.trial.number


def cell_rows(report: Report, most: int) -> Rows:
    """Every setting, clipped to `most` characters, with its mean and spread over the seeds."""
    keys = list(dict.fromkeys(key for cell in report.cells for key in cell.settings))
    header, rows = [*keys, f"{report.metric}, mean", "sd", "min .. max", "seeds", ""], []
    for cell in report.cells:
        spread = f"{number(min(cell.values))} .. {number(max(cell.values))}" if len(cell.values) > 1 else "-"
        diverged = f"{cell.num_diverged} diverged" if cell.num_diverged else ""
        numbers = [number(cell.mean), number(cell.sd), spread, f"{len(cell.values)}/{len(cell.seeds)}", diverged]
        rows.append([*(clip(format_value(cell.settings.get(key)), most) for key in keys), *numbers])
    return header, rows, range(len(keys), len(keys) + 4)


def has_seeds(report: Report) -> bool:
    return any(len(cell.seeds) > 1 for cell in report.cells)


def lines_of(report: Report, max_width: int | None = None) -> list[str]:
    counts = ", ".join(f"{count} {state}" for state, count in report.counts.items())
    out = [f"sweep {report.sweep.name}  {report.sweep.title()}  {len(report.statuses)} trials: {counts}"]
    if report.sweep.grid.fixed:
        out.append("in every trial: " + " ".join(words(report.sweep.grid.fixed)))
    out.append(table(*trial_rows(report), max_width=max_width))
    if has_seeds(report):
        out += ["", table(*cell_rows(report, 24), max_width=max_width)]
    out += [f"note: {note}" for note in report.notes()]
    if report.command():
        out.append(f"best: {report.command()}")
    return out


# ---- files -----------------------------------------------------------------------------------------------------------


def write(report: Report, draw: bool = True) -> list[Path]:
    """Writes report.md and report.json, and heatmap.png once there are enough cells; the files that exist now."""
    folder = report.sweep.path
    picture = folder / "heatmap.png"
    if draw:
        draw_map(report, picture)
    files.write_atomic(folder / "report.json", jsonl.pretty(report.to_json()))
    facts = report.sweep.facts
    head, *rest = lines_of(report, max_width=200)
    table_lines = "\n".join(rest).rstrip()
    parts = [f"# {report.sweep.name}", "", f"- {head}"]
    parts += [f"- why: {facts['why']}"] if facts.get("why") else []
    parts += [f"- {report.goal}; a trial counts with its best evaluation", "", "```text", table_lines, "```"]
    if picture.exists():
        parts += ["", f"![{report.metric} over {', '.join(axis.key for axis in report.sweep.grid.axes)}]({picture.name})"]
    files.write_atomic(folder / "report.md", "\n".join([*parts, ""]))
    return [path for path in (folder / "report.md", folder / "report.json", picture) if path.exists()]


def draw_map(report: Report, path: Path) -> bool:
    """Two axes against each other, further ones as small multiples; False while there is too little data."""
    axes = [axis for axis in report.sweep.grid.axes if axis.key != "seed"]
    known = [cell for cell in report.cells if cell.mean is not None]
    whole = all(s.state not in ("running", "waiting") for s in report.statuses)
    if not axes or report.sweep.grid.spans or not known or (len(known) < LEAST_CELLS and not whole):
        return False
    across, down, others, dropped = _layout(axes)
    places = itertools.product(*(axis.values for axis in others))
    keys = [axis.key for axis in others]
    panels = [_panel(report, across, down, dict(zip(keys, place, strict=True))) for place in places]
    means = [v for panel in panels for row in panel.values for v in row if v is not None]
    title = f"{report.sweep.name}: {report.goal}{_averaged(report, dropped)}"
    rows = [format_value(v) for v in down.values] if down else [""]
    labels = (rows, [format_value(v) for v in across.values], down.key if down else "", across.key)
    worst, best = (min(means), max(means)) if report.sign < 0 else (max(means), min(means))
    draw_panels(path, panels, labels, title, low=worst, high=best)
    return True


def _layout(axes: list[Axis]) -> tuple[Axis, Axis | None, list[Axis], list[Axis]]:
    """The longest axis horizontally, the next vertically; the rest as panels, as many as fit, and what is averaged over."""
    by_length = sorted(axes, key=lambda axis: -len(axis.values))
    others, dropped = by_length[2:], []
    while math.prod(len(axis.values) for axis in others) > MAX_PANELS:
        dropped.append(others.pop(0))
    return by_length[0], by_length[1] if len(by_length) > 1 else None, others, dropped


def _panel(report: Report, across: Axis, down: Axis | None, place: dict[str, Any]) -> Panel:
    values, hatched = [], []
    for low in down.values if down else (None,):
        row = [place | {across.key: value} | ({down.key: low} if down else {}) for value in across.values]
        cells = [[c for c in report.cells if wanted.items() <= c.settings.items()] for wanted in row]
        found = [[v for cell in group for v in cell.values] for group in cells]
        values.append([statistics.fmean(vs) if vs else None for vs in found])
        hatched.append([any(cell.num_diverged for cell in group) for group in cells])
    return Panel(" ".join(words(place)), values, hatched)


def _averaged(report: Report, dropped: Sequence[Axis]) -> str:
    """What a value in the map is the mean of, and its spread."""
    over = [f"{max(len(cell.seeds) for cell in report.cells)} seeds"] if has_seeds(report) else []
    over += [f"{len(axis.values)} values of {axis.key}" for axis in dropped]
    if not over:
        return ""
    spreads = [max(cell.values) - min(cell.values) for cell in report.cells if len(cell.values) > 1]
    apart = f"; spread over the seeds of a cell {number(min(spreads))} .. {number(max(spreads))}" if spreads else ""
    return f"\nmean of {' and '.join(over)}{apart}"


def record(report: Report) -> Path:
    sweep, best = report.sweep, report.best
    top = journal.path_of(sweep.root)
    counts = ", ".join(f"{count} {state}" for state, count in report.counts.items())
    value = f"best {report.metric} {number(best.mean)}" if best else "negative result: nothing came to an end"
    picture = os.path.relpath(sweep.path / "heatmap.png", top.parent)
    parts = [
        f"## {str(sweep.facts.get('created'))[:10]} · {sweep.name} · sweep of {len(report.statuses)}: {value}",
        f"- why: {journal.escaped(one_line(str(sweep.facts.get('why') or ''))) or '(not given; -m WHY sets it)'}",
        f"- recipe: {sweep.title()}, {code.describe(sweep.facts.get('code') or {})}",
        f"- trials: {counts}",
        *([f"- best: {' '.join(words(best.settings))}, reproduce: `{report.command()}`"] if best else []),
        *(f"- note: {note}" for note in report.notes()),
        *([f"- picture: ![heat-map of {sweep.name}]({picture})"] if (sweep.path / "heatmap.png").exists() else []),
        f"- reproduce: `{sweep.command()}`",
    ]
    return journal.record_as(sweep.root, sweep.name, parts)


# ---- the page -------------------------------------------------------------------------------------------------------


def sweep_page(report: Report) -> str:
    sweep, best = report.sweep, report.best
    numbers = {
        f"best {report.metric}": number(best.mean) if best else "",
        "trials": str(len(report.statuses)),
        **{state: str(count) for state, count in report.counts.items()},
    }
    notes = [f"best: {' '.join(words(best.settings))}"] if best else []
    notes += [*report.notes(), f"{report.goal}; a trial counts with its best evaluation"]
    repeat = [sweep.command(), *([report.command()] if report.command() else [])]
    parts = [
        _page_head(sweep),
        html_page.tiles(numbers),
        section("what it says", card(*(f"<p>{text(note)}</p>" for note in notes))),
        section("map", _embedded_map(report)),
        section("settings, best first", card(html_page.table(*cell_rows(report, 40), keys=()))),
        section("curves of the best trials", *_best_curves(report)),
        section("trials", card(_trials(report))),
        section("repeat it", card(*(f"<pre>{text(command)}</pre>" for command in repeat))),
    ]
    return html_page.page(sweep.name, parts, html_report.footer(sweep.root))


def _page_head(sweep: Sweep) -> str:
    why = sweep.facts.get("why")
    reason = f'<p class="why">{text(one_line(str(why)))}</p>' if why else ""
    axes = ", ".join(f"{axis.key} = {', '.join(map(format_value, axis.values))}" for axis in sweep.grid.axes)
    about = " · ".join(filter(None, [sweep.title(), str(sweep.facts.get("created"))[:16].replace("T", " "), axes]))
    return f'<header><h1>{text(sweep.name)}</h1><p class="lead">{text(about)}</p>{reason}</header>'


def _embedded_map(report: Report) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "heatmap.png"
        return card(embedded(Path(folder), path.name, report.goal)) if draw_map(report, path) else ""


def _best_curves(report: Report) -> list[str]:
    order = sorted(report.statuses, key=trial_rank)[:_NUM_CURVES]
    runs = [run for s in order if (run := Run(report.sweep.root / s.run)).path.is_dir()]
    if not runs:
        return []
    return [*html_report.overlays(runs), pairs([html_report.last_sample(run) for run in runs[:2]])]


def _trials(report: Report) -> str:
    header, rows, numbers = trial_rows(report)
    shown = html_page.table(header, rows, numbers)
    return shown if len(rows) <= 12 else folded(f"all {len(rows)} trials", shown)
