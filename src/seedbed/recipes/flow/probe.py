"""Probe of the flow system for the checks, made of the code that trains it. B batch, N patches, K values of a patch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch as replaced

import torch
from torch import Tensor

from seedbed.nn.patchify import depatchify, patchify
from seedbed.recipes.flow import classifier
from seedbed.recipes.flow.classifier import Classifier, ClassifierConfig
from seedbed.recipes.flow.evaluate import ReferenceSet
from seedbed.recipes.flow.objective import MIN_GAP
from seedbed.recipes.flow.sampling import MAX_BATCH, Sampling, generate
from seedbed.train.probe import Batch, OdeSampler, Probe, Velocity

if TYPE_CHECKING:
    from seedbed.recipes.flow.system import Flow


def build_probe(system: Flow, batch: Batch) -> Probe:
    """The model, the inputs that `loss` gives it, and what to expect of it: images as rows of patches, time along axis 1."""
    seen, patch = system.add_noise(batch), system.config.model.patch
    is_random = system.data.facts["name"].startswith("random:")

    def rows(x_BCHW: Tensor) -> Tensor:
        return patchify(x_BCHW, patch)

    opened = {"patches": rows(seen["input"]), "velocity": rows(seen["velocity"]), "time": seen["time"], "class": seen["class"]}
    from seedbed.recipes.flow import definitions

    return Probe(
        definitions=definitions.of(system),
        batch=opened,
        predict=lambda b: rows(system.run(_image(system, b["patches"]), b["time"], b["class"])),
        objective=lambda y_BNK, b: _score(system, y_BNK, b),
        inputs="patches",
        targets="velocity",
        ranges={"image": (-1.0, 1.0), "class": (0, system.data.num_classes - 1), "time": (0.0, 1.0)},
        oracle=lambda b: b["velocity"] if system.config.model.predict == "v" else _clean(b),
        lower_bound=0.0,
        order="full",
        # Condition tokens are not rotated, so positions of patches are absolute relative to them.
        positions="relative" if system.config.model.positions == "1d" and not system.model.num_context else "absolute",
        at_positions=lambda b, positions_N: _at(system, b, positions_N),
        uses=("class", "time"),
        scalars={"time": (0.0, 1.0)},
        corrupt=lambda b: (_clean(b), b["patches"] - b["time"][:, None, None] * b["velocity"], b["time"], b["patches"]),
        at_init=lambda b: _score(system, torch.zeros_like(b["patches"]), b).item(),
        # Random images have none: there the per-pixel baseline is nearly optimal.
        baselines=lambda b: {} if is_random else {k: v for k, v in system.baseline_losses().items() if k != "all zeros"},
        ode=_ode(system),
        own_scores=lambda folder: _own_scores(system, folder),
        patches=(patchify, depatchify, patch),
    )


def _ode(system: Flow) -> OdeSampler:
    """`generate` on more images than one batch holds."""
    model, drop = system.model, system.config.model.drop
    class_N = torch.arange(MAX_BATCH["cpu"] + 1) % model.num_classes

    def run(velocity: Velocity, sampler: str, steps: int, guidance: float) -> Tensor:
        def forward(x: Tensor, time_B: Tensor, class_B: Tensor, tables: object = None) -> Tensor:
            field = velocity(x, time_B, class_B)
            return field if model.config.predict == "v" else x + (1.0 - time_B).clamp_min(MIN_GAP)[:, None, None, None] * field

        was_training = model.training
        with replaced.object(model.eval(), "forward", forward):
            samples = generate(model, class_N, Sampling(sampler, steps, guidance), seed=0)
        model.train(was_training)
        return samples

    dropped = {"condition": "class", "null": model.null_class, "drop": drop} if drop else {}
    return OdeSampler({"euler": 1, "heun": 2, "midpoint": 2}, run, class_N, **dropped)


def _own_scores(system: Flow, folder: Path) -> dict[str, tuple[float, float, float]]:
    """By a classifier that is not trained: equal sets are equal by any features."""
    untrained = lambda data, device, config, say: Classifier(data.num_classes, config.width).eval()  # noqa: E731
    with replaced.object(classifier, "train_classifier", untrained):
        opened = classifier.open_classifier(system.data, folder, torch.device("cpu"), ClassifierConfig(width=8))
    reference = ReferenceSet(system.data, opened, 64)
    real, classes_N = reference.images_NCHW, reference.classes_N
    own, noise = (reference.row(x_NCHW, classes_N) for x_NCHW in (real, torch.randn_like(real).clamp(-1, 1)))
    known = {"fd": 0.0, "sliced": 0.0, "spectrum": 0.0, "precision": 1.0, "recall": 1.0, "coverage": 1.0, "right": 1.0}
    return {name: (own[name], value, noise[name]) for name, value in known.items() if name in own}


def _image(system: Flow, x_BNK: Tensor) -> Tensor:
    _, height, width = system.data.shape
    return depatchify(x_BNK, system.config.model.patch, height, width)


def _score(system: Flow, y_BNK: Tensor, b: Batch) -> Tensor:
    names = {"input": b["patches"], "velocity": b["velocity"]}
    seen = {name: _image(system, x) for name, x in names.items()}
    return system.errors(_image(system, y_BNK), {**seen, "time": b["time"]}).mean()


def _clean(b: Batch) -> Tensor:
    return b["patches"] + (1.0 - b["time"])[:, None, None] * b["velocity"]


def _at(system: Flow, b: Batch, positions_N: Tensor) -> Tensor:
    """The prediction with patch n at position `positions_N[n]` of the raster."""
    model = system.model
    columns = model.grid[1]
    tables = model.position_tables(torch.stack((positions_N // columns, positions_N % columns), dim=1))
    return model.tokens(b["patches"], b["time"], b["class"], tables)
