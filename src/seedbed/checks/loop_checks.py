"""Checks T: memory, exact resume, randomness, side effects of evaluation, and crash safety."""

import contextlib
import errno
import inspect
import itertools
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from seedbed.checks import short_runs
from seedbed.checks.calls import places, record
from seedbed.checks.registry import check, failed, passed, skipped
from seedbed.checks.small_jobs import advance_global_rng, loss_now, new_job, shorten_samples, take_steps
from seedbed.checks.subject import CPU, Subject, source_line, take_rows
from seedbed.config import override
from seedbed.data.feed import Feed
from seedbed.nn import rng
from seedbed.report.findings import Finding
from seedbed.track import files
from seedbed.train import capabilities, checkpoint, checkpoint_loading, loop, progress, rollback, saving
from seedbed.train.engine import Engine
from seedbed.train.job import Job

MEMORY_SHARE = 0.92
STOP, END = 3, 6
# Seeds, and steps of each, whose variants are compared: drawn from two, all of them agree by chance once in 1e9.
NUM_SEEDS, MANY_STEPS = 4, 32
_NO_TOOLS = ("every.log=1", "every.eval=0", "every.sample=0", "every.save=0", "steps=12")


@check("T1", "memory", "err", humbatova=(13, 6))
def memory(subject: Subject) -> Finding:
    if not torch.cuda.is_available() or subject.config.device == "cpu":
        return skipped("no CUDA device")
    device = torch.device("cuda", torch.cuda.current_device())
    total = torch.cuda.get_device_properties(device).total_memory
    one, two = _peaks(subject, device)
    rows = subject.config.batch // subject.config.accum
    needed = one + (two - one) * (rows - 1)
    share = needed / total
    what = f"about {needed / 2**30:.1f} of {total / 2**30:.0f} GiB for {rows} items at a time"
    if share > MEMORY_SHARE:
        fits = max(1, int(rows * MEMORY_SHARE / share))
        fix = f"accum={-(-rows // fits) * subject.config.accum}, or batch={fits}"
        return failed(what, where=subject.loss_line(), case="T1-memory", fix=fix, value=share, limit=MEMORY_SHARE)
    return passed(what, share, MEMORY_SHARE)


def _peaks(subject: Subject, device: torch.device) -> list[float]:
    """Peak bytes of a step of the real config on one item and on two.

    Of one engine and one feed: memory that a first pair holds until it is collected would count as the second's need.
    """
    config = override(subject.config, ["accum=1", "compile=off"])
    engine = Engine(subject.recipe.build(config, subject.real_data).to(device), config, device)
    engine.variant = engine.system.variant(0, config.steps)
    feed, peaks = Feed(subject.real_data.train, batch=2, parts=1, seed=1, device=device), []
    for rows in (1, 2):
        for step in range(2):  # the first one allocates what is kept
            torch.cuda.reset_peak_memory_stats(device)
            feed.load(2 * step)
            engine.begin(step, 0.5)
            engine.step(lambda part, rows=rows: take_rows(feed.part(part), slice(rows)))
        peaks.append(float(torch.cuda.max_memory_allocated(device)))
    feed.close()
    return peaks


@check("T2", "resume", "err", humbatova=(6,))
def resume(subject: Subject) -> Finding:
    subject = short_runs.learner(subject)
    settings = (*_NO_TOOLS, "batch=4", "accum=2")
    with tempfile.TemporaryDirectory() as scratch:
        whole = new_job(subject, *settings, folder=Path(scratch) / "whole")
        straight = _fit(whole, END)
        _fit(new_job(subject, *settings, folder=Path(scratch) / "parts"), STOP)
        saved = checkpoint_loading.load_newest(Path(scratch) / "parts" / "checkpoints", lambda text: None)
        if saved is None or saved.step != STOP:
            what = f"stopped at step {STOP}, the newest checkpoint is {saved.step if saved else 'none'}"
            return failed(what, where=source_line(loop.finish), case="T2-stopped")
        # Another seed: whatever is not restored is visible.
        second = new_job(subject, *settings, folder=Path(scratch) / "parts", seed=subject.config.seed + 1)
        advance_global_rng(987)
        progress.restore(second, saved)
        resumed = _fit(second, END)
    if difference := _compare(whole, second, straight, resumed):
        what = f"{END} steps and {STOP} + resume + {END - STOP} differ: {difference}"
        return failed(what, where=_cause_of_difference(whole, second, difference))
    if spoiled := _roll_back_problem(subject):
        return failed(spoiled, where=source_line(rollback.go_back), case="T2-rollback")
    return passed(f"{END} steps = {STOP} + save + new objects + {END - STOP}, bitwise; a roll-back restores all")


