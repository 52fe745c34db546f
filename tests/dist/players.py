"""Processes that play ranks: one spawn per test file, in which acts of different world sizes follow each other.

An act is (world, kind, run, words): `train` or `resume` through the launcher, as a command would. Ranks beyond an act's world
sit it out. Run as a script, this file is one rank.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

Act = tuple[int, str, str, list[str]]


def ports(num: int) -> list[int]:
    """Free ports; each act meets at one of its own."""
    probes = [socket.socket() for _ in range(num)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    found = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return found


def play(root: Path, acts: list[Act], num: int, seconds: float) -> dict[str, list[int]]:
    """Exit codes of every rank by act; an act that raised has -1, and its rank says so on its standard error."""
    script = {"root": str(root), "acts": acts, "ports": ports(len(acts))}
    (root / "script.json").write_text(json.dumps(script))
    processes, words = [], [sys.executable, __file__, str(root / "script.json")]
    for rank in range(num):
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PLAYER": str(rank), "PYTHONPATH": str(Path(__file__).parents[1])}
        with (root / f"rank{rank}.log").open("w") as log:
            processes.append(subprocess.Popen(words, env=env, stdout=log, stderr=subprocess.STDOUT))
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
    told = {rank: (root / f"rank{rank}.log").read_text() for rank in range(num)}
    codes: dict[str, list[int]] = {}
    for text in told.values():
        for line in text.splitlines():
            if line.startswith("ACT "):
                _, name, code = line.split()
                codes.setdefault(name, []).append(int(code))
    for rank, process in enumerate(processes):
        # One that was killed waited for another, which says why.
        assert process.returncode in (0, -signal.SIGKILL), f"rank {rank}: {told[rank][-3000:]}"
    assert all(process.returncode == 0 for process in processes), f"not all ranks came to the end\n{told[0][-3000:]}"
    return codes


def losses(root: Path, run: str, key: str = "loss") -> list[float]:
    lines = (root / "runs" / run / "rows.jsonl").read_text().splitlines()
    return [json.loads(line)[key] for line in lines]


def events(root: Path, run: str, kind: str) -> list[dict[str, Any]]:
    lines = (root / "runs" / run / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def furthest(one: list[float], other: list[float]) -> float:
    assert len(one) == len(other) > 0
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


# ---- one rank ------------------------------------------------------------------------------------------------------------


def _stop_at(step: int, rank: int, loop: Any) -> None:
    """Let this rank alone be asked to stop after `step` steps, as by SIGTERM."""
    real = loop._take_step

    def take(job: Any) -> None:
        real(job)
        if job.step == step:
            loop._take_step = real
            os.kill(os.getpid(), signal.SIGTERM)

    if int(os.environ["PLAYER"]) == rank:
        loop._take_step = take


def _perform(root: Path, kind: str, run: str, words: list[str]) -> int:
    from seedbed.launch import local
    from seedbed.train import loop

    stops = [word for word in words if word.startswith("stop=")]
    for word in stops:  # stop=STEP:RANK
        step, _, rank = word.removeprefix("stop=").partition(":")
        _stop_at(int(step), int(rank), loop)
    words = [word for word in words if word not in stops]
    if kind == "train":
        return local.train(words[0], words[1:], root=root / "runs", run_name=run, dirty=True)
    return local.resume(root / "runs", run, words)


def _main(path: Path) -> None:
    import traceback

    import torch

    torch.set_num_threads(1)
    script, rank = json.loads(path.read_text()), int(os.environ["PLAYER"])
    for number, ((world, kind, run, words), port) in enumerate(zip(script["acts"], script["ports"], strict=True)):
        if rank >= world:
            continue
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            os.environ.pop(name, None)
        if world > 1:
            places = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in places.items()}, MASTER_ADDR="127.0.0.1")
        try:
            code = _perform(Path(script["root"]), kind, run, words)
        except BaseException:
            traceback.print_exc()
            sys.exit(1)
        print(f"ACT {number}:{run} {code}", flush=True)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
