"""find-lr: the arithmetic against brute force, the conclusions on drawn valleys, and a system left exactly as it was found."""

import dataclasses
import random

import numpy as np
import pytest
import torch
from tune_toys import Model, Regression, bench, needs_cuda

from seedbed.config import Optim
from seedbed.errors import UserError
from seedbed.tune import lr, lr_plot
from seedbed.tune.bench import preserved, rigged

RATES = np.geomspace(1e-6, 1.0, 120)


def valley(bottom: float, noise: float, seed: int, depth: float = 1.0) -> lr.Ramp:
    """A loss of 4 that falls to 4 - depth at `bottom` and climbs behind it."""
    far = np.log10(RATES / bottom)
    losses = 4.0 - depth * np.exp(-0.5 * (far / 0.7) ** 2) + np.where(far > 0, 2.0 * far, 0.0)
    losses = losses + noise * np.random.default_rng(seed).normal(size=len(RATES))
    return lr.Ramp(RATES, losses, lr.smooth(lr.cut(losses), lr.beta_for(len(RATES))), True)


def readings(ramps: list[lr.Ramp]) -> list[lr.Reading]:
    return [lr.read(ramp, lr.beta_for(len(RATES))) for ramp in ramps]


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9, 0.99])
def test_smoothing_equals_its_definition(beta: float) -> None:
    losses = np.random.default_rng(1).normal(size=37)
    steps = np.arange(37)
    weight = beta ** np.abs(steps[:, None] - steps[None]) if beta else np.eye(37)
    np.testing.assert_allclose(lr.smooth(losses, beta), weight @ losses / weight.sum(1), rtol=1e-9)


def test_smoothing_has_no_bias_and_no_lag() -> None:
    np.testing.assert_allclose(lr.smooth(np.full(50, 3.0), 0.95), 3.0)
    bowl = (np.arange(101) - 50.0) ** 2
    assert np.argmin(lr.smooth(bowl, 0.9)) == 50


@pytest.mark.parametrize("height", [10.0, 1e6, 1e30])
def test_the_height_of_an_explosion_does_not_move_the_valley(height: float) -> None:
    low, high = valley(1e-2, 0.0, 0), valley(1e-2, 0.0, 0)
    broken = np.append(high.losses, height)
    rates = np.append(RATES, 1.1)
    high = lr.Ramp(rates, broken, lr.smooth(lr.cut(broken), 0.9), True)
    assert lr.read(high, 0.9).minimum == pytest.approx(lr.read(low, 0.9).minimum, rel=0.3)


def test_cutting_leaves_everything_below_the_cut() -> None:
    losses = np.array([4.0, 4.1, 3.9, 3.0, 2.0, 3.5, 50.0, np.float64(1e20)])
    assert (lr.cut(losses)[:6] == losses[:6]).all() and (lr.cut(losses)[6:] == 6.0).all()


@pytest.mark.parametrize(
    ("losses", "at"),
    [
        ([2.0] * 20, None),
        ([2.0] * 10 + [8.1] * 5, 10),
        ([2.0] * 10 + [7.9] * 5, None),
        ([9.0, 9.0, 2.0, 2.0, 2.0, 2.0, 8.1], 6),
        ([1.0, 30.0, 1.0, 1.0, 1.0, 1.0], None),  # too early to judge
        ([1.0, 0.0, -2.0, -2.0, -2.0, 6.9], None),  # below zero: 3 times what was gained
        ([1.0, 0.0, -2.0, -2.0, -2.0, 7.1], 5),
        ([0.0] * 8, None),
    ],
)
def test_a_ramp_stops_at_four_times_the_best(losses: list[float], at: int | None) -> None:
    watch = lr.Watch(beta=0.0, patience=4)
    assert next((i for i, loss in enumerate(losses) if watch.exploded(loss)), None) == at


@pytest.mark.parametrize(("size", "rate"), [(124e6, 5.7e-4), (1.3e9, 2.0e-4)])
def test_the_prior_is_the_fit_to_the_table(size: float, rate: float) -> None:
    assert lr.prior(int(size)) == pytest.approx(rate, rel=0.02)


@pytest.mark.parametrize("bottom", [1e-4, 1e-3, 1e-2])
@pytest.mark.parametrize("noise", [0.0, 0.05, 0.2])
def test_a_valley_is_found_where_it_is(bottom: float, noise: float) -> None:
    for seed in range(10):
        (found,) = readings([valley(bottom, noise, seed)])
        assert found.found
        assert bottom / 2.5 < found.minimum < 2.5 * bottom
        assert bottom / 100 < found.steepest < found.minimum


