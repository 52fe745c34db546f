"""The tensors of many runs as one: flat weights, moments and averages, and one AdamW step for all of them.

R runs, P parameters of the padded config, B items of one run's batch. A run's own tensors are views of its row.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from seedbed.train.capabilities import packable
from seedbed.train.engine import saved_buffers
from seedbed.train.job import Job
from seedbed.train.optim import AdamW
from seedbed.train.system import Batch, System

# Matrix products are fastest on rows that begin at a multiple of this many numbers.
ALIGNMENT = 32
_RATE, _EMA, _COUNTER = range(3)
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Slot:
    """The position of one parameter of the padded config in a row."""

    name: str
    shape: torch.Size
    start: int

    def of(self, row_P: Tensor, shape: torch.Size) -> Tensor:
        """The parameter in a row, or its first entries along every axis where a run's own is smaller."""
        return row_P[self.start : self.start + self.shape.numel()].view(self.shape)[_first(shape)]


@dataclass(frozen=True)
class Segment:
    """Consecutive columns of the stack that share each run's base learning rate and weight decay."""

    columns: slice
    rate_R: Tensor
    decay_R: Tensor


class Layout:
    """The order of all parameters in a row: by optimizer settings, aligned ones first."""

    def __init__(self, jobs: Sequence[Job], template: System, device: torch.device) -> None:
        shapes = {name: param.shape for name, param in template.named_parameters()}
        # Base learning rate and weight decay of every trained parameter.
        groups = [[(name, part.group) for part in _parts(job) for name in part.names] for job in jobs]
        settings = [{name: (group.lr, group.weight_decay) for name, group in found} for found in groups]
        alike: dict[tuple[tuple[float, float], ...], list[str]] = defaultdict(list)
        for name in sorted(settings[0], key=lambda name: bool(shapes[name].numel() % ALIGNMENT)):
            alike[tuple(found[name] for found in settings)].append(name)
        self.slots: dict[str, Slot] = {}
        self.segments: list[Segment] = []
        start = 0
        for key, names in alike.items():
            first = start
            for name in names:
                self.slots[name] = Slot(name, shapes[name], start)
                start += shapes[name].numel()
            rate_R, decay_R = torch.tensor(key, dtype=torch.float64, device=device).unbind(1)
            self.segments.append(Segment(slice(first, start), rate_R, decay_R))
        self.width = -(-start // ALIGNMENT) * ALIGNMENT
        self.sizes = [slot.shape.numel() for slot in self.slots.values()] + [self.width - start]

    def parameters(self, weights_RP: Tensor) -> Tensors:
        """Every parameter of the padded config for all runs; one split, so that backward makes one gradient tensor."""
        pairs = zip(self.slots.values(), weights_RP.split(self.sizes, dim=1), strict=False)  # the last ones are padding
        return {slot.name: part.unflatten(1, slot.shape) if slot.shape else part[:, 0] for slot, part in pairs}


class _Objective(nn.Module):
    """The packed loss as a module's forward, which is what `functional_call` calls."""

    def __init__(self, system: System) -> None:
        super().__init__()
        self.system = system

    def forward(self, index_B: Tensor, settings: Tensors) -> tuple[Tensor, Tensors, Tensors]:
        return packable(self.system).packed_loss(index_B, settings)


class Forward(nn.Module):
    """The packed loss of every run: one call on the template, batched over parameters, buffers, settings and items."""

    def __init__(self, template: System, layout: Layout) -> None:
        super().__init__()
        # In a tuple, so that the template's own weights are not taken for this module's.
        self.objective, self.layout = (_Objective(template),), layout

    def forward(
        self, weights_RP: Tensor, buffers: Tensors, settings: Tensors, index_RB: Tensor
    ) -> tuple[Tensor, Tensors, Tensors]:
        def alone(tensors: Tensors, settings: Tensors, index_B: Tensor) -> tuple[Tensor, Tensors, Tensors]:
            (objective,) = self.objective
            return functional_call(objective, {f"system.{n}": t for n, t in tensors.items()}, (index_B, settings))

        return vmap(alone)({**self.layout.parameters(weights_RP), **buffers}, settings, index_RB)


class Update(nn.Module):
    """Clip, guard, AdamW and moving average of every run with its own settings: what Engine does for one, row by row."""

    def __init__(self, stack: "Stack") -> None:
        super().__init__()
        self.stack = (stack,)
        optims = [job.config.optim for job in stack.jobs]
        columns = [(o.beta1, o.beta2, o.eps, o.clip) for o in optims]
        # In float64, as in the fused kernel: in float32 the bias correction of the first steps would lose precision.
        numbers = torch.tensor(columns, dtype=torch.float64, device=stack.device)
        self.beta1_R, self.beta2_R, self.eps_R, self.clip_R = numbers.unbind(1)

    @torch.no_grad()
    def forward(self, grad_RP: Tensor, loss_R: Tensor) -> Tensor:
        (stack,) = self.stack
        norm_R = torch.linalg.vector_norm(grad_RP, dim=1)
        stack.halted.copy_(torch.where(torch.isfinite(loss_R + norm_R), stack.halted, 1.0))
        divisor_R = (norm_R / self.clip_R.to(norm_R.dtype)).clamp_min(1.0)
        grad_RP = grad_RP / self._column(torch.where(self.clip_R > 0, divisor_R, 1.0).float())
        keep_R1 = (stack.halted == 0)[:, None]
        stack.counts += (1.0 - stack.halted)[:, None]
        count_R = stack.counts[:, 0].double()
        fixes = [1.0 - beta_R.pow(count_R) for beta_R in (self.beta1_R, self.beta2_R)]
        for segment in stack.layout.segments:
            self._adamw(stack, segment, grad_RP[:, segment.columns], keep_R1, fixes)
        if stack.ema is not None:
            change_RP = (stack.weights - stack.ema) * self._column(stack.turn[_EMA].float())
            stack.ema.copy_(torch.where(keep_R1, stack.ema + change_RP, stack.ema))
        return norm_R

    def _adamw(self, stack: "Stack", segment: Segment, grad: Tensor, keep_R1: Tensor, fixes: list[Tensor]) -> None:
        weights, mean, square = (t[:, segment.columns] for t in (stack.weights, stack.mean, stack.square))
        # Learning rates are rounded to float32 as in the engine, so that packed and single runs are equal in float64.
        rate_R = (stack.turn[_RATE].float() * segment.rate_R.float()).double()
        column = self._column
        new_mean = torch.lerp(mean, grad, column(1.0 - self.beta1_R))
        new_square = square * column(self.beta2_R) + grad * grad * column(1.0 - self.beta2_R)
        scale = new_square.sqrt() / column(fixes[1].sqrt()) + column(self.eps_R)
        new_weights = weights * column(1.0 - rate_R * segment.decay_R) - column(rate_R / fixes[0]) * new_mean / scale
        # `where`, never a product with 0: 0 x NaN is NaN.
        for old, new in ((weights, new_weights), (mean, new_mean), (square, new_square)):
            old.copy_(torch.where(keep_R1, new, old))

    def _column(self, x_R: Tensor) -> Tensor:
        return x_R.to(self.stack[0].weights.dtype)[:, None]


class Units(System):
    def __init__(self, forward: Forward, update: Update) -> None:
        super().__init__()
        self.losses, self.update_all = forward, update

    def compile_units(self) -> Iterator[nn.Module]:
        return self.children()


class Stack:
    """R runs on the device; a StepRunner uses it as engine and as feed."""

    def __init__(self, jobs: Sequence[Job], template: System) -> None:
        self.jobs, self.config, self.device = list(jobs), jobs[0].config, jobs[0].engine.device
        self.variant: Hashable = None
        self.layout = Layout(jobs, template, self.device)
        shape, dtype = (len(jobs), self.layout.width), next(template.parameters()).dtype
        self.weights, self.mean, self.square = (torch.zeros(shape, dtype=dtype, device=self.device) for _ in range(3))
        self.ema = torch.zeros_like(self.weights) if self.config.ema else None
        self.halted = torch.zeros(len(jobs), device=self.device)
        self.compiled: set[str] = set()  # beside the modules: a run that asks for more is not packed
        # A run's steps, once for every group of its optimizer: a checkpoint's tensors may not share memory.
        self.counts = torch.zeros(len(jobs), max(len(_parts(job)) for job in jobs), device=self.device)
        self.turn = torch.zeros(3, len(jobs), dtype=torch.float64, device=self.device)
        self.lr_factor = self.turn[_RATE]
        self._steps_B = torch.arange(self.config.batch, device=self.device)
        self.settings = _stacked_settings(jobs, template, self.device)
        kept = {n: t.detach() for n, t in _untrained_tensors(template, self.layout).items()}
        self.buffers = {n: t.expand(len(jobs), *t.shape).clone() for n, t in kept.items()}
        self._held = [self._attach(row, job) for row, job in enumerate(jobs)]
        self.losses, self.update = Forward(template, self.layout), Update(self)
        self.system: System = Units(self.losses, self.update)

    def _attach(self, row: int, job: Job) -> list[Tensor]:
        """Copy a run's tensors into its row, and make them views of it."""
        engine, held = job.engine, []

        def move(tensor: Tensor, view: Tensor) -> None:
            view.copy_(tensor.detach())
            tensor.data = view
            held.append(tensor)

        for number, part in enumerate(_parts(job)):
            for name, *tensors in zip(part.names, part.params, part.means, part.squares, strict=True):
                for tensor, flat_RP in zip(tensors, (self.weights, self.mean, self.square), strict=True):
                    move(tensor, self.layout.slots[name].of(flat_RP[row], tensor.shape))
            move(part.count, self.counts[row, number])
        if engine.ema and self.ema is not None:
            for name, tensor in engine.ema.shadow.items():
                move(tensor, self.layout.slots[name].of(self.ema[row], tensor.shape))
        for name, tensor in _untrained_tensors(job.system, self.layout).items():
            move(tensor, self.buffers[name][row][_first(tensor.shape)])
        move(engine.halted, self.halted[row])
        _update_watch(job)
        return held

    def detach(self, row: int) -> None:
        """Give a run its own tensors again, and halt its row."""
        for tensor in self._held[row]:
            tensor.data = tensor.data.clone()
        self._held[row] = []
        _update_watch(self.jobs[row])
        self.halted[row] = 1.0

    def is_attached(self, row: int) -> bool:
        return bool(self._held[row])

    def begin(self, rates: list[float], averaging: list[float], counters: list[int]) -> None:
        """Set what changes from step to step: each run's learning rate, EMA weight and next item."""
        host = torch.tensor([rates, averaging, counters], dtype=torch.float64)
        self.turn.copy_(host.pin_memory() if self.device.type == "cuda" else host, non_blocking=True)

    def part(self, k: int) -> Batch:
        """The counters of every run's items."""
        return {"index": self.turn[_COUNTER].long()[:, None] + self._steps_B}

    def step(self, parts: Callable[[int], Batch]) -> Tensors:
        """One update of every run that is not halted; measurements are vectors over runs."""
        leaf_RP = self.weights.detach().requires_grad_()
        loss_R, extra, fresh = self.losses(leaf_RP, self.buffers, self.settings, parts(0)["index"])
        (grad_RP,) = torch.autograd.grad(loss_R.sum(), leaf_RP)
        norm_R = self.update(grad_RP, loss_R.detach())
        for name, value in fresh.items():
            old = self.buffers[name]
            keep = (self.halted == 0).view(-1, *[1] * (old.ndim - 1))
            old.copy_(torch.where(keep, value.detach(), old))
        return {"loss": loss_R, **extra, "grad_norm": norm_R}

    @contextlib.contextmanager
    def dry_run(self) -> Iterator[None]:
        """Steps inside take the usual time and change nothing, since every run is halted."""
        halted = self.halted.clone()
        self.halted.fill_(1.0)
        try:
            yield
        finally:
            self.halted.copy_(halted)


def _parts(job: Job) -> list[AdamW]:
    (optimizer,) = job.engine.optimizers.values()
    parts = [part for part in optimizer.parts if isinstance(part, AdamW)]
    assert len(parts) == len(optimizer.parts), "a pack needs AdamW"
    return parts


def _untrained_tensors(system: System, layout: Layout) -> Tensors:
    """A run's other tensors: buffers of its checkpoints, and parameters that are not trained."""
    return saved_buffers(system) | {n: p for n, p in system.named_parameters() if n not in layout.slots}


def _stacked_settings(jobs: Sequence[Job], template: System, device: torch.device) -> Tensors:
    """Every run's settings in the shapes of the padded config, with zeros for what a smaller run does not have."""
    stacked = {}
    for name, whole in packable(template).settings_tensors().items():
        stacked[name] = torch.zeros(len(jobs), *whole.shape, dtype=whole.dtype, device=device)
        for row, job in enumerate(jobs):
            own = packable(job.system).settings_tensors()[name]
            stacked[name][row][_first(own.shape)] = own
    return stacked


def _first(shape: torch.Size) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in shape)


def _update_watch(job: Job) -> None:
    """Let the layer watcher refer to the new tensors: its detached weights do not follow when storage changes."""
    own = {name: param for part in _parts(job) for name, param in zip(part.names, part.params, strict=True)}
    job.watch.layers.params = [own[name].detach() for name in job.watch.layers.names]
