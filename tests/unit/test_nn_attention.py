"""Attention: causality, grouped keys, options that must matter, the cache, and the choice of kernels."""

import math

import pytest
import torch
from torch.nn.attention import SDPBackend

from seedbed.errors import UserError
from seedbed.nn import attention_choice, cuda_ops, layers
from seedbed.nn.decoding import Cache
from seedbed.nn.init import kind_of, rows_of
from seedbed.nn.layers import Attention, Own, attend, attention_scope, choose_attention, current_kernels, rms_norm, rope_table

WIDTH, HEADS, LENGTH = 32, 4, 9


def make(**options) -> Attention:
    torch.manual_seed(0)
    return Attention(WIDTH, HEADS, **options).eval()


def rope(positions=None):
    return rope_table(torch.arange(LENGTH) if positions is None else positions, WIDTH // HEADS, 1e4)


def test_causality_of_attention():
    module, x = make(), torch.randn(2, LENGTH, WIDTH)
    before = module(x, rope())
    for t in range(LENGTH):
        changed = x.clone()
        changed[:, t] += 1.0
        moved = (module(changed, rope()) - before).abs().amax((0, 2))
        assert (moved[:t] == 0).all() and (moved[t:] > 1e-6).all(), t


def test_attention_equals_the_formula():
    module, x = make(), torch.randn(2, LENGTH, WIDTH)
    q, k, v = (module.qkv(x).view(2, LENGTH, 3, HEADS, -1)[:, :, i].transpose(1, 2) for i in range(3))
    q, k = (rms_norm(z) * 1.2 for z in (q, k))
    scores = (q @ k.mT) / math.sqrt(WIDTH // HEADS)
    scores = scores.masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -math.inf)
    expected = module.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(module(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_keys_equal_repeated_heads(kv_heads):
    grouped, full = make(kv_heads=kv_heads), make()
    head = WIDTH // HEADS
    q, k, v = grouped.qkv.weight.data.split(rows_of(grouped.qkv.weight))
    k, v = (z.view(kv_heads, head, WIDTH).repeat_interleave(HEADS // kv_heads, 0).flatten(0, 1) for z in (k, v))
    full.qkv.weight.data = torch.cat((q, k, v))
    full.out.weight.data = grouped.out.weight.data
    x = torch.randn(2, LENGTH, WIDTH)
    torch.testing.assert_close(grouped(x, rope()), full(x, rope()), rtol=1e-5, atol=1e-6)


def test_attention_rows_of_a_batch_are_independent():
    module, x = make(gate=True, values_x0=True), torch.randn(3, LENGTH, WIDTH)
    together = module(x, rope(), x)
    for row in range(3):
        alone = module(x[row : row + 1], rope(), x[row : row + 1])
        torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-5, atol=1e-6)


def test_attention_depends_on_positions():
    module, x = make(), torch.randn(1, LENGTH, WIDTH)
    assert (module(x, rope()) - module(x)).abs().max() > 1e-3
    torch.testing.assert_close(module(x, rope()), module(x, rope(torch.arange(LENGTH) + 50)), rtol=1e-3, atol=1e-4)


def test_attention_options_have_an_effect():
    x = torch.randn(2, LENGTH, WIDTH)
    plain = make()(x, rope())
    assert (make(qk_norm=False)(x, rope()) - plain).abs().max() > 1e-3
    gated = make(gate=True)
    gated.init_weights(0.1, 0.1, torch.Generator().manual_seed(0))
    open_gate = gated(x, rope())
    with torch.no_grad():
        gated.gate.weight.fill_(-10.0)
    assert (gated(x, rope()) - open_gate).abs().max() > 1e-3
    values = make(values_x0=True)
    assert (values(x, rope(), x) - values(x, rope(), x * 2)).abs().max() > 1e-3


def test_attention_gate_is_open_at_initialisation():
    gated, plain = make(gate=True), make()
    for module in (gated, plain):
        module.init_weights(0.1, 0.1, torch.Generator().manual_seed(0))
    x = torch.randn(2, LENGTH, WIDTH)
    torch.testing.assert_close(gated(x, rope()), plain(x, rope()))
    assert kind_of("gate.weight", gated.gate, gated.gate.weight) == "scalar"


def test_attention_dropout_is_for_training_only():
    module, x = make(dropout=0.5), torch.randn(2, LENGTH, WIDTH)
    assert torch.equal(module(x), module(x))
    module.train()
    assert not torch.equal(module(x), module(x))


def test_autocast_keeps_the_stream_in_half_precision():
    module, x = make(gate=True, values_x0=True), torch.randn(2, LENGTH, WIDTH)
    exact = module(x, rope(), x)
    with torch.autocast("cpu", torch.bfloat16):
        half = module(x.bfloat16(), rope(), x.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), exact, rtol=0.1, atol=0.03)


def test_second_derivatives_exist_with_the_plain_kernel():
    module = make().double()
    x = torch.randn(1, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    with attention_scope([SDPBackend.MATH]):
        y = module(x, rope(torch.arange(3))).square().sum()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
    assert second.abs().max() > 0


@pytest.mark.parametrize("kv_heads", [0, 2])
@torch.no_grad()
def test_cache_decoding_equals_the_full_pass_for_ragged_rows(kv_heads):
    module, x = make(kv_heads=kv_heads), torch.randn(2, LENGTH, WIDTH)
    full = module(x, rope())
    cache = Cache(1, 2, kv_heads or HEADS, LENGTH, WIDTH // HEADS, dtype=torch.float32, device=torch.device("cpu"))
    lengths = torch.tensor([4, 2])
    prompt = x[:, :4].clone()
    prompt[1, 2:] = 1e3  # padding, which must leave no trace
    filled = module(prompt, rope(torch.arange(4)), cache=cache.prefill(torch.arange(2))[0])
    torch.testing.assert_close(filled[0], full[0, :4], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(filled[1, :2], full[1, :2], rtol=1e-5, atol=1e-6)
    cache.length_B.copy_(lengths)
    for _ in range(5):
        at = cache.length_B
        step = module(x[torch.arange(2), at][:, None], rope(at[:, None]), cache=cache.decode()[0])
        torch.testing.assert_close(step[:, 0], full[torch.arange(2), at], rtol=1e-5, atol=1e-6)
        cache.length_B += 1
    assert cache.length_B.tolist() == [9, 7]


def test_prefill_writes_the_named_rows_only():
    cache = Cache(1, 3, 1, 4, 2, dtype=torch.float32, device=torch.device("cpu"))
    k = torch.ones(1, 1, 2, 2)
    cache.prefill(torch.tensor([1]))[0].update(k, 2 * k)
    assert cache.kv_LPBHTD[0, 0, :, 0, :, 0].tolist() == [[0, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]]
    assert cache.kv_LPBHTD[0, 1].sum() == 8


def test_kernels_are_ranked_by_time_and_those_that_fail_are_left_out(monkeypatch):
    times = {SDPBackend.CUDNN_ATTENTION: None, SDPBackend.FLASH_ATTENTION: 2.0, SDPBackend.MATH: 9.0}
    seen = []
    monkeypatch.setattr(attention_choice, "_time_kernel", lambda kernel, *shape: seen.append(shape) or times.get(kernel, 1.0))
    cuda = torch.device("cuda", 0)
    found = choose_attention((2, 8, 16, 64), torch.bfloat16, cuda)
    assert found == (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH)
    assert seen[0] == ((2, 8, 16, 64), torch.bfloat16, cuda, 8, 0.0, True)
    num_timings = len(seen)
    assert choose_attention((2, 8, 16, 64), torch.bfloat16, cuda) == found and len(seen) == num_timings
    choose_attention((4, 8, 16, 64), torch.bfloat16, cuda)
    assert len(seen) == 2 * num_timings
    attention_choice.choose.cache_clear()


# What the kernel for narrow heads takes, and what it does not: shape, dtype, key heads, dropout, causal.
NARROW = ((2, 8, 16, 32), torch.bfloat16, 0, 0.0, False)
NOT_NARROW = [
    ((2, 8, 16, 64), torch.bfloat16, 0, 0.0, False),
    ((2, 8, 16, 32), torch.float32, 0, 0.0, False),
    ((2, 8, 16, 32), torch.bfloat16, 2, 0.0, False),
    ((2, 8, 16, 32), torch.bfloat16, 0, 0.1, False),
    ((2, 8, 16, 32), torch.bfloat16, 0, 0.0, True),
]


@pytest.fixture
def timed(monkeypatch):
    """CUDA with Triton, where the kernel for narrow heads takes the seconds in the list that is given, and torch's take 2."""
    seconds = [1.0]
    monkeypatch.setattr(attention_choice, "cuda_ops", cuda_ops)
    monkeypatch.setattr(attention_choice, "_time_kernel", lambda kernel, *_: seconds[0] if kernel is Own.NARROW else 2.0)
    attention_choice.choose.cache_clear()
    yield seconds
    attention_choice.choose.cache_clear()


@pytest.mark.parametrize("case", NOT_NARROW)
def test_narrow_kernel_is_used_where_it_is_fastest(timed, monkeypatch, case):
    cuda = torch.device("cuda", 0)

    def choose(shape, dtype, *rest):
        return choose_attention(shape, dtype, cuda, *rest)

    assert choose(*NARROW)[0] is Own.NARROW
    assert Own.NARROW not in choose(*case)
    for seconds in (3.0, None):
        timed[0] = seconds
        attention_choice.choose.cache_clear()
        assert choose(*NARROW)[0] is not Own.NARROW
    monkeypatch.setattr(attention_choice, "cuda_ops", None)
    attention_choice.choose.cache_clear()
    assert Own.NARROW not in choose(*NARROW)


@pytest.mark.parametrize(
    ("case", "device", "has_triton"), [*((c, "cuda", True) for c in NOT_NARROW), (NARROW, "cpu", True), (NARROW, "cuda", False)]
)
def test_narrow_kernel_that_cannot_run_is_refused(monkeypatch, case, device, has_triton):
    monkeypatch.setattr(attention_choice, "cuda_ops", cuda_ops if has_triton else None)
    shape, dtype, *rest = case
    with pytest.raises(
        UserError, match=rf"attention=narrow does not run b?float.* heads of {shape[3]} over 16 tokens.* on {device};"
    ):
        choose_attention(shape, dtype, torch.device(device), *rest, only="narrow")


def test_kernel_refusal_names_the_causal_mask():
    with pytest.raises(UserError, match=r"attention=narrow does not run .* tokens under a causal mask on cpu"):
        choose_attention((2, 2, 16, 16), torch.bfloat16, torch.device("cpu"), only="narrow")


def test_narrow_kernel_scope_restores_the_choice():
    before = current_kernels()
    with attention_scope([Own.NARROW]):
        assert current_kernels() == [Own.NARROW, *before]
        with attention_scope(()):
            assert current_kernels() == [Own.NARROW, *before]
        with pytest.raises(KeyError), attention_scope([SDPBackend.MATH, Own.NARROW]):
            assert current_kernels() == [SDPBackend.MATH]
            raise KeyError
        with attention_scope(current_kernels()):
            assert current_kernels() == [Own.NARROW, *before]
        assert current_kernels() == [Own.NARROW, *before]
    assert current_kernels() == before


@pytest.mark.parametrize("how", [{}, {"is_causal": True}, {"dropout_p": 0.5}, {"attn_mask": torch.ones(7, 7)}])
def test_narrow_kernel_runs_only_where_it_is_equal(monkeypatch, how):
    q, k, v = torch.randn(3, 2, 4, 7, 16).unbind()
    given = []

    def kernel(*qkv_scale):
        given.append(qkv_scale)
        return qkv_scale[2] + 1, None

    monkeypatch.setattr(layers, "cuda_ops", cuda_ops)
    monkeypatch.setattr(cuda_ops, "narrow_attention", kernel)
    with attention_scope([Own.NARROW]):
        attend(q, k, v, **how)
        assert not given  # not on a CPU
        monkeypatch.setattr(cuda_ops, "can_be_narrow", lambda *_: True)
        y = attend(q, k, v, **how)
    assert len(given) == (not how)
    if given:
        torch.testing.assert_close(y, v + 1)
        assert given[0][0].shape == (2, 7, 4, 16) and given[0][3] == 0.25
    attend(q, k, v, **how)
    assert len(given) == (not how)


def test_kernel_choice_is_empty_off_cuda():
    assert choose_attention((2, 8, 16, 64), torch.float32, torch.device("cpu")) == ()
    with attention_scope(()):
        assert torch.backends.cuda.flash_sdp_enabled()
    with attention_scope([SDPBackend.MATH]):
        assert not torch.backends.cuda.flash_sdp_enabled()


@pytest.mark.parametrize(("width", "heads", "kv_heads"), [(30, 4, 0), (32, 4, 3)])
def test_attention_shapes_that_do_not_divide_are_refused(width, heads, kv_heads):
    with pytest.raises(AssertionError):
        Attention(width, heads, kv_heads=kv_heads)


@torch.no_grad()
def test_cache_slots_not_in_use_may_be_left_out():
    module, x = make(), torch.randn(2, LENGTH, WIDTH)
    outcomes = []
    for num_slots in (0, 4, 7):
        cache = Cache(1, 2, HEADS, LENGTH, WIDTH // HEADS, dtype=torch.float32, device=torch.device("cpu"))
        module(x[:, :3], rope(torch.arange(3)), cache=cache.prefill(torch.arange(2))[0])
        cache.length_B.copy_(torch.tensor([3, 1]))
        at = cache.length_B[:, None]
        outcomes.append(module(x[:, 3:4], rope(at), cache=cache.decode(num_slots)[0]))
        assert cache.kv_LPBHTD[0, 0, 0, 0, 3].any(), "the new key must be stored through the shortened view"
    torch.testing.assert_close(outcomes[0], outcomes[1])
    torch.testing.assert_close(outcomes[0], outcomes[2])
