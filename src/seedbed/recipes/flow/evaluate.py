"""Metrics of generated images, with the same metrics of real, corrupted and random images as baselines.

Distances between two sets of images are computed in float64. Shape suffixes: N M images, C channels, H W pixels,
D features, P patches, J projections, K frequencies.
"""

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from seedbed.cache import cache_folder
from seedbed.data.image_source import ImageData, blur
from seedbed.data.shapes import score_shapes
from seedbed.errors import UserError
from seedbed.recipes.flow.classifier import Classifier, all_images, open_classifier
from seedbed.recipes.flow.sampling import Sampling, generate

if TYPE_CHECKING:
    from seedbed.recipes.flow.system import Flow

MAX_IMAGES = 10_000
NOISE, BLUR = 0.2, 1.0
# Column to (title, digits after the point, which way is better).
COLUMNS = {
    "num": ("images", 0, ""),
    "fd": ("FD-classifier", 3, "lower"),
    "kid": ("KID x1000", 3, "lower"),
    "kid_std": ("± subsets", 3, ""),
    "precision": ("precision", 3, "higher"),
    "recall": ("recall", 3, "higher"),
    "density": ("density", 3, "higher"),
    "coverage": ("coverage", 3, "higher"),
    "accuracy": ("class accuracy", 3, "higher"),
    "nearest": ("nearest train", 3, "near 1"),
    "sliced": ("sliced W", 4, "lower"),
    "spectrum": ("spectrum dB", 2, "lower"),
    "right": ("exact: right", 3, "higher"),
    "iou80": ("IoU >= 0.8", 3, "higher"),
}

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
    """(K,) radially averaged power spectrum in decibels, up to the highest frequency of the shorter side."""
    size = min(x_NCHW.shape[-2:])
    power_HW = torch.stack([torch.fft.fft2(part.double()).abs().square().mean((0, 1)) for part in x_NCHW.split(1024)]).mean(0)
    # In cycles along the shorter side.
    tall_H, wide_W = (torch.fft.fftfreq(side, 1 / size, device=x_NCHW.device) for side in power_HW.shape)
    ring_HW = (tall_H[:, None] ** 2 + wide_W[None, :] ** 2).sqrt().round().long()
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
    power_HW = torch.fft.fft2(x_NCHW.double()).abs().square().mean((0, 1))
    axes = [axis[: len(axis) // 2 + 1] for axis in (power_HW[0], power_HW[:, 0])]
    ats = [side // patch for side in (x_NCHW.shape[-1], x_NCHW.shape[-2])]
    near = [k for k in (-2, -1, 0, 1, 2) if all(0 < at + k < len(axis) for at, axis in zip(ats, axes, strict=True))]
    if 0 not in near or len(near) < 2:
        return math.nan
    found = {k: axes[0][ats[0] + k] + axes[1][ats[1] + k] for k in near}
    beside = torch.stack([power for k, power in found.items() if k])
    return (10 * torch.log10((found[0] + 1e-12) / (beside.mean() + 1e-12))).item()


def evaluate_samples(
    samples_NCHW: Tensor, classes_N: Tensor, data: ImageData, classifier: Classifier, *, baselines: bool = True, patch: int = 0
) -> dict[str, Any]:
    """Metrics of samples in [-1, 1] conditioned on these classes. The result is plain values; `markdown` prints it."""
    reference = ReferenceSet(data, classifier, min(len(samples_NCHW), MAX_IMAGES))
    samples_NCHW, classes_N = samples_NCHW[: reference.num].clamp(-1, 1), classes_N[: reference.num].cpu()
    rows = {"samples": reference.row(samples_NCHW, classes_N)}
    if baselines:
        rows |= {name: reference.row(*part) for name, part in reference.baselines()}
        # One half of the reference against the other: the sampling error of each metric, with half of the images.
        even, odd = slice(0, None, 2), slice(1, None, 2)
        rows["test half vs half"] = reference.row(reference.images_NCHW[even], reference.classes_N[even], odd)
    seen_N = classifier.classify(samples_NCHW)[1].cpu()
    table: dict[str, Any] = {
        "classifier": {"hash": classifier.hash, "accuracy": classifier.accuracy, "num_features": classifier.mean.numel()},
        "num_reference": len(reference.images_NCHW),
        "rows": rows,
        "confusion": confusion(classes_N, seen_N, data.num_classes),
        "class_names": list(data.class_names),
    }
    if patch:
        sets = {"samples": samples_NCHW, "real": reference.images_NCHW}
        table["grid_peak"] = {name: grid_peak(images, patch) for name, images in sets.items()}
    return table


def confusion(asked_N: Tensor, seen_N: Tensor, num_classes: int) -> list[list[int]]:
    """How often each conditioned class (row) was classified as each class (column)."""
    return torch.bincount(asked_N * num_classes + seen_N, minlength=num_classes**2).view(num_classes, num_classes).tolist()


class ReferenceSet:
    """Held-out images as the reference of all metrics; rows have `num` images at most."""

    def __init__(self, data: ImageData, classifier: Classifier, num: int):
        self.data, self.classifier = data, classifier
        # Every row has as many images as the reference where it can: the distances' bias depends on the number.
        self.num = min(num, data.valid.num_items, MAX_IMAGES)
        if self.num < 8:
            raise UserError(f"{self.num} images are too few to evaluate; at least 8 samples and held-out images are needed")
        self.device = classifier.mean.device
        reference, self.classes_N = data.valid.pick(data.valid.spread(self.num))
        self.images_NCHW = reference.to(self.device)
        self.features_ND, _ = classifier.classify(self.images_NCHW)
        # Features of all training images, to detect copies.
        self.bank_MD = torch.cat([classifier.classify(part)[0] for part in all_images(data.train)])
        self.far = nearest(self.features_ND, self.bank_MD)[0].median()

    def row(self, images_NCHW: Tensor, classes_N: Tensor, rows: slice = slice(None)) -> dict[str, float]:
        """The metrics of these images against these rows of the reference."""
        images_NCHW, against, against_MD = images_NCHW.to(self.device).float(), self.images_NCHW[rows], self.features_ND[rows]
        features_ND, seen_N = self.classifier.classify(images_NCHW)
        kid, kid_std = kernel_distance(features_ND, against_MD)
        copies = nearest(features_ND, self.bank_MD)[0].median()
        found = {
            "num": float(len(images_NCHW)),
            "fd": frechet(features_ND, against_MD),
            "kid": 1000 * kid,
            "kid_std": 1000 * kid_std,
            **coverage(against_MD, features_ND),
            "accuracy": (seen_N.cpu() == classes_N.cpu()).double().mean().item(),
            "nearest": (copies / self.far.clamp_min(1e-12)).item(),
            "sliced": sliced_wasserstein(images_NCHW, against),
            "spectrum": spectral_distance(images_NCHW, against),
        }
        if self.data.facts["name"] == "shapes":
            exact = score_shapes(images_NCHW, classes_N)
            found |= {name: exact[name] for name in ("right", "iou80")}
        return found

    def baselines(self) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
        """Sets with a known ranking, from real images to noise."""
        generator = torch.Generator().manual_seed(3)
        real, classes_N = self.data.train.pick(self.data.train.spread(self.num))
        yield "train images", (real, classes_N)
        yield "labels shuffled", (real, classes_N[torch.randperm(len(classes_N), generator=generator)])
        noise = torch.randn(self.images_NCHW.shape, generator=generator).to(self.device)
        yield "test + noise", ((self.images_NCHW + NOISE * noise).clamp(-1, 1), self.classes_N)
        yield "test blurred", (blur(self.images_NCHW, BLUR), self.classes_N)
        # The first held-out image of every class, as often as the class occurs.
        first = {c: n for n, c in reversed(list(enumerate(self.classes_N.tolist())))}
        repeated = self.images_NCHW[[first[c] for c in self.classes_N.tolist()]]
        yield "one per class, repeated", (repeated, self.classes_N)
        noise = torch.randn(self.images_NCHW.shape, generator=generator).clamp(-1, 1)
        yield "pure noise", (noise, self.classes_N)


def markdown(table: dict[str, Any]) -> str:
    """The table as Markdown: a line about the classifier, a row per set, and which way is better."""
    columns = [name for name in COLUMNS if name in table["rows"]["samples"]]
    used = table["classifier"]
    lines = [
        f"Classifier {used['hash']}: {used['accuracy']:.1%} of real held-out images right, {used['num_features']} features; "
        f"reference: {table['num_reference']:,} held-out images.",
        "",
        "| set | " + " | ".join(COLUMNS[name][0] for name in columns) + " |",
        "|---|" + "---:|" * len(columns),
    ]
    for title, row in table["rows"].items():
        lines.append(f"| {title} | " + " | ".join(f"{row[name]:,.{COLUMNS[name][1]}f}" for name in columns) + " |")
    lines.append("| better | " + " | ".join(COLUMNS[name][2] for name in columns) + " |")
    matrix = np.array(table["confusion"])
    share = np.diag(matrix) / np.maximum(matrix.sum(1), 1)
    classes = ", ".join(f"{name} {value:.0%}" for name, value in zip(table["class_names"], share, strict=True))
    lines += ["", f"Accuracy by class: {classes}." if len(share) <= 100 else ""]
    if "grid_peak" in table:
        peak = table["grid_peak"]
        lines.append(f"Peak at one over the patch: {peak['samples']:+.2f} dB in samples, {peak['real']:+.2f} dB in real images.")
    return "\n".join(lines).rstrip() + "\n"


NUM_SEEDS = 3
# Columns whose spread over seeds is reported.
SPREAD = ("fd", "kid", "precision", "recall", "accuracy", "right")


def full_evaluation(
    system: "Flow", sampling: Sampling, seed: int, classes_N: Tensor, say: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """A table of plain values: samples with baselines, samples without guidance, and the spread over seeds."""
    data, device = system.data, system.model.enter.weight.device
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        classifier = open_classifier(data, cache_folder(system.config.data.cache) / "classifiers", device, say=say)

    def scored(how: Sampling, number: int, baselines: bool) -> dict[str, Any]:
        say(f"sampling {len(classes_N):,} images: {how}, seed {number}")
        images_NCHW = generate(system.model, classes_N, how, number)
        with torch.autocast(device.type, enabled=False):
            patch = system.config.model.patch if baselines else 0
            return evaluate_samples(images_NCHW, classes_N, data, classifier, baselines=baselines, patch=patch)

    start = time.perf_counter()
    generate(system.model, classes_N[:1000], sampling, seed)[0, 0, 0, 0].item()
    seconds = 1000 * (time.perf_counter() - start) / len(classes_N[:1000])
    seeds = list(range(seed, seed + NUM_SEEDS))
    table = scored(sampling, seeds[0], baselines=True)
    others = [scored(sampling, number, baselines=False)["rows"]["samples"] for number in seeds[1:]]
    plain = scored(replace(sampling, guidance=1.0), seed, baselines=False)["rows"]["samples"]
    first, rest = table["rows"]["samples"], {k: v for k, v in table["rows"].items() if k != "samples"}
    table["rows"] = {"samples": first, "samples, guidance 1": plain, **rest}
    over_seeds = {name: [row[name] for row in (first, *others)] for name in SPREAD if name in first}
    spread = {name: (statistics.fmean(values), statistics.stdev(values)) for name, values in over_seeds.items()}
    table["seeds"], table["spread"] = seeds, spread
    table["sampling"], table["seconds_per_1000"] = str(sampling), seconds
    return table


def words(table: dict[str, Any], horizon: str) -> str:
    """The evaluation as text: the sampling settings, the table, and the spread over seeds."""
    seeds = table["seeds"]
    spread = ", ".join(
        f"{COLUMNS[name][0]} {mean:.{COLUMNS[name][1]}f} ± {std:.{COLUMNS[name][1]}f}"
        for name, (mean, std) in table["spread"].items()
    )
    return (
        f"Samples: {table['sampling']}, {horizon} average of the weights, {table['seconds_per_1000']:.1f} s per 1,000 images; "
        f"the table shows seed {seeds[0]}.\n\n{markdown(table)}\nOver seeds {seeds[0]} to {seeds[-1]}: {spread}.\n"
    )


def write(table: dict[str, Any], text: str, folder: Path) -> tuple[Path, Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / "full_evaluation.md", folder / "full_evaluation.json"
    paths[0].write_text(text)
    paths[1].write_text(json.dumps(table, indent=1) + "\n")
    return paths
