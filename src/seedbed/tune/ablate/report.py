"""The report as Markdown and as a table for a terminal."""

import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from seedbed.track import files
from seedbed.track.text import duration, number, scaled, table, width
from seedbed.tune.ablate import figures
from seedbed.tune.ablate.axes import BASELINE, COMBINED
from seedbed.tune.ablate.study import ROUND, Entry, Study
from seedbed.tune.ablate.summary import BLIND_NOISE, EXPLAIN, Line, equal_time, loss_step

GIB = 2**30
SPEED = ("change", "items/s [p10, p90]", "ms/step", "x baseline", "predicted", "verdict")
COST = ("change", "parameters", "FLOP/item", "TFLOP/s", "MFU nominal", "MFU measured", "HFU", "allocated")
COST_END = ("retries", "data wait", "compile s")


def write(study: Study, summary: Sequence[Line], notes: Sequence[str]) -> None:
    """Writes report.md, report.json and the two figures."""
    study.save([asdict(line) for line in summary])
    drawn = figures.draw_all(study, summary)
    files.write_atomic(study.path / "report.md", markdown(study, summary, notes, drawn))


def markdown(study: Study, summary: Sequence[Line], notes: Sequence[str], drawn: Sequence[str]) -> str:
    parts = [f"# {study.path.name}: effect of each setting on {study.title}", ""]
    parts += [f"- {fact}" for fact in facts(study)]
    parts += ["", "## Speed", "", *_table(SPEED, [_speed(line) for line in summary]), "", *(f"- {note}" for note in notes)]
    held = "reserved" if study.facts.get("kind") == "cuda" else "peak RSS"
    parts += ["", "## Cost", "", *_table([*COST, held, *COST_END], [_cost(line) for line in summary if line.outcome == "ok"])]
    learned = ("change", f"loss at step {loss_step(study)}", f"loss after {equal_time(study):.3g} s", "attention", "step")
    parts += ["", "## Learning", "", *_table(learned, [_learned(line) for line in summary if line.outcome == "ok"])]
    parts += ["", "## Predictions, written before each row was measured", ""]
    known = [line for line in summary if line.predicted is not None and line.axis != BASELINE]
    parts += [f"- {line.label}: {_ratio(line.predicted)}: {line.basis}" for line in known]
    for name in drawn:
        parts += ["", f"![{name.removesuffix('.png')}]({name})"]
    return "\n".join([*parts, "", f"Made by `{command(study)}`.", ""])


def facts(study: Study) -> list[str]:
    """Where and how it was measured."""
    known = study.facts
    where = [known.get("device"), f"torch {known.get('torch')}", known.get("driver"), known.get("code"), known.get("created")]
    execution = f"{study.steps} timed steps per repeat after a warm-up, {study.num_repeats} repeats per row"
    execution += ", each between repeats of the baseline" if study.spacing == 1 else ", with repeats of the baseline between them"
    found = [", ".join(str(w) for w in where if w), f"{execution}; all rows of a round start from the same seed"]
    settings = study.identity.get("settings")
    return [*found, *([f"baseline with {' '.join(settings)}"] if settings else []), peaks(study)]


def peaks(study: Study) -> str:
    """The peaks that MFU refers to, or why there is none."""
    nominal, measured = (study.facts.get(key) for key in ("nominal_peak", "measured_peak"))
    if not (nominal or measured):
        return f"no MFU: the peak of {study.facts.get('device')} is not known"
    shown = [f"{value / 1e12:.0f} TFLOP/s {name}" for name, value in (("nominal", nominal), ("measured", measured)) if value]
    return f"MFU against bf16 peaks: {', '.join(shown)}"


def notes(summary: Sequence[Line], repeats: int) -> list[str]:
    """Caveats for the reader."""
    found = []
    if repeats < 2:
        found.append(f"one repeat per row: differences up to {BLIND_NOISE:.0%} are taken for noise; --repeats 3 would measure it")
    odd = [line.label for line in summary if line.explain]
    if odd:
        found.append(f"to explain, since off by more than {EXPLAIN:g}x from their prediction: {', '.join(odd)}")
    combined = next((line for line in summary if line.axis == COMBINED), None)
    if combined and combined.outcome == "ok":
        found.append(f"combined: {combined.basis}; only axes that leave the model as it is are combined")
    return found


