"""Parts that recipes share, written a second time and plainly: random numbers, layers, optimizers, text metrics, drawing tokens.

Each function gives what the code computes and what it must be; the parts that only one recipe has stand with that recipe.
B batch, T time, C width, V vocabulary.
"""

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from seedbed.checks.small_jobs import new_job, take_steps
from seedbed.checks.subject import CPU, Subject, spread
from seedbed.config import Guard
from seedbed.data.feed import Feed
from seedbed.data.image_source import ImageSource, to_bytes, to_float
from seedbed.data.text import TextData, text_metrics
from seedbed.data.tokenise import commit
from seedbed.nn import rng
from seedbed.nn.decoding import Sampling, pick
from seedbed.nn.init import rows_of
from seedbed.nn.layers import EPS, MLP, QK_SCALE, Attention, LayerNorm, RMSNorm, rope_table
from seedbed.nn.likeliest import only_likeliest
from seedbed.train import capabilities, checkpoint, reporting, rollback
from seedbed.train import loop as train_loop
from seedbed.train.engine import Engine
from seedbed.train.guard import Incidents, SpikeWatch
from seedbed.train.optim import MUON_COEFFICIENTS, AdamW, Muon
from seedbed.train.stepper import Stepper, StepResult
from seedbed.train.system import System, maximized

NUM_DRAWN, NUM_BLOCKS, NUM_BRANCHES, NUM_IMAGES = 20_000, 4, 256, 64
# Standard errors that the mean of random branches may be off.
SIGMAS = 6.0
# Weights moved in float32 against float64: iterations of Newton and Schulz, relative; rounding of a weight in three steps.
ITERATED, ROUNDED = 1e-2, 4e-7

# ---- data ----------------------------------------------------------------------------------------------------------------


def data(subject: Subject, system: System) -> Iterator[tuple]:
    """Random numbers have their distribution. Parts of a text end where others begin. Every image is the stored one, or its
    mirror image where that is asked for."""
    key_B, other_B = (rng.keys(1, torch.arange(NUM_DRAWN), stream) for stream in (8, 9))
    x, u = rng.normal(key_B, 2).double(), rng.uniform(key_B, 2).double()
    moments = [1 + x.mean(), x.square().mean(), x.pow(4).mean() / 3, 1 + x.prod(1).mean(), 2 * u.mean(), 3 * u.square().mean()]
    yield "moments of random numbers", (rng.normal, rng.uniform), [*moments, 4 * u.prod(1).mean()], [1.0] * 7, 0.05
    num_keys, counts = len(torch.cat((key_B, other_B)).unique()), rng.integers(key_B, 1, 5).flatten().bincount()
    found = [num_keys / NUM_DRAWN, *10 * counts / NUM_DRAWN]
    yield "keys that differ, and shares of integers", (rng.keys, rng.integers), found, [2.0] * 6, 0.1
    source, real = subject.data.train, subject.real_data
    if isinstance(real, TextData) and real.store is not None:
        ends = [real.store.manifest["splits"][name][n] for name, n in (("train", 1), ("valid", 0))]
        yield "end of the training part, against the beginning of validation", commit, ends[0], ends[1]
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
    is_near, code = torch.stack(away) < 1e-4, (ImageSource.batch, to_float)
    yield "items that are a part of their stored image, or its mirror image", code, is_near.any(0).sum(), NUM_IMAGES
    if len(away) <= 4:
        yield "ways to crop and mirror that occur", code, is_near.any(1).sum(), len(away)
    yield "bytes from floats from bytes", to_bytes, to_bytes(to_float(image[:1])), image[:1]


# ---- layers --------------------------------------------------------------------------------------------------------------


