"""Generation: cached against uncached, best of several samples, early stop, and what is refused."""

import itertools
from pathlib import Path

import pytest
import torch
from _uncached import UncachedEnergyDecoder
from ebt_samples import BLOCK, BYTES, CHARS, STEP_TERMS, batch_of, make, make_plain, written_rows
from helpers import float_limit
from torch import Tensor

from seedbed.errors import UserError
from seedbed.nn.decoding import Sampling
from seedbed.recipes.ebt.generate import (
    CachedDecoder,
    Optimized,
    OptimizeOptions,
    optimize_predictions,
)
from seedbed.recipes.ebt.optimize import optimize
from seedbed.recipes.ebt.system import EnergySystem
from seedbed.train.engine import Engine
from seedbed.train.system import Request

KINDS = {
    "pred": [],
    "prefix": ["model.step_embed=prefix"],
    "s2": ["model.step_embed=none", "model.mcmc.num_landscapes=1", "model.mcmc.num_steps=3", "model.mcmc.loss=last"],
}
PROMPTS = ["the quick", "s", "over the lazy dog; size is"]


def perturbed(*settings: str, noise: float = 0.2) -> EnergySystem:
    """Weights far enough from their initialisation that predictions depend on the context."""
    system = make(*settings)
    with torch.no_grad():
        for index, param in enumerate(system.model.parameters()):
            param += noise * torch.randn(param.shape, generator=torch.Generator().manual_seed(index))
    return system.eval()


@torch.no_grad()
def written(kind: type, system: EnergySystem, options: OptimizeOptions, num: int = 15):
    rows = [CHARS.encode(p).tolist() for p in PROMPTS]
    return written_rows(kind(system, options, rows, num, Sampling(0.9), 3), num)


