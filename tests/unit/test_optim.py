"""The optimizers against PyTorch's own, and the promise that a skipped step leaves no trace."""

import pytest
import torch
from torch import nn

from seedbed.config import Optim
from seedbed.errors import UserError
from seedbed.nn.init import declare
from seedbed.train.optim import Optimizer, orthogonalise, param_groups

ONE, GO, SKIP = torch.tensor(1.0), torch.tensor(0.0), torch.tensor(1.0)


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 12), nn.Linear(12, 6, bias=False), nn.LayerNorm(6), nn.Linear(6, 7))
    declare(net[4].weight, "head")
    return net


def give_gradients(net: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in net.parameters():
        p.grad = torch.randn(p.shape, generator=generator)


def step(net: nn.Module, optimizer: Optimizer, seed: int, skip: torch.Tensor = GO, rate: torch.Tensor = ONE) -> None:
    give_gradients(net, seed)
    optimizer.step(rate, ONE, skip)


def test_adamw_equals_torch() -> None:
    ours, theirs = model(), model()
    config = Optim(kind="adamw", lr=0.01, beta1=0.8, beta2=0.9, weight_decay=0.3, eps=1e-6)
    optimizer = Optimizer(param_groups(ours, config), config)
    decayed = [p for p in theirs.parameters() if p.ndim >= 2]
    plain = [p for p in theirs.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.3}, {"params": plain, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9), eps=1e-6, foreach=False)
    for seed in range(5):
        step(ours, optimizer, seed)
        give_gradients(theirs, seed)
        reference.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4)])
def test_muon_equals_torch(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    start = torch.randn(3, *shape)
    config = Optim(kind="muon", muon_lr=0.02, muon_weight_decay=0.1, momentum=0.9)
    net = nn.ModuleList(nn.Linear(shape[1], shape[0], bias=False) for _ in range(3))
    for layer, weight in zip(net, start, strict=True):
        layer.weight.data.copy_(weight)
    optimizer = Optimizer(param_groups(net, config), config)
    theirs = [nn.Parameter(w.clone()) for w in start]
    reference = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    for seed in range(4):
        step(net, optimizer, seed)
        generator = torch.Generator().manual_seed(seed)
        for p in theirs:
            p.grad = torch.randn(p.shape, generator=generator)
        reference.step()
    for layer, b in zip(net, theirs, strict=True):
        # torch orthogonalises in bfloat16, we in float32 on the CPU: the difference is its rounding.
        torch.testing.assert_close(layer.weight, b, rtol=0.02, atol=0.004)


def test_fused_matrices_are_orthogonalised_apart() -> None:
    """A stacked weight declared with `rows` moves as its parts would, each in a parameter of its own."""
    torch.manual_seed(0)
    whole = nn.Linear(6, 10, bias=False)
    declare(whole.weight, "matrix", rows=(6, 2, 2))
    parts = nn.ModuleList(nn.Linear(6, n, bias=False) for n in (6, 2, 2))
    for part, weight in zip(parts, whole.weight.detach().split((6, 2, 2)), strict=True):
        part.weight.data.copy_(weight)
    config = Optim(kind="muon")
    a, b = (Optimizer(param_groups(m, config), config) for m in (whole, parts))
    for seed in range(3):
        step(whole, a, seed)
        for part, grad in zip(parts, whole.weight.grad.split((6, 2, 2)), strict=True):
            part.weight.grad = grad.clone()
        b.step(ONE, ONE, GO)
    torch.testing.assert_close(whole.weight, torch.cat([p.weight for p in parts]), rtol=0, atol=1e-7)


def test_orthogonalise_flattens_the_singular_values() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 8, 32) * 100
    values = torch.linalg.svdvals(orthogonalise(x))
    assert values.min() > 0.6 and values.max() < 1.4
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    exact = u @ v
    assert (orthogonalise(x) * exact).sum() / exact.pow(2).sum() > 0.9


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_skipped_step_leaves_no_trace_even_with_nan(kind: str) -> None:
    config = Optim(kind=kind, lr=0.01)
    net, twin = model(), model()
    ours, other = (Optimizer(param_groups(m, config), config) for m in (net, twin))
    step(net, ours, 1)
    step(twin, other, 1)
    for p in net.parameters():
        p.grad = torch.full_like(p, float("nan"))
    ours.step(ONE, torch.tensor(float("nan")), SKIP)
    step(net, ours, 2)
    step(twin, other, 2)
    for (name, a), b in zip(net.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b), name
    for name, tensor in ours.tensors().items():
        assert torch.equal(tensor, other.tensors()[name]), name


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_skipped_first_step_is_harmless(kind: str) -> None:
    net = model()
    before = [p.detach().clone() for p in net.parameters()]
    config = Optim(kind=kind)
    optimizer = Optimizer(param_groups(net, config), config)
    step(net, optimizer, 0, skip=SKIP)
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    step(net, optimizer, 0)
    assert all(torch.isfinite(p).all() and not torch.equal(p, b) for p, b in zip(net.parameters(), before, strict=True))


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_divisor_divides_the_gradient_and_rate_scales_the_step(kind: str) -> None:
    config = Optim(kind=kind, lr=0.01, eps=0.1, weight_decay=0.0, muon_weight_decay=0.0)
    net, twin = model(), model()
    ours, other = (Optimizer(param_groups(m, config), config) for m in (net, twin))
    give_gradients(net, 3)
    ours.step(ONE, torch.tensor(4.0), GO)
    give_gradients(twin, 3)
    for p in twin.parameters():
        p.grad /= 4.0
    other.step(ONE, ONE, GO)
    for a, b in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)
    before = [p.detach().clone() for p in net.parameters()]
    step(net, ours, 4, rate=torch.tensor(0.0))
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


def test_param_groups_hold_every_parameter_once() -> None:
    net = model()
    groups = param_groups(net, Optim(kind="muon"), "net.")
    names = [n for g in groups for n in g.params]
    assert sorted(names) == sorted(f"net.{n}" for n, _ in net.named_parameters())
    kinds = {n: (g.name, g.weight_decay > 0) for g in groups for n in g.params}
    assert kinds["net.0.weight"] == ("adamw:embed", True)
    assert kinds["net.1.weight"] == ("muon:matrix", True)
    assert kinds["net.1.bias"] == ("adamw:scalar", False)
    assert kinds["net.3.weight"] == ("adamw:scalar", False)
    assert kinds["net.4.weight"] == ("adamw:head", True)


def test_frozen_and_shared_parameters() -> None:
    net = model()
    net[1].weight.requires_grad_(False)
    net[2].weight = nn.Parameter(net[2].weight.detach())
    net.append(net[2])
    names = [n for g in param_groups(net, Optim()) for n in g.params]
    assert "1.weight" not in names and names.count("2.weight") == 1 and "5.weight" not in names
    for p in net.parameters():
        p.requires_grad_(False)
    with pytest.raises(UserError, match="no trainable parameter"):
        param_groups(net, Optim())


def test_declared_rate_and_decay_are_used() -> None:
    net = nn.Linear(3, 3)
    declare(net.weight, "matrix", lr_scale=0.5, decay=False)
    groups = {n: g for g in param_groups(net, Optim(lr=0.1)) for n in g.params}
    assert groups["weight"].lr == pytest.approx(0.05) and groups["weight"].weight_decay == 0.0
    assert groups["bias"].lr == 0.1
