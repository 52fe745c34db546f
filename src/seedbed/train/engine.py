"""The engine: what happens between a batch and new weights, all on the device and without a host sync.

It owns accumulation, precision, clipping, the finite guard, the optimizers, the moving average and step counting.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Hashable, Iterator
from math import isfinite
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from seedbed.config import Config
from seedbed.dist.ranks import ALONE, Ranks, local
from seedbed.dist.shards import Rows, Shards, cut
from seedbed.errors import UserError
from seedbed.train.ema import Ema
from seedbed.train.low import to_float8
from seedbed.train.optim import BACKEND, Optimizer, gradients, param_groups
from seedbed.train.recompute import recompute_units
from seedbed.train.schedule import multiplier

if TYPE_CHECKING:
    from seedbed.train.system import Batch, System

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FIRST_SCALE, SCALE_PATIENCE = 2.0**15, 1000
_RATE, _PROGRESS, _EMA, _EMA2, _STOP = range(5)


def pick_device(name: str) -> torch.device:
    """The device a config asks for; `auto` prefers CUDA, then MPS, then the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("device=cuda, but torch sees no CUDA device; use device=cpu or check the driver")
    if name == "mps" and not torch.backends.mps.is_available():
        raise UserError("device=mps, but torch sees no Metal device; use device=cpu")
    return torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)


