"""What candidates over a vocabulary cost in memory, in numbers a person can check."""

from __future__ import annotations

from pathlib import Path

import torch

from seedbed.config import Config
from seedbed.errors import UserError

GB = 1e9
# Copies of all logits that a step which carries loss keeps for the way back, and those that are alive at any time.
KEPT, ALIVE = 2, 3
# A guarded step keeps the buffer as it was, and makes the new one beside it.
BUFFERS = 3


def logits_bill(config: Config, vocab: int) -> tuple[float, str]:
    """Bytes, and the arithmetic in words."""
    walk, rows = config.model.walk, config.batch // config.accum
    rows += max(1, rows // 2) if walk.replay else 0
    copy = rows * config.data.block * vocab * 4
    carrying = walk.steps if walk.loss == "each" or walk.through == "all" else 1
    copies = KEPT * carrying + ALIVE
    total = copy * copies
    words = f"{rows} rows x {config.data.block} tokens x {vocab:,} ids x 4 bytes = {copy / GB:.2f} GB a copy, {copies} copies"
    if walk.replay:
        buffer = walk.replay * config.data.block * vocab * 4
        total += BUFFERS * buffer
        words += f"; replay of {walk.replay}: {buffer / GB:.2f} GB, {BUFFERS} times in a step"
    return total, f"{total / GB:.2f} GB ({words})"


def require_room(config: Config, vocab: int, device: torch.device) -> str:
    """The bill in words; refused where the device could not hold it even with nothing else in its memory."""
    total, words = logits_bill(config, vocab)
    room = memory_of(device)
    if total > room:
        raise UserError(
            f"the logits of candidates do not fit: {words}, and the {device.type} has {room / GB:.1f} GB\n"
            "use a smaller batch or more accum, a shorter data.block, a smaller data.vocab, or less model.walk.replay"
        )
    return words


def memory_of(device: torch.device) -> float:
    """All the memory of a device, in bytes; without limit where it cannot be told."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[1])
    info = Path("/proc/meminfo")
    if device.type != "cpu" or not info.exists():
        return float("inf")
    (line,) = (line for line in info.read_text().splitlines() if line.startswith("MemTotal"))
    return float(line.split()[1]) * 1024
