"""Processes that train one model together: rank and degrees, collectives on tensors, and JSON messages between hosts.

`SINGLE` is the only rank of a run without process groups: its collectives return their input.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from seedbed.config import Dist

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
# Gradients are reduced in buckets of this many bytes: large enough for the network, small compared to the weights.
BUCKET_BYTES = 64 << 20


class Ranks:
    """One process of `degrees.world`: there are `replicate` replicas, each sharded over `shard` ranks."""

    def __init__(self, degrees: Dist, rank: int = 0, mesh: DeviceMesh | None = None, control: Any = None) -> None:
        self.degrees, self.rank, self.mesh = degrees, rank, mesh
        self.world = degrees.world
        self._control = control
        # The same ranks with a process group of their own: for threads that write checkpoints during steps.
        self.background = self

    @property
    def is_primary(self) -> bool:
        """Whether this rank owns the run's folder and the console."""
        return self.rank == 0

    @property
    def is_single(self) -> bool:
        return self.world == 1

    @property
    def shard_rank(self) -> int:
        """Which shard of the weights this rank holds; consecutive ranks hold consecutive shards."""
        return self.rank % self.degrees.shard

    @property
    def replica_rank(self) -> int:
        """Which replica this rank belongs to; replica 0 writes checkpoints."""
        return self.rank // self.degrees.shard

    # ---- numbers on the device ---------------------------------------------------------------------------------------

    def all_reduce_sum(self, value: Tensor) -> Tensor:
        """The sum over all ranks, the same on each; not differentiable."""
        if self.is_single:
            return value
        value = value.detach().clone()
        dist.all_reduce(value)
        return value

    def all_reduce_mean(self, value: Tensor) -> Tensor:
        """The mean over all ranks, the same on each; not differentiable."""
        return self.all_reduce_sum(value) / self.world

    def sum_over_shards(self, value: Tensor) -> Tensor:
        """The sum over the ranks that hold the shards of one replica."""
        if self.degrees.shard == 1:
            return value
        assert self.mesh is not None
        value = value.detach().clone()
        dist.all_reduce(value, group=self.mesh.get_group("shard"))
        return value

    def all_reduce_mean_(self, tensors: Sequence[Tensor]) -> None:
        """The mean over all ranks, in place, in buckets."""
        if self.is_single:
            return
        for bucket in _buckets(tensors):
            flat = torch.cat([t.reshape(-1) for t in bucket])
            dist.all_reduce(flat)
            flat /= self.world
            sizes = [t.numel() for t in bucket]
            for tensor, part in zip(bucket, flat.split(sizes), strict=True):
                tensor.copy_(part.view_as(tensor))

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        """Copy rank 0's values to every rank, in place."""
        if not self.is_single:
            for tensor in tensors:
                dist.broadcast(tensor, 0)

    def shard_of(self, items: Iterable[T]) -> Iterator[T]:
        """This rank's share: every `world`-th item, from the `rank`-th on."""
        return itertools.islice(items, self.rank, None, self.world)

    # ---- objects on the host -----------------------------------------------------------------------------------------

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's value on every rank, sent as JSON."""
        if self.is_single:
            return value
        return self.all_gather_object(value if self.is_primary else None)[0]

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of ranks, sent as JSON."""
        if self.is_single:
            return [value]
        data = json.dumps(value).encode()
        sizes = torch.zeros(self.world, dtype=torch.int64)
        sizes[self.rank] = len(data)
        dist.all_reduce(sizes, group=self._control)
        padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        gathered = [torch.empty_like(padded) for _ in range(self.world)]
        dist.all_gather(gathered, padded, group=self._control)
        return [json.loads(p[:n].numpy().tobytes()) for p, n in zip(gathered, sizes.tolist(), strict=True)]

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self.all_gather_object(None)

    def close(self) -> None:
        """Leave the process group once all ranks are here: after a signal, the launcher ends the ranks that outlast the first."""
        if not self.is_single:
            self.barrier()
            dist.destroy_process_group()


SINGLE = Ranks(Dist())


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive tensors of one dtype, at most BUCKET_BYTES together."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if bucket and (size + num_bytes > BUCKET_BYTES or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += num_bytes
    if bucket:
        yield bucket


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor; the tensor itself where it is not sharded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[operator]


# ---- joining -------------------------------------------------------------------------------------------------------------


def started() -> int:
    """The number of processes that torchrun or seedbed started for this command; 0 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", 0)) if "RANK" in os.environ else 0