def mix(*numbers: int) -> int:
    """A 63-bit seed from whole numbers, so that neighbouring steps share nothing (splitmix64)."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state + number * 0xBF58476D1CE4E5B9 + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1


class Engine:
    """Runs a system's updates. Recipes see `device`, `variant`, `progress` and `descend`; the loop sees the rest."""

    def __init__(self, system: System, config: Config, device: torch.device, ranks: Ranks = ALONE) -> None:
        self.system, self.config, self.device, self.ranks = system, config, device, ranks
        self.dtype = DTYPES[config.precision]
        # A setting of the process: every engine says what it wants. Without such units, on a CPU, it changes nothing.
        torch.set_float32_matmul_precision("high" if config.precision == "tf32" and device.type == "cuda" else "highest")
        # Layers are exchanged and taught to forget before anything is compiled, and before the optimizers learn their names.
        self.num_float8 = to_float8(system, device) if config.float8 else None
        recompute_units(system, config.recompute, device)
        self.shards = cut(system, system.shard_units(), ranks, device) if ranks.degrees.shard > 1 else Shards()
        self.compiled = {part for part, on in _compiled_parts(config).items() if on}
        self._kind = device.type  # kept: to ask a device for it in every step takes microseconds
        modules = system.players()
        self.optimizers = {
            name: Optimizer(param_groups(module, config.optim, _prefix_of(module, system)), config.optim)
            for name, module in modules.items()
        }
        self.ema = Ema(system, config.ema) if config.ema else None
        self.ema2 = Ema(system, config.ema2) if config.ema2 else None  # a second, longer horizon, for sampling
        self.variant: Hashable = None
        self._dials = torch.zeros(5, device=device)
        self.wants_stop = False  # this rank was asked to end the run; a step tells the others
        self.rate = self._dials[_RATE]  # a view: what the schedule really gave the step
        self._host_dials = torch.zeros(5)
        # 0 or 1, in the dtype in which the fused optimizer asks for it.
        self.halted, self._one = torch.zeros((), device=device), torch.ones((), device=device)
        self.scale = {n: torch.tensor(FIRST_SCALE, device=device) for n in modules} if config.precision == "fp16" else {}
        self.calm = {n: torch.zeros((), device=device) for n in self.scale}
        self._part, self._num_parts, self._share = 0, 1, None
        self._buffers = list(saved_buffers(system).values())
        self._agreed_buffers = [b for n, b in saved_buffers(system).items() if n not in system.working()]
        self._before: list[Tensor] = []
        self.touched = False  # whether the present step has begun to change weights
        self._totals: dict[str, Tensor] = {}
        self.norms: dict[str, Tensor] = {}

    @property
    def progress(self) -> Tensor:
        """How much of the run is done, 0 to 1, as a tensor: safe to use inside a captured step."""
        return self._dials[_PROGRESS]

    # ---- before a step, on the host -----------------------------------------------------------------------------

    def begin(self, step: int, progress: float, rate: float | None = None) -> None:
        """Set what changes from step to step: rates (by the schedule unless `rate` is given), progress, dice."""
        dials = self._host_dials if self._kind == "cpu" else torch.zeros(5, pin_memory=self._kind == "cuda")
        view = dials.numpy()
        view[_RATE] = multiplier(self.config.schedule, progress) if rate is None else rate
        view[_PROGRESS] = progress
        view[_EMA] = self.ema.weight(step) if self.ema else 0.0
        view[_EMA2] = self.ema2.weight(step) if self.ema2 else 0.0
        view[_STOP] = self.wants_stop
        self._dials.copy_(dials, non_blocking=True)
        self.roll_dice(step)

    def roll_dice(self, step: int) -> None:
        """All noise of a step follows from (seed, step, rank): nothing to save, and evaluation cannot disturb training."""
        seed = mix(self.config.seed, step, *([self.ranks.rank] if self.ranks.rank else []))
        torch.default_generator.manual_seed(seed)
        if self._kind == "cuda":
            torch.cuda.default_generators[self.device.index].manual_seed(seed)
        elif self._kind == "mps":
            torch.mps.manual_seed(seed)

    # ---- one step, on the device -----------------------------------------------------------------------------------

    def step(self, parts: Callable[[int], Batch]) -> dict[str, Tensor]:
        """One update from all micro-batches; returns measurements as tensors, averaged over targets."""
        self._num_parts = self.config.accum
        self._totals.clear()
        self.norms.clear()
        self._before, self.touched = [b.clone() for b in self._buffers], False
        if self._num_parts == 1 and self.ranks.is_alone:
            out = self._update(parts(0), 0)
        else:
            out = self._update_in_parts([parts(k) for k in range(self._num_parts)])
        self.ranks.first_decides_(self._agreed_buffers)
        for buffer, old in zip(self._buffers, self._before, strict=True):
            buffer.copy_(torch.where(self.halted != 0, old, buffer))
        if self.ema:
            self.ema.update(self._dials[_EMA] * (1.0 - self.halted))
        if self.ema2:
            self.ema2.update(self._dials[_EMA2] * (1.0 - self.halted))
        return {**out, **{_norm_name(n): v for n, v in self.norms.items()}}

    def _update_in_parts(self, batches: list[Batch]) -> dict[str, Tensor]:
        """One update from micro-batches of all ranks, each weighted by its share of the step's targets."""
        out: dict[str, Tensor] = {}
        for k, (batch, share) in enumerate(zip(batches, self._shares(batches), strict=True)):
            self._share = share
            for name, value in self._update(batch, k).items():
                value = value if share is None else value * share
                out[name] = out[name] + value if name in out else value
        self._share = None
        return out if self.ranks.is_alone else self._agreed(out)

    def _shares(self, batches: list[Batch]) -> list[Tensor | None]:
        """How much each part counts, so that the mean over ranks of the sum over parts is the mean over targets."""
        counts = [self.system.num_targets(batch) for batch in batches]
        by_shape = all(isinstance(count, int) for count in counts)  # the same on every rank
        if by_shape and len(counts) == 1:
            return [None]
        counts_K = torch.stack([_as_float(count, self.device) for count in counts])
        total = counts_K.sum()
        if not by_shape and not self.ranks.is_alone:
            return list((counts_K * self.ranks.world / self.ranks.total(total).clamp_min(1.0)).unbind())
        return list((counts_K / total.clamp_min(1.0)).unbind())

    def _agreed(self, out: dict[str, Tensor]) -> dict[str, Tensor]:
        """Measurements as means over ranks, and how many ranks want to stop: every rank sees the same and does the same."""
        values = [value.detach().float().reshape(()) for value in out.values()]
        mean = self.ranks.total(torch.stack([*values, self._dials[_STOP]])) / self.ranks.world
        return dict(zip([*out, "stop"], mean.unbind(), strict=True))

    def together(self, value: Tensor) -> Tensor:
        """A sum over this rank's part of a batch, as the sum over all ranks' parts: for what a recipe counts by itself."""
        return self.ranks.total(value)

    def _update(self, batch: Batch, part: int) -> dict[str, Tensor]:
        self._part = part
        with self.autocast(), self._autograd():
            return self.system.update(batch, self)

    def _autograd(self) -> contextlib.AbstractContextManager:
        """Backward passes as compiled code, where asked for. Compiled forward passes must know it too: they leave theirs open."""
        if "autograd" not in self.compiled:
            return contextlib.nullcontext()
        from torch._dynamo import compiled_autograd

        return compiled_autograd._enable(torch.compile(backend=BACKEND, dynamic=False), dynamic=False)

    def autocast(self) -> contextlib.AbstractContextManager:
        """The run's precision, for training and evaluation alike."""
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self._kind, dtype=self.dtype)

    def descend(self, loss: Tensor, name: str = "main") -> None:
        """Backward through `loss` for one player; on the step's last micro-batch also clip, guard and step."""
        optimizer = self.optimizers[name]
        if self._share is not None:
            loss = loss * self._share
        total = self._totals.get(name)
        self._totals[name] = loss.detach() if total is None else total + loss.detach()
        scaled = self.shards.enter(loss * self.scale[name] if self.scale else loss)
        with torch.autocast(self._kind, enabled=False) if self.dtype != torch.float32 else contextlib.nullcontext():
            scaled.backward(inputs=optimizer.params if len(self.optimizers) > 1 else None)
            if self._part == self._num_parts - 1:
                self._finish(name, optimizer)

    @torch.no_grad()
    def abandon(self) -> None:
        """Undo a step that failed before any weight was written: as if it had not begun."""
        assert not self.touched, "weights have been written"
        for buffer, old in zip(self._buffers, self._before, strict=False):
            buffer.copy_(old)
        for optimizer in self.optimizers.values():
            for param in optimizer.params:
                param.grad = None
        self._share = None

    @torch.no_grad()
    def _finish(self, name: str, optimizer: Optimizer) -> None:
        self.touched = True
        for param in optimizer.params:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        self.ranks.average_([p.grad for p in optimizer.params if p.grad is not None and not hasattr(p, "to_local")])
        norm = self._norm(optimizer)
        scale = self.scale.get(name)
        true_norm = norm if scale is None else norm / scale
        skip = self._guard(name, true_norm)
        clip = self.config.optim.clip
        divisor = (true_norm / clip).clamp_min(1.0) if clip else torch.ones_like(norm)
        step = optimizer.compiled_step if "optimizer" in self.compiled else optimizer.step
        step(self.rate, divisor if scale is None else divisor * scale, skip)
        for param in optimizer.params:
            param.grad = None
        self.norms[name] = true_norm

    def _norm(self, optimizer: Optimizer) -> Tensor:
        """The norm of all gradients together, of which a rank may hold a piece."""
        if not self.shards:
            return total_norm(gradients(optimizer.params))
        pieces = [local(g) for g in gradients(optimizer.params) if hasattr(g, "to_local")]
        square = self.ranks.total_of_pieces(total_norm(pieces).square())
        whole = [g for g in gradients(optimizer.params) if not hasattr(g, "to_local")]
        return (square + total_norm(whole).square() if whole else square).sqrt()

    def _guard(self, name: str, norm: Tensor) -> Tensor:
        """1 when this update must not happen. A bad step also halts all later ones until the host has looked."""
        loss = self.ranks.total(self._totals[name])
        if not self.scale:
            self._halt_unless_finite(loss, norm)
            return self.halted
        # With fp16 an overflow of the gradient is expected now and then: skip, lower the scale, go on.
        self.halted.logical_or_(_not_finite(loss))
        overflow = _not_finite(norm)
        calm = torch.where(overflow, 0.0, self.calm[name] + 1.0)
        grow = calm >= SCALE_PATIENCE
        factor = torch.where(overflow, 0.5, torch.where(grow, 2.0, 1.0))
        frozen = self.halted != 0
        self.scale[name].copy_(torch.where(frozen, self.scale[name], (self.scale[name] * factor).clamp(1.0, 2.0**24)))
        self.calm[name].copy_(torch.where(frozen, self.calm[name], torch.where(grow, 0.0, calm)))
        return torch.logical_or(frozen, overflow).float()

    def _halt_unless_finite(self, loss: Tensor, norm: Tensor) -> None:
        if self._kind == "cpu":  # nothing runs behind: to look costs less than any operation would
            if not isfinite(loss.item() + norm.item()):
                self.halted.fill_(1.0)
            return
        if self._kind == "mps":
            self.halted.logical_or_(_not_finite(loss + norm))
            return
        # One kernel where arithmetic takes four: it writes 1 for what is not finite, never 0, and scales the sum by 1.
        torch._amp_foreach_non_finite_check_and_unscale_([loss + norm], self.halted, self._one)

    # ---- around steps ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode with averaged weights, no gradients and dice of its own; everything is put back after.

        Cut weights are whole inside, so that a rank may do what others do not.
        """
        was_training = self.system.training
        self.system.eval()
        averaged = self.ema.swapped_in() if self.ema else contextlib.nullcontext()
        try:
            with forked_dice(self.device), averaged, self.shards.gathered(), torch.no_grad(), self.autocast():
                torch.manual_seed(mix(self.config.seed, -1))
                yield
        finally:
            self.system.train(was_training)

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Steps that cost the same and change nothing, since the guard is halted."""
        halted = self.halted.clone()
        with forked_dice(self.device):
            self.halted.fill_(True)
            try:
                yield
            finally:
                self.halted.copy_(halted)

    @torch.no_grad()
    def spoiled(self) -> str:
        """The first weight, moment or average that is not finite; empty when all are. Buffers may hold what they like."""
        buffers = saved_buffers(self.system).keys()
        groups = self.tensors().items()
        named = [(f"{file}: {n}", local(t)) for file, group in groups for n, t in group.items() if n not in buffers]
        named = [(name, t) for name, t in named if t.is_floating_point() and t.numel()]
        largest = torch.stack([norm.float() for norm in torch._foreach_norm([t for _, t in named], float("inf"))])
        fine = largest.isfinite().tolist()
        return next((name for (name, _), ok in zip(named, fine, strict=True) if not ok), "")

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Everything on the device that a checkpoint keeps, by file; of what is cut, this rank's piece."""
        optim = {f"{player}.{n}": t for player, o in self.optimizers.items() for n, t in o.tensors().items()}
        optim |= {f"{n}.scale": t for n, t in self.scale.items()} | {f"{n}.calm": t for n, t in self.calm.items()}
        weights: dict[str, Tensor] = {n: local(p) for n, p in self.system.named_parameters()}
        working = self.system.working()
        for name, buffer in saved_buffers(self.system).items():
            (optim if name in working else weights)[name] = buffer
        files = {"model": weights, "optim": optim}
        return files | {name: dict(e.shadow) for name, e in (("ema", self.ema), ("ema2", self.ema2)) if e}

    def rows(self, file: str, name: str) -> Rows | None:
        """Which rows of a tensor of `tensors` this rank holds; None for all of them."""
        if file == "optim":
            _, moment, name = name.split(".", 2) if name.count(".") > 1 else ("", "", name)
            return self.shards.rows.get(name) if moment in ("mean", "square") else None
        return self.shards.rows.get(name)


