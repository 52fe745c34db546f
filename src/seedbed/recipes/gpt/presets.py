"""The model config and the demo of the gpt recipe; gpu_presets.py has the other presets. No torch import: listing is fast."""

from dataclasses import dataclass
from typing import Literal

from seedbed.config import Config, Every, Optim, Schedule, Units, number, registered
from seedbed.data.corpus import TextConfig
from seedbed.errors import UserError


@dataclass(frozen=True)
class ModelConfig:
    """The transformer's size; vocabulary and context come from the data.

    `out_init` scales the first output projections (0: every block starts as the identity). `skips`, `gate`, `values_x0`
    and `drop_path` are for small data seen many times: early states added to late blocks, a gate per attention head,
    values that also read the embedding, and branches left out at random.
    """

    depth: int = number(6, low=1, high=1000)
    heads: int = number(6, low=1, high=1024)
    width: int = number(384, low=2, high=65536)
    kv_heads: int = number(0, low=0, high=1024)
    mlp: Literal["swiglu", "relu2", "gelu"] = "swiglu"
    norm: Literal["rms", "layer"] = "rms"
    positions: str = registered("rope", "seedbed.nn.layers:ENCODINGS")
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


def units(config: Config) -> Units:
    return config.data.units


def demo() -> Config:
    """A small GPT learns Python's own documentation on a laptop.

    0.9 M parameters on characters. Samples turn into something like the language reference.
    """
    return Config(
        model=ModelConfig(depth=4, heads=4, width=128),
        data=TextConfig(text="reference", tokenizer="char", block=64),
        optim=Optim(kind="muon", lr=3e-3, muon_lr=1e-2),
        schedule=Schedule(kind="linear", warmup=0.02, decay=0.7, floor=0.05),
        every=Every(log=20, eval=150, sample=150, save=150),
        steps=600,
        batch=16,
    )
