"""A temporary folder for drills: starts runs as processes and compares their results exactly.

Every run is forked from this process, which has torch loaded and no threads, so it starts in milliseconds.
"""

import contextlib
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch

from seedbed import isolated
from seedbed.track.run import Run
from seedbed.train import checkpoint, checkpoint_loading

# A tiny GPT with every kind of state: two optimizers, dropout, EMA, accumulation.
RECIPE = "gpt/demo"
TINY = (
    *("device=cpu", "precision=fp32", "batch=8", "accum=2", "ema=0.99", "limit.valid=8", "guard.stall=none"),
    *("model.depth=1", "model.width=32", "model.heads=2", "model.dropout=0.1", "data.block=16"),
    *("every.log=1", "every.eval=0", "every.sample=0", "every.save=8", "steps=40"),
)
STEPS, EVERY = 40, 8
# What may differ between equal runs: times and memory.
CLOCKS = {"seconds", "memory", "items_per_s", "wait", "mfu", "mfu_measured", "time"}

Fault = Callable[[], object]


class Failed(Exception):
    """A drill failed; the text says what was found."""


class NotRun(Exception):
    """A drill cannot run here; the text says why."""


@dataclass
class DrillResult:
    """Counts of a drill. `steps_lost` are steps that a checkpoint should have held and did not."""

    injected: int = 0
    detected: int = 0
    steps_lost: int = 0
    messages: list[str] = field(default_factory=list)

    def add(self, sentence: str = "") -> None:
        """Counts one detected fault and keeps the message that reported it, if any."""
        self.injected += 1
        self.detected += 1
        if sentence and sentence not in self.messages:
            self.messages.append(sentence)


@dataclass
class Child:
    """A command in its own process, with its output in a file."""

    pid: int
    out: Path
    _popen: subprocess.Popen | None = None
    _code: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self._code is None and self._popen:
            self._code = self._popen.poll()
        elif self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def output(self) -> str:
        return self.out.read_text(errors="replace")


