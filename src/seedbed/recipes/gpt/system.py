"""The gpt system: next-token loss, exact evaluation of a whole split, samples, and export. B batch, T time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seedbed.config import Config
from seedbed.data.text import TextData, TextSource, windows
from seedbed.errors import UserError
from seedbed.nn import eagerly
from seedbed.nn.layers import attention_scope, choose_attention
from seedbed.recipes.gpt.generate import generate
from seedbed.recipes.gpt.model import build_model
from seedbed.train.engine import DTYPES
from seedbed.train.system import Batch, Request, Sample, System, option, over_ranks, own_share

if TYPE_CHECKING:
    from seedbed.train.engine import EvalEngine
    from seedbed.train.probe import Probe

# Logits that one batch of evaluation may hold.
EVAL_LOGITS = {"cuda": 1 << 29, "mps": 1 << 26, "cpu": 1 << 22}
PROMPT_TOKENS = 24
CHINCHILLA = 20.0


@dataclass(frozen=True)
class SampleOptions:
    """Options of `seedbed sample`."""

    prompt: str | None = option(None, "what the samples begin with")
    num: int = option(1, "number of samples", low=1)
    tokens: int = option(200, "length of each sample", low=1)
    temperature: float = option(0.8, "0 always takes the likeliest token", low=0)
    top_k: int = option(0, "choose among the K likeliest; 0: all", low=0)
    top_p: float = option(1.0, "choose among the likeliest that make up P", low=0, high=1)
    seed: int = option(1, "the same seed gives the same samples", low=0)


class GPT(System):
    """A transformer that predicts the next token."""

    auto_compile = "whole"
    sample_options = SampleOptions

    def __init__(self, config: Config, data: TextData) -> None:
        super().__init__()
        self.config, self.data, self.tokenizer = config, data, data.tokenizer
        self._kernels: dict[torch.device, tuple] = {}
        self.model = build_model(config.model, data.vocab_size, config.data.block, config.seed)

    # ---- training --------------------------------------------------------------------------------------------------

    def loss(self, batch: Batch, engine: EvalEngine) -> tuple[Tensor, dict[str, Tensor]]:
        x_BT, y_BT = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        with attention_scope(self.kernels()):
            return self.model(x_BT, y_BT, self.model.position_tables(x_BT)), {}

    def num_targets(self, batch: Batch) -> int:
        return batch["tokens"][:, 1:].numel()

    def kernels(self) -> tuple:
        """The attention kernels for a training step, fastest first; timed once, on CUDA only."""
        device = self.model.embed.weight.device
        if device not in self._kernels:
            config, shape = self.config, self.config.model
            size = (config.micro_batch, shape.heads, config.data.block, shape.width // shape.heads)
            rest = (DTYPES[config.precision], device, shape.kv_heads, shape.dropout)
            self._kernels[device] = choose_attention(size, *rest, only=config.attention)
        return self._kernels[device]

    def probe(self, batch: Batch) -> Probe:
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

    # ---- evaluation and samples ------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, source: TextSource, engine: EvalEngine) -> dict[str, float]:
        """Every target of the split once, in non-overlapping windows of one context; the same for any batch size."""
        device, model = self.model.embed.weight.device, self.model
        batch = max(1, EVAL_LOGITS[device.type] // (model.block * len(model.head_weight)))
        was_training, nats = model.training, 0.0
        model.eval()
        try:
            with eagerly():  # a shape that is used a few times is not worth compiling
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

    def sample(self, request: Request, engine: EvalEngine) -> Sample:
        """Text after a prompt, by default the beginning of the validation part."""
        options = asdict(request.read(SampleOptions))
        if self.tokenizer is None and not request.options:
            return Sample()
        given, num = options.pop("prompt"), options.pop("num")
        first = self.tokenizer.decode(self.data.valid.tokens[:PROMPT_TOKENS].tolist()) if self.tokenizer else ""
        prompt = first if given is None else given
        write = request.write or (lambda text: None)

        def on_text(row: int, piece: str) -> None:
            if row == 0:
                write(piece)

        # A capture runs the garbage collector and frees memory: between steps that costs more than it saves.
        has_ended = float(engine.progress) >= 1.0
        capture = bool(request.options) or request.write is not None or has_ended
        write(prompt)
        texts = [prompt + text for text in self.complete([prompt] * num, on_text=on_text, capture=capture, **options)]
        # The first sample was streamed; the others were generated with it.
        rest = "".join(f"\n\n---- sample {i} of {num}\n{text}" for i, text in enumerate(texts[1:], 2))
        write(rest + "\n")
        return Sample(text=texts[0] + rest, facts={"prompt": prompt, **options})

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

    def export(self, folder: Path) -> list[Path]:
        from seedbed.recipes.gpt.export import export

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
