"""ablate as a command: reads the axes, predicts and measures row by row in rounds, and reports."""

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
from seedbed.errors import EXIT_OK, UserError
from seedbed.track import code, jsonl
from seedbed.track.flops import measured_peak, nominal_peak
from seedbed.tune import show
from seedbed.tune.ablate import axes, measure, report, study
from seedbed.tune.ablate.axes import BASELINE, COMBINED, Row
from seedbed.tune.ablate.measure import Repeat
from seedbed.tune.ablate.predictions import Predictor, product
from seedbed.tune.ablate.study import Entry, Line, Study
from seedbed.tune.batch import frozen_heap, uncompiled
from seedbed.tune.workload import Workload

HALF = ("bf16", "fp16")
ROWS_PER_COMPILATION = 4


@dataclass
class DataCache:
    """The data of a config, reopened only when something it may depend on changes."""

    workload: Workload
    kept: dict[Any, Data] = field(default_factory=dict)

    def __call__(self, config: Config) -> Data:
        key = (config.data, config.model, config.limit, config.seed)
        if key not in self.kept:
            base = self.workload.config
            same = key == (base.data, base.model, base.limit, base.seed)
            self.kept = {key: self.workload.data if same else self.workload.recipe.open_data(config)}
        return self.kept[key]


@dataclass
class Session:
    workload: Workload
    study: Study
    predictor: Predictor
    data_of: DataCache
    on_status: Callable[[str], None] = lambda text: None

    def config_of(self, entry: Entry, place: int = 0) -> Config:
        """A row's config in a round: every round has its own seed, the same for all rows."""
        config = axes.config_of(self.workload.config, entry.row)
        return replace(config, seed=config.seed + place // study.ROUND % self.study.num_repeats)

    def work(self) -> None:
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
            self.on_status(report.progress(self.study, place, entry))
            config = self.config_of(entry, place)
            num_steps = self.study.steps
            entry.repeats[place] = self._skipped(entry) or measure.measure_repeat(self.workload, config, self.data_of, num_steps)
            self.study.save()
            if entry.row.axis == BASELINE and entry.outcome != "ok":
                raise UserError(f"the baseline itself does not run ({entry.outcome}): {entry.why}")

    def _predict(self, entry: Entry) -> bool:
        """Predicts a row before it is measured; False when the row turns out to be impossible."""
        self.on_status(f"predicting {entry.row.label}")
        try:
            entry.prediction = self.predictor.predict(entry.row.axis, self.config_of(entry))
        except UserError as problem:
            entry.repeats[0] = Repeat("not run", str(problem).splitlines()[0])
        self.study.save()
        return entry.prediction is not None

    def _skipped(self, entry: Entry) -> Repeat | None:
        """A larger batch is not tried where a smaller one did not fit."""
        for other in self.study.singles if entry.row.axis == "batch" else ():
            smaller = other.row.axis == "batch" and other.row.settings["batch"] < entry.row.settings["batch"]
            if smaller and other.outcome == "oom":
                return Repeat("skipped", f"{other.row.label} was out of memory already")
        return None

    def _combination(self) -> Entry:
        summary = self.summarise()
        best = study.best_choices(self.study, summary)
        if len(best) < 2:
            why = f"{best[0].row.label} is the only change" if best else "no change that leaves the model as it is was"
            return Entry(Row(COMBINED, skip_reason=f"{why} faster than noise"))
        row = Row(COMBINED, {key: value for entry in best for key, value in entry.row.settings.items()})
        try:
            axes.config_of(self.workload.config, row)
        except UserError as problem:
            return Entry(Row(COMBINED, skip_reason=str(problem)))
        ratios = {line.label: line.ratio or 1.0 for line in summary}
        names = [entry.row.label for entry in best]
        return Entry(row, product((ratios[name] for name in names), names))

    def summarise(self) -> list[Line]:
        batches, overheads, no_mfu = {}, {}, {}
        for entry in self.study.entries:
            config = self.config_of(entry)
            batches[entry.row.label] = config.batch
            no_mfu[entry.row.label] = "" if config.precision in HALF and not config.float8 else "not a product of 16-bit numbers"
            if config.remat != "none" and entry.outcome == "ok":
                overheads[entry.row.label] = self.predictor.overhead(config)
        return study.summarise(self.study, batches, overheads, no_mfu)


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
    """The effect of each setting: one change per row against the baseline, and the best of them combined."""
    workload = Workload.open(name, settings)
    predictor = Predictor(workload, data_of := DataCache(workload))

    def resize(depth: int) -> dict[str, Any]:
        return axes.equal_width(workload.config, depth, lambda config: predictor.op_counts(config).num_params)

    with show.status_line("reading axes"):
        rows = axes.read(workload.config, words, resize) if words else axes.default(workload.config, workload.device.type, resize)
    # What a command must share with a report to continue it.
    identity = {"recipe": workload.name, "axes": list(words), "settings": list(settings), "steps": steps, "repeats": repeats}
    identity |= {"rows": [row.label for row in rows], "config": configs.digest(workload.config)}
    identity |= {"device": _device_name(workload.device), "torch": torch.__version__}
    # Rows between two repeats of the baseline: one, unless each repeat must compile it again.
    spacing = 1 if uncompiled(workload.config) == workload.config else ROWS_PER_COMPILATION
    found = study.open_study(root, report_name, identity, _facts(workload, root), rows, repeats, spacing)
    session = Session(workload, found, predictor, data_of)
    with show.status_line(f"ablating {workload.name}") as on_status, frozen_heap():
        session.on_status = on_status
        if not found.steps:
            on_status("timing the baseline")
            found.steps = steps or measure.steps_per_repeat(workload)
            found.save()
        session.work()
    return _finish(session, json)


def _finish(session: Session, json: bool) -> int:
    summary = session.summarise()
    notes = report.notes(summary, session.study.num_repeats)
    report.write(session.study, summary, notes)
    if json:
        print(dumps(jsonl.finite(report.to_json(session.study, summary, notes))))
        return EXIT_OK
    print("\n".join(report.lines_of(session.study, summary, notes)))
    for file in ("report.md", "predicted.png", "waterfall.png"):
        if (session.study.path / file).exists():
            print(session.study.path / file)
    return EXIT_OK


def _facts(workload: Workload, root: Path) -> dict[str, Any]:
    """Device, versions and peaks, which are measured in this process."""
    cuda = workload.device.type == "cuda"
    device = _device_name(workload.device)
    return {
        "device": device,
        "kind": workload.device.type,
        "torch": torch.__version__,
        "driver": _driver() if cuda else f"{torch.get_num_threads()} threads",
        "code": code.describe(code.state(Path.cwd(), root)),
        "created": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "nominal_peak": nominal_peak(device) if cuda else None,
        "measured_peak": measured_peak(workload.device) if cuda else None,
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({platform.processor() or platform.machine()})"


def _driver() -> str:
    """The CUDA version of torch, and the driver version where Linux shows it."""
    try:
        found = re.search(r"\b\d+\.\d+(?:\.\d+)?\b", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        found = None
    return f"CUDA {torch.version.cuda}" + (f", driver {found[0]}" if found else "")
