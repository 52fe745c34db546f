"""Strips and films of dreams: the memory, the truth above, the dream below; and the examination when a run has ended.

Shape suffixes: N pictures, H W pixels, T frames.
"""

from __future__ import annotations

import contextlib
import fractions
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from seedbed.data import grids
from seedbed.recipes.world.data import WindowsOfPlay
from seedbed.recipes.world.evaluate import Walk, free_run
from seedbed.recipes.world.examine import examine, horizons, one_walk, table
from seedbed.recipes.world.memory import to_bytes
from seedbed.recipes.world.metrics import psnr
from seedbed.train.system import Request, Sample

if TYPE_CHECKING:
    from seedbed.recipes.world.emulator import Emulator
    from seedbed.train.engine import Engine

OPTIONS: dict[str, Any] = {"num": 3, "steps": 64, "examine": None}
# Frames of a walk that a strip shows, and how large a picture of a film is at least.
SHOWN = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
FILM_SIDE, FILM_RATE = 128, 15
LABEL = 12


@torch.no_grad()
def show(system: Emulator, request: Request, engine: Engine) -> Sample:
    """Some walks as strips and one film; with `--examine N`, or when training has ended, the whole battery too."""
    options = request.read(**OPTIONS)
    source = system.data.valid
    assert isinstance(source, WindowsOfPlay)
    steps = min(int(options["steps"]), max(horizons(system, source)))
    walk = one_walk(system, source, int(options["num"]), steps)
    dreams = [frame for _, frame in free_run(system, walk, walk.frames_BTCHW.shape[1] - walk.before)]
    request.folder.mkdir(parents=True, exist_ok=True)
    files = [grids.save(strips(system, walk, dreams), request.folder / "strips.png")]
    files += films(walk, dreams, request.folder)
    near = {h: psnr(dreams[h - 1], walk.target(h)).mean().item() for h in (1, 4, 16, 64) if h <= len(dreams)}
    text = f"{len(walk.start_B)} walks of {len(dreams)} frames: " + ", ".join(f"{v:.1f} dB at {h}" for h, v in near.items())
    has_ended = not request.options and float(engine.progress) >= 1.0
    num = int(options["examine"] or (system.config.data.examined if has_ended else 0))
    if num:
        found = examine(system, source, request.folder, num)
        text, files = f"{table(found)}\n{text}", [*files, request.folder / "examination.md"]
        system.judge.latest |= {"standing_alarm": float(found["standing"]["alarm"])}
    if request.write:
        request.write(text + "\n")
    return Sample(text=text, files=tuple(files), facts={f"psnr_{h}": round(v, 3) for h, v in near.items()})


def strips(system: Emulator, walk: Walk, dreams: Sequence[torch.Tensor]) -> Image.Image:
    """For each walk: every remembered frame as it is packed, then the truth above the dream at some steps."""
    marks = [step for step in SHOWN if step <= len(dreams)]
    pages = []
    for n in range(len(walk.start_B)):
        real = np.stack([_picture(walk.target(step)[n]) for step in marks])
        dreamed = np.stack([_picture(dreams[step - 1][n]) for step in marks])
        both = grids.tile(np.concatenate((real, dreamed)), len(marks))
        remembered = _memory(system, walk, n, both.height)
        title = "truth above, dream below, after " + " ".join(map(str, marks)) + " frames"
        pages.append(grids.beside([("memory", remembered), (title, both)]))
    page = Image.new("RGB", (max(p.width for p in pages), sum(p.height for p in pages)), grids.PAPER)
    top = 0
    for one in pages:
        page.paste(one, (0, top))
        top += one.height
    return page


def _memory(system: Emulator, walk: Walk, n: int, height: int) -> Image.Image:
    """The memory of a walk, each scale on lines of its own, every frame enlarged to the same size."""
    memory, lines = walk.memory(system), []
    side = max(8, height // 2 - 2 * grids.MARGIN) if len(system.layout.scales) == 1 else 24
    for kept in memory.kept.values():
        frames = to_bytes(kept[n].unflatten(0, (-1, 3))).cpu().numpy()
        wide = side * frames.shape[2] // frames.shape[1]
        lines += [np.asarray(Image.fromarray(f).resize((wide, side), Image.Resampling.NEAREST)) for f in frames]
    return grids.tile(np.stack(lines), 2 if len(system.layout.scales) == 1 else 10)


def _picture(frame: torch.Tensor) -> np.ndarray:
    return to_bytes(frame).cpu().numpy()


def films(walk: Walk, dreams: Sequence[torch.Tensor], folder: Path) -> list[Path]:
    """Truth and dream side by side: a gif always, an mp4 where `av` is installed."""
    pages = [_page(walk, dreams, step) for step in range(1, len(dreams) + 1)]
    path = folder / "film.gif"
    pages[0].save(path, save_all=True, append_images=pages[1:], duration=1000 // FILM_RATE, loop=0)
    with contextlib.suppress(ImportError):
        return [path, _mp4(pages, folder / "film.mp4")]
    return [path]


def _page(walk: Walk, dreams: Sequence[torch.Tensor], step: int) -> Image.Image:
    rows = [np.concatenate((_picture(walk.target(step)[n]), _picture(dreams[step - 1][n])), 1) for n in range(len(walk.start_B))]
    picture = np.concatenate(rows, 0)
    factor = max(1, FILM_SIDE // walk.frames_BTCHW.shape[-2])
    page = Image.fromarray(picture.repeat(factor, 0).repeat(factor, 1))
    # Video formats want even sides.
    framed = Image.new("RGB", (page.width + page.width % 2, page.height + LABEL + (page.height + LABEL) % 2), grids.PAPER)
    framed.paste(page, (0, LABEL))
    words = f"truth | dream, frame {step}"
    ImageDraw.Draw(framed).text((2, 0), words, fill=grids.INK, font=ImageFont.load_default(10))
    return framed


def _mp4(pages: Sequence[Image.Image], path: Path) -> Path:
    import av

    with av.open(str(path), "w") as out:
        stream: Any = out.add_stream("libx264", rate=fractions.Fraction(FILM_RATE), options={"crf": "18"})
        stream.width, stream.height, stream.pix_fmt = *pages[0].size, "yuv420p"
        for page in pages:
            out.mux(stream.encode(av.VideoFrame.from_image(page)))
        out.mux(stream.encode())
    return path
