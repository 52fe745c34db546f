"""Console output of a training run, copied to the run's console.log without colours."""

import contextlib
import io
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.text import Text

from seedbed.config import Units
from seedbed.track import files
from seedbed.track.text import clip, duration, number, safe, scaled, size, wrapped

_WIDTH = 100  # of console.log, and where there is no terminal
_LIVE = ("items_per_s", "loss")  # the columns of the live line


class Console:
    """Writes lines to the terminal and to console.log. Neither a closed pipe nor a full disk stops the run.

    `verbose` shows on the terminal what is otherwise only in console.log. NO_COLOR stands above FORCE_COLOR.
    """

    def __init__(self, log: Path | None = None, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic):
        self.units, self.verbose, self.has_hidden = Units(), False, False
        stream = stream or sys.stdout
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
        self._rich = RichConsole(file=stream, highlight=False, markup=False, emoji=False, soft_wrap=True, force_jupyter=False)
        self._live = self._rich.is_terminal and self._rich.file.isatty() and not self._rich.is_dumb_terminal
        self._clock = clock
        self._start: tuple[int, float] | None = None
        self._status, self._closed_pipe, self._step_width = "", False, 0
        self._early: list[str] = []
        self._appender: files.Appender | None = None
        if log is not None:
            self.attach(log)

    def attach(self, log: Path) -> None:
        """Copy everything to this file from now on, including what was printed before."""
        self._step_width, self._start = 0, None
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

    def detail(self, text: str) -> None:
        """A line for console.log, and for those who asked for everything."""
        (self.line if self.verbose else self._record)(safe(text))

    @property
    def width(self) -> int:
        """The columns that lines are made for: 80 to 200."""
        return min(max(self._screen, 80), 200)

    @property
    def _screen(self) -> int:
        """Columns of $COLUMNS, else of the terminal, else of console.log."""
        found = os.environ.get("COLUMNS", "")
        with contextlib.suppress(OSError, ValueError):  # the terminal is gone
            found = found or str(os.get_terminal_size(self._rich.file.fileno()).columns)
        return int(found) if found.isdigit() and int(found) else _WIDTH

    def warn(self, text: str) -> None:
        self.line(f"warning: {text}", style="yellow")

    def step_row(self, row: dict[str, Any], last_step: int | None = None) -> None:
        """Print one log point on one line, and on a terminal a progress bar. Columns that do not fit are left to console.log."""
        step, now = row["step"], self._clock()
        if self._start is None or step < self._start[0]:
            self._start = (step, now)
        first, since = self._start
        eta = max(last_step - step, 0) * (now - since) / (step - first) if last_step and step > first else None
        self._step_width = max(self._step_width, len(f"{last_step or step}"))
        at = f"{step:>{self._step_width}}" + (f"/{last_step}" if last_step else "")
        columns = self._columns()
        cells = [show(row.get(key)) for key, show in columns.items() if key == "loss" or row.get(key) is not None]
        cells, left = [f"step {at}", *cells], f"  eta {duration(eta):>5}" if eta is not None else ""
        if self._live and last_step:
            from seedbed.track.live_line import live_line

            shown = [columns[key](row[key]) for key in _LIVE if row.get(key)]
            self._status = live_line(step / last_step, shown, eta, self._screen)
        self._record("  ".join(cells) + left)
        while len("  ".join(cells)) + (11 if last_step else 0) > self.width:
            cells.pop()
        self._show("  ".join(cells) + left)

    def _columns(self) -> dict[str, Callable[[Any], str]]:
        items, each, loss = self.units.items, self.units.per_item, self.units.loss
        rate = {"items_per_s": lambda value: f"{scaled(value * each):>5} {items}/s"}
        return COLUMNS | {"loss": lambda value: f"{_loss(value)} {loss}".rstrip()} | rate

    def evaluation(self, step: int, numbers: dict[str, float], improved: bool, part: str = "eval") -> None:
        """Print the numbers that fit on a line; console.log has all."""
        head, end = f"{part} {step:>{self._step_width}}  ", "  best so far" * improved
        units = {"loss": f" {self.units.loss}", "nats": f" {self.units.loss}"}
        words = [f"{name} {number(value)}{units.get(name, '')}".rstrip() for name, value in numbers.items()]
        self._record(head + ("\n" + " " * len(head)).join(wrapped(words, _WIDTH - len(head))) + end)
        first, *more = wrapped(words, self.width - len(head) - len(end) - 13)
        hidden = len(words) - len(first.split("  "))
        self.has_hidden |= bool(more)
        self._show(safe(head + first) + (f"  and {hidden} more" if more else "") + end, "bold green" if improved else "bold")

    def sample(self, step: int, text: str, names: list[str]) -> None:
        self.line(f"sample at step {step}" + (f": {', '.join(names)}" if names else ""), style="bold")
        for part in text.splitlines():
            self.line(f"  | {part}", style="cyan")

    def close(self) -> None:
        self._status = ""
        self._show(None)
        if self._appender is not None:
            self._appender.close()
            self._appender = None

    def _show(self, text: str | None, style: str = "") -> None:
        if self._closed_pipe:
            return
        out = self._rich.file
        try:
            if self._live:
                out.write("\r\x1b[2K")
            if style and not self._rich.no_color:  # neither colours nor bold
                self._rich.print(Text(text or "", style=style))
            elif text is not None:
                out.write(text + "\n")
            if self._status:
                out.write(clip(self._status, self._screen - 1))
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
