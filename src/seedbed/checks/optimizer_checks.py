"""Checks O: every parameter is trained once, by the right optimizer, at the declared lr."""

import functools
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from seedbed import config as configs
from seedbed.checks import short_runs
from seedbed.checks.registry import check, failed, passed, skipped
from seedbed.checks.small_jobs import new_job, take_steps
from seedbed.checks.subject import CPU, Recorder, Subject, repeat_rows, source_line, take_rows
from seedbed.config import Optim, Schedule
from seedbed.nn.init import declaration_of, settings_of
from seedbed.report.findings import Finding
from seedbed.train import capabilities, checkpoint_loading, inference_weights, saving
from seedbed.train.capabilities import single_rank_reason
from seedbed.train.engine import Engine, EvalEngine
from seedbed.train.job import Job
from seedbed.train.optim import AdamW, Muon, Optimizer, multiplier, param_groups
from seedbed.train.system import Batch

# Gradient norms of one batch, three times: sound 0, not zeroed 2.86, 5.72, 8.58.
ZERO_LIMIT = 1e-3
# Steps in which every tensor must get a gradient: a loss with a random number of steps may leave some out at first.
MOST_STEPS = 16
# Parts against the whole in float32: sound at most 4e-7, a mean of means .23.
PARTS_LIMIT = 1e-4
# Applied against declared rate: sound at most 2e-4 (float32 weights), eps 1e-3 or one shared floor 5 % and more.
RATE_LIMIT = 0.02
# Muon's step is only near orthogonal: clean .3 (a step .7 long), three times the rate 1.1.
MUON_LIMIT = 0.9
# Elements with a gradient that a step leaves as they were: float32 at most .004, bf16 weights .34.
STUCK_LIMIT = 0.2
AVERAGE_LIMIT = 1e-5


@check("O1", "param groups", "err", humbatova=(12,), quick=True)
def optimizer_groups(subject: Subject) -> Finding:
    engine = subject.fresh_engine()
    counts = Counter(id(p) for o in engine.optimizers.values() for g in o.groups for p in g.params.values())
    stepped = Counter(id(p) for o in engine.optimizers.values() for p in o.params)
    wanted = {n: p for n, p in engine.system.named_parameters() if p.requires_grad}
    missing = [n for n, p in wanted.items() if not counts[id(p)] or not stepped[id(p)]]
    double = [n for n, p in wanted.items() if counts[id(p)] > 1]
    where = source_line(param_groups)
    if missing:
        what = f"{len(missing)} of {len(wanted)} trainable tensors are in no group: {_names(missing)}"
        return failed(what, where=where, case="O1-missing")
    known = {id(p) for p in engine.system.parameters()}
    if strange := [p for o in engine.optimizers.values() for p in o.params if id(p) not in known]:
        what = f"the optimizer holds {len(strange)} tensors that are not the model's"
        return failed(what, where=where, case="O1-foreign")
    if double:
        what = f"{len(double)} tensors are in more than one group: {_names(double)}"
        return failed(what, where=where, case="O1-double")
    odd = _odd_kinds(engine) if not subject.unsure else []
    if odd and (other := _twice_as_wide(subject)):  # where a matrix has as many rows as a table by coincidence, it has more there
        odd = [name for name in odd if name in _odd_kinds(other)]
    if odd:
        return failed(f"{len(odd)} tensors in an odd group: {_names(odd)}", where=where, severity="warn")
    return passed(f"{len(wanted)} tensors, each in one of {sum(len(o.groups) for o in engine.optimizers.values())} groups")