@pytest.mark.usefixtures("exact_noise")
@pytest.mark.parametrize(
    "options",
    [OptimizeOptions(1), OptimizeOptions(4), OptimizeOptions(3, best_of=3), OptimizeOptions(8, early_stop=0.05)],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
def test_generation_cached_equals_uncached(kind: str, options: OptimizeOptions):
    """Also past the context, where windows are encoded again. In float64: steps amplify rounding."""
    system = perturbed(*KINDS[kind]).double()
    cached, uncached = (written(decoder, system, options) for decoder in (CachedDecoder, UncachedEnergyDecoder))
    for one, two in zip(cached, uncached, strict=True):
        assert one.tokens == two.tokens and one.steps == two.steps
        assert len(one.tokens) == 15 > BLOCK
        assert one.energies == pytest.approx(two.energies, rel=1e-5, abs=1e-6)
    assert len({one.text for one in cached}) == len(PROMPTS)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_generation_probabilities_agree_in_float32(kind: str):
    system = perturbed(*KINDS[kind], noise=0.05)
    probe = system.probe(batch_of(system))
    assert probe.cached is not None
    full, stepwise = probe.predict(probe.batch), probe.cached(probe.batch["inputs"])
    assert full.shape == stepwise.shape and full.std() > 0.1
    # Every step amplifies the rounding of the one before: two steps keep the limit, three do not.
    limit = float_limit(2 * STEP_TERMS) if system.mcmc.num_steps == 2 else 1e-4
    torch.testing.assert_close(full.softmax(-1), stepwise.softmax(-1), rtol=0, atol=limit)


def opened(system: EnergySystem, num: int = 3) -> tuple[list, Tensor]:
    tokens = torch.tensor([CHARS.encode("the quick b").tolist()]).expand(2, -1)
    caches = system.model.new_caches(2)
    for t in range(tokens.shape[1]):
        contexts = system.model.per_landscape([system.model.decode_token(c, tokens[:, t : t + 1]) for c in caches])
    return contexts, torch.randn(2, num, system.model.vocab, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_predictions_of_a_row_are_independent():
    system = perturbed()
    contexts, z_BNV = opened(system)
    together = optimize_predictions(system, contexts, z_BNV, OptimizeOptions(3))
    for n in range(3):
        alone = optimize_predictions(system, contexts, z_BNV[:, n : n + 1], OptimizeOptions(3))
        torch.testing.assert_close(together.z_BNV[:, n : n + 1], alone.z_BNV, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_predictions_equal_optimize_and_returns_final_energies():
    system = perturbed()
    contexts, z_BNV = opened(system)
    thought = optimize_predictions(system, contexts, z_BNV, OptimizeOptions(5))
    (*_, last) = optimize(system.model, contexts, z_BNV, 5, system.alpha(), "prob")
    assert torch.equal(thought.z_BNV, last.z_BTV)
    assert torch.equal(thought.energy_BN, system.model.energy(last.z_BTV.softmax(-1), contexts[-1], 1))


def test_best_of_keeps_the_lowest_energy():
    thought = Optimized(torch.arange(12.0).view(2, 3, 2), torch.tensor([[3.0, 1.0, 2.0], [0.0, 5.0, -1.0]]), torch.ones(2, 3))
    best = thought.best()
    assert best.energy_BN.tolist() == [[1.0], [-1.0]]
    assert best.z_BNV[:, 0].tolist() == [[2.0, 3.0], [10.0, 11.0]]


@torch.no_grad()
def test_early_stop_where_the_energy_stops_falling():
    system = perturbed(*KINDS["s2"])
    contexts, z_BNV = opened(system)
    steps = list(optimize(system.model, contexts, z_BNV, 13, system.alpha(), "prob"))
    falls = torch.stack([a.energy_BT - b.energy_BT for a, b in itertools.pairwise(steps)])
    tol = float(falls[:4].flatten().sort().values[8])
    thought = optimize_predictions(system, contexts, z_BNV, OptimizeOptions(12, early_stop=tol)) if tol > 0 else None
    assert thought is not None, "the test needs falls of energy to choose a limit among"
    expected = ((falls[:11] >= tol).cumprod(0).sum(0) + 1).float()
    assert torch.equal(thought.steps_BN, expected) and len(expected.unique()) > 1
    for row, n in ((0, 0), (1, 2)):
        last = steps[int(expected[row, n]) - 1].z_BTV[row, n]
        assert torch.equal(thought.z_BNV[row, n], last)
    assert (optimize_predictions(system, contexts, z_BNV, OptimizeOptions(5, early_stop=1e9)).steps_BN == 1).all()


def sampled(system, folder: Path, **options):
    engine = Engine(system, system.config, torch.device("cpu"))
    with engine.evaluating():
        return system.sample(Request(folder, options), engine)


def test_sample_is_repeatable_and_prints_energies(tmp_path: Path):
    system = perturbed()
    options = {"prompt": "the ", "tokens": 5, "optimize_steps": 3, "best_of": 2, "seed": 4}
    shown = sampled(system, tmp_path, **options)
    assert shown == sampled(system, tmp_path, **options)
    assert shown.text.startswith("the ") and "energy of each token, after 3.00 steps" in shown.text
    assert shown.text.count(":-") + shown.text.count(":0") + shown.text.count(":1") >= 1
    assert shown.text != sampled(system, tmp_path, **{**options, "seed": 5}).text
    assert sampled(make_plain(), tmp_path, prompt="the ", tokens=5).text.startswith("the ")


def test_prompt_that_is_empty_starts_a_document(tmp_path: Path):
    system = make(tokenizer=BYTES)
    assert len(BYTES.separator) == 1
    assert sampled(system, tmp_path, prompt="", tokens=3).text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimize_steps": 0}, "optimize_steps=0 is out of range"),
        ({"best_of": -1}, "best_of=-1 is out of range"),
        ({"early_stop": -0.5}, "early_stop=-0.5 is out of range"),
        ({"early_stop": float("nan")}, "early_stop=nan is out of range"),
        ({"temperature": -1.0}, "temperature=-1.0 is out of range"),
        ({"latents": 3}, "does not know --latents"),
    ],
    ids=str,
)
def test_sample_options_out_of_range_are_refused(options, words: str, tmp_path: Path):
    with pytest.raises(UserError, match=words):
        sampled(make(), tmp_path, **options)


@pytest.mark.parametrize("option", ["optimize_steps", "best_of", "early_stop"])
def test_plain_run_refuses_energy_options(option: str, tmp_path: Path):
    with pytest.raises(UserError, match=f"--{option.replace('_', '-')} needs energies"):
        sampled(make_plain(), tmp_path, **{option: 2})
