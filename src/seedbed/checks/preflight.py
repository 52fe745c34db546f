"""The preflight as a command and before training: runs checks, prints findings, stores the verdict."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from seedbed import config as configs
from seedbed.cache import cache_folder
from seedbed.checks import runner
from seedbed.checks.registry import Check
from seedbed.checks.subject import Subject
from seedbed.config import Config
from seedbed.data.feed import Data
from seedbed.errors import UserError
from seedbed.recipes import Recipe, find
from seedbed.report.findings import Finding, Report
from seedbed.track import files, jsonl
from seedbed.track.text import clip, safe, width

# Seconds between two pictures of the status line.
TICK = 1.0


def check(
    name: str, assignments: list[str], *, root: Path, only: list[str], skip: list[str], full: bool = False, as_json: bool = False
) -> int:
    """Runs the checks on a recipe as it would be trained, and prints the findings."""
    recipe, preset = find(name)
    base, checks = recipe.preset(preset), runner.select(only, skip)
    try:
        config = configs.override(base, assignments)
    except UserError as problem:  # the only finding
        why, fix = "it would be ignored, or stop the run at its start", "write the key as the config knows it"
        finding = Finding("A1", "config keys", "fail", "err", what=str(problem), where="command line", why=why, fix=fix)
        return _print(Report(name, findings=[finding]), as_json)
    subject = Subject(recipe, preset, config, root, full=full)
    report = _run(subject, checks, as_json)
    if not only and not skip:
        report.key = runner.key_of(recipe, config, str(subject.real_data.facts.get("fingerprint", "")))
        runner.save_verdict(verdict_folder(), report)
    return _print(report, as_json)


def check_script(name: str, *, only: list[str], skip: list[str], as_json: bool = False) -> int:
    """Runs the checks on the model of `script.py::make`, and prints the findings."""
    from seedbed.checks.foreign import script_subject

    checks = runner.select(only, skip)
    with script_subject(name) as subject:
        return _print(_run(subject, checks, as_json), as_json)


def _run(subject: Subject, checks: Sequence[Check], as_json: bool) -> Report:
    """Runs the checks; unless the output is JSON, shows each as it ends."""
    if not as_json:
        print(Report(subject.name, subject.shrunk).head(), flush=True)
    with Progress(silent=as_json) as progress:

        def show(finding: Finding) -> None:
            if not as_json:
                progress.clear()
                print(finding.row(), flush=True)

        progress.say("opening the data", ticking=False)  # preparing it prints its own progress
        with contextlib.suppress(Exception):  # errors are left to the checks
            _ = subject.real_data
        return runner.run(subject, checks, show, progress.say)


def _print(report: Report, as_json: bool) -> int:
    if as_json:
        jsonl.print_json(report.json())
    else:
        print("\n".join(report.details()))
    return report.exit_code


def verdict_folder() -> Path:
    return cache_folder() / "preflight"


def before_training(
    recipe: Recipe,
    preset: str | None,
    config: Config,
    *,
    root: Path,
    folder: Path,
    say: Callable[[str], None],
    data: Data | None = None,
) -> Report:
    """The verdict that training starts on, stored in the run's folder: a full one that is still valid, or the quick checks'.

    `data` is what the run has opened. Only the quick checks stop a run: their stored errors are tried again, and stored errors of
    others are warnings. Who wants to stop at those types `seedbed check NAME && seedbed train NAME`.
    """
    subject = Subject(recipe, preset, config, root, quick=True, data=data)
    key = runner.key_of(recipe, config, str(subject.real_data.facts.get("fingerprint", "")))
    report = runner.load_verdict(verdict_folder(), key)
    with Progress() as progress:
        if report is None:
            report = runner.run(subject, runner.select(quick=True), progress=progress.say)
            report.key, origin = key, ""
        elif report.of("err"):
            quick, failed = {c.id for c in runner.select(quick=True)}, " ".join(finding.id for finding in report.of("err"))
            origin = f"seedbed check of {_when(report.made)} found errors ({failed}); the quick checks were tried again"
            report = runner.rerun_errors(subject, report, quick, progress.say)
            runner.save_verdict(verdict_folder(), report)
            lenient = [f if f.id in quick or f not in report.of("err") else replace(f, severity="warn") for f in report.findings]
            report = replace(report, findings=lenient)
        else:
            origin = f"seedbed check of {_when(report.made)}, on the same config, code, data and torch"
    say(f"preflight: {report.summary()}" + (f" ({origin})" if origin else ""))
    files.write_atomic(folder / "preflight.json", json.dumps(report.json(), indent=1))
    for finding in report.findings:
        if finding.alarm:
            say("\n".join(finding.lines(report.name)))
    return report


def _when(made: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(made))


class Progress:
    """A status line on a terminal while checks run: which one, how many, and for how long. Silent elsewhere."""

    def __init__(self, stream: TextIO | None = None, *, silent: bool = False) -> None:
        self.stream = stream or sys.stderr
        self.live = not silent and self.stream.isatty() and os.environ.get("TERM") != "dumb"
        self._start = time.monotonic()
        self._text = ""
        self._lock, self._end = threading.Lock(), threading.Event()
        self._ticker: threading.Thread | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        if self._ticker is not None:
            self._ticker.join()
        self.clear()

    def say(self, text: str, *, ticking: bool = True) -> None:
        """Shows `text`; without `ticking` only once, because others may write to the terminal meanwhile."""
        if not self.live:
            return
        with self._lock:
            self._text = text if ticking else ""
            self._draw(text)
        if ticking and self._ticker is None:
            self._ticker = threading.Thread(target=self._tick, name="progress", daemon=True)
            self._ticker.start()

    def clear(self) -> None:
        """Removes the line."""
        with self._lock:
            self._text = ""
            self._write("\r\x1b[2K")

    def _tick(self) -> None:
        while not self._end.wait(TICK):
            with self._lock:
                if self._text:
                    self._draw(self._text)

    def _draw(self, text: str) -> None:
        self._write("\r\x1b[2K" + clip(f"  {safe(text)}, {time.monotonic() - self._start:.0f} s", width()))

    def _write(self, text: str) -> None:
        if not self.live:
            return
        try:
            self.stream.write(text)
            self.stream.flush()
        except (OSError, ValueError):  # a closed terminal stops no check
            self.live = False
