"""What only a GPU can show of the engine's switches: recomputation inside graphs, forced kernels, 8-bit layers, a report."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import rows, train_once

from seedbed.cli import main

pytestmark = pytest.mark.usefixtures("no_report")
GPT = ("device=cuda", "model.depth=2", "model.width=64", "model.heads=2", "batch=8", "steps=8", "every.log=1")
GPT += ("every.eval=0", "every.save=0", "every.sample=0", "optim.kind=adamw", "precision=bf16")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of all tests here: many are compared with the same one, and most of their time is compilation."""
    return tmp_path_factory.mktemp("options")


def losses(root: Path, *settings: str) -> tuple[list[float], str]:
    name = "-".join(("run", *settings)).replace("=", "-")
    train_once(root, name, *GPT, *settings, recipe="gpt/demo")
    return [row["loss"] for row in rows(root, name)], (root / name / "console.log").read_text()


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("how", [("capture=off",), (), ("compile=blocks",), ("compile=whole",)], ids=" ".join)
def test_recomputation_replays_dropout_captured_and_compiled(root: Path, how: tuple[str, ...], mode: str) -> None:
    settings = ("model.dropout=0.3", "model.drop_path=0.2", *how)
    plain, _ = losses(root, *settings)
    again, log = losses(root, *settings, f"remat={mode}")
    assert f"{mode} remat" in log
    assert ("captured as one CUDA graph" in log) == ("capture=off" not in how), log
    # Compiled code draws its dropout in another order once a unit is cut differently: there, the course must be alike.
    np.testing.assert_allclose(again, plain, rtol=1e-3 if "compile" not in " ".join(how) else 0.1)


@pytest.mark.parametrize("kernel", ["cudnn", "flash", "efficient", "math"])
def test_forced_kernel_trains_alike(root: Path, kernel: str) -> None:
    auto, _ = losses(root)
    forced, log = losses(root, f"attention={kernel}")
    assert {"cudnn": "CUDNN", "flash": "FLASH", "efficient": "EFFICIENT", "math": "MATH"}[kernel] in log
    np.testing.assert_allclose(forced, auto, rtol=1e-2)


@pytest.mark.parametrize("part", ["compile_autograd", "compile_optimizer"])
@pytest.mark.parametrize("mode", ["off", "whole"])
def test_compiled_parts_train_alike(root: Path, part: str, mode: str) -> None:
    plain, _ = losses(root, f"compile={mode}")
    again, log = losses(root, f"compile={mode}", f"{part}=true")
    assert "goes on eager" not in log, log
    np.testing.assert_allclose(again, plain, rtol=1e-2)


def test_float8_says_how_many_layers_it_converted(root: Path) -> None:
    pytest.importorskip("torchao", reason="float8 needs torchao")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no 8-bit products on this GPU")
    _, log = losses(root, "float8=true")
    assert "float8: 0 layers converted" in log
    wide, log = losses(root, "float8=true", "model.width=2048", "model.depth=1", "model.heads=16", "compile=whole")
    assert "float8: 0 layers" not in log and np.isfinite(wide).all()


def test_ablation_report_over_the_switches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = [word for s in ("device=cuda", "precision=bf16", "batch=8") for word in ("--set", s)]
    axes = ("remat=full", "attention=flash,math", "batch=4194304", "dtype=fp32")
    assert main(["ablate", "gpt/demo", *axes, *settings, "--steps", "5", "--repeats", "2", "--json"]) == 0
    messages = {row["label"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert messages["batch=4194304"]["outcome"] == "oom"
    assert messages["baseline"]["mfu_measured"] > 0
    if messages["baseline"]["mfu"]:  # a card that is in the table
        assert messages["remat=full"]["hfu"] > messages["remat=full"]["mfu"]
    assert messages["precision=fp32"]["mfu"] is None
    assert messages["attention=flash"]["attention"] == "flash" and messages["attention=math"]["attention"] == "math"
    assert messages["baseline"]["allocated"] <= messages["baseline"]["reserved"]