@contextlib.contextmanager
def forked_dice(device: torch.device) -> Iterator[None]:
    """Leave the random generators as they were found."""
    kind = device.type if device.type != "cpu" else "cuda"
    devices = [device.index or 0] if device.type != "cpu" else []
    python, legacy_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices, device_type=kind):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy_numpy)


def total_norm(grads: list[Tensor]) -> Tensor:
    """The norm of all gradients together."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))


def saved_buffers(system: System) -> dict[str, Tensor]:
    """The buffers a checkpoint keeps: those the module did not mark as non-persistent."""
    keys = set(system.state_dict(keep_vars=True))
    return {n: b for n, b in system.named_buffers() if n in keys}


def _compiled_parts(config: Config) -> dict[str, bool]:
    return {"autograd": config.compile_autograd, "optimizer": config.compile_optimizer}


def _not_finite(x: Tensor) -> Tensor:
    return (x - x) != 0  # two cheap kernels; isfinite is four


def _as_float(count: Tensor | int, device: torch.device) -> Tensor:
    return count.float() if isinstance(count, Tensor) else torch.full((), float(count), device=device)


def _norm_name(player: str) -> str:
    return "grad_norm" if player == "main" else f"grad_norm_{player}"


def _prefix_of(module: torch.nn.Module, system: System) -> str:
    """The dotted path of a player inside the system, so that names in checkpoints agree with the weights'."""
    path = next(name for name, m in system.named_modules() if m is module)
    return f"{path}." if path else ""
