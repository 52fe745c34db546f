"""The engine: accumulation, precision, the guard and the moving average, on systems small enough to reason about."""

import copy

import pytest
import torch
from torch import Tensor, nn

from seedbed.config import Config, Optim, Schedule
from seedbed.train.engine import Engine, mix
from seedbed.train.system import System

CPU = torch.device("cpu")


class Masked(System):
    """A linear model whose loss averages only over the targets that a mask keeps."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))
        self.register_buffer("seen", torch.zeros(()))

    def num_targets(self, batch):
        return batch["keep"].sum()

    def loss(self, batch, engine):
        self.seen += 1
        error = (self.net(batch["x"]).float()[:, 0] - batch["y"]) ** 2
        return (error * batch["keep"]).sum() / batch["keep"].sum().clamp_min(1), {"error": error.detach().mean()}


def make(config: Config, dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> Engine:
    torch.manual_seed(0)
    return Engine(Masked(dropout).to(dtype), config, CPU)


def config(**changes) -> Config:
    return Config(model=None, data=None, schedule=Schedule(kind="constant", warmup=0.0), **{"batch": 8, **changes})


def batch(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 4, generator=generator, dtype=torch.float64)
    keep = torch.tensor([1, 1, 1, 0, 1, 0, 0, 0])
    return {"x": x.to(dtype), "y": x.sum(1).to(dtype), "keep": keep.to(dtype)}


def parts_of(whole: dict[str, Tensor], num: int):
    size = 8 // num
    return lambda k: {name: t[k * size : (k + 1) * size] for name, t in whole.items()}


def advance(engine: Engine, whole: dict[str, Tensor], step: int = 0) -> dict[str, Tensor]:
    engine.begin(step, 0.5)
    return engine.step(parts_of(whole, engine.config.accum))


def weights(engine: Engine) -> list[Tensor]:
    return [p.detach().clone() for p in engine.system.parameters()]


@pytest.mark.parametrize("accum", [2, 4])
def test_accumulation_equals_one_batch_with_unequal_targets(accum: int) -> None:
    """4 micro-batches = 1 batch, although the mask leaves some parts with few targets and one with none."""
    optim = Optim(clip=0.05)  # low enough to bite
    whole = make(config(optim=optim), dtype=torch.float64)
    split = make(config(optim=optim, accum=accum), dtype=torch.float64)
    for step in range(3):
        a, b = (advance(e, batch(step, torch.float64), step) for e in (whole, split))
        torch.testing.assert_close(a["loss"], b["loss"], rtol=1e-12, atol=0)
        torch.testing.assert_close(a["grad_norm"], b["grad_norm"], rtol=1e-9, atol=0)
    for a, b in zip(weights(whole), weights(split), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_clipping_equals_torch() -> None:
    engine = make(config(optim=Optim(clip=0.1, eps=1.0)))
    twin = copy.deepcopy(engine.system)
    measured = advance(engine, batch())
    loss, _ = twin.loss(batch(), engine)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
    assert norm > 0.1, "the clip must bite for this test to mean anything"
    torch.testing.assert_close(measured["grad_norm"], norm)
    groups = [
        {"params": [p for p in twin.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in twin.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1.0).step()
    for a, b in zip(engine.system.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("optim", ["adamw", "muon"])
@pytest.mark.parametrize("accum", [1, 2])
def test_nonfinite_step_changes_nothing_and_halts(optim: str, accum: int) -> None:
    engine = make(config(optim=Optim(kind=optim), ema=0.9, accum=accum))
    advance(engine, batch(0), 0)
    kept = {f: {n: t.clone() for n, t in g.items()} for f, g in engine.tensors().items()}
    bad = batch(1)
    bad["x"][0, 0] = float("nan")
    advance(engine, bad, 1)
    assert bool(engine.halted)
    advance(engine, batch(2), 2)
    for file, group in engine.tensors().items():
        for name, tensor in group.items():
            assert name == "seen" or torch.equal(tensor, kept[file][name]), f"{file}: {name} moved"
    engine.halted.fill_(False)
    advance(engine, batch(2), 2)
    assert not bool(engine.halted)
    assert not torch.equal(engine.tensors()["model"]["net.0.weight"], kept["model"]["net.0.weight"])


def test_nonfinite_gradient_with_finite_loss_is_caught() -> None:
    class Root(Masked):
        def loss(self, batch, engine):
            loss, extra = super().loss(batch, engine)
            return loss + 0 * torch.sqrt(self.net[0].bias.sum() * 0), extra

    torch.manual_seed(0)
    engine = Engine(Root(), config(), CPU)
    before = weights(engine)
    measured = advance(engine, batch())
    assert torch.isfinite(measured["loss"]) and not torch.isfinite(measured["grad_norm"])
    assert bool(engine.halted) and all(torch.equal(a, b) for a, b in zip(before, weights(engine), strict=True))


def test_dry_run_leaves_no_trace() -> None:
    a, b = make(config(ema=0.9), dropout=0.5), make(config(ema=0.9), dropout=0.5)
    advance(a, batch(), 0)
    advance(b, batch(), 0)
    rng = torch.get_rng_state()
    with b.dry_run():
        for step in range(3):
            advance(b, batch(step + 5), step)
    assert torch.equal(rng, torch.get_rng_state())
    for step in (1, 2):
        advance(a, batch(step), step)
        advance(b, batch(step), step)
    for file, group in a.tensors().items():
        for name, tensor in group.items():
            assert torch.equal(tensor, b.tensors()[file][name]), f"{file}: {name}"


def test_noise_follows_from_seed_and_step_alone() -> None:
    losses = []
    for disturb in (False, True):
        engine = make(config(), dropout=0.5)
        if disturb:
            torch.rand(17)
        row = []
        for step in range(3):
            row.append(advance(engine, batch(), step)["loss"].item())
            if disturb:
                with engine.evaluating():
                    torch.rand(5)
                    engine.system.net(batch()["x"])
        losses.append(row)
    assert losses[0] == losses[1]
    engine = make(config(), dropout=0.5)
    engine.begin(7, 0.5)
    first = torch.rand(4)
    engine.begin(8, 0.5)
    assert not torch.equal(first, torch.rand(4))


def test_neighbouring_seeds_share_nothing() -> None:
    seeds = [mix(seed, step) for seed in range(50) for step in range(200)]
    assert len(set(seeds)) == len(seeds)
    ones = sum(bin(mix(1, s) ^ mix(1, s + 1)).count("1") for s in range(1000)) / 1000
    assert 29 < ones < 34  # of 63 bits, about half differ
    assert all(0 <= s < 2**63 for s in seeds)


def test_evaluating_uses_averaged_weights_and_puts_everything_back() -> None:
    engine = make(config(ema=0.5), dropout=0.5)
    for step in range(3):
        advance(engine, batch(step), step)
    before = weights(engine)
    with engine.evaluating():
        assert not engine.system.training and not torch.is_grad_enabled()
        for (name, live), shadow in zip(engine.system.named_parameters(), engine.ema.shadow.values(), strict=True):
            assert torch.equal(live, shadow), name
        assert not torch.equal(before[0], next(engine.system.parameters()))
    assert engine.system.training
    assert all(torch.equal(a, b) for a, b in zip(before, weights(engine), strict=True))


def test_ema_equals_the_formula() -> None:
    engine = make(config(ema=0.7))
    expected = weights(engine)
    for step in range(6):
        advance(engine, batch(step), step)
        decay = min(0.7, (1 + step) / (10 + step))
        expected = [decay * e + (1 - decay) * w for e, w in zip(expected, weights(engine), strict=True)]
    for a, b in zip(engine.ema.shadow.values(), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_bf16_keeps_float32_masters() -> None:
    engine, plain = make(config(precision="bf16")), make(config())
    for step in range(5):
        low, full = advance(engine, batch(step), step), advance(plain, batch(step), step)
    assert all(p.dtype == torch.float32 for p in engine.system.parameters())
    assert low["loss"] != full["loss"], "bf16 must really have been used"
    torch.testing.assert_close(low["loss"], full["loss"], rtol=0.05, atol=0.02)


def test_fp16_scale_falls_on_overflow_and_the_run_goes_on() -> None:
    engine = make(config(precision="fp16"))
    engine.scale["main"].fill_(2.0**24)
    before = weights(engine)
    huge = batch()
    huge["y"] = huge["y"] * 100
    advance(engine, huge)
    assert not bool(engine.halted), "an overflow is not a fault"
    assert engine.scale["main"] < 2.0**24 and all(torch.equal(a, b) for a, b in zip(before, weights(engine), strict=True))
    for step in range(30):
        advance(engine, huge, step)
    assert not torch.equal(before[0], weights(engine)[0]), "it must find a scale that works"
    bad = batch()
    bad["x"][:] = float("nan")
    advance(engine, bad)
    assert bool(engine.halted), "a loss that is not finite is a fault at any scale"


class Players(System):
    """Two players that would move each other's weights if the engine let them."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 1)

    def named_optimizers(self):
        return {"left": self.left, "right": self.right}

    def update(self, batch, engine):
        out = self.right(self.left(batch["x"])).mean()
        engine.minimize(-out, "right")
        between = [p.detach().clone() for p in self.left.parameters()]
        out = self.right(self.left(batch["x"])).mean()
        engine.minimize(out, "left")
        self.left_was_alone = all(torch.equal(a, b) for a, b in zip(between, self.left_before, strict=True))
        return {"loss": out.detach()}


def test_optimizers_change_only_their_own_weights() -> None:
    torch.manual_seed(0)
    engine = Engine(Players(), config(), CPU)
    engine.system.left_before = [p.detach().clone() for p in engine.system.left.parameters()]
    right = [p.detach().clone() for p in engine.system.right.parameters()]
    measured = advance(engine, batch())
    assert engine.system.left_was_alone
    assert not torch.equal(engine.system.left.weight, engine.system.left_before[0])
    assert not torch.equal(engine.system.right.weight, right[0])
    assert {"grad_norm_left", "grad_norm_right"} <= measured.keys()
    names = engine.tensors()["optim"]
    assert "left.mean.left.weight" in names and "right.mean.right.weight" in names


def test_unused_parameter_is_harmless() -> None:
    engine = make(config())
    engine.system.idle = nn.Linear(2, 2)
    engine = Engine(engine.system, config(), CPU)
    advance(engine, batch())
    assert torch.isfinite(engine.system.idle.weight).all() and not bool(engine.halted)
