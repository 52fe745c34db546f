"""The gpt system: next-token loss, exact evaluation of a whole split, and samples. B batch, T time."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seedbed.config import Config
from seedbed.data.text import TextData, TextSource, text_metrics, windows
from seedbed.nn import eagerly
from seedbed.nn.decoding import Sampling
from seedbed.nn.layers import attention_scope, choose_attention
from seedbed.recipes.gpt.model import CachedDecoder, build_model
from seedbed.train.engine import DTYPES, EvalEngine
from seedbed.train.system import Batch, over_ranks
from seedbed.train.text_system import TextSystem

if TYPE_CHECKING:
    from seedbed.train.export_llama import Llama
    from seedbed.train.export_onnx import OnnxNetwork
    from seedbed.train.probe import Probe

# Logits that one batch of evaluation may hold.
EVAL_LOGITS = {"cuda": 1 << 29, "mps": 1 << 26, "cpu": 1 << 22}
CHINCHILLA = 20.0


class GPT(TextSystem):
    """A transformer that predicts the next token."""

    auto_compile = "whole"

    def __init__(self, config: Config, data: TextData) -> None:
        super().__init__(config, data)
        self._kernels: dict[torch.device, tuple] = {}
        self.model = build_model(config.model, data.vocab_size, config.data.block, config.seed)

    def loss(self, batch: Batch, engine: EvalEngine) -> tuple[Tensor, dict[str, Tensor]]:
        x_BT, y_BT = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        with attention_scope(self.kernels()):
            return self.model(x_BT, y_BT, self.model.position_tables(x_BT)), {}

    def kernels(self) -> tuple:
        """The attention kernels for a training step, fastest first; timed once, on CUDA only."""
        device = self.model.embed.weight.device
        if device not in self._kernels:
            config, shape = self.config, self.config.model
            size = (config.micro_batch, shape.heads, config.data.block, shape.width // shape.heads)
            rest = (DTYPES[config.precision], device, shape.kv_heads, shape.dropout)
            self._kernels[device] = choose_attention(size, *rest, only=config.attention)
        return self._kernels[device]

    def probe(self, batch: Batch) -> "Probe":
        from seedbed.recipes.gpt.probe import build_probe  # checks use it, training does not

        return build_probe(self, batch)

    def baselines(self, batch: Batch) -> dict[str, float]:
        return {"unigram entropy": self.data.unigram_entropy()}

    def compile_units(self) -> Iterator[nn.Module]:
        yield from self.model.blocks
        yield self.model.head

    def shard_units(self) -> Iterator[nn.Module]:
        yield from self.model.blocks

    def flops_per_item(self) -> float:
        """An item is a block: one context of tokens."""
        return self.model.flops_per_token() * self.config.data.block

    @torch.no_grad()
    def evaluate(self, source: TextSource, engine: EvalEngine) -> dict[str, float]:
        """Every target of the split once, in non-overlapping windows of one context; the same for any batch size."""
        device, model = self.model.embed.weight.device, self.model
        batch = max(1, EVAL_LOGITS[device.type] // (model.block * len(model.head_weight)))
        was_training, nats = model.training, 0.0
        model.eval()
        try:
            with eagerly():  # a shape that is used a few times is not worth compiling
                for tokens_BT in engine.ranks.shard_of(windows(source, batch, device)):
                    logits_BTV = model.logits(tokens_BT[:, :-1]).float()
                    nats_BT = F.cross_entropy(logits_BTV.mT, tokens_BT[:, 1:], reduction="none")
                    nats += nats_BT.sum(-1).cpu().double().sum().item()
        finally:
            model.train(was_training)
        return text_metrics("loss", over_ranks(nats, engine), source)

    def decoder(self, rows: list[list[int]], num: int, sampling: Sampling, seed: int, capture: bool) -> CachedDecoder:
        with eagerly():  # it reads the prompts: compiled blocks would be compiled again for every length
            return CachedDecoder(self.model, rows, num, sampling, seed, capture=capture)

    def to_llama(self) -> "Llama":
        from seedbed.recipes.gpt import export

        return export.to_llama(self.model, self.tokenizer)

    def onnx_network(self) -> "OnnxNetwork":
        from seedbed.recipes.gpt import export

        return export.onnx_network(self.model)

    def describe(self) -> dict[str, Any]:
        """Size against data, and the first block as the model sees it: x above y."""
        config, model = self.config, self.model
        num_params = model.num_parameters()
        unique, seen = len(self.data.train.tokens), config.steps * config.batch * config.data.block
        facts = {
            "non-embedding parameters": f"{model.num_parameters(embedding=False):,}",
            "tokens/parameter": f"{unique / num_params:.3g} unique, {seen / num_params:.3g} seen (Chinchilla: {CHINCHILLA:g})",
            "MFLOP/token": f"{model.flops_per_token() / 1e6:.1f}",
        }
        if self.kernels():
            facts["attention"] = self.kernels()[0].name
        if self.tokenizer is not None:
            block = self.data.train.tokens[: min(49, config.data.block + 1)].tolist()
            facts |= {"x": repr(self.tokenizer.decode(block[:-1])), "y": repr(self.tokenizer.decode(block[1:]))}
        return facts


def build(config: Config, data: TextData) -> GPT:
    return GPT(config, data)
