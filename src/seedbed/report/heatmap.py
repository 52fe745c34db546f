"""Heat maps as PNG: a number in every cell, diverged cells hatched, a box around the trained range."""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seedbed.track import files

_EMPTY, _SPOILED = "#ececec", "#d9d2cf"
_CELL = (0.72, 0.46)  # inches
_MAX_COLUMNS = 3  # of panels

Row = Sequence[float | None]


@dataclass(frozen=True)
class Panel:
    """One map: rows of numbers (None or NaN where there is none yet), and which cells have diverged."""

    title: str
    values: Sequence[Row]
    hatched: Sequence[Sequence[bool]] | None = None


def draw_panels(
    path: Path,
    panels: Sequence[Panel],
    labels: tuple[Sequence[Any], Sequence[Any], str, str],
    title: str,
    *,
    low: float,
    high: float,
    box: tuple[int, int, int, int] | None = None,
) -> None:
    """Write small multiples that share their axes and colours; `labels` are rows, columns and the titles of both.

    `box` outlines (first row, last row, first column, last column), all inside. Colours run from `low`, dark, to `high`, bright;
    where less is better, `low` is the larger number.
    """
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    rows, cols = labels[:2]
    across = min(len(panels), _MAX_COLUMNS)
    down = -(-len(panels) // across)
    size = across * (max(len(cols), 3) * _CELL[0] + 1.1) + 1.0, down * (max(len(rows), 2) * _CELL[1] + 1.0) + 0.6
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    grid = figure.subplots(down, across, squeeze=False)
    colours = colormaps["viridis"]
    for axis, panel in zip(grid.flat, panels, strict=False):
        assert len(panel.values) == len(rows) and all(len(r) == len(cols) for r in panel.values), "one number per cell"
        _draw_cells(axis, panel, colours, low, high)
        _label(axis, labels, panel.title)
        if box:
            top, bottom, left, right = box
            corner, size = (left - 0.5, top - 0.5), (right - left + 1, bottom - top + 1)
            axis.add_patch(Rectangle(corner, *size, fill=False, edgecolor="#d1342f", linewidth=2.2, zorder=3))
    for axis in grid.flat[len(panels) :]:
        axis.set_visible(False)
    bar = figure.colorbar(ScalarMappable(cmap=colours), ax=list(grid.flat), fraction=0.04, pad=0.02)
    bar.set_ticks([0.0, 0.5, 1.0], labels=[short(v) for v in (low, (low + high) / 2, high)])
    figure.suptitle(title, fontsize=10, x=0.02, ha="left")
    out = io.BytesIO()
    figure.savefig(out, format="png")
    files.write_atomic(path, out.getvalue())


def short(value: float) -> str:
    if not math.isfinite(value):
        return "-"
    if value == int(value) and abs(value) < 1e4:
        return str(int(value))
    # Rounding may not turn 99.996 into the 100 that only a perfect score is.
    return f"{value:.4g}" if f"{value:.4g}" != f"{value:.0f}" else f"{value:.1f}"


def _draw_cells(axis: Any, panel: Panel, colours: Any, low: float, high: float) -> None:
    from matplotlib.patches import Rectangle

    size = 8 if len(panel.values[0]) <= 14 else 6
    for r, row in enumerate(panel.values):
        for c, value in enumerate(row):
            spoiled = bool(panel.hatched and panel.hatched[r][c])
            known = value is not None and math.isfinite(value)
            colour = colours(_share(value, low, high)) if known and value is not None else _SPOILED if spoiled else _EMPTY
            style: dict[str, Any] = {"hatch": "////", "edgecolor": "#8c5a4f"} if spoiled else {"edgecolor": "white"}
            axis.add_patch(Rectangle((c - 0.5, r - 0.5), 1, 1, facecolor=colour, linewidth=0.8, **style))
            if known and value is not None:
                dark = not spoiled and _share(value, low, high) < 0.6
                backing = {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85} if spoiled else None
                words = {"ha": "center", "va": "center", "fontsize": size, "bbox": backing}
                axis.text(c, r, short(value), color="white" if dark else "black", **words)


def _share(value: float, low: float, high: float) -> float:
    """Position of a value between `low` and `high`, which may be in either order."""
    return min(max((value - low) / (high - low), 0.0), 1.0) if high != low else 1.0


def _label(axis: Any, labels: tuple[Sequence[Any], Sequence[Any], str, str], title: str) -> None:
    rows, cols, row_title, col_title = labels
    axis.set_xlim(-0.5, len(cols) - 0.5)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    rotation = 45 if max(len(str(c)) for c in cols) > 7 else 0
    axis.set_xticks(range(len(cols)), [str(c) for c in cols], fontsize=8, rotation=rotation)
    axis.set_yticks(range(len(rows)), [str(r) for r in rows], fontsize=8)
    axis.set_xlabel(col_title, fontsize=9)
    axis.set_ylabel(row_title, fontsize=9)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    if title:
        axis.set_title(title, fontsize=9, loc="left")
