"""What `seedbed`, `seedbed --help` and `seedbed runs --help` print."""

from pathlib import Path

from seedbed.cli import VERBS
from seedbed.track.text import clip

SECTIONS = {
    "demo": "train",
    "sample": "use",
    "find-lr": "measure",
    "doctor": "examine",
    "data prepare": "data",
    "runs list": "inspect runs",
    "top": "watch and share",
}


def overview(root: Path, as_json: bool) -> int:
    from seedbed.recipes import catalogue, names
    from seedbed.report import summaries
    from seedbed.track import jsonl
    from seedbed.track.text import width

    known, measured = {name: catalogue.describe(name) for name in names()}, catalogue.measured()
    found = summaries.with_queue(root)
    if as_json:
        return jsonl.print_json({"recipes": known, "measured": measured, "runs": found})
    print("seedbed: train generative models from scratch")
    for name, presets in known.items():
        about = measured.get(name, {})
        print(f"\n{name}: {about.get('about', 'a recipe')}")
        for preset, text in presets.items():
            print(_preset_line(f"{name}/{preset}", about.get(preset, {"what": text}), text, min(width(), 160)))
    print("\nor your own file: seedbed train path/to/recipe.py")
    if found:
        print(f"\nlast runs ({len(found)} in {root})\n" + summaries.runs_table(summaries.folded(found)[:5]))
    print("\ntry: seedbed demo · seedbed train RECIPE/PRESET -m why · seedbed --help")
    return 0


def _preset_line(name: str, about: dict[str, str], text: str, columns: int) -> str:
    """What it trains, in the preset's own words where they fit, on which machine, how long, and with which result."""
    end = f"{about.get('machine', ''):<7}  {about.get('time', ''):<7}  {about.get('result', 'not measured'):<14}".rstrip()
    room = columns - 61
    words = text if len(text) <= room else about["what"]
    return clip(f"  {name:<23}  {words:<{room}}  {end}" if len(words) <= room else f"  {name:<23}  {words}", columns)


def help_text() -> str:
    parts = ["usage: seedbed [--runs DIR] VERB ...", "", "`seedbed` alone lists the recipes, their presets and the last runs."]
    for name, found in VERBS.items():
        if name in SECTIONS:
            parts += ["", SECTIONS[name]]
        parts.append(f"  {f'{name} {found.usage}':<44} {found.about}")
    parts += [
        "",
        "every verb takes --help, --runs DIR and --dirty; verbs that list something take --json; see also seedbed --version",
    ]
    codes = "0 done, 1 failed, 2 wrong input; resumable: 129, 130, 138, 143 after a signal, 75 when stalled"
    return "\n".join([*parts, f"exit codes: {codes}"])


def group_help(group: str) -> int:
    for name, found in VERBS.items():
        if name.startswith(f"{group} "):
            print(f"  seedbed {name} {found.usage}\n      {found.about}")
    return 0
