"""Checks I: generation agrees with training: caches, sampling path, mode, exports, samplers, pixels, and controls in play."""

import inspect
import math
import tempfile
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.nn.modules.module import register_module_forward_pre_hook

from seedbed import config as configs
from seedbed.checks.calls import only_called_by, recipe_calls, used_only_by
from seedbed.checks.device_checks import inference_engine
from seedbed.checks.registry import check, failed, passed, skipped
from seedbed.checks.small_jobs import NUM_TOKENS, advance_global_rng, sample_options, short_options
from seedbed.checks.structure_checks import CONTROL
from seedbed.checks.subject import CPU, ROWS, Subject, probe_of, source_line, spread
from seedbed.checks.watch_ops import Integers
from seedbed.errors import UserError
from seedbed.report.findings import Finding
from seedbed.train import capabilities, exports, inference_weights
from seedbed.train.engine import Engine, EvalEngine
from seedbed.train.probe import OdeSampler
from seedbed.train.system import Request, System

# Cached against full forward, relative to the mean output: sound 1e-15 in float64, 4e-7 in float32.
CACHE_LIMIT = {torch.float64: 1e-9, torch.float32: 1e-4}
# Modules that act differently in training.
MODES = (torch.nn.modules.dropout._DropoutNd, torch.nn.modules.batchnorm._NormBase)
# Share of a measure of samples by which it may rise, float32.
SAME = 1e-5
# Samples against closed forms, float32: at most 2e-6.
EXACT = 1e-4
# Share of a sampler's order that is measured on a Gaussian of this standard deviation: .97 to 1.05.
ORDER, DATA_STD, NUM_STEPS = 0.8, 0.5, 8
# Standard errors that a statistic may be off.
SIGMAS = 5.0
GUIDANCE = (0.0, 0.5, 1.0, 2.0)
# Variance of the number of dropped conditions of a batch against the binomial one: per sample .9, one draw per batch 22.
DISPERSION, NUM_BATCHES, NUM_ROWS = 4.0, 64, 16
NUM_PASSES = 100
# Full deflection against half of the median control of training on that side; and, in spans, beyond its outer quantiles.
REACHED, BEYOND, QUANTILES = 0.5, 0.1, (0.005, 0.995)


@check("I1", "KV cache", "err", humbatova=(4,), needs=("cached", "inputs"))
def kv_cache(subject: Subject) -> Finding:
    system = subject.perturbed()
    limit = CACHE_LIMIT.get(subject.dtype, 1e-4)
    worst, problem = 0.0, ""
    # Two prompts in turn: the first must not affect the second. Then shorter ones.
    turns = [(0, None), (1, None), (0, None), (1, 1), (0, 2), (0, 7)]
    with torch.no_grad():
        for n, length in turns:
            probe = probe_of(system, subject.perturbed_batch(n))
            batch = {k: v[:, :length] if v.ndim > 1 else v for k, v in probe.batch.items()}
            full, stepwise = probe.predict(batch), probe.cached(batch[probe.inputs])
            if full.shape != stepwise.shape:
                worst, problem = 1.0, f"the cache gives shape {tuple(stepwise.shape)}, not {tuple(full.shape)}"
                break
            apart_T = (full - stepwise).abs().flatten(2).amax((0, 2)) / spread(full)
            if float(apart_T.max()) > worst:
                worst = float(apart_T.max())
                first = int((apart_T > limit).int().argmax())
                problem = f"cached and full outputs part at token {first}: {worst:.1e} of their mean"
        if worst <= limit:
            return passed("cached = full", worst, limit)
        probe = subject.declared
        where = used_only_by(subject, lambda: probe.cached(probe.batch[probe.inputs]), any_file=True)
    return failed(problem, where=where or source_line(type(system).sample), value=worst, limit=limit)


