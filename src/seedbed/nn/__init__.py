"""Layers: attention, norms, positions, generation. Only torch is needed; kernels of our own run where Triton is installed."""

import importlib.util

HAS_TRITON = importlib.util.find_spec("triton") is not None  # it comes with torch's builds for CUDA
