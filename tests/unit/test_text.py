"""Blocks of text: exact counts, every target once, and evaluation that misses nothing."""

import numpy as np
import pytest
import torch

from seedbed.config import Config
from seedbed.data.corpus import TextConfig
from seedbed.data.feed import Feed
from seedbed.data.text import TextSource, open_text, windows
from seedbed.errors import UserError
from seedbed.recipes.gpt.data import open_data

CPU = torch.device("cpu")
CASES = [
    (n, block)
    for block in (1, 2, 7, 64)
    for n in (2 * block, 2 * block + 1, 3 * block, 3 * block + 1, 10 * block + 5)
    if n > block
]


def epoch_starts(source: TextSource, epoch: int) -> np.ndarray:
    index = np.arange(source.num_items)
    return source.locate(np.full(source.num_items, epoch), index)


@pytest.mark.parametrize(("n", "block"), CASES)
def test_blocks_predict_every_target_once(n, block):
    source = TextSource(np.arange(n), block, "blocks", seed=1)
    targets = [t for start in epoch_starts(source, 0) for t in range(start + 1, start + block + 1)]
    assert sorted(targets) == list(range(1, source.num_items * block + 1))
    assert source.num_items == (n - 1) // block and source.num_dropped == (n - 1) % block
    assert targets and max(targets) <= n - 1


@pytest.mark.parametrize(("n", "block"), CASES)
def test_phase_moves_the_borders_and_keeps_the_count(n, block):
    source = TextSource(np.arange(n), block, "phase", seed=1)
    assert source.num_items == (n - block) // block
    seen = set()
    for epoch in range(200):
        starts = epoch_starts(source, epoch)
        assert 0 <= starts[0] < block and starts[-1] + block <= n - 1
        assert (np.diff(starts) == block).all()
        seen.add(int(starts[0]))
    assert len(seen) > 0.9 * block or len(seen) == block


def test_tiny_shakespeare_has_the_known_counts():
    tokens = np.zeros(1_003_854, np.uint8)
    assert TextSource(tokens, 256, "blocks", 1).num_items == 3921
    assert TextSource(tokens, 256, "blocks", 1).num_dropped == 77
    assert TextSource(tokens, 256, "phase", 1).num_items == 3920
    shapes = [w.shape for w in windows(TextSource(tokens[:111_540], 256, "blocks", 1), 1000)]
    assert shapes == [(435, 257), (1, 180)]


def test_random_starts_are_anywhere_and_repeatable():
    source = TextSource(np.arange(5000), 10, "random", seed=3)
    starts = np.concatenate([epoch_starts(source, e) for e in range(100)])
    assert starts.min() >= 0 and starts.max() == 5000 - 10 - 1
    assert abs(starts.mean() / 4989 - 0.5) < 0.01 and len(np.unique(starts)) > 4900
    assert np.array_equal(epoch_starts(source, 7), epoch_starts(TextSource(np.arange(5000), 10, "random", seed=3), 7))
    assert not np.array_equal(epoch_starts(source, 7), epoch_starts(TextSource(np.arange(5000), 10, "random", seed=4), 7))


@pytest.mark.parametrize("mode", ["blocks", "phase", "random"])
def test_batches_that_straddle_epochs(mode):
    source = TextSource(np.arange(100), 9, mode, seed=5)
    epochs = np.repeat([3, 4, 5], [4, source.num_items, 2])
    index = np.concatenate([np.arange(4), np.arange(source.num_items), np.arange(2)])
    together = source.locate(epochs, index)
    apart = [source.locate(epochs[i : i + 1], index[i : i + 1])[0] for i in range(len(index))]
    assert together.tolist() == apart


@pytest.mark.parametrize("mode", ["blocks", "phase", "random"])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
def test_text_batch_is_consecutive_tokens(mode, dtype):
    """Token i is i: what comes out of the feed must count up by one, and targets follow inputs."""
    source = TextSource(np.arange(250).astype(dtype), 16, mode, seed=2)
    feed = Feed(source, batch=4, parts=2, seed=2, device=CPU)
    for step in range(20):
        feed.load(4 * step)
        for k in range(2):
            tokens = feed.part(k)["tokens"]
            assert tokens.shape == (2, 17) and tokens.dtype == torch.int64
            assert (tokens[:, 1:] == tokens[:, :-1] + 1).all()


