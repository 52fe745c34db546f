"""Autoregressive decoding, with or without a cache. B rows, V vocabulary, N tokens of history.

When the context is full, its last half is read again and generation continues from there: `window_start` is the policy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from seedbed.nn.sampling import Sampling, pick, window_start

READ_EVERY = 16  # tokens between two reads from a CUDA device; on other devices every token is read at once


class Decoder:
    """Extends rows of tokens. The host knows every length; tokens, lengths and the generator stay on the device."""

    def __init__(
        self,
        model: Any,
        prompts: list[list[int]],
        num_tokens: int,
        sampling: Sampling,
        seed: int,
        *,
        capture: bool = False,
    ) -> None:
        self.model, self.sampling = model, sampling
        device = model.embed.weight.device
        self.lengths = [len(p) for p in prompts]
        self.starts = [window_start(0, n, model.block) for n in self.lengths]
        self.history_BN = torch.zeros(len(prompts), max(self.lengths) + num_tokens, dtype=torch.int64, device=device)
        for row, prompt in zip(self.history_BN, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        self.count_B = torch.tensor(self.lengths, device=device)
        self.generator = torch.Generator(device).manual_seed(seed)
        self.why_not_captured = "not asked for" if not capture else "" if device.type == "cuda" else f"no graphs on {device.type}"

    def advance(self) -> None:
        """Append one token to every row."""
        raise NotImplementedError

    def run(self, num_tokens: int, read_every: int) -> Iterator[list[list[int]]]:
        """New tokens of every row, in chunks of `read_every`; in between, the host does not wait for the device."""
        for first in range(0, num_tokens, read_every):
            count = min(read_every, num_tokens - first)
            for _ in range(count):
                self.advance()
            newest_BN = (self.count_B - count)[:, None] + torch.arange(count, device=self.count_B.device)
            yield self.history_BN.gather(1, newest_BN).tolist()

    def _append(self, logits_BV: Tensor) -> None:
        token_B = pick(logits_BV, self.sampling, self.generator)
        self.history_BN.scatter_(1, self.count_B[:, None], token_B[:, None])
        self.count_B += 1

    def _windows(self, rows: list[int], leave: int) -> tuple[Tensor, list[int]]:
        """The rows' windows without their last `leave` tokens, padded on the right, which causal attention does not see."""
        sizes = [self.lengths[r] - self.starts[r] - leave for r in rows]
        tokens_NT = self.history_BN.new_zeros(len(rows), max(sizes))
        for i, (row, size) in enumerate(zip(rows, sizes, strict=True)):
            tokens_NT[i, :size] = self.history_BN[row, self.starts[row] : self.starts[row] + size]
        return tokens_NT, sizes


class CachedDecoder(Decoder):
    """Decodes with a cache: each new token is one forward pass of one token, and on CUDA one graph launch.

    A subclass defines how windows are read (`_fill`), the decode step (`_step`, without host work), and which counters
    on the device a step advances.
    """

    counters: tuple[Tensor, ...]

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.graph: torch.cuda.CUDAGraph | None = None
        self._open()
        self._fill(list(range(len(self.lengths))))

    def _open(self) -> None:
        """Allocate the cache."""
        raise NotImplementedError

    def _fill(self, rows: list[int]) -> None:
        """Read all but the last token of each row's window; the last one is the next step's input."""
        raise NotImplementedError

    def _step(self, num_slots: int = 0) -> None:
        """One decode step; `num_slots` is the number of slots in use where the host knows it."""
        raise NotImplementedError

    def advance(self) -> None:
        full = [r for r, n in enumerate(self.lengths) if window_start(self.starts[r], n, self.model.block) != self.starts[r]]
        for row in full:
            self.starts[row] = window_start(self.starts[row], self.lengths[row], self.model.block)
        if full:
            self._fill(full)
        if self.graph is None and not self.why_not_captured:
            self._capture()
        if self.graph is None:
            self._step(max(n - s for n, s in zip(self.lengths, self.starts, strict=True)))
        else:
            self.graph.replay()
        self.lengths = [n + 1 for n in self.lengths]

    def _capture(self) -> None:
        """Capture the step as one CUDA graph. Warm-up steps rewrite the same slots; counters and generator are restored."""
        before, rng = [c.clone() for c in self.counters], self.generator.get_state()
        graph = torch.cuda.CUDAGraph()
        try:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._step()
            torch.cuda.current_stream().wait_stream(side)
            graph.register_generator_state(self.generator)
            with torch.cuda.graph(graph):
                self._step()
            self.graph = graph
        except RuntimeError as error:
            torch.cuda.synchronize()
            self.why_not_captured = str(error).splitlines()[0]
            self.generator = torch.Generator(self.generator.device)  # the old generator state would stay marked as being captured
        for counter, value in zip(self.counters, before, strict=True):
            counter.copy_(value)
        self.generator.set_state(rng)
