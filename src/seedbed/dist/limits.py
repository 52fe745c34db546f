"""What cannot be spread over ranks, named with the reason, before anything is built or sent."""

from typing import Any

from seedbed.config import Config, Dist
from seedbed.errors import UserError

# Settings that weights cut into pieces cannot have, and why.
_NOT_CUT = {
    "compile_autograd": (True, "pieces travel in the middle of the backward pass"),
    "compile_optimizer": (True, "its code would be compiled for whole tensors"),
    "float8": (True, "torchao's layers gather their weights in a way of their own"),
}


def require_settings(config: Config) -> None:
    """Refuse settings that do not go with the degrees: before a run is made."""
    if config.dist.world > 1 and config.device == "mps":
        raise UserError("device=mps is one device without others to talk to; use dist.replicate=1 dist.shard=1")
    for key, (value, why) in _NOT_CUT.items() if config.dist.shard > 1 else ():
        if getattr(config, key) == value:
            raise UserError(f"{key}={str(value).lower()} does not go with dist.shard={config.dist.shard}: {why}")


def require_possible(system: Any, config: Config, degrees: Dist) -> None:
    """Refuse in one line what a system cannot do on several ranks; `degrees` are those of the ranks at hand."""
    if config.dist.world != degrees.world:
        raise UserError(f"dist.replicate x dist.shard = {config.dist.world}, but this work is done by one process; set both to 1")
    if degrees.world == 1:
        return
    if why := system.why_one_rank():
        raise UserError(f"this run cannot be spread over {degrees.world} ranks: {why}")
    if degrees.shard > 1 and len(system.players()) > 1:
        names = ", ".join(system.players())
        raise UserError(
            f"dist.shard={degrees.shard}: the players of this system ({names}) descend one after another in a step, and FSDP2 "
            f"lets go of the weights after the first; use dist.replicate={degrees.world}"
        )
