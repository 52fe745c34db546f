"""Ranks that hang, die or differ: the others end soon and say why. Run as a script, this file is one rank."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

GPT = ["device=cpu", "model.depth=1", "model.width=32", "model.heads=2", "batch=8", "every.eval=0", "every.save=0"]
LIMIT = 4.0


def one_rank(folder: Path, fault: str) -> int:
    import torch

    from seedbed.cli import failures
    from seedbed.errors import UserError
    from seedbed.launch import local
    from seedbed.recipes import Recipe
    from seedbed.track import code
    from seedbed.train import guard, loop

    torch.set_num_threads(1)
    guard.RANKS_LIMIT, rank, real = LIMIT, int(os.environ["RANK"]), loop.take_step

    def take(job: loop.Job) -> None:
        real(job)
        if rank == 1 and job.step == 30:
            if fault == "dies":
                os._exit(9)
            os.kill(os.getpid(), signal.SIGSTOP)

    if fault in ("hangs", "dies"):
        loop.take_step = take
    words = [*GPT, "steps=100000", "dist.replicate=2"]
    opened = Recipe.open_data

    def open_other(self: Recipe, config: Any) -> Any:
        data = opened(self, config)
        data.facts["fingerprint"] = "other"
        return data

    if rank == 1 and fault == "torch":
        torch.__version__ = "1.0"
    if rank == 1 and fault == "code":
        code.source_digest = lambda: "other"
    if rank == 1 and fault == "data":
        Recipe.open_data = open_other
    try:
        return local.train("gpt/demo", words, root=folder / "runs", run_name="one", dirty=True)
    except UserError as error:
        return failures.print_error(str(error))
    except Exception as error:
        return failures.explain(error)


def ranks(folder: Path, fault: str) -> tuple[list[int], list[str], float]:
    """Exit codes, what the ranks printed, and the seconds between the end of rank 0's steps and the end of both."""
    from rank_processes import PATHS, ports

    (port,) = ports(1)
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATHS, "WORLD_SIZE": "2"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    argv = [sys.executable, __file__, str(folder), fault]
    processes = []
    for rank in range(2):
        env = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with (folder / f"rank{rank}.log").open("w") as log:
            processes.append(subprocess.Popen(argv, env=env, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [processes[0].wait(timeout=200)]
        if fault == "hangs":
            processes[1].kill()  # a launcher does
        codes.append(processes[1].wait(timeout=60))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    rows = folder / "runs/one/rows.jsonl"
    seconds = time.time() - rows.stat().st_mtime if rows.exists() else 0.0
    return codes, [(folder / f"rank{rank}.log").read_text() for rank in range(2)], seconds


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_hung_rank_ends_all_with_the_name_of_the_collective(tmp_path: Path) -> None:
    codes, texts, seconds = ranks(tmp_path, "hangs")
    assert codes == [75, -signal.SIGKILL], texts
    assert "waiting for other ranks in all_reduce of gradients" in texts[0].splitlines()[-2], texts[0]
    assert seconds < 60.0


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_dead_rank_ends_the_other(tmp_path: Path) -> None:
    codes, texts, seconds = ranks(tmp_path, "dies")
    assert codes[1] == 9 and codes[0] != 0, texts
    assert "another rank has stopped, so this one stops too" in texts[0]
    assert seconds < 60.0


@pytest.mark.timeout(240)
@pytest.mark.parametrize("what", ["torch", "code", "data"])
def test_rank_that_differs_is_refused_before_the_first_step(tmp_path: Path, what: str) -> None:
    codes, texts, _ = ranks(tmp_path, what)
    assert codes == [2, 2], texts
    assert f"seedbed: the {what} of rank 1 differs from that of rank 0; give all machines the same" in texts[0]
    assert "Traceback" not in texts[0] + texts[1]


if __name__ == "__main__":
    sys.exit(one_rank(Path(sys.argv[1]), sys.argv[2]))
