"""Declares how an optimizer treats a parameter, where the parameter is created."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

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
