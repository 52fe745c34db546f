"""Sheets of images: where labels stand, and that the images below them are whole."""

import numpy as np
from PIL import Image

from seedbed.data import grids

NUM, SIDE = 10, 16


def images(side: int = SIDE) -> np.ndarray:
    return np.random.default_rng(0).integers(60, 200, (NUM, side, side, 3)).astype(np.uint8)


def found(page: Image.Image, shown: np.ndarray, step: tuple[int, int], n: int, columns: int) -> bool:
    """Whether image n is where its row and column say, pixel by pixel."""
    factor = (step[0] - grids.MARGIN) // shown.shape[1]
    y, x = grids.MARGIN + n // columns * step[0], grids.MARGIN + n % columns * step[1]
    part = np.asarray(page)[y : y + shown.shape[1] * factor : factor, x : x + shown.shape[2] * factor : factor]
    return np.array_equal(part, shown[n])


def is_labelled(page: Image.Image, n: int, columns: int, step: tuple[int, int]) -> bool:
    """Whether there is ink below image n."""
    y, x = grids.MARGIN + n // columns * step[0], grids.MARGIN + n % columns * step[1]
    below = np.asarray(page)[y + grids.SHOWN + 1 : y + step[0] - 1, x : x + step[1] - grids.MARGIN]
    return bool((below < 128).any())


def test_sheet_without_names_is_the_images_alone():
    page, step = grids.tile(images(), 4), (grids.SHOWN + grids.MARGIN,) * 2
    assert page.size == (4 * step[1] + grids.MARGIN, 3 * step[0] + grids.MARGIN)
    assert all(found(page, images(), step, n, 4) for n in range(NUM))


def test_names_are_written_once_per_row_and_class():
    names = ["red disc"] * 6 + ["blue disc"] * 4
    page = grids.tile(images(), 4, names)
    step = (grids.SHOWN + 2 * grids.LABEL_HEIGHT + grids.MARGIN, grids.SHOWN + grids.MARGIN)
    assert page.size == (4 * step[1] + grids.MARGIN, 3 * step[0] + grids.MARGIN)
    assert [n for n in range(NUM) if is_labelled(page, n, 4, step)] == [0, 4, 6, 8]


def test_long_names_enlarge_small_images():
    plain, named = grids.tile(images(32), 4), grids.tile(images(32), 4, ["automobile"] * NUM)
    assert plain.width == 4 * (32 + grids.MARGIN) + grids.MARGIN
    assert named.width == 4 * (64 + grids.MARGIN) + grids.MARGIN, "twice as large, and the name fits below"
