"""Generation by walking: caches against reading anew, the choice among starts, stopping early, and what is refused."""

import itertools
from pathlib import Path

import pytest
import torch
from ebt_samples import BLOCK, BYTES, CHARS, batch_of, make, make_plain
from torch import Tensor

from seedbed.errors import UserError
from seedbed.nn.sampling import Sampling
from seedbed.recipes.ebt.generate import CachedDecoder, Thinking, Thought, UncachedDecoder, think, write
from seedbed.recipes.ebt.system import EnergySystem
from seedbed.recipes.ebt.walk import walk
from seedbed.train.engine import Engine
from seedbed.train.system import Request

KINDS = {
    "pred": [],
    "prefix": ["model.step_embed=prefix"],
    "s2": ["model.step_embed=none", "model.walk.landscapes=1", "model.walk.steps=3", "model.walk.loss=last"],
}
PROMPTS = ["the quick", "s", "over the lazy dog; size is"]


def shaken(*settings: str, noise: float = 0.2) -> EnergySystem:
    """Weights far enough from their birth that what comes next depends on what came before."""
    system = make(*settings)
    with torch.no_grad():
        for index, param in enumerate(system.model.parameters()):
            param += noise * torch.randn(param.shape, generator=torch.Generator().manual_seed(index))
    return system.eval()


def written(kind: type, system: EnergySystem, thinking: Thinking, num: int = 15):
    rows = [CHARS.encode(p).tolist() for p in PROMPTS]
    with torch.no_grad():
        return write(kind(system, thinking, rows, num, Sampling(0.9), 3), CHARS, num)


