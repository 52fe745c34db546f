"""The gpt system: the loss it trains on, exact evaluation, samples, and export that loads back bit for bit."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import offline

from seedbed.config import Config, Optim, Schedule
from seedbed.data.bpe import train_bpe
from seedbed.data.corpus import TextConfig
from seedbed.data.text import TextData, TextSource
from seedbed.data.tokenizers import CharTokenizer
from seedbed.errors import UserError
from seedbed.recipes.gpt import system as system_file
from seedbed.recipes.gpt.presets import ModelConfig
from seedbed.recipes.gpt.system import GPT, build
from seedbed.train import exports, inference_weights
from seedbed.train.engine import Engine
from seedbed.train.system import Request

TEXT = "the quick brown fox jumps over the lazy dog; größe is size.\n" * 20
BLOCK = 16
CHARS = CharTokenizer(sorted(set(TEXT)))
BPE = train_bpe([TEXT], 300)


def make_data(tokenizer=CHARS) -> TextData:
    ids = tokenizer.encode(TEXT)
    cut = len(ids) * 3 // 4
    train = TextSource(ids[:cut], BLOCK, "blocks", 1, tokenizer.token_bytes)
    valid = TextSource(ids[cut:], BLOCK, "blocks", 1, tokenizer.token_bytes)
    return TextData(train, valid, {}, tokenizer, None, tokenizer.vocab_size)  # type: ignore[arg-type]


def make_config(**model) -> Config:
    shape = ModelConfig(**{"depth": 2, "heads": 2, "width": 32, "out_init": 0.5, **model})
    return Config(
        model=shape,
        data=TextConfig(block=BLOCK),
        optim=Optim(lr=1e-2),
        schedule=Schedule(kind="constant", warmup=0.0),
        steps=60,
        batch=8,
        device="cpu",
    )


def make(tokenizer=CHARS, **model) -> GPT:
    return build(make_config(**model), make_data(tokenizer))


def batch_of(system: GPT, rows: int = 8) -> dict[str, torch.Tensor]:
    tokens = system.data.train.tokens
    starts = np.arange(rows) * BLOCK
    return {"tokens": torch.from_numpy(np.stack([tokens[s : s + BLOCK + 1] for s in starts]).astype(np.int64))}


# ---- loss ---------------------------------------------------------------------------------------------------------------


def test_targets_are_the_next_tokens():
    """A model that copies its input must score badly, one that knows the next token perfectly."""
    system = make()
    batch = batch_of(system)
    tokens_BT = batch["tokens"]

    def loss_of(answer_BT):
        one_hot = torch.nn.functional.one_hot(answer_BT, CHARS.vocab_size).float() * 50
        return torch.nn.functional.cross_entropy(one_hot.flatten(0, 1), tokens_BT[:, 1:].flatten())

    seen = {}
    system.model.forward = lambda x, y, *dtype: seen.update(x=x, y=y) or torch.zeros(())
    system.loss(batch, offline(system))
    assert torch.equal(seen["x"][:, 1:], seen["y"][:, :-1]) and torch.equal(seen["y"], tokens_BT[:, 1:])
    assert loss_of(seen["y"]) < 1e-6 and loss_of(seen["x"]) > 10
    assert system.num_targets(batch) == 8 * BLOCK


def test_training_learns_a_text_it_sees_again_and_again():
    system = make()
    engine, batch = Engine(system, system.config, torch.device("cpu")), batch_of(make())
    losses = []
    for step in range(60):
        engine.begin(step, (step + 1) / 60)
        losses.append(engine.step(lambda part: batch)["loss"].item())
    assert abs(losses[0] - math.log(CHARS.vocab_size)) < 0.1
    assert losses[-1] < 0.5 * losses[0]


def test_dropout_differs_between_steps_and_repeats_with_the_seed():
    system, batch = make(dropout=0.5).train(), batch_of(make())
    torch.manual_seed(0)
    first, second = (system.loss(batch, offline(system))[0].item() for _ in range(2))
    torch.manual_seed(0)
    assert first != second and system.loss(batch, offline(system))[0].item() == first


def test_flops_count_a_block():
    system = make()
    assert system.flops_per_item() == system.model.flops_per_token() * BLOCK > 0


def test_compile_units_cover_the_blocks_and_the_loss():
    system = make()
    assert list(system.compile_units()) == [*system.model.blocks, system.model.head]


# ---- evaluation ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def reference_nats(system: GPT) -> float:
    """One window at a time, one target at a time."""
    tokens, total = torch.from_numpy(system.data.valid.tokens.astype(np.int64)), 0.0
    for start in range(0, len(tokens) - 1, BLOCK):
        window = tokens[start : start + BLOCK + 1]
        logs = system.model.logits(window[None, :-1])[0].double().log_softmax(-1)
        total -= sum(logs[i, window[i + 1]].item() for i in range(len(window) - 1))
    return total


@pytest.mark.parametrize("tokenizer", [CHARS, BPE], ids=["char", "bpe"])
def test_evaluation_scores_every_target_once(tokenizer):
    system = make(tokenizer, dropout=0.5).eval()
    valid = system.data.valid
    assert valid.num_targets % BLOCK, "the tail must be part of the test"
    nats, numbers = reference_nats(system), system.evaluate(valid, offline(system))
    num_bytes = len(tokenizer.bytes_of(valid.tokens[1:].tolist()))
    assert next(iter(numbers)) == "loss", "the first number decides which checkpoint is best"
    assert numbers["loss"] == pytest.approx(nats / (len(valid.tokens) - 1), rel=1e-6)
    assert numbers["perplexity"] == pytest.approx(math.exp(numbers["loss"]))
    assert numbers["bits_per_byte"] == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-6)


def test_evaluation_is_the_same_for_any_batch_size_and_restores_the_mode(monkeypatch):
    system, seen = make(dropout=0.5).train(), []
    for windows_at_once in (1, 3, 1000):
        logits = windows_at_once * BLOCK * len(system.model.head_weight)
        monkeypatch.setattr(system_file, "EVAL_LOGITS", {"cpu": logits})
        seen += [system.evaluate(system.data.valid, offline(system))["loss"] for _ in range(2)]
        assert system.model.training
    assert seen[0] == seen[1] and seen[2] == seen[3]
    assert max(seen) - min(seen) < 1e-6


def test_evaluation_of_an_uninformed_model_is_the_log_of_the_vocabulary():
    system = make(tied=False)
    with torch.no_grad():
        system.model.unembed.weight.zero_()
    assert system.evaluate(system.data.valid, offline(system))["loss"] == pytest.approx(math.log(CHARS.vocab_size), rel=1e-6)


def test_evaluation_does_not_compile_its_shapes():
    system, calls = make(), []
    expected = system.evaluate(system.data.valid, offline(system))
    for unit in system.compile_units():
        unit.compile(backend=lambda graph, inputs: calls.append(graph) or graph, dynamic=False)
    assert system.evaluate(system.data.valid, offline(system)) == expected and calls == []


# ---- samples ------------------------------------------------------------------------------------------------------------


def test_samples_repeat_start_with_the_prompt_and_stream():
    system, written = make(dropout=0.5).train(), []
    request = Request(Path("unused"), {"prompt": "the ", "tokens": 30, "num": 2}, written.append)
    shown = system.sample(request, offline(system))
    assert shown.text.startswith("the ") and "sample 2 of 2\nthe " in shown.text
    assert "".join(written) == shown.text + "\n" and len(written) > 10
    assert system.sample(request, offline(system)).text == shown.text and system.model.training


def test_samples_begin_with_the_validation_text_by_default():
    system = make()
    shown = system.sample(Request(Path("unused")), offline(system))
    first = CHARS.decode(system.data.valid.tokens[:24].tolist())
    assert shown.text.startswith(first) and len(shown.text) == len(first) + 200


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 3}, "does not know"),
        ({"prompt": "€"}, "not in the tokenizer"),
        ({"tokens": 0}, "tokens"),
        ({"top_p": 2.0}, "top_p"),
    ],
)
def test_sample_options_out_of_range_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        (system := make()).sample(Request(Path("unused"), options), offline(system))


def test_sample_of_random_tokens_is_refused():
    system = make()
    system.tokenizer = None
    assert system.sample(Request(Path("unused")), offline(system)).text == ""
    with pytest.raises(UserError, match="random tokens"):
        system.sample(Request(Path("unused"), {"prompt": "a"}), offline(system))
    assert "x" not in system.describe()


def test_description_shows_size_against_data_and_the_shift():
    facts = make().describe()
    assert facts["x"] == repr(TEXT[:BLOCK]) and facts["y"] == repr(TEXT[1 : BLOCK + 1])
    assert "Chinchilla: 20" in facts["tokens/parameter"]
    assert "attention" not in facts, "off CUDA there is nothing to choose"


# ---- export -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", [CHARS, BPE], ids=["char", "bpe"])
def test_export_gives_the_same_logits_bit_for_bit(tmp_path, tokenizer):
    shape = {"tied": False, "skips": True, "gate": True, "values_x0": True, "kv_heads": 1}
    system, other = make(tokenizer, **shape).eval(), make(tokenizer, **shape)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    exports.write(offline(system), {"config": {}, "data": {}}, tmp_path)
    inference_weights.restore(offline(other), exports.read(tmp_path))
    x_BT = batch_of(system)["tokens"]
    assert torch.equal(other.model.logits(x_BT), system.model.logits(x_BT)) and not other.training


def test_seed_of_the_config_decides_the_model():
    a, b = make(), make()
    other = build(dataclasses.replace(make_config(), seed=2), make_data())
    assert torch.equal(a.model.embed.weight, b.model.embed.weight)
    assert not torch.equal(a.model.embed.weight, other.model.embed.weight)
