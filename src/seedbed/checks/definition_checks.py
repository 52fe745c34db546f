"""Checks of definitions: what code computes against a second, plain implementation, of shared parts and of the recipe's own."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from seedbed.checks.calls import places
from seedbed.checks.registry import check, failed, passed, skipped
from seedbed.checks.runner import source_line_of_error
from seedbed.checks.subject import PERTURBATION, Subject, add_noise, source_line, spread
from seedbed.config import Config, override
from seedbed.errors import UserError
from seedbed.report.findings import Finding
from seedbed.train import capabilities

# Largest difference of two ways to compute one number, relative to its size. Measured in float32: at most 2e-6.
SAME = 1e-4
DEPTH = 4
# Place, id, title, categories and summary of each check.
FAMILY = (
    ("data", "D9", "data formulas", (1, 3), "Random numbers, items and splits are those of their definitions."),
    ("model", "M10", "layer formulas", (4, 5, 14), "Layers, and how they are joined, give what a plain implementation gives."),
    ("objective", "L7", "loss formulas", (9,), "Losses, weights, noise, times and stages are those of their definitions."),
    ("optimizer", "O8", "optimizer step", (12,), "Three steps on random gradients move weights as the formula in float64 does."),
    ("loop", "T8", "loop formulas", (6,), "Incidents, spikes and the best evaluation are judged as they are defined."),
    ("evaluation", "V9", "metric formulas", (11,), "With known predictions, evaluation reports what follows from them."),
    ("inference", "I9", "sample formulas", (10, 11), "Generation and play read, draw and write what they were asked for."),
)  # fmt: skip


def compare(found: Any, wanted: Any) -> tuple[float, str]:
    """The largest difference, relative to the mean size of what is wanted and infinite for other shapes; and where it is."""
    a, b = (torch.as_tensor(np.asarray(x) if isinstance(x, list) else x).detach().double() for x in (found, wanted))
    if a.shape != b.shape:
        return math.inf, f"{tuple(a.shape)} values, by definition {tuple(b.shape)}"
    if not a.numel():
        return 0.0, ""
    apart = torch.where(a == b, 0.0, (a - b).abs()).flatten()  # infinities may be equal
    at = apart.nan_to_num(math.inf).argmax()
    return float(apart[at]) / max(spread(b[b.isfinite()]), 1e-6), f"{a.flatten()[at]:.4g}, by definition {b.flatten()[at]:.4g}"


def definitions(subject: Subject, place: str) -> Iterator[tuple]:
    """Those of a place: of parts that recipes share, and what is declared; in evaluation mode, with noise on the weights."""
    from seedbed.checks.definitions import SHARED

    system = subject.recipe.build(_deeper(subject), subject.data).eval()
    add_noise(system, PERTURBATION)  # outputs that start at zero would hide what leads to them
    yield from SHARED[place](subject, system) if place in SHARED and not subject.unsure else ()  # not of other people's models
    probe = capabilities.probe(system.eval(), subject.batch())
    own = probe.definitions if probe is not None and probe.definitions else {}
    yield from own[place]() if place in own else ()


def _deeper(subject: Subject) -> Config:
    """The small config with up to four layers: fewer do not show in which order something passes over layers."""
    full, small = subject.shrunk.get("model.depth", (0, 0))
    with contextlib.suppress(UserError):
        return override(subject.small, [f"model.depth={max(small, min(full, DEPTH))}"]) if full else subject.small
    return subject.small


def compare_all(subject: Subject, place: str) -> Finding:
    """The first definition that does not hold."""
    num, worst = 0, 0.0
    try:
        for what, code, found, wanted, *limit in definitions(subject, place):
            num, (apart, how), allowed = num + 1, compare(found, wanted), (*limit, SAME)[0]
            worst = max(worst, apart / allowed)
            if not apart <= allowed:
                where = places(source_line(function) for function in (code if isinstance(code, tuple) else (code,)))
                return failed(f"{what}: {how}", where=where, value=apart, limit=allowed)
    except Exception as error:
        if "/definitions.py:" not in source_line_of_error(error):
            raise
        return skipped(f"a definition does not fit this config: {type(error).__name__}: {error}"[:200])
    return passed(f"{num} definitions hold; part of the limit used", worst, 1.0) if num else skipped("nothing is defined here")


for place, id, title, categories, summary in FAMILY:

    @check(id, title, "err", humbatova=categories)
    def run(subject: Subject, place: str = place) -> Finding:
        return compare_all(subject, place)

    run.__doc__ = summary
