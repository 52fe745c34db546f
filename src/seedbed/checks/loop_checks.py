"""T and V: a run can be stopped, repeated and watched without changing it, and evaluation measures what it says."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import errno
import inspect
import random
import signal
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from seedbed.checks import practice
from seedbed.checks.case import CPU, Case, Recorder, outputs, place
from seedbed.checks.registry import Result, check, failed, passed, skipped
from seedbed.config import override
from seedbed.data.feed import Feed, Source
from seedbed.track import files
from seedbed.train import checkpoint, loop
from seedbed.train.engine import Engine
from seedbed.train.loop import Job
from seedbed.train.system import Request

MEMORY_SHARE = 0.92
# Train against evaluation loss, float32: sound at most 3e-7.
SAME_LIMIT = 1e-5
PARTS_LIMIT = 1e-5
# Held-out rows that evaluation checks look at: enough for several batches, few enough to be quick.
NUM_ROWS = 400
STOP, END = 3, 6
NUM_TOKENS = 12


_MISSING: Any = object()


class Silent:
    """Takes whatever a loop tells a person or a run folder, and keeps nothing but the rows."""

    def __init__(self, path: Path) -> None:
        self.path, self.name, self.rows = path, "check", []

    def row(self, values: dict[str, Any]) -> None:
        self.rows.append(values)

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def new_job(case: Case, *assignments: str, folder: Path | None = None, seed: int | None = None) -> Job:
    """The run's own job on the small config, on a small held-out part, writing below `folder`."""
    config = override(case.small, ["batch=4", "accum=1", "budget=none", *assignments])
    system = case.fresh_system(seed)
    data = dataclasses.replace(case.data, valid=small_source(case.data.valid))
    quiet: Any = Silent(folder or Path("nowhere"))
    return Job(run=quiet, config=config, system=system, data=data, engine=Engine(system, config, CPU), console=quiet)


def small_source(source: Source, first: int = 0, num_rows: int = NUM_ROWS) -> Source:
    """A source like this one over fewer rows: made by its own constructor where its arguments can be found again."""
    longest = max((len(a) for a in source.arrays.values()), default=0)
    if longest <= num_rows:
        return source
    names = [p for p in inspect.signature(type(source).__init__).parameters.values() if p.name != "self"]
    given: dict[str, Any] = {}
    for name in names:
        value = getattr(source, name.name, getattr(source, f"_{name.name}", _MISSING))
        if value is _MISSING:
            if name.default is inspect.Parameter.empty:
                return source
            continue
        is_rows = isinstance(value, np.ndarray) and any(value is a for a in source.arrays.values())
        given[name.name] = value[first : first + num_rows] if is_rows else value
    try:
        return type(source)(**given)
    except Exception:  # whatever a stranger's constructor minds: then the whole source it is
        return source


class _Enough(Exception):
    """Stops a sample once its options are known."""


def known_options(engine: Engine) -> dict[str, Any]:
    """The options that the recipe's sample reads, found by letting it ask for them."""
    seen: dict[str, Any] = {}

    class Spy(Request):
        def read(self, **defaults: Any) -> dict[str, Any]:
            seen.update(defaults)
            raise _Enough

    with tempfile.TemporaryDirectory() as scratch, contextlib.suppress(_Enough), engine.evaluating():
        engine.system.sample(Spy(Path(scratch)), engine)
    return seen


def shorten_samples(engine: Engine) -> None:
    """Let the system's samples be a few tokens long, where it counts tokens."""
    real = engine.system.sample
    if "tokens" in known_options(engine):
        engine.system.sample = lambda request, engine: real(  # type: ignore[method-assign]
            Request(request.folder, {"tokens": NUM_TOKENS, **request.options}, request.write), engine
        )


# ---- T: the loop -------------------------------------------------------------------------------------------------


@check("T1", "memory", "err", humbatova=(13, 6))
def memory(case: Case) -> Result:
    if not torch.cuda.is_available() or case.config.device == "cpu":
        return skipped("no CUDA device")
    device = torch.device("cuda", torch.cuda.current_device())
    total = torch.cuda.get_device_properties(device).total_memory
    one, two = (_peak(case, device, rows) for rows in (1, 2))
    rows = case.config.batch // case.config.accum
    needed = one + (two - one) * (rows - 1)
    share = needed / total
    what = f"about {needed / 2**30:.1f} of {total / 2**30:.0f} GiB for {rows} items at a time"
    if share > MEMORY_SHARE:
        fits = max(1, int(rows * MEMORY_SHARE / share))
        why = "it will run out of memory in its first backward pass"
        fix = f"accum={-(-rows // fits) * case.config.accum}, or batch={fits}"
        return failed(what, where=case.name, why=why, fix=fix, value=share, limit=MEMORY_SHARE)
    return passed(what, share, MEMORY_SHARE)


