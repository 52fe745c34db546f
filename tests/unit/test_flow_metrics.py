"""Distances against closed forms, the classifier and its cache, and the table: every metric must rank the baselines rightly."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from seedbed.config import Config
from seedbed.data.image_source import ImageData, open_data
from seedbed.data.images import ImageConfig
from seedbed.errors import UserError
from seedbed.recipes.flow import evaluate
from seedbed.recipes.flow.classifier import NUM_FEATURES, Classifier, ClassifierConfig, open_classifier, train_classifier
from seedbed.recipes.flow.evaluate import BLUR, COLUMNS, blur, confusion, evaluate_samples, markdown

QUICK = ClassifierConfig(width=8, epochs=8, batch=16)
CPU = torch.device("cpu")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---- closed forms --------------------------------------------------------------------------------------------------------


def test_frechet_of_gaussians_is_its_formula():
    a, b = normal(40_000, 3), normal(40_000, 3, seed=1)
    mix = torch.tensor([[2.0, 0.5, 0.0], [0.0, 1.0, 0.3], [0.0, 0.0, 0.5]], dtype=torch.float64)
    shift = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    cov = mix.T @ mix
    wanted = shift.square().sum() + 3 + cov.trace() - 2 * torch.linalg.eigvalsh(cov).sqrt().sum()
    assert evaluate.frechet(a, b @ mix + shift) == pytest.approx(wanted.item(), rel=0.02)


def test_frechet_is_symmetric_zero_on_itself_and_blind_to_rotation():
    a, b = normal(500, 8) * torch.arange(1, 9), normal(400, 8, seed=1) + 1
    turn = torch.linalg.qr(normal(8, 8, seed=2))[0]
    assert evaluate.frechet(a, a) < 1e-8
    assert evaluate.frechet(a, b) == pytest.approx(evaluate.frechet(b, a))
    assert evaluate.frechet(a, b) == pytest.approx(evaluate.frechet(a @ turn, b @ turn))


def test_frechet_bias_has_the_known_size():
    # 10,000 draws of 64 unit features leave 0.22 between two sets of one times.
    assert evaluate.frechet(normal(10_000, 64), normal(10_000, 64, seed=1)) == pytest.approx(0.22, abs=0.03)


def test_frechet_of_constant_features_is_finite():
    a, b = normal(100, 4), normal(100, 4, seed=1)
    a[:, 2] = b[:, 2] = 0.0
    assert math.isfinite(evaluate.frechet(a, b))


def test_kernel_distance_is_unbiased():
    same, spread = evaluate.kernel_distance(normal(2000, 16), normal(2000, 16, seed=1), size=200)
    assert abs(same) < 4 * spread / math.sqrt(10) and spread > 0
    far, _ = evaluate.kernel_distance(normal(2000, 16), normal(2000, 16, seed=1) + 0.5, size=200)
    assert far > 10 * spread
    assert evaluate.kernel_distance(normal(50, 4), normal(50, 4, seed=1)) == evaluate.kernel_distance(
        normal(50, 4), normal(50, 4, seed=1)
    )


def test_kernel_distance_of_two_pairs_by_hand():
    a, b = torch.tensor([[1.0], [2.0]]), torch.tensor([[0.0], [-1.0]])
    k = lambda x, y: (x * y + 1) ** 3  # noqa: E731
    wanted = k(1, 2) + k(0, -1) - 2 * (k(1, 0) + k(1, -1) + k(2, 0) + k(2, -1)) / 4
    assert evaluate.kernel_distance(a, b, subsets=2)[0] == pytest.approx(wanted)


def test_precision_and_recall_at_their_corners():
    real = normal(300, 2).float()
    assert evaluate.coverage(real, real.clone())["precision"] == 1.0 == evaluate.coverage(real, real.clone())["recall"]
    far = evaluate.coverage(real, real + 100)
    assert far == {"precision": 0.0, "recall": 0.0, "density": 0.0, "coverage": 0.0}
    # One mode of two: everything generated is plausible, half of what is real is missing.
    two = torch.cat([real[:150], real[150:] + 50])
    half = evaluate.coverage(two, normal(300, 2, seed=3).float())
    assert half["precision"] > 0.9 and half["recall"] < 0.55 and half["coverage"] < 0.55
    swapped = evaluate.coverage(normal(300, 2, seed=3).float(), two)
    assert swapped["precision"] < 0.55 and swapped["recall"] > 0.9


def test_density_counts_balls():
    real = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    # The second neighbours are 2, 1, 1 and 2 away, so that the point 1.5 lies in all four balls.
    assert evaluate.coverage(real, torch.full((4, 1), 1.5), k=2)["density"] == pytest.approx(4 / 2)


def test_coverage_does_not_depend_on_blocks(monkeypatch):
    a, b = normal(120, 5).float(), normal(90, 5, seed=1).float()
    whole = evaluate.coverage(a, b), evaluate.nearest(a, b)
    monkeypatch.setattr(evaluate, "PAIRS", 700)
    parts = evaluate.coverage(a, b), evaluate.nearest(a, b)
    assert whole[0] == parts[0] and torch.allclose(whole[1][0], parts[1][0]) and torch.equal(whole[1][1], parts[1][1])


def test_nearest_row_is_found():
    bank = normal(200, 6).float()
    far, which = evaluate.nearest(bank[[5, 17]] + 1e-3, bank)
    assert which.tolist() == [5, 17] and (far < 0.01).all()


def test_sliced_wasserstein_of_a_shift():
    a = normal(400, 3, 8, 8).float()
    assert evaluate.sliced_wasserstein(a, a) == 0.0
    small, large = (evaluate.sliced_wasserstein(a, normal(300, 3, 8, 8, seed=1).float() + s) for s in (0.1, 0.5))
    # A shift of every pixel by s moves a unit line by s times the sum of its weights, which is normal: sqrt(2 / pi) on average.
    assert large == pytest.approx(0.5 * math.sqrt(2 / math.pi), rel=0.25) and small < large / 3


def test_spectrum_of_one_wave_and_of_noise():
    wave = torch.cos(2 * math.pi * 4 * torch.arange(16) / 16).expand(2, 3, 16, 16)
    assert evaluate.spectrum(wave).argmax() == 4
    white = evaluate.spectrum(normal(600, 1, 16, 16))
    assert white.std() < 0.3 and white.mean() == pytest.approx(10 * math.log10(256), abs=0.2)
    noise = normal(10, 3, 16, 16)
    assert evaluate.spectral_distance(2 * noise, noise) == pytest.approx(20 * math.log10(2))


def test_spectrum_and_grid_peak_of_images_that_are_not_square():
    """Frequencies are counted along the shorter side, and patches along each."""
    wave = torch.sin(2 * math.pi * torch.arange(32) * 8 / 32).expand(4, 1, 16, 32)
    assert evaluate.spectrum(wave).argmax() == 4 and len(evaluate.spectrum(wave)) == 9
    plain, tiles = normal(64, 1, 16, 32), normal(64, 1, 1, 1).expand(64, 1, 16, 32).clone()
    tiles[:, :, ::4] += 1
    tiles[:, :, :, ::4] += 1
    assert abs(evaluate.grid_peak(plain, 4)) < 1.5 and evaluate.grid_peak(tiles + 0.1 * plain, 4) > 5


def test_grid_peak_detects_patch_borders():
    plain = normal(200, 3, 32, 32)
    tiles = plain + 0.3 * (torch.arange(32) % 4 == 0).double()
    assert abs(evaluate.grid_peak(plain, 4)) < 1 and evaluate.grid_peak(tiles, 4) > 5
    assert math.isnan(evaluate.grid_peak(plain, 1)), "a patch of one pixel has no grid"


def test_blur_keeps_the_mean_and_removes_detail():
    flat = torch.full((1, 3, 8, 8), 0.3)
    torch.testing.assert_close(blur(flat, BLUR), flat)
    noise = normal(50, 3, 16, 16).float()
    assert blur(noise, BLUR).var() < 0.2 * noise.var()


def test_confusion_counts_pairs():
    found = confusion(torch.tensor([0, 0, 1, 2]), torch.tensor([0, 2, 1, 1]), 3)
    assert found == [[1, 0, 1], [0, 1, 0], [0, 1, 0]]


# ---- the classifier -----------------------------------------------------------------------------------------------------


def shapes(valid: float = 0.5) -> ImageData:
    return open_data(Config(model=None, data=ImageConfig(size=16, valid=valid)))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[ImageData, Classifier, Path]:
    folder = tmp_path_factory.mktemp("classifiers")
    data = shapes()
    return data, open_classifier(data, folder, CPU, QUICK), folder


def test_classifier_has_about_a_million_parameters_and_few_features():
    assert 0.8e6 < sum(p.numel() for p in Classifier(10).parameters()) < 1.3e6 and NUM_FEATURES == 64


def test_classifier_learns_and_its_features_are_standardised(trained):
    data, classifier, _ = trained
    assert classifier.accuracy > 0.97
    features, seen = classifier.classify(data.train.pick(np.arange(data.train.num_items))[0])
    assert features.mean(0).abs().max() < 1e-3 and (features.std(0) - 1).abs().max() < 1e-2
    assert (seen.numpy() == data.train.arrays["class"]).mean() > 0.97
    assert not any(p.requires_grad for p in classifier.parameters()) and not classifier.training


def test_classifier_at_chance_level_is_refused_and_not_saved(tmp_path):
    data = shapes(valid=0.9)
    mixed = np.random.default_rng(0).permutation(data.train.arrays["class"])
    data.train.arrays["class"][:] = mixed
    with pytest.raises(UserError, match="real held-out images, and chance is"):
        open_classifier(data, tmp_path, CPU, ClassifierConfig(width=8, epochs=1, batch=16))
    assert not list(tmp_path.iterdir())


def test_classifier_is_loaded_from_the_cache(trained, monkeypatch):
    data, classifier, folder = trained
    monkeypatch.setattr("seedbed.recipes.flow.classifier.train_classifier", lambda *args: pytest.fail("trained again"))
    again = open_classifier(data, folder, CPU, QUICK)
    assert again.hash == classifier.hash and again.accuracy == classifier.accuracy
    x = data.valid.pick(np.arange(16))[0]
    assert torch.equal(again.classify(x)[0], classifier.classify(x)[0])


def test_classifier_training_is_deterministic_and_forks_the_rng():
    small = ImageData(*(part.first(48) for part in (shapes().train, shapes().valid)), {}, shapes().class_names, (3, 16, 16))
    config = ClassifierConfig(width=4, epochs=1, batch=16)
    state = torch.get_rng_state()
    a, b = train_classifier(small, CPU, config), train_classifier(small, CPU, config)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


@pytest.mark.parametrize("damage", ["weights", "note", "gone"])
def test_classifier_file_that_is_damaged_is_trained_again(trained, tmp_path, monkeypatch, damage: str):
    data, classifier, folder = trained
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (note,), (weights,) = tmp_path.glob("*.json"), tmp_path.glob("*.safetensors")
    if damage == "weights":
        content = bytearray(weights.read_bytes())
        content[-5] ^= 1
        weights.write_bytes(content)
    elif damage == "note":
        note.write_text(json.dumps({"hash": 3}))
    else:
        weights.unlink()
    monkeypatch.setattr("seedbed.recipes.flow.classifier.train_classifier", lambda *args: classifier)
    lines: list[str] = []
    assert open_classifier(data, tmp_path, CPU, QUICK, say=lines.append).hash == classifier.hash
    assert len(lines) == 2 and "is damaged" in lines[0] and "training the classifier again" in lines[0]


def test_classifier_refuses_latents_one_class_and_few_images(trained, tmp_path):
    data, classifier, _ = trained
    lone = ImageData(data.train, data.valid, data.facts, ("thing",), data.shape)
    with pytest.raises(UserError, match="these images have one"):
        open_classifier(lone, tmp_path, CPU, QUICK)
    with pytest.raises(UserError, match="too few to evaluate"):
        evaluate_samples(torch.zeros(4, 3, 16, 16), torch.zeros(4, dtype=torch.long), data, classifier)
    latent = shapes()
    latent.train.arrays = {**latent.train.arrays, "image": latent.train.arrays["image"].astype(np.float16)}
    with pytest.raises(UserError, match="latents cannot be scored"):
        open_classifier(latent, tmp_path, CPU, QUICK)


# ---- the table -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table(trained) -> dict:
    """Samples that are real training images, a third of them under a wrong name."""
    data, classifier, _ = trained
    images, classes = data.train.pick(np.arange(600))
    wrong = torch.where(torch.arange(600) % 3 == 0, (classes + 1) % 24, classes)
    return evaluate_samples(images, wrong, data, classifier, patch=4)


# A metric, and sets from good to bad; sets in one bracket are alike, and "real" stands for what real images get.
REAL = ("train images", "test half vs half")
ORDERS = {
    "fd": (("train images",), ("test + noise",), ("test blurred",), ("pure noise",)),
    "kid": (REAL, ("test + noise",), ("test blurred",), ("pure noise",)),
    "precision": (("one per class, repeated", *REAL), ("test + noise",), ("test blurred",), ("pure noise",)),
    "recall": (REAL, ("one per class, repeated", "test blurred"), ("pure noise",)),
    "density": (REAL, ("test + noise",), ("test blurred",), ("pure noise",)),
    "coverage": (REAL, ("test + noise",), ("test blurred", "one per class, repeated"), ("pure noise",)),
    "accuracy": (REAL, ("test blurred",), ("labels shuffled", "pure noise")),
    "sliced": (REAL, ("one per class, repeated",), ("test + noise",), ("pure noise",)),
    "spectrum": (REAL, ("test + noise",), ("test blurred",), ("pure noise",)),
    "right": (REAL, ("test blurred",), ("labels shuffled", "pure noise")),
    "iou80": (REAL, ("test blurred",), ("pure noise",)),
}


@pytest.mark.parametrize("name", ORDERS)
def test_metrics_rank_the_baselines(table: dict, name: str):
    sign = {"higher": -1, "lower": 1}[COLUMNS[name][2]]
    ranks = [[sign * table["rows"][title][name] for title in group] for group in ORDERS[name]]
    for better, worse in itertools.pairwise(ranks):
        assert max(better) < min(worse), f"{name}: {ranks}"


def test_metrics_have_further_orders(table: dict):
    rows = table["rows"]
    assert rows["one per class, repeated"]["fd"] > 5 * rows["train images"]["fd"], "lost variety must cost"
    shuffled, train = rows["labels shuffled"], rows["train images"]
    assert {**shuffled, "accuracy": 0, "right": 0} == {**train, "accuracy": 0, "right": 0}, "names change nothing else"
    assert train["nearest"] < 0.01 < 0.9 < rows["test half vs half"]["nearest"] < 1.1, "copies of training images are seen"
    assert rows["pure noise"]["accuracy"] < 0.2 and rows["test half vs half"]["num"] == 300


def test_metrics_of_the_samples_row(table: dict):
    row = table["rows"]["samples"]
    assert row["accuracy"] == pytest.approx(2 / 3, abs=0.03) and row["right"] == pytest.approx(2 / 3)
    assert row["fd"] == pytest.approx(table["rows"]["train images"]["fd"], abs=0.05) and row["nearest"] < 0.01
    assert np.array(table["confusion"]).sum() == 600 and len(table["classifier"]["hash"]) == 16
    assert json.loads(json.dumps(table)) == table, "plain values only"


def test_table_is_printed_with_the_classifier_first_and_never_called_fid(table: dict):
    text = markdown(table)
    assert text.startswith(f"Classifier {table['classifier']['hash']}: ") and "| samples | 600 |" in text
    assert all(f"| {title} |" in text for title in table["rows"]) and "FID" not in text
    assert "red disc" in text and "Peak at one over the patch" in text
    widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert len(widths) == 1


def test_table_without_baselines_has_the_same_row(trained, table: dict):
    data, classifier, _ = trained
    images, classes = data.train.pick(np.arange(600))
    wrong = torch.where(torch.arange(600) % 3 == 0, (classes + 1) % 24, classes)
    alone = evaluate_samples(images, wrong, data, classifier, baselines=False)
    assert alone["rows"] == {"samples": table["rows"]["samples"]} and "grid_peak" not in alone
