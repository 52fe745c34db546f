"""Traces one step: every module call, every operation and every backward node, in execution order.

It finds where a value first becomes non-finite, and never changes what is computed.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from seedbed.checks.subject import short, source_line
from seedbed.checks.watch_ops import DispatchMode, RecordDraws, ReplayDraws, caller
from seedbed.config import Config
from seedbed.train.anomaly import last_line_outside_torch
from seedbed.train.engine import Engine, total_norm
from seedbed.train.optim import Optimizer
from seedbed.train.system import Batch, System

_HERE = str(Path(__file__).parent)


@dataclass
class Call:
    """One module call: magnitudes of inputs and outputs, and the range of autograd nodes it created."""

    name: str
    kind: str
    module: nn.Module
    first: int
    last: int = 0
    given: float = 0.0
    gave: float = 0.0
    rms: float = 0.0
    weight: float = 0.0
    dtype: str = ""
    finite: bool = True


@dataclass(frozen=True)
class Origin:
    """Where a value became non-finite. `op` is the operation, `line` its source line, as far as they are known."""

    direction: str
    module: str
    where: str
    op: str = ""
    line: str = ""
    given: str = ""
    dtype: str = ""


@dataclass
class Examination:
    """The trace of one step."""

    terms: dict[str, float] = field(default_factory=dict)
    norms: dict[str, float] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    draws: list[list[Tensor]] = field(default_factory=list)
    forward: Origin | None = None
    backward: Origin | None = None
    grads: dict[str, float] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        return self.terms.get("loss", math.nan)

    @property
    def bad(self) -> bool:
        return not all(map(math.isfinite, [self.loss, *self.norms.values()]))


def finite(x: Any) -> bool:
    """Whether every floating-point value in here is finite."""
    if isinstance(x, Tensor):
        return not (x.is_floating_point() or x.is_complex()) or x.numel() == 0 or bool(torch.isfinite(x).all())
    return math.isfinite(x) if isinstance(x, float) else True


def all_finite(values: Any) -> bool:
    return all(map(finite, tree_leaves(values)))


def largest(values: Any) -> float:
    """The largest finite magnitude in here; NaN when there is none."""
    tensors = [t.detach() for t in tree_leaves(values) if isinstance(t, Tensor) and t.is_floating_point() and t.numel()]
    sizes = [float(t[torch.isfinite(t)].abs().max()) for t in tensors if bool(torch.isfinite(t).any())]
    return max(sizes) if sizes else math.nan


def _next_node() -> int:
    """The sequence number of the next autograd node."""
    return torch.autograd._get_sequence_nr()  # pyright: ignore[reportPrivateImportUsage]


class Tracer(DispatchMode):
    """Hooks on every module, every operation and every backward node, which write into `found`."""

    def __init__(self, system: System, found: Examination) -> None:
        super().__init__()
        self.system, self.found = system, found
        self.names = {m: n for n, m in system.named_modules()}
        self.stack: list[Call] = []
        self.by_op: Origin | None = None
        self.looking = True

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with contextlib.ExitStack() as hooks:
            for module in (module for module, name in self.names.items() if name):
                hooks.enter_context(module.register_forward_pre_hook(self._enter, prepend=True, with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(self._leave, with_kwargs=True))
            with torch.autograd.set_detect_anomaly(True, check_nan=False), self:
                yield

    # ---- forward -----------------------------------------------------------------------------------------------------

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        with self.paused():
            if not self.found.forward and not all_finite((args, kwargs)):
                caller = self.stack[-1] if self.stack else None  # it produced the input
                self.found.forward = self._origin(caller.module if caller else self.system, caller)
            given = largest((args, kwargs))
            self.stack.append(Call(self.names[module], type(module).__name__, module, _next_node(), given=given))

    def _leave(self, module: nn.Module, args: tuple, kwargs: dict, out: Any) -> None:
        with self.paused():
            call = self.stack.pop()
            call.last = _next_node()
            call.finite, call.gave = all_finite(out), largest(out)
            first = next((t for t in tree_leaves(out) if isinstance(t, Tensor) and t.is_floating_point()), None)
            if first is not None:
                call.dtype = str(first.dtype).removeprefix("torch.")
                call.rms = float(first.detach().float().square().mean().sqrt())
            call.weight = largest(list(module.parameters(recurse=False)))
            self.found.calls.append(call)
            if not call.finite and not self.found.forward:
                self.found.forward = self._origin(module, call)

    def _origin(self, module: nn.Module, call: Call | None) -> Origin:
        """The origin in the forward pass of a module: the operation inside it that was seen to fail, if any."""
        name, seen = self.names[module], self.by_op
        if seen and (seen.module == name or not name or seen.module.startswith(f"{name}.")):
            return seen
        given = f"input up to {call.given:.4g}, weights up to {call.weight:.4g}" if call else ""
        return Origin("forward", name, where_of(module), given=given, dtype=call.dtype if call else "")

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Every operation; the first with a non-finite output from finite inputs is recorded."""
        kwargs = kwargs or {}
        given = tree_leaves((args, kwargs)) if self.looking and not self.by_op else []
        # Before the call: it may write into what it was given.
        sound = any(isinstance(x, Tensor) for x in given) and "empty" not in func._schema.name and all(map(finite, given))
        out = func(*args, **kwargs)
        if sound and not all_finite(out):
            self.by_op = self._origin_of_operation(func, given)
        return out

    def _origin_of_operation(self, func: Any, given: list[Any]) -> Origin:
        module = self.stack[-1].module if self.stack else self.system
        tensors = [x.detach() for x in given if isinstance(x, Tensor) and x.is_floating_point()]
        ranges = [f"{float(x.min()):.4g} to {float(x.max()):.4g}" if x.numel() else "nothing" for x in tensors[:3]]
        dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
        op = func._schema.name.removeprefix("aten::")
        return Origin("forward", self.names[module], where_of(module), op, caller(), "; ".join(ranges), dtype)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self.looking, before = False, self.looking
        try:
            yield
        finally:
            self.looking = before

    # ---- backward ----------------------------------------------------------------------------------------------------

    def follow(self, loss: Tensor) -> None:
        """Hooks every node behind `loss`: the first with a non-finite output from finite gradients is the origin."""
        if not self.found.forward and not finite(loss.detach()):
            # What no module boundary showed happened in the objective.
            self.found.forward = self.by_op or Origin("forward", "", where_of(self.system))
        seen, waiting = set(), [loss.grad_fn]
        while waiting:
            node = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            node.register_hook(functools.partial(self._on_node, node))
            waiting += [behind for behind, _ in node.next_functions]

    def _on_node(self, node: Any, results: Any, arriving: Any) -> None:
        if self.found.backward:
            return
        with self.paused():
            hooked = not all_finite(arriving)
            if hooked or not all_finite(results):
                self.found.backward = self._origin_of_node(node, arriving, hooked)

    def _origin_of_node(self, node: Any, arriving: Any, hooked: bool) -> Origin:
        given = f"gradient arriving up to {largest(arriving):.4g}"
        if hasattr(node, "variable"):
            owner = next((n for n, p in self.system.named_parameters() if p is node.variable), "?")
            module = self.system.get_submodule(owner.rpartition(".")[0])
            return Origin("backward", self.names[module], where_of(module), f"hook on {owner}", given=given)
        module = self._module_of(node)
        op = f"hook on the result of {node.name()}" if hooked else node.name()
        # The line of the forward operation, from the traceback of anomaly mode.
        found = last_line_outside_torch("".join(node.metadata.get("traceback_", [])), (_HERE,))
        line = f"{short(found[0])}:{found[1]} {found[2]}" if found else ""
        return Origin("backward", self.names[module], where_of(module), op, line, given)

    def _module_of(self, node: Any) -> nn.Module:
        """The innermost module call that created a node, by sequence number."""
        number = node._sequence_nr()
        if node.name() == "BackwardHookFunctionBackward":
            # A module's hooks on its outputs are put there right after its forward; the function itself takes a number or two.
            for call in reversed(self.found.calls):
                hooks = call.module._backward_hooks or call.module._backward_pre_hooks
                if hooks and call.last <= number <= call.last + 2:
                    return call.module
        inside = [call for call in self.found.calls if call.first <= number < call.last]
        return min(inside, key=lambda call: call.last - call.first).module if inside else self.system


