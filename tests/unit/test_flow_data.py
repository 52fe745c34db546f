"""Images on their way to the model: the shapes and their exact check, augmentation, noise, time and class dropout."""

import math

import numpy as np
import pytest
import torch
from helpers import NOISED_TERMS, assert_close_in_float

from seedbed.config import Config
from seedbed.data import shapes
from seedbed.data.feed import Feed
from seedbed.data.image_source import ImageSource, to_bytes, to_float
from seedbed.data.images import ImageConfig
from seedbed.errors import UserError
from seedbed.recipes.flow.data import (
    TimeDistribution,
    draw_noise,
    draw_time,
    drop_class,
    flow_batch,
    open_data,
)

LAWS = [TimeDistribution(), TimeDistribution("logit-normal"), TimeDistribution("logit-normal", -0.8, 0.8)]


def opened(**fields) -> object:
    return open_data(Config(model=None, data=ImageConfig(**fields)))


def renders(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    images, classes = shapes.render_shapes(size)
    return to_float(torch.from_numpy(images)), torch.from_numpy(classes).long()


# ---- shapes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [16, 24, 64])
def test_shapes_are_distinguishable(size: int):
    masks = shapes.masks(size).reshape(4, -1, size * size).astype(np.float64)
    for a in range(4):
        for b in range(a):
            both = masks[a] @ masks[b].T
            iou = both / (masks[a].sum(1)[:, None] + masks[b].sum(1) - both)
            assert iou.max() <= 0.75, (shapes.SHAPES[a], shapes.SHAPES[b])


def test_shapes_are_stretched_and_scored_where_images_are_not_square():
    images, classes = shapes.render_shapes(16, 24)
    assert images.shape == (1200, 16, 24, 3)
    score = shapes.score_shapes(to_float(torch.from_numpy(images[::7])), torch.from_numpy(classes[::7]).long())
    assert score == dict.fromkeys(("right", "shape", "colour", "iou80", "iou"), 1.0)


def test_shapes_renderings_are_listed_once():
    images, classes = shapes.render_shapes(16)
    assert images.shape == (4 * 6 * 2 * 25, 16, 16, 3) and len(np.unique(images.reshape(len(images), -1), axis=0)) == len(images)
    assert np.bincount(classes).tolist() == [50] * 24 and len(set(shapes.CLASS_NAMES)) == 24


@pytest.mark.parametrize("size", [16, 64])
def test_shapes_score_reads_noisy_renderings(size: int):
    images, classes = (part[::7] for part in renders(size))
    noisy = images + 0.1 * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    assert shapes.score_shapes(noisy, classes) == dict.fromkeys(("right", "shape", "colour", "iou80", "iou"), 1.0)


def test_shapes_score_detects_each_mistake():
    images, classes = renders(16)
    other_colour = classes // 6 * 6 + (classes + 1) % 6
    assert shapes.score_shapes(images, other_colour) | {"iou": 0, "iou80": 0} == {
        **{"right": 0.0, "shape": 1.0, "colour": 0.0},
        **{"iou": 0, "iou80": 0},
    }
    found = shapes.score_shapes(images, (classes + 6) % 24)
    assert (found["right"], found["shape"], found["colour"]) == (0.0, 0.0, 1.0)
    upper_half_gone = images.clone()
    upper_half_gone[:, :, :8] = images[:, :, :1, :1]
    assert shapes.score_shapes(upper_half_gone, classes)["iou80"] < 0.8


def test_shapes_score_of_an_empty_image_is_zero():
    empty = torch.tensor(shapes.BACKGROUND)[None, :, None, None].expand(2, 3, 16, 16) / 127.5 - 1
    seen = shapes.read_shapes(empty)
    assert seen.shape.tolist() == [-1, -1] and seen.colour.tolist() == [-1, -1] and seen.iou.tolist() == [0.0, 0.0]


def test_shapes_score_of_noise_is_chance():
    _, classes = renders(16)
    noise = torch.randn(len(classes), 3, 16, 16, generator=torch.Generator().manual_seed(0))
    assert shapes.score_shapes(noise, classes)["right"] < 3 / 24


# ---- opening -------------------------------------------------------------------------------------------------------------


def test_shapes_are_split_within_every_class_and_do_not_depend_on_the_seed():
    data = opened(size=16, valid=0.1)
    assert np.bincount(data.train.arrays["class"]).tolist() == [45] * 24
    assert np.bincount(data.valid.arrays["class"]).tolist() == [5] * 24
    both = np.concatenate([data.train.arrays["image"], data.valid.arrays["image"]]).reshape(1200, -1)
    assert len(np.unique(both, axis=0)) == 1200
    again = open_data(Config(model=None, data=ImageConfig(size=16), seed=9))
    assert again.facts == data.facts and np.array_equal(again.train.arrays["image"], data.train.arrays["image"])
    assert opened(size=16, valid=0.2).facts["fingerprint"] != data.facts["fingerprint"]


def test_shapes_first_items_hold_every_class():
    assert len(set(opened(size=16).train.first(240).arrays["class"].tolist())) == 24


def test_random_images():
    data = opened(images="random:20:1000", size=8)
    assert data.shape == (3, 8, 8) and data.num_classes == 1000
    assert (data.train.num_items, data.valid.num_items) == (18, 2)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"images": " "}, "data.images is empty"),
        ({"images": "random:10"}, "not random:NUM:CLASSES"),
        ({"images": "random:1:5"}, "not random:NUM:CLASSES"),
        ({"images": "random:10:x"}, "not random:NUM:CLASSES"),
        ({"images": "random:10:70000"}, "not random:NUM:CLASSES"),
        ({"crop": "random"}, "cannot be cropped"),
        ({"images": "x", "encode": "a:b", "flip": True}, "neither flipped nor cropped"),
        ({"images": "x", "encode": "a.b"}, "not package.module:function"),
    ],
)
def test_image_settings_out_of_range_are_refused(fields: dict, words: str):
    with pytest.raises(UserError, match=words):
        Config(model=None, data=ImageConfig(**fields))


