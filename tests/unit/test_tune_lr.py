"""find-lr: the arithmetic on drawn valleys, trials that are the run in small, and a system left exactly as it was found."""

import dataclasses
import itertools
import math
import random

import numpy as np
import pytest
import torch
from tune_toys import Model, Regression, needs_cuda, workload

from seedbed.config import Optim, Schedule
from seedbed.errors import UserError
from seedbed.train.optim import multiplier
from seedbed.tune import lr
from seedbed.tune.lr import Divergence, Study, Trial, num_scored, trial_schedule
from seedbed.tune.workload import preserved, rigged

FACTS = {"num_params": 1000, "run_steps": 800, "trial_steps": 100}


# ---- drawn valleys -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bottom", [-0.5, -0.3, 0.0, 0.2, 0.5])
@pytest.mark.parametrize(("scale", "shift"), [(1.0, 0.0), (1e-6, 3.0), (50.0, -20.0)])
def test_vertex_of_a_parabola_is_its_lowest_point(bottom: float, scale: float, shift: float) -> None:
    losses = {k: shift + scale * (k - 3 - bottom) ** 2 for k in (2, 3, 4)}
    assert lr.vertex(losses, 3) == pytest.approx(3 + bottom, abs=1e-5)


@pytest.mark.parametrize(
    ("losses", "low", "high"),
    [
        ((math.inf, 1.0, 2.0), 0.0, 0.5),
        ((2.0, 1.0, math.inf), -0.5, 0.0),
        ((math.inf, 1.0, math.inf), 0.0, 0.0),
        ((1.0, 1.0, 1.0), 0.0, 0.0),
        ((1e9, 1.0, 1.1), 0.0, 0.5),
        ((1.0, math.inf, 1.0), 0.0, 0.0),
        ((3.0, 2.0, 0.5), 0.5, 0.5),  # a repeat that has its lowest point elsewhere
        ((0.5, 2.0, 3.0), -0.5, -0.5),
    ],
)
def test_vertex_stays_near_the_best(losses: tuple, low: float, high: float) -> None:
    assert low <= lr.vertex(dict(zip((-1, 0, 1), losses, strict=True)), 0) <= high


@pytest.mark.parametrize("step", [1, 2])
def test_local_minimum_is_found_with_few_trials(step: int) -> None:
    for bottom, start in itertools.product(range(-6, 7), (-2, 0, 2)):
        seen = []

        def loss(k: int, seen: list = seen, bottom: int = bottom) -> float:
            seen.append(k)
            return float((k - bottom) ** 2) if k - bottom < 3 else math.inf

        found = lr.local_minimum(loss, start, step, (-6, 6))
        assert abs(found - bottom) < step or found == bottom
        assert all(-6 <= k <= 6 for k in seen) and len(set(seen)) <= 2 + abs(bottom - start) // step + 2


@pytest.mark.parametrize("value", [math.inf, 1.0])
def test_local_minimum_search_ends_on_a_plateau(value: float) -> None:
    assert -6 <= lr.local_minimum(lambda k: value, 0, 1, (-6, 6)) <= 6


def curve(
    bottom: float, noise: float = 0.0, repeats: int = 2, seed: int = 0, depth: float = 1.0, bracketed: bool = True
) -> lr.LrCurve:
    """Losses of 3 around the lowest point at the power `bottom`."""
    rng = np.random.default_rng(seed)
    best = round(bottom)
    scores = {
        k: [3.0 + depth * (k - bottom) ** 2 + noise * float(rng.normal()) for _ in range(repeats)]
        for k in range(best - 1, best + 2)
    }
    return lr.LrCurve(scores, bracketed)


DRIFT = (0.3, 0.2)


def conclude(found: lr.LrCurve, muon: float | None = None, untrained: float = 9.0, **facts: int) -> lr.LrResult:
    return lr.conclude(found, untrained, 1e-3, muon, FACTS | facts, ["a note"], [Trial(1.0, 100, 0, 3.0)], DRIFT)


