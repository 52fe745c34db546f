"""The kernels on the device they are for: the same checks as by the interpreter, compiled, captured, and where they are used."""

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from kernel_checks import DTYPES, SHAPES, WIDTHS, check_compiled, check_loss, check_turn  # noqa: E402

from seedbed.nn.attention import Attention  # noqa: E402
from seedbed.nn.rope import rope_table  # noqa: E402


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (8, 1024, 12, 12, 64), (3, 129, 6, 2, 128)], ids=str)
def test_norm_and_turn(shape, dtype):
    check_turn("cuda", shape, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("widths", [*WIDTHS, (50257, 50304), (70000, 70016)], ids=str)
def test_loss_and_gradient_in_place(widths, dtype):
    check_loss("cuda", *widths, dtype)


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
        return torch.autograd.grad(module(x, rope).float().square().sum(), x)[0]

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    names = " ".join(event.key for event in seen.key_averages())
    assert "_turn" in names and "_turn_back" in names
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        wanted = step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    got.zero_()
    graph.replay()
    torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-2)
