"""Verbs that watch runs as they train, and those that show them to others."""

import argparse

from seedbed.cli.words import Parser, Verb, registrar

VERBS: dict[str, Verb] = {}
verb = registrar(VERBS)


def _mirror_arguments(parser: Parser) -> None:
    parser.add_argument("names", nargs="+", metavar="RUN")
    parser.add_argument("--to", required=True, metavar="NAME,...", help="wandb, tensorboard, trackio, mlflow; +checkpoints")


@verb("runs mirror", "RUN ... --to NAME", "copy runs to W&B, TensorBoard, trackio or MLflow after the fact", _mirror_arguments)
def _runs_mirror(given: argparse.Namespace) -> int:
    from seedbed.track.mirrors import choose
    from seedbed.track.run import Run

    choices = choose.read(given.to)
    for run in [Run.open(given.runs, name) for name in given.names]:
        choose.send(run, choices, print)
    return 0