def _sample(engine: Engine, **options: Any) -> list[Any]:
    """The text of a sample, and what is in its files."""
    with tempfile.TemporaryDirectory() as folder, engine.evaluating():
        sample = engine.system.sample(Request(Path(folder), options), engine)
        return [sample.text, *(path.read_bytes() for path in sample.files)]


@check("I2", "sampling parity", "err", humbatova=(10,), needs=("inputs", "decode"))
def sampling_parity(subject: Subject) -> Finding:
    """The greedy continuation by the sampling path equals the one by the training forward pass."""
    engine = inference_engine(subject)
    system = engine.system
    if subject.declared.order != "causal":
        return _typed_inputs(subject, engine)
    with engine.evaluating():
        moves = isinstance(system, capabilities.Completing) and not _has_noise(subject, system)
        asked = [*((row, False) for row in range(ROWS)), *[(0, True)] * moves]
        wanted = [(prompt, text) for prompt, text in (_greedy(subject, system, *one) for one in asked) if prompt]
    if isinstance(system, capabilities.Completing) and (problem := _neighbour_problem(subject, engine)):
        where = used_only_by(subject, lambda: _neighbour_problem(subject, engine)) or source_line(type(system).complete)
        return failed(problem, where=where, case="I2-neighbour")
    if not wanted:
        return skipped("no prompt survives decoding and encoding")
    # A model that starts from noise must start from that of training.
    options = {"tokens": NUM_TOKENS, "temperature": 0.0} | (
        {"seed": subject.small.seed} if "seed" in sample_options(engine) else {}
    )
    found: list[str] = []
    continue_all = lambda: found.extend(_sample(engine, prompt=prompt, **options)[0] for prompt, _ in wanted)  # noqa: E731
    try:
        where = used_only_by(subject, continue_all, any_file=True) or source_line(type(system).sample)
    except UserError as error:
        return skipped(f"the recipe does not continue a prompt: {error}")
    for shown, (_, expected) in zip(found, wanted, strict=True):
        if shown.startswith(expected):
            continue
        same = next((i for i, (a, b) in enumerate(zip(shown, expected, strict=False)) if a != b), len(shown))
        parts = f"{shown[same : same + 12]!r} instead of {expected[same : same + 12]!r}"
        what = f"the likeliest continuation parts from the training forward at character {same}: {parts}"
        return failed(what, where=where)
    return passed("greedy tokens by sampling and by the training forward agree")


def _typed_inputs(subject: Subject, engine: Engine) -> Finding:
    """A row of the data, typed as a prompt, reaches the model as the data gives it."""
    batch = subject.batch(0)
    probe = probe_of(engine.system, batch)
    for row in batch[probe.inputs]:
        prompt = probe.decode(row)
        with Integers() as seen:
            try:
                where = used_only_by(subject, lambda prompt=prompt: _sample(engine, prompt=prompt))
            except UserError as error:
                return skipped(f"the recipe does not take a prompt: {error}")
        alike = [v.flatten() for v in seen.tensors if v.numel() == row.numel()]
        if not alike:
            return skipped("a prompt does not reach the model as a row of the data")
        if not any(torch.equal(v.to(row.dtype), row) for v in alike):
            fed = max(alike, key=lambda v: len({*v.tolist()} & {*row.tolist()})).tolist()[:16]
            wanted = row.tolist()[:16]
            what = f"typed as {prompt!r}, a row of the data reaches the model as {fed}, not as {wanted}"
            return failed(what, where=where or source_line(type(engine.system).sample), case="I2-typed")
    return passed(f"{len(batch[probe.inputs])} rows, typed as prompts, reach the model as the data gives them")


