"""One step as one call: compiled where asked, captured as one CUDA graph per variant where possible, eager otherwise.

Measurements leave the device as one small vector that is read a step later, so that the host never waits for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from seedbed.train.oom import is_out_of_memory

if TYPE_CHECKING:
    from seedbed.config import Config
    from seedbed.train.system import Batch, System

NUM_WARMUPS = 3


class Parts(Protocol):
    """Where a step's data comes from: a Feed, or the counters of many runs."""

    def part(self, k: int) -> Batch: ...


class Steps(Protocol):
    """What takes the steps: one run's Engine, or the Stack of many. Measurements have the shape of `halted`."""

    system: System
    config: Config
    device: torch.device
    variant: Hashable
    lr_factor: Tensor
    halted: Tensor
    compiled: set[str]

    def step(self, parts: Callable[[int], Batch]) -> dict[str, Tensor]: ...
    def dry_run(self) -> AbstractContextManager[None]: ...


def compile_system(system: System, mode: str, say: Callable[[str], None] = print) -> list[nn.Module]:
    """Compile in place, so that parameter names stay as they are; returns the compiled modules."""
    if mode != "off":
        _load_compiler(say)
    units = units_to_compile(system, mode)
    for unit in units:
        unit.compile(dynamic=False, options=dict(system.compile_options) or None)
    return units


def _load_compiler(say: Callable[[str], None]) -> None:
    from seedbed.train import compile_cache

    compile_cache.enable(say)
    torch.compiler.reset()  # an earlier system in this process must not count towards the limit of recompilations


def units_to_compile(system: System, mode: str) -> list[nn.Module]:
    """The modules that a mode of `compile` compiles."""
    mode = system.auto_compile if mode == "auto" else mode
    return {"off": [], "blocks": list(system.compile_units()), "whole": list(system.children())}[mode]


