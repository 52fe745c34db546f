"""An energy over next tokens in two streams, and the plain transformer that is its baseline.

The real stream encodes the tokens; the predicted one holds a prediction of the next token at every position, attends to the
real stream and to itself, and ends in one number. Shape suffixes: B batch, T time, C width, H heads, D head width, S positions
of the real stream, V vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seedbed.nn.decoding import Cache, Decode, Prefill
from seedbed.nn.init import declare, fill_, initialised, module_list, normal_
from seedbed.nn.layers import MLP, Rope, apply_rope, rms_norm, rope_table, stream_dtype, widen
from seedbed.recipes.ebt.presets import ModelConfig

EPS = 1e-5


class Norm(nn.Module):
    """Root-mean-square norm with a gain."""

    def __init__(self, width: int, decay: bool) -> None:
        super().__init__()
        self.weight = declare(nn.Parameter(torch.ones(width)), "scalar", decay=decay)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, EPS)


class Context(NamedTuple):
    """What predictions need of the real stream: keys and values per layer, positions of the predictions, attention mask."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    rope: Rope
    mask_TS: Tensor


def two_stream_attention(
    q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, mask_TS: Tensor
) -> Tensor:
    """Each prediction attends to the real positions that `mask_TS` (0 or -inf) allows, and to itself.

    Written in basic operations, since fused kernels cannot be differentiated twice.
    """
    q_BHTD = q_BHTD * q_BHTD.shape[-1] ** -0.5
    real_BHTS = widen(q_BHTD @ k_BHSD.mT) + mask_TS
    self_BHT1 = widen((q_BHTD * k_BHTD).sum(-1, keepdim=True))
    share_BHTU = torch.cat((real_BHTS, self_BHT1), -1).softmax(-1).to(v_BHTD.dtype)
    return share_BHTU[..., :-1] @ v_BHSD + share_BHTU[..., -1:] * v_BHTD


class Block(nn.Module):
    """Attention and feed-forward: `forward` for the real stream, `predict` for the predicted one."""

    def __init__(self, width: int, heads: int, decay_all: bool) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = Norm(width, decay_all), Norm(width, decay_all)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        declare(self.qkv.weight, "matrix", rows=(width,) * 3)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = MLP(width, "swiglu", hidden=width)

    def init_weights(self, generator: torch.Generator) -> None:
        width = self.out.in_features
        for weight in (self.qkv.weight, self.out.weight, self.mlp.up.weight, self.mlp.down.weight):
            normal_(weight, width**-0.5, generator)
        fill_(self.norm1.weight, 1.0)
        fill_(self.norm2.weight, 1.0)

    def forward(self, x_BTC: Tensor, rope: Rope, cache: Prefill | Decode | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """The real stream after this block, and its keys and values: the cache's, where there is one."""
        q_BHTD, k_BHSD, v_BHSD = self._project(self.norm1(x_BTC), rope)
        mask = None
        if cache is not None:
            k_BHSD, v_BHSD, mask = cache.update(k_BHSD, v_BHSD)
        y_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHSD, v_BHSD, attn_mask=mask, is_causal=mask is None)
        return self._finish(x_BTC, y_BHTD), k_BHSD, v_BHSD

    def keys_values(self, x_BTC: Tensor, rope: Rope, cache: Prefill | Decode | None = None) -> tuple[Tensor, Tensor]:
        """Keys and values of the last block, where the real stream ends."""
        k, v = F.linear(self.norm1(x_BTC), self.qkv.weight[x_BTC.shape[-1] :]).unflatten(-1, (2, self.heads, -1)).unbind(-3)
        k_BHSD, v_BHSD = apply_rope(k, rope).transpose(1, 2), v.transpose(1, 2)
        return (k_BHSD, v_BHSD) if cache is None else cache.update(k_BHSD, v_BHSD)[:2]

    def predict(self, x_BTC: Tensor, rope: Rope, k_BHSD: Tensor, v_BHSD: Tensor, mask_TS: Tensor) -> Tensor:
        """The predicted stream after this block."""
        q_BHTD, k_BHTD, v_BHTD = self._project(self.norm1(x_BTC), rope)
        return self._finish(x_BTC, two_stream_attention(q_BHTD, k_BHTD, v_BHTD, k_BHSD, v_BHSD, mask_TS))

    def _project(self, x_BTC: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x_BTC).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        return apply_rope(q, rope).transpose(1, 2), apply_rope(k, rope).transpose(1, 2), v.transpose(1, 2)

    def _finish(self, x_BTC: Tensor, y_BHTD: Tensor) -> Tensor:
        x_BTC = x_BTC + self.out(y_BHTD.transpose(1, 2).flatten(2))
        return x_BTC + self.mlp(self.norm2(x_BTC))


