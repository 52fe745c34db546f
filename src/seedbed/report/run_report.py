"""report.md and plots/loss.png: how a run went, in at most fifteen lines of facts and one picture."""

import io
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seedbed.config import flat
from seedbed.report import facts
from seedbed.track import clocks, code, files
from seedbed.track.events import KINDS, details, is_at_least
from seedbed.track.run import Run, full_name
from seedbed.track.text import clip, duration, format_value, number, one_line, scaled, size

PICTURE = "plots/loss.png"  # and beside it the same as SVG
# Units of metrics, by how their names begin.
_UNITS = {"nats": "nats", "psnr": "dB", "bits_per_byte": "bits per byte", "seconds": "s", "items_per_s": "items/s"}
_MAX_POINTS = 4000
_MAX_SAMPLE_LINES = 24


def write(run: Run) -> Path:
    """Draw the curves and write the report, replacing earlier ones."""
    rows, events = run.rows(), run.events()
    config = run.config_json()
    picture = draw(f"{run.name} · {full_name(config['recipe'], config['preset'])}", rows, events)
    for form, content in picture.items():
        (run.path / PICTURE).parent.mkdir(exist_ok=True)
        files.write_atomic((run.path / PICTURE).with_suffix(f".{form}"), content)
    parts = [f"# {run.name}", "", *(f"- {line}" for line in fact_lines(run, rows, events))]
    if picture:
        parts += ["", f"![loss, evaluation and learning rate over the steps]({PICTURE})"]
    files.write_atomic(run.path / "report.md", "\n".join([*parts, *_last_sample(events), ""]))
    return run.path / "report.md"


def fact_lines(run: Run, rows: list[dict[str, Any]], events: list[dict[str, Any]]) -> list[str]:
    """The facts, one per line; unknown ones are left out."""
    config, status = run.config_json(), run.status()
    if run.wall is not None:
        status["wall"] = run.wall()  # includes the time for the plot
    shown = {
        "status": outcome(run, status, rows),
        "recipe": run.title(),
        "why": one_line(str(config.get("why") or "")),
        "parent": config.get("parent"),
        "changed": ", ".join(f"{k}={format_value(v)}" for k, v in (config.get("changes") or {}).items()),
        "code": code.describe(run.code_json()),
        "start": _start(events),
        "loss": loss_line(rows),
        "evaluation": evaluation_line(events),
        "time": _times(status, rows),
        "speed": _speed(rows),
        "incidents": incident_line(events),
        "verdict": one_line(str(status.get("verdict") or "")),
        "reproduce": f"`{run.command()}`",
    }
    return [f"{name}: {text}" for name, text in shown.items() if text]


