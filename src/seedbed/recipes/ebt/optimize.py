"""Optimisation of predictions on the energy: initial predictions, one step, and noise, all from counters.

And the replay buffer: contexts with partly optimised predictions, which later batches optimise further. Shape suffixes:
B rows of a batch, T time, V vocabulary, R entries of the buffer, h rows from the buffer, L tokens of a block.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from seedbed.errors import UserError
from seedbed.nn import rng
from seedbed.nn.init import declare
from seedbed.recipes.ebt.model import Context, EnergyModel
from seedbed.recipes.ebt.presets import MCMCConfig
from seedbed.train.alarm_tables import raised, read_alarms

if TYPE_CHECKING:
    from seedbed.nn.cuda_graph import GraphedCalls
    from seedbed.train.watch import Alarm

# Streams of random numbers. Noise has one per step; evaluation has one per sample of the initial prediction.
NUM_STEPS, INITIAL, STEP_SIZE, REPLAY, NOISE, EVALUATION, GENERATION = 1, 2, 3, 4, 1000, 100_000, 200_000
ALPHA_RATE = 3.0
ALARMS, MAX_DRIFT = read_alarms(Path(__file__).with_name("alarms.toml")), 10.0

# Added to the counters of replayed rows, so that their noise differs from that of any sample.
REPLAY_OFFSET = 1 << 60


class Step(NamedTuple):
    """One step: the new logits; and gradient and energy at the old ones."""

    z_BTV: Tensor
    grad_BTV: Tensor
    energy_BT: Tensor


class CounterNormal(nn.Module):
    """Normal numbers from (seed, counter, stream); a module, so that it can be compiled into one kernel."""

    def __init__(self, seed: int, vocab: int) -> None:
        super().__init__()
        self.seed, self.vocab = seed, vocab

    def forward(self, counter_BT: Tensor, stream: int) -> Tensor:
        return rng.normal(rng.keys(self.seed, counter_BT, stream), self.vocab)


def log_step_size(alpha: float, learned: bool) -> nn.Parameter | None:
    """The learned step size; none where it is fixed.

    Stored as a logarithm: it stays positive, and one learning rate changes it by the same factor at any size.
    """
    if not learned:
        return None
    return declare(nn.Parameter(torch.tensor(math.log(alpha))), "scalar", lr_scale=ALPHA_RATE, decay=False)


class SeparateClip(torch.autograd.Function):
    """The identity; its gradient is clipped alone and scaled down so that it does not count in the global norm.

    Adam is invariant to the scale. What is clipped is the mean over ranks, computed by `mean`.
    """

    SCALE = 1e-3

    @staticmethod
    def forward(ctx, x: Tensor, mean: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        ctx.mean = mean
        return x.clone()

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0] if ctx.mean is None else ctx.mean(grads[0])
        return grad.clamp(-1.0, 1.0) * SeparateClip.SCALE, None


def step_alarms(measured: dict[str, float], progress: float, first_alpha: float) -> "list[Alarm]":
    """The alarms of one logged step; the step size may drift from its first value by a factor."""
    return raised(ALARMS, measured, progress, mcmc_alpha_drift=(first_alpha / MAX_DRIFT, first_alpha * MAX_DRIFT))


def no_onnx_network(system: nn.Module) -> NoReturn:
    what = "an energy model cannot be exported to ONNX"
    raise UserError(f"{what}: its predictions follow the gradient of its energy, and ONNX has no gradients")


def optimize_step(
    model: EnergyModel, contexts: list[Context], z_BTV: Tensor, number: int, alpha: Tensor | float, space: str
) -> Step:
    """Gradient-descent step `number`, counted from 0."""
    landscape = landscape_of(contexts, number)
    p_BTV, grad_BTV, energy_BT = model(z_BTV, contexts[landscape], landscape)
    slope_BTV = logit_gradient(p_BTV, grad_BTV) if space == "logit" else grad_BTV
    return Step((p_BTV if space == "prob" else z_BTV) - alpha * slope_BTV, grad_BTV, energy_BT)


def landscape_of(contexts: list[Context], number: int) -> int:
    """Steps beyond the number of landscapes use the last one."""
    return min(number, len(contexts) - 1)


def logit_gradient(p_BTV: Tensor, grad_BTV: Tensor) -> Tensor:
    """The gradient with respect to logits, from that with respect to probabilities."""
    return p_BTV * (grad_BTV - (p_BTV * grad_BTV).sum(-1, keepdim=True))


def graphed_step(
    graphs: "GraphedCalls", model: EnergyModel, contexts: list[Context], z_BTV: Tensor, number: int, alpha: Any, space: str
) -> Step:
    """`optimize_step` for many steps on the same contexts, one CUDA graph for each landscape; valid until the next."""
    landscape = landscape_of(contexts, number)
    step = lambda z_BTV, alpha: optimize_step(model, contexts, z_BTV, landscape, alpha, space)  # noqa: E731
    return graphs(landscape, step, z_BTV, torch.as_tensor(alpha, dtype=z_BTV.dtype, device=z_BTV.device))


def optimize(
    model: EnergyModel,
    contexts: list[Context],
    z_BTV: Tensor,
    num_steps: int,
    alpha: Tensor | float,
    space: str,
    take: Callable[..., Step] = optimize_step,
) -> Iterator[Step]:
    """Steps without noise and without a graph of gradients, as evaluation and generation take them."""
    with torch.no_grad():
        for number in range(num_steps):
            step = take(model, contexts, z_BTV, number, alpha, space)
            z_BTV = step.z_BTV
            yield step


def initial_predictions(noise: CounterNormal, config: MCMCConfig, counter_BT: Tensor, stream: int, dtype: torch.dtype) -> Tensor:
    if config.initial_condition == "zeros":
        return torch.zeros(*counter_BT.shape, noise.vocab, dtype=dtype, device=counter_BT.device)
    return noise(counter_BT, stream).to(dtype)


class ReplayBatch(NamedTuple):
    """A batch with replayed rows after its own, and the buffer entries that those came from."""

    tokens_BL: Tensor
    z_BTV: Tensor
    counter_BT: Tensor
    slot_h: Tensor
    known_h: Tensor


class ReplayBuffer(nn.Module):
    """Adds half a batch from the buffer to each batch, chosen by counter, each row from its own part of the buffer."""

    tokens_RL: Tensor
    z_RTV: Tensor
    known_R: Tensor

    def __init__(self, size: int, block: int, vocab: int, seed: int, write_back: bool) -> None:
        super().__init__()
        self.seed, self.write_back = seed, write_back
        self.register_buffer("tokens_RL", torch.zeros(size, block + 1, dtype=torch.int64))
        self.register_buffer("z_RTV", torch.zeros(size, block, vocab))
        self.register_buffer("known_R", torch.zeros(size, dtype=torch.bool))

    def sample(self, tokens_BL: Tensor, z_BTV: Tensor, counter_BT: Tensor, index_B: Tensor) -> ReplayBatch:
        """A batch with replayed rows; while the buffer fills, some rows of the batch are repeated instead."""
        size, num = len(self.known_R), max(1, len(tokens_BL) // 2)
        edges = torch.arange(num + 1, device=index_B.device) * size // num
        drawn_h = rng.uniform(rng.keys(self.seed, index_B[:num], REPLAY), 1)[:, 0]
        # Parts of the buffer do not overlap, so no entry is written twice in one step.
        slot_h = edges[:-1] + (drawn_h * (edges[1:] - edges[:-1])).long()
        known_h = self.known_R[slot_h]
        tokens_hL = torch.where(known_h[:, None], self.tokens_RL[slot_h], tokens_BL[:num])
        z_hTV = torch.where(known_h[:, None, None], self.z_RTV[slot_h].to(z_BTV.dtype), z_BTV[:num])
        counters = torch.cat((counter_BT, counter_BT[:num] + REPLAY_OFFSET))
        return ReplayBatch(torch.cat((tokens_BL, tokens_hL)), torch.cat((z_BTV, z_hTV)), counters, slot_h, known_h)

    @torch.no_grad()
    def store(self, batch: ReplayBatch, end_BTV: Tensor, index_B: Tensor) -> None:
        """Store the final predictions of the batch's own rows over the oldest entries, and update the replayed ones."""
        num = len(index_B)
        if self.write_back:
            z_hTV = end_BTV[num:].to(self.z_RTV.dtype)
            self.z_RTV[batch.slot_h] = torch.where(batch.known_h[:, None, None], z_hTV, self.z_RTV[batch.slot_h])
        slot_B = index_B % len(self.known_R)
        self.tokens_RL[slot_B] = batch.tokens_BL[:num]
        self.z_RTV[slot_B] = end_BTV[:num].to(self.z_RTV.dtype)
        self.known_R.index_fill_(0, slot_B, True)  # [slot_B] = True would fetch its value from the host: no capture
