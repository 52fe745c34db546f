"""Checks of time: controls and frames (D1), rollouts (C8), calls of repeated modules (C9), stages of a curriculum (T5)."""

import contextlib
import itertools
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from seedbed.checks.calls import influence_ends_in, made_by, only_called_by, places, recipe_calls, record
from seedbed.checks.device_checks import inference_engine
from seedbed.checks.evaluation_checks import evaluation_line, observed_evaluation
from seedbed.checks.registry import check, failed, passed, skipped
from seedbed.checks.small_jobs import short_options
from seedbed.checks.subject import CPU, Recorder, Subject, limit_for, probe_of, source_line, spread
from seedbed.errors import UserError
from seedbed.report.findings import Finding
from seedbed.train.probe import Rollouts
from seedbed.train.system import Request, System

# Dead reckoning against recorded poses, metres or rotation entries in float32: clean 5e-7.
POSE_LIMIT = 1e-3
# Errors in levels of a pixel: exact predictions 1e-6; a wrong index is off by one.
LEVEL_LIMIT = 0.25
LENGTH, NUM_STEPS = 4, 6
# A stage may be so many times the one before. Presets: 4, for rollouts of 1, 4, 16 and 64 frames.
JUMP = 4.0
NUM_EVALUATIONS, MOST_UPDATES, ENOUGH = 8, 1500, 2
# Batches after which their largest value has reached the limit of the stage.
SETTLED = 20


@check("D1", "control lag", "err", humbatova=(1,), needs=("alignment",))
def control_lag(subject: Subject) -> Finding:
    """Image motion agrees best with the controls at lag 0, in their sign, and the controls lead from pose to pose."""
    found, problem = subject.declared.alignment(subject.real_data), ""
    where = source_line(type(subject.real_data.train).__init__)
    if found.is_clear and found.lag:
        problem = f"frames agree with other controls than theirs: {found.summary}"
        fix = f"seedbed data prepare ... --shift-actions {found.lag}"
    elif found.reversed_axes:
        problem = f"{', '.join(found.reversed_axes)} against the convention"
        fix = f"seedbed data prepare ... --flip {found.reversed_axes[0]}"
    elif not found.pose_error <= POSE_LIMIT:
        problem = f"the controls lead to poses that are off by {found.pose_error:.2g} after one frame"
        fix = "integrate it in recorded units"
        where = source_line(found.integrate)
    if problem:
        fix = f"give the network the control of each frame: {fix}"
        return failed(problem, where=where, case="D1-lag", fix=fix, value=found.pose_error)
    if not found.is_clear:
        return skipped(f"no lag stands out: {found.summary}")
    return passed(found.summary, found.pose_error, POSE_LIMIT)


class _Network:
    """Dynamics that move `speed` levels a frame; 1 is true. Records controls and memories that do not fit their frame."""

    def __init__(self, world: Rollouts, speed: float) -> None:
        self.world, self.speed, self.control, self.memory = world, speed, 0.0, 0.0
        self.wrong: Tensor | None = None  # the first that does not fit

    def __call__(self, remembered: list[Tensor], action: Tensor) -> Tensor:
        now_B1 = self._levels(remembered[0][:, -1:])
        seen_B1 = remembered[0][:, -1].flatten(1).abs().amax(1, keepdim=True) > 0  # training may blank the memory of a row
        for kept in remembered if self.speed == 1.0 else ():
            off_BT = self._levels(kept) + torch.arange(kept.shape[1] - 1, -1, -1) - now_B1
            self.memory = max(self.memory, *(off_BT * seen_B1).flatten().tolist(), key=abs)
            self.wrong = kept if self.wrong is None and self.problem() else self.wrong
        self.control = max(self.control, *((action / self.world.control - now_B1) * seen_B1).flatten().tolist(), key=abs)
        self.wrong = action if self.wrong is None and self.problem() else self.wrong
        return remembered[0][:, -1] + self.speed * self.world.level

    def _levels(self, frames_BTCHW: Tensor) -> Tensor:
        return (frames_BTCHW.flatten(2).mean(2) + 1.0) / self.world.level

    def problem(self) -> str:
        """What the network was given wrongly."""
        if abs(self.memory) > LEVEL_LIMIT:
            return f"the memory holds a frame {self.memory:+.3g} frames from where it belongs"
        wrong = abs(self.control) > LEVEL_LIMIT and self.speed == 1.0
        return f"the control is that of the frame {self.control:+.3g} frames away" if wrong else ""


