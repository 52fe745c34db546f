"""Checks of definitions: what the code computes against a second, plain implementation, of shared parts and the recipe's own."""

import math
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import torch

from seedbed.checks.calls import places
from seedbed.checks.registry import check, failed, passed, skipped
from seedbed.checks.runner import source_line_of_error
from seedbed.checks.subject import PERTURBATION, Subject, add_noise, source_line, spread
from seedbed.report.findings import Finding
from seedbed.train import capabilities
from seedbed.train.probe import Definition
from seedbed.train.system import System


def difference(found: Any, wanted: Any) -> float:
    """The largest difference of two values or tensors, relative to the mean size of the second; infinite for other shapes."""
    a, b = (torch.as_tensor(np.asarray(x) if isinstance(x, list) else x).detach().double() for x in (found, wanted))
    if a.shape != b.shape:
        return math.inf
    apart = torch.where(a == b, 0.0, (a - b).abs())  # infinities may be equal
    return float(apart.max()) / max(spread(b[b.isfinite()]), 1e-6) if apart.numel() else 0.0


def definitions(subject: Subject, place: str) -> Iterator[Definition]:
    """Those of a place, of shared parts and of the recipe's own: a system in evaluation mode with noise on its weights."""
    from seedbed.checks.definitions import SHARED

    system = subject.once("system of definitions", lambda: _system(subject)).eval()
    probe = capabilities.probe(system, subject.batch())
    own = probe.definitions if probe is not None and probe.definitions else {}
    yield from SHARED[place](subject, system) if place in SHARED else ()
    yield from own[place]() if place in own else ()


def _system(subject: Subject) -> System:
    system = subject.fresh_system().eval()
    add_noise(system, PERTURBATION)  # outputs that start at zero would hide what leads to them
    return system


def _compared(subject: Subject, place: str) -> Finding:
    num, worst, why = 0, 0.0, "the code does not compute what it says: results are worse, or not what they are called"
    try:
        for one in definitions(subject, place):
            apart, num = difference(one.found, one.wanted), num + 1
            worst = max(worst, apart / one.limit)
            if not apart <= one.limit:
                what = f"{one.what}: {_shown(one.found, one.wanted)}"
                where = places(source_line(function) for function in (one.code if isinstance(one.code, tuple) else (one.code,)))
                fix = "compare the function with its formula; where the formula was changed on purpose, change its definition too"
                return failed(what, where=where, why=why, fix=fix, value=apart, limit=one.limit)
    except Exception as error:
        if "definitions.py:" not in source_line_of_error(error):
            raise
        return skipped(f"a definition does not fit this config: {type(error).__name__}: {error}"[:200])
    return (
        passed(f"{num} agree with their definitions; largest share of what is allowed", worst, 1.0)
        if num
        else skipped("the recipe declares no definitions")
    )


def _shown(found: Any, wanted: Any) -> str:
    """The first pair of values that differ most, or the shapes."""
    a, b = (torch.as_tensor(np.asarray(x) if isinstance(x, list) else x).detach().double() for x in (found, wanted))
    if a.shape != b.shape:
        return f"{tuple(a.shape)} values, by definition {tuple(b.shape)}"
    at = torch.where(a == b, 0.0, (a - b).abs()).flatten().nan_to_num(math.inf).argmax()
    return f"{a.flatten()[at]:.4g}, by definition {b.flatten()[at]:.4g}"


@check("D9", "data formulas", "err", humbatova=(1, 3))
def data_formulas(subject: Subject) -> Finding:
    """Random numbers, items and splits are those of their definitions."""
    return _compared(subject, "data")


@check("M10", "layer formulas", "err", humbatova=(4, 5, 14))
def layer_formulas(subject: Subject) -> Finding:
    """Layers, and how a model joins them, give what a plain implementation of them gives."""
    return _compared(subject, "model")


@check("L7", "loss formulas", "err", humbatova=(9,))
def loss_formulas(subject: Subject) -> Finding:
    """Losses, their weights, noise and times, and the stages of training, are those of their definitions."""
    return _compared(subject, "objective")


@check("O8", "optimizer step", "err", humbatova=(12,))
def optimizer_step(subject: Subject) -> Finding:
    """Three steps on random gradients move weights as the formula of the optimizer does in float64."""
    return _compared(subject, "optimizer")


@check("V9", "metric formulas", "err", humbatova=(11,))
def metric_formulas(subject: Subject) -> Finding:
    """With known predictions, evaluation reports the numbers that follow from them."""
    return _compared(subject, "evaluation")


@check("I9", "sampling formulas", "err", humbatova=(10, 11))
def sampling_formulas(subject: Subject) -> Finding:
    """What generation reads, draws and writes is what its options say."""
    return _compared(subject, "inference")
