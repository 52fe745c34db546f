"""What a report varies: axes by name or by config key, one row per value, and a set that makes sense without being asked."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from seedbed import config as configs
from seedbed.config import Config
from seedbed.errors import UserError
from seedbed.track.text import spell
from seedbed.tune.sweep import grid

BASELINE, COMBINED = "baseline", "combined"
# Axes whose name is not the key they set.
KEYS = {"dtype": "precision", "heads": "model.heads", "patch": "model.patch"}
PLACES = {"replicate", "shard"}
SIZE = "size"
DEPTHS, WIDTH = ("model.depth", "model.blocks"), "model.width"
# Keys that leave the model and the data of a step as they are: what the combined row may choose from.
FREE = ("precision", *(word.partition("=")[0] for word in configs.PLAIN))
COMPILED = ("compile=whole", "compile_autograd=true", "compile_optimizer=true")
SAME_SIZE = 0.25  # a width further off than this in parameters is not the same size


@dataclass(frozen=True)
class Row:
    """One line of the report: settings that differ from the baseline, or why there is nothing to run."""

    axis: str
    settings: dict[str, Any] = field(default_factory=dict)
    why_not: str = ""
    value: str = ""

    @property
    def label(self) -> str:
        if self.axis in (BASELINE, COMBINED):
            return self.axis
        return self.value or " ".join(grid.words(self.settings))

    @property
    def is_free(self) -> bool:
        return all(key in FREE for key in self.settings)


Resize = Callable[[int], dict[str, Any]]


def read(base: Config, words: Sequence[str], resize: Resize) -> list[Row]:
    """The rows that a command line asks for; a value that no run could have is refused before anything is measured."""
    rows: list[Row] = []
    seen: set[str] = set()
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise UserError(f"`{word}` is not axis=value,value; for example: recompute=selective,full")
        if name in seen:
            raise UserError(f"{name} is given twice; put all its values into one list: {name}=a,b")
        seen.add(name)
        rows += _read_one(base, name, text, resize)
    for row in rows:
        _require(base, row)
    return rows


def _read_one(base: Config, name: str, text: str, resize: Resize) -> list[Row]:
    name = name.removeprefix("dist.") if name.removeprefix("dist.") in PLACES else name
    if name in PLACES:
        return [Row(name, why_not=_one_device(), value=f"{name}={value}") for value in text.split(",")]
    if name == SIZE:
        key = _depth_key(base)
        depths = [v for v in _values(base, key, text, name) if v != configs.flatten(base)[key]]
        rows = [Row(name, {key: depth} | resize(depth)) for depth in depths]
    else:
        key = _key(base, name)
        rows = [Row(name, {key: value}) for value in _values(base, key, text, name) if value != configs.flatten(base)[key]]
    if not rows:
        now = spell(configs.flatten(base)[key])
        raise UserError(f"{name}={text} is the baseline itself ({key}={now}): there is nothing to compare; name other values")
    return rows


def _key(base: Config, name: str) -> str:
    """The config key of an axis; names near to an unknown one."""
    key, known = KEYS.get(name, name), configs.flatten(base)
    if key in known:
        return key
    if name in KEYS:
        raise UserError(f"axis {name}: this recipe has no {key}")
    names = [*KEYS, SIZE, *PLACES, *known]
    tails = {n.rpartition(".")[2]: n for n in reversed(list(known))}
    near = difflib.get_close_matches(name, names, 3, 0.5)
    near += [tails[t] for t in difflib.get_close_matches(name.rpartition(".")[2], tails, 3, 0.6)]
    shown = list(dict.fromkeys(near))[:3] or [*KEYS, SIZE, "batch", "compile", "recompute"]
    raise UserError(f"unknown axis `{name}`; nearest: {', '.join(shown)}")


def _depth_key(base: Config) -> str:
    known = configs.flatten(base)
    found = next((key for key in DEPTHS if key in known), None)
    if found is None or WIDTH not in known:
        raise UserError(f"axis {SIZE}: this recipe has no {DEPTHS[0]} and {WIDTH} to weigh against each other")
    return found


def _values(base: Config, key: str, text: str, name: str) -> list[Any]:
    if not text:
        raise UserError(f"{name}= names no values; write {name}=a,b")
    found = grid.read(base, [f"{key}={text}"], None)
    return list(found.axes[0].values) if found.axes else [found.fixed[key]]


def _require(base: Config, row: Row) -> None:
    try:
        config_of(base, row)
    except UserError as problem:
        raise UserError(f"the row {row.label} cannot be run: {problem}") from None


def config_of(base: Config, row: Row) -> Config:
    return configs.override(base, grid.words(row.settings))


def _one_device() -> str:
    return "one device: a report is measured in one process; `seedbed plan --world N` tells what ranks hold and send"


# ---- the set for those who name no axis --------------------------------------------------------------------------------


def default(base: Config, device: str, resize: Resize) -> list[Row]:
    """Every axis that means something on this device, with values around the baseline's."""
    rows: list[Row] = []
    for name, values in _suggested(base, device).items():
        for value in values:
            rows += _try(base, name, value, resize)
    left_out = {} if device == "cuda" else {"capture=off": "no CUDA graphs here"}
    if device == "cpu":
        left_out |= {name: "compiling takes minutes on a CPU; name the axis to wait for it" for name in COMPILED}
    left_out |= {"replicate=2": _one_device(), "shard=2": _one_device()}
    return [*rows, *(Row(word.partition("=")[0], why_not=why, value=word) for word, why in left_out.items())]


