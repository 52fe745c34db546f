"""Drills of closed terminals, killed parent processes and slow web clients."""

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
from pathlib import Path

from seedbed import isolated
from seedbed.drills import faults
from seedbed.drills.crash import interrupt
from seedbed.drills.mirrors_and_ranks import TOGETHER
from seedbed.drills.sandbox import STEPS, Child, DrillResult, Failed, NotRun, Sandbox, require_close, training


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
    for k, number in enumerate(numbers[:1] if sandbox.short else numbers * 2):
        name = f"orphan-{k}"
        child = sandbox.start_fresh(*training(name, *TOGETHER, "steps=100000", "every.save=0", "dist.replicate=2"))
        sandbox.wait_for_rows(child, name, 8)
        ranks = [int(word) for word in Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()]
        child.signal(number)
        sandbox.wait(child)
        sandbox.wait_until(lambda ranks=ranks: not any(_is_alive(pid) for pid in ranks), child, "'s ranks to end")
        if len(ranks) != 2 or sandbox.status(name) != "interrupted":
            raise Failed(f"{len(ranks)} ranks of a command that got {number.name} left the run {sandbox.status(name)}")
        step = sandbox.newest(name).step
        result.steps_lost += max(0, len(sandbox.rows(name)) - step)
        result.add(f"{number.name} to the command that started two ranks: both save and end with it")
    # The schedule depends on the length, so equality is tested on a run of the same length.
    child = sandbox.start_fresh(*training("exact", *TOGETHER, "dist.replicate=2"))
    sandbox.wait_for_rows(child, "exact", 20)
    child.signal(signal.SIGKILL)
    sandbox.wait(child)
    sandbox.wait_until(lambda: sandbox.status("exact") == "interrupted", child, "'s ranks to end")
    sandbox.resume("exact", "dist.replicate=1")
    require_close(sandbox, "straight", "exact", 1e-5)
    result.add("SIGKILL to the command that started two ranks: both save and end with it")


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