def outcome(run: Run, status: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    step = status.get("step", rows[-1].get("step") if rows else 0)
    of = f" of {status['last_step']}" if status.get("last_step") else ""
    return f"{facts.final_status(run, status)} at step {step}{of}"


def loss_line(rows: list[dict[str, Any]]) -> str:
    last = facts.last_losses(rows)
    if not last:
        return ""
    mean, sd = facts.mean_and_sd(last)
    return f"{number(mean)} ± {number(sd)} over the last {len(last)} rows" if math.isfinite(sd) else number(mean)


def evaluation_line(events: list[dict[str, Any]]) -> str:
    (metric, points), found = facts.evaluations(events), facts.best(events)
    if not found:
        return ""
    step, best = found
    last = "the last" if step == points[-1][0] else f"the last {number(points[-1][1])} at {points[-1][0]}"
    return f"best {metric} {number(best)} at step {step} ({last})"


def _start(events: list[dict[str, Any]]) -> str:
    first: dict[str, Any] = next((e for e in events if e.get("kind") == "start"), {})
    plain = {key: value for key, value in flat(details(first)).items() if isinstance(value, str | int | float)}
    return ", ".join(f"{one_line(key)} {clip(number(value), 40)}" for key, value in list(plain.items())[:10])


def _times(status: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Wall time of the run's last process by part; before its end, seconds per timer."""
    if wall := clocks.split_in_words(status):
        return wall
    clock = status.get("clock")
    if not isinstance(clock, dict) or not clock:
        clock = {"train": rows[-1]["seconds"]} if rows and "seconds" in rows[-1] else {}
    return ", ".join(f"{name} {duration(seconds)}" for name, seconds in clock.items() if facts.is_number(seconds))


def _speed(rows: list[dict[str, Any]]) -> str:
    found = {key: facts.median(rows, key) for key in ("items_per_s", "wait", "mfu")}
    memory = max((row["memory"] for row in rows if facts.is_number(row.get("memory"))), default=None)
    parts = [
        f"{scaled(found['items_per_s'])} items/s" if found["items_per_s"] is not None else "",
        f"data wait {found['wait']:.1%}" if found["wait"] is not None else "",
        f"MFU {found['mfu']:.1%}" if found["mfu"] is not None else "",
        f"memory {size(memory)}" if memory is not None else "",
    ]
    return ", ".join(filter(None, parts))


def incident_line(events: list[dict[str, Any]]) -> str:
    """Notices, warnings and errors, by kind and number."""
    counts = Counter(one_line(str(e.get("kind"))) for e in events if is_at_least("notice", e))
    return ", ".join(f"{counts[kind]} {kind}" for kind in dict.fromkeys([*KINDS, *counts]) if counts[kind])


def _last_sample(events: list[dict[str, Any]]) -> list[str]:
    last = next((e for e in reversed(events) if e.get("kind") == "sample"), None)
    if last is None:
        return []
    parts = ["", f"## Sample at step {last.get('step')}", ""]
    text = str(last.get("text") or "").splitlines()
    parts += [f"    {line}" for line in text[:_MAX_SAMPLE_LINES]]
    parts += ["    ..."] if len(text) > _MAX_SAMPLE_LINES else []
    return parts + [f"\n![sample]({name})" for name in last.get("files") or [] if str(name).endswith((".png", ".gif"))]


def draw(title: str, rows: list[dict[str, Any]], events: list[dict[str, Any]]) -> dict[str, bytes]:
    """Training loss, evaluation and learning rate over the steps as "png" and "svg"; empty when there is nothing to draw."""
    losses, rates = facts.series(rows, "loss"), facts.series(rows, "lr")
    if not losses:
        return {}
    from matplotlib.figure import Figure

    metric, points = facts.evaluations(events)
    apart = bool(points) and "loss" not in str(metric)
    heights = [3, *([1.5] if apart else []), 1]
    figure = Figure(figsize=(8, 1.4 + 1.15 * sum(heights)), dpi=120, layout="constrained")
    axes = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    _draw_losses(axes[0], losses)
    if points:
        _draw_points(axes[1 if apart else 0], str(metric), points, facts.best(events) or points[-1])
    if rates:
        axes[-1].plot(*zip(*_thinned(rates), strict=True), color="tab:gray", linewidth=1.4)
        axes[-1].ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    axes[-1].set_ylabel("learning rate")
    axes[-1].set_ylim(bottom=0)
    for kind, colour in ((kind, known.colour) for kind, known in KINDS.items() if known.colour):
        steps = [e["step"] for e in events if e.get("kind") == kind and facts.is_number(e.get("step"))]
        for index, step in enumerate(steps[:50]):
            axes[0].axvline(step, color=colour, linewidth=0.9, linestyle=":", label=None if index else f"{kind} ({len(steps)})")
    for axis in axes:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(frameon=False, loc="upper right")
    figure.suptitle(title, fontsize=11, x=0.02, ha="left")
    axes[-1].set_xlabel("step")
    axes[-1].xaxis.get_major_locator().set_params(integer=True)
    if any("perplexity" in event for event in events):  # then the loss is the mean of nats
        axes[0].set_ylabel("loss (nats)")
    out = {form: io.BytesIO() for form in ("png", "svg")}
    for form, content in out.items():
        figure.savefig(content, format=form)
    return {form: content.getvalue() for form, content in out.items()}


def _draw_losses(axis: Any, losses: list[tuple[int, float]]) -> None:
    steps, raw = zip(*_thinned(losses), strict=True)
    smooth = smoothed(raw)
    axis.plot(steps, raw, color="tab:blue", alpha=0.3, linewidth=0.8, marker="o" if len(raw) < 3 else None)
    axis.plot(steps, smooth, color="tab:blue", linewidth=1.6, label=f"training loss, at the end {number(smooth[-1])}")
    # A spike must not flatten the rest of the curve: the smoothed curve sets the scale.
    low, high = min(smooth), max(smooth)
    margin = 0.08 * (high - low) or 0.1 * abs(high) or 1.0
    axis.set_ylim(low - margin, high + margin)
    axis.set_ylabel("loss")


def _draw_points(axis: Any, metric: str, points: list[tuple[int, float]], best: tuple[int, float]) -> None:
    steps, values = zip(*points, strict=True)
    axis.plot(steps, values, "o-", color="tab:orange", markersize=3.5, linewidth=1.4, label=f"evaluation: {metric}")
    axis.plot(*best, "*", color="tab:red", markersize=11, label=f"best {number(best[1])} at step {best[0]}")
    low, high = axis.get_ylim()
    margin = 0.06 * (max(values) - min(values))
    axis.set_ylim(min(low, min(values) - margin), max(high, max(values) + margin))
    if not axis.get_ylabel():
        unit = next((f" ({unit})" for name, unit in _UNITS.items() if metric.startswith(name)), "")
        axis.set_ylabel(metric + unit)


def _thinned(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    return points[:: -(-len(points) // _MAX_POINTS)]


def smoothed(values: Sequence[float]) -> list[float]:
    """Interquartile mean of a window around each point: no lag, robust against spikes."""
    out = []
    for index in range(len(values)):
        # The window is symmetric at the start, where the curve is steep, and one-sided at the end.
        half = min(len(values) // 50, index)
        window = sorted(values[index - half : index + half + 1])
        middle = window[len(window) // 4 : len(window) - len(window) // 4]
        out.append(math.fsum(middle) / len(middle))
    return out


DATA, LAUNCHES, MEMORY, ATTENTION, MATMUL = "data", "host launches", "memory traffic", "attention", "matmul"
DATA_MATTERS = 0.15  # the share of a step from which waiting for data is named first


@dataclass(frozen=True)
class Setup:
    """How the step ran: what may still be switched on."""

    device: str = "cpu"
    precision: str = "fp32"
    compiled: bool = False
    captured: bool = False
    tier: str = "device"


def closing_verdict(setup: Setup, wait: float | None = None, mfu: float | None = None) -> str:
    """One sentence at the end of a run, from figures that it has anyway: the share of the time blocked on data, and MFU."""
    bound, why = _likely(setup, wait, mfu)
    if not bound:
        return f"{why}; `seedbed profile` shows a step in detail"
    from seedbed.report import verdict

    return f"{why}. What would help: {verdict.help_for(bound, setup)[0]}"


def _likely(setup: Setup, wait: float | None, mfu: float | None) -> tuple[str, str]:
    """The bound, or "" where these figures cannot tell, and its description."""
    if wait is not None and wait >= DATA_MATTERS:
        return DATA, f"bound by data: {wait:.0%} of the time was spent waiting for it"
    data_text = "not bound by data" if wait is None else f"not bound by data ({wait:.1%} of the time)"
    if setup.device != "cuda":
        return "", f"{data_text}; the rest is computing on the {setup.device}"
    if setup.precision == "fp32":
        return MATMUL, f"{data_text}, and fp32 does not use the GPU's matrix units"
    if mfu is None:
        return "", f"{data_text}; how busy the GPU was is unknown"
    if mfu >= 0.35:
        return MATMUL, f"bound by matmul: {mfu:.0%} of the GPU's nominal peak"
    if not setup.captured and mfu < 0.15:
        return LAUNCHES, f"probably bound by host launches: {mfu:.0%} of the GPU's nominal peak, and the step is not captured"
    return MEMORY, f"probably bound by memory traffic or small matrices: {mfu:.0%} of the GPU's nominal peak"
