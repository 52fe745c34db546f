"""ablate as a verb: read the axes, then predict and measure row after row, round after round, and tell."""

from __future__ import annotations

import datetime
import platform
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from json import dumps
from pathlib import Path
from typing import Any

import torch

from seedbed import config as configs
from seedbed.config import Config
from seedbed.data.feed import Data
from seedbed.errors import UserError
from seedbed.track import code, lines
from seedbed.track.flops import measured_peak, nominal_peak
from seedbed.tune import show
from seedbed.tune.ablate import axes, measuring, report, study, summary
from seedbed.tune.ablate.axes import BASELINE, COMBINED, Row
from seedbed.tune.ablate.measuring import Visit
from seedbed.tune.ablate.predictions import Oracle, product
from seedbed.tune.ablate.study import Entry, Study
from seedbed.tune.batch import frozen_heap
from seedbed.tune.bench import Bench

EXIT_OK, EXIT_FAILED = 0, 1
HALF = ("bf16", "fp16")
ROWS_PER_COMPILATION = 4


@dataclass
class Shelf:
    """The data of a config, opened once while nothing that it may depend on changes."""

    bench: Bench
    kept: dict[Any, Data] = field(default_factory=dict)

    def __call__(self, config: Config) -> Data:
        key = (config.data, config.model, config.limit, config.seed)
        if key not in self.kept:
            base = self.bench.config
            same = key == (base.data, base.model, base.limit, base.seed)
            self.kept = {key: self.bench.data if same else self.bench.recipe.open_data(config)}
        return self.kept[key]


