"""Export of a network to ONNX: one file in float32 on the CPU, and a config.json that names its inputs and outputs."""

import contextlib
import importlib.util
import json
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from seedbed.errors import UserError

OPSET = 18
MODEL, CONFIG = "model.onnx", "config.json"
DTYPES = {torch.float32: "float32", torch.int64: "int64", torch.bool: "bool"}


class Function(nn.Module):
    """A function of tensors and of the weights of a module, as a module."""

    def __init__(self, weights: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.weights, self.function = weights, function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


@dataclass(frozen=True)
class OnnxNetwork:
    """A function of a module's weights with an example of each input; axes that have a name may have any length."""

    function: Function
    inputs: dict[str, Tensor]
    axes: dict[str, tuple[str, ...]]
    """For each input and for the output the names of its axes; a number stands for a fixed length."""
    output: str
    facts: dict[str, Any] = field(default_factory=dict)


def needs(extra: str, *packages: str) -> None:
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise UserError(f'this needs {" and ".join(missing)}: pip install "seedbed[{extra}]"')


def write_module(
    function: Function, example: Sequence[Tensor], inputs: list[str], outputs: list[str], path: Path, axes: Any = None
) -> None:
    """One file, in evaluation mode; `axes` are the dynamic axes of each input, by default none."""
    needs("onnx", "onnx", "onnxscript")
    with contextlib.ExitStack() as quiet, warnings.catch_warnings(action="ignore"), torch.no_grad():
        for logger in (logging.getLogger("torch.onnx"), logging.getLogger("onnxscript")):
            quiet.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        program = torch.onnx.export(
            function.eval(),
            tuple(example),
            dynamo=True,
            opset_version=OPSET,
            input_names=inputs,
            output_names=outputs,
            dynamic_shapes=None if axes is None else (axes,),
            verbose=False,
        )
        assert program is not None
        for node in program.model.graph.all_nodes():
            node.metadata_props.clear()  # stack traces, with paths of this machine
        program.save(str(path), external_data=False)


def write_onnx(network: OnnxNetwork, facts: dict[str, Any], folder: Path) -> None:
    """model.onnx and config.json; `facts` are those of the run."""
    dims = {name: torch.export.Dim.DYNAMIC for axes in network.axes.values() for name in axes if not name.isdigit()}
    dynamic = tuple({n: dims[name] for n, name in enumerate(network.axes[key]) if name in dims} for key in network.inputs)
    inputs = list(network.inputs.values())
    write_module(network.function, inputs, list(network.inputs), [network.output], folder / MODEL, dynamic)
    given = {name: {"dtype": DTYPES[t.dtype], "shape": _shape(network.axes[name])} for name, t in network.inputs.items()}
    output = {network.output: {"dtype": "float32", "shape": _shape(network.axes[network.output])}}
    known = {**facts, "opset": OPSET, "inputs": given, "outputs": output, **network.facts}
    (folder / CONFIG).write_text(json.dumps(known, indent=1) + "\n")


def _shape(axes: tuple[str, ...]) -> list[str | int]:
    return [int(name) if name.isdigit() else name for name in axes]
