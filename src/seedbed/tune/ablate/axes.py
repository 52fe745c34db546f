"""The axes of an ablation, by name or config key, with one row per value; and the default set."""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from seedbed import config as configs
from seedbed.config import Config
from seedbed.config.saved import current_key
from seedbed.errors import UserError
from seedbed.track.text import format_value
from seedbed.tune.sweep import grid

BASELINE, COMBINED = "baseline", "combined"
# Axes whose name is not the key they set.
KEYS = {"dtype": "precision", "heads": "model.heads", "patch": "model.patch"}
PLACES = {"replicate", "shard"}
SIZE = "size"
DEPTHS, WIDTH = ("model.depth", "model.blocks"), "model.width"
# Keys that do not change the model or the data of a step: the combined row chooses from them.
FREE = ("precision", *(word.partition("=")[0] for word in configs.PLAIN))
COMPILED = ("compile=whole", "compile_autograd=true", "compile_optimizer=true")
SAME_SIZE = 0.25  # largest relative difference in parameters of the same size
SINGLE = "one device: a report is measured in one process; `seedbed plan --world N` estimates memory and communication of ranks"


@dataclass(frozen=True)
class Row:
    """One line of the report: settings that differ from the baseline, or why it is not run."""

    axis: str
    settings: dict[str, Any] = field(default_factory=dict)
    skip_reason: str = ""
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
    """The rows of a command line; an invalid value is refused before anything is measured."""
    rows: list[Row] = []
    succeeded: set[str] = set()
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise UserError(f"`{word}` is not axis=value,value; for example: remat=selective,full")
        if name in succeeded:
            raise UserError(f"{name} is given twice; put all its values into one list: {name}=a,b")
        succeeded.add(name)
        rows += _read_one(base, name, text, resize)
    return _required(base, rows)


def _read_one(base: Config, name: str, text: str, resize: Resize) -> list[Row]:
    name = name.removeprefix("dist.") if name.removeprefix("dist.") in PLACES else name
    if name in PLACES:
        return [Row(name, skip_reason=SINGLE, value=f"{name}={value}") for value in text.split(",")]
    key = _depth_key(base) if name == SIZE else _key(base, name)
    if not text:
        raise UserError(f"{name}= names no values; write {name}=a,b")
    found, now = grid.read(base, [f"{key}={text}"], None), configs.flatten(base)[key]
    values = [value for value in (found.axes[0].values if found.axes else [found.fixed[key]]) if value != now]
    if not values:
        same = f"{name}={text} is the baseline itself ({key}={format_value(now)})"
        raise UserError(f"{same}: there is nothing to compare; name other values")
    return [Row(name, {key: value} | (resize(value) if name == SIZE else {})) for value in values]


def _key(base: Config, name: str) -> str:
    """The config key of an axis; suggests names near to an unknown one."""
    key, known = KEYS.get(name, name), configs.flatten(base)
    if key in known:
        return key
    if name in KEYS:
        raise UserError(f"axis {name}: this recipe has no {key}")
    if current_key(key) != key:
        raise UserError(f"axis `{name}` is now called `{current_key(key)}`")
    names = [*KEYS, SIZE, *PLACES, *known]
    tails = {n.rpartition(".")[2]: n for n in reversed(list(known))}
    near = difflib.get_close_matches(name, names, 3, 0.5)
    near += [tails[t] for t in difflib.get_close_matches(name.rpartition(".")[2], tails, 3, 0.6)]
    shown = list(dict.fromkeys(near))[:3] or [*KEYS, SIZE, "batch", "compile", "remat"]
    raise UserError(f"unknown axis `{name}`; nearest: {', '.join(shown)}")


def _depth_key(base: Config) -> str:
    known = configs.flatten(base)
    found = next((key for key in DEPTHS if key in known), None)
    if found is None or WIDTH not in known:
        raise UserError(f"axis {SIZE}: this recipe has no {DEPTHS[0]} and {WIDTH} to weigh against each other")
    return found


def _required(base: Config, rows: list[Row]) -> list[Row]:
    for row in rows:
        try:
            config_of(base, row)
        except UserError as problem:
            raise UserError(f"the row {row.label} cannot be run: {problem}") from None
    return rows


def config_of(base: Config, row: Row) -> Config:
    return configs.override(base, grid.words(row.settings))


def default(base: Config, device: str, resize: Resize) -> list[Row]:
    """Every axis that is meaningful on this device, with values around the baseline's."""
    rows: list[Row] = []
    for name, value in ((name, value) for name, values in _suggested(base, device).items() for value in values):
        try:
            rows += _required(base, _read_one(base, name, format_value(value), resize))
        except UserError:  # a value that this config does not accept
            rows += [Row(name, skip_reason="it needs precision=bf16", value=f"{name}={value}")] if name == "float8" else []
    left_out = {} if device == "cuda" else {"capture=off": "no CUDA graphs here"}
    if device == "cpu":
        left_out |= {name: "compiling takes minutes on a CPU; name the axis to wait for it" for name in COMPILED}
    left_out |= {"replicate=2": SINGLE, "shard=2": SINGLE}
    return [*rows, *(Row(word.partition("=")[0], skip_reason=why, value=word) for word, why in left_out.items())]


def _suggested(base: Config, device: str) -> dict[str, list[Any]]:
    known, cuda = configs.flatten(base), device == "cuda"
    found: dict[str, list[Any]] = {
        "dtype": ["fp32", "tf32", "bf16"] if cuda else ["fp32", "bf16"],
        "remat": ["none", "selective", "full"],
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


def equal_width(base: Config, depth: int, num_params: Callable[[Config], int]) -> dict[str, Any]:
    """The width at which `depth` layers have about as many parameters as the baseline, with the same number of heads."""
    key, known = _depth_key(base), configs.flatten(base)
    multiple = known.get("model.heads", 1) * 4
    wanted, best = num_params(base), None
    # Widths around the one that keeps depth x width squared.
    middle = max(1, round(known[WIDTH] * (known[key] / max(depth, 1)) ** 0.5 / multiple))
    for width in range(multiple * max(1, middle - 4), multiple * (middle + 5), multiple):
        try:
            off = num_params(configs.override(base, [f"{key}={depth}", f"{WIDTH}={width}"])) / wanted - 1.0
        except UserError:
            continue
        if best is None or abs(off) < abs(best[1]):
            best = width, off
    if best is None or abs(best[1]) > SAME_SIZE:
        raise UserError(f"{SIZE}={depth}: no {WIDTH} gives {key}={depth} about {wanted:,} parameters")
    return {WIDTH: best[0]}
