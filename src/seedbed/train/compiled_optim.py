"""The step of an optimizer as compiled code (`compile_optimizer=true`)."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from seedbed.train import optim
from seedbed.train.optim import AdamW, Muon


def compile_step(parts: Sequence[AdamW | Muon]) -> Callable[[Tensor, Tensor, Tensor], None]:
    """One compiled call for all groups."""

    @torch.no_grad()
    def step(lr_factor: Tensor, divisor: Tensor, skip: Tensor) -> None:
        for part in parts:
            if isinstance(part, AdamW):
                _adamw_step(part, lr_factor, divisor, skip)
            else:
                part.step(lr_factor, divisor, skip)

    return torch.compile(step, backend=optim.BACKEND, dynamic=False)


def _adamw_step(part: AdamW, lr_factor: Tensor, divisor: Tensor, skip: Tensor) -> None:
    """AdamW in plain tensor operations, for a compiler to fuse. `where`, never a product with 0: 0 x NaN is NaN."""
    settings, keep = part.optim, skip == 0
    part.count += 1.0 - skip
    count = part.count.clamp_min(1.0)
    lr, fix1, fix2 = lr_factor * part.group.lr, 1.0 - settings.beta1**count, (1.0 - settings.beta2**count).sqrt()
    for param, grad, mean, square in zip(part.params, part.gradients(), part.means, part.squares, strict=True):
        grad = grad / divisor
        new_mean = torch.lerp(mean, grad, 1.0 - settings.beta1)
        new_square = torch.lerp(square, grad * grad, 1.0 - settings.beta2)
        shrunk = param * (1.0 - lr * part.group.weight_decay)
        new_param = shrunk - lr / fix1 * new_mean / (new_square.sqrt() / fix2 + settings.eps)
        for old, new in ((mean, new_mean), (square, new_square), (param, new_param)):
            old.copy_(torch.where(keep, new, old))
