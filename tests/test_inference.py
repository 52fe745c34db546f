"""Trained runs in use: sampling needs weights and what was kept with the run, no optimizer and no training data."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import start, train_once

from seedbed import inference
from seedbed.errors import UserError
from seedbed.launch import local
from seedbed.recipes import INFERENCE
from seedbed.train import checkpoint_loading, optim
from seedbed.train.progress import is_same_data
from seedbed.train.system import Request

TEXT = "the seed that fell on good ground grew up and bore a hundred seeds. " * 60
SMALL = ["model.depth=1", "model.width=32", "data.block=32", "batch=4", "steps=4", "every.eval=4", "every.save=4", "ema=0.9"]


@pytest.fixture(autouse=True)
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local.journal, "finish", lambda run, warn: None)


@pytest.fixture(scope="module")
def text_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A gpt run on a text of its own; the folder is shared, so tests copy it before they change it."""
    folder = tmp_path_factory.mktemp("inference")
    (folder / "text.txt").write_text(TEXT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SEEDBED_CACHE", str(folder / "cache"))
        patch.setattr(local.journal, "finish", lambda run, warn: None)
        train_once(folder / "runs", "one", *SMALL, f"data.text={folder / 'text.txt'}", recipe="gpt/demo")
    return folder


@pytest.fixture
def folder(text_runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the runs, where neither the text nor its prepared store can be found."""
    shutil.copytree(text_runs / "runs", tmp_path / "runs", symlinks=True)
    monkeypatch.setenv("SEEDBED_CACHE", str(tmp_path / "empty"))
    moved = text_runs / "moved.txt"
    (text_runs / "text.txt").rename(moved)
    yield tmp_path
    moved.rename(text_runs / "text.txt")


def sampled(root: Path, **options: object) -> str:
    trained = inference.load(root, "one")
    with trained.engine.evaluating():
        return trained.system.sample(Request(root, dict(options)), trained.engine).text


def test_sampling_works_without_the_training_data(folder: Path, text_runs: Path, monkeypatch: pytest.MonkeyPatch):
    without = sampled(folder / "runs", tokens=40)
    shutil.rmtree(folder / "runs" / "one" / INFERENCE)
    with pytest.raises(UserError, match=r"text\.txt"):
        sampled(folder / "runs", tokens=40)
    monkeypatch.setenv("SEEDBED_CACHE", str(text_runs / "cache"))
    (text_runs / "moved.txt").rename(text_runs / "text.txt")
    assert sampled(folder / "runs", tokens=40) == without, "an old run opens its data and gives the same sample"
    (text_runs / "text.txt").rename(text_runs / "moved.txt")


def test_export_works_without_the_training_data(folder: Path):
    assert inference.export(folder / "runs", "one", folder / "out") == 0
    assert (folder / "out" / "model.safetensors").is_file()


def test_inference_allocates_no_optimizer_state(text_runs: Path, monkeypatch: pytest.MonkeyPatch):
    made = []
    for kind in (optim.Optimizer, optim.AdamW):
        real = kind.__init__
        monkeypatch.setattr(
            kind, "__init__", lambda self, *args, real=real, **named: (made.append(self), real(self, *args, **named))[1]
        )
    trained = inference.load(text_runs / "runs", "one")
    assert made == [] and not hasattr(trained.engine, "optimizers")
    assert trained.engine.ema is None, "averaged weights take the place of the weights"
    start(text_runs / "counted", "two", "steps=1")
    assert made, "training makes what is counted here"


def test_inference_loads_the_averaged_weights(text_runs: Path):
    trained = inference.load(text_runs / "runs", "one", "step-000004")
    saved = checkpoint_loading.load(text_runs / "runs" / "one" / "checkpoints" / "step-000004").tensors
    for name, param in trained.system.named_parameters():
        assert torch.equal(param.detach().cpu(), saved["ema"][name])
    assert any(not torch.equal(saved["ema"][name], saved["model"][name]) for name in saved["ema"])


def test_checkpoint_without_optimizer_files_can_be_sampled(folder: Path):
    want = sampled(folder / "runs", tokens=20)
    for path in (folder / "runs" / "one" / "checkpoints").rglob("optim*.safetensors"):
        path.unlink()
    assert sampled(folder / "runs", tokens=20) == want
    with pytest.raises(checkpoint_loading.Damaged):
        checkpoint_loading.load(folder / "runs" / "one" / "checkpoints" / "step-000004")


def test_damaged_weights_are_refused(folder: Path):
    for path in (folder / "runs" / "one" / "checkpoints").rglob("model.safetensors"):
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(UserError, match="checkpoint damaged"):
        inference.load(folder / "runs", "one", "step-000004")


def test_data_of_another_run_is_refused(folder: Path):
    about = folder / "runs" / "one" / INFERENCE / "data.json"
    facts = json.loads(about.read_text())
    facts["facts"]["fingerprint"] = "0" * 16
    about.write_text(json.dumps(facts))
    with pytest.raises(UserError, match="the data has changed"):
        inference.load(folder / "runs", "one")


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"facts": 1}'])
def test_damaged_inference_data_is_named(folder: Path, damage: bytes):
    (folder / "runs" / "one" / INFERENCE / "data.json").write_bytes(damage)
    with pytest.raises(UserError, match=r"inference is damaged .*move it away"):
        inference.load(folder / "runs", "one")


def test_data_rendered_again_by_another_processor_are_accepted():
    """Their pixels at edges differ, and so does their fingerprint; recorded and tokenised data must be the same."""
    facts = {"fingerprint": "1" * 16}
    assert is_same_data(SimpleNamespace(facts=facts), "1" * 16, "this run")
    assert not is_same_data(SimpleNamespace(facts=facts, is_rendered=True), "0" * 16, "this run")
    with pytest.raises(UserError, match="the data has changed: this run was trained on 0000"):
        is_same_data(SimpleNamespace(facts=facts, is_rendered=False), "0" * 16, "this run")


@pytest.mark.parametrize(("recording", "rendered"), [("box", True), ("gym:Pendulum-v1", False), ("somewhere", False)])
def test_world_data_of_the_box_alone_are_rendered(recording: str, rendered: bool):
    from seedbed.recipes.world.data import is_rendered

    assert is_rendered(recording) == rendered
