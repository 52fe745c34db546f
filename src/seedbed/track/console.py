"""Console output of a training run, copied to the run's console.log without colours."""

import contextlib
import io
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.text import Text

from seedbed.config import diff, flat
from seedbed.track import files
from seedbed.track.text import clip, config_lines, duration, format_value, number, safe, scaled, size, wrapped

_WIDTH = 100


class Console:
    """Writes lines to the terminal and to console.log. Neither a closed pipe nor a full disk stops the run."""

    def __init__(self, log: Path | None = None, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic):
        stream = stream or sys.stdout
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
        self._rich = RichConsole(file=stream, highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._live = self._rich.is_terminal and not self._rich.is_dumb_terminal
        self._clock = clock
        self._start: tuple[int, float] | None = None
        self._status = ""
        self._closed_pipe = False
        self._early: list[str] = []
        self._appender: files.Appender | None = None
        self._step_width = 0
        if log is not None:
            self.attach(log)

    def attach(self, log: Path) -> None:
        """Copy everything to this file from now on, including what was printed before."""
        self._step_width = 0
        self._start = None
        with contextlib.suppress(OSError):
            self._appender = files.Appender(log)
        early, self._early = self._early, []
        for text in early:
            self._record(text)

    def line(self, text: str = "", style: str = "") -> None:
        """Print; line breaks stay, control characters do not."""
        text = safe(text)
        self._show(text, style)
        self._record(text)

    def warn(self, text: str) -> None:
        self.line(f"warning: {text}", style="yellow")

    def step_row(self, row: dict[str, Any], last_step: int | None = None) -> None:
        """Print one log point on one line, and on a terminal a progress bar."""
        step, now = row["step"], self._clock()
        if self._start is None or step < self._start[0]:
            self._start = (step, now)
        first, since = self._start
        eta = max(last_step - step, 0) * (now - since) / (step - first) if last_step and step > first else None
        self._step_width = max(self._step_width, len(f"{last_step or step}"))
        at = f"{step:>{self._step_width}}" + (f"/{last_step}" if last_step else "")
        self._status = self._progress(row, last_step, eta) if self._live else ""
        cells = [show(row.get(key)) for key, show in COLUMNS.items() if key == "loss" or row.get(key) is not None]
        self.line("  ".join([f"step {at}", *cells, f"eta {duration(eta):>5}" if eta is not None else ""]).rstrip())

    def evaluation(self, step: int, numbers: dict[str, float], improved: bool, part: str = "eval") -> None:
        """Print the metrics of an evaluation."""
        head = f"{part} {step:>{self._step_width}}  "
        words = [f"{name} {number(value)}" for name, value in numbers.items()] + ["best so far"] * improved
        text = ("\n" + " " * len(head)).join(wrapped(words, _WIDTH - len(head)))
        self.line(head + text, style="bold green" if improved else "bold")

    def sample(self, step: int, text: str, names: list[str]) -> None:
        """Print a sample, indented, and the names of its files."""
        self.line(f"sample at step {step}" + (f": {', '.join(names)}" if names else ""), style="bold")
        for part in text.splitlines():
            self.line(f"  | {part}", style="cyan")

    def config(self, title: str, config: dict[str, Any], base: dict[str, Any], parent: tuple[str, dict[str, Any]] | None) -> None:
        """Print every resolved value, with `*` on changes against the preset and `~` against the parent run."""
        new = flat(config)
        changed = diff(flat(base), new)
        moved = diff(flat(parent[1]), new) if parent else {}
        self.line(title, style="bold")
        for text in config_lines(new, {"*": changed, "~": moved}, _WIDTH):
            self.line(text)
        self._differences("*", "changed against the preset", changed)
        if parent:
            self._differences("~", f"changed against {parent[0]}", moved)

    def close(self) -> None:
        """Clear the progress line and close the log file."""
        self._status = ""
        self._show(None)
        if self._appender is not None:
            self._appender.close()
            self._appender = None

    def _differences(self, mark: str, title: str, changes: dict[str, tuple[Any, Any]]) -> None:
        words = [f"{key} {format_value(old)} -> {format_value(new)}" for key, (old, new) in changes.items()] or ["nothing"]
        for index, text in enumerate(wrapped([f"{title}: {words[0]}", *words[1:]], _WIDTH - 6, " · ")):
            self.line(f"  {' ' if index else mark} {text}", style="yellow" if changes else "")

    def _progress(self, row: dict[str, Any], last_step: int | None, eta: float | None) -> str:
        if not last_step:
            return ""
        share = min(row["step"] / last_step, 1.0)
        filled = round(30 * share)
        rate = f"  {scaled(row['items_per_s'])} items/s" if row.get("items_per_s") else ""
        left = f"  {duration(eta)} left" if eta is not None else ""
        return f"{'━' * filled}{'─' * (30 - filled)} {share:4.0%}{rate}{left}"

    def _show(self, text: str | None, style: str = "") -> None:
        if self._closed_pipe:
            return
        out = self._rich.file
        try:
            if self._live:
                out.write("\r\x1b[2K")
            if style:
                self._rich.print(Text(text or "", style=style))
            elif text is not None:
                out.write(text + "\n")
            if self._status:
                out.write(clip(self._status, self._rich.width - 1))
            out.flush()
        except (OSError, ValueError):
            # The reader of a pipe or the terminal is gone: the run and its console.log continue.
            self._closed_pipe = True

    def _record(self, text: str) -> None:
        if self._appender is None:
            self._early.append(text)
            return
        with contextlib.suppress(OSError):
            self._appender.write(text.encode(errors="replace") + b"\n")


def _loss(value: Any) -> str:
    """Eight characters at most, so that columns stay in place."""
    text = f"{value:.6g}" if isinstance(value, float) and 1000 <= abs(value) < 1e5 else number(value)
    return f"loss {text:>8}"


# The columns of a log line in order: key of the row, and its text of fixed width. A recipe's file may add its own.
COLUMNS: dict[str, Callable[[Any], str]] = {
    "loss": _loss,
    "lr": lambda value: f"lr {value:.1e}",
    "items_per_s": lambda value: f"{scaled(value):>5} items/s",
    "wait": lambda value: f"wait {value:>3.0%}",
    "mfu": lambda value: f"mfu {value:>3.0%}",
    "memory": lambda value: f"{size(value):>7}",
}
