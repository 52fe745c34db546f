"""Checks of optimizer, learning, loop, evaluation, devices and inference: every fault is named, what is clean stays clean."""

import random
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from _sources import WindowSource
from torch import Tensor

from seedbed import config as configs
from seedbed.checks import runner, short_runs
from seedbed.checks.optimizer_checks import declared_rate
from seedbed.checks.registry import failed, passed
from seedbed.checks.small_jobs import new_job, sample_options, small_source
from seedbed.checks.subject import Subject
from seedbed.config import Schedule
from seedbed.data.feed import Source
from seedbed.recipes import find
from seedbed.report.findings import Finding
from seedbed.train.optim import OPTIMIZERS, AdamW, multiplier

sys.path.append(str(Path(__file__).parents[1] / "faults"))
from catalogue_training import FAULTS
from patching import EXAMPLE, GPT, ROOT, SRC, TOY, Fault, check, edited

GROUPS = "OHETVGI"


def make_case(recipe: str, *settings: str) -> Subject:
    found, preset = find(str(ROOT / recipe) if recipe.endswith(".py") else recipe)
    return Subject(found, preset, configs.override(found.preset(preset), settings), Path("nowhere"))


def alarms(subject: Subject, *ids: str) -> list[Finding]:
    return [f for f in runner.run(subject, runner.select(ids)).findings if f.alarm]


def quick(fault: Fault) -> bool:
    """Cheap enough for every test run: the toy, and the first checks of gpt."""
    return fault.recipe == TOY or (fault.recipe == GPT and fault.expected <= {"O1", "O3", "G3", "I7"})


# Faults that show in another file than they stand in: at most one in ten.
ELSEWHERE = {
    "inputs ignored", "logits rounded in bf16", "weights renormed in forward", "key in the slot before", "prompt cut short",
    "answer in the stream", "temperature ignored", "seed of a sample ignored",
}  # fmt: skip
FAULT_PARAMS = [pytest.param(f, marks=[] if quick(f) else pytest.mark.slow, id=f"{f.recipe}: {f.id}") for f in FAULTS]


@pytest.mark.parametrize("fault", FAULT_PARAMS)
def test_injected_fault_is_named_by_a_check(fault: Fault):
    with fault.apply():
        subject = make_case(fault.recipe, *fault.settings)
        ours = [id for id in fault.expected if id[0] in GROUPS]
        found = alarms(subject, *ours)
    assert found, "none of the expected checks failed"
    for finding in found:
        assert all((finding.what, finding.why, finding.fix)), finding
        file, line = re.match(r"(\S+\.py):(\d+) ", finding.where).groups()
        path = next(p for p in (SRC / file, ROOT / file) if p.is_file())
        assert 1 <= int(line) <= len(path.read_text().splitlines()), finding.where
    if fault.file and fault.id not in ELSEWHERE:
        assert any(f.where.startswith(fault.file) for f in found), [f.where for f in found]


def test_ids_of_the_catalogue_exist_and_names_are_unique():
    known = {check.id for check in runner.select()}
    for fault in FAULTS:
        assert fault.expected <= known, f"{fault.id} expects {fault.expected - known}"
    names = [f.id for f in FAULTS]
    assert len(names) == len(set(names))
    assert set(names) >= ELSEWHERE and len(ELSEWHERE) <= 0.1 * sum(bool(f.file) for f in FAULTS)


CLEAN = [(TOY, 1)]
SLOW_CLEAN = [(recipe, seed) for recipe in (TOY, EXAMPLE, GPT) for seed in (1, 2, 3) if (recipe, seed) not in CLEAN]


@pytest.mark.parametrize(("recipe", "seed"), [*CLEAN, *(pytest.param(*c, marks=pytest.mark.slow) for c in SLOW_CLEAN)])
def test_clean_recipe_raises_no_alarm(recipe: str, seed: int):
    assert alarms(make_case(recipe, f"seed={seed}"), *GROUPS) == []


VARIANTS = [
    (GPT, "model.dropout=0.2"),
    (GPT, "model.tied=false"),
    (GPT, "optim.lr=1e-3", "optim.muon_lr=3e-3"),
    (GPT, "accum=4"),
    (GPT, "batch=1"),
    (GPT, "ema=0.9", "optim.kind=adamw"),
    (EXAMPLE, "optim.lr=1.6e-3"),
    (EXAMPLE, "accum=4", "ema=0.99"),
    (EXAMPLE, "batch=1"),
    (TOY, "model.dropout=0.2"),
    (TOY, "optim.lr=3e-3"),
    (TOY, "accum=4"),
    (TOY, "batch=1"),
]


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS, ids=" ".join)
def test_valid_variants_raise_no_alarm(variant: tuple[str, ...]):
    assert alarms(make_case(*variant), *GROUPS) == []


def test_checks_leave_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Dice, flags, threads, modes and folders are as they were; the same checks give the same numbers again."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist(), torch.get_num_threads()
    ids = ("O", "T2", "T3", "T6", "V1", "G2", "G3", "I6", "E1")
    first = runner.run(make_case(TOY), runner.select(ids))
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist(), torch.get_num_threads()
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
    assert list(tmp_path.iterdir()) == []
    again = runner.run(make_case(TOY), runner.select(ids))
    assert [(f.id, f.status, f.value) for f in first.findings] == [(f.id, f.status, f.value) for f in again.findings]


