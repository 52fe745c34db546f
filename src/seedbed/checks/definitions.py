"""Parts that recipes share, written a second time and plainly: random numbers, layers, optimizers, text metrics, drawing tokens.

Each function gives what the code computes and what it must be; the parts that only one recipe has stand with that recipe.
B batch, T time, C width, V vocabulary.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seedbed.checks.subject import CPU, Subject
from seedbed.data.image_source import ImageSource, to_bytes, to_float
from seedbed.data.text import TextData, text_metrics, windows
from seedbed.data.tokenise import commit
from seedbed.nn import rng
from seedbed.nn.decoding import CachedDecoder, Sampling, pick, window_start
from seedbed.nn.init import rows_of
from seedbed.nn.layers import EPS, MLP, QK_SCALE, Attention, LayerNorm, RMSNorm, apply_rope, rope_table
from seedbed.nn.likeliest import only_likeliest
from seedbed.train import capabilities
from seedbed.train.engine import Engine
from seedbed.train.optim import MUON_COEFFICIENTS, AdamW, Muon
from seedbed.train.probe import Definition
from seedbed.train.system import System

NUM_DRAWN, NUM_BLOCKS, NUM_BRANCHES, NUM_IMAGES = 20_000, 4, 64, 64
# Newton-Schulz iterations in float32 against float64: at most 2e-4.
ITERATED = 1e-2

# ---- data ----------------------------------------------------------------------------------------------------------------


def data(subject: Subject, system: System) -> Iterator[Definition]:
    """Random numbers have their distribution. Parts of a text end where others begin. Every image is the stored one, or its
    mirror image where that is asked for."""
    key_B = rng.keys(1, torch.arange(NUM_DRAWN), 9)
    yield Definition(
        "keys that differ", rng.keys, len(torch.cat((key_B, rng.keys(1, torch.arange(NUM_DRAWN), 8))).unique()), 40_000
    )
    x, u = rng.normal(key_B, 2).double(), rng.uniform(key_B, 2).double()
    moments = [1 + x.mean(), x.square().mean(), x.pow(4).mean() / 3, 1 + x.prod(1).mean()]
    yield Definition("moments of normal numbers, and of their pairs", rng.normal, moments, [1.0] * 4, 0.05)
    moments = [2 * u.mean(), 3 * u.square().mean(), 4 * u.prod(1).mean()]
    yield Definition("moments of uniform numbers, and of their pairs", rng.uniform, moments, [1.0] * 3, 0.05)
    yield Definition(
        "share of each integer", rng.integers, 5 * rng.integers(key_B, 1, 5).flatten().bincount() / NUM_DRAWN, [1.0] * 5, 0.1
    )
    source, real = subject.data.train, subject.real_data
    if isinstance(real, TextData) and real.store is not None:
        ends = [real.store.manifest["splits"][name][n] for name, n in (("train", 1), ("valid", 0))]
        yield Definition("end of the training part, against the beginning of validation", commit, ends[0], ends[1])
    if not isinstance(source, ImageSource):
        return
    (height, width), (down, right) = source.shape, source.margins
    image = torch.randint(0, 256, (NUM_IMAGES, height + down, width + right, 3), dtype=torch.uint8)
    made = source.batch({"image": image, "class": torch.zeros(NUM_IMAGES), "index": torch.arange(NUM_IMAGES)})["image"]
    away = []
    for row in range(down + 1):
        for column in range(right + 1):
            part = image[:, row : row + height, column : column + width].permute(0, 3, 1, 2) / 127.5 - 1.0
            away += [(x - made).abs().flatten(1).amax(1) for x in ((part, part.flip(3)) if source.flip else (part,))]
    is_near = torch.stack(away) < 1e-4
    code = (ImageSource.batch, to_float)
    yield Definition("items that are a part of their stored image, or its mirror image", code, is_near.any(0).sum(), NUM_IMAGES)
    if len(away) <= 4:
        yield Definition("ways to crop and mirror that occur", code, is_near.any(1).sum(), len(away))
    yield Definition("bytes from floats from bytes", to_bytes, to_bytes(to_float(image[:1])), image[:1])


# ---- layers --------------------------------------------------------------------------------------------------------------


def layers(subject: Subject, system: System) -> Iterator[Definition]:
    """Layers by their formulas. A random branch is on average what it is afterwards, by what a block adds to its input."""
    generator = torch.Generator().manual_seed(3)
    for kind, formula in {Attention: _attention, MLP: _mlp, LayerNorm: _layer_norm, RMSNorm: _rms_norm}.items():
        for module in [one for one in system.modules() if type(one) is kind][:1]:
            width = next((p.shape[-1] for p in module.parameters()), 12)
            x_BTC, x0_BTC = (torch.randn(2, 7, width, generator=generator) for _ in range(2))
            with torch.no_grad():
                yield Definition(kind.__name__, (kind.forward, kind.__init__), *formula(module.eval(), x_BTC, x0_BTC))
    yield from _random_branches(subject, system)


def _attention(module: Attention, x_BTC: Tensor, x0_BTC: Tensor) -> tuple[Tensor, Tensor]:
    """Each head by itself; pairs of queries and keys are turned as complex numbers, by angles that fall with base 100."""
    num, heads, keys, size = x_BTC.shape[1], module.heads, module.kv_heads, x_BTC.shape[2] // module.heads
    rope, falls = rope_table(torch.arange(num), size, 100.0), 100.0 ** (-torch.arange(size // 2) * 2.0 / size)
    turn_TD = torch.polar(torch.ones(num, size // 2), torch.arange(num)[:, None] * falls)
    parts = module.qkv.weight.split((heads * size, keys * size, keys * size))
    out_BTC = torch.zeros_like(x_BTC)
    for head in range(heads):
        shared = head * keys // heads
        q, k, v = (
            F.linear(x_BTC, part.unflatten(0, (-1, size))[n]) for part, n in zip(parts, (head, shared, shared), strict=True)
        )
        if module.values_x0:
            v = v + F.linear(x0_BTC, module.values_x0.weight.unflatten(0, (-1, size))[shared])
        q, k = (x / x.square().mean(-1, keepdim=True).sqrt() if module.qk_norm else x for x in (q, k))
        q, k = (torch.complex(*x.chunk(2, -1)) * turn_TD for x in (q, k))
        scores_BTT = (q @ k.mH).real * (QK_SCALE**2 if module.qk_norm else 1.0) / math.sqrt(size)
        if module.causal:
            scores_BTT = scores_BTT + torch.full((num, num), -math.inf).triu(1)
        y = scores_BTT.softmax(-1) @ v
        if module.gate:
            y = y * 2.0 * torch.sigmoid(F.linear(x_BTC, module.gate.weight[head : head + 1]))
        out_BTC += F.linear(y, module.out.weight[:, head * size : (head + 1) * size])
    return module(x_BTC, rope, x0_BTC), out_BTC


def _mlp(module: MLP, x: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    first, *second = F.linear(x, module.up.weight).split(module.down.in_features, -1)
    tanh = 0.5 * first * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (first + 0.044715 * first**3)))
    inner = {"swiglu": first * torch.sigmoid(first) * sum(second), "relu2": first.clamp_min(0.0) ** 2, "gelu": tanh}
    return module(x), inner[module.kind] @ module.down.weight.T


def _layer_norm(module: LayerNorm, x: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    away = x - x.mean(-1, keepdim=True)
    return module(x), module.weight * away / (away.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def _rms_norm(module: RMSNorm, x: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    return module(x), x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * (1.0 if module.weight is None else module.weight)


def _random_branches(subject: Subject, system: System) -> Iterator[Definition]:
    with torch.no_grad():
        if torch.equal(*(subject.loss_of(system.train(), subject.batch(), seed) for seed in (0, 1))):
            return
    calls: list[tuple[nn.Module, tuple, dict[str, Any]]] = []
    with contextlib.ExitStack() as hooks, torch.no_grad():
        for module in (one for name, one in system.named_modules() if name and [*one.parameters()]):
            keep = lambda module, args, options: calls.append((module, args, options))  # noqa: E731
            hooks.enter_context(module.register_forward_pre_hook(keep, with_kwargs=True))
        subject.loss_of(system, subject.batch())
    for module, args, options in calls:
        if not args or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
            continue
        with torch.no_grad(), contextlib.suppress(RuntimeError):
            base = module.eval()(*args, **options)
            if not isinstance(base, Tensor) or base.shape != args[0].shape or torch.equal(base, args[0]):
                continue
            made = [module.train()(*args, **options) - args[0] for _ in range(NUM_BRANCHES)]
            if not torch.equal(*made[:2]):
                own = base - args[0]
                share = (torch.stack(made).mean(0) * own).sum() / own.square().sum()
                what = f"mean of {type(module).__name__} in training, as a share of evaluation"
                yield Definition(what, type(module).forward, share, 1.0, 0.15)


# ---- optimizers ----------------------------------------------------------------------------------------------------------


def optimizers(subject: Subject, system: System) -> Iterator[Definition]:
    """Three steps on random gradients at half the rate, in float64. The divisor of the gradients is 2."""
    engine, rng, rate = Engine(subject.fresh_system(), subject.small, CPU), torch.Generator().manual_seed(5), torch.tensor(0.5)
    for part in (part for optimizer in engine.optimizers.values() for part in optimizer.parts if type(part) in (AdamW, Muon)):
        params = {n: p for n, p in part.group.params.items() if p.numel() > 1}
        wanted = {n: p.detach().double().clone() for n, p in params.items()}
        mean, square = ({n: torch.zeros_like(p) for n, p in wanted.items()} for _ in range(2))
        for step in range(1, 4):
            for name, param in part.group.params.items():
                param.grad = torch.randn(param.shape, generator=rng)
                if name not in params:
                    continue
                one, x, lr = (param.grad.double() / 2.0, mean[name], square[name]), wanted[name], 0.5 * part.group.lr
                change = (
                    _muon_change(param, *one[:2], subject.small.optim.momentum)
                    if isinstance(part, Muon)
                    else _adam_change(*one, step, subject)
                )
                wanted[name] = x - lr * (change + part.group.weight_decay * x)
            with torch.no_grad():
                part.step(rate, torch.tensor(2.0), torch.tensor(0.0))
        code = (Muon.step, Muon.__init__) if isinstance(part, Muon) else AdamW.step
        for name, param in params.items():
            limit = ITERATED if isinstance(part, Muon) else 1e-4
            yield Definition(f"{name} after three steps of {type(part).__name__}", code, param, wanted[name], limit)


def _adam_change(grad: Tensor, mean: Tensor, square: Tensor, step: int, subject: Subject) -> Tensor:
    optim = subject.small.optim
    mean += (1.0 - optim.beta1) * (grad - mean)
    square += (1.0 - optim.beta2) * (grad.square() - square)
    return mean / (1.0 - optim.beta1**step) / ((square / (1.0 - optim.beta2**step)).sqrt() + optim.eps)


def _muon_change(param: Tensor, grad: Tensor, momentum: Tensor, decay: float) -> Tensor:
    """Every fused matrix by itself: the momentum, one step ahead, with its singular values near 1."""
    momentum += (1.0 - decay) * (grad - momentum)
    found, (a, b, c) = [], MUON_COEFFICIENTS
    for one in (grad + decay * (momentum - grad)).split(rows_of(param)):
        x = one / one.norm()
        for _ in range(5):
            x = a * x + b * x @ x.T @ x + c * x @ x.T @ x @ x.T @ x
        found.append(0.2 * math.sqrt(max(one.shape)) * x)
    return torch.cat(found)


# ---- evaluation ----------------------------------------------------------------------------------------------------------


def evaluation(subject: Subject, system: System) -> Iterator[Definition]:
    """Text: every target once, each after what precedes it, and units of what is reported."""
    if not isinstance(subject.data, TextData):
        return
    valid, tokenizer = subject.data.valid, subject.data.tokenizer
    num = min(len(valid.tokens), NUM_BLOCKS * valid.block + 3)
    source = type(valid)(valid.tokens[:num], valid.block, "blocks", valid.seed, valid.token_bytes)
    parts, tokens = [*windows(source, 3, CPU)], [int(n) for n in source.tokens]
    yield Definition("targets of evaluation", windows, torch.cat([part[:, 1:].flatten() for part in parts]), tokens[1:])
    yield Definition("inputs of evaluation", windows, torch.cat([part[:, :-1].flatten() for part in parts]), tokens[:-1])
    yield Definition("entries of a window", windows, len(parts[0][0]), source.block + 1)
    found, nats = text_metrics("loss", 3.0 * len(tokens), source), 3.0 * len(tokens) / (len(tokens) - 1)
    yield Definition("nats per token and perplexity", text_metrics, [found["loss"], found["perplexity"]], [nats, math.exp(nats)])
    text = tokenizer.decode(tokens[1:]) if tokenizer is not None else "\ufffd"
    if "bits_per_byte" in found and "\ufffd" not in text:
        wanted = 3.0 * len(tokens) / math.log(2.0) / len(text.encode())
        yield Definition("bits per byte", text_metrics, found["bits_per_byte"], wanted)


# ---- inference -----------------------------------------------------------------------------------------------------------


def inference(subject: Subject, system: System) -> Iterator[Definition]:
    """Drawing tokens, and the window that is read when the context is full."""
    if not isinstance(system, capabilities.Completing):
        return
    logits_BV, rng = torch.randn(4, 9, generator=torch.Generator().manual_seed(1)) * 2.0, torch.Generator().manual_seed(2)
    for given in (Sampling(top_k=3), Sampling(top_p=0.6), Sampling(top_p=0.95), Sampling(top_k=5, top_p=0.8)):
        kept, wanted = only_likeliest(logits_BV, given).isfinite(), torch.stack([_kept(row_V, given) for row_V in logits_BV])
        yield Definition(f"tokens kept by {given}", only_likeliest, kept, wanted)
    for given in (Sampling(0.5), Sampling(2.0), Sampling(1.5, top_k=4)):
        drawn = pick(logits_BV[:1].expand(NUM_DRAWN, -1), given, rng).bincount(minlength=9) / NUM_DRAWN
        odds = torch.where(_kept(logits_BV[0], given), logits_BV[0], -math.inf) / given.temperature
        yield Definition(f"share of each token drawn with {given}", pick, drawn, odds.softmax(-1), 0.2)
    model, prompts = SimpleNamespace(block=8, embed=nn.Embedding(1, 1)), [[*range(n)] for n in (1, 3, 8, 9, 24)]
    decoder, code = _Reads(model, prompts, 12, Sampling(0.0), 0), (CachedDecoder.advance, window_start)
    starts = [0 for _ in prompts]
    for _ in range(12):
        decoder.advance()
        for row, tokens in enumerate(decoder.history_BN.tolist()):
            end = len(prompts[row]) + decoder.num
            starts[row] = starts[row] if end - starts[row] <= 8 else end - 4  # the last half of a full context is read again
            yield Definition(f"context after {decoder.num + 1} tokens", code, decoder.read[row], tokens[starts[row] : end])
        decoder.num += 1


class _Reads(CachedDecoder):
    """Remembers what a model would have read, and writes the numbers of its steps."""

    num = 0

    def _open(self) -> None:
        self.read: list[list[int]] = [[] for _ in self.lengths]
        self.cache: Any = SimpleNamespace(length_B=torch.zeros_like(self.count_B), prefill=lambda rows_N: rows_N.tolist())

    def _prefill(self, tokens_NT: Tensor, layers: Any) -> None:
        for row, tokens in zip(layers, tokens_NT.tolist(), strict=True):
            self.read[row] = tokens

    def step(self, num_slots: int = 0) -> None:
        for row, (tokens, size) in enumerate(zip(self.read, self.cache.length_B.tolist(), strict=True)):
            self.read[row] = [*tokens[:size], int(self.history_BN[row, self.lengths[row] - 1])]
        self.cache.length_B += 1
        self._append(torch.eye(99)[40 + self.num].expand(len(self.lengths), -1))


def _kept(logits_V: Tensor, given: Sampling) -> Tensor:
    """Which tokens are drawn from: one after the other, the likeliest first."""
    probs, kept, total = logits_V.double().softmax(-1).tolist(), torch.zeros(len(logits_V), dtype=torch.bool), 0.0
    order = sorted(range(len(probs)), key=lambda n: -probs[n])[: given.top_k or None]
    whole = sum(probs[n] for n in order)
    for n in order:
        kept[n] = total < given.top_p * whole - 1e-12
        total += probs[n]
    return kept


SHARED: dict[str, Callable[[Subject, System], Iterable[Definition]]] = {
    "data": data, "model": layers, "optimizer": optimizers, "evaluation": evaluation, "inference": inference,
}  # fmt: skip
