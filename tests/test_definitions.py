"""What the demos compute against plain second implementations (tests/definitions)."""

import pytest
from definitions.compare import compared
from definitions.shared import difference

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
    ("gpt/demo", "model.qk_norm=false", "model.mlp=relu2"),
    ("gpt/demo", "optim.kind=adamw", "optim.beta2=0.95", "optim.weight_decay=0.2"),
    ("thinker/demo", "data.curriculum.kind=mixed", "model.loss.base=2"),
    ("thinker/demo", "data.task=add", "data.base=10", "data.max_value=100", "data.held=0.2"),
    ("ebt/demo", "model.step_embed=prefix"),
    ("ebt/demo", "model.mcmc.space=logit", "model.mcmc.replay_buffer=32"),
]


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_parts_agree_with_their_second_implementation(case: tuple[str, ...], seed: int):
    found = compared(*case, f"seed={seed}")
    assert {what: how for what, how in found.items() if how} == {}
    assert len(found) >= 5


def test_difference_is_relative_and_sees_shapes_and_missing_numbers():
    assert difference([1.0, 2.0], [1.0, 2.0]) == 0.0
    assert difference([1.0, 3.3], [1.0, 3.0]) == pytest.approx(0.15)
    assert difference([float("inf"), 1.0], [float("inf"), 1.0]) == 0.0
    assert difference([1.0], [1.0, 1.0]) == float("inf")
    assert not difference([float("nan"), 1.0], [1.0, 1.0]) <= 1.0
