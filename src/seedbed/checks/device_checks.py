"""G: the same numbers on every device, in every precision and memory layout, and no waiting inside a step."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from seedbed.checks import practice
from seedbed.checks.case import CPU, SHAKE, Case, place
from seedbed.checks.registry import Result, check, failed, passed, skipped
from seedbed.config import override
from seedbed.train.engine import Engine
from seedbed.train.system import Batch, System

# CPU against GPU, float32, TF32 off.
PARITY_LIMIT = 1e-4
# bf16 against float32: loss at most .004 and cosine at least .999 on clean presets; a wrong cast gives .3.
LOSS_LIMIT, COSINE_LIMIT = 5e-2, 0.99
# Weights far from their birth: near it predictions are so flat that rounding them hardly shows.
FAR = 0.2
COMPILE_LIMIT = 1e-3
LAYOUT_LIMIT = 1e-5


def _device() -> torch.device | None:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("mps") if torch.backends.mps.is_available() else None


def _one_step(
    case: Case, device: torch.device, *assignments: str, noise: float = SHAKE
) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """Loss, gradients and new weights of one step from the shaken start, on the host."""
    engine = shaken_engine(case, device, *assignments, noise=noise)
    batch = {k: v.to(device) for k, v in case.batch(0).items()}
    with practice.gradients(engine.system) as seen:
        loss = practice.take_step(case, engine, batch, 0)["loss"]
    weights = {n: p.detach().float().cpu() for n, p in engine.system.named_parameters()}
    return float(loss), {n: g.float().cpu() for n, g in seen.items()}, weights


def shaken_engine(case: Case, device: torch.device, *assignments: str, noise: float = SHAKE) -> Engine:
    """An engine whose weights are away from their birth, so that nothing hides behind zeros; float32."""
    config = override(case.small, ["accum=1", *assignments])
    system = case.fresh_system()
    dice = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for param in system.parameters():
            param += noise * torch.randn(param.shape, generator=dice).to(param.dtype)
    engine = Engine(system.to(device), config, device)
    engine.variant = system.variant(0, case.small.steps)
    return engine


def _noisy(case: Case) -> bool:
    """Whether the loss depends on the dice; those of two devices differ lawfully."""
    system, batch = case.shaken(), case.shaken_batch()
    with torch.no_grad():
        return not torch.equal(case.loss_of(system, batch, dice=1), case.loss_of(system, batch, dice=2))


@check("G1", "parity", "err", humbatova=(13,))
def parity(case: Case) -> Result:
    device = _device()
    if device is None:
        return skipped("no accelerator")
    if _noisy(case):
        return skipped("the loss draws noise, and devices draw different noise")
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        (loss, grads, _), (other, theirs, _) = _one_step(case, CPU), _one_step(case, device)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    errors = {n: _relative(grads[n], theirs[n]) for n in grads if n in theirs}
    name = max(errors, key=lambda n: errors[n])
    worst = max(errors[name], abs(loss - other) / max(abs(loss), 1e-12))
    if not worst <= PARITY_LIMIT:
        return failed(
            f"one step on {device.type} and on the CPU: loss {other:.6g} and {loss:.6g}, gradient of {name} {worst:.1e} apart",
            where=case.locate(practice.owner(case.shaken(), name)),
            why="a kernel of this device computes something else",
            fix="call contiguous() before the operation, replace it, or use another device; report it to torch",
            value=worst,
            limit=PARITY_LIMIT,
        )
    return passed(f"one step on {device.type} equals the CPU's", worst, PARITY_LIMIT)


def _relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / a.norm().clamp_min(1e-12))


def _cosine(a: dict[str, Tensor], b: dict[str, Tensor]) -> tuple[float, str]:
    """The worst agreement of direction over tensors that carry a share of the gradient, and whose it is."""
    total = torch.stack([g.norm() for g in a.values()]).norm()
    worst = (1.0, "")
    for name, grad in a.items():
        if name in b and grad.norm() > 1e-3 * total:
            worst = min(worst, (float(torch.cosine_similarity(grad.flatten(), b[name].flatten(), dim=0)), name))
    return worst


@check("G2", "precision", "warn", humbatova=(13,))
def precision(case: Case) -> Result:
    wanted = case.config.precision
    # A preset in float32 has no half precision to fear; what bf16 would do is worth a note.
    severity = "note" if wanted in ("fp32", "tf32") else None
    loss, grads, _ = _one_step(case, CPU, noise=FAR)
    half, halved, _ = _one_step(case, CPU, "precision=bf16", noise=FAR)
    apart = abs(half - loss) / max(abs(loss), 1e-12)
    cosine, name = _cosine(grads, halved)
    if not (apart <= LOSS_LIMIT and cosine >= COSINE_LIMIT):
        return failed(
            f"bf16 against float32: loss {half:.5g} and {loss:.5g}, the gradient of {name or 'all'} agrees to {cosine:.3f}",
            where=case.locate(practice.owner(case.shaken(), name)) if name else case.objective_place(),
            why="in half precision this part is trained in another direction",
            fix="compute it in float32: with torch.autocast(device, enabled=False)",
            value=1 - cosine,
            limit=1 - COSINE_LIMIT,
            severity=severity,
        )
    compiled = _compiled_error(case)
    if compiled is not None and not compiled <= COMPILE_LIMIT:
        why = "what runs fast is not what was tested"
        what = f"4 steps compiled and eager end {compiled:.1e} apart"
        return failed(what, where=place(System.compile_units), why=why, fix="compile=off, or find the unit that differs")
    return passed("bf16 points where float32 points", 1 - cosine, 1 - COSINE_LIMIT)


def _compiled_error(case: Case) -> float | None:
    """How far 4 compiled steps with a moving rate end from eager ones; only where the preset compiles on a GPU."""
    if case.config.compile == "off" or not torch.cuda.is_available():
        return None
    from seedbed.train.capture import compile_system

    device, ends = torch.device("cuda", torch.cuda.current_device()), []
    for mode in ("off", case.config.compile):
        engine = shaken_engine(case, device)
        compile_system(engine.system, mode)
        for step in range(4):
            batch = {k: v.to(device) for k, v in case.batch(step).items()}
            loss = practice.take_step(case, engine, batch, step, rate=(step + 1) / 4)["loss"]
        ends.append(float(loss))
    return abs(ends[0] - ends[1]) / max(abs(ends[0]), 1e-12)


@check("G3", "layout", "err", humbatova=(13, 7))
def layout(case: Case) -> Result:
    system = case.shaken()
    trouble = _written_inputs(case, system)
    if trouble:
        why = "the feed's memory is shared: whoever holds the batch sees it change"
        return failed(trouble, where=practice.loss_place(case), why=why, fix="work on a copy: x = x + ..., not x += ...")
    base = _loss(case, system, case.shaken_batch())
    for title, change in (("strided", _strided), ("expanded", _expanded)):
        batch = {k: change(v) for k, v in case.shaken_batch().items()}
        wanted = base if title == "strided" else _loss(case, system, {k: v.contiguous().clone() for k, v in batch.items()})
        try:
            other = _loss(case, system, batch)
        except RuntimeError as error:
            what = f"{title} batches cannot be used: {str(error).splitlines()[0]}"
            why = "it works by luck: another feed, cut or device hands over other strides"
            return failed(what, where=practice.loss_place(case), why=why, fix="reshape instead of view; write into no input")
        apart = abs(other - wanted) / max(abs(wanted), 1e-12)
        if not apart <= LAYOUT_LIMIT:
            what = f"the same numbers in a {title} batch give loss {other:.6g} instead of {wanted:.6g}"
            why = "the result depends on how memory is laid out"
            fix = "use no raw strides (as_strided, data_ptr, view of a transpose)"
            return failed(what, where=practice.loss_place(case), why=why, fix=fix, value=apart, limit=LAYOUT_LIMIT)
    trouble = _two_passes(case)
    if trouble:
        why = "the second step, a checkpointed block or a captured step would fail"
        return failed(
            trouble, where=practice.loss_place(case), why=why, fix="return new tensors; write into no buffer in forward"
        )
    return passed("strided and expanded batches give the same loss; two passes in a row work")


def _loss(case: Case, system: System, batch: Batch) -> float:
    with torch.no_grad():
        return float(case.loss_of(system, batch))


def _strided(x: Tensor) -> Tensor:
    return torch.stack([x, x], dim=-1)[..., 0] if x.ndim else x


def _expanded(x: Tensor) -> Tensor:
    """The first row, five times, in the memory of one."""
    return x[:1].expand_as(x) if x.ndim and len(x) else x


def _written_inputs(case: Case, system: System) -> str:
    batch = case.shaken_batch()
    kept = {k: v.clone() for k, v in batch.items()}
    with torch.no_grad():
        case.loss_of(system, batch)
    name = next((k for k in batch if not torch.equal(batch[k], kept[k])), "")
    return f"the loss writes into its input {name!r}" if name else ""


def _two_passes(case: Case) -> str:
    """Two forward passes, then both backward: fails when the second overwrote what the first remembers."""
    system = case.fresh_system()
    try:
        losses = [case.loss_of(system, case.batch(n), dice=n) for n in range(2)]
        for loss in losses:
            loss.backward()
    except RuntimeError as error:
        return f"two passes in a row: {str(error).splitlines()[0]}"
    return ""


@check("G4", "traffic", "warn", humbatova=(13, 6))
def traffic(case: Case) -> Result:
    if not torch.cuda.is_available():
        return skipped("no CUDA device")
    device = torch.device("cuda", torch.cuda.current_device())
    engine = shaken_engine(case, device)
    batch = {k: v.to(device) for k, v in case.batch(0).items()}
    for step in range(2):
        practice.take_step(case, engine, batch, step)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine.step(lambda part: batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    syncs = [w for w in caught if "synchron" in str(w.message)]
    if syncs:
        first = syncs[0]
        return failed(
            f"a step waits for the GPU {len(syncs)} times",
            where=f"{first.filename}:{first.lineno}",
            why="the GPU idles while Python thinks, and the step cannot be captured",
            fix="return tensors; call no item(), cpu(), bool() or nonzero() on them inside update",
            value=float(len(syncs)),
            limit=0.0,
        )
    return passed("a step never waits for the GPU", 0.0, 0.0)
