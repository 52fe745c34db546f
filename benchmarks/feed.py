"""Feed bandwidth on the CPU against plain copies of as many bytes, in one process, turn by turn: frame windows and tokens.

Frames: windows of 8 frames 64x64x3, batch 256, from a memory-mapped file in the page cache. Tokens: 64 blocks of 1,024 + 1
from a memory-mapped file of uint16, delivered as int64. `copy` is a tensor's `copy_` of one block of the same size, the
plain copy of a PyTorch program; `memcpy` is numpy's, which for blocks of many megabytes switches to stores that bypass the
caches and cannot be had for windows of 98 kB. Each is measured with one thread and with all of torch's.
"""

import argparse
import mmap
import re
import tempfile
from pathlib import Path

import numpy as np
import torch
from _report import cpu_name, write_result
from _sources import WindowSource

from seedbed.data.feed import Source
from seedbed.data.text import TextSource
from seedbed.report.data_bench import compare

TARGET = 0.80
EPISODE = 1000


def mapped(path: Path, num_bytes: int, dtype: str) -> np.ndarray:
    """A file of random bytes, memory-mapped and in the page cache."""
    block = np.random.default_rng(0).integers(0, 256, 16 << 20, dtype=np.uint8).tobytes()
    with open(path, "wb") as file:
        for start in range(0, num_bytes, len(block)):
            file.write(block[: num_bytes - start])
    with open(path, "rb") as file:
        array = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype)
    array.view(np.uint8)[:: mmap.PAGESIZE].max()
    return array


def sources(folder: Path, megabytes: int) -> dict[str, tuple[Source, int]]:
    row = 64 * 64 * 3
    frames = mapped(folder / "frames", (megabytes << 20) // row * row, "u1").reshape(-1, 64, 64, 3)
    windows = WindowSource({"frames": frames}, {"frames": 8}, np.arange(0, len(frames) - EPISODE, EPISODE))
    tokens = mapped(folder / "tokens", (megabytes << 20) // 4, "<u2")
    return {"frames": (windows, 256), "tokens": (TextSource(tokens, 1024, "phase", 1), 64)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1024, help="size of the frame file; tokens take a quarter of it")
    options = parser.parse_args()
    num_threads, rows = torch.get_num_threads(), {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (source, batch) in sources(Path(folder), options.megabytes).items():
            for threads in sorted({1, num_threads}):
                torch.set_num_threads(threads)
                rows[f"{name}, threads {threads}"] = compare(source, batch=batch)
            if name == "frames":
                rows["frames, read ahead by a thread"] = compare(source, batch=batch, limit_bytes=0)
    show(rows)
    lowest = min(r["ratio_cpu"] for name, r in rows.items() if name.endswith("threads 1"))
    print(f"with one thread the feed reaches at least {lowest:.2f} of a plain copy (target: {TARGET:.2f})")
    kind = re.sub(r"[^a-z0-9]+", "-", cpu_name().lower()).strip("-")
    write_result(f"feed-{kind}-{num_threads}-threads", {"target": TARGET, "lowest": lowest, **rows})


def show(rows: dict[str, dict]) -> None:
    """One line per case: times and speeds, then the feed against each plain copy, by the clock and by the processor."""
    titles = ("feed ms", "cpu ms", "GB/s", "copy GB/s", "memcpy GB/s", "/copy", "/memcpy", "cpu /copy", "cpu /memcpy")
    print(f"{'':32}" + "".join(f"{title:>12}" for title in titles))
    for name, r in rows.items():
        figures = (r["feed"]["ms"], r["feed"]["cpu_ms"], r["feed"]["gb_per_s"], r["copy"]["gb_per_s"], r["memcpy"]["gb_per_s"])
        ratios = (r["ratio"], r["ratio_memcpy"], r["ratio_cpu"], r["ratio_memcpy_cpu"])
        print(f"{name:32}" + "".join(f"{value:12.3f}" for value in (*figures, *ratios)))


if __name__ == "__main__":
    main()
