"""torchrun's elastic restarts: a run that loses ranks goes on by itself, to the same end. As a script: `... 20` kills."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rank_processes import PATHS, events, losses

from seedbed.config import Dist, override
from seedbed.errors import UserError
from seedbed.launch import elastic, local
from seedbed.recipes import find
from seedbed.train import checkpoint, checkpoint_loading

NUM_STEPS, NUM_RANKS = 600, 4
SETTINGS = ["device=cpu", "model.depth=1", "model.width=32", "model.heads=2", "data.block=16", "batch=8", "limit.valid=8"]
SETTINGS += [f"steps={NUM_STEPS}", "every.log=1", "every.eval=0", "every.sample=0", "every.save=25", "ema=0.9", "keep=3"]


def torchrun(root: Path, name: str, degrees: list[str], num_restarts: int) -> subprocess.Popen:
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"]
    words += [f"--max-restarts={num_restarts}", "-m", "seedbed", "train", "gpt/demo", *SETTINGS, *degrees]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATHS}
    with (root / f"{name}.log").open("w") as log:
        words += ["--name", name, "--runs", str(root / "runs"), "--no-check", "--dirty"]
        return subprocess.Popen(words, env=env, stdout=log, stderr=subprocess.STDOUT)


def ranks_of(agent: int) -> dict[int, int]:
    """The processes of torchrun's ranks, by rank."""
    found = {}
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == agent:
                env = (folder / "environ").read_bytes().split(b"\0")
                found[int(next(line for line in env if line.startswith(b"RANK=")).partition(b"=")[2])] = int(folder.name)
    return found


def last_step(root: Path, name: str) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return len(losses(root, name))
    return 0


def kill_at_random_moments(root: Path, name: str, degrees: list[str], num_kills: int) -> list[int]:
    """Train under torchrun and kill a random rank so many times; the steps at which that was."""
    rng, killed = random.Random(num_kills), []
    run = torchrun(root, name, degrees, num_kills + 1)
    try:
        for number in range(num_kills):
            wanted = (number + rng.random()) * 0.9 * NUM_STEPS / num_kills  # spread over the run
            deadline = time.monotonic() + 240
            while last_step(root, name) < wanted or len(ranks_of(run.pid)) < NUM_RANKS:
                assert run.poll() is None and time.monotonic() < deadline, (root / f"{name}.log").read_text()[-3000:]
                time.sleep(0.02)
            killed.append(last_step(root, name))
            os.kill(ranks_of(run.pid)[rng.randrange(NUM_RANKS)], signal.SIGKILL)
            time.sleep(2.0)  # torchrun looks every 0.1 s
        assert run.wait(timeout=300) == 0, (root / f"{name}.log").read_text()[-3000:]
    finally:
        run.terminate()  # it ends its ranks
        run.wait(timeout=60)
    return killed


def final(root: Path, name: str) -> dict[str, dict[str, torch.Tensor]]:
    return checkpoint_loading.load(root / "runs" / name / "checkpoints" / checkpoint.folder_name(NUM_STEPS)).tensors


def compare(root: Path, degrees: list[str], num_kills: int) -> None:
    killed = kill_at_random_moments(root, "lost", degrees, num_kills)
    assert torchrun(root, "whole", degrees, 0).wait(timeout=300) == 0, (root / "whole.log").read_text()[-3000:]
    resumed = [event["step"] for event in events(root, "lost", "resume")]
    print(f"killed at steps {killed}, went on from steps {resumed}")
    assert resumed, "no rank was lost"
    assert losses(root, "lost") == losses(root, "whole")
    for file, tensors in final(root, "whole").items():
        assert all(torch.equal(tensor, final(root, "lost")[file][name]) for name, tensor in tensors.items()), file


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("degrees", [["dist.replicate=4"], ["dist.replicate=2", "dist.shard=2"]])
def test_run_that_loses_ranks_ends_with_the_weights_of_an_undisturbed_one(tmp_path: Path, degrees: list[str]) -> None:
    compare(tmp_path, degrees, num_kills=3)


@pytest.mark.parametrize(
    ("degrees", "num", "found"),
    [
        (Dist(replicate=4), 4, []),
        (Dist(replicate=4), 2, ["dist.replicate=2"]),
        (Dist(replicate=2, shard=2), 2, ["dist.replicate=1"]),
        (Dist(replicate=1, shard=4), 8, ["dist.replicate=2"]),
        (Dist(replicate=4), 3, "batch=16 and accum=2 a run goes on with one of: 1, 2, 4"),
        (
            Dist(shard=4),
            3,
            "torchrun has 3 ranks left of 4; with dist.shard=4, batch=16 and accum=2 a run goes on with one of: 4",
        ),
    ],
)
def test_ranks_that_are_left(monkeypatch: pytest.MonkeyPatch, degrees: Dist, num: int, found: list[str] | str) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(num))
    config = replace(override(find("gpt/demo")[0].preset("demo"), ["batch=16", "accum=2"]), dist=degrees)
    if isinstance(found, list):
        assert elastic.fitted(config) == found
        return
    with pytest.raises(UserError, match=found):
        elastic.fitted(config)


def test_restarted_command_needs_the_name_of_its_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    with pytest.raises(UserError, match="name its run by --name NAME"):
        local.train("gpt/demo", [], root=tmp_path, dirty=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        compare(Path(folder), sys.argv[2:] or ["dist.replicate=4"], int(sys.argv[1]))
