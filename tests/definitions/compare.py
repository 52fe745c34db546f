"""All parts of a recipe against their second implementations."""

from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from definitions import ebt, flow, shared, thinker, world
from definitions.shared import SAME, SHARED, difference
from seedbed import config as configs
from seedbed.checks.subject import PERTURBATION, Subject, add_noise
from seedbed.recipes import find
from seedbed.train.system import System

# The functions of a recipe's own definitions, by the place that they are about.
OWN: dict[str, tuple[ModuleType, dict[str, str]]] = {
    "flow": (flow, {"objective": "loss", "model": "model", "evaluation": "metrics", "inference": "samples"}),
    "ebt": (ebt, {"objective": "loss", "model": "model", "data": "data", "evaluation": "metrics"}),
    "thinker": (
        thinker,
        {"data": "data", "objective": "loss", "model": "model", "evaluation": "metrics"},
    ),
    "world": (world, {"data": "data", "model": "model", "objective": "loss", "evaluation": "scores", "inference": "play"}),
}


def comparisons(subject: Subject, system: System) -> Iterable[tuple[Any, ...]]:
    """All parts of this system that are written twice."""
    for compare in SHARED.values():
        yield from compare(subject, system)
    own, names = OWN.get(subject.recipe.name, (shared, {}))
    for place, name in names.items():
        compare: Callable[..., Iterable[tuple]] = getattr(own, name)
        given = (system, subject.batch(0)) if (own, place) == (world, "objective") else (system,)
        yield from compare(*given)


def compared(name: str, *settings: str) -> dict[str, str]:
    """What was compared, each with how it differs; empty where it agrees."""
    recipe, preset = find(name)
    subject = Subject(recipe, preset, configs.override(recipe.preset(preset), [*settings, "device=cpu"]), Path("nowhere"))
    system = subject.fresh_system().eval()
    add_noise(system, PERTURBATION)  # outputs that start at zero would hide what leads to them
    found = {}
    for what, functions, value, wanted, *limit in comparisons(subject, system):
        agrees = difference(value, wanted) <= (limit[0] if limit else SAME)
        found[what] = "" if agrees else f"{value}, by definition {wanted}; {functions}"
    return found
