"""Differences between the code of a resumed run and the code it had before: versions, commit, patch, sources, recipe file."""

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seedbed.config import diff
from seedbed.track import code, files, jsonl
from seedbed.track.run import Run

Changes = dict[str, tuple[Any, Any]]


def since_last(run: Run, recipe_files: Sequence[Path]) -> Changes:
    """Differences between the code that last trained this run and the code of this process."""
    facts = run.code_json()
    before = _comparable(facts, _text_digest(run.path / "code.patch"))
    copies = {f"recipe {path.name}": _text_digest(run.path / path.name) for path in recipe_files}
    before |= {key: digest for key, digest in copies.items() if digest}
    for past in facts.get("resumed") or []:
        before |= {key: new for key, (_, new) in past["changed"].items()}
    now = _now(run.path.parent) | {f"recipe {path.name}": _text_digest(path) for path in recipe_files}
    # A field that an older version did not record counts as equal.
    return {key: pair for key, pair in diff(before, now).items() if key in before and key in now}


def record(run: Run, step: int, changed: Changes) -> None:
    """Add the differences to code.json, which keeps the values of the run's start; entries after a rewound step are dropped."""
    facts = run.code_json()
    kept = [past for past in facts.get("resumed") or [] if past["step"] <= step]
    new = [*kept, {"step": step, "changed": {key: list(pair) for key, pair in changed.items()}}] if changed else kept
    if new != (facts.get("resumed") or []):
        run.kept_files["code.json"] = jsonl.pretty({**facts, "resumed": new})
        files.write_atomic(run.locate() / "code.json", run.kept_files["code.json"])


def describe(changed: Changes) -> str:
    """The differences in a line."""
    return ", ".join(_words(key, *pair) for key, pair in changed.items())


def _words(key: str, old: Any, new: Any) -> str:
    if key == "commit":
        return f"commit {str(old)[:10]} -> {str(new)[:10]}"
    if key in ("sources of seedbed", "uncommitted changes") or key.startswith("recipe "):
        return f"{key} {'changed' if old and new else 'appeared' if new else 'are gone'}"
    return f"{key} {old} -> {new}"


def _comparable(facts: dict[str, Any], patch: str | None) -> dict[str, Any]:
    """The parts of a code state that decide what a step computes."""
    found = {"seedbed": facts.get("version"), "python": facts.get("python"), **(facts.get("packages") or {})}
    found |= {"sources of seedbed": facts.get("source")}
    found = {key: value for key, value in found.items() if value}
    return found | {key: facts[key] for key in ("commit",) if key in facts} | ({"uncommitted changes": patch} if facts else {})


@functools.cache
def _now(root: Path) -> dict[str, Any]:
    """The state of this process's code, which does not change while it runs."""
    facts = code.state(Path.cwd(), root)
    return _comparable(facts, _digest(facts["patch"].encode(errors="surrogateescape")) if facts.get("patch") else None)


def _text_digest(path: Path) -> str | None:
    try:
        return _digest(path.read_bytes())
    except OSError:
        return None


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
