"""A user's model, loss and batches as a System, with the Probe that one run of the loss allows: what predicts, and from what."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from seedbed.checks.structure_checks import altered
from seedbed.checks.subject import ROWS
from seedbed.checks.watch_ops import RecordDraws, ReplayDraws
from seedbed.errors import UserError
from seedbed.train.probe import Probe
from seedbed.train.system import Batch, System

# What is taken of a loader: enough to see what the data is like, and little enough to be quick.
MAX_ROWS, MAX_BATCHES = 512, 64
TARGET_NAMES = ("labels", "label", "targets", "target", "y")
# Attention does not depend on the bias of its keys.
KEY_BIAS = re.compile(r"(^|[._])(k|key|wk|k_proj|key_proj|to_k|k_lin)\.bias$")
IGNORED = -100  # torch's `ignore_index`
# Batches of a validation loader that one evaluation uses.
VALID_BATCHES = 8


class ForeignSystem(System):
    """A copy of the user's model, optimizers and schedulers. `case` is shared by all copies."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case, parts = case, case.parts
        self.model, self.optimizers, self.schedulers = copy.deepcopy((parts.model, parts.optimizers, parts.schedulers))
        self.train()

    def loss(self, batch: Batch, engine: Any = None) -> tuple[Tensor, dict[str, Tensor]]:
        random.seed(torch.initial_seed())
        np.random.seed(torch.initial_seed() % 2**32)
        return scalar(self.case.parts.loss(self.model, self.case.restore(batch))), {}

    def num_targets(self, batch: Batch) -> Tensor | int:
        return self.case.counted(batch).sum() if self.case.roles.is_token_wise else len(next(iter(batch.values())))

    def probe(self, batch: Batch) -> Probe:
        """The model as a function of the batch; noise that the loss draws becomes entries of the batch."""
        roles, made, draws, rng = self.case.roles, dict(batch), [], torch.get_rng_state()
        if roles.draws:
            with RecordDraws(draws), torch.no_grad():
                self.loss(batch)
            made |= {f"noise {i}": drawn for i, drawn in enumerate(draws)}
        if roles.is_token_wise:
            made["counted"] = self.case.counted(batch)

        def run(given: Batch, instead: Tensor | None = None) -> tuple[Tensor, Tensor]:
            torch.set_rng_state(rng)
            noise = ReplayDraws([given[f"noise {i}"] for i in range(len(draws))]) if draws else contextlib.nullcontext()
            with _output_of(self.model.get_submodule(roles.point or ""), instead) as seen, noise:
                return self.loss(given)[0], seen[-1]

        # A Probe without a prediction skips the checks that need one.
        is_known: Any = roles.point is not None or None
        predict, objective = is_known and (lambda given: run(given)[1]), is_known and (lambda x, given: run(given, x)[0])
        return Probe(made, predict, objective, **self.case.declarations(self, made))


@dataclass
class Roles:
    """What the entries of a batch are for. `point` is the path of the module whose output is the prediction, or None."""

    inputs: str
    targets: str
    uses: tuple[str, ...]
    point: str | None
    reason: str
    draws: bool
    is_token_wise: bool = False
    is_supervised: bool = False
    class_axis: int | None = None
    num_classes: int = 0
    guess: float = 0.0
    scale: float = 30.0


