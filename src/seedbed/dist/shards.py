"""Weights cut into pieces over ranks by FSDP2, gathered unit by unit where they are used, and whole for evaluation."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from seedbed.dist.ranks import Ranks, local


class Rows(NamedTuple):
    """Rows of a tensor that a rank holds: from `first` to before `last`, of `num` in all."""

    first: int
    last: int
    num: int


@dataclass
class Shards:
    """A system whose parameters are pieces; without any, everything here does nothing."""

    system: nn.Module | None = None
    units: list[Any] = field(default_factory=list)
    rows: dict[str, Rows] = field(default_factory=dict)
    _whole: bool = False

    def __bool__(self) -> bool:
        return self.system is not None

    def enter(self, loss: Tensor) -> Tensor:
        """The loss as something whose backward pass brings every gradient to its owner."""
        return self.system.descent(loss) if self.system is not None else loss  # type: ignore[operator]

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Every parameter whole on every rank: inside, ranks may go different ways, since nothing is sent."""
        if self.system is None or self._whole:
            yield
            return
        self._whole = True
        for unit in self.units:
            unit.unshard()
        try:
            with contextlib.ExitStack() as stack:
                for unit in self.units:
                    stack.enter_context(_unhooked(unit))
                yield
        finally:
            for unit in self.units:
                unit.reshard()
            self._whole = False

    def require_cut(self) -> None:
        assert not self._whole, "weights were changed piece by piece while they were gathered"


def cut(system: Any, units: Iterable[nn.Module], ranks: Ranks, device: torch.device) -> Shards:
    """Cut every parameter along its first axis, in place: each unit is gathered when it is called, the rest for a whole step.

    The system is built on the host and moves to the device unit by unit, so that a device never holds all of it. Names stay;
    a single number cannot be cut and stays whole.
    """
    from torch.distributed.fsdp import register_fsdp_forward_method

    declared = {name: vars(p).get("declaration") for name, p in system.named_parameters()}
    for param in system.parameters():
        if param.ndim == 0:
            param.data = param.data.to(device)
    cut_units = apply(system, units, ranks)
    system.descent = _same
    system.to(device)
    for method in ("update", "descent"):
        register_fsdp_forward_method(system, method)
    with torch.no_grad():
        system.descent(torch.zeros((), device=device))  # the first to be called is the root of all units
    shards = Shards(system, [*cut_units, system])
    for unit in shards.units:
        unit.reshard()
    for name, param in system.named_parameters():
        if declared[name] is not None:
            param.declaration = declared[name]
        if hasattr(param, "to_local"):
            shards.rows[name] = _place(param, ranks)
            param.first_row = shards.rows[name].first
    return shards


def apply(system: Any, units: Iterable[nn.Module], ranks: Ranks) -> list[Any]:
    """FSDP2 on the units, then on what is left; the units. Tensors without numbers can be cut too."""
    from torch.distributed.fsdp import fully_shard

    single = {p for p in system.parameters() if p.ndim == 0}
    mesh = ranks.mesh if ranks.degrees.replicate > 1 else ranks.mesh["shard"]  # type: ignore[index]
    found: list[Any] = list(units)
    for unit in found:
        fully_shard(unit, mesh=mesh, ignored_params=single)
    fully_shard(system, mesh=mesh, ignored_params=single, reshard_after_forward=False)
    return found


@contextlib.contextmanager
def _unhooked(unit: Any) -> Iterator[None]:
    """Calls that FSDP2 does not see: it would take those of one rank alone for a part of the next backward pass."""
    state = unit._get_fsdp_state()
    kept = {name: getattr(unit, name) for name in ("_forward_pre_hooks", "_forward_hooks")}
    for name, hooks in kept.items():
        others = ((key, hook) for key, hook in hooks.items() if getattr(hook, "__self__", None) is not state)
        setattr(unit, name, OrderedDict(others))
    try:
        yield
    finally:
        for name, hooks in kept.items():
            setattr(unit, name, hooks)


def _same(loss: Tensor) -> Tensor:
    return loss


def _place(param: Tensor, ranks: Ranks) -> Rows:
    """FSDP2 gives every rank the same number of rows, rounded up, and the last ones what is left."""
    num = param.shape[0]
    size = -(-num // ranks.degrees.shard)
    first = min(size * ranks.shard_rank, num)
    rows = Rows(first, min(first + size, num), num)
    assert len(local(param)) == rows.last - rows.first, "torch cuts tensors in another way"
    return rows
