"""Out of memory on a real device: the step that did not fit is taken in smaller parts, captured or not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import kinds, rows

from seedbed.track.run import Run

# 4096 x 16384 activations are 256 MiB each, the weights less than one: memory follows the micro-batch.
LARGE = ["device=cuda", "model.width=16384", "batch=4096", "data.num=8192", "steps=6", "every.eval=0"]
# A process of its own for each: what other tests have left in memory would count against the limit.
TRAIN = """
import sys, pathlib, torch
from helpers import start
root, name, share, *settings = sys.argv[1:]
torch.cuda.set_per_process_memory_fraction(float(share))
assert start(pathlib.Path(root), name, *settings) == 0
print(torch.cuda.max_memory_reserved() / torch.cuda.get_device_properties(0).total_memory)
"""


def train(root: Path, name: str, share: float, *settings: str) -> float:
    """Train with a share of the device's memory; returns the share that was used at most."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-c", TRAIN, str(root), name, str(share), *settings]
    done = subprocess.run(words, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return float(done.stdout.split()[-1])


@pytest.mark.parametrize("capture", ["auto", "off"])
def test_out_of_memory_on_a_small_device_is_survived(tmp_path: Path, capture: str) -> None:
    used = train(tmp_path, "roomy", 1.0, *LARGE, f"capture={capture}")
    train(tmp_path, "tight", 0.6 * used, *LARGE, f"capture={capture}")
    assert "out_of_memory" in kinds(tmp_path, "tight")
    assert Run.open(tmp_path, "tight").config_json()["config"]["accum"] > 1
    for one, other in zip(rows(tmp_path, "roomy"), rows(tmp_path, "tight"), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-3)
