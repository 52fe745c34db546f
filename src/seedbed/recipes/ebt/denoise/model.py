"""Transformers over all patches of an image: an energy model, and a regressor of the same blocks.

Shape suffixes: B batch, C channels, H W pixels, N patches, K numbers of a patch, D width, H heads.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seedbed.nn.init import declare, fill_, initialised, module_list, normal_
from seedbed.nn.layers import MLP, widen
from seedbed.nn.modulate import Modulation
from seedbed.nn.patchify import depatchify, grid_of, patchify, raster, sincos_table
from seedbed.recipes.ebt.presets import DenoiseConfig

# Shift, scale and gate of attention and of the feed-forward part; the last norm has a shift and a scale.
PER_BLOCK, PER_HEAD = 6, 2
CONSTANT_STD = 1.0


def _norm(x_BND: Tensor, shift_1D: Tensor, scale_1D: Tensor) -> Tensor:
    return torch.addcmul(shift_1D, F.layer_norm(x_BND, x_BND.shape[-1:]), 1.0 + scale_1D)


class Block(nn.Module):
    """Attention among all patches and a feed-forward part. Attention is written out: fused kernels do not differentiate twice."""

    def __init__(self, config: DenoiseConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        declare(self.qkv.weight, "matrix", rows=(config.width,) * 3)
        self.out = nn.Linear(config.width, config.width, bias=False)
        self.mlp = MLP(config.width, "gelu")

    def forward(self, x_BND: Tensor, vectors: tuple[Tensor, ...]) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = vectors
        x_BND = torch.addcmul(x_BND, gate1, self.attend(_norm(x_BND, shift1, scale1)))
        return torch.addcmul(x_BND, gate2, self.mlp(_norm(x_BND, shift2, scale2)))

    def attend(self, x_BND: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x_BND).chunk(3, dim=-1))
        weights_BHNN = torch.softmax(widen(q @ k.mT) * q.shape[-1] ** -0.5, dim=-1).to(v.dtype)
        return self.out((weights_BHNN @ v).transpose(1, 2).flatten(2))

    def init_weights(self, width: int, generator: torch.Generator) -> None:
        for weight in (self.qkv.weight, self.out.weight):
            normal_(weight, width**-0.5, generator)
        self.mlp.init_weights(width**-0.5, self.mlp.down.in_features**-0.5, generator)


class Trunk(nn.Module):
    """From patches to features of patches, for a head; what conditions its norms is a learned constant."""

    head: nn.Linear

    def __init__(self, config: DenoiseConfig, shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.config, self.shape = config, shape
        channels, height, width = shape
        self.grid = grid_of(height, width, config.patch)
        self.num_patches = self.grid[0] * self.grid[1]
        self.num_numbers = channels * config.patch**2
        self.enter = nn.Linear(self.num_numbers * (1 + (config.observe == "concat")), config.width)
        self.constant = declare(nn.Parameter(torch.empty(config.width)), "scalar")
        self.modulation = Modulation(config.width, PER_BLOCK * config.depth + PER_HEAD)
        self.blocks = module_list(Block(config) for _ in range(config.depth))

    def features(self, z_BCHW: Tensor, noisy_BCHW: Tensor) -> Tensor:
        """(B, N, D), normed; the noisy image is seen only where the config says so."""
        x_BNK = patchify(z_BCHW, self.config.patch)
        if self.config.observe == "concat":
            x_BNK = torch.cat((x_BNK, patchify(noisy_BCHW, self.config.patch)), dim=-1)
        places_ND = sincos_table(raster(*self.grid, x_BNK.device), self.config.width)
        x_BND = self.enter(x_BNK) + places_ND.to(self.enter.weight.dtype)
        vectors = self.modulation(self.constant[None]).split(1, dim=1)
        for i, block in enumerate(self.blocks):
            x_BND = block(x_BND, vectors[PER_BLOCK * i : PER_BLOCK * (i + 1)])
        return _norm(x_BND, *vectors[-PER_HEAD:])

    def init_weights(self, generator: torch.Generator) -> None:
        """Gates and the head are zero, so the initial output is the noisy image."""
        normal_(self.enter.weight, self.enter.in_features**-0.5, generator)
        fill_(self.enter.bias, 0.0)
        normal_(self.constant, CONSTANT_STD, generator)
        self.modulation.init_weights()
        for block in self.blocks:
            block.init_weights(self.config.width, generator)
        for param in self.head.parameters():
            fill_(param, 0.0)

    def layer_flops(self) -> float:
        """Products of one pass of one image with the matrices of the blocks."""
        return 2.0 * self.num_patches * sum(p.numel() for block in self.blocks for p in block.parameters())

    def attention_flops(self) -> float:
        """Products of patches with patches."""
        return 4.0 * self.config.depth * self.num_patches**2 * self.config.width

    def end_flops(self, layer: nn.Linear) -> float:
        """Products of the first layer or the last."""
        return 2.0 * self.num_patches * layer.weight.numel()


class ImageEnergy(Trunk):
    """One number per image, the mean over its patches; `forward` returns its gradient too, and is differentiable again."""

    def __init__(self, config: DenoiseConfig, shape: tuple[int, int, int]) -> None:
        super().__init__(config, shape)
        # No bias: a constant has no gradient.
        self.head = nn.Linear(config.width, 1, bias=False)
        declare(self.head.weight, "head")

    def energy(self, z_BCHW: Tensor, noisy_BCHW: Tensor) -> Tensor:
        """(B,), in float32."""
        return self.head(self.features(z_BCHW, noisy_BCHW)).to(torch.promote_types(z_BCHW.dtype, torch.float32)).mean((1, 2))

    def forward(self, z_BCHW: Tensor, noisy_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient with respect to the estimate, and the energy of each image."""

        def total(z_BCHW: Tensor) -> tuple[Tensor, Tensor]:
            energy_B = self.energy(z_BCHW, noisy_BCHW)
            return energy_B.sum(), energy_B

        # Inside the function, so that it can be compiled whole: a compiled region cannot be differentiated twice from outside.
        return torch.func.grad(total, has_aux=True)(z_BCHW)


class Regressor(Trunk):
    """The same blocks with a head of pixels, added to the noisy image."""

    def __init__(self, config: DenoiseConfig, shape: tuple[int, int, int]) -> None:
        super().__init__(config, shape)
        self.head = nn.Linear(config.width, self.num_numbers)
        declare(self.head.weight, "head")

    def forward(self, z_BCHW: Tensor) -> Tensor:
        y_BNK = self.head(self.features(z_BCHW, z_BCHW)).to(torch.promote_types(z_BCHW.dtype, torch.float32))
        return z_BCHW + depatchify(y_BNK, self.config.patch, *self.shape[1:])


def build_model(config: DenoiseConfig, shape: tuple[int, int, int], seed: int) -> ImageEnergy | Regressor:
    return initialised(ImageEnergy if config.kind == "energy" else Regressor, seed, config, shape)
