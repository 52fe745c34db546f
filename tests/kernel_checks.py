"""What the kernels must do, on any device: on CUDA as they run, elsewhere by Triton's interpreter (run this file for that).

B batch, T time, H query heads, K key heads, D head width or width, M vectors, N rows, V padded vocabulary.
"""

import contextlib
import functools
import itertools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from seedbed.nn import cuda_ops, gated, layers
from seedbed.nn.cuda_ops import NormAndRotate, narrow_attention
from seedbed.nn.layers import apply_rope, rms_norm, rope_table
from seedbed.recipes.flow.model import build_model
from seedbed.recipes.flow.presets import ModelConfig

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [(2, 5, 3, 3, 8), (2, 11, 4, 2, 64), (1, 3, 6, 1, 2)]  # B, T, H, K, D
WIDTHS = [(1, 16), (65, 128), (5000, 5008), (4096, 4096)]  # vocabulary, V
LENGTHS = (1, 2, 3, 16, 17, 64, 130)
GATED = [(2, 1, 96), (3, 7, 384), (1, 100, 96), (2, 7, 520), (2, 40, 33)]  # B, T, D
# What narrow attention may be off by beside its roundings to 16 bits: for scores of ordinary size, and for huge ones, which
# float32 holds to fewer places behind the point.
OFF = (2e-6, 5e-5)


def close(got: Tensor, wanted: Tensor, num_terms: int = 1) -> None:
    """Within rounding of the dtype of `got`, measured over the whole: single numbers may cancel to nothing. Roundings of a
    sum of many terms in float32 add up like steps of chance."""
    limit = max(1e-6, torch.finfo(got.dtype).eps, 0.5 * num_terms**0.5 * torch.finfo(torch.float32).eps)
    assert (got.float() - wanted.float()).norm() <= limit * wanted.float().norm() + 1e-12


def plain(qkv: Tensor, rope: tuple[Tensor, Tensor], kv_heads: int) -> tuple[Tensor, ...]:
    heads = qkv.shape[2] - 2 * kv_heads
    qk, v = qkv.split((heads + kv_heads, kv_heads), dim=2)
    return (*apply_rope(rms_norm(qk), rope).split((heads, kv_heads), dim=2), v)


def check_rotate(device: str, shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    """Forward and backward equal the plain code in float32, for gradients that lie in each order attention gives."""
    batch, length, heads, kv_heads, head_dim = shape
    torch.manual_seed(0)
    rope = rope_table(torch.arange(length, device=device), head_dim, 1e4)
    qkv = torch.randn(batch, length, heads + 2 * kv_heads, head_dim, device=device).to(dtype).requires_grad_()
    out = NormAndRotate.apply(qkv, *rope, kv_heads)
    assert out[2].data_ptr() != qkv.data_ptr() and out[2].untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr()
    wide = qkv.detach().float().requires_grad_()
    wanted = plain(wide, rope, kv_heads)
    for order in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):
        grads = [laid_out(torch.randn(x.shape, device=device).to(dtype), kind) for x, kind in zip(out, order, strict=True)]
        (grad,) = torch.autograd.grad(out, qkv, grads, retain_graph=True)
        close(grad, torch.autograd.grad(wanted, wide, [g.float() for g in grads], retain_graph=True)[0])
    for a, b in zip(out, wanted, strict=True):
        close(a, b)


def laid_out(x_BTHD: Tensor, kind: int) -> Tensor:
    """The same numbers with time outside heads, heads outside time, or the head width outermost."""
    order = ((0, 1, 2, 3), (0, 2, 1, 3), (3, 0, 1, 2))[kind]
    back = tuple(order.index(i) for i in range(4))
    return x_BTHD.permute(order).contiguous().permute(back)


