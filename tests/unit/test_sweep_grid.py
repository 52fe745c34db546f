"""What a sweep varies: lists, ranges, seeds; corners first; and a line for everything that cannot be meant."""

import itertools
import json
import random
from dataclasses import dataclass

import pytest

from seedbed.config import Config, flatten, number
from seedbed.errors import UserError
from seedbed.tune.sweep import grid as grids
from seedbed.tune.sweep.grid import Axis, Grid


@dataclass(frozen=True)
class Model:
    width: int = number(8, low=1)
    plan: str = "ro"
    latents: str = "8"
    sizes: tuple[int, ...] = (1, 2)
    pair: tuple[int, int] | None = None
    tied: bool = False


BASE = Config(model=Model(), data=None)

READ = [
    ("optim.lr=1e-3,3e-3", [0.001, 0.003]),
    ("model.width=1..4", [1, 2, 3, 4]),
    ("model.width=1..9..2", [1, 3, 5, 7, 9]),
    ("model.width=1..8..3", [1, 4, 7]),
    ("model.width=1..3,8,16", [1, 2, 3, 8, 16]),
    ("model.width=8..128x5", [8, 16, 32, 64, 128]),
    ("optim.lr=1e-4..1e-2x3", [1e-4, 1e-3, 1e-2]),
    ("optim.lr=1e-4..1e-2x5", [1e-4, 3.16e-4, 1e-3, 3.16e-3, 1e-2]),
    ("optim.weight_decay=0..2", [0.0, 1.0, 2.0]),
    ("model.latents=4..6", ["4", "5", "6"]),
    ("model.latents=4:8,4:16", ["4:8", "4:16"]),
    ("model.plan=rw,lw|ro", ["rw,lw", "ro"]),
    ("model.sizes=1,2|3", [(1, 2), (3,)]),
    ("model.pair=1,2|3,4|none", [(1, 2), (3, 4), None]),
    ("optim.kind=adamw,muon", ["adamw", "muon"]),
    ("model.tied=true,false", [True, False]),
    ("budget=30s,2m", [30.0, 120.0]),
]


@pytest.mark.parametrize(("word", "values"), READ, ids=[word for word, _ in READ])
def test_axis_is_parsed(word: str, values: list):
    (axis,) = grids.read(BASE, [word], None).axes
    assert axis == Axis(word.partition("=")[0], tuple(values))


FIXED = [("steps=5", 5), ("model.sizes=3,4", (3, 4)), ("model.pair=3,4", (3, 4)), ("model.plan=../a.txt", "../a.txt")]


@pytest.mark.parametrize(("word", "value"), FIXED, ids=[word for word, _ in FIXED])
def test_single_value_is_set_in_every_trial(word: str, value: object):
    found = grids.read(BASE, [word], None)
    assert (found.axes, found.fixed) == ((), {word.partition("=")[0]: value})


def test_commas_inside_a_value_are_explained():
    assignments = ["model.sizes=3,4", "optim.lr=1,2", "model.sizes=1|2,3", "model.plan=a,b"]
    assert grids.takes_commas(BASE, assignments) == ["model.sizes=3,4"]


def test_seeds_start_at_the_configs_seed():
    assert grids.read(BASE, [], 3).axes == (Axis("seed", (1, 2, 3)),)
    assert grids.read(BASE, ["seed=10"], 2).axes == (Axis("seed", (10, 11)),)
    assert grids.read(BASE, ["seed=10"], 1) == Grid((), (), {"seed": 10})
    assert grids.read(BASE, [], None) == Grid((), (), {})


