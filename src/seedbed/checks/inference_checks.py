"""Checks I: generation agrees with training: caches, sampling path, mode and exported weights."""

from __future__ import annotations

import contextlib
import inspect
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch._C import _functorch as functorch  # pyright: ignore[reportAttributeAccessIssue]

from seedbed.checks.device_checks import perturbed_engine
from seedbed.checks.registry import check, failed, passed, skipped
from seedbed.checks.small_jobs import NUM_TOKENS, advance_global_rng, sample_options, short_options
from seedbed.checks.subject import CPU, ROWS, Subject, short, source_line, spread
from seedbed.errors import UserError
from seedbed.report.findings import Finding
from seedbed.train import capabilities
from seedbed.train.engine import Engine
from seedbed.train.system import Request, Sample, System

# Cached against full forward, relative to the mean output: sound 1e-15 in float64, 4e-7 in float32.
CACHE_LIMIT = {torch.float64: 1e-9, torch.float32: 1e-4}
EXPORT_LIMIT = 1e-6


@check("I1", "KV cache", "err", humbatova=(4,), needs=("cached", "inputs"))
def kv_cache(subject: Subject) -> Finding:
    system = subject.perturbed()
    limit = CACHE_LIMIT.get(subject.dtype, 1e-4)
    worst, problem = 0.0, ""
    # Two prompts in turn: the first must not affect the second. Then shorter ones.
    turns = [(0, None), (1, None), (0, None), (1, 1), (0, 2), (0, 7)]
    with torch.no_grad():
        for n, length in turns:
            probe = capabilities.probe(system, subject.perturbed_batch(n))
            assert probe is not None and probe.cached is not None
            batch = {k: v[:, :length] if v.ndim > 1 else v for k, v in probe.batch.items()}
            full, stepwise = probe.predict(batch), probe.cached(batch[probe.inputs])
            if full.shape != stepwise.shape:
                shapes = f"{tuple(stepwise.shape)}, not {tuple(full.shape)}"
                return _cache_failure(system, f"the cache gives shape {shapes}", 1.0, limit)
            apart_T = (full - stepwise).abs().flatten(2).amax((0, 2)) / spread(full)
            if float(apart_T.max()) > worst:
                worst = float(apart_T.max())
                problem = (
                    f"cached and full outputs part at token {int((apart_T > limit).int().argmax())}: {worst:.1e} of their mean"
                )
    return _cache_failure(system, problem, worst, limit) if not worst <= limit else passed("cached = full", worst, limit)


def _cache_failure(system: System, what: str, value: float, limit: float) -> Finding:
    why = "samples get worse with length, or depend on the previous prompt"
    fix = "look at the cache's index, mask and positions, and start every generation with an empty one"
    return failed(what, where=source_line(type(system).sample), why=why, fix=fix, value=value, limit=limit)


def _engine(subject: Subject) -> Engine:
    """An engine with weights far enough from initialisation that outputs depend on their context."""
    return subject.once("inference.engine", lambda: perturbed_engine(subject, CPU, noise=0.3))


def _sample(engine: Engine, folder: Path, **options: Any) -> Sample:
    with engine.evaluating():
        return engine.system.sample(Request(folder, options), engine)


def used_only_by(subject: Subject, act: Callable[[], object]) -> str:
    """The first function in a recipe file that `act` runs and training does not; empty when there is none."""
    files = {str(path) for path in subject.recipe.files()}

    def called(work: Callable[[], object]) -> dict[str, str]:
        found: dict[str, str] = {}

        def look(frame: Any, event: str, _: Any) -> None:
            code = frame.f_code
            if event == "call" and code.co_filename in files and "<" not in code.co_name:
                found.setdefault(code.co_filename, f"{short(code.co_filename)}:{code.co_firstlineno} {code.co_qualname}")

        sys.setprofile(look)
        try:
            work()
        finally:
            sys.setprofile(None)
        return found

    trained = called(lambda: subject.loss_of(subject.perturbed(), subject.perturbed_batch()))
    return next((where for file, where in called(act).items() if file not in trained), "")


@check("I2", "sampling parity", "err", humbatova=(10,), needs=("inputs", "decode"))
def sampling_parity(subject: Subject) -> Finding:
    """The greedy continuation by the sampling path equals the one by the training forward pass."""
    engine = _engine(subject)
    system = engine.system
    with engine.evaluating():
        wanted = [(prompt, text) for prompt, text in (_greedy(subject, system, row) for row in range(ROWS)) if prompt]
    if not wanted:
        return skipped("no prompt survives decoding and encoding")
    with tempfile.TemporaryDirectory() as scratch:

        def continue_all() -> None:
            found.extend(_sample(engine, Path(scratch), prompt=p, tokens=NUM_TOKENS, temperature=0.0).text for p, _ in wanted)

        found: list[str] = []
        try:
            where = used_only_by(subject, continue_all) or source_line(type(system).sample)
        except UserError as error:
            return skipped(f"the recipe does not continue a prompt: {error}")
    for shown, (_, expected) in zip(found, wanted, strict=True):
        if shown.startswith(expected):
            continue
        same = next((i for i, (a, b) in enumerate(zip(shown, expected, strict=False)) if a != b), len(shown))
        return failed(
            f"the likeliest continuation parts from the training forward at character {same}: {shown[same : same + 12]!r} "
            f"instead of {expected[same : same + 12]!r}",
            where=where,
            why="samples do not show what was trained: they look worse than the loss",
            fix="share preprocessing, positions and mode between sampling and training",
        )
    return passed("greedy tokens by sampling and by the training forward agree")


