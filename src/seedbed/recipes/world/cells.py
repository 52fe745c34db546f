"""Convolution cells for images: no norms, FiLM conditioning in every cell, and only operations that export to a browser.

Shape suffixes: B batch, C channels, H W pixels, F features of the condition.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seedbed.nn.init import fill_, normal_

SLOPE = 0.2
# Gains of the initial weights by the name of a layer, 1 for all others: a residual branch starts at zero, and the condition does
# not, so that it has an effect from the first step on.
GAINS = {"second": 0.0, "linear": 0.3}


def leaky(x: Tensor) -> Tensor:
    return F.leaky_relu(x, SLOPE)


def init_conv(conv: nn.Conv2d | nn.Linear, generator: torch.Generator, gain: float = 1.0) -> None:
    """Fan-in normal weights that keep the variance through a leaky layer; gain 0 gives zero output."""
    fan_in = conv.weight[0].numel()
    normal_(conv.weight, gain * math.sqrt(2.0 / ((1.0 + SLOPE**2) * fan_in)), generator)
    if conv.bias is not None:
        fill_(conv.bias, 0.0)


def init_layers(module: nn.Module, generator: torch.Generator) -> None:
    """Every convolution and linear layer of a module, with the gain of its name."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            init_conv(layer, generator, GAINS.get(name.rpartition(".")[2], 1.0))


class Condition(nn.Module):
    """Embeds numbers (controls, a noise level) as the features that condition every cell."""

    def __init__(self, num_inputs: int, width: int) -> None:
        super().__init__()
        self.enter, self.mix = nn.Linear(num_inputs, width), nn.Linear(width, width)

    def forward(self, numbers_BN: Tensor) -> Tensor:
        return leaky(self.mix(leaky(self.enter(numbers_BN))))


class Film(nn.Module):
    """x (1 + scale) + shift, both from the condition."""

    def __init__(self, features: int, channels: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, 2 * channels)

    def forward(self, x_BCHW: Tensor, condition_BF: Tensor) -> Tensor:
        scale_BC11, shift_BC11 = self.linear(condition_BF)[:, :, None, None].chunk(2, dim=1)
        return x_BCHW * (1.0 + scale_BC11) + shift_BC11


class Cell(nn.Module):
    """x + conv(leaky(film(conv(leaky(x))))): the identity at initialisation."""

    def __init__(self, channels: int, features: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1)
        self.film = Film(features, channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x_BCHW: Tensor, condition_BF: Tensor) -> Tensor:
        return x_BCHW + self.second(leaky(self.film(self.first(leaky(x_BCHW)), condition_BF)))


class Down(nn.Module):
    """Half the height and width; the condition modulates the output."""

    def __init__(self, channels: int, out: int, features: int) -> None:
        super().__init__()
        self.conv, self.film = nn.Conv2d(channels, out, 3, stride=2, padding=1), Film(features, out)

    def forward(self, x_BCHW: Tensor, condition_BF: Tensor) -> Tensor:
        return leaky(self.film(self.conv(x_BCHW), condition_BF))


class Up(nn.Module):
    """Twice the height and width, by a 1x1 convolution and a pixel shuffle."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 4 * out, 1)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return F.pixel_shuffle(self.conv(leaky(x_BCHW)), 2)


def flops(module: nn.Module, positions: int = 1) -> float:
    """Of one image's forward pass: convolutions at this many positions, and linear layers once."""
    return sum(
        2.0 * part.weight.numel() * (positions if isinstance(part, nn.Conv2d) else 1)
        for part in module.modules()
        if isinstance(part, nn.Conv2d | nn.Linear)
    )
