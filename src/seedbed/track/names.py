"""Names of runs (date, recipe and two words) and of checkpoint folders (by step)."""

import datetime
import hashlib
import os
import re
from collections.abc import Container
from pathlib import Path

from seedbed.errors import UserError

_FIRST_WORDS = """
amber autumn basalt blue bold brave bright bronze candid cedar civil clear clever copper coral crimson crisp dawn deep
early eager fair fern fleet frost gentle gilded glad golden grand green hardy hazel honest humble indigo ivory jade keen
kind late light lively lofty lucid lunar mellow mild misty noble north ochre olive open patient plain proud quiet rapid
rare russet rustic sage scarlet silent silver smooth solar spring steady still stone summer sunny swift tidy topaz true
velvet violet vivid warm west wide wild winter wise young
"""

_SECOND_WORDS = """
acorn alder anemone aspen aster badger barley beech birch bramble briar brook burdock cherry chestnut clover cosmos
cowslip crane crocus cypress dahlia daisy dogwood elder elm falcon fennel finch flax foxglove garnet gentian ginkgo
grove harrow hawthorn heath heron hickory holly iris ivy jasmine juniper kestrel larch lark laurel lichen lilac linden
lotus lupin magnolia mallow maple marten meadow mint mistle myrtle nettle oak orchard orchid osprey otter peony pine
plover poplar poppy quince reed robin rowan sedge sorrel sparrow spruce swallow teasel thistle thrush thyme tulip
vetch walnut willow wren yarrow yew
"""

_FIRST, _SECOND = _FIRST_WORDS.split(), _SECOND_WORDS.split()
_LEGAL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def two_words(seed: int) -> str:
    """Two words joined by a dash, by a hash of the seed."""
    number = int.from_bytes(hashlib.sha256(str(seed).encode()).digest()[:8], "big")
    number, second = divmod(number, len(_SECOND))
    return f"{_FIRST[number % len(_FIRST)]}-{_SECOND[second]}"


def new_name(recipe: str, moment: datetime.datetime, taken: Container[str]) -> str:
    """A free name such as 2026-03-01-gpt-amber-wren for a run that starts at `moment`."""
    title = re.sub(r"[^a-z0-9]+", "-", Path(recipe).stem.lower()).strip("-")[:40] or "run"
    seed = int(moment.timestamp() * 1e6)
    for attempt in range(100_000):
        name = f"{moment:%Y-%m-%d}-{title}-{two_words(seed + attempt)}"
        if name not in taken:
            return name
    raise UserError(f"no free run name is left for {title} on {moment:%Y-%m-%d}; choose one with --run NAME")


def check_name(name: str) -> str:
    """`name` if it is a valid run name: no slash, no leading dot, no special characters."""
    if not _LEGAL.fullmatch(name):
        raise UserError(f"{name!r} cannot name a run: use letters, digits, dots, dashes and underscores, 100 at most")
    return name


# ---- checkpoint folders ----------------------------------------------------------------------------------------------

# Six digits, more where the step needs them: a name with other zeros, or with anything behind, is not one of ours.
_NAME = re.compile(r"step-(\d{6}|[1-9]\d{6,18})")


def folder_name(step: int) -> str:
    return f"step-{step:06d}"


def step_of(name: str) -> int | None:
    """The step in a checkpoint folder's name; None for other names."""
    found = _NAME.fullmatch(name) if name.isascii() else None
    return int(found[1]) if found else None


def step_names(folder: Path) -> list[str]:
    """The checkpoint folders by step, oldest first; links, files and other names are ignored."""
    try:
        with os.scandir(folder) as entries:
            found = [e.name for e in entries if step_of(e.name) is not None and e.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    return sorted(found, key=lambda name: step_of(name) or 0)
