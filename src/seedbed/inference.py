"""Inference with trained runs: `load` returns a run's system with its weights; sample, play and export use it.

No optimizer, no training data and no compilation: what is needed besides the weights was saved with the run.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from seedbed import config as configs
from seedbed.config import Config
from seedbed.data.feed import Data
from seedbed.errors import EXIT_OK, UserError
from seedbed.recipes.saved import open_saved
from seedbed.track import edits
from seedbed.track.run import Run
from seedbed.train import checkpoint, checkpoint_loading
from seedbed.train.capabilities import Exportable, InferenceOptimizable, Playable, WebExportable, require
from seedbed.train.ema import Ema
from seedbed.train.engine import EvalEngine, saved_buffers
from seedbed.train.options import need_data
from seedbed.train.player import Player
from seedbed.train.progress import is_same_data
from seedbed.train.stepper import build
from seedbed.train.system import Request, Sample, System, rank_local_buffers

# Groups of a checkpoint's tensors that inference reads; `ema` takes the place of the weights it averages.
WEIGHTS = ("model", "ema", "ema2")


@dataclass
class TrainedModel:
    """The system of a run with the weights of one checkpoint."""

    run: Run
    config: Config
    data: Data
    system: System
    engine: EvalEngine


def load(root: Path, run_name: str, checkpoint_name: str = "", device: str = "auto", *, all_data: bool = False) -> TrainedModel:
    """A run's system with its best weights, or those of a named checkpoint; averaged ones where the run has them.

    `all_data` opens the training data even where the run has saved the part of it that inference needs.
    """
    run = Run.open(root, run_name)
    recipe, config = open_saved(edits.verified_config(run), run.path)
    config = configs.override(config, [*configs.PLAIN, f"device={device}"])
    saved = _checkpoint(run, checkpoint_name)
    edits.require_own(run, saved.origin, config, saved.path.name)
    data = None if all_data else recipe.open_inference_data(config, run.path)
    data = data or recipe.open_data(config)
    is_same_data(data, saved.state["data"], f"run {run.name}")
    engine = build(recipe, config, data, make=EvalEngine)
    _restore(engine, saved)
    return TrainedModel(run, config, data, engine.system, engine)


def _checkpoint(run: Run, name: str) -> checkpoint_loading.Checkpoint:
    folder = run.path / "checkpoints"
    path = folder / name if name else checkpoint.best(folder)
    if path and not path.is_dir():
        names = ", ".join(p.name for p in checkpoint.steps_in(folder)) or "none yet"
        raise UserError(f"run {run.name} has no checkpoint {name!r}; there are: {names}")
    try:
        saved = checkpoint_loading.load(path, groups=WEIGHTS) if path else checkpoint_loading.load_newest(folder, groups=WEIGHTS)
    except checkpoint_loading.Damaged as problem:
        raise UserError(f"checkpoint damaged: {problem}; name another with --checkpoint") from None
    if saved is None:
        raise UserError(f"run {run.name} has no checkpoint yet; wait for its first save")
    return saved


def _restore(engine: EvalEngine, saved: checkpoint_loading.Checkpoint) -> None:
    """The checkpoint's weights into the system, the averaged ones where there are any."""
    system = engine.system
    params, local = dict(system.named_parameters()), rank_local_buffers(system)
    live: dict[str, dict[str, Any]] = {"model": params | {n: b for n, b in saved_buffers(system).items() if n not in local}}
    what = f"checkpoint {saved.path.name}"
    checkpoint_loading.restore(live, {"model": saved.tensors["model"]}, what)
    if "ema2" in saved.tensors:
        engine.ema2 = Ema(system, engine.config.ema2)
        checkpoint_loading.restore({"ema2": engine.ema2.shadow}, {"ema2": saved.tensors["ema2"]}, what)
    if "ema" in saved.tensors:
        averaged: dict[str, dict[str, torch.Tensor]] = {
            "ema": {name: param for name, param in params.items() if param.requires_grad}
        }
        checkpoint_loading.restore(averaged, {"ema": saved.tensors["ema"]}, what)


# Options by name, or a function that reads them for the recipe's dataclass of options.
Options = dict[str, Any] | Callable[[type], dict[str, Any]]


def sample(root: Path, run_name: str, options: Options, *, checkpoint_name: str = "", write: Any = None) -> int:
    """Print a sample of a trained run, and the names of its files."""
    trained = load(root, run_name, checkpoint_name)
    options = _read(options, trained.system.sample_options)
    if need_data(trained.system.sample_options, options):
        trained = load(root, run_name, checkpoint_name, all_data=True)
    with trained.engine.evaluating():
        shown = trained.system.sample(Request(trained.run.path / "samples" / "asked", options, write), trained.engine)
    _print(shown, text=write is None)
    return EXIT_OK


def inference_curve(root: Path, run_name: str, options: Options, *, checkpoint_name: str = "") -> int:
    """Print the quality of predictions by number of inference-time optimisation steps; picture and numbers go to the run."""
    trained = load(root, run_name, checkpoint_name, all_data=True)
    system = require(trained.system, InferenceOptimizable, "predictions of this recipe are not optimised at inference time")
    request = Request(trained.run.path / "thinking", _read(options, system.curve_options))
    with trained.engine.evaluating():
        _print(system.inference_curve(request, trained.engine))
    return EXIT_OK


def _read(options: Options, kind: type) -> dict[str, Any]:
    return options if isinstance(options, dict) else options(kind)


def _print(shown: Sample, text: bool = True) -> None:
    if text and shown.text:
        print(shown.text)
    for path in shown.files:
        print(path)


def player(root: Path, run_name: str, checkpoint_name: str = "", runtime: str = "torch") -> Player:
    """A player of a trained run; onnx runs on one CPU core, whatever device torch would use."""
    trained = load(root, run_name, checkpoint_name, device="cpu" if runtime == "onnx" else "auto")
    with trained.engine.evaluating():
        return require(trained.system, Playable, "runs of this recipe cannot be played").play(runtime)


def export(root: Path, run_name: str, out: Path, checkpoint_name: str = "", *, to: Literal["files", "web"] = "files") -> int:
    """Write the weights and what is needed to use them elsewhere: safetensors and JSON, or a network for a web page."""
    trained = load(root, run_name, checkpoint_name, device="cpu")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not empty; name a new folder with --out")
    with trained.engine.evaluating():
        if to == "files":
            files = require(trained.system, Exportable, "this recipe has no export").export(out)
        else:
            files = require(trained.system, WebExportable, "this recipe has no web page").export_web(out)
    for path in files:
        print(path)
    return EXIT_OK
