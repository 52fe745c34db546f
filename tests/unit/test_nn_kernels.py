"""The kernels by Triton's interpreter, where there is a Triton to ask, and when they are used."""

import contextlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from seedbed.nn import gated, modulate
from seedbed.nn.cuda_ops import can_norm_and_rotate
from seedbed.nn.gated import can_gate_and_norm
from seedbed.nn.layers import rope_table


def interpreter_works() -> bool:
    """Before 3.7 it cannot loop up to a number that it was given, with the numpy of today."""
    if importlib.util.find_spec("triton") is None:
        return False
    return tuple(int(n) for n in importlib.metadata.version("triton").split(".")[:2]) >= (3, 7)


@pytest.mark.skipif(not interpreter_works(), reason="needs Triton 3.7 or later, whose interpreter runs kernels on a CPU")
def test_kernels_equal_plain_code():
    """In a process of its own: Triton decides when it is imported whether it compiles or interprets."""
    script = Path(__file__).parents[1] / "kernel_checks.py"
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


class OnCuda(torch.Tensor):
    """A tensor that says it is on CUDA."""

    is_cuda = True


def heads(length: int = 5, head_dim: int = 16, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(2, length, 9, head_dim, dtype=dtype).as_subclass(OnCuda)


def table(shape: tuple[int, ...] = (5,), head_dim: int = 16):
    return rope_table(torch.zeros(shape), head_dim, 1e4)


@pytest.mark.parametrize(
    ("given", "rope", "wanted"),
    [
        (heads(), table(), True),
        (heads(dtype=torch.float32), table(), True),
        (heads(dtype=torch.float64), table(), False),
        (heads(head_dim=24), table(head_dim=24), False),
        (heads(), table((2, 5)), False),  # positions of their own for each row of the batch
        (heads(), table((1,)), False),
        (torch.zeros(2, 5, 9, 16), table(), False),  # not on CUDA
    ],
)
def test_rotation_kernel_is_used_where_supported(given, rope, wanted):
    assert can_norm_and_rotate(given, rope) is wanted


def stream(width: int = 96, dtype: torch.dtype = torch.bfloat16, length: int = 5) -> torch.Tensor:
    return torch.zeros(2, length, width, dtype=dtype).as_subclass(OnCuda)


@pytest.mark.parametrize(
    ("x", "branch", "vectors", "wanted"),
    [
        (stream(), stream(), stream(length=3), True),
        (stream(), None, stream(length=2), True),
        (stream(2048, torch.float32), None, stream(2048, torch.float32, 2), True),
        (stream(2049), None, stream(2049, length=2), False),
        (stream(dtype=torch.float64), None, stream(dtype=torch.float64, length=2), False),
        (stream(), stream(dtype=torch.float32), stream(length=3), False),
        (stream(), stream(length=1), stream(length=3), False),
        (stream(), stream(), stream(dtype=torch.float32, length=3), False),
        (stream(), stream(), stream(length=3)[:1], False),  # one modulation for all images
        (torch.zeros(2, 5, 96), None, torch.zeros(2, 2, 96), False),  # not on CUDA
    ],
)
def test_gated_norm_kernel_is_used_where_supported(x, branch, vectors, wanted, monkeypatch):
    monkeypatch.setattr(gated, "HAS_TRITON", True)
    assert can_gate_and_norm(x, branch, vectors) is wanted
    monkeypatch.setattr(gated, "HAS_TRITON", False)
    assert not can_gate_and_norm(x, branch, vectors)
    monkeypatch.setattr(gated, "HAS_TRITON", True)
    monkeypatch.setattr(gated, "trusted", False)
    assert not can_gate_and_norm(x, branch, vectors)


@pytest.mark.parametrize("how", ["right", "wrong", "raises"])
def test_gated_norm_kernel_must_agree_with_plain_code(how, monkeypatch):
    def kernel(x, branch, vectors):
        if how == "raises":
            raise ValueError("no such card\nsecond line")
        total, y = modulate._plain(x, branch, vectors)
        return total, y * (1.05 if how == "wrong" else 1.0), y

    monkeypatch.setattr(gated, "trusted", True)
    monkeypatch.setattr(gated, "can_gate_and_norm", lambda *_: True)
    monkeypatch.setattr(gated, "gate_and_norm", kernel)
    modulate.try_gate_and_norm.cache_clear()
    words = {"wrong": "differs from plain code", "raises": "does not run: no such card;"}
    with pytest.warns(UserWarning, match=words[how]) if how in words else contextlib.nullcontext():
        modulate.try_gate_and_norm(32, torch.bfloat16, torch.device("cpu"))
    modulate.try_gate_and_norm.cache_clear()
    assert gated.trusted is (how == "right")
