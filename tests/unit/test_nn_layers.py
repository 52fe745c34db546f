"""Norms, rotary positions, feed-forward blocks, parameter declarations and initialisation."""

import functools
import math

import pytest
import torch
from torch import nn

from seedbed.nn.init import declare, kind_of, materialize, normal_, rows_of, settings_of
from seedbed.nn.layers import MLP, LayerNorm, RMSNorm, apply_rope, gelu, rms_norm, rope_table


def test_rms_norm_gives_unit_root_mean_square_whatever_the_scale():
    for scale in (1e-2, 1.0, 1e4):
        y = rms_norm(torch.randn(5, 7, 32) * scale)
        torch.testing.assert_close(y.square().mean(-1), torch.ones(5, 7), rtol=5e-3, atol=0)


def test_norms_compute_in_float32_and_return_the_stream_dtype():
    # A mean square of 1e6 over 512 numbers cannot be summed in bf16: its steps at 2e6 are 16384 wide.
    x = (1000 + torch.randn(4, 512)).bfloat16()
    for norm in (RMSNorm(), functools.partial(rms_norm, weight_D=torch.ones(512)), LayerNorm(512)):
        y = norm(x)
        assert y.dtype == torch.bfloat16
        torch.testing.assert_close(y.float(), norm(x.float()), rtol=8e-3, atol=8e-3)
        with torch.autocast("cpu", torch.bfloat16):
            assert norm(x).dtype == torch.bfloat16


def test_weighted_norm_uses_its_weight():
    x = torch.randn(3, 8)
    torch.testing.assert_close(rms_norm(x, torch.arange(8.0)), rms_norm(x) * torch.arange(8.0))
    assert list(RMSNorm().parameters()) == []


def test_norm_and_rope_can_be_differentiated_twice():
    x = torch.randn(2, 3, 2, 4, dtype=torch.float64, requires_grad=True)
    rope = rope_table(torch.arange(3), 4, 100.0)
    assert torch.autograd.gradgradcheck(lambda z: apply_rope(rms_norm(z), rope), x)


def test_rope_keeps_lengths_and_scores_depend_on_distance_only():
    q, k = torch.randn(2, 1, 1, 1, 16)
    turned = lambda x, p: apply_rope(x, rope_table(torch.tensor([p]), 16, 1e4))  # noqa: E731
    torch.testing.assert_close(turned(q, 37).norm(), q.norm())
    score = lambda i, j: (turned(q, i) * turned(k, j)).sum()  # noqa: E731
    torch.testing.assert_close(score(3, 1), score(103, 101), rtol=1e-4, atol=1e-5)
    assert abs(score(3, 1) - score(4, 1)) > 1e-3
    torch.testing.assert_close(turned(q, 0), q)


def test_rope_takes_positions_per_row_and_a_base():
    x = torch.randn(2, 3, 4, 8)
    positions = torch.tensor([[0, 1, 2], [7, 8, 9]])
    both = apply_rope(x, rope_table(positions, 8, 1e4))
    for row in range(2):
        torch.testing.assert_close(both[row], apply_rope(x[row : row + 1], rope_table(positions[row], 8, 1e4))[0])
    assert (both - apply_rope(x, rope_table(positions, 8, 1e3))).abs().max() > 1e-3
    with pytest.raises(AssertionError, match="even head width"):
        rope_table(positions, 7, 1e4)


def test_rope_rotates_each_pair_by_its_own_frequency():
    x = torch.zeros(1, 1, 1, 4)
    x[..., 1] = 1.0
    y = apply_rope(x, rope_table(torch.tensor([5]), 4, 100.0))[0, 0, 0]
    angle = 5 * 100.0**-0.5
    torch.testing.assert_close(y, torch.tensor([0.0, math.cos(angle), 0.0, math.sin(angle)]))


