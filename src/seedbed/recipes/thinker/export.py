"""The answer of a thinker as ONNX, with as many latents and steps as in training. B batch, N input, M output tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from seedbed.errors import UserError
from seedbed.recipes.thinker.evaluate import as_trained, predict
from seedbed.recipes.thinker.presets import BY_ENDS
from seedbed.train.export_onnx import OnnxNetwork

if TYPE_CHECKING:
    from seedbed.recipes.thinker.system import ThinkerSystem


class Answer(nn.Module):
    """Logits after the last step. The noise of the first state follows from `index`, as in evaluation."""

    def __init__(self, system: ThinkerSystem) -> None:
        super().__init__()
        self.system, self.num_out = system, system.source.shape.num_out

    def forward(self, x_BN: Tensor, index_B: Tensor, learn_BM: Tensor | None = None) -> Tensor:
        y_BM = x_BN.new_zeros(len(x_BN), self.num_out)  # only its shape is used
        batch = {"x": x_BN, "y": y_BM, "index": index_B}
        batch |= {} if learn_BM is None else {"learn": learn_BM}
        return predict(self.system, batch, as_trained(self.system))[-1]


def onnx_network(system: ThinkerSystem) -> OnnxNetwork:
    config, sizes = system.config.model, system.model.sizes
    if config.target_stream == "only":
        raise UserError("model.target_stream=only: its answer depends on the targets, which an exported network does not get")
    inputs = {"tokens": torch.zeros(2, sizes.num_in, dtype=torch.long), "sample_index": torch.arange(2)}
    axes = {"tokens": ("batch", str(sizes.num_in)), "sample_index": ("batch",)}
    if config.positions.kind in BY_ENDS:
        inputs["used"], axes["used"] = torch.ones(2, sizes.num_out, dtype=torch.bool), ("batch", str(sizes.num_out))
    axes["logits"] = ("batch", str(sizes.num_out), str(sizes.vocab))
    facts = {
        "latents": system.latents.high,
        "steps": system.steps.high,
        "pad": sizes.pad,
        "sample_index": "any whole number per row: it decides the noise of the first state",
        "used": "which output positions the answer has",
        "cache": "none",
    }
    facts = {name: value for name, value in facts.items() if name != "used" or "used" in inputs}
    return OnnxNetwork(Answer(system), inputs, axes, "logits", facts)
