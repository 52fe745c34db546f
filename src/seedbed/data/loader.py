"""LoaderSource: the batches of any iterable, such as a PyTorch DataLoader, as a source of training items."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from seedbed.data.feed import Source
from seedbed.errors import UserError


class LoaderSource(Source):
    """Items of an iterable of batches, in its own order; batches are dictionaries, or sequences whose parts `names` names.

    The iterable begins again when it ends. `seek(num_items)` gives an iterator of batches that goes on after so many items
    since the very first: with it, a resumed run takes the same items as an uninterrupted one. Without it, a resumed run begins
    the iterable from its start and says so. The batch size of the run need not be that of the iterable.
    """

    def __init__(
        self, batches: Iterable[Any], names: Sequence[str] = (), seek: Callable[[int], Iterator[Any]] | None = None
    ) -> None:
        self.batches, self.names, self.seek = batches, tuple(names), seek
        self._iterator: Iterator[Any] | None = None
        self._first, self._kept = 0, dict[str, Tensor]()  # what was read and may be asked for, from which item on

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """One pass, for `evaluate`."""
        return map(self._named, self.batches)

    def batch(self, raw: dict[str, Tensor]) -> dict[str, Tensor]:
        """The items of these counters, on their device."""
        counters = raw["index"].cpu()
        low, end = int(counters.min()), int(counters.max()) + 1
        # A DataLoader draws from the global generator, whose numbers belong to the step.
        with torch.random.fork_rng(devices=[]):
            if self._iterator is None or low < self._first:
                self._begin(low)
            while self._end() < end:
                torch.default_generator.manual_seed(self._end())
                self._read()
        found = {name: value[counters - self._first].to(raw["index"].device) for name, value in self._kept.items()}
        # Ranks and micro-batches ask for further items of the same step; what lies before it is not asked for again.
        self._kept, self._first = {name: value[low - self._first :] for name, value in self._kept.items()}, low
        return {**raw, **found}

    def _begin(self, at: int) -> None:
        if at and self.seek is None and self._iterator is None:
            print(
                f"note: the loader cannot seek to item {at}: it begins from its start, unlike in an uninterrupted run (see seek)"
            )
        self._iterator = self.seek(at) if self.seek else iter(self.batches)
        self._first, self._kept = at, {}

    def _end(self) -> int:
        return self._first + len(next(iter(self._kept.values()), ()))

    def _read(self) -> None:
        assert self._iterator is not None
        batch = next(self._iterator, None)
        if batch is None:
            self._iterator = iter(self.batches)
            batch = next(self._iterator, None)
        if batch is None:
            raise UserError("the loader gives no batches; an iterator that is used up cannot begin again, a DataLoader can")
        new = self._named(batch)
        self._kept = {name: torch.cat([self._kept[name], value]) if self._kept else value for name, value in new.items()}

    def _named(self, batch: Any) -> dict[str, Tensor]:
        if not isinstance(batch, Mapping):
            parts = batch if isinstance(batch, Sequence) else (batch,)
            if len(parts) != len(self.names):
                what = f"a batch of the loader has {len(parts)} parts, and {len(self.names)} names are given"
                raise UserError(f'{what}: LoaderSource(loader, names=("image", "label"))')
            batch = dict(zip(self.names, parts, strict=True))
        return {name: torch.as_tensor(value) for name, value in batch.items()}
