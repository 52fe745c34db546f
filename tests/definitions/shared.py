"""Parts that recipes share, written a second time: layers, drawing tokens, text metrics, images, random branches, optimizers.

Each function yields (what, the functions that compute it, what they give, what they must give, the relative difference allowed).
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seedbed.checks.subject import CPU, Subject, spread
from seedbed.data.image_source import ImageSource, to_bytes, to_float
from seedbed.data.text import TextData, text_metrics, windows
from seedbed.data.tokenise import commit
from seedbed.nn.decoding import CachedDecoder, Sampling, pick, window_start
from seedbed.nn.init import rows_of
from seedbed.nn.layers import MLP, QK_SCALE, Attention, LayerNorm, rope_table
from seedbed.nn.likeliest import only_likeliest
from seedbed.train import capabilities
from seedbed.train.engine import Engine
from seedbed.train.optim import AdamW, Muon
from seedbed.train.system import System

# Relative difference of two ways to compute one number, float32: at most 2e-6.
SAME = 1e-4
# Singular values of Muon's step over its scale: .65 to 1.3 (Newton-Schulz); of matrices that are orthogonalised together, .4.
ORTHOGONAL = (0.5, 1.5)
NUM_DRAWN, NUM_BLOCKS, NUM_BRANCHES = 20_000, 4, 64


def difference(found: Any, wanted: Any) -> float:
    """The largest difference of two values or tensors, relative to the mean size of the second; infinite for other shapes."""
    a, b = (torch.as_tensor(np.asarray(x) if isinstance(x, list) else x).detach().double() for x in (found, wanted))
    if a.shape != b.shape:
        return math.inf
    apart = torch.where(a == b, 0.0, (a - b).abs())  # infinities may be equal
    finite = b[b.isfinite()]
    return float(apart.max()) / max(spread(finite), 1e-6) if apart.numel() else 0.0


# ---- parts that recipes share ------------------------------------------------------------------------------------------


def _inference(subject: Subject, system: System) -> Iterator[tuple]:
    """Drawing tokens, and the window that is read when the context is full."""
    if not isinstance(system, capabilities.Completing):
        return
    logits_BV, rng = torch.randn(4, 9, generator=torch.Generator().manual_seed(1)) * 2.0, torch.Generator().manual_seed(2)
    for given in (Sampling(top_k=3), Sampling(top_p=0.6), Sampling(top_p=0.95), Sampling(top_k=5, top_p=0.8)):
        kept = only_likeliest(logits_BV, given).isfinite()
        yield f"tokens kept by {given}", only_likeliest, kept, torch.stack([_kept(row_V, given) for row_V in logits_BV])
    for given in (Sampling(0.5), Sampling(2.0), Sampling(1.5, top_k=4)):
        drawn = torch.stack([pick(logits_BV[:1].expand(NUM_DRAWN, -1), given, rng)]).flatten().bincount(minlength=9) / NUM_DRAWN
        odds = torch.where(_kept(logits_BV[0], given), logits_BV[0], -math.inf) / given.temperature
        yield f"share of each token drawn with {given}", pick, drawn, odds.softmax(-1), 0.2
    model, prompts = SimpleNamespace(block=8, embed=nn.Embedding(1, 1)), [[*range(n)] for n in (1, 3, 8, 9, 24)]
    decoder = _Reads(model, prompts, 12, Sampling(0.0), 0)
    starts = [0 for _ in prompts]
    for _ in range(12):
        decoder.advance()
        for row, tokens in enumerate(decoder.history_BN.tolist()):
            end = len(prompts[row]) + decoder.num
            starts[row] = starts[row] if end - starts[row] <= 8 else end - 4  # the last half of a full context is read again
            name, code = f"context after {decoder.num + 1} tokens", (CachedDecoder.advance, window_start)
            yield name, code, decoder.read[row], tokens[starts[row] : end]
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
        if total < given.top_p * whole - 1e-12:
            kept[n] = True
        total += probs[n]
    return kept


def _evaluation(subject: Subject, system: System) -> Iterator[tuple]:
    """Text: every target once, each after what precedes it, and units of what is reported."""
    if not isinstance(subject.data, TextData):
        return
    valid, tokenizer = subject.data.valid, subject.data.tokenizer
    num = min(len(valid.tokens), NUM_BLOCKS * valid.block + 3)
    source = type(valid)(valid.tokens[:num], valid.block, "blocks", valid.seed, valid.token_bytes)
    parts, tokens = [*windows(source, 3, CPU)], [int(n) for n in source.tokens]
    yield "targets of evaluation", windows, torch.cat([part[:, 1:].flatten() for part in parts]), tokens[1:]
    yield "inputs of evaluation", windows, torch.cat([part[:, :-1].flatten() for part in parts]), tokens[:-1]
    yield "entries of a window", windows, len(parts[0][0]), source.block + 1
    found = text_metrics("loss", 3.0 * len(tokens), source)
    nats = 3.0 * len(tokens) / (len(tokens) - 1)
    yield "nats per token", text_metrics, found["loss"], nats
    yield "perplexity", text_metrics, found["perplexity"], math.exp(nats)
    text = tokenizer.decode(tokens[1:]) if tokenizer is not None else "\ufffd"
    if "bits_per_byte" in found and "\ufffd" not in text:
        size = len(text.encode())
        yield "bits per byte", text_metrics, found["bits_per_byte"], 3.0 * len(tokens) / math.log(2.0) / size


def _data(subject: Subject, system: System) -> Iterator[tuple]:
    """Images: every item is its stored image or, where that is asked for, the mirror image; inside of its margins."""
    source, data = subject.data.train, subject.real_data
    if isinstance(data, TextData) and data.store is not None:
        ends = [data.store.manifest["splits"][name][n] for name, n in (("train", 1), ("valid", 0))]
        yield "end of the training part, against the beginning of validation", commit, ends[0], ends[1]
    if not isinstance(source, ImageSource):
        return
    stored = source.shape[0] + source.margins[0], source.shape[1] + source.margins[1]
    image = torch.randint(0, 256, (64, *stored, 3), dtype=torch.uint8)
    made = source.batch({"image": image, "class": torch.zeros(64), "index": torch.arange(64)})["image"]
    away = []
    for at_row in range(source.margins[0] + 1):
        for at_column in range(source.margins[1] + 1):
            part = (
                image[:, at_row : at_row + source.shape[0], at_column : at_column + source.shape[1]].permute(0, 3, 1, 2) / 127.5
                - 1.0
            )
            away += [(x - made).abs().flatten(1).amax(1) for x in ((part, part.flip(3)) if source.flip else (part,))]
    is_near = torch.stack(away) < SAME
    yield "items that are a part of their stored image, or its mirror image", ImageSource.batch, is_near.any(0).sum(), 64
    if len(away) <= 4:
        yield "ways to crop and mirror that occur", ImageSource.batch, is_near.any(1).sum(), len(away)
    yield "bytes from floats from bytes", (to_bytes, to_float), to_bytes(to_float(image[:1])), image[:1]


def _model(subject: Subject, system: System) -> Iterator[tuple]:
    """Layers by their formulas. Random branches have the mean of what they are afterwards, by what a block adds to its input."""
    rng = torch.Generator().manual_seed(3)
    for kind, formula in {Attention: _attention, MLP: _mlp, LayerNorm: _layer_norm}.items():
        for module in [one for one in system.modules() if type(one) is kind][:1]:
            width = next(p for p in module.parameters()).shape[-1]
            x_BTC, x0_BTC = (torch.randn(2, 7, width, generator=rng) for _ in range(2))
            with torch.no_grad():
                yield f"{kind.__name__}", (kind.forward, kind.__init__), *formula(module, x_BTC, x0_BTC)
    calls: list[tuple[nn.Module, tuple, dict[str, Any]]] = []
    with contextlib.ExitStack() as hooks, torch.no_grad():
        for module in (one for name, one in system.named_modules() if name and [*one.parameters()]):
            keep = lambda module, args, options: calls.append((module, args, options))  # noqa: E731
            hooks.enter_context(module.register_forward_pre_hook(keep, with_kwargs=True))
        subject.loss_of(system, subject.batch())
    for module, args, options in calls if _is_random(subject, system) else ():
        if not args or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
            continue
        with torch.no_grad(), contextlib.suppress(RuntimeError):
            base = module.eval()(*args, **options)
            if not isinstance(base, Tensor) or base.shape != args[0].shape:
                continue
            made = [module.train()(*args, **options) for _ in range(2)]
            if torch.equal(*made) or torch.equal(base, args[0]):
                continue
            mean = torch.stack([module(*args, **options) - args[0] for _ in range(NUM_BRANCHES)]).mean(0)
            share = (mean * (base - args[0])).sum() / (base - args[0]).square().sum()
            yield f"mean of {type(module).__name__} in training, against evaluation", type(module).forward, share, 1.0, 0.15
    system.eval()


def _attention(module: Attention, x_BTC: Tensor, x0_BTC: Tensor) -> tuple[Tensor, Tensor]:
    """Each head by itself; pairs of queries and keys are turned as complex numbers, by angles that fall with base 100."""
    num, heads, keys, size = x_BTC.shape[1], module.heads, module.kv_heads, module.head_dim
    rope = rope_table(torch.arange(num), size, 100.0)
    turn_TD = torch.polar(
        torch.ones(num, size // 2), torch.arange(num)[:, None] * 100.0 ** (-torch.arange(size // 2) * 2.0 / size)
    )
    out_BTC = torch.zeros_like(x_BTC)
    for head in range(heads):
        shared = head * keys // heads
        q, k, v = (
            F.linear(x_BTC, rows.unflatten(0, (-1, size))[n])
            for rows, n in zip(
                module.qkv.weight.split((heads * size, keys * size, keys * size)), (head, shared, shared), strict=True
            )
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


def _is_random(subject: Subject, system: System) -> bool:
    with torch.no_grad():
        one, other = (subject.loss_of(system.train(), subject.batch(), seed) for seed in (0, 1))
    return not torch.equal(one, other)


def _optimizer(subject: Subject, system: System) -> Iterator[tuple]:
    """Three steps on random gradients, against the formulas in float64; of Muon, the first step of every fused matrix."""
    engine, rng = Engine(subject.fresh_system(), subject.small, CPU), torch.Generator().manual_seed(5)
    one, zero, optim = torch.ones(()), torch.zeros(()), subject.small.optim
    for part in (part for optimizer in engine.optimizers.values() for part in optimizer.parts):
        params = {n: p for n, p in part.group.params.items() if p.numel() > 1}
        before = {n: p.detach().double().clone() for n, p in params.items()}
        mean, square = ({n: torch.zeros_like(p) for n, p in before.items()} for _ in range(2))
        for step in range(1, 2 if isinstance(part, Muon) else 4):
            for name, param in part.group.params.items():
                param.grad = torch.randn(param.shape, generator=rng)
                if name not in params or isinstance(part, Muon):
                    continue
                grad, x = param.grad.double() / 2.0, before[name]
                mean[name] += (1.0 - optim.beta1) * (grad - mean[name])
                square[name] += (1.0 - optim.beta2) * (grad.square() - square[name])
                root = (square[name] / (1.0 - optim.beta2**step)).sqrt() + optim.eps
                change = mean[name] / (1.0 - optim.beta1**step) / root + part.group.weight_decay * x
                before[name] = x - 0.5 * part.group.lr * change
            with torch.no_grad():
                part.step(0.5 * one, 2.0 * one, zero)
        for name, param in params.items():
            if type(part) is AdamW:
                yield f"{name} after three steps of AdamW", AdamW.step, param, before[name]
            first = 0
            for height in rows_of(param) if isinstance(part, Muon) else ():
                old, now = before[name][first : first + height], param.detach()[first : first + height].double()
                old = old * (1.0 - 0.5 * part.group.lr * part.group.weight_decay)
                sizes = torch.linalg.svdvals((now - old) / (0.1 * part.group.lr * math.sqrt(max(old.shape))))
                outside = ((sizes < ORTHOGONAL[0]) | (sizes > ORTHOGONAL[1])).sum()
                yield f"singular values of Muon's step of {name} that are not near 1", (Muon.step, Muon.__init__), outside, 0, 0.0
                first += height


SHARED: dict[str, Callable[[Subject, System], Iterable[tuple]]] = {
    "data": _data, "model": _model, "optimizer": _optimizer, "evaluation": _evaluation, "inference": _inference,
}  # fmt: skip