@pytest.mark.parametrize("thinking", [Thinking(1), Thinking(4), Thinking(3, best_of=3), Thinking(8, early_stop=0.05)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_cached_generation_is_uncached_generation(kind: str, thinking: Thinking):
    """Also past the context, where windows are read again. In float64: steps multiply what rounding makes of it."""
    system = shaken(*KINDS[kind]).double()
    cached, uncached = (written(decoder, system, thinking) for decoder in (CachedDecoder, UncachedDecoder))
    for one, two in zip(cached, uncached, strict=True):
        assert one.tokens == two.tokens and one.steps == two.steps
        assert len(one.tokens) == 15 > BLOCK
        assert one.energies == pytest.approx(two.energies, rel=1e-5, abs=1e-6)
    assert len({one.text for one in cached}) == len(PROMPTS)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_in_float32_probabilities_agree(kind: str):
    system = shaken(*KINDS[kind], noise=0.05)
    probe = system.probe(batch_of(system))
    assert probe.cached is not None
    full, stepwise = probe.predict(probe.batch), probe.cached(probe.batch["inputs"])
    assert full.shape == stepwise.shape and full.std() > 0.1
    # Every step multiplies what rounding made of the one before: two steps keep the limit, three do not.
    limit = 1e-5 if system.walk.steps == 2 else 1e-4
    torch.testing.assert_close(full.softmax(-1), stepwise.softmax(-1), rtol=0, atol=limit)


def opened(system: EnergySystem, num: int = 3) -> tuple[list, Tensor]:
    tokens = torch.tensor([CHARS.encode("the quick b").tolist()]).expand(2, -1)
    caches = system.model.new_caches(2)
    for t in range(tokens.shape[1]):
        memories = system.model.for_landscapes([system.model.remember(c, tokens[:, t : t + 1]) for c in caches])
    return memories, torch.randn(2, num, system.model.vocab, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def test_candidates_of_a_row_do_not_see_each_other():
    system = shaken()
    memories, z_BNV = opened(system)
    together = think(system, memories, z_BNV, Thinking(3))
    for n in range(3):
        alone = think(system, memories, z_BNV[:, n : n + 1], Thinking(3))
        torch.testing.assert_close(together.z_BNV[:, n : n + 1], alone.z_BNV, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_thinking_is_the_walk_and_energies_are_those_of_where_it_ends():
    system = shaken()
    memories, z_BNV = opened(system)
    thought = think(system, memories, z_BNV, Thinking(5))
    (*_, last) = walk(system.model, memories, z_BNV, 5, system.alpha(), "prob")
    assert torch.equal(thought.z_BNV, last.z_BTV)
    assert torch.equal(thought.energy_BN, system.model.energy(last.z_BTV.softmax(-1), memories[-1], 1))


def test_the_lowest_energy_wins():
    thought = Thought(torch.arange(12.0).view(2, 3, 2), torch.tensor([[3.0, 1.0, 2.0], [0.0, 5.0, -1.0]]), torch.ones(2, 3))
    best = thought.best()
    assert best.energy_BN.tolist() == [[1.0], [-1.0]]
    assert best.z_BNV[:, 0].tolist() == [[2.0, 3.0], [10.0, 11.0]]


@torch.no_grad()
def test_a_candidate_stops_where_its_energy_stops_falling():
    system = shaken(*KINDS["s2"])
    memories, z_BNV = opened(system)
    steps = list(walk(system.model, memories, z_BNV, 13, system.alpha(), "prob"))
    falls = torch.stack([a.energy_BT - b.energy_BT for a, b in itertools.pairwise(steps)])
    tol = float(falls[:4].flatten().sort().values[8])
    thought = think(system, memories, z_BNV, Thinking(12, early_stop=tol)) if tol > 0 else None
    assert thought is not None, "the test needs falls of energy to choose a limit among"
    expected = ((falls[:11] >= tol).cumprod(0).sum(0) + 1).float()
    assert torch.equal(thought.steps_BN, expected) and len(expected.unique()) > 1
    for row, n in ((0, 0), (1, 2)):
        last = steps[int(expected[row, n]) - 1].z_BTV[row, n]
        assert torch.equal(thought.z_BNV[row, n], last)
    assert (think(system, memories, z_BNV, Thinking(5, early_stop=1e9)).steps_BN == 1).all()


def sampled(system, folder: Path, **options):
    engine = Engine(system, system.config, torch.device("cpu"))
    with engine.evaluating():
        return system.sample(Request(folder, options), engine)


def test_a_sample_is_repeatable_and_tells_its_energies(tmp_path: Path):
    system = shaken()
    options = {"prompt": "the ", "tokens": 5, "think": 3, "best_of": 2, "seed": 4}
    shown = sampled(system, tmp_path, **options)
    assert shown == sampled(system, tmp_path, **options)
    assert shown.text.startswith("the ") and "energy of each token, after 3.00 steps" in shown.text
    assert shown.text.count(":-") + shown.text.count(":0") + shown.text.count(":1") >= 1
    assert shown.text != sampled(system, tmp_path, **{**options, "seed": 5}).text
    assert sampled(make_plain(), tmp_path, prompt="the ", tokens=5).text.startswith("the ")


def test_an_empty_prompt_starts_a_document(tmp_path: Path):
    system = make(tokenizer=BYTES)
    assert len(BYTES.separator) == 1
    assert sampled(system, tmp_path, prompt="", tokens=3).text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"think": 0}, "think=0 is out of range"),
        ({"best_of": -1}, "best_of=-1 is out of range"),
        ({"early_stop": -0.5}, "early_stop=-0.5 is out of range"),
        ({"early_stop": float("nan")}, "early_stop=nan is out of range"),
        ({"temperature": -1.0}, "temperature=-1.0 is out of range"),
        ({"latents": 3}, "does not know --latents"),
    ],
    ids=str,
)
def test_bad_options(options, words: str, tmp_path: Path):
    with pytest.raises(UserError, match=words):
        sampled(make(), tmp_path, **options)


@pytest.mark.parametrize("option", ["think", "best_of", "early_stop"])
def test_a_plain_run_has_no_energies(option: str, tmp_path: Path):
    with pytest.raises(UserError, match=f"--{option.replace('_', '-')} needs energies"):
        sampled(make_plain(), tmp_path, **{option: 2})
