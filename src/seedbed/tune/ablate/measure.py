"""One repeat of a row: build, warm up, time real steps, free. Out of memory is an outcome."""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from seedbed.config import Config
from seedbed.data.feed import Data
from seedbed.errors import UserError
from seedbed.train.engine import Engine
from seedbed.train.system import flops_per_item
from seedbed.tune.batch import free, peak_memory, reset_peak
from seedbed.tune.estimate import real_batch
from seedbed.tune.workload import Rig, Workload, num_parameters, rigged, synchronize

WARM_UP = {"cuda": 20, "mps": 5, "cpu": 3}
REPEAT_SECONDS, FEWEST, MOST = 4.0, 10, 200


@dataclass(frozen=True)
class Repeat:
    """The result of one repeat; `seconds` per timed step, `losses` from the first step on."""

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
    execution: str = ""


def measure_repeat(workload: Workload, config: Config, data_of: Callable[[Config], Data], num_steps: int) -> Repeat:
    """Measures one config; errors become outcomes."""
    start = time.perf_counter()
    free(workload)
    try:
        found = _measure(workload, config, data_of(config), num_steps)
    except UserError as problem:
        found = Repeat("not run", str(problem).splitlines()[0])
    except torch.OutOfMemoryError as error:
        found = Repeat("oom", str(error).strip().splitlines()[0][:160])
    except Exception as error:  # an outcome of the row; the traceback would keep tensors alive
        last = (str(error).strip() or "no message").splitlines()[-1]
        found = Repeat("crash", f"{type(error).__name__}: {last}"[:200])
    torch.compiler.reset()
    free(workload)
    return replace(found, total_seconds=time.perf_counter() - start)


def _measure(workload: Workload, config: Config, data: Data, num_steps: int) -> Repeat:
    device, cuda = workload.device, workload.device.type == "cuda"
    messages: list[str] = []
    engine = replace(workload, config=config, data=data).build()
    attention = attention_used(engine, data)
    reset_peak(device)
    retried = torch.cuda.memory_stats(device)["num_alloc_retries"] if cuda else 0
    with rigged(engine, data, messages.append) as rig:
        start = time.perf_counter()
        rig.load(0, 0, config.steps)  # compiles and captures
        synchronize(device)
        compiled = time.perf_counter() - start
        losses = _steps(rig, 0, WARM_UP.get(device.type, 3), [])
        synchronize(device)
        waited, timestamps = rig.feed.wait, [_timestamp(device)]
        losses += _steps(rig, len(losses), num_steps, timestamps)
        synchronize(device)
        seconds = [a.elapsed_time(b) / 1e3 if cuda else b - a for a, b in itertools.pairwise(timestamps)]
        wait = (rig.feed.wait - waited) / max(sum(seconds), 1e-9)
        execution = "; ".join([rig.runner.how, *messages])
    allocated = torch.cuda.max_memory_allocated(device) if cuda else 0
    retries = torch.cuda.memory_stats(device)["num_alloc_retries"] - retried if cuda else 0
    facts = {"num_params": num_parameters(engine.system), "flops": float(flops_per_item(engine.system))}
    memory = {"allocated": allocated, "reserved": peak_memory(device), "retries": retries}
    return Repeat("ok", "", seconds, losses, compiled, 0.0, wait, **memory, **facts, attention=attention, execution=execution)


def _steps(rig: Rig, first: int, num: int, timestamps: list[Any]) -> list[float]:
    """Trains on from step `first`; returns losses, and appends a timestamp per step where timestamps are kept."""
    losses: list[float] = []
    is_timed = bool(timestamps)
    for step in range(first, first + num):
        rig.take_step(step)
        if (result := rig.pop_result()) is not None:
            losses.append(result.loss)
        if is_timed:
            timestamps.append(_timestamp(rig.engine.device))
    while (result := rig.pop_result(lag=0)) is not None:
        losses.append(result.loss)
    return losses


def _timestamp(device: torch.device) -> Any:
    """A CUDA event in the stream, or the host clock."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def steps_per_repeat(workload: Workload) -> int:
    """The number of steps such that a repeat of the baseline times some seconds."""
    with rigged(workload.build(), workload.data, lambda text: None) as rig:
        rig.take_steps(2)
        seconds = rig.seconds_per_step(0.0, fewest=2, rounds=2)
    free(workload)
    return int(min(max(REPEAT_SECONDS / max(seconds, 1e-6), FEWEST), MOST))


class _AttentionCalls(TorchFunctionMode):
    num = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += func is F.scaled_dot_product_attention
        return func(*args, **(kwargs or {}))


class _AttentionKernels(TorchDispatchMode):
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
    """The kernel of a forward pass of one item: its name, `math` where torch has no fused one, `own` where torch is not used."""
    config, system = engine.config, engine.system
    buffers = {name: b.clone() for name, b in system.named_buffers()}
    batch = {name: tensor.to(engine.device) for name, tensor in real_batch(data, 1, config.seed).items()}
    try:
        engine.variant = system.variant(0, config.steps)
        engine.begin(0, 0.0)
        with _AttentionCalls() as asked, _AttentionKernels() as ran, engine.autocast():
            system.loss(batch, engine)
    except NotImplementedError:  # a recipe that overrides update
        return "-"
    finally:
        with torch.no_grad():
            for name, buffer in system.named_buffers():
                buffer.copy_(buffers[name])
    return "+".join(sorted(ran.names)) or ("math" if asked.num else "own")