# ---- from bytes to floats ------------------------------------------------------------------------------------------------


def test_to_bytes_inverts_to_float():
    every = torch.arange(256, dtype=torch.uint8).view(1, 16, 16, 1).expand(2, 16, 16, 3)
    image = to_float(every)
    assert image.shape == (2, 3, 16, 16) and image.is_contiguous() and image.min() == -1 and image.max() == 1
    assert torch.equal(to_bytes(image), every)


def source(train: bool = True, size: int = 6, num: int = 64, **fields) -> ImageSource:
    config = ImageConfig(images="x", size=size, **fields)
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (num, *config.stored_shape, 3), np.uint8)
    return ImageSource(images, np.arange(num, dtype=np.uint8), config, seed=1, train=train)


def batch(source: ImageSource, first: int, num: int, parts: int = 1) -> dict[str, torch.Tensor]:
    feed = Feed(source, batch=num, parts=parts, seed=1, device=torch.device("cpu"))
    feed.load(first)
    found = [{name: value.clone() for name, value in feed.part(k).items()} for k in range(parts)]
    return {name: torch.cat([part[name] for part in found]) for name in found[0]}


def test_image_batch_has_the_documented_fields():
    found = batch(source(flip=True), 0, 32)
    assert {name: (value.dtype, tuple(value.shape)) for name, value in found.items()} == {
        "image": (torch.float32, (32, 3, 6, 6)),
        "class": (torch.int64, (32,)),
        "index": (torch.int64, (32,)),
    }


def test_flip_mirrors_half_of_the_training_images():
    made = source(flip=True)
    found = batch(made, 0, 64)
    plain = made.pick(found["class"].numpy())[0]
    same = (found["image"] == plain).all((1, 2, 3))
    mirrored = (found["image"] == plain.flip(-1)).all((1, 2, 3))
    assert (same ^ mirrored).all() and 20 < mirrored.sum() < 44


def test_flip_leaves_held_out_images_alone():
    made = source(train=False, flip=True, crop="random", size=16)
    found = batch(made, 0, 64)
    assert torch.equal(found["image"], made.pick(found["class"].numpy())[0])
    middle = made.arrays["image"][found["class"].numpy(), 1:17, 1:17]
    assert torch.equal(found["image"], to_float(torch.from_numpy(middle)))


def test_crop_covers_every_position():
    made = source(crop="random", size=16)
    found = batch(made, 0, 64)
    whole = to_float(torch.from_numpy(made.arrays["image"]))[found["class"]]
    places = set()
    for image, stored in zip(found["image"], whole, strict=True):
        hits = [(y, x) for y in range(3) for x in range(3) if torch.equal(stored[:, y : y + 16, x : x + 16], image)]
        assert len(hits) == 1
        places.add(hits[0])
    assert len(places) == 9


def test_flips_and_crops_of_images_that_are_not_square():
    made = source(flip=True, crop="random", size=16, width=24)
    found = batch(made, 0, 64)
    whole = to_float(torch.from_numpy(made.arrays["image"]))[found["class"]]
    assert found["image"].shape == (64, 3, 16, 24) and whole.shape[2:] == (18, 27)
    places = set()
    for image, stored in zip(found["image"], whole, strict=True):
        cuts = {(y, x): stored[:, y : y + 16, x : x + 24] for y in range(3) for x in range(4)}
        hits = [
            (place, flip) for place, cut in cuts.items() for flip in (0, 1) if torch.equal(cut.flip(-1) if flip else cut, image)
        ]
        assert len(hits) == 1
        places.add(hits[0])
    assert {place for place, _ in places} == {(y, x) for y in range(3) for x in range(4)} and {flip for _, flip in places} == {
        0,
        1,
    }
    held = source(train=False, crop="random", size=16, width=24)
    assert torch.equal(held.pick(np.arange(1))[0], to_float(torch.from_numpy(held.arrays["image"][:1, 1:17, 1:25])))


