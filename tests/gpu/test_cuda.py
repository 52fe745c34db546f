"""Captured steps equal eager ones, random numbers change inside graphs, and data arrives as it was sent: on a GPU."""

from pathlib import Path

import numpy as np
import pytest
import torch
from _sources import WindowSource
from helpers import newest, no_host_sync, resume, rows, start, stop_at

from seedbed.data.feed import Feed
from seedbed.nn.layers import linear_cross_entropy
from seedbed.track.run import Run
from seedbed.train.stepper import EagerRunner

pytestmark = pytest.mark.usefixtures("no_report")
GPT = [
    "device=cuda",
    "data.text=reference",
    "model.depth=2",
    "model.width=64",
    "model.heads=2",
    "batch=8",
    "every.log=1",
    "every.eval=6",
    "every.save=6",
]


def gpt(root: Path, name: str, *settings: str) -> list[float]:
    assert start(root, name, *GPT, "steps=12", *settings, recipe="gpt/demo") == 0
    return [r["loss"] for r in rows(root, name)]


@pytest.mark.parametrize("optim", ["adamw", "muon"])
@pytest.mark.parametrize("accum", [1, 4])
def test_captured_equals_eager(tmp_path: Path, optim: str, accum: int) -> None:
    settings = ["model.dropout=0", f"optim.kind={optim}", f"accum={accum}", "ema=0.9"]
    eager = gpt(tmp_path, "eager", *settings, "capture=off")
    captured = gpt(tmp_path, "captured", *settings)
    assert "captured as one CUDA graph" in (tmp_path / "captured" / "console.log").read_text()
    assert len(captured) == 12
    np.testing.assert_allclose(captured, eager, rtol=2e-5)
    a, b = newest(tmp_path, "eager"), newest(tmp_path, "captured")
    torch.testing.assert_close(a.tensors["ema"], b.tensors["ema"], rtol=1e-3, atol=1e-4)


def test_compiled_equals_eager(tmp_path: Path) -> None:
    eager = gpt(tmp_path, "eager", "model.dropout=0", "capture=off")
    for mode in ("blocks", "whole"):
        compiled = gpt(tmp_path, mode, "model.dropout=0", f"compile={mode}")
        log = (tmp_path / mode / "console.log").read_text()
        assert f"compiled ({mode}), captured" in log, log
        np.testing.assert_allclose(compiled, eager, rtol=1e-4)


def test_dropout_moves_between_replays_and_repeats_with_the_seed(tmp_path: Path) -> None:
    settings = ["model.dropout=0.3", "optim.lr=0", "data.mode=blocks", "data.valid=0.9"]
    one, two = (gpt(tmp_path, n, *settings) for n in ("one", "two"))
    assert one == two, "the same seed gives the same numbers"
    other = gpt(tmp_path, "other", *settings, "seed=2")
    assert other != one


def test_resume_on_cuda_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ["model.dropout=0.2", "ema=0.9"]
    straight = gpt(tmp_path, "straight", *settings)
    stop_at(5, monkeypatch)
    assert start(tmp_path, "stopped", *GPT, "steps=12", *settings, recipe="gpt/demo") == 143
    assert resume(tmp_path, "stopped") == 0
    np.testing.assert_allclose([r["loss"] for r in rows(tmp_path, "stopped")], straight, rtol=1e-4)
    lrs = [[r["lr"] for r in rows(tmp_path, n)] for n in ("straight", "stopped")]
    assert lrs[0] == lrs[1]


def test_poisoned_item_is_skipped_in_a_captured_step(tmp_path: Path) -> None:
    assert start(tmp_path, "one", "data.poison=7", "steps=24") == 0
    kinds = [e["kind"] for e in Run.open(tmp_path, "one").events()]
    assert kinds.count("nonfinite") == 2
    assert torch.isfinite(newest(tmp_path, "one").tensors["model"]["net.0.weight"]).all()
    assert "captured as one CUDA graph" in (tmp_path / "one" / "console.log").read_text()