def _wrong_rollouts(world: Rollouts, ways: dict[str, Callable[[], list[float]]]) -> tuple[dict[str, str], float]:
    """What is wrong, by the name of the way, and the largest error of exact predictions."""
    problems, worst = {}, 0.0
    for (name, run), speed in itertools.product(ways.items(), (1.0, 2.0)):
        network = _Network(world, speed)
        with world.replaced(network), torch.no_grad():
            moves = run()
        drifts = [(speed - 1.0) * n for n in range(1, len(moves) + 1)]
        offs = [abs(move - drift) for move, drift in zip(moves, drifts, strict=True)]
        worst, first = max(worst, *moves) if speed == 1.0 else worst, next((n for n, x in enumerate(offs) if x > LEVEL_LIMIT), -1)
        problem = network.problem()
        if name == "training" and speed == 2.0:  # its rollouts have several ages
            problem = "" if max(moves) > 1.0 + LEVEL_LIMIT else "errors do not grow: it goes on from true frames, not its own"
        elif not problem and first >= 0:
            problem = f"frame {first + 1} is {moves[first] - drifts[first]:+.3g} levels from where the network puts it"
        if problem:
            problems.setdefault(name, problem)
    return problems, worst


@check("C8", "rollouts", "err", humbatova=(1, 10), needs=("rollouts",))
def rollouts(subject: Subject) -> Finding:
    """With the true dynamics in place of the network, rollouts of training, evaluation and play meet their targets."""
    system = subject.fresh_system().train()
    world: Rollouts = probe_of(system, subject.batch(0)).rollouts

    def train(length: int = LENGTH) -> list[float]:
        engine = Recorder(system, subject.small, CPU)
        engine.variant = world.stage(length)
        return [float(system.update(dict(world.batch), engine)[world.error]) / world.level for _ in range(NUM_STEPS)]

    def free(name: str) -> list[float]:
        pairs = zip(world.free[name](LENGTH), world.true(LENGTH), strict=True)
        return [float((frame - true[: len(frame)]).mean()) / world.level for frame, true in pairs]

    ways: dict[str, Callable[[], list[float]]] = {"training": train}
    ways |= {name: (lambda name=name: free(name)) for name in world.free}
    kept = {name: buffer.clone() for name, buffer in system.named_buffers()}
    problems, worst = _wrong_rollouts(world, ways)
    if not problems:
        return passed(f"rollouts of {', '.join(ways)}; largest error in levels", worst, LEVEL_LIMIT)
    (name, problem), network = next(iter(problems.items())), _Network(world, 1.0)

    def run_again() -> None:
        for title, buffer in system.named_buffers():
            buffer.copy_(kept[title])
        with world.replaced(network), torch.no_grad():
            ways[name]()

    where = made_by(subject, run_again, lambda: network.wrong)
    if not where and name != "training" and len(problems) == len(world.free):  # then it is what they are compared with
        *_, where = recipe_calls(subject, lambda: world.true(1)).values()
    elif not where and (name != "training" or "grow" in problem):
        others = [run for way, run in ways.items() if way not in problems] if name != "training" else [lambda: train(1)]
        where = places(only_called_by(subject, ways[name], *others))
    return failed(f"rollouts of {' and '.join(problems)}: {problem}", where=where or source_line(world.windows))


@check("C9", "iteration count", "err", humbatova=(4, 6), needs=("predict",))
def number_of_iterations(subject: Subject) -> Finding:
    """Training, evaluation and samples call repeated modules as often as the config says; what is read from a memory matters."""
    known, predict = subject.declared.recall or ({}, lambda number, is_other: torch.zeros(1))
    for number, is_read in known.items():
        with torch.no_grad():
            base, other = predict(number, False), predict(number, True)
        moved, limit = float((base - other).abs().max()) / spread(base), limit_for(base)
        if is_read != (moved > limit):
            way = "is read and does not matter" if is_read else "is not read and matters"
            what = f"entry {number} of the memory {way}: another one moves the prediction by {moved:.2g}"
            runs = (torch.no_grad()(lambda n=number, other=other: predict(n, other)) for other in (False, True))
            where = influence_ends_in(subject, *runs) or subject.loss_line()
            return failed(what, where=where, case="C9-memory", value=moved, limit=limit)
    if subject.declared.calls is None:
        has_memory = subject.declared.recall is not None
        return passed("what is read from the memory matters") if has_memory else skipped("its probe does not declare calls")
    engine = inference_engine(subject)
    system = engine.system
    calls = probe_of(system, subject.batch(0)).calls
    done = {"evaluation": observed_evaluation(subject).calls}
    with _counted(system, calls) as done["training"]:
        subject.loss_of(system, subject.batch(0))
    request = Request(Path(tempfile.mkdtemp()), dict(short_options(engine)))
    with contextlib.suppress(UserError), _counted(system, calls) as done["sampling"], engine.evaluating():
        system.sample(request, engine)
    shutil.rmtree(request.folder)
    for (name, counts), (module, (first, wanted)) in itertools.product(done.items(), calls.items()):
        if counts[first] and counts[module] != wanted * counts[first]:
            what = f"{name} calls {module} {counts[module] / counts[first]:.3g} times a prediction, the config says {wanted}"
            return failed(what, where=evaluation_line(subject) if name == "evaluation" else subject.loss_line())
    return passed(f"{', '.join(f'{m} {n} times' for m, (_, n) in calls.items())} in {', '.join(done)}")


