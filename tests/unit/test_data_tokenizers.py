"""Tokenizers: text comes back exactly, ids are stable, and what is not known has a defined answer."""

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from seedbed.data import tokenizers
from seedbed.data.bpe import ByteTokenizer, train_bpe
from seedbed.data.text_files import split_text
from seedbed.data.tokenise import char_table
from seedbed.data.tokenizers import TABLE_75, CharTokenizer, Tokenizer, load, token_dtype
from seedbed.errors import UserError

SRC = Path(__file__).resolve().parents[2] / "src"
NASTY = [
    "",
    " ",
    "\n",
    "a",
    "  leading and trailing  ",
    "tab\tnul\0bell\x07 del\x7f",
    "line\r\nline\rline\n\n\n   \n\t\nend",
    "no-break\u00a0space, thin\u2009space, ideographic\u3000space, separator\u2028here",
    "é = e\u0301, not \u00e9; ﬁ ﬃ Å \u212b K",
    "zero\u200bwidth \u200djoiner \ufeffbom \ufffd replacement",
    "עברית العربية हिन्दी ไทย 日本語 中文 한국어",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 \U0001d518 \U0010ffff",
    "<|endoftext|> <unk> <s> </s> [PAD]",
    "don't I'll we've 'tis ''' \"quoted\" 3.14159 1_000_000",
    "Ġ Ċ Ā ġ",
    "x" * 5000 + "\n" * 300 + " y" * 3000,
]


@pytest.fixture(scope="module")
def bpe() -> ByteTokenizer:
    words = [f"{a}{b}" for a in ("the", "cat", "sat", "mat", "don't", "日本語") for b in ("", "s", "ing", "ed", "1", ".")]
    # Pieces that end in blank lines teach a token for them, which a cut in the wrong place would bring out.
    return train_bpe([" ".join(words) * 3, *[f"{word}\n\n" for word in words] * 3], 400)


def random_text(seed: int, length: int) -> str:
    """Any code points but surrogates, with many spaces and line ends."""
    rng = random.Random(seed)
    pools = ["abc the,.'\n\n  \t", "éü\u00a0ßЖ中\u2028", "\U0001f600\U0001f1e9\U0010ffff\0\x7f"]
    return "".join(rng.choice(pools[0]) if rng.random() < 0.8 else rng.choice(pools[rng.randrange(1, 3)]) for _ in range(length))


@pytest.mark.parametrize("text", NASTY, ids=lambda t: repr(t[:12]))
def test_round_trip_of_any_text(bpe, text):
    char = CharTokenizer(sorted(set(text)) or ["a"])
    for tokenizer in (char, bpe):
        ids = tokenizer.encode(text)
        assert ids.dtype == tokenizer.dtype and (not ids.size or int(ids.max()) < tokenizer.vocab_size)
        assert tokenizer.decode(ids.tolist()) == text
        assert tokenizer.bytes_of(ids.tolist()) == text.encode()
        assert int(tokenizer.token_bytes[ids].sum()) == len(text.encode())


@pytest.mark.parametrize("seed", range(10))
def test_round_trip_of_random_text(bpe, seed):
    text = random_text(seed, 3000)
    for tokenizer in (CharTokenizer(sorted(set(text))), bpe):
        assert tokenizer.decode(tokenizer.encode(text).tolist()) == text


def test_surrogate_half_is_refused():
    text = "ok \ud800 \udfff"
    char = CharTokenizer(sorted(set(text)))
    assert char.decode(char.encode(text).tolist()) == text
    with pytest.raises(UserError, match="surrogate"):
        train_bpe(["aaa"], 257).encode(text)


@pytest.mark.parametrize("seed", range(10))
def test_chunking_does_not_change_the_tokens(bpe, seed, monkeypatch):
    """Long text is cut into shares; where a line ends between two words that changes nothing."""
    rng = random.Random(seed)
    words = ["the", "don't", "日本", "x=1;", "  y", "é", "...", "a  b", "\tz"]
    text = "".join(rng.choice(words) + rng.choice([" ", " ", "\n", "\n", "\n\n", " \n "]) for _ in range(800))
    whole = bpe.encode(text)
    monkeypatch.setattr("seedbed.data.bpe.SHARE", 500)
    assert all(part.endswith("\n") for part in list(split_text(text, 500))[:-1])
    assert np.array_equal(bpe.encode(text), whole)
    texts = [text, "", "one", text[:333]]
    assert all(np.array_equal(a, bpe.encode(t)) for a, t in zip(bpe.encode_all(texts), texts, strict=True))