def test_token_ids_survive_their_narrow_dtype():
    tokens = np.array([65_535, 32_768, 32_767, 0, 1] * 20, np.uint16)
    for limit in (None, 0):
        feed = Feed(TextSource(tokens, 4, "blocks", 1), batch=2, parts=1, seed=1, device=CPU, limit_bytes=limit)
        feed.load(0)
        assert set(feed.part(0)["tokens"].flatten().tolist()) == {65_535, 32_768, 32_767, 0, 1}
        feed.close()


@pytest.mark.parametrize("batch", [1, 3, 64, 10_000])
@pytest.mark.parametrize(("n", "block"), CASES)
def test_windows_cover_every_target_once(n, block, batch):
    source = TextSource(np.arange(n), block, "blocks", seed=1)
    rows = [row for window in windows(source, batch) for row in window]
    assert torch.cat([row[1:] for row in rows]).tolist() == list(range(1, n))
    assert torch.cat([row[:-1] for row in rows]).tolist() == list(range(n - 1))
    assert all(len(row) == block + 1 for row in rows[: (n - 1) // block])
    assert all(len(w) <= batch for w in windows(source, batch))


def test_target_bytes_are_counted():
    tokens = np.array([0, 1, 2, 1, 0, 2] * 100, np.uint8)
    source = TextSource(tokens, 8, "blocks", 1, token_bytes=np.array([1, 2, 4]))
    assert source.num_target_bytes == sum([1, 2, 4][t] for t in tokens[1:])
    assert TextSource(tokens, 8, "blocks", 1).num_target_bytes == 0


@pytest.mark.parametrize(
    ("n", "block", "mode", "words"),
    [
        (100, 100, "blocks", r"has 100 tokens, and one block needs data\.block \+ 1 = 101; use data\.block=99 or less"),
        (10, 1024, "phase", r"has 10 tokens, and one block needs data\.block \+ 1 = 1,025; use data\.block=9 or less"),
        (
            150,
            100,
            "phase",
            r"has 150 tokens, and mode=phase needs 2 x data\.block = 200; use data\.mode=blocks or data\.block=75",
        ),
    ],
)
def test_text_with_too_few_tokens_for_a_block_is_refused(n, block, mode, words):
    with pytest.raises(UserError, match=words):
        TextSource(np.zeros(n, np.uint8), block, mode, 1)
    suggested = 75 if mode == "phase" and n > block else n - 1
    assert TextSource(np.zeros(n, np.uint8), suggested, "phase" if suggested == 75 else "blocks", 1).num_items >= 1


@pytest.fixture
def text(tmp_path, monkeypatch):
    monkeypatch.setenv("SEEDBED_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "a.txt"
    path.write_text("".join(f"Zeile {n}: schöne Wörter\n" for n in range(200)))
    return path


@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_text_decodes_to_its_source(text, kind):
    data = open_text(TextConfig(text=str(text), tokenizer=kind, vocab=300, block=32), seed=1)
    assert data.tokenizer is not None and data.vocab_size == data.tokenizer.vocab_size
    feed = Feed(data.train, batch=8, parts=1, seed=1, device=CPU)
    feed.load(0)
    for row in feed.part(0)["tokens"]:
        shown = data.tokenizer.bytes_of(row.tolist())
        assert shown in text.read_bytes()
    assert data.train.num_items == (len(data.train.tokens) - 32) // 32
    total = data.train.num_target_bytes + data.valid.num_target_bytes
    firsts = [int(data.tokenizer.token_bytes[s.tokens[0]]) for s in (data.train, data.valid)]
    assert total + sum(firsts) == len(text.read_bytes()) == data.facts["num_bytes"]


def test_text_facts_describe_the_data(text):
    data = open_data(Config(model=None, data=TextConfig(text=str(text), block=16), seed=3))
    assert data.facts["fingerprint"] == data.store.fingerprint
    assert data.facts["num_tokens"] + data.facts["num_valid_tokens"] == len(data.store.arrays["tokens"])
    assert data.train.seed == 3 and data.valid.mode == "blocks"
    again = open_data(Config(model=None, data=TextConfig(text=str(data.store.path), block=16), seed=3))
    assert again.facts["fingerprint"] == data.facts["fingerprint"]


def test_validation_split_shorter_than_a_block_is_refused(text):
    with pytest.raises(UserError, match=r"the validation part has \d+ tokens, and one block needs"):
        open_text(TextConfig(text=str(text), block=1000), seed=1)


def test_random_tokens_have_no_tokenizer(text):
    data = open_text(TextConfig(text="random:5000:70000", block=16), seed=1)
    assert data.tokenizer is None and data.vocab_size == 70_000 and data.valid.num_target_bytes == 0
    assert data.train.tokens.dtype == np.int32
