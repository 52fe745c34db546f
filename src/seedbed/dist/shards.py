"""Weights sharded over ranks by FSDP2: gathered unit by unit during a step, and all at once for evaluation."""

import contextlib
import itertools
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from seedbed.dist import Ranks, local


class Rows(NamedTuple):
    """The rows of a tensor that a rank holds: `first` up to and without `last`, of `num` in total."""

    first: int
    last: int
    num: int


@dataclass
class Shards:
    """A system with sharded parameters."""

    system: Any
    units: list[Any]
    rows: dict[str, Rows] = field(default_factory=dict)
    _is_gathered: bool = False

    def enter(self, loss: Tensor, is_last: bool) -> Tensor:
        """The loss as an output of FSDP2's root, so that its backward pass reduces and scatters the gradients.

        Replicas average their shards once, in the last micro-batch of a step.
        """
        self.system.set_requires_all_reduce(is_last)
        return self.system.root_output(loss)

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """All parameters unsharded on every rank: inside, nothing is sent, and ranks may do different things."""
        if self._is_gathered:
            yield
            return
        self._is_gathered = True
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
            self._is_gathered = False


def rows_each(num: int, num_shards: int) -> int:
    """FSDP2 gives every rank the same number of a tensor's rows, rounded up; the last ranks get what is left."""
    return -(-num // num_shards)


def shard(system: Any, units: Iterable[nn.Module], ranks: Ranks, device: torch.device, dtype: torch.dtype) -> Shards:
    """Shard every parameter along its first axis, in place: a unit is gathered when it is called, the rest for a whole step.

    What is on the meta device gets storage for this rank's shards, filled with NaN; what is on the host moves to the device unit
    by unit. So neither holds all of a model. Parameter names stay. Scalars cannot be sharded and are replicated.
    """
    from torch.distributed.fsdp import register_fsdp_forward_method

    def to_device(tensor: Tensor) -> Tensor:
        return torch.full_like(tensor, float("nan"), device=device) if tensor.is_meta else tensor.to(device)

    declared = {name: vars(p).get("declaration") for name, p in system.named_parameters()}
    for param in system.parameters():
        if param.ndim == 0:
            param.data = param.data.to(device)
    sharded_units = apply_fsdp(system, units, ranks, dtype)
    system.root_output = lambda loss: loss
    system._apply(to_device)
    for method in ("update", "root_output"):
        register_fsdp_forward_method(system, method)
    with torch.no_grad():
        system.root_output(torch.zeros((), device=device))  # FSDP2 takes the module that is called first for the root
    shards = Shards(system, [*sharded_units, system])
    for unit in shards.units:
        unit.reshard()
    for name, param in system.named_parameters():
        if declared[name] is not None:
            param.declaration = declared[name]
        if hasattr(param, "to_local"):
            num = param.shape[0]
            size = rows_each(num, ranks.degrees.shard)
            first = min(size * ranks.shard_rank, num)
            rows = Rows(first, min(first + size, num), num)
            assert len(local(param)) == rows.last - rows.first, "torch splits rows over ranks in another way"
            shards.rows[name] = rows
            param.first_row = rows.first
    return shards


def apply_fsdp(system: Any, units: Iterable[nn.Module], ranks: Ranks, dtype: torch.dtype = torch.float32) -> list[Any]:
    """Apply FSDP2 to the units, then to the rest of the system; returns the units. Works on the meta device too.

    Units are gathered in bfloat16 where `dtype` is that, as autocast would convert their weights anyway. The rest stays float32:
    embeddings, and objectives that need it. While a unit computes, the next one is gathered.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    scalars = {p for p in system.parameters() if p.ndim == 0}
    mesh = ranks.mesh if ranks.degrees.replicate > 1 else ranks.mesh["shard"]  # type: ignore[index]
    reduce_dtype = torch.bfloat16 if ranks.degrees.reduce == "bf16" else torch.float32
    narrow = MixedPrecisionPolicy(dtype if dtype == torch.bfloat16 else None, reduce_dtype, cast_forward_inputs=False)
    found: list[Any] = list(units)
    for unit in found:
        fully_shard(unit, mesh=mesh, ignored_params=scalars, mp_policy=narrow)
    full = MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    fully_shard(system, mesh=mesh, ignored_params=scalars, reshard_after_forward=False, mp_policy=full)
    for unit, following in itertools.pairwise(found):
        unit.set_modules_to_forward_prefetch([following])
    return found


@contextlib.contextmanager
def _unhooked(unit: Any) -> Iterator[None]:
    """Remove FSDP2's hooks inside: it would take a call on one rank for a part of the next backward pass."""
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
