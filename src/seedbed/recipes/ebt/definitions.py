"""Parts of ebt written a second time. B rows, T time, V vocabulary, K numbers of steps, P positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from seedbed.recipes.ebt import evaluate, generate, objective, optimize
from seedbed.train.engine import EvalEngine

if TYPE_CHECKING:
    from seedbed.recipes.ebt.system import EnergySystem

NUM, STEPS = 4096, (1, 2, 4)


def of(system: EnergySystem) -> dict[str, Callable[[], Iterator[tuple]]]:
    parts = {"objective": loss, "model": model, "data": data, "evaluation": metrics, "inference": samples}
    return {place: lambda part=part: part(system) for place, part in parts.items()}


def loss(system: EnergySystem) -> Iterator[tuple]:
    """One step of gradient descent, in probabilities and in logits, and what training draws at random."""
    rng = torch.Generator().manual_seed(1)
    z, grad = (torch.randn(2, 3, 5, generator=rng, dtype=torch.float64) for _ in range(2))
    with torch.enable_grad():
        free = z.clone().requires_grad_()
        (slope,) = torch.autograd.grad((free.softmax(-1) * grad).sum(), free)
    yield "gradient with respect to logits", optimize.logit_gradient, optimize.logit_gradient(z.softmax(-1), grad), slope
    seen, contexts = list[int](), {num: list[Any](range(num)) for num in (1, 3)}

    def energy(z: Tensor, context: Any, landscape: int) -> tuple[Tensor, ...]:
        seen.append(10 * context + landscape)
        return z.softmax(-1), grad, z.sum(-1)

    model: Any = energy
    for space, wanted in {"logit": z - 0.3 * slope, "prob": z.softmax(-1) - 0.3 * grad, "mirror": z - 0.3 * grad}.items():
        step = optimize.optimize_step(model, contexts[1], z, 0, 0.3, space)
        yield f"step in the space {space}", optimize.optimize_step, step.z_BTV, wanted
    seen.clear()
    ends = [step.z_BTV for step in optimize.optimize(model, contexts[3], z, 5, 0.5, "mirror")]
    yield "contexts and landscapes of the steps", (optimize.optimize_step, optimize.optimize), seen, [0, 11, 22, 22, 22]
    yield "prediction after all steps", optimize.optimize, ends[-1], z - 2.5 * grad
    ratio, counter_BT = max(system.mcmc.random_alpha, 2.0), torch.arange(NUM)[:, None]
    sizes = objective.step_sizes(replace(system.mcmc, random_alpha=ratio), torch.tensor(3.0), 1, counter_BT) / 3.0
    found, wanted = [sizes.min(), sizes.mean(), sizes.max()], [1.0 / ratio, (1.0 / ratio + ratio) / 2, ratio]
    yield "smallest, mean and largest random step size", objective.step_sizes, found, wanted, 0.05
    with torch.enable_grad():
        size_N, pull_N = torch.zeros(4).requires_grad_(), torch.tensor([-3.0, -0.5, 0.5, 3.0])
        (found,) = torch.autograd.grad((optimize.SeparateClip.apply(size_N) * pull_N).sum(), size_N)
    clipped = optimize.SeparateClip.SCALE * pull_N.clamp(-1.0, 1.0)
    yield "gradient of a step size", optimize.SeparateClip.backward, found, clipped
    noisy = replace(system.mcmc, langevin_noise=0.7, backprop_through="all")
    moves = [objective.add_langevin_noise(torch.zeros(()), counter_BT, n, noisy, system.noise) for n in range(2)]
    found = [moves[0].std() / 0.7, 1.0 + (moves[0] * moves[1]).mean()]
    yield "spread of the Langevin noise, and what two steps share", objective.add_langevin_noise, found, [1.0, 1.0], 0.1


def model(system: EnergySystem) -> Iterator[tuple]:
    """A prediction stands one place after its last token."""
    from seedbed.recipes.ebt.model import EnergyModel

    context = system.model.encode_context(torch.arange(12).view(2, 6) % system.model.vocab)[0]
    positions_T, falls = torch.arange(6) + 1 + system.model.num_prefix, torch.arange(half := system.model.head_dim // 2) / half
    wanted = (positions_T[:, None, None] * system.config.model.rope_base**-falls).cos()
    yield "angles of predictions, one after their last token", EnergyModel.encode_context, context.rope[0], wanted


def data(system: EnergySystem) -> Iterator[tuple]:
    """Predictions that are replayed, each marked with the tokens that it was made for."""
    buffer = optimize.ReplayBuffer(8, 3, 5, 1, True)
    index_B, counter_BT = torch.arange(8), torch.arange(24).view(8, 3)
    tokens = torch.arange(8)[:, None].expand(8, 4)
    marks = lambda tokens_BL: tokens_BL[:, :3, None].expand(-1, -1, 5).float()  # noqa: E731
    first = buffer.sample(tokens, marks(tokens), counter_BT, index_B)
    buffer.store(first, marks(first.tokens_BL), index_B)
    again = buffer.sample(tokens + 50, marks(tokens + 50), counter_BT + 24, index_B + 8)
    code = (optimize.ReplayBuffer.sample, optimize.ReplayBuffer.store)
    yield "tokens of replayed predictions", code, again.tokens_BL[:, :3], again.z_BTV[..., 0].long()
    yield "rows of a batch that are replayed", code, (again.tokens_BL[:, 0] < 50).sum(), 4
    yield "counters that differ", code, len(again.counter_BT.unique()), again.counter_BT.numel()


def metrics(system: EnergySystem) -> Iterator[tuple]:
    """With an energy whose gradient is 1 for the first token, nats and energies after each step are known."""
    source = evaluate.held_out_part(system.data.valid, 3 * system.data.valid.block)
    vocab, alpha, model = system.model.vocab, float(system.alpha().detach()), type(system.model)
    slope = F.one_hot(torch.zeros((), dtype=torch.int64), vocab)
    mcmc = replace(system.mcmc, initial_condition="zeros", space="mirror")
    energy = lambda self, z, context, landscape: (z.softmax(-1), slope.expand_as(z).to(z), z.sum(-1))  # noqa: E731
    config = replace(system.config, model=replace(system.config.model, mcmc=mcmc))
    engine = EvalEngine(system, config, torch.device("cpu"))
    with patch.object(model, "forward", energy), patch.multiple(system, mcmc=mcmc, config=config), torch.no_grad():
        nats_NKP, energy_NKP = evaluate.measure(system, source, [*STEPS], 2)
        quick = evaluate.nats_by_steps(system, source, STEPS, engine)
    target_P = torch.tensor([int(n) for n in source.tokens[1:]])
    wanted = [F.cross_entropy(-k * alpha * slope.float().expand(len(target_P), -1), target_P) for k in STEPS]
    yield "energies after each number of steps", evaluate.measure, energy_NKP.mean((0, 2)), torch.tensor(STEPS) * -alpha
    yield "nats in the curves", evaluate.measure, nats_NKP.mean((0, 2)), torch.stack(wanted)
    yield "nats after each number of steps", evaluate.nats_by_steps, quick, torch.stack(wanted)
    nats_NKP = torch.rand(2, len({*evaluate.STEPS, mcmc.num_steps}), 5, generator=torch.Generator().manual_seed(3)).double()
    at = sorted({*evaluate.STEPS, mcmc.num_steps}).index(mcmc.num_steps)
    with patch.multiple(evaluate, measure=lambda *given: (nats_NKP, -nats_NKP), first_energy=lambda *given: 1.0):
        found = evaluate.curve(system, source, 2)
    one, other = nats_NKP[:, at]
    wanted = {"lowest energy": one.maximum(other), "at random": (one + other) / 2, "oracle": one.minimum(other)}
    wanted["average of all"] = -((-one).exp() / 2 + (-other).exp() / 2).log()
    for name, value in wanted.items():
        yield f"nats of two predictions, {name}", evaluate.curve, found["by_starts"][name], [one.mean(), value.mean()]
    found, wanted = [*found["nats"], found["gap"], found["rank_correlation"]], [*nats_NKP.mean((0, 2)), 1.0 + one.mean(), -1.0]
    yield "curves, gap and rank correlation", (evaluate.curve, evaluate.rank_correlation), found, wanted


def samples(system: EnergySystem) -> Iterator[tuple]:
    """Every prediction of every row and place has its own beginning."""
    if system.mcmc.initial_condition == "normal":
        decoder: Any = SimpleNamespace(history_BN=torch.zeros(2, 4))
        initial = generate.InitialPredictions(system, decoder, generate.OptimizeOptions(1), 5)
        found = torch.cat([initial.at(torch.full((2, 1), at), n) for at in (1, 2) for n in (0, 1, 2)])
        yield "initial predictions that differ", generate.InitialPredictions.at, len(found.flatten(0, 1).unique(dim=0)), 12
