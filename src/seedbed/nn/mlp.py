"""Feed-forward blocks: SwiGLU, squared ReLU and GELU, about eight width squared parameters each."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seedbed.nn.groups import declare
from seedbed.nn.init import normal_

HIDDEN_MULTIPLE = 64


class MLP(nn.Module):
    """Two matmuls around a nonlinearity; SwiGLU is two thirds as wide because it has two inner matrices."""

    def __init__(self, width: int, kind: str, hidden: int = 0) -> None:
        super().__init__()
        self.kind = kind
        if not hidden:
            # Rounded up, since matrix units want whole tiles.
            hidden = -(-8 * width // (3 * HIDDEN_MULTIPLE)) * HIDDEN_MULTIPLE if kind == "swiglu" else 4 * width
        inner = (hidden, hidden) if kind == "swiglu" else (hidden,)
        self.up = nn.Linear(width, sum(inner), bias=False)
        declare(self.up.weight, "matrix", rows=inner)
        self.down = nn.Linear(hidden, width, bias=False)

    def init_weights(self, in_std: float, out_std: float, generator: torch.Generator) -> None:
        normal_(self.up.weight, in_std, generator)
        normal_(self.down.weight, out_std, generator)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if self.kind == "swiglu":
            gate, value = h.chunk(2, dim=-1)
            return self.down(F.silu(gate) * value)
        if self.kind == "relu2":
            h = F.relu(h)
            return self.down(h * h)  # not h.square(): that is a power, which autocast on CUDA lifts to float32
        return self.down(gelu(h))


def gelu(x: Tensor) -> Tensor:
    """GELU as GPT-2 and DiT compute it. Its tanh is half a sigmoid: compiled, that takes a third of the instructions of tanh or
    erf, and memory is what the kernel waits for, not arithmetic."""
    if not torch.compiler.is_compiling():
        return F.gelu(x, approximate="tanh")
    slope = math.sqrt(8 / math.pi)
    return x * torch.sigmoid(slope * (x + 0.044715 * (x * x * x)))  # not x**3: a power, which autocast on CUDA lifts to float32
