"""Estimates of a system: parameters, FLOP and memory by fake tensors, so that any size takes seconds and no memory."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from seedbed.config import Config
from seedbed.data.feed import Data, Feed
from seedbed.errors import UserError
from seedbed.nn.init import kind_of
from seedbed.recipes import Recipe
from seedbed.train.engine import Engine
from seedbed.train.system import Batch, flops_per_item
from seedbed.tune.workload import num_parameters

CPU = torch.device("cpu")

T = TypeVar("T")


class EstimateEngine(Engine):
    """Runs backward passes on request, but no optimizer."""

    backward = True

    def minimize(self, loss: Tensor, name: str = "main") -> None:
        if self.backward:
            loss.backward(inputs=self.optimizers[name].params if len(self.optimizers) > 1 else None)


@dataclass(frozen=True)
class Estimate:
    """Size of a system in bytes and operations; activations are a constant plus a part per item."""

    num_params: int
    num_non_embedding: int
    num_trained: int
    targets_per_item: float
    flops_formula: float
    flops_counted: float
    weights: int
    gradients: int
    moments: int
    average: int
    fixed: int
    per_item: int
    fake_tensors: bool

    def memory(self, part: int, data: int = 0) -> dict[str, int]:
        """Bytes of a training step whose micro-batch holds `part` items, by purpose."""
        activations = self.fixed + self.per_item * part
        held = {"weights": self.weights, "gradients": self.gradients, "moments": self.moments, "average": self.average}
        return {**held, "activations": activations, "data": data}


def estimate_costs(recipe: Recipe, config: Config, data: Data) -> Estimate:
    estimate, engine, items = with_fake_tensors(recipe, config, data, _count)
    return replace(estimate, targets_per_item=float(engine.system.num_targets(items[1])))


def with_fake_tensors(
    recipe: Recipe, config: Config, data: Data, work: Callable[[EstimateEngine, dict[int, Batch], bool], T]
) -> tuple[T, EstimateEngine, dict[int, Batch]]:
    """`work(engine, batches of one and two items, True)` on fake tensors; its result, the engine, and real batches.

    A system that needs real values gets real batches, and `work` gets False.
    """
    items = {b: real_batch(data, b, config.seed) for b in (1, 2)}

    def attempt(mode: FakeTensorMode | None) -> tuple[T, EstimateEngine]:
        engine = EstimateEngine(recipe.build(config, data), config, CPU)
        drawn = {b: {n: mode.from_tensor(t) if mode else t for n, t in batch.items()} for b, batch in items.items()}
        return work(engine, drawn, mode is not None), engine

    return *with_fakes(attempt), items


def with_fakes(work: Callable[[FakeTensorMode | None], T]) -> T:
    """`work(mode)` in a mode of fake tensors; `work(None)` outside of it for a recipe that needs real values."""
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            return work(mode)
    except UserError:
        raise
    except Exception:  # anything a recipe may do that needs real values
        return work(None)


def real_batch(data: Data, size: int, seed: int) -> Batch:
    """The first items of a run, on the host."""
    with contextlib.closing(Feed(data.train, batch=size, parts=1, seed=seed, device=CPU)) as feed:
        feed.load(0)
        return {name: tensor.clone() for name, tensor in feed.part(0).items()}


def _count(engine: EstimateEngine, items: dict[int, Batch], without_numbers: bool) -> Estimate:
    system, files = engine.system, engine.tensors()
    engine.variant = system.variant(0, engine.config.steps)
    saved = {size: saved_bytes(engine, batch) for size, batch in items.items()}
    per_item = max(saved[2] - saved[1], 0)
    trained = [p for p in system.parameters() if p.requires_grad]
    owned = ((*path.rpartition("."), param) for path, param in system.named_parameters())
    body = (p for owner, _, name, p in owned if kind_of(name, system.get_submodule(owner), p) not in ("embed", "head"))
    return Estimate(
        num_params=num_parameters(system),
        num_non_embedding=sum(p.numel() for p in body),
        num_trained=sum(p.numel() for p in trained),
        targets_per_item=1.0,
        flops_formula=float(flops_per_item(system)),
        flops_counted=flops(engine, items[1]),
        weights=sum(t.nbytes for t in files["model"].values()),
        gradients=sum(p.nbytes for p in trained),
        moments=sum(t.nbytes for t in files["optim"].values()),
        average=sum(t.nbytes for t in files.get("ema", {}).values()),
        fixed=max(saved[1] - per_item, 0),
        per_item=per_item,
        fake_tensors=without_numbers,
    )


def flops(engine: EstimateEngine, batch: Batch) -> float:
    """FLOP of a forward and backward pass as torch counts them, attention as full (not causal) products."""
    engine.backward = True
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        forward_backward(engine, batch)
    return float(counter.get_total_flops())


def saved_bytes(engine: EstimateEngine, batch: Batch) -> int:
    """Bytes that a forward pass saves for the backward pass, without weights and inputs."""
    known = {t.untyped_storage()._cdata for t in [*engine.system.parameters(), *engine.system.buffers(), *batch.values()]}
    held: dict[int, Any] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            held[storage._cdata] = storage  # kept alive, or its address would be reused
        return tensor

    engine.backward = False
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forward_backward(engine, batch)
    return sum(storage.nbytes() for storage in held.values())


def forward_backward(engine: EstimateEngine, batch: Batch) -> None:
    """One update without an optimizer; no gradients are left."""
    with engine.autocast():
        engine.system.update(batch, engine)
    for param in engine.system.parameters():
        param.grad = None
