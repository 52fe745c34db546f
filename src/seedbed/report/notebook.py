"""The loss of a training run, drawn while it trains, in a Jupyter notebook."""

import contextlib
import io
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from seedbed.track import jsonl

SECONDS = 2.0


@contextlib.contextmanager
def live_curve(run: Path) -> Iterator[None]:
    """Redraw the run's curve every two seconds, from what it has written; nothing outside of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if getattr(shell, "kernel", None) is None:
        yield
        return
    from IPython.display import Image, display  # type: ignore[reportMissingImports]

    handle: Any = display(display_id=True)
    over = threading.Event()

    def redraw() -> None:
        ended, seen = False, 0
        while not ended:
            ended = over.wait(SECONDS)  # and once more at the end
            rows = jsonl.read(run / "rows.jsonl")
            if len(rows) > seen:
                handle.update(Image(data=picture(rows, run.name)))
            seen = len(rows)

    thread = threading.Thread(target=redraw, name="live curve", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(10 * SECONDS)


def picture(rows: list[dict[str, Any]], title: str) -> bytes:
    """The loss by step, as a PNG. No pyplot: this is called from a thread."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 2.6), dpi=100, layout="constrained")
    axes = figure.add_subplot()
    points = [(row["step"], row["loss"]) for row in rows if isinstance(row.get("loss"), int | float)]
    axes.plot(*zip(*points, strict=True) if points else ([], []), linewidth=1.2)
    axes.set(xlabel="step", ylabel="loss", title=title)
    axes.grid(alpha=0.3)
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()
