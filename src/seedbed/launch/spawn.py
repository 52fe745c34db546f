"""Starts the ranks of a run on this machine as processes of one command, and ends them together."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

from seedbed import isolated
from seedbed.launch.processes import PARENT_PIPE
from seedbed.train import process_guards

# Seconds to wait for the other ranks once one has failed: before SIGTERM, after it, and after SIGKILL.
GRACE = {0: 1.0, signal.SIGTERM: 10.0, signal.SIGKILL: 10.0}


def start(num: int) -> int:
    """Run this command once per rank. Returns the exit code of the first rank that failed, or 0."""
    words = isolated.command("seedbed", *sys.argv[1:])
    ours, theirs = os.pipe()[::-1]
    shared = {
        **os.environ,
        "WORLD_SIZE": str(num),
        "LOCAL_WORLD_SIZE": str(num),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
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

    caught = (number for number in process_guards.STOPPING if not process_guards.is_ignored(number))
    handlers: dict[int, Any] = {number: signal.signal(number, pass_on) for number in caught}
    try:
        for rank in range(num):
            # In their own session, so that Ctrl-C reaches them once, through this process. The pipe closes with this process.
            env = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(subprocess.Popen(words, env=env, start_new_session=True, pass_fds=(theirs,)))
        return _wait_for(ranks, stops)
    finally:
        _end(ranks)
        process_guards.restore_signals(handlers)
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
    rank, code = failed[0]
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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
