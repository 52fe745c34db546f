"""The engine: what happens between a batch and new weights, all on the device and without a host sync.

It owns accumulation, precision, clipping, the finite guard, the optimizers, the moving average and step counting.
"""

import contextlib
import random
from collections.abc import Callable, Hashable, Iterator
from math import isfinite
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from seedbed.config import Config
from seedbed.data import order
from seedbed.dist import SINGLE, Ranks, local
from seedbed.errors import UserError
from seedbed.train.optim import BACKEND, Optimizer, gradients, multiplier, param_groups
from seedbed.train.system import Batch, System, named_optimizers, rank_local_buffers

if TYPE_CHECKING:
    from seedbed.dist.reducer import Reducer
    from seedbed.dist.shards import Rows, Shards
    from seedbed.train.ema import Ema

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FIRST_SCALE, SCALE_PATIENCE = 2.0**15, 1000
_LR_FACTOR, _PROGRESS, _EMA, _EMA2, _STOP = range(5)

# Names that the loop writes next to a recipe's metrics.
RESERVED = frozenset({"step", "stop", "rate", "lr", "lr_factor", "lrs", "halted", "items", "epoch"})
STORED = "calm"  # the name of growth trackers in checkpoints


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
    """A 63-bit seed from integers (splitmix64), so that the streams of neighbouring steps are unrelated."""
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = order.mix((state + number * 0xBF58476D1CE4E5B9 + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF)
    return state >> 1


class EvalEngine:
    """What `loss`, `evaluate` and `sample` use of an engine: device, precision, ranks and averaged weights; no optimizer."""

    def __init__(self, system: System, config: Config, device: torch.device, ranks: Ranks = SINGLE) -> None:
        self.system, self.config, self.device, self.ranks = system, config, device, ranks
        self.dtype = DTYPES[config.precision]
        # A setting of the process: every engine sets it.
        torch.set_float32_matmul_precision("high" if config.precision == "tf32" and device.type == "cuda" else "highest")
        # Cached: asking for them takes microseconds in every step.
        self._kind, self._is_single = device.type, ranks.is_single
        self.variant: Hashable = None
        self.shards: Shards | None = None
        self.ema: Ema | None = None
        self.ema2: Ema | None = None  # a second, longer horizon, for sampling

    @property
    def progress(self) -> Tensor:
        """How much of the run is done, 0 to 1, as a tensor: safe to use inside a captured step."""
        return torch.zeros((), device=self.device)

    def all_reduce_sum(self, value: Tensor) -> Tensor:
        """The sum over all ranks: for what a recipe counts over its part of a batch."""
        return self.ranks.all_reduce_sum(value)

    def autocast(self) -> contextlib.AbstractContextManager:
        """The run's precision, for training and evaluation alike."""
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self._kind, dtype=self.dtype)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode with averaged weights, no gradients and its own random state; everything is restored after.

        Sharded weights are gathered inside, so that ranks may do different things.
        """
        was_training = self.system.training
        self.system.eval()
        averaged = self.ema.swapped_in() if self.ema else contextlib.nullcontext()
        gathered = self.shards.gathered() if self.shards else contextlib.nullcontext()
        threads = cpu_threads(self.system.num_cpu_threads)
        try:
            with fork_rng(self.device), threads, averaged, gathered, torch.no_grad(), self.autocast():
                torch.manual_seed(mix(self.config.seed, -1))
                yield
        finally:
            self.system.train(was_training)


class Engine(EvalEngine):
    """Runs a system's updates. Recipes see `device`, `variant`, `progress` and `minimize`; the loop sees the rest."""

    def __init__(self, system: System, config: Config, device: torch.device, ranks: Ranks = SINGLE) -> None:
        super().__init__(system, config, device, ranks)
        if config.float8 or config.remat != "none" or ranks.mesh:
            from seedbed.train.layer_changes import change_layers

            self.shards = change_layers(system, config, device, ranks)
        self.compiled = {part for part in ("autograd", "optimizer") if getattr(config, f"compile_{part}")}
        modules = named_optimizers(system)
        # Dotted paths in the system, so that names of moments in checkpoints agree with the weights'.
        prefixes = {module: f"{path}." if path else "" for path, module in system.named_modules()}
        self.optimizers = {n: Optimizer(param_groups(m, config.optim, prefixes[m]), config.optim) for n, m in modules.items()}
        self._reducers: dict[str, Reducer] = {}
        if not ranks.is_single:
            from seedbed.dist.reducer import make_reducers

            # Compiled autograd runs no hooks during the backward pass.
            self._reducers = make_reducers(modules, DTYPES[config.dist.reduce], "autograd" not in self.compiled)
        if config.ema or config.ema2:
            from seedbed.train.ema import Ema

            self.ema = Ema(system, config.ema) if config.ema else None
            self.ema2 = Ema(system, config.ema2) if config.ema2 else None
        self._step_scalars = torch.zeros(5, device=device)
        self.wants_stop = False  # this rank was asked to stop; a step shares it with the others
        self.lr_factor = self._step_scalars[_LR_FACTOR]  # a view: the lr that the schedule gave this step
        self._host_scalars = torch.zeros(5)
        # 0 or 1, in the dtype that the fused optimizer expects.
        self.halted, self._one = torch.zeros((), device=device), torch.ones((), device=device)
        self.scale = {n: torch.tensor(FIRST_SCALE, device=device) for n in modules} if config.precision == "fp16" else {}
        self.growth_tracker = {n: torch.zeros((), device=device) for n in self.scale}
        self._part, self._num_parts, self._share = 0, 1, None
        self._buffers = list(saved_buffers(system).values())
        self._agreed_buffers = [b for n, b in saved_buffers(system).items() if n not in rank_local_buffers(system)]
        self._before: list[Tensor] = []
        self.touched = False  # whether the present step has begun to change weights
        self._totals: dict[str, Tensor] = {}
        self.norms: dict[str, Tensor] = {}

    @property
    def progress(self) -> Tensor:
        return self._step_scalars[_PROGRESS]

    # ---- before a step, on the host -----------------------------------------------------------------------------

    def begin(self, step: int, progress: float, lr_factor: float | None = None) -> None:
        """Set what changes from step to step: learning rates (by the schedule unless `lr_factor` is given), progress, seed."""
        scalars = self._host_scalars if self._kind == "cpu" else torch.zeros(5, pin_memory=self._kind == "cuda")
        view = scalars.numpy()
        view[_LR_FACTOR] = multiplier(self.config.schedule, progress, step + 1) if lr_factor is None else lr_factor
        view[_PROGRESS] = progress
        view[_EMA] = self.ema.weight(step) if self.ema else 0.0
        view[_EMA2] = self.ema2.weight(step) if self.ema2 else 0.0
        view[_STOP] = self.wants_stop
        self._step_scalars.copy_(scalars, non_blocking=True)
        self.seed_step(step)

    def seed_step(self, step: int) -> None:
        """Seed all noise of a step by (seed, step, rank): no state to save, and evaluation does not affect training."""
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
        if self._num_parts == 1 and self._is_single:
            out = self._update(parts(0), 0)
        else:
            out = self._update_in_parts([parts(k) for k in range(self._num_parts)])
        if not self._is_single:
            self.ranks.broadcast_(self._agreed_buffers)
        for buffer, old in zip(self._buffers, self._before, strict=True):
            buffer.copy_(torch.where(self.halted != 0, old, buffer))
        if self.ema:
            self.ema.update(self._step_scalars[_EMA] * (1.0 - self.halted))
        if self.ema2:
            self.ema2.update(self._step_scalars[_EMA2] * (1.0 - self.halted))
        return {**out, **{"grad_norm" if n == "main" else f"grad_norm_{n}": v for n, v in self.norms.items()}}

    def _update_in_parts(self, batches: list[Batch]) -> dict[str, Tensor]:
        """One update from micro-batches of all ranks, each weighted by its share of the step's targets."""
        out: dict[str, Tensor] = {}
        for k, (batch, share) in enumerate(zip(batches, self._shares(batches), strict=True)):
            self._share = share
            for name, value in self._update(batch, k).items():
                value = value if share is None else value * share
                out[name] = out[name] + value if name in out else value
        self._share = None
        return out if self.ranks.is_single else self._agreed(out)

    def _shares(self, batches: list[Batch]) -> list[Tensor | None]:
        """The weight of each part, such that the mean over ranks of the sum over parts is the mean over targets."""
        counts = [self.system.num_targets(batch) for batch in batches]
        by_shape = all(isinstance(count, int) for count in counts)  # the same on every rank
        if by_shape and len(counts) == 1:
            return [None]
        # `full` makes no host tensor, which a captured step could not copy.
        made = (c.float() if isinstance(c, Tensor) else torch.full((), float(c), device=self.device) for c in counts)
        counts_K = torch.stack(list(made))
        total = counts_K.sum()
        if not by_shape and not self.ranks.is_single:
            return list((counts_K * self.ranks.world / self.ranks.all_reduce_sum(total).clamp_min(1.0)).unbind())
        return list((counts_K / total.clamp_min(1.0)).unbind())

    def _agreed(self, out: dict[str, Tensor]) -> dict[str, Tensor]:
        """Measurements as means over ranks, and the number of ranks that want to stop: the same on every rank."""
        values = [value.detach().float().reshape(()) for value in out.values()]
        mean = self.ranks.all_reduce_mean(torch.stack([*values, self._step_scalars[_STOP]]))
        return dict(zip([*out, "stop"], mean.unbind(), strict=True))

    def _update(self, batch: Batch, part: int) -> dict[str, Tensor]:
        self._part = part
        with self.autocast(), self._autograd():
            measured = self.system.update(batch, self)
        if taken := RESERVED.intersection(measured):
            raise UserError(f"the recipe measures `{min(taken)}`, a name that the loop itself uses; give the metric another name")
        for name in [name for name, value in measured.items() if not isinstance(value, Tensor)]:
            from seedbed.train.recipe_mistakes import as_tensor

            measured[name] = as_tensor(name, measured[name], self.device)
        return measured

    def _autograd(self) -> contextlib.AbstractContextManager:
        """Compiled autograd where asked for. Compiled forward passes must run under it too, for it to compile their backward."""
        if "autograd" not in self.compiled:
            return contextlib.nullcontext()
        from torch._dynamo import compiled_autograd

        return compiled_autograd._enable(torch.compile(backend=BACKEND, dynamic=False), dynamic=False)

    def minimize(self, loss: Tensor, name: str = "main") -> None:
        """Backward through `loss` for one optimizer; on the step's last micro-batch also clip, guard and step."""
        optimizer = self.optimizers[name]
        if self._share is not None:
            loss = loss * self._share
        total = self._totals.get(name)
        self._totals[name] = loss.detach() if total is None else total + loss.detach()
        scaled = loss * self.scale[name] if self.scale else loss
        is_last = self._part == self._num_parts - 1
        if self.shards:
            scaled = self.shards.enter(scaled, is_last)
        if is_last and name in self._reducers:
            self._reducers[name].start()
        with torch.autocast(self._kind, enabled=False) if self.dtype != torch.float32 else contextlib.nullcontext():
            scaled.backward(inputs=optimizer.params if len(self.optimizers) > 1 else None)
            if is_last:
                self.apply_gradients(name, optimizer)

    @torch.no_grad()
    def abandon(self) -> None:
        """Undo a step that failed before any weight was written."""
        assert not self.touched, "weights have been written"
        for buffer, old in zip(self._buffers, self._before, strict=False):
            buffer.copy_(old)
        for optimizer in self.optimizers.values():
            for param in optimizer.params:
                param.grad = None
        self._share = None

    @torch.no_grad()
    def apply_gradients(self, name: str, optimizer: Optimizer) -> None:
        """Average over ranks, clip, guard and step, then clear the gradients."""
        self.touched = True
        if name in self._reducers:
            self._reducers[name].finish()
        for param in optimizer.params:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        norm = self._norm(optimizer)
        scale = self.scale.get(name)
        true_norm = norm if scale is None else norm / scale
        skip = self._guard(name, true_norm)
        clip = self.config.optim.clip
        divisor = (true_norm / clip).clamp_min(1.0) if clip else torch.ones_like(norm)
        step = optimizer.compiled_step if "optimizer" in self.compiled else optimizer.step
        step(self.lr_factor, divisor if scale is None else divisor * scale, skip)
        for param in optimizer.params:
            param.grad = None
        self.norms[name] = true_norm

    def _norm(self, optimizer: Optimizer) -> Tensor:
        """The norm of all gradients together, over all shards."""
        if not self.shards:
            return total_norm(gradients(optimizer.params))
        shards = [local(g) for g in gradients(optimizer.params) if hasattr(g, "to_local")]
        square = self.ranks.sum_over_shards(total_norm(shards).square())
        whole = [g for g in gradients(optimizer.params) if not hasattr(g, "to_local")]
        return (square + total_norm(whole).square() if whole else square).sqrt()

    def _guard(self, name: str, norm: Tensor) -> Tensor:
        """1 when this update must be skipped. A bad step also halts all later ones until the host has seen it."""
        loss = self._totals[name] if self._is_single else self.ranks.all_reduce_sum(self._totals[name])
        if not self.scale:
            self._halt_unless_finite(loss, norm)
            return self.halted
        # With fp16, gradients overflow now and then: skip the step and lower the scale.
        self.halted.logical_or_(_not_finite(loss))
        overflow = _not_finite(norm)
        growth_tracker = torch.where(overflow, 0.0, self.growth_tracker[name] + 1.0)
        grow = growth_tracker >= SCALE_PATIENCE
        factor = torch.where(overflow, 0.5, torch.where(grow, 2.0, 1.0))
        frozen = self.halted != 0
        self.scale[name].copy_(torch.where(frozen, self.scale[name], (self.scale[name] * factor).clamp(1.0, 2.0**24)))
        self.growth_tracker[name].copy_(torch.where(frozen, self.growth_tracker[name], torch.where(grow, 0.0, growth_tracker)))
        return torch.logical_or(frozen, overflow).float()

    def _halt_unless_finite(self, loss: Tensor, norm: Tensor) -> None:
        if self._kind == "cpu":  # nothing is queued: reading costs less than any operation
            if not isfinite(loss.item() + norm.item()):
                self.halted.fill_(1.0)
            return
        if self._kind == "mps":
            self.halted.logical_or_(_not_finite(loss + norm))
            return
        # One kernel where arithmetic takes four: it writes 1 for non-finite values, never 0, and scales the sum by 1.
        torch._amp_foreach_non_finite_check_and_unscale_([loss + norm], self.halted, self._one)

    # ---- around steps ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def dry_run(self) -> Iterator[None]:
        """Steps inside take the usual time and change nothing, since the guard is halted."""
        halted = self.halted.clone()
        with fork_rng(self.device):
            self.halted.fill_(True)
            try:
                yield
            finally:
                self.halted.copy_(halted)

    @torch.no_grad()
    def spoiled(self) -> str:
        """The name of the first weight, moment or average that is not finite; empty when all are. Buffers are not checked."""
        buffers = saved_buffers(self.system).keys()
        groups = self.tensors().items()
        named = [(f"{file}: {n}", local(t)) for file, group in groups for n, t in group.items() if n not in buffers]
        named = [(name, t) for name, t in named if t.is_floating_point() and t.numel()]
        largest = torch.stack([norm.float() for norm in torch._foreach_norm([t for _, t in named], float("inf"))])
        fine = largest.isfinite().tolist()
        return next((name for (name, _), ok in zip(named, fine, strict=True) if not ok), "")

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Everything on the device that a checkpoint keeps, by file; of sharded tensors, this rank's shard."""
        optim = {f"{name}.{n}": t for name, o in self.optimizers.items() for n, t in o.tensors().items()}
        optim |= {f"{n}.scale": t for n, t in self.scale.items()} | {f"{n}.{STORED}": t for n, t in self.growth_tracker.items()}
        weights: dict[str, Tensor] = {n: local(p) for n, p in self.system.named_parameters()}
        working = rank_local_buffers(self.system)
        for name, buffer in saved_buffers(self.system).items():
            (optim if name in working else weights)[name] = buffer
        files = {"model": weights, "optim": optim}
        return files | {name: dict(e.shadow) for name, e in (("ema", self.ema), ("ema2", self.ema2)) if e}

    def rows(self, file: str, name: str) -> "Rows | None":
        """Which rows of a tensor of `tensors` this rank holds; None for all of them."""
        if file == "optim":
            _, moment, name = name.split(".", 2) if name.count(".") > 1 else ("", "", name)
            name = name if moment in ("mean", "square") else ""
        return self.shards.rows.get(name) if self.shards else None


@contextlib.contextmanager
def fork_rng(device: torch.device) -> Iterator[None]:
    """Restore the random generators after the block."""
    kind = device.type if device.type != "cpu" else "cuda"
    devices = [device.index or 0] if device.type != "cpu" else []
    python, legacy_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices, device_type=kind):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy_numpy)


@contextlib.contextmanager
def cpu_threads(number: int) -> Iterator[None]:
    """Use this many CPU threads inside the block; 0 changes nothing."""
    before = torch.get_num_threads()
    if number:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        if number:
            torch.set_num_threads(before)


def total_norm(grads: list[Tensor]) -> Tensor:
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))


def saved_buffers(system: System) -> dict[str, Tensor]:
    """The buffers a checkpoint keeps: those the module did not mark as non-persistent."""
    keys = set(system.state_dict(keep_vars=True))
    return {n: b for n, b in system.named_buffers() if n in keys}


def _not_finite(x: Tensor) -> Tensor:
    return (x - x) != 0  # two cheap kernels; isfinite is four