def check_loss(device: str, vocab: int, padded: int, dtype: torch.dtype) -> None:
    """Losses and gradients of rows with far outliers, and whatever lies in the padding has no part in them."""
    from seedbed.nn.kernels import softmax_minus_onehot_

    torch.manual_seed(0)
    logits_NV = (3 * torch.randn(9, padded)).to(dtype)
    logits_NV[3, vocab - 1], logits_NV[4, 0], logits_NV[5] = 300.0, 300.0, -200.0
    logits_NV[:, vocab:] = 50.0
    targets_N = torch.randint(0, vocab, (9,))
    targets_N[0], targets_N[1] = 0, vocab - 1
    wide = logits_NV[:, :vocab].float().requires_grad_()
    nats_N = F.cross_entropy(wide, targets_N, reduction="none")
    (grad_NV,) = torch.autograd.grad(nats_N.sum(), wide)
    given = logits_NV.to(device)
    got_N = softmax_minus_onehot_(given, targets_N.to(device), vocab).cpu()
    torch.testing.assert_close(got_N, nats_N.detach(), rtol=1e-5, atol=1e-5)
    close(given[:, :vocab].cpu(), grad_NV)
    assert not given[:, vocab:].any()


def check_compiled(device: str, backend: str, kv_heads: int, values_x0: bool) -> None:
    """Attention with the kernel, compiled without a break, equals attention without it; gradients too."""
    torch.manual_seed(0)
    module = layers.Attention(64, 4, kv_heads=kv_heads, values_x0=values_x0).to(device)
    x, x0 = torch.randn(2, 2, 7, 64, device=device).unbind()
    rope = rope_table(torch.arange(7, device=device), 16, 1e4)
    inputs = (x.requires_grad_(), *module.parameters())

    def run(call, fused: bool) -> tuple[Tensor, ...]:
        real = cuda_ops.can_norm_and_rotate
        cuda_ops.can_norm_and_rotate = lambda *_: fused
        try:
            y = call(x, rope, x0)
            return (y, *torch.autograd.grad(y.square().sum(), inputs))
        finally:
            cuda_ops.can_norm_and_rotate = real

    wanted = run(module, fused=False)
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, dynamic=False, backend=backend)
    for got in (run(module, fused=True), run(compiled, fused=True)):
        for a, b in zip(got, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, dy: Tensor, scale: float) -> tuple[Tensor, ...]:
    """By the book and in float64: outputs and the gradients of all three."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    weights = (torch.einsum("bthd,bshd->bhts", q, k) * scale).softmax(-1)
    y = torch.einsum("bhts,bshd->bthd", weights, v)
    return (y.detach(), *torch.autograd.grad(y, (q, k, v), dy.double()))


def rounded_attention(q: Tensor, k: Tensor, v: Tensor, dy: Tensor, scale: float) -> list[Tensor]:
    """The same in float64, but for what a kernel must round: weights, outputs, and the gradients of scores and of all three.

    Where one key has all the weight, the gradient is the small rest of what was rounded: no fixed limit would fit. Outputs are
    a mean by the rounded weights, and what they give the gradient of scores is taken before they are rounded themselves.
    """
    q64, k64, v64, dy64 = (x.detach().double() for x in (q, k, v, dy))

    def rounded(x: Tensor) -> Tensor:
        return x.to(q.dtype).double()

    weights = (torch.einsum("bthd,bshd->bhts", q64, k64) * scale).softmax(-1)
    total = rounded(weights).sum(-1, keepdim=True)
    y = torch.einsum("bhts,bshd->bthd", rounded(weights) / total, v64)
    slope = torch.einsum("bthd,bshd->bhts", dy64, v64) - (dy64 * y).sum(-1).transpose(1, 2)[..., None]
    ds = rounded(weights * slope)
    dq, dk = torch.einsum("bhts,bshd->bthd", ds, k64) * scale, torch.einsum("bhts,bthd->bshd", ds, q64) * scale
    return [rounded(x) for x in (y, dq, dk, torch.einsum("bhts,bthd->bshd", rounded(weights), dy64))]


def sizes_of_terms(q: Tensor, k: Tensor, v: Tensor, dy: Tensor, scale: float) -> list[Tensor]:
    """How large the terms are of which each result is the sum. Where one key has all the weight they cancel to almost nothing."""
    q64, k64, v64, dy64 = (x.detach().double() for x in (q, k, v, dy))
    weights = (torch.einsum("bthd,bshd->bhts", q64, k64) * scale).softmax(-1)
    slope = weights * torch.einsum("bthd,bshd->bhts", dy64.abs(), v64.abs()) * scale
    y, dv = torch.einsum("bhts,bshd->bthd", weights, v64.abs()), torch.einsum("bhts,bthd->bshd", weights, dy64.abs())
    dq, dk = torch.einsum("bhts,bshd->bthd", slope, k64.abs()), torch.einsum("bhts,bthd->bshd", slope, q64.abs())
    return [x.norm() for x in (y, dq, dk, dv)]


def check_narrow(
    device: str,
    length: int,
    head_dim: int,
    dtype: torch.dtype,
    times: float = 1.0,
    shift: float = 0.0,
    mean: float = 0.0,
    spread: float = 1.0,
) -> None:
    """Forward and backward equal softmax attention, for values inside a larger tensor and a gradient in any order.

    With a shift all scores are far above zero, or far below. Values have a mean and a spread; where the spread is 0 they are
    the same for all keys, and no query or key has a gradient.
    """
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, length, 2, head_dim, device=device).unbind()
    v = torch.randn(2, length, 6, head_dim, device=device)
    v = (v * spread + v[:, :1] * (1 - spread) + mean).to(dtype)[:, :, 4:]
    q, k, v = (x.to(dtype).requires_grad_() for x in (q * times + shift, k + 2.0 * bool(shift), v))
    kind = length % 3
    dy = laid_out(torch.randn(q.shape, device=device).to(dtype), kind)
    y, *_ = narrow_attention(q, k, v, 0.3)
    got = (y.detach(), *torch.autograd.grad(y, (q, k, v), dy))
    given = (q, k, v, dy, 0.3)
    wanted, rounded, sizes = softmax_attention(*given), rounded_attention(*given), sizes_of_terms(*given)
    off = OFF[times > 1 or shift != 0]
    for name, a, b, c, size in zip(("y", "dq", "dk", "dv"), got, wanted, rounded, sizes, strict=True):
        assert a.shape == b.shape and a.dtype == dtype and a.is_contiguous()
        # Weights may be rounded before they are divided by their sum, and what is off before it is rounded may be rounded the
        # other way: one number in so many, by a whole place.
        eps = torch.finfo(dtype).eps
        limit = off * size + max(3 * (c - b).norm(), 0.5 * eps * b.norm()) + (off * eps) ** 0.5 * b.norm()
        wrong = (a.double() - b).norm()
        what = f"{name} of {length} x {head_dim} {dtype}, scores times {times:g}, shift {shift:g}, values {mean:g} +- {spread:g}"
        assert wrong <= limit, f"{what}: off by {wrong:.1e}, at most {limit:.1e}, of {b.norm():.1e}"


def check_narrow_all(device: str, length: int, head_dim: int, dtype: torch.dtype) -> None:
    """With scores of ordinary size, huge ones, and all far from zero; with values around zero, far from it, and all equal."""
    check_narrow(device, length, head_dim, dtype)
    check_narrow(device, length, head_dim, dtype, 40.0)
    check_narrow(device, length, head_dim, dtype, shift=-12.0)
    check_narrow(device, length, head_dim, dtype, mean=4.0)
    check_narrow(device, length, head_dim, dtype, mean=4.0, spread=0.0)


@contextlib.contextmanager
def unrounded_total() -> Iterator[None]:
    """The fault of dividing by the sum of weights from before they were rounded: outputs are no mean of values."""
    from seedbed.nn import narrow_kernels

    def forward(given: tuple[Tensor, ...], out: tuple[Tensor, ...], scale: float) -> None:
        q, k, v = (x.double() for x in given)
        weights = (torch.einsum("bthd,bshd->bhts", q, k) * scale).exp()
        total = weights.sum(-1, keepdim=True)
        y = torch.einsum("bhts,bshd->bthd", weights.to(given[0].dtype).double(), v) / total.transpose(1, 2)
        out[0].copy_(y)
        out[1].copy_(y - out[0].double())
        out[2][:, :, : q.shape[1]] = total[..., 0].log2()

    real, narrow_kernels.forward = narrow_kernels.forward, forward
    try:
        yield
    finally:
        narrow_kernels.forward = real


@contextlib.contextmanager
def rounded_outputs() -> Iterator[None]:
    """The fault of taking from rounded outputs what the gradient of scores is a difference to."""
    from seedbed.nn import narrow_kernels

    def backward(dy: Tensor, given: tuple[Tensor, ...], lse: Tensor, scale: float) -> tuple[Tensor, ...]:
        return real(dy, (*given[:4], torch.zeros_like(given[4])), lse, scale)

    real, narrow_kernels.backward = narrow_kernels.backward, backward
    try:
        yield
    finally:
        narrow_kernels.backward = real


# What was done wrong once, and where it shows: keys, mean and spread of the values.
FAULTS = [(unrounded_total, 1, 0.0, 1.0), (unrounded_total, 17, 4.0, 0.0), (rounded_outputs, 64, 4.0, 1.0)]


def check_narrow_faults(device: str, head_dim: int, dtype: torch.dtype) -> None:
    """The limits are narrow enough to tell two roundings that a kernel must not do."""
    for fault, length, mean, spread in FAULTS:
        check_narrow(device, length, head_dim, dtype, mean=mean, spread=spread)
        try:
            with fault():
                check_narrow(device, length, head_dim, dtype, mean=mean, spread=spread)
        except AssertionError as error:
            assert str(error).startswith("dq of"), error
        else:
            raise AssertionError(f"{fault.__name__} of {length} keys in {dtype} was not noticed")


def check_narrow_compiled(device: str, backend: str, dtype: torch.dtype) -> None:
    """Attention with the kernel, plain and compiled without a break, equals torch's; gradients too, and the kernel runs."""
    from seedbed.nn import narrow_kernels

    torch.manual_seed(0)
    module = layers.Attention(64, 4, causal=False, gate=True).to(device, dtype)
    x = torch.randn(2, 7, 64, device=device, dtype=dtype, requires_grad=True)
    rope = rope_table(torch.arange(7, device=device), 16, 1e4)
    inputs, ran = (x, *module.parameters()), []

    def run(call) -> tuple[Tensor, ...]:
        y = call(x, rope)
        return (y, *torch.autograd.grad(y.float().square().sum(), inputs))

    wanted = run(module)
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, dynamic=False, backend=backend)
    results = [run(compiled)]  # the choice comes after: what was compiled for torch's kernels must not stay
    real, cuda_ops.can_be_narrow = cuda_ops.can_be_narrow, lambda *_: True
    forward, narrow_kernels.forward = narrow_kernels.forward, lambda *given: ran.append(1) or forward(*given)
    try:
        with layers.attention_scope([layers.Own.NARROW]):
            results += [run(module), run(compiled)]
    finally:
        cuda_ops.can_be_narrow, narrow_kernels.forward = real, forward
    assert len(ran) == 2, f"the kernel ran {len(ran)} times"
    off = 1e-4 if dtype == torch.float32 else 3e-2
    for a, b in zip(itertools.chain(*results), wanted * 3, strict=True):
        assert (a - b).float().norm() <= off * b.float().norm()


