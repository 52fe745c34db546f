"""Words that the project no longer uses, each with the one to use instead; the lists behind `tests/test_style.py`.

Tables that translate old settings, events and checks name old words on purpose and are skipped: `TRANSLATIONS`.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

# Parts of identifiers: `forked_dice`, `roll_dice` and `_DiceTable` all contain `dice`.
PARTS = {
    "adversary": "critic, or named optimizers",
    "birth": "initialisation",
    "born": "created",
    "calm": "stable, or growth tracker",
    "company": "ranks",
    "crew": "workers",
    "descend": "minimize",
    "dice": "rng",
    "doubt": "uncertainty, warning",
    "dream": "rollout",
    "dust": "leftovers",
    "envelope": "padded config",
    "explaining": "explain_oom",
    "grain": "density, granularity",
    "heart": "memorised",
    "journey": "transfer, path",
    "lawful": "valid, allowed",
    "lesson|lessons": "curriculum stage",
    "lying": "leftover",
    "meddling": "edits",
    "mending": "repair",
    "odometer": "pose tracking",
    "office": "workspace",
    "parcel|parcels": "bucket",
    "pretended": "fake process group",
    "reckoned": "computed",
    "recompute": "remat",
    "rehearsal|rehearse|rehearsed": "estimate, dry run",
    "rung": "level, step of a ladder",
    "said": "printed, message, output",
    "shaken": "perturbed",
    "shelf": "run_index",
    "spelled": "formatted, escaped",
    "surviving": "retry_on_oom",
    "talker": "sample worker",
    "tally|tallies": "counts",
    "tapes": "gradient records",
    "told": "message, described, reported",
}

# Whole identifiers, without leading underscores.
NAMES = {
    r"is_alone|ALONE": "is_single, SINGLE",
    r"is_first": "is_primary",
    r"tell": "report, broadcast_object",
    r"first_decides_?": "broadcast_",
    r"total_of_pieces": "sum_over_shards",
    r"take_back|send_back": "rewind, restore",
    r"judged_by": "classifier score",
    r"map_cells": "plane_resolution",
    r"warm_critic": "critic_warmup",
    r"on_paper|PaperEngine": "estimate",
    r"on_piece": "on_text",
    r"roll_all_dice": "seed_step",
    r"left_lying": "gc_paused",
    r"echo": "config summary",
    r"Doors": "Auth",
    r"House": "PlayServer",
    r"Visit": "PlaySession, repeat",
    r"Beside": "NonPrimaryRun",
    r"(Bench|Valley|Room|Standing|Scene|Rung|Oracle|Place|Walk|Take|Talk|Held|Dust)": "a name in the words of the field",
    r"cut_units|require_cut|NOT_CUT": "sharded units, require_sharded",
    r"births|practice|walked_ground|tapes": "initialisations, short_runs, walkable mask, gradient records",
}

# Attributes of these objects: `self.ranks.tell(...)`.
ATTRIBUTES = {
    r"engine\.(descend|rate|calm|dials)": "minimize, lr, growth, step scalars",
    r"ranks\.(tell|collect|meet|mine|leave|behind|parcels)": "broadcast_object, all_gather_object, barrier, shard_of, background",
}

# Comments, docstrings, strings and docs.
PROSE = {
    r"(?<!-)\badversary\b(?!-)": "critic, or several optimizers",
    r"\banew\b": "again, new",
    r"\bat birth\b": "at initialisation",
    r"\bborn\b": "created",
    r"\bby heart\b": "memorised",
    r"\bcalm\w*": "stable",
    r"\bcomforts\b": "a plain list",
    r"\bcop(y|ies) of (a|the|one)?\s*(weights|pieces)\b": "replicas",
    r"\bcopy-last\b": "persistence baseline",
    r"\bcrew\b": "workers",
    r"\bcut into \w*\s?pieces\b|\bpieces of (a|one|each|every) copy\b": "sharded, shards of a replica",
    r"\bdice\b": "random numbers, rng",
    r"\bdreams?\b|\bdreamt\b": "rollout",
    r"\benvelope\b": "padded config",
    r"\bin vain\b": "without effect, failed",
    r"\bjourney\b": "transfer",
    r"\blag doctor\b": "lag estimation",
    r"\blawful\w*": "valid, allowed",
    r"\blessons?\b": "curriculum stage",
    r"\bl(ies?|ying|ay) (there|here|beside|about|around|next to|idle|on the|in (the|an?|its)|under)\b": "is in, is left over",
    r"\bmeddl\w+": "edits",
    r"\bmend(s|ed|ing)?\b": "repair",
    r"\bodometer\b": "pose tracking",
    r"\bon paper\b": "estimated",
    r"\boutside tables\b": "non-embedding parameters",
    r"\bparcels?\b": "bucket",
    r"(?<!dead\s)\breckon(s|ed)?\b|(?<!dead\s)\breckoning\b": "compute",
    r"\brehears\w+": "estimate, dry run",
    r"\bsecond look\b": "fine pass",
    r"\bsteps? of thought\b": "inference-time optimisation steps",
    r"\bswe(ep|pt) up\b": "collect, remove",
    r"\btalk ms\b": "communication",
    r"\btargets for 20\b": "tokens for 20 per parameter",
    r"\bwalked ground\b": "walkable mask",
    r"\bwhole battery\b": "full evaluation",
    r"\bwith our manners\b": "a plain description",
    r"\bwithout a word\b": "silently, without output",
}

# Assignments whose strings name old words in order to translate them.
TRANSLATIONS = {"STORED", "RENAMED", "RENAMED_VALUES", "OLD_FILE"}

# Names of parameters in checkpoints, which stay.
STORED_NAMES = {"src/seedbed/recipes/world/radiance_field.py": {"said"}}

# file -> retired words that it still uses. This may only shrink.
EXCEPTIONS: dict[str, set[str]] = {}


def snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower().strip("_")


def defined_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every name that a file gives to something."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.alias) and node.asname:
            yield node.lineno, node.asname


def retired_names(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Line, identifier and replacement of every retired name that a file defines, and of every retired attribute it uses."""
    for line, name in defined_names(tree):
        parts = snake(name).split("_")
        for words, new in PARTS.items():
            if set(words.split("|")) & set(parts):
                yield line, name, new
        for pattern, new in NAMES.items():
            if re.fullmatch(pattern, name.lstrip("_")):
                yield line, name, new
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            used = ast.unparse(node)
            for pattern, new in ATTRIBUTES.items():
                if re.search(rf"(?:^|\.)_?{pattern}$", used):
                    yield node.lineno, used, new


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Comments and strings of a Python file, without those of translation tables."""
    skipped = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and {ast.unparse(t) for t in (node.targets if isinstance(node, ast.Assign) else [node.target])} & TRANSLATIONS
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    strings = {"STRING", "COMMENT", "FSTRING_MIDDLE"}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if tokenize.tok_name[token.type] in strings and token.start[0] not in skipped:
            yield token.start[0], token.string


def retired_prose(passages: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str, str]]:
    """Line, words and replacement of every retired expression."""
    for line, passage in passages:
        for pattern, new in PROSE.items():
            for match in re.finditer(pattern.replace(" ", r"\s+"), passage, re.IGNORECASE):
                yield line + passage[: match.start()].count("\n"), match.group(), new


def retired_words(path: Path) -> list[tuple[int, str, str]]:
    """Line, word and replacement of every retired word in a Python file, a script of a page or a page of the docs."""
    text = path.read_text()
    if path.suffix == ".py":
        stored = next((names for file, names in STORED_NAMES.items() if path.as_posix().endswith(file)), set())
        names = (found for found in retired_names(ast.parse(text)) if found[1] not in stored)
        return [*names, *retired_prose(prose(text))]
    return list(retired_prose(iter([(1, text)])))
