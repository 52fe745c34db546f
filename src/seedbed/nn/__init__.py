"""Layers: attention, norms, positions, generation. Only torch is needed; kernels of our own run where Triton is installed."""

import contextlib
import importlib.util
import sys
from contextlib import AbstractContextManager

import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None  # it comes with torch's builds for CUDA


def eagerly() -> AbstractContextManager[object]:
    """Inside, nothing is compiled and no compiled code is used. Does nothing where torch's compiler was never loaded."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()
