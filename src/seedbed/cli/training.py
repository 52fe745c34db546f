"""Verbs that train a run, and those that use what it learned."""

import argparse
from pathlib import Path

from seedbed.cli import queueing
from seedbed.cli.words import Parser, Verb, number, registrar, settings
from seedbed.errors import UserError

VERBS: dict[str, Verb] = {}
verb = registrar(VERBS)

# ---- training --------------------------------------------------------------------------------------------------------


@verb("demo", "", "train a small GPT on this machine and show what it writes")
def _demo(given: argparse.Namespace) -> int:
    from seedbed.launch import local

    return local.demo(given.runs)


def _train_arguments(parser: Parser) -> None:
    settings(parser, "RECIPE/PRESET")
    parser.add_argument("-m", "--why", default="", metavar="WHY", help="why this run: the journal will tell")
    parser.add_argument("--run", metavar="NAME", help="the run's name; otherwise date, recipe and two words")
    parser.add_argument("--parent", metavar="RUN", help="the run to compare with")
    parser.add_argument("--no-check", action="store_true", help="start without the quick checks; the journal will tell")
    parser.add_argument("--force", action="store_true", help="start although a check failed; the journal will tell")
    parser.add_argument("--anomaly", action="store_true", help="stop at the first NaN of a backward pass and name its line; slow")
    parser.add_argument("--dry", action="store_true", help="two steps of everything, resumed and compared; keeps nothing")
    queueing.place_argument(parser)
    _mirror_argument(parser)


def _mirror_argument(parser: Parser) -> None:
    kinds = "wandb, tensorboard, trackio, mlflow; +checkpoints sends these too; none"
    parser.add_argument("--mirror", metavar="NAME,...", help=f"copy the run to {kinds}")


@verb("train", "RECIPE/PRESET [key=value ...]", "start a run; -m says why, --run names it", _train_arguments)
def _train(given: argparse.Namespace) -> int:
    if not queueing.stays_here(given):
        return queueing.train(given)
    from seedbed.launch import spawn

    num_ranks = spawn.to_train(given.name, given.settings)
    if given.dry:
        spawn.refuse(num_ranks, "--dry")
        return _dry_run(given)
    if num_ranks:
        return spawn.start(num_ranks)
    from seedbed.launch import local
    from seedbed.track.mirrors import choose

    facts = {"run_name": given.run, "why": given.why, "dirty": given.dirty, "parent": given.parent}
    facts["check"] = "skip" if given.no_check else "force" if given.force else "quick"
    facts["mirrors"] = choose.read(given.mirror or "")
    return local.train(given.name, given.settings, root=given.runs, anomaly=given.anomaly, **facts)


def _dry_run(given: argparse.Namespace) -> int:
    from seedbed.launch import dry

    for option in ("run", "parent", "why", "mirror"):
        if getattr(given, option):
            raise UserError(f"--dry keeps nothing, so --{option} has no use; drop one of them")
    return dry.dry_run(given.name, given.settings)


def _resume_arguments(parser: Parser) -> None:
    settings(parser, "RUN")
    parser.add_argument("--force", action="store_true", help="also when the run is finished, or a check before its start fails")
    parser.add_argument("--no-check", action="store_true", help="begin a queued run without the quick checks")
    queueing.place_argument(parser)
    queueing.dry_argument(parser)
    _mirror_argument(parser)


@verb("resume", "RUN [key=value ...]", "go on with a run, bit for bit", _resume_arguments)
def _resume(given: argparse.Namespace) -> int:
    if not queueing.stays_here(given):
        return queueing.resume(given)
    from seedbed.launch import spawn

    queueing.refuse_dry(given)
    num_ranks = spawn.to_resume(given.runs, given.name, given.settings)
    if num_ranks:
        return spawn.start(num_ranks)
    from seedbed.launch import local
    from seedbed.track.mirrors import choose

    mirrors = None if given.mirror is None else choose.read(given.mirror)
    check: local.Check = "skip" if given.no_check else "force" if given.force else "quick"
    return local.resume(given.runs, given.name, given.settings, force=given.force, check=check, mirrors=mirrors)


