"""replay: one step of a past run again, bit for bit; the place where it went wrong, the rows that did it, and what to do."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from seedbed.checks.case import num_rows, place, take_rows, to_dtype
from seedbed.checks.forensics import Examination, Place, TracingEngine, finite, largest
from seedbed.checks.scene import Scene, build, examine, open_scene, real_step
from seedbed.checks.tape import Player
from seedbed.data.order import Order
from seedbed.train import checkpoint
from seedbed.train.system import Batch

EXIT_OK, EXIT_NOT_REPRODUCED = 0, 1
# How long the search for rows and the worst rows may take, in seconds.
PATIENCE = 20.0
# A number this many times beyond all that the batches before held is out of range.
OUTLIER = 1e3
NUM_REFERENCES = 8


@dataclass(frozen=True)
class Row:
    """One item of the step: its place in the batch, its sample counter, and the item of the data set that this is."""

    part: int
    row: int
    sample: int
    item: int | None
    loss: float
    shown: str


@dataclass(frozen=True)
class Rung:
    """The same step in another arithmetic."""

    name: str
    loss: float
    norm: float
    finite: bool
    problem: str = ""


@dataclass
class Finding:
    """What replay has to say. `kind` is data, weight, optimizer, forward, backward, gradient, overflow, spike or clean."""

    run: str
    step: int
    kind: str
    what: str
    where: str
    why: str
    fix: str
    reproduced: bool
    start: str
    loss: float
    place: Place | None = None
    rows: list[Row] = field(default_factory=list)
    all_rows: bool = False
    rungs: list[Rung] = field(default_factory=list)
    examination: Examination = field(default_factory=Examination)
    blocks: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def sentence(self) -> str:
        told = self.rows and not self.all_rows and self.kind not in ("spike", "clean", "data")
        rows = f"; rows {', '.join(str(r.row) for r in self.rows[:6])}" if told else ""
        return f"replay {self.step}: {self.what}{rows} -> {self.fix}"

    def to_json(self) -> dict[str, Any]:
        calls = [
            {k: getattr(c, k) for k in ("name", "kind", "given", "gave", "rms", "weight", "dtype", "finite")}
            for c in self.examination.calls
        ]
        plain = {k: getattr(self, k) for k in ("run", "step", "kind", "what", "where", "why", "fix", "reproduced", "start")}
        more = {"loss": self.loss, "terms": self.examination.terms, "norms": self.examination.norms, "all_rows": self.all_rows}
        shown = {"place": asdict(self.place) if self.place else None, "rows": [asdict(r) for r in self.rows]}
        ladder = {"ladder": [asdict(r) for r in self.rungs], "blocks": self.blocks, "notes": self.notes}
        return {**plain, **more, **shown, **ladder, "calls": calls, "verdict": self.sentence()}


def investigate(root: Path, run_name: str, step: int | None, tell: Callable[[str], None] = lambda text: None) -> Finding:
    """Reproduce the step and name what went wrong in it."""
    scene = open_scene(root, run_name, step, tell)
    try:
        tell(f"taking step {scene.step} again")
        changes = real_step(scene)
        exam = examine(scene)
        finding = Finding(scene.run.name, scene.step, *_outline(scene), scene.start, exam.loss, examination=exam)
        finding.notes = scene.notes
        if exam.bad:
            _explain_bad(scene, finding, tell)
        else:
            _explain_finite(scene, finding, changes, tell)
        if scene.differs:
            _admit(scene, finding)
        return finding
    finally:
        scene.job.feed.close()


def _outline(scene: Scene) -> tuple[str, str, str, str, str, bool]:
    return "clean", "", "", "", "", scene.differs is None


def _admit(scene: Scene, finding: Finding) -> None:
    """The replay left the run's course: say so before anything else."""
    assert scene.differs
    step, recorded, loss = scene.differs
    finding.notes.insert(0, f"not reproduced: step {step} recorded a loss of {recorded}, here it is {loss:.9g}")
    if finding.kind == "clean":
        finding.what = f"the step cannot be reproduced: step {step} recorded {recorded}, here it is {loss:.9g}"
        finding.where = f"first step that differs: {step}"
        finding.why = "something that is not in the checkpoint decides the loss"
        finding.fix = "look for code or data changed since, other threads or devices, or dice that the engine does not set"


