"""V: evaluation measures what it says, the same every time, however the set is cut."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator
from typing import Any

import torch

from seedbed.checks import practice
from seedbed.checks.case import CPU, Case, outputs, place
from seedbed.checks.device_checks import shaken_engine
from seedbed.checks.jobs import NUM_ROWS, loss_now, roll_all_dice, small_source
from seedbed.checks.learning_checks import MEMORISED, overfit_run
from seedbed.checks.registry import Result, check, failed, passed, skipped
from seedbed.data.feed import Feed, Source
from seedbed.train.engine import Engine

# Train against evaluation loss, float32: clean at most 3e-7.
SAME_LIMIT = 1e-5
PARTS_LIMIT = 1e-5
# Share of what was memorised that another row's inputs bring too: clean .16 to .52, .73 with random tokens; a leak 1.0.
LEAK_LIMIT = 0.9


def _evaluate(engine: Engine, source: Source) -> dict[str, float]:
    with engine.evaluating():
        return engine.system.evaluate(source, engine)


@check("V1", "repeat", "err", humbatova=(11,))
def repeat(case: Case) -> Result:
    engine, source = shaken_engine(case, CPU), small_source(case.data.valid)
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
        where = case.locate(practice.owner(engine.system, f"{name}.") if isinstance(module, torch.nn.Module) else module)
        return failed(what, where=where, why=why, fix="honour self.training: F.dropout(x, p, self.training)")
    return passed("evaluations of the same weights agree bitwise")


def _noisy_module(case: Case, engine: Engine) -> tuple[str, Any] | None:
    """The innermost module whose inputs are the same for two sets of dice and whose output is not."""
    system, batch = engine.system, case.batch(0)
    system.eval()
    runs = []
    for seed in (1, 2):
        with torch.no_grad(), _inputs_of(system) as given:
            torch.manual_seed(seed)
            shown = outputs(system, lambda: loss_now(case, system, batch))
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
    engine = shaken_engine(case, CPU)
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
            values.append(loss_now(case, system, case.batch(0)))
    system.train()
    return values[0] != values[1]


@check("V3", "parts", "err", humbatova=(11,))
def parts(case: Case) -> Result:
    """The number must not depend on the batch that evaluation happens to use, nor on a short last one."""
    source = small_source(case.data.valid)
    base = _evaluate(shaken_engine(case, CPU), source)
    worst, told = 0.0, ""
    for rows in (1, 3, 8):
        engine = shaken_engine(case, CPU, "accum=1", f"batch={rows}")
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
    engine = shaken_engine(case, CPU)
    if _loss_is_noisy(case, engine):
        return None
    values = [next(iter(_evaluate(engine, s).items())) for s in (a, b, both)]
    expected = (num_a * values[0][1] + num_b * values[1][1]) / (num_a + num_b)
    apart = abs(values[2][1] - expected) / max(abs(expected), 1e-12)
    return apart, f"{values[0][0]} of two parts is {expected:.6g} weighted by size, of both together {values[2][1]:.6g}"


@check("V4", "chance", "err", humbatova=(11,), needs=("inputs", "targets"))
def chance(case: Case) -> Result:
    """After one batch was memorised: another row's inputs must bring the loss back up."""
    trace = overfit_run(case)
    system = trace.engine.system
    was = system.training
    system.eval()
    try:
        trace.engine.roll_dice(0)  # the noise that was learned with the batch
        probe = system.probe(case.batch(0))
        assert probe is not None
        with torch.no_grad():
            batch = probe.batch
            swapped = {**batch, probe.inputs: batch[probe.inputs].roll(1, 0)}
            own = float(probe.objective(probe.predict(batch), batch))
            other = float(probe.objective(probe.predict(swapped), batch))
    finally:
        system.train(was)
    if max(trace.losses[-1], own) > MEMORISED * trace.first:
        return skipped("one batch was not learned by heart, so that nothing can be told (see E1)")
    kept = (trace.first - other) / max(trace.first - own, 1e-12)
    if kept > LEAK_LIMIT:
        return failed(
            f"memorised rows score {own:.3g} with their own inputs and {other:.3g} with another row's",
            where=practice.loss_place(case),
            why="the answer does not come from the inputs: the target leaks in by another way",
            fix="see C2; look for targets, row numbers or batch order in what the model is given",
            value=kept,
            limit=LEAK_LIMIT,
        )
    return passed(f"own inputs {own:.3g}, another row's {other:.3g}", kept, LEAK_LIMIT)
