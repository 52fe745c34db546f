"""Model summary: layers with shapes, parameters and FLOPs, from one item passed through the model before step 0."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from seedbed.data.feed import Data, Feed
from seedbed.nn.layers import cuda_ops
from seedbed.train.engine import Engine, fork_rng
from seedbed.train.system import Batch, flops_per_item, named_optimizers


def summarise(engine: Engine, data: Data) -> dict[str, Any]:
    """Plain JSON values: totals, a row per module, and the parameters that the loss does not reach.

    Weights, buffers and random generators are unchanged. Where the pass fails, the parameters are still listed.
    """
    system = engine.system
    facts: dict[str, Any] = {
        "parameters": sum(p.numel() for p in system.parameters()),
        "trained": sum(p.numel() for p in system.parameters() if p.requires_grad),
        "flops_per_item": float(flops_per_item(system)) or None,
    }
    before = {name: buffer.clone() for name, buffer in system.named_buffers()}
    state, variant, look = system.state(), engine.variant, _ForwardPass()
    try:
        one_item = Feed(data.train, batch=1, parts=1, seed=engine.config.seed, device=torch.device("cpu"))
        with fork_rng(engine.device), closing(one_item) as feed:
            engine.variant = system.variant(0, engine.config.steps)
            feed.load(0)
            look.at(engine, {name: tensor.to(engine.device, copy=True) for name, tensor in feed.part(0).items()})
    except Exception as error:  # a recipe may not support a single item
        facts["unseen"] = f"{type(error).__name__}: {error}".partition("\n")[0]
    finally:
        engine.variant = variant
        system.load_state(state)
        for name, buffer in system.named_buffers():
            buffer.copy_(before[name])
    return facts | {"unreached": look.unreached, "layers": list(look.rows(system))}


class _ForwardOnly:
    """The engine as a recipe sees it, except that `minimize` only records the loss."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.losses: dict[str, list[Tensor]] = defaultdict(list)  # by optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def minimize(self, loss: Tensor, name: str = "main") -> None:
        self.losses[name].append(loss)


def _inner(result: Tensor, a: Tensor, *rest: Any) -> float:
    return result.numel() * a.shape[-1]


# Multiplications by function, given its result and arguments.
_RULES: dict[Any, Any] = {
    F.scaled_dot_product_attention: lambda y, q, k, v, *rest: q.shape[:-1].numel() * k.shape[-2] * (q.shape[-1] + v.shape[-1]),
    **dict.fromkeys((F.linear, torch.matmul, torch.bmm, torch.mm), _inner),
    **dict.fromkeys((Tensor.matmul, Tensor.__matmul__, Tensor.bmm, Tensor.mm), _inner),
    **dict.fromkeys((torch.addmm, torch.baddbmm), lambda result, bias, *product: _inner(result, *product)),
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), lambda result, x, weight, *rest: result.numel() * weight[0].numel()),
}
if cuda_ops:
    _RULES[cuda_ops.narrow_attention._opoverload] = lambda y, q_BTHD, *rest: 2 * q_BTHD.numel() * q_BTHD.shape[1]


class _Products(TorchFunctionMode):
    """Counts the FLOPs of matrix products, convolutions and attention.

    `seedbed plan` uses torch's own counter, which sees every operation; loading that takes a second, and this runs before
    every training.
    """

    flops = 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        rule = _RULES.get(func)
        if rule:
            self.flops += 2.0 * rule(result, *args)
        return result


class _ForwardPass:
    """The result of one pass: output shape and FLOPs of each module, and the parameters that took part."""

    def __init__(self) -> None:
        self.shapes: dict[str, list[int]] = {}
        self.flops: dict[str, float] = {}
        self.unreached: list[str] = []

    def at(self, engine: Engine, batch: Batch) -> None:
        system, still = engine.system, _ForwardOnly(engine)
        counter = _Products()
        hooks = [hook for path, module in system.named_modules() if path for hook in self._hooks(path, module, counter)]
        try:
            with counter, engine.autocast():
                system.update(batch, still)  # pyright: ignore[reportArgumentType]
        finally:
            for hook in hooks:
                hook.remove()
        reached = _leaves([loss for losses in still.losses.values() for loss in losses])
        # An optimizer that starts in a later stage has no loss yet.
        waiting = {
            id(p) for name, module in named_optimizers(system).items() if name not in still.losses for p in module.parameters()
        }
        asked = [(n, p) for n, p in system.named_parameters() if p.requires_grad and id(p) not in waiting]
        self.unreached = [n for n, p in asked if id(p) not in reached]

    def _hooks(self, path: str, module: nn.Module, counter: _Products) -> Iterator[Any]:
        begun: list[float] = []

        def enter(module: nn.Module, given: Any) -> None:
            begun.append(counter.flops)

        def leave(module: nn.Module, given: Any, result: Any) -> None:
            self.flops[path] = self.flops.get(path, 0.0) + counter.flops - begun.pop()
            found = next((t for t in (result if isinstance(result, list | tuple) else [result]) if isinstance(t, Tensor)), None)
            if found is not None:
                self.shapes[path] = list(found.shape)

        yield module.register_forward_pre_hook(enter)
        yield module.register_forward_hook(leave)

    def rows(self, system: nn.Module) -> Iterator[dict[str, Any]]:
        """Modules that hold parameters or were called, in the order of the code; each with all that it contains."""
        for path, module in system.named_modules():
            num = sum(p.numel() for p in module.parameters())
            if path and (num or path in self.shapes):
                seen = {"shape": self.shapes.get(path), "flops": self.flops.get(path)}
                yield {"path": path, "kind": type(module).__name__, "parameters": num, **seen}


def _leaves(losses: list[Tensor]) -> set[int]:
    """The tensors that a backward pass would give a gradient, found by traversing the graph without computing it."""
    waiting: list[Any] = [loss.grad_fn for loss in losses if loss.grad_fn is not None]
    seen, found = set(waiting), set()
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        fresh = {parent for parent, _ in node.next_functions if parent is not None} - seen
        seen |= fresh
        waiting += fresh
    return found
