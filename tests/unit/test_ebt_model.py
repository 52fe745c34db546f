"""The energy model: two streams against one long masked one, slopes against differences, and what depends on what.

Shape suffixes: B batch, T time, V vocabulary.
"""

import math

import pytest
import torch
from ebt_samples import BLOCK, batch_of, make, make_plain
from torch import Tensor

from seedbed.recipes.ebt.model import EnergyModel
from seedbed.recipes.ebt.objective import step_sizes, walk_to_loss
from seedbed.recipes.ebt.walk import STARTS, Apart, along_logits, first_candidates, take_step
from seedbed.train.optim import param_groups

KINDS = {
    "pred": [],
    "prefix": ["model.step_embed=prefix"],
    "none": ["model.step_embed=none", "model.walk.landscapes=1"],
}


def opened(*settings: str, dtype: torch.dtype = torch.float64) -> tuple[EnergyModel, Tensor, Tensor]:
    """A model far from its birth, tokens, and logits of candidates."""
    system = make(*settings)
    model = system.model.to(dtype)
    with torch.no_grad():
        for index, param in enumerate(model.parameters()):
            param += 0.2 * torch.randn(param.shape, dtype=dtype, generator=torch.Generator().manual_seed(index))
    z_BTV = torch.randn(3, BLOCK, model.vocab, dtype=dtype, generator=torch.Generator().manual_seed(99))
    return model, batch_of(system, 3)["tokens"][:, :-1], z_BTV


def one_long_stream(model: EnergyModel, tokens_BT: Tensor, p_BTV: Tensor, landscape: int) -> Tensor:
    """The energies by plain attention over real tokens and candidates side by side, under one mask."""
    more, size = model.num_prefix, tokens_BT.shape[1]
    x = model.enter(p_BTV)
    if model.landscape is not None and not more:
        x = x + model.landscape.weight[landscape]
    x = torch.cat((model.enter_tokens(tokens_BT, landscape), x), 1)
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
def test_two_streams_are_one_long_masked_one(kind: str):
    model, tokens_BT, z_BTV = opened(*KINDS[kind])
    p_BTV = z_BTV.softmax(-1)
    for landscape, memory in enumerate(model.read(tokens_BT)):
        expected = one_long_stream(model, tokens_BT, p_BTV, landscape)
        assert expected.std() > 0.1, "energies that are all alike would hide a difference"
        torch.testing.assert_close(model.energy(p_BTV, memory, landscape), expected, rtol=0, atol=1e-9)


def test_landscapes_differ():
    for kind in ("pred", "prefix"):
        model, tokens_BT, z_BTV = opened(*KINDS[kind])
        first, second = (model.energy(z_BTV.softmax(-1), m, n) for n, m in enumerate(model.read(tokens_BT)))
        assert not torch.allclose(first, second)


def test_the_real_stream_is_read_once_and_does_not_know_of_candidates():
    model, tokens_BT, z_BTV = opened(dtype=torch.float32)
    memories = model.read(tokens_BT)
    assert memories[0] is memories[1]
    before = [t.clone() for t in (*memories[0].keys, *memories[0].values)]
    model(z_BTV, memories[0], 0)
    model(z_BTV.flip(0) * 3, memories[0], 1)
    again = model.read(tokens_BT)[0]
    assert all(torch.equal(a, b) for a, b in zip(before, (*again.keys, *again.values), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, (*memories[0].keys, *memories[0].values), strict=True))


def test_an_energy_depends_on_its_own_candidate_and_on_what_came_before():
    model, tokens_BT, z_BTV = opened()
    place = 5
    p_BTV = z_BTV.softmax(-1).requires_grad_()
    (slope,) = torch.autograd.grad(model.energy(p_BTV, model.read(tokens_BT)[0], 0)[:, place].sum(), p_BTV)
    assert slope[:, place].abs().sum() > 0
    slope[:, place] = 0
    assert torch.equal(slope, torch.zeros_like(slope))
    changed = tokens_BT.clone()
    changed[:, place + 1] = (changed[:, place + 1] + 1) % model.vocab
    one, two = (model(z_BTV, model.read(t)[0], 0)[2] for t in (tokens_BT, changed))
    assert torch.equal(one[:, : place + 1], two[:, : place + 1])
    assert (one[:, place + 1] != two[:, place + 1]).all()