def layers(subject: Subject, system: System) -> Iterator[tuple]:
    """Layers by their formulas."""
    generator = torch.Generator().manual_seed(3)
    for kind, formula in {Attention: _attention, MLP: _mlp, LayerNorm: _layer_norm, RMSNorm: _rms_norm}.items():
        for module in [one for one in system.modules() if type(one) is kind][:1]:
            width = next((p.shape[-1] for p in module.parameters()), 12)
            x_BTC, x0_BTC = (torch.randn(2, 7, width, generator=generator) for _ in range(2))
            yield kind.__name__, (kind.forward, kind.__init__), *formula(module, x_BTC, x0_BTC)
    yield from _random_branches(subject, system)


def _random_branches(subject: Subject, system: System) -> Iterator[tuple]:
    """A branch that is left out for some rows is on average what it is in evaluation, by what a block adds to its input."""
    given: dict[type[nn.Module], tuple[nn.Module, tuple, dict[str, Any]]] = {}
    with contextlib.ExitStack() as hooks, torch.no_grad():
        for module in (one for name, one in system.named_modules() if name and [*one.parameters()]):
            keep = lambda module, *call: given.setdefault(type(module), (module, *call)) and None  # noqa: E731
            hooks.enter_context(module.register_forward_pre_hook(keep, with_kwargs=True))
        one, other = (subject.loss_of(system.train(), subject.batch(), seed) for seed in (0, 1))
    for module, args, options in given.values() if not torch.equal(one, other) else ():
        with contextlib.suppress(Exception), torch.no_grad():  # a module may need the context in which it was called
            own = module.eval()(*args, **options) - args[0]
            draw = lambda num: torch.stack([module.train()(*args, **options) - args[0] for _ in range(num)])  # noqa: B023, E731
            if own.any() and (draw(16).flatten(2) == 0.0).all(2).any():
                share_N = (draw(NUM_BRANCHES) * own).flatten(1).sum(1) / own.square().sum()
                what, error = (
                    f"mean of {type(module).__name__} in training, as a share of evaluation",
                    share_N.std() / NUM_BRANCHES**0.5,
                )
                yield what, type(module).forward, share_N.mean(), 1.0, max(0.1, SIGMAS * float(error))