# ---- a step that is not finite ---------------------------------------------------------------------------------------


def _explain_bad(scene: Scene, finding: Finding, tell: Callable[[str], None]) -> None:
    exam = finding.examination
    tell("looking for the rows")
    bad_weights = {n: t for n, t in scene.engine.tensors()["model"].items() if not finite(t.detach())}
    if bad_weights:
        finding.all_rows = True
        _blame_weight(scene, finding, bad_weights)
    else:
        finding.rows, finding.all_rows = failing_rows(scene, exam)
        finding.place = exam.forward or exam.backward
    tell("climbing the ladder of precisions")
    finding.rungs = ladder(scene, exam)
    if bad_weights:
        return
    if blame_data(scene, finding):
        return
    if finding.place:
        _blame_code(scene, finding, finding.place)
    else:
        _blame_gradient(finding)


def _blame_weight(scene: Scene, finding: Finding, bad: dict[str, Tensor]) -> None:
    name, tensor = next(iter(bad.items()))
    count = int((~torch.isfinite(tensor)).sum())
    more = f" (and {len(bad) - 1} more tensors)" if len(bad) > 1 else ""
    finding.kind = "weight"
    module = scene.system.get_submodule(name.rpartition(".")[0])
    finding.place = Place("weight", name.rpartition(".")[0], place(type(module)), op=name)
    finding.where = f"{name}, {finding.place.where}"
    finding.what = f"{name}{more} holds {count} of {tensor.numel()} values that are not finite before the step is taken"
    finding.why, finding.fix = _history_of_weight(scene, name)


def _history_of_weight(scene: Scene, name: str) -> tuple[str, str]:
    """When did it happen: run forward from the newest checkpoint in which it was still finite."""
    folder = scene.run.path / "checkpoints"
    whole = [p for p in checkpoint.steps_in(folder) if p.name < checkpoint.folder_name(scene.step)]
    for path in reversed(whole):
        try:
            saved = checkpoint.load(path)
        except checkpoint.Damaged:
            continue
        if finite(saved.tensors["model"][name]):
            optim = [n for n, t in saved.tensors["optim"].items() if not finite(t)]
            state = f"; but its optimizer state is not ({optim[0]})" if optim else ""
            why = f"it was finite in {path.name}{state}: it was written in between, by an update or by code outside the step"
            return why, f"go on from there: seedbed resume {scene.run.name}; look for in-place writes, then for eps and lr"
    return "no checkpoint holds a finite value of it", "check the initialisation; start the run again"


def _blame_code(scene: Scene, finding: Finding, found: Place) -> None:
    name = found.module or f"the objective ({type(scene.system).__name__})"
    finding.kind = found.direction
    op = f"{found.op} at {found.line}" if found.line else found.op
    wide = next((r for r in finding.rungs if r.name.startswith("fp64")), None)
    if found.direction == "forward":
        finding.what = f"{name}: output is not finite" + (f", from {op} of {found.given}" if op else f" ({found.given})")
    else:
        finding.what = f"{name}: its output is finite, its gradient is not" + (f", from {op} ({found.given})" if op else "")
    finding.where = f"{found.line}, called in {found.where}" if found.line else found.where
    if found.line.rpartition(".")[2].rpartition(" ")[2] == found.where.rpartition(".")[2]:
        finding.where = f"{found.line.partition(' ')[0]} {found.where.partition(' ')[2]}"
    if wide and wide.finite:
        finding.why = f"finite in float64: the mathematics is sound, {found.dtype or 'the arithmetic'} overflows or loses it"
        finding.fix = f"compute {name} in float32 or wider, or keep its input small (norm, clamp, scale)"
    else:
        finding.why = "not finite in float64 either: a root, a logarithm or a division at its edge, not the precision"
        finding.fix = _remedy(found.op, found.direction)