@contextlib.contextmanager
def _counted(system: nn.Module, calls: Mapping[str, tuple[str, int]]) -> Iterator[Counter[str]]:
    counts: Counter[str] = Counter()
    with contextlib.ExitStack() as hooks:
        for name in {*calls, *(first for first, _ in calls.values())}:
            hook = lambda module, given, name=name: counts.update([name])  # noqa: E731
            hooks.enter_context(system.get_submodule(name).register_forward_pre_hook(hook))
        yield counts


@check("T5", "curriculum", "err", humbatova=(6,), needs=("perfect",))
def curriculum(subject: Subject) -> Finding:
    """With a perfect model the curriculum leaves its first stage, by jumps that are not too large, and batches follow it."""
    system = subject.fresh_system().train()
    probe, name = probe_of(system, subject.batch(0)), system.stage_metric
    with probe.perfect():
        walked = list(_walk(subject, system, probe.stage_entry))
    subject.fresh_system()  # data may read the stage of the newest system
    stages, problem, severity = [stage for stage, _, _ in walked], "", "err"
    changes = [(a, b) for a, b in itertools.pairwise(stages) if a != b]
    where = source_line(type(system).evaluate)
    if not system.evaluation_steers:  # what decides about a stage is the last that a step does
        *_, where = recipe_calls(subject, lambda: subject.loss_of(system, subject.batch(0))).values()
    for stage, seen, age in walked if probe.stage_entry else ():
        if seen > stage or (age >= SETTLED and seen < stage):
            problem = f"{name} is {stage:g}, and the largest {probe.stage_entry} of {age} batches is {seen:g}"
            where = places((subject.batch_line(), *(call.code for call in record(subject, lambda: subject.batch()))))
            break
    jump = next((pair for pair in changes if pair[1] < pair[0] or pair[1] > JUMP * max(pair[0], 1.0)), None)
    if not changes and not problem:
        problem = f"{name} stays {stages[0]:g} with a perfect model, over {len(stages)} updates"
    elif jump and not problem:
        problem, severity = f"{name} goes from {jump[0]:g} to {jump[1]:g} with a perfect model", "warn"
    if problem:
        return failed(problem, where=where, severity=severity)
    return passed(f"{name} {' '.join(f'{s:g}' for s in dict.fromkeys(stages))}", max(b / max(a, 1.0) for a, b in changes), JUMP)


def _walk(subject: Subject, system: System, entry: str) -> Iterator[tuple[float, float, int]]:
    """The stage of each update, the largest value of the entry since it changed, and the number of batches since."""
    recorder, config, feed = Recorder(system, subject.small, CPU), subject.small, subject.feed(subject.data.train, 5)
    stride = max(1, config.steps // NUM_EVALUATIONS) if system.evaluation_steers else 1
    last, largest, age, changes = None, 0.0, 0, 0
    for n, step in enumerate(range(0, config.steps, stride)[:MOST_UPDATES]):
        feed.load(5 * n)
        if system.evaluation_steers:
            with recorder.evaluating():
                system.evaluate(subject.data.valid, recorder)
        recorder.variant, batch = system.variant(step, config.steps), feed.part(0)
        stage = float(system.update(batch, recorder)[system.stage_metric])
        # A step may report the stage after it: its batch belongs to the one before.
        largest, age = max(largest, float(batch[entry].max()) if entry else 0.0), age + 1
        yield (stage if last is None else last), largest, age
        if stage != last:
            changes, largest, age = changes + (last is not None), 0.0, 0
        last = stage
        if changes > ENOUGH:
            return
