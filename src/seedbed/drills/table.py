"""The list of drills, how they run, and their results as a table, as JSON and as a page."""

import contextlib
import json
import re
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seedbed.drills import crash, damage, disconnects, training_faults
from seedbed.drills.sandbox import DrillResult, Failed, NotRun, Sandbox, preload
from seedbed.errors import EXIT_FAILED, EXIT_OK, UserError
from seedbed.track import code, files, jsonl
from seedbed.track.text import duration, table

RESULTS = Path("drills.json")
_MARKS = ("<!-- drills: written by `seedbed drill --write` -->", "<!-- end of drills -->")


@dataclass(frozen=True)
class Drill:
    """A kind of fault, the function that injects it, its time limit in seconds, and how exactly runs agree afterwards."""

    name: str
    act: Callable[[Sandbox, DrillResult], None]
    limit: float = 300.0
    exact: str = "yes"

    @property
    def about(self) -> str:
        return (self.act.__doc__ or "").strip().partition("\n")[0]


OTHER_SUMS = "same batch, other sums: losses within "
DRILLS = [
    Drill("kill-save", crash.kill_save),
    Drill("kill-run", crash.kill_run, 600.0),
    Drill("signals", crash.signals),
    Drill("disk-full", crash.disk_full),
    Drill("power-loss", crash.power_loss, 600.0),
    Drill("damaged-checkpoint", damage.checkpoints),
    Drill("damaged-data", damage.data),
    Drill("not-finite", training_faults.not_finite),
    Drill("out-of-memory", training_faults.out_of_memory, exact=OTHER_SUMS + "1e-4"),
    Drill("feed", training_faults.feed),
    Drill("hang", training_faults.hang),
    Drill("mirrors", disconnects.mirrors),
    Drill("sizes", training_faults.sizes, exact="same batch: losses within 1e-5"),
    Drill("ranks", disconnects.ranks, 600.0, OTHER_SUMS + "1e-5"),
    Drill("two-processes", damage.two_processes),
    Drill("clock", damage.clock),
    Drill("config", damage.config),
    Drill("hang-up", disconnects.hang_up),
    Drill("parents", disconnects.parents, 600.0, OTHER_SUMS + "1e-5"),
    Drill("slow-clients", disconnects.slow_clients, exact="-"),
    Drill("million-steps", damage.million_steps),
    Drill("moved-folder", damage.moved_folder),
    Drill("sharded-manifest", damage.sharded_manifest, exact=OTHER_SUMS + "1e-5"),
    Drill("edited-config", damage.edited_config),
]


def show(as_json: bool) -> int:
    if as_json:
        return jsonl.print_json({drill.name: drill.about for drill in DRILLS})
    print(table(("drill", "what is injected"), [(drill.name, drill.about) for drill in DRILLS]))
    return EXIT_OK


def drill(names: Sequence[str], *, short: bool, as_json: bool, page: Path | None) -> int:
    """Runs these drills, or all; 1 when anything was lost or not reported."""
    chosen = [_find(name) for name in names] or DRILLS
    if page and not page.is_file():
        raise UserError(f"there is no page {page}; it must contain the two marks around the table")
    preload()
    found, results = [], []
    for one in chosen:
        found.append(run_drill(one, short))
        results = _keep(found)  # after each drill, so that an interrupt loses none
        if not as_json:
            print(_line(found[-1]), flush=True)
    if page:
        # The table goes between the page's two marks.
        head, mark, rest = page.read_text(encoding="utf-8").partition(_MARKS[0])
        _, end, tail = rest.partition(_MARKS[1])
        if not mark or not end:
            raise UserError(f"{page} lacks the lines {_MARKS[0]} and {_MARKS[1]}, between which the table goes")
        files.write_atomic(page, f"{head}{mark}\n{markdown(results)}\n{end}{tail}")
    print(json.dumps(found, indent=1) if as_json else f"\n{_total(found)}; kept in {RESULTS}" + f" and {page}" * bool(page))
    return EXIT_OK if all(one["outcome"] != "failed" for one in found) else EXIT_FAILED


def _find(name: str) -> Drill:
    if found := [one for one in DRILLS if one.name == name]:
        return found[0]
    import difflib

    near = difflib.get_close_matches(name, [d.name for d in DRILLS], 1, 0.4)
    raise UserError(f"there is no drill {name!r}; " + (f"did you mean {near[0]}?" if near else "seedbed drill --list names them"))


