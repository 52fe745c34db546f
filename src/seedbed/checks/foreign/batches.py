"""A user's batches as rows of named tensors, which can be split into batches of any size and given back in their own form."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from seedbed.errors import UserError
from seedbed.train.system import Batch

# What is taken of a loader: enough to see what the data is like, and little enough to be quick.
MAX_ROWS, MAX_BATCHES = 512, 64


@dataclass(frozen=True)
class Pool:
    """Rows by the names of their entries; `template` is the first batch, `taken` says what was read."""

    rows: Batch
    template: Any
    taken: str

    @property
    def num_rows(self) -> int:
        return len(next(iter(self.rows.values())))

    def take(self, index: Tensor) -> Batch:
        return {name: value[index] for name, value in self.rows.items()}

    def restore(self, batch: Batch) -> Any:
        """A batch in the user's form; what has no rows is that of the first batch, in the dtype of the rest."""
        dtype = next((v.dtype for v in batch.values() if v.is_floating_point()), torch.float32)
        fixed = {
            n: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in _named(self.template).items()
        }
        made = pytree.tree_unflatten([batch.get(name, value) for name, value in fixed.items()], _spec(self.template))
        if isinstance(self.template, Mapping) and type(self.template) is not dict:
            made, entries = copy.copy(self.template), made
            made.update(entries)  # type: ignore[attr-defined]
        return made

    def name_of(self, key: Any) -> str:
        """The name of the entry that the user calls by its key or index."""
        last = list(self.rows)[key] if isinstance(key, int) and -len(self.rows) <= key < 0 else str(key)
        if last not in self.rows:
            raise UserError(f"a batch has no entry {key!r} with one value per row; there are: {', '.join(self.rows)}")
        return last


def collect(batches: Any) -> Pool:
    """The rows of the first batches of a list, a loader, an iterator, or a function that returns one of these."""
    first, shape, parts, num_rows, num_other = None, None, [], 0, 0
    with _generators_restored(batches):
        found: Any = batches() if callable(batches) else batches
        for batch in itertools.islice(found, MAX_BATCHES):
            rows = _rows(batch)
            form = [(name, value.dtype, value.shape[1:]) for name, value in rows.items()]
            first, shape = (batch, form) if shape is None else (first, shape)
            if form != shape:
                num_other += 1  # padded to another length
                continue
            parts.append(rows)
            num_rows += len(next(iter(rows.values())))
            if num_rows >= MAX_ROWS:
                break
    if not parts:
        raise UserError("batches is empty; give a list of batches, a loader, or a function that returns an iterator of them")
    taken = f"{num_rows} rows of {len(parts)} batches" + (f", {num_other} of another shape left out" if num_other else "")
    once = ", which the iterator will not give again" if isinstance(batches, Iterator) else ""
    return Pool({name: torch.cat([part[name] for part in parts]) for name in parts[0]}, first, taken + once)


@contextlib.contextmanager
def _generators_restored(batches: Any) -> Iterator[None]:
    """Restores the random generators that a loader and its sampler own."""
    found = [getattr(owner, "generator", None) for owner in (batches, getattr(batches, "sampler", None))]
    states = [(generator, generator.get_state()) for generator in found if isinstance(generator, torch.Generator)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


def _rows(batch: Any) -> Batch:
    """The tensors with one value per row: those of the commonest length. Copied to the CPU."""
    found = {name: value for name, value in _named(batch).items() if isinstance(value, Tensor) and value.ndim}
    if not found:
        raise UserError(f"a batch is a {type(batch).__name__} without a tensor; make it a tensor, or a dict or tuple of tensors")
    ((length, _),) = Counter(len(value) for value in found.values()).most_common(1)
    return {name: value.detach().cpu().clone() for name, value in found.items() if len(value) == length}


def _named(batch: Any) -> dict[str, Any]:
    entries, _ = pytree.tree_flatten_with_path(dict(batch) if isinstance(batch, Mapping) else batch)
    return {".".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in path) or "batch": value for path, value in entries}


def _spec(batch: Any) -> pytree.TreeSpec:
    return pytree.tree_structure(dict(batch) if isinstance(batch, Mapping) else batch)