class Case:
    """The user's parts, rows of the user's batches by the names of their entries, and what the user declared."""

    def __init__(self, parts: Parts, declared: dict[str, Any]) -> None:
        self.parts, self.declared = parts, declared
        self.rows, self.template, self.taken = collect(parts.batches)
        self.num_rows = len(next(iter(self.rows.values())))

    def take(self, index: Tensor) -> Batch:
        return {name: value[index] for name, value in self.rows.items()}

    def restore(self, batch: Batch) -> Any:
        """A batch in the user's form; what has no rows is that of the first batch, in the dtype of the rest."""
        dtype, own = next((v.dtype for v in batch.values() if v.is_floating_point()), torch.float32), copy.copy(self.template)
        fixed = {n: v.to(dtype) if torch.is_tensor(v) and v.is_floating_point() else v for n, v in _entries(own).items()}
        made = pytree.tree_unflatten([batch.get(n, v) for n, v in fixed.items()], pytree.tree_structure(_plain(own)))
        if own is _plain(own):
            return made
        own.update(made)  # a mapping with methods of its own, such as `to`
        return own

    def name_of(self, key: Any) -> str:
        """The name of the entry that the user calls by its key or index."""
        if str(key) not in self.rows:
            raise UserError(f"a batch has no entry {key!r} with one value per row; there are: {', '.join(self.rows)}")
        return str(key)

    def counted(self, batch: Batch) -> Tensor:
        """Where a target counts: not at -100, and not at the first position where the model shifts its targets."""
        kept = batch[self.roles.targets] != IGNORED
        kept[:, : int(self.parts.shifts_targets)] = False
        return kept

    @functools.cached_property
    def roles(self) -> Roles:
        """Runs the loss on a few rows in evaluation mode, and looks at what reaches the model and what it returns."""
        system, before = ForeignSystem(self).eval(), torch.get_rng_state()
        with torch.no_grad():
            for num_rows in (ROWS + 1, ROWS):  # rows against rows show at both sizes, other axes at one
                batch = self.take(torch.arange(num_rows) % self.num_rows)
                given, point = _watch(system.model, lambda batch=batch: system.loss(batch), num_rows)
                if point is not None:
                    break
        reached = [name for name in batch if any(batch[name] is value for value in given)]
        last, named = list(batch)[-1], [name for name in TARGET_NAMES if name in batch]
        guessed = last if len(batch) > 1 and point is not None else ""
        targets = self.name_of(self.declared["targets"]) if "targets" in self.declared else named[0] if named else guessed
        inputs = self.name_of(self.declared.get("inputs", next((n for n in (*reached, *batch) if n != targets), last)))
        used = self.declared.get("uses", [n for n in reached if n not in (inputs, targets) and "mask" not in n])
        reason = "" if point is not None else "the loss does not call the model once for one prediction per row"
        draws = not torch.equal(before, torch.get_rng_state())
        self.roles = roles = Roles(inputs, targets, tuple(map(self.name_of, used)), point, reason, draws)
        if targets and point is not None:
            with torch.no_grad():
                self._learn_form(system.probe(batch), is_certain=targets != guessed)
        return roles

    def _learn_form(self, probe: Probe, is_certain: bool) -> None:
        """Whether the loss uses the target, whether it classifies, and what a guess costs."""
        roles, prediction, targets = self.roles, probe.predict(probe.batch), probe.batch[probe.targets]
        other = altered(targets, (slice(None),))  # what conditions a prediction changes no loss of the same prediction
        losses = [probe.objective(prediction, {**probe.batch, probe.targets: value}) for value in (targets, other)]
        if not is_certain and torch.equal(*losses) and not torch.equal(targets, other):
            roles.targets = ""
            return
        if targets.is_floating_point():
            roles.is_supervised = targets.shape == prediction.shape and not roles.draws
            roles.num_classes = 2 if roles.is_supervised and bool(((targets == 0) | (targets == 1)).all()) else 0
        else:
            roles.is_token_wise = targets.ndim > 1
            axes = (axis for axis in (-1, 1) if prediction.ndim == targets.ndim + 1 and prediction.shape[axis] > targets.max())
            roles.class_axis = next((axis for axis in axes if prediction.select(axis, 0).shape == targets.shape), None)
            roles.is_supervised = roles.class_axis is not None
            roles.num_classes = prediction.shape[roles.class_axis] if roles.class_axis is not None else 0
        if roles.num_classes > 1:
            flat = float(probe.objective(torch.zeros_like(prediction), probe.batch))
            roles.guess = flat if math.isclose(flat, math.log(roles.num_classes), rel_tol=1e-3) else 0.0
        if roles.guess or roles.class_axis is not None:  # label smoothing prefers logits that are not too large
            costs = {scale: float(probe.objective(self._oracle(probe.batch, scale), probe.batch)) for scale in (30.0, 10.0, 3.0)}
            roles.scale = min(costs, key=costs.__getitem__)

    def declarations(self, system: ForeignSystem, batch: Batch) -> dict[str, Any]:
        """The fields of the probe: those that the user gave, else what is known."""
        roles, own = self.roles, {**self.declared}
        is_causal, dead = own.pop("causal", self.parts.causal), (f"model.{name}" for name in own.pop("dead", ()))
        known = {
            "mask": "counted" if roles.is_token_wise and not batch["counted"].all() else "",
            "constant": tuple(name for name in self.rows if name not in (roles.inputs, roles.targets)),
            "order": "causal" if is_causal else None,
            "at_init": (lambda batch: roles.guess) if roles.guess else None,
            "oracle": self._oracle if roles.is_supervised else None,
            "dead": (*(name for name, _ in system.named_parameters() if KEY_BIAS.search(name)), *dead),
        }
        return known | own | {"inputs": roles.inputs, "targets": roles.targets, "uses": roles.uses}

    def _oracle(self, batch: Batch, scale: float = 0.0) -> Tensor:
        """The prediction that fits the targets best: themselves, or a large logit for each of their classes."""
        roles, targets, scale = self.roles, batch[self.roles.targets], scale or self.roles.scale
        if roles.class_axis is None:
            return (2 * targets - 1) * scale if roles.guess else targets
        targets = targets.roll(-1, 1) if self.parts.shifts_targets else targets
        hot = nn.functional.one_hot(targets.clamp_min(0), roles.num_classes).movedim(-1, roles.class_axis)
        return scale * hot.double()


