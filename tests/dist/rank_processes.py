"""Rank processes for tests: one spawn per test file, in which runs of different world sizes follow each other.

A job is (world, kind, run, arguments): `train` or `resume` through the launcher, as a command would. Ranks beyond a job's world
skip it. Run as a script, this file is one rank.
"""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RankJob = tuple[int, str, str, list[str]]
TESTS = Path(__file__).parents[1]
PATHS = os.pathsep.join(map(str, (TESTS.parent / "src", TESTS)))


def ports(num: int) -> list[int]:
    """Free ports, one for each job, below those that systems give to connections: a job may start minutes later."""
    found: list[int] = []
    for port in random.SystemRandom().sample(range(10_240, 32_000), 10 * num):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
    return found[:num]


def run_jobs(root: Path, jobs: list[RankJob], num: int, seconds: float) -> dict[str, list[int]]:
    """Exit codes of every rank by job; a rank whose job raised writes the traceback to its log."""
    script = {"root": str(root), "jobs": jobs, "ports": ports(len(jobs))}
    (root / "script.json").write_text(json.dumps(script))
    processes, argv = [], [sys.executable, __file__, str(root / "script.json")]
    for rank in range(num):
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TEST_RANK": str(rank), "PYTHONPATH": PATHS}
        with (root / f"rank{rank}.log").open("w") as log:
            processes.append(subprocess.Popen(argv, env=env, stdout=log, stderr=subprocess.STDOUT))
    deadline = time.monotonic() + seconds
    try:
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes) or time.monotonic() > deadline:
                break
            time.sleep(0.2)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    logs = {rank: (root / f"rank{rank}.log").read_text() for rank in range(num)}
    codes: dict[str, list[int]] = {}
    for text in logs.values():
        for line in text.splitlines():
            if line.startswith("JOB "):
                _, name, code = line.split()
                codes.setdefault(name, []).append(int(code))
    for rank, process in enumerate(processes):
        # A rank that was killed waited for another one, whose log has the reason.
        assert process.returncode in (0, -signal.SIGKILL), f"rank {rank}: {logs[rank][-3000:]}"
    assert all(process.returncode == 0 for process in processes), f"not all ranks finished\n{logs[0][-3000:]}"
    return codes


def losses(root: Path, run: str, key: str = "loss") -> list[float]:
    lines = (root / "runs" / run / "rows.jsonl").read_text().splitlines()
    return [json.loads(line)[key] for line in lines]


def events(root: Path, run: str, kind: str) -> list[dict[str, Any]]:
    lines = (root / "runs" / run / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def max_difference(one: list[float], other: list[float]) -> float:
    assert len(one) == len(other) > 0
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


# ---- one rank ------------------------------------------------------------------------------------------------------------


def _stop_at(step: int, rank: int, loop: Any) -> None:
    """Send SIGTERM to this rank only, after `step` steps."""
    real = loop.take_step

    def take(job: Any) -> None:
        real(job)
        if job.step == step:
            loop.take_step = real
            os.kill(os.getpid(), signal.SIGTERM)

    if int(os.environ["TEST_RANK"]) == rank:
        loop.take_step = take


def _run_job(root: Path, kind: str, run: str, words: list[str]) -> int:
    from seedbed.launch import local
    from seedbed.launch.resume import resume
    from seedbed.train import loop

    stops = [word for word in words if word.startswith("stop=")]
    for word in stops:  # stop=STEP:RANK
        step, _, rank = word.removeprefix("stop=").partition(":")
        _stop_at(int(step), int(rank), loop)
    words = [word for word in words if word not in stops]
    if kind == "train":
        return local.train(words[0], words[1:], root=root / "runs", run_name=run, dirty=True)
    return resume(root / "runs", run, words)


def _main(path: Path) -> None:
    import traceback

    import torch

    torch.set_num_threads(1)
    script, rank = json.loads(path.read_text()), int(os.environ["TEST_RANK"])
    for number, ((world, kind, run, words), port) in enumerate(zip(script["jobs"], script["ports"], strict=True)):
        if rank >= world:
            continue
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            os.environ.pop(name, None)
        if world > 1:
            variables = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in variables.items()}, MASTER_ADDR="127.0.0.1")
        try:
            code = _run_job(Path(script["root"]), kind, run, words)
        except BaseException:
            traceback.print_exc()
            sys.exit(1)
        print(f"JOB {number}:{run} {code}", flush=True)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
