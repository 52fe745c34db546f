"""Stores: what is written comes back, damage is named, and a build that dies leaves nothing half made."""

import errno
import json
import multiprocessing
import os
import shutil

import numpy as np
import pytest

from seedbed.data import store as stores
from seedbed.data.store import DamagedStore, Store, Writer, building, digest
from seedbed.errors import UserError
from seedbed.track import files


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(stores, "CHUNK", 1000)


def build(path, rows=2600, plan="plan", **changes) -> Store:
    writer = Writer(path, plan)
    writer.array("tokens", np.dtype("<u2"))
    writer.array("frames", np.dtype("u1"), (2, 3))
    for start in range(0, rows, 700):
        part = np.arange(start, min(start + 700, rows))
        writer.append("tokens", (part % 500).astype("<u2"))
        writer.append("frames", np.repeat(part[:, None] % 251, 6, 1).reshape(-1, 2, 3).astype("u1"))
    facts = {"splits": {"train": (0, rows - 600), "valid": (rows - 600, rows)}, "limits": {"tokens": 500}, "extra": []} | changes
    return writer.commit(**facts, tokenizer={"fingerprint": "f"}, rebuild="seedbed data prepare x")


def test_store_round_trip(tmp_path):
    store = Store.open(build(tmp_path / "s").path)
    assert np.array_equal(store.arrays["tokens"], np.arange(2600) % 500)
    assert store.arrays["frames"].shape == (2600, 2, 3) and store.arrays["frames"][2599, 1, 2] == 2599 % 251
    assert store.split("valid", "tokens")[0] == 2000 % 500 and len(store.split("train", "tokens")) == 2000
    assert store.verify() == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s"]
    assert sorted(p.name for p in store.path.iterdir()) == ["frames.bin", "manifest.json", "tokens.bin"]
    with pytest.raises(ValueError):
        store.arrays["tokens"][0] = 1


def test_store_content_does_not_depend_on_chunk_borders(tmp_path, monkeypatch):
    """Hashes are those of the file cut into chunks, however it was appended."""
    import hashlib

    info = build(tmp_path / "s").manifest["arrays"]["tokens"]
    data = (tmp_path / "s" / "tokens.bin").read_bytes()
    assert info["chunks"] == [hashlib.sha256(data[i : i + 1000]).hexdigest() for i in range(0, len(data), 1000)]
    exact = build(tmp_path / "exact", rows=2000).manifest["arrays"]["tokens"]
    assert len(exact["chunks"]) == 4


def test_fingerprint_names_the_content_and_nothing_else(tmp_path):
    first = build(tmp_path / "a")
    assert build(tmp_path / "b").fingerprint == first.fingerprint
    assert build(tmp_path / "c", splits={"train": (0, 1999), "valid": (1999, 2600)}).fingerprint != first.fingerprint
    assert build(tmp_path / "d", rows=2599).fingerprint != first.fingerprint


def truncate(path):
    os.truncate(path / "tokens.bin", 5000)


def flip(path):
    data = bytearray((path / "tokens.bin").read_bytes())
    data[3456] ^= 1
    (path / "tokens.bin").write_bytes(data)


def edit(path):
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"limit": 500', '"limit": 501'))


def rewrite(change):
    """Change the manifest and its checksum: what only `verify` can find."""

    def act(path):
        manifest = json.loads((path / "manifest.json").read_text())
        del manifest["hash"]
        change(manifest)
        (path / "manifest.json").write_text(json.dumps(manifest | {"hash": digest(manifest)}))

    return act


OPEN_TABLE = [
    (truncate, "tokens.bin has 5,000 bytes instead of 5,200"),
    (lambda p: (p / "tokens.bin").unlink(), "tokens.bin is missing"),
    (edit, "manifest.json was changed"),
    (lambda p: (p / "manifest.json").write_text("{"), "manifest.json is not JSON"),
    (lambda p: (p / "manifest.json").write_text('{"a":' * 5000 + "1" + "}" * 5000), "nested too deeply"),
    (lambda p: (p / "manifest.json").write_text("[" * 100_000), "nested too deeply"),
    (lambda p: (p / "manifest.json").write_text("[1]"), "lacks its checksum"),
    (lambda p: (p / "manifest.json").write_bytes(b"\xff\xfe"), "manifest.json is not JSON"),
    (rewrite(lambda m: m["arrays"]["tokens"].update(dtype="|O8")), "not one that a store may hold"),
    (rewrite(lambda m: m["arrays"].update({"../x": m["arrays"].pop("tokens")})), "not one that a store may hold"),
    (rewrite(lambda m: m["files"].update({"tokenizer.json": "00"})), "tokenizer.json is missing"),
]


