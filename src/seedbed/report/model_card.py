"""The model card of an export: README.md with what the run measured and how the files are loaded.

It names no folder of this machine.
"""

import os
import re
import shlex
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seedbed.report import facts
from seedbed.report.run_report import evaluation_line, outcome
from seedbed.track import code
from seedbed.track.run import Run, full_name
from seedbed.track.text import duration, number, one_line, safe

# An absolute path of any system or one under the home folder, up to the next space or quote; not the path of a URL.
_PATH = re.compile(r"(?<![\w.~/:<\\-])(?:~[\w.-]*/|//?(?=[^\s/])|[A-Za-z]:[\\/](?=[^\s/\\])|\\\\(?=\w))[^\s'\"`<>|,;)\]}]*")
# One in quotes, perhaps behind a key: its folders may hold spaces.
_QUOTED = re.compile(r"""(['"])([\w.]+=)?(?:[~/]|[A-Za-z]:[/\\]|\\\\)[^'"]*[/\\]([^'"/\\]+)/*\1""")
_MAX_SAMPLE = 1500
# How each kind of export is loaded: lines of the header, and code in which {folder} is where it lies.
_KINDS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


def without_folders(text: str) -> str:
    """The text with only the last part of every absolute path."""
    return _PATH.sub(lambda found: re.split(r"[\\/]", found[0].rstrip("\\/"))[-1], _QUOTED.sub(r"\1\2\3\1", text))


def model_card(run: Run, folder: str = "", to: str = "files", pictures: Sequence[str] = (), **known: Any) -> str:
    """Markdown with a YAML header. `folder` is where the export lies, or USER/NAME on the Hub.
    `known`: `parameters` and `data`, which the run's events have too, and the name of a `checkpoint` that was chosen."""
    config, events = run.config_json(), run.events()
    recipe, name = os.path.basename(config["recipe"]).removesuffix(".py"), config.get("run", run.name)
    tags = ["tags:", "- seedbed", *([f"- {recipe}"] if re.fullmatch(r"[\w-]+", recipe) else [])]
    header = ["---", *_KINDS[to].get("header", []), *tags, "---"]
    local = folder.rpartition("/")[2] or "FOLDER"
    use = ["```python", _KINDS[to]["use"].replace("{folder}", f'"{local}"'), "```"]
    if "/" in folder:
        use = ["```bash", f"hf download {folder} --local-dir {local}", *use[2:], "", *use]
    if to == "files" and config["recipe"].endswith(".py"):
        trust = f"put it into the working directory, read it, and confirm it: `seedbed sample {local} --trust`"
        use += ["", f"The recipe, `{recipe}.py`, is a file that is not part of this folder. Get it from the author, {trust}."]
    repeat = [without_folders(safe(run.command())), f"seedbed export {shlex.quote(name)} --to {to}"]
    sample = next((e for e in reversed(events) if e.get("kind") == "sample" and e.get("text")), {"text": ""})
    parts = {
        "Plots and samples": [f"![{name}]({name})" for name in pictures],
        "Use": use,
        "Repeat": ["```bash", *repeat, "```"],
        f"Sample at step {sample.get('step')}": [f"    {s}" for s in safe(str(sample["text"]))[:_MAX_SAMPLE].splitlines()],
    }
    first = ["", f"# {_cell(name)}", "", "Trained from scratch with seedbed. Every number below was recorded by the run."]
    table = [f"| {key} | {_cell(value)} |" for key, value in _facts(run, config, events, known).items() if value]
    rest = [line for title, lines in parts.items() if lines for line in ("", f"## {title}", "", *lines)]
    return "\n".join([*header, *first, "", "| | |", "|---|---|", *table, *rest, ""])


def _cell(value: str) -> str:
    return without_folders(one_line(value)).replace("|", "\\|")


def _table(values: dict[str, Any], key: str) -> dict[str, Any]:
    return found if isinstance(found := values.get(key), dict) else {}


def _facts(run: Run, config: dict[str, Any], events: list[Any], known: dict[str, Any]) -> dict[str, str]:
    start, model = (next((e for e in events if e.get("kind") == kind), {}) for kind in ("start", "model"))
    known = {**start, **model, **known}
    data, saved, made = _table(known, "data"), run.status(), run.code_json()
    name = without_folders(f"'{data.get('name') or ''}'")[1:-1]
    sizes = [f"{number(size)} {key[4:].replace('_', ' ')}" for key, size in data.items() if key.startswith("num_")]
    clock, parameters, device = _table(saved, "clock"), known.get("parameters"), str(known.get("device") or "")
    spent: dict[str, Any] = {name: clock.get(key) for key, name in (("train", "train"), ("eval", "evaluation"))}
    return {
        "preset": full_name(config["recipe"], config["preset"]),
        "parameters": f"{parameters:,}" if isinstance(parameters, int) else "",
        "data": ": ".join(filter(None, [name, ", ".join(sizes)])),
        "steps": outcome(run, saved, run.rows()) if saved else "",
        "result": evaluation_line(events),
        "weights": str(known.get("checkpoint") or ""),
        "time": ", ".join(f"{name} {duration(seconds)}" for name, seconds in spent.items() if facts.is_number(seconds)),
        "hardware": f"{device}, {made['num_cores']} cores, {made.get('machine')}" if made.get("num_cores") else device,
        "software": f"seedbed {config.get('version')}"
        + (f", Python {made.get('python')}, torch {_table(made, 'packages').get('torch')}" if made else ""),
        "code": code.describe(made) if made else "",
    }
