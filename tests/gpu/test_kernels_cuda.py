"""The kernels on the device they are for: the same checks as by the interpreter, compiled, captured, and where they are used."""

import itertools

import pytest
import torch
from kernel_checks import (
    DTYPES,
    GATED,
    LENGTHS,
    SHAPES,
    WIDTHS,
    check_compiled,
    check_gated_all,
    check_gated_compiled,
    check_loss,
    check_narrow_all,
    check_narrow_compiled,
    check_narrow_faults,
    check_norms_cancel,
    check_rotate,
    softmax_attention,
)

from seedbed.nn import modulate
from seedbed.nn.attention_choice import NAMED
from seedbed.nn.cuda_ops import NARROW_DTYPES as NARROW
from seedbed.nn.cuda_ops import narrow_attention
from seedbed.nn.layers import Attention, attention_scope, choose_attention, rope_table


def captured(step):
    """What a step gives by itself, and what it gives when it is replayed as a graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        wanted = step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    for tensor in got:
        tensor.zero_()
    graph.replay()
    return wanted, got


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (8, 1024, 12, 12, 64), (3, 129, 6, 2, 128)], ids=str)
def test_norm_and_rotate(shape, dtype):
    check_rotate("cuda", shape, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("widths", [*WIDTHS, (50257, 50304), (70000, 70016)], ids=str)
def test_loss_and_gradient_in_place(widths, dtype):
    check_loss("cuda", *widths, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_pass_no_gradient_along_their_input(dtype):
    check_norms_cancel("cuda", dtype)


@pytest.mark.parametrize("kv_heads", [0, 2])
@pytest.mark.parametrize("values_x0", [False, True])
def test_attention_compiles_around_the_kernel(kv_heads, values_x0):
    check_compiled("cuda", "inductor", kv_heads, values_x0)


def test_attention_uses_the_kernel_and_can_be_captured():
    torch.manual_seed(0)
    module = Attention(256, 4).to("cuda", torch.bfloat16)
    x = torch.randn(2, 64, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    rope = rope_table(torch.arange(64, device="cuda"), 64, 1e4)

    def step():
        return torch.autograd.grad(module(x, rope).float().square().sum(), (x,))

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as seen:
        step()
        torch.cuda.synchronize()
    names = " ".join(event.key for event in seen.key_averages())
    assert "_rotate" in names and "_rotate_backward" in names
    wanted, got = captured(step)
    torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("head_dim", [16, 32])
@pytest.mark.parametrize("length", [*LENGTHS, 1000, 2050])
def test_narrow_attention(length, head_dim, dtype):
    check_narrow_all("cuda", length, head_dim, dtype)


def test_narrow_attention_in_float32():
    """Nobody is given it: it shows that what is off in 16 bits is their rounding. Its products take long to compile."""
    check_narrow_all("cuda", 130, 16, torch.float32)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("head_dim", [16, 32])
def test_narrow_attention_is_held_to_limits_that_tell_wrong_roundings(head_dim, dtype):
    check_narrow_faults("cuda", head_dim, dtype)


def test_narrow_attention_over_many_tokens():
    """The shape of flow/seed-256, one of its heads against float64."""
    if torch.cuda.get_device_properties(0).total_memory < 40 << 30:
        pytest.skip("the plain way to it needs some 20 GB")
    torch.manual_seed(0)
    q, k, v, dy = torch.randn(4, 1, 16_386, 16, 16, device="cuda").to(torch.bfloat16).unbind()
    inputs = tuple(x.requires_grad_() for x in (q, k, v))
    y, *_ = narrow_attention(*inputs, 0.36)
    got = (y, *torch.autograd.grad(y, inputs, dy))
    one = [x[:, :, 5:6].detach() for x in (*inputs, dy)]
    for a, b in zip(got, softmax_attention(*one, 0.36), strict=True):
        assert (a[:, :, 5:6].double() - b).norm() <= 1e-2 * b.norm()


def test_attention_compiles_around_narrow_attention():
    check_narrow_compiled("cuda", "inductor", torch.bfloat16)


def test_narrow_attention_can_be_named_and_captured():
    kernels = choose_attention((2, 4, 130, 16), torch.bfloat16, torch.device("cuda"), causal=False, only="narrow")
    assert kernels == (NAMED["narrow"],)
    torch.manual_seed(0)
    module = Attention(64, 4, causal=False).to("cuda", torch.bfloat16)
    x = torch.randn(2, 130, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step():
        with attention_scope(kernels):
            return torch.autograd.grad(module(x).float().square().sum(), (x,))

    wanted, got = captured(step)
    torch.testing.assert_close(got, wanted, rtol=0.0, atol=0.0)  # two passes backward, each in a fixed order


LARGE = [(64, 256, 384), (2, 5000, 768), (3, 129, 1152), (2, 77, 2048)]  # as models have them: in bfloat16, the widest in all
CASES = [case for case in itertools.product([*GATED, *LARGE], DTYPES) if case[1] == torch.bfloat16 or case[0] not in LARGE[:-1]]


@pytest.mark.parametrize(("shape", "dtype"), CASES, ids=str)
def test_gated_addition_and_norm(shape, dtype):
    check_gated_all("cuda", shape, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_flow_compiles_around_the_gated_norm(dtype):
    check_gated_compiled("cuda", "inductor", dtype)


def test_gated_norm_equals_compiled_plain_code():
    """In bfloat16 at the shape of flow/s2-32: both round, so both are held to float64."""
    torch.manual_seed(0)
    x, branch, dx, dy = torch.randn(4, 32, 256, 384, device="cuda").bfloat16().unbind()
    vectors = torch.randn(32, 74, 384, device="cuda").bfloat16()[:, 5:8]
    given = [t.detach().requires_grad_() for t in (x, branch, vectors)]

    def plain(x, branch, vectors):
        gate, shift, scale = vectors.split(1, dim=1)
        x = torch.addcmul(x, gate, branch)
        return x, modulate.modulated_norm(x, shift, scale)

    def run(call, given, grads):
        out = call(*given)
        return [t.detach().double() for t in (*out, *torch.autograd.grad(out, given, grads))]

    double = [t.detach().double().requires_grad_() for t in given]
    wanted = run(plain, double, (dx.double(), dy.double()))
    theirs = run(torch.compile(plain, fullgraph=True, dynamic=False), given, (dx, dy))
    for a, b, c in zip(run(modulate.gate_and_norm, given, (dx, dy)), theirs, wanted, strict=True):
        assert (a - c).norm() <= 2 * (b - c).norm() + 1e-4 * c.norm()


def test_gated_norm_can_be_captured():
    torch.manual_seed(0)
    x, branch = (torch.randn(8, 100, 384, device="cuda").bfloat16().requires_grad_() for _ in range(2))
    vectors = torch.randn(8, 5, 384, device="cuda").bfloat16().requires_grad_()

    def step():
        total, y = modulate.gate_and_norm(x, branch, vectors[:, 1:4])
        return torch.autograd.grad((total + y).float().square().sum(), (x, branch, vectors))

    for b, a in zip(*captured(step), strict=True):
        torch.testing.assert_close(a, b, rtol=0.0, atol=0.0)  # sums in a fixed order
