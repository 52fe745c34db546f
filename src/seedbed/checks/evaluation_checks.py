"""Checks V: evaluation is deterministic, equals the training loss at any batch size, and reads the right data in its own mode."""

import contextlib
import math
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from seedbed.checks import short_runs
from seedbed.checks.calls import change, contents, places, record, used_only_by
from seedbed.checks.data_checks import NUM_PAIRED, unpaired
from seedbed.checks.device_checks import inference_engine, perturbed_engine
from seedbed.checks.inference_checks import mode_problem
from seedbed.checks.learning_checks import MEMORISED, overfit_run
from seedbed.checks.registry import check, failed, passed, skipped
from seedbed.checks.small_jobs import NUM_ROWS, advance_global_rng, evaluate, loss_now, small_source
from seedbed.checks.subject import CPU, Subject, probe_of, source_line
from seedbed.checks.watch_ops import caller
from seedbed.config import override
from seedbed.data.feed import Feed, Source
from seedbed.errors import UserError
from seedbed.report.findings import Finding
from seedbed.train import capabilities
from seedbed.train.engine import Engine
from seedbed.train.system import Request, System

# Train against evaluation loss, float32: clean at most 3e-7.
SAME_LIMIT = 1e-5
PARTS_LIMIT = 1e-5
# Share of what was memorised that another row's inputs also achieve: clean .16 to .52, .73 with random tokens; a leak 1.0.
LEAK_LIMIT = 0.9
# Rows of training data, for an evaluation of other data.
NUM_OTHERS = 16
# Standard errors, of as many answers, that a metric of random answers may be off.
SIGMAS, NUM_ANSWERS = 6.0, 256
# Error of a perfect score against the distance of noise from it.
KNOWN = 1e-3


@check("V1", "eval determinism", "err", humbatova=(11,))
def eval_determinism(subject: Subject) -> Finding:
    engine, source = perturbed_engine(subject, CPU), small_source(subject.data.valid)
    before = short_runs.named_tensors(engine)
    advance_global_rng(11)
    first = subject.once("evaluation", lambda: evaluate(engine, source))
    advance_global_rng(12)
    second = evaluate(engine, source)
    where = source_line(type(engine.system).evaluate)
    if first != second:
        name = next(n for n in first if first[n] != second.get(n))
        what = f"two evaluations of the same weights differ: {name} {first[name]} and {second.get(name)}"
        return failed(what, where=where, case="V1-differs")
    if changed := short_runs.first_difference(before, short_runs.named_tensors(engine)):
        return failed(f"evaluation changes {changed}", where=where, case="V1-changes")
    if where := _noisy_forward(subject, engine):
        what = f"in evaluation mode {where.partition(' ')[2]} gives different outputs for the same input"
        return failed(what, where=where, case="V1-noise")
    return passed("evaluations of the same weights agree bitwise")


def _noisy_forward(subject: Subject, engine: Engine) -> str:
    """The innermost module that gives something else for another seed although it gets the same; empty when there is none."""
    system, batch = engine.system, subject.batch(0)
    names = {id(module): name for name, module in system.named_modules()}

    def calls() -> list[Any]:
        seen = list[Any]()
        keep = lambda module, args, given, out: seen.append((module, [*contents([args, given])], [*contents(out)]))  # noqa: E731
        with contextlib.ExitStack() as hooks:  # not a global hook: torch leaves a trace of one that takes keywords
            for module in system.modules():
                hooks.enter_context(module.register_forward_hook(keep, with_kwargs=True))
            loss_now(subject, system, batch)
        return seen

    for (module, *a), (_, *b) in zip(*_with_seeds(system, calls), strict=False):
        if change(a[0], b[0]) == 0.0 < change(a[1], b[1]):
            return short_runs.owner_line(system, f"{names.get(id(module), '')}.")
    probe = capabilities.probe(system.eval(), batch)
    predictions = _with_seeds(system, lambda: probe.predict(probe.batch)) if probe is not None else ()
    return "" if probe is None or torch.equal(*predictions) else source_line(type(system).loss)


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


