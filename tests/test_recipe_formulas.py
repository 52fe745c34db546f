"""Parts of recipes against plain second implementations that `seedbed check` leaves out: networks, attentions, sample scores."""

from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from seedbed.checks.definition_checks import SAME, compare
from seedbed.checks.subject import PERTURBATION, Subject, add_noise
from seedbed.recipes import find
from seedbed.recipes.ebt import model as ebt_model
from seedbed.recipes.flow import evaluate
from seedbed.recipes.thinker import model as thinker_model


def flow_network(system) -> Iterator[tuple]:
    """Blocks are joined by gates and modulated norms."""
    time_B, class_B, net = torch.tensor([0.1, 0.6, 0.9]), torch.tensor([0, 1, 0]), system.model
    x_BNK = torch.randn(3, net.num_patches, net.enter.in_features, generator=torch.Generator().manual_seed(5))
    tables, vectors = net.position_tables(), [*net.modulation(net.time(time_B) + net.classes(class_B))[:, :, None].unbind(1)]
    x_BND = net.enter(x_BNK) + (0.0 if tables.positions_ND is None else tables.positions_ND)

    def modulated(x_BND: Tensor) -> Tensor:
        shift, scale = vectors.pop(0), vectors.pop(0)
        return F.rms_norm(x_BND, x_BND.shape[2:], eps=1e-7) * (1.0 + scale) + shift

    y_BND = modulated(x_BND)
    for block in net.blocks:
        for layer in (lambda y, block=block: block.attention(y, tables.ropes[0]), block.mlp):
            x_BND = x_BND + vectors.pop(0) * layer(y_BND)
            y_BND = modulated(x_BND)
    yield "output of the network", net.tokens(x_BNK, time_B, class_B), net.leave(y_BND), SAME


def flow_scores(system) -> Iterator[tuple]:
    x, line = torch.randn(40, 3, generator=torch.Generator().manual_seed(6)).double(), torch.arange(8.0)[:, None]
    wanted = (2.0 * x + 1.0).mean(0).square().sum() + 4.0 * x.var(0).sum()
    yield "Fréchet distance of x and 3 x + 1", evaluate.frechet(x, 3.0 * x + 1.0), wanted, SAME
    ones = torch.ones(8, 3)
    yield "kernel distance of 1 and -1", evaluate.kernel_distance(ones, -ones)[0], 16.0, SAME
    found = evaluate.coverage(line, torch.cat((line[:4], line[:4] + 100.0)))
    shares = [found[name] for name in ("precision", "recall", "coverage")]
    yield "precision, recall and coverage", shares, [0.5, 7 / 8, 3 / 4], SAME
    x = torch.randn(8, *system.data.shape, generator=torch.Generator().manual_seed(7))
    yield "decibels between x and 10 x", evaluate.spectral_distance(x, 10.0 * x), 20.0, SAME


def thinker_attention(system) -> Iterator[tuple]:
    heads, width = system.model.cell[0].cross, system.config.model.width
    x_BQD, context_BCD = (torch.randn(2, num, width, generator=torch.Generator().manual_seed(num)) for num in (3, 5))
    bias_C, wanted = torch.tensor([0.0, -1.0, 2.0, 0.0, -1e9]), torch.zeros_like(x_BQD)
    parts = (heads.query.weight, *heads.pair.weight.chunk(2), heads.out.weight.T)
    for query, key, value, out in zip(*(part.chunk(heads.heads) for part in parts), strict=True):
        scores = x_BQD @ query.T @ (context_BCD @ key.T).mT / len(query) ** 0.5 + bias_C
        wanted += scores.softmax(-1) @ (context_BCD @ value.T) @ out
    yield "attention", heads(x_BQD, heads.keys_values(context_BCD), bias_C), wanted, SAME


def ebt_attention(system) -> Iterator[tuple]:
    """Every prediction attends to the tokens so far and to itself."""
    rng, num, width = torch.Generator().manual_seed(2), 4, 6
    q, k, v, real_k, real_v = (torch.randn(2, num, width, generator=rng) for _ in range(5))
    mask_TS, wanted = torch.full((num, num), -torch.inf).triu(1), torch.zeros_like(q)
    for t in range(num):
        keys, values = (torch.cat((real[:, : t + 1], own[:, t : t + 1]), 1) for real, own in ((real_k, k), (real_v, v)))
        share = (keys @ q[:, t, :, None] / width**0.5).softmax(1)
        wanted[:, t] = (share * values).sum(1)
    yield "attention of predictions", ebt_model.two_stream_attention(q, k, v, real_k, real_v, mask_TS), wanted, SAME


def ebt_slope(system) -> Iterator[tuple]:
    """The gradient that the model gives is that of its energy."""
    rng, vocab = torch.Generator().manual_seed(2), system.model.vocab
    context, z_BTV = system.model.encode_context(torch.arange(12).view(2, 6) % vocab)[0], torch.randn(2, 6, vocab, generator=rng)
    p_BTV, grad_BTV, _ = system.model(z_BTV, context, 0)
    turn_BTV = p_BTV * torch.randn(2, 6, vocab, generator=rng)
    ahead, behind = (system.model.energy(p_BTV + sign * 0.01 * turn_BTV, context, 0) for sign in (1.0, -1.0))
    yield "slope of the energy", (grad_BTV * turn_BTV).sum(-1), (ahead - behind) / 0.02, 0.05


FORMULAS: dict[Callable, str] = {
    flow_network: "flow", flow_scores: "flow", thinker_attention: "thinker", ebt_attention: "ebt", ebt_slope: "ebt",
}  # fmt: skip


@torch.no_grad()
def violated(formula: Callable) -> list[str]:
    """What is wrong, by name, on the demo with noise on its weights."""
    recipe, preset = find(f"{FORMULAS[formula]}/demo")
    system = Subject(recipe, preset, recipe.preset(preset), Path("nowhere")).fresh_system().eval()
    add_noise(system, PERTURBATION)
    return [what for what, found, wanted, limit in formula(system) if not compare(found, wanted)[0] <= limit]


@pytest.mark.parametrize("formula", FORMULAS, ids=lambda formula: formula.__name__)
def test_formula_holds(formula: Callable):
    assert violated(formula) == []


def test_formulas_can_fail():
    real = ebt_model.two_stream_attention
    with patch.object(ebt_model, "two_stream_attention", lambda q, *rest: real(1.2 * q, *rest)):
        assert violated(ebt_attention) == ["attention of predictions"]
    real = thinker_model.Attention.keys_values
    with patch.object(thinker_model.Attention, "keys_values", lambda self, x_BCD: real(self, 1.2 * x_BCD)):
        assert violated(thinker_attention) == ["attention"]
    distance = evaluate.frechet
    with patch.object(evaluate, "frechet", lambda a, b: 2.0 * distance(a, b)):
        assert violated(flow_scores) == ["Fréchet distance of x and 3 x + 1"]