def _cancel_arguments(parser: Parser) -> None:
    parser.add_argument("name", metavar="NAME", help="a run or a sweep that was handed to a cluster")


@verb("cancel", "RUN|SWEEP", "take its job out of the queue; it is saved first and can go on", _cancel_arguments)
def _cancel(given: argparse.Namespace) -> int:
    from seedbed.launch import slurm

    return slurm.cancel(given.runs, given.name)


# ---- what a trained run can do ---------------------------------------------------------------------------------------

# Each recipe knows some of these and refuses the others by name.
_SAMPLE_OPTIONS = ("prompt", "num", "tokens", "temperature", "top_k", "top_p", "seed", "latents", "steps", "examine")
_THOUGHT_OPTIONS = ("think", "best_of", "early_stop")
_IMAGE_OPTIONS = ("class", "grid", "guidance", "interval", "sampler", "shift", "ema")


def _sample_arguments(parser: Parser) -> None:
    parser.add_argument("name", metavar="RUN")
    parser.add_argument("--prompt", metavar="TEXT", help="what the samples begin with")
    parser.add_argument("--num", type=number(int, 1), metavar="N", help="how many samples")
    parser.add_argument("--tokens", type=number(int, 1), metavar="N", help="how long each is")
    parser.add_argument("--temperature", type=number(float, 0), metavar="T", help="0 always takes the likeliest")
    parser.add_argument("--top-k", type=number(int, 1), metavar="K", help="choose among the K likeliest")
    parser.add_argument("--top-p", type=number(float, 0, 1), metavar="P", help="choose among the likeliest that make up P")
    parser.add_argument("--seed", type=number(int, 0), metavar="N", help="the same seed gives the same samples")
    parser.add_argument("--latents", type=number(int, 1), metavar="N", help="latents to think with")
    parser.add_argument("--steps", type=number(int, 1), metavar="N", help="steps to think for, or from noise to image")
    parser.add_argument("--examine", type=number(int, 1), metavar="N", help="judge on N fresh samples, with maps and curves")
    _thought_arguments(parser)
    _image_arguments(parser)
    parser.add_argument("--checkpoint", default="", metavar="STEP", help="such as step-000240; otherwise the best")
    parser.add_argument("--no-stream", action="store_true", help="print when all is done, not as it comes")


def _thought_arguments(parser: Parser) -> None:
    parser.add_argument("--think", type=number(int, 1), metavar="N", help="steps downhill for every token")
    parser.add_argument("--best-of", type=number(int, 1), metavar="N", help="starts, of which the lowest energy wins")
    parser.add_argument("--early-stop", type=number(float, 0), metavar="E", help="stop when the energy falls by less")


def _image_arguments(parser: Parser) -> None:
    parser.add_argument("--class", metavar="NAME", help="what the images show: a class by name or number, or all")
    parser.add_argument("--grid", metavar="ROWSxCOLUMNS", help="how many images, and how they lie")
    parser.add_argument("--guidance", type=number(float, 0), metavar="W", help="1 is the model as trained, 2 pulls to the class")
    parser.add_argument("--interval", metavar="LOW,HIGH", help="times between which guidance acts, from 0 (noise) to 1")
    parser.add_argument("--sampler", metavar="NAME", help="euler, heun or midpoint")
    parser.add_argument("--shift", type=number(float, 0), metavar="S", help="above 1: more steps near the noise")
    parser.add_argument("--ema", metavar="NAME", help="short or long: which average of the weights")


@verb("sample", "RUN [--prompt TEXT] [options]", "show what a run has learned", _sample_arguments)
def _sample(given: argparse.Namespace) -> int:
    from seedbed.launch import local

    options = {
        name: getattr(given, name)
        for name in _SAMPLE_OPTIONS + _THOUGHT_OPTIONS + _IMAGE_OPTIONS
        if getattr(given, name) is not None
    }
    write = None if given.no_stream else _stream
    return local.sample(given.runs, given.name, options, checkpoint_name=given.checkpoint, write=write)


