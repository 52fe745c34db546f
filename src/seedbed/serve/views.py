"""What the pages ask for, as plain values: a run, its curves, several runs side by side, sweeps, the journal."""

import contextlib
import math
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from seedbed.config import diff
from seedbed.errors import UserError
from seedbed.serve.shelf import Shelf
from seedbed.serve.thin import clip_to, smooth, thin
from seedbed.track import checkpoints, code, facts, journal, lines
from seedbed.track.run import Run, flat
from seedbed.track.text import spell

# Events that have a place of their own on the page, or say nothing on a time line.
_ELSEWHERE = {"sample", "model", "start", "checkpoint", "eval", "test"}
# Curves without noise to take away.
_STEADY = {"lr", "memory", "epoch"}
_USUAL = 300
AXES = ("step", "seconds", "items")
MAX_POINTS, MAX_CONSOLE, MAX_SAMPLES = 4000, 1 << 16, 200


# ---- a run -----------------------------------------------------------------------------------------------------------


def run_page(shelf: Shelf, name: str) -> dict[str, Any]:
    """Everything about a run but its curves, samples and console."""
    run, short = shelf.run(name), shelf.summary(name)
    page: dict[str, Any] = {"summary": short, "folder": str(run.path), "keys": keys_of(shelf, name)}
    try:
        config = run.config_json()
    except UserError as problem:
        return {**page, "damaged": str(problem), "events": time_line(shelf, name), "notes": [], "config": []}
    status, events = run.status(), shelf.events(name)
    page |= {"version": config.get("version"), "hash": config.get("hash"), "code": code.describe(run.code_json())}
    page |= {"command": run.command(), "error": status.get("error"), "verdict": status.get("verdict")}
    page |= {"config": config_table(run, config), "children": shelf.children(name)[:50], "events": time_line(shelf, name)}
    page |= {"preflight": _preflight(run, events), "time": _time_use(shelf, name, status), "notes": notes(shelf, name)}
    page["checkpoints"], page["metric"] = _checkpoints(shelf, run)
    return page | {"opens": _opens(config, page["checkpoints"])}


def keys_of(shelf: Shelf, name: str) -> list[str]:
    """The curves there are: columns of the rows, and the numbers of evaluations as `eval/NAME`."""
    measured = [key for key in shelf.columns(name).names() if key not in (*AXES, "time")]
    evaluated = dict.fromkeys(
        f"{event['kind']}/{key}"
        for event in shelf.events(name)
        if event.get("kind") in ("eval", "test")
        for key, value in event.items()
        if key not in ("step", "time", "seconds") and facts.is_number(value)
    )
    return [*measured, *evaluated]


def config_table(run: Run, config: dict[str, Any]) -> list[dict[str, Any]]:
    """Every setting, what it is in the parent where that differs, and whether it was changed against the preset."""
    own, changed = flat(config["config"]), config.get("changes") or {}
    before: dict[str, Any] = {}
    with contextlib.suppress(UserError):
        if config.get("parent"):
            before = diff(flat(Run.open(run.path.parent, config["parent"]).config_json()["config"]), own)
    return [
        {
            "key": key,
            "value": spell(own[key]) if key in own else "(not set)",
            "changed": key in changed,
            "parent": spell(before[key][0]) if key in before else None,
        }
        for key in {**own, **before}
    ]


def time_line(shelf: Shelf, name: str) -> list[dict[str, Any]]:
    """What happened, in words, and where it stands on each axis: spikes, roll-backs, restarts, stalls."""
    out, events = [], shelf.events(name)
    for event in events:
        if event.get("kind") in _ELSEWHERE:
            continue
        told = event.get("what") or ", ".join(
            f"{key} {spell(value)}"
            for key, value in event.items()
            if key not in ("step", "kind", "time") and value not in ([], "")
        )
        alarm = event.get("kind") in facts.INCIDENTS and event.get("kind") != "resume"
        out.append({"step": event.get("step"), "kind": str(event.get("kind")), "what": str(told)[:400], "alarm": alarm})
    out = out[-500:]
    steps = np.array([float(e["step"]) if facts.is_number(e["step"]) else math.nan for e in out])
    places = {axis: _moved(shelf, name, steps, axis).tolist() for axis in AXES}
    return lines.finite([{**event, "at": {axis: places[axis][i] for axis in AXES}} for i, event in enumerate(out)])


def notes(shelf: Shelf, name: str) -> list[dict[str, str]]:
    try:
        return journal.conclusions(shelf.root, name)
    except UserError:
        return []


def _checkpoints(shelf: Shelf, run: Run) -> tuple[list[dict[str, Any]], str | None]:
    columns = shelf.columns(run.name)
    try:
        found, metric = checkpoints.describe(run, dict(zip(columns.column("step"), columns.column("loss"), strict=True)))
    except OSError:  # one was thinned out while we looked
        return [], None
    kept = ("name", "step", "loss", "evaluation", "best", "bytes", "missing", "created")
    return lines.finite([{key: one[key] for key in kept} for one in found]), metric


