"""Which drills there are, how they are run, and their results as a table, as JSON and as a page."""

from __future__ import annotations

import json
import re
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seedbed.drills import company, crash, damage, trouble
from seedbed.drills.lab import Failed, Lab, NotRun, Tally, opened, preload
from seedbed.errors import UserError
from seedbed.track import code, files, lines
from seedbed.track.text import duration, table

EXIT_OK, EXIT_FAILED = 0, 1
RESULTS = Path("drills.json")
_MARKS = ("<!-- drills: written by `seedbed drill --write` -->", "<!-- end of drills -->")


@dataclass(frozen=True)
class Drill:
    """A kind of fault, what injects it, and the seconds it may take in full."""

    name: str
    act: Callable[[Lab, Tally], None]
    limit: float = 300.0

    @property
    def about(self) -> str:
        return (self.act.__doc__ or "").strip().partition("\n")[0]


DRILLS = [
    Drill("kill-save", crash.kill_save),
    Drill("kill-run", crash.kill_run, 600.0),
    Drill("signals", crash.signals),
    Drill("disk-full", crash.disk_full),
    Drill("power-loss", crash.power_loss, 600.0),
    Drill("damaged-checkpoint", damage.checkpoints),
    Drill("damaged-data", damage.data),
    Drill("not-finite", trouble.not_finite),
    Drill("out-of-memory", trouble.out_of_memory),
    Drill("feed", trouble.feed),
    Drill("hang", trouble.hang),
    Drill("mirrors", company.mirrors),
    Drill("sizes", trouble.sizes),
    Drill("ranks", company.ranks, 600.0),
    Drill("two-processes", damage.two_processes),
    Drill("clock", damage.clock),
    Drill("config", damage.config),
]


def show(as_json: bool) -> int:
    """The drills by name."""
    if as_json:
        print(json.dumps({drill.name: drill.about for drill in DRILLS}, indent=1))
    else:
        print(table(("drill", "what is injected"), [(drill.name, drill.about) for drill in DRILLS]))
    return EXIT_OK


def drill(names: Sequence[str], *, short: bool, as_json: bool, page: Path | None) -> int:
    """Hold these drills, or all of them; 1 when anything was lost or not told."""
    chosen = [_find(name) for name in names] or DRILLS
    if page and not page.is_file():
        raise UserError(f"there is no page {page}; it must hold the two marks between which the table goes")
    preload()
    found, results = [], []
    for one in chosen:
        found.append(hold(one, short))
        results = _keep(found)  # after each: who stops here keeps what was held
        if not as_json:
            print(_line(found[-1]), flush=True)
    if page:
        _write_page(page, results)
    print(json.dumps(found, indent=1) if as_json else f"\n{_closing(found)}; kept in {RESULTS}" + f" and {page}" * bool(page))
    return EXIT_OK if all(one["outcome"] != "failed" for one in found) else EXIT_FAILED


def _find(name: str) -> Drill:
    for one in DRILLS:
        if one.name == name:
            return one
    import difflib

    near = difflib.get_close_matches(name, [d.name for d in DRILLS], 1, 0.4)
    raise UserError(f"there is no drill {name!r}; " + (f"did you mean {near[0]}?" if near else "seedbed drill --list names them"))


def hold(one: Drill, short: bool) -> dict[str, Any]:
    """One drill in a folder of its own: how it ended, in plain values."""
    tally, start = Tally(), time.monotonic()
    outcome, problem = "passed", ""
    with tempfile.TemporaryDirectory(prefix="seedbed-drill-", ignore_cleanup_errors=True) as folder:
        try:
            with opened(Path(folder).resolve(), short, one.limit) as lab:
                one.act(lab, tally)
            outcome, problem = _judged(tally)
        except NotRun as reason:
            outcome, problem = "not run", str(reason)
        except Failed as reason:
            outcome, problem = "failed", str(reason)
        except Exception as error:  # a drill that stumbles must not hide the others
            outcome, problem = "failed", f"{type(error).__name__}: {error}"
            traceback.print_exc()
    return {
        "drill": one.name,
        "injected": one.about,
        "outcome": outcome,
        **({"problem": problem} if problem else {}),
        "num_faults": tally.injected,
        "num_detected": tally.detected,
        "steps_lost": tally.steps_lost,
        "bit_exact": tally.exact,
        "said": tally.said,
        "seconds": round(time.monotonic() - start, 1),
        "short": short,
        "version": code.version(),
    }