def test_the_slope_is_that_of_the_energy():
    model, tokens_BT, z_BTV = opened()
    memory = model.read(tokens_BT)[0]
    p_BTV, slope_BTV, energy_BT = model(z_BTV, memory, 0)
    direction = torch.randn(p_BTV.shape, dtype=p_BTV.dtype, generator=torch.Generator().manual_seed(7))
    up, down = (model.energy(p_BTV + s * 1e-5 * direction, memory, 0) for s in (1, -1))
    torch.testing.assert_close((slope_BTV * direction).sum(-1), (up - down) / 2e-5, rtol=1e-6, atol=1e-8)
    assert torch.equal(energy_BT, model.energy(p_BTV, memory, 0))


def test_the_slope_along_logits_is_that_of_the_softmax():
    model, tokens_BT, z_BTV = opened()
    memory = model.read(tokens_BT)[0]
    p_BTV, slope_BTV, _ = model(z_BTV, memory, 0)
    z_BTV = z_BTV.requires_grad_()
    (expected,) = torch.autograd.grad(model.energy(z_BTV.softmax(-1), memory, 0).sum(), z_BTV)
    torch.testing.assert_close(along_logits(p_BTV, slope_BTV), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "settings",
    [
        ["model.walk.steps=2"],
        ["model.walk.steps=2", "model.walk.through=all", "model.walk.loss=last"],
        ["model.walk.steps=3", "model.walk.loss=last", "model.walk.space=logit"],
        ["model.walk.steps=2", "model.step_embed=prefix", "model.walk.space=mirror"],
    ],
    ids=" ".join,
)
def test_gradients_through_the_walk_equal_finite_differences(settings: list[str]):
    """Of the loss that is differentiated: where walks are detached, what a step starts from is held fixed."""
    system = make("data.block=12", *settings)
    model = system.double().model
    batch, walk = batch_of(system, 2), system.walk
    tokens_BT, targets_BT = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    place_BT = system.places(batch["index"])
    start_BTV = first_candidates(system.draw, walk, place_BT, STARTS, torch.float64)
    alpha = torch.tensor(3.0, dtype=torch.float64)
    chosen = {"config": walk, "alpha": alpha, "num_steps": walk.steps, "draw": system.draw}
    outcome = walk_to_loss(model, model.read(tokens_BT), start_BTV, targets_BT, place_BT, **chosen)
    params = list(model.parameters())
    grads = torch.autograd.grad(outcome.loss, params, allow_unused=True)
    with torch.no_grad():
        z_BTV, fixed = start_BTV, []
        for number in range(walk.steps):
            fixed.append(z_BTV)
            z_BTV = take_step(model, model.read(tokens_BT), z_BTV, number, alpha, walk.space).z_BTV

    def loss() -> Tensor:
        memories, z_BTV, nats = model.read(tokens_BT), start_BTV, []
        for number in range(walk.steps):
            z_BTV = z_BTV if walk.through == "all" else fixed[number]
            z_BTV = take_step(model, memories, z_BTV, number, alpha, walk.space).z_BTV
            nats.append(torch.nn.functional.cross_entropy(z_BTV.flatten(0, 1), targets_BT.flatten()))
        return torch.stack(nats).mean() if walk.loss == "each" else nats[-1]

    with torch.no_grad():
        assert torch.equal(loss(), outcome.loss)
        for seed in range(2):
            dice = torch.Generator().manual_seed(seed)
            directions = [torch.randn(p.shape, dtype=p.dtype, generator=dice) for p in params]
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


def test_steps_without_loss_leave_no_trace_in_the_gradient():
    """Truncated: the gradient is that of the last step alone, from where the others led."""
    system = make("model.walk.loss=last", "model.walk.steps=3", "model.walk.landscapes=3")
    batch = batch_of(system)
    tokens_BT, targets_BT, place_BT = batch["tokens"][:, :-1], batch["tokens"][:, 1:], system.places(batch["index"])
    start_BTV = first_candidates(system.draw, system.walk, place_BT, STARTS, torch.float32)
    chosen = {"config": system.walk, "alpha": torch.tensor(5.0), "num_steps": 3, "draw": system.draw}
    outcome = walk_to_loss(system.model, system.model.read(tokens_BT), start_BTV, targets_BT, place_BT, **chosen)
    outcome.loss.backward()
    assert system.model.landscape is not None and system.model.landscape.weight.grad is not None
    moved = system.model.landscape.weight.grad.abs().sum(-1)
    assert moved[0] == 0 and moved[1] == 0 and moved[2] > 0