def _remedy(op: str, direction: str) -> str:
    """What to do about an operation, by its name in the forward or the backward pass."""
    low = op.lower()
    if direction == "forward" and "sqrt" in low and "rsqrt" not in low:
        return "keep what goes into the root at or above 0 (clamp_min)"
    table = {
        ("sqrt", "pow", "norm", "std", "hypot"): "add a small eps inside the root, where the gradient at 0 is infinite",
        ("div", "reciprocal", "mean"): "add an eps to the denominator, or clamp it away from 0",
        ("log",): "clamp what goes into the logarithm above 0, or use log_softmax, logsumexp or log1p",
        ("exp", "sinh", "cosh"): "subtract the maximum first, or clamp what goes into the exponential",
        ("softmax",): "leave at least one entry of every row unmasked",
        ("acos", "asin", "atanh", "erfinv"): "clamp its input inside the open interval",
        ("hook",): "look at the hook that is registered there",
    }
    found = next((text for words, text in table.items() if any(word in low for word in words)), None)
    return found or "look at that line with the rows above: guard the case that they are"


def _blame_gradient(finding: Finding) -> None:
    """Forward and backward were sound node by node, and yet the gradients' norm is not finite."""
    written = [n for n, size in finding.examination.grads.items() if math.isnan(size)]
    if written:
        finding.kind, finding.where = "gradient", written[0]
        finding.place = Place("gradient", written[0].rpartition(".")[0], written[0], op=written[0])
        finding.what = f"the gradient of {written[0]} is not finite although the backward pass gave finite ones"
        finding.why = "something wrote to .grad between backward and the optimizer"
        finding.fix = "look for post-accumulate hooks and for code that touches .grad"
        return
    name, size = max(finding.examination.grads.items(), key=lambda item: item[1], default=("?", math.nan))
    finding.kind, finding.where = "overflow", name
    finding.place = Place("gradient", name.rpartition(".")[0], name, op=name)
    finding.what = f"every gradient is finite, but their norm overflows; the largest is that of {name} ({size:.3g})"
    finding.why = "gradients of this size come from an explosion in depth or in a recurrence, not from one operation"
    finding.fix = "lower optim.lr, normalise inside the block, or scale the loss down"


# ---- the data --------------------------------------------------------------------------------------------------------


def blame_data(scene: Scene, finding: Finding) -> bool:
    """Whether the rows that fail hold numbers that are not finite, out of their range, or far beyond the batches before."""
    exam = finding.examination
    limits = _reference(scene)
    for part, batch in enumerate(exam.batches):
        suspects = {r.row for r in finding.rows if r.part == part} or set(range(num_rows(batch)) if finding.all_rows else ())
        ranges = declared_ranges(scene, batch)
        for name, value in batch.items():
            size = limits.get(name, math.inf)
            bad = [row for row in _bad_rows(value, batch, *ranges.get(name, (-size, size))) if row in suspects]
            if bad:
                _tell_data(scene, finding, part, name, bad)
                return True
    return False


def declared_ranges(scene: Scene, batch: Batch) -> dict[str, tuple[float, float]]:
    """What the recipe's probe says about the entries of a batch; a probe may choke on the very numbers under investigation."""
    try:
        with scene.engine.evaluating():
            probe = scene.system.probe(batch)
        return dict(probe.ranges or {}) if probe else {}
    except Exception:
        return {}


def _bad_rows(value: Tensor, batch: Batch, low: float, high: float) -> list[int]:
    if not value.ndim or len(value) != num_rows(batch) or not (value.is_floating_point() or math.isfinite(high)):
        return []
    flat = value.detach().reshape(len(value), -1).double()
    wrong = ~(torch.isfinite(flat) & (flat >= low) & (flat <= high)).all(1)
    return wrong.nonzero().flatten().tolist()


