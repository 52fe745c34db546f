"""Inference with trained runs: `load` returns a run's system with its weights; sample, play and export use it.

No optimizer, no training data and no compilation: what is needed besides the weights was saved with the run.
"""

import contextlib
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from seedbed import config as configs
from seedbed.config import Config
from seedbed.data import inference_data
from seedbed.data.feed import Data, Source
from seedbed.data.tokenizers import Tokenizer
from seedbed.errors import EXIT_OK, UserError
from seedbed.recipes import INFERENCE, Recipe
from seedbed.recipes.saved import open_saved
from seedbed.track import code, edits
from seedbed.track.run import Run
from seedbed.track.run_names import find_folder
from seedbed.track.text import format_value, one_line
from seedbed.train import checkpoint, checkpoint_loading, exports
from seedbed.train.capabilities import InferenceOptimizable, LlamaExportable, OnnxExportable, Playable, WebExportable, require
from seedbed.train.engine import EvalEngine
from seedbed.train.inference_weights import WEIGHTS, restore
from seedbed.train.options import need_data
from seedbed.train.player import Player
from seedbed.train.progress import is_same_data
from seedbed.train.stepper import build
from seedbed.train.system import Request, Sample, System

FORMATS = ("files", "hf", "gguf", "onnx", "web")
PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@dataclass
class TrainedModel:
    """The system of a run with the weights of one checkpoint; `data` may be the part that was saved with the run."""

    run: Run
    recipe: Recipe
    config: Config
    data: Data
    system: System
    engine: EvalEngine
    with_all_data: Callable[[], "TrainedModel"]

    @property
    def model(self) -> nn.Module:
        """The network: `model` or `net` of the system, else the system itself."""
        found = (getattr(self.system, name, None) for name in ("model", "net"))
        return next((one for one in found if isinstance(one, nn.Module)), self.system)

    def sample(self, folder: Path | None = None, **options: Any) -> Sample:
        """A sample with the options of `seedbed sample`; its files go to `folder`, by default that of the run."""
        return self.answer(Request(folder or self.run.path / "samples" / "asked", options))

    def answer(self, request: Request) -> Sample:
        """A sample; where an option needs the training data, that is opened."""
        if need_data(self.system.sample_options, request.options):
            self = self.with_all_data()
        with self.evaluating():
            return self.system.sample(request, self.engine)

    def evaluate(self, source: Source | str | Path | None = None) -> dict[str, float]:
        """Metrics by name, with averaged weights: on the run's own validation data, or on given ones.

        Given are a text or the `Path` of a text file, a folder of images, or that of a recording; a `Source` to any recipe.
        """
        found: Any = self._own_validation() if source is None else source
        if not isinstance(found, Source):
            found = self.recipe.evaluation_source(self.config, self.data, found)
        kinds = [kind for kind in type(self.data.valid).__mro__ if issubclass(kind, Source) and kind is not Source] or [Source]
        if not isinstance(found, kinds[-1]):
            raise UserError(f"recipe {self.recipe.name} is evaluated on a {kinds[-1].__name__}, not on a {type(found).__name__}")
        with self.evaluating():
            return self.system.evaluate(found, self.engine)

    def _own_validation(self) -> Source:
        facts = self.data.facts
        try:
            data = self.recipe.open_data(self.config)
            is_same_data(data, facts.get("fingerprint", ""), f"run {self.run.name}")
        except UserError as error:
            why = str(error).splitlines()[0]
            what = f"the data of run {self.run.name}, {facts.get('name')}, is not on this machine"
            raise UserError(f"{what} ({why}); pass other data to evaluate") from None
        return data.valid

    def export(self, out: Path, *, to: str = "files") -> None:
        """Write the weights and what is needed to use them into a new folder, in one of `FORMATS`; `load` opens that of files."""
        if to not in FORMATS:
            raise UserError(f"to={to!r} is not one of {', '.join(FORMATS)}")
        if to == "onnx" and (self.engine.device.type, self.engine.dtype) != ("cpu", torch.float32):
            raise UserError("ONNX is written in float32 on the CPU; load the run with device='cpu', dtype='float32'")
        from seedbed.report.model_card import model_card

        out = Path(out)
        with self.evaluating():
            if to == "web":
                require(self.system, WebExportable, "this recipe has no web page").export_web(out)
                return
            with exports.new_folder(out) as folder:
                self._export_files(folder) if to == "files" else self._export_foreign(folder, to)
                num_params = sum(param.numel() for param in self.model.parameters())
                card = model_card(self.run, out.name, to, parameters=num_params, data=self.data.facts)
                (folder / "README.md").write_text(card, encoding="utf-8")

    def _export_foreign(self, folder: Path, to: str) -> None:
        """For programs that know nothing of seedbed."""
        from seedbed.train import export_llama, export_onnx

        facts = self._facts()
        if to == "onnx":
            network = require(self.system, OnnxExportable, f"recipe {self.recipe.name} has no network for ONNX")
            export_onnx.write_onnx(network.onnx_network(), {**facts, "data": facts["data"].get("name")}, folder)
        else:
            why = f"recipe {self.recipe.name} is not a language model of Llama's shape, and --to {to} is for those"
            llama = require(self.system, LlamaExportable, why).to_llama()
            if to == "hf":
                export_llama.write_hf(llama, folder)
            else:
                export_llama.write_gguf(llama, self.run.name, folder)

    def _facts(self) -> dict[str, Any]:
        known = self.run.config_json()
        facts = {name: known[name] for name in ("recipe", "preset", "config")}
        return facts | {"version": code.version(), "run": known.get("run", self.run.name), "data": self.data.facts}

    def _export_files(self, folder: Path) -> None:
        exports.write(self.engine, self._facts(), folder)
        if not (self.run.path / INFERENCE).is_dir():
            return self.recipe.save_inference_data(self.data, folder)
        (folder / INFERENCE).mkdir()
        for path in (self.run.path / INFERENCE).iterdir():
            if path.is_file() and not path.is_symlink():
                shutil.copyfile(path, folder / INFERENCE / path.name)

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        return self._tokenizer.encode(text).tolist()

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids."""
        found = [int(id) for id in ids]
        if wrong := [id for id in found if not 0 <= id < self._tokenizer.vocab_size]:
            raise UserError(f"{wrong[0]} is no id of a vocabulary of {self._tokenizer.vocab_size}")
        return self._tokenizer.decode(found)

    @property
    def _tokenizer(self) -> Tokenizer:
        if (found := getattr(self.data, "tokenizer", None)) is None:
            raise UserError(f"run {self.run.name} has no tokenizer: it was not trained on text")
        return found

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode with averaged weights; what the device cannot compute in this precision is an error of one line."""
        try:
            with self.engine.evaluating():
                yield
        except RuntimeError as error:
            if self.engine.dtype == torch.float32 or "not implemented for" not in str(error):
                raise
            what = f"{str(self.engine.dtype).removeprefix('torch.')} on {self.engine.device.type}"
            raise UserError(f"this recipe cannot compute in {what} ({error}); use dtype='float32'") from None


