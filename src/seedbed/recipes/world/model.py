"""The generator: a U-net from remembered frames and a control to the next frame, as a change of the last one.

Shape suffixes: B batch, C channels, H W pixels, A control axes, M remembered numbers of a pixel, F features of the condition.
"""

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seedbed.errors import UserError
from seedbed.nn.init import module_list
from seedbed.recipes.world.cells import Cell, Condition, Down, Up, flops, init_conv, init_layers, leaky
from seedbed.recipes.world.memory import POSE, Layout, name_of
from seedbed.recipes.world.presets import ModelConfig, num_parameters
from seedbed.recipes.world.radiance_field import RadianceField, Rendering

# Channels at 1/2, 1/4 ... 1/64 of the image before scaling by model.size. Small images use the last ones only.
WIDTHS = (20, 32, 56, 96, 160, 256)
WIDTHS_PARAMETERS = 8e6  # of a network with these channels
MIN_SIDE = 3  # the smallest feature map: below it a 3x3 kernel sees mostly padding
FEATURES = (48, 256)
TAPS = 7  # per axis, centred on the pixel itself
LEAK = 0.05  # slope outside [0, 1]
STILL = 0.05  # in units of an axis's scale: below it, a static scene changes in proportion to the control


def widths_of(size: str, height: int, width: int) -> tuple[int, ...]:
    """Channels by scale, finest first, from model.size and the image size."""
    num = num_scales(height, width)
    factor = math.sqrt(num_parameters(size) / WIDTHS_PARAMETERS)
    # Multiples that tensor cores prefer.
    return tuple(max(8, 4 * round(c / 4) if c < 32 else 8 * round(c / 8)) for c in (factor * full for full in WIDTHS[-num:]))


def num_scales(height: int, width: int) -> int:
    num = 0
    while num < len(WIDTHS) and all(n % 2 ** (num + 1) == 0 and n >> (num + 1) >= MIN_SIDE for n in (height, width)):
        num += 1
    if num < 2:
        raise UserError(f"frames of {width}x{height} pixels cannot be halved twice; record them at multiples of 8, such as 64x64")
    return num


def layout_of(config: ModelConfig, height: int, width: int) -> Layout:
    """Which frames are remembered at which size: a pyramid reaches further back at coarser sizes."""
    scales = [(1, config.memory)]
    if config.pyramid:
        for reduction, factor in ((4, 2), (16, 4), (64, 8)):
            if reduction <= 2 ** num_scales(height, width):
                scales.append((reduction, factor * config.memory))
    return Layout(tuple(scales))


