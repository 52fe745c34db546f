"""`--trust`: the user confirms the code that a run or a sweep names."""

import argparse
import sys

from seedbed.cli.parser import argument

trust_argument = argument("--trust", action="store_true", help="trust and execute the recipe file that it names; read it first")


def confirm(given: argparse.Namespace) -> None:
    """With --trust: record that the user trusts the code of a run or a sweep, and print what it is."""
    if not given.trust:
        return
    from seedbed.recipes.saved import confirm_saved
    from seedbed.track.run_names import find_folder

    if getattr(given, "join", None):
        from seedbed.tune.sweep import verbs

        found = verbs.confirm(given.runs, given.join)
    else:
        found = confirm_saved(find_folder(given.runs, given.name).config_json())
    for code in found:
        print(f"trusted: {code}", file=sys.stderr)
    if not found:
        print("--trust: nothing to confirm, the recipe is an installed one", file=sys.stderr)
