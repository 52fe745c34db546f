"""Checks that config.json and the checkpoints of a run are unmodified: edited or foreign ones are refused until accepted.

config.json holds the hash of its values; a checkpoint names its run and the values it was trained with. Runs of older versions
lack some of this and are taken as they are. Needs no torch.
"""

import contextlib
from pathlib import Path
from typing import Any

from seedbed import config as configs
from seedbed.config.saved import is_free, translated
from seedbed.errors import UserError
from seedbed.track import files, jsonl
from seedbed.track.folders import step_names, step_of
from seedbed.track.run import Run
from seedbed.track.text import clip, format_value

Changes = dict[str, tuple[Any, Any]]


def verified_config(run: Run) -> dict[str, Any]:
    """config.json, verified against the hash of its values."""
    facts = run.config_json()
    if not _is_edited(facts):
        return facts
    what = describe(_changes_since(_newest_origin(run)[1], facts["config"])) or "its values differ from its hash"
    raise UserError(
        f"config.json of run {run.name} was edited or is damaged: {what}\n"
        f"put it back, or go on with it as it is: seedbed resume {run.name} --accept-edits"
    )


def require_own(run: Run, written_by: dict[str, Any], config: Any, name: str) -> None:
    """Refuse a checkpoint of another run, or one trained with other values of settings that cannot change during a run."""
    if not (run.path / "config.json").exists():
        return
    facts = run.config_json()
    if _identity(written_by) in (facts.get("accepted") or []):
        return
    accept = f"or use it all the same: seedbed resume {run.name} --accept-edits"
    if written_by.get("id") != facts.get("id"):
        other = f"run {clip(str(written_by.get('name')), 80)}" if written_by.get("name") else "another run or an older version"
        raise UserError(f"checkpoint {name} was written by {other}, not by run {run.name}; move it away, {accept}")
    changed = {key: pair for key, pair in _changes_since(written_by, configs.to_json(config)).items() if not is_free(key)}
    if changed:
        raise UserError(
            f"checkpoint {name} was trained with other values than config.json of run {run.name} has: {describe(changed)}\n"
            f"put config.json back, {accept}"
        )


def accept(run: Run) -> str:
    """Accept config.json and the newest checkpoint as they are; recorded in config.json and as an event.

    What was accepted, in words; nothing when all is as the run wrote it.
    """
    with run.lock():
        facts = run.config_json()
        step, newest = _newest_origin(run)
        changed, foreign = _changes_since(newest, facts["config"]), bool(newest) and newest.get("id") != facts.get("id")
        if not foreign and not _is_edited(facts) and all(map(is_free, changed)):
            return ""
        accepted = [*(facts.get("accepted") or []), *([_identity(newest)] if newest else [])]
        new = {**facts, "hash": _hash(facts), "accepted": list(dict.fromkeys(accepted))}
        files.write_atomic(run.path / "config.json", jsonl.pretty(new))
        what = describe(changed) or "config.json was edited"
        what = f"a checkpoint of run {newest.get('name')}, {what}" if foreign else what
        pairs = {key: list(pair) for key, pair in changed.items()}
        run.event(step, "edited", what=what, changed=pairs, hash=[facts.get("hash"), new["hash"]])
        run.close()
    return what


def describe(changes: Changes) -> str:
    words = [f"{key} {clip(format_value(old), 40)} -> {clip(format_value(new), 40)}" for key, (old, new) in changes.items()]
    return ", ".join(words[:5]) + (f" and {len(words) - 5} more" if len(words) > 5 else "")


def _is_edited(facts: dict[str, Any]) -> bool:
    return facts.get("hash") != _hash(facts) if "hash" in facts or "id" in facts else False


def _hash(facts: dict[str, Any]) -> str:
    return configs.digest_values(configs.flat(facts["config"]))


def _identity(written_by: dict[str, Any]) -> str:
    return f"{written_by.get('id')}:{written_by.get('hash')}"


def _newest_origin(run: Run) -> tuple[int, dict[str, Any]]:
    """The step of the newest checkpoint that has a manifest, and what it records about its run."""
    folder = Path(run.path) / "checkpoints"
    for name in reversed(step_names(folder)):
        with contextlib.suppress(UserError):
            found = jsonl.read_object(folder / name / "manifest.json").get("run") or {}
            return step_of(name) or 0, found if isinstance(found, dict) else {}
    return 0, {}


def _changes_since(written_by: dict[str, Any], values: dict[str, Any]) -> Changes:
    """The settings that differ from those of a checkpoint; keys that only one version has are ignored."""
    found = written_by.get("config")
    before, now = (translated(configs.flat(v)) if isinstance(v, dict) else {} for v in (found, values))
    return {key: pair for key, pair in configs.diff(before, now).items() if key in before and key in now}
