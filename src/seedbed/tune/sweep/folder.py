"""The sweep folder: settings, one file per trial, claims that end with their process, and results."""

import contextlib
import datetime
import errno
import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from seedbed.errors import UserError
from seedbed.report import facts as run_facts
from seedbed.report import summaries
from seedbed.track import files, folders, jsonl
from seedbed.track.lock_holders import is_locked
from seedbed.track.rows import tail_lines
from seedbed.track.run import Run, full_name
from seedbed.track.text import format_value, one_line
from seedbed.tune.sweep.grid import Grid, from_json, to_json
from seedbed.tune.sweep.grid import words as words_of

# States of a run that has ended; in any other it can resume.
ENDS = ("done", "nan", "diverged")
DIVERGED = ("nan", "diverged")
# What identifies a sweep besides its settings.
_IDENTITY = ("recipe", "preset", "patience", "sampler")


@dataclass(frozen=True)
class Trial:
    """One cell: its number in order of work, and its settings."""

    number: int
    settings: dict[str, Any]


@dataclass(frozen=True)
class TrialStatus:
    trial: Trial
    state: str
    run: str
    step: int | None = None
    last_step: int | None = None
    loss: float | None = None
    metric: str | None = None
    best: float | None = None
    best_step: int | None = None
    seconds: float | None = None
    rate: float | None = None
    error: str = ""
    # The best of every evaluated number, and those of which more is better.
    metrics: dict[str, float] = field(default_factory=dict)
    higher: Sequence[str] = ()

    @property
    def sign(self) -> int:
        """-1 where more of the metric is better: the best trial has the lowest `sign * best`."""
        return -1 if self.metric in self.higher else 1

    def to_json(self) -> dict[str, Any]:
        shown = {k: v for k, v in vars(self).items() if k != "trial"}
        return {"trial": self.trial.number, "settings": self.trial.settings, **shown}


def folder_of(root: Path) -> Path:
    return Path(root).parent / "sweeps"


def default_name(recipe: str, preset: str, grid: Grid) -> str:
    return name_for(f"{Path(recipe).stem}-{preset}", [recipe, preset, to_json(grid)])


def name_for(title: str, identity: Any) -> str:
    """The same command gives the same name, so that it finds its folder again."""
    stem = re.sub(r"[^A-Za-z0-9]+", "-", title).strip("-")
    content = json.dumps(jsonl.finite(identity), sort_keys=True)
    return f"{stem[:60]}-{hashlib.sha256(content.encode()).hexdigest()[:6]}"


def require_same(
    what: str, theirs: dict[str, Any], mine: dict[str, Any], fix: str, show: Callable[[Any], str] = format_value
) -> None:
    """Raises a UserError that names the settings in which a command differs from what exists."""
    different = [key for key in {**theirs, **mine} if mine.get(key) != theirs.get(key)]
    if different:
        words = "; ".join(f"{key} {show(theirs.get(key))} there, {show(mine.get(key))} here" for key in different)
        raise UserError(f"{what} exists already with other settings: {words}\n{fix}")


