"""Joining the other processes of a run, their collectives, and what cannot be spread over them."""

import datetime
import json
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from seedbed.config import Config, Dist
from seedbed.dist import SINGLE, Ranks, is_elastic, started
from seedbed.errors import UserError

# One rank may sample or prepare data while the others wait; the launcher notices a rank that died.
TIMEOUT = datetime.timedelta(hours=2)


def join(degrees: Dist, device: str) -> Ranks:
    """Join the process group; the number of processes must be the one that the config asks for."""
    require(degrees, started())
    if not degrees.is_distributed:
        return SINGLE
    rank, cuda = int(os.environ.get("RANK", 0)), device == "cuda" or (device == "auto" and torch.cuda.is_available())
    if cuda:
        number = int(os.environ.get("LOCAL_RANK", 0))
        count = torch.cuda.device_count()
        if not count:
            raise UserError("device=cuda, but torch sees no CUDA device; use device=cpu or check the driver")
        if number >= count:
            raise UserError(f"this machine has {count} GPUs, and {number + 1} ranks were started on it; start one rank per GPU")
        torch.cuda.set_device(number)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=TIMEOUT, **_store(degrees.world, rank))
    # JSON messages have groups of their own, apart from the collectives of steps.
    control, background = (dist.new_group(backend="gloo", timeout=TIMEOUT) for _ in range(2))
    mesh = None
    if degrees.is_sharded:  # replicas along the first axis, shards along the second: those of a replica are on consecutive ranks
        shape = (degrees.replicate, degrees.shard)
        mesh = init_device_mesh("cuda" if cuda else "cpu", shape, mesh_dim_names=("replicate", "shard"))
    ranks = GroupRanks(degrees, rank, mesh, control)
    ranks.background = GroupRanks(degrees, rank, mesh, background)
    return ranks


def _store(world: int, rank: int) -> dict[str, Any]:
    """Where ranks find each other, where that is not torchrun's address."""
    if not started():
        return {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if not is_elastic() or os.environ.get("GROUP_WORLD_SIZE") != "1":
        return {}
    # Started again on this machine, torchrun still has the addresses of the ranks that are gone.
    store = next(iter(dist.rendezvous("env://", rank, world, timeout=TIMEOUT)))[0]
    return {"store": dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store), "rank": rank, "world_size": world}


class GroupRanks(Ranks):
    """One rank in torch's process group, of several as a rule; `control` is the group of JSON messages."""

    is_single = False

    def __init__(self, degrees: Dist, rank: int, mesh: DeviceMesh | None = None, control: Any = None) -> None:
        super().__init__(degrees, rank)
        self.mesh, self._control = mesh, control

    def all_reduce_sum(self, value: Tensor, group: Any = None) -> Tensor:
        value = value.detach().clone()
        dist.all_reduce(value, group=group)
        return value

    def sum_over_shards(self, value: Tensor) -> Tensor:
        return self.all_reduce_sum(value, self.mesh.get_group("shard")) if self.mesh else value

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            dist.broadcast(tensor, 0)

    def all_gather_object(self, value: Any) -> list[Any]:
        data = json.dumps(value).encode()
        sizes = torch.zeros(self.world, dtype=torch.int64)
        sizes[self.rank] = len(data)
        dist.all_reduce(sizes, group=self._control)
        padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        gathered = [torch.empty_like(padded) for _ in range(self.world)]
        dist.all_gather(gathered, padded, group=self._control)
        return [json.loads(p[:n].numpy().tobytes()) for p, n in zip(gathered, sizes.tolist(), strict=True)]

    def agree(self, act: Callable[[], Any]) -> list[Any]:
        done, problem = None, ""
        try:
            done = act()
        except OSError as error:
            problem = f"rank {self.rank}: {error}"
        found = self.all_gather_object([done, problem])
        for _, message in found:
            if message:
                raise OSError(message)
        return [done for done, _ in found]

    def close(self) -> None:
        self.barrier()
        dist.destroy_process_group()


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


# Settings that do not work with sharded weights when they are true, and why.
_NOT_SHARDED = {
    "compile_autograd": "FSDP2 gathers and scatters inside the backward pass",
    "compile_optimizer": "its code would be compiled for unsharded tensors",
    "float8": "torchao's layers scale rows of full weights, and nobody has verified them with shards",
}


def require_settings(config: Config) -> None:
    """Refuse settings that do not work with the degrees of parallelism, before the run is created."""
    if config.dist.is_distributed and config.device == "mps":
        raise UserError("device=mps is a single device; use dist.replicate=1 dist.shard=1")
    for key, why in _NOT_SHARDED.items() if config.dist.is_sharded else ():
        if getattr(config, key):
            raise UserError(f"{key}=true does not go with dist.shard={config.dist.shard}: {why}")
