"""Output of `seedbed sample` for a flow run: grids of images, the exact score of shapes, and the full evaluation.

N images, C channels, H W pixels.
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from seedbed.data import grids
from seedbed.data.image_source import ImageData, to_bytes
from seedbed.data.shapes import score_shapes
from seedbed.errors import UserError
from seedbed.recipes.flow.evaluate import full_evaluation, words, write
from seedbed.recipes.flow.sampling import Sampling, generate
from seedbed.train.engine import EvalEngine
from seedbed.train.system import Request, Sample, option

if TYPE_CHECKING:
    from seedbed.recipes.flow.system import Flow

GUIDANCE = 2.0
# Samples during training: enough to look at, and for shapes enough to score.
NUM_WHILE_TRAINING, STEPS_WHILE_TRAINING = 96, 12
# Seconds of a fast GPU, some more on a CPU.
MAX_FLOPS = {"cuda": 1e15, "cpu": 1e12}
NUM_ASKED = 64
MAX_SHOWN = 256


@dataclass(frozen=True)
class SampleOptions:
    """Options of `seedbed sample`; None is decided by what the model can do."""

    class_: str = option("all", "what the images show: a class by name or number, or all")
    grid: str | None = option(None, "number of images and their layout, as ROWSxCOLUMNS")
    num: int | None = option(None, "number of images", low=1)
    guidance: float | None = option(None, "1 is the model as trained, 2 moves images towards their class", low=0)
    interval: str = option("0,1", "times between which guidance acts, from 0 (noise) to 1, as LOW,HIGH")
    steps: int = option(24, "steps from noise to image", low=1)
    shift: float = option(1.0, "above 1: more steps near the noise", low=0)
    sampler: str = option("heun", "euler, heun or midpoint")
    seed: int = option(1, "the same seed gives the same samples", low=0)
    ema: str = option("short", "short or long: which average of the weights")
    examine: int | None = option(None, "the full evaluation on N samples", low=1, needs_data=True)


def show(system: Flow, request: Request, engine: EvalEngine) -> Sample:
    """Images of the wanted classes as one PNG, next to real ones of the same classes."""
    options, name = request.read(SampleOptions), "grid.png"
    if not request.options:
        if system.data.facts["name"].startswith("random:"):
            return Sample()  # noise has nothing to show
        options = replace(options, steps=STEPS_WHILE_TRAINING, num=_affordable(system))
    sampling, (num, columns) = _sampling(system, options), _layout(options)
    classes_N = _classes(options.class_, num, system.data)
    if request.options:
        asked = options.class_.replace(" ", "-").replace("/", "-")
        name = f"{asked}-{options.sampler}{options.steps}-w{sampling.guidance:g}-seed{options.seed}.png"
    with _weights(engine, options.ema):
        images_NCHW = generate(system.model, classes_N, sampling, options.seed)
        path = grids.save(_beside_real(system.data, images_NCHW, classes_N, columns), request.folder / name)
        if options.examine:
            return _full_evaluation(system, request, sampling, options, path)
    facts = {"sampling": str(sampling), "seed": options.seed, "num": num}
    text = f"{num} images, {sampling}, seed {options.seed}"
    if system.data.facts["name"] == "shapes":
        facts |= {name: round(value, 4) for name, value in score_shapes(images_NCHW, classes_N).items()}
        text += (
            f"\nright shape and colour {facts['right']:.1%} (shape {facts['shape']:.1%}, colour {facts['colour']:.1%}), "
            f"IoU >= 0.8 {facts['iou80']:.1%}, mean IoU {facts['iou']:.3f}"
        )
    if request.write:
        request.write(text + "\n")
    return Sample(text=text, files=(path,), facts=facts)


def _full_evaluation(system: Flow, request: Request, sampling: Sampling, options: SampleOptions, grid: Path) -> Sample:
    """The full evaluation on `--examine` samples, in the run's folder as text and JSON."""
    say = request.write or (lambda text: None)
    classes_N = _classes("all", options.examine or 0, system.data)
    table = full_evaluation(system, sampling, options.seed, classes_N, say=lambda line: say(f"{line}\n"))
    text = words(table, options.ema)
    say(text)
    return Sample(text=text, files=(grid, *write(table, text, request.folder)), facts={"sampling": str(sampling)})


