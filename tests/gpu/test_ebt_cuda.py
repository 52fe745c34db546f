"""What only a GPU can show of ebt: captured and compiled steps equal eager ones, and captured generation."""

from pathlib import Path

import numpy as np
import pytest
import torch
from ebt_samples import CHARS, TEXT, make
from helpers import newest, rows, start

from seedbed.launch import local
from seedbed.nn.sampling import Sampling
from seedbed.recipes.ebt.generate import CachedDecoder, Thinking, UncachedDecoder, write
from seedbed.train.system import Sample

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SMALL = ["device=cuda", "data.tokenizer=char", "data.block=32", "batch=8", "steps=8", "model.size=4xs", "model.control=false"]
QUIET = ["every.log=1", "every.eval=0", "every.sample=0", "every.save=0", "limit.valid=4"]
S2 = ["model.walk.replay=16", "model.step_embed=none", "model.walk.landscapes=1", "model.walk.steps=3", "model.walk.fewest=2"]
S2 += ["model.walk.loss=last", "model.walk.langevin=3", "model.walk.spread=2", "model.walk.learn_alpha=false"]
KINDS = {"s1": [], "s2": S2, "prefix": ["model.step_embed=prefix"]}


@pytest.fixture(autouse=True)
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local.journal, "finish", lambda run, warn: None)
    monkeypatch.setattr("seedbed.recipes.ebt.system.EnergySystem.sample", lambda *given: Sample())


def losses(root: Path, name: str, *settings: str) -> list[float]:
    text = root / "small.txt"
    text.write_text(TEXT)
    assert start(root, name, *SMALL, *QUIET, f"data.text={text}", *settings, recipe="ebt/demo") == 0
    return [row["loss"] for row in rows(root, name)]


@pytest.mark.parametrize("kind", KINDS)
def test_captured_equals_eager(tmp_path: Path, kind: str) -> None:
    eager = losses(tmp_path, "eager", *KINDS[kind], "capture=off")
    captured = losses(tmp_path, "captured", *KINDS[kind])
    assert "captured as one CUDA graph" in (tmp_path / "captured" / "console.log").read_text()
    np.testing.assert_allclose(captured, eager, rtol=2e-3)
    if kind == "s2":
        one, two = (newest(tmp_path, n).tensors["model"]["replay.tokens_RL"] for n in ("eager", "captured"))
        assert torch.equal(one, two)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_equals_eager(tmp_path: Path, kind: str) -> None:
    eager = losses(tmp_path, "eager", *KINDS[kind], "capture=off")
    compiled = losses(tmp_path, "compiled", *KINDS[kind], "compile=blocks")
    log = (tmp_path / "compiled" / "console.log").read_text()
    assert "compiled (blocks), captured" in log and "goes on eager" not in log, log
    np.testing.assert_allclose(compiled, eager, rtol=1e-2)


def test_half_precision_follows_whole_precision(tmp_path: Path) -> None:
    np.testing.assert_allclose(losses(tmp_path, "half", "precision=bf16"), losses(tmp_path, "whole"), rtol=5e-2)


def test_a_step_equals_that_of_the_cpu(tmp_path: Path) -> None:
    on_cpu = losses(tmp_path, "cpu", "device=cpu", "steps=3")
    np.testing.assert_allclose(losses(tmp_path, "cuda", "steps=3"), on_cpu, rtol=2e-3)


@pytest.mark.parametrize("thinking", [Thinking(2), Thinking(4, best_of=3)], ids=str)
@pytest.mark.parametrize("settings", [[], ["model.step_embed=prefix"]], ids=["pred", "prefix"])
@torch.no_grad()
def test_captured_generation_equals_reading_anew(settings: list[str], thinking: Thinking) -> None:
    system = make(*settings).double().cuda().eval()
    rows = [CHARS.encode(p).tolist() for p in ("the quick", "s")]
    captured = CachedDecoder(system, thinking, rows, 30, Sampling(0.0), 3, capture=True)
    slow = UncachedDecoder(system, thinking, rows, 30, Sampling(0.0), 3)
    one, two = write(captured, CHARS, 30), write(slow, CHARS, 30)
    assert not captured.why_not_captured
    for a, b in zip(one, two, strict=True):
        assert a.tokens == b.tokens and a.energies == pytest.approx(b.energies, rel=1e-4, abs=1e-5)