def collect(batches: Any) -> tuple[Batch, Any, str]:
    """Rows of the first batches of a list, a loader, an iterator or a function that returns one; a batch; what was read."""
    first, forms, num_rows, num_other = None, [], 0, 0
    owned = [getattr(owner, "generator", None) for owner in (batches, getattr(batches, "sampler", None))]
    states = [(generator, generator.get_state()) for generator in owned if isinstance(generator, torch.Generator)]
    found: Any = batches() if callable(batches) else batches
    parts: list[Batch] = []
    for batch in itertools.islice(found, MAX_BATCHES):
        rows = _rows(batch)
        forms.append([(name, value.dtype, value.shape[1:]) for name, value in rows.items()])
        if forms[-1] != forms[0]:  # padded to another length
            num_other += 1
            continue
        first, num_rows = batch if first is None else first, num_rows + len(next(iter(rows.values())))
        parts.append(rows)
        if num_rows >= MAX_ROWS:
            break
    for generator, state in states:
        generator.set_state(state)
    if not parts:
        raise UserError("batches is empty; give a list of batches, a loader, or a function that returns an iterator of them")
    taken = f"{num_rows} rows of {len(parts)} batches" + (f", {num_other} of another shape left out" if num_other else "")
    taken += ", which the iterator will not give again" if isinstance(batches, Iterator) else ""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}, first, taken


def _rows(batch: Any) -> Batch:
    """The tensors with one value per row: those of the commonest length. Copied to the CPU."""
    found = {name: value for name, value in _entries(batch).items() if isinstance(value, Tensor) and value.ndim}
    if not found:
        raise UserError(f"a batch is a {type(batch).__name__} without a tensor; make it a tensor, or a dict or tuple of tensors")
    ((length, _),) = Counter(len(value) for value in found.values()).most_common(1)
    return {name: value.detach().cpu().clone() for name, value in found.items() if len(value) == length}


def _plain(batch: Any) -> Any:
    return dict(batch) if isinstance(batch, Mapping) and type(batch) is not dict else batch


def _entries(batch: Any) -> dict[str, Any]:
    leaves, _ = pytree.tree_flatten_with_path(_plain(batch))
    return {".".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in path) or "batch": leaf for path, leaf in leaves}


def _watch(model: nn.Module, run: Callable[[], Any], num_rows: int) -> tuple[list[Any], str | None]:
    """What the outermost modules are given, and the one module whose output the loss is computed from, if there is one."""
    depth, outer, made = [0], [], []

    def enter(module: nn.Module, args: Any) -> None:
        depth[0] += 1

    def leave(name: str, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        depth[0] -= 1
        made.append((name, main_tensor(out)[1]))
        if not depth[0]:
            outer.append((name, [*args, *kwargs.values()], out))

    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_pre_hook(enter))
            hooks.enter_context(module.register_forward_hook(functools.partial(leave, name), with_kwargs=True))
        run()
    given = [value for _, values, _ in outer for value in values]
    name, _, out = outer[0] if len(outer) == 1 else (None, [], None)
    prediction = main_tensor(out)[1]
    if any(isinstance(value, Tensor) and not value.ndim for value in pytree.tree_leaves(out)):  # the loss is computed inside
        name = next((inner for inner, value in made if value is prediction and inner != name), None)
    is_per_row = prediction is not None and prediction.shape[0] == num_rows and num_rows not in prediction.shape[1:]
    return given, name if is_per_row else None


def main_tensor(out: Any) -> tuple[int, Tensor | None]:
    """The first tensor of numbers in a module's output, which is its prediction, and its place among the leaves."""
    leaves = enumerate(pytree.tree_leaves(out))
    return next(((i, x) for i, x in leaves if isinstance(x, Tensor) and x.ndim and x.is_floating_point()), (0, None))


@contextlib.contextmanager
def _output_of(module: nn.Module, instead: Tensor | None = None) -> Iterator[list[Tensor]]:
    """The predictions of a module inside the block; with `instead`, it returns that tensor."""
    seen: list[Tensor] = []

    def hook(module: nn.Module, args: Any, out: Any) -> Any:
        (place, value), (leaves, spec) = main_tensor(out), pytree.tree_flatten(out)
        if value is None:
            raise UserError("for one row the model returns a number without a row axis; squeeze(-1) instead of squeeze()")
        seen.append(value)
        leaves[place] = value if instead is None else instead.to(value.dtype)
        return pytree.tree_unflatten(leaves, spec)

    with module.register_forward_hook(hook):
        yield seen


# ---- what trains a model: given by the user, or asked of a Lightning module or a transformers model; imports neither ---