def _cause_of_difference(a: Job, b: Job, difference: str) -> str:
    """The source of a difference: random numbers that depend on history, state that is not saved, or the restoring."""
    states = []
    for seed in (1, 2):
        advance_global_rng(seed)
        b.engine.seed_step(STOP)
        states.append(torch.get_rng_state())
    if not torch.equal(*states):
        return source_line(Engine.seed_step)
    kept = {n for group in b.engine.tensors().values() for n in group}
    if difference in dict(a.system.named_buffers()).keys() - a.system.state_dict().keys():
        return source_line(type(a.system).__init__)
    return source_line(Engine.tensors if difference in set(a.system.state_dict()) - kept else progress.restore)


def _fit(job: Job, stop: int) -> list[dict[str, Any]]:
    """The rows of a job that ends after `stop` steps as by a signal: it neither evaluates nor samples at its end."""
    real = job.system.variant

    def variant(now: int, num_steps: int) -> Any:
        if now >= stop - 1:
            job.stop_signal = signal.SIGTERM
        return real(now, num_steps)

    job.system.variant = variant  # type: ignore[method-assign]
    loop.fit(job)
    rows: Any = job.run.rows
    return [{k: row[k] for k in row if k in ("step", "loss", "lr", "lrs", "items", "epoch")} for row in rows]


def _compare(a: Job, b: Job, rows_a: list, rows_b: list) -> str:
    """The first difference between two jobs that should be equal; empty when there is none."""
    for name in ("step", "items", "skipped_items", "total_items", "counter", "best", "best_step"):
        if getattr(a, name) != getattr(b, name):
            return f"{name} is {getattr(a, name)} and {getattr(b, name)}"
    tail = rows_a[len(rows_a) - len(rows_b) :]
    for one, other in zip(tail, rows_b, strict=False):
        if one != other:
            words = ", ".join(f"{k} {one[k]} and {other.get(k)}" for k in one if one[k] != other.get(k))
            return f"step {one['step']}: {words[:200]}"
    # Buffers that are not persistent too: a stage that is not restored need not show within these steps.
    buffers = lambda job: job.system.state_dict() | dict(job.system.named_buffers())  # noqa: E731
    for held in (lambda job: short_runs.named_tensors(job.engine), buffers):
        if name := short_runs.first_difference(held(a), held(b)):
            return name
    return "" if a.system.state() == b.system.state() else "state()"


@check("T3", "randomness", "err", humbatova=(6,))
def randomness(subject: Subject) -> Finding:
    system, batch = subject.fresh_system(), subject.batch(0)
    engine = Engine(system, subject.small, CPU)

    def loss(step: int, others: int) -> float:
        advance_global_rng(others)
        engine.seed_step(step)
        state = torch.get_rng_state()
        value = loss_now(subject, system, batch)
        drawn.append(not torch.equal(state, torch.get_rng_state()))
        after.append(torch.get_rng_state())
        return value

    drawn: list[bool] = []
    after: list[torch.Tensor] = []
    here, again, later = loss(5, 1), loss(5, 2), loss(6, 1)
    where = subject.objective_line()
    if here != again:
        return failed(f"the loss of one step on one batch is {here:.6g} and {again:.6g}", where=where)
    if drawn[0] and (torch.equal(after[0], after[2]) or (here == later and _depends_on_seed(subject, system, batch))):
        return failed("steps 5 and 6 draw the same noise", where=source_line(Engine.seed_step), case="T3-step")
    if shared := _shared_noise(system, batch):
        return failed(f"all rows of a batch draw the same {shared!r}", where=where, case="T3-rows")
    if again := _key_used_twice(subject):
        return failed(f"a step draws twice from the same keys: {again}", where=again.partition(" and ")[2], case="T3-keys")
    if _drawn_once(subject):
        what = "what a step computes (its variant) depends on the seed, and is the same in all steps of a run"
        return failed(what, where=source_line(type(system).variant), case="T3-variant")
    return passed("equal steps draw equal noise, other steps draw other noise" if drawn[0] else "the loss draws nothing")


