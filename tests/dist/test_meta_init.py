"""Shards are filled without the whole model on any rank, with the numbers that one process draws. As a script: one rank."""

import functools
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

RECIPES = {
    "gpt/demo": ["model.depth=3", "model.width=40", "model.heads=2", "model.skips=true", "batch=8"],
    "flow/demo": ["model.depth=2", "model.width=32", "model.heads=2", "batch=8"],
    "ebt/demo": ["batch=8", "model.control=false"],
}
DEGREES = {1: ["dist.single=shard"], 2: ["dist.shard=2"], 4: ["dist.replicate=2", "dist.shard=2"], 3: ["dist.shard=3", "batch=9"]}


def scalars_alone(real: Any, module: torch.nn.Module, *given: Any, scalars_only: bool = False) -> torch.nn.Module:
    """In the place of `materialize`: whole weights on the host end the rank."""
    assert scalars_only
    return real(module, *given, scalars_only=True)


def one_rank(name: str, degrees: list[str]) -> None:
    from seedbed import config as configs
    from seedbed.dist.join import join
    from seedbed.nn import init
    from seedbed.recipes import find
    from seedbed.train.stepper import build

    recipe, preset = find(name)
    config = configs.override(recipe.preset(preset), [*RECIPES[name], "device=cpu", *degrees])
    data = recipe.open_data(config)
    plain = build(recipe, configs.override(config, configs.SINGLE_PROCESS), data).system
    wanted = {n: p.detach() for n, p in plain.named_parameters()}
    ranks = join(config.dist, "cpu")
    real = init.materialize
    if not name.startswith("ebt"):  # it measures its head while it is built
        init.materialize = functools.partial(scalars_alone, real)
    system = build(recipe, config, data, ranks=ranks).system
    init.materialize = real
    num_sharded = 0
    for n, param in system.named_parameters():
        full = param.full_tensor() if hasattr(param, "full_tensor") else param
        num_sharded += full is not param
        assert torch.equal(full.detach(), wanted[n]), n
        assert vars(param).get("declaration") == vars(plain.get_parameter(n)).get("declaration"), n
    assert num_sharded > 5
    assert all(torch.equal(b, plain.get_buffer(n)) for n, b in system.named_buffers())
    ranks.close()
    print("EQUAL", num_sharded)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("world", "name"), [(1, "ebt/demo"), (2, "flow/demo"), (3, "gpt/demo"), (4, "gpt/demo")])
def test_shards_hold_the_numbers_of_one_process_bit_for_bit(world: int, name: str) -> None:
    from rank_processes import PATHS, ports

    (port,) = ports(1)
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATHS}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    argv = [sys.executable, __file__, name, *DEGREES[world]]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    ranks = [subprocess.Popen(argv, env={**shared, "RANK": str(r), "LOCAL_RANK": str(r)}, **pipes) for r in range(world)]
    texts = [process.communicate(timeout=200)[0] for process in ranks]
    assert all("EQUAL" in text for text in texts), texts


if __name__ == "__main__":
    one_rank(sys.argv[1], sys.argv[2:])
