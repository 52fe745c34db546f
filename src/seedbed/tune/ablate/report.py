"""The report as Markdown with two figures, predicted against measured and a waterfall, and as a table for a terminal."""

import io
import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from seedbed.track import files
from seedbed.track.text import duration, number, scaled, table, width
from seedbed.tune.ablate.axes import BASELINE, COMBINED
from seedbed.tune.ablate.study import BLIND_NOISE, EXPLAIN, ROUND, Entry, Line, Study, equal_time, loss_step

GIB = 2**30
SPEED = ("change", "items/s [p10, p90]", "ms/step", "x baseline", "predicted", "verdict")
COST = ("change", "parameters", "FLOP/item", "TFLOP/s", "MFU nominal", "MFU measured", "HFU", "allocated")
COST_END = ("retries", "data wait", "compile s")

INK, BAND, GRID = "#1f3b57", "#dbe6f1", "#e4e4e4"
LABEL = 0.034  # of the picture's height
COLOURS = {"faster": "#588157", "slower": "#c8553d", "within noise": "#9a9a9a"}


def write(study: Study, summary: Sequence[Line], notes: Sequence[str]) -> None:
    study.save([asdict(line) for line in summary])
    drawn = draw_all(study, summary)
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
    known = study.identity
    words = [*known["axes"], *(w for s in known["settings"] for w in ("--set", s))]
    words += ["--steps", str(known["steps"])] if known["steps"] else []
    return shlex.join(["seedbed", "ablate", study.title, *words, "--repeats", str(study.num_repeats), "--name", study.path.name])


def lines_of(study: Study, summary: Sequence[Line], notes: Sequence[str]) -> list[str]:
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
    left, ratio = study.seconds_left(), entry.prediction.ratio if entry.prediction else 1.0
    line = f"round {place // ROUND + 1} of {2 * study.num_repeats}, {entry.row.label}, predicted x{ratio:.2f}"
    return line + (f", about {duration(left)} left" if math.isfinite(left) else "")


def to_json(study: Study, summary: Sequence[Line], notes: Sequence[str]) -> dict[str, Any]:
    """The report for scripts; single steps stay in report.json."""
    shown = {"name": study.path.name, "path": str(study.path), "recipe": study.title, "facts": study.facts}
    rows = [asdict(line) for line in summary]
    return {**shown, "steps": study.steps, "repeats": study.num_repeats, "rows": rows, "notes": list(notes)}


def draw_all(study: Study, summary: Sequence[Line]) -> list[str]:
    """Writes both figures once there is a row to show; returns their names."""
    shown = [line for line in summary if line.ratio is not None and line.predicted is not None and line.axis != BASELINE]
    if not shown:
        return []
    drawn = {
        "predicted.png": _scatter(shown, f"{study.title}: predicted and measured speed against the baseline"),
        "waterfall.png": _waterfall(shown, f"{study.title}: effect of each change"),
    }
    for name, figure in drawn.items():
        out = io.BytesIO()
        figure.savefig(out, format="png")
        files.write_atomic(study.path / name, out.getvalue())
    return list(drawn)


def _scatter(shown: Sequence[Line], title: str) -> Figure:
    axes = _axes((9.4, 6.4), title, "predicted, times the baseline's items per second")
    numbers = [x for line in shown for x in (line.ratio, line.predicted) if x]
    low, high = min(*numbers, 1.0) / 1.35, max(*numbers, 1.0) * 1.35
    axes.fill_between([low, high], [low / EXPLAIN, high / EXPLAIN], [low * EXPLAIN, high * EXPLAIN], color=BAND, linewidth=0)
    axes.plot([low, high], [low, high], color=INK, linewidth=1.0)
    heights = _heights([math.log(line.ratio or 1.0) for line in shown], math.log(low), math.log(high))
    for line, height in zip(shown, heights, strict=True):
        axes.plot(line.predicted, line.ratio, "o", color=COLOURS[line.verdict], markersize=7, zorder=3)
        arrow = {"arrowstyle": "-", "color": "#b8b8b8", "linewidth": 0.6, "shrinkB": 4, "relpos": (0.0, 0.5)}
        text = f"{line.label}  {line.ratio:.2f}" + ("  explain" if line.explain else "")
        where = {"xytext": (1.03, height), "textcoords": "axes fraction", "va": "center", "arrowprops": arrow}
        axes.annotate(text, (line.predicted, line.ratio), fontsize=7.5, annotation_clip=False, **where)
    _log(axes.xaxis, axes.set_xscale, axes.set_xlim, low, high)
    _log(axes.yaxis, axes.set_yscale, axes.set_ylim, low, high)
    axes.set_ylabel("measured")
    for verdict, colour in COLOURS.items():
        axes.plot([], [], "o", color=colour, label=verdict)
    axes.fill_between([], [], [], color=BAND, label=f"inside the band: within {EXPLAIN:g}x of the prediction")
    axes.legend(loc="upper left", frameon=False, fontsize=8)
    return axes.figure