def check_narrow_flops() -> None:
    """The summary of a model counts as many operations for it as for torch's attention."""
    from seedbed.train.summary import _Products

    q = torch.randn(2, 7, 3, 16)
    with _Products() as own:
        narrow_attention(q, q, q, 0.25)
    with _Products() as theirs:
        F.scaled_dot_product_attention(q.transpose(1, 2), q.transpose(1, 2), q.transpose(1, 2))
    assert own.flops == theirs.flops > 0


def plain_gated(x: Tensor, branch: Tensor | None, vectors: Tensor) -> tuple[Tensor, Tensor]:
    *gate, shift, scale = vectors.split(1, dim=1)
    x = x if branch is None else x + gate[0] * branch
    return x, rms_norm(x) * (1 + scale) + shift


def check_gated(device: str, shape: tuple[int, int, int], dtype: torch.dtype, branched: bool = True, used: str = "both") -> None:
    """Sum, norm and all gradients equal plain code in float64: of tokens and vectors inside larger tensors, for gradients in
    any order, and where only one of the two results is used."""
    batch, length, width = shape
    torch.manual_seed(0)
    wide = [torch.randn(batch, n, width, device=device).to(dtype) for n in (length + 2, length + 2, 7)]
    num = 3 if branched else 2
    given = [x.requires_grad_() for x in (wide if branched else wide[::2])]

    def parts(tensors: list[Tensor]) -> tuple[Tensor, Tensor | None, Tensor]:
        return tensors[0][:, :length], tensors[1][:, :length] if branched else None, tensors[-1][:, 2 : 2 + num]

    total, y, _ = gated.gate_and_norm(*parts(given))
    double = [x.detach().double().requires_grad_() for x in given]
    results = {"sum": total, "norm": y}, dict(zip(("sum", "norm"), plain_gated(*parts(double)), strict=True))
    chosen = [name for name in (("sum", "norm") if branched else ("norm",)) if used in (name, "both")]
    grads = [out_of_order(torch.randn(shape, device=device).to(dtype), kind) for kind in range(len(chosen))]
    got = torch.autograd.grad([results[0][n] for n in chosen], given, grads)
    wanted = torch.autograd.grad([results[1][n] for n in chosen], double, [g.double() for g in grads], materialize_grads=True)
    for name, a, b in zip(chosen, (results[0][n] for n in chosen), (results[1][n] for n in chosen), strict=True):
        assert a.shape == shape and a.dtype == dtype and a.is_contiguous(), name
        close(a.detach(), b.detach())
    for a, b in zip(got, wanted, strict=True):
        close(a, b, length)