@pytest.mark.parametrize("bottom", [-2.4, -0.3, 0.0, 1.2, 3.4])
@pytest.mark.parametrize("longer", [1, 2, 8, 10])
def test_best_rate_falls_with_the_length_of_the_run(bottom: float, longer: int) -> None:
    finding = conclude(curve(bottom), trial_steps=800 // longer)
    assert finding.lr == pytest.approx(1e-3 * 2**bottom * (800 / (800 // longer)) ** -0.3)
    assert finding.clear and finding.low <= finding.lr <= finding.high
    assert finding.high / finding.low == pytest.approx((800 / (800 // longer)) ** 0.4)


def test_rate_within_the_range_is_left_alone() -> None:
    finding = conclude(curve(0.9))  # 8 ** 0.3 is 2 ** 0.9
    assert finding.lr == pytest.approx(1e-3) and not finding.assignments and "no reason to change" in finding.advice


def test_muon_moves_by_the_same_factor() -> None:
    finding = conclude(curve(4.0), muon=4e-2)
    assert finding.ratio is not None and finding.ratio > 4
    assert finding.assignments == {
        "optim.lr": pytest.approx(1e-3 * finding.ratio),
        "optim.muon_lr": pytest.approx(4e-2 * finding.ratio),
    }


def test_uncertain_curves_name_no_single_rate() -> None:
    doubts = {
        "at no rate does the loss fall": conclude(curve(0.0), untrained=3.0),
        "the highest rate that was tried": conclude(curve(5.0, bracketed=False)),
        "the lowest rate that was tried": conclude(curve(-5.0, bracketed=False)),
        "trials of 100 steps say too little about 100,000": conclude(curve(0.0), run_steps=100_000),
        "the same within its noise": conclude(lr.LrCurve({-1: [3.1, 2.9], 0: [3.0, 2.95], 1: [2.9, 3.1]}, True)),
    }
    for words, finding in doubts.items():
        assert words in finding.advice and "\n" not in finding.advice, words
        assert not finding.clear and finding.lr is None and finding.ratio is None and not finding.assignments
    assert all(finding.low < finding.high / 1.3 for finding in doubts.values())
    assert all(finding.low <= finding.lowest <= finding.high for finding in doubts.values())


@pytest.mark.parametrize("seed", range(20))
def test_noise_widens_the_range_and_the_truth_stays_inside(seed: int) -> None:
    """Over a bowl of depth 1 per power, noise of a tenth of it may move the answer a little."""
    finding = conclude(curve(0.2, noise=0.1, repeats=3, seed=seed))
    truth = 1e-3 * 2**0.2 * 8**-0.3
    assert finding.low < truth < finding.high
    assert finding.lr is None or 1 / 1.6 < finding.lr / truth < 1.6


def test_flat_curve_is_distinguished_from_a_minimum() -> None:
    flat = [curve(0.0, noise=0.1, repeats=3, seed=s, depth=0.0).flat_range() for s in range(40)]
    steep = [curve(0.0, noise=0.05, repeats=3, seed=s).flat_range() for s in range(40)]
    assert sum(low <= -1 and high >= 1 for low, high in flat) > 20
    assert all(-1 < low <= high < 1 for low, high in steep)


def test_one_repeat_shows_no_noise() -> None:
    assert curve(0.2, repeats=1).noise() == 0.0 and curve(0.2, repeats=1).flat_range() == pytest.approx((0.2, 0.2))


@pytest.mark.parametrize("repeats", [2, 3])
def test_noise_excludes_what_repeats_share(repeats: int) -> None:
    """A repeat whose items are harder at every rate says nothing about rates; what is left has the deviation it was made with."""
    shifted = {k: [x + 5.0 * r for r, x in enumerate(losses)] for k, losses in curve(0.2, repeats=repeats).scores.items()}
    assert lr.LrCurve(shifted, True).deviation()[0] == pytest.approx(0.0, abs=1e-9)
    found = [curve(0.2, noise=0.1, repeats=repeats, seed=s).deviation()[0] ** 2 for s in range(400)]
    assert math.sqrt(np.mean(found)) == pytest.approx(0.1, rel=0.1)


def drawn(bottom: float, depth: float, noise: float, seed: int, diverges: float = math.inf):
    """Scores by power of two and repeat: a parabola, noise that all rates of a repeat share, and noise of each trial."""
    own, shared = np.random.default_rng(seed).normal(size=(2, 13, 2)) * noise

    def score(k: int, repeat: int) -> float:
        return 3.0 + depth * (k - bottom) ** 2 + float(own[k + 6, repeat] + shared[0, repeat]) if k < diverges else math.inf

    return score


def answers(depth: float, noise: float, diverges: float = math.inf, num: int = 200) -> list[tuple[float, lr.LrResult]]:
    """The true best rate and what is found, for many drawings; the run is as long as a trial."""
    found = []
    for seed in range(num):
        bottom = float(np.random.default_rng(1000 + seed).uniform(-2, 2))
        seen = lr.search(drawn(bottom, depth, noise, seed, bottom + diverges), 2, 0, (-6, 6))
        found.append((1e-3 * 2**bottom, conclude(seen, trial_steps=800)))
    return found


@pytest.mark.parametrize("diverges", [math.inf, 1.6])
def test_sharp_minimum_gives_a_single_rate(diverges: float) -> None:
    for truth, finding in answers(depth=1.0, noise=0.01, diverges=diverges):
        assert finding.lr is not None and 1 / 1.6 < finding.lr / truth < 1.6
        assert math.isfinite(diverges) or 1 / 1.2 < finding.lr / truth < 1.2


@pytest.mark.parametrize("depth", [0.02, 0.05])
def test_flat_minimum_gives_a_range_with_the_best(depth: float) -> None:
    """Twice the rate costs less than the noise of a trial. The level of the test is one in twenty to either side."""
    found = answers(depth, noise=0.05)
    ranges = [(truth, finding) for truth, finding in found if finding.lr is None]
    assert len(ranges) >= 0.8 * len(found)
    assert sum(finding.low <= truth <= finding.high for truth, finding in ranges) >= 0.93 * len(ranges)
    assert all(finding.high / finding.low > 1.6 for _, finding in ranges)
    assert sum("the same within its noise" in finding.advice for _, finding in ranges) >= 0.9 * len(ranges)


def test_named_rates_are_near_the_best() -> None:
    """Whatever the noise, a rate that is named costs little: less than the noise of one trial above the best."""
    for depth, noise in itertools.product((0.02, 0.1, 0.3, 1.0), (0.02, 0.05, 0.2)):
        named = [(math.log2(f.lr / truth), f) for truth, f in answers(depth, noise, num=60) if f.lr is not None]
        costs = [depth * off**2 / noise for off, _ in named]
        assert not costs or sorted(costs)[int(0.9 * (len(costs) - 1))] < 1.0, (depth, noise)


def test_flat_minimum_is_followed_to_its_edges() -> None:
    asked = set()

    def flat(k: int, repeat: int) -> float:
        asked.add(k)
        return 3.0 + (abs(k) > 2) + 0.01 * ((k * 7 + repeat * 3) % 5)

    assert lr.search(flat, 2, 0, (-6, 6)).flat_range() == (pytest.approx(-2, abs=0.5), pytest.approx(2, abs=0.5))
    assert asked == set(range(-3, 4))
    endless = lr.search(lambda k, r: 3.0 + 0.01 * r, 2, 0, (-6, 6))
    assert len(endless.scores) <= lr.MOST_RATES + 1 and endless.flat_range() == (-math.inf, math.inf)
    finding = conclude(endless, trial_steps=800)
    assert "lies within: no reason to change it" in finding.advice
    assert finding.lr is None and (finding.low, finding.high) == (pytest.approx(1e-3 / 64), pytest.approx(1e-3 * 64))


def test_divergence_at_all_rates_gives_no_answer() -> None:
    seen = lr.search(lambda k, r: math.inf, 2, 0, (-6, 6))
    finding = conclude(seen)
    assert finding.lr is None and finding.advice.startswith("no answer: at no rate does") and not finding.assignments


def test_flat_range_next_to_divergence() -> None:
    """An error of a thousandth beside one of none is no valley, however high the other side is."""
    low, _ = lr.LrCurve({1: [0.001, 0.0], 2: [0.001, 0.001], 3: [0.0, 0.0], 4: [1.0, 0.993]}, True).flat_range()
    assert low == -math.inf


def test_flat_range_ends_where_trials_diverge() -> None:
    low, high = lr.LrCurve({-1: [3.0, 3.1], 0: [3.0, 3.0], 1: [math.inf, 3.0]}, True).flat_range()
    assert low == -math.inf and high <= 1


def test_lr_result_is_plain_json() -> None:
    trials = [Trial(1.0, 100, 0, math.inf), Trial(1.0, 100, 1, 2.0, math.inf), Trial(1.0, 100, 2, 2.0, 3.0)]
    finding = lr.conclude(curve(4.0), 9.0, 1e-3, None, FACTS, [], trials, DRIFT)
    shown = finding.to_json()
    assert shown["trials"][0] == {"factor": 1.0, "num_steps": 100, "repeat": 0, "loss": None, "score": None}
    assert [(t["loss"], t["score"]) for t in shown["trials"][1:]] == [(2.0, None), (2.0, 3.0)]
    assert shown["try"] == finding.assignments and shown["ratio"] == finding.ratio and "assignments" not in shown


# ---- trials ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["constant", "cosine", "one_cycle", "wsd", "linear"])
@pytest.mark.parametrize("warmup", [0.0, 0.02, 0.1, 0.5])
def test_trial_has_the_schedule_of_the_run(kind: str, warmup: float) -> None:
    schedule = Schedule(kind=kind, warmup=warmup)
    assert trial_schedule(schedule, 400, 400) == schedule
    short = trial_schedule(schedule, 800, 100)
    assert short.warmup * 100 == pytest.approx(min(warmup * 800, max(20, warmup * 100)))
    assert multiplier(short, 1.0) == multiplier(schedule, 1.0)


def test_divergence_is_detected_and_learning_is_not() -> None:
    assert next(i for i in range(40) if Divergence().add(math.nan)) == 0
    for losses, diverges in [
        ([4.0] * 40, False),
        ([4.0 - 0.1 * i for i in range(60)], False),
        ([4.0] * 20 + [13.0] * 5, True),
        ([4.0] * 20 + [11.0] * 5, False),
        ([4.0] * 20 + [50.0] + [4.0] * 5, False),
        ([-2.0] * 20 + [3.0] * 5, True),
        ([4.0, 4.0, math.inf], True),
    ]:
        watch = Divergence()
        assert any([watch.add(x) for x in losses]) == diverges, losses


def snapshot(engine) -> dict[str, torch.Tensor]:
    found = {f"{f}.{n}": t.detach().clone() for f, group in engine.tensors().items() for n, t in group.items()}
    return found | {f"buffer.{n}": b.clone() for n, b in engine.system.named_buffers()} | {"halted": engine.halted.clone()}


def rng_state() -> tuple:
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


def reuse(engine, like):
    """The same workbench, around an engine that the test holds."""

    class Kept(type(like)):
        def build(self, *args, **kwargs):
            return engine

    return Kept(**{f.name: getattr(like, f.name) for f in dataclasses.fields(like)})


SCHEDULED = {"schedule": Schedule(kind="linear", warmup=0.1, decay=0.5, floor=0.0), "steps": 30}


@pytest.mark.parametrize("changes", [{}, {"ema": 0.9, "accum": 2, "model": Model(dropout=0.3)}], ids=str)
def test_trial_of_full_length_is_the_run(changes: dict) -> None:
    toys = workload(**SCHEDULED, **changes)
    engine = toys.build()
    with rigged(engine, toys.data, print) as rig:
        assert Study(rig, 30)._train(1.0, 30, 0)
    trained = snapshot(engine)
    engine = toys.build()
    with rigged(engine, toys.data, print) as rig:
        rig.take_steps(30)
    assert all(torch.equal(trained[name], value) for name, value in snapshot(engine).items())


def test_trials_share_items_between_rates_but_not_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    toys = workload(num_items=4096, **SCHEDULED)
    with rigged(toys.build(), toys.data, print) as rig:
        counters: list[int] = []
        load = rig.feed.load
        monkeypatch.setattr(rig.feed, "load", lambda counter: (counters.append(counter), load(counter)))
        seen = {}
        for factor, repeat in itertools.product((0.5, 2.0), (0, 1)):
            counters.clear()
            Study(rig, 30).trial(factor, 20, repeat)
            seen[factor, repeat] = list(counters)
    assert seen[0.5, 0] == seen[2.0, 0] and seen[0.5, 1] == seen[2.0, 1]
    assert len(seen[0.5, 0]) == 20 + num_scored(20) and not set(seen[0.5, 0]) & set(seen[0.5, 1])


def test_score_uses_ema_weights() -> None:
    """With a rate of 0 the average is the start; with an average of its own the score must follow it."""
    toys = workload(ema=0.9, **SCHEDULED)
    engine = toys.build()
    with rigged(engine, toys.data, print) as rig:
        study = Study(rig, 30)
        before = study.trial(0.0, 20).loss
        with torch.no_grad():
            for value in engine.ema.shadow.values():
                value.zero_()
        after = study._score(20, 0)
        with torch.no_grad():
            for value in engine.ema.live.values():
                value.fill_(100.0)
        assert study._score(20, 0) == after != before


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"accum": 2, "ema": 0.9, "model": Model(dropout=0.5)},
        {"optim": Optim(kind="muon"), "ema": 0.99},
        {"precision": "fp16"},
        {"precision": "bf16", "accum": 4},
    ],
    ids=str,
)
def test_find_lr_restores_all_state(changes: dict) -> None:
    """Weights, moments, averages, buffers, the guard, the system's own state and every generator: bitwise as before."""
    toys = workload(**changes)
    engine = toys.build()
    with rigged(engine, toys.data, print) as rig:
        rig.take_steps(3)
    engine.system.eval()
    before, rolled, calls = snapshot(engine), rng_state(), engine.system.calls
    finding = lr.find(reuse(engine, toys), num_steps=20)
    assert len(finding.trials) > 5
    after = snapshot(engine)
    assert before.keys() == after.keys()
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert not moved and rng_state() == rolled
    assert engine.system.calls == calls and not engine.system.training


@needs_cuda
@pytest.mark.parametrize("capture", ["auto", "off"])
def test_find_lr_restores_all_state_on_cuda(capture: str) -> None:
    toys = workload(where=torch.device("cuda", 0), capture=capture, ema=0.9, accum=2, model=Model(dropout=0.3))
    engine = toys.build()
    before, rolled = snapshot(engine), (rng_state(), torch.cuda.get_rng_state().tolist())
    first, second = (lr.find(reuse(engine, toys), num_steps=20) for _ in range(2))
    after = snapshot(engine)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (rng_state(), torch.cuda.get_rng_state().tolist()) == rolled
    assert [t.factor for t in first.trials] == [t.factor for t in second.trials]


def test_find_lr_restores_all_state_after_an_error() -> None:
    toys = workload(ema=0.9)
    engine = toys.build()
    before, rolled = snapshot(engine), rng_state()
    with pytest.raises(ZeroDivisionError), rigged(engine, toys.data, print) as rig, preserved(engine):
        rig.take_steps(3)
        raise ZeroDivisionError
    after = snapshot(engine)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert rng_state()[0] == rolled[0]


def test_find_lr_is_deterministic() -> None:
    """Whatever the first did, it left no trace in the second."""
    toys = workload(ema=0.9, model=Model(dropout=0.3))
    engine = toys.build()
    first, second = (lr.find(reuse(engine, toys), num_steps=20) for _ in range(2))
    assert first.trials == second.trials and first.advice == second.advice


DECAYED = Schedule(kind="linear", warmup=0.05, decay=0.8, floor=0.0)


def test_constant_schedule_widens_the_range() -> None:
    widths = {}
    for kind in ("constant", "linear"):
        finding = lr.find(workload(schedule=Schedule(kind=kind, warmup=0.0), steps=80), num_steps=20)
        widths[kind] = finding.high / finding.low
    assert widths["constant"] > 1.3 * widths["linear"]


def final_loss(rate: float) -> float:
    toys = workload(optim=Optim(lr=rate), batch=64, steps=240, schedule=DECAYED)
    engine, losses = toys.build(), []
    with rigged(engine, toys.data, print) as rig:
        for step in range(240):
            rig.take_step(step)
            losses.append(rig.pop_result(lag=0).loss)
    return float(np.mean(losses[-10:]))


@pytest.mark.parametrize("configured", [1e-3, 0.3])
def test_find_lr_result_does_not_depend_on_the_configured_rate(configured: float) -> None:
    finding = lr.find(workload(optim=Optim(lr=configured), batch=64, steps=240, schedule=DECAYED), num_steps=60)
    rate = math.sqrt(finding.low * finding.high)
    # From 0.03 to 0.3 the loss is that of the noise, within a fifth; a sixteenth or sixteen times as much is far worse.
    sweep = {at: final_loss(at) for at in (0.1 / 16, 0.1 / 4, 0.1, 0.4, 1.6)}
    assert final_loss(rate) < 1.3 * min(sweep.values()) < 0.5 * max(sweep[0.1 / 16], sweep[1.6])


def test_run_length_with_a_time_budget_is_measured() -> None:
    assert lr.run_length(workload(budget=30.0).config, 0.01) == 3000 and lr.run_length(workload().config, 0.01) == 50
    assert lr.affordable(100.0, 0.01) > 4 * lr.affordable(20.0, 0.01) and lr.affordable(1.0, 60.0) == lr.FEWEST_STEPS


def test_trial_is_never_longer_than_the_run() -> None:
    finding = lr.find(workload(steps=25), seconds=5.0)
    assert finding.trial_steps == finding.run_steps == 25 and max(t.num_steps for t in finding.trials) == 25


class Fragile(Regression):
    """Not a number as soon as the weights have moved."""

    def loss(self, batch, engine):
        loss, extra = super().loss(batch, engine)
        far = (self.net[0].weight.detach().abs().max() > 1.0).float()
        return loss + torch.where(far > 0, torch.nan, 0.0), extra


def test_non_finite_trial_counts_as_diverged() -> None:
    finding = lr.find(workload(lambda c: Fragile(), optim=Optim(lr=0.1)), num_steps=40)
    diverged = [t for t in finding.trials if math.isinf(t.loss)]
    shortest = [t for t in finding.trials if t.num_steps == 10]
    assert diverged and {t.factor for t in shortest if math.isinf(t.loss)} == {1.0, 4.0}
    assert min(t.factor for t in shortest) < 1.0, "it goes down where all diverge"


class Broken(Regression):
    def loss(self, batch, engine):
        return super().loss(batch, engine)[0] * float("nan"), {}


def test_loss_that_is_never_finite_gives_no_answer() -> None:
    finding = lr.find(workload(lambda c: Broken()), num_steps=20)
    assert finding.lr is None and finding.advice.startswith("no answer")


@pytest.mark.parametrize(
    ("options", "changes", "words"),
    [
        ({"num_steps": 5}, {}, "at least 20"),
        ({"low": 1e-3, "high": 1e-4}, {}, "range"),
        ({"low": 1e-2, "high": 1.0}, {}, "must hold the configured"),
        ({"low": 0.0}, {}, "range"),
        ({"low": -1.0}, {}, "range"),
        ({"high": float("inf")}, {}, "range"),
        ({"high": float("nan")}, {}, "range"),
        ({}, {"optim": Optim(lr=0.0)}, "optim.lr=0"),
    ],
)
def test_bad_requests_are_one_line(options: dict, changes: dict, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        lr.find(workload(**changes), **options)
    assert "\n" not in str(caught.value)


# ---- the picture -------------------------------------------------------------------------------------------------------

DRAWN = [Trial(f, n, r, 4.0 - n / 100 + (f - 2.0) ** 2 / 10) for f in (0.5, 1.0, 2.0, 4.0) for n in (25, 100) for r in (0, 1)]


def test_lr_figure_is_a_png(tmp_path) -> None:
    finding = dataclasses.replace(conclude(curve(1.0)), trials=[*DRAWN, Trial(0.0, 100, 0, 5.0), Trial(8.0, 100, 0, math.inf)])
    lr.draw(finding, "find-lr toy", tmp_path / "a.png")
    lr.draw(dataclasses.replace(finding, clear=False, lr=None), "find-lr toy", tmp_path / "b.png")
    first, second = (tmp_path / "a.png").read_bytes(), (tmp_path / "b.png").read_bytes()
    assert first.startswith(b"\x89PNG") and len(first) > 10_000 and first != second


def test_lr_figure_is_scaled_to_the_minimum() -> None:
    low, high = lr.limits([*DRAWN, Trial(0.0, 100, 0, 5.0), Trial(16.0, 100, 0, 1e9), Trial(32.0, 100, 0, math.inf)])
    assert low < min(t.loss for t in DRAWN) and 5.0 < high < 10.0
    assert len(lr.curves(DRAWN, 100)) == 2 and [f for f, _ in lr.curves(DRAWN, 100)[0]] == [0.5, 1.0, 2.0, 4.0]
