"""Commands on single runs: show, diff, rm, journal, note. Each prints and returns an exit code."""

import contextlib
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from seedbed.config import diff, flat
from seedbed.errors import UserError
from seedbed.report import facts, journal, notes, slurm_queue, summaries
from seedbed.report.event_text import event_text
from seedbed.report.tables import config_lines, evaluation_table, model_text
from seedbed.track import clocks, code, jsonl
from seedbed.track.events import details
from seedbed.track.rows import tail_lines
from seedbed.track.run import Run, full_name
from seedbed.track.text import clip, duration, format_value, number, one_line, safe, scaled, size, table, width

_NUM_ROWS, _NUM_EVENTS = 5, 8


def show(root: Path, name: str, as_json: bool) -> int:
    run = Run.open(root, name)
    config, status, short = run.config_json(), run.status(), summaries.summary(run)
    slurm_queue.add([short])
    rows = jsonl.decode(tail_lines(run.path / "rows.jsonl")[-_NUM_ROWS:])
    events = jsonl.decode(tail_lines(run.path / "events.jsonl")[-_NUM_EVENTS:])
    if as_json:
        checkpoints, best = run.checkpoints()
        more = {"rows": rows, "events": events, "checkpoints": checkpoints, "best_checkpoint": best}
        state = {"state": status, "code": run.code_json(), "command": run.command()}
        return jsonl.print_json({**short, **{k: config[k] for k in config if k not in short}, **state, **more})
    of = f" of {number(short['last_step'])}" if short["last_step"] else ""
    print(f"{run.name}  {short['status']} at step {number(short['step'])}{of}")
    for title, text in _overview(run, config, status, short).items():
        if text:
            print(f"  {title:<12} {one_line(text)}")
    changes = config.get("changes") or {}
    print("config" + (" (* changed against the preset)" if changes else ""))
    print("\n".join(config_lines(flat(config["config"]), {"*": changes}, width())))
    _print_rows(rows)
    print(evaluation_table(run.events(), width()))
    if events:
        print("last events")
    for event in events:
        print(clip(f"  {number(event.get('step')):>8}  {one_line(str(event.get('kind'))):<10} {event_text(event)}", width()))
    return 0


def show_model(root: Path, name: str, as_json: bool) -> int:
    run = Run.open(root, name)
    found = next((event for event in run.events() if event.get("kind") == "model"), None)
    if found is None:
        raise UserError(f"run {run.name} has no model table; the model was not built yet")
    about = details(found)
    if as_json:
        return jsonl.print_json(about)
    print(safe(model_text(about)))
    return 0


def _overview(run: Run, config: dict, status: dict, short: dict) -> dict[str, str]:
    checkpoints, best = run.checkpoints()
    kept = f"{len(checkpoints)}: {', '.join(checkpoints[-3:])}" if checkpoints else "none"
    return {
        "recipe": run.title(),
        "why": str(config.get("why") or ""),
        "parent": str(config.get("parent") or ""),
        "created": f"{config.get('created')} ({summaries.age(config.get('created'))} ago)",
        "code": code.describe(run.code_json()),
        "error": str(status.get("error") or ""),
        "queue": f"job {short['queue']}" if short["queue"] else "",
        "loss": number(short["loss"]),
        "best": number(short["best"]) if short["best"] is not None else "",
        "time": clocks.split_in_words(status),
        "checkpoints": kept + (f" (best {best})" if best else ""),
        "folder": f"{run.path} ({size(_folder_size(run.path))})",
        "report": str(run.path / "report.md") if (run.path / "report.md").exists() else "",
        "repeat": run.command(),
    }