def _reference(scene: Scene) -> dict[str, float]:
    """How large an entry of a batch may be, from the batches before this one."""
    job, sizes = scene.job, {}
    first = max(job.counter - NUM_REFERENCES * job.config.batch, 0)
    for counter in range(first, job.counter, job.config.batch):
        job.feed.load(counter)
        for k in range(job.config.accum):
            for name, value in job.feed.part(k).items():
                size = largest(value)
                sizes[name] = max(sizes.get(name, 0.0), 0.0 if math.isnan(size) else size)
    return {name: OUTLIER * size for name, size in sizes.items() if size > 0}


def _tell_data(scene: Scene, finding: Finding, part: int, name: str, bad: list[int]) -> None:
    batch = finding.examination.batches[part]
    finding.rows = [r for r in finding.rows if r.part == part and r.row in bad] or [
        row_facts(scene, finding.examination, part, row) for row in bad[:8]
    ]
    finding.all_rows = False
    row = finding.rows[0]
    value = batch[name][row.row]
    kind = "values that are not finite" if not finite(value) else f"values up to {largest(value):.3g}, far out of range"
    finding.kind = "data"
    finding.place = Place("data", "", place(type(scene.data.train).batch), op=name)
    item = f"item {row.item} of the data set (sample {row.sample})" if row.item is not None else f"sample {row.sample}"
    finding.what = f"the batch itself is bad: `{name}` of row {row.row}, {item}, holds {kind}"
    finding.where = f"{place(type(scene.data.train).batch)}; {item}"
    finding.why = "whatever the model computes from it is not finite either; the model is not to blame"
    finding.fix = f"repair or drop item {row.item if row.item is not None else row.sample} at the source, or clamp it in `batch`"


# ---- rows ------------------------------------------------------------------------------------------------------------


