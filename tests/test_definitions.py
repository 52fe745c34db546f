"""What the demos compute against plain second implementations: the checks of definitions hold, and can fail."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from faults.patching import check, edited

from seedbed.checks import runner
from seedbed.checks.definition_checks import FAMILY, compare
from seedbed.checks.subject import Subject
from seedbed.recipes import find
from seedbed.train import capabilities

IDS = [id for _, id, *_ in FAMILY]
CASES = [
    ("gpt/demo",),
    ("flow/demo",),
    ("thinker/demo",),
    ("ebt/demo",),
    ("world/demo", "data.frames=600"),
    ("flow/demo", "data.flip=true", "model.t_distribution=uniform"),
    ("flow/demo", "model.stratified=false", "model.predict=v"),
    ("gpt/demo", "model.drop_path=0.3", "model.dropout=0.2"),
    ("gpt/demo", "model.kv_heads=2", "model.values_x0=true", "model.gate=true", "model.mlp=gelu", "model.norm=layer"),
    ("gpt/demo", "model.qk_norm=false", "model.mlp=relu2", "model.skips=true", "model.softcap=15", "model.positions=learned"),
    ("gpt/demo", "optim.kind=adamw", "optim.beta2=0.95", "optim.weight_decay=0.2"),
    ("thinker/demo", "data.curriculum.kind=mixed", "model.loss.base=2"),
    ("thinker/demo", "data.task=add", "data.base=10", "data.max_value=100", "data.held=0.2"),
    ("ebt/demo", "model.step_embed=prefix"),
    ("ebt/demo", "model.mcmc.space=logit", "model.mcmc.replay_buffer=32"),
    ("world/demo", "data.frames=600", "model.kind=edm", "model.pyramid=true"),
]
DEFINED = {"gpt": "D9 M10 O8 T8 V9 I9", "thinker": "D9 M10 L7 O8 T8 V9"}


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_definitions_hold(case: tuple[str, ...], seed: int):
    findings = check(*case, f"seed={seed}", only=IDS).findings
    assert [f.lines(case[0]) for f in findings if f.status == "fail"] == []
    tested = {f.id for f in findings if f.status == "pass"}
    assert tested >= {*DEFINED.get(case[0].partition("/")[0], "D9 M10 L7 O8 T8 V9 I9").split()}


LOOP = {
    "reporting": ("else value < job.best)", "else value > job.best)"),
    "rollback": ("[0] < 50", "[0] < 500"),
    "guard": ("if above > 0.0 and loss > self.limit():", "if above < 0.0 and loss > self.limit():"),
}


@pytest.mark.parametrize("name", LOOP)
def test_loop_that_judges_otherwise_is_named(name: str):
    with edited(f"seedbed/train/{name}.py", *LOOP[name]):
        (finding,) = check("gpt/demo", only=["T8"]).findings
    assert finding.status == "fail" and f"train/{name}.py" in finding.where and finding.why and finding.fix


LAWFUL = [
    ("gpt/demo", "optim.lr=1e-7", "optim.muon_lr=1e-7"),  # rounding of the weights is as large as a step
    ("gpt/demo", "model.drop_path=0.9"),  # few branches are kept: their mean is far from that of evaluation
    ("gpt/demo", "model.width=60", "model.heads=4", "model.positions=none"),  # heads of an odd width have no pairs to turn
    ("thinker/demo", "model.loss.base=10", "model.n_step=400"),
]


@pytest.mark.parametrize("case", LAWFUL, ids=" ".join)
def test_unusual_settings_violate_no_definition(case: tuple[str, ...]):
    assert [f.lines(case[0]) for f in check(*case, only=IDS).findings if f.status == "fail"] == []


def test_compare_is_relative_and_sees_shapes_and_missing_numbers():
    assert compare([1.0, 2.0], [1.0, 2.0])[0] == 0.0
    assert compare([1.0, 3.3], [1.0, 3.0])[0] == pytest.approx(0.15)
    assert compare([float("inf"), 1.0], [float("inf"), 1.0])[0] == 0.0
    assert compare([1.0], [1.0, 1.0]) == (float("inf"), "(1,) values, by definition (2,)")
    assert not compare([float("nan"), 1.0], [1.0, 1.0])[0] <= 1.0
    assert compare([1.0, 2.0, 5.0], torch.tensor([1.0, 2.0, 4.0]))[1] == "5, by definition 4"


def mean_of_three(x: float) -> float:
    return x / 3.0


def declaring(definitions: Callable[[], object]) -> dict[str, str]:
    """What the checks say of a recipe that declares these definitions of its objective."""
    recipe, preset = find("gpt/demo")
    real = capabilities.probe

    def probe(system, batch):
        found = real(system, batch)
        return found and replace(found, definitions={"objective": definitions})

    with patch.object(capabilities, "probe", probe):
        report = runner.run(Subject(recipe, preset, recipe.preset(preset), Path("nowhere")), runner.select(["L7"]))
    (finding,) = report.findings
    return {"status": finding.status, "what": finding.what, "where": finding.where, "why": finding.why}


def test_a_recipe_declares_definitions_of_its_own():
    held = declaring(lambda: [("mean", mean_of_three, mean_of_three(6.0), 2.0)])
    assert held["status"] == "pass" and "1 definitions hold" in held["what"]
    wrong = declaring(lambda: [("mean", mean_of_three, mean_of_three(6.0), 3.0), ("never reached", None, 0, 0)])
    assert wrong["status"] == "fail" and wrong["what"] == "mean: 2, by definition 3"
    assert "test_definitions.py" in wrong["where"] and "mean_of_three" in wrong["where"] and wrong["why"]
    close = declaring(lambda: [("mean", mean_of_three, 2.0, 2.1, 0.1)])
    assert close["status"] == "pass", "the limit of a definition counts"
    assert declaring(lambda: [])["status"] == "skip"


def test_an_error_of_the_code_is_a_finding():
    def broken():
        yield "mean", mean_of_three, mean_of_three("six"), 2.0  # type: ignore[arg-type]

    found = declaring(broken)
    assert found["status"] == "fail" and "TypeError" in found["what"] and "mean_of_three" in found["where"]
