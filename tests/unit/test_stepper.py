"""The stepper, `build` and the loop's actions: one way to make and take a step, for a run and for every instrument."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import TOY, kinds, newest, rows, start

from seedbed import config as configs
from seedbed.errors import UserError
from seedbed.recipes import Recipe, find
from seedbed.train import loop, oom
from seedbed.train.engine import RESERVED
from seedbed.train.job import Action
from seedbed.train.progress import load_progress
from seedbed.train.stepper import Stepper, build
from seedbed.train.system import System
from seedbed.tune.workload import Rig, Workload

CPU = torch.device("cpu")
QUIET = ("every.eval=0", "every.save=0", "steps=6")


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch):
    """Change what the recipe builds from now on."""

    def change(edit: Any) -> None:
        real = Recipe.build

        def made(self: Recipe, config: Any, data: Any) -> System:
            system = real(self, config, data)
            edit(system)
            return system

        monkeypatch.setattr(Recipe, "build", made)

    return change


def opened(*settings: str) -> tuple[Recipe, Any, Any]:
    recipe, preset = find(TOY)
    config = configs.override(recipe.preset(preset), list(settings))
    return recipe, config, recipe.open_data(config)


# ---- build -----------------------------------------------------------------------------------------------------------


def test_build_seeds_all_generators_for_instruments_as_for_a_run(tmp_path: Path, built) -> None:
    def scatter(system: System) -> None:
        """Initial weights from numpy and Python: allowed, if not wise."""
        with torch.no_grad():
            next(system.parameters()).fill_(np.random.random() + random.random())

    built(scatter)
    assert start(tmp_path, "one", *QUIET, "optim.lr=0") == 0
    weights = newest(tmp_path, "one").tensors["model"]
    recipe, config, data = opened(*QUIET, "optim.lr=0")
    np.random.seed(5)
    random.seed(6)
    engine = Workload("toy", recipe, config, data, CPU).build()
    for name, param in engine.system.named_parameters():
        assert torch.equal(param, weights[name]), name


def test_instruments_take_the_steps_of_a_run(tmp_path: Path) -> None:
    """The same losses, bit for bit, with dropout: weights, order, schedule and noise are a run's own."""
    settings = (*QUIET, "model.dropout=0.3")
    assert start(tmp_path, "one", *settings) == 0
    wanted = [row["loss"] for row in rows(tmp_path, "one")]
    recipe, config, data = opened(*settings)
    rig = Rig(Workload("toy", recipe, config, data, CPU).build(), data.train, print)
    found = []
    for step in range(6):
        rig.take_step(step)
        result = rig.pop_result(lag=0)
        assert result is not None
        found.append(result.loss)
    rig.close()
    assert found == wanted


@pytest.mark.parametrize("name", ["thinker/demo", "ebt/demo", pytest.param("world/demo", marks=pytest.mark.slow)])
def test_build_leaves_the_number_of_cpu_threads_alone(name: str) -> None:
    recipe, preset = find(name)
    config = recipe.preset(preset)
    data = recipe.open_data(config)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        engine = build(recipe, config, data, CPU)
        assert torch.get_num_threads() == 2, "a setting of the process belongs to whoever started it"
        assert engine.system.num_cpu_threads == 1
        with engine.evaluating():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_fit_trains_with_the_threads_that_a_system_wants(tmp_path: Path, built, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = loop.take_step
    monkeypatch.setattr(loop, "take_step", lambda job: (seen.append(torch.get_num_threads()), real(job)))
    built(lambda system: setattr(system, "num_cpu_threads", 1))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert start(tmp_path, "one", *QUIET) == 0
        assert set(seen) == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


# ---- results -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_reserved_metric_names_are_refused(tmp_path: Path, built, name: str) -> None:
    def measure(system: System) -> None:
        real = system.loss

        def loss(batch: Any, engine: Any) -> Any:
            value, extra = real(batch, engine)
            return value, {**extra, name: value.detach()}

        system.loss = loss  # type: ignore[method-assign]

    built(measure)
    with pytest.raises(UserError, match=f"measures `{name}`, a name that the loop itself uses"):
        start(tmp_path, "one", *QUIET)


def test_step_results_hold_loss_metrics_and_factor() -> None:
    recipe, config, data = opened(*QUIET)
    engine = build(recipe, config, data, CPU)
    stepper = Stepper(engine, data.train)
    assert stepper.pop_result() is None
    for step in range(3):
        stepper.step(step, step * config.batch, (step + 1) / 6, 6)
    first = stepper.pop_result(lag=2)
    assert first is not None and first.step == 1 and not first.halted and not first.stop
    assert 0 < first.lr_factor <= 1 and "grad_norm" in first.metrics and "loss" not in first.metrics
    assert next(iter(first.measured)) == "loss" and stepper.pop_result(lag=2) is None
    stepper.close()


# ---- actions ---------------------------------------------------------------------------------------------------------


def test_actions_of_a_recipe_run_every_n_steps_and_at_the_end(tmp_path: Path, built) -> None:
    steps: list[tuple[str, int]] = []
    built(
        lambda system: setattr(
            system,
            "actions",
            [Action(2, lambda job: steps.append(("often", job.step))), Action(0, lambda job: steps.append(("end", job.step)))],
        )
    )
    assert start(tmp_path, "one", *QUIET) == 0
    assert steps == [("often", 2), ("often", 4), ("often", 6), ("end", 6)]


def test_actions_see_results_that_are_read_and_come_after_evaluating_and_saving(tmp_path: Path, built) -> None:
    seen = []

    def look(job: loop.Job) -> None:
        seen.append((job.step, job.best_step, (job.run.path / "checkpoints" / f"step-{job.step:06}").is_dir()))
        job.run.event(job.step, "note", what="mine")

    built(lambda system: setattr(system, "actions", [Action(3, look)]))
    assert start(tmp_path, "one", "every.eval=3", "every.save=3", "steps=6") == 0
    assert [(step, saved) for step, _, saved in seen] == [(3, True), (6, True)]
    assert kinds(tmp_path, "one").count("note") == 2


# ---- memory and progress -------------------------------------------------------------------------------------------------


def test_out_of_memory_in_cuda_words_shrinks_the_micro_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What find-batch takes for a lack of memory, the loop takes for one too."""
    real, left = loop.take_step, [RuntimeError("CUDA error: out of memory"), MemoryError()]

    def take(job: loop.Job) -> None:
        if left:  # before a weight is written
            raise left.pop()
        real(job)

    monkeypatch.setattr(loop, "take_step", take)
    assert start(tmp_path, "one", *QUIET) == 0
    assert not left and kinds(tmp_path, "one").count("out_of_memory") == 2
    assert oom.is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"))


def test_progress_loads_checkpoints_of_earlier_versions(tmp_path: Path) -> None:
    assert start(tmp_path, "one", *QUIET) == 0
    state = newest(tmp_path, "one").state
    progress = load_progress(state)
    assert {**progress.to_json(), "step": 6} == state
    old = {{"python_rng": "python_dice", "numpy_rng": "numpy_dice"}.get(k, k): v for k, v in state.items()}
    del old["compile_mode"]
    loaded = load_progress({**old, "incident": {"what": "nothing"}})
    assert loaded.python_rng == progress.python_rng and loaded.numpy_rng == progress.numpy_rng and loaded.compile_mode is None
