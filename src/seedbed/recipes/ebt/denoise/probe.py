"""Probe of the denoisers for the checks, made of the code that trains them. B batch, N patches, K values of a patch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from seedbed.nn.patchify import depatchify, patchify
from seedbed.train.probe import Batch, Probe

if TYPE_CHECKING:
    from seedbed.recipes.ebt.denoise.system import Denoiser


def build_probe(system: Denoiser, batch: Batch) -> Probe:
    """Noisy patches in, clean patches out, after the trained number of steps."""
    patch, steps = system.config.model.patch, system.config.model.steps
    _, height, width = system.data.shape

    def image(x_BNK: Tensor) -> Tensor:
        return depatchify(x_BNK, patch, height, width)

    def predict(b: Batch) -> Tensor:
        return patchify(list(system.estimates(image(b["patches"]), steps))[-1], patch)

    return Probe(
        batch={"patches": patchify(system.noisy(batch), patch), "clean": patchify(batch["image"], patch)},
        predict=predict,
        objective=lambda y_BNK, b: system.error(image(y_BNK), image(b["clean"])),
        inputs="patches",
        targets="clean",
        ranges={"image": (-1.0, 1.0), "class": (0, system.data.num_classes - 1)},
        oracle=lambda b: b["clean"],
        lower_bound=0.0,
        order="full",
        positions="absolute",
        at_init=lambda b: system.error(image(b["patches"]), image(b["clean"])).item(),
        baselines=lambda b: {"the noisy image itself": system.error(image(b["patches"]), image(b["clean"])).item()},
    )