WRONG = [
    (["optm.lr=1,2"], None, "unknown key `optm.lr`; nearest: optim.lr"),
    (["optim=1,2"], None, "`optim` is a group"),
    (["optim.lr"], None, "is not key=value"),
    (["optim.lr="], None, "optim.lr= names no values; write optim.lr=a,b,c"),
    (["optim.lr=1e-3,,1e-2"], None, "has an empty value"),
    (["model.plan=a,"], None, "has an empty value"),
    (["optim.lr=1e-3,fast"], None, "optim.lr=fast is not a number"),
    (["optim.kind=adamw,sgd"], None, "optim.kind=sgd is not one of adamw, muon"),
    (["model.width=1,2.5"], None, "model.width=2.5 is not a whole number"),
    (["model.width=1..x"], None, "model.width=1..x is not a range; write 1..4"),
    (["model.width=..4"], None, "is not a range"),
    (["model.width=4..1"], None, "is an empty range: 4 is not below 1"),
    (["model.width=4..4"], None, "is an empty range"),
    (["model.width=1..9..0"], None, "a step of 0 leads nowhere"),
    (["model.width=1..9..2x3"], None, "a step or a number of values, not both"),
    (["model.width=1..3x5"], None, "twice"),
    (["model.width=1..99999999"], None, "more than 10,000 values"),
    (["optim.lr=1e-4..1e-2"], None, "say how many values: optim.lr=1e-4..1e-2x5"),
    (["optim.lr=0..1e-2x5"], None, "a range above 0"),
    (["optim.lr=1e-4..1e-2x1"], None, "two or more"),
    (["optim.lr=1e-3,0.001"], None, "names 0.001 twice"),
    (["optim.lr=1,2", "optim.lr=3"], None, "optim.lr is given twice"),
    (["seed=1,2"], 2, "give one of them"),
    ([], 0, "--seeds 0 leaves nothing to train"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "seeds", "printed"), WRONG, ids=[" ".join(given) or f"seeds {seeds}" for given, seeds, _ in WRONG]
)
def test_wrong_axis_is_a_one_line_error(given: list[str], seeds: int | None, printed: str):
    with pytest.raises(UserError) as problem:
        grids.read(BASE, given, seeds)
    assert printed in str(problem.value) and "\n" not in str(problem.value)


def some_grids() -> list[Grid]:
    rng = random.Random(0)
    shapes = [[rng.randint(1, 5) for _ in range(rng.randint(1, 3))] for _ in range(20)]
    keys = ("model.width", "optim.lr", "steps")
    return [Grid(tuple(Axis(keys[i], tuple(range(1, n + 1))) for i, n in enumerate(shape)), (), {}) for shape in shapes]


@pytest.mark.parametrize("grid", some_grids(), ids=lambda g: "x".join(str(len(a.values)) for a in g.axes))
def test_cells_are_ordered_from_the_corners_inwards(grid: Grid):
    found = [tuple(cell.values()) for cell in grids.cells(grid)]
    assert sorted(found) == sorted(itertools.product(*(axis.values for axis in grid.axes)))
    inner = [sum(v not in (a.values[0], a.values[-1]) for v, a in zip(place, grid.axes, strict=True)) for place in found]
    assert inner == sorted(inner)
    assert inner.count(0) == 2 ** sum(len(axis.values) > 1 for axis in grid.axes)


def test_cells_are_ordered_by_seed_first():
    found = grids.cells(grids.read(BASE, ["model.width=1..3", "steps=1..3"], 2))
    assert [cell["seed"] for cell in found] == [1] * 9 + [2] * 9
    assert found[:9] == [{**cell, "seed": 1} for cell in grids.cells(grids.read(BASE, ["model.width=1..3", "steps=1..3"], None))]


def test_too_many_trials_are_refused():
    with pytest.raises(UserError, match="1,000,000 trials"):
        grids.cells(grids.read(BASE, ["model.width=1..1000", "steps=1..1000"], None))


def test_cell_config_has_its_values_and_the_fixed_ones():
    grid = grids.read(BASE, ["model.sizes=1,2|3", "optim.lr=1e-3,1e-2", "steps=7"], None)
    for cell in grids.cells(grid):
        values = flatten(grids.config_of(BASE, grid, cell))
        assert {key: values[key] for key in cell} == cell and values["steps"] == 7


def test_cell_that_cannot_be_trained_is_named():
    grid = grids.read(BASE, ["batch=8,16", "accum=2,3"], None)
    with pytest.raises(UserError, match=r"^the cell batch=8 accum=3 cannot be trained: batch=8 does not divide"):
        for cell in grids.cells(grid):
            grids.config_of(BASE, grid, cell)


def test_range_is_left_to_the_suggester():
    found = grids.read(
        BASE, ["optim.lr=1e-4..1e-2", "optim.clip=0.5..1", "model.width=2..8..2", "optim.kind=adamw,muon"], 2, True
    )
    assert [(s.key, s.low, s.high, s.step, s.log) for s in found.spans] == [
        ("optim.lr", 1e-4, 1e-2, None, True),
        ("optim.clip", 0.5, 1.0, None, False),
        ("model.width", 2.0, 8.0, 2, False),
    ]
    assert [axis.key for axis in found.axes] == ["optim.kind", "seed"]
    for wrong in ("optim.lr=1..0.1", "model.width=1.5..3", "optim.lr=0..1..2"):
        with pytest.raises(UserError):
            grids.read(BASE, [wrong], None, True)


def test_grid_round_trips_through_json():
    found = grids.read(BASE, ["optim.lr=1e-4..1e-2", "model.sizes=1,2|3", "model.pair=1,2", "model.plan=a,b"], 2, True)
    assert grids.from_json(json.loads(json.dumps(grids.to_json(found)))) == found
