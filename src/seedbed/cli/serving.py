"""Verbs that open a page in the browser."""

import argparse

from seedbed.cli.words import Parser, Verb, number, registrar

VERBS: dict[str, Verb] = {}
verb = registrar(VERBS)


def _serve_arguments(parser: Parser) -> None:
    parser.add_argument("--port", type=number(int, 0, 65535), default=8765, metavar="N", help="8765 unless given; 0: a free one")
    parser.add_argument("--host", default="127.0.0.1", metavar="H", help="an address of this machine, to let others in; --token")
    parser.add_argument("--token", action="store_true", help="nothing is shown without the token in the address")
    parser.add_argument("--open", action="store_true", help="open the page in a browser")


@verb("serve", "[--port N] [--open]", "the workbench: every run, live, as a page in the browser", _serve_arguments)
def _serve(given: argparse.Namespace) -> int:
    from seedbed.serve.run import needs, serve_app

    needs()
    from seedbed.serve.app import workbench

    def show(address: str) -> None:
        if given.open:
            import webbrowser

            webbrowser.open(address)

    return serve_app(workbench(given.runs), given.host, given.port, locked=given.token, then=show)
