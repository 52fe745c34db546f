"""Optimizers without host synchronisation, and schedules of the learning rate.

AdamW is one fused call, Muon is batched by shape, learning rates are tensors. With `skip` = 1 both leave weights and moments
exactly as they were, so a bad step need not be undone.
"""

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from seedbed.config import Optim, Schedule
from seedbed.dist import local
from seedbed.errors import UserError
from seedbed.nn.init import kind_of, rows_of, settings_of
from seedbed.train.system import ParamGroup

BACKEND = "inductor"


def param_groups(module: nn.Module, optim: Optim, prefix: str = "") -> list[ParamGroup]:
    """Every trainable parameter in exactly one group, by kind, learning rate and weight decay."""
    found: dict[tuple, dict[str, nn.Parameter]] = defaultdict(dict)
    owners = {id(p): m for m in module.modules() for p in m.parameters(recurse=False)}
    for name, param in module.named_parameters():
        if not param.requires_grad:
            continue
        kind = kind_of(name, owners[id(param)], param)
        scale, decay = settings_of(param)
        algo = optim.kind if OPTIMIZERS[optim.kind].takes(kind, param) else "adamw"
        lr, base_decay = OPTIMIZERS[algo].base(optim)
        wants_decay = kind != "scalar" and param.ndim >= 2 if decay is None else decay
        found[(algo, kind, lr * scale, base_decay if wants_decay else 0.0)][prefix + name] = param
    if not found:
        raise UserError("the system has no trainable parameter; nothing would be learned")
    return [
        ParamGroup(name=f"{algo}:{kind}", kind=algo, lr=lr, weight_decay=decay, params=params)
        for (algo, kind, lr, decay), params in found.items()
    ]


