"""Processes that train one model together: rank, degrees, collectives on tensors and messages between hosts.

`SINGLE` is the only rank of a run without process groups: its collectives return their input. join.py has those of several.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from seedbed.config import Dist

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


class Ranks:
    """One process of `degrees.world`: there are `replicate` replicas, each sharded over `shard` ranks."""

    mesh: DeviceMesh | None = None
    is_single = True

    def __init__(self, degrees: Dist, rank: int = 0) -> None:
        self.degrees, self.rank, self.world = degrees, rank, degrees.world
        # The same ranks with a process group of their own: for threads that write checkpoints during steps.
        self.background = self

    @property
    def is_primary(self) -> bool:
        """Whether this rank owns the run's folder and the console."""
        return self.rank == 0

    @property
    def shard_rank(self) -> int:
        """Which shard of the weights this rank holds; consecutive ranks hold consecutive shards."""
        return self.rank % self.degrees.shard

    def shard_of(self, items: Iterable[T]) -> Iterator[T]:
        """This rank's share: every `world`-th item, from the `rank`-th on."""
        return itertools.islice(items, self.rank, None, self.world)

    # ---- numbers on the device ---------------------------------------------------------------------------------------

    def all_reduce_sum(self, value: Tensor) -> Tensor:
        """The sum over all ranks, the same on each; not differentiable."""
        return value

    def all_reduce_mean(self, value: Tensor) -> Tensor:
        """The mean over all ranks, the same on each; not differentiable."""
        return self.all_reduce_sum(value) / self.world

    def sum_over_shards(self, value: Tensor) -> Tensor:
        """The sum over the ranks that hold the shards of one replica."""
        return value

    def broadcast_(self, tensors: Iterable[Tensor]) -> None:
        """Copy rank 0's values to every rank, in place."""

    # ---- objects on the host -----------------------------------------------------------------------------------------

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's value, in the order of ranks, sent as JSON."""
        return [value]

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's value on every rank, sent as JSON."""
        return self.all_gather_object(value if self.is_primary else None)[0]

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self.all_gather_object(None)

    def agree(self, act: Callable[[], T]) -> list[T]:
        """Every rank's result of `act`; a disk error on one rank is raised on all of them."""
        return [act()]

    def close(self) -> None:
        """Leave the process group once all ranks are here: after a signal, the launcher ends the ranks that outlast the first."""


SINGLE = Ranks(Dist())


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor; the tensor itself where it is not sharded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[operator]


def started() -> int:
    """The number of processes that torchrun or seedbed started for this command; 0 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", 0)) if "RANK" in os.environ else 0


def is_elastic() -> bool:
    """Whether torchrun starts this command again when a rank is lost. It counts a changed number of nodes as no restart."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0
