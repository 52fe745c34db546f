"""The flow-matching objective: velocity errors, and closed-form losses of simple predictors as baselines.

x_t = (1 - t) noise + t image; the velocity is image - noise. B batch, C channels, H W pixels, D values of an image, Q times.
"""

import math

import torch
from torch import Tensor

from seedbed.recipes.flow.data import TimeDistribution

# 1 / (1 - t) converts an image to a velocity; the same floor in the loss and in the sampler.
MIN_GAP = 0.05
NUM_QUADRATURE = 4096
# Beyond this many values an image's covariance is too large to decompose before every run.
MAX_NUMBERS = 3072
# The baselines are computed from as many images as a gigabyte holds, up to a limit.
MAX_IMAGES, MAX_TOTAL = 20_000, 1 << 27


def _over_images(value_B: Tensor) -> Tensor:
    return value_B[:, None, None, None]


def velocity(field_BCHW: Tensor, x_BCHW: Tensor, time_B: Tensor, predict: str) -> Tensor:
    """The velocity of a network's output: itself, or that from x to the predicted image."""
    if predict == "v":
        return field_BCHW
    return (field_BCHW - x_BCHW) / _over_images((1.0 - time_B).clamp_min(MIN_GAP))


def errors(field_BCHW: Tensor, x_BCHW: Tensor, time_B: Tensor, velocity_BCHW: Tensor, predict: str) -> Tensor:
    """(B,) mean squared error of the velocity of each image, in float32."""
    gap_B = 1.0 - time_B
    target = velocity_BCHW
    if predict == "x":
        target = velocity_BCHW * _over_images(gap_B / gap_B.clamp_min(MIN_GAP))
    return (velocity(field_BCHW, x_BCHW, time_B, predict) - target).square().mean((1, 2, 3))


def quantiles(times: TimeDistribution) -> Tensor:
    """Quadrature times: equally spaced quantiles of the distribution, in float64."""
    u_Q = (torch.arange(NUM_QUADRATURE, dtype=torch.float64) + 0.5) / NUM_QUADRATURE
    if times.kind == "uniform":
        return u_Q
    return torch.sigmoid(times.mean + times.std * math.sqrt(2.0) * torch.erfinv(2.0 * u_Q - 1.0))


def weights(time_Q: Tensor, predict: str) -> tuple[Tensor, Tensor]:
    """The weights of velocity errors and of image errors in the loss, at each time."""
    gap_Q = 1.0 - time_Q
    if predict == "v":
        return torch.ones_like(gap_Q), torch.ones_like(gap_Q)
    floor_Q = gap_Q.clamp_min(MIN_GAP)
    return (gap_Q / floor_Q).square(), floor_Q.square().reciprocal()


def zero_baseline(moment: float, time_Q: Tensor, predict: str) -> float:
    """The loss of a network that returns zeros, as a zero-initialised one does; `moment` is the images' mean square."""
    if predict == "v":
        return 1.0 + moment
    return moment * weights(time_Q, predict)[1].mean().item()


def gaussian_baseline(variances_D: Tensor, time_Q: Tensor, predict: str) -> float:
    """The loss of the best affine predictor for independent values of these variances: s^2 / ((1-t)^2 + t^2 s^2) at t."""
    return (curve(variances_D, time_Q) * weights(time_Q, predict)[0]).mean().item()


def curve(variances_D: Tensor, time_Q: Tensor) -> Tensor:
    """(Q,) the velocity error of that predictor at each time."""
    gap2, time2 = (1.0 - time_Q).square(), time_Q.square()
    # In chunks: thousands of values at thousands of times would be a gigabyte.
    parts = [(part[None] / (gap2[:, None] + time2[:, None] * part[None])).sum(1) for part in variances_D.double().split(256)]
    return torch.stack(parts).sum(0) / len(variances_D)


def baseline_losses(images_ND: Tensor, times: TimeDistribution, predict: str) -> dict[str, float]:
    """Losses of simple predictors under this distribution of times, easiest first."""
    moment, variances_D, eigenvalues_D = moments(images_ND.float())
    time_Q = quantiles(times)
    found = {
        "all zeros": zero_baseline(moment, time_Q, predict),
        "pixel by pixel": gaussian_baseline(variances_D, time_Q, predict),
    }
    return found if eigenvalues_D is None else found | {"linear": gaussian_baseline(eigenvalues_D, time_Q, predict)}


def moments(images_ND: Tensor) -> tuple[float, Tensor, Tensor | None]:
    """Mean square, variance of every value, and the covariance's eigenvalues unless images are too large for that."""
    centred_ND = images_ND - images_ND.mean(0)
    variances_D = centred_ND.square().mean(0)
    eigenvalues = None
    if images_ND.shape[1] <= MAX_NUMBERS:
        eigenvalues = torch.linalg.eigvalsh(centred_ND.T @ centred_ND / len(images_ND)).clamp_min(0.0).double().cpu()
    return images_ND.square().mean().item(), variances_D.double().cpu(), eigenvalues