@pytest.mark.parametrize("kind", ["swiglu", "relu2", "gelu"])
def test_mlps_have_about_eight_width_squared_weights_and_keep_the_stream_dtype(kind):
    mlp = MLP(192, kind)
    assert sum(p.numel() for p in mlp.parameters()) == 8 * 192**2
    with torch.autocast("cpu", torch.bfloat16):
        assert mlp(torch.randn(2, 3, 192).bfloat16()).dtype == torch.bfloat16


def tanh_gelu(h):
    return 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))


def test_gelu_is_the_same_written_for_the_compiler(monkeypatch):
    x = torch.linspace(-30, 30, 2001, dtype=torch.float64).requires_grad_()
    found = []
    for compiling in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda compiling=compiling: compiling)
        y = gelu(x)
        found.append((y, *torch.autograd.grad(y.sum(), x)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found[0][0], tanh_gelu(x), rtol=1e-9, atol=1e-12)


def test_mlps_compute_what_they_are_called():
    x, act = torch.randn(5, 64), nn.functional
    for kind, reference in (("relu2", lambda h: act.relu(h) ** 2), ("gelu", tanh_gelu)):
        mlp = MLP(64, kind)
        torch.testing.assert_close(mlp(x), reference(x @ mlp.up.weight.T) @ mlp.down.weight.T)
    mlp = MLP(64, "swiglu")
    gate, value = mlp.up.weight.split(rows_of(mlp.up.weight))
    torch.testing.assert_close(mlp(x), (act.silu(x @ gate.T) * (x @ value.T)) @ mlp.down.weight.T)


def test_kinds_follow_the_module_unless_declared():
    linear, table, norm = nn.Linear(3, 4), nn.Embedding(5, 6), nn.LayerNorm(4)
    assert kind_of("a.weight", linear, linear.weight) == "matrix"
    assert kind_of("a.bias", linear, linear.bias) == "scalar"
    assert kind_of("weight", table, table.weight) == "embed"
    assert kind_of("n.weight", norm, norm.weight) == "scalar"
    conv = nn.Conv1d(2, 3, 1)
    assert kind_of("c.weight", conv, conv.weight) == "scalar"
    declare(linear.weight, "head", lr_scale=0.5, decay=False)
    assert kind_of("a.weight", linear, linear.weight) == "head"
    assert settings_of(linear.weight) == (0.5, False)
    assert settings_of(table.weight) == (1.0, None)


def test_wrong_declarations_are_refused():
    weight = nn.Linear(3, 4).weight
    with pytest.raises(AssertionError, match="not one of"):
        declare(weight, "bias")
    with pytest.raises(AssertionError, match="do not add up"):
        declare(weight, "matrix", rows=(3, 2))
    assert rows_of(weight) == (4,)
    assert rows_of(declare(weight, "matrix", rows=(3, 1))) == (3, 1)


def test_materialize_fills_with_nan_and_keeps_declarations():
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(3, 4), nn.Embedding(5, 6))
        declare(module[0].weight, "head", lr_scale=2.0)
        module[1].weight.requires_grad_(False)
    materialize(module)
    assert all(p.device.type == "cpu" and p.isnan().all() for p in module.parameters())
    assert kind_of("0.weight", module[0], module[0].weight) == "head"
    assert settings_of(module[0].weight) == (2.0, None)
    assert not module[1].weight.requires_grad
    with pytest.raises(AssertionError, match="buffers"):
        materialize(nn.BatchNorm1d(3))


def test_normal_fill_follows_its_generator_and_standard_deviation():
    a, b = (nn.Parameter(torch.empty(64, 64, dtype=d)) for d in (torch.float32, torch.bfloat16))
    normal_(a, 0.3, torch.Generator().manual_seed(1))
    normal_(b, 0.3, torch.Generator().manual_seed(1))
    assert abs(a.std().item() - 0.3) < 0.02
    torch.testing.assert_close(a.bfloat16(), b)
    normal_(a, 0.0, torch.Generator())
    assert not a.any()