def _peak(case: Case, device: torch.device, rows: int) -> float:
    """Bytes at the worst moment of a step on `rows` items of the real config."""
    config = override(case.config, [f"batch={rows}", "accum=1", "compile=off"])
    system = case.recipe.build(config, case.real_data).to(device)
    engine = Engine(system, config, device)
    engine.variant = system.variant(0, config.steps)
    feed = Feed(case.real_data.train, batch=rows, parts=1, seed=1, device=device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    for step in range(2):
        feed.load(step * rows)
        engine.begin(step, 0.5)
        engine.step(feed.part)
    peak = torch.cuda.max_memory_allocated(device)
    feed.close()
    del engine, system, feed
    torch.cuda.empty_cache()
    return float(peak)


_NO_TOOLS = ("every.log=1", "every.eval=0", "every.sample=0", "every.save=0", "steps=12")


@check("T2", "resume", "err", humbatova=(6,))
def resume(case: Case) -> Result:
    settings = (*_NO_TOOLS, "batch=4", "accum=2")
    with tempfile.TemporaryDirectory() as scratch:
        whole = new_job(case, *settings, folder=Path(scratch) / "whole")
        (Path(scratch) / "whole").mkdir()
        _stop_at(whole, END)
        straight = _fit(whole)
        first = new_job(case, *settings, folder=Path(scratch) / "parts")
        (Path(scratch) / "parts").mkdir()
        _stop_at(first, STOP)
        _fit(first)
        saved = checkpoint.load_newest(Path(scratch) / "parts" / "checkpoints", lambda text: None)
        if saved is None or saved.step != STOP:
            why = "a signal would lose the run's work"
            what = f"stopped at step {STOP}, the newest checkpoint is {saved.step if saved else 'none'}"
            return failed(what, where=place(loop._finish), why=why, fix="save a checkpoint when a run is stopped")
        # Another seed: whatever is not restored is visible.
        second = new_job(case, *settings, folder=Path(scratch) / "parts", seed=case.config.seed + 1)
        roll_all_dice(987)
        loop.take_back(second, saved)
        _stop_at(second, END)
        told = _fit(second)
    difference = _compare(whole, second, straight, told)
    if difference:
        return failed(
            f"{END} steps and {STOP} + resume + {END - STOP} differ: {difference}",
            where=place(loop.take_back),
            why="a resumed run is another run: nothing can be repeated, and every preemption costs progress",
            fix="save and restore weights, moments, averages, counters and whatever state() should give",
        )
    spoiled = _roll_back_trouble(case)
    if spoiled:
        return failed(
            spoiled,
            where=place(loop._send_back),
            why="weights without the moments and the place that belong to them spoil again what was saved",
            fix="restore weights, every moment, averages and counters together, and skip the data that led there",
        )
    return passed(f"{END} steps = {STOP} + save + new objects + {END - STOP}, bitwise; a roll-back restores all")


def _fit(job: Job) -> list[dict[str, Any]]:
    loop.fit(job)
    rows: Any = job.run.rows
    return [{k: row[k] for k in row if k in ("step", "loss", "lr", "lrs", "items", "epoch")} for row in rows]


def _stop_at(job: Job, step: int) -> None:
    """End the job as a signal would, once `step` steps are taken, by way of what the loop asks before every step.

    So stopped, a run neither evaluates nor samples at its end, which can take long."""
    real = job.system.variant

    def variant(now: int, num_steps: int) -> Any:
        if now >= step - 1:
            job.stop_signal = signal.SIGTERM
        return real(now, num_steps)

    job.system.variant = variant  # type: ignore[method-assign]


def roll_all_dice(seed: int) -> None:
    """Move every global generator on, as an evening of other work would."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def _compare(a: Job, b: Job, rows_a: list, rows_b: list) -> str:
    """What differs between two jobs that should have ended alike; empty when nothing does."""
    for name in ("step", "items", "skipped_items", "total_items", "counter", "best", "best_step"):
        if getattr(a, name) != getattr(b, name):
            return f"{name} is {getattr(a, name)} and {getattr(b, name)}"
    tail = rows_a[len(rows_a) - len(rows_b) :]
    for one, other in zip(tail, rows_b, strict=False):
        if one != other:
            return (
                f"step {one['step']}: "
                + ", ".join(f"{k} {one[k]} and {other.get(k)}" for k in one if one[k] != other.get(k))[:200]
            )
    for held in (lambda job: practice.named_tensors(job.engine), lambda job: job.system.state_dict()):
        name = practice.first_difference(held(a), held(b))
        if name:
            return name
    return "" if a.system.state() == b.system.state() else "state()"


@check("T3", "dice", "err", humbatova=(6,))
def dice(case: Case) -> Result:
    system, batch = case.fresh_system(), case.batch(0)
    engine = Engine(system, case.small, CPU)

    def loss(step: int, others: int) -> float:
        roll_all_dice(others)
        engine.roll_dice(step)
        state = torch.get_rng_state()
        value = _loss_now(case, system, batch)
        drawn.append(not torch.equal(state, torch.get_rng_state()))
        return value

    drawn: list[bool] = []
    here, again, later = loss(5, 1), loss(5, 2), loss(6, 1)
    where = case.objective_place()
    if here != again:
        why = "a step cannot be repeated: resume and replay are guesses"
        fix = "draw from torch's own generator, which the engine sets for every step; not from random or numpy"
        return failed(f"the loss of one step on one batch is {here:.6g} and {again:.6g}", where=where, why=why, fix=fix)
    if drawn[0] and here == later and _dice_matter(case, system, batch):
        why = "every step meets the same noise: the model learns one draw by heart"
        fix = "let the noise of a step follow from (seed, step)"
        return failed("steps 5 and 6 draw the same noise", where=place(Engine.roll_dice), why=why, fix=fix)
    return passed("the same step draws the same, another step draws anew" if drawn[0] else "the loss draws nothing")


def _loss_now(case: Case, system: Any, batch: Any) -> float:
    """The training loss with the dice as they lie, changing nothing."""
    kept = copy.deepcopy({n: b for n, b in system.named_buffers()})
    recorder = Recorder(system, case.small, CPU)
    recorder.variant = system.variant(0, case.small.steps)
    system.update(batch, recorder)
    for name, buffer in system.named_buffers():
        buffer.copy_(kept[name])
    return float(sum(v.detach() for v in recorder.norms.values()))


def _dice_matter(case: Case, system: Any, batch: Any) -> bool:
    """Whether other random numbers give another loss; on the shaken system, since zeros at birth can hide it."""
    values = []
    for seed in range(4):
        torch.manual_seed(seed)
        values.append(_loss_now(case, system, batch))
    return len(set(values)) > 1


@check("T4", "neutral", "err", humbatova=(6, 11))
def neutral(case: Case) -> Result:
    with tempfile.TemporaryDirectory() as scratch:
        jobs = []
        for name, every in (("quiet", 0), ("busy", 2)):
            folder = Path(scratch) / name
            folder.mkdir()
            tools = [f"every.{tool}={every}" for tool in ("eval", "sample", "save")]
            job = new_job(case, *_NO_TOOLS, *tools, folder=folder)
            shorten_samples(job.engine)
            _stop_at(job, 4)
            job.best = -1e30  # evaluations shall not save: a save is asked for on its own
            jobs.append((job, _fit(job)))
    (quiet, rows_quiet), (busy, rows_busy) = jobs
    difference = _compare(quiet, busy, rows_quiet, rows_busy)
    modes = [n for n, m in busy.system.named_modules() if not m.training]
    if difference or modes:
        told = difference or f"{modes[0] or 'the system'} is left in evaluation mode"
        return failed(
            f"4 steps with evaluation, sampling, logging and saving in between differ from 4 without: {told}",
            where=place(type(busy.system).evaluate),
            why="how often you look changes the result: runs cannot be compared",
            fix="evaluate and sample inside engine.evaluating(), and change no weight, buffer, mode or dice there",
        )
    return passed("looking on changes nothing, bitwise")


def _roll_back_trouble(case: Case) -> str:
    """After trouble the loop goes back to its best checkpoint: to all of it, and past the data that spoiled the run."""
    with tempfile.TemporaryDirectory() as scratch:
        job = new_job(case, "steps=20", "guard.policy=rollback", folder=Path(scratch))
        _steps(job, 2)
        loop._save(job, best=True)
        kept = practice.named_tensors(job.engine)
        _steps(job, 1)
        loop._save(job, best=False)
        _steps(job, 2)
        spoiled = job.counter
        with torch.no_grad():
            for tensor in (t for group in job.engine.tensors().values() for t in group.values()):
                tensor.fill_(float("nan") if tensor.is_floating_point() else 0)
        loop._send_back(job, "rollback", "nan")
        name = practice.first_difference(kept, practice.named_tensors(job.engine))
    if name or job.step != 2:
        return f"after a roll-back {name or f'the step is {job.step}, not 2: it'} is not what the best checkpoint holds"
    if job.counter != spoiled:
        return f"after a roll-back the next item is {job.counter}, inside the stretch up to {spoiled} that spoiled the run"
    return ""


def _steps(job: Job, num: int) -> None:
    for _ in range(num):
        loop._take_step(job)
    job.readback.drop()


@check("T6", "crash", "err", humbatova=(6,))
def crash(case: Case) -> Result:
    with tempfile.TemporaryDirectory() as scratch:
        job = new_job(case, "keep=3", folder=Path(scratch))
        folder = Path(scratch) / "checkpoints"
        _steps(job, 1)
        loop._save(job, best=False)
        good = practice.named_tensors(job.engine)
        _steps(job, 1)
        trouble = _first_trouble(job, folder, good)
    if trouble:
        return failed(
            trouble,
            where=place(checkpoint.save),
            why="one full disk or power cut at the wrong moment loses the run",
            fix="write aside, sync, verify, rename; load the newest that matches its checksums",
        )
    return passed("a full disk, a kill at any write and a damaged file cost one checkpoint at most")


class _Killed(BaseException):
    """Stands for SIGKILL: nobody catches it."""


def _first_trouble(job: Job, folder: Path, good: dict[str, torch.Tensor]) -> str:
    for error in (OSError(errno.ENOSPC, "No space left on device"), _Killed()):
        for count in range(12):
            with _failing_write(count, error) as failed_at:
                try:
                    loop._save(job, best=False)
                except _Killed:
                    pass
                except OSError:
                    return f"a full disk at write {count + 1} of a save ends the run"
            title = "a kill" if isinstance(error, _Killed) else "a full disk"
            problem = _newest_is(folder, good if failed_at else practice.named_tensors(job.engine))
            if problem:
                when = f"after {title} at write {count + 1}" if failed_at else f"after {title}, and a save that went well"
                return f"{when}: {problem}"
            if not failed_at:
                break
        checkpoint.forget_after(folder, 1)
    loop._save(job, best=False)
    newest = checkpoint.steps_in(folder)[-1]
    for path in sorted(newest.glob("*.safetensors")):
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(bytes(data))
        problem = _newest_is(folder, good)
        if problem:
            return f"with one flipped bit in the newest {path.name}: {problem}"
        data[-3] ^= 1
        path.write_bytes(bytes(data))
    return ""


def _newest_is(folder: Path, good: dict[str, torch.Tensor]) -> str:
    """Empty when the newest whole checkpoint holds these tensors."""
    try:
        saved = checkpoint.load_newest(folder, lambda text: None)
    except Exception as error:
        return f"loading fails: {error}"
    if saved is None:
        return "there is no checkpoint left"
    held = {f"{file}: {n}": t for file, group in saved.tensors.items() for n, t in group.items()}
    name = practice.first_difference(good, held)
    return f"{name} is not what was saved" if name else ""


@contextlib.contextmanager
def _failing_write(after: int, error: BaseException) -> Iterator[list[int]]:
    """Let the write layer fail at its n-th call; yields a list that is filled when it did."""
    real, calls, hit = files.write, iter(range(10**6)), []

    def write(fd: int, data: bytes) -> None:
        if next(calls) == after:
            hit.append(after)
            real(fd, data[: len(data) // 2])
            raise error
        real(fd, data)

    files.write = write
    try:
        yield hit
    finally:
        files.write = real


# ---- V: evaluation -----------------------------------------------------------------------------------------------


def _evaluate(engine: Engine, source: Source) -> dict[str, float]:
    with engine.evaluating():
        return engine.system.evaluate(source, engine)


def _shaken_engine(case: Case, *assignments: str) -> Engine:
    """An engine whose weights are far from their birth, so that nothing hides behind zeros; float32."""
    engine = case.fresh_engine("accum=1", *assignments)
    engine.variant = engine.system.variant(0, case.small.steps)
    dice = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for param in engine.system.parameters():
            param += 0.05 * torch.randn(param.shape, generator=dice).to(param.dtype)
    return engine


@check("V1", "repeat", "err", humbatova=(11,))
def repeat(case: Case) -> Result:
    engine, source = _shaken_engine(case), small_source(case.data.valid)
    before = practice.named_tensors(engine)
    roll_all_dice(11)
    first = _evaluate(engine, source)
    roll_all_dice(12)
    second = _evaluate(engine, source)
    where = place(type(engine.system).evaluate)
    if first != second:
        name = next(n for n in first if first[n] != second.get(n))
        why = "scores are noise, and the best checkpoint is a matter of luck"
        what = f"two evaluations of the same weights differ: {name} {first[name]} and {second.get(name)}"
        return failed(what, where=where, why=why, fix="evaluate in evaluation mode, with dice of its own seed")
    changed = practice.first_difference(before, practice.named_tensors(engine))
    if changed:
        why = "every look at the model changes it"
        return failed(f"evaluation changes {changed}", where=where, why=why, fix="write into no parameter or buffer there")
    noisy = _noisy_module(case, engine)
    if noisy:
        name, module = noisy
        why = "dropout or other noise is live while the model is judged: scores are worse than the model"
        what = f"in evaluation mode {name} gives different outputs for the same input"
        return failed(what, where=case.locate(module), why=why, fix="honour self.training: F.dropout(x, p, self.training)")
    return passed("evaluations of the same weights agree bitwise")


def _noisy_module(case: Case, engine: Engine) -> tuple[str, Any] | None:
    """The innermost module whose inputs are the same for two sets of dice and whose output is not."""
    system, batch = engine.system, case.batch(0)
    system.eval()
    runs = []
    for seed in (1, 2):
        with torch.no_grad(), _inputs_of(system) as given:
            torch.manual_seed(seed)
            shown = outputs(system, lambda: _loss_now(case, system, batch))
        runs.append((given, shown))
    system.train()
    (given_a, shown_a), (given_b, shown_b) = runs
    for (name, module, a), (_, _, b), x, y in zip(shown_a, shown_b, given_a, given_b, strict=False):
        if a.shape == b.shape and not torch.equal(a, b) and _same(x, y):
            return name, module
    if case.probe is not None:
        return _noisy_prediction(case, system)
    return None


def _noisy_prediction(case: Case, system: Any) -> tuple[str, Any] | None:
    system.eval()
    probe = system.probe(case.batch(0))
    values = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        with torch.no_grad():
            values.append(probe.predict(probe.batch))
    system.train()
    return None if torch.equal(*values) else ("the prediction", type(system).loss)


@contextlib.contextmanager
def _inputs_of(system: torch.nn.Module) -> Iterator[list[Any]]:
    """The tensors each module was given, in the order in which modules finish."""
    seen: list[Any] = []

    def keep(module: Any, args: Any, kwargs: Any, out: Any) -> None:
        first = out[0] if isinstance(out, tuple | list) and out else out
        if isinstance(first, torch.Tensor):
            values = [*args, *kwargs.values()]
            seen.append([v.detach().clone() for v in values if isinstance(v, torch.Tensor)])

    handles = [m.register_forward_hook(keep, with_kwargs=True) for n, m in system.named_modules() if n]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(x.shape == y.shape and torch.equal(x, y) for x, y in zip(a, b, strict=True))


@check("V2", "same", "err", humbatova=(11,))
def same(case: Case) -> Result:
    engine = _shaken_engine(case)
    source = small_source(case.data.valid, num_rows=_whole_items(case))
    if source.num_items > 4000 or not source.num_items:
        return skipped("the held-out part cannot be cut to one batch")
    numbers = _evaluate(engine, source)
    name, value = next(iter(numbers.items()))
    measured = _training_names(case, engine)
    if name not in measured:
        return skipped(f"evaluation reports {name}, training {', '.join(measured)}: nothing to compare")
    with engine.evaluating():
        feed = Feed(source, batch=source.num_items, parts=1, seed=1, device=CPU, shuffle=False)
        feed.load(0)
        expected = float(engine.system.loss(feed.part(0), engine)[0])
        draws = [float(engine.system.loss(feed.part(0), engine)[0]) for _ in range(8)]
    apart = abs(value - expected) / max(abs(expected), 1e-12)
    # Where the loss draws noise, other noise is lawful.
    lawful = 5 * statistics.stdev(draws) / max(abs(expected), 1e-12)
    if not apart <= max(SAME_LIMIT, lawful):
        return failed(
            f"the same {source.num_items} items: evaluation says {name} {value:.6g}, the training loss is {expected:.6g}",
            where=place(type(engine.system).evaluate),
            why="the gap between training and held-out loss is arithmetic, not over-fitting",
            fix="share one function between loss and evaluate: same reduction, same mask, same terms",
            value=apart,
            limit=SAME_LIMIT,
        )
    return passed("evaluation and training measure the same on the same items", apart, SAME_LIMIT)


def _whole_items(case: Case) -> int:
    """Rows for a whole number of items and nothing over, where items lie side by side; else the usual number."""
    spans = [s for s in case.data.valid.spans.values() if s > 1]
    step = (spans[0] - 1) if spans else 1
    return (NUM_ROWS // step) * step + (1 if spans else 0)


def _training_names(case: Case, engine: Engine) -> list[str]:
    """What a training step calls its measurements."""
    fresh = case.fresh_engine("accum=1")
    fresh.variant = engine.variant
    fresh.begin(0, 1.0 / case.small.steps, 0.0)
    return list(fresh.step(lambda part: case.batch(0)))


def _loss_is_noisy(case: Case, engine: Engine) -> bool:
    system = engine.system
    system.eval()
    values = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        with torch.no_grad():
            values.append(_loss_now(case, system, case.batch(0)))
    system.train()
    return values[0] != values[1]


@check("V3", "parts", "err", humbatova=(11,))
def parts(case: Case) -> Result:
    """The number must not depend on the batch that evaluation happens to use, nor on a short last one."""
    source = small_source(case.data.valid)
    base = _evaluate(_shaken_engine(case), source)
    worst, told = 0.0, ""
    for rows in (1, 3, 8):
        engine = _shaken_engine(case, f"batch={rows}")
        numbers = _evaluate(engine, source)
        for name, value in numbers.items():
            apart = abs(value - base[name]) / max(abs(base[name]), 1e-12)
            if apart > worst:
                worst, told = apart, f"{name} is {base[name]:.6g} at batch {case.small.batch} and {value:.6g} at batch {rows}"
    halves = _halves_error(case)
    if halves is not None and halves[0] > worst:
        worst, told = halves
    if worst > PARTS_LIMIT:
        return failed(
            told,
            where=place(type(case.shaken()).evaluate),
            why="a short last batch, or the order of averaging, decides part of the score",
            fix="sum over targets and divide once by their number; take exp or log at the end",
            value=worst,
            limit=PARTS_LIMIT,
        )
    return passed("the score does not depend on how the set is cut", worst, PARTS_LIMIT)


def _halves_error(case: Case) -> tuple[float, str] | None:
    """The first number of two unequal parts of the held-out set, weighted, against that of both together."""
    whole = case.data.valid
    spans = [s for s in whole.spans.values() if s > 1]
    step = (spans[0] - 1) if spans else 1
    over = 1 if spans else 0  # neighbouring windows share their border
    # The second part ends in half an item, where items are windows.
    num_a, num_b = 23 * step, 8 * step + step // 2
    if max((len(a) for a in whole.arrays.values()), default=0) < num_a + num_b + over + 1:
        return None
    a = small_source(whole, 0, num_a + over)
    b = small_source(whole, num_a, num_b + over)
    both = small_source(whole, 0, num_a + num_b + over)
    if whole in (a, b, both) or not all(s.num_items for s in (a, b, both)):
        return None
    engine = _shaken_engine(case)
    if _loss_is_noisy(case, engine):
        return None
    values = [next(iter(_evaluate(engine, s).items())) for s in (a, b, both)]
    expected = (num_a * values[0][1] + num_b * values[1][1]) / (num_a + num_b)
    apart = abs(values[2][1] - expected) / max(abs(expected), 1e-12)
    return apart, f"{values[0][0]} of two parts is {expected:.6g} weighted by size, of both together {values[2][1]:.6g}"
