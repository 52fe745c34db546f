"""Axes of an ablation: names, values, what is refused, the set for those who name none, and widths of equal size."""

import re

import pytest
from tune_toys import config as toy_config

from seedbed import config as configs
from seedbed.errors import UserError
from seedbed.recipes import find
from seedbed.tune.ablate import axes
from seedbed.tune.ablate.axes import Row


def preset(name: str, *settings: str):
    recipe, chosen = find(name)
    return configs.override(recipe.preset(chosen), list(settings))


GPT = preset("gpt/demo")


def read(*words: str, base=GPT) -> list[Row]:
    return axes.read(base, words, resize=lambda depth: {"model.width": 64})


def test_axis_names_become_keys_and_the_baseline_is_no_extra_row() -> None:
    rows = read("dtype=fp32,bf16", "heads=2,4,8", "batch=8,32", "optim.lr=0.1", "remat=none,full", "compile_optimizer=true")
    assert [row.settings for row in rows] == [
        {"precision": "bf16"},
        {"model.heads": 2},
        {"model.heads": 8},
        {"batch": 8},
        {"batch": 32},
        {"optim.lr": 0.1},
        {"remat": "full"},
        {"compile_optimizer": True},
    ]
    assert [row.label for row in rows][:2] == ["precision=bf16", "model.heads=2"]
    assert [row.is_free for row in rows] == [True, False, False, False, False, False, True, True]
    assert axes.config_of(GPT, rows[1]).model.heads == 2


def test_size_axis_sets_depth_and_matching_width() -> None:
    (row,) = read("size=2,4")
    assert row.settings == {"model.depth": 2, "model.width": 64}
    assert not row.is_free


def test_axes_of_several_devices_are_skipped_rows() -> None:
    rows = read("replicate=2,4", "shard=2")
    assert [row.label for row in rows] == ["replicate=2", "replicate=4", "shard=2"]
    assert all(row.skip_reason.startswith("one device") for row in rows)


WRONG = [
    (("rmat=full",), r"unknown axis `rmat`; nearest: remat"),
    (("head=2",), r"unknown axis `head`; nearest: heads"),
    (("model.dept=2",), r"unknown axis `model.dept`; nearest: model.depth"),
    (("xyzzy=1",), r"unknown axis `xyzzy`; nearest: dtype, heads, patch, size"),
    (("patch=2",), r"axis patch: this recipe has no model.patch"),
    (("batch=16",), r"batch=16 is the baseline itself \(batch=16\): there is nothing to compare"),
    (("dtype=fp32",), r"dtype=fp32 is the baseline itself \(precision=fp32\)"),
    (("size=4",), r"size=4 is the baseline itself \(model.depth=4\)"),
    (("heads=3",), r"the row model.heads=3 cannot be run: model.width=128 does not divide"),
    (("steps=0",), r"the row steps=0 cannot be run: steps=0 is out of range"),
    (("dtype=fp8",), r"precision=fp8 is not one of"),
    (("float8=true",), r"the row float8=true cannot be run: float8=true needs precision=bf16"),
    (("batch=x",), r"batch=x is not a whole number"),
    (("batch=8,8",), r"names 8 twice"),
    (("batch=8", "batch=32"), r"batch is given twice"),
    (("batch=",), r"batch= names no values"),
    (("batch",), r"`batch` is not axis=value"),
    (("model=2",), r"unknown axis `model`|`model` is a group"),
]


@pytest.mark.parametrize(("words", "says"), WRONG, ids=lambda v: " ".join(v) if isinstance(v, tuple) else "")
def test_wrong_axis_is_explained_in_a_line_or_two(words: tuple[str, ...], says: str) -> None:
    with pytest.raises(UserError) as reported:
        read(*words)
    assert re.search(says, str(reported.value)), str(reported.value)
    assert len(str(reported.value).splitlines()) <= 2


def test_recipe_without_depth_has_no_size() -> None:
    with pytest.raises(UserError, match=r"axis size: this recipe has no model.depth"):
        axes.read(toy_config(), ["size=2"], resize=lambda depth: {})


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ["gpt/demo", "flow/demo", "thinker/demo", "flow/cifar10"])
def test_default_axes_are_at_least_eight(name: str, device: str) -> None:
    base = preset(name)
    rows = axes.default(base, device, resize=lambda depth: {"model.width": 96})
    assert len({row.axis for row in rows if not row.skip_reason}) >= 8
    assert {"replicate", "shard", "float8", "dtype", "remat", "batch", "heads", "size", "compile"} <= {r.axis for r in rows}
    assert ("patch" in {row.axis for row in rows}) == hasattr(base.model, "patch")
    labels = [row.label for row in rows]
    assert len(labels) == len(set(labels))
    for row in rows:
        if not row.skip_reason:
            assert axes.config_of(base, row) != base


def test_equal_width_keeps_the_number_of_parameters() -> None:
    """For layers of 12 width^2 the product of depth and width^2 stays."""

    def num_params(config) -> int:
        return 12 * config.model.depth * config.model.width**2

    for depth in (1, 2, 8, 16):
        (width,) = axes.equal_width(GPT, depth, num_params).values()
        config = configs.override(GPT, [f"model.depth={depth}", f"model.width={width}"])
        assert num_params(config) == pytest.approx(num_params(GPT), rel=0.15)
        assert width % GPT.model.heads == 0


def test_equal_width_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(UserError, match=r"size=64: no model.width gives model.depth=64"):
        axes.equal_width(GPT, 64, lambda config: config.model.depth**3)