def test_samples_do_not_depend_on_batch_size():
    made = source(flip=True, crop="random")
    whole, parts = batch(made, 0, 48), batch(made, 0, 48, parts=3)
    late = batch(made, 32, 16)
    for name, value in whole.items():
        assert torch.equal(value, parts[name]) and torch.equal(value[32:], late[name])


# ---- noise and time ------------------------------------------------------------------------------------------------------


def flows(index: torch.Tensor, times: TimeDistribution = LAWS[1], seed: int = 1) -> dict[str, torch.Tensor]:
    image = torch.linspace(-1, 1, 48).view(1, 3, 4, 4).expand(len(index), 3, 4, 4)
    return flow_batch(image, torch.zeros_like(index), index, seed, times)


def test_flow_batch_lies_on_the_line_from_noise_to_image():
    index = torch.arange(128)
    found = flows(index)
    image = torch.linspace(-1, 1, 48).view(1, 3, 4, 4)
    noise = draw_noise(index, 1, (3, 4, 4))
    time = found["time"][:, None, None, None]
    assert torch.equal(found["velocity"], image - noise)
    torch.testing.assert_close(found["input"], (1 - time) * noise + time * image)
    assert set(found) == {"input", "time", "class", "velocity"} and found["time"].dtype == torch.float32


@pytest.mark.parametrize("times", [*LAWS, TimeDistribution("logit-normal", strata=64)])
def test_flow_batch_does_not_depend_on_its_neighbours(times: TimeDistribution):
    whole = flows(torch.arange(64), times)
    ranks = [flows(torch.arange(start, start + 16), times) for start in range(0, 64, 16)]
    split = {name: torch.cat([rank[name] for rank in ranks]) for name in whole}
    # A logarithm, a cosine or a logistic function may round otherwise at the end of a vector register.
    for name in whole:
        assert_close_in_float(whole[name], split[name], NOISED_TERMS)
    assert len(torch.unique(whole["input"].flatten(1), dim=0)) == 64, "two samples share their noise"


def test_seed_changes_noise_and_times():
    a, b = flows(torch.arange(64), seed=1), flows(torch.arange(64), seed=2)
    assert not torch.isclose(a["time"], b["time"]).any() and (a["velocity"] != b["velocity"]).float().mean() > 0.99


def test_noise_is_normal():
    noise = draw_noise(torch.arange(4000), 3, (3, 4, 4)).double()
    assert abs(noise.mean()) < 0.01 and abs(noise.var() - 1) < 0.01
    pairs = torch.corrcoef(noise.flatten(1).T) - torch.eye(48, dtype=torch.float64)
    assert pairs.abs().max() < 5 / math.sqrt(4000)


@pytest.mark.parametrize("strata", [0, 200])
@pytest.mark.parametrize("times", LAWS)
def test_times_follow_their_distribution(times: TimeDistribution, strata: int):
    times = TimeDistribution(times.kind, times.mean, times.std, strata)
    time = draw_time(torch.arange(20_000), 1, times).double().sort().values
    at = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    share = time if times.kind == "uniform" else torch.special.ndtr((torch.logit(time) - times.mean) / times.std)
    # Kolmogorov and Smirnov: independent draws are farther away once in a thousand times, strata never come near.
    assert (share - at).abs().max() < (0.001 if strata else 1.95 / math.sqrt(20_000))
    assert time[0] >= 0 and time[-1] <= 1


@pytest.mark.parametrize("size", [1, 7, 64, 96, 256])
def test_times_are_stratified_over_a_step_and_within_ranks(size: int):
    for step in (0, 5):
        time = draw_time(torch.arange(step * size, (step + 1) * size), 1, TimeDistribution(strata=size))
        assert torch.equal((time * size).floor().clamp(max=size - 1).sort().values, torch.arange(size, dtype=torch.float32))
        for rank in time.chunk(8) if size >= 64 else ():
            assert rank.min() < 0.3 and rank.max() > 0.7
    orders = [
        draw_time(torch.arange(s * size, (s + 1) * size), 1, TimeDistribution(strata=size)).argsort().tolist() for s in range(6)
    ]
    assert size == 1 or len({tuple(order) for order in orders}) > 1, "every step pairs places and times alike"


def test_class_dropout_is_independent_per_item():
    index, classes = torch.arange(10_000), torch.arange(10_000) % 10
    dropped = drop_class(classes, index, 1, 0.1, 10)
    gone = dropped == 10
    assert torch.equal(dropped[~gone], classes[~gone]) and abs(gone.double().mean() - 0.1) < 0.01
    counts = gone.view(100, 100).sum(1).double()
    assert 2 < counts.std() < 4.2, "the shares of batches must spread like a binomial's"
    assert torch.equal(drop_class(classes, index, 1, 0.0, 10), classes)
    times = draw_time(index, 1, TimeDistribution())
    assert abs(times[gone].mean() - 0.5) < 0.04, "dropout and time must not share their draws"
