"""What only a GPU can show of the engine's switches: recomputation inside graphs, forced kernels, 8-bit layers, a report."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import rows, start

from seedbed.cli import main
from seedbed.launch import local

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
GPT = ("device=cuda", "model.depth=2", "model.width=64", "model.heads=2", "batch=8", "steps=8", "every.log=1")
GPT += ("every.eval=0", "every.save=0", "every.sample=0", "optim.kind=adamw", "precision=bf16")


@pytest.fixture(autouse=True)
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local.journal, "finish", lambda run, warn: None)


def losses(root: Path, name: str, *settings: str) -> tuple[list[float], str]:
    assert start(root, name, *GPT, *settings, recipe="gpt/demo") == 0
    return [row["loss"] for row in rows(root, name)], (root / name / "console.log").read_text()


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("how", [("capture=off",), (), ("compile=blocks",), ("compile=whole",)], ids=" ".join)
def test_recomputation_replays_dropout_captured_and_compiled(tmp_path: Path, how: tuple[str, ...], mode: str) -> None:
    settings = ("model.dropout=0.3", "model.drop_path=0.2", *how)
    plain, _ = losses(tmp_path, "plain", *settings)
    again, log = losses(tmp_path, "again", *settings, f"recompute={mode}")
    assert f"{mode} recompute" in log
    assert ("captured as one CUDA graph" in log) == ("capture=off" not in how), log
    # Compiled code draws its dropout in another order once a unit is cut differently: there, the course must be alike.
    np.testing.assert_allclose(again, plain, rtol=1e-3 if "compile" not in " ".join(how) else 0.1)


@pytest.mark.parametrize("kernel", ["cudnn", "flash", "efficient", "math"])
def test_a_forced_kernel_trains_alike(tmp_path: Path, kernel: str) -> None:
    auto, _ = losses(tmp_path, "auto")
    forced, log = losses(tmp_path, "forced", f"attention={kernel}")
    assert {"cudnn": "CUDNN", "flash": "FLASH", "efficient": "EFFICIENT", "math": "MATH"}[kernel] in log
    np.testing.assert_allclose(forced, auto, rtol=1e-2)


@pytest.mark.parametrize("part", ["compile_autograd", "compile_optimizer"])
@pytest.mark.parametrize("mode", ["off", "whole"])
def test_compiled_parts_train_alike(tmp_path: Path, part: str, mode: str) -> None:
    plain, _ = losses(tmp_path, "plain", f"compile={mode}")
    again, log = losses(tmp_path, "again", f"compile={mode}", f"{part}=true")
    assert "goes on eager" not in log, log
    np.testing.assert_allclose(again, plain, rtol=1e-2)


def test_float8_says_how_many_layers_it_converted(tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="float8 needs torchao")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no 8-bit products on this GPU")
    _, log = losses(tmp_path, "narrow", "float8=true")
    assert "float8: 0 layers converted" in log
    wide, log = losses(tmp_path, "wide", "float8=true", "model.width=2048", "model.depth=1", "model.heads=16", "compile=whole")
    assert "float8: 0 layers" not in log and np.isfinite(wide).all()


def test_a_report_over_the_switches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    settings = [word for s in ("device=cuda", "precision=bf16", "batch=8") for word in ("--set", s)]
    axes = ("recompute=full", "capture=off", "attention=flash,math", "batch=4194304", "dtype=fp32")
    assert main(["ablate", "gpt/demo", *axes, *settings, "--steps", "5", "--repeats", "2", "--json"]) == 0
    told = {row["label"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert told["batch=4194304"]["outcome"] == "oom"
    assert told["baseline"]["mfu_measured"] > 0
    if told["baseline"]["mfu"]:  # a card that is in the table
        assert told["recompute=full"]["hfu"] > told["recompute=full"]["mfu"]
    assert told["precision=fp32"]["mfu"] is None
    assert told["attention=flash"]["attention"] == "flash" and told["attention=math"]["attention"] == "math"
    assert told["baseline"]["allocated"] <= told["baseline"]["reserved"]
