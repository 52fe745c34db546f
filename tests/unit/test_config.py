"""Configs: overrides, types, ranges, hash, difference and the way to JSON and back."""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from seedbed.config import Config, Every, Optim, diff, digest, flatten, number, override, to_json
from seedbed.config import saved as saved_configs
from seedbed.config.saved import from_json
from seedbed.errors import UserError


@dataclass(frozen=True)
class Model:
    width: int = number(128, low=1, high=4096)
    num_heads: int = number(4, low=1)
    dropout: float = number(0.0, low=0.0, high=0.9)
    kind: Literal["plain", "gated"] = "plain"
    levels: Literal[1, 2, 4] = 1
    tied: bool = True
    sizes: tuple[int, ...] = (1, 2)
    shape: tuple[int, float] = (3, 0.5)
    cap: float | None = None
    nested: tuple[tuple[int, ...], ...] = ()
    anything: Any = None

    def check(self) -> None:
        if self.width % self.num_heads:
            raise UserError(f"model.width={self.width} does not divide into model.num_heads={self.num_heads}")


@dataclass(frozen=True)
class Data:
    source: str = "reference"
    block: int = number(64, low=2)


def base(**changes: Any) -> Config:
    return Config(model=Model(), data=Data(), **changes)


GOOD = [
    ("steps=500", "steps", 500),
    ("steps=1e3", "steps", 1000),
    ("steps=1_000", "steps", 1000),
    ("steps=9007199254740993", "steps", 9007199254740993),
    ("optim.lr=3e-4", "optim.lr", 3e-4),
    ("optim.lr=0", "optim.lr", 0.0),
    ("model.kind=gated", "model.kind", "gated"),
    ("model.levels=4", "model.levels", 4),
    ("model.tied=no", "model.tied", False),
    ("model.tied=TRUE", "model.tied", True),
    ("model.sizes=4,8,16", "model.sizes", (4, 8, 16)),
    ("model.sizes=", "model.sizes", ()),
    ("model.shape=7,1e-2", "model.shape", (7, 0.01)),
    ("model.cap=30", "model.cap", 30.0),
    ("model.cap=none", "model.cap", None),
    ("data.source=a=b c", "data.source", "a=b c"),
    ("data.source=", "data.source", ""),
    ("budget=90s", "budget", 90.0),
    ("budget=5m", "budget", 300.0),
    ("budget=1.5h", "budget", 5400.0),
    ("budget=2d", "budget", 172800.0),
    ("budget=42", "budget", 42.0),
    ("budget=none", "budget", None),
]


@pytest.mark.parametrize(("text", "key", "value"), GOOD)
def test_assignment_sets_one_value_of_the_right_type(text: str, key: str, value: Any):
    old = base()
    new = override(old, [text])
    assert flatten(new)[key] == value
    assert type(flatten(new)[key]) is type(value)
    assert set(diff(flatten(old), flatten(new))) <= {key}
    assert flatten(old) == flatten(base()), "the config it started from must not change"


BAD = [
    ("steps", "`steps` is not key=value"),
    ("steps=", "is not a whole number"),
    ("steps=many", "steps=many is not a whole number"),
    ("steps=1.5", "steps=1.5 is not a whole number"),
    ("steps=inf", "is not a whole number"),
    ("steps=1e400", "is not a whole number"),
    ("steps=0", "at least 1"),
    ("steps=-5", "at least 1"),
    ("steps=5m", "steps=5m is not a whole number"),
    ("optim.lr=nan", "is not a number"),
    ("optim.lr=11", "between 0 and 10"),
    ("optim.lr=0x10", "is not a number"),
    ("model.dropout=1", "between 0 and 0.9"),
    ("model.kind=gatted", "did you mean gated?"),
    ("model.levels=3", "one of 1, 2, 4"),
    ("model.tied=maybe", "true or false"),
    ("model.sizes=1,,2", "is not a whole number"),
    ("model.sizes=1,x", "is not a whole number"),
    ("model.shape=1", "2 values separated by commas"),
    ("model.shape=1,2,3", "2 values separated by commas"),
    ("model.anything=here", "cannot be set from the command line"),
    ("model.cap=high", "is not a number"),
    ("budget=5x", "budget=5x is not a duration"),
    ("budget=m", "budget=m is not a duration"),
    ("budget=abcm", "budget=abcm is not a duration"),
    ("budget=0", "at least 0.001"),
    ("budget=-5m", "at least 0.001"),
    ("precision=fp8", "one of fp32, tf32, bf16, fp16"),
    ("seed=-1", "between 0 and"),
    ("optim=adamw", "`optim` is a group; set one of: optim.kind, optim.lr"),
    ("lr=1", "nearest: optim.lr"),
    ("optim.lrr=1", "nearest: optim.lr"),
    ("optm.lr=1", "nearest: optim.lr"),
    ("learning_rate=1", "unknown key `learning_rate`"),
    ("model.heads=2", "nearest: model.num_heads"),
    ("step=2", "nearest: steps"),
    ("steps.more=2", "unknown key `steps.more`"),
    ("model.width.x=2", "unknown key `model.width.x`"),
    ("=5", "unknown key"),
    (".=5", "unknown key"),
    ("batch=30 accum=4", "is not a whole number"),
    ("accum=5", "does not divide"),
    ("model.num_heads=3", "does not divide"),
]


@pytest.mark.parametrize(("text", "printed"), BAD)
def test_assignment_that_is_wrong_is_explained(text: str, printed: str):
    with pytest.raises(UserError, match=printed.replace("?", r"\?")) as caught:
        override(base(), [text])
    assert len(str(caught.value).splitlines()) <= 2


