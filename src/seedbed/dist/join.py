"""Joining the other processes of a run, and what cannot be spread over them."""

from __future__ import annotations

import datetime
import os
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from seedbed.config import Config, Dist
from seedbed.dist.ranks import SINGLE, Ranks, started
from seedbed.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# One rank may sample or prepare data while the others wait; the launcher notices a rank that died.
TIMEOUT = datetime.timedelta(hours=2)


def join(degrees: Dist, device: str) -> Ranks:
    """Join the process group; the number of processes must be the one that the config asks for."""
    num = started()
    require(degrees, num)
    if degrees.world == 1:
        return SINGLE
    rank, cuda = int(os.environ["RANK"]), device == "cuda" or (device == "auto" and torch.cuda.is_available())
    if cuda:
        _use_gpu(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=TIMEOUT)
    # JSON messages have groups of their own, apart from the collectives of steps.
    control, background = (dist.new_group(backend="gloo", timeout=TIMEOUT) for _ in range(2))
    mesh = make_mesh(degrees, "cuda" if cuda else "cpu") if degrees.shard > 1 else None  # costs seconds to load
    ranks = Ranks(degrees, rank, mesh, control)
    ranks.background = Ranks(degrees, rank, mesh, background)
    return ranks


def require(degrees: Dist, num: int) -> None:
    """Refuse a number of processes that the config does not ask for."""
    shape = f"dist.replicate={degrees.replicate} x dist.shard={degrees.shard}"
    if num > 1 and num != degrees.world:
        raise UserError(
            f"torchrun started {num} processes, but {shape} is {degrees.world}\n"
            f"set dist.replicate={num} (replicas), dist.shard={num} (shards) or a product of both; or start with: "
            f"torchrun --nproc-per-node={degrees.world} -m seedbed train ..."
        )
    if num <= 1 and degrees.world > 1:
        raise UserError(
            f"{shape} needs {degrees.world} processes; start with: torchrun --nproc-per-node={degrees.world} -m seedbed train ..."
        )


def make_mesh(degrees: Dist, kind: str) -> DeviceMesh:
    """Replicas along the first axis, shards along the second: the shards of a replica are on consecutive ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(kind, (degrees.replicate, degrees.shard), mesh_dim_names=("replicate", "shard"))


def _use_gpu(number: int) -> None:
    count = torch.cuda.device_count()
    if not count:
        raise UserError("device=cuda, but torch sees no CUDA device; use device=cpu or check the driver")
    if number >= count:
        raise UserError(f"this machine has {count} GPUs, and {number + 1} ranks were started on it; start one rank per GPU")
    torch.cuda.set_device(number)


# Settings that do not work with sharded weights, and why.
_NOT_SHARDED = {
    "compile_autograd": (True, "FSDP2 gathers and scatters inside the backward pass"),
    "compile_optimizer": (True, "its code would be compiled for unsharded tensors"),
    "float8": (True, "torchao's layers gather their own weights"),
}


def require_settings(config: Config) -> None:
    """Refuse settings that do not work with the degrees of parallelism, before the run is created."""
    if config.dist.world > 1 and config.device == "mps":
        raise UserError("device=mps is a single device; use dist.replicate=1 dist.shard=1")
    for key, (value, why) in _NOT_SHARDED.items() if config.dist.shard > 1 else ():
        if getattr(config, key) == value:
            raise UserError(f"{key}={str(value).lower()} does not go with dist.shard={config.dist.shard}: {why}")