def test_noise_alone_is_no_valley() -> None:
    assert sum(readings([valley(1e-2, 0.3, seed, depth=0.0)])[0].found for seed in range(50)) <= 2


def conclude(bottoms: list[float], configured: float, muon: float | None = None, noise: float = 0.02) -> lr.Finding:
    ramps = [valley(b, noise, i) for i, b in enumerate(bottoms)]
    return lr.conclude(ramps, readings(ramps), configured, 1_000_000, muon)


def test_repeats_that_agree_give_suggestions_and_ratios() -> None:
    finding = conclude([1e-2, 1.1e-2, 0.9e-2], configured=1e-3)
    steepest, lowest, prior = finding.suggestions
    assert finding.clear and "no clear valley" not in finding.advice
    assert lowest.lr == pytest.approx(1e-3, rel=0.5) and lowest.low <= lowest.lr <= lowest.high
    assert prior.lr == pytest.approx(lr.prior(1_000_000))
    assert all(s.ratio == pytest.approx(s.lr / 1e-3) for s in finding.suggestions)
    assert steepest.lr < 1e-2


def test_repeats_that_disagree_are_no_valley() -> None:
    finding = conclude([1e-3, 1e-2, 1e-2], configured=1e-3)
    assert not finding.clear and finding.advice.startswith("no clear valley") and not finding.assignments


@pytest.mark.parametrize(("configured", "word"), [(1e-6, "below"), (1.0, "above"), (1e-3, "no reason")])
def test_the_configured_rate_is_judged(configured: float, word: str) -> None:
    finding = conclude([1e-2] * 3, configured)
    assert word in finding.advice
    assert bool(finding.assignments) == (word != "no reason")


def test_muon_moves_by_the_same_factor() -> None:
    finding = conclude([1e-2] * 3, configured=1e-6, muon=4e-5)
    assert finding.assignments["optim.muon_lr"] == pytest.approx(40 * finding.assignments["optim.lr"])


def test_a_loss_that_still_falls_at_the_end_is_noted() -> None:
    losses = 4.0 - np.linspace(0, 1, len(RATES)) ** 2
    ramp = lr.Ramp(RATES, losses, lr.smooth(losses, 0.8), False)
    notes = lr.conclude([ramp] * 3, readings([ramp] * 3), 1e-3, 1000, None).notes
    assert any("--high" in note for note in notes)


# ---- with a real system -----------------------------------------------------------------------------------------------


def snapshot(engine) -> dict[str, torch.Tensor]:
    found = {f"{f}.{n}": t.detach().clone() for f, group in engine.tensors().items() for n, t in group.items()}
    return found | {f"buffer.{n}": b.clone() for n, b in engine.system.named_buffers()} | {"halted": engine.halted.clone()}


def dice() -> tuple:
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


def reuse(engine, like):
    """The same workbench, around an engine that the test holds."""

    class Kept(type(like)):
        def build(self, *args, **kwargs):
            return engine

    return Kept(**{f.name: getattr(like, f.name) for f in dataclasses.fields(like)})


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
def test_nothing_moves(changes: dict) -> None:
    """Weights, moments, averages, buffers, the guard, the system's own state and every generator: bitwise as before."""
    toys = bench(**changes)
    engine = toys.build()
    with rigged(engine, toys.data, print) as rig:
        rig.take_steps(3)
    engine.system.eval()
    before, rolled, calls = snapshot(engine), dice(), engine.system.calls
    finding = lr.find(reuse(engine, toys), num_steps=40)
    assert max(r.rates[-1] for r in finding.ramps) > 10 * engine.config.optim.lr, "the ramp must have gone far"
    after = snapshot(engine)
    assert before.keys() == after.keys()
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert not moved and dice() == rolled
    assert engine.system.calls == calls and not engine.system.training


@needs_cuda
@pytest.mark.parametrize("capture", ["auto", "off"])
def test_nothing_moves_on_cuda(capture: str) -> None:
    toys = bench(where=torch.device("cuda", 0), capture=capture, ema=0.9, accum=2, model=Model(dropout=0.3))
    engine = toys.build()
    before, rolled = snapshot(engine), (dice(), torch.cuda.get_rng_state().tolist())
    first, second = (lr.find(reuse(engine, toys), num_steps=40) for _ in range(2))
    after = snapshot(engine)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (dice(), torch.cuda.get_rng_state().tolist()) == rolled
    assert all(np.allclose(a.losses, b.losses, rtol=1e-3) for a, b in zip(first.ramps, second.ramps, strict=True))