def _attention(module: Attention, x_BTC: Tensor, x0_BTC: Tensor) -> tuple[Tensor, Tensor]:
    """Each head by itself; pairs of queries and keys are turned as complex numbers, by angles that fall with base 100."""
    num, heads, keys, size = x_BTC.shape[1], module.heads, module.kv_heads, x_BTC.shape[2] // module.heads
    rope = rope_table(torch.arange(num), size, 100.0) if size % 2 == 0 else None  # an odd width has no pairs to turn
    angle_TD = torch.arange(num)[:, None] * 100.0 ** (-torch.arange(size // 2) * 2.0 / size)
    parts = module.qkv.weight.split((heads * size, keys * size, keys * size))
    out_BTC = torch.zeros_like(x_BTC)
    for head in range(heads):
        shared = head * keys // heads
        rows = zip(parts, (head, shared, shared), strict=True)
        q, k, v = (x_BTC @ part.unflatten(0, (-1, size))[n].T for part, n in rows)
        if module.values_x0:
            v = v + F.linear(x0_BTC, module.values_x0.weight.unflatten(0, (-1, size))[shared])
        q, k = (F.rms_norm(x, x.shape[2:], eps=EPS) if module.qk_norm else x for x in (q, k))
        if rope:
            q, k = (torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones(()), angle_TD) for x in (q, k))
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
    return module(x), x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()


# ---- optimizers ----------------------------------------------------------------------------------------------------------


def optimizers(subject: Subject, system: System) -> Iterator[tuple]:
    """What three steps on random gradients add to weights, in float64. The rate is halved, the divisor of the gradients is 2."""
    engine, generator = Engine(subject.fresh_system(), subject.small, CPU), torch.Generator().manual_seed(5)
    optim = subject.small.optim
    for part in (part for optimizer in engine.optimizers.values() for part in optimizer.parts if type(part) in (AdamW, Muon)):
        params = part.group.params
        before, wanted = ({n: p.detach().double().clone() for n, p in params.items()} for _ in range(2))
        mean, square = ({n: torch.zeros_like(p) for n, p in wanted.items()} for _ in range(2))
        for step in range(1, 4):
            for name, param in params.items():
                param.grad = torch.randn(param.shape, generator=generator)
                grad = param.grad.double() / 2.0
                mean[name].lerp_(grad, 1.0 - (optim.momentum if isinstance(part, Muon) else optim.beta1))
                square[name].lerp_(grad.square(), 1.0 - optim.beta2)
                root = (square[name] / (1.0 - optim.beta2**step)).sqrt() + optim.eps
                change = mean[name] / (1.0 - optim.beta1**step) / root
                if isinstance(part, Muon):
                    change = _orthogonal(grad.lerp(mean[name], optim.momentum), rows_of(param))
                wanted[name] -= 0.5 * part.group.lr * (change + part.group.weight_decay * wanted[name])
            with torch.no_grad():
                part.step(torch.tensor(0.5), torch.tensor(2.0), torch.tensor(0.0))
        for name, param in params.items():
            what, code = f"{name} moved by {type(part).__name__}", (type(part).step, type(part).__init__)
            moved, largest = wanted[name] - before[name], float(before[name].abs().max())
            yield what, code, param.double() - before[name], moved, ITERATED + ROUNDED * largest / spread(moved)


def _orthogonal(x_MC: Tensor, rows: tuple[int, ...]) -> Tensor:
    """Every fused matrix by itself, with its singular values near 1."""
    found, (a, b, c) = [], MUON_COEFFICIENTS
    for one in x_MC.split(rows):
        x = one / one.norm()
        for _ in range(5):
            x = a * x + b * x @ x.T @ x + c * x @ x.T @ x @ x.T @ x
        found.append(0.2 * math.sqrt(max(one.shape)) * x)
    return torch.cat(found)


# ---- loop ----------------------------------------------------------------------------------------------------------------


def loop(subject: Subject, system: System) -> Iterator[tuple]:
    """Answers to steps that are not finite and to spikes, spikes of a noisy curve, the best of three evaluations, and which items
    steps take."""
    guard, words = Guard(max_skips=2, max_rollbacks=2), ("warn", "skip", "rollback", "stop")
    incidents, near, far = (Incidents(guard) for _ in range(3))
    answers = [words.index(rollback.answer_to_nonfinite(incidents)) for _ in range(9)]
    yield "answers to nine steps: skip 1, roll back 2, stop 3", rollback.answer_to_nonfinite, answers, [1, 1, 2] * 2 + [1, 1, 3]
    spikes = ((near, 10), (near, 20), (near, 30), (far, 10), (far, 90), (far, 170))
    answers = [words.index(rollback.answer_to_spike(*spike)) for spike in spikes]
    yield "answers to three spikes near each other, and to three far apart", rollback.answer_to_spike, answers, [0, 0, 2, 0, 0, 0]
    watch, noise = SpikeWatch(guard), torch.randn(400, generator=torch.Generator().manual_seed(7))
    curve = (3.0 + 0.1 * noise).tolist()
    seen = torch.tensor([watch.spikes(loss) for loss in (*curve, 9.0, 3.0, math.nan, 9.0)])
    yield "spikes of a noisy curve", SpikeWatch.spikes, seen.nonzero().flatten(), [400, 403]
    values, sign = (3.0, 1.0, 2.0), -1.0 if maximized(system, {"loss": 0.0}) else 1.0
    with tempfile.TemporaryDirectory() as folder:
        job = new_job(subject, "every.log=1000", "guard.policy=rollback", folder=Path(folder))
        for job.step, value in enumerate(values, 1):
            job.system.evaluate = lambda source, engine, value=value: {"loss": sign * value}  # type: ignore[method-assign]
            reporting.evaluate(job)
        saved = checkpoint.best(Path(folder) / "checkpoints")
        job.step, loads, real = 0, list[int](), Feed.load
        with patch.object(Feed, "load", lambda feed, counter: loads.append(counter) or real(feed, counter)):
            take_steps(job, 3)
        accepted = [train_loop.accept_step(job, StepResult(step, loss)) for step, loss in enumerate((*curve, 9.0, 9.0, 9.0), 1)]
    found = [job.best or 0.0, job.best_step, checkpoint.step_at(saved) if saved else 0]
    yield "best of three evaluations, its step, and the checkpoint that is kept", reporting.evaluate, found, [sign, 2, 2]
    yield "first items of three steps", (Stepper.load, train_loop.take_step), loads, [job.config.batch * n for n in range(3)]
    wanted = [*[True] * (len(curve) + 2), False]
    yield "steps after which a run goes on: all but the third spike", train_loop.accept_step, accepted, wanted


# ---- evaluation ----------------------------------------------------------------------------------------------------------


def evaluation(subject: Subject, system: System) -> Iterator[tuple]:
    """Units of what is reported about text."""
    if not isinstance(subject.data, TextData):
        return
    valid, tokenizer = subject.data.valid, subject.data.tokenizer
    source = type(valid)(valid.tokens[: NUM_BLOCKS * valid.block], valid.block, "blocks", valid.seed, valid.token_bytes)
    nats, tokens = 3.0 * len(source.tokens), [int(n) for n in source.tokens[1:]]
    found, wanted = text_metrics("loss", nats, source), {"loss": nats / len(tokens), "perplexity": math.exp(nats / len(tokens))}
    text = tokenizer.decode(tokens) if tokenizer is not None else "\ufffd"
    wanted |= {} if "\ufffd" in text else {"bits_per_byte": nats / math.log(2.0) / len(text.encode())}
    for name, value in wanted.items():
        yield f"{name} of a text", text_metrics, found[name], value


# ---- inference -----------------------------------------------------------------------------------------------------------


def inference(subject: Subject, system: System) -> Iterator[tuple]:
    """Which tokens are drawn, and how often."""
    if not isinstance(system, capabilities.Completing):
        return
    generator = torch.Generator().manual_seed(1)
    logits_BV = torch.randn(4, 9, generator=generator) * 2.0
    for given in (Sampling(top_k=3), Sampling(top_p=0.6), Sampling(top_p=0.95), Sampling(top_k=5, top_p=0.8)):
        kept_BV = only_likeliest(logits_BV, given).isfinite()
        yield f"tokens kept by {given}", only_likeliest, kept_BV, _kept(logits_BV, given)
    for given in (Sampling(0.5), Sampling(2.0), Sampling(1.5, top_k=4)):
        share_V = pick(logits_BV[:1].expand(NUM_DRAWN, -1), given, generator).bincount(minlength=9) / NUM_DRAWN
        odds_BV = logits_BV.masked_fill(~_kept(logits_BV, given), -math.inf) / given.temperature
        yield f"share of each token drawn with {given}", pick, share_V, odds_BV[0].softmax(-1), 0.2


def _kept(logits_BV: Tensor, given: Sampling) -> Tensor:
    """Which tokens are drawn from: those with less than `top_p` of the `top_k` likeliest before them."""
    before_BVV = logits_BV[:, None] > logits_BV[:, :, None]
    in_k_BV = before_BVV.sum(-1) < (given.top_k or logits_BV.shape[1])
    probs_BV = logits_BV.masked_fill(~in_k_BV, -math.inf).double().softmax(-1)
    return in_k_BV & ((before_BVV * probs_BV[:, None]).sum(-1) < given.top_p)


SHARED: dict[str, Callable[[Subject, System], Iterable[tuple]]] = {
    "data": data, "model": layers, "optimizer": optimizers, "loop": loop, "evaluation": evaluation, "inference": inference,
}  # fmt: skip