def _weights(engine: EvalEngine, horizon: str) -> Any:
    """A context with the longer average of the weights; the shorter one is in place already."""
    if horizon not in ("short", "long"):
        raise UserError(f"--ema {horizon} is not short or long")
    if horizon == "short":
        return contextlib.nullcontext()
    if not engine.ema2:
        raise UserError("this run kept no longer average of its weights; train one with ema2=0.9999")
    return engine.ema2.swapped_in()


def _sampling(system: Flow, options: SampleOptions) -> Sampling:
    guidance = (GUIDANCE if system.config.model.drop else 1.0) if options.guidance is None else options.guidance
    try:
        low, high = (float(part) for part in options.interval.split(","))
    except ValueError:
        raise UserError(f"--interval {options.interval} is not two times such as 0.1,0.9") from None
    return Sampling(options.sampler, options.steps, guidance, (low, high), options.shift)


def _affordable(system: Flow) -> int:
    """The number of images to sample during training: fewer where one is expensive."""
    model = system.model
    calls = 2 * STEPS_WHILE_TRAINING * (2 if system.config.model.drop else 1)
    budget = MAX_FLOPS["cuda" if model.enter.weight.is_cuda else "cpu"]
    return max(2, min(NUM_WHILE_TRAINING, int(budget / (calls * model.forward_flops()))))


def _layout(options: SampleOptions) -> tuple[int, int]:
    """How many images, and how many in a row."""
    if options.grid is None:
        return options.num or NUM_ASKED, 8
    try:
        rows, columns = (int(part) for part in options.grid.lower().split("x"))
    except ValueError:
        rows = columns = 0
    if rows < 1 or columns < 1:
        raise UserError(f"--grid {options.grid} is not ROWSxCOLUMNS, such as 8x8")
    return rows * columns, columns


def _classes(asked: str, num: int, data: ImageData) -> Tensor:
    """The class of each image: one by name or number, or all of them in turn, in equal shares."""
    if asked == "all":
        return torch.arange(num) * data.num_classes // num if num >= data.num_classes else torch.arange(num)
    names = {name: i for i, name in enumerate(data.class_names)}
    if asked in names:
        return torch.full((num,), names[asked])
    if asked.isdigit() and int(asked) < data.num_classes:
        return torch.full((num,), int(asked))
    near = difflib.get_close_matches(asked, names, 3, 0.4) or list(names)[:6]
    raise UserError(f"there is no class {asked!r}; nearest: {', '.join(near)}; or `all`, or a number below {data.num_classes}")


def _beside_real(data: ImageData, images_NCHW: Tensor, classes_N: Tensor, columns: int) -> Image.Image:
    """Real images of the same classes on the left, generated ones on the right."""
    shown = slice(0, MAX_SHOWN) if len(images_NCHW) <= MAX_SHOWN else slice(0, len(images_NCHW), len(images_NCHW) // MAX_SHOWN)
    sides = [("real", _real(data, classes_N[shown])), ("generated", images_NCHW[shown])]
    names = [data.class_names[c] for c in classes_N[shown].tolist()]
    return grids.beside([(title, grids.tile(to_bytes(x[:, :3]).cpu().numpy(), columns, names)) for title, x in sides])


def _real(data: ImageData, classes_N: Tensor) -> Tensor:
    """Held-out images of these classes, without repetition while there are enough; any other where a class has none."""
    class_M = np.asarray(data.valid.arrays["class"])
    turns: dict[int, Iterator[int]] = {}
    for c in set(classes_N.tolist()):
        turns[c] = itertools.cycle(np.flatnonzero(class_M == c).tolist() or [c % len(class_M)])
    rows = [next(turns[c]) for c in classes_N.tolist()]
    return data.valid.pick(np.array(rows))[0]
