"""Distances against closed forms, the judge and its cache, and the table: every metric must order the oracle rows rightly."""

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
from seedbed.recipes.flow import metrics
from seedbed.recipes.flow.evaluate import COLUMNS, blur, confusion, evaluate_samples, markdown
from seedbed.recipes.flow.judge import NUM_FEATURES, Judge, JudgeConfig, open_judge, train_judge

QUICK = JudgeConfig(width=8, epochs=8, batch=16)
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
    assert metrics.frechet(a, b @ mix + shift) == pytest.approx(wanted.item(), rel=0.02)


def test_frechet_is_symmetric_zero_on_itself_and_blind_to_rotation():
    a, b = normal(500, 8) * torch.arange(1, 9), normal(400, 8, seed=1) + 1
    turn = torch.linalg.qr(normal(8, 8, seed=2))[0]
    assert metrics.frechet(a, a) < 1e-8
    assert metrics.frechet(a, b) == pytest.approx(metrics.frechet(b, a))
    assert metrics.frechet(a, b) == pytest.approx(metrics.frechet(a @ turn, b @ turn))


def test_the_bias_of_frechet_is_the_one_we_know():
    # 10,000 draws of 64 unit features leave 0.22 between two sets of one law.
    assert metrics.frechet(normal(10_000, 64), normal(10_000, 64, seed=1)) == pytest.approx(0.22, abs=0.03)


def test_frechet_survives_features_that_never_move():
    a, b = normal(100, 4), normal(100, 4, seed=1)
    a[:, 2] = b[:, 2] = 0.0
    assert math.isfinite(metrics.frechet(a, b))


def test_the_kernel_distance_is_unbiased():
    same, spread = metrics.kernel_distance(normal(2000, 16), normal(2000, 16, seed=1), size=200)
    assert abs(same) < 4 * spread / math.sqrt(10) and spread > 0
    far, _ = metrics.kernel_distance(normal(2000, 16), normal(2000, 16, seed=1) + 0.5, size=200)
    assert far > 10 * spread
    assert metrics.kernel_distance(normal(50, 4), normal(50, 4, seed=1)) == metrics.kernel_distance(
        normal(50, 4), normal(50, 4, seed=1)
    )


def test_the_kernel_distance_of_two_pairs_by_hand():
    a, b = torch.tensor([[1.0], [2.0]]), torch.tensor([[0.0], [-1.0]])
    k = lambda x, y: (x * y + 1) ** 3  # noqa: E731
    wanted = k(1, 2) + k(0, -1) - 2 * (k(1, 0) + k(1, -1) + k(2, 0) + k(2, -1)) / 4
    assert metrics.kernel_distance(a, b, subsets=2)[0] == pytest.approx(wanted)


def test_precision_and_recall_at_their_corners():
    real = normal(300, 2).float()
    assert metrics.coverage(real, real.clone())["precision"] == 1.0 == metrics.coverage(real, real.clone())["recall"]
    far = metrics.coverage(real, real + 100)
    assert far == {"precision": 0.0, "recall": 0.0, "density": 0.0, "coverage": 0.0}
    # One mode of two: everything generated is plausible, half of what is real is missing.
    two = torch.cat([real[:150], real[150:] + 50])
    half = metrics.coverage(two, normal(300, 2, seed=3).float())
    assert half["precision"] > 0.9 and half["recall"] < 0.55 and half["coverage"] < 0.55
    swapped = metrics.coverage(normal(300, 2, seed=3).float(), two)
    assert swapped["precision"] < 0.55 and swapped["recall"] > 0.9


def test_density_counts_balls():
    real = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    # The second neighbours are 2, 1, 1 and 2 away, so that the point 1.5 lies in all four balls.
    assert metrics.coverage(real, torch.full((4, 1), 1.5), k=2)["density"] == pytest.approx(4 / 2)


def test_blocks_do_not_change_the_answer(monkeypatch):
    a, b = normal(120, 5).float(), normal(90, 5, seed=1).float()
    whole = metrics.coverage(a, b), metrics.nearest(a, b)
    monkeypatch.setattr(metrics, "PAIRS", 700)
    parts = metrics.coverage(a, b), metrics.nearest(a, b)
    assert whole[0] == parts[0] and torch.allclose(whole[1][0], parts[1][0]) and torch.equal(whole[1][1], parts[1][1])