def out_of_order(x_BTD: Tensor, kind: int) -> Tensor:
    """The same numbers with the width outermost, or time."""
    order = ((2, 0, 1), (1, 0, 2))[kind]
    return x_BTD.permute(order).contiguous().permute([order.index(i) for i in range(3)])


def check_norms_cancel(device: str, dtype: torch.dtype) -> None:
    """A norm does not change with the length of its input: a gradient along the input comes to nothing, in both kernels."""
    torch.manual_seed(0)
    x = torch.randn(3, 1, 4, 32, device=device).to(dtype)  # of the first position, which is turned by no angle
    x[:, :, :, 1:] = torch.where(torch.arange(4, device=device)[:, None] == 0, x[:, :, :, :1], x[:, :, :, 1:])  # one is constant
    qkv = x.clone().requires_grad_()
    q, k, _ = NormAndRotate.apply(qkv, *rope_table(torch.zeros(1, device=device), 32, 1e4), 1)
    (turned,) = torch.autograd.grad((q, k), qkv, (x[:, :, :2], x[:, :, 2:3]))
    flat = x[:, 0].clone().requires_grad_()
    _, y, _ = gated.gate_and_norm(flat, None, torch.zeros(3, 2, 32, device=device, dtype=dtype))
    (normed,) = torch.autograd.grad(y, flat, x[:, 0])
    for grad, given in ((turned[:, :, :3], x[:, :, :3]), (normed, x[:, 0])):
        wide = given.double().requires_grad_()
        (wanted,) = torch.autograd.grad(rms_norm(wide), wide, given.double())  # what the norm's epsilon leaves
        assert (grad.double() - wanted).norm() <= 2e-6 * rms_norm(given.double()).norm()


