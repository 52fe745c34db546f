"""profile: the time of a step by phase, by operation and by kind of work, with a Perfetto trace."""

import contextlib
import json
import os
import statistics
import time
import timeit
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile

from seedbed.config import Config
from seedbed.errors import UserError
from seedbed.report.verdict import ATTENTION, MATMUL, MEMORY, Setup, Shares, Verdict, judge
from seedbed.train.engine import Engine
from seedbed.train.system import Batch, System
from seedbed.tune.workload import Rig, Workload, rigged, synchronize

PHASES = ("data", "transfer", "forward", "backward", "optimizer")
NUM_OPS = 12
TRACED_STEPS, ROUNDS = 3, 5
_MARK, _STEP = "phase:", "whole step"

_ATTENTION = ("attention", "flash", "fmha", "sdpa")
_MATMUL = ("gemm", "gemv", "matmul", "cutlass", "nvjet", "wgmma", "conv", "addmm", "baddbmm", "aten::mm", "aten::bmm", "mkldnn")


def kind_of_work(name: str) -> str:
    """Attention, matmul, or memory traffic for everything else."""
    low = name.lower()
    if any(word in low for word in _ATTENTION):
        return ATTENTION
    return MATMUL if any(word in low for word in _MATMUL) else MEMORY


class Phases:
    """Attributes time to the innermost phase: host clock, and on CUDA also events in the stream."""

    def __init__(self, device: torch.device) -> None:
        self.cuda, self.device = device.type == "cuda", device
        self.stack: list[str] = []
        self.marks: list[tuple[str, float, Any]] = []
        self.on = False

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if not self.on:
            yield
            return
        self.stack.append(name)
        self._mark(name)
        try:
            with record_function(_MARK + name):
                yield
        finally:
            self.stack.pop()
            self._mark(self.stack[-1] if self.stack else "")

    def _mark(self, name: str) -> None:
        if self.device.type == "mps":
            synchronize(self.device)  # no events there: the host clock needs a synchronisation
        event = torch.cuda.Event(enable_timing=True) if self.cuda else None
        if event:
            event.record()
        self.marks.append((name, time.perf_counter(), event))

    def take(self) -> tuple[dict[str, float], dict[str, float]]:
        """Seconds per phase since the last call, on the host and (CUDA only) in the stream; synchronises."""
        synchronize(self.device)
        host: dict[str, float] = {name: 0.0 for name in PHASES}
        stream = dict(host)
        for (name, start, begun), (_, end, ended) in zip(self.marks, self.marks[1:], strict=False):
            if name:
                host[name] += end - start
                stream[name] += begun.elapsed_time(ended) / 1e3 if begun else 0.0
        self.marks = []
        return host, stream if self.cuda else {}


class TimedEngine(Engine):
    """An engine that times its phases. What is not the system's work (clipping, EMA) counts as optimizer."""

    def __init__(self, system: System, config: Config, device: torch.device) -> None:
        super().__init__(system, config, device)
        self.phases = Phases(device)

    def step(self, parts: Callable[[int], Batch]) -> dict[str, torch.Tensor]:
        def timed(k: int) -> Batch:
            with self.phases("transfer"):
                return parts(k)

        with self.phases("optimizer"):
            return super().step(timed)

    def _update(self, batch: Batch, part: int) -> dict[str, torch.Tensor]:
        with self.phases("forward"):
            return super()._update(batch, part)

    def minimize(self, loss: torch.Tensor, name: str = "main") -> None:
        with self.phases("backward"):
            super().minimize(loss, name)

    def apply_gradients(self, name: str, optimizer: Any) -> None:
        with self.phases("optimizer"):
            super().apply_gradients(name, optimizer)


@dataclass(frozen=True)
class Work:
    """A trace per step: busy seconds by kind of work and by phase, and the most expensive operations."""

    kinds: dict[str, float]
    phases: dict[str, float]
    ops: list[dict[str, Any]]
    num_ops: float

    @property
    def busy(self) -> float:
        return sum(self.kinds.values())


@dataclass(frozen=True)
class Profile:
    """The result of profile; times in seconds per step."""

    device: str
    execution: str
    seconds: float
    uncaptured: float
    items_per_s: float
    phases: list[dict[str, Any]]
    work: Work
    per_op: float
    shares: Shares
    verdict: Verdict
    trace: str

    def to_json(self) -> dict[str, Any]:
        verdict = {"bound": self.verdict.bound, "text": self.verdict.text, "help": list(self.verdict.help)}
        return {**asdict(self), "verdict": verdict}


