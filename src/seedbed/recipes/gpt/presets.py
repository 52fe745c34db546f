"""Presets of the gpt recipe, as functions."""
from dataclasses import dataclass
from typing import Literal

from seedbed.config import number
from seedbed.errors import UserError


@dataclass(frozen=True)
class ModelConfig:
    """The transformer's shape; vocabulary and context come from the data."""

    depth: int = number(6, low=1, high=1000)
    heads: int = number(6, low=1, high=1024)
    width: int = number(384, low=2, high=65536)
    kv_heads: int = number(0, low=0, high=1024)
    mlp: Literal["swiglu", "relu2", "gelu"] = "swiglu"
    norm: Literal["rms", "layer"] = "rms"
    positions: Literal["rope", "learned"] = "rope"
    rope_base: float = number(1e4, low=2.0)
    qk_norm: bool = True
    tied: bool = True
    dropout: float = number(0.0, low=0.0, high=0.95)
    softcap: float = number(0.0, low=0.0)
    out_init: float = number(0.0, low=0.0, high=10.0)
    skips: bool = False
    gate: bool = False
    values_x0: bool = False
    drop_path: float = number(0.0, low=0.0, high=0.95)

    def check(self) -> None:
        """What the fields must satisfy together."""
        if self.width % self.heads:
            raise UserError(f"model.width={self.width} does not divide into model.heads={self.heads}; choose a multiple")
        if self.kv_heads and self.heads % self.kv_heads:
            raise UserError(f"model.heads={self.heads} cannot share model.kv_heads={self.kv_heads} evenly; choose a divisor")
        if self.positions == "rope" and (self.width // self.heads) % 2:
            raise UserError(f"model.width/model.heads={self.width // self.heads} is odd, and RoPE needs an even head width")
