"""Image metrics: PSNR, 1 - SSIM, sharpness, and shift in pixels.

Images lie in [-1, 1]. Shape suffixes: B images, C colours, H W pixels.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from seedbed.recipes.world.memory import quantise
from seedbed.recipes.world.recording import lag_estimation

WINDOW, SIGMA = 7, 1.5
_C1, _C2 = 0.01**2, 0.03**2


def psnr(frame_BCHW: Tensor, target_BCHW: Tensor) -> Tensor:
    """(B,) PSNR in dB after quantisation; at most 100."""
    square_B = (quantise(frame_BCHW.float()) - target_BCHW).div(2).square().flatten(1).mean(1)
    return -10.0 * square_B.clamp_min(1e-10).log10()


def dissimilarity(frame_BCHW: Tensor, target_BCHW: Tensor) -> Tensor:
    """(B,) 1 - SSIM of grey images on [0, 1]."""
    x, y = (((p.clamp(-1, 1) + 1) / 2).mean(1, keepdim=True) for p in (frame_BCHW.float(), target_BCHW.float()))
    at = torch.arange(WINDOW, device=x.device, dtype=x.dtype) - WINDOW // 2
    line = torch.exp(-0.5 * (at / SIGMA) ** 2)
    kernel = torch.outer(line, line)[None, None] / line.sum() ** 2
    mean_x, mean_y = F.conv2d(x, kernel), F.conv2d(y, kernel)
    var_x, var_y = F.conv2d(x * x, kernel) - mean_x**2, F.conv2d(y * y, kernel) - mean_y**2
    both = F.conv2d(x * y, kernel) - mean_x * mean_y
    map_B1HW = (2 * mean_x * mean_y + _C1) * (2 * both + _C2) / ((mean_x**2 + mean_y**2 + _C1) * (var_x + var_y + _C2))
    return 1.0 - map_B1HW.flatten(1).mean(1)


def sharpness(frame_BCHW: Tensor) -> Tensor:
    """(B,) the mean absolute difference of neighbouring pixels."""
    x = frame_BCHW.float().clamp(-1, 1)
    across, down = (x[..., 1:] - x[..., :-1]).abs(), (x[..., 1:, :] - x[..., :-1, :]).abs()
    return across.flatten(1).mean(1) + down.flatten(1).mean(1)


def shift(before_BCHW: Tensor, after_BCHW: Tensor) -> Tensor:
    """(B, 2) pixels to the right and downwards by which the image moved."""
    grey_NHW, first_B = torch.cat((before_BCHW, after_BCHW)).float().mean(1).cpu().numpy(), np.arange(len(before_BCHW))
    found_B2 = lag_estimation.shift(grey_NHW, first_B, first_B + len(first_B))
    return torch.from_numpy(found_B2).to(before_BCHW)
