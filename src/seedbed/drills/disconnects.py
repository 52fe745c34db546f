"""Drills of closed terminals, killed parent processes, slow web clients, mirror services and other ranks."""

import contextlib
import os
import pty
import random
import resource
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from seedbed import isolated
from seedbed.drills import faults
from seedbed.drills.crash import interrupt
from seedbed.drills.sandbox import STEPS, Child, DrillResult, Failed, NotRun, Sandbox, line_with, require_close, training
from seedbed.report.mirrors import base, choose
from seedbed.report.mirrors.base import Sink


def hang_up(sandbox: Sandbox, result: DrillResult) -> None:
    """SIGHUP at random steps of a run, a closed terminal, and SIGHUP under nohup, which must change nothing."""
    sandbox.train("straight")
    rng = random.Random(8)
    for k in range(2 if sandbox.short else 12):
        interrupt(sandbox, result, f"hung-{k}", rng.randrange(2, STEPS), signal.SIGHUP)
    ignored = faults.at_step(7, faults.send(signal.SIGHUP))
    sandbox.train("nohup", fault=lambda: (signal.signal(signal.SIGHUP, signal.SIG_IGN), ignored()))
    sandbox.require_same_end("straight", "nohup")
    result.add("under nohup a closed terminal is ignored: the run trains to its end")
    _close_terminal(sandbox, result)


def _close_terminal(sandbox: Sandbox, result: DrillResult) -> None:
    """A run in its own terminal, which is closed: saved at that step, although it cannot print any more."""
    # A new interpreter, which prints to the terminal until it is closed.
    pid, terminal = pty.fork()
    if not pid:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also under nohup
        os.chdir(sandbox.folder)
        env = {**os.environ, "SEEDBED_RUNS": str(sandbox.root), "OMP_NUM_THREADS": "1"}
        os.execve(sys.executable, isolated.command("seedbed", *training("closed", "steps=100000", "every.save=0")), env)
    child = Child(pid, sandbox.folder / "closed.txt")
    child.out.touch()
    sandbox.children.append(child)
    while sandbox.num_rows("closed") < 5:
        with contextlib.suppress(OSError):
            os.read(terminal, 1 << 16)
        sandbox.wait_until(lambda: True, child, "to train")
    os.close(terminal)
    code = sandbox.wait(child)
    if code != 129 or sandbox.status("closed") != "interrupted":
        raise Failed(f"a run whose terminal was closed ended with {code} as {sandbox.status('closed')}")
    result.steps_lost += max(0, len(sandbox.rows("closed")) - sandbox.newest("closed").step)
    result.add("a closed terminal: saved at that step, exit code 129")


def parents(sandbox: Sandbox, result: DrillResult) -> None:
    """The command that started two ranks is killed, hung up or asked to stop: its ranks save and end; the run resumes."""
    if not Path("/proc/self/task").exists():
        raise NotRun("it finds the ranks under /proc, which this system lacks")
    sandbox.train("straight", *TOGETHER)
    numbers = (signal.SIGKILL, signal.SIGHUP, signal.SIGTERM)
    endless = ("steps=100000", "every.save=0")
    cases = [(f"orphan-{k}", number, endless, 8) for k, number in enumerate(numbers[:1] if sandbox.short else numbers * 2)]
    # The schedule depends on the length, so equality is tested on a run of the same length.
    for name, number, settings, num_rows in (*cases, ("exact", signal.SIGKILL, (), 20)):
        child = sandbox.start_fresh(*training(name, *TOGETHER, *settings, "dist.replicate=2"))
        sandbox.wait_for_rows(child, name, num_rows)
        ranks = [int(word) for word in Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()]
        child.signal(number)
        sandbox.wait(child)
        sandbox.wait_until(lambda ranks=ranks: not any(_is_alive(pid) for pid in ranks), child, "'s ranks to end")
        if len(ranks) != 2 or sandbox.status(name) != "interrupted":
            raise Failed(f"{len(ranks)} ranks of a command that got {number.name} left the run {sandbox.status(name)}")
        result.steps_lost += max(0, len(sandbox.rows(name)) - sandbox.newest(name).step)
        result.add(f"{number.name} to the command that started two ranks: both save and end with it")
    sandbox.resume("exact", "dist.replicate=1")
    require_close(sandbox, "straight", "exact", 1e-5)


