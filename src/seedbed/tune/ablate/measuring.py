"""One visit to a row: build it, warm it up, time real steps, and give everything back. Running out of memory is an outcome."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from seedbed.config import Config
from seedbed.data.feed import Data, Feed
from seedbed.errors import UserError
from seedbed.train.engine import Engine
from seedbed.tune.batch import free, peak_memory, reset_peak
from seedbed.tune.bench import Bench, Rig, num_parameters, rigged, synchronize

WARM_UP = {"cuda": 20, "mps": 5, "cpu": 3}
VISIT_SECONDS, FEWEST, MOST = 4.0, 10, 200


@dataclass(frozen=True)
class Visit:
    """What was seen in one visit; `seconds` and `losses` have a value per timed step, losses from the very first on."""

    outcome: str
    why: str = ""
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    compile_seconds: float = 0.0
    total_seconds: float = 0.0
    wait: float = 0.0
    allocated: int = 0
    reserved: int = 0
    retries: int = 0
    num_params: int = 0
    flops: float = 0.0
    attention: str = ""
    how: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def visit(bench: Bench, config: Config, data_of: Callable[[Config], Data], num_steps: int) -> Visit:
    """Measure one config, whatever comes of it."""
    start = time.perf_counter()
    free(bench)
    try:
        found = _measure(bench, config, data_of(config), num_steps)
    except UserError as problem:
        found = Visit("not run", str(problem).splitlines()[0])
    except torch.OutOfMemoryError as error:
        found = Visit("oom", str(error).strip().splitlines()[0][:160])
    except Exception as error:  # a row of the report, not its end; the traceback would hold on to the tensors
        last = (str(error).strip() or "no message").splitlines()[-1]
        found = Visit("crash", f"{type(error).__name__}: {last}"[:200])
    torch.compiler.reset()
    gc.collect()
    free(bench)
    return replace(found, total_seconds=time.perf_counter() - start)


def _measure(bench: Bench, config: Config, data: Data, num_steps: int) -> Visit:
    device = bench.device
    bench = Bench(bench.name, bench.recipe, config, data, device)
    said: list[str] = []
    engine = bench.build()
    attention = attention_used(engine, data)
    reset_peak(device)
    retried = torch.cuda.memory_stats(device)["num_alloc_retries"] if device.type == "cuda" else 0
    with rigged(engine, data, said.append) as rig:
        compiled = _prepare(rig)
        losses = _steps(rig, 0, WARM_UP.get(device.type, 3), [])
        synchronize(device)
        waited, ticks = rig.feed.wait, [_tick(device)]
        losses += _steps(rig, len(losses), num_steps, ticks)
        seconds = _between(ticks, device)
        wait = (rig.feed.wait - waited) / max(sum(seconds), 1e-9)
        how = "; ".join([rig.runner.how, *said])
    cuda = device.type == "cuda"
    allocated = torch.cuda.max_memory_allocated(device) if cuda else 0
    retries = torch.cuda.memory_stats(device)["num_alloc_retries"] - retried if cuda else 0
    facts = {"num_params": num_parameters(engine.system), "flops": float(engine.system.flops_per_item())}
    memory = {"allocated": allocated, "reserved": peak_memory(device), "retries": retries}
    return Visit("ok", "", seconds, losses, compiled, 0.0, wait, **memory, **facts, attention=attention, how=how)


def _prepare(rig: Rig) -> float:
    """Seconds to compile and capture, before the first step."""
    start = time.perf_counter()
    rig.load(0, 0)
    synchronize(rig.engine.device)
    return time.perf_counter() - start


def _steps(rig: Rig, first: int, num: int, ticks: list[Any]) -> list[float]:
    """Train on from step `first`; losses in order, and a tick of the clock after every step where ticks are kept."""
    losses: list[float] = []
    batch, device, counting = rig.engine.config.batch, rig.engine.device, bool(ticks)
    for step in range(first, first + num):
        rig.step(step, step * batch)
        if (measured := rig.read()) is not None:
            losses.append(measured["loss"])
        if counting:
            ticks.append(_tick(device))
    while (measured := rig.read(leave=0)) is not None:
        losses.append(measured["loss"])
    return losses


def _tick(device: torch.device) -> Any:
    """A moment: in the stream where there is one, since the host runs ahead of it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(ticks: list[Any], device: torch.device) -> list[float]:
    synchronize(device)
    return [a.elapsed_time(b) / 1e3 if device.type == "cuda" else b - a for a, b in itertools.pairwise(ticks)]


def steps_per_visit(bench: Bench) -> int:
    """So many that a visit to the baseline times some seconds of it."""
    with rigged(bench.build(), bench.data, lambda text: None) as rig:
        rig.take_steps(2)
        seconds = rig.seconds_per_step(0.0, fewest=2, rounds=2)
    free(bench)
    return int(min(max(VISIT_SECONDS / max(seconds, 1e-6), FEWEST), MOST))


# ---- which attention ran -----------------------------------------------------------------------------------------------


class _Asked(TorchFunctionMode):
    """Whether anybody calls torch's attention at all."""

    num = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += func is F.scaled_dot_product_attention
        return func(*args, **(kwargs or {}))


class _Ran(TorchDispatchMode):
    """The fused attention kernels that really run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if "scaled_dot_product" in name:
            self.names.add(next((kind for kind in ("cudnn", "flash", "efficient") if kind in name), name))
        elif "narrow_attention" in name:
            self.names.add("narrow")
        return func(*args, **(kwargs or {}))


def attention_used(engine: Engine, data: Data) -> str:
    """The kernel behind a forward pass of one item: its name, `math` where torch has no fused one, `own` where nobody asks it."""
    config, system = engine.config, engine.system
    buffers = {name: b.clone() for name, b in system.named_buffers()}
    feed = Feed(data.train, batch=1, parts=1, seed=config.seed, device=engine.device)
    try:
        feed.load(0)
        engine.variant = system.variant(0, config.steps)
        engine.begin(0, 0.0)
        with _Asked() as asked, _Ran() as ran, engine.autocast():
            system.loss(feed.part(0), engine)
    except NotImplementedError:  # a recipe with an update of its own
        return "-"
    finally:
        feed.close()
        with torch.no_grad():
            for name, buffer in system.named_buffers():
                buffer.copy_(buffers[name])
    return "+".join(sorted(ran.names)) or ("math" if asked.num else "own")
