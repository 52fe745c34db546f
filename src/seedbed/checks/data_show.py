"""data show: a training batch as the model receives it: shapes, dtypes, ranges, decoded rows and images."""

import contextlib
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from seedbed import config as configs
from seedbed.checks.subject import num_rows
from seedbed.data.feed import Feed
from seedbed.data.order import Order
from seedbed.recipes import find
from seedbed.track.run import full_name
from seedbed.track.text import number, safe
from seedbed.train import capabilities
from seedbed.train.stepper import build
from seedbed.train.system import Batch, System

MIN_SIDE = 8
NUM_TILES = 16


def show(name: str, assignments: list[str], *, folder: Path, batch_number: int = 0, num: int = 4, as_json: bool = False) -> int:
    """Prints and draws training batch `batch_number` and its first `num` rows, through the path that training uses."""
    recipe, preset = find(name)
    config = configs.override(recipe.preset(preset), [*assignments, "device=cpu"])
    data = recipe.open_data(config)
    engine = build(recipe, config, data)
    first = batch_number * config.batch
    with contextlib.closing(Feed(data.train, batch=config.batch, parts=1, seed=config.seed, device=engine.device)) as feed:
        feed.load(first)
        batch = feed.part(0)
    entries = [facts(key, value) for key, value in batch.items()]
    items = Order(data.train.num_items, config.seed).at(first, config.batch)[1].tolist() if data.train.arrays else []
    rows = decode(engine.system, batch, range(min(num, num_rows(batch))))
    pictures = [str(draw(key, value, folder)) for key, value in batch.items() if images(value) is not None]
    title = f"batch {batch_number} of {full_name(recipe.name, preset or '')}: samples {first} to {first + config.batch - 1}"
    if as_json:
        print(json.dumps({"title": title, "entries": entries, "items": items, "rows": rows, "pictures": pictures}))
        return 0
    out = Console(highlight=False, emoji=False)
    out.print(f"[bold]{escape(title)}[/], {feed.describe()}", soft_wrap=True)
    out.print(_table(entries))
    for row, text in enumerate(rows):
        out.print(f"  row {row}{f', item {items[row]}' if items else ''}: {escape(safe(text))}", soft_wrap=True)
    for path in pictures:
        out.print(f"  picture {path}", soft_wrap=True)
    return 0


def facts(key: str, value: Tensor) -> dict[str, Any]:
    """Statistics of an entry; non-finite values are counted and excluded from the rest."""
    wide = value.detach().double().flatten()
    good = wide[torch.isfinite(wide)]
    numbers = {"low": good.min(), "high": good.max(), "mean": good.mean(), "std": good.std(correction=0)} if len(good) else {}
    return {
        "name": key,
        "shape": list(value.shape),
        "dtype": str(value.dtype).removeprefix("torch."),
        **{name: float(numbers[name]) if numbers else None for name in ("low", "high", "mean", "std")},
        "distinct": len(torch.unique(good)),
        "not_finite": len(wide) - len(good),
    }


def _table(entries: list[dict[str, Any]]) -> Table:
    table = Table(*("entry", "shape", "dtype", "low", "high", "mean", "std", "distinct", "bad"), box=None)
    for e in entries:
        numbers = [number(e[k]) if e[k] is not None else "" for k in ("low", "high", "mean", "std")]
        shape = " x ".join(map(str, e["shape"])) or "scalar"
        bad = str(e["not_finite"] or "")
        table.add_row(e["name"], shape, e["dtype"], *numbers, f"{e['distinct']:,}", bad, style="red" if bad else "")
    return table


def decode(system: System, batch: Batch, rows: Iterable[int]) -> list[str]:
    """Rows, decoded by the recipe or as numbers."""
    with torch.no_grad():
        probe = capabilities.probe(system.eval(), batch)
    if probe and probe.decode and probe.inputs:
        return [repr(probe.decode(probe.batch[probe.inputs][row].detach().cpu())) for row in rows]
    return [as_numbers(batch, row) for row in rows]


def as_numbers(batch: Batch, row: int) -> str:
    """The first numbers of every entry of a row."""
    whole = {k: v for k, v in batch.items() if v.ndim and len(v) == num_rows(batch) and k != "index"}
    return " ".join(f"{k}={_numbers(v[row])}" for k, v in whole.items())


def _numbers(value: Tensor, most: int = 6) -> str:
    shown = ", ".join(f"{x:.4g}" for x in value.flatten()[:most].tolist())
    return f"[{shown}{', ...' if value.numel() > most else ''}]" if value.ndim else shown


def images(value: Tensor) -> np.ndarray | None:
    """(N, height, width, channels) bytes when an entry looks like images: two long sides and 1 or 3 channels."""
    if value.ndim == 3 and min(value.shape[1:]) >= MIN_SIDE and value.dtype != torch.int64:
        value = value[..., None]
    if value.ndim == 5:
        value = value.flatten(0, 1)
    if value.ndim != 4:
        return None
    if value.shape[1] in (1, 3) and min(value.shape[2:]) >= MIN_SIDE:
        value = value.movedim(1, -1)
    if value.shape[-1] not in (1, 3) or min(value.shape[1:3]) < MIN_SIDE:
        return None
    value = value[:NUM_TILES]
    if value.dtype == torch.uint8:
        return value.numpy()
    x = torch.nan_to_num(value.detach().double())
    low, high = float(x.min()), float(x.max())
    return ((x - low) / max(high - low, 1e-12) * 255).round().byte().numpy()


def draw(key: str, value: Tensor, folder: Path) -> Path:
    """Draws the first images of an entry side by side, scaled from its minimum to its maximum."""
    from PIL import Image

    tiles = images(value)
    assert tiles is not None
    columns = math.ceil(math.sqrt(len(tiles)))
    rows = -(-len(tiles) // columns)
    num, height, width, channels = tiles.shape
    grid = np.pad(tiles, ((0, rows * columns - num), (0, 0), (0, 0), (0, 0))).reshape(rows, columns, height, width, channels)
    sheet = grid.swapaxes(1, 2).reshape(rows * height, columns * width, channels)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{key}.png"
    Image.fromarray(sheet[..., 0] if channels == 1 else sheet).save(path)
    return path