def _key_used_twice(subject: Subject) -> str:
    """Two places, or one twice, that draw from equal keys of counter-based noise in one training step; empty if none."""
    system, batch = subject.fresh_system(), subject.batch(0)
    for variant in capabilities.variants(system, subject.small.steps):
        calls = record(subject, lambda v=variant: subject.loss_of(system, batch, variant=v), values=True, shared="nn data")
        seen: dict[bytes, str] = {}
        for call in (call for call in calls if call.code is rng.keys.__code__ and call.gave):
            place, key = places(call.around), call.gave[0].tobytes()
            if key in seen:
                return f"{seen[key].partition(';')[0]} and {place}"
            seen[key] = place
    return ""


def _drawn_once(subject: Subject) -> bool:
    """Whether a part of the step's variant differs between seeds, but not between the steps of one."""
    seen = []
    for seed in range(NUM_SEEDS):
        system = subject.recipe.build(override(subject.small, [f"seed={seed}"]), subject.data)
        found = (system.variant(step, subject.small.steps) for step in range(MANY_STEPS))
        seen.append([{*part} for part in zip(*(v if isinstance(v, tuple) else (v,) for v in found), strict=True)])
    return any(all(len(one) == 1 for one in part) and len(set().union(*part)) > 1 for part in zip(*seen, strict=True))


def _shared_noise(system: Any, batch: Any) -> str:
    """An entry of the probe's batch that is random, but equal for all rows."""
    batches = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        probe = capabilities.probe(system, batch)
        if probe is None:
            return ""
        batches.append(probe.batch)
    for name, a in batches[0].items():
        moved = a.shape == batches[1][name].shape and not torch.equal(a, batches[1][name])
        if moved and a.ndim and len(a) > 1 and torch.equal(a, a[:1].expand_as(a)):
            return name
    return ""


def _depends_on_seed(subject: Subject, system: Any, batch: Any) -> bool:
    """Whether another seed gives another loss: zero-initialised layers can hide noise."""
    values = []
    for seed in range(4):
        torch.manual_seed(seed)
        values.append(loss_now(subject, system, batch))
    return len(set(values)) > 1


@check("T4", "side effects", "err", humbatova=(6, 11))
def side_effects(subject: Subject) -> Finding:
    subject = short_runs.learner(subject)
    with tempfile.TemporaryDirectory() as scratch:
        small_jobs = []
        for name, every in (("quiet", 0), ("busy", 2)):
            # Evaluations that steer training belong to both.
            evals = 2 if subject.perturbed().evaluation_steers else every
            often = (f"every.eval={evals}", f"every.sample={every}", f"every.save={every}")
            job = new_job(subject, *_NO_TOOLS, *often, folder=Path(scratch) / name)
            shorten_samples(job.engine)
            job.best = -1e30  # evaluations must not save here
            small_jobs.append((job, _fit(job, 4)))
    (quiet, rows_quiet), (busy, rows_busy) = small_jobs
    difference = _compare(quiet, busy, rows_quiet, rows_busy)
    modes = [n for n, m in busy.system.named_modules() if not m.training]
    if difference or modes:
        what = difference or f"{modes[0] or 'the system'} is left in evaluation mode"
        what = f"4 steps with evaluation, sampling, logging and saving in between differ from 4 without: {what}"
        return failed(what, where=_cause_of_side_effect(busy))
    return passed("looking on changes nothing, bitwise")


def _cause_of_side_effect(job: Job) -> str:
    """The evaluation wrapper where it does not restore state itself; else the recipe's evaluation."""
    engine, system = job.engine, job.system
    system.train()
    for shadow in engine.ema.shadow.values() if engine.ema else ():
        shadow.add_(1.0)  # EMA and weights differ now in any case
    before = short_runs.named_tensors(engine)
    with engine.evaluating():
        pass
    if short_runs.first_difference(before, short_runs.named_tensors(engine)) and engine.ema:
        return source_line(inspect.unwrap(type(engine.ema).swapped_in))
    return source_line(inspect.unwrap(Engine.evaluating) if not system.training else type(system).evaluate)


