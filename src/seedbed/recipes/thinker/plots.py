"""Plots of the full evaluation: the map of latents and steps, accuracy against steps, and convergence of the state."""

from pathlib import Path
from typing import Any

from seedbed.errors import UserError
from seedbed.report.heatmap import draw_heatmap

MAP, EXACT_MAP, CURVE, RESIDUAL = "map.png", "map-exact.png", "steps.png", "residual.png"


def plot_all(found: dict[str, Any], folder: Path) -> None:
    """Every plot of a full evaluation."""
    plot_map(found, "token", folder / MAP)
    plot_map(found, "exact", folder / EXACT_MAP)
    _plot_curve(found, folder / CURVE)
    _plot_residual(found, folder / RESIDUAL)


def plot_map(found: dict[str, Any], kind: str, path: Path) -> None:
    """Accuracy in per cent by latents and steps, the trained box outlined; colours run from chance to 100."""
    cells, names = found["map"], {"token": "tokens right", "exact": "exact match"}
    rows, columns = cells["latents"], cells["steps"]
    low_k, high_k, low_t, high_t = cells["box"]
    draw_heatmap(
        path,
        [[100.0 * value for value in row] for row in cells[kind]],
        rows,
        columns,
        f"{found['task']}: {names[kind]} in %, training box outlined",
        "latents",
        "steps",
        low=100.0 * cells["chance"] if kind == "token" else 0.0,
        high=100.0,
        box=(rows.index(low_k), rows.index(high_k), columns.index(low_t), columns.index(high_t)),
    )


def _plot_curve(found: dict[str, Any], path: Path) -> None:
    figure, axis = _figure()
    curve, baselines = found["curve"], found["baselines"]
    axis.plot(curve["steps"], [100 * v for v in curve["exact"]], marker="o", markersize=3, label="exact match")
    axis.plot(curve["steps"], [100 * v for v in curve["token"]], marker="o", markersize=3, label="tokens right")
    trivial = 100 * max(v for name, v in baselines.items() if name.endswith("_token"))
    axis.axhline(trivial, color="tab:gray", linestyle=":", label=f"tokens right by a trivial answer ({trivial:.1f})")
    axis.axvspan(*curve["trained"], color="tab:red", alpha=0.12, label="trained")
    axis.set_xscale("log", base=2)
    axis.set_ylim(-2, 102)
    axis.set_ylabel("%")
    _finish(figure, axis, f"{found['task']}: accuracy against steps, to 16 times the trained ones", path)


def _plot_residual(found: dict[str, Any], path: Path) -> None:
    figure, axis = _figure()
    moves = found["curve"]["residual"]
    axis.plot(range(1, len(moves) + 1), moves, label="change of the state by a step, relative to its norm")
    axis.axvspan(*found["curve"]["trained"], color="tab:red", alpha=0.12, label="trained")
    axis.set_xscale("log", base=2)
    if min(moves, default=0) > 0:
        axis.set_yscale("log")
    _finish(figure, axis, f"{found['task']}: residual |z(t+1) - z(t)| / |z(t)|", path)


def _figure() -> tuple[Any, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(f"the plot needs matplotlib, which does not load: {error}") from None
    figure = Figure(figsize=(7, 3.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()


def _finish(figure: Any, axis: Any, title: str, path: Path) -> None:
    axis.set_xlabel("steps")
    axis.xaxis.set_major_formatter("{x:.0f}")
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)
    axis.set_title(title, fontsize=10, loc="left")
    figure.savefig(path, format="png")
