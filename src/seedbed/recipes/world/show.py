"""Contact sheets and videos of rollouts beside the true frames, and the full evaluation at the end of a run.

Shape suffixes: N pictures, H W pixels, T frames.
"""

import contextlib
import fractions
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from seedbed.data import grids
from seedbed.recipes.world.evaluate import Trajectories, trajectory_batch
from seedbed.recipes.world.examine import examine, horizons, rollout_frames, table
from seedbed.recipes.world.memory import to_bytes
from seedbed.recipes.world.metrics import psnr
from seedbed.train.engine import EvalEngine
from seedbed.train.system import Request, Sample, option

if TYPE_CHECKING:
    from seedbed.recipes.world.emulator import Emulator

# Steps on the contact sheet, and the minimum side of a video frame.
SHOWN = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
VIDEO_SIDE, VIDEO_FPS = 128, 15
LABEL = 12


@dataclass(frozen=True)
class SampleOptions:
    """Options of `seedbed sample`."""

    num: int = option(3, "number of rollouts", low=1)
    steps: int = option(64, "frames of each rollout", low=1)
    examine: int | None = option(None, "the full evaluation on N rollouts", low=1, needs_data=True)


@torch.no_grad()
def show(system: "Emulator", request: Request, engine: EvalEngine) -> Sample:
    """A contact sheet and a video; with `--examine N`, or when training has ended, also the full evaluation."""
    options = request.read(SampleOptions)
    source = system.data.valid
    kept = {name: most for name, most in source.recording.kept.items() if name not in request.options}
    num, steps = min(options.num, kept.get("num", options.num)), min(options.steps, kept.get("steps", options.steps))
    steps = min(steps, max(horizons(system, source)))
    traj = trajectory_batch(system, source, num, steps, source.shown_windows(num, steps))
    with system.long_rollouts():
        rollouts = rollout_frames(system, traj, steps)
    request.folder.mkdir(parents=True, exist_ok=True)
    files = [grids.save(contact_sheet(system, traj, rollouts), request.folder / "rollouts.png")]
    files += videos(traj, rollouts, request.folder)
    near = {h: psnr(rollouts[h - 1], traj.target(h)).mean().item() for h in (1, 4, 16, 64) if h <= len(rollouts)}
    text = f"{len(traj.start_B)} rollouts of {len(rollouts)} frames: " + ", ".join(f"{v:.1f} dB at {h}" for h, v in near.items())
    has_ended = not request.options and float(engine.progress) >= 1.0
    num = int(options.examine or (system.config.data.examined if has_ended else 0))
    if num:
        found = examine(system, source, request.folder, num)
        text, files = f"{table(found)}\n{text}", [*files, request.folder / "examination.md"]
    if request.write:
        request.write(text + "\n")
    return Sample(text=text, files=tuple(files), facts={f"psnr_{h}": round(v, 3) for h, v in near.items()})


def contact_sheet(system: "Emulator", traj: Trajectories, rollouts: Sequence[torch.Tensor]) -> Image.Image:
    """Per trajectory: the memory as it is packed, then true frames above predicted ones at some steps."""
    marks = [step for step in SHOWN if step <= len(rollouts)]
    pages = []
    for n in range(len(traj.start_B)):
        frames = [*(traj.target(step)[n] for step in marks), *(rollouts[step - 1][n] for step in marks)]
        both = grids.tile(to_bytes(torch.stack(frames)).cpu().numpy(), len(marks))
        remembered = _memory(system, traj, n, both.height)
        title = "true above, predicted below, after " + " ".join(map(str, marks)) + " frames"
        pages.append(grids.beside([("memory", remembered), (title, both)]))
    return Image.fromarray(np.concatenate([np.asarray(page) for page in pages]))


def _memory(system: "Emulator", traj: Trajectories, n: int, height: int) -> Image.Image:
    """The memory, one block of rows per scale, every frame enlarged to the same size."""
    memory, lines = traj.memory(system), []
    # Of one scale two columns, as high as the page; of several small ones.
    side, columns = (max(8, height // 2 - 2 * grids.MARGIN), 2) if len(memory.kept) == 1 else (24, 10)
    for kept in memory.kept.values():
        frames = to_bytes(kept[n].unflatten(0, (-1, 3))).cpu().numpy()
        wide = side * frames.shape[2] // frames.shape[1]
        lines += [np.asarray(Image.fromarray(f).resize((wide, side), Image.Resampling.NEAREST)) for f in frames]
    return grids.tile(np.stack(lines), columns)


def videos(traj: Trajectories, rollouts: Sequence[torch.Tensor], folder: Path) -> list[Path]:
    """True and predicted frames side by side: a GIF, and an MP4 where `av` is installed."""
    pages = [_page(traj, rollouts, step) for step in range(1, len(rollouts) + 1)]
    path = folder / "rollout.gif"
    # One palette, of eight frames: a palette of its own takes 30 ms for each.
    few = Image.fromarray(np.concatenate([np.asarray(page) for page in pages[:: max(1, len(pages) // 8)]]))
    palette = few.quantize(256)
    first, *rest = (page.quantize(palette=palette, dither=Image.Dither.NONE) for page in pages)
    first.save(path, save_all=True, append_images=rest, duration=1000 // VIDEO_FPS, loop=0)
    with contextlib.suppress(ImportError):
        return [path, _mp4(pages, folder / "rollout.mp4")]
    return [path]


def _page(traj: Trajectories, rollouts: Sequence[torch.Tensor], step: int) -> Image.Image:
    sides_BHWC = [to_bytes(frames_BCHW).cpu().numpy() for frames_BCHW in (traj.target(step), rollouts[step - 1])]
    picture = np.concatenate([*np.concatenate(sides_BHWC, 2)], 0)
    factor = max(1, VIDEO_SIDE // traj.frames_BTCHW.shape[-2])
    page = Image.fromarray(picture.repeat(factor, 0).repeat(factor, 1))
    # Codecs need even sides; rows that are no multiple of the SIMD width would be encoded with uninitialised memory.
    width = page.width + -page.width % 32
    framed = Image.new("RGB", (width, page.height + LABEL + (page.height + LABEL) % 2), grids.PAPER)
    framed.paste(page, (0, LABEL))
    words = f"true | predicted, frame {step}"
    ImageDraw.Draw(framed).text((2, 0), words, fill=grids.INK, font=ImageFont.load_default(10))
    return framed


def _mp4(pages: Sequence[Image.Image], path: Path) -> Path:
    import av

    with av.open(str(path), "w") as out:
        stream: Any = out.add_stream("libx264", rate=fractions.Fraction(VIDEO_FPS), options={"crf": "18"})
        stream.width, stream.height, stream.pix_fmt = *pages[0].size, "yuv420p"
        for page in pages:
            out.mux(stream.encode(av.VideoFrame.from_image(page)))
        out.mux(stream.encode())
    return path