def _is_alive(pid: int) -> bool:
    """Whether a process that is not our child still runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


HALF = (
    b"",
    b"GET /api/runs HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ",
    b"POST /api/runs/x/note HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n{",
)


def slow_clients(sandbox: Sandbox, result: DrillResult) -> None:
    """More incomplete requests than the server has files: all are closed, it answers meanwhile, its log stays short."""
    from seedbed.serve.server import EXTRA, needs

    try:
        needs()
    except Exception:
        raise NotRun(f"the page is not installed: {EXTRA}") from None
    child = sandbox.start("serve", "--port", "0", fault=_few_files)
    sandbox.wait_until(lambda: child.poll() is not None or (child.out.exists() and "Ctrl-C" in child.output()), child, "to serve")
    port = int(child.output().partition("127.0.0.1:")[2].partition("/")[0])
    num = 60 if sandbox.short else 400
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(_connected(port, HALF[k % len(HALF)])) for k in range(num)]
        for _ in range(5):
            _require_answer(port)
        sandbox.wait_until(lambda: all(_is_closed(one) for one in held), child, "to close incomplete requests")
        _require_answer(port)
    if len(child.output()) > 100_000 or child.poll() is not None:
        raise Failed(f"{num} incomplete requests: {len(child.output()):,} characters of log, exit code {child.poll()}")
    for _ in range(num):
        result.add("an incomplete request is closed after its timeout, or earlier for a new one; complete ones are answered")


def _few_files() -> None:
    """In the server: a quarter of the usual open files, and short timeouts."""
    from seedbed.serve import slow_clients as bounds

    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    bounds.REQUEST_SECONDS = 3.0


def _connected(port: int, words: bytes) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", port), timeout=10)
    with contextlib.suppress(OSError):
        made.sendall(words)
    return made


def _require_answer(port: int) -> None:
    began = time.monotonic()
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/runs", timeout=10) as answer:
            answer.read()
    except OSError as error:
        raise Failed(f"the page did not answer during incomplete requests: {error}") from None
    if time.monotonic() - began > 5:
        raise Failed(f"the page took {time.monotonic() - began:.1f} s to answer during incomplete requests")


def _is_closed(one: socket.socket) -> bool:
    one.settimeout(0.01)
    try:
        return one.recv(1 << 16) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def _service(name: str, method: str, fault: Callable[..., object]) -> type[Sink]:
    """A service that accepts everything, with a fault in one method."""
    methods = dict.fromkeys(("open", "numbers", "text", "media", "close"), lambda self, *given: None)
    return type(name, (Sink,), methods | {method: lambda self, *given: fault(*given)})


SERVICES = (
    _service("Unreachable", "open", lambda config: faults.fail(ConnectionError("no route to host"))),
    _service("Raising", "numbers", lambda *given: faults.fail(RuntimeError("HTTP 500"))),
    # The network fails in the middle of the run.
    _service("Lost", "numbers", lambda step, *_: step > 20 and faults.fail(ConnectionError("connection reset by peer"))),
    _service("Hanging", "numbers", lambda *given: time.sleep(3600)),
    _service("HangingAtStart", "open", lambda config: time.sleep(3600)),
    _service("Slow", "numbers", lambda *given: time.sleep(0.5)),
    _service("HangingAtEnd", "close", lambda status: time.sleep(3600)),
)


def _mirror_by(kind: type[Sink]) -> None:
    """In the run: makes this service the mirror, and limits the final wait to a second."""
    choose.require = lambda choice: None
    choose.SINKS = {"tensorboard": kind}
    base.SECONDS = 1.0


def mirrors(sandbox: Sandbox, result: DrillResult) -> None:
    """A mirror (W&B, TensorBoard, ...) is unreachable, raises, loses the network, hangs, is slow or is not installed."""
    sandbox.train("straight")
    for kind in SERVICES[2:5] if sandbox.short else SERVICES:
        name, start = kind.__name__.lower(), time.monotonic()
        output = sandbox.run(*training(name), "--mirror", "tensorboard", fault=lambda kind=kind: _mirror_by(kind))
        result.add(line_with(output, f"mirror {name}").removeprefix("warning: "))
        sandbox.require_same_end("straight", name)
        if time.monotonic() - start > 30:
            raise Failed(f"{name}: the run waited for its mirror")
    output = sandbox.run(*training("absent"), "--mirror", "trackio", fault=_uninstall, code=2)
    result.add(line_with(output, "not installed").removeprefix("seedbed: "))


def _uninstall() -> None:
    import importlib.util

    real = importlib.util.find_spec
    importlib.util.find_spec = lambda name, package=None: None if name == "trackio" else real(name, package)


# Long enough for a fault, and nothing that depends on how a batch is split.
TOGETHER = ("model.dropout=0.0", "steps=96", "every.save=8")


def ranks(sandbox: Sandbox, result: DrillResult) -> None:
    """One of two ranks under torchrun is killed: all stop and the run resumes; then 1, 2 and 1 ranks in turn."""
    if not Path("/proc/self/environ").exists():
        raise NotRun("it finds a rank by its environment under /proc, which this system lacks")
    sandbox.train("straight", *TOGETHER)
    # Started on one rank: torchrun would take --run as its own option.
    sandbox.train("killed", *TOGETHER, fault=faults.at_step(4, faults.send(signal.SIGTERM)), code=143)
    child = sandbox.start_fresh("resume", "killed", "dist.replicate=2", num_ranks=2)
    sandbox.wait_for_rows(child, "killed", 20)
    os.kill(_second_rank(child.pid), signal.SIGKILL)
    if not sandbox.wait(child):
        raise Failed("torchrun ended well although a rank was killed")
    result.add("torchrun stops the other rank and ends with an error; the run resumes at its newest checkpoint")
    sandbox.resume("killed", num_ranks=2)
    require_close(sandbox, "straight", "killed", 1e-5)
    sandbox.train("turns", *TOGETHER, fault=faults.at_step(20, faults.send(signal.SIGTERM)), code=143)
    child = sandbox.start_fresh("resume", "turns", "dist.replicate=2", num_ranks=2)
    sandbox.wait_for_rows(child, "turns", 44)
    os.kill(_second_rank(child.pid), signal.SIGTERM)
    sandbox.wait(child)
    if sandbox.status("turns") != "interrupted" or sandbox.newest("turns").step >= 96:
        raise Failed(f"two ranks that were asked to stop left {sandbox.status('turns')}")
    sandbox.resume("turns", "dist.replicate=1")
    require_close(sandbox, "straight", "turns", 1e-5)
    result.add("a signal to one rank stops all at the same step")


def _second_rank(torchrun: int) -> int:
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            parent = int((path.parent / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == torchrun and b"RANK=1" in path.read_bytes().split(b"\0"):
                return int(path.parent.name)
    raise Failed("torchrun has no rank 1")
