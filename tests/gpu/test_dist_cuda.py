"""One process through the code of several ranks, with NCCL on a GPU: the losses of a plain run, captured where possible."""

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import rows, start

GPT = ["device=cuda", "data.text=reference", "model.depth=2", "model.width=64", "model.heads=2", "model.dropout=0", "batch=8"]
STEPS = ["steps=12", "every.log=1", "every.eval=6", "every.save=6", "ema=0.9"]


def gpt(root: Path, name: str, *settings: str) -> tuple[list[float], str]:
    assert start(root, name, *GPT, *STEPS, *settings, recipe="gpt/demo") == 0
    return [row["loss"] for row in rows(root, name)], (root / name / "console.log").read_text()


@pytest.mark.parametrize("compile", ["off", "blocks"])
@pytest.mark.parametrize("accum", [1, 2])
def test_nccl_with_one_rank_equals_a_plain_run(tmp_path: Path, compile: str, accum: int) -> None:
    settings = [f"compile={compile}", f"accum={accum}"]
    plain, _ = gpt(tmp_path, "plain", *settings)
    assert len(set(plain)) == 12
    for way, how in (("replicate", "captured as one CUDA graph"), ("shard", "not captured: FSDP2")):
        losses, log = gpt(tmp_path, way, *settings, f"dist.single={way}")
        np.testing.assert_allclose(losses, plain, rtol=2e-5)
        assert how in log, log
        assert compile == "off" or "compiled (blocks)" in log, log
    assert not torch.distributed.is_initialized()


def test_bf16_shards_and_sums_round_and_do_no_more(tmp_path: Path) -> None:
    plain, _ = gpt(tmp_path, "plain", "precision=bf16")
    for name, *settings in (
        ("shard", "dist.single=shard"),
        ("replicate", "dist.single=replicate", "dist.reduce=bf16"),
        ("shard-reduced", "dist.single=shard", "dist.reduce=bf16"),
    ):
        losses, _ = gpt(tmp_path, name, "precision=bf16", *settings)
        np.testing.assert_allclose(losses, plain, atol=5e-3, rtol=0)
