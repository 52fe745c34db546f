"""A run that is killed twenty times, at random moments, ends with the same bits as one that was left alone."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import TOY, assert_same_end, kinds

from seedbed.track.run import Run

NUM_KILLS = 20
SETTINGS = ["steps=4000", "accum=2", "model.dropout=0.2", "ema=0.99", "every.log=7", "every.save=40", "every.eval=200"]


def seedbed(root: Path, *words: str) -> subprocess.Popen:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "SEEDBED_RUNS": str(root)}
    command = [sys.executable, "-m", "seedbed", *words]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=root.parent)


def finish(process: subprocess.Popen) -> str:
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    return said


def wait_for_rows(root: Path, process: subprocess.Popen, size: int) -> None:
    """Wait until the run trains again: its rows have grown."""
    path = root / "killed" / "rows.jsonl"
    while process.poll() is None and not (path.exists() and path.stat().st_size > size):
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_twenty_kills_change_no_bit(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    root.mkdir()
    finish(seedbed(root, "train", TOY, *SETTINGS, "--run", "straight", "--dirty"))
    dice = random.Random(0)
    num_kills, words = 0, ["train", TOY, *SETTINGS, "--run", "killed", "--dirty"]
    while num_kills < NUM_KILLS:
        path = root / "killed" / "rows.jsonl"
        size = path.stat().st_size if path.exists() else 0
        process = seedbed(root, *words)
        if num_kills % 5 == 4:
            time.sleep(dice.uniform(0.0, 3.0))  # anywhere: while starting, loading, resuming
        else:
            wait_for_rows(root, process, size)
            time.sleep(dice.uniform(0.0, 0.25))
        process.kill()
        process.communicate()
        assert process.returncode != 0, "the run ended before it could be killed often enough"
        num_kills += 1
        if (root / "killed").exists():
            words = ["resume", "killed"]
    finish(seedbed(root, *words))
    assert_same_end(root, "straight", "killed")
    assert kinds(root, "killed").count("resume") >= 3
    assert Run.open(root, "killed").status()["status"] == "done"