def _names(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _twice_as_wide(subject: Subject) -> Engine | None:
    """The same model at twice its width, where that is a setting."""
    width = configs.flatten(subject.small).get("model.width")
    if not isinstance(width, int) or not width:
        return None
    config = configs.override(subject.small, [f"model.width={2 * width}"])
    return Engine(subject.fresh_system(config=config), config, CPU)


def _odd_kinds(engine: Engine) -> list[str]:
    tables = {id(m.weight): m.num_embeddings for m in engine.system.modules() if isinstance(m, nn.Embedding)}
    sizes = set(tables.values())
    odd = []
    for optimizer in engine.optimizers.values():
        for group in optimizer.groups:
            for name, param in group.params.items():
                declared = declaration_of(param)
                # A matrix with one row per entry of an embedding is that embedding or the head.
                is_table = id(param) in tables or (param.ndim == 2 and bool(sizes & set(param.shape[:1])))
                if group.kind == "muon" and (param.ndim != 2 or is_table):
                    odd.append(f"{name} (a {'table or head' if is_table else 'vector'} in Muon)")
                elif declared and declared.decay is not None and declared.decay < bool(group.weight_decay):
                    odd.append(f"{name} (declared without weight decay)")
                elif group.weight_decay and param.ndim < 2 and not (declared and declared.decay):
                    odd.append(f"{name} (a vector that decays)")
    return odd


@check("O2", "weights move", "err", humbatova=(12, 6))
def weights_move(subject: Subject) -> Finding:
    engine = short_runs.start(subject)
    system = engine.system
    before = {n: p.detach().clone() for n, p in system.named_parameters()}
    buffers = {n: b.clone() for n, b in system.named_buffers()}
    reached: set[str] = set()
    named = {n: p for n, p in system.named_parameters() if n not in subject.declared.dead}
    with short_runs.gradients(system) as seen:
        for variant in capabilities.variants(system, subject.small.steps):
            engine.variant = variant  # type: ignore[assignment]
            for step in range(MOST_STEPS):
                short_runs.take_step(subject, engine, subject.batch(step, short_runs.rows_per_step(subject)), step)
                reached |= {n for n, g in seen.items() if g.abs().max() > 0}
                seen.clear()
                if step >= 2 and reached >= {n for n, p in named.items() if p.requires_grad}:
                    break
    held = {id(p) for o in engine.optimizers.values() for p in o.params}
    frozen = [n for n, p in named.items() if not p.requires_grad]
    cut_off = [n for n, p in named.items() if p.requires_grad and n not in reached]
    still = [n for n, p in named.items() if n in reached and torch.equal(p.detach(), before[n])]
    for names, state, case in (
        (still, "get a gradient and do not move", "O2-still"),
        (cut_off, "get no gradient", "O2-cut-off"),
        (frozen, "are frozen (requires_grad=False)", "O2-frozen"),
    ):
        if names:
            what = f"{len(names)} of {len(before)} tensors {state} in {MOST_STEPS} steps: {_names(names)}"
            where = short_runs.owner_line(system, names[0])
            if names is frozen:
                where = source_line(type(system).__init__)
            elif names is still:
                where = source_line(Optimizer.step if id(named[names[0]]) in held else param_groups)
            severity = subject.unsure if names is frozen else ""
            return failed(what, where=where, case=case, value=float(len(names)), limit=0.0, severity=severity)
    if idle := _idle_buffer(system, buffers):
        what = f"{idle} stays zero while other buffers of its module change"
        return failed(what, where=source_line(type(system.get_submodule(idle.rpartition(".")[0]))))
    return passed(f"all {len(named)} tensors get a gradient and move")


def _idle_buffer(system: nn.Module, before: dict[str, Tensor]) -> str:
    """The first buffer that was zero and still is, in a module whose other buffers have changed; empty when there is none."""
    now = {name: buffer for name, buffer in system.named_buffers() if buffer.numel()}
    owners = {n.rpartition(".")[0] for n, old in before.items() if n in now and not torch.equal(now[n], old)} - {""}
    idle = (n for n in before if n.rpartition(".")[0] in owners and n in now and not now[n].any() and not before[n].any())
    return next(idle, "")


@check("O3", "zero_grad", "err", humbatova=(12,))
def zero_grad(subject: Subject) -> Finding:
    engine, batch = short_runs.start(subject), subject.batch(0)
    buffers, norms = {n: b.clone() for n, b in engine.system.named_buffers()}, []
    for _ in range(3):
        for name, buffer in engine.system.named_buffers():  # what a step stores for the next is no gradient
            buffer.copy_(buffers[name])
        measured = short_runs.take_step(subject, engine, batch, 0, rate=0.0)
        norms.append(max(float(v) for n, v in measured.items() if n.startswith("grad_norm")))
    apart = (max(norms) - min(norms)) / max(min(norms), 1e-12)
    if not apart <= ZERO_LIMIT:
        what = f"gradient norms of the same batch at rate 0: {', '.join(f'{n:.3g}' for n in norms)}"
        return failed(what, where=source_line(Engine.apply_gradients), value=apart, limit=ZERO_LIMIT)
    return passed("the same batch gives the same gradient three times", apart, ZERO_LIMIT)


@check("O4", "accumulation", "err", humbatova=(12, 6))
def accumulation(subject: Subject) -> Finding:
    # Where a loss term uses every n-th row only, each row occurs n times, so that splitting does not change what it uses.
    stride = capabilities.row_stride(subject.perturbed())
    batch = repeat_rows(subject.batch(0, 20), stride)
    # Parts of unequal size: weighting by parts instead of targets shows.
    rows = [slice(stride * first, stride * last) for first, last in ((0, 9), (9, 11), (11, 16), (16, 20))]
    split = [take_rows(batch, r) for r in rows]
    (whole, loss), (parts, reported) = _gradient(subject, [batch]), _gradient(subject, split)
    summed, loss_of_parts = _weighted_sum(subject, split)
    # A batch that cannot be sharded, as the recipe declares, changes when it is split.
    mixes = subject.declared.mixes_rows or single_rank_reason(subject.perturbed())
    if mixes or _apart(whole, _gradient(subject, [batch], step=1)[0]) > 1e-6:
        # Parts draw other noise than the batch, or legitimately use other rows: compare with the parts' weighted sum.
        whole, loss = summed, loss_of_parts
    apart = _apart(whole, parts)
    if not apart <= PARTS_LIMIT:
        what = f"{len(split)} unequal parts give another gradient than the whole batch: {apart:.1%} off"
        where = source_line(Engine.step if _apart(summed, parts) > PARTS_LIMIT else type(subject.perturbed()).num_targets)
        return failed(what, where=where, value=apart, limit=PARTS_LIMIT)
    if not abs(reported - loss) <= PARTS_LIMIT * max(abs(loss), 1e-6):
        what = f"{len(split)} unequal parts report a loss of {reported:.6g}, their mean over targets is {loss:.6g}"
        return failed(what, where=source_line(Engine.step), case="O4-reported", value=abs(reported - loss), limit=PARTS_LIMIT)
    clipped = _clip_error(subject, batch, float(_norm(whole)))
    if not clipped <= 1e-3:
        what = f"with clip set to half the gradient's norm, what reaches the optimizer is {clipped:.0%} off that length"
        return failed(what, where=source_line(Engine.apply_gradients), case="O4-clip", value=clipped, limit=1e-3)
    return passed("unequal parts give the gradient of the batch; clipping works", apart, PARTS_LIMIT)


def _engine_for(subject: Subject, num_parts: int, clip: float) -> Engine:
    engine = subject.fresh_engine(f"batch={num_parts}", f"accum={num_parts}", f"optim.clip={clip!r}")
    engine.variant = engine.system.variant(0, subject.small.steps)
    return engine


def _gradient(subject: Subject, parts: list[Batch], step: int = 0) -> tuple[dict[str, Tensor], float]:
    """The gradients of one step, and the loss that it reports."""
    engine = _engine_for(subject, len(parts), clip=0.0)
    with short_runs.gradients(engine.system) as seen:
        engine.begin(step, 1.0 / subject.small.steps, 0.0)
        measured = engine.step(lambda k: parts[k])
    return dict(seen), float(measured["loss"])


def _weighted_sum(subject: Subject, parts: list[Batch]) -> tuple[dict[str, Tensor], float]:
    """The parts' gradients and losses weighted by their targets, with the random numbers that each gets in one step."""
    system = subject.fresh_system()
    recorder = Recorder(system, subject.small, CPU)
    recorder.variant = system.variant(0, subject.small.steps)
    recorder.seed_step(0)
    counts = torch.tensor([float(system.num_targets(part)) for part in parts])
    loss = 0.0
    for part, share in zip(parts, counts / counts.sum().clamp_min(1.0), strict=True):
        loss += float(system.update(part, recorder)["loss"] * share)
        (torch.stack(list(recorder.norms.values())).sum() * share).backward()
    return {n: p.grad for n, p in system.named_parameters() if p.grad is not None}, loss


def _norm(grads: dict[str, Tensor]) -> Tensor:
    return torch.stack([g.double().norm() for g in grads.values()]).norm()


def _apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    if a.keys() != b.keys():
        return math.inf
    return float(_norm({n: a[n] - b[n] for n in a}) / _norm(a).clamp_min(1e-12))


def _clip_error(subject: Subject, batch: Batch, norm: float) -> float:
    """Difference between clip and the norm that each optimizer received in one step."""
    engine = _engine_for(subject, 1, norm / 2)
    received = {name: _received(optimizer, subject.small.optim) for name, optimizer in engine.optimizers.items()}
    engine.begin(0, 1.0 / subject.small.steps, 0.0)
    engine.step(lambda k: batch)
    errors = [math.hypot(*(length() for length in lengths)) / (norm / 2) - 1.0 for lengths in received.values()]
    return abs(errors[0]) if len(errors) == 1 else max(0.0, *errors)


def _received(optimizer: Optimizer, optim: Optim) -> list[Callable[[], float]]:
    """Functions that give the norm each part received: from its first moments where known, else what it was called with."""
    decays = {AdamW: ("mean.", optim.beta1), Muon: ("momentum.", optim.momentum)}
    return [
        functools.partial(_norm_in_moments, part, *decays[type(part)]) if type(part) in decays else _norm_of_call(part)
        for part in optimizer.parts
    ]


def _norm_in_moments(part: AdamW | Muon, prefix: str, decay: float) -> float:
    return float(torch.stack([t.double().norm() for n, t in part.tensors() if n.startswith(prefix)]).norm()) / (1 - decay)


def _norm_of_call(part: AdamW | Muon) -> Callable[[], float]:
    step, found = part.step, [0.0]

    def recorded(lr_factor: Tensor, divisor: Tensor, skip: Tensor) -> None:
        grads = {name: p.grad for name, p in part.group.params.items() if p.grad is not None}
        found[0] = float(_norm(grads) / divisor)
        step(lr_factor, divisor, skip)

    part.step = recorded
    return lambda: found[0]


# ---- schedule --------------------------------------------------------------------------------------------------------


def declared_rate(schedule: Schedule, progress: float, total: float = math.inf) -> float:
    """The schedule in a run of `total` steps, implemented a second time on purpose; a schedule of the user's own, as it is."""
    if schedule.kind not in ("constant", "cosine", "one_cycle", "wsd", "linear"):
        return multiplier(schedule, progress, round(progress * total) if total < math.inf else 0)
    if schedule.kind == "one_cycle":
        step, peak = progress - 1.0 / total, schedule.warmup - 1.0 / total
        rises = peak > 0.0 and step <= peak
        share = step / peak if rises else (step - peak) / max(1.0 - schedule.warmup, 1e-12)
        low, wave = 1.0 / schedule.div / (1.0 if rises else schedule.final_div), math.cos(math.pi * share)
        return 0.5 * ((low + 1.0) + (low - 1.0) * wave) if rises else 0.5 * ((1.0 + low) + (1.0 - low) * wave)
    if progress < schedule.warmup:
        return progress / schedule.warmup
    after = (progress - schedule.warmup) / max(1.0 - schedule.warmup, 1e-12)
    begin = 1.0 - schedule.decay
    cooled = max(0.0, progress - begin) / schedule.decay if schedule.decay else 0.0
    height = {
        "constant": 1.0,
        "cosine": (1.0 + math.cos(math.pi * after)) / 2.0,
        "wsd": 1.0 - math.sqrt(cooled),
        "linear": 1.0 - cooled,
    }[schedule.kind]
    return schedule.floor + (1.0 - schedule.floor) * height


@check("O5", "lr schedule", "err", humbatova=(2, 12))
def lr_schedule(subject: Subject) -> Finding:
    """Steps the real loop over the whole horizon with a constant gradient, and measures how far weights move."""
    job = _ConstantGradientJob(subject)
    if problem := next(job.faults(subject), None):
        return problem
    total = subject.small.steps
    points = sorted({round(i * (total - 1) / 40) for i in range(41)} | {0, 1, 2} & set(range(total)))
    worst = 0.0
    for step in points:
        wanted = declared_rate(subject.small.schedule, (step + 1) / total, total)
        for group, rate in job.rates(step).items():
            full = job.full_rates[group]
            error = abs(rate / full - wanted) / max(wanted, 0.01)
            if error > RATE_LIMIT:
                what = f"{group} moves at {rate / full:.4g} of its rate at step {step + 1} of {total}, declared {wanted:.4g}"
                return failed(what, where=job.blame(step, wanted, group), value=error, limit=RATE_LIMIT)
            worst = max(worst, error)
    what = f"{len(points)} steps of {total:,}: every group follows {subject.small.schedule.kind}"
    return next(job.wrong_sizes(), None) or passed(what, worst, RATE_LIMIT)


class _ConstantGradientJob:
    """A job whose objective has a constant gradient, so that the movement of a weight is its effective lr."""

    def __init__(self, subject: Subject) -> None:
        self.job = new_job(subject, "batch=4", "accum=1", "ema=0.0", "optim.clip=0.0")
        self.engine, self.system = self.job.engine, self.job.engine.system
        self.system.update = self._pull  # type: ignore[method-assign]
        self.groups, self.parts = {}, {}
        for optimizer in self.engine.optimizers.values():
            for group, part in zip(optimizer.groups, optimizer.parts, strict=True):
                name, param = next(iter(group.params.items()))
                title = f"{group.name} ({name})"
                self.groups[title], self.parts[title] = (group, param), part
        self.force = 1.0
        self.full_rates = self._movement(lambda: self._step(0, 1.0))

    def _pull(self, batch: Batch, engine: Engine) -> dict[str, Tensor]:
        losses = {}
        for player, optimizer in engine.optimizers.items():
            # Scaled to norm 1 over all tensors, as in a clipped step.
            size = math.sqrt(sum(p.numel() for p in optimizer.params))
            loss = self.force * torch.stack([p.sum() / size for p in optimizer.params]).sum()
            engine.minimize(loss, player)
            losses["loss"] = loss.detach()
        return losses

    def rates(self, step: int) -> dict[str, float]:
        """Movement of each group at this step, through the loop's own step."""
        self.job.step, self.job.items = step, step * self.job.config.batch
        return self._movement(lambda: take_steps(self.job, 1))

    def step_of(self, group: str) -> str:
        return source_line(type(self.parts[group]).step)

    def blame(self, step: int, wanted: float, group: str) -> str:
        """The cause of a wrong lr: progress, schedule or optimizer."""
        self.job.step, self.job.items = step, step * self.job.config.batch
        done = (step + 1) / self.job.config.steps
        if abs(self.job.progress - done) > 0.01 * done:
            return source_line(Job.progress.fget)
        limit = RATE_LIMIT * max(wanted, 0.01)
        if abs(float(self.engine.lr_factor) - wanted) < limit:
            return self.step_of(group)
        curve = multiplier(self.job.config.schedule, done, step + 1)
        return source_line(Engine.begin if abs(curve - wanted) < limit else multiplier)

    def _step(self, step: int, rate: float) -> None:
        self.engine.begin(step, 0.5, rate)
        self.job.stepper.feed.load(0)
        self.engine.step(self.job.stepper.feed.part)

    @torch.no_grad()
    def _movement(self, go: Callable[[], None], start: float = 0.0) -> dict[str, float]:
        """Movement of each group, per element; from 0 there is nothing to decay."""
        for _, param in self.groups.values():
            param.fill_(start)
        with torch.enable_grad():
            go()
        return {t: float((p.double() - start).norm()) / math.sqrt(p.numel()) for t, (_, p) in self.groups.items()}

    def _forget(self) -> None:
        for part in self.parts.values():
            for _, moment in part.tensors():
                moment.zero_()

    def faults(self, subject: Subject) -> Iterator[Finding]:
        """Groups that do not move, that have rates or decays which no setting names, or that decay otherwise than they say."""
        for title in (title for title, moved in self.full_rates.items() if not moved > 0):
            yield failed(f"{title} does not move at its full rate", where=self.step_of(title), case="O5-still")
        optim = subject.small.optim
        for title, (group, param) in self.groups.items():
            muon = group.kind == "muon"
            lr, decay = (optim.muon_lr, optim.muon_weight_decay) if muon else (optim.lr, optim.weight_decay)
            lr *= settings_of(param)[0]
            if not math.isclose(group.lr, lr, rel_tol=1e-6) or group.weight_decay not in (0.0, decay):
                what = f"{title} has lr {group.lr:g} and decay {group.weight_decay:g}; the config says {lr:g} and {decay:g} or 0"
                yield failed(what, where=source_line(param_groups), case="O5-config")
        # Without a gradient, weights of 1 shrink by lr x decay and by nothing else.
        self._forget()
        self.force = 0.0
        shrunk = self._movement(lambda: self._step(0, 1.0), start=1.0)
        self.force = 1.0
        self._forget()
        for title, (group, _) in self.groups.items():
            wanted = group.lr * group.weight_decay
            error = abs(shrunk[title] - wanted)
            if error > max(RATE_LIMIT * wanted, 1e-3 * group.lr, 2e-7):
                what = f"without a gradient {title} shrinks by {shrunk[title]:.3g} a step; lr x decay is {wanted:.3g}"
                yield failed(what, where=self.step_of(title), case="O5-decay", value=error, limit=RATE_LIMIT * wanted)

    def wrong_sizes(self) -> Iterator[Finding]:
        """A constant gradient moves AdamW by lr per element; Muon's step is an orthogonal matrix times its scale."""
        for title, (group, param) in self.groups.items():
            muon = group.kind == "muon"
            wanted = group.lr * (0.2 * math.sqrt(max(param.shape)) / math.sqrt(param.numel()) if muon else 1.0)
            error, limit = abs(self.full_rates[title] / wanted - 1.0), MUON_LIMIT if muon else RATE_LIMIT
            if error > limit:
                what = f"{title} moves at {self.full_rates[title] / wanted:.3g} times the rate it was given"
                yield failed(what, where=self.step_of(title), case="O5-size", value=error, limit=limit)


# ---- resolution, averages ------------------------------------------------------------------------------------------


@check("O6", "update rounding", "err", humbatova=(12, 13))
def update_rounding(subject: Subject) -> Finding:
    engine = short_runs.start(subject)
    system = engine.system
    for step in range(2):
        short_runs.take_step(subject, engine, subject.batch(step, short_runs.rows_per_step(subject)), step)
    before = {n: p.detach().clone() for n, p in system.named_parameters()}
    with short_runs.gradients(system) as seen:
        # At a tenth of the peak, as near the end of a schedule.
        short_runs.take_step(subject, engine, subject.batch(2, short_runs.rows_per_step(subject)), 2, rate=0.1)
    worst, name = 0.0, ""
    for key, param in system.named_parameters():
        grad = seen.get(key)
        if grad is None:
            continue
        pulled = grad.abs() > 1e-3 * grad.abs().max().clamp_min(1e-20)
        stuck = float(((param.detach() == before[key]) & pulled).sum() / pulled.sum().clamp_min(1))
        if stuck > worst:
            worst, name = stuck, key
    if worst > STUCK_LIMIT:
        kind = str(dict(system.named_parameters())[name].dtype).removeprefix("torch.")
        what = f"{worst:.0%} of {name} ({kind}) did not change although it has a gradient"
        where = short_runs.owner_line(system, name) if kind == "float32" else source_line(type(system).__init__)
        return failed(what, where=where, value=worst, limit=STUCK_LIMIT)
    return passed("updates are larger than the weights' last digit", worst, STUCK_LIMIT)


@check("O7", "EMA", "err", humbatova=(12,))
def ema(subject: Subject) -> Finding:
    decay = subject.small.ema
    if not decay:
        return skipped("the preset keeps no average (ema=0)")
    engine = short_runs.start(subject)
    assert engine.ema is not None
    expected = {n: p.detach().clone() for n, p in engine.system.named_parameters() if p.requires_grad}
    worst, name = 0.0, ""
    for step in range(3):
        short_runs.take_step(subject, engine, subject.batch(step), step)
        weight = 1.0 - min(decay, (1.0 + step) / (10.0 + step))
        for key, param in engine.system.named_parameters():
            if key in expected:
                expected[key] += weight * (param.detach() - expected[key])
    with engine.evaluating():
        shown = {n: p.detach().clone() for n, p in engine.system.named_parameters()}
    for key, value in expected.items():
        error = float((shown[key] - value).abs().max() / value.abs().max().clamp_min(1e-6))
        worst, name = max((worst, name), (error, key))
    if not worst <= AVERAGE_LIMIT:
        what = f"after 3 steps the average of {name} that evaluation sees is {worst:.1%} off its formula"
        return failed(what, where=source_line(type(engine.ema).update), value=worst, limit=AVERAGE_LIMIT)
    if lost := _lost_in_inference(subject):
        what = f"a saved run is loaded for inference with other values of {lost[0]} than evaluations saw"
        return failed(what, where=lost[1], case="O7-inference")
    half_life, third = math.log(2) / (1.0 - decay), subject.config.steps / 3
    # Runs on random data only measure speed.
    if half_life > third and not short_runs.nothing_to_learn(subject):
        what = f"the average's half-life is {half_life:.0f} steps, the run has {subject.config.steps}"
        fix = f"ema={max(0.0, 1 - 10 / subject.config.steps):.4g} fits this length, or train longer"
        where = subject.preset_line()
        return failed(what, where=where, case="O7-length", fix=fix, value=half_life, limit=third, severity="warn")
    return passed("the average follows its formula and fits the run", worst, AVERAGE_LIMIT)


def _lost_in_inference(subject: Subject) -> tuple[str, str] | None:
    """The first parameter that a checkpoint, loaded for inference, does not restore to its average, and where it is lost."""
    with tempfile.TemporaryDirectory() as scratch:
        job = new_job(subject, folder=Path(scratch))
        assert job.engine.ema is not None
        for shadow in job.engine.ema.shadow.values():
            shadow.add_(1.0)
        saving.save(job)
        saved = checkpoint_loading.load_newest(Path(scratch) / "checkpoints", groups=inference_weights.WEIGHTS)
        assert saved is not None
        other = EvalEngine(subject.fresh_system(subject.config.seed + 1), job.config, CPU)
        inference_weights.restore(other, saved)
    live = dict(other.system.named_parameters())
    for name, shadow in job.engine.ema.shadow.items():
        if not torch.equal(live[name], shadow):
            is_saved = torch.equal(saved.tensors.get("ema", live)[name], shadow)
            return name, source_line(inference_weights.restore if is_saved else Engine.tensors)
    return None
