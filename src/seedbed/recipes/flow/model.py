"""The flow model: a transformer over patches, conditioned on time and class.

B batch, C channels, H W pixels, N patches, T tokens (patches and conditions), K values of a patch, D width, F features of a time.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seedbed.nn.init import declare, fill_, initialised, module_list, normal_
from seedbed.nn.layers import MLP, Attention, Rope, rms_norm, rope_table, stream_dtype, widen
from seedbed.nn.modulate import Modulation, full_precision, gate_and_norm, try_gate_and_norm
from seedbed.nn.patchify import depatchify, grid_of, patchify, raster, sincos_table
from seedbed.recipes.flow.presets import ModelConfig

TIME_FEATURES, TIME_PERIOD = 256, 10_000.0
CLASS_STD = 0.5
# A norm needs a shift and a scale, and every one but the first has a branch before it, with its gate.
FIRST, OTHERS = 2, 3


class PositionTables(NamedTuple):
    """Position embeddings, rotary angles and dtype of a forward pass. Made outside of compiled code, which would recompute the
    angles for every value and cannot always query autocast for the dtype."""

    dtype: torch.dtype
    positions_ND: Tensor | None
    ropes: tuple[Rope | None, Rope | None]
    """For patches alone, and for patches followed by condition tokens; none where positions are only added."""


def time_features(time_B: Tensor, num: int, scale: float) -> Tensor:
    """(B, F) cosines and sines of `scale` times t. Without a scale, times in [0, 1] give nearly parallel vectors."""
    assert num % 2 == 0, f"cosines and sines come in pairs, not {num}"
    half = num // 2
    wide_B = widen(time_B)
    rates = torch.exp(torch.arange(half, device=time_B.device, dtype=wide_B.dtype) * (-math.log(TIME_PERIOD) / half))
    angles_BF = scale * wide_B[:, None] * rates
    return torch.cat((angles_BF.cos(), angles_BF.sin()), dim=1)


class TimeEmbedding(nn.Module):
    """Sines of the time through two layers, in float32 also under autocast."""

    def __init__(self, num_features: int, width: int, scale: float) -> None:
        super().__init__()
        self.num_features, self.scale = num_features, scale
        self.up, self.down = nn.Linear(num_features, width), nn.Linear(width, width)

    def init_weights(self, generator: torch.Generator) -> None:
        for layer in (self.up, self.down):
            normal_(layer.weight, layer.in_features**-0.5, generator)
            fill_(layer.bias, 0.0)

    def forward(self, time_B: Tensor) -> Tensor:
        with full_precision(time_B.device):
            features_BF = time_features(time_B.to(self.up.weight.dtype), self.num_features, self.scale)
            return self.down(F.silu(self.up(features_BF)))


class Block(nn.Module):
    """Attention among all tokens and feed-forward, each added to the stream; modulated by the condition, or plain."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention = Attention(config.width, config.heads, qk_norm=config.qk_norm, causal=False)
        self.mlp = MLP(config.width, config.mlp, config.hidden)

    def forward(
        self, x_BTD: Tensor, rope: Rope | None, vectors: tuple[Tensor, ...] = (), branch_BTD: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The stream, and with vectors the last branch, not yet added: the next norm does both in one pass."""
        if not vectors:
            x_BTD = x_BTD + self.attention(rms_norm(x_BTD), rope)
            return x_BTD + self.mlp(rms_norm(x_BTD)), None
        x_BTD, y_BTD = gate_and_norm(x_BTD, branch_BTD, vectors[0])
        x_BTD, y_BTD = gate_and_norm(x_BTD, self.attention(y_BTD, rope), vectors[1])
        return x_BTD, self.mlp(y_BTD)


class FlowTransformer(nn.Module):
    """From a noisy image, its time and its class to an output of the image's shape; zero at initialisation."""

    def __init__(self, config: ModelConfig, shape: tuple[int, int, int], num_classes: int) -> None:
        super().__init__()
        self.config, self.shape, self.num_classes = config, shape, num_classes
        channels, height, width = shape
        self.grid = grid_of(height, width, config.patch)
        self.num_patches = self.grid[0] * self.grid[1]
        numbers = channels * config.patch**2
        self.enter = nn.Linear(numbers, config.width)
        # The last row is the null class.
        self.classes = nn.Embedding((num_classes + bool(config.drop)) * max(1, self.num_class_tokens), config.width)
        adaln = config.condition == "adaln"
        self.time = TimeEmbedding(TIME_FEATURES, config.width, config.t_scale) if adaln else None
        self.modulation = Modulation(config.width, FIRST + OTHERS * 2 * config.depth) if adaln else None
        self.blocks = module_list(Block(config) for _ in range(config.depth))
        self.leave = nn.Linear(config.width, numbers)
        declare(self.leave.weight, "head")

    @property
    def num_class_tokens(self) -> int:
        """Tokens that carry the class; with `context` at least one."""
        return max(self.config.context_tokens, int(self.config.condition == "context"))

    @property
    def num_context(self) -> int:
        """Tokens beside the patches: those of the class, and with `context` one for the time."""
        return self.num_class_tokens + (self.config.condition == "context")

    @property
    def null_class(self) -> int:
        assert self.config.drop, "a model trained without class dropout has no null class"
        return self.num_classes

    def init_weights(self, generator: torch.Generator) -> None:
        """Fill every parameter; gates (or, without them, the blocks' outputs) and the last layer are zero."""
        width = self.config.width
        # `unit` keeps the variance of pixels at any patch size; the others are those of torch and DiT, for comparison.
        numbers = self.enter.in_features
        stds = {"unit": numbers**-0.5, "conv": (3 * numbers) ** -0.5, "xavier": (2 / (numbers + width)) ** 0.5}
        normal_(self.enter.weight, stds[self.config.patch_init], generator)
        normal_(self.classes.weight, CLASS_STD, generator)
        for layer in (self.enter, self.leave):
            fill_(layer.bias, 0.0)
        if self.time and self.modulation:
            self.time.init_weights(generator)
            self.modulation.init_weights()
        # Where gates are zero the branches must not be: one zero in a product is enough.
        out_std = width**-0.5 if self.modulation else 0.0
        for block in self.blocks:
            block.attention.init_weights(width**-0.5, out_std, generator)
            down_std = block.mlp.down.in_features**-0.5 if self.modulation else 0.0
            block.mlp.init_weights(width**-0.5, down_std, generator)
        fill_(self.leave.weight, 0.0)

    def token_parameters(self) -> int:
        """Matmul parameters of the blocks, applied to every token."""
        return sum(p.numel() for block in self.blocks for p in block.parameters() if p.ndim == 2)

    def image_parameters(self) -> int:
        """Matmul parameters applied once per image: the time's layers and the modulation."""
        parts = [m for m in (self.time, self.modulation) if m is not None]
        return sum(p.numel() for part in parts for p in part.parameters() if p.ndim == 2)

    def flops_per_image(self) -> float:
        """Forward and backward: 6 per parameter and token, 12 L N^2 D for attention, none for the gradient of pixels."""
        config, ends = self.config, self.enter.weight.numel() + self.leave.weight.numel()
        late = config.depth - config.context_start if self.num_context else 0
        tokens = [self.num_patches] * (config.depth - late) + [self.num_patches + self.num_context] * late
        per_block = self.token_parameters() // config.depth
        blocks = sum(6 * n * per_block + 12 * n * n * config.width for n in tokens)
        around = 6 * (self.num_patches * ends + self.image_parameters())
        # Neither pixels nor the time have a gradient, so the first layer on either needs no product for it.
        spared = 2 * self.num_patches * self.enter.weight.numel() + (2 * self.time.up.weight.numel() if self.time else 0)
        return float(blocks + around - spared)

    def forward_flops(self) -> float:
        """Forward pass of one image: approximately a third of training."""
        return self.flops_per_image() / 3

    def forward(self, x_BCHW: Tensor, time_B: Tensor, class_B: Tensor, tables: PositionTables | None = None) -> Tensor:
        """An output of the shape of `x_BCHW`, in float32. Compiled code must be given its tables."""
        _, height, width = self.shape
        y_BNK = self.tokens(patchify(x_BCHW, self.config.patch), time_B, class_B, tables)
        return depatchify(y_BNK, self.config.patch, height, width)

    def tokens(self, x_BNK: Tensor, time_B: Tensor, class_B: Tensor, tables: PositionTables | None = None) -> Tensor:
        """The same on patches as rows."""
        tables = tables or self.position_tables()
        x_BTD = self.enter(x_BNK).to(tables.dtype)
        if tables.positions_ND is not None:
            x_BTD = x_BTD + tables.positions_ND.to(tables.dtype)
        vectors, branch_BTD = self._vectors(time_B, class_B, tables.dtype), None
        for i, block in enumerate(self.blocks):
            own = vectors[2 * i : 2 * i + 2]
            if self.num_context and i == self.config.context_start:
                if branch_BTD is not None:
                    x_BTD = torch.addcmul(x_BTD, own[0][:, :1], branch_BTD)
                    own, branch_BTD = (own[0][:, 1:], own[1]), None
                x_BTD = torch.cat((x_BTD, self._context(time_B, class_B).to(tables.dtype)), dim=1)
            rope = tables.ropes[int(x_BTD.shape[1] > self.num_patches)]  # torch 2.11 compiles no index that is a bool
            x_BTD, branch_BTD = block(x_BTD, rope, own, branch_BTD)
        x_BTD = x_BTD[:, : self.num_patches]
        if branch_BTD is None:
            y_BND = rms_norm(x_BTD)
        else:
            _, y_BND = gate_and_norm(x_BTD, branch_BTD[:, : self.num_patches], vectors[-1])
        # Cast last: the error is squared in float32.
        return self.leave(y_BND).to(torch.promote_types(x_BNK.dtype, torch.float32))

    def _vectors(self, time_B: Tensor, class_B: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Shift and scale of the first norm, gate, shift and scale of all others; none where conditions are tokens."""
        if not self.time or not self.modulation:
            return ()
        condition_BD = self.time(time_B) + self._class_rows(class_B).mean(1)
        return self.modulation(condition_BD).to(dtype).split((FIRST, *[OTHERS] * (2 * self.config.depth)), dim=1)

    def _class_rows(self, class_B: Tensor) -> Tensor:
        """(B, tokens of the class, D): consecutive rows of the table."""
        num = max(1, self.num_class_tokens)
        return self.classes(class_B[:, None] * num + torch.arange(num, device=class_B.device))

    def _context(self, time_B: Tensor, class_B: Tensor) -> Tensor:
        """The condition tokens: a sinusoidal one for the time, where adaln does not carry it, and those of the class."""
        rows_BTD = self._class_rows(class_B)
        if self.time:
            return rows_BTD
        time_BD = time_features(time_B, self.config.width, self.config.t_scale)
        return torch.cat((time_BD[:, None].to(rows_BTD.dtype), rows_BTD), dim=1)

    def position_tables(self, positions_N2: Tensor | None = None) -> PositionTables:
        """The tables of a forward pass; patches are in raster order unless other positions are given."""
        config, device = self.config, self.enter.weight.device
        if self.modulation and device.type == "cuda":
            try_gate_and_norm(config.width, stream_dtype(self.enter.weight), device)
        positions_N2 = raster(*self.grid, device) if positions_N2 is None else positions_N2
        head_dim, rope = config.width // config.heads, None
        if config.positions == "1d":
            rope = rope_table(positions_N2[:, 0] * self.grid[1] + positions_N2[:, 1], head_dim, config.rope_base)
        elif config.positions == "2d":
            rope = axial_table(positions_N2, head_dim, config.rope_base)
        positions_ND = None if config.positions == "1d" else sincos_table(positions_N2, config.width)
        ropes = (rope, rope and with_unrotated(rope, self.num_context))
        return PositionTables(stream_dtype(self.enter.weight), positions_ND, ropes)


def build_model(config: ModelConfig, shape: tuple[int, int, int], num_classes: int, seed: int) -> FlowTransformer:
    return initialised(FlowTransformer, seed, config, shape, num_classes, may_wait=True)


def axial_table(places_N2: Tensor, head_dim: int, base: float) -> Rope:
    """Cosines and sines of shape (N, 1, D/2): the first half of the angles follows the row, the second the column."""
    assert head_dim % 4 == 0, f"two axes of pairs need a head width that is a multiple of 4, not {head_dim}"
    parts = [rope_table(place_N, head_dim // 2, base) for place_N in places_N2.unbind(1)]
    cos, sin = (torch.cat(pair, dim=-1) for pair in zip(*parts, strict=True))
    return cos, sin


def with_unrotated(rope: Rope, num: int) -> Rope:
    """The table with `num` further tokens that have no position and are not rotated."""
    cos, sin = rope
    shape = (num, *cos.shape[1:])
    return torch.cat((cos, cos.new_ones(shape))), torch.cat((sin, sin.new_zeros(shape)))
