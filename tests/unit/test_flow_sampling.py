"""Samplers against exact velocities, guidance against its formula, and samples that depend on nothing but what they should."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from seedbed.errors import UserError
from seedbed.recipes.flow.model import FlowTransformer, build_model
from seedbed.recipes.flow.objective import MIN_GAP, velocity
from seedbed.recipes.flow.presets import ModelConfig
from seedbed.recipes.flow.sampling import SAMPLERS, Sampling, generate, guided, integrate, time_grid

MU, SIGMA = 0.7, 0.3


def gaussian(x: Tensor, t: float) -> Tensor:
    """The exact velocity towards N(MU, SIGMA^2); it maps x0 to MU + SIGMA x0."""
    spread = (1 - t) ** 2 + t**2 * SIGMA**2
    return MU + (t * SIGMA**2 - (1 - t)) / spread * (x - t * MU)


def mixture(x: Tensor, t: float) -> Tensor:
    """The exact velocity towards three narrow modes."""
    modes, sigma = torch.tensor([-1.5, 0.2, 1.4], dtype=torch.float64), 0.25
    spread = (1 - t) ** 2 + t**2 * sigma**2
    share = torch.softmax(-((x[:, None] - t * modes) ** 2) / (2 * spread), dim=1)
    each = modes + (t * sigma**2 - (1 - t)) / spread * (x[:, None] - t * modes)
    return (share * each).sum(1)


def starts(num: int = 201) -> Tensor:
    return torch.special.ndtri((torch.arange(num, dtype=torch.float64) + 0.5) / num)


def order(field: Callable, sampler: str, truth: Tensor) -> float:
    """log2 of the median error at 64 steps against that at 128: paths that change basin are few."""
    found = [(integrate(field, starts(), time_grid(n), sampler) - truth).abs().median().item() for n in (64, 128)]
    return math.log2(found[0] / found[1])


@pytest.mark.parametrize(("sampler", "wanted"), [("euler", 1.0), ("heun", 2.0)])
def test_solver_order_on_a_gaussian(sampler: str, wanted: float) -> None:
    assert order(gaussian, sampler, MU + SIGMA * starts()) == pytest.approx(wanted, abs=0.1)


@pytest.mark.parametrize(("sampler", "wanted"), [("euler", 1.0), ("heun", 2.0), ("midpoint", 2.0)])
def test_solver_order_on_a_mixture(sampler: str, wanted: float) -> None:
    truth = integrate(mixture, starts(), time_grid(1024), "heun")
    assert order(mixture, sampler, truth) == pytest.approx(wanted, abs=0.15)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("steps", [1, 7, 24])
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_solver_is_exact_for_a_constant_velocity(sampler: str, steps: int, shift: float) -> None:
    end = integrate(lambda x, t: torch.full_like(x, 2.0), torch.zeros(3, dtype=torch.float64), time_grid(steps, shift), sampler)
    torch.testing.assert_close(end, torch.full((3,), 2.0, dtype=torch.float64), rtol=1e-12, atol=0)


@pytest.mark.parametrize("steps", [1, 4, 25])
def test_time_grid_begins_at_0_and_ends_at_1(steps: int) -> None:
    """v = t tells a right grid from one that also evaluates at 1 and keeps dt = 1/n, which an order test does not."""

    def rising(x: Tensor, t: float) -> Tensor:
        return torch.full_like(x, t)

    zero = torch.zeros(1, dtype=torch.float64)
    assert integrate(rising, zero, time_grid(steps), "euler").item() == pytest.approx((steps - 1) / (2 * steps), abs=1e-12)
    assert integrate(rising, zero, time_grid(steps), "midpoint").item() == pytest.approx(0.5, abs=1e-12)
    last = 1 / (2 * steps**2)  # what Heun loses by ending with Euler's step
    assert integrate(rising, zero, time_grid(steps), "heun").item() == pytest.approx(0.5 - last, abs=1e-12)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_solver_never_evaluates_time_1(sampler: str) -> None:
    seen: list[float] = []

    def watched(x: Tensor, t: float) -> Tensor:
        seen.append(t)
        return x

    integrate(watched, torch.zeros(1), time_grid(5), sampler)
    assert max(seen) < 1.0 and len(seen) == {"euler": 5, "heun": 9, "midpoint": 10}[sampler]


def test_time_grid_shift_moves_steps_towards_the_noise() -> None:
    even, shifted = time_grid(8), time_grid(8, 3.0)
    assert shifted[0] == 0.0 and shifted[-1] == 1.0 and shifted == sorted(shifted)
    assert all(s < e for s, e in zip(shifted[1:-1], even[1:-1], strict=True))


# ---- from the model ----------------------------------------------------------------------------------------------------


def small(**changes) -> FlowTransformer:
    config = ModelConfig(depth=1, width=16, heads=2, patch=2, **changes)
    model = build_model(config, (3, 4, 4), 3, seed=1).eval()
    rng = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for param in model.parameters():
            param += 0.1 * torch.randn(param.shape, generator=rng)
    return model


@torch.no_grad()
@pytest.mark.parametrize("predict", ["v", "x"])
def test_guidance_is_its_formula_within_its_interval(predict: str) -> None:
    model, label = small(predict=predict), torch.tensor([0, 1, 2])
    x = torch.randn(3, 3, 4, 4, generator=torch.Generator().manual_seed(0))

    def alone(t: float, classes: Tensor) -> Tensor:
        time = torch.full((3,), t)
        return velocity(model(x, time, classes), x, time, predict)

    field = guided(model, label, Sampling(guidance=2.5, interval=(0.2, 0.8)))
    blind, messages = alone(0.5, torch.full((3,), 3)), alone(0.5, label)
    torch.testing.assert_close(field(x, 0.5), blind + 2.5 * (messages - blind), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(field(x, 0.1), alone(0.1, label))
    torch.testing.assert_close(field(x, 0.9), alone(0.9, label))


@torch.no_grad()
def test_guidance_1_is_the_model_and_0_ignores_the_class() -> None:
    model = small()
    one = generate(model, torch.tensor([0, 1]), Sampling(steps=3), seed=1)
    torch.testing.assert_close(generate(model, torch.tensor([0, 1]), Sampling(steps=3, guidance=1.0), seed=1), one)
    blind = Sampling(steps=3, guidance=0.0)
    torch.testing.assert_close(generate(model, torch.tensor([0, 1]), blind, 1), generate(model, torch.tensor([2, 0]), blind, 1))
    assert (generate(model, torch.tensor([2, 0]), Sampling(steps=3), 1) - one).abs().max() > 1e-3


def test_guidance_without_class_dropout_is_refused() -> None:
    model = small(drop=0.0)
    assert generate(model, torch.tensor([1]), Sampling(steps=2), seed=1).shape == (1, 3, 4, 4)
    with pytest.raises(UserError, match=r"without class dropout.*--guidance 1"):
        generate(model, torch.tensor([1]), Sampling(steps=2, guidance=2.0), seed=1)


def test_samples_depend_on_seed_and_index_but_not_on_the_batch() -> None:
    model, label, sampling = small(), torch.tensor([0, 1, 2, 0, 1]), Sampling(steps=4, guidance=2.0)
    whole = generate(model, label, sampling, seed=1)
    torch.testing.assert_close(generate(model, label, sampling, seed=1, batch=2), whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(generate(model, label[:2], sampling, seed=1), whole[:2], rtol=1e-4, atol=1e-5)
    assert (generate(model, label, sampling, seed=2) - whole).abs().max() > 0.1
    assert (whole[0] - whole[3]).abs().max() > 0.1, "two samples of one class differ"


def test_sampling_refuses_training_mode() -> None:
    with pytest.raises(AssertionError, match="evaluation mode"):
        generate(small().train(), torch.tensor([1]), Sampling(steps=1), seed=1)


def test_x_prediction_reaches_a_perfect_image_with_bounded_last_steps() -> None:
    """With x-prediction the way to a fixed image is straight; near time 1 the divisor stays at the loss's own floor."""
    target = torch.full((1, 1, 2, 2), 0.5)

    def field(x: Tensor, t: float) -> Tensor:
        return velocity(target, x, torch.tensor([t]), "x")

    end = integrate(field, torch.full_like(target, -3.0), time_grid(24), "euler")
    # What is left after the clamp begins: (1 - dt / MIN_GAP) of the last twenty-fourth of the way.
    torch.testing.assert_close(end, target, rtol=0, atol=3.5 / 24 * (1 - 1 / (24 * MIN_GAP)) + 1e-3)
    assert field(torch.zeros_like(target), 1.0).abs().max().item() == pytest.approx(0.5 / MIN_GAP)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sampler": "dopri"}, "there is no sampler 'dopri'; there are: euler, heun, midpoint"),
        ({"steps": 0}, "steps=0 is out of range"),
        ({"guidance": -1.0}, "guidance=-1.0 is out of range"),
        ({"guidance": math.inf}, "guidance=inf is out of range"),
        ({"interval": (0.8, 0.2)}, "between two times from 0"),
        ({"shift": 0.0}, "shift=0.0 is out of range"),
    ],
)
def test_sampling_options_out_of_range_are_refused(wrong: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Sampling(**wrong)


def test_sampling_as_text() -> None:
    base = Sampling(guidance=2.0)
    assert str(base) == "heun, 24 steps, guidance 2"
    assert str(replace(base, interval=(0.1, 0.9), shift=2.0)) == "heun, 24 steps, guidance 2 at times 0.1 to 0.9, shift 2"
