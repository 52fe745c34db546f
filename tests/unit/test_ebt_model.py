"""The energy model: two streams against one masked stream, gradients against finite differences, and dependencies.

Shape suffixes: B batch, T time, V vocabulary.
"""

import math

import pytest
import torch
from ebt_samples import BLOCK, STEP_TERMS, batch_of, make, make_plain
from helpers import assert_close_in_float
from torch import Tensor

from seedbed.recipes.ebt.model import EnergyModel
from seedbed.recipes.ebt.objective import optimize_to_loss, step_sizes
from seedbed.recipes.ebt.optimize import INITIAL, SeparateClip, initial_predictions, logit_gradient, optimize_step
from seedbed.train.optim import param_groups

KINDS = {
    "pred": [],
    "prefix": ["model.step_embed=prefix"],
    "none": ["model.step_embed=none", "model.mcmc.num_landscapes=1"],
}


def opened(*settings: str, dtype: torch.dtype = torch.float64) -> tuple[EnergyModel, Tensor, Tensor]:
    """A model away from its initialisation, tokens, and logits of predictions."""
    system = make(*settings)
    model = system.model.to(dtype)
    with torch.no_grad():
        for index, param in enumerate(model.parameters()):
            param += 0.2 * torch.randn(param.shape, dtype=dtype, generator=torch.Generator().manual_seed(index))
    z_BTV = torch.randn(3, BLOCK, model.vocab, dtype=dtype, generator=torch.Generator().manual_seed(99))
    return model, batch_of(system, 3)["tokens"][:, :-1], z_BTV


def one_long_stream(model: EnergyModel, tokens_BT: Tensor, p_BTV: Tensor, landscape: int) -> Tensor:
    """The energies by plain attention over real tokens and predictions side by side, under one mask."""
    more, size = model.num_prefix, tokens_BT.shape[1]
    x = model.enter(p_BTV)
    if model.landscape is not None and not more:
        x = x + model.landscape.weight[landscape]
    x = torch.cat((model.embed_tokens(tokens_BT, landscape), x), 1)
    num_real = size + more
    allowed = torch.zeros(num_real + size, num_real + size, dtype=torch.bool)
    for i in range(num_real):
        allowed[i, : i + 1] = True
    for i in range(size):
        allowed[num_real + i, : more + i + 1] = True
        allowed[num_real + i, num_real + i] = True
    rope = model.rope(torch.cat((torch.arange(num_real), more + 1 + torch.arange(size))))
    for block in model.blocks:
        q, k, v = block._project(block.norm1(x), rope)
        scores = (q @ k.mT / math.sqrt(model.head_dim)).masked_fill(~allowed, -math.inf)
        x = block._finish(x, scores.softmax(-1) @ v)
    return model.head(model.norm(x[:, num_real:]))[..., 0]


@pytest.mark.parametrize("kind", KINDS)
def test_two_stream_attention_equals_one_masked_stream(kind: str):
    model, tokens_BT, z_BTV = opened(*KINDS[kind])
    p_BTV = z_BTV.softmax(-1)
    for landscape, context in enumerate(model.encode_context(tokens_BT)):
        expected = one_long_stream(model, tokens_BT, p_BTV, landscape)
        assert expected.std() > 0.1, "energies that are all alike would hide a difference"
        torch.testing.assert_close(model.energy(p_BTV, context, landscape), expected, rtol=0, atol=1e-9)


def test_landscapes_differ():
    for kind in ("pred", "prefix"):
        model, tokens_BT, z_BTV = opened(*KINDS[kind])
        first, second = (model.energy(z_BTV.softmax(-1), m, n) for n, m in enumerate(model.encode_context(tokens_BT)))
        assert not torch.allclose(first, second)


def test_context_is_encoded_once_and_independent_of_predictions():
    model, tokens_BT, z_BTV = opened(dtype=torch.float32)
    contexts = model.encode_context(tokens_BT)
    assert contexts[0] is contexts[1]
    before = [t.clone() for t in (*contexts[0].keys, *contexts[0].values)]
    model(z_BTV, contexts[0], 0)
    model(z_BTV.flip(0) * 3, contexts[0], 1)
    again = model.encode_context(tokens_BT)[0]
    assert all(torch.equal(a, b) for a, b in zip(before, (*again.keys, *again.values), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, (*contexts[0].keys, *contexts[0].values), strict=True))


def test_energy_depends_on_its_own_prediction_and_context_only():
    model, tokens_BT, z_BTV = opened()
    position = 5
    p_BTV = z_BTV.softmax(-1).requires_grad_()
    (gradient,) = torch.autograd.grad(model.energy(p_BTV, model.encode_context(tokens_BT)[0], 0)[:, position].sum(), p_BTV)
    assert gradient[:, position].abs().sum() > 0
    gradient[:, position] = 0
    assert torch.equal(gradient, torch.zeros_like(gradient))
    changed = tokens_BT.clone()
    changed[:, position + 1] = (changed[:, position + 1] + 1) % model.vocab
    one, two = (model(z_BTV, model.encode_context(t)[0], 0)[2] for t in (tokens_BT, changed))
    assert torch.equal(one[:, : position + 1], two[:, : position + 1])
    assert (one[:, position + 1] != two[:, position + 1]).all()


