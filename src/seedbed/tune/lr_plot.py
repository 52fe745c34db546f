"""The picture of find-lr: the band of the repeats, their middle, and the suggested rates."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from seedbed.tune.lr import Finding, Ramp

INK, BAND, CONFIGURED = "#1f3b57", "#7fa8cf", "#9a9a9a"
COLOURS = ["#c8553d", "#588157", "#8d6cab"]


def band(ramps: list[Ramp]) -> tuple[np.ndarray, np.ndarray]:
    """Rates that every repeat reached, and the smoothed losses there, one row per repeat."""
    num = min(len(r.rates) for r in ramps)
    return ramps[0].rates[:num], np.stack([r.smooth[:num] for r in ramps])


def draw(finding: Finding, title: str, path: Path) -> None:
    """Write the plot as a PNG."""
    figure = Figure(figsize=(10, 5.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    rates, curves = band(finding.ramps)
    for ramp in finding.ramps:
        axes.plot(ramp.rates, ramp.losses, ".", color=BAND, alpha=0.35, markersize=3, zorder=1)
        axes.plot(ramp.rates, ramp.smooth, color=BAND, linewidth=0.8, zorder=2)
    axes.fill_between(rates, curves.min(0), curves.max(0), color=BAND, alpha=0.45, linewidth=0, zorder=1)
    axes.plot(rates, curves.mean(0), color=INK, linewidth=2.0, zorder=3, label=f"loss, smoothed, {len(curves)} repeats")
    _mark_rates(axes, finding)
    axes.set_xscale("log")
    axes.set_ylim(*limits(finding.ramps))
    axes.set_xlim(min(r.rates[0] for r in finding.ramps), max(r.rates[-1] for r in finding.ramps) * 1.5)
    axes.set_xlabel("learning rate (optim.lr; every group moves by the same factor)")
    axes.set_ylabel("loss")
    axes.set_title(title if finding.clear else f"{title}: no clear valley", loc="left")
    axes.grid(True, which="major", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower left", frameon=False, fontsize=9)
    figure.savefig(path)


def _mark_rates(axes, finding: Finding) -> None:
    axes.axvline(
        finding.configured, color=CONFIGURED, linestyle="--", linewidth=1.4, label=f"configured {finding.configured:.2g}"
    )
    for suggestion, colour in zip(finding.suggestions, COLOURS, strict=True):
        label = f"{suggestion.name} {suggestion.lr:.2g}"
        axes.axvline(suggestion.lr, color=colour, linewidth=1.6, label=label)
        if suggestion.high > suggestion.low:
            axes.axvspan(suggestion.low, suggestion.high, color=colour, alpha=0.08, linewidth=0)


def limits(ramps: list[Ramp]) -> tuple[float, float]:
    """From below the lowest loss to above the start; the explosion itself may leave the picture."""
    low = min(float(r.losses.min()) for r in ramps)
    start = max(float(r.smooth[0]) for r in ramps)
    room = max(start - low, 1e-3 * abs(start), 1e-9)
    return low - 0.1 * room, start + 0.5 * room
