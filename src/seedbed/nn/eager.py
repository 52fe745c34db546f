"""Runs compiled modules eagerly, for shapes that occur only a few times: compiling would take longer."""

import contextlib
import sys
from contextlib import AbstractContextManager

import torch


def eagerly() -> AbstractContextManager[object]:
    """Inside, nothing is compiled and no compiled code is used. Does nothing where torch's compiler was never loaded."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()