@pytest.mark.parametrize("kind", ["constant", "cosine", "one_cycle", "wsd", "linear"])
@pytest.mark.parametrize("warmup", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("decay", [0.0, 0.3, 1.0])
def test_declared_schedule_equals_the_real_one(kind: str, warmup: float, decay: float):
    schedule = Schedule(kind=kind, warmup=warmup, decay=decay, floor=0.2)  # type: ignore[arg-type]
    for i in range(1, 101):
        assert declared_rate(schedule, i / 100, 100) == pytest.approx(multiplier(schedule, i / 100, i), abs=1e-12)


@pytest.mark.parametrize(("seeds", "status"), [({0}, "skip"), ({0, 2}, "skip"), ({0, 1, 2}, "fail"), ({1, 2}, "pass")])
def test_alarm_of_a_short_run_is_raised_on_every_seed(seeds: set[int], status: str):
    def find(more_seed: int) -> Finding:
        return failed("worse", where="a", why="b", fix="c") if more_seed in seeds else passed("better")

    assert short_runs.on_every_seed(find).status == status


def test_short_runs_of_another_seed_start_elsewhere():
    one, two = (short_runs.train(make_case(TOY), more_seed=more) for more in (0, 1))
    assert one.first != two.first


def test_short_runs_repeat_bitwise():
    one, two = (short_runs.train(make_case(TOY)).losses for _ in range(2))
    assert one == two and len(one) == short_runs.NUM_STEPS


def test_non_finite_short_run_is_reported():
    assert not short_runs.train(make_case(EXAMPLE), rate=1e30).finite


class Rows(Source):
    def __init__(self, rows: np.ndarray, factor: int, _hidden: int = 3) -> None:
        self.rows, self._factor = rows, factor
        self.num_items, self.arrays, self.spans = len(rows), {"rows": rows}, {"rows": 0}


class Odd(Source):
    def __init__(self, path: str) -> None:
        rows = np.zeros((1000, 2))
        self.num_items, self.arrays, self.spans = len(rows), {"rows": rows}, {"rows": 0}


def test_small_source_uses_the_constructor():
    rows = np.arange(2000.0).reshape(1000, 2)
    cut = small_source(Rows(rows, 7), first=10, num_rows=50)
    assert isinstance(cut, Rows) and cut.num_items == 50 and cut._factor == 7
    assert np.array_equal(cut.rows, rows[10:60])


def test_small_source_falls_back_to_the_full_source():
    odd = Odd("somewhere")
    assert small_source(odd) is odd
    small = Rows(np.zeros((10, 2)), 1)
    assert small_source(small) is small
    windows = WindowSource({"a": np.zeros((900, 2))}, {"a": 4}, np.array([0, 450]))
    assert small_source(windows).num_items > 0


def test_options_of_a_sample_are_found_without_sampling():
    assert sample_options(new_job(make_case(EXAMPLE)).engine) == {"seed": 1}
    assert sample_options(new_job(make_case(TOY)).engine) == {}


def test_random_data_skips_learning_checks():
    subject = make_case(TOY)
    subject.data.facts["name"] = "random:20:7"
    assert [f.status for f in runner.run(subject, runner.select(["H1", "H2", "E3"])).findings] == ["skip"] * 3


def test_short_run_width_is_restored_where_valid():
    subject = make_case(EXAMPLE)
    width = short_runs.config_of(subject).model.width
    assert subject.small.model.width < width <= short_runs.WIDTH


class Lion(AdamW):
    """The sign of a blend of gradient and momentum: its moments are not AdamW's."""

    def step(self, lr_factor: Tensor, divisor: Tensor, skip: Tensor) -> None:
        lr, keep = lr_factor * self.group.lr, skip == 0
        for param, grad, mean in zip(self.params, self.gradients(), self.means, strict=True):
            grad = grad / divisor
            change = torch.lerp(mean, grad, 1.0 - self.optim.beta1).sign() * lr + param * lr * self.group.weight_decay
            param.sub_(torch.where(keep, change, 0.0))
            mean.copy_(torch.where(keep, torch.lerp(mean, grad, 1.0 - self.optim.beta2), mean))


@pytest.mark.parametrize("recipe", [TOY, GPT])
def test_optimizer_of_ones_own_raises_no_alarm(recipe: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(OPTIMIZERS, "lion", Lion)
    settings = ("optim.kind=lion", "optim.lr=3e-4")
    ids = ["O1", "O2", "O3", "O4", "O5", "O6", "T2"]
    assert not [f for f in check(recipe, *settings, only=ids).findings if f.alarm]
    with edited("seedbed/train/engine.py", "(true_norm / clip).clamp_min(1.0) if clip", "torch.ones_like(norm) if clip"):
        assert [f.id for f in check(recipe, *settings, only=["O4"]).findings if f.alarm] == ["O4"]


@pytest.mark.parametrize("kind", ["ends", "ends_shifted"])
def test_typed_prompts_reach_thinkers_whose_positions_count_from_both_ends(kind: str):
    settings = ("data.curriculum.kind=uniform", f"model.positions.kind={kind}", "model.positions.max=64")
    (finding,) = runner.run(make_case("thinker/demo", *settings), runner.select(["I2"])).findings
    assert finding.status == "pass", finding.what
