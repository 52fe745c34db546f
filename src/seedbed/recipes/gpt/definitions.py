"""The model of gpt written a second time: how its layers are joined. B batch, T time, C width, V vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from seedbed.recipes.gpt.model import Head, Transformer

if TYPE_CHECKING:
    from seedbed.recipes.gpt.system import GPT


@torch.no_grad()
def model(system: GPT) -> Iterator[tuple]:
    """Every block adds its attention and its feed-forward to the stream; late blocks also add the input of an early one."""
    net, config = system.model, system.config.model
    if config.positions not in ("rope", "learned", "none"):
        return  # an encoding of somebody's own
    tokens_BT = torch.arange(2 * net.block).view(2, -1) * 7 % net.vocab
    x_BTC, half, early = net.embed(tokens_BT), config.width // config.heads // 2, []
    angle_T1D = torch.arange(net.block)[:, None, None] * config.rope_base ** (-torch.arange(half) / half)
    if config.positions == "learned":
        x_BTC = x_BTC + next(net.positions.parameters())[: net.block]  # type: ignore[union-attr]
    else:
        x_BTC = F.rms_norm(x_BTC, x_BTC.shape[2:], eps=1e-7)
    rope, start_BTC = (angle_T1D.cos(), angle_T1D.sin()) if config.positions == "rope" else None, x_BTC
    for number, block in enumerate(net.blocks):
        if config.skips and number >= config.depth - config.depth // 2:
            x_BTC = x_BTC + block.skip_weight * early.pop()  # type: ignore[operator]
        early.append(x_BTC) if number < config.depth // 2 else None
        x_BTC = x_BTC + block.attention(block.norm1(x_BTC), rope, start_BTC)
        x_BTC = x_BTC + block.mlp(block.norm2(x_BTC))
    logits_BTV = net.head.norm(x_BTC) @ net.head_weight[: net.vocab].T
    if config.softcap:
        logits_BTV = config.softcap * (logits_BTV / config.softcap).tanh()
    yield "logits", (Transformer.hidden, F.linear), net.logits(tokens_BT), logits_BTV
    wanted = F.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT.flatten())
    yield "loss of the logits", (Head.forward,), net(tokens_BT, tokens_BT), wanted