def test_step_that_cannot_be_captured_continues_with_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = EagerRunner.__call__

    def asks_the_host(self: EagerRunner) -> torch.Tensor:
        vector = real(self)
        vector.sum().item()
        return vector

    monkeypatch.setattr(EagerRunner, "__call__", asks_the_host)
    assert start(tmp_path, "one", "model.dropout=0.2") == 0
    assert "could not be captured" in (tmp_path / "one" / "console.log").read_text()
    assert len(rows(tmp_path, "one")) == 12


@pytest.mark.parametrize("limit", [None, 0])
def test_batches_arrive_as_they_were_sent(limit: int | None) -> None:
    """Both tiers, under load: every byte of every batch, while the device is kept busy so that buffers are reused early."""
    rng = np.random.default_rng(0)
    arrays = {
        "frames": rng.integers(0, 256, (5000, 16, 16, 3), dtype=np.uint8),
        "tokens": rng.integers(0, 60000, 5000, dtype=np.uint16),
    }
    source = WindowSource(arrays, {"frames": 4, "tokens": 9})
    device = torch.device("cuda", 0)
    feed = Feed(source, batch=64, parts=2, seed=3, device=device, limit_bytes=limit)
    host = Feed(source, batch=64, parts=2, seed=3, device=torch.device("cpu"))
    assert feed.tier == ("device" if limit is None else "memory-map")
    busy = torch.randn(2048, 2048, device=device)
    sums, wanted = [], []
    for step in range(60):
        feed.load(step * 64)
        host.load(step * 64)
        for _ in range(4):
            busy = busy @ busy * 1e-3
        for k in range(2):
            part, true = feed.part(k), host.part(k)
            assert part["frames"].device.type == "cuda"
            weights = torch.arange(part["frames"][0].numel(), device=device).view(part["frames"][0].shape) % 251
            sums.append((part["frames"].long() * weights).sum((1, 2, 3, 4)) + part["tokens"].long().sum(1) + part["index"])
            local_weights = weights.cpu()
            wanted.append(
                (true["frames"].long() * local_weights).sum((1, 2, 3, 4)) + true["tokens"].long().sum(1) + true["index"]
            )
    assert torch.equal(torch.cat(sums).cpu(), torch.cat(wanted))
    feed.close()


@pytest.mark.parametrize(("vocab", "padded"), [(65, 128), (50257, 50304), (70000, 70016)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fused_loss_equals_plain(vocab: int, padded: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(300, 64, device="cuda", dtype=dtype).requires_grad_()
    weight = (torch.randn(padded, 64, device="cuda") * 0.3).requires_grad_()
    targets = torch.randint(0, vocab, (300,), device="cuda")
    fused = linear_cross_entropy(x, weight, targets, vocab)
    fused.mul(3.0).backward()
    got = (x.grad.double(), weight.grad.double())
    x64, w64 = x.detach().double().requires_grad_(), weight.detach().to(dtype).double().requires_grad_()
    plain = torch.nn.functional.cross_entropy((x64 @ w64.T)[:, :vocab], targets)
    plain.mul(3.0).backward()
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    assert abs(fused.double() - plain) <= limit * plain
    for a, b in zip(got, (x64.grad, w64.grad), strict=True):
        assert (a - b).norm() <= limit * b.norm()


def test_no_host_sync_in_a_step(tmp_path: Path) -> None:
    """Uncaptured on purpose: torch itself raises where the host would wait for the device."""
    from _jobs import open_job

    with open_job("gpt/demo", *GPT, "capture=off") as job:
        for step in range(3):
            job.stepper.feed.load(job.counter)
            job.engine.begin(step, 0.5)
            job.stepper.runner()
        torch.cuda.synchronize()
        job.stepper.feed.load(job.counter)
        job.engine.begin(4, 0.5)
        with no_host_sync():
            job.stepper.runner()