def run(workload: Workload, folder: Path, *, num_steps: int = 20, tick: Callable[[str], None] = lambda text: None) -> Profile:
    """Times steps as a run takes them, then the same steps uncaptured by phase and under the profiler."""
    if num_steps < 5:
        raise UserError(f"steps={num_steps} is too few to time; use at least 5")
    on_host = workload.device.type != "cuda"
    engine = workload.build(make=TimedEngine)
    with rigged(engine, workload.data, lambda text: None) as rig:
        tick("warming up")
        rig.take_steps(3)
        tick("timing steps as a run takes them")
        waited = rig.feed.wait
        seconds = rig.seconds_per_step(0.0, fewest=-(-num_steps // ROUNDS), rounds=ROUNDS)
        wait = (rig.feed.wait - waited) / (ROUNDS * -(-num_steps // ROUNDS))
        tick("timing the phases")
        uncaptured, host, stream = time_phases(rig, engine.phases, num_steps)
        tick("tracing operations")
        trace = folder / "trace.json"
        work = trace_steps(rig, engine.phases, trace)
        per_op = seconds_per_op() if on_host else 0.0
        runner, execution = rig.runner, rig.runner.how
        setup = Setup(workload.device.type, workload.config.precision, bool(runner.units), not runner.why_not, rig.feed.tier)
    shares = host_shares(uncaptured, host, work, per_op) if on_host else device_shares(seconds, wait, work)
    parts = {**host, "host gap": max(uncaptured - sum(host.values()), 0.0)}
    rows = [{"phase": name, "ms": 1e3 * s, "share": s / uncaptured} for name, s in parts.items()]
    rows = rows if on_host else device_rows(seconds, wait, host, stream, work)
    rate = workload.config.batch / seconds
    return Profile(
        str(workload.device), execution, seconds, uncaptured, rate, rows, work, per_op, shares, judge(shares, setup), str(trace)
    )


def time_phases(rig: Rig, phases: Phases, num_steps: int) -> tuple[float, dict[str, float], dict[str, float]]:
    """Seconds of an uncaptured step, and of its phases on the host and in the stream."""
    for step in range(2):
        _one_step(rig, phases, step)
    synchronize(phases.device)
    phases.on = True
    rows = []
    for step in range(num_steps):
        start = time.perf_counter()
        _one_step(rig, phases, step)
        synchronize(phases.device)
        rows.append((time.perf_counter() - start, *phases.take()))
    phases.on = False
    # The middle third by length, so that other load on this machine is excluded.
    rows = sorted(rows, key=lambda row: row[0])[num_steps // 3 : num_steps - num_steps // 3]
    return statistics.fmean(row[0] for row in rows), _mean([row[1] for row in rows]), _mean([row[2] for row in rows])


def _mean(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.fmean(row[name] for row in rows) for name in rows[0]}


def _one_step(rig: Rig, phases: Phases, step: int) -> None:
    engine = rig.engine
    with phases("data"):
        rig.load(step, step * engine.config.batch, engine.config.steps)
    engine.begin(step, rig.progress(step))
    engine.step(rig.feed.part)


def trace_steps(rig: Rig, phases: Phases, path: Path) -> Work:
    """A few steps under the torch profiler: writes the trace and returns its summary."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if phases.cuda else [])
    phases.on = True
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # it would print to stderr
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the profiler warns about its own set-up
        with torch_profile(activities=activities) as profiler:
            for step in range(TRACED_STEPS):
                with record_function(_STEP):
                    _one_step(rig, phases, step)
            synchronize(phases.device)
        phases.on = False
        phases.take()
        profiler.export_chrome_trace(str(path))
        ops = top_ops(profiler.key_averages(), phases.cuda, bool(rig.runner.units))
    return read_trace(json.loads(path.read_text())["traceEvents"], ops, TRACED_STEPS, phases.cuda)


def top_ops(averages: Any, cuda: bool, compiled: bool) -> list[dict[str, Any]]:
    """The operations with the largest self time; kernels where operations are compiled."""
    side = DeviceType.CUDA if cuda and compiled else DeviceType.CPU

    def own(entry: Any) -> float:
        return entry.self_device_time_total if cuda else entry.self_cpu_time_total

    entries = [e for e in averages if own(e) > 0 and e.device_type == side and not e.key.startswith((_MARK, _STEP))]
    total = sum(map(own, entries)) or 1.0
    entries.sort(key=own, reverse=True)
    return [
        {"op": e.key, "ms": own(e) / 1e3 / TRACED_STEPS, "share": own(e) / total, "calls": e.count / TRACED_STEPS}
        for e in entries[:NUM_OPS]
    ]


def read_trace(events: list[dict[str, Any]], ops: list[dict[str, Any]], num_steps: int, cuda: bool) -> Work:
    """Work of a trace by kind and by phase: kernels on CUDA, self time of operations on a CPU."""
    spans = [
        (e["ts"], e["ts"] + e["dur"], e["name"].removeprefix(_MARK))
        for e in events
        if e.get("cat") == "user_annotation" and e["name"].startswith(_MARK)
    ]
    found = list(kernels(events) if cuda else host_ops(events))
    kinds: dict[str, float] = {kind: 0.0 for kind in (MATMUL, ATTENTION, MEMORY)}
    phases: dict[str, float] = defaultdict(float)
    for name, when, duration, _ in found:
        kinds[kind_of_work(name)] += duration / 1e6 / num_steps
        around = [(start, phase) for start, end, phase in spans if start <= when < end]
        _, innermost = max(around, default=(0.0, "optimizer"))  # the phase that began last
        phases[innermost] += duration / 1e6 / num_steps
    return Work(kinds, {n: phases[n] for n in PHASES}, ops, sum(leaf for *_, leaf in found) / num_steps)


def kernels(events: list[dict[str, Any]]) -> Iterator[tuple[str, float, float, bool]]:
    """Name, launch time on the host, and duration (both in microseconds) of everything that ran on the GPU."""
    launches = {
        e["args"]["correlation"]: e["ts"]
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    for e in events:
        if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            yield e["name"], launches.get(e["args"].get("correlation"), e["ts"]), e["dur"], True


def host_ops(events: list[dict[str, Any]]) -> Iterator[tuple[str, float, float, bool]]:
    """Name, start, self time (in microseconds) of every CPU operation, and whether it is a leaf."""
    by_thread = defaultdict(list)
    for e in events:
        if e.get("cat") == "cpu_op":
            by_thread[e["tid"]].append([e["ts"], e["ts"] + e["dur"], e["name"], e["dur"], True])
    for ops in by_thread.values():
        ops.sort(key=lambda op: (op[0], -op[1]))
        open_ops: list[list[Any]] = []
        for op in ops:
            while open_ops and open_ops[-1][1] <= op[0]:
                open_ops.pop()
            if open_ops:
                open_ops[-1][3] -= op[3]
                open_ops[-1][4] = False
            open_ops.append(op)
        yield from ((name, start, max(own, 0.0), leaf) for start, _, name, own, leaf in ops)


def seconds_per_op() -> float:
    """Host overhead of one operation: the best of some rounds on a tensor of one number."""
    x = torch.zeros(1, requires_grad=True)
    return min(timeit.repeat("x.add(1.0)", repeat=20, number=200, globals={"x": x})) / 200


def host_shares(seconds: float, host: dict[str, float], work: Work, per_op: float) -> Shares:
    """Shares on a CPU, where the overhead of an operation counts as launching."""
    data = host["data"] + host["transfer"]
    unnamed = max(seconds - sum(host.values()), 0.0)
    gap = min(unnamed + work.num_ops * per_op, seconds - data)
    return _shares(seconds, data, gap, work.kinds)


def device_shares(seconds: float, wait: float, work: Work) -> Shares:
    """Shares on a device: data is the wait of the host, other idle time is launches."""
    return _shares(seconds, min(wait, seconds), max(seconds - work.busy - wait, 0.0), work.kinds)


def _shares(seconds: float, data: float, gap: float, kinds: dict[str, float]) -> Shares:
    scale = max(seconds - data - gap, 0.0) / (sum(kinds.values()) or 1.0) / seconds
    return Shares(data / seconds, gap / seconds, *(kinds[k] * scale for k in (MATMUL, ATTENTION, MEMORY)))


def device_rows(
    seconds: float, wait: float, host: dict[str, float], stream: dict[str, float], work: Work
) -> list[dict[str, Any]]:
    """The phases of a step on a device: host time, stream time by events, and kernel time.

    Shares are of the step as a run takes it and add up: data by waiting, phases by kernels, and the remaining gap.
    """
    rows = []
    for name in PHASES:
        busy = wait if name == "data" else work.phases[name]
        figures = {"ms": 1e3 * busy, "host_ms": 1e3 * host[name], "stream_ms": 1e3 * stream.get(name, 0.0)}
        rows.append({"phase": name, **figures, "share": busy / seconds})
    gap = max(seconds - wait - work.busy, 0.0)
    return [*rows, {"phase": "host gap", "ms": 1e3 * gap, "share": gap / seconds}]