def _judged(tally: Tally) -> tuple[str, str]:
    if tally.steps_lost:
        return "failed", f"{tally.steps_lost} steps lost that a checkpoint should have held"
    if tally.detected != tally.injected:
        return "failed", f"{tally.injected - tally.detected} of {tally.injected} faults went unnoticed"
    return ("passed", "") if tally.injected else ("failed", "nothing was injected")


def _line(one: dict[str, Any]) -> str:
    if one["outcome"] == "not run":
        return f"{one['drill']:<20} not run: {one['problem']}"
    numbers = f"{one['num_faults']:>4} faults  {one['num_detected']:>4} detected  {one['steps_lost']:>2} steps lost"
    text = f"{one['drill']:<20} {one['outcome']:<7} {numbers}  exact: {one['bit_exact']}  ({duration(one['seconds'])})"
    return f"{text}\n  {one['problem']}" if one["outcome"] == "failed" else text


def _closing(found: list[dict[str, Any]]) -> str:
    held = [one for one in found if one["outcome"] != "not run"]
    faults, lost = sum(one["num_faults"] for one in held), sum(one["steps_lost"] for one in held)
    failed = sum(one["outcome"] == "failed" for one in held)
    words = f"{len(held)} drills held, {faults} faults injected, {lost or 'no'} steps lost, {failed or 'none'} failed"
    return words + f", {len(found) - len(held)} not run" * (len(found) > len(held))


def _keep(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Renew these drills' results in drills.json; those of others stay. All of them, in the order of the table."""
    known: dict[str, Any] = {}
    if RESULTS.is_file():
        known = {one["drill"]: one for one in lines.read_object(RESULTS).get("drills", []) if isinstance(one, dict)}
    known |= {one["drill"]: one for one in found}
    results = [known[one.name] for one in DRILLS if one.name in known]
    files.write_atomic(RESULTS, lines.pretty({"drills": results}))
    return results


def _write_page(page: Path, results: list[dict[str, Any]]) -> None:
    """Put the table between the page's two marks."""
    text = page.read_text(encoding="utf-8")
    head, mark, rest = text.partition(_MARKS[0])
    _, end, tail = rest.partition(_MARKS[1])
    if not mark or not end:
        raise UserError(f"{page} lacks the lines {_MARKS[0]} and {_MARKS[1]}, between which the table goes")
    files.write_atomic(page, f"{head}{mark}\n{markdown(results)}\n{end}{tail}")


def markdown(results: list[dict[str, Any]]) -> str:
    """The results as a table for a page, with their sum."""
    rows = ["| drill | injected | faults | detected | steps lost | bit-exact after |", "|---|---|---|---|---|---|"]
    for one in results:
        cells = [one["num_faults"], one["num_detected"], one["steps_lost"], one["bit_exact"]]
        if one["outcome"] == "not run":
            cells = ["-", f"not run: {one['problem']}", "-", "-"]
        elif one["outcome"] == "failed":
            cells[1] = f"FAILED: {one['problem']}"
        shown = [_cell(str(value)) for value in (f"`{one['drill']}`", one["injected"], *cells)]
        rows.append(f"| {' | '.join(shown)} |")
    said = [f"- `{one['drill']}`: {_cell(sentence)}" for one in results for sentence in _varied(one["said"])]
    return "\n".join([_closing(results) + ".", "", *rows, "", "What a person reads:", "", *said])


def _varied(said: list[str], most: int = 4) -> list[str]:
    """The first sentences that differ in more than their numbers and names of files."""
    kinds = {re.sub(r"[\w.-]*\d[\w.-]*|\S+\.(json|safetensors)|[\w.]+ cannot change", "", text): text for text in reversed(said)}
    return list(reversed(kinds.values()))[:most]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
