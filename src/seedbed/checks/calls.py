"""Functions of a recipe that run in something, with what they get and give: the places that findings name."""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass
from itertools import count, takewhile
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
from torch import Tensor

from seedbed import errors
from seedbed.checks.subject import Subject, short

NUM_PLACES = 3
# Values of a tensor up to which it is compared.
MAX_VALUES = 1 << 20
# Change of what a function gives, against that of what it gets, below which an influence ends in it.
FADED = 1e-6


@dataclass
class Call:
    """One call: the recipe's functions around it, innermost first; tensors that it got and gave; its turn to end."""

    code: CodeType
    around: tuple[CodeType, ...]
    got: list[np.ndarray] = field(default_factory=list)
    gave: list[np.ndarray] = field(default_factory=list)
    end: int = 0


def record(subject: Subject, act: Callable[[], object], *, values: bool = False, shared: str = "") -> list[Call]:
    """The calls of functions in files of the recipe, in order, while `act` runs.

    `shared` names folders of this package whose files count as well; `values` keeps copies of tensors.
    """
    own = {str(path) for path in subject.recipe.files() if path.name != "probe.py"}
    own |= {str(path) for name in shared.split() for path in (Path(errors.__file__).parent / name).glob("*.py")}
    found, open_calls, turns = list[Call](), list[Call](), count(1)

    def look(frame: Any, event: str, value: Any) -> None:
        code = frame.f_code
        if code.co_filename not in own:
            return
        if event == "call" and not code.co_name.startswith(("<gen", "<list", "<dict", "<set", "<module")):
            got = [*contents(list(frame.f_locals.values()))] if values else []
            open_calls.append(Call(code, tuple(call.code for call in reversed(open_calls)), got))
            found.append(open_calls[-1])
        elif event == "return" and open_calls and open_calls[-1].code is code:
            call = open_calls.pop()
            call.gave, call.end = [*contents(value)] if values else [], next(turns)

    sys.setprofile(look)
    try:
        act()
    finally:
        sys.setprofile(None)
    return found


def contents(value: Any, depth: int = 3) -> Iterator[np.ndarray]:
    """Copies of the tensors and arrays in a value, without their shapes."""
    if isinstance(value, Tensor | np.ndarray):
        try:
            array = value.detach().cpu().numpy() if isinstance(value, Tensor) else value
            if 1 < array.size <= MAX_VALUES:
                yield array.flatten()
        except (RuntimeError, TypeError):  # inside a transform of torch.func, or of a type that numpy lacks
            return
    elif depth:
        fields = vars(value) if is_dataclass(value) and not isinstance(value, type) else value
        parts = fields.values() if isinstance(fields, Mapping) else fields if isinstance(fields, list | tuple) else ()
        for part in parts:
            yield from contents(part, depth - 1)


def places(codes: Iterable[CodeType | str]) -> str:
    """`file:line name` of the first function of each file, at most three; lines that are known already may be among them."""
    found: dict[str, str] = {}
    for code in codes:
        place = code if isinstance(code, str) else f"{short(code.co_filename)}:{code.co_firstlineno} {code.co_qualname}"
        found.setdefault(place.partition(":")[0], place)
    return "; ".join([*found.values()][:NUM_PLACES])


def recipe_calls(subject: Subject, act: Callable[[], object]) -> dict[CodeType, str]:
    """The functions that `act` calls, in order, and their places with those around them.

    Not those of one argument: properties and conversions, which many use.
    """
    found: dict[CodeType, str] = {}
    for call in record(subject, act):
        if call.code.co_argcount > 1 and not call.code.co_name.startswith(("<", "__")):
            found.setdefault(call.code, places((call.code, *call.around)))
    return found


def only_called_by(subject: Subject, act: Callable[[], object], *others: Callable[[], object]) -> list[str]:
    """Places of the functions that `act` calls and none of the others does."""
    known = {code for other in others for code in recipe_calls(subject, other)}
    return [place for code, place in recipe_calls(subject, act).items() if code not in known]


def made_by(subject: Subject, act: Callable[[], object], value: Callable[[], Any], shared: str = "") -> str:
    """The first function to give a value, or more that begins with it, which is known after `act`; empty when none does."""
    calls = sorted(record(subject, act, values=True, shared=shared), key=lambda call: call.end)
    wanted = next(contents(value()), np.full(2, np.nan))
    makers = (call for call in calls if any(np.array_equal(wanted, one[: wanted.size]) for one in call.gave))
    return next((places((call.code, *call.around)) for call in makers), "")


def influence_ends_in(subject: Subject, one: Callable[[], object], other: Callable[[], object]) -> str:
    """The first function that gets other tensors in two runs and gives about the same; empty when there is none."""
    runs = (sorted(record(subject, act, values=True), key=lambda call: call.end) for act in (one, other))
    pairs = takewhile(lambda pair: pair[0].code is pair[1].code, zip(*runs, strict=False))
    ends = (a for a, b in pairs if a.gave and change(a.gave, b.gave) < FADED * change(a.got, b.got))
    return next((places((a.code, *a.around)) for a in ends), "")


def change(some: list[np.ndarray], others: list[np.ndarray]) -> float:
    """The largest change of one of several tensors, relative to its mean."""
    pairs = [(a, b.astype(np.float64)) for a, b in zip(some, others, strict=False) if a.shape == b.shape]
    return max((float(abs(a - b).max() / max(abs(a).mean(), 1e-12)) for a, b in pairs), default=0.0)


def used_only_by(subject: Subject, act: Callable[[], object], *, any_file: bool = False) -> str:
    """The functions that `act` runs in files which training does not use, the recipe's first; empty when there are none.

    With `any_file`, also functions of the files that training uses, where it does not run them.
    """
    own = {str(path) for path in subject.recipe.files()}

    def called(work: Callable[[], object]) -> Counter[CodeType]:
        return Counter(call.code for call in record(subject, work, shared="nn data") if call.code.co_name[0] not in "<_")

    trained = called(lambda: subject.loss_of(subject.perturbed(), subject.perturbed_batch()))
    only, used = dict[str, CodeType](), {code.co_filename for code in trained}
    for code, _ in called(act).most_common():
        if code not in trained and (any_file or code.co_filename not in used) and not code.co_filename.endswith("__init__.py"):
            only.setdefault(code.co_filename, code)
    return places(only[file] for file in sorted(only, key=lambda file: (file not in own, "/nn/" not in file)))