def _speed(line: Line) -> list[str]:
    if line.outcome != "ok":
        return [line.label, line.outcome, "", "", _ratio(line.predicted), line.why]
    rate = f"{_rate(line.items_per_s)} [{_rate(line.low)}, {_rate(line.high)}]"
    noise = f" ± {line.ratio * line.noise:.3f}" if line.noise is not None and line.ratio is not None else ""
    verdict = line.verdict + (", explain" if line.explain else "")
    return [line.label, rate, f"{line.ms:.3g}", f"{line.ratio:.3f}{noise}", _ratio(line.predicted), verdict]


def _cost(line: Line) -> list[str]:
    shares = ["-" if share is None else f"{share:.1%}" for share in (line.mfu, line.mfu_measured, line.hfu)]
    sizes = ["-" if not size else f"{size / GIB:.2f} GiB" for size in (line.allocated, line.reserved)]
    flops = "-" if not line.flops else scaled(line.flops)
    tflops = "-" if line.tflops is None else f"{line.tflops:.3g}"
    rest = [str(line.retries), "-" if line.wait is None else f"{line.wait:.1%}", f"{line.compile_seconds:.1f}"]
    return [line.label, f"{line.num_params:,}", flops, tflops, *shares, *sizes, *rest]


def _learned(line: Line) -> list[str]:
    spread = f" ± {line.loss_sd:.2g}" if line.loss_sd is not None else ""
    loss = "not finite" if line.loss is None else f"{number(line.loss)}{spread}"
    return [line.label, loss, number(line.loss_at_time), line.attention, line.execution]


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    right = ["---"] + ["---:" if name not in ("verdict", "attention", "step") else "---" for name in header[1:]]
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return ["| " + " | ".join(row) + " |" for row in (header, right, *cells)]


def command(study: Study) -> str:
    """The command that makes or continues this report."""
    known = study.identity
    words = [*known["axes"], *(w for s in known["settings"] for w in ("--set", s))]
    words += ["--steps", str(known["steps"])] if known["steps"] else []
    return shlex.join(["seedbed", "ablate", study.title, *words, "--repeats", str(study.num_repeats), "--name", study.path.name])


def lines_of(study: Study, summary: Sequence[Line], notes: Sequence[str]) -> list[str]:
    """The report for a terminal."""
    header = ("change", "items/s", "ms/step", "x", "predicted", "peak", "loss", "verdict")
    rows = [_short(line) for line in summary]
    out = [f"ablate {study.title}  {'; '.join(facts(study)[-1:])}", table(header, rows, right=range(1, 7), max_width=width())]
    return [*out, *(f"note: {note}" for note in notes)]


def _short(line: Line) -> list[str]:
    if line.outcome != "ok":
        return [line.label, "", "", "", _ratio(line.predicted), "", "", f"{line.outcome}: {line.why}"]
    peak = f"{(line.allocated or line.reserved or 0) / GIB:.2f} GiB"
    verdict = line.verdict + (", explain" if line.explain else "")
    speed = [_rate(line.items_per_s), f"{line.ms:.3g}", f"{line.ratio:.3f}", _ratio(line.predicted)]
    return [line.label, *speed, peak, number(line.loss), verdict]


def progress(study: Study, place: int, entry: Entry) -> str:
    """The state of the measurement."""
    left, ratio = study.seconds_left(), entry.prediction.ratio if entry.prediction else 1.0
    line = f"round {place // ROUND + 1} of {2 * study.num_repeats}, {entry.row.label}, predicted x{ratio:.2f}"
    return line + (f", about {duration(left)} left" if math.isfinite(left) else "")


def to_json(study: Study, summary: Sequence[Line], notes: Sequence[str]) -> dict[str, Any]:
    """The report for scripts; single steps stay in report.json."""
    shown = {"name": study.path.name, "path": str(study.path), "recipe": study.title, "facts": study.facts}
    return {
        **shown,
        "steps": study.steps,
        "repeats": study.num_repeats,
        "rows": [asdict(line) for line in summary],
        "notes": list(notes),
    }