def _heights(values: Sequence[float], low: float, high: float) -> list[float]:
    """Label positions beside the points, in order, near their points and without overlap."""
    gap = min(LABEL, 1.0 / max(len(values), 1))
    order, offsets = np.argsort(values, kind="stable"), gap * np.arange(len(values))
    # Less their offsets, heights keep the gaps wherever they do not fall.
    wanted = (np.array(values)[order] - low) / (high - low) - offsets
    up, down = np.maximum.accumulate(wanted), np.minimum.accumulate(wanted[::-1])[::-1]
    # Both keep the gaps, so their mean does, centred on the points.
    heights = np.empty(len(values))
    heights[order] = np.clip((up + down) / 2, 0.0, 1.0 + gap - gap * len(values)) + offsets
    return heights.tolist()


def _waterfall(shown: Sequence[Line], title: str) -> Figure:
    """Single changes as bars from the baseline; then the chosen ones one after the other, and their combination."""
    singles = sorted((line for line in shown if line.axis != COMBINED), key=lambda line: line.ratio or 0.0, reverse=True)
    combined = next((line for line in shown if line.axis == COMBINED), None)
    chosen = [line for line in singles if combined and line.label in combined.basis.partition(": ")[2].split(", ")]
    num = len(singles) + (len(chosen) + 2 if combined else 0)
    size = 8.6, 1.5 + 0.3 * max(num, 3)
    axes = _axes(size, title, "times the baseline's items per second; a tick marks the prediction")
    bars = [(line.label, 1.0, line.ratio or 1.0, COLOURS[line.verdict], line.predicted, line.noise) for line in singles]
    if combined:
        reached = 1.0
        bars.append(("", 1.0, 1.0, "white", None, None))
        for line in chosen:
            bars.append((f"+ {line.label}", reached, reached * (line.ratio or 1.0), "#a3bfa0", None, None))
            reached *= line.ratio or 1.0
        bars.append(("combined, measured", 1.0, combined.ratio or 1.0, INK, combined.predicted, combined.noise))
    ends = [end for _, start, end, *_ in bars for end in (start, end)] + [line.predicted or 1.0 for line in shown]
    low, high = min(ends) / 1.2, max(ends) * 1.35
    for place, bar in enumerate(bars):
        _bar(axes, place, bar, high)
    axes.axvline(1.0, color=INK, linewidth=1.0, zorder=1)
    axes.set_yticks(range(len(bars)), [bar[0] for bar in bars], fontsize=8)
    axes.set_ylim(len(bars) - 0.4, -0.6)
    _log(axes.xaxis, axes.set_xscale, axes.set_xlim, low, high)
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)
    return axes.figure


def _bar(axes: Any, place: int, bar: tuple[str, float, float, str, float | None, float | None], high: float) -> None:
    label, start, end, colour, predicted, noise = bar
    if not label:
        return
    axes.barh(place, end - start, left=start, height=0.62, color=colour, zorder=2)
    if noise:
        axes.plot([end * (1 - noise), end * (1 + noise)], [place, place], color="#333333", linewidth=1.0, zorder=3)
    if predicted is not None:
        axes.plot([predicted, predicted], [place - 0.4, place + 0.4], color="black", linewidth=1.6, zorder=4)
    most = max(start, end * (1 + (noise or 0.0)), predicted or 0.0)
    axes.text(most * 1.015, place, f"{end:.2f}", va="center", fontsize=7.5, zorder=5)


def _log(axis: Any, scale: Any, limit: Any, low: float, high: float) -> None:
    """A logarithmic axis with plain tick labels: 0.5, 1, 2."""
    scale("log")
    limit(low, high)
    steps = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0) if high / low < 12 else (1.0, 2.0, 5.0)
    marks = [s * 10.0**e for e in range(-4, 5) for s in steps]
    fine = [0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.3] if high / low < 2.6 else []
    shown = sorted({round(m, 6) for m in (*marks, *fine) if low <= m <= high})
    axis.set_ticks(shown, labels=[f"{m:g}" for m in shown], fontsize=8)
    axis.set_ticks([], minor=True)


def _axes(size: tuple[float, float], title: str, label: str) -> Any:
    axes = Figure(figsize=size, dpi=120, layout="constrained").add_subplot()
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(label)
    return axes
