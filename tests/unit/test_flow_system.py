"""The flow system: its loss and levels, class dropout, evaluation, two averages, samples, and runs that resume exactly."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import NOISED_TERMS, assert_close_in_float, assert_same_end, newest, resume, rows, start, stop_at
from PIL import Image
from torch import Tensor

from seedbed import config as configs
from seedbed.data.feed import Feed
from seedbed.data.grids import LABEL_HEIGHT
from seedbed.data.image_source import ImageData, ImageSource
from seedbed.data.images import ImageConfig
from seedbed.errors import UserError
from seedbed.launch import local
from seedbed.recipes import find
from seedbed.recipes.flow import objective
from seedbed.recipes.flow.data import TimeDistribution
from seedbed.recipes.flow.show import SampleOptions, _classes, _layout
from seedbed.recipes.flow.system import NUM_BINS, Flow, build
from seedbed.train.engine import Engine
from seedbed.train.system import Request

TINY = ["model.depth=1", "model.width=16", "model.heads=2", "batch=8", "steps=6"]
QUIET = ["every.log=1", "every.eval=0", "every.sample=0", "every.save=3"]


@pytest.fixture(autouse=True)
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local.journal, "finish", lambda run, warn: None)


def made(*assignments: str) -> tuple[Flow, Engine, Feed]:
    recipe, preset = find("flow/demo")
    config = configs.override(recipe.preset(preset), [*TINY, *assignments])
    data = recipe.open_data(config)
    assert isinstance(data, ImageData)
    system = build(config, data)
    feed = Feed(data.train, batch=config.batch, parts=1, seed=config.seed, device=torch.device("cpu"))
    feed.load(0)
    return system, Engine(system, config, torch.device("cpu")), feed


# ---- the loss ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("condition", ["adaln", "context"])
def test_initial_loss_of_v_is_1_plus_the_second_moment(condition: str) -> None:
    system, engine, feed = made("model.predict=v", "batch=512", f"model.condition={condition}")
    batch = feed.part(0)
    loss, _ = system.loss(batch, engine)
    moment = batch["image"].square().mean().item()
    assert loss.item() == pytest.approx(1 + moment, rel=0.01)
    assert system.baseline_losses()["all zeros"] == pytest.approx(1 + moment, rel=0.02)


def test_initial_loss_of_x_is_the_weighted_second_moment() -> None:
    system, engine, feed = made("model.predict=x", "batch=1024")
    assert system.loss(feed.part(0), engine)[0].item() == pytest.approx(system.baseline_losses()["all zeros"], rel=0.05)


def test_loss_of_equivalent_x_and_v_predictions_is_equal() -> None:
    rng = torch.Generator().manual_seed(0)
    image, noise, wrong = torch.randn(3, 4, 3, 4, 4, generator=rng, dtype=torch.float64)
    time = torch.tensor([0.0, 0.3, 0.9, 0.94], dtype=torch.float64)
    t = time[:, None, None, None]
    x, direction = (1 - t) * noise + t * image, image - noise
    as_v = direction + wrong
    as_x = x + (1 - t) * as_v
    torch.testing.assert_close(objective.errors(as_x, x, time, direction, "x"), objective.errors(as_v, x, time, direction, "v"))
    assert objective.errors(image, x, time, direction, "x").max() < 1e-20


def test_x_prediction_is_finite_at_time_1() -> None:
    image, x, time = torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 2, 2), torch.ones(1)
    error = objective.errors(torch.full_like(image, 0.1), x, time, image - x, "x")
    assert error.item() == pytest.approx((0.1 / objective.MIN_GAP) ** 2)


@pytest.mark.parametrize(("mean", "std", "weight"), [(None, None, 39.0), (0.0, 1.0, 11.0), (-0.8, 0.8, 2.96)])
def test_mean_weight_of_x_prediction(mean: float | None, std: float | None, weight: float) -> None:
    times = TimeDistribution("uniform") if mean is None or std is None else TimeDistribution("logit-normal", mean, std)
    assert objective.weights(objective.quantiles(times), "x")[1].mean().item() == pytest.approx(weight, rel=0.02)


# ---- levels --------------------------------------------------------------------------------------------------------------


def test_baseline_losses_in_closed_form_under_uniform_time() -> None:
    time = objective.quantiles(TimeDistribution("uniform"))
    variances = torch.tensor([0.04, 0.25, 1.0], dtype=torch.float64)
    assert objective.gaussian_baseline(variances, time, "v") == pytest.approx(
        math.pi / 2 * variances.sqrt().mean().item(), rel=1e-3
    )
    assert objective.zero_baseline(0.25, time, "v") == 1.25


def test_gaussian_baseline_equals_the_best_linear_predictor() -> None:
    """Least squares at one time, on correlated numbers, against the formula."""
    rng = torch.Generator().manual_seed(0)
    mix = torch.randn(4, 4, generator=rng, dtype=torch.float64)
    image = torch.randn(20_000, 4, generator=rng, dtype=torch.float64) @ mix + 0.3
    noise = torch.randn(20_000, 4, generator=rng, dtype=torch.float64)
    t = 0.4
    seen = torch.cat(((1 - t) * noise + t * image, torch.ones(20_000, 1, dtype=torch.float64)), 1)
    direction = image - noise
    best = torch.linalg.lstsq(seen, direction).solution
    reached = (seen @ best - direction).square().mean().item()
    _, variances, eigenvalues = objective.moments(image)
    assert eigenvalues is not None
    messages = objective.curve(eigenvalues, torch.tensor([t], dtype=torch.float64)).item()
    assert reached == pytest.approx(messages, rel=0.02)
    assert messages < objective.curve(variances, torch.tensor([t], dtype=torch.float64)).item()


def test_baseline_losses_are_ordered_and_printed() -> None:
    system, _, _ = made()
    levels = list(system.baseline_losses().values())
    assert len(levels) == 3 and levels == sorted(levels, reverse=True)
    assert "pixel by pixel" in system.describe()["baseline losses"]


def test_baseline_losses_of_large_images_have_no_covariance() -> None:
    assert objective.moments(torch.randn(3, objective.MAX_NUMBERS + 1))[2] is None


# ---- noise, classes, bins ----------------------------------------------------------------------------------------------


def test_class_dropout_in_training_only() -> None:
    system, _, feed = made("batch=1024", "model.drop=0.25")
    batch = feed.part(0)
    null = system.model.null_class
    hidden = system.add_noise(batch)["class"] == null
    assert 0.2 < hidden.float().mean() < 0.3
    assert torch.equal(system.eval().add_noise(batch)["class"], batch["class"])
    off, _, _ = made("model.drop=0")
    assert off.model.classes.num_embeddings == 24, "no row for a class that never comes"


def test_noise_does_not_depend_on_the_batch() -> None:
    system, _, feed = made("model.stratified=false", "batch=16")
    batch = feed.part(0)
    whole, part = system.add_noise(batch), system.add_noise({k: v[5:7] for k, v in batch.items()})
    for name in whole:
        assert_close_in_float(whole[name][5:7], part[name], NOISED_TERMS)


def test_accumulation_equals_the_whole_step() -> None:
    norms = []
    for accum in (1, 4):
        system, engine, _ = made(f"accum={accum}", "batch=16", "model.predict=v")
        feed = Feed(system.data.train, batch=16, parts=accum, seed=1, device=torch.device("cpu"))
        feed.load(0)
        engine.begin(0, 0.5)
        measured = engine.step(feed.part)
        norms.append((measured["loss"].item(), measured["grad_norm"].item()))
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_loss_bins_by_time() -> None:
    system, engine, feed = made("batch=512", "model.t_distribution=uniform", "model.predict=v")
    batch = feed.part(0)
    _, measured = system.loss(batch, engine)
    assert list(measured) == [f"loss_t{k}" for k in range(NUM_BINS)]
    seen = system.add_noise(batch)
    errors = system.errors(torch.zeros_like(seen["input"]), seen)
    inside = (seen["time"] >= 0.3) & (seen["time"] < 0.4)
    assert measured["loss_t3"].item() == pytest.approx(errors[inside].mean().item(), rel=1e-4)
    before = system.bins.clone()
    system.eval()
    assert system.loss(batch, engine)[1] == {} and torch.equal(system.bins, before), "evaluation leaves them alone"


# ---- evaluation ----------------------------------------------------------------------------------------------------------


def test_evaluation_does_not_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    system, engine, _ = made()
    with torch.no_grad():
        system.model.leave.weight.normal_(generator=torch.Generator().manual_seed(1))
    first = system.evaluate(system.data.valid, engine)
    torch.rand(5)
    monkeypatch.setattr("seedbed.recipes.flow.system.EVAL_BATCH", {"cpu": 40})
    assert system.evaluate(system.data.valid, engine) == pytest.approx(first, rel=1e-5)
    assert next(iter(first)) == "loss_early" and system.training


def test_evaluation_compares_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The grid stops short of the floor, so an x-model and a v-model that mean the same are scored the same."""
    systems = {predict: made(f"model.predict={predict}") for predict in ("v", "x")}
    found = {}
    for predict, (system, engine, _) in systems.items():

        def zero_direction(x: Tensor, time: Tensor, label: Tensor, p: str = predict) -> Tensor:
            return torch.zeros_like(x) if p == "v" else x

        monkeypatch.setattr(system.model, "forward", zero_direction)
        found[predict] = system.evaluate(system.data.valid, engine)["loss_grid"]
    assert found["v"] == pytest.approx(found["x"], rel=1e-4)


