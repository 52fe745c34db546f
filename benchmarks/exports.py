"""Exports against the run they came from: tiny runs on a CPU, largest difference of outputs and size of the files.

`python benchmarks/exports.py` trains gpt/llama (shrunk), flow/demo and thinker/demo for a few steps each.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from _report import write_result
from transformers import AutoModelForCausalLM

from seedbed import inference
from seedbed.cli import main
from seedbed.recipes.flow.objective import velocity
from seedbed.recipes.thinker.evaluate import as_trained, predict

SHORT = ["steps=20", "every.eval=20", "every.save=20", "batch=8", "device=cpu", "precision=fp32", "compile=off"]
SMALL = ["model.depth=3", "model.width=128", "model.heads=4"]
TEXT = ["data.text=reference", "data.vocab=512", "data.block=64"]
RUNS = {
    "gpt": ("gpt/llama", [*SMALL, *TEXT, "model.out_init=1"], ("hf", "gguf", "onnx")),
    "flow": ("flow/demo", SMALL, ("onnx",)),
    "thinker": ("thinker/demo", ["data.test=0", "data.length=8", "model.n_step=4"], ("onnx",)),
}
NUM = 8


def inputs_and_outputs(name: str, trained: inference.TrainedModel) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Random inputs by name, and what the run computes of them."""
    model: Any = trained.model
    torch.manual_seed(0)
    with trained.evaluating():
        if name == "gpt":
            given = {"tokens": torch.randint(0, model.vocab, (NUM, model.block))}
            return given, model.logits(given["tokens"])
        if name == "flow":
            x, time, of_class = torch.randn(NUM, *model.shape), torch.rand(NUM), torch.randint(0, model.num_classes, (NUM,))
            wanted = velocity(model(x, time, of_class), x, time, trained.config.model.predict)
            return {"x": x, "time": time, "class": of_class}, wanted
        batch = trained.data.valid.batch({"index": torch.arange(NUM)})
        wanted = predict(trained.system, batch, as_trained(trained.system))[-1]
        return {"tokens": batch["x"], "sample_index": batch["index"]}, wanted


def difference(to: str, folder: Path, given: dict[str, torch.Tensor], wanted: torch.Tensor) -> float:
    if to == "hf":
        with torch.no_grad():
            return float((AutoModelForCausalLM.from_pretrained(folder)(given["tokens"]).logits - wanted).abs().max())
    if to == "gguf":
        return gguf_difference(folder, given, wanted)
    network = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    return float(np.abs(network.run(None, {key: t.numpy() for key, t in given.items()})[0] - wanted.numpy()).max())


def gguf_difference(folder: Path, given: dict[str, torch.Tensor], wanted: torch.Tensor) -> float:
    """By the reader of GGUF files in `transformers`, which puts the rows of queries and keys back; it needs accelerate."""
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=torch.float32)
        return float((theirs(given["tokens"]).logits - wanted).abs().max())


def measure(root: Path, name: str) -> dict[str, Any]:
    preset, settings, kinds = RUNS[name]
    assert main(["--runs", str(root), "train", preset, "--run", name, "--no-check", "--dirty", *settings, *SHORT]) == 0
    trained = inference.load(root, name, device="cpu", dtype="float32")
    given, wanted = inputs_and_outputs(name, trained)
    found = {}
    for to in kinds:
        folder = root / f"{name}-{to}"
        assert main(["--runs", str(root), "export", name, "--to", to, "--out", str(folder)]) == 0
        size = sum(path.stat().st_size for path in folder.iterdir())
        largest = float(wanted.abs().max())
        found[f"{name} {to}"] = {"difference": difference(to, folder, given, wanted), "largest": largest, "bytes": size}
    return found


def table(figures: dict[str, Any]) -> str:
    lines = ["| export | largest difference | largest output | files |", "|---|---|---|---|"]
    for name, found in figures.items():
        lines.append(f"| {name} | {found['difference']:.1e} | {found['largest']:.2f} | {found['bytes'] / 1e6:.2f} MB |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("SEEDBED_CACHE", str(Path(folder) / "cache"))
        figures = {key: value for name in RUNS for key, value in measure(Path(folder), name).items()}
    print(json.dumps(figures, indent=1))
    path = write_result("exports", figures)
    path.with_suffix(".md").write_text(table(figures))
