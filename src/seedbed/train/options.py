"""Options of a recipe's samples as the command line and the playground give them; their dataclass is made of `option`s."""

import types
import typing
from dataclasses import dataclass, fields
from math import inf
from typing import Any, NoReturn, TypeVar

from seedbed.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True)
class Option:
    """One option of the command line; `kind` is int, float or str; with `many` it may be given several times."""

    name: str
    field: str
    kind: type
    many: bool
    default: Any
    help: str
    low: float
    high: float
    needs_data: bool

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def read(self, value: Any) -> Any:
        """A value in its type and range; None stands for the default."""
        if value is None or self.many:
            return value
        try:
            found = self.kind(value)
        except (TypeError, ValueError):
            raise UserError(f"{self.name}={value} is not a {'whole ' if self.kind is int else ''}number") from None
        if self.kind is not str and not self.low <= found <= self.high:
            limits = f"at least {self.low:g}" if self.high == inf else f"between {self.low:g} and {self.high:g}"
            raise UserError(f"{self.name}={value} is out of range: it must be {limits}")
        return found


def options_of(kind: type) -> dict[str, Option]:
    """The options of a dataclass by name. A trailing underscore is for Python's keywords: `class_` is typed `--class`."""
    hints, found = typing.get_type_hints(kind), {}
    for one in fields(kind):
        hint = hints[one.name]
        if typing.get_origin(hint) in (typing.Union, types.UnionType):
            (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
        many = typing.get_origin(hint) is tuple
        value = typing.get_args(hint)[0] if many else hint
        about = {"help": "", "low": -inf, "high": inf, "needs_data": False} | dict(one.metadata)
        name = one.name.rstrip("_")
        found[name] = Option(name, one.name, value, many, one.default, **about)
    return found


def read_options(kind: type[T], given: dict[str, Any]) -> T:
    """The dataclass with the given values; an unknown option is an error that lists the known ones."""
    known, given = options_of(kind), {name.rstrip("_"): value for name, value in given.items()}
    for name in given:
        if name not in known:
            refuse(f"--{name.replace('_', '-')}", kind)
    values = {known[name].field: known[name].read(value) for name, value in given.items()}
    return kind(**{name: value for name, value in values.items() if value is not None})


def refuse(flag: str, kind: type) -> NoReturn:
    """An option that this recipe does not have."""
    known = ", ".join(option.flag for option in options_of(kind).values())
    raise UserError(f"this recipe does not know {flag}; it knows {known}" if known else f"this recipe has no options, not {flag}")


def need_data(kind: type, given: dict[str, Any]) -> bool:
    """Whether one of the given options needs the training data."""
    known = options_of(kind)
    return any(name in known and known[name].needs_data for name in given)