@pytest.mark.parametrize(("spoil", "words"), OPEN_TABLE, ids=lambda x: x if isinstance(x, str) else "")
def test_store_damage_is_found_on_opening(tmp_path, spoil, words):
    path = build(tmp_path / "s").path
    spoil(path)
    with pytest.raises(DamagedStore) as caught:
        Store.open(path)
    lines = str(caught.value).splitlines()
    assert words in lines[0] and str(path) in lines[0] and len(lines) == 2
    assert "seedbed data prepare x" in lines[1] or f"rm -r {path}" in lines[1]


VERIFY_TABLE = [
    (flip, ["tokens.bin: chunk 3 (bytes 3,000 to 3,999) differs", "holds values"]),
    (rewrite(lambda m: m["splits"].update(valid=[2100, 2600])), ["split valid starts at 2,100, after a gap"]),
    (rewrite(lambda m: m["splits"].update(valid=[1900, 2600])), ["split valid starts at 1,900, inside"]),
    (rewrite(lambda m: m["splits"].update(valid=[2000, 2601])), ["splits end at 2,601, the arrays have 2,600"]),
    (rewrite(lambda m: m["splits"].update(valid=[2000, 2000])), ["split valid is empty", "splits end at 2,000"]),
    (rewrite(lambda m: m["arrays"]["tokens"].update(limit=499)), ["holds 499, but values must stay below 499"]),
    (rewrite(lambda m: m["arrays"]["tokens"].update(max=400)), ["holds values 0 to 499, its manifest says 0 to 400"]),
    (rewrite(lambda m: m["arrays"]["tokens"]["chunks"].pop()), ["has 6 chunks, its manifest names 5"]),
]


@pytest.mark.parametrize(("spoil", "words"), VERIFY_TABLE, ids=lambda x: x[0] if isinstance(x, list) else "")
def test_store_damage_is_found_by_verify(tmp_path, spoil, words):
    path = build(tmp_path / "s").path
    spoil(path)
    problems = Store.open(path, check=False).verify()
    assert problems and words[0] in problems[0]
    assert all(any(w in p for w in words) for p in problems), problems


