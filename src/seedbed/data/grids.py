"""Grids of images as PNG, and several grids side by side with titles. N images, H W pixels."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

MARGIN, PAPER, INK = 2, (255, 255, 255), (40, 40, 40)
LABEL_HEIGHT, LABEL_SIZE = 14, 11
# Small images are enlarged to about this, pixel by pixel.
SHOWN = 48


def tile(images_NHWC: np.ndarray, columns: int, names: Sequence[str] = ()) -> Image.Image:
    """Images row by row, with a margin; the last row may be short. Of equal `names` in a row the first is written below."""
    num, height, width, _ = images_NHWC.shape
    font, words = ImageFont.load_default(LABEL_SIZE), [name.replace("_", " ").split()[:2] for name in names]
    widest = max((math.ceil(font.getlength(word)) for lines in words for word in lines), default=0)
    factor = max(1, SHOWN // max(height, width), round(widest / width))
    images = images_NHWC.repeat(factor, axis=1).repeat(factor, axis=2)
    step_y = height * factor + MARGIN + LABEL_HEIGHT * max(map(len, words), default=0)
    step_x = max(width * factor, widest) + MARGIN
    rows = -(-num // columns)
    page = Image.new("RGB", (columns * step_x + MARGIN, rows * step_y + MARGIN), PAPER)
    draw = ImageDraw.Draw(page)
    for n, image in enumerate(images):
        x, y = MARGIN + n % columns * step_x, MARGIN + n // columns * step_y
        page.paste(Image.fromarray(image), (x, y))
        if words and (n % columns == 0 or words[n] != words[n - 1]):
            draw.multiline_text((x, y + height * factor), "\n".join(words[n]), fill=INK, font=font, spacing=1)
    return page


def beside(panels: Sequence[tuple[str, Image.Image]]) -> Image.Image:
    """Panels from left to right, each under its title."""
    height = LABEL_HEIGHT + max(panel.height for _, panel in panels)
    page = Image.new("RGB", (sum(panel.width for _, panel in panels) + 4 * MARGIN * (len(panels) - 1), height), PAPER)
    draw, font, x = ImageDraw.Draw(page), ImageFont.load_default(LABEL_SIZE), 0
    for title, panel in panels:
        draw.text((x + MARGIN, 1), title, fill=INK, font=font)
        page.paste(panel, (x, LABEL_HEIGHT))
        x += panel.width + 4 * MARGIN
    return page


def save(page: Image.Image, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    page.save(path, format="PNG")
    return path