def test_nothing_moves_when_the_system_fails_half_way() -> None:
    toys = bench(ema=0.9)
    engine = toys.build()
    before, rolled = snapshot(engine), dice()
    with pytest.raises(ZeroDivisionError), rigged(engine, toys.data, print) as rig, preserved(engine):
        rig.take_steps(3)
        raise ZeroDivisionError
    after = snapshot(engine)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert dice()[0] == rolled[0]


def test_a_second_ramp_equals_the_first() -> None:
    """Whatever the first did, it left no trace in the second."""
    toys = bench(ema=0.9, model=Model(dropout=0.3))
    engine = toys.build()
    first, second = (lr.find(reuse(engine, toys), num_steps=40) for _ in range(2))
    for a, b in zip(first.ramps, second.ramps, strict=True):
        assert (a.losses == b.losses).all()


def test_repeats_see_different_items_and_the_rates_of_the_ramp(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = lr.Rig.step

    def step(self, step, counter, rate=None):
        seen.append((step, counter, rate))
        original(self, step, counter, rate)
        assert self.engine._dials[0].item() == pytest.approx(rate)

    monkeypatch.setattr(lr.Rig, "step", step)
    # No rate in this range breaks anything, so every ramp is complete.
    lr.find(bench(num_items=4096), num_steps=30, low=1e-5, high=1e-3)
    assert len(seen) == 90 and len({counter for _, counter, _ in seen}) == 90
    assert all(counter == step * 8 for step, counter, _ in seen)
    for repeat in range(3):
        rates = [rate * 1e-3 for _, _, rate in seen[30 * repeat : 30 * repeat + 30]]
        np.testing.assert_allclose(rates, np.geomspace(1e-5, 1e-3, 30))


def final_loss(rate: float) -> float:
    toys = bench(optim=Optim(lr=rate))
    engine, losses = toys.build(), []
    with rigged(engine, toys.data, print) as rig:
        for step in range(60):
            rig.step(step, step * 8)
            losses.append(rig.read(leave=0)["loss"])
    return float(np.mean(losses[-10:]))


def test_the_suggestion_trains_better_than_rates_far_off() -> None:
    finding = lr.find(bench(optim=Optim(lr=1e-4), batch=64), num_steps=100, low=1e-5, high=100.0)
    rate = finding.suggestions[1].lr
    assert finding.clear
    assert final_loss(rate) < 0.9 * final_loss(rate / 30) and final_loss(rate) < final_loss(rate * 100)


class Fragile(Regression):
    """Not a number as soon as the weights have moved."""

    def loss(self, batch, engine):
        loss, extra = super().loss(batch, engine)
        far = (self.net[0].weight.detach().abs().max() > 2.0).float()
        return loss + torch.where(far > 0, torch.nan, 0.0), extra


def test_a_loss_that_is_not_finite_ends_the_ramp() -> None:
    finding = lr.find(bench(lambda c: Fragile()), num_steps=60, high=30.0)
    assert all(ramp.broke and len(ramp.losses) < 60 and np.isfinite(ramp.losses).all() for ramp in finding.ramps)


class Broken(Regression):
    def loss(self, batch, engine):
        return super().loss(batch, engine)[0] * float("nan"), {}


@pytest.mark.parametrize(
    ("options", "changes", "words"),
    [
        ({"repeats": 2}, {}, "at least 3"),
        ({"num_steps": 5}, {}, "at least 30"),
        ({"low": 1e-3, "high": 1e-4}, {}, "range"),
        ({"low": 0.0}, {}, "range"),
        ({"low": -1.0}, {}, "range"),
        ({"high": float("inf")}, {}, "range"),
        ({"high": float("nan")}, {}, "range"),
        ({}, {"optim": Optim(lr=0.0)}, "optim.lr=0"),
        ({"num_steps": 30}, {"make": lambda c: Broken()}, "not finite"),
    ],
)
def test_bad_requests_are_one_line(options: dict, changes: dict, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        lr.find(bench(**changes), **options)
    assert "\n" not in str(caught.value)


def test_the_plot_is_a_picture(tmp_path) -> None:
    finding = conclude([1e-2] * 3, 1e-3, noise=0.1)
    lr_plot.draw(finding, "find-lr toy", tmp_path / "a.png")
    lr_plot.draw(dataclasses.replace(finding, clear=False), "find-lr toy", tmp_path / "b.png")
    first, second = (tmp_path / "a.png").read_bytes(), (tmp_path / "b.png").read_bytes()
    assert first.startswith(b"\x89PNG") and len(first) > 10_000 and first != second


def test_the_picture_shows_the_valley_and_not_the_explosion() -> None:
    ramp = valley(1e-2, 0.0, 0)
    low, high = lr_plot.limits([ramp])
    assert low < ramp.losses.min() and ramp.smooth[0] < high < ramp.losses.max()
