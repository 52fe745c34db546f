"""What a person sees while a run trains; all of it also goes to the run's console.log, without colours."""

import contextlib
import io
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.text import Text

from seedbed.config import diff
from seedbed.track import files
from seedbed.track.run import flat
from seedbed.track.text import clip, config_lines, duration, number, safe, scaled, size, spell, wrapped

_WIDTH = 100


class Console:
    """Lines for the terminal and console.log. Neither a closed pipe nor a full disk stops the run that writes here."""

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
        """Copy everything to this file from now on, and what was printed before as well."""
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
        """One log point on one line, and on a terminal how far the run has come."""
        step, now = row["step"], self._clock()
        if self._start is None or step < self._start[0]:
            self._start = (step, now)
        eta = self._eta(step, now, last_step)
        self._step_width = max(self._step_width, len(f"{last_step or step}"))
        at = f"{step:>{self._step_width}}" + (f"/{last_step}" if last_step else "")
        self._status = self._progress(row, last_step, eta) if self._live else ""
        self.line("  ".join([f"step {at}", *_columns(row), f"eta {duration(eta):>5}" if eta is not None else ""]).rstrip())

    def evaluation(self, step: int, numbers: dict[str, float], improved: bool, part: str = "eval") -> None:
        """The numbers on held-out data, where they stand out between the steps."""
        head = f"{part} {step:>{self._step_width}}  "
        words = [f"{name} {number(value)}" for name, value in numbers.items()] + ["best so far"] * improved
        text = ("\n" + " " * len(head)).join(wrapped(words, _WIDTH - len(head)))
        self.line(head + text, style="bold green" if improved else "bold")

    def sample(self, step: int, text: str, names: list[str]) -> None:
        """What the model made, indented, and the files it lies in."""
        self.line(f"sample at step {step}" + (f": {', '.join(names)}" if names else ""), style="bold")
        for part in text.splitlines():
            self.line(f"  | {part}", style="cyan")

    def config(self, title: str, config: dict[str, Any], base: dict[str, Any], parent: tuple[str, dict[str, Any]] | None) -> None:
        """Every resolved value (nested, as saved), with `*` on changes against the preset and `~` against the parent run."""
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
        """Take the progress line off the screen and let go of the file."""
        self._status = ""
        self._show(None)
        if self._appender is not None:
            self._appender.close()
            self._appender = None

    def _differences(self, mark: str, title: str, changes: dict[str, tuple[Any, Any]]) -> None:
        words = [f"{key} {spell(old)} -> {spell(new)}" for key, (old, new) in changes.items()] or ["nothing"]
        for index, text in enumerate(wrapped([f"{title}: {words[0]}", *words[1:]], _WIDTH - 6, " · ")):
            self.line(f"  {' ' if index else mark} {text}", style="yellow" if changes else "")

    def _eta(self, step: int, now: float, last_step: int | None) -> float | None:
        assert self._start is not None
        first, since = self._start
        if not last_step or step <= first:
            return None
        return max(last_step - step, 0) * (now - since) / (step - first)

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
            # The reader of a pipe has gone, or the terminal has: the run and its console.log go on.
            self._closed_pipe = True

    def _record(self, text: str) -> None:
        if self._appender is None:
            self._early.append(text)
            return
        with contextlib.suppress(OSError):
            self._appender.write(text.encode(errors="replace") + b"\n")


def _columns(row: dict[str, Any]) -> list[str]:
    """The parts of a log line that this row has numbers for, each of a fixed width."""
    shown = [f"loss {_loss(row.get('loss')):>8}"]
    if row.get("lr") is not None:
        shown.append(f"lr {row['lr']:.1e}")
    if row.get("items_per_s") is not None:
        shown.append(f"{scaled(row['items_per_s']):>5} items/s")
    for name in ("wait", "mfu"):
        if row.get(name) is not None:
            shown.append(f"{name} {row[name]:>3.0%}")
    if row.get("memory") is not None:
        shown.append(f"{size(row['memory']):>7}")
    return shown


def _loss(value: Any) -> str:
    """Eight characters at most, so that columns stay in place."""
    return f"{value:.6g}" if isinstance(value, float) and 1000 <= abs(value) < 1e5 else number(value)
