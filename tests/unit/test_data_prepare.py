"""Preparation: cached by content, continued after a kill, exact to the byte, and clear about what is wrong."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from seedbed.data import corpus, random_tokens, store, tokenise, tokenizers
from seedbed.data.corpus import TextConfig
from seedbed.data.prepare import cache_folder, load_tokenizer, prepare_text
from seedbed.data.store import DamagedStore, Store
from seedbed.data.tokenizers import CharTokenizer
from seedbed.errors import UserError
from seedbed.track import files

SRC = Path(__file__).resolve().parents[2] / "src"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache of its own, and a disk that is not waited for."""
    monkeypatch.setenv("SEEDBED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    return tmp_path / "cache"


@pytest.fixture
def small(monkeypatch):
    """Many pieces, groups, saves and chunks in a small text."""
    monkeypatch.setattr(corpus, "CHUNK", 300)
    monkeypatch.setattr(tokenise, "BATCH_CHARACTERS", 500)
    monkeypatch.setattr(tokenise, "SAVE_EVERY", 1000)
    monkeypatch.setattr(store, "CHUNK", 700)


def lines(count: int = 200) -> str:
    rng = random.Random(count)
    return "".join(f"line {n} of {rng.random()} sürprises\n" for n in range(count))


def write(path: Path, text: str) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(text.encode())
    return str(path)


def decoded(found: Store) -> str:
    tokenizer = load_tokenizer(found)
    assert tokenizer is not None
    return tokenizer.decode(found.arrays["tokens"].tolist())


@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_store_holds_the_tokens_of_a_file(tmp_path, small, kind):
    text = lines()
    found = prepare_text(TextConfig(text=write(tmp_path / "a.txt", text), tokenizer=kind, vocab=300))
    assert decoded(found) == text and found.verify() == []
    facts = found.manifest
    assert facts["counts"] == {"num_tokens": len(found.arrays["tokens"]), "num_bytes": len(text.encode()), "num_unknown": 0}
    assert facts["arrays"]["tokens"]["max"] < facts["tokenizer"]["vocab_size"]
    assert found.arrays["tokens"].dtype == (np.uint8 if kind == "char" else np.uint16)


@pytest.mark.parametrize(
    ("length", "valid", "num_valid"), [(1_115_394, 0.1, 111_540), (10, 0.9, 9), (1000, 0.3, 300), (7, 0.1, 1)]
)
def test_validation_split_is_the_last_part(tmp_path, length, valid, num_valid):
    found = prepare_text(TextConfig(text=write(tmp_path / "a.txt", "ab" * (length // 2) + "c" * (length % 2)), valid=valid))
    assert found.manifest["splits"] == {"train": [0, length - num_valid], "valid": [length - num_valid, length]}


@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_documents_are_separated(tmp_path, kind):
    for name, text in {"a.txt": "one", "b.txt": "two", "c.txt": "three"}.items():
        write(tmp_path / "folder" / name, text)
    found = prepare_text(TextConfig(text=str(tmp_path / "folder"), tokenizer=kind, vocab=257))
    between = "\n\n" if kind == "char" else "<|endoftext|>"
    assert decoded(found) == between.join(["one", "two", "three"])
    tokenizer = load_tokenizer(found)
    assert tokenizer is not None
    expected = 11 + (2 * 2 if kind == "char" else 0)
    assert int(tokenizer.token_bytes[found.arrays["tokens"]].sum()) == expected


def test_prepared_store_is_reused(tmp_path, monkeypatch):
    config = TextConfig(text=write(tmp_path / "a.txt", lines()))
    first = prepare_text(config)
    monkeypatch.setattr(store.Writer, "__init__", lambda *a: pytest.fail("built again"))
    assert prepare_text(config).path == first.path
    copy = write(tmp_path / "elsewhere" / "a.txt", lines())
    assert prepare_text(replace(config, text=copy)).path == first.path


def test_store_key_depends_on_settings(tmp_path):
    config = TextConfig(text=write(tmp_path / "a.txt", lines()))
    CharTokenizer(sorted(set(lines()) | {"%"})).save(tmp_path)
    variants = [
        config,
        replace(config, valid=0.2),
        replace(config, unknown="unk"),
        replace(config, tokenizer="bpe", vocab=260),
        replace(config, tokenizer="bpe", vocab=270),
        replace(config, tokenizer=str(tmp_path / "tokenizer.json")),
        replace(config, text=write(tmp_path / "b.txt", lines() + "more\n")),
    ]
    found = [prepare_text(c) for c in variants]
    assert len({f.path for f in found}) == len({f.fingerprint for f in found}) == len(variants)
    for other in (replace(config, block=7), replace(config, mode="random"), replace(config, vocab=999)):
        assert prepare_text(other).path == found[0].path


def test_changed_source_is_prepared_again(tmp_path):
    config = TextConfig(text=write(tmp_path / "a.txt", "first text\n"))
    first = prepare_text(config)
    write(tmp_path / "a.txt", "other text\n")
    second = prepare_text(config)
    assert decoded(first) == "first text\n" and decoded(second) == "other text\n"


@pytest.mark.parametrize("when", ["at a save", "at the end"])
def test_source_that_changes_while_read_is_refused(tmp_path, monkeypatch, when):
    path = tmp_path / "a.txt"
    config = TextConfig(text=write(path, lines()))
    clock = 1 if when == "at a save" else path.stat().st_mtime
    monkeypatch.setattr(tokenise, "SAVE_EVERY", 1000 if when == "at a save" else 1 << 30)
    original = tokenizers.CharTokenizer.encode_all

    def encode_all(self, texts):
        path.write_text(lines().upper())
        os.utime(path, (clock, clock))
        return original(self, texts)

    monkeypatch.setattr(tokenizers.CharTokenizer, "encode_all", encode_all)
    with pytest.raises(UserError, match="changed while it was read"):
        prepare_text(config)
    assert {p.suffix for p in (tmp_path / "cache").iterdir()} == {".lock"}


def test_store_folder_follows_config_and_environment(monkeypatch):
    assert str(cache_folder("/x/y")) == "/x/y"
    monkeypatch.setenv("SEEDBED_CACHE", "/a")
    assert str(cache_folder("")) == "/a"
    monkeypatch.delenv("SEEDBED_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert str(cache_folder("")) == "/b/seedbed"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder("") == Path.home() / ".cache" / "seedbed"


def test_store_path_can_be_given_directly(tmp_path):
    made = prepare_text(TextConfig(text=write(tmp_path / "a.txt", lines())), out=tmp_path / "mine")
    assert made.path == tmp_path / "mine"
    found = prepare_text(TextConfig(text=str(tmp_path / "mine"), tokenizer="bpe"))
    assert found.fingerprint == made.fingerprint
    with pytest.raises(UserError, match=r"split with valid=0\.1, not data\.valid=0\.2"):
        prepare_text(TextConfig(text=str(tmp_path / "mine"), valid=0.2))


def test_existing_folder_is_never_overwritten(tmp_path):
    config = TextConfig(text=write(tmp_path / "a.txt", lines()))
    write(tmp_path / "folder" / "precious.txt", "keep")
    for out in (tmp_path / "folder", tmp_path / "a.txt"):
        with pytest.raises(UserError, match="exists and is not a store"):
            prepare_text(config, out=out, rebuild=True)
    made = prepare_text(config, out=tmp_path / "mine")
    with pytest.raises(UserError, match="holds a store of another text or tokenizer"):
        prepare_text(replace(config, tokenizer="bpe"), out=tmp_path / "mine", rebuild=True)
    assert Store.open(tmp_path / "mine").fingerprint == made.fingerprint
    assert (tmp_path / "folder" / "precious.txt").read_text() == "keep"
    (tmp_path / "empty").mkdir()
    assert prepare_text(config, out=tmp_path / "empty").fingerprint == made.fingerprint


def test_damaged_store_error_names_a_command_that_repairs_it(tmp_path):
    config = TextConfig(text=write(tmp_path / "a.txt", lines()))
    made = prepare_text(config)
    fingerprint, path = made.fingerprint, made.path
    os.truncate(path / "tokens.bin", 10)
    with pytest.raises(DamagedStore) as caught:
        prepare_text(config)
    command = f"seedbed data prepare {tmp_path / 'a.txt'} --out {path}"
    assert str(caught.value).splitlines()[1] == f"rebuild it: {command}"
    printed = []
    again = prepare_text(config, out=path, rebuild=True, say=printed.append)
    assert again.fingerprint == fingerprint and again.verify() == []
    assert "10 bytes instead of" in printed[0] and "building it again" in printed[0]


def test_damaged_store_is_detected_and_rebuilt(tmp_path):
    config = TextConfig(text=write(tmp_path / "a.txt", lines()))
    made = prepare_text(config)
    data = bytearray((made.path / "tokens.bin").read_bytes())
    data[100] ^= 1
    (made.path / "tokens.bin").write_bytes(data)
    with pytest.raises(DamagedStore, match=r"tokens.bin: chunk 0"):
        prepare_text(config)
    assert prepare_text(config, rebuild=True).verify() == []


def test_tokenizer_that_does_not_match_the_store_is_refused(tmp_path):
    found = prepare_text(TextConfig(text=write(tmp_path / "a.txt", lines())))
    made = found.manifest["tokenizer"]["fingerprint"]
    other = CharTokenizer(sorted(set(lines()), reverse=True))
    other.save(found.path)
    with pytest.raises(DamagedStore) as caught:
        load_tokenizer(Store.open(found.path))
    assert made in str(caught.value) and other.fingerprint in str(caught.value)
    assert "seedbed data prepare" in str(caught.value)


def test_unknown_characters_of_a_whole_corpus_are_counted(tmp_path, small):
    text = lines(100) + "é%é\n" + lines(100) + "é"
    config = TextConfig(text=write(tmp_path / "a.txt", text), tokenizer="char75")
    with pytest.raises(UserError) as caught:
        prepare_text(config)
    message = str(caught.value)
    assert f"'ü' U+00FC 200 times, first at character {text.index('ü'):,}" in message
    assert f"'é' U+00E9 3 times, first at character {text.index('é'):,}" in message
    assert f"'%' U+0025 1 times, first at character {text.index('%'):,}" in message
    found = prepare_text(replace(config, unknown="unk"))
    assert found.manifest["counts"]["num_unknown"] == 204
    assert decoded(found) == text.replace("é", "\ufffd").replace("%", "\ufffd").replace("ü", "\ufffd")


def test_random_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(random_tokens, "CHUNK", 1000)
    found = prepare_text(TextConfig(text="random:25_300:50_304"))
    tokens = found.arrays["tokens"]
    assert len(tokens) == 25_300 and tokens.dtype == np.uint16 and found.verify() == []
    assert tokens.max() < 50_304 and tokens.max() > 50_000 and len(np.unique(tokens)) > 15_000
    assert load_tokenizer(found) is None
    assert prepare_text(TextConfig(text="random:25300:50304")).path == found.path


@pytest.mark.parametrize("text", ["a", ""])
def test_text_that_is_too_short_is_refused(tmp_path, text):
    with pytest.raises(UserError, match=r"too few for a training and a validation part|is empty"):
        prepare_text(TextConfig(text=write(tmp_path / "a.txt", text)))
    assert not list((tmp_path / "cache").glob("[!.]*"))


class Killed(BaseException):
    pass


@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_preparation_killed_at_any_write_is_continued(tmp_path, small, monkeypatch, kind):
    config = TextConfig(text=write(tmp_path / "a.txt", lines(60)), tokenizer=kind, vocab=280)
    straight = prepare_text(config, out=tmp_path / "straight").manifest
    original, calls, limit = files.write, 0, 0

    def dying(fd, data):
        nonlocal calls
        calls += 1
        if calls == limit:
            original(fd, bytes(data)[: len(data) // 2])
            raise Killed
        original(fd, data)

    monkeypatch.setattr(files, "write", dying)
    prepare_text(config, out=tmp_path / "count")
    total = calls
    for limit in range(1, total + 1):
        calls = 0
        path = tmp_path / f"s{limit}"
        with pytest.raises(Killed):
            prepare_text(config, out=path)
        assert not path.exists()
        calls = limit
        again = prepare_text(config, out=path)
        assert again.manifest["arrays"] == straight["arrays"] and again.fingerprint == straight["fingerprint"]
        assert again.manifest["counts"] == straight["counts"]
        shutil.rmtree(path)
    assert total > 8


DRIVER = """
import signal, sys, time
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may have told us to ignore it
from seedbed.data import corpus, prepare, store, tokenise
corpus.CHUNK, tokenise.BATCH_CHARACTERS, tokenise.SAVE_EVERY, store.CHUNK = 3000, 4000, 8000, 5000
original = store.Writer.append
def slow(self, name, rows):
    time.sleep(0.01)
    original(self, name, rows)
store.Writer.append = slow
config = corpus.TextConfig(text=sys.argv[1], tokenizer=sys.argv[3], vocab=300)
print(prepare.prepare_text(config, out=Path(sys.argv[2])).fingerprint)
"""


@pytest.mark.parametrize(("kind", "sign"), [("char", signal.SIGKILL), ("bpe", signal.SIGKILL), ("char", signal.SIGINT)])
def test_preparation_by_a_killed_process_is_continued(tmp_path, kind, sign):
    source, path = tmp_path / "folder", tmp_path / "store"
    for n in range(12):
        write(source / f"{n:02}.txt", lines(300 + n))
    command = [sys.executable, "-c", DRIVER, str(source)]
    env = {"PYTHONPATH": str(SRC), "TOKENIZERS_PARALLELISM": "false"}
    straight = subprocess.run([*command, str(tmp_path / "straight"), kind], env=env, capture_output=True, text=True, check=True)
    rng, places = random.Random(kind), []
    for _ in range(4):
        process = subprocess.Popen(
            [*command, str(path), kind], env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        note = tmp_path / ".store.partial" / "progress.json"
        seen = places[-1] if places else -1
        deadline = time.monotonic() + 30
        # Wait for some progress, then strike at a random moment after it.
        while process.poll() is None and time.monotonic() < deadline:
            place = json.loads(note.read_text())["arrays"].get("tokens", {}).get("num_bytes", 0) if note.exists() else -1
            if place > seen:
                break
            time.sleep(0.002)
        time.sleep(rng.random() * 0.06)
        process.send_signal(sign)
        process.communicate()
        if path.exists():
            break
        places.append(json.loads(note.read_text())["arrays"].get("tokens", {}).get("num_bytes", 0))
    assert len(places) >= 2 and places == sorted(places) and places[-1] > 0
    last = subprocess.run([*command, str(path), kind], env=env, capture_output=True, text=True, check=True)
    assert last.stdout == straight.stdout
    assert (path / "tokens.bin").read_bytes() == (tmp_path / "straight" / "tokens.bin").read_bytes()
    assert [p.name for p in tmp_path.glob(".store*")] == [".store.lock"]


def test_full_disk_is_reported_and_preparation_continues_later(tmp_path, small, monkeypatch):
    config = TextConfig(text=write(tmp_path / "a.txt", lines()))
    original, room = files.write, 6000

    def write_some(fd, data):
        nonlocal room
        room -= len(data)
        if room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(fd, data)

    with monkeypatch.context() as patch:
        patch.setattr(files, "write", write_some)
        with pytest.raises(UserError, match="the disk is full; what was prepared is kept"):
            prepare_text(config, out=tmp_path / "s")
    assert not (tmp_path / "s").exists()
    note = json.loads((tmp_path / ".s.partial" / "progress.json").read_text())
    assert note["state"]["offset"] > 0
    assert decoded(prepare_text(config, out=tmp_path / "s")) == lines()


def test_folder_without_permission_is_reported(tmp_path):
    write(tmp_path / "file", "x")
    with pytest.raises(UserError, match="cannot write in"):
        prepare_text(TextConfig(cache=str(tmp_path / "file" / "cache")))


def test_preparation_memory_is_bounded(tmp_path):
    """60 MB of text through a process that may not hold half of it beyond what it needs to start."""
    path = tmp_path / "large.txt"
    with open(path, "w") as file:
        for _ in range(60):
            file.write("some words of text that repeat for ever\n" * 25_000)
    code = (
        "import resource, sys; from pathlib import Path; from seedbed.data import prepare;"
        "used = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
        "import numpy as np; prepare.tokenizers.CharTokenizer('ab'); before = used();"
        "prepare.prepare_text(prepare.TextConfig(text=sys.argv[1]), out=Path(sys.argv[2])); print((used() - before) // 1024)"
    )
    arguments = [sys.executable, "-c", code, str(path), str(tmp_path / "s")]
    done = subprocess.run(arguments, env={"PYTHONPATH": str(SRC)}, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 40
    assert len(Store.open(tmp_path / "s").arrays["tokens"]) == 60_000_000


def test_preparation_does_not_import_torch():
    code = "import sys, seedbed.data.prepare; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(SRC)}, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