def test_energy_gradient_equals_finite_differences():
    model, tokens_BT, z_BTV = opened()
    context = model.encode_context(tokens_BT)[0]
    p_BTV, grad_BTV, energy_BT = model(z_BTV, context, 0)
    direction = torch.randn(p_BTV.shape, dtype=p_BTV.dtype, generator=torch.Generator().manual_seed(7))
    up, down = (model.energy(p_BTV + s * 1e-5 * direction, context, 0) for s in (1, -1))
    torch.testing.assert_close((grad_BTV * direction).sum(-1), (up - down) / 2e-5, rtol=1e-6, atol=1e-8)
    assert torch.equal(energy_BT, model.energy(p_BTV, context, 0))


def test_logit_gradient_equals_that_of_the_softmax():
    model, tokens_BT, z_BTV = opened()
    context = model.encode_context(tokens_BT)[0]
    p_BTV, grad_BTV, _ = model(z_BTV, context, 0)
    z_BTV = z_BTV.requires_grad_()
    (expected,) = torch.autograd.grad(model.energy(z_BTV.softmax(-1), context, 0).sum(), z_BTV)
    torch.testing.assert_close(logit_gradient(p_BTV, grad_BTV), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "settings",
    [
        ["model.mcmc.num_steps=2"],
        ["model.mcmc.num_steps=2", "model.mcmc.backprop_through=all", "model.mcmc.loss=last"],
        ["model.mcmc.num_steps=3", "model.mcmc.loss=last", "model.mcmc.space=logit"],
        ["model.mcmc.num_steps=2", "model.step_embed=prefix", "model.mcmc.space=mirror"],
    ],
    ids=" ".join,
)
def test_optimisation_gradients_equal_finite_differences(settings: list[str]):
    """Of the loss that is differentiated: where steps are detached, the input of a step is held fixed."""
    system = make("data.block=12", *settings)
    model = system.double().model
    batch, mcmc = batch_of(system, 2), system.mcmc
    tokens_BT, targets_BT = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    counter_BT = system.counters(batch["index"])
    start_BTV = initial_predictions(system.noise, mcmc, counter_BT, INITIAL, torch.float64)
    alpha = torch.tensor(3.0, dtype=torch.float64)
    chosen = {"config": mcmc, "alpha": alpha, "num_steps": mcmc.num_steps, "noise": system.noise}
    outcome = optimize_to_loss(model, model.encode_context(tokens_BT), start_BTV, targets_BT, counter_BT, **chosen)
    params = list(model.parameters())
    grads = torch.autograd.grad(outcome.loss, params, allow_unused=True)
    with torch.no_grad():
        z_BTV, fixed = start_BTV, []
        for number in range(mcmc.num_steps):
            fixed.append(z_BTV)
            z_BTV = optimize_step(model, model.encode_context(tokens_BT), z_BTV, number, alpha, mcmc.space).z_BTV

    def loss() -> Tensor:
        contexts, z_BTV, nats = model.encode_context(tokens_BT), start_BTV, []
        for number in range(mcmc.num_steps):
            z_BTV = z_BTV if mcmc.backprop_through == "all" else fixed[number]
            z_BTV = optimize_step(model, contexts, z_BTV, number, alpha, mcmc.space).z_BTV
            nats.append(torch.nn.functional.cross_entropy(z_BTV.flatten(0, 1), targets_BT.flatten()))
        return torch.stack(nats).mean() if mcmc.loss == "each" else nats[-1]

    with torch.no_grad():
        assert_close_in_float(loss(), outcome.loss, mcmc.num_steps * STEP_TERMS)
        for seed in range(2):
            rng = torch.Generator().manual_seed(seed)
            directions = [torch.randn(p.shape, dtype=p.dtype, generator=rng) for p in params]
            expected = sum((g * d).sum() for g, d in zip(grads, directions, strict=True) if g is not None)
            values = []
            for sign in (1, -1):
                for p, d in zip(params, directions, strict=True):
                    p += sign * 1e-6 * d
                values.append(loss())
                for p, d in zip(params, directions, strict=True):
                    p -= sign * 1e-6 * d
            assert abs(float(expected)) > 1e-3
            torch.testing.assert_close((values[0] - values[1]) / 2e-6, expected, rtol=1e-5, atol=1e-8)