def test_evaluation_covers_every_class_of_a_sorted_store() -> None:
    classes = np.repeat(np.arange(10, dtype=np.uint8), 100)
    source = ImageSource(np.zeros((1000, 4, 4, 3), np.uint8), classes, ImageConfig(size=4), 1, train=False)
    picked = source.pick(source.spread(48))[1]
    assert torch.bincount(picked, minlength=10).min() >= 4


# ---- training and averages ---------------------------------------------------------------------------------------------


def test_resume_is_bitwise_and_training_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = [*TINY, *QUIET, "ema=0.9", "ema2=0.99"]
    assert start(tmp_path, "straight", *settings, recipe="flow/demo") == 0
    stop_at(4, monkeypatch)
    assert start(tmp_path, "stopped", *settings, recipe="flow/demo") == 143
    assert resume(tmp_path, "stopped") == 0
    assert_same_end(tmp_path, "straight", "stopped")
    assert {"model", "optim", "ema", "ema2"} == set(newest(tmp_path, "straight").tensors)
    losses = [row["loss"] for row in rows(tmp_path, "straight")]
    assert losses[-1] < losses[0]
    assert "loss_t9" in rows(tmp_path, "straight")[0]


def test_ema_of_two_horizons_and_warm_up() -> None:
    system, engine, feed = made("ema=0.1", "ema2=0.99")
    initial = {n: p.detach().clone() for n, p in system.named_parameters()}
    for step in range(5):
        engine.begin(step, 0.5)
        engine.step(feed.part)
    name = "model.leave.weight"
    live = dict(system.named_parameters())[name].detach()
    assert engine.ema is not None and engine.ema2 is not None
    near, far = ((e.shadow[name] - live).norm() for e in (engine.ema, engine.ema2))
    assert 0 < near < far < (initial[name] - live).norm()
    assert [engine.ema2.weight(s) for s in (0, 1)] == pytest.approx([1 - 0.1, 1 - 2 / 11])
    assert engine.ema2.weight(10**6) == pytest.approx(0.01)
    assert engine.ema2.shadow[name].dtype == torch.float32


