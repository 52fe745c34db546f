"""Parameters: how they are initialised, equally on every device, and how an optimizer is to treat them."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")
keeps_meta = False  # set by `shapes_only` of deferred.py
defers = False  # set by `deferred_init` of deferred.py


def materialize(module: nn.Module, device: torch.device | str = "cpu", scalars_only: bool = False) -> nn.Module:
    """Give a module built on the meta device storage filled with NaN, so that a missing initialisation shows at once.

    Unlike `Module.to_empty`, it keeps the declarations of the parameters. Inside `shapes_only` nothing happens.
    """
    if keeps_meta:
        return module
    for child in module.modules():
        assert not list(child.buffers(recurse=False)), "buffers would be left uninitialised; compute them in forward"
        for name, old in child.named_parameters(recurse=False):
            if scalars_only and old.ndim:
                continue
            # Not full_like: for a meta tensor it imports torch's symbolic shapes.
            new = nn.Parameter(torch.full(old.shape, float("nan"), dtype=old.dtype, device=device), old.requires_grad)
            declared = declaration_of(old)
            if declared:
                new.declaration = declared  # type: ignore[attr-defined]
            setattr(child, name, new)
    return module


@torch.no_grad()
def normal_(param: Tensor, std: float, generator: torch.Generator) -> None:
    """Normal numbers drawn on the CPU, so that a seed gives the same model on every device; std 0 fills with zeros."""
    if param.is_meta:
        return
    if std == 0.0:
        param.zero_()
        return
    drawn = torch.empty(param.shape).normal_(0.0, std, generator=generator)
    if hasattr(param, "to_local"):  # sharded: this rank's rows of the same numbers
        first, param = vars(param)["first_row"], param.to_local()  # type: ignore[operator]
        drawn = drawn[first : first + len(param)]
    param.copy_(drawn)


@torch.no_grad()
def fill_(param: Tensor, value: float) -> None:
    """Fill with a constant, for gains and gates."""
    param.fill_(value)


class _Unfilled(TorchFunctionMode):
    """Skips the random fills of torch's own layers: on the meta device they have no effect and import torch's compiler."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("normal_", "uniform_", "kaiming_uniform_"):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """Modules created inside have shapes and no storage; `materialize` or a checkpoint provides it."""
    with torch.device("meta"), _Unfilled():
        yield


def initialised(kind: type[M], seed: int, *given: Any, may_wait: bool = False) -> M:
    """A freshly initialised model on the CPU, the same for a seed on every machine.

    One whose weights nothing reads before the first step `may_wait`, and be filled shard by shard.
    """
    with on_meta():
        model = kind(*given)
    materialize(model, scalars_only=may_wait and defers)  # scalars are not sharded
    if may_wait and defers:
        model.deferred_seed = seed  # type: ignore[assignment]
    else:
        model.init_weights(torch.Generator().manual_seed(seed))  # type: ignore[operator]
    return model


def module_list(modules: Iterable[T]) -> list[T]:
    """An `nn.ModuleList`, known to type checkers as a list of modules of one class (or of such lists)."""
    return nn.ModuleList(modules)  # type: ignore[arg-type, return-value]


KINDS = ("matrix", "embed", "head", "scalar")


@dataclass(frozen=True)
class Declaration:
    """A parameter's kind, learning-rate factor, weight decay (None: by kind) and the heights of matrices fused in it."""

    kind: str
    lr_scale: float = 1.0
    decay: bool | None = None
    rows: tuple[int, ...] = ()


def declare(param: Tensor, kind: str, lr_scale: float = 1.0, decay: bool | None = None, rows: tuple[int, ...] = ()) -> Any:
    """Attach a declaration to `param`. `rows` names the heights of matrices fused into one for a single matmul."""
    assert kind in KINDS, f"kind {kind!r} is not one of {KINDS}"
    assert not rows or sum(rows) == param.shape[0], f"rows {rows} do not add up to {param.shape[0]}"
    param.declaration = Declaration(kind, lr_scale, decay, rows)  # type: ignore[attr-defined]
    return param


def declaration_of(param: Tensor) -> Declaration | None:
    """What was declared for `param`, or None."""
    return getattr(param, "declaration", None)


def kind_of(name: str, module: nn.Module, param: Tensor) -> str:
    """The declared kind; undeclared weights of Linear are matrices, of Embedding embeddings, all else scalars."""
    declared = declaration_of(param)
    if declared:
        return declared.kind
    if name.rpartition(".")[2] == "weight" and param.ndim == 2:
        if isinstance(module, nn.Linear):
            return "matrix"
        if isinstance(module, nn.Embedding):
            return "embed"
    return "scalar"


def settings_of(param: Tensor) -> tuple[float, bool | None]:
    """The declared learning-rate factor and decay; (1.0, None) when nothing was declared."""
    declared = declaration_of(param)
    return (declared.lr_scale, declared.decay) if declared else (1.0, None)


def rows_of(param: Tensor) -> tuple[int, ...]:
    """The heights of the matrices fused in `param`, top to bottom; one height when it is a single matrix."""
    declared = declaration_of(param)
    return (declared.rows if declared else ()) or (param.shape[0],)
