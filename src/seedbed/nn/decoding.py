"""Autoregressive decoding: rows of tokens are extended, tokens are drawn from logits, keys and values are cached.

B rows, V vocabulary, N tokens of history, L layers, H heads, T slots, D head width. When the context is full, its last half is
read again and generation continues from there: `window_start` is the policy.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from seedbed.errors import UserError

READ_EVERY = 16  # tokens between two reads from a CUDA device; on other devices every token is read at once


class Decoder:
    """Extends rows of tokens. The host knows every length; tokens, lengths and the generator stay on the device."""

    def __init__(
        self, model: Any, prompts: list[list[int]], num_tokens: int, sampling: "Sampling", seed: int, *, capture: bool = False
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

    A subclass defines how the model reads windows (`_prefill`) and the decode step (`step`, without host work). `counters` are
    those on the device that a step advances.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.graph: torch.cuda.CUDAGraph | None = None
        self._open()
        self._fill(list(range(len(self.lengths))))

    def _open(self) -> None:
        """Allocate the cache."""
        self.cache: Cache = self.model.new_cache(len(self.lengths))
        self.counters: tuple[Tensor, ...] = (self.cache.length_B, self.count_B)

    def _fill(self, rows: list[int]) -> None:
        """Read all but the last token of each row's window; the last one is the next step's input."""
        tokens_NT, sizes = self._windows(rows, leave=1)
        rows_N = torch.tensor(rows, device=tokens_NT.device)
        if tokens_NT.shape[1]:
            self._prefill(tokens_NT, self.cache.prefill(rows_N))
        self.cache.length_B[rows_N] = torch.tensor(sizes, device=tokens_NT.device)

    def _prefill(self, tokens_NT: Tensor, layers: "list[Prefill]") -> None:
        raise NotImplementedError

    def step(self, num_slots: int = 0) -> None:
        """One decode step; `num_slots` is the number of slots in use where the host knows it."""
        raise NotImplementedError

    def advance(self) -> None:
        full = [r for r, n in enumerate(self.lengths) if window_start(self.starts[r], n, self.model.block) != self.starts[r]]
        for row in full:
            self.starts[row] = window_start(self.starts[row], self.lengths[row], self.model.block)
        if full:
            self._fill(full)
        if self.graph is None and not self.why_not_captured:
            from seedbed.nn.cuda_graph import capture

            capture(self)
        if self.graph is None:
            self.step(max(n - s for n, s in zip(self.lengths, self.starts, strict=True)))
        else:
            self.graph.replay()
        self.lengths = [n + 1 for n in self.lengths]


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn: temperature 0 takes the likeliest; top_k 0 and top_p 1 are off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < math.inf:
            raise UserError(f"temperature={self.temperature} is out of range: 0 is greedy, 1 samples as trained")
        if self.top_k < 0:
            raise UserError(f"top_k={self.top_k} is out of range: 0 keeps all tokens, 40 the forty likeliest")
        if not 0.0 < self.top_p <= 1.0:
            raise UserError(f"top_p={self.top_p} is out of range: it must be above 0 and at most 1 (1 keeps all tokens)")


def pick(logits_BV: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """One token per row by the Gumbel-max trick: no division, no host, one shape."""
    if sampling.temperature == 0.0:
        return logits_BV.argmax(-1)
    logits_BV = logits_BV.float() / sampling.temperature
    if sampling.top_k or sampling.top_p < 1.0:
        from seedbed.nn.likeliest import only_likeliest

        logits_BV = only_likeliest(logits_BV, sampling)
    waits_BV = torch.empty_like(logits_BV).exponential_(generator=generator).clamp_min(1e-20)
    return (logits_BV - waits_BV.log()).argmax(-1)


def window_start(start: int, num_tokens: int, context: int) -> int:
    """Where the context window begins when a row holds `num_tokens`; a full window is reduced to its last half."""
    return start if num_tokens - start <= context else num_tokens - max(1, context // 2)


class Cache:
    """Keys and values of every layer; slot t of a row holds its token number t."""

    def __init__(
        self, num_layers: int, batch: int, num_heads: int, length: int, head_dim: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        # Zeros, not empty: a masked slot has weight 0, and 0 x NaN would still be NaN.
        self.kv_LPBHTD = torch.zeros(num_layers, 2, batch, num_heads, length, head_dim, dtype=dtype, device=device)
        self.length_B = torch.zeros(batch, dtype=torch.int64, device=device)

    def prefill(self, rows_N: Tensor) -> "list[Prefill]":
        """One writer per layer for whole prompts in the given rows; the caller sets `length_B` afterwards."""
        return [Prefill(kv, rows_N) for kv in self.kv_LPBHTD]

    def decode(self, num_slots: int = 0) -> "list[Decode]":
        """One writer per layer for one further token in every row; the caller advances `length_B` afterwards.

        `num_slots` is the number of slots in use, the new one included: attention skips the others. 0 means all.
        """
        used_LPBHTD = self.kv_LPBHTD[..., : num_slots or None, :]
        slots_T = torch.arange(used_LPBHTD.shape[4], device=self.length_B.device)
        # An additive mask, made once: from a boolean one every layer would make its own.
        hidden_B11T = (slots_T > self.length_B[:, None])[:, None, None]
        mask_B11T = torch.zeros_like(hidden_B11T, dtype=used_LPBHTD.dtype).masked_fill(hidden_B11T, float("-inf"))
        rows_B = torch.arange(len(self.length_B), device=self.length_B.device)
        return [Decode(kv, rows_B, self.length_B, mask_B11T) for kv in used_LPBHTD]


class Prefill:
    """Stores a prompt's keys and values; attention is plainly causal, since nothing precedes the prompt."""

    def __init__(self, kv_PBHTD: Tensor, rows_N: Tensor) -> None:
        self.kv, self.rows = kv_PBHTD, rows_N

    def update(self, k_NHtD: Tensor, v_NHtD: Tensor) -> tuple[Tensor, Tensor, None]:
        """Keys, values and mask to attend with."""
        num_tokens = k_NHtD.shape[2]
        self.kv[0, self.rows, :, :num_tokens] = k_NHtD
        self.kv[1, self.rows, :, :num_tokens] = v_NHtD
        return k_NHtD, v_NHtD, None


class Decode:
    """Appends one token per row, each at its own length; attention sees the filled slots."""

    def __init__(self, kv_PBHTD: Tensor, rows_B: Tensor, length_B: Tensor, mask_B11T: Tensor) -> None:
        self.kv, self.rows, self.length, self.mask = kv_PBHTD, rows_B, length_B, mask_B11T

    def update(self, k_BH1D: Tensor, v_BH1D: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values and mask to attend with."""
        self.kv[0, self.rows, :, self.length] = k_BH1D[:, :, 0]
        self.kv[1, self.rows, :, self.length] = v_BH1D[:, :, 0]
        return self.kv[0], self.kv[1], self.mask
