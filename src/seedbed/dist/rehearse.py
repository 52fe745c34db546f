"""A mesh of any size in one process: a process group that answers and sends nothing, to see what each rank would hold."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from seedbed.config import Dist
from seedbed.dist.ranks import Ranks, make_mesh


@contextlib.contextmanager
def pretended(degrees: Dist) -> Iterator[Ranks]:
    """The first of `degrees.world` ranks, as if the others were there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    assert not dist.is_initialized(), "a real group of processes is at work"
    dist.init_process_group("fake", rank=0, world_size=degrees.world, store=FakeStore())
    try:
        yield Ranks(degrees, 0, make_mesh(degrees, "cpu"))
    finally:
        dist.destroy_process_group()
