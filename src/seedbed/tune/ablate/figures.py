"""The two figures of a report: predicted against measured, and a waterfall of the changes."""

import io
import math
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from seedbed.track import files
from seedbed.tune.ablate.axes import BASELINE, COMBINED
from seedbed.tune.ablate.study import Study
from seedbed.tune.ablate.summary import EXPLAIN, Line

INK, BAND, GRID = "#1f3b57", "#dbe6f1", "#e4e4e4"
LABEL = 0.034  # of the picture's height
COLOURS = {"faster": "#588157", "slower": "#c8553d", "within noise": "#9a9a9a"}


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
    figure = Figure(figsize=(9.4, 6.4), dpi=120, layout="constrained")
    axes: Any = figure.add_subplot()
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
    axes.set_xlabel("predicted, times the baseline's items per second")
    axes.set_ylabel("measured")
    axes.set_title(title, loc="left", fontsize=10)
    _plain(axes)
    for verdict, colour in COLOURS.items():
        axes.plot([], [], "o", color=colour, label=verdict)
    axes.fill_between([], [], [], color=BAND, label=f"inside the band: within {EXPLAIN:g}x of the prediction")
    axes.legend(loc="upper left", frameon=False, fontsize=8)
    return figure


def _heights(values: Sequence[float], low: float, high: float) -> list[float]:
    """Label positions beside the points, in order, near their points and without overlap."""
    gap = min(LABEL, 1.0 / max(len(values), 1))
    order = sorted(range(len(values)), key=lambda i: values[i])
    wanted = [(values[i] - low) / (high - low) for i in order]
    up, down = _pushed(wanted, gap), [-h for h in reversed(_pushed([-h for h in reversed(wanted)], gap))]
    # Both keep the gaps, so their mean does, centred on the points.
    heights = [(a + b) / 2 for a, b in zip(up, down, strict=True)]
    top = 1.0
    for k in reversed(range(len(heights))):
        heights[k] = min(heights[k], top)
        top = heights[k] - gap
    heights = _pushed([max(h, 0.0) for h in heights], gap)
    return [height for _, height in sorted(zip(order, heights, strict=True))]


def _pushed(heights: Sequence[float], gap: float) -> list[float]:
    """Every height at least a gap above the one before."""
    out: list[float] = []
    for height in heights:
        out.append(max(height, out[-1] + gap) if out else height)
    return out


def _waterfall(shown: Sequence[Line], title: str) -> Figure:
    """Single changes as bars from the baseline; then the chosen ones one after the other, and their combination."""
    singles = sorted((line for line in shown if line.axis != COMBINED), key=lambda line: line.ratio or 0.0, reverse=True)
    combined = next((line for line in shown if line.axis == COMBINED), None)
    chosen = [line for line in singles if combined and line.label in combined.basis.partition(": ")[2].split(", ")]
    num = len(singles) + (len(chosen) + 2 if combined else 0)
    figure = Figure(figsize=(8.6, 1.5 + 0.3 * max(num, 3)), dpi=120, layout="constrained")
    axes: Any = figure.add_subplot()
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
    axes.set_xlabel("times the baseline's items per second; a tick marks the prediction")
    axes.set_title(title, loc="left", fontsize=10)
    _plain(axes)
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)
    return figure


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


def _plain(axes: Any) -> None:
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