class Sweep:
    """One folder under `sweeps/`. Its trials are ordinary runs named NAME-0007 under `runs/`."""

    def __init__(self, root: Path, name: str) -> None:
        self.root, self.name = Path(root), name
        self.path = folder_of(root) / name
        self.facts = jsonl.read_object(self.path / "sweep.json")
        if not all(isinstance(self.facts.get(key), dict) for key in ("axes", "spans", "fixed")):
            raise UserError(f"{self.path / 'sweep.json'} is damaged: it lacks axes, spans or fixed")
        if not all(isinstance(self.facts.get(key), str) for key in ("recipe", "preset")):
            raise UserError(f"{self.path / 'sweep.json'} is damaged: it lacks recipe or preset")
        self.grid = from_json(self.facts)
        self._results: dict[int, TrialStatus] = {}

    @classmethod
    def open(cls, root: Path, name: str) -> "Sweep":
        name = Path(name).name
        top = folder_of(root)
        if name and (top / name / "sweep.json").is_file():
            return cls(root, name)
        import difflib

        known = sorted(p.parent.name for p in top.glob("*/sweep.json"))
        if not known:
            start = "start one with: seedbed sweep RECIPE/PRESET key=a,b,c"
            raise UserError(f"there is no sweep {name!r}: {top} holds none yet; {start}")
        near = difflib.get_close_matches(name, known, 3, 0.4) or known[-3:]
        raise UserError(f"there is no sweep {name!r} in {top}; nearest: {', '.join(near)}")

    @classmethod
    def create_or_join(cls, root: Path, name: str, grid: Grid, settings: Sequence[dict[str, Any]], **facts: Any) -> "Sweep":
        """Creates a sweep atomically, or joins an existing one with equal settings."""
        folders.check_name(f"{name}-0001")
        path = folder_of(root) / name
        facts |= to_json(grid)
        if not path.exists():
            taken = sorted(p.name for p in Path(root).glob(f"{name}-[0-9][0-9][0-9][0-9]"))
            if taken:
                raise UserError(f"run {taken[0]} exists and belongs to no sweep that is there; choose another --name")
            created = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
            _create(path, {**facts, "created": created}, settings)
        found = cls(root, name)
        fix = "choose another --name, or the same settings to join it"
        require_same(f"sweep {name}", _identity(found.facts), _identity(facts), fix, _format)
        return found

    def title(self) -> str:
        return full_name(self.facts["recipe"], self.facts["preset"])

    def command(self) -> str:
        facts, words = self.facts, []
        for axis in self.grid.axes:
            texts = [format_value(value) for value in axis.values]
            between = "|" if any("," in text for text in texts) else ","
            words.append(f"{axis.key}={between.join(texts)}")
        words += [f"{span.key}={_format(vars(span))}" for span in self.grid.spans]
        words += words_of(self.grid.fixed)
        words += ["--suggest", str(facts["suggest"]), "--sampler", facts["sampler"]] if facts.get("sampler") else []
        words += ["--metric", str(facts["metric"])] if facts.get("metric") else []
        words += ["--patience", str(facts["patience"])] if facts.get("patience") else []
        return shlex.join(["seedbed", "sweep", self.title(), *words, "--name", self.name])

    def run_name(self, trial: Trial) -> str:
        return f"{self.name}-{trial.number:04d}"

    def trials(self) -> list[Trial]:
        found = []
        for path in sorted((self.path / "trials").glob("[0-9]*.json")):
            settings = jsonl.read_object(path).get("settings")
            if not isinstance(settings, dict):
                raise UserError(f"{path} is damaged: it lacks settings")
            found.append(Trial(int(path.stem), {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}))
        return found

    def add(self, settings: dict[str, Any], **facts: Any) -> Trial:
        """Adds a trial; only while `locked`."""
        number = max((trial.number for trial in self.trials()), default=0) + 1
        files.write_atomic(_trial_path(self.path, number), jsonl.pretty({"settings": settings, **facts}))
        return Trial(number, settings)

    @contextlib.contextmanager
    def locked(self, name: str = "lock") -> Iterator[None]:
        """Locks the sweep against other workers, while trials are added; without effect on a disk without locks."""
        fd = folders.open_lock(self.path / name)
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            folders.release(fd)

    def claim(self, trial: Trial) -> int | None:
        """Claims a trial for this process until `locks.release`; None when it is taken or has ended."""
        fd = folders.open_lock(self.path / "claims" / f"{trial.number:04d}")
        try:
            mine = folders.try_lock(fd)
        except OSError:
            mine = True  # a disk without locks: one process at a time, as with runs
        # The run may have been resumed by hand.
        if mine and self.result(trial) is None and not Run(self.root / self.run_name(trial)).is_running():
            folders.sign(fd)
            return fd
        folders.release(fd)
        return None

    def is_claimed(self, trial: Trial) -> bool:
        return is_locked(self.path / "claims" / f"{trial.number:04d}")

    def result(self, trial: Trial) -> TrialStatus | None:
        """The result of a trial; it remains when the run's folder is removed."""
        if trial.number not in self._results:
            path = self._result_path(trial)
            if not path.is_file():
                return None
            values = jsonl.read_object(path)
            known = {k: values[k] for k in TrialStatus.__dataclass_fields__ if k in values and k != "trial"}
            self._results[trial.number] = TrialStatus(**{"state": "failed", "run": self.run_name(trial), **known, "trial": trial})
        return self._results[trial.number]

    def record(self, trial: Trial, error: str = "") -> TrialStatus | None:
        """Writes the trial's result if its run has ended, or failed with this error; None when it can continue."""
        run = Run(self.root / self.run_name(trial))
        state = "failed" if error else str(run.status().get("status"))
        if not error and state not in ENDS:
            return None
        if state == "done" and any(event.get("kind") == "early_stop" for event in _last_events(run)):
            state = "stopped early"
        more = dict(zip(("metrics", "higher"), _all_best(run.events()), strict=True))
        found = replace(self._read_run(trial), state=state, error=one_line(error)[:300], **more)
        files.write_atomic(self._result_path(trial), jsonl.pretty(found.to_json()))
        return found

    def forget_failures(self) -> int:
        """Makes failed trials available again; returns how many there are."""
        failed = [t for t in self.trials() if (found := self.result(t)) and found.state == "failed"]
        for trial in failed:
            self._result_path(trial).unlink(missing_ok=True)
            self._results.pop(trial.number, None)
        return len(failed)

    def status(self, trial: Trial) -> TrialStatus:
        return self.result(trial) or self._read_run(trial)

    def statuses(self, metric: str | None = None) -> list[TrialStatus]:
        """Every trial, by the metric that decides `best`, that of the sweep's --metric, or another one."""
        found = [self.status(trial) for trial in self.trials()]
        metric = metric or self.facts.get("metric")
        return [self._by(one, metric) for one in found] if metric else found

    def _by(self, found: TrialStatus, metric: str) -> TrialStatus:
        metrics, higher = found.metrics, found.higher
        if not metrics and found.best is not None:  # it still runs, or ended before all metrics were recorded
            metrics, higher = _all_best(Run(self.root / found.run).events())
        return replace(found, metric=metric, best=metrics.get(metric), metrics=metrics, higher=higher)

    def _read_run(self, trial: Trial) -> TrialStatus:
        """The state of an unfinished run by its files."""
        state = "running" if self.is_claimed(trial) else "waiting"
        run = Run(self.root / self.run_name(trial))
        if not run.path.is_dir():
            return TrialStatus(trial, state, run.name)
        short, saved = summaries.summary(run), run.status()
        events = _last_events(run)
        metric, _ = run_facts.evaluations(events)
        higher = [metric] if metric and run_facts.is_higher_better(events, metric) else []
        clock = saved.get("clock")
        seconds = clock.get("train") if isinstance(clock, dict) else None
        row = next(iter(jsonl.decode(tail_lines(run.path / "rows.jsonl", 4096)[-1:])), {})
        numbers: dict[str, Any] = {key: short[key] for key in ("step", "last_step", "loss", "best")}
        numbers["rate"] = row.get("items_per_s")
        about = {"metric": metric, "higher": higher, "best_step": saved.get("best_step"), "seconds": seconds}
        return TrialStatus(trial, state, run.name, **numbers, **about)

    def _result_path(self, trial: Trial) -> Path:
        return self.path / "results" / f"{trial.number:04d}.json"


