"""plan --world: ranks that are only pretended, and what each of them would hold and send."""

from dataclasses import replace

import pytest
import torch

from seedbed.config import Dist, override
from seedbed.errors import UserError
from seedbed.recipes import find
from seedbed.tune import scale
from seedbed.tune.paper import count

GPT = [
    "model.depth=2",
    "model.width=32",
    "model.heads=2",
    "data.text=random:4096:64",
    "data.block=16",
    "batch=8",
    "optim.kind=adamw",
]


@pytest.fixture(scope="module")
def case():
    recipe, preset = find("gpt/demo")
    config = override(recipe.preset(preset), GPT)
    data = recipe.open_data(config)
    return recipe, config, data, count(recipe, config, data)


@pytest.mark.parametrize(
    ("changes", "world", "wanted"),
    [
        ({"batch": 64}, 8, (64, 1, 8)),
        ({"batch": 64, "accum": 16}, 8, (64, 2, 4)),
        ({"batch": 64}, 128, (128, 1, 1)),
        ({"batch": 60, "accum": 4}, 2, (60, 2, 15)),
        ({"batch": 64, "dist": Dist(shard=4)}, 8, (64, 1, 8)),
    ],
)
def test_a_batch_is_spread_without_larger_parts(case, changes, world: int, wanted: tuple[int, int, int]):
    config, notes = scale.spread(replace(case[1], **changes), world)
    assert (config.batch, config.accum, config.micro_batch) == wanted
    assert config.dist.world == world
    assert bool(notes) == (config.batch != changes["batch"])


@pytest.mark.parametrize(
    ("degrees", "world", "says"),
    [
        (Dist(shard=3), 8, "--world 8 does not divide into dist.shard=3"),
        (Dist(replicate=4), 8, "--world 8, but dist.replicate=4"),
    ],
)
def test_a_world_that_does_not_divide_is_refused(case, degrees: Dist, world: int, says: str):
    with pytest.raises(UserError, match=says):
        scale.spread(replace(case[1], batch=48, dist=degrees), world)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_pieces_weigh_their_share_and_rings_send_theirs(case):
    recipe, config, data, counted = case
    size = counted.weights
    alone = scale.look(recipe, config, data, counted, 0.4, 8)
    assert alone.memory["weights"] == size and alone.memory["moments"] == 2 * size
    assert alone.sent == {"gather weights": 0, "scatter gradients": 0, "average over copies": int(2 * 7 / 8 * size)}
    cut = scale.look(recipe, replace(config, dist=Dist(shard=4)), data, counted, 0.4, 8)
    assert size / 4 <= cut.memory["weights"] < size / 4 + 4096, "rows are rounded up"
    assert cut.sent["scatter gradients"] == int(3 / 4 * size)
    assert cut.sent["average over copies"] == int(size / 4)
    assert 3 / 4 * size < cut.sent["gather weights"] < 3 / 2 * size
    assert all(0 < e.efficiency <= 1 for e in cut.expected)
    assert not torch.distributed.is_initialized()


def test_the_first_thing_that_does_not_fit_is_named():
    gpu = next(g for g in scale.GPUS if g.name == "RTX 3090")
    memory = {"weights": 10 * scale.GIB, "gradients": 10 * scale.GIB, "activations": 2 * scale.GIB}
    assert scale._first_too_much(memory, gpu) == "activations"
    assert scale._first_too_much({"weights": 10 * scale.GIB}, gpu) == ""
