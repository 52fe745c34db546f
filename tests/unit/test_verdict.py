"""The verdicts, by table: which share wins, what is advised, and nothing that is switched on already."""

import subprocess
import sys

import pytest
from conftest import ROOT

from seedbed.report.run_report import closing_verdict
from seedbed.report.verdict import ATTENTION, DATA, LAUNCHES, MATMUL, MEMORY, Setup, Shares, judge

GPU = Setup("cuda", "bf16", compiled=True, captured=True)
PLAIN = Setup("cuda", "fp32")
HOST = Setup("cpu")


@pytest.mark.parametrize(
    ("shares", "bound"),
    [
        (Shares(matmul=0.7, memory=0.2, attention=0.1), MATMUL),
        (Shares(matmul=0.3, memory=0.6, attention=0.1), MEMORY),
        (Shares(matmul=0.3, memory=0.2, attention=0.5), ATTENTION),
        (Shares(gap=0.5, matmul=0.3, memory=0.2), LAUNCHES),
        (Shares(gap=0.31, matmul=0.6, memory=0.09), LAUNCHES),  # waste is named although matmul takes longer
        (Shares(gap=0.2, matmul=0.6, memory=0.2), MATMUL),
        (Shares(data=0.2, matmul=0.7, memory=0.1), DATA),
        (Shares(data=0.14, matmul=0.7, memory=0.16), MATMUL),
        (Shares(data=0.2, gap=0.6, matmul=0.2), LAUNCHES),  # the larger waste first
        (Shares(data=0.6, gap=0.4), DATA),
        (Shares(data=0.1, gap=0.29, matmul=0.2, memory=0.2, attention=0.21), LAUNCHES),
        (Shares(data=1.0), DATA),
    ],
)
@pytest.mark.parametrize("setup", [GPU, PLAIN, HOST])
def test_verdict_names_the_bound(shares: Shares, bound: str, setup: Setup) -> None:
    verdict = judge(shares, setup)
    assert verdict.bound == bound and verdict.text.startswith(f"bound by {bound} (") and verdict.help


WORST = {
    DATA: Shares(data=1.0),
    LAUNCHES: Shares(gap=1.0),
    MEMORY: Shares(memory=1.0),
    ATTENTION: Shares(attention=1.0),
    MATMUL: Shares(matmul=1.0),
}


@pytest.mark.parametrize("bound", WORST)
@pytest.mark.parametrize("tier", ["device", "memory-map", "generated"])
@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
def test_advice_excludes_what_is_on_or_impossible(bound: str, device: str, tier: str) -> None:
    for precision in ("fp32", "bf16"):
        for compiled in (False, True):
            for captured in {False, device == "cuda"}:
                setup = Setup(device, precision, compiled, captured, tier)
                advice = " ".join(judge(WORST[bound], setup).help)
                assert not (compiled and "compile=" in advice)
                assert not ((captured or device != "cuda") and "capture=" in advice)
                assert not ((precision != "fp32" or device == "cpu") and "precision=" in advice)
                assert not (tier != "memory-map" and "disk" in advice)


@pytest.mark.parametrize(
    ("setup", "bound", "first"),
    [
        (PLAIN, LAUNCHES, "capture=auto"),
        (Setup("cuda", "bf16", captured=True), LAUNCHES, "compile=blocks"),
        (GPU, LAUNCHES, "larger batch"),
        (HOST, LAUNCHES, "compile=blocks"),
        (PLAIN, MEMORY, "compile=blocks"),
        (Setup("cuda", "fp32", compiled=True), MEMORY, "precision=bf16"),
        (PLAIN, ATTENTION, "precision=bf16"),
        (PLAIN, MATMUL, "precision=bf16"),
        (GPU, MATMUL, "should spend"),
        (HOST, MATMUL, "GPU"),
        (Setup("cuda", tier="memory-map"), DATA, "device memory"),
        (Setup("cuda", tier="generated"), DATA, "source"),
    ],
)
def test_advice_is_ordered_by_use(setup: Setup, bound: str, first: str) -> None:
    assert first in judge(WORST[bound], setup).help[0]


@pytest.mark.parametrize(
    ("summary", "words"),
    [
        ({"device": "cuda", "wait": 0.4, "mfu": 0.2, "precision": "bf16"}, "bound by data: 40%"),
        ({"device": "cpu", "wait": 0.3}, "bound by data: 30%"),
        ({"device": "cpu", "wait": 0.01}, "computing on the cpu"),
        ({"device": "cuda", "wait": 0.0, "mfu": 0.5, "precision": "bf16", "captured": True}, "bound by matmul: 50%"),
        ({"device": "cuda", "wait": 0.0, "mfu": 0.05, "precision": "bf16", "captured": False}, "capture=auto"),
        ({"device": "cuda", "wait": 0.0, "mfu": 0.05, "precision": "bf16", "captured": True}, "memory traffic"),
        ({"device": "cuda", "wait": 0.0, "precision": "fp32"}, "precision=bf16"),
        ({"device": "cuda", "wait": 0.0, "mfu": None, "precision": "bf16"}, "unknown"),
        ({"device": "mps", "wait": None, "mfu": None}, "computing on the mps"),
        ({}, "seedbed profile"),
    ],
)
def test_closing_verdict_of_a_run(summary: dict, words: str) -> None:
    figures = {name: summary.pop(name) for name in ("wait", "mfu") if name in summary}
    text = closing_verdict(Setup(**{"tier": "memory-map", **summary}), **figures)
    assert words in text and "\n" not in text


def test_verdict_loads_no_torch() -> None:
    """It closes every run and must not make a listing slow."""
    code = "import sys, seedbed.report.verdict; print(sorted({'torch', 'numpy', 'rich'} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True)
    assert shown.stdout.strip() == "[]", shown.stderr
