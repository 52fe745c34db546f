"""The Python interface: use trained runs, read what runs wrote, train and sweep as the commands do."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seedbed.config import flat
from seedbed.errors import UserError
from seedbed.track import folders
from seedbed.track.run import Run as RunFolder
from seedbed.track.run_names import run_names
from seedbed.track.text import format_value

if TYPE_CHECKING:
    from seedbed.inference import TrainedModel

RUNS = Path("runs")
# Values by column name, all of one length; None where a line has no such value.
Columns = dict[str, list[Any]]


@dataclass(frozen=True)
class Run:
    """A run folder, to read. `rows`, `events` and `evals` fit into `pandas.DataFrame(...)` and `polars.DataFrame(...)`."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def status(self) -> str:
        """running, done, interrupted, failed, stalled, nan or diverged."""
        return str(RunFolder(self.path).status().get("status", "unknown"))

    @property
    def settings(self) -> dict[str, Any]:
        """Every setting by its dotted key."""
        return flat(RunFolder(self.path).config_json()["config"])

    def rows(self) -> Columns:
        """One line per log point; nested numbers have dotted names."""
        return columns(RunFolder(self.path).rows())

    def events(self) -> Columns:
        """One line per event: evaluations, samples, checkpoints, alarms."""
        return columns(RunFolder(self.path).events())

    def evals(self) -> Columns:
        """One line per evaluation: its step and metrics."""
        found = (event for event in RunFolder(self.path).events() if event.get("kind") == "eval")
        return columns({key: value for key, value in event.items() if key not in ("kind", "time")} for event in found)


def columns(lines: Iterable[Mapping[str, Any]]) -> Columns:
    """A list per key of any line, in order of appearance."""
    flattened = [flat(dict(line)) for line in lines]
    keys = dict.fromkeys(key for line in flattened for key in line)
    return {key: [line.get(key) for line in flattened] for key in keys}


def runs(root: str | Path = RUNS) -> list[Run]:
    """All runs in a folder, by name."""
    return [Run(Path(root) / name) for name in run_names(Path(root))]


def load(
    run: str | Path | Run,
    checkpoint: str = "",
    *,
    device: str = "auto",
    dtype: str = "",
    root: str | Path = RUNS,
    trust: bool = False,
) -> TrainedModel:
    """A trained run with its best weights, or those of a named checkpoint such as "step-000240".

    `run` is a name in `root`, a run folder anywhere, or a folder that `seedbed export` wrote. Neither optimizer nor training data
    are needed. `trust` confirms that the recipe file of a run that was trained elsewhere may be executed.
    """
    from seedbed import inference
    from seedbed.recipes.saved import confirm_saved

    folder, name = _locate(run, Path(root))
    if trust:
        confirm_saved(RunFolder.open(folder, name).config_json())
    return inference.load(folder, name, checkpoint, device, dtype=dtype)


def _locate(run: str | Path | Run, root: Path) -> tuple[Path, str]:
    """The folder that holds a run, and its name in there."""
    if isinstance(run, Run):
        return run.path.parent, run.name
    path = Path(run).expanduser()
    if len(path.parts) == 1 and isinstance(run, str):
        return root, run
    if not path.is_dir():
        raise UserError(f"there is no folder {path}; name a run in {root}, or the folder of a run or an export")
    return path.resolve().parent, path.resolve().name


def train(
    preset: str,
    *settings: str,
    run: str | None = None,
    why: str = "",
    parent: str | None = None,
    check: bool = True,
    dirty: bool = False,
    root: str | Path = RUNS,
    **values: Any,
) -> Run:
    """Train a new run to its end, as `seedbed train` does: in this process, with its folder, report and journal entry.

    Settings are given as on the command line ("optim.lr=1e-3"), or by key: `steps=100`, `**{"optim.lr": 1e-3}`. An interrupt
    saves a checkpoint and returns the run as "interrupted"; `seedbed resume` continues it. A notebook shows the loss meanwhile.
    """
    from seedbed import launch
    from seedbed.launch import local
    from seedbed.report.notebook import live_curve

    words = _words(settings, values)
    if launch.to_train(preset, words):
        raise UserError("a run on several ranks has several processes; start it with the command: seedbed train")
    root = Path(root)
    name = run or folders.new_name(preset, datetime.datetime.now().astimezone(), set(run_names(root)))
    facts = {"run_name": name, "why": why, "parent": parent, "dirty": dirty}
    with live_curve(root / name):
        local.train(preset, words, root=root, check="quick" if check else "skip", **facts)
    if (ended := Run(root / name)).status not in ("done", "interrupted"):
        raise UserError(f"run {name} ended as {ended.status!r}; {ended.path / 'console.log'} says why")
    return ended


def sweep(
    preset: str,
    *settings: str,
    seeds: int | None = None,
    name: str | None = None,
    why: str = "",
    check: bool = True,
    dirty: bool = False,
    root: str | Path = RUNS,
    **values: Any,
) -> list[Run]:
    """Train a grid as `seedbed sweep` does, and return its runs: a setting with several values is a list, or text "1e-3,3e-3".

    The same call continues a sweep that was interrupted.
    """
    from seedbed.launch import trials
    from seedbed.tune.sweep import verbs
    from seedbed.tune.sweep.folder import Sweep

    options = verbs.Options(root=Path(root), dirty=dirty, check=check)
    made = verbs.draft(preset, _words(settings, values), options, name=name, why=why, num_seeds=seeds)
    verbs.start(made, options, lambda: trials)
    found = Sweep.open(Path(root), made.name)
    return [Run(Path(root) / found.run_name(trial)) for trial in found.trials() if (Path(root) / found.run_name(trial)).is_dir()]


def _words(settings: Sequence[str], values: Mapping[str, Any]) -> list[str]:
    """Settings as the command line has them; several values are separated as sweeps read them."""
    several = {key: value for key, value in values.items() if isinstance(value, list | tuple)}
    words = [f"{key}={'|'.join(format_value(one) for one in value)}" for key, value in several.items()]
    return [*settings, *words, *(f"{key}={format_value(value)}" for key, value in values.items() if key not in several)]
