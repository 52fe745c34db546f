"""The peak rate of a GPU in FLOP/s: nominal by its name, and measured."""

import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
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


# The first pattern found in the device's name wins.
GPUS = [Gpu(**facts) for facts in tomllib.loads(Path(__file__).with_name("gpus.toml").read_text())["gpus"]]


def nominal_peak(device_name: str) -> float | None:
    """FLOP/s in dense bf16 as the vendor states it; None for a device that is not in the table."""
    return next((gpu.bf16 * TERA for gpu in GPUS if gpu.pattern in device_name), None)


def measured_peak(device: "torch.device", size: int = 8192, seconds: float = 0.2) -> float:
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
