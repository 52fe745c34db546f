"""Console output of a sweep: a live table on a terminal, a line per event elsewhere, nothing with --json."""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from seedbed.track.text import number, one_line
from seedbed.tune.sweep import report as reports
from seedbed.tune.sweep.folder import Sweep, Trial, TrialStatus
from seedbed.tune.sweep.grid import words

# Reading the files of all workers may take at most this share of the time.
SHARE = 0.02
LEAST_SECONDS = 2.0


class Screen:
    def __init__(self, sweep: Sweep, quiet: bool) -> None:
        self.sweep, self.quiet = sweep, quiet
        self._live: Any = None
        self._draw_again = 0.0
        self._drawing = threading.Lock()

    def say(self, text: str) -> None:
        if self.quiet:
            return
        if self._live:
            self._live.console.print(one_line(text), markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, flush=True)

    def on_start(self, trials: Sequence[Trial]) -> None:
        text = f"trials {', '.join(f'{t.number:04d}' for t in trials)} begin as one pack"
        if len(trials) == 1:
            text = f"trial {trials[0].number:04d} begins: {' '.join(words(trials[0].settings))}"
        self._line(text)

    def on_end(self, found: TrialStatus) -> None:
        name = f"trial {found.trial.number:04d} {found.state}: {' '.join(words(found.trial.settings))}"
        at = f" at step {number(found.step)}" if found.step is not None else ""
        value = f", {found.metric or 'best'} {number(found.best)}" if found.best is not None else ""
        self._line(f"{name}{at}{value}" + (f" ({found.error})" if found.error else ""))
        self.write()

    def write(self, last: bool = False) -> None:
        """Writes the report; the heat-map only now and then, and at the end."""
        # One worker at a time reads and writes, so that none overwrites newer results.
        with self._drawing, self.sweep.locked("report.lock"):
            start = time.monotonic()
            draw = last or start >= self._draw_again
            reports.write(reports.read_report(self.sweep), draw=draw)
            if draw:
                self._draw_again = start + (time.monotonic() - start) / SHARE

    def close(self) -> None:
        """Writes the final report, and a journal entry when all trials have ended."""
        self.write(last=True)
        found = reports.read_report(self.sweep)
        if not {"running", "waiting"} & set(found.counts):
            reports.record(found)

    def _line(self, text: str) -> None:
        """Prints an event, where no table shows it."""
        if not self._live:
            self.say(text)

    @contextlib.contextmanager
    def showing(self) -> Iterator[None]:
        """A live table during the block, on a terminal."""
        if self.quiet or not sys.stdout.isatty():
            yield
            return
        from rich.console import Console
        from rich.live import Live

        # On its own handle: the output of trials is redirected, the table is not.
        out = Console(file=sys.stdout, highlight=False)
        done = threading.Event()
        with Live(console=out, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False) as live:
            self._live = live
            thread = threading.Thread(target=self._refresh, args=(done, out), daemon=True)
            thread.start()
            try:
                yield
            finally:
                done.set()
                thread.join(5)
                self._live = None

    def _refresh(self, done: threading.Event, out: Any) -> None:
        pause = 0.0
        while not done.wait(pause):
            start = time.monotonic()
            # A half-written file may break the table, never the training.
            with contextlib.suppress(Exception):
                self._live.update(self._table(out.height - 3), refresh=True)
            pause = max(LEAST_SECONDS, (time.monotonic() - start) / SHARE)

    def _table(self, max_rows: int) -> Any:
        from rich.table import Table
        from rich.text import Text

        found = reports.read_report(self.sweep)
        keys = list(dict.fromkeys(key for s in found.statuses for key in s.trial.settings))
        counts = ", ".join(f"{count} {state}" for state, count in found.counts.items())
        shown = Table(box=None, pad_edge=False, title=f"{self.sweep.name}: {counts}", title_justify="left")
        for name in ("trial", *keys, "state", "step", "loss", found.metric, "items/s"):
            shown.add_column(Text(name), no_wrap=True)
        running = [s for s in found.statuses if s.state == "running"]
        ended = sorted(
            (s for s in found.statuses if s.best is not None and s.state != "running"), key=lambda s: s.sign * (s.best or 0.0)
        )
        for status in [*running, *ended][: max(max_rows, 3)]:
            cells = reports.trial_cells(status, keys)[:-1]
            shown.add_row(*map(Text, [*cells, number(status.rate, 0) if status.rate else ""]))
        return shown
