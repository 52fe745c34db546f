"""Starts the ranks of a run on this machine as processes of one command, and ends them together."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from seedbed import config as configs
from seedbed import isolated
from seedbed.config import Config
from seedbed.errors import UserError
from seedbed.launch import num_processes
from seedbed.recipes.saved import open_saved
from seedbed.track.run import Run
from seedbed.train import guard

# Most processes that a run's folder can start by itself; the command line may ask for more.
MAX_UNASKED = max(8, os.cpu_count() or 1)
# A pipe that is closed when the command ends, and the seconds that ranks then have to save.
PARENT_PIPE, ORPHAN_GRACE = "SEEDBED_PARENT_PIPE", 300.0
# Seconds to wait for the other ranks once one has failed: before SIGTERM, after it, and after SIGKILL.
GRACE = {0: 1.0, signal.SIGTERM: 10.0, signal.SIGKILL: 10.0}


def to_resume(root: Path, name: str, assignments: list[str]) -> int:
    """Number of processes that `resume` must start."""

    def config() -> Config:
        run = Run.open(root, name)
        from seedbed.track.edits import verified_config

        return configs.override(open_saved(verified_config(run), run.path)[1], assignments)

    world = num_processes(config)
    if world > MAX_UNASKED and not any(word.startswith("dist.") for word in assignments):
        raise UserError(
            f"run {name} needs {world} processes, and this machine has {os.cpu_count()} cores; "
            f"to start them anyway: seedbed resume {name} dist.replicate=N dist.shard=M"
        )
    return world


def start(num: int) -> int:
    """Run this command once per rank. Returns the exit code of the first rank that failed, or 0."""
    words = isolated.command("seedbed", *sys.argv[1:])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free_port = probe.getsockname()[1]
    ours, theirs = os.pipe()[::-1]
    shared = {
        **os.environ,
        "WORLD_SIZE": str(num),
        "LOCAL_WORLD_SIZE": str(num),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port),
        PARENT_PIPE: str(theirs),
    }
    shared.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num)))
    ranks: list[subprocess.Popen] = []
    stops: set[int] = set()  # exit codes of ranks that were stopped by a signal we passed on

    def pass_on(number: int, _frame: Any) -> None:
        stops.add(128 + number)
        for process in ranks:
            if process.poll() is None:
                process.send_signal(number)

    caught = (number for number in guard.STOPPING if not guard.is_ignored(number))
    handlers: dict[int, Any] = {number: signal.signal(number, pass_on) for number in caught}
    try:
        for rank in range(num):
            # In their own session, so that Ctrl-C reaches them once, through this process. The pipe closes with this process.
            env = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(subprocess.Popen(words, env=env, start_new_session=True, pass_fds=(theirs,)))
        return _wait_for(ranks, stops)
    finally:
        _end(ranks)
        guard.restore_signals(handlers)
        os.close(ours)
        os.close(theirs)


def _wait_for(ranks: list[subprocess.Popen], stops: set[int]) -> int:
    """Wait until all ranks have ended or one has failed. One stopped by a signal has not failed: others may still be saving."""
    while any(process.poll() is None for process in ranks):
        if any((code := process.poll()) and code not in stops for process in ranks):
            break
        time.sleep(0.05)
    failed = [(r, code) for r, process in enumerate(ranks) if (code := process.poll())]
    if not failed:
        return 0
    # The ranks that lose a killed one fail too, within the same look: the one that was killed is the cause.
    rank, code = min(failed, key=lambda found: found[1] >= 0)
    if code < 0:
        print(f"seedbed: rank {rank} was killed by signal {-code}; the other ranks are stopped", file=sys.stderr, flush=True)
        return 128 - code
    return code


def _end(ranks: list[subprocess.Popen]) -> None:
    """Wait for the remaining ranks, then send SIGTERM, then SIGKILL."""
    for number, seconds in GRACE.items():  # signal 0 only tests whether the process exists
        left = [process for process in ranks if process.poll() is None]
        for process in left:
            process.send_signal(number)
        deadline = time.monotonic() + seconds
        while any(process.poll() is None for process in left) and time.monotonic() < deadline:
            time.sleep(0.05)


def end_with_parent() -> None:
    """In a rank: send itself SIGTERM, which saves, when the command that started it has ended for any reason."""
    given = os.environ.pop(PARENT_PIPE, None)
    if given is None:
        return

    def wait() -> None:
        with contextlib.suppress(OSError):
            os.read(int(given), 1)  # nothing is written to the pipe: the read returns when it is closed
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ORPHAN_GRACE)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="parent", daemon=True).start()
