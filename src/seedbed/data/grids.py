"""Grids of images as PNG, and several grids side by side with titles. N images, H W pixels."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

MARGIN, PAPER, INK = 2, (255, 255, 255), (40, 40, 40)
LABEL_HEIGHT = 14
# Small images are enlarged to about this, pixel by pixel.
SHOWN = 48


def tile(images_NHWC: np.ndarray, columns: int) -> Image.Image:
    """Images row by row, with a margin; the last row may be short."""
    num, height, width, _ = images_NHWC.shape
    factor = max(1, SHOWN // max(height, width))
    images = images_NHWC.repeat(factor, axis=1).repeat(factor, axis=2)
    step_y, step_x = height * factor + MARGIN, width * factor + MARGIN
    rows = -(-num // columns)
    page = np.full((rows * step_y + MARGIN, columns * step_x + MARGIN, 3), PAPER, np.uint8)
    for n, image in enumerate(images):
        y, x = MARGIN + n // columns * step_y, MARGIN + n % columns * step_x
        page[y : y + height * factor, x : x + width * factor] = image
    return Image.fromarray(page)


def beside(panels: Sequence[tuple[str, Image.Image]]) -> Image.Image:
    """Panels from left to right, each under its title."""
    height = LABEL_HEIGHT + max(panel.height for _, panel in panels)
    page = Image.new("RGB", (sum(panel.width for _, panel in panels) + 4 * MARGIN * (len(panels) - 1), height), PAPER)
    draw, font, x = ImageDraw.Draw(page), ImageFont.load_default(10), 0
    for title, panel in panels:
        draw.text((x + MARGIN, 1), title, fill=INK, font=font)
        page.paste(panel, (x, LABEL_HEIGHT))
        x += panel.width + 4 * MARGIN
    return page


def save(page: Image.Image, path: Path) -> Path:
    """Write a PNG, with its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    page.save(path, format="PNG")
    return path
