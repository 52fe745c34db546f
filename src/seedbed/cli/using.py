"""Verbs that use trained runs."""

import argparse
from functools import partial
from pathlib import Path

from seedbed.cli.parser import Parser, Verb, number, registrar
from seedbed.cli.recipe_options import recipe_options
from seedbed.cli.trusting import confirm, trust_argument
from seedbed.errors import UserError

VERBS: dict[str, Verb] = {}
verb = registrar(VERBS)


def _sample_arguments(parser: Parser) -> None:
    parser.add_argument("name", metavar="RUN", help="further options depend on the recipe: see seedbed sample RUN --help")
    _checkpoint_argument(parser)
    parser.add_argument("--no-stream", action="store_true", help="print the sample when it is complete")
    trust_argument(parser)
    parser.takes_recipe_options = True


def _checkpoint_argument(parser: Parser) -> None:
    parser.add_argument("--checkpoint", default="", metavar="STEP", help="such as step-000240; default: the best")


@verb("sample", "RUN [--prompt TEXT] [options]", "generate samples from a run", _sample_arguments)
def _sample(given: argparse.Namespace) -> int:
    confirm(given)
    from seedbed import inference

    write = None if given.no_stream else _stream
    read = partial(recipe_options, given, "sample")
    return inference.sample(given.runs, given.name, read, checkpoint_name=given.checkpoint, write=write)


def _stream(text: str) -> None:
    from seedbed.track.text import safe

    print(safe(text), end="", flush=True)


def _inference_curve_arguments(parser: Parser) -> None:
    parser.add_argument(
        "name", metavar="RUN", help="further options depend on the recipe: see seedbed inference-curve RUN --help"
    )
    trust_argument(parser)
    _checkpoint_argument(parser)
    parser.takes_recipe_options = True


_CURVE = "quality by number of inference-time optimisation steps"


@verb("inference-curve", "RUN [options]", _CURVE, _inference_curve_arguments)
def _inference_curve(given: argparse.Namespace) -> int:
    confirm(given)
    from seedbed import inference

    read = partial(recipe_options, given, "inference-curve")
    return inference.inference_curve(given.runs, given.name, read, checkpoint_name=given.checkpoint)


def _play_arguments(parser: Parser) -> None:
    parser.add_argument("name", metavar="RUN")
    parser.add_argument("--port", type=number(int, 0, 65535), default=8766, metavar="N", help="default 8766; 0: any free port")
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="H", help="address to listen on, for other machines; needs --token"
    )
    parser.add_argument("--token", action="store_true", help="require the token in the address for every request")
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    trust_argument(parser)
    parser.add_argument("--runtime", choices=("torch", "onnx"), default="torch", help="onnx: ONNX Runtime on one processor core")
    _checkpoint_argument(parser)


@verb("play", "RUN [--open] [--runtime onnx]", "play a world model in the browser", _play_arguments)
def _play(given: argparse.Namespace) -> int:
    from seedbed.serve.server import needs

    needs()
    confirm(given)
    from seedbed.serve import play

    def show(address: str) -> None:
        if given.open:
            import webbrowser

            webbrowser.open(address)

    server = play.PlayServer(given.runs, given.runtime, given.checkpoint)
    return play.play(server, given.name, host=given.host, port=given.port, locked=given.token, then=show)


def _export_arguments(parser: Parser) -> None:
    parser.add_argument("name", metavar="RUN")
    parser.add_argument(
        "--to", choices=("files", "web"), default="files", help="web: a page that runs the network in the browser"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="a new folder; default: RUN-export or RUN-web")
    trust_argument(parser)
    parser.add_argument("--ort", type=Path, metavar="DIR", help="for web: the folder of the npm package onnxruntime-web")
    parser.add_argument("--fetch-ort", action="store_true", help="for web: let npm fetch onnxruntime-web")
    _checkpoint_argument(parser)


@verb("export", "RUN [--to web] [--out DIR]", "write weights and config for use elsewhere, or a web page", _export_arguments)
def _export(given: argparse.Namespace) -> int:
    confirm(given)
    from seedbed import inference

    out = given.out or Path(f"{Path(given.name).name}-{'web' if given.to == 'web' else 'export'}")
    if given.to == "files":
        if given.ort or given.fetch_ort:
            raise UserError("--ort and --fetch-ort belong to --to web")
        return inference.export(given.runs, given.name, out, given.checkpoint)
    from seedbed.serve import web_page

    with web_page.runtime_files(given.ort, given.fetch_ort) as runtime:
        status = inference.export(given.runs, given.name, out, given.checkpoint, to="web")
        web_page.write_page(out, runtime, Path(given.name).name)
    return status
