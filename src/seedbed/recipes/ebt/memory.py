"""Memory of predictions over a vocabulary: the arithmetic, and the refusal of a run that cannot fit."""

from pathlib import Path

import torch

from seedbed.config import Config
from seedbed.errors import UserError

GB = 1e9
# Copies of all logits that a step with a loss keeps for the backward pass, and those that are live at any time.
KEPT, ALIVE = 2, 3
# A guarded step keeps the old buffer while it makes the new one.
BUFFERS = 3


def logits_memory(config: Config, vocab: int) -> tuple[float, str]:
    """Bytes, and the arithmetic as text."""
    mcmc, rows = config.model.mcmc, config.batch // config.accum
    rows += max(1, rows // 2) if mcmc.replay_buffer else 0
    copy = rows * config.data.block * vocab * 4
    with_loss = mcmc.num_steps if mcmc.loss == "each" or mcmc.backprop_through == "all" else 1
    copies = KEPT * with_loss + ALIVE
    total = copy * copies
    words = f"{rows} rows x {config.data.block} tokens x {vocab:,} ids x 4 bytes = {copy / GB:.2f} GB a copy, {copies} copies"
    if mcmc.replay_buffer:
        buffer = mcmc.replay_buffer * config.data.block * vocab * 4
        total += BUFFERS * buffer
        words += f"; replay of {mcmc.replay_buffer}: {buffer / GB:.2f} GB, {BUFFERS} times in a step"
    return total, f"{total / GB:.2f} GB ({words})"


def require_memory(config: Config, vocab: int, device: torch.device) -> str:
    """The arithmetic as text; an error where the device could not hold the logits even with nothing else in its memory."""
    total, words = logits_memory(config, vocab)
    room = device_memory(device)
    if total > room:
        raise UserError(
            f"the logits of predictions do not fit: {words}, and the {device.type} has {room / GB:.1f} GB\n"
            "use a smaller batch or more accum, a shorter data.block, a smaller data.vocab, or less model.mcmc.replay_buffer"
        )
    return words


def device_memory(device: torch.device) -> float:
    """The total memory of a device in bytes; infinite where it is unknown."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[1])
    info = Path("/proc/meminfo")
    if device.type != "cpu" or not info.exists():
        return float("inf")
    (line,) = (line for line in info.read_text().splitlines() if line.startswith("MemTotal"))
    return float(line.split()[1]) * 1024
