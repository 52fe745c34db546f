"""Linear layers in float8 through torchao (optional): 8-bit matrix products with a scale per row; weights keep their dtype."""

import dataclasses

import torch
from torch import nn

from seedbed.errors import UserError
from seedbed.nn.init import kind_of
from seedbed.train.system import System

FIRST_CAPABILITY = (8, 9)


def to_float8(system: System, device: torch.device, emulate: bool = False) -> int:
    """Convert the layers that gain from it, in place and before compilation; returns their number.

    `emulate` computes the 8-bit products in full precision: for tests on hardware without them.
    """
    if not emulate:
        _require_products(device)
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(f"float8=true needs torchao, which does not load ({error}); pip install 'seedbed[fp8]'") from None
    if not any(convertible(module) for module in system.modules()):
        return 0
    recipe = dataclasses.replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=emulate)
    convert_to_float8_training(system, config=recipe, module_filter_fn=lambda module, name: convertible(module))
    return num_float8(system)


def convertible(module: nn.Module) -> bool:
    """Whether 8-bit products with a scale per row pay for their scaling, by the measurements in torchao's documentation.

    A head is not converted: its precision matters most for the loss, and a recipe may use its weight without calling it.
    """
    if not isinstance(module, nn.Linear) or kind_of("weight", module, module.weight) == "head":
        return False
    rows, columns = module.weight.shape
    if rows % 16 or columns % 16:
        return False
    return rows > 2048 and columns > 1024 and not (rows <= 4096 and columns <= 2048)


def num_float8(system: nn.Module) -> int:
    """How many layers of a system are converted; found by class name, without importing torchao."""
    return sum(type(module).__name__ == "Float8Linear" for module in system.modules())


def _require_products(device: torch.device) -> None:
    if device.type != "cuda":
        raise UserError(f"float8=true needs an NVIDIA GPU with 8-bit products, and this is {device.type}; use float8=false")
    found = torch.cuda.get_device_capability(device)
    if found < FIRST_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise UserError(f"float8=true needs compute capability 8.9 (Ada, Hopper or newer), and {name} has {found[0]}.{found[1]}")
