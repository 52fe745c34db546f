"""What is changed in a system's layers before it trains: float8 products, activation checkpointing and shards."""

import torch

from seedbed.config import Config
from seedbed.dist import Ranks
from seedbed.dist.shards import Shards
from seedbed.train.system import System


def change_layers(system: System, config: Config, device: torch.device, ranks: Ranks) -> Shards | None:
    """In this order: before anything is compiled, and before optimizers learn names. Returns the shards, if there are any."""
    if config.float8:
        from seedbed.train.float8 import to_float8

        to_float8(system, device)
    if config.remat != "none":
        from seedbed.train.activation_checkpointing import checkpoint_units

        checkpoint_units(system, config.remat, device)
    if ranks.mesh is None:
        return None
    from seedbed.dist.shards import shard
    from seedbed.nn.deferred import init_deferred
    from seedbed.train.capabilities import shard_units

    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    shards = shard(system, shard_units(system), ranks, device, dtype)
    init_deferred(system)  # one parameter at a time, with the numbers that one process draws
    return shards
