"""Changes to what a run has written: other settings from some step on, and rows and events that are dropped again."""

from typing import Any

from seedbed.config import diff, flat
from seedbed.track import files, jsonl
from seedbed.track.run import Run, described


def change_config(run: Run, config: Any, base: Any = None, history: list[dict[str, Any]] | None = None) -> None:
    """Update config.json to the settings from now on; without `base`, changes are added to the recorded ones.

    `history` lists the changes during the run, by the step from which they apply.
    """
    run.locate()
    facts = run.config_json()
    new = {**facts, **described(config, base), **({} if history is None else {"history": history})}
    if base is None:
        since = {key: now for key, (_, now) in diff(flat(facts["config"]), flat(new["config"])).items()}
        new["changes"] = {**(facts.get("changes") or {}), **since}
    if new != facts:
        run.kept_files["config.json"] = jsonl.pretty(new)
        files.write_atomic(run.path / "config.json", run.kept_files["config.json"])


def rewind(run: Run, step: int, *, events: bool = True) -> None:
    """Drop rows (and events) after `step` and any partial last line: training will write them again."""
    run.locate()
    run.close()
    for name in ("rows.jsonl", "events.jsonl") if events else ("rows.jsonl",):
        old = jsonl.read_bytes(run.path / name)
        kept = b"".join(line + b"\n" for line in old.split(b"\n") if _is_upto(line, step))
        if kept != old:
            files.write_atomic(run.path / name, kept)
    for listener in run.listeners:
        listener("rewind", {"step": step})


def _is_upto(line: bytes, step: int) -> bool:
    found = jsonl.decode([line])
    at = found[0].get("step") if found else None
    return bool(found) and not (isinstance(at, int | float) and at > step)
