"""How to repeat a run today: what puts its code back, its commands, and what they do not repeat."""

import shlex
from pathlib import Path
from typing import Any

from seedbed import recipes
from seedbed.config import diff, flat, to_json
from seedbed.errors import UserError
from seedbed.track import code
from seedbed.track.run import Run

_EVENTS = {
    "edited": "its files were edited by hand and accepted at step {step}",
    "early_stop": "it stopped early: add --until {step}",
    "pack": "it trained in a pack with other trials; alone, its numbers agree up to rounding",
}


def reproduction(run: Run) -> dict[str, Any]:
    """Commands that put the code back (`before`), those that train (`command`), and `remarks` on what differs all the same."""
    facts, state, patch, file = run.config_json(), run.code_json(), run.path / "code.patch", Path(run.config_json()["recipe"])
    before = [f"git checkout {shlex.quote(str(state['commit']))}"] if state.get("commit") else []
    before += [f"git apply {shlex.quote(str(patch))}"] if patch.is_file() else []
    (changes, remarks), version, kept = _against_preset_now(facts), code.version(), run.path / file.name
    is_edited = kept.is_file() and not (file.is_file() and file.read_bytes() == kept.read_bytes())
    is_other = state.get("version") not in (None, version)
    known = {
        f"its code had uncommitted changes, and {patch} is missing": state.get("dirty") and not patch.is_file(),
        code.left_out(state): code.left_out(state),
        f"seedbed {state.get('version')} trained it, and {version} is installed: numbers may differ": is_other,
        "the installed seedbed has other sources than those that trained it: numbers may differ": not is_other
        and state.get("source") not in (None, code.source_digest()),
        "it was resumed with other code, which no command restores": state.get("resumed"),
        f"{file} has changed or is gone; the run's copy is {kept}": is_edited,
        "a time budget decided its length, which is another one on another machine": facts["config"].get("budget"),
    }
    known |= {_EVENTS.get(str(event.get("kind")), "").format(step=event.get("step")): True for event in run.events()}
    remarks += [text for text, holds in known.items() if text and holds]
    return {"before": before, "command": run.command(changes), "remarks": remarks}


def _against_preset_now(facts: dict[str, Any]) -> tuple[dict[str, Any] | None, list[str]]:
    """The changes against the preset of today, where it is another one; files of users are not executed."""
    if recipes.is_file_name(facts["recipe"]):
        return None, []
    try:
        now, own = flat(to_json(recipes.find(facts["recipe"])[0].preset(facts["preset"]))), flat(facts["config"])
    except UserError as problem:
        return None, [f"its preset is gone: {problem}"]
    differing = diff(now, own)
    moved = [key for key in differing if key not in (facts.get("changes") or {})]
    shared = {key: value for key, (_, value) in differing.items() if key in now and key in own}
    remarks = [f"the preset has changed since; the command restores {', '.join(sorted(shared.keys() & moved))}"]
    lost = [key for key in moved if key not in shared]
    return (shared if moved else None), remarks * (len(lost) < len(moved)) + [f"not restored: {', '.join(lost)}"] * bool(lost)
