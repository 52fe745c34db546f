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
    changes, remarks = _against_preset_now(facts)
    before = [f"git checkout {shlex.quote(str(state['commit']))}"] if state.get("commit") else []
    before += [f"git apply {shlex.quote(str(patch))}"] if patch.is_file() else []
    if state.get("dirty") and not patch.is_file():
        remarks.append(f"its code had uncommitted changes, and {patch} is missing")
    remarks += filter(None, [code.left_out(state)])
    if state.get("version") not in (None, code.version()):
        remarks.append(f"seedbed {state['version']} trained it, and {code.version()} is installed: numbers may differ")
    elif state.get("source") not in (None, code.source_digest()):
        remarks.append("the sources of the installed seedbed are not those that trained it: numbers may differ")
    resumed = [past for past in state.get("resumed") or [] if isinstance(past, dict)]
    remarks += [f"from step {p.get('step')} on other code trained it, which no command restores" for p in resumed]
    if (kept := run.path / file.name).is_file() and not (file.is_file() and file.read_bytes() == kept.read_bytes()):
        remarks.append(f"{file} has changed or is gone; the run's copy is {kept}")
    if facts["config"].get("budget"):
        remarks.append("a time budget decided its length, which is another one on another machine")
    found = (_EVENTS.get(str(event.get("kind")), "").format(step=event.get("step")) for event in run.events())
    return {"before": before, "command": run.command(changes), "remarks": [*remarks, *dict.fromkeys(filter(None, found))]}


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
    remarks = [f"the preset has changed since; the command restores {', '.join(set(moved) & shared.keys())}"]
    lost = [key for key in moved if key not in shared]
    return (shared if moved else None), remarks * (len(lost) < len(moved)) + [f"not restored: {', '.join(lost)}"] * bool(lost)