@pytest.mark.parametrize("order", [["batch=33", "accum=3"], ["accum=3", "batch=33"]])
def test_assignments_are_validated_together_in_any_order(order: list[str]):
    config = override(base(), order)
    assert (config.batch, config.accum) == (33, 3)


@pytest.mark.parametrize("order", [["model.width=99", "model.num_heads=9"], ["model.num_heads=9", "model.width=99"]])
def test_recipe_check_sees_all_assignments(order: list[str]):
    assert override(base(), order).model.width == 99


def test_assignment_last_value_of_a_key_wins():
    assert override(base(), ["steps=1", "steps=2"]).steps == 2


def test_configs_cannot_be_changed_in_place():
    with pytest.raises(dataclasses.FrozenInstanceError):
        base().steps = 5  # type: ignore[misc]


WRONG_TYPES = [{"steps": v} for v in ("5", 1.5, True, None)] + [{"precision": "int8"}, {"budget": "5m"}, {"seed": 1.0}]


@pytest.mark.parametrize("values", WRONG_TYPES, ids=str)
def test_preset_value_of_the_wrong_type_is_refused(values: dict[str, Any]):
    with pytest.raises(UserError, match=f"^{next(iter(values))}=.* is not "):
        base(**values)


@pytest.mark.parametrize("value", [Path("."), [1], {"a": 1}, {1}, (1, [2]), object()], ids=lambda v: type(v).__name__)
def test_config_value_that_json_cannot_hold_is_refused(value: Any):
    with pytest.raises(UserError, match=r"model.anything=.*: a config holds numbers"):
        Config(model=Model(anything=value), data=Data())


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_range_is_checked_in_code_too(value: float):
    with pytest.raises(UserError, match=r"optim\.lr=.* is out of range"):
        base(optim=Optim(lr=value))


def test_json_round_trip_gives_the_same_config():
    config = override(base(), ["model.sizes=5,6", "budget=5m", "optim.lr=0.125", "model.shape=1,2"])
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, nested=((1, 2), (3,))))
    again = from_json(base(), json.loads(json.dumps(to_json(config))))
    assert again == config
    assert digest(again) == digest(config)
    assert diff(flatten(again), flatten(config)) == {}


def test_saved_config_without_a_key_keeps_the_presets_value():
    saved = to_json(base(steps=7))
    del saved["optim"]["lr"], saved["guard"]
    assert from_json(base(optim=Optim(lr=0.5)), saved) == base(optim=Optim(lr=0.5), steps=7)


def damaged(change: Any) -> dict[str, Any]:
    saved = to_json(base())
    change(saved)
    return saved


DAMAGED = [
    (lambda s: s.update(novelty=1), "`novelty`, which this version does not know"),
    (lambda s: s["optim"].update(novelty=1), "`optim.novelty`"),
    (lambda s: s.update(optim=5), "`optim` should hold a group"),
    (lambda s: s.update(model="x"), "`model` should hold a group"),
    (lambda s: s.update(steps="many"), "steps='many' is not a whole number"),
    (lambda s: s.update(steps=-1), "out of range"),
    (lambda s: s.update(precision="int3"), "is not one of"),
    (lambda s: s["model"].update(sizes=["a"]), "model.sizes"),
    (lambda s: s.update(batch=None), "batch=None"),
]


@pytest.mark.parametrize(("change", "printed"), DAMAGED, ids=[printed for _, printed in DAMAGED])
def test_saved_config_that_is_damaged_is_an_error(change: Any, printed: str):
    with pytest.raises(UserError, match=printed):
        from_json(base(), damaged(change))


def test_config_hash_depends_on_every_value():
    assert digest(base(budget=300)) == digest(override(base(), ["budget=5m"]))
    assert digest(base()) == digest(base())
    keys = [k for k, v in flatten(base()).items() if isinstance(v, int) and not isinstance(v, bool) and k != "model.levels"]
    doubled = [override(base(), [f"{key}={2 * flatten(base())[key] or 2}"]) for key in keys]
    assert len({digest(base()), *map(digest, doubled)}) == len(keys) + 1


def test_config_diff_names_both_values():
    assert diff({"a": 1, "b": (1, 2)}, {"a": 2, "b": [1, 2], "c": None, "d": 0}) == {"a": (1, 2), "d": (None, 0)}


def test_flatten_keeps_the_order_of_the_fields():
    keys = list(flatten(base()))
    assert keys[:2] == ["model.width", "model.num_heads"]
    assert keys.index("optim.lr") < keys.index("every.log") < keys.index("steps")
    assert [k for k in keys if k.startswith("every.")] == [f"every.{f.name}" for f in dataclasses.fields(Every)]


# ---- keys of earlier versions ----------------------------------------------------------------------------------------


def test_renamed_key_on_the_command_line_names_the_new_one() -> None:
    with pytest.raises(UserError, match=r"^`recompute` is now called `remat`$"):
        override(base(), ["recompute=full"])


def test_renamed_keys_and_values_in_a_saved_config_are_translated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_configs, "RENAMED", {"recompute": "remat", "model.inner": "guard"})
    monkeypatch.setattr(saved_configs, "RENAMED_VALUES", {"remat": {"all": "full"}})
    saved = to_json(base())
    del saved["remat"], saved["guard"]
    saved |= {"recompute": "all"}
    saved["model"]["inner"] = {"sigmas": 9.0}
    found = from_json(base(), saved)
    assert found == override(base(), ["remat=full", "guard.sigmas=9"])
    with pytest.raises(UserError, match=r"^remat=all is now called remat=full$"):
        override(base(), ["remat=all"])


def test_renamed_keys_are_no_difference() -> None:
    old = {("recompute" if key == "remat" else key): value for key, value in flatten(base()).items()}
    assert diff(old, flatten(base())) == {}
    assert diff({**old, "recompute": "full"}, flatten(base())) == {"remat": ("full", "none")}
