"""The command that injects faults into small runs and reports whether anything was lost."""

import argparse
from pathlib import Path

from seedbed.cli.parser import Parser, Verb, registrar

VERBS: dict[str, Verb] = {}
verb = registrar(VERBS)


def _drill_arguments(parser: Parser) -> None:
    parser.add_argument("names", nargs="*", default=[], metavar="NAME", help="the drills to run; default: all")
    parser.add_argument("--list", action="store_true", dest="listed", help="list the drills and run none")
    parser.add_argument("--short", action="store_true", help="fewer faults of each kind")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="update the table in this page, such as docs/drills.md")


@verb("drill", "[NAME ...]", "inject faults into small runs and count what is lost; --list, --short", _drill_arguments)
def _drill(given: argparse.Namespace) -> int:
    from seedbed.drills import table

    if given.listed:
        return table.show(given.json)
    return table.drill(given.names, short=given.short, as_json=given.json, page=given.write)