def gradients(params: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of the parameters; the engine has made sure that all exist."""
    return [p.grad for p in params if p.grad is not None]


class AdamW:
    """AdamW over one group, as one fused kernel, which also divides gradients by `divisor`."""

    @staticmethod
    def takes(kind: str, param: Tensor) -> bool:
        """Whether it trains parameters of this kind; AdamW trains those that no other optimizer takes."""
        return True

    @staticmethod
    def base(optim: Optim) -> tuple[float, float]:
        """The base learning rate and weight decay."""
        return optim.lr, optim.weight_decay

    def __init__(self, group: ParamGroup, optim: Optim) -> None:
        self.group, self.optim = group, optim
        self.names = list(group.params)
        self.is_sharded = any(hasattr(p, "to_local") for p in group.params.values())
        self.params = [local(p).detach() if hasattr(p, "to_local") else p for p in group.params.values()]
        self.means = [torch.zeros_like(p, memory_format=torch.preserve_format) for p in self.params]
        self.squares = [torch.zeros_like(p, memory_format=torch.preserve_format) for p in self.params]
        self.count = torch.zeros((), device=self.params[0].device)
        self._counts = [self.count] * len(self.params)

    def step(self, lr_factor: Tensor, divisor: Tensor, skip: Tensor) -> None:
        self.count += 1.0 - skip
        # With `skip` set on the very first step the count is 0; the kernel returns before it divides by it.
        torch._fused_adamw_(
            self.params,
            self.gradients(),
            self.means,
            self.squares,
            [],
            self._counts,
            lr=lr_factor * self.group.lr,
            beta1=self.optim.beta1,
            beta2=self.optim.beta2,
            weight_decay=self.group.weight_decay,
            eps=self.optim.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=divisor.float(),
            found_inf=skip,
        )

    def gradients(self) -> list[Tensor]:
        """The gradients of this rank's shards."""
        grads = gradients(list(self.group.params.values()))
        return [local(grad) for grad in grads] if self.is_sharded else grads

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield f"count.{self.names[0]}", self.count
        for name, mean, square in zip(self.names, self.means, self.squares, strict=True):
            yield f"mean.{name}", mean
            yield f"square.{name}", square


MUON_COEFFICIENTS = (3.4445, -4.775, 2.0315)


def orthogonalise(x_kmn: Tensor, steps: int = 5) -> Tensor:
    """The nearest semi-orthogonal matrix of each of k stacked matrices, by Newton-Schulz iterations."""
    a, b, c = MUON_COEFFICIENTS
    tall = x_kmn.shape[-2] > x_kmn.shape[-1]
    x = x_kmn.mT if tall else x_kmn
    x = x.to(torch.bfloat16) if x.is_cuda else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(x_kmn.dtype)


def _own_rows(param: nn.Parameter, first: int, height: int) -> tuple[Tensor, slice]:
    """This rank's part of the `height` rows from `first` on, and its slice of them."""
    if not hasattr(param, "to_local"):
        return param.detach()[first : first + height], slice(None)
    mine, start = local(param).detach(), getattr(param, "first_row", 0)
    low = min(max(first, start), start + len(mine))
    high = max(low, min(first + height, start + len(mine)))
    return mine[low - start : high - start], slice(low - first, high - first) if high > low else slice(0, 0)


class Muon:
    """Momentum orthogonalised per matrix; matrices of one shape, with fused ones split, are processed as one batch."""

    @staticmethod
    def takes(kind: str, param: Tensor) -> bool:
        return kind == "matrix" and param.ndim == 2

    @staticmethod
    def base(optim: Optim) -> tuple[float, float]:
        return optim.muon_lr, optim.muon_weight_decay

    def __init__(self, group: ParamGroup, optim: Optim) -> None:
        self.group, self.optim = group, optim
        shapes: dict[tuple[int, int], list[tuple[str, nn.Parameter, int]]] = defaultdict(list)
        for name, param in group.params.items():
            first = 0
            for height in rows_of(param):
                shapes[height, param.shape[1]].append((f"{name}.{first}", param, first))
                first += height
        self.buckets = list(shapes.items())
        self.momenta = [local(params[0][1]).new_zeros(len(params), *shape) for shape, params in self.buckets]

    def step(self, lr_factor: Tensor, divisor: Tensor, skip: Tensor) -> None:
        lr, keep = lr_factor * self.group.lr, skip == 0
        shrink = 1.0 - lr * self.group.weight_decay * keep
        for (shape, matrices), momentum_kmn in zip(self.buckets, self.momenta, strict=True):
            height = shape[0]
            params = [p for _, p, _ in matrices]
            # Sharded gradients are gathered: only a full matrix can be orthogonalised.
            grads = (g.full_tensor() if hasattr(g, "full_tensor") else g for g in gradients(params))  # type: ignore[operator]
            full = dict(zip(map(id, params), grads, strict=True))
            grad_kmn = torch.stack([full[id(p)][first : first + height] for _, p, first in matrices]) / divisor
            blended = torch.lerp(momentum_kmn, grad_kmn, 1.0 - self.optim.momentum)
            # `where`, never a product with 0: 0 x NaN is NaN.
            momentum_kmn.copy_(torch.where(keep, blended, momentum_kmn))
            nesterov = torch.lerp(grad_kmn, momentum_kmn, self.optim.momentum)
            scale = 0.2 * math.sqrt(max(shape))
            change = torch.where(keep, orthogonalise(nesterov) * (-scale * lr), 0.0)
            mine = [_own_rows(p, first, height) for _, p, first in matrices]
            weights = [weight for weight, _ in mine]
            torch._foreach_mul_(weights, shrink)
            torch._foreach_add_(weights, [one[rows] for one, (_, rows) in zip(change.unbind(), mine, strict=True)])

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for (_, matrices), momentum_kmn in zip(self.buckets, self.momenta, strict=True):
            for (name, _, _), momentum in zip(matrices, momentum_kmn.unbind(), strict=True):
                yield f"momentum.{name}", momentum


# Name to class, the values of `optim.kind`. A new optimizer is a class like these and a line here.
OPTIMIZERS: dict[str, type[AdamW] | type[Muon]] = {"adamw": AdamW, "muon": Muon}


class Optimizer:
    """All parameter groups of one named optimizer: stepped together, saved by parameter name."""

    def __init__(self, groups: list[ParamGroup], optim: Optim) -> None:
        self.groups = groups
        self.parts = [OPTIMIZERS[g.kind](g, optim) for g in groups]
        self.params = [p for g in groups for p in g.params.values()]

    @torch.no_grad()
    def step(self, lr_factor: Tensor, divisor: Tensor, skip: Tensor) -> None:
        for part in self.parts:
            part.step(lr_factor, divisor, skip)

    @functools.cached_property
    def compiled_step(self) -> Callable[[Tensor, Tensor, Tensor], None]:
        """The step as compiled code, equal to `step` up to rounding."""
        from seedbed.train.compiled_optim import compile_step

        return compile_step(self.parts)

    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor for part in self.parts for name, tensor in part.tensors()}


