"""The words of the watchers' alarms: what was seen, where, why it matters and what to do. Loaded when one is raised."""

import gc
import sys
from collections import Counter
from collections.abc import Callable

from torch import Tensor

from seedbed.data.feed import Feed
from seedbed.train.memory_growth import Levels
from seedbed.train.watch import MEGA, Alarm, Point


def data_wait(feed: Feed, steps: int, share: float, wait: float) -> Alarm:
    fix = {
        "device": "make the source's `locate` and rows cheaper; `seedbed profile` shows the phases",
        "generated": "make the source's `batch` cheaper; `seedbed profile` shows the phases",
        "memory-map": "put the data on a faster disk, store it in a narrower dtype, or free memory so that it fits",
    }
    return Alarm(
        "data_wait",
        f"waiting for data took {share:.0%} of the last {steps} steps, {1e3 * wait:.1f} ms a step (limit 10 %)",
        f"{type(feed.source).__name__}, {feed.describe()}",
        "the device idles while the source is read, and the run takes longer than necessary",
        fix[feed.tier],
        {"share": round(share, 4)},
    )


def host_leak(levels: Levels, slope: float, grown: float, point: Point) -> Alarm:
    projected = slope * max(point.last_step - point.step, 0)
    what = f"host memory grows by {1000 * slope / MEGA:.0f} MB per 1,000 steps ({grown / MEGA:.0f} MB seen)"
    fix = "store plain numbers (`.item()` at log points, never tensors) and bound every list that grows"
    share = projected / _available()
    end = f", {share:.0%} of what is free, and may be killed for it" if share >= 0.1 else ""
    why = f"neither garbage nor free memory, and at this rate {projected / MEGA:,.0f} MB more before the run ends{end}"
    facts = {"mb_per_1000_steps": round(1000 * slope / MEGA, 1), "mb_after_sweeps": levels.in_mega()}
    return Alarm("host_leak", what, _growing_type(), why, fix, facts)


def device_leak(levels: Levels, slope: float, grown: float, point: Point) -> Alarm:
    what = f"GPU memory between steps grows by {200 * slope / MEGA:.1f} MB per 200 steps ({grown / MEGA:.1f} MB seen)"
    why = "something keeps tensors of past steps alive; the run will end out of memory"
    fix = "detach what is kept across steps (`x.detach()`), and keep numbers, not tensors"
    facts = {"mb_per_200_steps": round(200 * slope / MEGA, 2), "mb_after_sweeps": levels.in_mega()}
    return Alarm("device_leak", what, _growing_type(), why, fix, facts)


def _available() -> float:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return next(float(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return float("inf")


def _growing_type() -> str:
    """The most frequent type of object created since training began; older objects are frozen and not listed."""
    new = gc.get_objects()
    tensors = [x for x in new if type(x) is Tensor]
    if len(tensors) > 100:
        size = sum(t.numel() * t.element_size() for t in tensors)
        shape = Counter(tuple(t.shape) for t in tensors).most_common(1)[0][0]
        return f"{len(tensors):,} tensors made since the start are alive ({size / MEGA:.0f} MB, most of shape {shape})"
    kind, count = Counter(type(x).__name__ for x in new).most_common(1)[0]
    return f"{count:,} objects of type {kind} made since the start are alive, {sys.getallocatedblocks():,} blocks in all"


def schedule(step: int, kind: str, group: str, used: float, meant: float) -> Alarm:
    return Alarm(
        "schedule",
        f"step {step} used a learning rate of {used:.4g} in group {group}, the schedule says {meant:.4g}",
        "train/engine.py Engine.begin, train/optim.py multiplier",
        f"schedule={kind} is declared, another schedule is used",
        "set rates only through the config; a recipe must not write to the optimizer's groups",
        {"used": used, "meant": meant},
    )


def unused(step: int, names: list[str], num_all: int) -> Alarm:
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return Alarm(
        "unused",
        f"{len(names)} of {num_all} parameters have had no gradient in {step} steps: {shown}",
        names[0],
        "they keep their initial values: dead code, a detached branch, or a layer that the loss does not reach",
        "connect them, remove them, or freeze them on purpose with requires_grad_(False)",
        {"parameters": names},
    )


def dead(name: str) -> Alarm:
    what = "has had no gradient for many steps, while the rest of the model still learns"
    why = "it learned before and no longer does: saturated or dead units, or a branch that was cut off"
    fix = "look at its activations with `seedbed replay`; lower the learning rate or change the activation"
    return Alarm("dead", f"{name} {what}", name, why, fix)


def exploding(name: str, rms: float, before: float) -> Alarm:
    what = f"the weights of {name} have an rms of {rms:.3g}, {before:.3g} at the start"
    why = "weights this large saturate what follows and make the next spike or overflow likely"
    fix = "lower optim.lr, raise optim.weight_decay, or normalise the input of that layer"
    return Alarm("exploding", what, name, why, fix, {"rms": rms, "before": before})


def stuck_eval(num: int, numbers: dict[str, float]) -> Alarm:
    shown = ", ".join(f"{k} {v:.6g}" for k, v in numbers.items())
    return Alarm(
        "stuck_eval",
        f"{num} evaluations in a row gave the same numbers to the last bit: {shown}",
        "System.evaluate",
        "the weights have changed and the metrics have not: they are stale, or do not depend on the model",
        "evaluate the live module, drop caches between evaluations, check what `evaluate` really computes",
    )


def floor(step: int, loss: float, name: str, baseline: float) -> Alarm:
    return Alarm(
        "floor",
        f"after {step} steps the loss {loss:.4g} is still above {baseline:.4g}, that of the trivial predictor `{name}`",
        "System.loss",
        "the model is worse than a prediction that ignores its input",
        "run `seedbed check` on this preset; try a higher learning rate, or `seedbed overfit` on one batch",
        {"loss": loss, "baseline": baseline},
    )


# Alarms by the kind of their event.
ALARMS: dict[str, Callable[..., Alarm]] = {
    make.__name__: make for make in (data_wait, host_leak, device_leak, schedule, unused, dead, exploding, stuck_eval, floor)
}