def test_the_nearest_row_is_found():
    bank = normal(200, 6).float()
    far, which = metrics.nearest(bank[[5, 17]] + 1e-3, bank)
    assert which.tolist() == [5, 17] and (far < 0.01).all()


def test_sliced_wasserstein_of_a_shift():
    a = normal(400, 3, 8, 8).float()
    assert metrics.sliced_wasserstein(a, a) == 0.0
    small, large = (metrics.sliced_wasserstein(a, normal(300, 3, 8, 8, seed=1).float() + s) for s in (0.1, 0.5))
    # A shift of every pixel by s moves a unit line by s times the sum of its weights, which is normal: sqrt(2 / pi) on average.
    assert large == pytest.approx(0.5 * math.sqrt(2 / math.pi), rel=0.25) and small < large / 3


def test_the_spectrum_of_one_wave_and_of_noise():
    wave = torch.cos(2 * math.pi * 4 * torch.arange(16) / 16).expand(2, 3, 16, 16)
    assert metrics.spectrum(wave).argmax() == 4
    white = metrics.spectrum(normal(600, 1, 16, 16))
    assert white.std() < 0.3 and white.mean() == pytest.approx(10 * math.log10(256), abs=0.2)
    noise = normal(10, 3, 16, 16)
    assert metrics.spectral_distance(2 * noise, noise) == pytest.approx(20 * math.log10(2))


def test_a_grid_of_patches_shows_as_a_peak():
    plain = normal(200, 3, 32, 32)
    tiles = plain + 0.3 * (torch.arange(32) % 4 == 0).double()
    assert abs(metrics.grid_peak(plain, 4)) < 1 and metrics.grid_peak(tiles, 4) > 5
    assert math.isnan(metrics.grid_peak(plain, 1)), "a patch of one pixel has no grid"


def test_a_blur_keeps_the_mean_and_removes_detail():
    flat = torch.full((1, 3, 8, 8), 0.3)
    torch.testing.assert_close(blur(flat), flat)
    noise = normal(50, 3, 16, 16).float()
    assert blur(noise).var() < 0.2 * noise.var()


def test_confusion_counts_pairs():
    found = confusion(torch.tensor([0, 0, 1, 2]), torch.tensor([0, 2, 1, 1]), 3)
    assert found == [[1, 0, 1], [0, 1, 0], [0, 1, 0]]


# ---- the judge -----------------------------------------------------------------------------------------------------------


def shapes(valid: float = 0.5) -> ImageData:
    return open_data(Config(model=None, data=ImageConfig(size=16, valid=valid)))


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> tuple[ImageData, Judge, Path]:
    folder = tmp_path_factory.mktemp("judges")
    data = shapes()
    return data, open_judge(data, folder, CPU, QUICK), folder


def test_the_judge_has_about_a_million_parameters_and_few_features():
    assert 0.8e6 < sum(p.numel() for p in Judge(10).parameters()) < 1.3e6 and NUM_FEATURES == 64


def test_the_judge_learns_and_its_features_are_standard(judged):
    data, judge, _ = judged
    assert judge.accuracy > 0.97
    features, seen = judge.look(data.train.pick(np.arange(data.train.num_items))[0])
    assert features.mean(0).abs().max() < 1e-3 and (features.std(0) - 1).abs().max() < 1e-2
    assert (seen.numpy() == data.train.arrays["class"]).mean() > 0.97
    assert not any(p.requires_grad for p in judge.parameters()) and not judge.training


def test_a_judge_that_guesses_is_refused_and_not_kept(tmp_path):
    data = shapes(valid=0.9)
    mixed = np.random.default_rng(0).permutation(data.train.arrays["class"])
    data.train.arrays["class"][:] = mixed
    with pytest.raises(UserError, match="real held-out images apart, and guessing"):
        open_judge(data, tmp_path, CPU, JudgeConfig(width=8, epochs=1, batch=16))
    assert not list(tmp_path.iterdir())


def test_the_judge_is_found_again_by_its_hash(judged, monkeypatch):
    data, judge, folder = judged
    monkeypatch.setattr("seedbed.recipes.flow.judge.train_judge", lambda *args: pytest.fail("trained again"))
    again = open_judge(data, folder, CPU, QUICK)
    assert again.hash == judge.hash and again.accuracy == judge.accuracy
    x = data.valid.pick(np.arange(16))[0]
    assert torch.equal(again.look(x)[0], judge.look(x)[0])