@dataclass
class Session:
    """One process at work on a report."""

    bench: Bench
    study: Study
    oracle: Oracle
    data_of: Shelf
    tell: Callable[[str], None] = lambda text: None

    def config_of(self, entry: Entry, place: int = 0) -> Config:
        """A row's config in a round: every round has its own seed, the same for all rows."""
        config = axes.config_of(self.bench.config, entry.row)
        return replace(config, seed=config.seed + place // study.ROUND % self.study.repeats)

    def work(self) -> None:
        """Everything that is still waiting, then the combination of what was best."""
        self._measure_all()
        if self.study.combined is None and self.study.singles:
            self.study.entries.append(self._combination())
            self.study.save()
        self._measure_all()

    def _measure_all(self) -> None:
        while (found := next(self.study.waiting(), None)) is not None:
            place, entry = found
            if entry.prediction is None and not self._predict(entry):
                continue
            self.tell(report.progress(self.study, place, entry))
            config = self.config_of(entry, place)
            entry.visits[place] = self._skipped(entry) or measuring.visit(self.bench, config, self.data_of, self.study.steps)
            self.study.save()
            if entry.row.axis == BASELINE and entry.outcome != "ok":
                raise UserError(f"the baseline itself does not run ({entry.outcome}): {entry.why}")

    def _predict(self, entry: Entry) -> bool:
        """Write down what will happen, before it does; False when the row turns out to be impossible."""
        self.tell(f"predicting {entry.row.label}")
        try:
            entry.prediction = self.oracle.predict(entry.row.axis, self.config_of(entry))
        except UserError as problem:
            entry.visits[0] = Visit("not run", str(problem).splitlines()[0])
        self.study.save()
        return entry.prediction is not None

    def _skipped(self, entry: Entry) -> Visit | None:
        """A larger batch need not be tried where a smaller one did not fit."""
        batch = entry.row.settings.get("batch")
        if entry.row.axis != "batch" or batch is None:
            return None
        for other in self.study.singles:
            if other.row.axis == "batch" and other.outcome == "oom" and other.row.settings["batch"] < batch:
                return Visit("skipped", f"{other.row.label} was out of memory already")
        return None

    def _combination(self) -> Entry:
        best = summary.best_choices(self.study, self.summarise())
        if len(best) < 2:
            why = f"{best[0].row.label} is the only change" if best else "no change that leaves the model as it is was"
            return Entry(Row(COMBINED, why_not=f"{why} faster than noise"))
        settings = {key: value for entry in best for key, value in entry.row.settings.items()}
        row = Row(COMBINED, settings)
        try:
            axes.config_of(self.bench.config, row)
        except UserError as problem:
            return Entry(Row(COMBINED, why_not=str(problem)))
        ratios = {line.label: line.ratio or 1.0 for line in self.summarise()}
        names = [entry.row.label for entry in best]
        return Entry(row, product((ratios[name] for name in names), names))

    def summarise(self) -> list[summary.Line]:
        batches, overheads, no_mfu = {}, {}, {}
        for entry in self.study.entries:
            config = self.config_of(entry)
            batches[entry.row.label] = config.batch
            no_mfu[entry.row.label] = "" if config.precision in HALF and not config.float8 else "not a product of 16-bit numbers"
            if config.recompute != "none" and entry.outcome == "ok":
                overheads[entry.row.label] = self.oracle.overhead(config)
        return summary.summarise(self.study, batches, overheads, no_mfu)


def ablate(
    name: str,
    words: list[str],
    *,
    root: Path,
    settings: list[str],
    steps: int | None = None,
    repeats: int = 3,
    report_name: str | None = None,
    json: bool = False,
) -> int:
    """What each switch buys: one change per row against the baseline, and the best of them together."""
    bench = Bench.open(name, settings)
    oracle = Oracle(bench, data_of := Shelf(bench))

    def resize(depth: int) -> dict[str, Any]:
        return axes.equal_width(bench.config, depth, lambda config: oracle.tally(config).num_params)

    with show.telling("reading axes"):
        rows = axes.read(bench.config, words, resize) if words else axes.default(bench.config, bench.device.type, resize)
    identity = _identity(bench, words, settings, rows, steps, repeats)
    found, _ = study.open_study(root, report_name, identity, _facts(bench, root), rows, repeats, _spacing(bench.config))
    session = Session(bench, found, oracle, data_of)
    with show.telling(f"ablating {bench.name}") as tell, frozen_heap():
        session.tell = tell
        if not found.steps:
            tell("timing the baseline")
            found.steps = steps or measuring.steps_per_visit(bench)
            found.save()
        session.work()
    return _finish(session, json)


def _spacing(config: Config) -> int:
    """Rows between two visits to the baseline: one, unless each visit must compile it again."""
    compiled = config.compile != "off" or config.compile_autograd or config.compile_optimizer
    return ROWS_PER_COMPILATION if compiled else 1


def _finish(session: Session, json: bool) -> int:
    told = session.summarise()
    notes = report.notes(told, session.study.repeats)
    report.write(session.study, told, notes)
    if json:
        print(dumps(lines.finite(report.to_json(session.study, told, notes))))
        return EXIT_OK
    print("\n".join(report.lines_of(session.study, told, notes)))
    for file in ("report.md", "predicted.png", "waterfall.png"):
        if (session.study.path / file).exists():
            print(session.study.path / file)
    return EXIT_OK


def _identity(
    bench: Bench, words: list[str], settings: list[str], rows: list[Row], steps: int | None, repeats: int
) -> dict[str, Any]:
    """What a command must share with a report to go on with it."""
    asked = {"recipe": bench.name, "axes": list(words), "settings": list(settings), "steps": steps, "repeats": repeats}
    made = {"rows": [row.label for row in rows], "config": configs.digest(bench.config)}
    return {**asked, **made, "device": _device_name(bench.device), "torch": torch.__version__}


def _facts(bench: Bench, root: Path) -> dict[str, Any]:
    """Where the numbers come from. Peaks are measured in the same process as the rows."""
    cuda = bench.device.type == "cuda"
    device = _device_name(bench.device)
    return {
        "device": device,
        "kind": bench.device.type,
        "torch": torch.__version__,
        "driver": _driver() if cuda else f"{torch.get_num_threads()} threads",
        "code": code.describe(code.state(Path.cwd(), root)),
        "created": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "nominal_peak": nominal_peak(device) if cuda else None,
        "measured_peak": measured_peak(bench.device) if cuda else None,
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({platform.processor() or platform.machine()})"


def _driver() -> str:
    """CUDA as torch was built for it, and the driver's version where Linux tells it."""
    try:
        found = re.search(r"\b\d+\.\d+(?:\.\d+)?\b", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        found = None
    return f"CUDA {torch.version.cuda}" + (f", driver {found[0]}" if found else "")