def check_gated_all(device: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """With and without a branch, and where one program takes many tokens."""
    from seedbed.nn import gated_kernels

    for branched, used in ((True, "both"), (True, "norm"), (True, "sum"), (False, "norm")):
        check_gated(device, shape, dtype, branched, used)
    before = gated_kernels.FORWARD, gated_kernels.BACKWARD
    gated_kernels.FORWARD, gated_kernels.BACKWARD = (tiles._replace(programs=shape[0]) for tiles in before)
    try:
        check_gated(device, shape, dtype)
    finally:
        gated_kernels.FORWARD, gated_kernels.BACKWARD = before


@contextlib.contextmanager
def gated_is(fused: bool) -> Iterator[list[int]]:
    """Whether norms are taken together with the addition before them; notes every time the kernel runs."""
    from seedbed.nn import gated_kernels

    ran: list[int] = []
    real, forward = gated.can_gate_and_norm, gated_kernels.forward
    gated.can_gate_and_norm = lambda *_: fused
    gated_kernels.forward = lambda *given: ran.append(1) or forward(*given)
    try:
        yield ran
    finally:
        gated.can_gate_and_norm, gated_kernels.forward = real, forward


def check_gated_compiled(device: str, backend: str, dtype: torch.dtype) -> None:
    """A flow model with the kernel, plain, recomputed and compiled without a break, equals one without; gradients too."""
    config = ModelConfig(depth=2, width=32, heads=2, patch=2, context_tokens=1, context_start=1)
    model = build_model(config, (3, 8, 8), 5, seed=1).to(device)
    torch.manual_seed(0)
    with torch.no_grad():
        for param in model.parameters():
            param += 0.1 * torch.randn_like(param)
    x, time, label = torch.randn(3, 3, 8, 8, device=device), torch.rand(3, device=device), torch.arange(3, device=device)

    def run(call, num: int) -> tuple[Tensor, ...]:
        with gated_is(num > 0) as ran, torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16):
            y = call(x, time, label, model.position_tables())
            grads = torch.autograd.grad(y.square().sum(), list(model.parameters()))
        assert len(ran) == num, f"the kernel ran {len(ran)} times, not {num}"
        return y, *grads

    wanted = run(model, 0)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend=backend)
    off = 1e-5 if dtype == torch.float32 else 5e-2
    recomputed = functools.partial(checkpoint, model, use_reentrant=False)
    for got in (run(model, 5), run(recomputed, 10), run(compiled, 5)):
        for a, b in zip(got, wanted, strict=True):
            assert (a - b).norm() <= off * b.norm()