def run_drill(one: Drill, short: bool) -> dict[str, Any]:
    """Runs one drill in its own folder; returns its result as plain values."""
    result, start = DrillResult(), time.monotonic()
    outcome, problem, exact = "passed", "", "-"
    with tempfile.TemporaryDirectory(prefix="seedbed-drill-", ignore_cleanup_errors=True) as folder:
        try:
            with contextlib.closing(Sandbox(Path(folder).resolve(), short, one.limit)) as sandbox:
                one.act(sandbox, result)
            exact = one.exact
            outcome, problem = _outcome(result)
        except NotRun as reason:
            outcome, problem = "not run", str(reason)
        except Failed as reason:
            outcome, problem = "failed", str(reason)
        except Exception as error:  # a drill that raises must not hide the others
            outcome, problem = "failed", f"{type(error).__name__}: {error}"
            traceback.print_exc()
    return {
        "drill": one.name,
        "injected": one.about,
        "outcome": outcome,
        **({"problem": problem} if problem else {}),
        "num_faults": result.injected,
        "num_detected": result.detected,
        "steps_lost": result.steps_lost,
        "bit_exact": exact,
        "messages": result.messages,
        "seconds": round(time.monotonic() - start, 1),
        "short": short,
        "version": code.version(),
    }


def _outcome(result: DrillResult) -> tuple[str, str]:
    if result.steps_lost:
        return "failed", f"{result.steps_lost} steps lost that a checkpoint should hold"
    if result.detected != result.injected:
        return "failed", f"{result.injected - result.detected} of {result.injected} faults went unnoticed"
    return ("passed", "") if result.injected else ("failed", "nothing was injected")


def _line(one: dict[str, Any]) -> str:
    if one["outcome"] == "not run":
        return f"{one['drill']:<20} not run: {one['problem']}"
    numbers = f"{one['num_faults']:>4} faults  {one['num_detected']:>4} detected  {one['steps_lost']:>2} steps lost"
    text = f"{one['drill']:<20} {one['outcome']:<7} {numbers}  exact: {one['bit_exact']}  ({duration(one['seconds'])})"
    return f"{text}\n  {one['problem']}" if one["outcome"] == "failed" else text


def _total(found: list[dict[str, Any]]) -> str:
    held = [one for one in found if one["outcome"] != "not run"]
    faults, lost = sum(one["num_faults"] for one in held), sum(one["steps_lost"] for one in held)
    failed = sum(one["outcome"] == "failed" for one in held)
    words = f"{len(held)} drills run, {faults} faults injected, {lost or 'no'} steps lost, {failed or 'none'} failed"
    return words + f", {len(found) - len(held)} not run" * (len(found) > len(held))


def _keep(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Updates these drills' results in drills.json. Returns all results in the order of the table."""
    known: dict[str, Any] = {}
    if RESULTS.is_file():
        known = {one["drill"]: one for one in jsonl.read_object(RESULTS).get("drills", []) if isinstance(one, dict)}
    known |= {one["drill"]: one for one in found}
    results = [known[one.name] for one in DRILLS if one.name in known]
    files.write_atomic(RESULTS, jsonl.pretty({"drills": results}))
    return results


def markdown(results: list[dict[str, Any]]) -> str:
    rows = ["| drill | injected | faults | detected | steps lost | bit-exact after |", "|---|---|---|---|---|---|"]
    for one in results:
        cells = [one["num_faults"], one["num_detected"], one["steps_lost"], one["bit_exact"]]
        if one["outcome"] == "not run":
            cells = ["-", f"not run: {one['problem']}", "-", "-"]
        elif one["outcome"] == "failed":
            cells[1] = f"FAILED: {one['problem']}"
        shown = [_cell(str(value)) for value in (f"`{one['drill']}`", one["injected"], *cells)]
        rows.append(f"| {' | '.join(shown)} |")
    messages = [(one["drill"], one.get("messages") or one.get("said", [])) for one in results]  # "said" in older files
    output = [f"- `{name}`: {_cell(message)}" for name, all_of_it in messages for message in _distinct(all_of_it)]
    return "\n".join([_total(results) + ".", "", *rows, "", "Messages:", "", *output])


def _distinct(messages: list[str]) -> list[str]:
    """The first messages that differ in more than numbers and file names."""
    varying = r"[\w.-]*\d[\w.-]*|\S+\.(json|safetensors)|[\w.]+ cannot change"
    kinds = {re.sub(varying, "", text): text for text in reversed(messages)}
    return list(reversed(kinds.values()))[:4]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
