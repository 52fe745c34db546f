"""Rates and utilisation: items per second, data wait, memory, and MFU against nominal and measured peaks."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

TERA = 1e12


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU as its vendor describes it: dense bf16 TFLOP/s, GiB of memory."""

    name: str
    pattern: str
    bf16: float
    gib: float


# Dense bf16 matrix rates and memory from the vendors' data sheets; the first pattern found in the device's name wins.
GPUS = [
    Gpu("RTX 3090", "3090", 71, 24),
    Gpu("RTX 4090", "4090", 165, 24),
    Gpu("RTX 5090", "5090", 210, 32),
    Gpu("A100", "A100", 312, 80),
    Gpu("L40S", "L40S", 362, 48),
    Gpu("H100 PCIe", "H100 PCIe", 756, 80),
    Gpu("H100 NVL", "H100 NVL", 835, 94),
    Gpu("H200 NVL", "H200 NVL", 836, 141),
    Gpu("H100 SXM", "H100", 989, 80),
    Gpu("H200 SXM", "H200", 989, 141),
]


def nominal_peak(device_name: str) -> float | None:
    """FLOP/s in dense bf16 as the vendor states it; None for a device that is not in the table."""
    return next((gpu.bf16 * TERA for gpu in GPUS if gpu.pattern in device_name), None)


def measured_peak(device: torch.device, size: int = 8192, seconds: float = 0.2) -> float:
    """Measured FLOP/s of a large bf16 matrix product on this CUDA device."""
    import torch

    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    b = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    for _ in range(3):
        torch.mm(a, b)
    torch.cuda.synchronize(device)
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        for _ in range(10):
            torch.mm(a, b)
        torch.cuda.synchronize(device)
        count += 10
    return 2.0 * size**3 * count / (time.perf_counter() - start)


def memory_bytes(device: torch.device) -> int:
    """Peak memory of this process: device memory on CUDA, host memory elsewhere."""
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


class Meter:
    """Turns counters into rates between two readings. MFU is left out where the peak is unknown."""

    def __init__(self, flops_per_item: float, device: torch.device, precision: str) -> None:
        import torch

        self.flops, self.device = flops_per_item, device
        self.nominal = self.measured = None
        if device.type == "cuda" and precision in ("bf16", "fp16") and flops_per_item:
            self.nominal = nominal_peak(torch.cuda.get_device_name(device))
            self.measured = measured_peak(device)
        self._last = (0, 0.0, 0.0)

    def start(self, items: int, seconds: float, wait: float) -> None:
        """Start counting here: earlier steps belong to another process or to the warm-up."""
        self._last = (items, seconds, wait)

    def read(self, items: int, seconds: float, wait: float) -> dict[str, float]:
        """Rates since the last reading, given totals of items, training seconds and seconds blocked on data."""
        last_items, last_seconds, last_wait = self._last
        self._last = (items, seconds, wait)
        elapsed = seconds - last_seconds
        out = {"seconds": round(seconds, 4), "memory": memory_bytes(self.device)}
        if elapsed <= 0 or items <= last_items:
            return out
        rate = (items - last_items) / elapsed
        out |= {"items_per_s": round(rate, 2), "wait": round(max(wait - last_wait, 0.0) / elapsed, 4)}
        for name, peak in (("mfu", self.nominal), ("mfu_measured", self.measured)):
            if peak:
                out[name] = round(rate * self.flops / peak, 4)
        return out