def _stream(text: str) -> None:
    from seedbed.track.text import safe

    print(safe(text), end="", flush=True)


def _think_arguments(parser: Parser) -> None:
    parser.add_argument("name", metavar="RUN")
    parser.add_argument("--tokens", type=number(int, 2), metavar="N", help="how much of each text to judge")
    parser.add_argument("--starts", type=number(int, 1, 64), metavar="N", help="how wide to think, at most")
    parser.add_argument("--text", action="append", metavar="TEXT", help="a further text, unlike the one trained on")
    parser.add_argument("--checkpoint", default="", metavar="STEP", help="such as step-000240; otherwise the best")


@verb("think", "RUN [--tokens N] [--starts N] [--text TEXT]", "what more steps of thought buy", _think_arguments)
def _think(given: argparse.Namespace) -> int:
    from seedbed.launch import local

    options = {name: getattr(given, name) for name in ("tokens", "starts", "text") if getattr(given, name) is not None}
    return local.think(given.runs, given.name, options, checkpoint_name=given.checkpoint)


def _play_arguments(parser: Parser) -> None:
    parser.add_argument("name", metavar="RUN")
    parser.add_argument("--port", type=number(int, 0, 65535), default=8766, metavar="N", help="8766 unless given; 0: a free one")
    parser.add_argument("--host", default="127.0.0.1", metavar="H", help="an address of this machine, to let others in; --token")
    parser.add_argument("--token", action="store_true", help="nothing is shown without the token in the address")
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    parser.add_argument("--runtime", choices=("torch", "onnx"), default="torch", help="onnx: ONNX Runtime on one processor core")
    parser.add_argument("--checkpoint", default="", metavar="STEP", help="such as step-000240; otherwise the best")


@verb("play", "RUN [--open] [--runtime onnx]", "walk through what a run dreams, in the browser", _play_arguments)
def _play(given: argparse.Namespace) -> int:
    from seedbed.serve.run import needs

    needs()
    from seedbed.serve import play

    def show(address: str) -> None:
        if given.open:
            import webbrowser

            webbrowser.open(address)

    house = play.House(given.runs, given.runtime, given.checkpoint)
    return play.play(house, given.name, host=given.host, port=given.port, locked=given.token, then=show)


def _export_arguments(parser: Parser) -> None:
    parser.add_argument("name", metavar="RUN")
    parser.add_argument("--to", choices=("files", "web"), default="files", help="web: a page that runs the network by itself")
    parser.add_argument("--out", type=Path, metavar="DIR", help="a new folder; otherwise RUN-export or RUN-web")
    parser.add_argument("--ort", type=Path, metavar="DIR", help="for web: the folder of the npm package onnxruntime-web")
    parser.add_argument("--fetch-ort", action="store_true", help="for web: let npm fetch onnxruntime-web")
    parser.add_argument("--checkpoint", default="", metavar="STEP", help="such as step-000240; otherwise the best")


@verb("export", "RUN [--to web] [--out DIR]", "write weights and config to use elsewhere, or a page", _export_arguments)
def _export(given: argparse.Namespace) -> int:
    from seedbed.launch import local

    out = given.out or Path(f"{Path(given.name).name}-{'web' if given.to == 'web' else 'export'}")
    if given.to == "files":
        if given.ort or given.fetch_ort:
            raise UserError("--ort and --fetch-ort belong to --to web")
        return local.export(given.runs, given.name, out, given.checkpoint)
    from seedbed.serve import web_page

    with web_page.runtime_files(given.ort, given.fetch_ort) as runtime:
        status = local.export(given.runs, given.name, out, given.checkpoint, to="web")
        web_page.write_page(out, runtime, Path(given.name).name)
    return status
