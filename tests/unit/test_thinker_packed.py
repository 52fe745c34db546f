"""Thinkers in a pack are the same thinkers alone, however much larger the shapes are that they are computed in."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import float_limit

from seedbed import config as configs
from seedbed.launch import local
from seedbed.recipes import find
from seedbed.recipes.thinker import evaluate
from seedbed.track import files
from seedbed.track.console import Console
from seedbed.track.run import Run
from seedbed.train.engine import Engine
from seedbed.train.job import Job
from seedbed.train.loop import fit
from seedbed.tune.packing.pack import Pack, fit_pack, why_not_packed

CPU = torch.device("cpu")
SMALL = [
    "model.width=8",
    "model.heads=2",
    "data.length=4",
    "data.vocab=5",
    "data.test=0",
    "data.curriculum.kind=gated",
    "data.curriculum.window=4",
    "data.curriculum.min_steps=2",
    "batch=6",
    "steps=20",
    "ema=0.9",
    "every.log=1",
    "every.eval=0",
    "every.save=0",
    "optim.clip=0.3",
]
# Different in every key that may differ: sizes, draws, programs, noise, loss and curriculum.
GRID = [
    ["seed=1", "model.n_latent=3", "model.n_step=1:2", "data.curriculum.threshold=0"],
    ["seed=2", "model.n_latent=2:5", "model.n_step=4", "model.program=rw,lw*2,lo", "model.n_memory=2", "optim.lr=1e-2"],
    ["seed=3", "model.n_latent=4:6:2", "model.n_step=2:4", "model.loss.steps=random", "model.noise=0.3", "model.program=rlwo*"],
    ["seed=4", "model.n_step=3", "model.loss.steps=progressive", "model.perturb=0.4", "data.curriculum.start=2"],
    ["seed=5", "model.n_step=1:4", "model.loss.base=1.4", "model.loss.backprop_steps=2", "data.curriculum.window=3"],
    ["seed=6", "model.n_step=2:5", "model.program=random", "model.n_memory=3", "model.loss.steps=last"],
]


@pytest.fixture(autouse=True)
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local.journal, "finish", lambda run, warn: None)
    monkeypatch.setattr(files, "fsync", lambda fd: None)
    monkeypatch.setitem(evaluate.NUM_QUICK, "cpu", 16)


def make_config(*settings: str) -> Any:
    return configs.override(find("thinker/demo")[0].preset("demo"), [*SMALL, *settings])


def make_job(root: Path, name: str, *settings: str) -> Job:
    recipe, config = find("thinker")[0], make_config(*settings)
    run = Run.create(root, "thinker", "demo", config, name=name, code={}, base=config)
    data = recipe.open_data(config)
    system = recipe.build(config, data).to(torch.float64)
    return Job(run=run, config=config, system=system, data=data, engine=Engine(system, config, CPU), console=silent())


def silent() -> Console:
    return Console(stream=io.StringIO())


def make_pack(jobs: list[Job]) -> Pack:
    padded_config, recipe = jobs[0].system.padded_config([job.config for job in jobs]), find("thinker")[0]
    return Pack(jobs, recipe.build(padded_config, recipe.open_data(padded_config)).to(torch.float64))


def numbers(job: Job) -> dict[str, torch.Tensor]:
    return {f"{file}.{n}": t.detach().clone() for file, group in job.engine.tensors().items() for n, t in group.items()}


@pytest.mark.slow
@pytest.mark.usefixtures("exact_noise")
def test_pack_of_different_thinkers_equals_single_runs(tmp_path: Path):
    assert not why_not_packed(make_job(tmp_path, "any").system, [make_config(*settings) for settings in GRID])
    packed = [make_job(tmp_path, f"p{k}", *settings) for k, settings in enumerate(GRID)]
    fit_pack(make_pack(packed))
    # All is float64 but the weights of the steps' losses: 20 updates of 1e-2 by gradients that differ by the eps of these.
    limit = 20 * 1e-2 * torch.finfo(torch.float32).eps
    for k, settings in enumerate(GRID):
        alone = make_job(tmp_path, f"a{k}", *settings)
        fit(alone)
        one, other = numbers(packed[k]), numbers(alone)
        assert one.keys() == other.keys()
        for name, tensor in other.items():
            assert torch.allclose(one[name].double(), tensor.double(), rtol=0, atol=limit), f"{settings}: {name}"
        ours, theirs = packed[k].run.rows(), alone.run.rows()
        assert [row["loss"] for row in ours] == pytest.approx([row["loss"] for row in theirs], rel=float_limit(1))
        assert [row["longest"] for row in ours] == [row["longest"] for row in theirs]
    assert packed[0].system.get_buffer("stage")[0] > 1, "the curriculum of the first run should have moved"
