"""The figure of find-lr: loss of the trials over the rate, the configured rate, and the likely range of the best."""

import math
from pathlib import Path

from matplotlib.figure import Figure

from seedbed.tune.lr import LrResult
from seedbed.tune.lr_trial import Trial

INK, BAND, CONFIGURED, FOUND = "#1f3b57", "#7fa8cf", "#9a9a9a", "#588157"


def draw(finding: LrResult, title: str, path: Path) -> None:
    """Writes the figure as a PNG."""
    figure = Figure(figsize=(10, 5.6), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    trials, metric = finding.compared, finding.metric
    lengths = sorted({t.num_steps for t in trials})
    for num_steps in lengths:
        is_last = num_steps == lengths[-1]
        for number, points in enumerate(curves(trials, num_steps)):
            label = f"{metric} after {num_steps:,} steps" if not number else None
            rates, losses = [finding.configured * factor for factor, _ in points], [loss for _, loss in points]
            axes.plot(rates, losses, "o-", color=INK if is_last else BAND, linewidth=1.6 if is_last else 1.0, label=label)
    axes.axvline(
        finding.configured, color=CONFIGURED, linestyle="--", linewidth=1.4, label=f"configured {finding.configured:.2g}"
    )
    label = f"likely {finding.low:.2g} to {finding.high:.2g} for {finding.run_steps:,} steps"
    axes.axvspan(finding.low, finding.high, color=FOUND, alpha=0.12, linewidth=0, label=label)
    if finding.lr is not None:
        axes.axvline(finding.lr, color=FOUND, linewidth=1.8, label=f"best, about {finding.lr:.2g}")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:.2g}")
    axes.set_ylim(*limits(trials))
    axes.set_xlabel("learning rate (optim.lr; every group moves by the same factor)")
    axes.set_ylabel("training loss on the items that would come next" if trials == finding.trials else f"evaluation: {metric}")
    axes.set_title(title if finding.clear else f"{title}: no single best rate", loc="left")
    axes.grid(True, which="major", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="best", frameon=False, fontsize=9)
    figure.savefig(path)


def curves(trials: list[Trial], num_steps: int) -> list[list[tuple[float, float]]]:
    """Factors and losses of trials of one length that did not diverge, by repeat."""
    repeats = sorted({t.repeat for t in trials if t.num_steps == num_steps})
    found = [t for t in trials if t.num_steps == num_steps and t.factor and math.isfinite(t.loss)]
    return [sorted((t.factor, t.loss) for t in found if t.repeat == repeat) for repeat in repeats]


def limits(trials: list[Trial]) -> tuple[float, float]:
    """From below the lowest loss to above the untrained one; larger losses are cut off."""
    known = [t.loss for t in trials if math.isfinite(t.loss)]
    low = min(known, default=0.0)
    start = max((t.loss for t in trials if not t.factor and math.isfinite(t.loss)), default=max(known, default=1.0))
    room = max(start - low, 1e-3 * abs(start), 1e-9)
    return low - 0.1 * room, start + 0.3 * room