def _preflight(run: Run, events: list[dict[str, Any]]) -> dict[str, Any]:
    said: dict[str, Any] = next((e for e in events if e.get("kind") == "preflight"), {})
    try:
        found = lines.read_object(run.path / "preflight.json").get("findings")
    except UserError:
        found = None
    kept = ("id", "title", "status", "severity", "what", "where", "why", "fix")
    told = [{key: one.get(key) for key in kept} for one in found or [] if isinstance(one, dict)]
    return {"outcome": said.get("outcome"), "findings": told}


def _time_use(shelf: Shelf, name: str, status: dict[str, Any]) -> dict[str, Any]:
    """Seconds by kind of work, and medians of what bounds a run."""
    columns = shelf.columns(name)
    clock = status.get("clock")
    seconds = _last(columns.column("seconds"))
    laps = clock if isinstance(clock, dict) else {"train": seconds} if seconds else {}
    medians = {key: _median(columns.column(key)) for key in ("items_per_s", "wait", "mfu", "memory")}
    return lines.finite({"laps": {k: v for k, v in laps.items() if facts.is_number(v)}, **medians})


def _opens(config: dict[str, Any], found: list[dict[str, Any]]) -> dict[str, bool]:
    """What may be opened from the run page: a player or a playground. A file of somebody's is not run from a web page."""
    from seedbed import recipes

    if not found or config["recipe"].endswith(".py"):
        return {"play": False, "talk": False}
    try:
        recipe, _ = recipes.find(config["recipe"])
    except Exception:
        return {"play": False, "talk": False}
    play = any(path.name == "player.py" for path in recipe.files())
    return {"play": play, "talk": not play}


def samples(shelf: Shelf, name: str) -> list[dict[str, Any]]:
    """What the model made, through time: text, and addresses of pictures and videos."""
    run = shelf.run(name)
    found = [event for event in shelf.events(name) if event.get("kind") == "sample"]
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


def console(shelf: Shelf, name: str) -> dict[str, Any]:
    """The end of what the terminal showed."""
    path = shelf.run(name).path / "console.log"
    try:
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - MAX_CONSOLE))
            text = file.read(MAX_CONSOLE).decode(errors="replace")
    except OSError:
        return {"text": "", "cut": False}
    return {"text": text.partition("\n")[2] if size > MAX_CONSOLE else text, "cut": size > MAX_CONSOLE}


def address(kind: str, name: str, path: str) -> str:
    """Where the server gives out a file of a run or a sweep."""
    return f"/files/{kind}/{quote(name, safe='')}/{quote(path)}"


# ---- curves ----------------------------------------------------------------------------------------------------------


def series(shelf: Shelf, name: str, keys: list[str], axis: str, num: int, weight: float, span: tuple[float, float]) -> dict:
    """Curves of one run over steps, seconds or items: thinned, and smoothed beside it where asked."""
    out = {}
    for key in keys:
        x, y = _curve(shelf, name, key, axis)
        found = {"raw": thin(*clip_to(x, y, *span), num)}
        if weight > 0 and len(y) > 2 and "/" not in key and key not in _STEADY:
            # The slider means a share of the curve: it does the same to the eye on a long run as on a short one.
            found["smooth"] = thin(*clip_to(x, smooth(y, weight ** (_USUAL / len(y))), *span), num)
        out[key] = {part: {"x": _plain(px), "y": _plain(py)} for part, (px, py) in found.items()}
    return out


def _curve(shelf: Shelf, name: str, key: str, axis: str) -> tuple[np.ndarray, np.ndarray]:
    columns = shelf.columns(name)
    kind, slash, metric = key.partition("/")
    if not slash or kind not in ("eval", "test"):
        return np.array(columns.column(axis)), np.array(columns.column(key))
    found = [e for e in shelf.events(name) if e.get("kind") == kind and facts.is_number(e.get("step"))]
    found = [e for e in found if facts.is_number(e.get(metric))]
    steps = np.array([float(e["step"]) for e in found])
    return _moved(shelf, name, steps, axis), np.array([float(e[metric]) for e in found])


def _moved(shelf: Shelf, name: str, steps: np.ndarray, axis: str) -> np.ndarray:
    """Steps on another axis, by the rows around them."""
    if axis == "step":
        return steps
    columns = shelf.columns(name)
    known, there = np.array(columns.column("step")), np.array(columns.column(axis))
    both = ~np.isnan(known) & ~np.isnan(there)
    return np.interp(steps, known[both], there[both]) if both.any() else steps * np.nan


def _plain(values: np.ndarray) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]


# ---- several runs ----------------------------------------------------------------------------------------------------


def compare(shelf: Shelf, names: list[str]) -> dict[str, Any]:
    """Runs beside each other: their levels with noise, the difference from the first, and the settings that differ."""
    found = [_level(shelf, name) for name in names]
    base = found[0]
    for one in found[1:]:
        one["delta"] = _delta(base, one)
    configs = {}
    for name in names:
        with contextlib.suppress(UserError):
            configs[name] = flat(shelf.run(name).config_json()["config"])
    keys = dict.fromkeys(key for values in configs.values() for key in values)
    told = {key: {name: spell(values[key]) if key in values else None for name, values in configs.items()} for key in keys}
    different = [{"key": key, "values": values} for key, values in told.items() if len(set(values.values())) > 1]
    shared = dict.fromkeys(key for name in names for key in keys_of(shelf, name))
    return lines.finite({"runs": found, "settings": different, "num_equal": len(told) - len(different), "keys": list(shared)})


