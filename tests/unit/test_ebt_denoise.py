"""Denoising by an energy: gradients against finite differences, noise levels, and the regressor of equal size."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import NOISED_TERMS, assert_close_in_float, assert_same_end, offline, resume, start, stop_at
from torch.nn.functional import smooth_l1_loss

from seedbed import config as configs
from seedbed.checks.preflight import check
from seedbed.data.feed import Feed
from seedbed.errors import UserError
from seedbed.launch import local
from seedbed.recipes import find
from seedbed.recipes.ebt import data as images
from seedbed.recipes.ebt.denoise import system as denoise
from seedbed.recipes.ebt.denoise import system as denoise_system
from seedbed.recipes.ebt.denoise.model import ImageEnergy
from seedbed.recipes.ebt.denoise.system import EnergyDenoiser, psnr, squared_errors
from seedbed.track.run import Run
from seedbed.train.capture import StepRunner, units_to_compile
from seedbed.train.engine import Engine
from seedbed.train.system import Request

CPU = torch.device("cpu")
TINY = ["model.depth=1", "model.width=16", "model.heads=2", "data.size=16", "batch=8", "device=cpu", "precision=fp32"]
TINY += ["compile=off", "model.alpha=800", "optim.lr=2e-3", "every.log=2", "every.eval=4", "every.save=4", "steps=8"]
KINDS = ["denoise-shapes", "regress-shapes"]


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(denoise, "NUM_EVALUATED", 48)


def built(preset: str = "denoise-shapes", *assignments: str) -> tuple[denoise.Denoiser, Engine, images.ImageData]:
    recipe, _ = find("ebt")
    config = configs.override(recipe.preset(preset), [*TINY, *assignments])
    data = recipe.open_data(config)
    torch.manual_seed(0)
    system = recipe.build(config, data)
    return system, Engine(system, config, CPU), data


def perturbed(system: denoise.Denoiser) -> denoise.Denoiser:
    """With every weight moved, so that nothing is zero by birth."""
    torch.manual_seed(3)
    with torch.no_grad():
        for name, param in system.named_parameters():
            if name != "log_alpha":
                param.add_(0.2 * torch.randn_like(param))
    return system


def first_batch(data: images.ImageData, num: int = 3) -> dict[str, torch.Tensor]:
    feed = Feed(data.train, batch=num, parts=1, seed=1, device=CPU)
    feed.load(0)
    return {name: tensor.clone() for name, tensor in feed.part(0).items()}


# ---- the gradient ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("observe", ["none", "concat"])
def test_energy_gradient_equals_finite_differences(observe: str) -> None:
    system, _, data = built("denoise-shapes", f"model.observe={observe}")
    model = perturbed(system).double().model
    assert isinstance(model, ImageEnergy)
    torch.manual_seed(1)
    z, noisy, way = (torch.randn(2, *data.shape, dtype=torch.float64) for _ in range(3))
    grad_BCHW, energy_B = model(z, noisy)
    step = 1e-5
    risen = (model.energy(z + step * way, noisy) - model.energy(z - step * way, noisy)) / (2 * step)
    assert torch.allclose((grad_BCHW * way).sum((1, 2, 3)), risen, rtol=1e-6, atol=1e-12)
    assert torch.equal(energy_B, model.energy(z, noisy)) and grad_BCHW.abs().max() > 1e-6
    other = model.energy(z, noisy + 1.0) - energy_B
    assert (other.abs().max() > 1e-6) == (observe == "concat"), "the noisy image is seen only when asked for"


@pytest.mark.parametrize(
    "settings", [(), ("model.learn_alpha=false",), ("model.observe=concat", "model.random_alpha=2")], ids=str
)
def test_optimisation_gradients_equal_finite_differences(settings: tuple[str, ...]) -> None:
    system, engine, data = built("denoise-shapes", *settings)
    perturbed(system).double()
    batch = {n: t.double() if t.is_floating_point() else t for n, t in first_batch(data).items()}
    system.loss(batch, engine)[0].backward()
    torch.manual_seed(5)
    ways = {n: torch.randn_like(p) for n, p in system.named_parameters()}
    expected = sum((p.grad * ways[n]).sum().item() for n, p in system.named_parameters() if p.grad is not None)
    losses = []
    with torch.no_grad():
        for sign in (1, -2):
            for name, param in system.named_parameters():
                param.add_(sign * 1e-6 * ways[name])
            losses.append(system.loss(batch, engine)[0].item())
    assert expected == pytest.approx((losses[0] - losses[1]) / 2e-6, rel=1e-4)


def test_optimisation_steps_are_detached_from_each_other() -> None:
    """Two steps: the gradient is the mean of those of each step from where it began."""
    system, engine, data = built("denoise-shapes", "model.steps=2", "model.learn_alpha=false")
    alone, _, _ = built("denoise-shapes", "model.learn_alpha=false")
    model, batch = perturbed(system).model, first_batch(data)
    system.loss(batch, engine)[0].backward()
    noisy = system.noisy(batch)
    starts = [noisy, next(iter(system.estimates(noisy, 1))).detach()]
    assert isinstance(alone, EnergyDenoiser)
    perturbed(alone)
    moved = [z - 800.0 * alone.model(z, noisy)[0] for z in starts]
    torch.stack([smooth_l1_loss(z, batch["image"]) for z in moved]).mean().backward()
    for (name, a), b in zip(model.named_parameters(), alone.model.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, rtol=1e-3, atol=1e-6), name


@pytest.mark.parametrize("settings", ["model.steps=2", "model.steps=3 model.observe=concat model.random_alpha=2"])
def test_probe_is_the_loss_of_every_step_in_evaluation_mode(settings: str) -> None:
    system, engine, data = built("denoise-shapes", *settings.split())
    batch, params = first_batch(data), list(perturbed(system).parameters())
    drawn, _ = system.loss(batch, engine)
    loss, _ = system.eval().loss(batch, engine)
    assert torch.equal(drawn, loss) == ("random_alpha" not in settings), "step sizes are drawn in training only"
    probe = system.probe(batch)
    assert probe.held is not None and probe.oracle is not None
    objective = probe.objective(probe.predict(probe.batch), probe.batch)
    wanted, num = torch.autograd.grad(loss, params), batch["image"].numel()
    for other in (objective, probe.held()()):
        assert_close_in_float(other, loss, num)
        for a, b in zip(torch.autograd.grad(other, params), wanted, strict=True):
            assert_close_in_float(a, b, num)
    assert probe.objective(probe.oracle(probe.batch), probe.batch).item() == 0.0


@pytest.mark.slow
def test_energy_gradient_compiles_whole_and_differentiates_the_same() -> None:
    found = []
    for compiled in (False, True):
        system, engine, data = built()
        perturbed(system)
        if compiled:
            system.model.compile(backend="aot_eager", fullgraph=True, dynamic=False)
        loss, _ = system.loss(first_batch(data), engine)
        loss.backward()
        found.append([p.grad for p in system.parameters()])
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-7)


def test_batch_images_are_independent() -> None:
    system, _, data = built()
    model = perturbed(system).model
    image = first_batch(data)["image"]
    assert torch.allclose(model(image, image)[0][:1], model(image[:1], image[:1])[0], atol=1e-7)


@pytest.mark.parametrize("preset", KINDS)
def test_initial_output_is_the_noisy_image(preset: str) -> None:
    system, engine, data = built(preset)
    batch = first_batch(data)
    noisy = system.noisy(batch)
    with torch.no_grad():
        assert all(torch.equal(estimate, noisy) for estimate in system.estimates(noisy, 3))
    loss, facts = system.loss(batch, engine)
    assert_close_in_float(loss, facts["loss_identity"], noisy.numel())
    assert loss.item() == pytest.approx(0.5 * 0.2**2, rel=0.05)


def test_energy_and_regressor_have_equal_size() -> None:
    recipe, _ = find("ebt")
    for preset, control in (("denoise-shapes", "regress-shapes"), ("denoise-cifar", "regress-cifar")):
        sizes = []
        for name in (preset, control):
            config = recipe.preset(name)
            model = denoise.build_model(configs.override(config, ["model.depth=2"]).model, (3, 32, 32), 1)
            sizes.append(sum(p.numel() for p in model.parameters()))
        assert abs(sizes[0] / sizes[1] - 1) < 0.01


@pytest.mark.parametrize("preset", KINDS)
def test_flops_equal_torch_counts(preset: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    system, engine, data = built(preset, "model.width=64", "data.size=32")
    batch = first_batch(data, 4)
    with FlopCounterMode(display=False) as counter:
        system.loss(batch, engine)[0].backward()
    assert counter.get_total_flops() / 4 == pytest.approx(system.flops_per_item(), rel=0.03)


# ---- noise and data --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("level", "decibels"), [(0.1, 20.0), (0.2, 13.98), (0.05, 26.02)])
def test_noise_level_in_decibels(level: float, decibels: float) -> None:
    image = torch.zeros(64, 3, 16, 16)
    noisy = denoise.add_noise(image, torch.arange(64), 1, "sigma", level)
    square = ((noisy - image) / 2).square().mean()
    assert psnr(square.double()).item() == pytest.approx(decibels, abs=0.1)


@pytest.mark.parametrize(("level", "signal", "noise"), [(0.1, 0.947, 0.321), (0.2, 0.812, 0.583)])
def test_ddpm_noise_level_equals_the_original(level: float, signal: float, noise: float) -> None:
    assert denoise.noise_scales("ddpm", level) == (pytest.approx(signal, abs=1e-3), pytest.approx(noise, abs=1e-3))


def test_noise_follows_the_counter_alone() -> None:
    image = torch.rand(5, 3, 8, 8)
    index = torch.tensor([7, 1 << 40, 3, 9, 2])
    whole = denoise.add_noise(image, index, 1, "sigma", 0.1)
    parts = [denoise.add_noise(image[i : i + 1], index[i : i + 1], 1, "sigma", 0.1) for i in range(5)]
    assert_close_in_float(whole, torch.cat(parts), NOISED_TERMS)
    assert not torch.equal(whole, denoise.add_noise(image, index, 2, "sigma", 0.1))
    assert not torch.equal(whole, denoise.add_noise(image, index, 1, "sigma", 0.1, evaluation=True))


def test_shape_colour_pairs_are_held_out() -> None:
    _, _, data = built()
    held = set(images.held_out())
    assert held.isdisjoint(set(data.train.arrays["class"])) and held.isdisjoint(set(data.valid.arrays["class"]))
    assert data.test is not None and set(data.test.arrays["class"]) == held
    seen = np.array(sorted(set(data.train.arrays["class"])))
    assert set(seen % 6) == set(range(6)) and set(seen // 6) == set(range(4)), "every shape and every colour is known"
    assert data.train.num_items + data.valid.num_items + data.test.num_items == 1200


def test_psnr_by_hand() -> None:
    image = torch.full((2, 1, 2, 2), 1.0)
    estimate = torch.tensor([0.8, 3.0]).view(2, 1, 1, 1).expand(2, 1, 2, 2)
    square = squared_errors(estimate, image)
    assert square.tolist() == pytest.approx([0.01, 0.0]), "3 is clipped to 1"
    assert psnr(square).tolist() == pytest.approx([20.0, 100.0], abs=1e-4)


@pytest.mark.parametrize("width", [0.3, 1.0, 2.0])
def test_blur_keeps_flat_images_and_weights_neighbours(width: float) -> None:
    flat = torch.full((1, 3, 9, 9), 0.7)
    assert torch.allclose(denoise_system.blur(flat, width), flat, atol=1e-6)
    point = torch.zeros(1, 1, 31, 31)
    point[..., 15, 15] = 1.0
    out = denoise_system.blur(point, width)[0, 0]
    assert out.sum().item() == pytest.approx(1.0, abs=1e-5)
    assert (out[15, 16] / out[15, 15]).item() == pytest.approx(math.exp(-0.5 / width**2), rel=1e-4)


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", KINDS)
def test_training_lowers_loss_and_energy(preset: str) -> None:
    system, engine, data = built(preset, "batch=16", "optim.lr=5e-3", "schedule.warmup=0.1")
    feed = Feed(data.train, batch=16, parts=1, seed=1, device=CPU)
    with engine.evaluating():
        before = system.evaluate(data.valid, engine)
    out = {}
    for step in range(60):
        feed.load(step * 16)
        engine.variant = system.variant(step, 60)
        engine.begin(step, (step + 1) / 60)
        out = engine.step(feed.part)
    with engine.evaluating():
        after, again = (system.evaluate(data.valid, engine) for _ in range(2))
    assert after == again, "evaluation is deterministic"
    assert after["error"] < 0.9 * before["error"] and after["psnr_in"] > before["psnr_in"] > 19.5
    if isinstance(system, EnergyDenoiser):
        assert out["gap"] > 0 and out["gap_negative"] < 0.2 and out["move_rms"] > 0.01


@pytest.mark.parametrize(
    ("facts", "kind"), [({"gap_negative": 0.5}, "mcmc_energy_rises"), ({"alpha": 1e5}, "mcmc_alpha_drift"), ({}, None)]
)
def test_alarms_start_after_warm_up(facts: dict[str, float], kind: str | None) -> None:
    system, _, _ = built()
    row = {"gap_negative": 0.0, "alpha": 800.0, "move_rms": 1e9} | facts
    assert [alarm.kind for alarm in system.alarms(row, 0.5)] == ([kind] if kind else [])
    assert system.alarms(row, 0.01) == []


def test_evaluation_does_not_depend_on_its_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    system, _, data = built()
    perturbed(system)
    found = []
    for size in (48, 7):
        monkeypatch.setitem(denoise.EVAL_BATCH, "cpu", size)
        found.append(system.score(data.valid, 0.1, [1, 2], offline(system)))
    for one, other in zip(*found, strict=True):
        assert one == {name: pytest.approx(value, rel=1e-6) for name, value in other.items()}


def test_resume_is_bitwise_and_test_part_is_scored_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local.journal, "finish", lambda run, warn: None)
    start(tmp_path, "whole", *TINY, recipe="ebt/denoise-shapes")
    stop_at(5, monkeypatch)
    start(tmp_path, "stopped", *TINY, recipe="ebt/denoise-shapes")
    assert resume(tmp_path, "stopped") == 0
    assert_same_end(tmp_path, "whole", "stopped")
    (tested,) = [e for e in Run.open(tmp_path, "whole").events() if e["kind"] == "test"]
    assert tested["psnr_in"] > 15 and (tmp_path / "whole" / "samples" / "step-000008" / "cleaned.png").is_file()


def test_denoising_curves_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(denoise_system, "STEPS", [1, 2])
    monkeypatch.setattr(denoise_system, "SIGMAS", (0.1, 0.2))
    monkeypatch.setattr(denoise_system, "BLURS", (0.4, 0.8))
    system, engine, _ = built()
    shown = system.sample(Request(tmp_path, {"examine": 1}), engine)
    saved = json.loads((tmp_path / "denoise.json").read_text())
    assert set(saved["parts"]) == {"held out", "never seen pairs"} and saved["steps"] == [1, 2]
    one = saved["parts"]["held out"]["0.1"]
    assert one["psnr"] == pytest.approx([one["identity"]] * 2), "at birth every step is the identity"
    assert one["blur"] != one["identity"] and (tmp_path / "denoise.png").is_file() and "*k=1" in shown.text


@pytest.mark.slow
@pytest.mark.parametrize("preset", KINDS)
def test_checks_pass(preset: str, tmp_path: Path, capsys) -> None:
    chosen = ["C", "M", "V", "I", "O"]
    status = check(f"ebt/{preset}", [*TINY, "steps=4000"], root=tmp_path, only=chosen, skip=[])
    assert status in (0, 3), capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["model.width=18", "model.heads=3"], "multiple of 4"),
        (["model.heads=5"], "does not divide"),
        (["model.patch=5"], "does not divide into patches"),
        (["model.steps=0"], "at least 1|between 1"),
        (["model.alpha=-3"], "out of range"),
        (["model.level=0"], "out of range"),
        (["model.kind=regress", "model.steps=2"], "no steps to vary"),
        (["model.kind=regress", "model.observe=concat"], "sees the noisy image already"),
    ],
)
def test_bad_settings_are_refused_in_one_line(settings: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        built("denoise-shapes", *settings)


def test_sample_num_above_held_out_images_is_refused(tmp_path: Path) -> None:
    system, engine, _ = built()
    with pytest.raises(UserError, match="--num 9999 is more than the"):
        system.sample(Request(tmp_path, {"num": 9999}), engine)


def test_sample_of_few_held_out_images_shows_them_all(tmp_path: Path) -> None:
    system, engine, _ = built("denoise-shapes", "limit.valid=2")
    assert system.sample(Request(tmp_path, {}), engine).files
    with pytest.raises(UserError, match="--num 8 is more than the 2 held-out images"):
        system.sample(Request(tmp_path, {"num": 8}), engine)


@pytest.mark.parametrize("preset", ["denoise-shapes", "regress-shapes", "denoise-cifar"])
def test_compilation_on_a_cpu_is_left_out(preset: str) -> None:
    """As for compile=auto of every recipe: compiled where that pays, which is on CUDA."""
    recipe, _ = find("ebt")
    config = recipe.preset(preset)
    assert config.compile == "auto"
    system, engine, data = built("denoise-shapes", f"compile={config.compile}")
    assert system.auto_compile == "whole" and units_to_compile(system, "auto") == [system.model]
    feed = Feed(data.train, batch=8, parts=1, seed=1, device=CPU)
    assert StepRunner(engine, feed, print).units == []