def _greedy(subject: Subject, system: System, number: int) -> tuple[str, str]:
    """A prompt and its greedy continuation within one context, by the training forward pass."""
    probe = capabilities.probe(system, subject.batch(0))
    assert probe is not None and probe.decode is not None
    context = probe.batch[probe.inputs].shape[1]
    num = min(NUM_TOKENS, context - 2)
    row = probe.batch[probe.inputs][number, : context - num]
    prompt = probe.decode(row)
    with torch.no_grad():
        for _ in range(num):
            batch = {k: row[None] if k in (probe.inputs, probe.targets) else v[:1] for k, v in probe.batch.items()}
            # Where a position is predicted several times, the last prediction counts.
            logits_KV = torch.atleast_2d(probe.predict(batch)[0, -1])
            row = torch.cat([row, logits_KV[-1:].argmax(-1)])
    return "" if "\ufffd" in probe.decode(row) else prompt, probe.decode(row)


@check("I6", "eval mode", "err", humbatova=(11, 6))
def eval_mode(subject: Subject) -> Finding:
    engine = _engine(subject)
    system = engine.system
    troubles: list[str] = []
    before = {n: t.detach().clone() for n, t in (*system.named_parameters(), *system.named_buffers())}

    def look(name: str) -> Any:
        def hook(module: torch.nn.Module, given: Any) -> None:
            if module.training:
                troubles.append(f"{name or 'the system'} runs in training mode while sampling")
            elif torch.is_grad_enabled() and not functorch.peek_interpreter_stack():
                # A model that optimises its output takes gradients inside torch.func.grad, and no graph outlives it.
                troubles.append(f"{name or 'the system'} builds a graph while sampling")

        return hook

    known = sample_options(engine)
    options = {**short_options(engine), **({"temperature": 1.0} if "temperature" in known else {})}
    with engine.evaluating():
        if system.training or torch.is_grad_enabled():
            state = "in training mode" if system.training else "with gradients on"
            why, fix = "every evaluation and sample runs that way", "eval() and no_grad() inside engine.evaluating()"
            return failed(f"evaluation runs {state}", where=source_line(inspect.unwrap(Engine.evaluating)), why=why, fix=fix)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            where = used_only_by(subject, lambda: _sample(engine, Path(scratch), **options)) or source_line(type(system).sample)
    except UserError as error:
        return skipped(str(error))
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as hooks:
        for name, module in system.named_modules():
            hooks.enter_context(module.register_forward_pre_hook(look(name)))
        shown = []
        for seed in (1, 2):
            advance_global_rng(seed)
            shown.append(_fingerprint(_sample(engine, Path(scratch) / str(seed), **options)))
        if "seed" in known and shown[0] == _fingerprint(_sample(engine, Path(scratch) / "3", **options, seed=2)):
            troubles.append("another seed gives the same sample")
    if shown[0] != shown[1]:
        troubles.append("two samples of the same weights and options differ")
    changed = next((n for n, t in (*system.named_parameters(), *system.named_buffers()) if not torch.equal(t, before[n])), "")
    if changed:
        troubles.append(f"sampling changes {changed}")
    if not all(m.training for m in system.modules()):
        troubles.append("sampling leaves the system in evaluation mode")
    if troubles:
        what = troubles[0]
        why = "dropout, label drop or other training noise degrades samples"
        fix = "sample inside engine.evaluating(), under no_grad, with a generator seeded by the request"
        return failed(what, where=where, why=why, fix=fix)
    if not shown[0]:
        return skipped("the recipe shows no samples")
    return passed("samples are made in evaluation mode, without a graph, and repeat")


def _fingerprint(sample: Sample) -> list[Any]:
    return [x for x in (sample.text, *(path.read_bytes() for path in sample.files)) if x]


@check("I7", "export", "err", humbatova=(8,))
def export(subject: Subject) -> Finding:
    engine = _engine(subject)
    system = engine.system
    if not isinstance(system, capabilities.Exportable):
        return skipped("this recipe has no export")
    with tempfile.TemporaryDirectory() as scratch, engine.evaluating():
        paths: list[Path] = []
        try:
            only = used_only_by(subject, lambda: paths.extend(system.export(Path(scratch) / "out")))
        except UserError as error:
            return skipped(str(error))
        stored: dict[str, torch.Tensor] = {}
        for path in paths:
            if path.suffix == ".safetensors":
                stored |= safetensors.torch.load_file(path)
    where = only or source_line(type(system).export)
    why, fix = "others would use another model than the one you evaluated", "write every parameter and saved buffer, as it is"
    if not stored:
        return failed("no weights were written", where=where, why=why, fix=fix)
    wanted = dict(system.named_parameters())
    short = _matching(stored, list(wanted))
    missing = [n for n in wanted if n not in short]
    if missing:
        return failed(f"{missing[0]} and {len(missing) - 1} more are not in the export", where=where, why=why, fix=fix)
    odd = [n for n, p in wanted.items() if stored[short[n]].shape != p.shape]
    if odd:
        return failed(f"{odd[0]} has another shape in the export", where=where, why=why, fix=fix)
    wrong = {n: float((stored[short[n]].float() - p.detach().float()).abs().max()) for n, p in wanted.items()}
    name = max(wrong, key=lambda n: wrong[n])
    limit = EXPORT_LIMIT * spread(wanted[name])
    if not wrong[name] <= limit:
        what = f"{name} differs by {wrong[name]:.1e} in the export"
        return failed(what, where=where, why=why, fix=fix, value=wrong[name], limit=limit)
    return passed(f"all {len(wanted)} tensors come back from the export", wrong[name], limit)


def _matching(stored: dict[str, torch.Tensor], names: list[str]) -> dict[str, str]:
    """Parameter names to names in the file, which may omit a common prefix."""
    found = {}
    for name in names:
        tail = name
        while tail and tail not in stored:
            tail = tail.partition(".")[2]
        if tail:
            found[name] = tail
    return found
