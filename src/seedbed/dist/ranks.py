"""Processes that train one model together: who they are, what they tell each other, and sums over all of them.

`ALONE` is a single process, for which every question has the trivial answer and nothing is sent.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from seedbed.config import Dist
from seedbed.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
# One rank may sample or prepare data while the others wait; a rank that died is noticed by whoever started it.
TIMEOUT = datetime.timedelta(hours=2)
# Gradients travel in parcels of this many bytes: large enough for the wire, small enough not to double the memory.
PARCEL = 64 << 20


class Ranks:
    """A process among `degrees.world`: `replicate` copies of the weights, each cut into `shard` pieces."""

    def __init__(self, degrees: Dist, rank: int = 0, mesh: DeviceMesh | None = None, control: Any = None) -> None:
        self.degrees, self.rank, self.mesh = degrees, rank, mesh
        self.world = degrees.world
        self._control = control
        # The same ranks, whose words go another way: for the threads that write checkpoints while steps are taken.
        self.behind = self

    @property
    def is_first(self) -> bool:
        """Whether this rank owns the run's folder and the screen."""
        return self.rank == 0

    @property
    def is_alone(self) -> bool:
        return self.world == 1

    @property
    def shard_rank(self) -> int:
        """Which piece of the weights this rank holds; neighbours hold neighbouring pieces."""
        return self.rank % self.degrees.shard

    @property
    def copy_rank(self) -> int:
        """Which copy of the weights this rank belongs to; the first one writes checkpoints."""
        return self.rank // self.degrees.shard

    # ---- numbers on the device ---------------------------------------------------------------------------------------

    def total(self, value: Tensor) -> Tensor:
        """The sum over all ranks, the same on each; not differentiable."""
        if self.is_alone:
            return value
        value = value.detach().clone()
        dist.all_reduce(value)
        return value

    def mean(self, value: Tensor) -> Tensor:
        """The mean over all ranks, the same on each; not differentiable."""
        return self.total(value) / self.world

    def total_of_pieces(self, value: Tensor) -> Tensor:
        """The sum over the ranks that hold the pieces of one copy."""
        if self.degrees.shard == 1:
            return value
        assert self.mesh is not None
        value = value.detach().clone()
        dist.all_reduce(value, group=self.mesh.get_group("shard"))
        return value

    def average_(self, tensors: Sequence[Tensor]) -> None:
        """The mean over all ranks, in place, in parcels."""
        if self.is_alone:
            return
        for parcel in _parcels(tensors):
            flat = torch.cat([t.reshape(-1) for t in parcel])
            dist.all_reduce(flat)
            flat /= self.world
            sizes = [t.numel() for t in parcel]
            for tensor, part in zip(parcel, flat.split(sizes), strict=True):
                tensor.copy_(part.view_as(tensor))

    def first_decides_(self, tensors: Iterable[Tensor]) -> None:
        """Let every rank hold what the first one holds."""
        if not self.is_alone:
            for tensor in tensors:
                dist.broadcast(tensor, 0)

    def mine(self, things: Iterable[T]) -> Iterator[T]:
        """This rank's share of work that is counted out one by one."""
        return itertools.islice(things, self.rank, None, self.world)

    # ---- words on the host -------------------------------------------------------------------------------------------

    def tell(self, value: Any) -> Any:
        """What the first rank says, as JSON; what the others say does not matter."""
        if self.is_alone:
            return value
        return self.collect(value if self.is_first else None)[0]

    def collect(self, value: Any) -> list[Any]:
        """What every rank says, in the order of ranks."""
        if self.is_alone:
            return [value]
        words = json.dumps(value).encode()
        sizes = torch.zeros(self.world, dtype=torch.int64)
        sizes[self.rank] = len(words)
        dist.all_reduce(sizes, group=self._control)
        page = torch.zeros(int(sizes.max()), dtype=torch.uint8)
        page[: len(words)] = torch.frombuffer(bytearray(words), dtype=torch.uint8)
        pages = [torch.empty_like(page) for _ in range(self.world)]
        dist.all_gather(pages, page, group=self._control)
        return [json.loads(p[:n].numpy().tobytes()) for p, n in zip(pages, sizes.tolist(), strict=True)]

    def meet(self) -> None:
        """Wait until every rank has come this far."""
        self.collect(None)

    def leave(self) -> None:
        """Part when all have done: whoever started the ranks may end the rest once one has left after a signal."""
        if not self.is_alone:
            self.meet()
            dist.destroy_process_group()


ALONE = Ranks(Dist())


def _parcels(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one type, up to a parcel's size together."""
    parcel: list[Tensor] = []
    size = 0
    for tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if parcel and (size + num_bytes > PARCEL or tensor.dtype != parcel[0].dtype):
            yield parcel
            parcel, size = [], 0
        parcel.append(tensor)
        size += num_bytes
    if parcel:
        yield parcel


def local(tensor: Tensor) -> Tensor:
    """The piece of a tensor that this rank holds: itself, unless it is cut."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[operator]


# ---- joining -------------------------------------------------------------------------------------------------------------


def started() -> int:
    """How many processes were started for this command, by torchrun or by seedbed itself; 0 when nobody did."""
    return int(os.environ.get("WORLD_SIZE", 0)) if "RANK" in os.environ else 0


def join(degrees: Dist, device: str) -> Ranks:
    """Find the others; the number of processes must be the one that the config asks for."""
    num = started()
    require(degrees, num)
    if degrees.world == 1:
        return ALONE
    rank, cuda = int(os.environ["RANK"]), device == "cuda" or (device == "auto" and torch.cuda.is_available())
    if cuda:
        _take_gpu(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=TIMEOUT)
    # Words travel between the hosts, apart from the numbers of steps.
    control, behind = (dist.new_group(backend="gloo", timeout=TIMEOUT) for _ in range(2))
    mesh = make_mesh(degrees, "cuda" if cuda else "cpu") if degrees.shard > 1 else None  # costs seconds to load
    ranks = Ranks(degrees, rank, mesh, control)
    ranks.behind = Ranks(degrees, rank, mesh, behind)
    return ranks


def require(degrees: Dist, num: int) -> None:
    """Refuse a number of processes that the config does not ask for."""
    shape = f"dist.replicate={degrees.replicate} x dist.shard={degrees.shard}"
    if num > 1 and num != degrees.world:
        raise UserError(
            f"torchrun started {num} processes, but {shape} is {degrees.world}\n"
            f"set dist.replicate={num} (copies) or dist.shard={num} (pieces), or their product; or start with: "
            f"torchrun --nproc-per-node={degrees.world} -m seedbed train ..."
        )
    if num <= 1 and degrees.world > 1:
        raise UserError(
            f"{shape} needs {degrees.world} processes; start with: torchrun --nproc-per-node={degrees.world} -m seedbed train ..."
        )


def make_mesh(degrees: Dist, kind: str) -> DeviceMesh:
    """Copies along the first axis, pieces along the second: pieces of one copy are neighbours."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(kind, (degrees.replicate, degrees.shard), mesh_dim_names=("replicate", "shard"))


def _take_gpu(number: int) -> None:
    count = torch.cuda.device_count()
    if not count:
        raise UserError("device=cuda, but torch sees no CUDA device; use device=cpu or check the driver")
    if number >= count:
        raise UserError(f"this machine has {count} GPUs, and {number + 1} ranks were started on it; start one rank per GPU")
    torch.cuda.set_device(number)
