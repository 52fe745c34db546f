"""Data of the pages as plain values: runs, curves, comparisons, sweeps, journal."""

import contextlib
import hashlib
import math
import os
import re
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from seedbed import recipes
from seedbed.config import diff, flat
from seedbed.errors import UserError
from seedbed.report import comparison, facts, journal, summaries
from seedbed.report.event_text import event_text
from seedbed.report.notes import conclusions, entries
from seedbed.serve.actions import TRASH
from seedbed.serve.reproduction import reproduction
from seedbed.serve.run_index import RunIndex, is_name
from seedbed.track import code, files, jsonl
from seedbed.track.events import has_section, severity_of
from seedbed.track.rows import Columns
from seedbed.track.run import Run
from seedbed.track.run_names import run_names
from seedbed.track.text import format_value
from seedbed.tune.sweep import importance
from seedbed.tune.sweep import report as sweep_report
from seedbed.tune.sweep.folder import Sweep, folder_of

# Curves that are never smoothed.
_STEADY = {"lr", "memory", "epoch"}
_USUAL = 300
_BLOCK = 64
AXES = ("step", "seconds", "items")
# Also known for some runs: what one item holds or costs, times the items.
MORE_AXES = ("tokens", "flops")
_PICTURE = re.compile(r"!\[[^\]]*\]\(([^)]+)\)")
MAX_POINTS, MAX_CONSOLE, MAX_SAMPLES = 4000, 1 << 16, 200


# ---- a run -----------------------------------------------------------------------------------------------------------


def run_page(index: RunIndex, name: str) -> dict[str, Any]:
    run, short = index.run(name), index.summary(name)
    page: dict[str, Any] = {"summary": short, "folder": str(run.path), "keys": keys_of(index, name)}
    try:
        config = run.config_json()
    except UserError as problem:
        return {**page, "damaged": str(problem), "events": time_line(index, name), "notes": [], "config": []}
    status, events = run.status(), index.events(name)
    page |= {"version": config.get("version"), "hash": config.get("hash"), "code": code.describe(run.code_json())}
    page |= {"reproduce": reproduction(run), "error": status.get("error"), "verdict": status.get("verdict")}
    page |= {"config": config_table(run, config), "children": index.children(name)[:50], "events": time_line(index, name)}
    page |= {"preflight": _preflight(run, events), "time": _time_use(index, name, status), "notes": notes(index, name)}
    page |= {"code_json": run.code_json(), "parents": _parents(index, config.get("parent"))}
    with contextlib.suppress(OSError):
        page["code_json"]["code.patch"] = hashlib.sha256((run.path / "code.patch").read_bytes()).hexdigest()[:10]
    page["checkpoints"], page["metric"] = _checkpoints(index, run)
    return page | {"opens": _opens(config, page["checkpoints"])}


def _parents(index: RunIndex, name: str | None) -> list[dict[str, Any]]:
    """Summaries of a parent and of those above it, the root first; of one that was removed, the name."""
    found: list[dict[str, Any]] = []
    while name and name not in [one["name"] for one in found]:
        there = is_name(name) and os.path.isdir(index.root / name)
        found.insert(0, index.summary(name) if there else {"name": name})
        name = found[0].get("parent")
    return found


def keys_of(index: RunIndex, name: str) -> list[str]:
    """The available curves: columns of the rows, and evaluation metrics as `eval/NAME`."""
    measured = [key for key in index.columns(name).names() if key not in (*AXES, "time")]
    evaluated = dict.fromkeys(
        f"{event['kind']}/{key}"
        for event in index.events(name)
        if event.get("kind") in ("eval", "test")
        for key, value in event.items()
        if key not in ("step", "time", "seconds") and facts.is_number(value)
    )
    return [*measured, *evaluated]


def config_table(run: Run, config: dict[str, Any]) -> list[dict[str, Any]]:
    """Every setting, its value in the parent where it differs, and whether it differs from the preset."""
    own, changed = flat(config["config"]), config.get("changes") or {}
    parent = journal.open_optional(run.path.parent, config.get("parent"))
    before = diff(flat(parent.config_json()["config"]), own) if parent else {}
    return [
        {
            "key": key,
            "value": format_value(own[key]) if key in own else "(not set)",
            "changed": key in changed,
            "parent": format_value(before[key][0]) if key in before else None,
        }
        for key in {**own, **before}
    ]