def _suggested(base: Config, device: str) -> dict[str, list[Any]]:
    known, cuda = configs.flatten(base), device == "cuda"
    found: dict[str, list[Any]] = {
        "dtype": ["fp32", "tf32", "bf16"] if cuda else ["fp32", "bf16"],
        "recompute": ["none", "selective", "full"],
        "batch": [base.batch // 2, base.batch * 2],
        "attention": ["cudnn", "flash", "efficient"] if cuda else ["math"],
        "float8": ["true"],
    }
    if device != "cpu":
        found |= {"compile": ["off", "blocks", "whole"], "compile_autograd": ["true"], "compile_optimizer": ["true"]}
    found |= {"capture": ["off"]} if cuda else {"accum": [1, 2], "optim.kind": ["adamw", "muon"]}
    for axis, key in (("heads", KEYS["heads"]), ("patch", KEYS["patch"]), (SIZE, next((d for d in DEPTHS if d in known), ""))):
        if key in known:
            found[axis] = [known[key] // 2, known[key] * 2]
    return found


def _try(base: Config, name: str, value: Any, resize: Resize) -> list[Row]:
    """The rows of one suggested value; none where the config would not take it, for nobody asked for it."""
    try:
        rows = _read_one(base, name, spell(value), resize)
        for row in rows:
            _require(base, row)
    except UserError:
        return [Row(name, why_not="it needs precision=bf16", value=f"{name}={value}")] if name == "float8" else []
    return rows


# ---- depth against width -----------------------------------------------------------------------------------------------


def equal_width(base: Config, depth: int, num_params: Callable[[Config], int]) -> dict[str, Any]:
    """The width at which `depth` layers hold about as many parameters as the baseline; heads keep their number."""
    key, known = _depth_key(base), configs.flatten(base)
    grain = known.get("model.heads", 1) * 4
    wanted, best = num_params(base), None
    for width in _widths(known[WIDTH], known[key], depth, grain):
        try:
            off = num_params(configs.override(base, [f"{key}={depth}", f"{WIDTH}={width}"])) / wanted - 1.0
        except UserError:
            continue
        if best is None or abs(off) < abs(best[1]):
            best = width, off
    if best is None or abs(best[1]) > SAME_SIZE:
        raise UserError(f"{SIZE}={depth}: no {WIDTH} gives {key}={depth} about {wanted:,} parameters")
    return {WIDTH: best[0]}


def _widths(width: int, depth: int, new_depth: int, grain: int) -> list[int]:
    """Multiples of `grain` around the width by which layers of width squared keep their sum."""
    guess = width * (depth / max(new_depth, 1)) ** 0.5
    middle = max(1, round(guess / grain))
    return [grain * n for n in range(max(1, middle - 4), middle + 5)]