def strides_of(height: int, width: int) -> tuple[int, ...]:
    """Strides of transport, coarse first: enough to reach a twelfth of the image."""
    return (4, 1) if max(height, width) > 12 * (TAPS // 2) else (1,)


def transport(x_BCHW: Tensor, weights_BKHW: Tensor, stride: int, dim: int) -> Tensor:
    """Per-pixel kernels along one axis: a weighted mean of neighbours; the identity where the weights are zero.

    Means, not sums: kernels that can sharpen would do so at every step of a rollout and diverge.
    """
    reach, size = TAPS // 2 * stride, x_BCHW.shape[dim]
    beyond = [reach if d == dim else -1 for d in range(4)]
    first, last = (x_BCHW.narrow(dim, at, 1).expand(beyond) for at in (0, size - 1))
    wide = torch.cat((first, x_BCHW, last), dim=dim)
    moved, total = torch.zeros_like(x_BCHW), torch.zeros_like(x_BCHW[:, :1])
    for k in range(TAPS):
        own = 1.0 if k == TAPS // 2 else 0.0
        weight_B1HW = (weights_BKHW[:, k : k + 1] + own).clamp_min(0.0)
        moved = moved + weight_B1HW * wide.narrow(dim, k * stride, size)
        total = total + weight_B1HW
    return moved / total.clamp_min(1e-3)


def hold_still(frame_B3HW: Tensor, memory: dict[str, Tensor], action_BA: Tensor) -> Tensor:
    """The last frame without control, the predicted one with control, interpolated in between."""
    last_B3HW, moving_B111 = memory["m1"][:, -3:], (action_BA.abs().amax(1) / STILL).clamp(0.0, 1.0)[:, None, None, None]
    return last_B3HW + moving_B111 * (frame_B3HW - last_B3HW)


class Trunk(nn.Module):
    """A U-net without normalisation, with more blocks in the decoder; the condition modulates every scale."""

    def __init__(
        self,
        inputs: dict[str, int],
        num_conditions: int,
        num_out: int,
        widths: tuple[int, ...],
        config: ModelConfig,
        field: RadianceField | None = None,
    ) -> None:
        super().__init__()
        self.widths, self.place = widths, field  # `place` is the name in checkpoints
        features = min(max(2 * widths[-1], FEATURES[0]), FEATURES[1])
        self.condition = Condition(num_conditions, features)
        before = (inputs["m1"], *widths[:-1])
        self.down = module_list(Down(a, b, features) for a, b in zip(before, widths, strict=True))
        # Coarser memories join at the feature map of their size.
        self.joins = {str(k): name_of(2**k) for k in range(1, len(widths) + 1) if name_of(2**k) in inputs}
        convs = {k: nn.Conv2d(inputs[name], widths[int(k) - 1], 3, padding=1) for k, name in self.joins.items()}
        self.join: dict[str, nn.Conv2d] = nn.ModuleDict(convs)  # type: ignore[assignment]
        self.encode = module_list(
            module_list(Cell(c, features) for _ in range(config.cells // 2 if k else 0)) for k, c in enumerate(widths)
        )
        self.up = module_list(Up(b, a) for a, b in pairwise(widths))
        num_up = [max(1, config.cells // 2), *[config.cells] * (len(widths) - 1)]
        self.decode = module_list(
            module_list(Cell(c, features) for _ in range(num)) for c, num in zip(widths, num_up, strict=True)
        )
        self.noise = nn.ParameterList(nn.Parameter(torch.zeros(1, c, 1, 1)) for c in widths)
        self.out = nn.Conv2d(widths[0], num_out, 3, padding=1)

    @property
    def field(self) -> RadianceField | None:
        return self.place

    def init_weights(self, generator: torch.Generator) -> None:
        if self.field is not None:
            self.field.init_weights(generator)
        for part in (self.condition, self.down, self.encode, self.up, self.decode, *self.join.values()):
            init_layers(part, generator)  # type: ignore[arg-type]
        init_conv(self.out, generator, 0.0)

    def forward(self, memory: dict[str, Tensor], numbers_BN: Tensor, noise_B1HW: Tensor) -> tuple[Tensor, Rendering | None]:
        """`num_out` channels at half the image size, and the field's rendering. Controls come first among the numbers."""
        condition_BF = self.condition(numbers_BN)
        seen = None if self.field is None else self.field.render_before_and_after(memory[POSE], numbers_BN)
        x, skips = memory["m1"], []
        for k, (down, cells) in enumerate(zip(self.down, self.encode, strict=True), 1):
            x = down(x, condition_BF)
            if self.field is not None and seen is not None:
                x = x + self.field.project(seen, k - 1)
            if str(k) in self.joins:
                x = x + self.join[str(k)](memory[self.joins[str(k)]])
            for cell in cells:
                x = cell(x, condition_BF)
            skips.append(x)
        for k in reversed(range(len(self.widths))):
            if k < len(self.widths) - 1:
                x = self.up[k](x) + skips[k]
            stride = 2 ** (k + 1)
            x = x + self.noise[k] * noise_B1HW[:, :, ::stride, ::stride]
            for cell in self.decode[k]:
                x = cell(x, condition_BF)
        return self.out(leaky(x)), seen

    def flops(self, height: int, width: int) -> float:
        """Of a forward pass for one image: convolutions and linear layers."""
        at = [height * width // 4**k for k in range(1, len(self.widths) + 1)]
        by_scale = [*zip(self.down, at), *zip(self.encode, at), *zip(self.decode, at), *zip(self.up, at[1:])]  # noqa: B905
        total = flops(self.condition) + flops(self.out, at[0]) + sum(flops(part, n) for part, n in by_scale)
        total += sum(flops(conv, at[int(k) - 1]) for k, conv in self.join.items())
        return total + (0.0 if self.field is None else self.field.flops(at))

    def input_flops(self, height: int, width: int) -> float:
        """What training saves of 3 x `flops`: gradients of inputs, and the backward pass of the field's fine images."""
        at = [height * width // 4**k for k in range(1, len(self.widths) + 1)]
        total = flops(self.down[0].conv, at[0]) + flops(self.condition.enter)
        total += sum(flops(conv, at[int(k) - 1]) for k, conv in self.join.items())
        if self.field is None or self.field.detail is None:
            return total
        return total + flops(self.field.detail.enter, at[0]) + 2.0 * self.field.rendered_flops()


class WorldNet(nn.Module):
    """The next frame: the last frame, transported, plus a residual; the last frame itself at initialisation.

    With a fine radiance field: the field's image after the control, plus what it does not explain of the last frame,
    transported and gated per pixel, plus a low-resolution residual.

    With `static`, the frame does not change without a control, exactly, so an idle rollout cannot drift. Transport is a
    per-pixel kernel along rows and then columns, at several strides: pure motion stays sharp and copying need not be learned.
    """

    def __init__(self, config: ModelConfig, height: int, width: int, num_axes: int, field: RadianceField | None = None) -> None:
        super().__init__()
        self.config, self.height, self.width, self.num_axes = config, height, width, num_axes
        self.layout = layout_of(config, height, width)
        self.strides = strides_of(height, width) if config.transport else ()
        inputs = {name: shape[0] for name, shape in self.layout.shapes(height, width).items()}
        num_out = (12 if field is None or field.detail is None else 3 + 4) + 2 * TAPS * len(self.strides)
        self.trunk = Trunk(inputs, num_axes + 1, num_out, widths_of(config.size, height, width), config, field)

    def forward(self, memory: dict[str, Tensor], action_BA: Tensor, level_B: Tensor, noise_B1HW: Tensor) -> Tensor:
        """`memory` from `Memory.tensors()`, scaled controls, the noise level of the memory, and the generator's own noise."""
        outputs, seen = self.trunk(memory, torch.cat((action_BA, level_B[:, None]), dim=1), noise_B1HW)
        outputs, frame_B3HW = outputs.float(), memory["m1"][:, -3:]
        if seen is None or seen.rendered_B6HW is None:
            frame_B3HW = self.moved(frame_B3HW, outputs[:, 12:]) + F.pixel_shuffle(outputs[:, :12], 2)
        else:
            # The field's image after the control, plus the transported part of the last frame that the field does not explain.
            before_B3HW, after_B3HW = seen.rendered_B6HW.chunk(2, dim=1)
            open_B1HW = 1.0 + F.pixel_shuffle(outputs[:, 3:7], 2)
            held_B1HW = open_B1HW.clamp(0.0, 1.0)
            kept_B1HW = held_B1HW + LEAK * (open_B1HW - held_B1HW)  # so that gradients do not vanish outside
            unknown_B3HW = self.moved(frame_B3HW - before_B3HW, outputs[:, 7:])
            change_B3HW = F.interpolate(outputs[:, :3], scale_factor=2.0, mode="bilinear", align_corners=False)
            frame_B3HW = after_B3HW + kept_B1HW * unknown_B3HW + change_B3HW
        return hold_still(frame_B3HW, memory, action_BA) if self.config.static else frame_B3HW

    def moved(self, x_BCHW: Tensor, weights_BKHW: Tensor) -> Tensor:
        rows = F.interpolate(weights_BKHW, scale_factor=2.0, mode="nearest").split(TAPS, dim=1) if self.strides else ()
        for n, stride in enumerate(self.strides):
            x_BCHW = transport(x_BCHW, rows[2 * n], stride, 3)
            x_BCHW = transport(x_BCHW, rows[2 * n + 1], stride, 2)
        return x_BCHW

    def flops(self) -> float:
        return self.trunk.flops(self.height, self.width)

    def flops_per_frame(self) -> float:
        """To train on one predicted frame: forward and backward, without gradients of the inputs."""
        return 3.0 * self.flops() - self.trunk.input_flops(self.height, self.width)


def build_model(
    config: ModelConfig, height: int, width: int, num_axes: int, seed: int, field: RadianceField | None = None
) -> WorldNet:
    """The generator with weights drawn from `seed`."""
    net = WorldNet(config, height, width, num_axes, field)
    net.trunk.init_weights(torch.Generator().manual_seed(seed))
    return net