def failing_rows(scene: Scene, exam: Examination) -> tuple[list[Row], bool]:
    """The smallest sets of rows that still fail, by halving; and whether every row that was tried fails alone."""
    deadline, found, every = time.monotonic() + PATIENCE, [], True
    engine = _single(scene)
    for part, batch in enumerate(exam.batches):
        count = num_rows(batch)

        def fails(rows: list[int], part: int = part, batch: Batch = batch, count: int = count) -> bool:
            alone = run_rows(scene, engine, batch, exam.tapes[part], rows, count)
            return alone is not None and alone.bad

        if not count or not fails(list(range(count))):
            every = False
            continue
        probes = sorted({0, count // 2, count - 1})
        rest = [row for row in range(count) if row not in probes]
        if count > 1 and all(fails([row]) for row in probes) and (not rest or fails(rest)):
            found += [(part, row) for row in probes]
            continue
        every = False
        found += [(part, row) for row in _shrink(list(range(count)), fails, deadline)]
    every = every and bool(found)
    return [row_facts(scene, exam, part, row) for part, row in found[:8]], every


def _shrink(rows: list[int], fails: Callable[[list[int]], bool], deadline: float) -> list[int]:
    """Rows of all the smallest failing sets inside `rows`, which fails as a whole."""
    if len(rows) == 1 or time.monotonic() > deadline:
        return rows
    halves = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    found = [row for half in halves if fails(half) for row in _shrink(half, fails, deadline)]
    return found or rows


def _single(scene: Scene) -> TracingEngine:
    """An engine on the same weights that takes any batch as one part."""
    engine = TracingEngine(scene.system, replace(scene.config, accum=1, ema=0.0), scene.engine.device)
    for name, scale in scene.engine.scale.items():
        engine.scale[name].copy_(scale)
    return engine


def run_rows(
    scene: Scene, engine: TracingEngine, batch: Batch, tape: list[Tensor], rows: list[int], count: int
) -> Examination | None:
    """The step on some of its rows, with the noise that they had; None when the model cannot take so few."""
    player = Player(tape, rows, count)
    try:
        return engine.examine(lambda k: take_rows(batch, rows), scene.begin(engine), player, light=True)
    except (RuntimeError, ValueError, IndexError, AssertionError):
        return None


def row_facts(scene: Scene, exam: Examination, part: int, row: int, loss: float = math.nan) -> Row:
    """Which item a row is, and what a person can read of it."""
    job = scene.job
    sample = job.counter + part * (job.config.batch // job.config.accum) + row
    source, item = job.data.train, None
    if source.arrays:
        _, index = Order(source.num_items, job.config.seed).at(sample, 1)
        item = int(index[0])
    return Row(part, row, sample, item, loss, show_row(scene, exam.batches[part], row))


def show_row(scene: Scene, batch: Batch, row: int) -> str:
    """A row decoded by the recipe, or its first numbers."""
    try:
        with scene.engine.evaluating():
            probe = scene.system.probe(batch)
            if probe and probe.decode and probe.inputs:
                return repr(probe.decode(probe.batch[probe.inputs][row].detach().cpu()))[:120]
    except Exception:  # a probe may choke on the very numbers under investigation
        pass
    shown = []
    for name, value in batch.items():
        if value.ndim and len(value) == num_rows(batch) and name != "index":
            numbers = value[row].detach().flatten()[:5].tolist()
            more = ", ..." if value[row].numel() > 5 else ""
            shown.append(f"{name}=[{', '.join(f'{x:.4g}' for x in numbers)}{more}]")
    return " ".join(shown)[:160]


# ---- precisions ------------------------------------------------------------------------------------------------------


def ladder(scene: Scene, exam: Examination) -> list[Rung]:
    """The same step with the same noise: as run, in float32 there, in float32 on the CPU, in float64 on the CPU."""
    device, config = scene.engine.device, scene.config
    rungs = [_rung(f"{config.precision} on {device.type}, as run", exam)]
    cpu = torch.device("cpu")
    wanted = [("fp32", device, torch.float32)] if config.precision != "fp32" else []
    wanted += [("fp32", cpu, torch.float32)] if device.type != "cpu" else []
    for name, where, dtype in [*wanted, ("fp64", cpu, torch.float64)]:
        title = f"{name} on {where.type}"
        try:
            rungs.append(_rung(title, _climb(scene, exam, where, dtype)))
        except Exception as error:  # a recipe may refuse a dtype in any way it likes
            rungs.append(Rung(title, math.nan, math.nan, False, f"{type(error).__name__}: {error}".splitlines()[0][:90]))
    return rungs


def _climb(scene: Scene, exam: Examination, device: torch.device, dtype: torch.dtype) -> Examination:
    config = replace(scene.config, precision="fp32", device=device.type, ema=0.0, accum=len(exam.batches))
    engine, system = build(scene.recipe, config, scene.data, device)
    with torch.no_grad():
        live = dict(scene.system.state_dict(keep_vars=True))
        for name, tensor in system.state_dict(keep_vars=True).items():
            tensor.copy_(live[name])
    system.load_state(scene.system.state())
    system.train(scene.system.training).to(dtype)
    batches = [{k: v.to(device) for k, v in to_dtype(b, dtype).items()} for b in exam.batches]
    tape = [draw for part in exam.tapes for draw in part]
    return engine.examine(lambda k: batches[k], scene.begin(engine), Player(tape), light=True)


def _rung(name: str, exam: Examination) -> Rung:
    return Rung(name, exam.loss, max(exam.norms.values(), default=math.nan), not exam.bad)


# ---- a step that is finite -------------------------------------------------------------------------------------------


def _explain_finite(scene: Scene, finding: Finding, changes: dict[str, float], tell: Callable[[str], None]) -> None:
    exam = finding.examination
    bad = [n for n, t in scene.engine.tensors()["optim"].items() if not finite(t)]
    if bad:
        finding.kind, finding.where = "optimizer", bad[0]
        finding.what = f"the optimizer's state {bad[0]} is not finite before the step ({len(bad)} tensors)"
        finding.why = "a squared gradient overflowed: such a weight never moves again"
        finding.fix = "go back to a checkpoint from before; lower optim.clip or scale the loss down"
        return
    tell("weighing the rows")
    finding.rows = worst_rows(scene, exam)
    finding.blocks = blocks(scene, exam, changes)
    limit, median = _band(scene)
    if exam.loss > limit:
        finding.kind = "spike"
        top = finding.rows[0] if finding.rows else None
        share = f"; row {top.row} alone has {top.loss:.4g}" if top else ""
        finding.what = f"loss {exam.loss:.4g} against {median:.4g} in the steps before{share}"
        block = max(finding.blocks, key=lambda b: b["grad_norm"], default={"block": "?"})
        finding.where = f"largest gradient: {block['block']}"
        finding.why = "one batch far from the others, or weights that an earlier step has thrown off"
        finding.fix = "look at the worst rows; if they are ordinary, lower optim.lr or optim.clip"
        blame_data_of_spike(scene, finding)
        return
    finding.what = f"nothing is wrong with this step: loss {exam.loss:.6g}, gradient norm {max(exam.norms.values()):.4g}"
    finding.where, finding.why, finding.fix = scene.start, "every value is finite and inside its band", "name another step"


def blame_data_of_spike(scene: Scene, finding: Finding) -> None:
    """Rows whose numbers lie far beyond those of the batches before explain a spike by themselves."""
    sizes = {name: limit / OUTLIER * 10 for name, limit in _reference(scene).items()}
    for batch in finding.examination.batches:
        for name, value in batch.items():
            size = sizes.get(name, math.inf)
            bad = _bad_rows(value, batch, -size, size)
            if bad:
                most = largest(value[bad[0]])
                finding.why = f"`{name}` of row {bad[0]} goes up to {most:.3g}, ten times beyond the batches before"
                finding.fix = "check the item at its source; clamp or normalise it in `batch`"
                finding.place = Place("data", "", place(type(scene.data.train).batch), op=name)
                return


def _band(scene: Scene) -> tuple[float, float]:
    """What a loss may be, from those recorded in the steps before: median and six robust deviations."""
    before = [float(v) for s, v in scene.recorded.items() if v is not None and scene.step - 128 <= s < scene.step]
    before = sorted(v for v in before if math.isfinite(v))
    if len(before) < 8:
        return math.inf, math.nan
    median = before[len(before) // 2]
    spread = sorted(abs(v - median) for v in before)[len(before) // 2]
    return median + 6 * max(1.4826 * spread, 1e-3 * abs(median)), median


def worst_rows(scene: Scene, exam: Examination, num: int = 5) -> list[Row]:
    """The rows with the largest loss of their own."""
    deadline, engine, losses = time.monotonic() + PATIENCE, _single(scene), []
    for part, batch in enumerate(exam.batches):
        for row in range(num_rows(batch)):
            if time.monotonic() > deadline:
                break
            alone = run_rows(scene, engine, batch, exam.tapes[part], [row], num_rows(batch))
            if alone is not None:
                losses.append((alone.loss, part, row))
    return [row_facts(scene, exam, part, row, loss) for loss, part, row in sorted(losses, reverse=True)[:num]]


def blocks(scene: Scene, exam: Examination, changes: dict[str, float]) -> list[dict[str, Any]]:
    """Gradient norm and relative update of every block, which is as deep as two names below the system."""
    found: dict[str, dict[str, float]] = {}
    for name, size in exam.grads.items():
        parts = name.split(".")[:-1]
        key = ".".join(parts[: 3 if len(parts) > 2 and parts[2].isdigit() else 2]) or name
        entry = found.setdefault(key, {"squares": 0.0, "update": 0.0})
        entry["squares"] += size * size
        entry["update"] = max(entry["update"], changes.get(name, 0.0))
    return [{"block": k, "grad_norm": math.sqrt(v["squares"]), "update": v["update"]} for k, v in found.items()]
