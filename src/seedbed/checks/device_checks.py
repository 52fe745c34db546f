"""Checks G: equal results on every device, precision and memory layout, and no host synchronisation in a step."""

import contextlib
import math
import warnings

import torch
from torch import Tensor

from seedbed.checks import short_runs
from seedbed.checks.objective_checks import is_deterministic
from seedbed.checks.registry import check, failed, passed, skipped
from seedbed.checks.subject import CPU, PERTURBATION, Subject, add_noise, source_line
from seedbed.checks.watch_ops import Operations, RoundedProducts
from seedbed.config import override
from seedbed.report.findings import Finding
from seedbed.train.engine import Engine, pick_device
from seedbed.train.system import System

# CPU against GPU, float32, TF32 off. Share of the norm of all gradients below which a tensor's own is no measure for its error.
PARITY_LIMIT, CANCELLED, PARITY_BATCHES = 1e-4, 1e-2, 3
# bf16 against float32: loss at most .004 and cosine at least .999 on clean presets; a wrong cast gives .3.
LOSS_LIMIT, COSINE_LIMIT = 5e-2, 0.99
# Weights far from initialisation, where predictions are so flat that rounding hardly shows. Nearer ones where the
# gradient is so steep that products in bf16 alone turn it by more than STEEP; without such a place there is no verdict.
PLACES, STEEP = (0.2, PERTURBATION, 0.02, 0.0), 5e-3
# Nor where the loss is this many times the initial one. Measured: 1 to 10 times, and 1e6 for a deep U-net.
REACHED = 30.0
# Sound bf16 turns the gradient by .1 to 5.5 times as much as float32 with rounded products (five recipes, three seeds).
ROUNDINGS = 8.0
# Compiling takes about as long as there are operations, whatever their size: above this many it is left to --full. Measured on
# a busy H200 machine: 10 to 15 s for 300 to 540 operations, 17 to 55 s for 580 to 1,360.
MAX_OPERATIONS = 560
COMPILE_LIMIT = 1e-3
LAYOUT_LIMIT = 1e-5


@check("G1", "device parity", "err", humbatova=(13,))
def device_parity(subject: Subject) -> Finding:
    if (device := _device()) is None:
        return skipped("no accelerator")
    if not is_deterministic(subject, subject.perturbed()):
        return skipped("the loss draws noise, and devices draw different noise")
    # Where a rounding decides a branch (a ReLU at 0, the cell of a grid), gradients of one batch are far apart on sound devices.
    apart = []
    while len(apart) < PARITY_BATCHES and not (apart and min(apart)[0] <= PARITY_LIMIT):
        apart.append(_apart(subject, device, len(apart)))
    worst, name, loss, other = min(apart)
    if not worst <= PARITY_LIMIT:
        what = f"one step on {device.type} and on the CPU: loss {other:.6g} and {loss:.6g}, gradient of {name} {worst:.1e} apart"
        return failed(what, where=short_runs.owner_line(subject.perturbed(), name), value=worst, limit=PARITY_LIMIT)
    return passed(f"one step on {device.type} equals the CPU's", worst, PARITY_LIMIT)


def _apart(subject: Subject, device: torch.device, index: int) -> tuple[float, str, float, float]:
    """How far one step on this batch is from the CPU's: the largest error, its parameter, and both losses."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # convolutions have a switch of their own
            (loss, grads), (other, theirs) = (_one_step(subject, where, index=index) for where in (CPU, device))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    # A gradient far below the others is a sum that cancels, and rounding is all that is left of it.
    floor = max(CANCELLED * math.hypot(*(float(g.norm()) for g in grads.values())), 1e-12)
    errors = {n: float((g - theirs[n]).norm() / g.norm().clamp_min(floor)) for n, g in grads.items() if n in theirs}
    name = max(errors, key=lambda n: errors[n])
    return max(errors[name], abs(loss - other) / max(abs(loss), 1e-12)), name, loss, other


def _device() -> torch.device | None:
    found = pick_device("auto")
    return None if found.type == "cpu" else found


def _one_step(
    subject: Subject, device: torch.device, *assignments: str, noise: float = PERTURBATION, rounded: bool = False, index: int = 0
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of one step from the perturbed weights, optionally with products rounded to bf16; on the host."""
    batch = {k: v.to(device) for k, v in subject.batch(index).items()}  # before the system is moved, which the data may depend on
    engine = perturbed_engine(subject, device, *assignments, noise=noise)
    engine.system.eval()  # dropout draws other numbers on another device
    with short_runs.gradients(engine.system) as seen, RoundedProducts() if rounded else contextlib.nullcontext():
        loss = short_runs.take_step(subject, engine, batch, 0)["loss"]
    return float(loss), {n: g.float().cpu() for n, g in seen.items()}


