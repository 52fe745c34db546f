"""What only a GPU can show of ebt: captured and compiled steps equal eager ones, and captured generation."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from _uncached import UncachedEnergyDecoder
from ebt_samples import CHARS, TEXT, make, written_rows
from helpers import newest, rows, train_once

from seedbed.nn.cuda_graph import GraphedCalls
from seedbed.nn.decoding import Sampling
from seedbed.recipes.ebt.generate import CachedDecoder, OptimizeOptions
from seedbed.recipes.ebt.optimize import graphed_step, optimize
from seedbed.train.system import Sample

pytestmark = pytest.mark.usefixtures("no_report")
SMALL = ["device=cuda", "data.tokenizer=char", "data.block=32", "batch=8", "steps=8", "model.size=4xs", "model.control=false"]
QUIET = ["every.log=1", "every.eval=0", "every.sample=0", "every.save=0", "limit.valid=4"]
S2 = [
    "model.mcmc.replay_buffer=16",
    "model.step_embed=none",
    "model.mcmc.num_landscapes=1",
    "model.mcmc.num_steps=3",
    "model.mcmc.min_steps=2",
]
S2 += [
    "model.mcmc.loss=last",
    "model.mcmc.langevin_noise=3",
    "model.mcmc.random_alpha=2",
    "model.mcmc.learn_alpha=false",
]
KINDS = {"s1": [], "s2": S2, "prefix": ["model.step_embed=prefix"]}


@pytest.fixture(autouse=True)
def no_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seedbed.recipes.ebt.system.EnergySystem.sample", lambda *given: Sample())


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of all tests here: captured and compiled steps are compared with the same eager ones."""
    return tmp_path_factory.mktemp("ebt")


def losses(root: Path, name: str, *settings: str) -> list[float]:
    text = root / "small.txt"
    text.write_text(TEXT)
    train_once(root, name, *SMALL, *QUIET, f"data.text={text}", *settings, recipe="ebt/demo")
    return [row["loss"] for row in rows(root, name)]


@pytest.mark.parametrize("kind", KINDS)
def test_captured_equals_eager(root: Path, kind: str) -> None:
    eager = losses(root, f"eager-{kind}", *KINDS[kind], "capture=off")
    captured = losses(root, f"captured-{kind}", *KINDS[kind])
    assert "captured as one CUDA graph" in (root / f"captured-{kind}" / "console.log").read_text()
    np.testing.assert_allclose(captured, eager, rtol=2e-3)
    if kind == "s2":
        one, two = (newest(root, f"{n}-s2").tensors["model"]["replay.tokens_RL"] for n in ("eager", "captured"))
        assert torch.equal(one, two)


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_equals_eager(root: Path, kind: str) -> None:
    eager = losses(root, f"eager-{kind}", *KINDS[kind], "capture=off")
    compiled = losses(root, f"compiled-{kind}", *KINDS[kind], "compile=blocks")
    log = (root / f"compiled-{kind}" / "console.log").read_text()
    assert "compiled (blocks), captured" in log and "goes on eager" not in log, log
    np.testing.assert_allclose(compiled, eager, rtol=1e-2)


def test_bf16_follows_fp32(root: Path) -> None:
    np.testing.assert_allclose(losses(root, "half", "precision=bf16"), losses(root, "whole"), rtol=5e-2)


def test_cuda_step_equals_cpu(root: Path) -> None:
    on_cpu = losses(root, "cpu", "device=cpu", "steps=3")
    np.testing.assert_allclose(losses(root, "cuda", "steps=3"), on_cpu, rtol=2e-3)


@pytest.mark.parametrize("options", [OptimizeOptions(2), OptimizeOptions(4, best_of=3)], ids=str)
@pytest.mark.parametrize("settings", [[], ["model.step_embed=prefix"]], ids=["pred", "prefix"])
@torch.no_grad()
def test_generation_captured_equals_uncached(settings: list[str], options: OptimizeOptions) -> None:
    system = make(*settings).double().cuda().eval()
    rows = [CHARS.encode(p).tolist() for p in ("the quick", "s")]
    captured = CachedDecoder(system, options, rows, 30, Sampling(0.0), 3, capture=True)
    slow = UncachedEnergyDecoder(system, options, rows, 30, Sampling(0.0), 3)
    one, two = written_rows(captured, 30), written_rows(slow, 30)
    assert not captured.why_not_captured
    for a, b in zip(one, two, strict=True):
        assert a.tokens == b.tokens and a.energies == pytest.approx(b.energies, rel=1e-4, abs=1e-5)


@torch.no_grad()
def test_graphed_steps_equal_eager_ones() -> None:
    """Those of several landscapes, on new predictions, and with another step size: the same kernels on the same shapes."""
    system = make(tokenizer=CHARS).to("cuda").eval()
    tokens_BT = torch.from_numpy(system.data.train.tokens[:64].astype("int64")).view(4, 16).to("cuda")
    contexts, graphs = system.model.encode_context(tokens_BT), GraphedCalls()
    for seed, alpha in ((1, system.alpha()), (2, 0.5 * system.alpha()), (3, 2.0)):
        torch.manual_seed(seed)
        z_BTV = torch.randn(4, 16, system.model.vocab, device="cuda")
        given = (system.model, contexts, z_BTV, 5, alpha, "prob")
        eager = [[x.clone() for x in step] for step in optimize(*given)]
        captured = [[x.clone() for x in step] for step in optimize(*given, partial(graphed_step, graphs))]
        assert all(torch.equal(a, b) for one, other in zip(eager, captured, strict=True) for a, b in zip(one, other, strict=True))
    assert graphs.is_possible and len(graphs.recorded) == 2, "a graph for each landscape"
