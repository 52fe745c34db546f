"""Static key/value cache for generation. L layers, B rows, H heads, T slots, D head width.

Rows may hold different numbers of tokens; lengths are on the device, so a decode step has one shape and no host work.
"""

import torch
from torch import Tensor


class Cache:
    """Keys and values of every layer; slot t of a row holds its token number t."""

    def __init__(
        self, num_layers: int, batch: int, num_heads: int, length: int, head_dim: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        # Zeros, not empty: a masked slot has weight 0, and 0 x NaN would still be NaN.
        self.kv_LPBHTD = torch.zeros(num_layers, 2, batch, num_heads, length, head_dim, dtype=dtype, device=device)
        self.length_B = torch.zeros(batch, dtype=torch.int64, device=device)

    @property
    def num_slots(self) -> int:
        return self.kv_LPBHTD.shape[4]

    def prefill(self, rows_N: Tensor) -> list["Prefill"]:
        """One writer per layer for whole prompts in the given rows; the caller sets `length_B` afterwards."""
        return [Prefill(kv, rows_N) for kv in self.kv_LPBHTD]

    def decode(self, num_slots: int = 0) -> list["Decode"]:
        """One writer per layer for one further token in every row; the caller advances `length_B` afterwards.

        `num_slots` is the number of slots in use, the new one included: attention skips the others. 0 means all.
        """
        used_LPBHTD = self.kv_LPBHTD[..., : num_slots or self.num_slots, :]
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