def mend_bfloat16() -> None:
    """Let the interpreter do with bfloat16 what a device does: it truncates instead of rounding, and multiplies the bits as
    integers. Products of two are exact in float32."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle, interpreter_builder

    cast, dot = interpreter_builder.cast_impl, interpreter_builder.create_dot

    def cast_impl(x, dtype):
        if (x.dtype.scalar, dtype.scalar) != (tl.float32, tl.bfloat16):
            return cast(x, dtype)
        rounded = torch.from_numpy(x.data.copy()).bfloat16()
        return TensorHandle(rounded.view(torch.uint16).numpy(), tl.bfloat16)

    def create_dot(a, b, *others):
        return dot(*(cast(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)), *others)

    interpreter_builder.cast_impl, interpreter_builder.create_dot = cast_impl, create_dot


def main() -> None:
    for dtype in DTYPES:
        check_norms_cancel("cpu", dtype)
    for shape in GATED:
        check_gated("cpu", shape, torch.float32)
    for dtype in DTYPES:
        check_gated_all("cpu", GATED[-1], dtype)
    check_gated_compiled("cpu", "aot_eager", torch.float32)
    mend_bfloat16()
    for length, head_dim, dtype in itertools.product(LENGTHS, (16, 32), DTYPES):
        check_narrow("cpu", length, head_dim, dtype, mean=4.0)
    for (length, head_dim), dtype in itertools.product(((1, 32), (17, 16), (130, 32)), DTYPES):
        check_narrow_all("cpu", length, head_dim, dtype)
    for head_dim, dtype in itertools.product((16, 32), (torch.bfloat16, torch.float16)):
        check_narrow_faults("cpu", head_dim, dtype)
    check_narrow_compiled("cpu", "aot_eager", torch.float32)
    check_narrow_flops()
    for shape, dtype in itertools.product(SHAPES, DTYPES):
        check_rotate("cpu", shape, dtype)
    for widths, dtype in itertools.product(WIDTHS, DTYPES):
        check_loss("cpu", *widths, dtype)
    check_compiled("cpu", "aot_eager", kv_heads=2, values_x0=True)


if __name__ == "__main__":
    main()