def _level(shelf: Shelf, name: str) -> dict[str, Any]:
    """Where a run ended: loss over its last rows with its scatter, best evaluation, speed."""
    short, columns = shelf.summary(name), shelf.columns(name)
    losses = np.array(columns.column("loss"))
    last = facts.last_of(losses[np.isfinite(losses)].tolist())
    mean, sd = facts.mean_and_sd(last)
    metric, points = facts.evaluations(shelf.events(name))
    best = min((value for _, value in points), default=None)
    numbers = {"loss": mean, "sd": sd, "num_last": len(last), "metric": metric, "best": best}
    measured = {"rate": _median(columns.column("items_per_s")), "seconds": _last(columns.column("seconds"))}
    return {**{key: short[key] for key in ("name", "title", "status", "step", "why")}, **numbers, **measured}


def _delta(base: dict[str, Any], one: dict[str, Any]) -> dict[str, Any]:
    """The difference by evaluation where both have the same, by loss otherwise, against the noise of the losses."""
    by = "best" if base["best"] is not None and one["best"] is not None and base["metric"] == one["metric"] else "loss"
    change, band = one[by] - base[by], facts.noise_band((base["sd"], one["sd"]))
    word = "unknown" if math.isnan(change) or math.isnan(band) else "same" if abs(change) <= band else "other"
    if word == "other":
        word = "better" if change < 0 else "worse"
    return {"by": f"best {one['metric']}" if by == "best" else "loss", "change": change, "band": band, "word": word}


def _median(column: Any) -> float | None:
    values = np.array(column)
    values = values[np.isfinite(values)]
    return float(np.median(values)) if len(values) else None


def _last(column: Any) -> float | None:
    values = np.array(column)
    values = values[np.isfinite(values)]
    return float(values[-1]) if len(values) else None


# ---- sweeps and the journal ------------------------------------------------------------------------------------------


def sweep_page(shelf: Shelf, name: str) -> dict[str, Any]:
    """A sweep at this moment: every trial and every setting over its seeds."""
    from seedbed.tune.sweep import report
    from seedbed.tune.sweep.folder import Sweep

    found = Sweep.open(shelf.root, name)
    told = report.look(found)
    page = {**told.to_json(), "command": found.command(), "title": found.title(), "notes_of": notes(shelf, name)}
    return lines.finite(page)


def sweep_names(shelf: Shelf) -> list[str]:
    from seedbed.tune.sweep.folder import folder_of

    return sorted(path.parent.name for path in folder_of(shelf.root).glob("*/sweep.json"))


_PICTURE = re.compile(r"!\[[^\]]*\]\(([^)]+)\)")


def journal_page(shelf: Shelf) -> list[dict[str, Any]]:
    """The journal's entries, newest first, with what a reader looks for: conclusion, picture, whether it was negative."""
    out = [_entry(shelf, entry) for entry in journal.entries(shelf.root)]
    return out[::-1]


def _entry(shelf: Shelf, entry: dict[str, str]) -> dict[str, Any]:
    date, _, rest = entry["title"].partition(" · ")
    verdict = rest.partition(" · ")[2] or rest
    found, more = [], []
    for line in entry["text"].splitlines():
        key, colon, text = line.removeprefix("- ").partition(": ")
        if line.startswith("- ") and colon:
            found.append([key, text])
        elif line.strip():
            more.append(line.strip())
    concluded = [[key.removeprefix("conclusion, "), text] for key, text in found if key.startswith("conclusion,")]
    picture = next((m[1] for key, text in found if key == "picture" and (m := _PICTURE.search(text))), None)
    shown = [pair for pair in found if pair[0] not in ("picture",) and not pair[0].startswith("conclusion")]
    kind = "sweep" if verdict.startswith("sweep of") else "run"
    page: dict[str, Any] = {"run": entry["run"], "kind": kind, "date": date, "verdict": verdict, "facts": shown, "more": more}
    page |= {"concluded": concluded, "picture": _picture(shelf, picture), "there": (shelf.root / entry["run"]).is_dir()}
    return page | {"negative": "negative result" in verdict, "open": not concluded}


def _picture(shelf: Shelf, link: str | None) -> str | None:
    """The address of a picture that the journal names, when it lies in a run or a sweep of ours."""
    if not link:
        return None
    path = Path(journal.path_of(shelf.root).parent / link)
    for kind, top in (("runs", shelf.root), ("sweeps", shelf.root.parent / "sweeps")):
        if path.is_relative_to(top) and len(path.relative_to(top).parts) > 1 and path.is_file():
            name, *rest = path.relative_to(top).parts
            return address(kind, name, "/".join(rest))
    return None