def time_line(index: RunIndex, name: str) -> list[dict[str, Any]]:
    """Events with severity, text and their position on each axis."""
    events = [event for event in index.events(name) if not has_section(event)][-500:]
    steps = np.array([float(e["step"]) if facts.is_number(e.get("step")) else math.nan for e in events])
    columns = index.columns(name)
    places = {axis: _moved(columns, steps, axis, np.array(columns.column(axis))).tolist() for axis in AXES}
    out = []
    for i, event in enumerate(events):
        shown = {"kind": str(event.get("kind")), "what": str(event.get("what") or event_text(event))[:400]}
        at = {axis: places[axis][i] for axis in AXES}
        out.append({"step": event.get("step"), **shown, "severity": severity_of(event), "at": at})
    return jsonl.finite(out)


def notes(index: RunIndex, name: str) -> list[dict[str, str]]:
    with contextlib.suppress(UserError):
        return conclusions(index.root, name)
    return []


def _checkpoints(index: RunIndex, run: Run) -> tuple[list[dict[str, Any]], str | None]:
    columns = index.columns(run.name)
    try:
        losses = dict(zip(columns.column("step"), columns.column("loss"), strict=True))
        found, metric = summaries.describe_checkpoints(run, losses)
    except OSError:  # one was removed in the meantime
        return [], None
    kept = ("name", "step", "loss", "evaluation", "best", "bytes", "missing", "created")
    return jsonl.finite([{key: one[key] for key in kept} for one in found]), metric


def _preflight(run: Run, events: list[dict[str, Any]]) -> dict[str, Any]:
    event: dict[str, Any] = next((e for e in events if e.get("kind") == "preflight"), {})
    found = None
    with contextlib.suppress(UserError):
        found = jsonl.read_object(run.path / "preflight.json").get("findings")
    kept = ("id", "title", "status", "severity", "what", "where", "why", "fix")
    shown = [{key: one.get(key) for key in kept} for one in found or [] if isinstance(one, dict)]
    return {"outcome": event.get("outcome"), "findings": shown}


def _time_use(index: RunIndex, name: str, status: dict[str, Any]) -> dict[str, Any]:
    """Seconds per timer, and medians of speed, data wait, MFU and memory."""
    columns = index.columns(name)
    clock = status.get("clock")
    seconds = _of_finite(itemgetter(-1), columns.column("seconds"))
    seconds_by_part = clock if isinstance(clock, dict) else {"train": seconds} if seconds else {}
    medians = {key: _of_finite(np.median, columns.column(key)) for key in ("items_per_s", "wait", "mfu", "memory")}
    return jsonl.finite({"seconds": {k: v for k, v in seconds_by_part.items() if facts.is_number(v)}, **medians})


def _opens(config: dict[str, Any], found: list[dict[str, Any]]) -> dict[str, bool]:
    """Whether the run page offers a player or a playground; recipes in user files are not executed from a web page."""
    with contextlib.suppress(Exception):
        if found and not recipes.is_file_name(config["recipe"]):
            recipe, _ = recipes.find(config["recipe"])
            return {"play": recipe.is_playable, "playground": not recipe.is_playable}
    return {"play": False, "playground": False}


