"""Verbs that use trained runs."""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from seedbed.cli.failures import RENAMED_OPTIONS
from seedbed.cli.parser import Parser, argument, declares, number, verb
from seedbed.cli.reporting import open_if_asked, server_arguments
from seedbed.cli.trusting import confirm, trust_argument
from seedbed.errors import UserError

_checkpoint_argument = argument("--checkpoint", default="", metavar="STEP", help="such as step-000240; default: the best")
_FORMATS = (
    "files: safetensors and JSON for seedbed, any recipe; hf: a folder that transformers loads, and gguf: a file of llama.cpp, "
    "language models of Llama's shape; onnx: a network; web: a page that runs the network in the browser"
)


@declares
def _takes_recipe_options(parser: Parser) -> None:
    parser.takes_recipe_options = True


@verb("sample", "RUN [--prompt TEXT] [options]", "generate samples from a run")
@argument("name", metavar="RUN", help="further options depend on the recipe: see seedbed sample RUN --help")
@_checkpoint_argument
@argument("--no-stream", action="store_true", help="print the sample when it is complete")
@trust_argument
@_takes_recipe_options
def _sample(given: argparse.Namespace) -> int:
    confirm(given)
    from seedbed import inference

    write = None if given.no_stream else _stream
    read = partial(recipe_options, given, "sample")
    return inference.sample(given.runs, given.name, read, checkpoint_name=given.checkpoint, write=write)


def _stream(text: str) -> None:
    from seedbed.track.text import safe

    print(safe(text), end="", flush=True)


@verb("inference-curve", "RUN [options]", "quality by number of inference-time optimisation steps")
@argument("name", metavar="RUN", help="further options depend on the recipe: see seedbed inference-curve RUN --help")
@trust_argument
@_checkpoint_argument
@_takes_recipe_options
def _inference_curve(given: argparse.Namespace) -> int:
    confirm(given)
    from seedbed import inference

    read = partial(recipe_options, given, "inference-curve")
    return inference.inference_curve(given.runs, given.name, read, checkpoint_name=given.checkpoint)


@verb("play", "RUN [--open] [--runtime onnx]", "play a world model in the browser")
@argument("name", metavar="RUN")
@server_arguments(8766)
@trust_argument
@argument("--runtime", choices=("torch", "onnx"), default="torch", help="onnx: ONNX Runtime on one processor core")
@_checkpoint_argument
def _play(given: argparse.Namespace) -> int:
    from seedbed.serve.server import needs

    needs()
    confirm(given)
    from seedbed.serve import play

    then = partial(open_if_asked, given)
    server = play.PlayServer(given.runs, given.runtime, given.checkpoint)
    return play.play(server, given.name, host=given.host, port=given.port, locked=given.token, then=then)


@verb("export", "RUN [--to hf] [--out DIR]", "write weights and config for use elsewhere, or a web page")
@argument("name", metavar="RUN")
@argument("--to", choices=("files", "hf", "gguf", "onnx", "web"), default="files", help=_FORMATS)
@argument("--out", type=Path, metavar="DIR", help="a new folder; default: RUN-export, RUN-hf, RUN-gguf, RUN-onnx or RUN-web")
@trust_argument
@argument("--ort", type=Path, metavar="DIR", help="for web: the folder of the npm package onnxruntime-web")
@argument("--fetch-ort", action="store_true", help="for web: let npm fetch onnxruntime-web")
@_checkpoint_argument
def _export(given: argparse.Namespace) -> int:
    confirm(given)
    from seedbed import inference

    out = given.out or Path(f"{Path(given.name).name}-{'export' if given.to == 'files' else given.to}")
    if given.to != "web":
        if given.ort or given.fetch_ort:
            raise UserError("--ort and --fetch-ort belong to --to web")
        return inference.export(given.runs, given.name, out, given.checkpoint, to=given.to)
    from seedbed.serve import web_page

    with web_page.runtime_files(given.ort, given.fetch_ort) as runtime:
        status = inference.export(given.runs, given.name, out, given.checkpoint, to="web")
        web_page.write_page(out, runtime, Path(given.name).name)
    return status


@verb("publish", "RUN --to hub:USER/NAME [--dry]", "upload weights, model card, samples and plots to the Hugging Face Hub")
@argument("name", metavar="RUN")
@argument("--to", required=True, metavar="hub:USER/NAME", help="a repository that you may write to; made if there is none")
@argument("--form", choices=("files", "hf", "gguf", "onnx"), default="files", help="of the weights: see seedbed export --help")
@argument("--private", action="store_true", help="make the repository private; one that exists is not changed")
@argument("--dry", action="store_true", help="print all that would be uploaded, the whole card too; contacts nothing")
@trust_argument
@_checkpoint_argument
def _publish(given: argparse.Namespace) -> int:
    confirm(given)
    from seedbed.publish import publish

    return publish(given.runs, given.name, given.to, given.form, given.checkpoint, private=given.private, dry=given.dry)


def split_recipe_options(parser: Parser, words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of this verb, and the options of the recipe, which is known later; each of these takes a value.

    With a RUN, `--help` is the recipe's too.
    """
    own, extra, left = [], [], list(words)
    asks_recipe = any(not word.startswith("-") for word in words)
    while left:
        word = left.pop(0)
        name = word.partition("=")[0]
        if word in ("-h", "--help") and asks_recipe:
            extra.insert(0, word)
            continue
        if not name.startswith("--") or name in parser.known_options:
            own.append(word)
            continue
        if name in RENAMED_OPTIONS:
            parser.error(f"{name} is now {RENAMED_OPTIONS[name]}")
        extra.append(word)
        if "=" not in word and left and not left[0].startswith("--"):
            extra.append(left.pop(0))
    return own, extra


def recipe_options(given: argparse.Namespace, verb: str, kind: type) -> dict[str, Any]:
    """The options of a recipe as they were typed, by its dataclass of options; `--help` lists them."""
    from seedbed.train.options import options_of, refuse

    parser = Parser(prog=f"seedbed {verb} {given.name}", description=kind.__doc__, allow_abbrev=False)
    for one in options_of(kind).values():
        read = str if one.kind is str else number(one.kind, one.low, one.high)
        shown = f" (default: {one.default})" if one.default not in (None, ()) else ""
        more: dict[str, Any] = {"action": "append"} if one.many else {}
        about = one.help + shown.replace("%", "%%")
        parser.add_argument(one.flag, dest=one.name, type=read, default=argparse.SUPPRESS, metavar="X", help=about, **more)
    for word in given.recipe_options:
        if word.startswith("--") and word.partition("=")[0] not in parser.known_options:
            refuse(word.partition("=")[0], kind)
    return vars(parser.parse_args(given.recipe_options))
