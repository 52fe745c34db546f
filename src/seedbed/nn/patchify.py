"""Images to rows of patches and back, and positions on their grid. B batch, C channels, H W pixels, N patches, K = C p p."""

import torch
from torch import Tensor

from seedbed.errors import UserError


def grid_of(height: int, width: int, patch: int) -> tuple[int, int]:
    """Rows and columns of patches; an image that does not divide into them is refused."""
    if height % patch or width % patch:
        raise UserError(f"an image of {height}x{width} does not divide into patches of {patch}x{patch}; choose a divisor")
    return height // patch, width // patch


def patchify(x_BCHW: Tensor, patch: int) -> Tensor:
    """Patches in raster order as rows (B, N, K); within a row channel by channel, each in raster order."""
    batch, channels, height, width = x_BCHW.shape
    rows, columns = grid_of(height, width, patch)
    x = x_BCHW.view(batch, channels, rows, patch, columns, patch)
    return x.permute(0, 2, 4, 1, 3, 5).reshape(batch, rows * columns, channels * patch * patch)


def depatchify(x_BNK: Tensor, patch: int, height: int, width: int) -> Tensor:
    """The inverse of `patchify`, bit for bit."""
    rows, columns = grid_of(height, width, patch)
    x = x_BNK.reshape(len(x_BNK), rows, columns, -1, patch, patch)
    return x.permute(0, 3, 1, 4, 2, 5).reshape(len(x_BNK), -1, height, width)


SINCOS_PERIOD = 10_000.0


def raster(rows: int, columns: int, device: torch.device) -> Tensor:
    """(N, 2): row and column of every patch, in the order of `patchify`."""
    at = torch.arange(rows * columns, device=device)
    return torch.stack((at // columns, at % columns), dim=1)


def sincos_table(places_N2: Tensor, width: int) -> Tensor:
    """(N, C) fixed features: sines and cosines of the row, then of the column."""
    assert width % 4 == 0, f"sines and cosines of two axes need a width that is a multiple of 4, not {width}"
    quarter = width // 4
    rates = SINCOS_PERIOD ** (-torch.arange(quarter, device=places_N2.device, dtype=torch.float32) / quarter)
    angles = [place_N[:, None].float() * rates for place_N in places_N2.unbind(1)]
    return torch.cat([f(angle) for angle in angles for f in (torch.sin, torch.cos)], dim=1)
