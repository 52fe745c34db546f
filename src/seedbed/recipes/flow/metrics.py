"""Distances between two sets of images, in classifier features or in pixels; every number in float64.

Shape suffixes: N M images, D features, C channels, H W pixels, P patches, J projections, K frequencies.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

# Number of pairwise distances computed at once.
PAIRS = 1 << 24
PATCH, PATCHES_PER_IMAGE, NUM_PROJECTIONS = 7, 8, 128


def frechet(a_ND: Tensor, b_MD: Tensor) -> float:
    """The Fréchet distance of the two sets taken as Gaussians."""
    a_ND, b_MD = a_ND.double(), b_MD.double()
    cov_a, cov_b = torch.cov(a_ND.T), torch.cov(b_MD.T)
    values, vectors = torch.linalg.eigh(cov_a)
    root = vectors * values.clamp_min(0).sqrt() @ vectors.T
    # The trace of the product's root, through a symmetric matrix with the same eigenvalues.
    cross = torch.linalg.eigvalsh(root @ cov_b @ root).clamp_min(0).sqrt().sum()
    gap = (a_ND.mean(0) - b_MD.mean(0)).square().sum()
    return max(0.0, (gap + cov_a.trace() + cov_b.trace() - 2 * cross).item())


def kernel_distance(a_ND: Tensor, b_MD: Tensor, subsets: int = 50, size: int = 1000) -> tuple[float, float]:
    """The unbiased squared kernel distance (cubic polynomial), mean and standard deviation over random subsets."""
    # Halves of small sets, so that subsets differ.
    size = min(size, max(2, min(len(a_ND), len(b_MD)) // 2))
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(subsets):
        a, b = (x[torch.randperm(len(x), generator=generator)[:size].to(x.device)].double() for x in (a_ND, b_MD))
        aa, bb, ab = ((x @ y.T / x.shape[1] + 1) ** 3 for x, y in ((a, a), (b, b), (a, b)))
        within = (aa.sum() - aa.trace() + bb.sum() - bb.trace()) / (size * (size - 1))
        found.append((within - 2 * ab.mean()).item())
    values = torch.tensor(found, dtype=torch.float64)
    return values.mean().item(), values.std().item()


def coverage(real_ND: Tensor, fake_MD: Tensor, k: int = 3) -> dict[str, float]:
    """Precision and recall by k-nearest-neighbour balls; density and coverage, which are robust to outliers."""
    real_N, fake_M = _radii(real_ND, k), _radii(fake_MD, k)
    precise, recalled, inside, covered = [], [], 0, []
    for rows in _blocks(len(real_ND), len(fake_MD)):
        near_RM = torch.cdist(real_ND[rows], fake_MD)
        within_RM = near_RM <= real_N[rows, None]
        precise.append(within_RM.any(0))
        inside += within_RM.sum().item()
        recalled.append((near_RM <= fake_M).any(1))
        covered.append(near_RM.min(1).values <= real_N[rows])
    return {
        "precision": torch.stack(precise).any(0).double().mean().item(),
        "recall": torch.cat(recalled).double().mean().item(),
        "density": inside / (k * len(fake_MD)),
        "coverage": torch.cat(covered).double().mean().item(),
    }


def _radii(x_ND: Tensor, k: int) -> Tensor:
    """The distance of each to its k-th neighbour, itself excluded."""
    k = min(k, len(x_ND) - 1)
    return torch.cat([torch.cdist(x_ND[rows], x_ND).kthvalue(k + 1).values for rows in _blocks(len(x_ND), len(x_ND))])


def nearest(x_ND: Tensor, bank_MD: Tensor) -> tuple[Tensor, Tensor]:
    """For each row the distance to the nearest row of a bank, and its index."""
    found = [torch.cdist(x_ND[rows], bank_MD).min(1) for rows in _blocks(len(x_ND), len(bank_MD))]
    return torch.cat([f.values for f in found]), torch.cat([f.indices for f in found])


def _blocks(num: int, width: int) -> Iterator[slice]:
    step = max(1, PAIRS // width)
    return (slice(first, min(first + step, num)) for first in range(0, num, step))


def sliced_wasserstein(a_NCHW: Tensor, b_MCHW: Tensor) -> float:
    """Sliced Wasserstein distance of small patches: needs no classifier and is sensitive to texture and noise."""
    patches = [_patches(x) for x in (a_NCHW, b_MCHW)]
    generator = torch.Generator().manual_seed(1)
    lines_DJ = F.normalize(torch.randn(patches[0].shape[1], NUM_PROJECTIONS, generator=generator), dim=0).to(a_NCHW.device)
    num = min(len(p) for p in patches)
    # Sets of different sizes are compared at as many quantiles as the smaller one has.
    at_P = torch.arange(num, device=a_NCHW.device) + 0.5
    a_PJ, b_PJ = ((p @ lines_DJ).sort(0).values[(at_P * len(p) / num).long()] for p in patches)
    return (a_PJ - b_PJ).double().abs().mean().item()


def _patches(x_NCHW: Tensor) -> Tensor:
    """(P, D): patches at random positions, the same for every set."""
    num, channels, height, width = x_NCHW.shape
    size, generator = min(PATCH, height, width), torch.Generator().manual_seed(2)
    found = []
    for _ in range(PATCHES_PER_IMAGE):
        y, x = (int(torch.randint(0, edge - size + 1, (), generator=generator)) for edge in (height, width))
        found.append(x_NCHW[:, :, y : y + size, x : x + size].reshape(num, channels * size * size))
    return torch.cat(found).float()


def spectrum(x_NCHW: Tensor) -> Tensor:
    """(K,) radially averaged power spectrum in decibels; images are square."""
    size = x_NCHW.shape[-1]
    power_HW = torch.stack([torch.fft.fft2(part.double()).abs().square().mean((0, 1)) for part in x_NCHW.split(1024)]).mean(0)
    along = torch.fft.fftfreq(size, 1 / size, device=x_NCHW.device)
    ring_HW = (along[:, None] ** 2 + along[None, :] ** 2).sqrt().round().long()
    num = size // 2 + 1
    inside = ring_HW < num
    total_K = torch.zeros(num, dtype=torch.float64, device=x_NCHW.device).index_add_(0, ring_HW[inside], power_HW[inside])
    count_K = torch.bincount(ring_HW[inside], minlength=num)
    return 10 * torch.log10(total_K / count_K + 1e-12)


def spectral_distance(a_NCHW: Tensor, b_MCHW: Tensor) -> float:
    """The root-mean-square difference of two spectra, in decibels."""
    return (spectrum(a_NCHW) - spectrum(b_MCHW)).square().mean().sqrt().item()


def grid_peak(x_NCHW: Tensor, patch: int) -> float:
    """Power along the axes at the patch frequency, relative to its neighbours, in decibels: large where patch borders show."""
    size = x_NCHW.shape[-1]
    power_HW = torch.fft.fft2(x_NCHW.double()).abs().square().mean((0, 1))
    at = size // patch
    axes_K = (power_HW[0] + power_HW[:, 0])[: size // 2 + 1]
    beside = [k for k in (at - 2, at - 1, at + 1, at + 2) if 0 < k < len(axes_K)]
    if not 0 < at < len(axes_K) or not beside:
        return math.nan
    return (10 * torch.log10((axes_K[at] + 1e-12) / (axes_K[beside].mean() + 1e-12))).item()
