"""The image cleaners opened up for the checks, by the code that trains them. B batch, N patches, K numbers of a patch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from seedbed.nn.patchify import depatchify, patchify
from seedbed.train.probe import Batch, Probe

if TYPE_CHECKING:
    from seedbed.recipes.ebt.denoise import Denoiser


def open_up(system: Denoiser, batch: Batch) -> Probe:
    """Noisy patches in, clean patches out, after as many steps as are trained."""
    patch, steps = system.config.model.patch, system.config.model.steps
    _, height, width = system.data.shape

    def image(x_BNK: Tensor) -> Tensor:
        return depatchify(x_BNK, patch, height, width)

    def predict(b: Batch) -> Tensor:
        return patchify(list(system.walk(image(b["patches"]), steps))[-1], patch)

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