def _neighbour_problem(subject: Subject, engine: Engine) -> str:
    """What differs when a prompt is continued beside a longer one instead of one of its length; empty when nothing does."""
    system = engine.system
    probe = probe_of(system, subject.batch(0))
    assert isinstance(system, capabilities.Completing)
    rows = probe.batch[probe.inputs]
    short, equal, long = (probe.decode(rows[n, :size]) for n, size in ((0, 3), (1, 3), (1, rows.shape[1] - 1)))
    with engine.evaluating():
        for place, orders in ((0, ([short, equal], [short, long])), (1, ([equal, short], [long, short]))):
            try:
                one, other = (system.complete(prompts, tokens=4, temperature=0.0)[place] for prompts in orders)
            except (IndexError, RuntimeError) as error:
                return f"prompts of unequal length cannot be continued together: {error}"
            if one != other:
                found = f"{one!r} beside an equally long one, {other!r} beside a longer one"
                return f"the likeliest continuation of a prompt is {found}"
    return ""


def _has_noise(subject: Subject, system: System) -> bool:
    """Whether a prediction depends on more than its inputs, such as noise by its number in the text."""
    probe = probe_of(system, subject.batch(0))
    rows = probe.batch[probe.inputs][:1]
    others = [{k: rows if k == probe.inputs else v[n : n + 1] for k, v in probe.batch.items()} for n in (0, 1)]
    with torch.no_grad():
        return not torch.equal(*map(probe.predict, others))


