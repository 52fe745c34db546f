"""The peak rate of a GPU in FLOP/s: nominal by its name, and measured."""

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


def measured_peak(device: "torch.device", size: int = 8192, seconds: float = 0.2) -> float:
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
