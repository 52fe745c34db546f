"""What only a GPU can show of flow: compiled and captured steps equal eager ones, no host syncs, samples as on the CPU."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import newest, no_host_sync, rows, train_once

from seedbed import config as configs
from seedbed.data.feed import Feed
from seedbed.recipes import find
from seedbed.recipes.flow.classifier import ClassifierConfig, train_classifier
from seedbed.recipes.flow.sampling import Sampling, generate
from seedbed.recipes.flow.system import Flow
from seedbed.train.stepper import build

pytestmark = pytest.mark.usefixtures("no_report")
SMALL = ["device=cuda", "model.depth=2", "model.width=128", "model.heads=2", "batch=32", "steps=10", "ema2=0.99"]
QUIET = ["every.log=1", "every.eval=0", "every.sample=0", "every.save=0"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of all tests here: captured and compiled steps are compared with the same eager ones."""
    return tmp_path_factory.mktemp("flow")


def losses(root: Path, name: str, *settings: str) -> list[float]:
    train_once(root, name, *SMALL, *QUIET, *settings, recipe="flow/demo")
    return [row["loss"] for row in rows(root, name)]


def made(*settings: str) -> tuple[Flow, Any, Feed]:
    recipe, preset = find("flow/demo")
    config = configs.override(recipe.preset(preset), [*SMALL, *settings])
    data = recipe.open_data(config)
    engine = build(recipe, config, data)
    system = engine.system
    assert isinstance(system, Flow)
    feed = Feed(data.train, batch=config.batch, parts=1, seed=config.seed, device=engine.device)
    feed.load(0)
    return system, engine, feed


@pytest.mark.parametrize("condition", ["adaln", "context"])
@pytest.mark.parametrize("predict", ["v", "x"])
def test_captured_equals_eager(root: Path, condition: str, predict: str) -> None:
    settings = [f"model.condition={condition}", f"model.predict={predict}"]
    eager = losses(root, f"eager-{condition}-{predict}", *settings, "capture=off")
    captured = losses(root, f"captured-{condition}-{predict}", *settings)
    assert "captured as one CUDA graph" in (root / f"captured-{condition}-{predict}" / "console.log").read_text()
    np.testing.assert_allclose(captured, eager, rtol=1e-4)
    a, b = newest(root, f"eager-{condition}-{predict}"), newest(root, f"captured-{condition}-{predict}")
    torch.testing.assert_close(a.tensors["ema2"], b.tensors["ema2"], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("condition", ["adaln", "context"])
def test_compiled_equals_eager(root: Path, condition: str) -> None:
    settings = [f"model.condition={condition}", "model.predict=v"]
    eager = losses(root, f"eager-{condition}-v", *settings, "capture=off")
    for mode in ("blocks", "whole"):
        compiled = losses(root, f"{mode}-{condition}", *settings, f"compile={mode}")
        log = (root / f"{mode}-{condition}" / "console.log").read_text()
        assert f"compiled ({mode}), captured" in log, log
        np.testing.assert_allclose(compiled, eager, rtol=1e-3)


def test_bf16_follows_fp32(root: Path) -> None:
    slow = "optim.lr=5e-4"  # at the demo's own rate ten steps blow rounding up to some per cent
    whole = losses(root, "whole", slow)
    half = losses(root, "half", slow, "precision=bf16", "compile=whole")
    np.testing.assert_allclose(half, whole, rtol=3e-2)
    assert np.mean(half) == pytest.approx(np.mean(whole), rel=1e-2)


def test_first_loss_equals_cpu(root: Path) -> None:
    """Noise, times and hidden classes follow from counters, so both devices draw the same ones."""
    cuda = losses(root, "cuda", "capture=off")
    cpu = losses(root, "cpu", "device=cpu")
    assert cuda[0] == pytest.approx(cpu[0], rel=1e-4)


def test_step_has_no_host_sync() -> None:
    """In sync-debug mode any wait of the host for the device raises."""
    system, engine, feed = made("precision=bf16")
    engine.begin(0, 0.5)
    engine.step(feed.part)
    torch.cuda.synchronize()
    with no_host_sync():
        engine.step(feed.part)
    assert system.training


@pytest.mark.parametrize("kernel", ["CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION"])
@pytest.mark.parametrize("heads", [2, 8])
def test_attention_kernels_agree_with_the_plain_one(kernel: str, heads: int) -> None:
    """Not causal, in bfloat16, forward and backward, also with condition tokens that make the length odd."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    system, engine, feed = made("precision=bf16", f"model.heads={heads}", "model.condition=context", "model.context_tokens=2")
    with torch.no_grad():
        for param in system.parameters():
            param += 0.05 * torch.randn_like(param)
    batch = feed.part(0)
    found = {}
    for name in ("MATH", kernel):
        system.zero_grad()
        system.kernels = lambda name=name: (getattr(SDPBackend, name),)  # type: ignore[method-assign]
        try:
            with torch.autocast("cuda", dtype=torch.bfloat16), sdpa_kernel(getattr(SDPBackend, name)):
                loss = system.loss(batch, engine)[0]
            loss.backward()
        except RuntimeError as error:
            pytest.skip(f"{name} does not run this shape: {str(error).splitlines()[0]}")
        found[name] = (loss.item(), system.model.enter.weight.grad.clone())  # type: ignore[union-attr]
    assert found[kernel][0] == pytest.approx(found["MATH"][0], rel=1e-2)
    torch.testing.assert_close(found[kernel][1], found["MATH"][1], rtol=0.1, atol=0.05 * found["MATH"][1].abs().max().item())


def test_samples_equal_cpu() -> None:
    system, _, _ = made()
    with torch.no_grad():
        system.model.leave.weight.normal_(std=0.1)
    system.eval()
    label, sampling = torch.arange(6), Sampling(steps=5, guidance=2.0)
    there = generate(system.model, label, sampling, seed=1).cpu()
    here = generate(system.model.cpu(), label, sampling, seed=1)
    torch.testing.assert_close(there, here, rtol=1e-2, atol=1e-2)


def test_classifier_trains_inside_an_open_autocast() -> None:
    """Its narrowed weights must not outlive a step: an open autocast keeps them, and nothing would be learned."""
    system, engine, _ = made()
    with torch.autocast("cuda", dtype=torch.bfloat16), torch.autocast("cuda", enabled=False):
        classifier = train_classifier(system.data, engine.device, ClassifierConfig(width=16, epochs=4, batch=64))
    assert classifier.accuracy > 0.5