def _print_rows(rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    share = "{:.1%}".format
    columns = {"lr": "{:.2e}".format, "items_per_s": scaled, "wait": share, "mfu": share, "memory": size}
    names = [name for name in ("step", "loss", *columns) if any(name in row for row in rows)]
    print("last rows")
    shown = []
    for row in rows:
        known = {name: form(row[name]) if facts.is_number(row.get(name)) else "-" for name, form in columns.items()}
        shown.append(["", *(known.get(name) or number(row.get(name)) for name in names)])
    print(table(["", *names], shown, right=range(len(names) + 1)))


def diff_runs(root: Path, first: str, second: str, as_json: bool) -> int:
    a, b = Run.open(root, first), Run.open(root, second)
    config_a, config_b = a.config_json(), b.config_json()
    settings = diff(flat(config_a["config"]), flat(config_b["config"]))
    found = [results(a), results(b)]
    if as_json:
        return jsonl.print_json({"runs": [a.name, b.name], "config": settings, "results": found})
    if (config_a["recipe"], config_a["preset"]) != (config_b["recipe"], config_b["preset"]):
        settings = {"preset": tuple(full_name(c["recipe"], c["preset"]) for c in (config_a, config_b)), **settings}
    rows = [[key, *(clip(one_line(format_value(value)), 40) for value in pair)] for key, pair in settings.items()]
    print(table(["settings", a.name, b.name], rows or [["(all equal)", "", ""]]))
    shown = [results_in_words(one) for one in found]
    print("\n" + table(["results", a.name, b.name], [[key, shown[0][key], shown[1][key]] for key in shown[0]]))
    return 0


def results(run: Run) -> dict[str, Any]:
    rows, events = run.rows(), run.events()
    (metric, points), best = facts.evaluations(events), facts.best(events)
    mean, sd = facts.mean_and_sd(facts.last_losses(rows))
    saved = run.status()
    return {
        "status": facts.current_status(run, saved),
        "step": rows[-1].get("step") if rows else saved.get("step"),
        "loss": mean,
        "loss_sd": sd,
        "metric": metric,
        "best": best[1] if best else None,
        "last": points[-1][1] if points else None,
        "seconds": rows[-1].get("seconds") if rows else None,
        "items_per_s": facts.median(rows, "items_per_s"),
        "code": code.describe(run.code_json()),
    }


def results_in_words(found: dict[str, Any]) -> dict[str, str]:
    seconds, rate = found["seconds"], found["items_per_s"]
    return {
        "status": f"{found['status']} at step {number(found['step'])}",
        "loss, last rows": number(found["loss"])
        + (f" ± {number(found['loss_sd'])}" if facts.is_number(found["loss_sd"]) else ""),
        "best evaluation": f"{found['metric'] or ''} {number(found['best'])}".strip(),
        "last evaluation": number(found["last"]),
        "training time": duration(seconds) if facts.is_number(seconds) else "-",
        "items per second": scaled(rate) if rate is not None else "-",
        "code": found["code"],
    }


def remove(root: Path, names: list[str], yes: bool) -> int:
    """Delete run folders permanently; their journal entries stay."""
    runs = [Run.open(root, name) for name in dict.fromkeys(names)]
    for run in runs:
        if run.path.is_symlink():
            raise UserError(f"{run.path} is a link to {os.readlink(run.path)}; remove the link yourself, the target stays")
        if journal.open_optional(run.path.parent, run.name) is None and "version" not in run.code_json():
            raise UserError(f"{run.path} is no run: it holds neither config.json nor code.json of one; remove it yourself")
    if not yes and not _agreed(runs):
        print("nothing was removed")
        return 0
    for run in runs:
        with run.lock():
            # The rename removes the run atomically; deleting may be interrupted and is completed later.
            aside = run.path.with_name(f".removed-{run.name}-{os.getpid()}.tmp")
            run.path.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
        if aside.exists():
            raise UserError(f"{run.path} is gone from the list, but parts of it could not be deleted: see {aside}")
        print(f"removed {run.path}")
    return 0


def _agreed(runs: list[Run]) -> bool:
    if not sys.stdin.isatty():
        raise UserError("removing a run cannot be undone; add --yes when there is no terminal")
    for run in runs:
        short = summaries.summary(run)
        print(f"{run.name}  {short['status']}, step {number(short['step'])}, {size(_folder_size(run.path))}")
    with contextlib.suppress(EOFError):
        return input("delete permanently? [y/N] ").strip().lower() in ("y", "yes")
    return False


def print_journal(root: Path, name: str | None, as_json: bool) -> int:
    found = notes.entries(root)
    if name is not None:
        wanted = Path(name).name
        found = [entry for entry in found if entry["run"] == wanted]
        if not found:
            raise UserError(f"the journal {journal.path_of(root)} has no entry for {wanted!r}")
    if as_json:
        return jsonl.print_json(found)
    if name is not None:
        print(safe("\n".join([f"## {found[0]['title']}", found[0]["text"]])))
    elif found:
        print(safe(journal.read(journal.path_of(root))), end="")
    else:
        print(f"no entries yet: {journal.path_of(root)} gains one when a run ends")
    return 0


def _folder_size(path: Path) -> int:
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total