class TracingEngine(Engine):
    """An engine that can trace a step without updating anything."""

    def __init__(self, system: System, config: Config, device: torch.device) -> None:
        super().__init__(system, config, device)
        self.found: Examination | None = None
        self.tracer: Tracer | None = None
        self.replay_draws: ReplayDraws | None = None

    def examine(
        self, parts: Callable[[int], Batch], begin: Callable[[], None], replay_draws: ReplayDraws | None = None
    ) -> Examination:
        """Traces the step that `begin` sets up. Weights, buffers and random state are restored.

        With `replay_draws` it takes its noise from there, and only finds out whether the step is finite.
        """
        self.found = found = Examination()
        self.tracer, self.replay_draws = None if replay_draws else Tracer(self.system, found), replay_draws
        watching = self.tracer.watching() if self.tracer else contextlib.nullcontext()
        try:
            with self.dry_run(), watching:
                begin()
                measured = self.step(parts)
        finally:
            self.found = self.tracer = None
        found.terms = {k: float(v) for k, v in measured.items() if not k.startswith("grad_norm")}
        return found

    def _update(self, batch: Batch, part: int) -> dict[str, Tensor]:
        found = self.found
        if found is None:
            return super()._update(batch, part)
        found.batches.append({k: v.detach().clone() for k, v in batch.items()})  # the feed may use its memory again
        found.draws.append([])
        with self.replay_draws or RecordDraws(found.draws[-1]):
            return super()._update(batch, part)

    def minimize(self, loss: Tensor, name: str = "main") -> None:
        with self.tracer.paused() if self.tracer else contextlib.nullcontext():
            if self.tracer:
                self.tracer.follow(loss)
            super().minimize(loss, name)

    @torch.no_grad()
    def apply_gradients(self, name: str, optimizer: Optimizer) -> None:
        if self.found is None:
            super().apply_gradients(name, optimizer)
            return
        grads = {n: p.grad for g in optimizer.groups for n, p in g.params.items() if p.grad is not None}
        scale = float(self.scale[name]) if name in self.scale else 1.0
        self.found.norms[name] = float(total_norm(list(grads.values()))) / scale if grads else 0.0
        self.found.grads |= {n: float(g.norm()) / scale for n, g in grads.items()}
        for param in optimizer.params:
            param.grad = None


def where_of(module: nn.Module) -> str:
    """`file:line Class.forward`, or the objective's line for the system itself."""
    kind = type(module)
    if issubclass(kind, System):
        return source_line(kind.loss if kind.loss is not System.loss else kind.update)
    return source_line(kind.forward)