def samples(index: RunIndex, name: str) -> list[dict[str, Any]]:
    run = index.run(name)
    found = [event for event in index.events(name) if event.get("kind") == "sample"]
    stride = max(1, -(-len(found) // MAX_SAMPLES))
    kept = [*found[:-1:stride], *found[-1:]]
    return [
        {
            "step": event.get("step"),
            "text": str(event.get("text") or "")[:20_000],
            "files": [address("runs", run.name, str(file)) for file in event.get("files") or []],
        }
        for event in kept
    ]


def console(index: RunIndex, name: str) -> dict[str, Any]:
    path = index.run(name).path / "console.log"
    try:
        with open(files.open_regular(path), "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - MAX_CONSOLE))
            text = file.read(MAX_CONSOLE).decode(errors="replace")
    except OSError:
        return {"text": "", "cut": False}
    return {"text": text.partition("\n")[2] if size > MAX_CONSOLE else text, "cut": size > MAX_CONSOLE}


def address(kind: str, name: str, path: str) -> str:
    return f"/files/{kind}/{quote(name, safe='')}/{quote(path)}"


# ---- curves ----------------------------------------------------------------------------------------------------------


def series(index: RunIndex, name: str, keys: list[str], axis: str, num: int, weight: float, span: tuple[float, float]) -> dict:
    """Curves of one run over an axis: downsampled, and a smoothed copy if wanted."""
    # One snapshot for all curves: a running run has more rows by the next read.
    out, columns = {}, index.columns(name)
    there = _positions(index, name, columns, axis)
    for key in dict.fromkeys(keys):
        kind, slash, metric = key.partition("/")
        if slash and kind in ("eval", "test"):
            points = facts.series([event for event in index.events(name) if event.get("kind") == kind], metric)
            steps, y = np.array(points, float).reshape(-1, 2).T
            x = _moved(columns, steps, axis, there)
        else:
            x, y = there, np.array(columns.column(key))
            # Some schedules of earlier versions ended at -1e-18, a rounding error.
            y = np.maximum(y, 0.0) if key == "lr" or key.startswith("lrs.") else y
        found = {"raw": downsample(*clip_to(x, y, *span), num)}
        if weight > 0 and len(y) > 2 and "/" not in key and key not in _STEADY:
            # The weight is scaled to the length of the curve, so that the slider has the same visual effect on all runs.
            found["smooth"] = downsample(*clip_to(x, smooth(y, weight ** (_USUAL / len(y))), *span), num)
        out[key] = {part: {"x": px.tolist(), "y": py.tolist()} for part, (px, py) in found.items()}
    return jsonl.finite(out)


def series_of_runs(index: RunIndex, names: list[str], keys: list[str], axis: str, *more: Any) -> dict[str, Any]:
    """Curves of several runs, and which of them cannot be drawn over this axis; a run that is gone is left out."""
    found = {name: series(index, name, keys, axis, *more) for name in names if os.path.isdir(index.root / name)}
    unknown = [name for name in found if (x := _positions(index, name, index.columns(name), axis)).size and np.isnan(x).all()]
    return {"runs": found, "unknown": unknown}


def _positions(index: RunIndex, name: str, columns: Columns, axis: str) -> np.ndarray:
    """Every row's position on an axis; NaN where the run's files do not say."""
    if axis in AXES or axis in columns.names():
        return np.array(columns.column(axis))
    return np.array(columns.column("items")) * _per_item(index, name, axis)


def _per_item(index: RunIndex, name: str, axis: str) -> float:
    """Training FLOP of an item by the recipe's formula, or tokens of a block of text; NaN where neither is known."""
    found: Any = None
    with contextlib.suppress(UserError, StopIteration):
        if axis == "flops":
            found = next(event.get("flops_per_item") for event in index.events(name) if event.get("kind") == "model")
        else:
            found = flat(index.run(name).config_json()["config"]).get("data.block")
    return float(found) if facts.is_number(found) else math.nan


def _moved(columns: Columns, steps: np.ndarray, axis: str, there: np.ndarray) -> np.ndarray:
    """Interpolate steps on another axis, where every row's position is known."""
    if axis == "step":
        return steps
    known = np.array(columns.column("step"))
    both = ~np.isnan(known) & ~np.isnan(there)
    return np.interp(steps, known[both], there[both]) if both.any() else steps * np.nan


# ---- several runs ----------------------------------------------------------------------------------------------------


def compare(index: RunIndex, names: list[str], metric: str | None = None) -> dict[str, Any]:
    """Comparison of runs: final losses, verdicts against the first run at equal steps and time, and settings that differ."""
    found = [_level(index, name, metric) for name in names]
    known = index.configs() if len(names) > 1 else []
    for one in found[1:]:
        one["verdicts"] = {axis: _verdict(index, one["name"], names[0], known, metric, axis) for axis in ("step", "seconds")}
    configs = {}
    for name in names:
        with contextlib.suppress(UserError):
            configs[name] = flat(index.run(name).config_json()["config"])
    keys = dict.fromkeys(key for values in configs.values() for key in values)
    shown = {
        key: {name: format_value(values[key]) if key in values else None for name, values in configs.items()} for key in keys
    }
    different = [{"key": key, "values": values} for key, values in shown.items() if len(set(values.values())) > 1]
    shared = dict.fromkeys(key for name in names for key in keys_of(index, name))
    return jsonl.finite({"runs": found, "settings": different, "num_equal": len(shown) - len(different), "keys": list(shared)})


def _verdict(index: RunIndex, name: str, base: str, known: Any, metric: str | None, axis: comparison.Axis) -> dict[str, Any]:
    found = comparison.Outcome("unknown", "its config.json cannot be read")
    with contextlib.suppress(UserError):
        runs = index.run(name), index.run(base)
        found = comparison.compare(*runs, known, metric=metric, axis=axis, events_of=lambda run: index.events(run.name))
    return vars(found)


def _level(index: RunIndex, name: str, metric: str | None) -> dict[str, Any]:
    """Final results of a run: loss over its last rows with standard deviation, best evaluation, speed."""
    short, columns = index.summary(name), index.columns(name)
    losses = np.array(columns.column("loss"))
    last = facts.last_of(losses[np.isfinite(losses)].tolist())
    mean, sd = facts.mean_and_sd(last)
    (metric, _), best = facts.evaluations(index.events(name), metric), facts.best(index.events(name), metric)
    numbers = {"loss": mean, "sd": sd, "num_last": len(last), "metric": metric, "best": best[1] if best else None}
    rate, seconds = _of_finite(np.median, columns.column("items_per_s")), _of_finite(itemgetter(-1), columns.column("seconds"))
    shown = {key: short[key] for key in ("name", "title", "status", "step", "why")}
    return {**shown, **numbers, "rate": rate, "seconds": seconds}


def _of_finite(measure: Callable[[np.ndarray], Any], column: Any) -> float | None:
    values = np.array(column)
    values = values[np.isfinite(values)]
    return float(measure(values)) if len(values) else None


# ---- sweeps and the journal ------------------------------------------------------------------------------------------


def sweep_page(index: RunIndex, name: str) -> dict[str, Any]:
    """Current state of a sweep: every trial, and every setting over its seeds."""
    found = Sweep.open(index.root, name if is_name(name) else "")
    report = sweep_report.read_report(found)
    more = {"command": found.command(), "title": found.title(), "notes_of": notes(index, name)}
    return jsonl.finite({**report.to_json(), **more, "importance": importance.of_axes(report.statuses)})


def studies(index: RunIndex) -> list[dict[str, Any]]:
    """Every sweep and every ablation, newest first: name, recipe, why, when."""
    found = []
    for path in (*folder_of(index.root).glob("*/sweep.json"), *(index.root.parent / "ablations").glob("*/report.json")):
        with contextlib.suppress(UserError, TypeError):
            kept = jsonl.read_object(path)
            kept |= {**(kept.get("identity") or {}), **(kept.get("facts") or {})}  # of an ablation
            shown = {key: kept.get(key) or "" for key in ("recipe", "preset", "why", "created")}
            found.append({"kind": path.parent.parent.name, "name": path.parent.name, **shown})
    return jsonl.finite(sorted(found, key=lambda one: (str(one["created"]), one["name"]), reverse=True))


def ablation_page(index: RunIndex, name: str) -> dict[str, Any]:
    """What an ablation has predicted, and at its end measured."""
    path = index.root.parent / "ablations" / name / "report.json"
    if not is_name(name) or not path.is_file():
        raise UserError(f"there is no ablation {name!r} here; it may have been renamed or removed")
    kept = jsonl.read_object(path)
    rows = [{key: row.get(key) for key in ("label", "axis", "outcome", "prediction")} for row in kept.get("rows") or []]
    return jsonl.finite({key: kept.get(key) for key in ("identity", "facts", "steps", "repeats", "summary")} | {"rows": rows})


def run_list(index: RunIndex) -> dict[str, Any]:
    """All runs, or of many the newest and how many there are; the names of all sweeps, and what can be restored."""
    sweeps = sorted(path.parent.name for path in folder_of(index.root).glob("*/sweep.json"))
    trash = sorted(path.name for path in (index.root / TRASH).glob("*.*"))
    # The version of before: what changes meanwhile is sent twice and not lost.
    about = {
        "version": index.version,
        "sweeps": sweeps,
        "root": str(index.root),
        "trash": trash,
        "num": len(run_names(index.root)),
    }
    return {**about, "runs": index.listing()}


def settings(index: RunIndex) -> dict[str, Any]:
    """Every setting of all runs, by columns: the values of a key, and for each run which one it has (-1 for none)."""
    known = [(run.name, flat(about["config"])) for run, about in index.configs()]
    keys: dict[str, Any] = {}
    for key in dict.fromkeys(key for _, config in known for key in config):
        values: dict[str, int] = {}
        at = [values.setdefault(format_value(config[key]), len(values)) if key in config else -1 for _, config in known]
        keys[key] = {"values": list(values), "at": at}
    return {"names": [name for name, _ in known], "keys": keys}


def journal_page(index: RunIndex) -> list[dict[str, Any]]:
    """The journal's entries, newest first, with conclusion, plot and whether the result was negative."""
    return [_entry(index, entry) for entry in reversed(entries(index.root))]


def _entry(index: RunIndex, entry: dict[str, str]) -> dict[str, Any]:
    date, _, rest = entry["title"].partition(" · ")
    verdict = rest.partition(" · ")[2] or rest
    lines = entry["text"].splitlines()
    found = [line[2:].split(": ", 1) for line in lines if line.startswith("- ") and ": " in line]
    more = [line.strip() for line in lines if line.strip() and not (line.startswith("- ") and ": " in line)]
    concluded = [[key.removeprefix("conclusion, "), text] for key, text in found if key.startswith("conclusion,")]
    picture = next((m[1] for key, text in found if key == "picture" and (m := _PICTURE.search(text))), None)
    shown = [pair for pair in found if pair[0] != "picture" and not pair[0].startswith("conclusion")]
    kind = "sweep" if verdict.startswith("sweep of") else "run"
    page: dict[str, Any] = {"run": entry["run"], "kind": kind, "date": date, "verdict": verdict, "facts": shown, "more": more}
    page |= {"concluded": concluded, "picture": _picture(index, picture), "there": os.path.isdir(index.root / entry["run"])}
    return page | {"negative": "negative result" in verdict, "open": not concluded}


def _picture(index: RunIndex, link: str | None) -> str | None:
    """The address of a plot in the journal, if it belongs to a run or a sweep."""
    if not link:
        return None
    path = Path(journal.path_of(index.root).parent / link)
    for kind, top in (("runs", index.root), ("sweeps", index.root.parent / "sweeps")):
        if path.is_relative_to(top) and len(path.relative_to(top).parts) > 1 and path.is_file():
            name, *rest = path.relative_to(top).parts
            return address(kind, name, "/".join(rest))
    return None


def downsample(x: np.ndarray, y: np.ndarray, num: int) -> tuple[np.ndarray, np.ndarray]:
    """At most about `num` points: both ends, and minimum and maximum of equal buckets."""
    known = ~np.isnan(y) & ~np.isnan(x)
    x, y = x[known], y[known]
    if len(y) <= num:
        return x, y
    width = -(-len(y) // max((num - 2) // 2, 1))
    rows = -(-len(y) // width)
    # The last bucket is padded with its last point, which changes neither extreme.
    grid = np.append(y, np.full(rows * width - len(y), y[-1])).reshape(rows, width)
    first = np.arange(rows) * width
    kept = np.concatenate([first + grid.argmin(1), first + grid.argmax(1), [0, len(y) - 1]])
    kept = np.unique(np.minimum(kept, len(y) - 1))
    return x[kept], y[kept]


def smooth(y: np.ndarray, weight: float) -> np.ndarray:
    """Bias-corrected exponential moving average; non-finite values are skipped."""
    known = np.isfinite(y)
    values, lags = y[known], np.arange(_BLOCK)
    # A block at a time: the average within the block, plus what is left of the average before it.
    within = (1 - weight) * np.tril(weight ** np.abs(lags[:, None] - lags))
    levels, left, decay = np.empty_like(values), 0.0, weight ** (lags + 1)
    for start in range(0, len(values), _BLOCK):
        part = values[start : start + _BLOCK]
        level = within[: len(part), : len(part)] @ part + decay[: len(part)] * left
        levels[start : start + _BLOCK], left = level, level[-1]
    means = np.append(np.nan, levels / (1 - weight ** np.arange(1, len(values) + 1)))
    return means[np.cumsum(known)]


def clip_to(x: np.ndarray, y: np.ndarray, low: float, high: float) -> tuple[np.ndarray, np.ndarray]:
    """The points between `low` and `high` and one more on each side, so that lines reach the edge of the chart."""
    inside = np.flatnonzero((x >= low) & (x <= high))
    if not len(inside):
        return x[:0], y[:0]
    part = slice(max(inside[0] - 1, 0), inside[-1] + 2)
    return x[part], y[part]