def load(
    root: Path, run_name: str, checkpoint_name: str = "", device: str = "auto", *, all_data: bool = False, dtype: str = ""
) -> TrainedModel:
    """The system of an export, or of a run with its best weights or a named checkpoint; averaged weights where there are any.

    `all_data` opens the training data even where the run has saved the part of it that inference needs. `dtype` is what it
    computes in, by default as in training; weights are in float32.
    """
    if dtype and dtype not in PRECISIONS:
        raise UserError(f"dtype={dtype} is not one of {', '.join(PRECISIONS)}")
    run = find_folder(root, run_name)
    exported = exports.read(run.path)
    if exported and checkpoint_name:
        raise UserError(f"{run.path} is an export, which has no checkpoint {checkpoint_name!r}")
    recipe, config = open_saved(edits.verified_config(run), run.path)
    precision = [f"precision={PRECISIONS[dtype]}"] if dtype else []
    config = configs.override(config, [*configs.PLAIN, f"device={device}", *precision])
    saved = exported or _checkpoint(run, checkpoint_name)
    edits.require_own(run, saved.origin, config, saved.path.name)
    data = None if all_data else _inference_data(recipe, config, run.path)
    data = data or recipe.open_data(config)
    is_same_data(data, saved.state["data"], f"run {run.name}")
    engine = build(recipe, config, data, make=EvalEngine)
    restore(engine, saved)
    again = partial(load, root, run_name, checkpoint_name, device, all_data=True, dtype=dtype)
    return TrainedModel(run, recipe, config, data, engine.system, engine, again)


def _inference_data(recipe: Recipe, config: Config, folder: Path) -> Data | None:
    try:
        return recipe.open_inference_data(config, folder)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise inference_data.damaged(folder / INFERENCE, error) from None


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


# Options by name, or a function that reads them for the recipe's dataclass of options.
Options = dict[str, Any] | Callable[[type], dict[str, Any]]


def sample(root: Path, run_name: str, options: Options, *, checkpoint_name: str = "", write: Any = None) -> int:
    """Print a sample of a trained run, and the names of its files."""
    trained = load(root, run_name, checkpoint_name)
    options = _read(options, trained.system.sample_options)
    streamed: list[str] = []

    def stream(piece: str) -> None:
        streamed.append(piece)
        write(piece)

    shown = trained.answer(Request(trained.run.path / "samples" / "asked", options, stream if write else None))
    _print(shown, text=not streamed)
    if shown == Sample():
        print(f"the recipe of run {trained.run.name} returned nothing: its `sample` gives no text, facts or files")
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
    for name, value in shown.facts.items() if text else ():  # with streamed text, a recipe says them itself
        print(f"{name} {one_line(format_value(value))}")
    for path in shown.files:
        print(path)


def player(root: Path, run_name: str, checkpoint_name: str = "", runtime: str = "torch") -> Player:
    """A player of a trained run; onnx runs on one CPU core, whatever device torch would use."""
    trained = load(root, run_name, checkpoint_name, device="cpu" if runtime == "onnx" else "auto")
    with trained.engine.evaluating():
        return require(trained.system, Playable, "runs of this recipe cannot be played").play(runtime)


def export(root: Path, run_name: str, out: Path, checkpoint_name: str = "", *, to: str = "files") -> int:
    """Write the weights and what is needed to use them elsewhere, in one of `FORMATS`."""
    dtype = "float32" if to in ("hf", "gguf", "onnx") else ""
    load(root, run_name, checkpoint_name, device="cpu", dtype=dtype).export(out, to=to)
    for path in sorted(path for path in out.rglob("*") if path.is_file()):
        print(path)
    return EXIT_OK
