"""The velocity of a flow as ONNX: a function of image, time and class. B batch, C channels, H W pixels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from seedbed.recipes.flow.model import FlowTransformer
from seedbed.recipes.flow.objective import velocity
from seedbed.train.export_onnx import OnnxNetwork

if TYPE_CHECKING:
    from seedbed.recipes.flow.system import Flow


class Velocity(nn.Module):
    """The velocity from noise (time 0) to images (time 1), whatever the network predicts."""

    def __init__(self, model: FlowTransformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, x_BCHW: Tensor, time_B: Tensor, class_B: Tensor) -> Tensor:
        return velocity(self.model(x_BCHW, time_B, class_B), x_BCHW, time_B, self.model.config.predict)


def onnx_network(system: Flow) -> OnnxNetwork:
    model = system.model
    inputs = {"x": torch.zeros(2, *model.shape), "time": torch.full((2,), 0.5), "class": torch.zeros(2, dtype=torch.long)}
    image = ("batch", *(str(n) for n in model.shape))
    facts = {
        "num_classes": model.num_classes,
        "null_class": model.null_class if model.config.drop else None,
        "sampling": "start from normal noise at time 0 and integrate the velocity to time 1; pixels are in [-1, 1]",
        "cache": "none",
    }
    axes = {"x": image, "time": ("batch",), "class": ("batch",), "velocity": image}
    return OnnxNetwork(Velocity(model), inputs, axes, "velocity", facts)