@check("V2", "eval loss", "err", humbatova=(11,))
def eval_loss(subject: Subject) -> Finding:
    engine = perturbed_engine(subject, CPU)
    few = small_source(subject.data.valid, num_rows=NUM_PAIRED)
    pairs = "" if any(few.spans.values()) else unpaired(few, lambda source: _rows_given(engine, source))
    if problem := pairs or _same_metrics(subject, engine):
        return failed(problem, where=source_line(type(engine.system).evaluate))
    step, over = _step_of_items(subject.data.valid)
    source = small_source(subject.data.valid, num_rows=NUM_ROWS // step * step + over)
    if source.num_items > 4000 or not source.num_items:
        return skipped("the held-out set cannot be reduced to one batch")
    numbers = evaluate(engine, source)
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
        case, where = "V2-differs", used_only_by(subject, lambda: evaluate(engine, source), any_file=True)
        factor = max(value / expected, expected / value) if value * expected > 0 else 0.0
        if factor > 1.5 and abs(factor - round(factor)) < SAME_LIMIT * factor:
            what, case = f"{what}: a factor of {factor:.0f}", "V2-factor"
            for call in record(subject, lambda: evaluate(engine, source), shared="nn data"):
                where = places((call.code, *call.around)) if call.code.co_argcount > 1 else where  # the last gives the metrics
        where = where or source_line(type(engine.system).evaluate)
        return failed(what, where=where, case=case, value=apart, limit=SAME_LIMIT)
    return passed("evaluation and training measure the same on the same items", apart, SAME_LIMIT)


def _rows_given(engine: Engine, source: Source) -> list[bytes]:
    """The rows of all tensors that the model gets in one evaluation, joined row by row."""
    rows: list[bytes] = []

    def look(module: Any, given: Any) -> None:
        parts = [x.numpy() for x in given if isinstance(x, torch.Tensor) and x.ndim]
        count = max((len(x) for x in parts), default=0)
        rows.extend(b"".join(x[n].tobytes() for x in parts if len(x) == count) for n in range(count))

    outer = next(m for m in engine.system.children() if any(True for _ in m.parameters()))
    with outer.register_forward_pre_hook(look):
        evaluate(engine, source)
    return rows


def _same_metrics(subject: Subject, engine: Engine) -> str:
    """Two metrics that depend on the weights and are always one and the same number; empty when there are none."""
    source = small_source(subject.data.valid)
    first = subject.once("evaluation", lambda: evaluate(engine, source))
    equal = partial(math.isclose, rel_tol=1e-12)  # a mean that is multiplied and divided again is off by its last digit
    pairs = [(a, b) for a in first for b in first if a < b and equal(first[a], first[b]) and first[a] % 1]
    second = evaluate(perturbed_engine(subject, CPU, noise=0.2), source) if pairs else {}
    same = [f"{a} and {b} are always the same number" for a, b in pairs if equal(second[a], second[b]) and second[a] != first[a]]
    return same[0] if same else ""


def _step_of_items(source: Source) -> tuple[int, int]:
    """Rows from one item to the next, where items are contiguous windows, and how many adjacent ones share; else 1 and 0."""
    spans = [s for s in source.spans.values() if s > 1]
    return (spans[0] - 1, 1) if spans else (1, 0)


@check("V3", "eval batch size", "err", humbatova=(11,))
def eval_batch_size(subject: Subject) -> Finding:
    """The score must not depend on the evaluation batch size or on a short last batch."""
    source = small_source(subject.data.valid)
    base = subject.once("evaluation", lambda: evaluate(perturbed_engine(subject, CPU), source))
    found = [(0.0, "")]
    for rows in (1, 3, 8):
        for name, value in evaluate(perturbed_engine(subject, CPU, f"batch={rows}"), source).items():
            what = f"{name} is {base[name]:.6g} at batch {subject.small.batch} and {value:.6g} at batch {rows}"
            found.append((abs(value - base[name]) / max(abs(base[name]), 1e-12), what))
    worst, problem = max([*found, _halves_error(subject)], key=lambda pair: pair[0])
    if worst > PARTS_LIMIT:
        return failed(problem, where=source_line(type(subject.perturbed()).evaluate), value=worst, limit=PARTS_LIMIT)
    return passed("the score does not depend on how the set is split", worst, PARTS_LIMIT)


def _halves_error(subject: Subject) -> tuple[float, str]:
    """Difference between the weighted score of two unequal parts of the held-out set and that of both together; 0 if unknown."""
    whole = subject.data.valid
    step, over = _step_of_items(whole)
    # The second part ends in half an item, where items are windows.
    num_a, num_b = 23 * step, 8 * step + step // 2
    if max((len(a) for a in whole.arrays.values()), default=0) < num_a + num_b + over + 1:
        return 0.0, ""
    a = small_source(whole, 0, num_a + over)
    b = small_source(whole, num_a, num_b + over)
    both = small_source(whole, 0, num_a + num_b + over)
    if whole in (a, b, both) or not all(s.num_items for s in (a, b, both)):
        return 0.0, ""
    engine = perturbed_engine(subject, CPU)
    one, other = _with_seeds(engine.system, lambda: loss_now(subject, engine.system, subject.batch(0)))
    if one != other:  # a noisy loss
        return 0.0, ""
    values = [next(iter(evaluate(engine, s).items())) for s in (a, b, both)]
    expected = (num_a * values[0][1] + num_b * values[1][1]) / (num_a + num_b)
    apart = abs(values[2][1] - expected) / max(abs(expected), 1e-12)
    return apart, f"{values[0][0]} of two parts is {expected:.6g} weighted by size, of both together {values[2][1]:.6g}"


@check("V4", "shuffled inputs", "err", humbatova=(11,), needs=("inputs", "targets", "predict"))
def shuffled_inputs(subject: Subject) -> Finding:
    """After memorising one batch, inputs of another row must raise the loss."""
    subject = short_runs.learner(subject)
    trace = overfit_run(subject)
    system = trace.engine.system
    was = system.training
    system.eval()
    try:
        trace.engine.seed_step(0)  # the noise that was learned with the batch
        probe = probe_of(system, subject.batch(0))
        others = ((), (probe.inputs,), (probe.inputs, "index"))  # entries that are another row's, in the prediction only
        with torch.no_grad():
            swaps = ({n: probe.batch[n].roll(1, 0) for n in names if n in probe.batch} for names in others)
            own, other, noisy = (float(probe.objective(probe.predict(probe.batch | swap), probe.batch)) for swap in swaps)
    finally:
        system.train(was)
    # An initial loss far above chance halves without anything being learned.
    if max(trace.losses[-1], own) > min(MEMORISED * trace.first, short_runs.first_baseline(subject)):
        return skipped("one batch was not memorised, so there is no verdict (see E1)")
    kept, by_noise = ((trace.first - score) / max(trace.first - own, 1e-12) for score in (other, noisy))
    if by_noise <= LEAK_LIMIT < kept:
        # Noise derived from sample counters was equal in every step, and identifies rows as well as their inputs.
        return skipped("rows were memorised by the noise of their counters, so there is no verdict on their inputs")
    if kept > LEAK_LIMIT:
        what = f"memorised rows score {own:.3g} with their own inputs and {other:.3g} with another row's"
        return failed(what, where=subject.loss_line(), value=kept, limit=LEAK_LIMIT, severity=subject.unsure)
    return passed(f"own inputs {own:.3g}, another row's {other:.3g}", kept, LEAK_LIMIT)


@dataclass
class Observed:
    """One evaluation: its numbers, modules in a wrong mode and lines that call them, reads of the training data, calls of the
    system's modules, and the scores of held-out items as samples."""

    numbers: dict[str, float] = field(default_factory=dict)
    modes: list[tuple[str, str]] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    scores: dict[str, tuple[float, float, float]] = field(default_factory=dict)


def _evaluate(subject: Subject, source: Source | None = None) -> dict[str, float]:
    return evaluate(inference_engine(subject), source or small_source(subject.data.valid))


def evaluation_line(subject: Subject) -> str:
    """The first function in a file of the recipe that only evaluation uses, or evaluate() itself."""
    return used_only_by(subject, lambda: _evaluate(subject)) or source_line(type(subject.perturbed()).evaluate)


def observed_evaluation(subject: Subject) -> Observed:
    return subject.once("observed evaluation", lambda: _observe(subject))


def _observe(subject: Subject) -> Observed:
    found, own = Observed(), {id(module): name for name, module in inference_engine(subject).system.named_modules()}

    def look(module: nn.Module, given: Any) -> None:
        found.calls[own.get(id(module), "")] += 1
        if problem := mode_problem(module, own):
            found.modes.append((problem, caller()))

    with register_module_forward_pre_hook(look), _recorded_reads(subject.data.train) as found.reads:
        found.numbers = _evaluate(subject)
    with register_module_forward_pre_hook(look):
        found.scores = _own_scores(subject)
    return found


def _own_scores(subject: Subject) -> dict[str, tuple[float, float, float]]:
    """Scores of held-out items as samples; networks that score are made, and read from disk the second time."""
    found, score = {}, subject.declared.own_scores
    with tempfile.TemporaryDirectory() as scratch, contextlib.suppress(UserError):
        for _ in range(2 if score else 0):
            found = dict(score(Path(scratch)))
    return found


@contextlib.contextmanager
def _recorded_reads(source: Source) -> Iterator[list[str]]:
    """Names of attributes that give rows of this source, as they are used."""
    seen, kind, rows = [], type(source), [*source.arrays.values()]

    def look(self: Source, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if name in ("arrays", "batch") or any(found is array for array in rows):
            seen.append(name)
        return found

    source.__class__ = type(kind.__name__, (kind,), {"__getattribute__": look})
    try:
        yield seen
    finally:
        source.__class__ = kind


@check("V5", "evaluation mode", "err", humbatova=(11,))
def modules_in_evaluation(subject: Subject) -> Finding:
    """No module of the system, and no dropout or batch norm of another network, is in training mode inside evaluate(), and none
    builds a graph."""
    if found := observed_evaluation(subject).modes:
        return failed(f"{found[0][0]} in evaluation", where=places((found[0][1], evaluation_line(subject))))
    return passed("every module is in evaluation mode")


@check("V6", "held-out data", "err", humbatova=(1, 11))
def held_out_data(subject: Subject) -> Finding:
    """Evaluation reads the source that it is given: other rows change its numbers, and training data is not read. What is
    trained for comparison at the end of a run, such as a baseline, does not depend on held-out data."""
    data, first = subject.data, observed_evaluation(subject)
    if data.train is data.valid:
        return skipped("training and validation are one source")
    second = _evaluate(subject, data.train.first(NUM_OTHERS))
    differ = [name for name, value in first.numbers.items() if second.get(name) != value]
    if first.reads or not differ:
        what = f"evaluate() reads `{first.reads[0]}` of the training data" if first.reads else "other data gives the same numbers"
        return failed(what, where=evaluation_line(subject), case="V6-other")
    parts = (data.valid, data.valid.first(NUM_OTHERS)) if subject.declared.trains_at_end else ()
    if len({tuple(_trained_at_end(subject, part)) for part in parts}) > 1:
        what = "what a run trains at its end, to compare with, has other losses with other held-out data"
        return failed(what, where=used_only_by(subject, lambda: _trained_at_end(subject, data.valid)))
    return passed(f"{len(differ)} of {len(first.numbers)} numbers differ between validation and training data")


def _trained_at_end(subject: Subject, valid: Source) -> list[float]:
    """Losses of all that is trained when a run ends, before it is evaluated."""
    subject, losses, real = subject.with_data(replace(subject.data, valid=valid)), [], torch.autograd.backward
    subject.small = override(subject.small, ["steps=3"])
    engine = perturbed_engine(subject, CPU)
    engine.begin(0, 1.0)

    def backward(loss: Tensor, *rest: Any, **options: Any) -> None:
        losses.append(float(loss.detach()))
        real(loss, *rest, **options)

    watch, stop = patch.object(torch.autograd, "backward", backward), patch.object(Engine, "evaluating", side_effect=UserError)
    with tempfile.TemporaryDirectory() as scratch, contextlib.suppress(UserError), engine.evaluating(), stop, watch:
        engine.system.sample(Request(Path(scratch)), engine)
    return losses


@check("V8", "known scores", "err", humbatova=(11,), needs=("own_scores",))
def known_scores(subject: Subject) -> Finding:
    """Held-out items that are scored as samples have perfect scores: no distance to themselves, all precision and recall."""
    scores = observed_evaluation(subject).scores
    offs = {name: abs(own - known) / (abs(noise - known) or 1.0) for name, (own, known, noise) in scores.items()}
    if not offs:
        return skipped("samples of this data cannot be scored")
    name = max(offs, key=lambda name: offs[name])
    if not offs[name] <= KNOWN:
        own, known, noise = scores[name]
        what = f"{name} of the held-out items themselves is {own:.4g}, not {known:g}; of noise it is {noise:.4g}"
        where = used_only_by(subject, lambda: _own_scores(subject))
        return failed(what, where=where, value=offs[name], limit=KNOWN)
    return passed(f"{', '.join(offs)} of the held-out items themselves", offs[name], KNOWN)


@check("V7", "chance level", "err", humbatova=(11,), needs=("chance",))
def chance_level(subject: Subject) -> Finding:
    """Metrics of random answers are at chance."""
    engine, rng, worst = inference_engine(subject), torch.Generator().manual_seed(3), 0.0
    probe = probe_of(engine.system, subject.batch(0))

    def guess(module: nn.Module, given: Any, out: Tensor) -> Tensor:
        return torch.randn(out.shape, generator=rng).to(out)

    with engine.system.get_submodule(probe.chance[0]).register_forward_hook(guess):
        found = _evaluate(subject)
    for metric, chance in probe.chance[1].items():
        error = math.sqrt(chance * (1.0 - chance) / NUM_ANSWERS) + 1.0 / NUM_ANSWERS
        worst = max(worst, abs(found.get(metric, chance) - chance) / error)
        if worst > SIGMAS:
            what = f"random answers have {metric} {found[metric]:.3g}; chance is {chance:.3g}"
            return failed(what, where=evaluation_line(subject), value=worst, limit=SIGMAS)
    return passed(f"{', '.join(probe.chance[1])} of random answers; largest distance in standard errors", worst, SIGMAS)