class StepRunner:
    """Calls the engine's step in the fastest way that works, and says which one that was."""

    def __init__(self, engine: Steps, feed: Parts, say: Callable[[str], None]) -> None:
        self.engine, self.feed, self.say = engine, feed, say
        if engine.compiled:
            _load_compiler(say)
        self.mode = engine.config.compile
        # With several ranks steps are not timed before they are compiled, and on a CPU compiling is seldom worth it.
        self.is_undecided = self.mode == "auto" and engine.device.type == "cuda" and engine.config.dist.world == 1
        if self.mode == "auto":
            self.mode = "off" if self.is_undecided or engine.device.type != "cuda" else engine.system.auto_compile
        if self.mode == "whole" and engine.config.dist.shard > 1:
            self.mode = "blocks"  # weights are gathered between them, which no compiled code can do
        self.units = compile_system(engine.system, self.mode, say)
        self.graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.names: list[str] = []
        self.why_not = self._why_not_captured()
        self.ready: set[Hashable] = set()
        self.side: torch.cuda.Stream | None = None

    @property
    def how(self) -> str:
        """In words, for the run's header: how a step runs."""
        compiled = f"compiled ({', '.join(self._compiled())})" if self._compiled() else "eager"
        compiled += self._further()
        return f"{compiled}, captured as one CUDA graph" if not self.why_not else f"{compiled}, not captured: {self.why_not}"

    def _compiled(self) -> list[str]:
        return [*([self.mode] if self.units else []), *sorted(self.engine.compiled)]

    def _further(self) -> str:
        """What else is not plain about a step."""
        config, found = self.engine.config, ""
        if config.remat != "none":
            found += f", {config.remat} remat"
        if config.float8:
            from seedbed.train.float8 import num_float8

            found += f", float8: {num_float8(self.engine.system)} layers converted"
        return found

    def __call__(self) -> Tensor:
        """Run the loaded step; returns its measurements as one tensor, in the order of `names`."""
        if self.why_not:
            return self._body()
        graph, vector = self.graphs[self.engine.variant]
        graph.replay()
        return vector

    def prepare(self) -> None:
        """Compile and capture for the engine's present variant, changing nothing."""
        variant = self.engine.variant
        if variant in self.ready:
            return
        self.ready.add(variant)
        if not self._compiled() and self.why_not:
            return
        try:
            self._dry_run()
        except Exception as error:
            if not self._compiled() or is_out_of_memory(error):
                raise
            self._compile_again(error)
        if not self.why_not:
            self._capture(variant)

    def settle(self, mode: str) -> None:
        """Apply the decision of `compile=auto`; prepared steps are prepared again if they are to be compiled."""
        self.is_undecided, self.mode = False, mode
        if mode != "off":
            self.forget()
            self.units = compile_system(self.engine.system, mode, self.say)

    def forget(self) -> None:
        """Release every captured step and its memory: the next step is captured again."""
        self.graphs.clear()
        self.ready.clear()
        self.why_not = self._why_not_captured()

    def _dry_run(self) -> None:
        with self.engine.dry_run():
            if self.engine.device.type != "cuda":
                self._body()
                return
            # One stream for all dry runs: cuBLAS keeps a workspace of tens of megabytes for every stream it was used on.
            self.side = self.side or torch.cuda.Stream()
            self.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.side):
                for _ in range(NUM_WARMUPS):
                    self._body()
            torch.cuda.current_stream().wait_stream(self.side)
            torch.cuda.synchronize()

    def _capture(self, variant: Hashable) -> None:
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self.graphs.values()))[0].pool() if self.graphs else None
        generator = torch.cuda.default_generators[self.engine.device.index]
        rng = generator.clone_state()
        try:
            with self.engine.dry_run(), torch.cuda.graph(graph, pool=pool):
                vector = self._body()
        except Exception as error:
            self.why_not = _first_line(error)
            self.graphs.clear()
            torch.cuda.synchronize()
            generator.graphsafe_set_state(rng)  # the old generator state would stay marked as being captured
            if is_out_of_memory(error):
                raise
            self.say(f"the step could not be captured and runs uncaptured: {self.why_not}")
            return
        self.graphs[variant] = (graph, vector)

    def _body(self) -> Tensor:
        measured = self.engine.step(self.feed.part)
        measured["lr_factor"], measured["halted"] = self.engine.lr_factor, self.engine.halted
        self.names = list(measured)
        shape = self.engine.halted.shape
        return torch.stack([v.detach().float().reshape(shape) for v in measured.values()])

    def _why_not_captured(self) -> str:
        if self.engine.device.type != "cuda":
            return f"no CUDA graphs on {self.engine.device.type}"
        if self.engine.config.dist.world > 1:
            return "several ranks take it together"
        return "capture=off" if self.engine.config.capture == "off" else ""

    def _compile_again(self, error: Exception) -> None:
        """After a failure: into another folder where the disk was the reason, and not at all otherwise."""
        from seedbed.train import compile_cache

        if compile_cache.is_disk_error(error):
            torch.compiler.reset()
            compile_cache.use_temporary_folder(f"it could not be written ({_first_line(error)})", self.say)
            try:
                return self._dry_run()
            except Exception as second:
                error = second
        self._give_up_compiling(error)
        self._dry_run()

    def _give_up_compiling(self, error: Exception) -> None:
        for unit in self.units:
            unit._compiled_call_impl = None
        self.units = []
        self.engine.compiled.clear()
        torch.compiler.reset()
        self.say(f"compile failed and the run goes on eager: {_first_line(error)}")


class Readback:
    """A short queue of measurement vectors on their way to the host."""

    def __init__(self, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"
        self.queue: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()

    def push(self, step: int, vector: Tensor) -> None:
        event = None
        if self.on_cuda:
            host = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)
            vector = host.copy_(vector, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self.queue.append((step, vector, event))

    def pop(self, leave: int) -> tuple[int, list[Any]] | None:
        """The oldest measurements, once more than `leave` are under way."""
        if len(self.queue) <= leave:
            return None
        step, vector, event = self.queue.popleft()
        if event:
            event.synchronize()
        return step, vector.tolist()

    def drop(self) -> None:
        self.queue.clear()


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:200]