def perturbed_engine(subject: Subject, device: torch.device, *assignments: str, noise: float = PERTURBATION) -> Engine:
    """A float32 engine with perturbed weights, so that zero-initialised layers hide nothing."""
    config = override(subject.small, ["accum=1", *assignments])
    system = subject.fresh_system()
    add_noise(system, noise)
    engine = Engine(system.to(device), config, device)
    engine.variant = system.variant(0, subject.small.steps)
    return engine


def inference_engine(subject: Subject) -> Engine:
    """An engine with weights far enough from initialisation that outputs depend on their context. Shared: do not train it."""
    return subject.once("inference.engine", lambda: perturbed_engine(subject, CPU, noise=0.3))


def _cosine(a: dict[str, Tensor], b: dict[str, Tensor]) -> tuple[float, str]:
    """The lowest cosine similarity over tensors that carry a share of the gradient, and the name of the tensor."""
    total = torch.stack([g.norm() for g in a.values()]).norm()
    worst = (1.0, "")
    for name, grad in a.items():
        if name in b and grad.norm() > 1e-3 * total:
            worst = min(worst, (float(torch.cosine_similarity(grad.flatten(), b[name].flatten(), dim=0)), name))
    return worst


@check("G2", "precision", "warn", humbatova=(13,))
def precision(subject: Subject) -> Finding:
    compiled = _compiled_error(subject)
    if compiled is not None and not compiled <= COMPILE_LIMIT:
        what = f"4 steps compiled and eager end {compiled:.1e} apart"
        return failed(what, where=source_line(System.compile_units), case="G2-compiled")
    wanted = subject.config.precision
    # A preset in float32 does not use bf16: a note only.
    severity = "note" if wanted in ("fp32", "tf32") else ""
    initial_loss = _one_step(subject, CPU, noise=0.0)[0]
    for noise in PLACES:
        loss, grads = _one_step(subject, CPU, noise=noise)
        near, rounded = _one_step(subject, CPU, noise=noise, rounded=True)
        steep = 1 - _cosine(grads, rounded)[0]
        if steep <= STEEP and loss <= REACHED * abs(initial_loss):
            break
    if steep > STEEP:
        return skipped(f"rounding products alone turns the gradient by {steep:.3f}, so its direction in bf16 says nothing")
    half, halved = _one_step(subject, CPU, "precision=bf16", noise=noise)
    apart, rounding = (abs(other - loss) / max(abs(loss), 1e-12) for other in (half, near))
    cosine, name = _cosine(grads, halved)
    limit = max(1 - COSINE_LIMIT, ROUNDINGS * steep)
    if not (apart <= max(LOSS_LIMIT, ROUNDINGS * rounding) and 1 - cosine <= limit):
        where = short_runs.owner_line(subject.perturbed(), name) if name else subject.objective_line()
        what = f"bf16 against float32: loss {half:.5g} and {loss:.5g}, the gradient of {name or 'all'} agrees to {cosine:.3f}"
        return failed(what, where=where, value=1 - cosine, limit=limit, severity=severity)
    return passed("bf16 points where float32 points", 1 - cosine, limit)


