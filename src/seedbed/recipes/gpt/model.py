"""The language model: a causal transformer. B batch, T time, C width, V padded vocabulary."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seedbed.nn import decoding, layers
from seedbed.nn.decoding import Cache, Decode, Prefill
from seedbed.nn.init import declare, fill_, initialised, module_list, normal_
from seedbed.recipes.gpt.presets import ModelConfig

VOCAB_MULTIPLE = 64


class PositionTables(NamedTuple):
    """Positions, rotary angles and dtype of a forward pass. Made outside of compiled code, which would recompute the angles
    for every value and cannot always query autocast for the dtype."""

    dtype: torch.dtype
    positions: Tensor
    rope: layers.Rope | None


def make_norm(config: ModelConfig) -> nn.Module:
    return layers.LayerNorm(config.width) if config.norm == "layer" else layers.RMSNorm()


class Block(nn.Module):
    """Attention and feed-forward with residual connections; the second half of a U-shaped model adds an early state too."""

    def __init__(self, config: ModelConfig, takes_skip: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = make_norm(config), make_norm(config)
        self.attention = layers.Attention(
            config.width,
            config.heads,
            kv_heads=config.kv_heads,
            qk_norm=config.qk_norm,
            dropout=config.dropout,
            gate=config.gate,
            values_x0=config.values_x0,
        )
        self.mlp = layers.MLP(config.width, config.mlp)
        self.skip_weight = declare(nn.Parameter(torch.ones(())), "scalar") if takes_skip else None
        # One rate for all blocks: a rate per block would be compiled once per block.
        self.dropout, self.drop_path = config.dropout, config.drop_path

    def forward(
        self,
        x_BTC: Tensor,
        rope: layers.Rope | None,
        x0_BTC: Tensor | None = None,
        skip_BTC: Tensor | None = None,
        cache: Prefill | Decode | None = None,
    ) -> Tensor:
        if skip_BTC is not None:
            assert self.skip_weight is not None
            x_BTC = x_BTC + self.skip_weight.to(x_BTC.dtype) * skip_BTC
        x_BTC = x_BTC + self._drop(self.attention(self.norm1(x_BTC), rope, x0_BTC, cache))
        return x_BTC + self._drop(self.mlp(self.norm2(x_BTC)))

    def _drop(self, y_BTC: Tensor) -> Tensor:
        """Dropout, and stochastic depth: the whole branch is dropped for some rows."""
        y_BTC = F.dropout(y_BTC, self.dropout, self.training)
        if not self.drop_path or not self.training:
            return y_BTC
        keep_B11 = torch.rand(len(y_BTC), 1, 1, device=y_BTC.device) >= self.drop_path
        return y_BTC * (keep_B11 / (1.0 - self.drop_path)).to(y_BTC.dtype)


class Head(nn.Module):
    """From the stream to logits or to the loss. The weight is passed in, since it may be the embedding's."""

    def __init__(self, config: ModelConfig, vocab: int) -> None:
        super().__init__()
        self.norm, self.vocab, self.softcap = make_norm(config), vocab, config.softcap

    def forward(self, x_BTC: Tensor, weight_VC: Tensor, targets_BT: Tensor) -> Tensor:
        """Mean nats over targets. Logits stay in the stream's dtype; only their reduction is float32."""
        if not self.softcap:
            return layers.linear_cross_entropy(self.norm(x_BTC).flatten(0, -2), weight_VC, targets_BT.flatten(), self.vocab)
        logits_BTV = layers.mask_padding(self.logits(x_BTC, weight_VC), self.vocab)
        return F.cross_entropy(layers.widen(logits_BTV).flatten(0, -2), targets_BT.flatten())

    def logits(self, x_BTC: Tensor, weight_VC: Tensor) -> Tensor:
        """Logits over the padded vocabulary."""
        logits_BTV = F.linear(self.norm(x_BTC), weight_VC)
        return torch.tanh(logits_BTV / self.softcap) * self.softcap if self.softcap else logits_BTV