def _greedy(subject: Subject, system: System, number: int, overflows: bool) -> tuple[str, str]:
    """A prompt and its greedy continuation by the training forward pass: within one context, or after twice as many tokens, of
    which half a context is read."""
    probe = probe_of(system, subject.batch(0))
    context = probe.batch[probe.inputs].shape[1]
    num = min(NUM_TOKENS, context // 2 if overflows else context - 2)
    row = probe.batch[probe.inputs][number, : context - num]
    start = 0
    if overflows:
        row = probe.batch[probe.inputs][number : number + 2].flatten()
        start = len(row) - context // 2
    prompt = probe.decode(row)
    with torch.no_grad():
        for _ in range(num):
            read_1T = row[None, start:]
            batch = {k: read_1T if k in (probe.inputs, probe.targets) else v[:1] for k, v in probe.batch.items()}
            # Where a position is predicted several times, the last prediction counts.
            logits_KV = torch.atleast_2d(probe.predict(batch)[0, -1])
            row = torch.cat([row, logits_KV[-1:].argmax(-1)])
    # The last character may be half written, and a sample is longer.
    return "" if "\ufffd" in prompt else prompt, probe.decode(row).rstrip("\ufffd")


@check("I6", "eval mode", "err", humbatova=(11, 6))
def eval_mode(subject: Subject) -> Finding:
    """Samples are made in evaluation mode without a graph, change nothing, repeat, and follow their options."""
    engine = inference_engine(subject)
    system = engine.system
    troubles: list[str] = []
    before = {n: t.detach().clone() for n, t in (*system.named_parameters(), *system.named_buffers())}
    names = {id(module): name for name, module in system.named_modules()}

    def look(module: torch.nn.Module, given: Any) -> None:
        if problem := mode_problem(module, names):
            troubles.append(f"{problem} while sampling")

    known = sample_options(engine)
    options = {**short_options(engine), **({"temperature": 1.0} if "temperature" in known else {})}
    with engine.evaluating():
        if system.training or torch.is_grad_enabled():
            state = "in training mode" if system.training else "with gradients on"
            return failed(f"evaluation runs {state}", where=source_line(inspect.unwrap(Engine.evaluating)), case="I6-training")
    try:
        where = used_only_by(subject, lambda: _sample(engine, **options)) or source_line(type(system).sample)
    except UserError as error:
        return skipped(str(error))
    shown = []
    with register_module_forward_pre_hook(look):
        for seed in (1, 2):
            advance_global_rng(seed)
            shown.append(_sample(engine, **options))
        if "seed" in known and shown[0] == _sample(engine, **options, seed=2):
            troubles.append("another seed gives the same sample")
        troubles += _option_problems(subject, engine, known)
    if shown[0] != shown[1]:
        troubles.append("two samples of the same weights and options differ")
    changed = next((n for n, t in (*system.named_parameters(), *system.named_buffers()) if not torch.equal(t, before[n])), "")
    if changed:
        troubles.append(f"sampling changes {changed}")
    if not all(m.training for m in system.modules()):
        troubles.append("sampling leaves the system in evaluation mode")
    if troubles:
        return failed(troubles[0], where=where)
    if not any(shown[0]):
        return skipped("the recipe shows no samples")
    return passed("samples are made in evaluation mode, without a graph, and repeat")


def mode_problem(module: torch.nn.Module, names: dict[int, str]) -> str:
    """What is wrong with the mode in which a module runs outside of training; `names` has those of the system, by id."""
    name = names.get(id(module), type(module).__name__) or "the system"
    # A model of another kind, such as a classifier that scores samples; a baseline may be trained there.
    if module.training and (id(module) in names or (isinstance(module, MODES) and not torch.is_grad_enabled())):
        return f"{name} is in training mode"
    # A model that optimises its output takes gradients inside torch.func.grad, and no graph outlives it.
    is_kept = torch.is_grad_enabled() and id(module) in names and not functorch.peek_interpreter_stack()
    return f"{name} builds a graph" if is_kept else ""


def _option_problems(subject: Subject, engine: Engine, known: dict[str, Any]) -> list[str]:
    """What the options of sampling do otherwise than they say."""
    found, system = [], engine.system
    if "temperature" in known:
        few = {**short_options(engine), "temperature": 1.0}
        greedy = _sample(engine, **{**few, "temperature": 0.0})
        for name, value in (("temperature", 1e-5), ("top_k", 1), ("top_p", 1e-9)):
            if name in known and _sample(engine, **{**few, name: value}) != greedy:
                found.append(f"{name}={value:g} does not take the likeliest token, as temperature=0 does")
    if isinstance(system, capabilities.Completing):
        with engine.evaluating():
            texts = system.complete([""] * 4, tokens=NUM_TOKENS, temperature=3.0)
        found += ["all samples of one prompt are the same text"] if len(set(texts)) == 1 else []
    for name, (values, measure) in (subject.declared.options or {}).items():
        with torch.no_grad():
            first, *_, last = costs = [measure(value) for value in values]
        worse = [v for v, (a, b) in zip(values[1:], pairwise(costs), strict=True) if bool((b > a + SAME * spread(a)).any())]
        found += [f"what {name} is to lower rises at {name}={worse[0]:g}"] if worse else []
        found += [f"{name} has no effect"] if torch.equal(first, last) else []
    return found


@check("I7", "export", "err", humbatova=(8,))
def export(subject: Subject) -> Finding:
    engine = inference_engine(subject)
    other = EvalEngine(subject.fresh_system(subject.config.seed + 1), subject.small, CPU)
    written = partial(failed, where=source_line(exports.write), case="I7-written")
    with tempfile.TemporaryDirectory() as scratch, engine.evaluating():
        with exports.new_folder(Path(scratch) / "export") as folder:
            exports.write(engine, {"config": configs.to_json(subject.small), "data": subject.data.facts}, folder)
        try:
            found = exports.read(Path(scratch) / "export")
            assert found is not None
            inference_weights.restore(other, found)
        except UserError as error:
            return written(str(error))
        live, loaded = (dict(system.named_parameters()) for system in (engine.system, other.system))
        wrong, name = max((float((loaded[name] - param).abs().max()), name) for name, param in live.items())
    if wrong:
        return written(f"{name} differs by {wrong:.1e} in the export", value=wrong, limit=0.0)
    if other.system.training:
        return failed("an exported model is loaded in training mode", where=source_line(inference_weights.restore))
    return passed(f"all {len(live)} tensors come back from the export")


def _sampler_line(subject: Subject, ode: OdeSampler) -> str:
    run = lambda: ode.run(_still, next(iter(ode.orders)), 2, 2.0 if ode.condition else 1.0)  # noqa: E731
    train = lambda: subject.loss_of(subject.perturbed(), subject.perturbed_batch())  # noqa: E731
    return next(iter(only_called_by(subject, run, train)), source_line(type(subject.perturbed()).sample))


def _still(x: Tensor, time: Tensor, condition: Tensor) -> Tensor:
    return torch.zeros_like(x)


def _over(value_B: Tensor, x: Tensor) -> Tensor:
    return value_B.to(x.dtype).view(-1, *[1] * (x.ndim - 1)).expand_as(x)


def _gaussian(x: Tensor, time_B: Tensor, condition_B: Tensor) -> Tensor:
    """The velocity of a Gaussian of data: it maps noise x to DATA_STD x."""
    t = _over(time_B, x)
    return x * (t * DATA_STD**2 - (1.0 - t)) / ((1.0 - t).square() + (t * DATA_STD).square())


@check("I3", "sampler", "err", humbatova=(10, 11), needs=("ode",))
def sampler(subject: Subject) -> Finding:
    """With an analytic velocity, samples are those of the closed form: a constant, the time, and a Gaussian's exact velocity."""
    ode, problem, worst = subject.declared.ode, "", 0.0
    noise = ode.run(_still, next(iter(ode.orders)), 1, 1.0)
    error, mean, std = 1.0 / math.sqrt(noise.numel()), float(noise.mean()), float(noise.std())
    distinct = len(torch.unique(noise.flatten(1), dim=0))
    if max(abs(mean), abs(std - 1.0)) > SIGMAS * error:
        problem = f"sampling starts from noise of mean {mean:.3g} and standard deviation {std:.3g}, not 0 and 1"
    elif distinct < len(noise):
        problem = f"{len(noise)} samples start from {distinct} different noises"
    for name, order in () if problem else ode.orders.items():
        seen: dict[float, None] = {}
        clock = lambda x, t, c, seen=seen: (seen.setdefault(float(t[0])), _over(t, x))[1]  # noqa: E731
        fields = (lambda x, t, c: torch.full_like(x, 0.75), clock)
        constant, times = (ode.run(field, name, NUM_STEPS, 1.0) - noise for field in fields)
        euler = sum(here * (there - here) for here, there in pairwise((*seen, 1.0)))
        wanted, allowed = (euler, EXACT) if order == 1 else (0.5, 1.0 / NUM_STEPS**2)  # Heun may end by Euler
        worst = max(worst, float((constant - 0.75).abs().max()))
        ends = [ode.run(_gaussian, name, n, 1.0) for n in (NUM_STEPS, 2 * NUM_STEPS)]
        errors = [max(float((end - DATA_STD * noise).abs().mean()), 1e-12) for end in ends]
        if not worst <= EXACT:
            problem = f"{name}: a velocity of 0.75 moves samples by {float(constant.mean()):.4g} in {NUM_STEPS} steps"
        elif not float((times - wanted).abs().max()) <= allowed:
            problem = f"{name}: a velocity of t moves samples by {float(times.mean()):.4g} in {NUM_STEPS} steps, not {wanted:.4g}"
        elif not math.log2(errors[0] / errors[1]) >= ORDER * order and errors[1] > EXACT:
            problem = f"{name}: the error falls with order {math.log2(errors[0] / errors[1]):.2f} of the step size, not {order}"
        if problem:
            break
    if problem:
        return failed(problem, where=_sampler_line(subject, ode), value=worst, limit=EXACT)
    return passed(f"{', '.join(ode.orders)} follow closed forms", worst, EXACT)


@check("I4", "guidance", "err", humbatova=(4, 10), needs=("ode", "predict"))
@torch.no_grad()
def guidance(subject: Subject) -> Finding:
    """Guidance is linear from unconditional (0) to conditional (1); conditions are dropped one by one, as often as declared."""
    ode = subject.declared.ode
    name = next(iter(ode.orders))
    if not ode.condition:
        return skipped("no condition is dropped in training, so there is no guidance")
    value_C = torch.randn(max(int(ode.conditions.max()), ode.null) + 1)
    noise = ode.run(_still, name, 2, 1.0)
    moves = {g: ode.run(lambda x, t, c: _over(value_C[c], x), name, 2, g) - noise for g in GUIDANCE}
    own, none = _over(value_C[ode.conditions], noise), value_C[ode.null]
    offs = {g: float((move - none - g * (own - none)).abs().max()) for g, move in moves.items()}
    worst = max(offs, key=lambda g: offs[g])
    if not offs[1.0] <= EXACT:
        return skipped("samples without guidance are off already (see I3)")
    if not offs[worst] <= EXACT:
        what = f"guidance {worst:g} is off by {offs[worst]:.3g} from unconditional + {worst:g} (conditional - unconditional)"
        return failed(what, where=_sampler_line(subject, ode), case="I4-linear", value=offs[worst], limit=EXACT)
    if problem := _null_is_a_condition(subject, ode) or _wrong_drops(subject, ode):
        system, batch = subject.fresh_system(), subject.batch(0)
        runs = [lambda on=on: capabilities.probe(system.train(on), batch) for on in (True, False)]
        return failed(problem, where=next(iter(only_called_by(subject, *runs)), subject.loss_line()))
    return passed("linear in the scale; conditions are dropped independently", offs[worst], EXACT)


def _null_is_a_condition(subject: Subject, ode: OdeSampler) -> str:
    probe = subject.declared
    given = probe.batch[ode.condition]
    null = probe.predict({**probe.batch, ode.condition: torch.full_like(given, ode.null)})
    for one in ode.conditions.unique().tolist()[:16]:
        other = probe.predict({**probe.batch, ode.condition: torch.full_like(given, one)})
        if float((other - null).abs().max()) < CONTROL * spread(null):
            return f"the prediction without a {ode.condition} equals that of {ode.condition} {one}"
    return ""


def _wrong_drops(subject: Subject, ode: OdeSampler) -> str:
    """What is wrong with the conditions that training sees in 64 batches."""
    system, seen = subject.fresh_system().train(), []
    for n in range(NUM_BATCHES):
        batch = subject.batch(n, NUM_ROWS)
        probe = probe_of(system, batch)
        seen.append({"": batch[ode.condition], **{k: probe.batch[k] for k in (ode.condition, *(probe.scalars or ()))}})
    given, found = (torch.stack([row[name] for row in seen]) for name in ("", ode.condition))
    dropped, usual = found == ode.null, ode.drop * (1.0 - ode.drop)
    share, ratio = float(dropped.double().mean()), float(dropped.double().sum(1).var()) / max(NUM_ROWS * usual, 1e-12)
    if bool(((found != given) & ~dropped).any()):
        return f"training changes {ode.condition} to something else than the null condition {ode.null}"
    if abs(share - ode.drop) > SIGMAS * math.sqrt(usual / dropped.numel() * max(1.0, ratio)):
        return f"{ode.condition} is dropped for {share:.1%} of {dropped.numel()} samples, declared {ode.drop:.1%}"
    if usual and ratio > DISPERSION:
        return f"the number of {ode.condition} dropped in a batch varies {ratio:.1f} times as much as for independent draws"
    for name in seen[0].keys() - {"", ode.condition}:
        value = torch.stack([row[name] for row in seen]).double()
        kept, gone = value[~dropped], value[dropped]
        error = float(value.std()) * math.sqrt(1.0 / max(len(kept), 1) + 1.0 / max(len(gone), 1))
        if len(gone) and len(kept) and abs(float(kept.mean() - gone.mean())) > SIGMAS * max(error, 1e-12):
            means = f"{float(gone.mean()):.2g} on average, elsewhere {float(kept.mean()):.2g}"
            return f"{ode.condition} is dropped where {name} is {means}"
    return ""


@check("I5", "pixel levels", "err", humbatova=(3,), needs=("quantise",))
def pixel_levels(subject: Subject) -> Finding:
    """All 256 levels survive being stored and read again 100 times, by every way that frames are fed back."""
    levels, ways = subject.declared.quantise
    step, worst = float(levels.max() - levels.min()) / 255, 0.0
    for name, store in ways.items():
        # As they are, rounded, and clamped.
        for given, wanted in ((levels, levels), (levels + 0.4 * step, levels), (levels + 256 * step, levels * 0 + levels.max())):
            frame = given
            for _ in range(NUM_PASSES):
                frame = store(frame)
            off = (frame - wanted).abs() / step
            worst = max(worst, float(off.max()))
            if not worst < 0.1:
                at = off.argmax()
                values = [float((x.flatten()[at] - levels.min()) / step) for x in (given, frame)]
                share = float((off > 0.1).double().mean())
                what = f"{name}: level {values[0]:.3g} becomes {values[1]:.3g} after {NUM_PASSES} frames; {share:.0%} move"
                *_, where = recipe_calls(subject, lambda store=store: store(levels)).values()
                return failed(what, where=where, value=worst, limit=0.1)
    return passed(f"{', '.join(ways)}: levels stay; largest change in levels", worst, 0.1)


@check("I8", "controls in play", "warn", humbatova=(10,), needs=("uses",))
def controls_in_play(subject: Subject) -> Finding:
    """Fully pressed, each control gives the network what training saw: its own axis, its sign, its range."""
    arrays = subject.real_data.train.arrays
    system = inference_engine(subject).system
    names = [name for name in subject.declared.uses if name in arrays]
    if not isinstance(system, capabilities.Playable) or not names:
        return skipped("the recipe has no player, or its controls are no array of the training data")
    player, trained = system.play("torch"), torch.from_numpy(arrays[names[0]]).double().flatten(0, -2)
    released = torch.tensor([axis.scale if axis.is_time else 0.0 for axis in player.axes])
    low_A, high_A = torch.quantile(trained[:: max(1, len(trained) // 100_000)], torch.tensor(QUANTILES).double(), dim=0)
    for n, axis in enumerate(player.axes):
        for value in () if axis.dead or axis.is_time else filter(None, axis.full):
            pressed = torch.where(torch.arange(len(released)) == n, value, released)
            inputs = [_network_input(player.new_rollout(), raw_A) for raw_A in (released, pressed)]
            if inputs[0] is None or inputs[1] is None:
                return skipped("no module takes the controls of the player as they are")
            given, change = float(inputs[1][n]), (inputs[1] - inputs[0]).double()
            side, margin = trained[:, n][trained[:, n] * value > 0].abs(), BEYOND * float(high_A[n] - low_A[n])
            problem = ""
            if int(change.abs().argmax()) != n or float(change[n]) * value <= 0:
                problem = f"moves input {int(change.abs().argmax())} of the network, not input {n} in its own sense"
            elif not low_A[n] - margin <= given <= high_A[n] + margin:
                problem = f"gives the network {given:.3g}, in training it was {float(low_A[n]):.3g} to {float(high_A[n]):.3g}"
            elif len(side) and abs(given) < REACHED * float(side.median()):
                problem = f"gives the network {given:.3g}; half of training had more than {float(side.median()):.3g}"
            if problem:
                what = f"`{axis.name}` pressed to {value:.3g} {problem}"
                return failed(what, where=source_line(type(player.new_rollout()).step))
    return passed(f"{sum(not a.dead and not a.is_time for a in player.axes)} axes are as in training")


def _network_input(rollout: Any, raw_A: Tensor) -> Tensor | None:
    """The first input of a module with as many numbers as there are axes, during one step of play."""
    seen: list[Tensor] = []

    def look(module: Any, given: tuple[Any, ...]) -> None:
        seen.extend(x[0].detach().clone() for x in given if isinstance(x, Tensor) and x.shape == (1, len(raw_A)))

    with register_module_forward_pre_hook(look):
        rollout.step(raw_A.numpy())
    return seen[0] if seen else None
