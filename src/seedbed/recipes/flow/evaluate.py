"""The table that says how good samples are: every number beside what real, spoilt and senseless images get for it.

Shape suffixes: N M images, C channels, H W pixels, D features.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from seedbed.data.image_source import ImageData
from seedbed.data.shapes import score_shapes
from seedbed.errors import UserError
from seedbed.recipes.flow import metrics
from seedbed.recipes.flow.judge import Judge

MAX_IMAGES = 10_000
NOISE, BLUR = 0.2, 1.0
# Column to (title, digits after the point, which way is better).
COLUMNS = {
    "num": ("images", 0, ""),
    "fd": ("FD-judge", 3, "lower"),
    "kid": ("KID x1000", 3, "lower"),
    "kid_std": ("± subsets", 3, ""),
    "precision": ("precision", 3, "higher"),
    "recall": ("recall", 3, "higher"),
    "density": ("density", 3, "higher"),
    "coverage": ("coverage", 3, "higher"),
    "accuracy": ("asked class", 3, "higher"),
    "nearest": ("nearest train", 3, "near 1"),
    "sliced": ("sliced W", 4, "lower"),
    "spectrum": ("spectrum dB", 2, "lower"),
    "right": ("exact: right", 3, "higher"),
    "iou80": ("IoU >= 0.8", 3, "higher"),
}


def evaluate_samples(
    samples_NCHW: Tensor, classes_N: Tensor, data: ImageData, judge: Judge, *, oracles: bool = True, patch: int = 0
) -> dict[str, Any]:
    """Judge samples in [-1, 1] that were asked to be of these classes. The result is plain values; `markdown` prints it."""
    exam = Examination(data, judge, min(len(samples_NCHW), MAX_IMAGES))
    samples_NCHW, classes_N = samples_NCHW[: exam.num].clamp(-1, 1), classes_N[: exam.num].cpu()
    rows = {"samples": exam.row(samples_NCHW, classes_N)}
    if oracles:
        rows |= {name: exam.row(*part) for name, part in exam.oracles()}
        rows |= exam.halves()
    seen_N = judge.look(samples_NCHW)[1].cpu()
    table: dict[str, Any] = {
        "judge": {"hash": judge.hash, "accuracy": judge.accuracy, "num_features": judge.mean.numel()},
        "num_reference": len(exam.reference),
        "rows": rows,
        "confusion": confusion(classes_N, seen_N, data.num_classes),
        "class_names": list(data.class_names),
    }
    if patch:
        table["grid_peak"] = {"samples": metrics.grid_peak(samples_NCHW, patch), "real": metrics.grid_peak(exam.reference, patch)}
    return table


def confusion(asked_N: Tensor, seen_N: Tensor, num_classes: int) -> list[list[int]]:
    """How often each asked class (row) was seen as each class (column)."""
    return torch.bincount(asked_N * num_classes + seen_N, minlength=num_classes**2).view(num_classes, num_classes).tolist()


class Examination:
    """Held-out images as the reference, and everything about them that each row needs; rows have `num` images at most."""

    def __init__(self, data: ImageData, judge: Judge, num: int):
        self.data, self.judge = data, judge
        # Every row has as many images as the reference where it can: the distances' bias depends on the number.
        self.num = min(num, data.valid.num_items, MAX_IMAGES)
        if self.num < 8:
            raise UserError(f"{self.num} images are too few to judge; at least 8 samples and held-out images are needed")
        self.device = judge.mean.device
        rows_N = data.valid.spread(self.num)
        reference, self.classes_N = data.valid.pick(rows_N)
        self.reference = reference.to(self.device)
        self.features_ND, _ = judge.look(self.reference)
        self.bank_MD = self._bank()
        self.far = metrics.nearest(self.features_ND, self.bank_MD)[0].median()

    def _bank(self) -> Tensor:
        """Features of all training images, for the search for copies."""
        source = self.data.train
        parts = (source.pick(np.arange(i, min(i + 4096, source.num_items)))[0] for i in range(0, source.num_items, 4096))
        return torch.cat([self.judge.look(part)[0] for part in parts])

    def row(self, images_NCHW: Tensor, classes_N: Tensor) -> dict[str, float]:
        return self._row(images_NCHW.to(self.device).float(), classes_N, self.reference, self.features_ND)

    def _row(self, images_NCHW: Tensor, classes_N: Tensor, against: Tensor, against_MD: Tensor) -> dict[str, float]:
        features_ND, seen_N = self.judge.look(images_NCHW)
        kid, kid_std = metrics.kernel_distance(features_ND, against_MD)
        copies = metrics.nearest(features_ND, self.bank_MD)[0].median()
        found = {
            "num": float(len(images_NCHW)),
            "fd": metrics.frechet(features_ND, against_MD),
            "kid": 1000 * kid,
            "kid_std": 1000 * kid_std,
            **metrics.coverage(against_MD, features_ND),
            "accuracy": (seen_N.cpu() == classes_N.cpu()).double().mean().item(),
            "nearest": (copies / self.far.clamp_min(1e-12)).item(),
            "sliced": metrics.sliced_wasserstein(images_NCHW, against),
            "spectrum": metrics.spectral_distance(images_NCHW, against),
        }
        if self.data.facts["name"] == "shapes":
            exact = score_shapes(images_NCHW, classes_N)
            found |= {name: exact[name] for name in ("right", "iou80")}
        return found

    def oracles(self) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
        """Sets whose rank is known beforehand, from as good as real to senseless."""
        generator = torch.Generator().manual_seed(3)
        real, classes_N = self.data.train.pick(self.data.train.spread(self.num))
        yield "train images", (real, classes_N)
        yield "labels shuffled", (real, classes_N[torch.randperm(len(classes_N), generator=generator)])
        yield "test + noise", (self._noised(generator), self.classes_N)
        yield "test blurred", (blur(self.reference), self.classes_N)
        yield "one per class, repeated", self._repeated()
        noise = torch.randn(self.reference.shape, generator=generator).clamp(-1, 1)
        yield "pure noise", (noise, self.classes_N)

    def halves(self) -> dict[str, dict[str, float]]:
        """One half of the reference against the other: what chance alone gives, with half of the images."""
        a, b = slice(0, None, 2), slice(1, None, 2)
        return {"test half vs half": self._row(self.reference[a], self.classes_N[a], self.reference[b], self.features_ND[b])}

    def _noised(self, generator: torch.Generator) -> Tensor:
        noise = torch.randn(self.reference.shape, generator=generator).to(self.device)
        return (self.reference + NOISE * noise).clamp(-1, 1)

    def _repeated(self) -> tuple[Tensor, Tensor]:
        """The first held-out image of every class, as often as the class occurs."""
        first = {int(c): n for n, c in reversed(list(enumerate(self.classes_N.tolist())))}
        rows = torch.tensor([first[c] for c in self.classes_N.tolist()])
        return self.reference[rows.to(self.device)], self.classes_N


def blur(x_NCHW: Tensor, sigma: float = BLUR) -> Tensor:
    """A Gaussian blur, in pixels."""
    reach = math.ceil(3 * sigma)
    at = torch.arange(-reach, reach + 1, device=x_NCHW.device, dtype=x_NCHW.dtype)
    kernel = torch.exp(-0.5 * (at / sigma) ** 2)
    kernel = (kernel / kernel.sum()).expand(x_NCHW.shape[1], 1, -1)
    padded = F.pad(x_NCHW, (reach,) * 4, mode="replicate")
    tall = F.conv2d(padded, kernel[..., None], groups=x_NCHW.shape[1])
    return F.conv2d(tall, kernel[..., None, :], groups=x_NCHW.shape[1])


def markdown(table: dict[str, Any]) -> str:
    """The table for a person: a line about the judge, a row per set, and which way is better."""
    columns = [name for name in COLUMNS if name in table["rows"]["samples"]]
    judge = table["judge"]
    lines = [
        f"Judge {judge['hash']}: {judge['accuracy']:.1%} of real held-out images right, {judge['num_features']} features; "
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
    lines += ["", f"Asked class by class: {classes}." if len(share) <= 100 else ""]
    if "grid_peak" in table:
        lines.append(
            "Peak at one over the patch: {samples:+.2f} dB in samples, {real:+.2f} dB in real images.".format(
                **table["grid_peak"]
            )
        )
    return "\n".join(lines).rstrip() + "\n"