def _roll_back_problem(subject: Subject) -> str:
    """Rolling back restores the whole best checkpoint and skips the data that caused it."""
    with tempfile.TemporaryDirectory() as scratch:
        job = new_job(subject, "steps=20", "guard.policy=rollback", folder=Path(scratch))
        take_steps(job, 2)
        saving.save(job, best=True)
        kept = short_runs.named_tensors(job.engine)
        take_steps(job, 1)
        saving.save(job)
        take_steps(job, 2)
        spoiled, job.incidents.num_rollbacks = job.counter, 2
        with torch.no_grad():
            for tensor in (t for group in job.engine.tensors().values() for t in group.values()):
                tensor.fill_(float("nan") if tensor.is_floating_point() else 0)
        rollback.go_back(job, "rollback", "nan")
        name = short_runs.first_difference(kept, short_runs.named_tensors(job.engine))
    if name or job.step != 2:
        return f"after a roll-back {name or f'the step is {job.step}, not 2: it'} is not what the best checkpoint holds"
    if job.incidents.num_rollbacks != 2:
        return (
            f"after a roll-back the run counts {job.incidents.num_rollbacks} of 2: one that diverges again and again never stops"
        )
    if job.counter != spoiled:
        return f"after a roll-back the next item is {job.counter}, inside the stretch up to {spoiled} that spoiled the run"
    return ""


@check("T6", "crash safety", "err", humbatova=(6,))
def crash_safety(subject: Subject) -> Finding:
    subject = short_runs.learner(subject)
    with tempfile.TemporaryDirectory() as scratch:
        job = new_job(subject, "keep=3", folder=Path(scratch))
        folder = Path(scratch) / "checkpoints"
        take_steps(job, 1)
        saving.save(job)
        good = short_runs.named_tensors(job.engine)
        take_steps(job, 1)
        problem = _first_problem(job, folder, good)
    if problem:
        cause = saving.save if "ends the run" in problem else checkpoint.save
        cause = checkpoint_loading.load_newest if "flipped bit" in problem else cause
        return failed(problem, where=source_line(cause))
    return passed("a full disk, a kill at any write and a damaged file cost one checkpoint at most")


class _Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


def _first_problem(job: Job, folder: Path, good: dict[str, torch.Tensor]) -> str:
    for error in (OSError(errno.ENOSPC, "No space left on device"), _Killed()):
        for count in range(12):
            with _failing_write(count, error) as failed_at:
                try:
                    saving.save(job)
                except _Killed:
                    pass
                except OSError:
                    return f"a full disk at write {count + 1} of a save ends the run"
            title = "a kill" if isinstance(error, _Killed) else "a full disk"
            if problem := _newest_is(folder, good if failed_at else short_runs.named_tensors(job.engine)):
                when = f"after {title} at write {count + 1}" if failed_at else f"after {title}, and a save that went well"
                return f"{when}: {problem}"
            if not failed_at:
                break
        checkpoint.forget_after(folder, 1)
    saving.save(job)
    newest = checkpoint.steps_in(folder)[-1]
    for path in sorted(newest.glob("*.safetensors")):
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(bytes(data))
        if problem := _newest_is(folder, good):
            return f"with one flipped bit in the newest {path.name}: {problem}"
        data[-3] ^= 1
        path.write_bytes(bytes(data))
    return ""


def _newest_is(folder: Path, good: dict[str, torch.Tensor]) -> str:
    """Empty when the newest intact checkpoint holds these tensors."""
    try:
        saved = checkpoint_loading.load_newest(folder, lambda text: None)
    except Exception as error:
        return f"loading fails: {error}"
    if saved is None:
        return "there is no checkpoint left"
    held = {f"{file}: {n}": t for file, group in saved.tensors.items() for n, t in group.items()}
    name = short_runs.first_difference(good, held)
    return f"{name} is not what was saved" if name else ""


@contextlib.contextmanager
def _failing_write(after: int, error: BaseException) -> Iterator[list[int]]:
    """Lets the n-th call of the write layer fail; yields a list that is filled when it did."""
    real, calls, hit = files.write, itertools.count(), []

    def write(fd: int, data: bytes) -> None:
        if next(calls) == after:
            hit.append(after)
            real(fd, data[: len(data) // 2])
            raise error
        real(fd, data)

    with patch.object(files, "write", write):
        yield hit
