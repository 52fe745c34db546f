"""Checks V: evaluation is deterministic, equals the training loss, and does not depend on the batch size."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch

from seedbed.checks import short_runs
from seedbed.checks.device_checks import perturbed_engine
from seedbed.checks.learning_checks import MEMORISED, first_baseline, overfit_run
from seedbed.checks.registry import check, failed, passed, skipped
from seedbed.checks.small_jobs import NUM_ROWS, advance_global_rng, loss_now, small_source
from seedbed.checks.subject import CPU, Subject, outputs, source_line
from seedbed.data.feed import Feed, Source
from seedbed.report.findings import Finding
from seedbed.train import capabilities
from seedbed.train.engine import Engine
from seedbed.train.probe import Probe
from seedbed.train.system import System

# Train against evaluation loss, float32: clean at most 3e-7.
SAME_LIMIT = 1e-5
PARTS_LIMIT = 1e-5
# Share of what was memorised that another row's inputs also achieve: clean .16 to .52, .73 with random tokens; a leak 1.0.
LEAK_LIMIT = 0.9


@check("V1", "eval determinism", "err", humbatova=(11,))
def eval_determinism(subject: Subject) -> Finding:
    engine, source = perturbed_engine(subject, CPU), small_source(subject.data.valid)
    before = short_runs.named_tensors(engine)
    advance_global_rng(11)
    first = subject.once("evaluation", lambda: _evaluate(engine, source))
    advance_global_rng(12)
    second = _evaluate(engine, source)
    where = source_line(type(engine.system).evaluate)
    if first != second:
        name = next(n for n in first if first[n] != second.get(n))
        why = "scores are noise, and the best checkpoint is a matter of luck"
        what = f"two evaluations of the same weights differ: {name} {first[name]} and {second.get(name)}"
        return failed(what, where=where, why=why, fix="evaluate in evaluation mode, with a fixed seed")
    changed = short_runs.first_difference(before, short_runs.named_tensors(engine))
    if changed:
        why = "every evaluation changes the model"
        return failed(f"evaluation changes {changed}", where=where, why=why, fix="write into no parameter or buffer there")
    noisy = _noisy_module(subject, engine)
    if noisy:
        name, module = noisy
        why = "dropout or other noise is active during evaluation: scores are worse than the model"
        what = f"in evaluation mode {name} gives different outputs for the same input"
        where = subject.locate(short_runs.owner(engine.system, f"{name}.") if isinstance(module, torch.nn.Module) else module)
        return failed(what, where=where, why=why, fix="honour self.training: F.dropout(x, p, self.training)")
    return passed("evaluations of the same weights agree bitwise")


def _evaluate(engine: Engine, source: Source) -> dict[str, float]:
    with engine.evaluating():
        return engine.system.evaluate(source, engine)


def _noisy_module(subject: Subject, engine: Engine) -> tuple[str, Any] | None:
    """The innermost module whose inputs are equal for two seeds and whose output is not."""
    system, batch = engine.system, subject.batch(0)
    system.eval()
    runs = []
    for seed in (1, 2):
        with torch.no_grad(), _inputs_of(system) as given:
            torch.manual_seed(seed)
            shown = outputs(system, lambda: loss_now(subject, system, batch))
        runs.append((given, shown))
    system.train()
    (given_a, shown_a), (given_b, shown_b) = runs
    for (name, module, a), (_, _, b), x, y in zip(shown_a, shown_b, given_a, given_b, strict=False):
        same = len(x) == len(y) and all(v.shape == w.shape and torch.equal(v, w) for v, w in zip(x, y, strict=True))
        if a.shape == b.shape and not torch.equal(a, b) and same:
            return name, module
    if subject.probe is None:
        return None
    probe = capabilities.probe(system.eval(), subject.batch(0))
    assert probe is not None
    predictions = _with_seeds(system, lambda: probe.predict(probe.batch))
    return None if torch.equal(*predictions) else ("the prediction", type(system).loss)


def _with_seeds(system: System, act: Callable[[], Any]) -> list[Any]:
    """Two results in evaluation mode, each with its own seed."""
    system.eval()
    values = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        with torch.no_grad():
            values.append(act())
    system.train()
    return values


@contextlib.contextmanager
def _inputs_of(system: torch.nn.Module) -> Iterator[list[Any]]:
    """The tensor inputs of each module, in order of completion."""
    seen: list[Any] = []

    def keep(module: Any, args: Any, kwargs: Any, out: Any) -> None:
        first = out[0] if isinstance(out, tuple | list) and out else out
        if isinstance(first, torch.Tensor):
            values = [*args, *kwargs.values()]
            seen.append([v.detach().clone() for v in values if isinstance(v, torch.Tensor)])

    with contextlib.ExitStack() as hooks:
        for module in list(system.modules())[1:]:
            hooks.enter_context(module.register_forward_hook(keep, with_kwargs=True))
        yield seen


@check("V2", "eval loss", "err", humbatova=(11,))
def eval_loss(subject: Subject) -> Finding:
    engine = perturbed_engine(subject, CPU)
    step, over = _step_of_items(subject.data.valid)
    source = small_source(subject.data.valid, num_rows=NUM_ROWS // step * step + over)
    if source.num_items > 4000 or not source.num_items:
        return skipped("the held-out set cannot be reduced to one batch")
    numbers = _evaluate(engine, source)
    name, value = next(iter(numbers.items()))
    fresh = subject.fresh_engine("accum=1")
    fresh.variant = engine.variant
    fresh.begin(0, 1.0 / subject.small.steps, 0.0)
    measured = list(fresh.step(lambda part: subject.batch(0)))
    if name not in measured:
        return skipped(f"evaluation reports {name}, training {', '.join(measured)}: nothing to compare")
    with engine.evaluating():
        feed = Feed(source, batch=source.num_items, parts=1, seed=1, device=CPU, shuffle=False)
        feed.load(0)
        expected = float(engine.system.loss(feed.part(0), engine)[0])
        draws = [float(engine.system.loss(feed.part(0), engine)[0]) for _ in range(8)]
    apart = abs(value - expected) / max(abs(expected), 1e-12)
    # Where the loss draws noise, other noise is legitimate.
    noise = 5 * statistics.stdev(draws) / max(abs(expected), 1e-12)
    if not apart <= max(SAME_LIMIT, noise):
        what = f"the same {source.num_items} items: evaluation says {name} {value:.6g}, the training loss is {expected:.6g}"
        why = "the gap between training and held-out loss is arithmetic, not over-fitting"
        fix = "share one function between loss and evaluate: same reduction, same mask, same terms"
        return failed(what, where=source_line(type(engine.system).evaluate), why=why, fix=fix, value=apart, limit=SAME_LIMIT)
    return passed("evaluation and training measure the same on the same items", apart, SAME_LIMIT)


def _step_of_items(source: Source) -> tuple[int, int]:
    """Rows from one item to the next, where items are contiguous windows, and how many adjacent ones share; else 1 and 0."""
    spans = [s for s in source.spans.values() if s > 1]
    return (spans[0] - 1, 1) if spans else (1, 0)


@check("V3", "eval batch size", "err", humbatova=(11,))
def eval_batch_size(subject: Subject) -> Finding:
    """The score must not depend on the evaluation batch size or on a short last batch."""
    source = small_source(subject.data.valid)
    base = subject.once("evaluation", lambda: _evaluate(perturbed_engine(subject, CPU), source))
    worst, problem = 0.0, ""
    for rows in (1, 3, 8):
        engine = perturbed_engine(subject, CPU, "accum=1", f"batch={rows}")
        numbers = _evaluate(engine, source)
        for name, value in numbers.items():
            apart = abs(value - base[name]) / max(abs(base[name]), 1e-12)
            if apart > worst:
                worst = apart
                problem = f"{name} is {base[name]:.6g} at batch {subject.small.batch} and {value:.6g} at batch {rows}"
    halves = _halves_error(subject)
    if halves is not None and halves[0] > worst:
        worst, problem = halves
    if worst > PARTS_LIMIT:
        where = source_line(type(subject.perturbed()).evaluate)
        why = "a short last batch, or the order of averaging, decides part of the score"
        fix = "sum over targets and divide once by their number; take exp or log at the end"
        return failed(problem, where=where, why=why, fix=fix, value=worst, limit=PARTS_LIMIT)
    return passed("the score does not depend on how the set is split", worst, PARTS_LIMIT)


def _halves_error(subject: Subject) -> tuple[float, str] | None:
    """Difference between the weighted score of two unequal parts of the held-out set and that of both together."""
    whole = subject.data.valid
    step, over = _step_of_items(whole)
    # The second part ends in half an item, where items are windows.
    num_a, num_b = 23 * step, 8 * step + step // 2
    if max((len(a) for a in whole.arrays.values()), default=0) < num_a + num_b + over + 1:
        return None
    a = small_source(whole, 0, num_a + over)
    b = small_source(whole, num_a, num_b + over)
    both = small_source(whole, 0, num_a + num_b + over)
    if whole in (a, b, both) or not all(s.num_items for s in (a, b, both)):
        return None
    engine = perturbed_engine(subject, CPU)
    one, other = _with_seeds(engine.system, lambda: loss_now(subject, engine.system, subject.batch(0)))
    if one != other:  # a noisy loss
        return None
    values = [next(iter(_evaluate(engine, s).items())) for s in (a, b, both)]
    expected = (num_a * values[0][1] + num_b * values[1][1]) / (num_a + num_b)
    apart = abs(values[2][1] - expected) / max(abs(expected), 1e-12)
    return apart, f"{values[0][0]} of two parts is {expected:.6g} weighted by size, of both together {values[2][1]:.6g}"


@check("V4", "shuffled inputs", "err", humbatova=(11,), needs=("inputs", "targets", "predict"))
def shuffled_inputs(subject: Subject) -> Finding:
    """After memorising one batch, inputs of another row must raise the loss."""
    trace = overfit_run(subject)
    system = trace.engine.system
    was = system.training
    system.eval()
    try:
        trace.engine.seed_step(0)  # the noise that was learned with the batch
        probe = capabilities.probe(system, subject.batch(0))
        assert probe is not None
        with torch.no_grad():
            own = float(probe.objective(probe.predict(probe.batch), probe.batch))
            other, noisy = (_with_others(probe, names) for names in ((probe.inputs,), (probe.inputs, "index")))
    finally:
        system.train(was)
    # An initial loss far above chance halves without anything being learned.
    if max(trace.losses[-1], own) > min(MEMORISED * trace.first, first_baseline(subject)):
        return skipped("one batch was not memorised, so there is no verdict (see E1)")
    kept, by_noise = ((trace.first - score) / max(trace.first - own, 1e-12) for score in (other, noisy))
    if by_noise <= LEAK_LIMIT < kept:
        # Noise derived from sample counters was equal in every step, and identifies rows as well as their inputs.
        return skipped("rows were memorised by the noise of their counters, so there is no verdict on their inputs")
    if kept > LEAK_LIMIT:
        what = f"memorised rows score {own:.3g} with their own inputs and {other:.3g} with another row's"
        why = "the prediction does not come from the inputs: the target leaks in another way"
        fix = "see C2; look for targets, row numbers or batch order in the model's inputs"
        where, unsure = short_runs.loss_line(subject), subject.unsure
        return failed(what, where=where, why=why, fix=fix, value=kept, limit=LEAK_LIMIT, severity=unsure)
    return passed(f"own inputs {own:.3g}, another row's {other:.3g}", kept, LEAK_LIMIT)


def _with_others(probe: Probe, names: tuple[str, ...]) -> float:
    """The loss when these entries are another row's, in the prediction only."""
    swapped = {**probe.batch, **{name: probe.batch[name].roll(1, 0) for name in names if name in probe.batch}}
    return float(probe.objective(probe.predict(swapped), probe.batch))
