"""The verb `serve`."""

import argparse

from seedbed.cli.parser import Parser, Verb, number, registrar

VERBS: dict[str, Verb] = {}
verb = registrar(VERBS)


def _serve_arguments(parser: Parser) -> None:
    parser.add_argument("--port", type=number(int, 0, 65535), default=8765, metavar="N", help="default 8765; 0: any free port")
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="H", help="address to listen on, for other machines; needs --token"
    )
    parser.add_argument("--token", action="store_true", help="require the token in the address for every request")
    parser.add_argument("--open", action="store_true", help="open the page in a browser")


@verb("serve", "[--port N] [--open]", "the workbench: live web pages of all runs", _serve_arguments)
def _serve(given: argparse.Namespace) -> int:
    from seedbed.serve.server import needs, serve_app

    needs()
    from seedbed.serve.app import workbench

    def show(address: str) -> None:
        if given.open:
            import webbrowser

            webbrowser.open(address)

    return serve_app(workbench(given.runs), given.host, given.port, locked=given.token, then=show)