def test_the_same_seed_gives_the_same_judge_and_other_randomness_is_left_alone():
    small = ImageData(*(part.first(48) for part in (shapes().train, shapes().valid)), {}, shapes().class_names, (3, 16, 16))
    config = JudgeConfig(width=4, epochs=1, batch=16)
    state = torch.get_rng_state()
    a, b = train_judge(small, CPU, config), train_judge(small, CPU, config)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


@pytest.mark.parametrize("damage", ["weights", "note", "gone"])
def test_a_damaged_judge_is_trained_again(judged, tmp_path, monkeypatch, damage: str):
    data, judge, folder = judged
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
    monkeypatch.setattr("seedbed.recipes.flow.judge.train_judge", lambda *args: judge)
    lines: list[str] = []
    assert open_judge(data, tmp_path, CPU, QUICK, say=lines.append).hash == judge.hash
    assert len(lines) == 2 and "is damaged" in lines[0] and "training the judge again" in lines[0]


def test_what_cannot_be_judged_is_said(judged, tmp_path):
    data, judge, _ = judged
    lone = ImageData(data.train, data.valid, data.facts, ("thing",), data.shape)
    with pytest.raises(UserError, match="have only one"):
        open_judge(lone, tmp_path, CPU, QUICK)
    with pytest.raises(UserError, match="too few to judge"):
        evaluate_samples(torch.zeros(4, 3, 16, 16), torch.zeros(4, dtype=torch.long), data, judge)
    latent = shapes()
    latent.train.arrays = {**latent.train.arrays, "image": latent.train.arrays["image"].astype(np.float16)}
    with pytest.raises(UserError, match="latents cannot be judged"):
        open_judge(latent, tmp_path, CPU, QUICK)


# ---- the table -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table(judged) -> dict:
    """Samples that are real training images, a third of them under a wrong name."""
    data, judge, _ = judged
    images, classes = data.train.pick(np.arange(600))
    wrong = torch.where(torch.arange(600) % 3 == 0, (classes + 1) % 24, classes)
    return evaluate_samples(images, wrong, data, judge, patch=4)


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
def test_each_metric_orders_the_oracle_rows(table: dict, name: str):
    sign = {"higher": -1, "lower": 1}[COLUMNS[name][2]]
    ranks = [[sign * table["rows"][title][name] for title in group] for group in ORDERS[name]]
    for better, worse in itertools.pairwise(ranks):
        assert max(better) < min(worse), f"{name}: {ranks}"


def test_more_orders_that_a_reader_relies_on(table: dict):
    rows = table["rows"]
    assert rows["one per class, repeated"]["fd"] > 5 * rows["train images"]["fd"], "lost variety must cost"
    shuffled, train = rows["labels shuffled"], rows["train images"]
    assert {**shuffled, "accuracy": 0, "right": 0} == {**train, "accuracy": 0, "right": 0}, "names change nothing else"
    assert train["nearest"] < 0.01 < 0.9 < rows["test half vs half"]["nearest"] < 1.1, "copies of training images are seen"
    assert rows["pure noise"]["accuracy"] < 0.2 and rows["test half vs half"]["num"] == 300


def test_the_row_of_samples_says_what_they_are(table: dict):
    row = table["rows"]["samples"]
    assert row["accuracy"] == pytest.approx(2 / 3, abs=0.03) and row["right"] == pytest.approx(2 / 3)
    assert row["fd"] == pytest.approx(table["rows"]["train images"]["fd"], abs=0.05) and row["nearest"] < 0.01
    assert np.array(table["confusion"]).sum() == 600 and len(table["judge"]["hash"]) == 16
    assert json.loads(json.dumps(table)) == table, "plain values only"


def test_the_table_is_printed_with_the_judge_first_and_never_called_by_another_name(table: dict):
    text = markdown(table)
    assert text.startswith(f"Judge {table['judge']['hash']}: ") and "| samples | 600 |" in text
    assert all(f"| {title} |" in text for title in table["rows"]) and "FID" not in text
    assert "red disc" in text and "Peak at one over the patch" in text
    widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert len(widths) == 1


def test_the_table_without_oracles_is_the_same_row(judged, table: dict):
    data, judge, _ = judged
    images, classes = data.train.pick(np.arange(600))
    wrong = torch.where(torch.arange(600) % 3 == 0, (classes + 1) % 24, classes)
    alone = evaluate_samples(images, wrong, data, judge, oracles=False)
    assert alone["rows"] == {"samples": table["rows"]["samples"]} and "grid_peak" not in alone