class Transformer(nn.Module):
    """Embedding, blocks and head. `forward` is the training loss; `logits` and `hidden` are for evaluation and generation."""

    def __init__(self, config: ModelConfig, vocab: int, block: int) -> None:
        super().__init__()
        self.config, self.vocab, self.block = config, vocab, block
        padded = -(-vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        self.embed = nn.Embedding(padded, config.width)
        sizes = layers.Sizes(block, config.width, config.width // config.heads, config.rope_base)
        self.positions: layers.NoPositions = layers.ENCODINGS[config.positions](sizes)
        num_skips = config.depth // 2 if config.skips else 0
        self.blocks = module_list(Block(config, i >= config.depth - num_skips) for i in range(config.depth))
        self.head = Head(config, vocab)
        self.unembed = None if config.tied else nn.Linear(config.width, padded, bias=False)
        if self.unembed:
            declare(self.unembed.weight, "head")

    def init_weights(self, generator: torch.Generator) -> None:
        """Fill every parameter; blocks start near the identity and the first loss is that of a uniform guess."""
        config = self.config
        classic = config.norm == "layer"
        in_std = 0.02 if classic else config.width**-0.5
        # A tied embedding is also the head: its scale decides the first logits (GPT-2's 0.02 starts 0.1 above ln V).
        table_std = 0.01 if classic else 1.0 / config.width if config.tied else 1.0
        normal_(self.embed.weight, table_std, generator)
        self.positions.init_weights(table_std, generator)
        for block in self.blocks:
            block.attention.init_weights(in_std, config.out_init * in_std, generator)
            block.mlp.init_weights(in_std, config.out_init * in_std, generator)
            if block.skip_weight is not None:
                fill_(block.skip_weight, 1.0)
        if self.unembed:
            normal_(self.unembed.weight, 0.1 * config.width**-0.5, generator)
        for module in self.modules():
            if isinstance(module, layers.LayerNorm):
                fill_(module.weight, 1.0)

    @property
    def head_weight(self) -> Tensor:
        return self.unembed.weight if self.unembed else self.embed.weight

    def num_parameters(self, embedding: bool = True) -> int:
        """All parameters, or those outside the embedding, position and output tables."""
        prefixes = () if embedding else ("embed.", "positions.", "unembed.")
        return sum(p.numel() for name, p in self.named_parameters() if not name.startswith(prefixes))

    def flops_per_token(self) -> float:
        """6N + 12*L*C*T, forward and backward: N without position table and with one V*C; attention not halved for causality."""
        prefixes = ("positions.", "embed.") if self.unembed else ("positions.",)
        num_weights = sum(p.numel() for name, p in self.named_parameters() if not name.startswith(prefixes))
        return 6.0 * num_weights + 12.0 * self.config.depth * self.config.width * self.block

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor, tables: PositionTables | None = None) -> Tensor:
        """The mean loss, in nats per target. Compiled code must be given its tables."""
        return self.head(self.hidden(tokens_BT, tables), self.head_weight, targets_BT)

    def logits(self, tokens_BT: Tensor) -> Tensor:
        """Logits over the true vocabulary at every position."""
        return self.read_out(self.hidden(tokens_BT))

    def read_out(self, x_BTC: Tensor) -> Tensor:
        """Logits over the true vocabulary from states of the last block."""
        return self.head.logits(x_BTC, self.head_weight)[..., : self.vocab]

    def hidden(
        self, tokens_BT: Tensor, tables: PositionTables | None = None, caches: Sequence[Prefill | Decode] | None = None
    ) -> Tensor:
        """States after the last block; positions count from 0 unless the tables hold others."""
        tables = tables or self.position_tables(tokens_BT)
        x_BTC = self.embed(tokens_BT)
        vectors = self.positions.vectors(tables.positions)
        x_BTC = layers.rms_norm(x_BTC) if vectors is None else x_BTC + vectors
        x_BTC = F.dropout(x_BTC.to(tables.dtype), self.config.dropout, self.training)
        x0_BTC, early = x_BTC if self.config.values_x0 else None, []
        for i, block in enumerate(self.blocks):
            skip = early.pop() if block.skip_weight is not None else None
            # The input of an early block, not its output: the innermost skip would add the stream to itself.
            if self.config.skips and i < self.config.depth // 2:
                early.append(x_BTC)
            x_BTC = block(x_BTC, tables.rope, x0_BTC, skip, caches[i] if caches else None)
        return x_BTC

    def position_tables(self, tokens_BT: Tensor, positions: Tensor | None = None) -> PositionTables:
        """The tables of a forward pass over these tokens at `positions` of shape (T) or (B, T), by default from 0."""
        if positions is None:
            positions = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        return PositionTables(layers.stream_dtype(self.embed.weight), positions, self.positions.rope(positions))

    def new_cache(self, batch: int) -> Cache:
        """Room for the keys and values of `batch` rows of the full context."""
        config, weight = self.config, self.embed.weight
        heads, head_dim = config.kv_heads or config.heads, config.width // config.heads
        dtype = layers.stream_dtype(weight)
        return Cache(config.depth, batch, heads, self.block, head_dim, dtype=dtype, device=weight.device)


class CachedDecoder(decoding.CachedDecoder):
    """Generation caches keys and values: after the prefill, each token is one decode step."""

    def _prefill(self, tokens_NT: Tensor, layers: list[Prefill]) -> None:
        self.model.hidden(tokens_NT, caches=layers)

    def step(self, num_slots: int = 0) -> None:
        """One decode step on the device, without a host sync."""
        token_B1 = self.history_BN.gather(1, self.count_B[:, None] - 1)
        tables = self.model.position_tables(token_B1, self.cache.length_B[:, None])
        x_B1C = self.model.hidden(token_B1, tables, self.cache.decode(num_slots))
        self.cache.length_B += 1
        self._append(self.model.read_out(x_B1C[:, 0]))


def build_model(config: ModelConfig, vocab: int, block: int, seed: int) -> Transformer:
    return initialised(Transformer, seed, config, vocab, block, may_wait=True)