class Sandbox:
    """A drill's folder and deadline."""

    def __init__(self, folder: Path, short: bool, limit: float):
        self.folder, self.short = folder, short
        self.root = folder / "runs"
        self.root.mkdir(parents=True)
        self.deadline = time.monotonic() + limit
        self.children: list[Child] = []

    def start(self, *words: str, fault: Fault | None = None) -> Child:
        """Runs `seedbed WORDS` in a forked process; `fault` is injected before it begins."""
        out = self._output()
        pid = os.fork()
        if not pid:
            _run_in_child(words, self.folder, self.root, out, fault)
        self.children.append(Child(pid, out))
        return self.children[-1]

    def start_fresh(self, *words: str, num_ranks: int = 0) -> Child:
        """Runs `seedbed WORDS` in a new interpreter, or in several through torchrun."""
        out = self._output()
        command = isolated.command("seedbed", *words)
        if num_ranks:
            torchrun = isolated.command("torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", "--no-python")
            command = [*torchrun, *command]
        env = {**os.environ, "SEEDBED_RUNS": str(self.root), "OMP_NUM_THREADS": "1"}
        with out.open("wb") as file:
            popen = subprocess.Popen(command, cwd=self.folder, env=env, stdout=file, stderr=file, stdin=subprocess.DEVNULL)
        self.children.append(Child(popen.pid, out, popen))
        return self.children[-1]

    def _output(self) -> Path:
        return self.folder / f"output-{len(self.children):03d}.txt"

    def wait(self, child: Child) -> int:
        self.wait_until(lambda: child.poll() is not None, child, "to end")
        code = child.poll()
        assert code is not None
        return code

    def wait_until(self, true: Callable[[], Any], child: Child, what: str) -> None:
        while not true():
            if time.monotonic() > self.deadline:
                child.signal(signal.SIGKILL)
                raise Failed(f"timed out waiting for a run {what}: {last_line(child.output())}")
            time.sleep(0.002)

    def wait_for_rows(self, child: Child, name: str, num: int) -> None:
        """Wait until a run has logged `num` rows; fails when it ends earlier."""
        self.wait_until(lambda: child.poll() is not None or self.num_rows(name) >= num, child, "to train")
        if child.poll() is not None:
            raise Failed(f"{name} ended too early: {child.output()[-300:]}")

    def run(self, *words: str, fault: Fault | None = None, code: int = 0, num_ranks: int = 0) -> str:
        child = self.start_fresh(*words, num_ranks=num_ranks) if num_ranks else self.start(*words, fault=fault)
        found = self.wait(child)
        if found != code:
            raise Failed(f"`{words[0]}` ended with {found} instead of {code}: {last_line(child.output())}")
        return child.output()

    def train(self, name: str, *settings: str, fault: Fault | None = None, code: int = 0) -> str:
        return self.run(*training(name, *settings), fault=fault, code=code)

    def resume(self, name: str, *settings: str, same_as: str = "", code: int = 0, **how: Any) -> str:
        """Resumes a run, which must continue at its newest intact checkpoint, and end as the run `same_as`."""
        kept = self.kept(name)
        output = self.run("resume", name, *settings, code=code, **how)
        if not code:
            self.require_resumed(name, kept)
        if same_as:
            self.require_same_end(same_as, name)
        return output

    def require_resumed(self, name: str, kept: int) -> None:
        at = self.events(name, "resume")[-1]["step"]
        if at < kept:
            raise Failed(f"{name} was resumed at step {at} although step {kept} was saved")

    def kept(self, name: str) -> int:
        """The newest step with an intact checkpoint; 0 when there is none."""
        for path in reversed(checkpoint.steps_in(self.checkpoints(name))):
            with contextlib.suppress(checkpoint_loading.Damaged):
                return checkpoint_loading.load(path).step
        return 0

    def close(self) -> None:
        for child in self.children:
            child.signal(signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                while child.poll() is None:
                    time.sleep(0.002)

    def plain(self, line: str) -> str:
        """A line of output without the sandbox's folder and the command's prefixes."""
        return line.replace(f"{self.folder}/", "").removeprefix("seedbed: ").removeprefix("warning: ")

    def run_folder(self, name: str) -> Path:
        return self.root / name

    def checkpoints(self, name: str) -> Path:
        return self.root / name / "checkpoints"

    def newest(self, name: str) -> checkpoint_loading.Checkpoint:
        saved = checkpoint_loading.load_newest(self.checkpoints(name), warn=lambda text: None)
        if saved is None:
            raise Failed(f"run {name} has no checkpoint")
        return saved

    def events(self, name: str, kind: str) -> list[dict[str, Any]]:
        return [event for event in Run.open(self.root, name).events() if event["kind"] == kind]

    def status(self, name: str) -> str:
        return Run.open(self.root, name).status().get("status", "")

    def require_same_end(self, one: str, other: str) -> None:
        """Requires that weights, moments, EMA, counters and rows of two runs are bitwise equal."""
        a, b = self.newest(one), self.newest(other)
        for what, wrong in (("checkpoints", differences(a, b)), ("rows", self._row_differences(one, other))):
            if wrong:
                raise Failed(f"{what} of {one} and {other} differ: {wrong[0]}" + f" and {len(wrong) - 1} more" * (len(wrong) > 1))

    def _row_differences(self, one: str, other: str) -> list[str]:
        a, b = (self.rows(name) for name in (one, other))
        steps = [[row.get("step") for row in rows] for rows in (a, b)]
        if steps[0] != steps[1]:
            return [f"{len(a)} rows to step {steps[0][-1:]} against {len(b)} to step {steps[1][-1:]}"]
        return [f"step {x['step']}" for x, y in zip(a, b, strict=True) if x != y]

    def num_rows(self, name: str) -> int:
        path = self.run_folder(name) / "rows.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def rows(self, name: str) -> list[dict[str, Any]]:
        return [{k: v for k, v in row.items() if k not in CLOCKS} for row in Run.open(self.root, name).rows()]


def training(name: str, *settings: str) -> list[str]:
    """The command line of a small run; later settings override."""
    words = {word.partition("=")[0]: word for word in (*TINY, *settings)}
    return ["train", RECIPE, *words.values(), "--run", name, "--no-check", "--dirty"]


def differences(a: checkpoint_loading.Checkpoint, b: checkpoint_loading.Checkpoint) -> list[str]:
    """All differences between two checkpoints, except times."""
    wrong = [f"{f} tensors" for f in a.tensors.keys() ^ b.tensors.keys()]
    for file in a.tensors.keys() & b.tensors.keys():
        mine, other = a.tensors[file], b.tensors[file]
        wrong += [f"{file}: {n}" for n in mine.keys() | other.keys() if not same_bits(mine.get(n), other.get(n))]
    return wrong + [f"state: {k}" for k in a.state.keys() | b.state.keys() if k != "clock" and a.state.get(k) != b.state.get(k)]


def same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b)


def require_close(sandbox: Sandbox, one: str, other: str, tolerance: float) -> None:
    """Requires that the losses of two runs agree within this relative tolerance."""
    a, b = sandbox.rows(one), sandbox.rows(other)
    if len(a) != len(b):
        raise Failed(f"{one} has {len(a)} rows, {other} {len(b)}")
    far = max(abs(x["loss"] - y["loss"]) / abs(x["loss"]) for x, y in zip(a, b, strict=True))
    if far > tolerance:
        raise Failed(f"losses of {one} and {other} differ by {far:.2g}")


def last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def line_with(output: str, words: str) -> str:
    """The line that contains `words`; the drill fails when there is none."""
    found = next((line.strip() for line in output.splitlines() if words in line), None)
    if found is None:
        raise Failed(f"no line contains {words!r}; the last one was: {last_line(output)}")
    return found


def _run_in_child(words: tuple[str, ...], folder: Path, root: Path, out: Path, fault: Fault | None) -> NoReturn:
    """In the child: sets up signals, output and folder as for a command started by hand, and runs it.

    It ends without the exit functions that it has inherited: they would remove the sandbox.
    """
    code = 1
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        sys.stdout.flush()
        sys.stderr.flush()
        fd, null = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        sys.stdout, sys.stderr = (open(n, "w", buffering=1, closefd=False) for n in (1, 2))  # noqa: SIM115
        os.chdir(folder)
        os.environ["SEEDBED_RUNS"] = str(root)
        sys.argv = ["seedbed", *words]
        if fault:
            fault()
        code = runpy.run_module("seedbed")["main"](words)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def preload() -> None:
    """Imports what every run needs before anything is forked."""
    import matplotlib.figure  # noqa: F401

    from seedbed.launch import local  # noqa: F401
    from seedbed.recipes import find

    torch.set_num_threads(1)
    torch.empty(2, device="meta").normal_()  # loads what meta tensors need
    find(RECIPE)