def test_store_bit_flips_are_all_found(tmp_path):
    path = build(tmp_path / "s").path
    good = (path / "tokens.bin").read_bytes()
    for place in np.random.default_rng(0).integers(0, len(good) * 8, 40).tolist():
        data = bytearray(good)
        data[place // 8] ^= 1 << place % 8
        (path / "tokens.bin").write_bytes(data)
        with pytest.raises(DamagedStore, match=f"chunk {place // 8 // 1000} "):
            Store.open(path)
        problems = Store.open(path, check=False).verify()
        assert f"chunk {place // 8 // 1000} " in problems[0]


def test_store_that_is_large_is_hashed_in_part(tmp_path, monkeypatch):
    path = build(tmp_path / "s").path
    flip(path)
    monkeypatch.setattr("seedbed.data.store_reading.SURE_BYTES", 8000)  # eight of its 22 chunks
    found = 0
    for _ in range(60):
        try:
            Store.open(path)
            monkeypatch.setattr("seedbed.data.store_reading._sound", set())
        except DamagedStore:
            found += 1
    assert 5 < found < 45


def test_store_is_hashed_once_until_its_files_change(tmp_path, monkeypatch):
    path = build(tmp_path / "s").path
    Store.open(path)
    with monkeypatch.context() as patch:
        patch.setattr("seedbed.data.store_reading.chunk_problem", lambda *given: pytest.fail("hashed again"))
        Store.open(path)
    flip(path)
    with pytest.raises(DamagedStore):
        Store.open(path)


@pytest.mark.parametrize("make", ["missing", "folder", "file"])
def test_store_missing_is_refused(tmp_path, make):
    path = tmp_path / "x"
    if make == "folder":
        path.mkdir()
    elif make == "file":
        path.write_text("x")
    with pytest.raises(UserError, match=r"(no|not a) store.*seedbed data prepare"):
        Store.open(path)


def test_store_of_another_format_is_refused(tmp_path):
    path = build(tmp_path / "s").path
    rewrite(lambda m: m.update(format=99))(path)
    with pytest.raises(UserError, match="format 99"):
        Store.open(path)


class Killed(BaseException):
    pass


NAMES = ("write", "fsync", "replace", "open_write")


def counting(monkeypatch, limit, error):
    """Let the write layer fail at its n-th call; half of the data of that call reaches the file."""
    calls = {"n": 0}

    def wrap(name, original):
        def call(*arguments):
            calls["n"] += 1
            if calls["n"] == limit:
                if name == "write":
                    original(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                raise error
            return original(*arguments)

        return call

    for name in NAMES:
        monkeypatch.setattr(files, name, wrap(name, getattr(files, name)))
    return calls


def steps(path) -> Store:
    """A build that saves after every part and continues where it was."""
    writer = Writer(path, "plan")
    writer.array("tokens", np.dtype("<u2"))
    for start in range(writer.state.get("done", 0), 2600, 260):
        writer.append("tokens", np.arange(start, start + 260).astype("<u2"))
        writer.save(done=start + 260)
    return writer.commit(splits={"train": (0, 2600)}, limits={}, extra=[], tokenizer=None)


@pytest.mark.parametrize("error", [Killed(), OSError(errno.ENOSPC, "No space left on device")], ids=["killed", "full disk"])
def test_store_build_killed_anywhere_is_continued(tmp_path, monkeypatch, error):
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # slow, and not what is tried here
    wanted = steps(tmp_path / "straight").manifest
    with monkeypatch.context() as patch:
        total = counting(patch, 0, error)
        steps(tmp_path / "count")
    continued = 0
    for limit in range(1, total["n"] + 1):
        path = tmp_path / f"s{limit}"
        with monkeypatch.context() as patch:
            counting(patch, limit, error)
            with pytest.raises(type(error)):
                steps(path)
        assert not path.exists() or Store.open(path).verify() == []
        continued += bool(Writer(path, "plan").state) if not path.exists() else 0
        again = steps(path) if not path.exists() else Store.open(path)
        assert again.verify() == [] and again.fingerprint == wanted["fingerprint"]
        assert again.manifest["arrays"] == wanted["arrays"]
        shutil.rmtree(path)
    assert total["n"] > 50 and continued > 40


def test_store_build_of_another_plan_is_discarded(tmp_path):
    writer = Writer(tmp_path / "s", "one")
    writer.array("tokens", np.dtype("u1"))
    writer.append("tokens", np.ones(50, "u1"))
    writer.save(done=50)
    writer.close()
    assert Writer(tmp_path / "s", "one").state == {"done": 50}
    assert Writer(tmp_path / "s", "two").state == {}
    assert not (tmp_path / ".s.partial" / "tokens.bin").exists()


@pytest.mark.parametrize("spoil", ["shorter", "no note", "torn note"])
def test_store_build_that_is_damaged_starts_again(tmp_path, spoil):
    writer = Writer(tmp_path / "s", "one")
    writer.array("tokens", np.dtype("u1"))
    writer.append("tokens", np.ones(50, "u1"))
    writer.save(done=50)
    writer.close()
    note = writer.aside / "progress.json"
    if spoil == "shorter":
        os.truncate(writer.aside / "tokens.bin", 49)
    elif spoil == "no note":
        note.unlink()
    else:
        note.write_text(note.read_text()[:-5])
    assert Writer(tmp_path / "s", "one").state == {}


def test_store_replacement_keeps_the_old_one_until_renamed(tmp_path, monkeypatch):
    old = build(tmp_path / "s")
    held = old.arrays["tokens"]
    new = build(tmp_path / "s", rows=2500)
    assert len(new.arrays["tokens"]) == 2500 and len(held) == 2600 and held[2599] == 2599 % 500
    assert [p.name for p in tmp_path.iterdir()] == ["s"]


def _hold(path, started, release):
    with building(path, print):
        started.set()
        release.wait(30)


def test_store_is_built_by_one_process_only(tmp_path):
    context = multiprocessing.get_context("spawn")
    started, release = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(tmp_path / "s", started, release))
    other.start()
    assert started.wait(60)
    printed = []

    def say(line):
        printed.append(line)
        release.set()

    with building(tmp_path / "s", say):
        assert printed and "another process is preparing" in printed[0]
    other.join(30)
    with building(tmp_path / "s", say):
        assert len(printed) == 1


def test_store_folder_that_is_not_writable_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write in"), building(tmp_path / "file" / "s", print):
        pass