def _compiled_error(subject: Subject) -> float | None:
    """Distance between 4 compiled and 4 eager steps with a changing lr; only where the preset compiles on a GPU."""
    if subject.config.compile == "off" or not torch.cuda.is_available():
        return None
    if not subject.full:
        with Operations() as seen:
            subject.loss_of(subject.fresh_system(), subject.batch())
        if seen.num > MAX_OPERATIONS:
            return None
    from seedbed.train.capture import compile_system

    device, ends = torch.device("cuda", torch.cuda.current_device()), []
    batches = [{k: v.to(device) for k, v in subject.batch(step).items()} for step in range(4)]
    for mode in ("off", subject.config.compile):
        engine = perturbed_engine(subject, device)
        compile_system(engine.system.eval(), mode)  # and in compiled code
        for step, batch in enumerate(batches):
            loss = short_runs.take_step(subject, engine, batch, step, rate=(step + 1) / 4)["loss"]
        ends.append(float(loss))
    return abs(ends[0] - ends[1]) / max(abs(ends[0]), 1e-12)


@check("G3", "memory layout", "err", humbatova=(13, 7))
def memory_layout(subject: Subject) -> Finding:
    system, loss_of = subject.perturbed(), torch.no_grad()(subject.loss_of)
    given, kept = subject.perturbed_batch(), {k: v.clone() for k, v in subject.perturbed_batch().items()}
    base = float(loss_of(system, given))
    written = next((k for k in given if not torch.equal(given[k], kept[k])), None)
    if written is not None:
        return failed(f"the loss writes into its input {written!r}", where=subject.loss_line(), case="G3-written")
    changes = {
        "strided": lambda x: torch.stack([x, x], dim=-1)[..., 0] if x.ndim else x,
        "expanded": lambda x: x[:1].expand_as(x) if x.ndim and len(x) else x,  # the first row, without copying
    }
    for title, change in changes.items():
        batch = {k: change(v) for k, v in subject.perturbed_batch().items()}
        copies = {k: v.contiguous().clone() for k, v in batch.items()}
        wanted = base if title == "strided" else float(loss_of(system, copies))
        try:
            other = float(loss_of(system, batch))
        except RuntimeError as error:
            what = f"{title} batches cannot be used: {str(error).splitlines()[0]}"
            return failed(what, where=subject.loss_line(), case="G3-refused", severity=subject.unsure)
        apart = abs(other - wanted) / max(abs(wanted), 1e-12)
        if not apart <= LAYOUT_LIMIT:
            what = f"the same numbers in a {title} batch give loss {other:.6g} instead of {wanted:.6g}"
            return failed(what, where=subject.loss_line(), case="G3-layout", value=apart, limit=LAYOUT_LIMIT)
    system = subject.fresh_system()
    try:  # two forward passes, then both backward passes: the second must not overwrite what the first saved
        for loss in [subject.loss_of(system, subject.batch(n), seed=n) for n in range(2)]:
            loss.backward()
    except RuntimeError as error:
        return failed(f"two passes in a row: {str(error).splitlines()[0]}", where=subject.loss_line())
    return passed("strided and expanded batches give the same loss; two passes in a row work")


@check("G4", "host sync", "warn", humbatova=(13, 6))
def host_sync(subject: Subject) -> Finding:
    if not torch.cuda.is_available():
        return skipped("no CUDA device")
    device = torch.device("cuda", torch.cuda.current_device())
    batch = {k: v.to(device) for k, v in subject.batch(0).items()}  # before the system is moved, which the data may depend on
    engine = perturbed_engine(subject, device)
    for step in range(2):
        short_runs.take_step(subject, engine, batch, step)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine.step(lambda part: batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    if syncs := [w for w in caught if "synchron" in str(w.message)]:
        what = f"a step waits for the GPU {len(syncs)} times"
        return failed(what, where=f"{syncs[0].filename}:{syncs[0].lineno}", value=float(len(syncs)), limit=0.0)
    return passed("a step never waits for the GPU", 0.0, 0.0)
