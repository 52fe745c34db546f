"""Activation checkpointing: activations that the forward pass does not keep are computed again in the backward pass.

`full` keeps the inputs of a unit and nothing inside it; `selective` also keeps the outputs of matrix products and attention.
"""

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from seedbed.errors import UserError
from seedbed.nn.layers import attention_scope, cuda_ops, current_kernels
from seedbed.train.system import System

_aten = torch.ops.aten
KEPT = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten.convolution.default,
    _aten._scaled_mm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    *([torch.ops.seedbed.narrow_attention.default] if cuda_ops else []),
}


def checkpoint_units(system: System, mode: str, device: torch.device) -> list[nn.Module]:
    """Checkpoint the activations of the system's units, in place and before they are compiled; the units."""
    if mode == "none":
        return []
    units = list(system.compile_units())
    if not units:
        raise UserError(f"remat={mode}: this recipe names no units to checkpoint (System.compile_units); use remat=none")
    for unit in units:
        # A bound method, so that a copy of the module gets one that is bound to the copy.
        unit.forward = types.MethodType(_forward(mode, device.type == "cuda"), unit)
    return units


def _forward(mode: str, keep_drawn: bool) -> Callable[..., Any]:
    """A unit's forward pass under a policy.

    Random numbers must be the same both times. A host restores its generator's state before it computes again. That cannot be
    done inside a CUDA graph, so random draws are kept there.
    """
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": not keep_drawn}
    if mode == "selective" or keep_drawn:
        policy = functools.partial(_policy, mode == "selective", keep_drawn)
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return type(self).forward(self, *args, **kwargs)
        run = type(self).forward if torch.compiler.is_compiling() else functools.partial(_under, current_kernels())
        return checkpoint(run, self, *args, **options, **kwargs)

    return forward


def _under(kernels: list[Any], unit: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The unit with the attention kernels of its forward pass: in the backward pass the recipe's choice is not active."""
    with attention_scope(kernels):
        return type(unit).forward(unit, *args, **kwargs)


def _policy(selective: bool, keep_drawn: bool, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if draws(op, args, kwargs):
        # All or none: keeping one draw and repeating another would shift the generator.
        return CheckpointPolicy.MUST_SAVE if keep_drawn else CheckpointPolicy.MUST_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE if selective and op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def draws(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call draws random numbers; attention does only with dropout."""
    if torch.Tag.nondeterministic_seeded not in getattr(op, "tags", ()):
        return False
    names = [argument.name for argument in op._schema.arguments]
    if "dropout_p" not in names:
        return True
    place = names.index("dropout_p")
    return bool(args[place] if place < len(args) else kwargs.get("dropout_p", 0.0))