def _all_best(events: Sequence[dict[str, Any]]) -> tuple[dict[str, float], list[str]]:
    """The best value of every evaluated number by name, and the names of those of which more is better."""
    evaluated = [event for event in events if event.get("kind") == "eval"]
    names = {k: 0 for e in evaluated for k, v in e.items() if run_facts.is_number(v) and k not in ("step", "time", "seconds")}
    found = {name: point[1] for name in names if (point := run_facts.best(events, name))}
    return found, [name for name in found if run_facts.is_higher_better(events, name)]


def _last_events(run: Run) -> list[dict[str, Any]]:
    return jsonl.decode(tail_lines(run.path / "events.jsonl"))


def _trial_path(folder: Path, number: int) -> Path:
    return folder / "trials" / f"{number:04d}.json"


def _create(path: Path, facts: dict[str, Any], settings: Sequence[dict[str, Any]]) -> None:
    aside = path.with_name(f".new-{os.getpid()}-{time.monotonic_ns()}.tmp")
    try:
        for name in ("trials", "claims", "results"):
            (aside / name).mkdir(parents=True)
        (path.parent / ".gitignore").write_text("*\n")  # no later run counts as dirty
        files.write_synced(aside / "sweep.json", jsonl.pretty(facts))
        for number, values in enumerate(settings, start=1):
            files.write_synced(_trial_path(aside, number), jsonl.pretty({"settings": values}))
        files.replace(aside, path)
        files.sync_folder(path.parent)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        # Another process may have created the same sweep meanwhile: then it is joined.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise UserError(f"the sweep cannot be created in {path.parent}: {error.strerror or error}") from None


def _identity(facts: dict[str, Any]) -> dict[str, Any]:
    """What two sweeps are compared by: recipe, options, and every key with its values."""
    varied = {**facts["axes"], **facts["spans"], **facts["fixed"]}
    return jsonl.finite({**{key: facts.get(key) for key in _IDENTITY}, **varied})


def _format(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value['low']:g}..{value['high']:g}" + (f"..{value['step']}" if (value["step"] or 1) > 1 else "")
    return format_value(value) if value is not None else "not set"