class Trunk(nn.Module):
    """Base of both models: token embedding and a stack of blocks."""

    def __init__(self, config: ModelConfig, vocab: int, block: int) -> None:
        super().__init__()
        depth, heads, width = config.shape
        self.config, self.vocab, self.block = config, vocab, block
        self.width, self.head_dim = width, width // heads
        self.embed = nn.Embedding(vocab, width)
        declare(self.embed.weight, "embed", decay=config.decay_all)
        self.blocks = module_list(Block(width, heads, config.decay_all) for _ in range(depth))
        self.norm = Norm(width, config.decay_all)

    def init_weights(self, generator: torch.Generator) -> None:
        """Xavier normal initialisation, as in the original."""
        normal_(self.embed.weight, self._xavier(self.embed.weight), generator)
        for block in self.blocks:
            block.init_weights(generator)
        fill_(self.norm.weight, 1.0)

    @staticmethod
    def _xavier(weight: Tensor) -> float:
        return (2.0 / sum(weight.shape)) ** 0.5

    def rope(self, positions: Tensor) -> Rope:
        # Steps amplify rounding, so angles are as exact as the weights.
        dtype = torch.promote_types(self.embed.weight.dtype, torch.float32)
        return rope_table(positions, self.head_dim, self.config.rope_base, dtype)

    def new_cache(self, batch: int) -> Cache:
        """Room for the keys and values of `batch` rows of the full context, and a prefix."""
        heads, weight = self.width // self.head_dim, self.embed.weight
        dtype = stream_dtype(weight)
        return Cache(len(self.blocks), batch, heads, self.block + 1, self.head_dim, dtype=dtype, device=weight.device)

    def forward_flops(self) -> float:
        """Operations of one token's forward pass through the blocks."""
        weights = sum(p.numel() for block in self.blocks for p in block.parameters() if p.ndim == 2)
        return 2.0 * weights + 4.0 * len(self.blocks) * self.width * self.block


class PlainModel(Trunk):
    """A causal transformer of the same blocks, with a softmax head."""

    def __init__(self, config: ModelConfig, vocab: int, block: int) -> None:
        super().__init__(config, vocab, block)
        self.head = nn.Linear(self.width, vocab, bias=False)
        declare(self.head.weight, "head")

    def init_weights(self, generator: torch.Generator) -> None:
        super().init_weights(generator)
        normal_(self.head.weight, 0.1 * self.width**-0.5, generator)  # the first guess is nearly uniform

    def forward(self, tokens_BT: Tensor, rope: Rope, caches: Sequence[Prefill | Decode] | None = None) -> Tensor:
        x_BTC = self.embed(tokens_BT).to(stream_dtype(self.embed.weight))
        for i, block in enumerate(self.blocks):
            x_BTC, _, _ = block(x_BTC, rope, caches[i] if caches else None)
        return self.head(self.norm(x_BTC))