@dataclass
class Parts:
    """A copy of the user's model with all that trains it."""

    model: nn.Module
    loss: Callable[[nn.Module, Any], Any]
    batches: Any
    optimizers: list[Optimizer]
    schedulers: list[Any]
    evaluate: Callable[[nn.Module], Mapping[str, float]] | None
    sample: Callable[[nn.Module], Any] | None
    valid: Any = None
    causal: bool = False
    shifts_targets: bool = False


def make_parts(model: Any, loss: Any, batches: Any, optimizer: Any, scheduler: Any, evaluate: Any, sample: Any) -> Parts:
    """Copies the model, its optimizers and schedulers together, and adds what a framework's module tells about itself."""
    if not isinstance(model, nn.Module):
        raise UserError(f"model is a {type(model).__name__}, not a torch.nn.Module")
    if isinstance(loss, nn.Module):
        example = "lambda model, batch: criterion(model(batch[0]), batch[1])"
        raise UserError(f"loss is called with the model and a batch; wrap the {type(loss).__name__}: {example}")
    try:
        made = copy.deepcopy((model, _listed(optimizer), _listed(scheduler)))
    except Exception as error:
        raise UserError(f"the model cannot be copied, and is not checked without that: {type(error).__name__}: {error}") from None
    parts = Parts(made[0].cpu(), loss, batches, made[1], made[2], evaluate, sample)
    if hasattr(model, "training_step"):
        _ask_lightning(parts)
    elif hasattr(getattr(model, "config", None), "model_type"):  # of transformers; causal ones shift their labels by one
        is_decoder = not getattr(model.config, "is_encoder_decoder", False)
        parts.causal = is_decoder and type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
        parts.shifts_targets = parts.causal and loss is None
        parts.loss = loss or (lambda model, batch: model(**batch))
    if parts.loss is None or parts.batches is None:
        raise UserError("loss(model, batch), which returns a scalar tensor, and batches, a list or a loader, are both needed")
    return parts


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def scalar(value: Any) -> Tensor:
    """The loss in what a loss function or a training step returned."""
    found = value.get("loss") if isinstance(value, Mapping) else value[0] if isinstance(value, tuple) and value else value
    if not isinstance(found, Tensor):
        raise UserError(f"the loss function returned {type(found).__name__}; return the scalar tensor itself, without item()")
    return found


def _ask_lightning(parts: Parts) -> None:
    """A LightningModule, or a module with the same methods: training_step, configure_optimizers, loaders, validation_step."""
    model: Any = parts.model
    if not getattr(model, "automatic_optimization", True):
        raise UserError("training_step optimises by itself (automatic_optimization=False): give a loss(model, batch) of one step")
    parts.loss = parts.loss or (lambda model, batch: _step(model.training_step, batch))
    with contextlib.suppress(Exception):  # it may need a trainer, or be missing: Lightning raises errors of its own
        if not parts.optimizers:
            # Optimizers and schedulers in any of the forms that configure_optimizers may return.
            value = model.configure_optimizers()
            if isinstance(value, tuple) and len(value) == 2 and all(isinstance(part, list | tuple) for part in value):
                value = [*value[0], *({"lr_scheduler": scheduler} for scheduler in value[1])]
            found = [entry if isinstance(entry, Mapping) else {"optimizer": entry} for entry in _listed(value)]
            schedulers = [entry["lr_scheduler"] for entry in found if entry.get("lr_scheduler") is not None]
            named = [scheduler["scheduler"] if isinstance(scheduler, Mapping) else scheduler for scheduler in schedulers]
            parts.optimizers, parts.schedulers = [entry["optimizer"] for entry in found if "optimizer" in entry], named
    with contextlib.suppress(Exception):
        parts.batches = model.train_dataloader() if parts.batches is None else parts.batches
    with contextlib.suppress(Exception):
        parts.valid = _listed(model.val_dataloader())[0]
        batches = list(itertools.islice(parts.valid, VALID_BATCHES))
        parts.evaluate = parts.evaluate or (lambda model: _validate(model, batches))


def _step(method: Any, batch: Any, number: int = 0) -> Any:
    return method(batch, number) if len(inspect.signature(method).parameters) > 1 else method(batch)


@torch.no_grad()
def _validate(model: Any, batches: list[Any]) -> dict[str, float]:
    """What validation_step returns or logs, in evaluation mode, as a trainer runs it."""
    seen: dict[str, float] = {}

    def log(name: str, value: Any, *args: Any, **options: Any) -> None:
        seen[f"{name} {len(seen)}"] = float(value) if isinstance(value, Tensor | float) else 0.0

    model.eval().log = log
    for number, batch in enumerate(batches):
        log("validation_step", _step(model.validation_step, batch, number))
    del model.train().log
    return seen