def test_both_forms_of_the_slope_agree():
    model, tokens_BT, z_BTV = opened()
    grads = []
    for mode in (True, False):
        p_BTV, slope_BTV, energy_BT = model.train(mode)(z_BTV, model.read(tokens_BT)[0], 1)
        loss = (p_BTV - 5.0 * slope_BTV).logsumexp(-1).sum() + energy_BT.sum()
        grads.append([slope_BTV.detach(), *torch.autograd.grad(loss, [p for p in model.parameters() if p.ndim == 2][:8])])
    for one, two in zip(*grads, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_gradient_function_compiles_as_one_graph_and_is_differentiated_again(dtype: torch.dtype):
    model, tokens_BT, z_BTV = opened(dtype=torch.float32)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
    grads = []
    for call in (model, compiled):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            p_BTV, slope_BTV, energy_BT = call(z_BTV, model.read(tokens_BT)[0], 1)
        assert {t.dtype for t in (p_BTV, slope_BTV, energy_BT)} == {torch.float32}
        (p_BTV - 5.0 * slope_BTV).logsumexp(-1).sum().backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        model.zero_grad()
    torch.compiler.reset()
    assert len(grads[0]) == len(grads[1]) > 10
    limit = 1e-4 if dtype == torch.float32 else 0.1
    for one, two in zip(*grads, strict=True):
        torch.testing.assert_close(one, two, rtol=limit, atol=limit * float(one.abs().max()))


def test_equal_size():
    system, plain = make(), make_plain()
    width, num = system.model.width, system.walk.landscapes
    assert system.model.num_parameters() - plain.model.num_parameters() == width * (1 + num)


def test_alpha_has_its_own_rate_and_no_say_in_the_norm():
    system = make()
    groups = {name: group for group in param_groups(system, system.config.optim) for name in group.params}
    assert groups["log_alpha"].lr == pytest.approx(3 * groups["model.enter.weight"].lr)
    assert groups["log_alpha"].weight_decay == 0 and groups["model.embed.weight"].weight_decay == 0
    assert groups["model.enter.weight"].weight_decay > 0
    replica = make("model.decay_all=true")
    assert {g.weight_decay for g in param_groups(replica, replica.config.optim) if "log_alpha" not in g.params} == {0.01}
    x = torch.tensor(2.0, requires_grad=True)
    (1e6 * Apart.apply(x)).backward()
    assert x.grad == pytest.approx(Apart.SHARE)


@torch.no_grad()
def test_the_first_step_of_a_calibrated_model_moves_logits_by_one():
    batches = {}
    for init in ("calibrated", "xavier"):
        system = make(f"model.head_init={init}")
        batch = batch_of(system)
        z_BTV = first_candidates(system.draw, system.walk, system.places(batch["index"]), STARTS, torch.float32)
        step = take_step(system.model, system.model.read(batch["tokens"][:, :-1]), z_BTV, 0, 5.0, "prob")
        batches[init] = float((5.0 * step.slope_BTV).std())
    assert batches["calibrated"] == pytest.approx(1.0, abs=0.2) and batches["xavier"] > 2.0


def test_step_sizes_fill_their_range_and_follow_from_counters():
    system = make("model.walk.spread=2")
    place = torch.arange(2000).view(2, -1)
    sizes = step_sizes(system.walk, torch.tensor(4.0), 1, place)
    assert sizes.shape == (2, 1000, 1) and 2.0 <= float(sizes.min()) < 2.1 and 7.9 < float(sizes.max()) <= 8.0
    assert float(sizes.mean()) == pytest.approx(5.0, abs=0.15)
    assert torch.equal(sizes[1:], step_sizes(system.walk, torch.tensor(4.0), 1, place[1:]))