def test_truncated_gradient_is_that_of_the_last_step():
    """Truncated: the gradient is that of the last step alone, from where the others led."""
    system = make("model.mcmc.loss=last", "model.mcmc.num_steps=3", "model.mcmc.num_landscapes=3")
    batch = batch_of(system)
    tokens_BT, targets_BT, counter_BT = batch["tokens"][:, :-1], batch["tokens"][:, 1:], system.counters(batch["index"])
    start_BTV = initial_predictions(system.noise, system.mcmc, counter_BT, INITIAL, torch.float32)
    chosen = {"config": system.mcmc, "alpha": torch.tensor(5.0), "num_steps": 3, "noise": system.noise}
    outcome = optimize_to_loss(system.model, system.model.encode_context(tokens_BT), start_BTV, targets_BT, counter_BT, **chosen)
    outcome.loss.backward()
    assert system.model.landscape is not None and system.model.landscape.weight.grad is not None
    moved = system.model.landscape.weight.grad.abs().sum(-1)
    assert moved[0] == 0 and moved[1] == 0 and moved[2] > 0


def test_energy_gradient_eager_and_functional_agree():
    model, tokens_BT, z_BTV = opened()
    grads = []
    for mode in (True, False):
        p_BTV, grad_BTV, energy_BT = model.train(mode)(z_BTV, model.encode_context(tokens_BT)[0], 1)
        loss = (p_BTV - 5.0 * grad_BTV).logsumexp(-1).sum() + energy_BT.sum()
        grads.append([grad_BTV.detach(), *torch.autograd.grad(loss, [p for p in model.parameters() if p.ndim == 2][:8])])
    for one, two in zip(*grads, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_energy_gradient_compiles_as_one_graph_and_is_differentiable(dtype: torch.dtype):
    model, tokens_BT, z_BTV = opened(dtype=torch.float32)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
    grads = []
    for call in (model, compiled):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            p_BTV, grad_BTV, energy_BT = call(z_BTV, model.encode_context(tokens_BT)[0], 1)
        assert {t.dtype for t in (p_BTV, grad_BTV, energy_BT)} == {torch.float32}
        (p_BTV - 5.0 * grad_BTV).logsumexp(-1).sum().backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        model.zero_grad()
    torch.compiler.reset()
    assert len(grads[0]) == len(grads[1]) > 10
    limit = 1e-4 if dtype == torch.float32 else 0.1
    for one, two in zip(*grads, strict=True):
        torch.testing.assert_close(one, two, rtol=limit, atol=limit * float(one.abs().max()))


def test_energy_and_plain_model_have_equal_size():
    system, plain = make(), make_plain()
    width, num = system.model.width, system.mcmc.num_landscapes
    own, other = (sum(p.numel() for p in one.model.parameters()) for one in (system, plain))
    assert own - other == width * (1 + num)


def test_alpha_has_its_own_lr_and_is_clipped_alone():
    system = make()
    groups = {name: group for group in param_groups(system, system.config.optim) for name in group.params}
    assert groups["log_alpha"].lr == pytest.approx(3 * groups["model.enter.weight"].lr)
    assert groups["log_alpha"].weight_decay == 0 and groups["model.embed.weight"].weight_decay == 0
    assert groups["model.enter.weight"].weight_decay > 0
    replica = make("model.decay_all=true")
    assert {g.weight_decay for g in param_groups(replica, replica.config.optim) if "log_alpha" not in g.params} == {0.01}
    x = torch.tensor(2.0, requires_grad=True)
    (1e6 * SeparateClip.apply(x)).backward()
    assert x.grad == pytest.approx(SeparateClip.SCALE)


@torch.no_grad()
def test_calibrated_head_init_moves_logits_by_one():
    batches = {}
    for init in ("calibrated", "xavier"):
        system = make(f"model.head_init={init}")
        batch = batch_of(system)
        z_BTV = initial_predictions(system.noise, system.mcmc, system.counters(batch["index"]), INITIAL, torch.float32)
        step = optimize_step(system.model, system.model.encode_context(batch["tokens"][:, :-1]), z_BTV, 0, 5.0, "prob")
        batches[init] = float((5.0 * step.grad_BTV).std())
    assert batches["calibrated"] == pytest.approx(1.0, abs=0.2) and batches["xavier"] > 2.0


def test_step_sizes_fill_their_range_and_follow_from_counters():
    system = make("model.mcmc.random_alpha=2")
    counter = torch.arange(2000).view(2, -1)
    sizes = step_sizes(system.mcmc, torch.tensor(4.0), 1, counter)
    assert sizes.shape == (2, 1000, 1) and 2.0 <= float(sizes.min()) < 2.1 and 7.9 < float(sizes.max()) <= 8.0
    assert float(sizes.mean()) == pytest.approx(5.0, abs=0.15)
    assert torch.equal(sizes[1:], step_sizes(system.mcmc, torch.tensor(4.0), 1, counter[1:]))
