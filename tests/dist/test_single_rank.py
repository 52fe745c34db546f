"""One process through the code of several: `dist.single` gives the losses and checkpoints of a plain run."""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import newest, resume, rows, start, stop_at

GPT = ["device=cpu", "model.depth=2", "model.width=32", "model.heads=2", "batch=8", "limit.valid=16", "ema=0.9"]
STEPS = ["steps=8", "every.log=1", "every.eval=4", "every.save=4"]


def gpt(root: Path, name: str, *settings: str) -> list[float]:
    assert start(root, name, *GPT, *STEPS, *settings, recipe="gpt/demo") == 0
    return [row["loss"] for row in rows(root, name)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("accum", [1, 2])
def test_code_path_of_several_ranks_equals_a_plain_run(tmp_path: Path, accum: int) -> None:
    plain = gpt(tmp_path, "plain", f"accum={accum}")
    assert len(set(plain)) == 8
    for way in ("replicate", "shard"):
        losses = gpt(tmp_path, way, f"accum={accum}", f"dist.single={way}")
        np.testing.assert_allclose(losses, plain, atol=2e-6, rtol=0)
        assert "1: 1 replicas of 1 shards" in (tmp_path / way / "console.log").read_text()
        one, other = newest(tmp_path, "plain"), newest(tmp_path, way)
        torch.testing.assert_close(one.tensors, other.tensors, rtol=1e-3, atol=1e-5)
    assert not torch.distributed.is_initialized()


@pytest.mark.timeout(120)
def test_run_continues_on_another_code_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = gpt(tmp_path, "plain")
    stop_at(5, monkeypatch)
    assert start(tmp_path, "changed", *GPT, *STEPS, "dist.single=shard", recipe="gpt/demo") == 143
    assert resume(tmp_path, "changed", "dist.single=replicate") == 0
    np.testing.assert_allclose([row["loss"] for row in rows(tmp_path, "changed")], plain, atol=2e-6, rtol=0)
