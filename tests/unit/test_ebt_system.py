"""The ebt systems: what a step trains, replay, exact evaluation, the end of text, inference curves, and what is refused."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from ebt_samples import BLOCK, BYTES, CHARS, STEP_TERMS, TEXT, TINY, batch_of, make, make_config, make_data, make_plain
from helpers import assert_close_in_float, assert_same_end, offline, resume, start, stop_at
from torch.utils.flop_counter import FlopCounterMode

from seedbed import cli
from seedbed.data.feed import Feed
from seedbed.errors import UserError
from seedbed.recipes import find
from seedbed.recipes.ebt import evaluate, optimize
from seedbed.recipes.ebt import system as system_file
from seedbed.recipes.ebt.evaluate import nats_by_steps
from seedbed.recipes.ebt.optimize import ReplayBuffer
from seedbed.recipes.ebt.system import EnergySystem, build, require_memory
from seedbed.track.run import Run
from seedbed.train.engine import Engine
from seedbed.train.system import Sample

S2 = [
    "model.mcmc.replay_buffer=8",
    "model.step_embed=none",
    "model.mcmc.num_landscapes=1",
    "model.mcmc.num_steps=3",
    "model.mcmc.min_steps=2",
]
S2 += [
    "model.mcmc.loss=last",
    "model.mcmc.langevin_noise=3",
    "model.mcmc.random_alpha=2",
    "model.mcmc.learn_alpha=false",
]


def engine_of(system: EnergySystem) -> Engine:
    return Engine(system, system.config, torch.device("cpu"))


def trained(system: EnergySystem, num_steps: int) -> Engine:
    engine, config = engine_of(system), system.config
    feed = Feed(system.data.train, batch=config.batch, parts=config.accum, seed=1, device=engine.device)
    for step in range(num_steps):
        feed.load(step * config.batch)
        engine.variant = system.variant(step, num_steps)
        engine.begin(step, 0.5)
        engine.step(feed.part)
    return engine


# ---- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [[], S2], ids=["s1", "s2"])
def test_metric_names_do_not_depend_on_the_variant(settings: list[str]):
    system = make(*settings, "every.log=3")
    engine = engine_of(system)
    found = {}
    for step in range(12):
        engine.variant = system.variant(step, 12)
        found[engine.variant] = system.loss(batch_of(system), engine)[1]
    assert {look for _, look in found} == {True, False}
    assert {num for num, _ in found} == ({2, 3} if settings else {2})
    names = [list(measures) for measures in found.values()]
    assert all(n == names[0] for n in names)
    for (num, look), measures in found.items():
        assert math.isfinite(measures[f"loss_{num}"]) and math.isfinite(measures["gap"]) == look
    assert [look for _, look in (system.variant(s, 12) for s in range(6))] == [False, False, True] * 2


def test_loss_is_the_mean_over_steps_or_the_last():
    for name in ("each", "last"):
        system = make(f"model.mcmc.loss={name}")
        loss, found = system.loss(batch_of(system), offline(system))
        steps = torch.stack([found["loss_1"], found["loss_2"]])
        torch.testing.assert_close(loss.detach(), steps.mean() if name == "each" else steps[-1])


def test_initial_predictions_do_not_depend_on_the_batch():
    """The loss of a batch is that of its rows one by one."""
    system = make("model.mcmc.langevin_noise=1", "model.mcmc.random_alpha=2")
    whole = system.loss(batch_of(system), offline(system))[0]
    parts = [system.loss(batch_of(system, 1, first=n), offline(system))[0] for n in range(4)]
    torch.testing.assert_close(torch.stack(parts).mean(), whole, rtol=1e-5, atol=1e-5)


def test_accumulation_changes_nothing():
    whole, parts = make(), make("accum=2")
    for system in (whole, parts):
        trained(system, 3)
    for one, two in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)


def test_training_lowers_loss_and_energy():
    system = make("optim.lr=0.01", "schedule.warmup=0")
    before, _ = system.loss(batch_of(system), offline(system))
    engine = trained(system, 60)
    engine.variant = (2, True)
    after, found = system.loss(batch_of(system), engine)
    assert after < before - 0.7
    assert found["gap"] > 0 and found["gap_negative"] < 0.2


def test_evaluation_loss_has_no_noise():
    settings = ["model.step_embed=none", "model.mcmc.num_landscapes=1", "model.mcmc.num_steps=3", "model.mcmc.loss=last"]
    system, normal = make(*S2), make(*settings)
    batch = batch_of(system)
    noisy = system.loss(batch, offline(system))[0]
    expected = normal.loss(batch, offline(normal))[0]
    assert abs(noisy - expected) > 0.1
    assert_close_in_float(system.eval().loss(batch, offline(system))[0], expected, 3 * STEP_TERMS)


HELD = {"s1": [], "s2": S2, "mirror": ["model.mcmc.space=mirror", "model.step_embed=prefix"]}
HELD["all"] = ["model.mcmc.backprop_through=all"]  # nothing is detached there


@pytest.mark.parametrize("settings", HELD.values(), ids=HELD)
def test_probe_holds_detached_inputs(settings: list[str]):
    """Its loss has the value and the gradient of the one that training descends, and no other dependence on the weights."""
    system = make(*settings)
    batch, engine = batch_of(system), engine_of(system)
    engine.variant = system.variant(0, system.config.steps)
    probe = system.probe(batch)
    assert probe.held is not None
    held, params = probe.held(), list(system.model.parameters())
    loss = system.loss(batch, engine)[0]
    torch.testing.assert_close(held(), loss)
    for one, two in zip(*(torch.autograd.grad(x, params, allow_unused=True) for x in (held(), loss)), strict=True):
        assert (one is None) == (two is None)
        if one is not None and two is not None:
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "settings", [[], ["model.step_embed=prefix", "model.mcmc.num_steps=3"], ["model.mcmc.loss=last"]], ids=str
)
def test_flops_equal_torch_counts(settings: list[str]):
    system = make(*settings)
    with FlopCounterMode(display=False) as counter:
        system.loss(batch_of(system), offline(system))[0].backward()
    assert counter.get_total_flops() / 4 == pytest.approx(system.flops_per_item(), rel=0.06)


# ---- replay ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write_back", [True, False])
def test_replay_buffer_continues_rows_and_keeps_the_newest(write_back: bool):
    replay, vocab = ReplayBuffer(8, BLOCK, 5, seed=1, write_back=write_back), 5
    place = torch.arange(4 * BLOCK).view(4, BLOCK)

    def turn(number: int):
        index = torch.arange(4) + 4 * number
        tokens = (torch.arange(4)[:, None] + 100 * number).expand(4, BLOCK + 1)
        batch = replay.sample(tokens, torch.zeros(4, BLOCK, vocab), place, index)
        end = batch.z_BTV + 1.0
        replay.store(batch, end, index)
        return batch

    first = turn(0)
    assert first.tokens_BL.shape == (6, BLOCK + 1) and torch.equal(first.tokens_BL[4:], first.tokens_BL[:2])
    assert replay.known_R.tolist() == [True] * 4 + [False] * 4
    turn(1)
    assert replay.known_R.all()
    seen = set()
    for number in range(2, 12):
        before = replay.tokens_RL[:, 0].clone(), replay.z_RTV[:, 0, 0].clone()
        batch = turn(number)
        assert batch.known_h.all() and batch.slot_h[0] < 4 <= batch.slot_h[1] < 8
        assert torch.equal(batch.tokens_BL[4:, 0], before[0][batch.slot_h])
        assert torch.equal(batch.z_BTV[4:, 0, 0], before[1][batch.slot_h])
        newest = [(4 * number + n) % 8 for n in range(4)]
        assert replay.tokens_RL[newest, 0].tolist() == [100 * number + n for n in range(4)]
        seen |= set(replay.z_RTV[:, 0, 0].tolist())
    assert seen == ({1.0, 2.0} if write_back else {1.0})


def test_replay_buffer_is_part_of_the_loss_and_of_the_state():
    system = make(*S2)
    assert system.replay is not None
    engine = trained(system, 3)
    assert bool(system.replay.known_R.all())
    tensors = engine.tensors()["model"]
    assert "replay.z_RTV" in tensors and tensors["replay.z_RTV"].abs().sum() > 0
    kept = system.replay.z_RTV.clone()
    batch = batch_of(system)
    one = system.loss(batch, offline(system))[0]
    system.replay.z_RTV.copy_(kept.flip(-1))
    assert not torch.equal(one, system.loss(batch, offline(system))[0])


@pytest.mark.parametrize("settings", [[], S2], ids=["s1", "s2"])
def test_resume_equals_uninterrupted_run(settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text = tmp_path / "small.txt"
    text.write_text(TEXT)
    chosen = [*TINY, f"data.text={text}", "data.tokenizer=char", "steps=8", "every.log=2", "every.eval=4", "every.save=4"]
    chosen += ["limit.valid=2", *settings]
    monkeypatch.setattr(EnergySystem, "sample", lambda *given: Sample())
    assert start(tmp_path, "whole", *chosen, recipe="ebt/demo") == 0
    stop_at(5, monkeypatch)
    start(tmp_path, "torn", *chosen, recipe="ebt/demo")
    assert resume(tmp_path, "torn") == 0
    assert_same_end(tmp_path, "whole", "torn")
    rows = Run.open(tmp_path, "whole").rows()
    assert all(math.isfinite(row["gap"]) and math.isfinite(row["alpha"]) for row in rows)


# ---- evaluation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [[], S2], ids=["s1", "s2"])
def test_evaluation_is_exact_deterministic_and_without_noise(settings: list[str], monkeypatch: pytest.MonkeyPatch):
    system = make(*settings)
    engine = engine_of(system)
    first = system.evaluate(system.data.valid, engine)
    torch.manual_seed(5)
    assert system.evaluate(system.data.valid, engine) == first
    monkeypatch.setitem(evaluate.EVAL_LOGITS, "cpu", 1)
    one_by_one = system.evaluate(system.data.valid, engine)
    assert_close_in_float(one_by_one["nats"], first["nats"], 3 * STEP_TERMS)
    assert first["perplexity"] == pytest.approx(math.exp(first["nats"]))
    assert first["bits_per_byte"] == pytest.approx(first["nats"] / math.log(2))
    by_start = nats_by_steps(system, system.data.valid, [system.mcmc.num_steps], offline(system), samples=1)[0]
    assert by_start != first["nats"] and by_start == pytest.approx(first["nats"], rel=0.3)


def test_plain_evaluation_counts_every_target_once():
    system = make_plain()
    found = system.evaluate(system.data.valid, offline(system))
    tokens = torch.from_numpy(system.data.valid.tokens.astype(np.int64))
    nats = 0.0
    for first in range(0, len(tokens) - 1, BLOCK):
        part = tokens[first : first + BLOCK + 1][None]
        with torch.no_grad():
            logits = system.logits(part[:, :-1])
        nats += torch.nn.functional.cross_entropy(logits[0], part[0, 1:], reduction="sum").item()
    assert found["nats"] == pytest.approx(nats / (len(tokens) - 1), rel=1e-5)


def test_end_of_text_is_trained(tmp_path: Path):
    """Documents of one letter: after it comes the separator, and a model must learn to end there."""
    end = int(BYTES.separator[0])
    letter = int(BYTES.encode("t")[0])
    ids = np.array([letter, end] * 400, BYTES.dtype)
    system = build(make_config("optim.lr=0.02", "schedule.warmup=0"), make_data(ids, BYTES))
    assert isinstance(system, EnergySystem)
    trained(system, 40)
    tokens = torch.tensor([[letter, end, letter]])
    with torch.no_grad():
        (*_, last) = evaluate.optimize(
            system.model, system.model.encode_context(tokens), torch.zeros(1, 3, system.model.vocab), 2, system.alpha(), "prob"
        )
    p_TV = last.z_BTV.softmax(-1)[0]
    assert p_TV[0, end] > 0.9 and p_TV[2, end] > 0.9 and p_TV[1, letter] > 0.9


# ---- inference curves----------------------------------------------------------------------------------------------------


def test_inference_curves_equal_evaluation(tmp_path: Path):
    system = make(tokenizer=BYTES)
    source = system.data.valid
    with torch.no_grad():
        found = evaluate.curve(system, source, num_samples=4)
        nats = nats_by_steps(system, source, [1, 2, 30], offline(system), samples=4)
    by_steps = dict(zip(found["steps"], found["nats"], strict=True))
    assert [by_steps[k] for k in (1, 2, 30)] == pytest.approx(nats, rel=1e-5)
    assert found["starts"] == [1, 2, 4] and found["num_tokens"] == source.num_targets
    ways = found["by_starts"]
    assert len({ways[name][0] for name in ways}) <= 2 and ways["lowest energy"][0] == pytest.approx(ways["oracle"][0])
    for way in ("lowest energy", "at random"):
        assert all(best <= other + 1e-9 for best, other in zip(ways["oracle"], ways[way], strict=True))
    assert ways["average of all"][-1] <= ways["at random"][-1]
    assert found["lowest_energy"][1] == pytest.approx(ways["lowest energy"])
    assert found["gain"][1] == 0.0 and -1.0 <= found["rank_correlation"] <= 1.0


def test_rank_correlation_and_texts():
    x = torch.randn(50, generator=torch.Generator().manual_seed(0))
    assert evaluate.rank_correlation(x, x.exp()) == pytest.approx(1.0)
    assert evaluate.rank_correlation(x, -(x**3)) == pytest.approx(-1.0)
    closing = {"(": ")", "[": "]", "{": "}"}
    for line in evaluate.dyck(500).splitlines()[:-1]:
        stack = []
        for character in line:
            if character in closing:
                stack.append(closing[character])
            else:
                assert stack.pop() == character
        assert not stack
    for line in evaluate.sums(500).splitlines()[:-1]:
        left, _, right = line.partition("=")
        assert sum(map(int, left.split("+"))) == int(right)


@pytest.mark.slow
def test_inference_curves_and_plain_baseline_at_the_end_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(system_file.END_TOKENS, "cpu", 48)
    text, other = tmp_path / "small.txt", tmp_path / "other.txt"
    text.write_text(TEXT)
    other.write_text("dog; fox\n" * 40)
    chosen = [*TINY[:-1], f"data.text={text}", "data.tokenizer=char", "steps=2", "limit.valid=4"]
    assert start(tmp_path, "a", *chosen, recipe="ebt/demo") == 0
    shown = next(e for e in Run.open(tmp_path, "a").events() if e["kind"] == "sample")
    assert "plain transformer" in shown["text"] and "held-out" in shown["text"] and "dyck: not measured" in shown["text"]
    words = ["inference-curve", "a", "--tokens", "40", "--starts", "2", "--text", str(other), "--runs", str(tmp_path)]
    assert cli.dispatch(words) == 0
    found = json.loads((tmp_path / "a" / "thinking" / "thinking.json").read_text())
    assert set(found["sets"]) == {"held-out", str(other)} and found["sets"]["held-out"]["num_tokens"] == 40
    assert (tmp_path / "a" / "thinking" / "thinking.png").read_bytes().startswith(b"\x89PNG")


def test_alarms():
    normal = {"move_rms": 2.0, "gap_negative": 0.1, "entropy": 2.0, "alpha": 6.0, "loss": 1.0}
    assert (
        optimize.step_alarms(normal, 1.0, 5.0) == [] and optimize.step_alarms(dict.fromkeys(normal, float("nan")), 1.0, 5.0) == []
    )
    for name, value, kind in (
        ("move_rms", 150.0, "mcmc_large_step"),
        ("move_rms", 0.001, "mcmc_small_step"),
        ("gap_negative", 0.3, "mcmc_energy_rises"),
        ("entropy", 0.001, "mcmc_low_entropy"),
        ("alpha", 60.0, "mcmc_alpha_drift"),
        ("alpha", 0.4, "mcmc_alpha_drift"),
    ):
        (alarm,) = optimize.step_alarms({**normal, name: value}, 1.0, 5.0)
        assert alarm.kind == kind and alarm.facts == {name: value}
    system = make("schedule.warmup=0.5")
    assert not system.alarms({**normal, "move_rms": 150.0}, 0.4) and system.alarms({**normal, "move_rms": 150.0}, 0.6)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["model.walk.spread=2"], "`model.walk.spread` is now called `model.mcmc.random_alpha`"),
        (["model.walk.alpha=2"], "`model.walk.alpha` is now called `model.mcmc.alpha`"),
        (["model.mcmc.num_steps=0"], "model.mcmc.num_steps=0 is out of range"),
        (["model.mcmc.alpha=-1"], "model.mcmc.alpha=-1.0 is out of range"),
        (["model.mcmc.alpha=0"], "model.mcmc.alpha=0.0 is out of range"),
        (["model.mcmc.langevin_noise=-1"], "out of range"),
        (["model.mcmc.random_alpha=0.5"], "out of range"),
        (["model.mcmc.min_steps=3"], "min_steps=3 is above model.mcmc.num_steps=2"),
        (["model.width=15"], "does not divide"),
        (["model.heads=16"], "heads of even width"),
        (["model.step_embed=none"], "differ by their embedding"),
        (["model.size=huge"], "model.size=huge is not one of"),
    ],
    ids=str,
)
def test_bad_settings(settings: list[str], words: str):
    with pytest.raises(UserError, match=words):
        make_config(*settings)


def test_replay_buffer_smaller_than_a_batch_is_refused():
    with pytest.raises(UserError, match="replay_buffer=3 cannot hold one batch of 4"):
        make("model.mcmc.replay_buffer=3")


def test_memory_of_logits_that_do_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(system_file, "device_memory", lambda device: 8e9)
    config = make_config("batch=32", "data.block=256", "model.mcmc.replay_buffer=192")
    device = torch.device("cpu")
    with pytest.raises(UserError) as caught:
        require_memory(config, 50_277, device)
    assert "48 rows x 256 tokens x 50,277 ids x 4 bytes = 2.47 GB" in str(caught.value)
    assert "replay of 192: 9.88 GB" in str(caught.value) and "8.0 GB" in str(caught.value)
    assert require_memory(config, 257, device).startswith("0.24 GB")
    system = make()
    monkeypatch.setattr(system_file, "device_memory", lambda device: 1.0)
    with pytest.raises(UserError, match="do not fit"):
        system.describe()


def test_presets_have_the_settings_of_their_names():
    recipe, _ = find("ebt/demo")
    presets = {name: make() for name, make in recipe.presets.items()}
    assert presets["s2"].model.mcmc.replay_buffer == 192 and presets["s2"].model.mcmc.random_alpha == 2.0
    assert presets["replica"].model.step_embed == "prefix" and presets["replica"].model.mcmc.alpha == 500
    for name in ("s1", "s2", "plain", "replica"):
        assert presets[name].model.shape == (6, 6, 384)
    assert presets["plain"].model.kind == "plain"
    for name in ("shakespeare-s1", "shakespeare-s2"):
        assert presets[name].data.tokenizer == "char"


def test_compile_units_hold_the_gradient_function_and_the_noise():
    system = make()
    units = list(system.compile_units())
    assert system.model in units and system.noise in units and all(block in units for block in system.model.blocks)
    assert CHARS.vocab_size == system.noise.vocab
