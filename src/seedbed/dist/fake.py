"""A mesh of any size in one process, on torch's fake process group, to see what each rank would hold."""

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from seedbed.config import Dist
from seedbed.dist.join import GroupRanks, make_mesh


@contextlib.contextmanager
def fake_ranks(degrees: Dist) -> Iterator[GroupRanks]:
    """Rank 0 of `degrees.world` ranks; the others do not exist and collectives send nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    assert not dist.is_initialized(), "a real process group exists"
    dist.init_process_group("fake", rank=0, world_size=degrees.world, store=FakeStore())
    try:
        yield GroupRanks(degrees, 0, make_mesh(degrees, "cpu"))
    finally:
        dist.destroy_process_group()