@pytest.mark.parametrize("text", [*NASTY, "word " * 1000, "\n" * 5000, "ab\n" * 2000])
@pytest.mark.parametrize("limit", [1, 2, 7, 100])
def test_chunks_join_to_the_text(text, limit):
    parts = list(split_text(text, limit))
    assert "".join(parts) == text
    assert all(0 < len(p) <= limit for p in parts)


def test_bpe_learns_the_same_in_every_process(tmp_path):
    code = (
        "import sys; from seedbed.data.bpe import train_bpe;"
        "text = ' '.join(str(i * i % 977) + chr(97 + i % 26) for i in range(20000));"
        "print(train_bpe([text[i:i+5000] for i in range(0, len(text), 5000)], 600).fingerprint)"
    )
    prints = set()
    for threads, hashing in (("1", "0"), ("2", "1"), ("2", "random")):
        env = {"PYTHONPATH": str(SRC), "PYTHONHASHSEED": hashing, "RAYON_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "true"}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        prints.add(done.stdout.strip())
    assert len(prints) == 1 and len(prints.pop()) == 16


def test_bpe_merges_and_has_every_byte(bpe):
    assert 300 < bpe.vocab_size <= 400
    assert len(bpe.encode("the cat sat on the mat.")) < 12
    assert {bytes([b]) for b in range(256)} <= {bpe.bytes_of([i]) for i in range(bpe.vocab_size)}
    assert bpe.token_bytes[bpe.separator].tolist() == [0] and bpe.decode(bpe.separator.tolist()) == "<|endoftext|>"
    assert bpe.separator[0] not in bpe.encode("<|endoftext|>")


def test_decoding_incomplete_characters_gives_the_replacement(bpe):
    ids = bpe.encode("日").tolist()
    assert len(ids) >= 1
    single = next(i for i in range(bpe.vocab_size) if bpe.bytes_of([i]) == b"\xe6")
    assert bpe.decode([single]) == "\ufffd"


def test_char_table_is_sorted():
    counts = np.zeros(tokenizers.NUM_CODEPOINTS, np.int64)
    for c in "hello wörld 😀":
        counts[ord(c)] += 1
    assert char_table(counts) == sorted(set("hello wörld 😀"))


@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [(1, "u1"), (256, "u1"), (257, "<u2"), (50_257, "<u2"), (65_536, "<u2"), (65_537, "<i4"), (1 << 31, "<i4")],
)
def test_token_dtype_follows_the_vocabulary(vocab, dtype):
    assert token_dtype(vocab) == np.dtype(dtype)
    assert int(np.array([vocab - 1], token_dtype(vocab))[0]) == vocab - 1


def test_unknown_characters_are_listed():
    tokenizer = CharTokenizer("abc")
    with pytest.raises(UserError) as caught:
        tokenizer.encode("abcXaXéX")
    first, second = str(caught.value).splitlines()
    assert first.startswith("2 characters are not in the tokenizer's table: 'X' U+0058 3 times, first at character 3; ")
    assert first.endswith("'é' U+00E9 1 times, first at character 6")
    assert "data.unknown=unk" in second and "bpe" in second
    with pytest.raises(UserError, match="and 15 more"):
        tokenizer.encode("0123456789ABCDEFGHIJ")


def test_unknown_characters_have_one_id_when_asked():
    tokenizer = CharTokenizer("abc", unk=True, unknown="unk")
    assert tokenizer.vocab_size == 4
    assert tokenizer.encode("aXb😀").tolist() == [0, 3, 1, 3]
    assert tokenizer.decode([0, 3]) == "a\ufffd"


def test_char75_table():
    tokenizer = CharTokenizer(TABLE_75, unk=True)
    assert tokenizer.vocab_size == 75 and tokenizer.dtype == np.uint8
    shakespeare = "\n !$&',-.3:;?" + "".join(chr(c) for c in [*range(65, 91), *range(97, 123)])
    assert len(shakespeare) == 65 and tokenizer.decode(tokenizer.encode(shakespeare).tolist()) == shakespeare
    assert list(TABLE_75) == sorted(TABLE_75)


def every_kind() -> dict[str, Tokenizer]:
    return {
        "char": CharTokenizer(["\n", "a", "\ud800", "😀"]),
        "unk": CharTokenizer("ab", unk=True, unknown="unk"),
        "75": CharTokenizer(TABLE_75, unk=True),
        "bpe": train_bpe(["hello hello"], 260),
    }


@pytest.mark.parametrize("name", every_kind())
def test_tokenizer_save_and_load_round_trip(tmp_path, name):
    tokenizer = every_kind()[name]
    file = tokenizer.save(tmp_path)
    for again in (load(tmp_path), load(file)):
        assert again.fingerprint == tokenizer.fingerprint and type(again) is type(tokenizer)
        assert np.array_equal(again.token_bytes, tokenizer.token_bytes)
        assert np.array_equal(again.encode("a"), tokenizer.encode("a"))
        assert np.array_equal(again.separator, tokenizer.separator)


