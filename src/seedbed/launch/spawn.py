"""Several ranks on this machine from one command: as many processes as the config asks for, which live and end together."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from seedbed import config as configs
from seedbed.config import Config
from seedbed.errors import UserError
from seedbed.recipes import find, find_saved
from seedbed.track.run import Run

# Seconds that the other ranks get to end by themselves once one has failed, after being asked to, and after being ended.
GRACE = {0: 1.0, signal.SIGTERM: 10.0, signal.SIGKILL: 10.0}
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def to_train(name: str, assignments: list[str]) -> int:
    """How many processes `train` must start here; 0 when this one is enough, or is one of them already."""

    def config() -> Config:
        recipe, preset = find(name)
        return configs.override(recipe.preset(preset), assignments)

    return _wanted(config)


def to_resume(root: Path, name: str, assignments: list[str]) -> int:
    """The same for `resume`."""

    def config() -> Config:
        facts = Run.open(root, name).config_json()
        recipe = find_saved(facts["recipe"], root)
        return configs.override(configs.from_json(recipe.preset(facts["preset"]), facts["config"]), assignments)

    return _wanted(config)


def _wanted(config: Callable[[], Config]) -> int:
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return 0
    try:
        world = config().dist.world
    except UserError:  # whoever does the work will say it
        return 0
    return world if world > 1 else 0


def refuse(num: int, what: str) -> None:
    if num:
        raise UserError(f"{what} is done by one process; set dist.replicate=1 dist.shard=1 for it")


def start(num: int) -> int:
    """This command again, once per rank; the exit code of the first rank that failed, or 0."""
    words = [sys.executable, "-m", "seedbed", *sys.argv[1:]]
    shared = {
        **os.environ,
        "WORLD_SIZE": str(num),
        "LOCAL_WORLD_SIZE": str(num),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    shared.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num)))
    # A group of their own: Ctrl-C reaches them once, through us.
    ranks = [
        subprocess.Popen(words, env={**shared, "RANK": str(r), "LOCAL_RANK": str(r)}, start_new_session=True) for r in range(num)
    ]

    def pass_on(number: int, _frame: Any) -> None:
        for process in ranks:
            if process.poll() is None:
                process.send_signal(number)

    handlers = {number: signal.signal(number, pass_on) for number in _FORWARDED}
    try:
        return _attend(ranks)
    finally:
        _end(ranks)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _attend(ranks: list[subprocess.Popen]) -> int:
    """Wait until all are done or one has failed."""
    while any(process.poll() is None for process in ranks):
        if any(process.poll() for process in ranks):
            break
        time.sleep(0.05)
    failed = [(r, code) for r, process in enumerate(ranks) if (code := process.poll())]
    if not failed:
        return 0
    rank, code = failed[0]
    if code < 0:
        print(f"seedbed: rank {rank} was ended by signal {-code}; the others stop too", file=sys.stderr, flush=True)
        return 128 - code
    return code


def _end(ranks: list[subprocess.Popen]) -> None:
    """Give those that are left time to end by themselves, then ask them, then end them."""
    for ask, seconds in GRACE.items():  # 0 only asks whether it is there
        left = [process for process in ranks if process.poll() is None]
        for process in left:
            process.send_signal(ask)
        deadline = time.monotonic() + seconds
        while any(process.poll() is None for process in left) and time.monotonic() < deadline:
            time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