@pytest.mark.slow
@pytest.mark.parametrize("settings", [("precision=fp32",), ("precision=bf16", "model.condition=context")])
def test_compiled_whole_equals_eager(settings: tuple[str, ...]) -> None:
    """Every part that `compile=whole` compiles is one graph, without a break."""
    system, engine, feed = made("model.predict=v", *settings)
    with torch.no_grad():
        system.model.leave.weight.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    batch = feed.part(0)
    with engine.autocast():
        eager = system.loss(batch, engine)[0]
        for part in system.children():
            part.compile(dynamic=False, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(system.loss(batch, engine)[0], eager, rtol=1e-3, atol=1e-3)


# ---- samples -------------------------------------------------------------------------------------------------------------


def asked(system: Flow, engine: Engine, folder: Path, **options: Any) -> Any:
    with engine.evaluating():
        return system.sample(Request(folder, options), engine)


def test_sample_grid_has_real_images_next_to_it(tmp_path: Path) -> None:
    system, engine, _ = made()
    shown = asked(system, engine, tmp_path, grid="2x3", steps=2, seed=4)
    (path,) = shown.files
    with Image.open(path) as page:
        assert page.format == "PNG" and page.width > 2 * 3 * 48
    assert shown.facts["num"] == 6 and 0.0 <= shown.facts["right"] <= 1.0
    assert "guidance 2" in shown.text
    again = asked(system, engine, tmp_path / "again", grid="2x3", steps=2, seed=4)
    assert np.array_equal(np.asarray(Image.open(path)), np.asarray(Image.open(again.files[0])))


def test_images_that_are_not_square_are_trained_evaluated_and_sampled(tmp_path: Path) -> None:
    settings = ("data.size=16", "data.width=24", "model.patch=4", "data.flip=true")
    assert start(tmp_path, "wide", *TINY, *QUIET, "steps=2", *settings, recipe="flow/demo") == 0
    system, engine, feed = made(*settings)
    assert system.model.grid == (4, 6) and feed.part(0)["image"].shape[2:] == (16, 24)
    with engine.evaluating():
        assert math.isfinite(system.evaluate(system.data.valid, engine)["loss_grid"])
    shown = asked(system, engine, tmp_path, grid="2x3", steps=2)
    with Image.open(shown.files[0]) as page:
        # Two panels of three columns and two rows, each image enlarged twice, above two lines of its class and a margin.
        assert page.size == (2 * (3 * (2 * 24 + 2) + 2) + 8, 14 + 2 * (2 * 16 + 2 * LABEL_HEIGHT + 2) + 2)


def test_positions_of_images_that_are_not_square_have_a_row_and_a_column() -> None:
    """Rotating an image and the network's grid with it gives the rotated output: rows and columns are not confused."""
    wide, tall = (
        made(*sides, "model.positions=sines")[0].model.eval() for sides in (("data.width=24",), ("data.size=24", "data.width=16"))
    )
    wide.load_state_dict(tall.state_dict())
    positions = wide.position_tables().positions_ND
    turned = tall.position_tables().positions_ND
    assert positions is not None and turned is not None
    half = positions.shape[1] // 2
    swapped = turned.view(6, 4, -1).transpose(0, 1).reshape(24, -1)
    # A sine at another place of a tensor may come from another kernel: vectors and their remainders round differently.
    assert_close_in_float(positions, torch.cat((swapped[:, half:], swapped[:, :half]), dim=1), 2)
    assert not torch.allclose(positions, swapped, atol=0.1)


def test_sample_during_training_covers_every_class(tmp_path: Path) -> None:
    system, engine, _ = made()
    shown = asked(system, engine, tmp_path)
    assert shown.facts["num"] == 96 and shown.files[0].name == "grid.png"


def test_sample_num_is_limited_by_flops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system, engine, _ = made()
    monkeypatch.setattr("seedbed.recipes.flow.show.MAX_FLOPS", {"cpu": 5 * 48 * system.model.forward_flops()})
    assert asked(system, engine, tmp_path).facts["num"] == 5
    monkeypatch.setattr("seedbed.recipes.flow.system.MAX_FLOPS", 8 * 3.5 * system.model.forward_flops())
    seen = []
    monkeypatch.setattr(system.model, "forward", lambda x, time, label: seen.append(len(x)) or torch.zeros_like(x))
    system.evaluate(system.data.valid, engine)
    assert sum(seen) == 8 * 3
    noise, engine, _ = made("data.images=random:20:3")
    assert asked(noise, engine, tmp_path).files == ()


def test_sample_with_the_long_ema(tmp_path: Path) -> None:
    system, engine, _ = made("ema=0.5", "ema2=0.9")
    assert engine.ema2 is not None
    engine.ema2.shadow["model.leave.bias"].fill_(5.0)
    short, long = (asked(system, engine, tmp_path / e, grid="1x1", steps=1, ema=e) for e in ("short", "long"))
    assert not np.array_equal(np.asarray(Image.open(short.files[0])), np.asarray(Image.open(long.files[0])))
    assert system.model.leave.bias.abs().max() == 0.0, "the live weights are back"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"class": "blue disk"}, "there is no class 'blue disk'; nearest: blue disc"),
        ({"class": "24"}, "a number below 24"),
        ({"grid": "8"}, "--grid 8 is not ROWSxCOLUMNS"),
        ({"grid": "0x4"}, "--grid 0x4 is not ROWSxCOLUMNS"),
        ({"interval": "0.1"}, "is not two times such as"),
        ({"sampler": "magic"}, "there is no sampler 'magic'"),
        ({"ema": "longest"}, "is not short or long"),
        ({"ema": "long"}, "kept no longer average"),
        ({"prompt": "hello"}, "does not know --prompt"),
    ],
)
def test_sample_options_out_of_range_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    system, engine, _ = made()
    with pytest.raises(UserError, match=message):
        asked(system, engine, tmp_path, **options)


