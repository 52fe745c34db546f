"""One step as one call: compiled where asked, captured as one CUDA graph per variant where possible, eager otherwise."""

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from seedbed.train.oom import is_out_of_memory
from seedbed.train.stepper import EagerRunner
from seedbed.train.system import System

if TYPE_CHECKING:
    from seedbed.train.protocols import Parts, Steps

NUM_WARMUPS = 3


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
    mode = system.auto_compile if mode == "auto" else mode
    return {"off": [], "blocks": list(system.compile_units()), "whole": list(system.children())}[mode]


class StepRunner(EagerRunner):
    """Calls the engine's step in the fastest way that works, and says which one that was."""

    def __init__(self, engine: "Steps", feed: "Parts", say: Callable[[str], None]) -> None:
        super().__init__(engine, feed, say)
        if engine.compiled:
            _load_compiler(say)
        self.mode = engine.config.compile
        # With several ranks steps are not timed before they are compiled, and on a CPU compiling is seldom worth it.
        self.is_undecided = self.mode == "auto" and engine.device.type == "cuda" and not engine.config.dist.is_distributed
        if self.mode == "auto":
            self.mode = "off" if self.is_undecided or engine.device.type != "cuda" else engine.system.auto_compile
        if self.mode == "whole" and engine.config.dist.is_sharded:
            self.mode = "blocks"  # weights are gathered between them, which no compiled code can do
        self.units = compile_system(engine.system, self.mode, say)
        self.side: torch.cuda.Stream | None = None

    def __call__(self) -> Tensor:
        """Run the loaded step; returns its measurements as one tensor, in the order of `names`."""
        if self.why_not:
            return super().__call__()
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
        super().forget()
        self.graphs.clear()

    def _dry_run(self) -> None:
        with self.engine.dry_run():
            if self.engine.device.type != "cuda":
                super().__call__()
                return
            # One stream for all dry runs: cuBLAS keeps a workspace of tens of megabytes for every stream it was used on.
            self.side = self.side or torch.cuda.Stream()
            self.side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.side):
                for _ in range(NUM_WARMUPS):
                    super().__call__()
            torch.cuda.current_stream().wait_stream(self.side)
            torch.cuda.synchronize()

    def _capture(self, variant: Hashable) -> None:
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self.graphs.values()))[0].pool() if self.graphs else None
        generator = torch.cuda.default_generators[self.engine.device.index]
        rng = generator.clone_state()
        try:
            # Another thread may copy a checkpoint or a batch meanwhile.
            with self.engine.dry_run(), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                vector = super().__call__()
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
        for unit in self.units:
            unit._compiled_call_impl = None
        self.units = []
        self.engine.compiled.clear()
        torch.compiler.reset()
        self.say(f"compile failed and the run goes on eager: {_first_line(error)}")
        self._dry_run()


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:200]
