"""The full evaluation of a trained flow model: its samples over several seeds, without guidance, and the baselines.

N images, C channels, H W pixels.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from seedbed.cache import cache_folder
from seedbed.recipes.flow.classifier import open_classifier
from seedbed.recipes.flow.evaluate import COLUMNS, evaluate_samples, markdown
from seedbed.recipes.flow.sampling import Sampling, generate

if TYPE_CHECKING:
    from seedbed.recipes.flow.system import Flow

NUM_SEEDS = 3
# Columns whose spread over seeds is reported.
SPREAD = ("fd", "kid", "precision", "recall", "accuracy", "right")


def full_evaluation(
    system: Flow, sampling: Sampling, seed: int, classes_N: Tensor, say: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """A table of plain values: samples with baselines, samples without guidance, and the spread over seeds."""
    data, device = system.data, system.model.enter.weight.device
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        classifier = open_classifier(data, cache_folder(system.config.data.cache) / "classifiers", device, say=say)

    def scored(how: Sampling, number: int, baselines: bool) -> dict[str, Any]:
        say(f"sampling {len(classes_N):,} images: {how}, seed {number}")
        images_NCHW = generate(system.model, classes_N, how, number)
        with torch.autocast(device.type, enabled=False):
            return evaluate_samples(
                images_NCHW, classes_N, data, classifier, baselines=baselines, patch=system.config.model.patch if baselines else 0
            )

    start = time.perf_counter()
    generate(system.model, classes_N[:1000], sampling, seed)[0, 0, 0, 0].item()
    seconds = 1000 * (time.perf_counter() - start) / len(classes_N[:1000])
    seeds = list(range(seed, seed + NUM_SEEDS))
    table = scored(sampling, seeds[0], baselines=True)
    others = [scored(sampling, number, baselines=False)["rows"]["samples"] for number in seeds[1:]]
    plain = scored(replace(sampling, guidance=1.0), seed, baselines=False)["rows"]["samples"]
    first, rest = table["rows"]["samples"], {k: v for k, v in table["rows"].items() if k != "samples"}
    table["rows"] = {"samples": first, "samples, guidance 1": plain, **rest}
    table["seeds"], table["spread"] = seeds, {name: _spread([first, *others], name) for name in SPREAD if name in first}
    table["sampling"], table["seconds_per_1000"] = str(sampling), seconds
    return table


def _spread(rows: list[dict[str, float]], name: str) -> tuple[float, float]:
    """Mean and standard deviation over seeds."""
    values = [row[name] for row in rows]
    return statistics.fmean(values), statistics.stdev(values)


def words(table: dict[str, Any], horizon: str) -> str:
    """The evaluation as text: the sampling settings, the table, and the spread over seeds."""
    seeds = table["seeds"]
    spread = ", ".join(
        f"{COLUMNS[name][0]} {mean:.{COLUMNS[name][1]}f} ± {std:.{COLUMNS[name][1]}f}"
        for name, (mean, std) in table["spread"].items()
    )
    return (
        f"Samples: {table['sampling']}, {horizon} average of the weights, {table['seconds_per_1000']:.1f} s per 1,000 images; "
        f"the table shows seed {seeds[0]}.\n\n{markdown(table)}\nOver seeds {seeds[0]} to {seeds[-1]}: {spread}.\n"
    )


def write(table: dict[str, Any], text: str, folder: Path) -> tuple[Path, Path]:
    """Write the evaluation as Markdown and as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "full_evaluation.md", folder / "full_evaluation.json"
    paths[0].write_text(text)
    paths[1].write_text(json.dumps(table, indent=1) + "\n")
    return paths