def test_guidance_without_dropout_is_refused_and_not_the_default(tmp_path: Path) -> None:
    system, engine, _ = made("model.drop=0")
    assert asked(system, engine, tmp_path, grid="1x1", steps=1).facts["sampling"] == "heun, 1 steps, guidance 1"
    with pytest.raises(UserError, match="without class dropout"):
        asked(system, engine, tmp_path, guidance=2.0)


def test_sample_classes_in_equal_shares() -> None:
    data: Any = SimpleNamespace(num_classes=10, class_names=tuple("abcdefghij"))
    assert torch.bincount(_classes("all", 100, data)).tolist() == [10] * 10
    assert _classes("all", 3, data).tolist() == [0, 1, 2]
    assert _classes("c", 2, data).tolist() == [2, 2] == _classes("2", 2, data).tolist()
    assert _layout(SampleOptions(grid="3x5")) == (15, 5) and _layout(SampleOptions()) == (64, 8)


def test_presets_of_seed_256_differ_in_heads_only() -> None:
    presets = find("flow")[0].presets
    one, two = presets["seed-256"](), presets["seed-256-h4"]()
    assert replace(two.model, heads=16) == one.model


def test_full_evaluation_has_seeds_guidance_1_and_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a classifier that knows nothing and a table of one column, since the classifier has tests of its own."""
    calls = []

    def fake_table(images: Tensor, classes: Tensor, *_: Any, baselines: bool, patch: int) -> dict[str, Any]:
        calls.append((len(images), baselines, patch))
        rows = {"samples": {"num": 24.0, "fd": float(images.square().mean())}} | (
            {"train images": {"num": 24.0, "fd": 0.1}} if baselines else {}
        )
        facts = {"hash": "abc", "accuracy": 0.5, "num_features": 4}
        return {"classifier": facts, "num_reference": 9, "rows": rows, "confusion": [[1, 0], [0, 1]], "class_names": ["a", "b"]}

    monkeypatch.setattr("seedbed.recipes.flow.evaluate.open_classifier", lambda *args, **kwargs: None)
    monkeypatch.setattr("seedbed.recipes.flow.evaluate.evaluate_samples", fake_table)
    system, engine, _ = made("model.predict=v")
    shown = asked(system, engine, tmp_path, examine=24, steps=1, grid="1x1")
    assert [path.name for path in shown.files] == ["all-heun1-w2-seed1.png", "full_evaluation.md", "full_evaluation.json"]
    assert calls == [(24, True, 4), (24, False, 0), (24, False, 0), (24, False, 0)]
    table = json.loads((tmp_path / "full_evaluation.json").read_text())
    assert list(table["rows"]) == ["samples", "samples, guidance 1", "train images"]
    assert table["seeds"] == [1, 2, 3] and table["spread"]["fd"][1] > 0
    assert "guidance 2, short average" in shown.text and "Over seeds 1 to 3: FD-classifier" in shown.text
