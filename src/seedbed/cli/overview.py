"""What `seedbed`, `seedbed --help` and `seedbed runs --help` print."""

from pathlib import Path

from seedbed.cli import VERBS

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
    """List recipes, presets and the last runs."""
    from seedbed.recipes import catalogue, names
    from seedbed.report import listing
    from seedbed.track import jsonl
    from seedbed.track.text import clip, width

    known = {name: catalogue.describe(name) for name in names()}
    found = listing.summaries(root)
    if as_json:
        return jsonl.print_json({"recipes": known, "runs": found})
    print("seedbed: train generative models from scratch\n\nrecipes")
    longest = max((len(f"{n}/{p}") for n, presets in known.items() for p in presets), default=0)
    for name, presets in known.items():
        for preset, text in presets.items():
            print(clip(f"  {f'{name}/{preset}':<{longest}}  {text}", width()))
    print("  or your own file: seedbed train path/to/recipe.py")
    if found:
        print(f"\nlast runs ({len(found)} in {root})\n" + listing.runs_table(listing.folded(found)[:5]))
    print("\ntry: seedbed demo · seedbed train RECIPE/PRESET steps=240 -m why · seedbed --help")
    return 0


def help_text() -> str:
    """All verbs by section."""
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
    """The verbs of `runs` or `data`."""
    for name, found in VERBS.items():
        if name.startswith(f"{group} "):
            print(f"  seedbed {name} {found.usage}\n      {found.about}")
    return 0
