"""`compile=auto`: compile only when that saves more time in the rest of the run than it takes.

Eager steps are timed once per config and machine; later starts know their time and are compiled at once.
"""

import contextlib
import json
import time
from pathlib import Path

from torch import nn

from seedbed import config as configs
from seedbed.track.files import write_atomic
from seedbed.train import budget, compile_cache
from seedbed.train.capture import units_to_compile
from seedbed.train.job import Job

# Captured steps on an H200, eager over compiled: 1.2 for flow on CIFAR-10, 1.7 for gpt/shakespeare, 2.7 for world/box64.
SPEED_UP = 1.5
# First preparations there: gpt/shakespeare 14 s for 50 layers, world/box64 79 s for 67. Cached ones: 6 and 7 s.
SECONDS_PER_LAYER, CACHED = 0.7, 0.25
# Seconds over which eager steps are timed.
TIMED = 0.5
# What does not change compiled code.
_IRRELEVANT = ("steps=1", "seed=1", "keep=1", "budget=none", "every.log=1", "every.eval=0", "every.sample=0", "every.save=0")


def decide(job: Job) -> None:
    """Compile if that pays in the rest of the run, and prepare the step; the decision is stored and reported."""
    seconds = _known().get(_key(job), {}).get("step", 0.0)
    if not seconds and not job.config.budget:  # with a budget they do not matter
        job.stepper.runner.prepare()
        seconds = budget.time_steps(job, TIMED)
    rest = job.config.budget or (job.num_steps - job.step) * seconds
    saved = rest if job.config.budget else rest * (1.0 - 1.0 / SPEED_UP)  # a budget buys more steps in the same time
    cost = expected_seconds(job)
    mode = job.system.auto_compile if saved > cost else "off"
    what = f"compiling takes about {cost:.0f} s and would save about {saved:.0f} of {rest:.0f} s"
    job.console.line(f"compile=auto: {mode}; {what}")
    job.run.event(job.step, "compile", mode=mode, expected_seconds=cost, expected_saving=saved)
    job.stepper.runner.settle(mode)
    start = time.perf_counter()
    job.stepper.runner.prepare()
    if mode != "off":
        remember(job, time.perf_counter() - start, seconds)


def expected_seconds(job: Job) -> float:
    """How long compiling will take: a share of the first time on this machine, or estimated by the number of layers."""
    known = _known().get(_key(job))
    if known:
        return CACHED * known["compile"]
    units = {_shape(unit): unit for unit in units_to_compile(job.system, job.system.auto_compile)}
    return SECONDS_PER_LAYER * sum(not list(module.children()) for unit in units.values() for module in unit.modules())


def remember(job: Job, compile_seconds: float, step_seconds: float) -> None:
    """Store how long the first compilation and an eager step took; a disk that cannot be written is ignored."""
    known, key = _known(), _key(job)
    first = known.get(key, {"compile": compile_seconds})
    with contextlib.suppress(OSError):
        write_atomic(_path(), json.dumps({**known, key: {**first, "step": step_seconds or first.get("step", 0.0)}}))


def _known() -> dict[str, dict[str, float]]:
    try:
        found = json.loads(_path().read_text(encoding="utf-8"))
        return {str(k): {"compile": float(v["compile"]), "step": float(v["step"])} for k, v in found.items()}
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        return {}


def _path() -> Path:
    return compile_cache.folder() / "seconds.json"


def _key(job: Job) -> str:
    """Runs with the same key compile the same code."""
    return configs.digest(configs.override(job.config, list(_IRRELEVANT)))


def _shape(unit: nn.Module) -> tuple[type, tuple[tuple[int, ...], ...]]:
    """Equal blocks are compiled once."""
    return type(unit), tuple(tuple(p.shape) for p in unit.parameters())
