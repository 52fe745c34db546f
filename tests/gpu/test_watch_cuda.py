"""Guards, watchers and replay beside a captured step: they never wait for the device, and what they keep can be replayed."""

from pathlib import Path

import pytest
import torch
from helpers import TOY, kinds, no_host_sync, start
from torch import Tensor

from seedbed.checks.replay import investigate
from seedbed.recipes import Recipe
from seedbed.train import loop
from seedbed.train.stepper import StepResult
from seedbed.train.system import System
from seedbed.train.watch import LAYERS_EVERY, Point

pytestmark = pytest.mark.usefixtures("no_report")


def test_watchers_do_not_wait_for_the_device(tmp_path: Path, monkeypatch) -> None:
    real, looks = loop.log_step, []

    def watched(job: loop.Job, result: StepResult) -> None:
        real(job, result)
        step = result.step
        if step > 100:
            later = Point(step + LAYERS_EVERY * (1 + len(looks)), 10_000, 1.0, 0.0, 1.0, result.lr_factor, step / 200)
            with no_host_sync():
                looks.append(job.watch.layers.look(later.step))
                job.watch.loader.look(later)

    monkeypatch.setattr(loop, "log_step", watched)
    assert start(tmp_path, "one", "device=cuda", "steps=110", "data.num=960", "every.eval=0", "every.save=0") == 0
    assert looks and not any(looks)


def test_captured_step_on_bad_weights_is_replayed(tmp_path: Path, monkeypatch) -> None:
    real = loop.take_step

    def take(job: loop.Job) -> None:
        if job.step == 6:
            with torch.no_grad():
                job.system.net[0].weight[0, 0] = float("nan")
        real(job)

    monkeypatch.setattr(loop, "take_step", take)
    assert start(tmp_path, "one", "device=cuda", "guard.policy=stop") == 1
    found = investigate(tmp_path, "one", None)
    assert found.reproduced and found.kind == "weight" and found.step == 7 and "net.0.weight" in found.finding.what
    assert [r.name for r in found.precisions] == ["fp32 on cuda, as run", "fp32 on cpu", "fp64 on cpu"]


def test_finite_step_is_replayed_within_rounding(tmp_path: Path) -> None:
    start(tmp_path, "one", "device=cuda", "model.dropout=0.2", "accum=2")
    assert investigate(tmp_path, "one", 7).reproduced


@pytest.mark.parametrize(("size", "steps"), [(25_000, 800), (2_500, 2000)])
def test_device_leak_is_seen(size: int, steps: int, tmp_path: Path, monkeypatch) -> None:
    real = Recipe.build

    def build(self: Recipe, config, data) -> System:
        system = real(self, config, data)
        kept: list[Tensor] = []
        system.variant = lambda step, num_steps: kept.append(torch.ones(size, device="cuda"))
        return system

    monkeypatch.setattr(Recipe, "build", build)
    start(
        tmp_path,
        "one",
        "device=cuda",
        f"steps={steps}",
        "data.num=960",
        "batch=64",
        "every.log=5",
        "every.eval=0",
        "every.save=0",
    )
    assert "device_leak" in kinds(tmp_path, "one")


def test_clean_captured_run_raises_nothing(tmp_path: Path) -> None:
    start(tmp_path, "one", "device=cuda", "steps=800", "data.num=960", "batch=64", "every.eval=200", "every.save=200", recipe=TOY)
    assert set(kinds(tmp_path, "one")) == {"preflight", "start", "model", "eval", "checkpoint", "sample", "end"}