def test_fingerprints_differ_when_ids_would():
    same = [CharTokenizer("abc").fingerprint, CharTokenizer(["a", "b", "c"]).fingerprint]
    assert len(set(same)) == 1
    all_kinds = [
        *(t.fingerprint for t in every_kind().values()),
        CharTokenizer("abc").fingerprint,
        CharTokenizer("acb").fingerprint,
        CharTokenizer("abcd").fingerprint,
        CharTokenizer("abc", unk=True).fingerprint,
        CharTokenizer("abc", unk=True, unknown="unk").fingerprint,
        train_bpe(["hello hello"], 261).fingerprint,
        train_bpe(["hello jello"], 260).fingerprint,
    ]
    assert len(set(all_kinds)) == len(all_kinds)


def body(**changes):
    return train_bpe(["hello hello hello"], 270).to_json() | changes


def test_fingerprint_does_not_depend_on_how_merges_are_written():
    plain = body()
    joined = body(model=plain["model"] | {"merges": [" ".join(m) for m in plain["model"]["merges"]]})
    assert ByteTokenizer(joined).fingerprint == ByteTokenizer(plain).fingerprint
    fewer = body(model=plain["model"] | {"merges": plain["model"]["merges"][:-1]})
    assert ByteTokenizer(fewer).fingerprint != ByteTokenizer(plain).fingerprint


def test_foreign_truncation_and_padding_are_off(tmp_path):
    cut = body(
        truncation={"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 50},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "x",
        },
    )
    tokenizer = ByteTokenizer(cut)
    assert tokenizer.decode(tokenizer.encode("hello there").tolist()) == "hello there"


def test_tokenizer_that_changes_text_is_refused(tmp_path):
    lower = ByteTokenizer(body(normalizer={"type": "Lowercase"}))
    assert lower.decode(lower.encode("hello").tolist()) == "hello"
    with pytest.raises(UserError, match="changes the text"):
        lower.encode("Hello")
    spaced = ByteTokenizer(
        body(pre_tokenizer={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True})
    )
    with pytest.raises(UserError, match="changes the text"):
        spaced.encode("hello")


WRONG_FILES = [
    ("{", "is not a tokenizer"),
    ("[]", "is not a tokenizer"),
    ("{}", "is not a tokenizer"),
    ('{"kind": "char", "format": 99}', "format 99"),
    ('{"kind": "char", "format": 1, "table": ["ab"], "unk": false, "unknown": "error"}', "is not a tokenizer"),
    (json.dumps({"model": {"type": "WordPiece"}, "decoder": {"type": "WordPiece"}}), "only byte-level BPE"),
    (json.dumps({"model": {"type": "BPE"}, "decoder": None}), "only byte-level BPE"),
    (json.dumps({"model": {"type": "BPE", "dropout": 0.1}, "decoder": {"type": "ByteLevel"}}), "dropout"),
]


@pytest.mark.parametrize(("content", "words"), WRONG_FILES)
def test_tokenizer_files_that_are_invalid_are_refused(tmp_path, content, words):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=words) as caught:
        load(tmp_path)
    assert str(tmp_path / "tokenizer.json") in str(caught.value)


def test_tokenizer_missing_is_reported(tmp_path):
    with pytest.raises(UserError, match="there is no tokenizer at"):
        load(tmp_path / "nothing.json")


def test_gaps_in_the_ids_are_allowed():
    plain = body()
    name = "".join(plain["model"]["merges"][-1])
    tokenizer = ByteTokenizer(body(model=plain["model"] | {"vocab": plain["model"]["vocab"] | {name: 70_000}}))
    assert tokenizer.vocab_size == 70_001 and tokenizer.dtype == np.int32
    assert tokenizer.token_bytes[60_000] == 0 and tokenizer.decode([60_000]) == ""
    text = "hello hello"
    ids = tokenizer.encode(text)
    assert 70_000 in ids and tokenizer.decode(ids.tolist()) == text


def test_added_tokens_count_as_the_text_they_are():
    plain = body()
    added = [*plain["added_tokens"], plain["added_tokens"][0] | {"id": 300, "content": "<extra>", "special": False}]
    tokenizer = ByteTokenizer(body(added_tokens=added))
    text = "hello <extra> hello"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids.tolist()) == text
    assert int(tokenizer.token_bytes[ids].sum()) == len(text)
    assert "<extra>" in [tokenizer.decode([i]) for i in ids.tolist()]