# ---- schedules: pure functions from progress (0 to 1 of the run's items) to a multiplier of the base learning rate ---------
# A new one is a function under `@shape` or `@curve`, here or in a file of your own; its name is a value of `schedule.kind`.

Curve = Callable[[float, float, Schedule], float]
F = TypeVar("F", bound=Curve)

# Name to the multiplier: a function of progress, the share of one step and schedule.
SCHEDULES: dict[str, Curve] = {}


def multiplier(schedule: Schedule, progress: float, step: int = 0) -> float:
    """The factor on every group's base learning rate. `progress` counts the step about to be taken, so the last step sees 1.

    `step` is its number, counted from 1; progress and number give the length of the run.
    """
    progress = min(max(progress, 0.0), 1.0)
    return SCHEDULES[schedule.kind](progress, progress / step if step else 0.0, schedule)


def curve(name: str) -> Callable[[F], F]:
    """Registers a schedule with a warm-up and an end of its own."""

    def register(function: F) -> F:
        SCHEDULES[name] = function
        return function

    return register


def shape(name: str) -> Callable[[F], F]:
    """Registers what follows a linear warm-up and ends at the floor: from 1 to 0 by the share done after the warm-up."""

    def register(function: F) -> F:
        SCHEDULES[name] = functools.partial(_after_warmup, function)
        return function

    return register


def _after_warmup(function: Curve, progress: float, share: float, schedule: Schedule) -> float:
    if progress < schedule.warmup:
        return progress / schedule.warmup
    after = (progress - schedule.warmup) / max(1.0 - schedule.warmup, 1e-12)
    return schedule.floor + (1.0 - schedule.floor) * function(after, progress, schedule)


@shape("constant")
def _constant(after: float, progress: float, schedule: Schedule) -> float:
    return 1.0


@shape("cosine")
def _cosine(after: float, progress: float, schedule: Schedule) -> float:
    return _cosine_between(1.0, 0.0, after)


@shape("linear")
def _linear(after: float, progress: float, schedule: Schedule) -> float:
    return 1.0 - _cooldown(progress, schedule)


@shape("wsd")
def _wsd(after: float, progress: float, schedule: Schedule) -> float:
    return 1.0 - math.sqrt(_cooldown(progress, schedule))


@curve("one_cycle")
def _one_cycle(progress: float, share: float, schedule: Schedule) -> float:
    """torch's OneCycleLR: a cosine up from 1 / div for the share `warmup` of the run, then one down to 1 / (div x final_div)."""
    here, peak, last = progress - share, schedule.warmup - share, 1.0 - share
    first, end = 1.0 / schedule.div, 1.0 / (schedule.div * schedule.final_div)
    if here <= peak and peak > 0.0:
        return _cosine_between(first, 1.0, here / peak)
    return _cosine_between(1.0, end, (here - peak) / max(last - peak, 1e-12))


def _cosine_between(start: float, end: float, share: float) -> float:
    return end + (start - end) * 0.5 * (1.0 + math.cos(math.pi * share))


def _cooldown(progress: float, schedule: Schedule) -> float:
    """Progress through the last `decay` of the run, 0 to 1; without the limit rounding ends a rate at -1e-18."""
    return min(max(0.0, progress - (1.0 - schedule.decay)) / schedule.decay, 1.0) if schedule.decay else 0.0
