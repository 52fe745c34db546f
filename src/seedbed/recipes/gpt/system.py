"""The gpt system: next-token loss, exact evaluation of a whole split, samples, and export. B batch, T time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seedbed.config import Config
from seedbed.data.text import TextData, TextSource, windows
from seedbed.errors import UserError
from seedbed.nn.attention import attention_scope, choose_attention
from seedbed.recipes.gpt.export import export
from seedbed.recipes.gpt.generate import generate
from seedbed.recipes.gpt.model import build_model
from seedbed.recipes.gpt.probe import open_up
from seedbed.train.engine import DTYPES
from seedbed.train.system import Batch, Request, Sample, System, over_ranks, own_share

if TYPE_CHECKING:
    from seedbed.train.engine import Engine
    from seedbed.train.probe import Probe

# Logits that one batch of evaluation may hold.
EVAL_LOGITS = {"cuda": 1 << 29, "mps": 1 << 26, "cpu": 1 << 22}
PROMPT_TOKENS = 24
CHINCHILLA = 20.0


class GPT(System):
    """A transformer that predicts the next token."""

    def __init__(self, config: Config, data: TextData) -> None:
        super().__init__()
        self.config, self.data, self.tokenizer = config, data, data.tokenizer
        self.model = build_model(config.model, data.vocab_size, config.data.block, config.seed)

    # ---- training --------------------------------------------------------------------------------------------------

    def loss(self, batch: Batch, engine: Engine) -> tuple[Tensor, dict[str, Tensor]]:
        x_BT, y_BT = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        with attention_scope(self.kernels()):
            return self.model(x_BT, y_BT, self.model.setting(x_BT)), {}

    def num_targets(self, batch: Batch) -> int:
        return batch["tokens"][:, 1:].numel()

    def kernels(self) -> tuple:
        """The attention kernels for a training step, fastest first; timed once, on CUDA only."""
        config, shape = self.config, self.config.model
        size = (config.micro_batch, shape.heads, config.data.block, shape.width // shape.heads)
        device = self.model.embed.weight.device
        return choose_attention(size, DTYPES[config.precision], device, shape.kv_heads, shape.dropout, only=config.attention)

    def probe(self, batch: Batch) -> Probe:
        return open_up(self, batch)

    def compile_units(self) -> Iterator[nn.Module]:
        yield from self.model.blocks
        yield self.model.head

    def shard_units(self) -> Iterator[nn.Module]:
        yield from self.model.blocks

    def flops_per_item(self) -> float:
        """An item is a block: one context of tokens."""
        return self.model.flops_per_token() * self.config.data.block

    # ---- evaluation and samples ------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, source: TextSource, engine: Engine) -> dict[str, float]:
        """Every target of the split once, in cold windows of one context; the same for any batch size."""
        device, model = self.model.embed.weight.device, self.model
        batch = max(1, EVAL_LOGITS[device.type] // (model.block * len(model.head_weight)))
        was_training, nats = model.training, 0.0
        model.eval()
        try:
            with torch.compiler.set_stance("force_eager"):  # a shape met a few times is not worth compiling
                for tokens_BT in own_share(windows(source, batch, device), engine):
                    logits_BTV = model.logits(tokens_BT[:, :-1]).float()
                    nats_BT = F.cross_entropy(logits_BTV.mT, tokens_BT[:, 1:], reduction="none")
                    nats += nats_BT.sum(-1).cpu().double().sum().item()
        finally:
            model.train(was_training)
        return _report(over_ranks(nats, engine), source)

    def complete(self, prompts: list[str], **options: Any) -> list[str]:
        """Continuations of `prompts`; the options are those of `generate`."""
        if self.tokenizer is None:
            raise UserError("this run was trained on random tokens; there is no text to generate")
        return generate(self.model, self.tokenizer, prompts, **options)

    def sample(self, request: Request, engine: Engine) -> Sample:
        """Text after a prompt, by default the beginning of the validation part."""
        options = request.read(prompt=None, num=1, tokens=200, temperature=0.8, top_k=0, top_p=1.0, seed=1)
        if self.tokenizer is None and not request.options:
            return Sample()
        given, num = options.pop("prompt"), options.pop("num")
        prompt = self._first_words() if given is None else given
        write = request.write or (lambda text: None)

        def on_piece(row: int, piece: str) -> None:
            if row == 0:
                write(piece)

        # While training, a capture would cost more than the few tokens it speeds up.
        capture = bool(request.options) or request.write is not None
        write(prompt)
        texts = [prompt + text for text in self.complete([prompt] * num, on_piece=on_piece, capture=capture, **options)]
        # The first sample was shown as it came; the others were made beside it.
        rest = "".join(f"\n\n---- sample {i} of {num}\n{text}" for i, text in enumerate(texts[1:], 2))
        write(rest + "\n")
        return Sample(text=texts[0] + rest, facts={"prompt": prompt, **options})

    def _first_words(self) -> str:
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode(self.data.valid.tokens[:PROMPT_TOKENS].tolist())

    def describe(self) -> dict[str, Any]:
        """Size against data, and the first block as the model sees it: x above y."""
        config, model = self.config, self.model
        num_params = model.num_parameters()
        unique, seen = len(self.data.train.tokens), config.steps * config.batch * config.data.block
        facts = {
            "outside tables": f"{model.num_parameters(embedding=False):,}",
            "tokens/parameter": f"{unique / num_params:.3g} unique, {seen / num_params:.3g} seen (Chinchilla: {CHINCHILLA:g})",
            "MFLOP/token": f"{model.flops_per_token() / 1e6:.1f}",
        }
        if self.kernels():
            facts["attention"] = self.kernels()[0].name
        if self.tokenizer is not None:
            block = self.data.train.tokens[: min(49, config.data.block + 1)].tolist()
            facts |= {"x": repr(self.tokenizer.decode(block[:-1])), "y": repr(self.tokenizer.decode(block[1:]))}
        return facts

    def export(self, folder: Path) -> list[Path]:
        return export(self.model, self.tokenizer, folder)


def _report(nats: float, source: TextSource) -> dict[str, float]:
    """Nats per token first: it decides which checkpoint is best. Bits per byte compare across tokenizers."""
    per_token = nats / source.num_targets
    numbers = {"loss": per_token, "perplexity": math.exp(min(per_token, 700.0))}
    if source.num_target_bytes:
        numbers["bits_per_byte"] = nats / (math.log(2) * source.num_target_bytes)
    return numbers


def build(config: Config, data: TextData) -> GPT:
    """The recipe's entry point."""
    return GPT(config, data)