class EnergyModel(Trunk):
    """The energy of predictions and its gradient with respect to their probabilities."""

    def __init__(self, config: ModelConfig, vocab: int, block: int) -> None:
        super().__init__(config, vocab, block)
        self.enter = nn.Linear(vocab, self.width, bias=False)
        declare(self.enter.weight, "head")
        self.landscape = None if config.step_embed == "none" else nn.Embedding(config.mcmc.num_landscapes, self.width)
        if self.landscape:
            declare(self.landscape.weight, "embed", decay=config.decay_all)
        # No bias: a constant has no gradient.
        self.head = nn.Linear(self.width, 1, bias=False)
        declare(self.head.weight, "head")

    @property
    def num_prefix(self) -> int:
        return int(self.config.step_embed == "prefix")

    def context_flops(self) -> float:
        """Operations of one token in the real stream, which ends at the last block's keys and values."""
        idle = sum(p.numel() for p in self.blocks[-1].parameters() if p.ndim == 2) - 2 * self.width**2
        return self.forward_flops() - 2.0 * idle - 4.0 * self.width * self.block

    def init_weights(self, generator: torch.Generator) -> None:
        super().init_weights(generator)
        normal_(self.enter.weight, self._xavier(self.enter.weight), generator)
        if self.landscape:
            normal_(self.landscape.weight, self._xavier(self.embed.weight), generator)
        normal_(self.head.weight, self._xavier(self.head.weight), generator)

    # ---- the real stream ---------------------------------------------------------------------------------------------

    def encode_context(self, tokens_BT: Tensor, positions_T: Tensor | None = None) -> list[Context]:
        """The context for each landscape: the same one, unless the landscape is the context's first token.

        Tokens have positions 0, 1, 2... unless others are given, and each prediction that of the next token.
        """
        num_tokens, more, device = tokens_BT.shape[1], self.num_prefix, tokens_BT.device
        positions_T = torch.arange(num_tokens, device=device) if positions_T is None else positions_T
        rope_S = self.rope(torch.cat((torch.arange(more, device=device), positions_T + more)))
        ahead_TS = torch.ones(num_tokens, num_tokens + more, dtype=torch.bool, device=device).triu(more + 1)
        mask_TS = torch.zeros(ahead_TS.shape, device=device).masked_fill(ahead_TS, float("-inf"))
        rope_T, found = self.rope(positions_T + more + 1), []
        for landscape in range(self.num_context_passes()):
            keys, values = self.context_keys_values(self.embed_tokens(tokens_BT, landscape), rope_S)
            found.append(Context(keys, values, rope_T, mask_TS))
        return self.per_landscape(found)

    def per_landscape(self, contexts: list[Context]) -> list[Context]:
        """One context per landscape, repeated where landscapes share it."""
        return contexts * (self.config.mcmc.num_landscapes // len(contexts))

    def num_context_passes(self) -> int:
        """The number of passes of the real stream that the landscapes need."""
        return self.config.mcmc.num_landscapes if self.num_prefix else 1

    def embed_tokens(self, tokens_BT: Tensor, landscape: int) -> Tensor:
        """The real stream's input, after the landscape's token where there is one."""
        x_BTC = self.embed(tokens_BT)
        if self.num_prefix:
            assert self.landscape is not None
            x_BTC = torch.cat((self.landscape.weight[landscape].expand(len(x_BTC), 1, -1), x_BTC), 1)
        return x_BTC.to(stream_dtype(self.embed.weight))

    def context_keys_values(
        self, x_BTC: Tensor, rope: Rope, caches: Sequence[Prefill | Decode] | None = None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Keys and values of every layer, from the input of the real stream."""
        found, last = [], len(self.blocks) - 1
        for i, block in enumerate(self.blocks):
            cache = caches[i] if caches else None
            if i == last:
                found.append(block.keys_values(x_BTC, rope, cache))
            else:
                x_BTC, *kv = block(x_BTC, rope, cache)
                found.append(tuple(kv))
        return tuple(k for k, _ in found), tuple(v for _, v in found)

    def new_caches(self, batch: int) -> list[Cache]:
        """An empty cache for every context pass; it holds the landscape's token where there is one."""
        caches = [self.new_cache(batch) for _ in range(self.num_context_passes())]
        if self.num_prefix:
            device = self.embed.weight.device
            nothing_B0 = torch.zeros(batch, 0, dtype=torch.int64, device=device)
            for landscape, cache in enumerate(caches):
                self.prefill(cache, torch.arange(batch, device=device), nothing_B0, landscape)
                cache.length_B += 1
        return caches

    def prefill(self, cache: Cache, rows_N: Tensor, tokens_NT: Tensor, landscape: int) -> None:
        """Encode whole windows into rows of a cache; the caller sets their lengths."""
        x_NTC = self.embed_tokens(tokens_NT, landscape)
        if x_NTC.shape[1]:
            self.context_keys_values(x_NTC, self.rope(torch.arange(x_NTC.shape[1], device=x_NTC.device)), cache.prefill(rows_N))

    def decode_token(self, cache: Cache, token_B1: Tensor, num_slots: int = 0) -> Context:
        """Append one token to every row; the context for predictions of the next, which all have one position."""
        layers = cache.decode(num_slots + self.num_prefix if num_slots else 0)
        x_B1C = self.embed(token_B1).to(stream_dtype(self.embed.weight))
        keys, values = self.context_keys_values(x_B1C, self.rope(cache.length_B[:, None]), layers)
        cache.length_B += 1
        return Context(keys, values, self.rope(cache.length_B[:, None]), layers[0].mask)

    # ---- the predicted stream ----------------------------------------------------------------------------------------

    def forward(self, z_BTV: Tensor, context: Context, landscape: int) -> tuple[Tensor, Tensor, Tensor]:
        """Probabilities of the predictions, the gradient of the energy with respect to them, and the energies.

        An energy depends on its own prediction alone, so the gradient of their sum is the gradient of each.
        """
        p_BTV = z_BTV.softmax(-1)
        if torch.compiler.is_compiling() or not self.training:
            return p_BTV, *self._functional_grad(p_BTV, context, landscape)
        goes_on = torch.is_grad_enabled()
        with torch.enable_grad():
            at_BTV = p_BTV if p_BTV.requires_grad else p_BTV.detach().requires_grad_()
            energy_BT = self.energy(at_BTV, context, landscape)
            (grad_BTV,) = torch.autograd.grad(energy_BT.sum(), at_BTV, create_graph=goes_on)
        return p_BTV, grad_BTV, energy_BT if goes_on else energy_BT.detach()

    def _functional_grad(self, p_BTV: Tensor, context: Context, landscape: int) -> tuple[Tensor, Tensor]:
        """The same in a form that compiles, can be differentiated again, and builds no graph of the weights where none is
        needed; but tools that hook saved tensors cannot see it."""

        def total(p_BTV: Tensor) -> tuple[Tensor, Tensor]:
            energy_BT = self.energy(p_BTV, context, landscape)
            return energy_BT.sum(), energy_BT

        return torch.func.grad(total, has_aux=True)(p_BTV)

    def energy(self, p_BTV: Tensor, context: Context, landscape: int) -> Tensor:
        """One number per prediction, low where it fits its context."""
        kind, dtype = p_BTV.device.type, context.keys[0].dtype  # compiled code cannot always query autocast
        # A step multiplies the gradient by alpha, rounding included: both ends of the stream stay in full precision.
        with torch.autocast(kind, enabled=False):
            x_BTC = F.linear(p_BTV, self.enter.weight)  # not called as a module: FLOP counters hook those
            if self.landscape and not self.num_prefix:
                x_BTC = x_BTC + self.landscape.weight[landscape]
        x_BTC = x_BTC.to(dtype)
        for block, k_BHSD, v_BHSD in zip(self.blocks, context.keys, context.values, strict=True):
            x_BTC = block.predict(x_BTC, context.rope, k_BHSD, v_BHSD, context.mask_TS)
        with torch.autocast(kind, enabled=False):
            return self.head(self.norm(widen(x_BTC)))[..., 0]


def build_model(config: ModelConfig, vocab: int, block: int, seed: int) -> EnergyModel | PlainModel:
    return initialised(EnergyModel if config.kind == "energy" else PlainModel, seed, config, vocab, block)
