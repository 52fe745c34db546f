"""A system built and stepped on paper: shapes without numbers, so that any size is counted in seconds and in no memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from seedbed.config import Config
from seedbed.data.feed import Data, Feed
from seedbed.errors import UserError
from seedbed.nn.groups import kind_of
from seedbed.recipes import Recipe
from seedbed.train.engine import Engine
from seedbed.train.system import Batch
from seedbed.tune.bench import num_parameters

CPU = torch.device("cpu")

T = TypeVar("T")


class PaperEngine(Engine):
    """Backward passes where they are wanted, but no optimizer: its operations belong to the step, not to the items."""

    backward = True

    def descend(self, loss: Tensor, name: str = "main") -> None:
        if self.backward:
            loss.backward(inputs=self.optimizers[name].params if len(self.optimizers) > 1 else None)


@dataclass(frozen=True)
class Counted:
    """What a system weighs, in bytes and operations; activations are a fixed part and one per item."""

    num_params: int
    num_body: int
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
    on_paper: bool

    def memory(self, part: int, data: int = 0) -> dict[str, int]:
        """Bytes of a training step whose micro-batch holds `part` items, by what they hold."""
        activations = self.fixed + self.per_item * part
        held = {"weights": self.weights, "gradients": self.gradients, "moments": self.moments, "average": self.average}
        return {**held, "activations": activations, "data": data}


def count(recipe: Recipe, config: Config, data: Data) -> Counted:
    """What the system of `config` weighs."""
    counted, engine, items = on_paper(recipe, config, data, _count)
    return replace(counted, targets_per_item=float(engine.system.num_targets(items[1])))


def on_paper(
    recipe: Recipe, config: Config, data: Data, work: Callable[[PaperEngine, dict[int, Batch], bool], T]
) -> tuple[T, PaperEngine, dict[int, Batch]]:
    """`work(engine, batches of one and two items, True)` without numbers; its result, the engine, and real batches.

    A system that asks for real numbers on the way is given them, and `work` is told so by False.
    """
    items = {b: real_batch(data, b, config.seed) for b in (1, 2)}
    try:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            engine = PaperEngine(recipe.build(config, data), config, CPU)
            drawn: dict[int, Batch] = {b: {n: mode.from_tensor(t) for n, t in batch.items()} for b, batch in items.items()}
            return work(engine, drawn, True), engine, items
    except UserError:
        raise
    except Exception:  # whatever a recipe does with numbers that are not there
        engine = PaperEngine(recipe.build(config, data), config, CPU)
        return work(engine, items, False), engine, items


def real_batch(data: Data, size: int, seed: int) -> Batch:
    """The first items of a run, on the host."""
    feed = Feed(data.train, batch=size, parts=1, seed=seed, device=CPU)
    try:
        feed.load(0)
        return {name: tensor.clone() for name, tensor in feed.part(0).items()}
    finally:
        feed.close()


def _count(engine: PaperEngine, items: dict[int, Batch], without_numbers: bool) -> Counted:
    system, files = engine.system, engine.tensors()
    engine.variant = system.variant(0, engine.config.steps)
    saved = {size: saved_bytes(engine, batch) for size, batch in items.items()}
    per_item = max(saved[2] - saved[1], 0)
    trained = [p for p in system.parameters() if p.requires_grad]
    body = (p for n, m, p in owned(system) if kind_of(n, m, p) not in ("embed", "head"))
    return Counted(
        num_params=num_parameters(system),
        num_body=sum(p.numel() for p in body),
        num_trained=sum(p.numel() for p in trained),
        targets_per_item=1.0,
        flops_formula=float(system.flops_per_item()),
        flops_counted=flops(engine, items[1]),
        weights=_bytes(files["model"].values()),
        gradients=_bytes(trained),
        moments=_bytes(files["optim"].values()),
        average=_bytes(files.get("ema", {}).values()),
        fixed=max(saved[1] - per_item, 0),
        per_item=per_item,
        on_paper=without_numbers,
    )


def owned(system: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """Every parameter once, with its own name and the module that holds it."""
    seen = set()
    for module in system.modules():
        for name, param in module.named_parameters(recurse=False):
            if id(param) not in seen:
                seen.add(id(param))
                yield name, module, param


def flops(engine: PaperEngine, batch: Batch) -> float:
    """Operations of a forward and backward pass as torch counts them, attention as plain products, whole and not halved."""
    engine.backward = True
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        _pass(engine, batch)
    return float(counter.get_total_flops())


def saved_bytes(engine: PaperEngine, batch: Batch) -> int:
    """Bytes that a forward pass keeps for the backward pass, every storage once, weights and inputs left out."""
    known = {t.untyped_storage()._cdata for t in [*engine.system.parameters(), *engine.system.buffers(), *batch.values()]}
    held: dict[int, Any] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            held[storage._cdata] = storage  # held on to, or its address would be given to the next one
        return tensor

    engine.backward = False
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        _pass(engine, batch)
    return sum(storage.nbytes() for storage in held.values())


def _pass(engine: PaperEngine, batch: Batch) -> None:
    with engine.autocast():
        engine.system.update(batch, engine)
    for param in engine.system.parameters():
        param.grad = None


def _bytes(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
