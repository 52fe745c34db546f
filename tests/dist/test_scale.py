"""plan --world: what each rank of a fake process group would hold and send."""

from dataclasses import replace

import pytest
import torch

from seedbed.config import Dist, override
from seedbed.errors import UserError
from seedbed.recipes import find
from seedbed.tune import scale
from seedbed.tune.estimate import estimate_costs

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
    return recipe, config, data, estimate_costs(recipe, config, data)


@pytest.mark.parametrize(
    ("changes", "world", "wanted"),
    [
        ({"batch": 64}, 8, (64, 1, 8)),
        ({"batch": 64, "accum": 16}, 8, (64, 2, 4)),
        ({"batch": 64}, 128, (128, 1, 1)),
        ({"batch": 60, "accum": 4}, 2, (60, 2, 15)),
        ({"batch": 64, "dist": Dist(shard=4, reduce="bf16")}, 8, (64, 1, 8)),
        ({"batch": 64, "accum": 4, "dist": Dist(replicate=4)}, 4, (64, 4, 4)),
    ],
)
def test_batch_is_split_over_ranks_without_larger_micro_batches(case, changes, world: int, wanted: tuple[int, int, int]):
    config, notes = scale.distribute(replace(case[1], **changes), world)
    assert (config.batch, config.accum, config.micro_batch) == wanted
    assert config.dist.world == world and config.dist.reduce == changes.get("dist", Dist()).reduce
    assert bool(notes) == (config.batch != changes["batch"])


@pytest.mark.parametrize(
    ("degrees", "world", "says"),
    [
        (Dist(shard=3), 8, "--world 8 is not a multiple of dist.shard=3"),
        (Dist(replicate=4), 8, "--world 8, but dist.replicate=4"),
    ],
)
def test_world_size_that_does_not_divide_is_refused(case, degrees: Dist, world: int, says: str):
    with pytest.raises(UserError, match=says):
        scale.distribute(replace(case[1], batch=48, dist=degrees), world)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_memory_and_traffic_of_shards_follow_from_their_sizes(case):
    recipe, config, data, estimate = case
    size = estimate.weights
    single = scale.estimate_scale(recipe, config, data, estimate, 0.4, 8)
    assert single.memory["weights"] == size and single.memory["moments"] == 2 * size
    assert single.sent_bytes == {"gather weights": 0, "scatter gradients": 0, "all-reduce gradients": int(2 * 7 / 8 * size)}
    sharded = scale.estimate_scale(recipe, replace(config, dist=Dist(shard=4)), data, estimate, 0.4, 8)
    assert size / 4 <= sharded.memory["weights"] < size / 4 + 4096, "rows are rounded up"
    assert sharded.sent_bytes["scatter gradients"] == int(3 / 4 * size)
    assert sharded.sent_bytes["all-reduce gradients"] == int(size / 4)
    assert 3 / 4 * size < sharded.sent_bytes["gather weights"] < 3 / 2 * size
    assert all(0 < e.efficiency <= 1 for e in sharded.speeds)
    assert not torch.distributed.is_initialized()


def test_memory_that_does_not_fit_first_is_named():
    gpu = next(g for g in scale.GPUS if g.name == "RTX 3090")
    memory = {"weights": 10 * scale.GIB, "gradients": 10 * scale.GIB, "activations": 2 * scale.GIB}
    assert scale._exceeded_by(memory, gpu) == "activations"
    assert scale._exceeded_by({"weights": 10 * scale.GIB}, gpu) == ""
