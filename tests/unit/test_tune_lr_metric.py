"""find-lr: what trials are judged by, and what is said where that is not what the run is judged by."""

import math

import pytest
import torch
import torch.nn.functional as F
from test_tune_lr import DECAYED, DRIFT, FACTS, SCHEDULED, curve, drawn, reuse, snapshot
from tune_toys import Regression, Rows, workload

from seedbed.config import Optim
from seedbed.tune import lr
from seedbed.tune.lr import Study, Trial
from seedbed.tune.workload import rigged


class Judged(Regression):
    """Judged by the error on held-out rows; evaluations are counted in its state, and move its buffers."""

    def evaluate(self, source, engine):
        self.calls += 1
        self.seen += 1
        x, y = (torch.from_numpy(source.arrays[name]) for name in ("x", "y"))
        return {"error": F.mse_loss(self.net(x), y).item(), "other": -1.0}


class Steered(Judged):
    evaluation_steers = True


class Saturated(Regression):
    def evaluate(self, source, engine):
        return {"exact": 1.0, "loss": 0.0}


class Distant(Regression):
    """Judged by something else than its loss: how far its weights have gone."""

    def evaluate(self, source, engine):
        return {"norm": 100.0 * self.net[0].weight.norm().item()}


@pytest.mark.parametrize("changes", [{}, {"ema": 0.9}], ids=str)
def test_trial_of_full_length_scores_like_the_run(changes: dict) -> None:
    toys = workload(lambda c: Judged(), **SCHEDULED, **changes)
    with rigged(toys.build(), toys.data, print) as rig:
        score = Study(rig, 30, valid=toys.data.valid).trial(1.0, 30).score
    engine = toys.build()
    with rigged(engine, toys.data, print) as rig:
        rig.take_steps(30)
    with engine.evaluating():
        assert score == engine.system.evaluate(toys.data.valid, engine)["error"]


def test_trials_are_compared_by_the_evaluation() -> None:
    toys = workload(lambda c: Judged(), ema=0.9, optim=Optim(lr=1e-2), steps=80, schedule=DECAYED)
    engine = toys.build()
    before, calls = snapshot(engine), engine.system.calls
    finding = lr.find(reuse(engine, toys), num_steps=40)
    assert finding.metric == "error" and engine.system.calls == calls
    assert all(torch.equal(before[name], value) for name, value in snapshot(engine).items())
    full = [t for t in finding.trials if t.num_steps == 40]
    assert all(t.score is not None for t in full) and [t.loss for t in finding.compared] == [t.score for t in full]
    assert all(t.score is None for t in finding.trials if t.num_steps != 40)
    assert not any("steer" in note for note in finding.notes)


def test_training_loss_decides_without_an_evaluation() -> None:
    finding = lr.find(workload(steps=40), num_steps=20, repeats=1)
    assert finding.metric == "training loss" and finding.compared == finding.trials
    assert any("one repeat" in note for note in finding.notes)


def test_trials_do_not_follow_what_evaluations_steer_and_say_so() -> None:
    finding = lr.find(workload(lambda c: Steered(), optim=Optim(lr=1e-2), steps=40, schedule=DECAYED), num_steps=40)
    assert finding.metric == "error" and any("steer" in note for note in finding.notes)


def test_evaluation_that_does_not_change_gives_no_answer() -> None:
    """By what the run is judged by, no rate is better than none; the training loss is only told."""
    toys = workload(lambda c: Saturated(), optim=Optim(lr=1e-2), steps=40, schedule=DECAYED)
    finding = lr.find(toys, num_steps=40)
    assert finding.lr is None and finding.advice.startswith("no answer: the run is judged by exact")
    assert finding.low < finding.high and "By the training loss" in finding.advice and "\n" not in finding.advice
    assert not finding.assignments and finding.metric == "training loss"


@pytest.mark.parametrize(("fall", "moves"), [(0.02, False), (0.0, False), (0.5, True)])
def test_evaluation_change_must_exceed_its_noise(fall: float, moves: bool) -> None:
    scores, losses = drawn(0.0, 0.01, 0.05, seed=3), drawn(1.0, 1.0, 0.001, seed=4)

    class Told:
        def trial(self, factor: float, num_steps: int, repeat: int = 0) -> Trial:
            if not factor:
                return Trial(factor, num_steps, repeat, 9.0, 3.0 + fall)
            k = round(math.log2(factor))
            return Trial(factor, num_steps, repeat, losses(k, repeat), scores(k, repeat))

    seen, untrained, metric = lr.compare(Told(), lr.Metric("exact", Rows(8)), 100, 2, 0, (-6, 6))
    assert (metric.name, untrained) == (("exact", 3.0 + fall) if moves else ("training loss", 9.0))
    assert bool(metric.caveat) == (not moves) and (moves or seen.best == 1)


@pytest.mark.parametrize(("system", "abstains"), [(Judged, False), (Steered, True), (Distant, True), (Regression, False)])
def test_evaluation_that_takes_too_long_is_skipped(system: type[Regression], abstains: bool) -> None:
    """Then the training loss decides where it is the same quantity, and there is no answer where it is not."""
    toys = workload(lambda c: system(), num_items=4096, batch=256)
    with rigged(toys.build(), toys.data, print) as rig:
        metric = lr.choose_metric(rig, Rows(4096), 0.0)
        afforded = lr.choose_metric(rig, Rows(4096), 100.0)
    assert metric.valid is None and metric.name == "training loss" and bool(metric.caveat) == abstains
    assert not afforded.caveat and (afforded.valid is not None) == (system is not Regression)
    finding = lr.conclude(curve(0.2), 9.0, 1e-3, None, FACTS | {"trial_steps": 800}, [], [], DRIFT, metric)
    assert (finding.lr is None) == abstains and (not abstains or "too long to compare trials by it" in finding.advice)
