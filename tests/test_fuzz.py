"""Fuzzing of the files that a stranger can hand over: config.json, manifests of checkpoints and stores, rows.jsonl.

Every input follows from a seed and a number, which a failure names; what broke something once is kept here.
"""

import json
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fuzzing
import numpy as np
import pytest
import torch
from dist.test_shards import equal, saved_by

from seedbed.config import Dist
from seedbed.data import store as stores
from seedbed.data.store import Store, Writer
from seedbed.errors import UserError
from seedbed.launch.resume import saved_config
from seedbed.recipes import find
from seedbed.report import summaries, top, verbs
from seedbed.track import edits, jsonl
from seedbed.track.changes import rewind
from seedbed.track.rows import Columns, Objects, thumbnail
from seedbed.track.run import Run
from seedbed.train import checkpoint, checkpoint_loading

NUM = 10_000
CODE = {"version": "0.0.1", "commit": None, "branch": None}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def renewed(data: bytes, renew: Any) -> bytes:
    """The same JSON object with its checksum taken again, as a stranger would; anything else as it is."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return data
    if not isinstance(value, dict):
        return data
    try:
        return json.dumps(renew(value)).encode()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return data


# ---- config.json -----------------------------------------------------------------------------------------------------

KEPT_CONFIGS = [
    b"",
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"config":' * 900 + b"{}" + b"}" * 900,
    b'{"recipe":"gpt","preset":"demo","config":{}}',
    b'{"recipe":"gpt","preset":"demo","config":{"steps":1e400},"hash":"0"}',
]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in memory where there is one: ten thousand files are written to it."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as name:
        yield Path(name)


@pytest.fixture
def run(folder: Path) -> Run:
    recipe, preset = find("gpt/demo")
    base = recipe.preset(preset)
    made = Run.create(folder, "gpt", "demo", base, name="one", why="to be broken", code=CODE, base=base)
    for step in range(1, 25):
        made.row({"step": step, "loss": 3.0 / step, "lr": 1e-3, "lrs": {"main": 1e-3, "rest": 0.1}, "seconds": step * 0.1})
    for step in range(5, 25, 5):
        made.event(step, "eval", valid_loss=2.0 / step, best=True)
    made.event(20, "sample", text="a {falling} [leaf]", files=["samples/step-000050/a.png"])
    made.set_status("done", step=24, last_step=24, loss=0.05, best=0.04)
    made.close()
    return made


@pytest.mark.parametrize("hashed", [False, True], ids=["as it is", "hash renewed"])
def test_fuzz_config_json(run: Run, hashed: bool) -> None:
    path = run.path / "config.json"
    good = path.read_bytes()
    recipe, wanted = saved_config(run)

    def parse(data: bytes) -> None:
        path.write_bytes(renewed(data, lambda v: {**v, "hash": edits._hash(v)}) if hashed else data)
        summaries.summary(run)
        found, config = saved_config(run)
        assert hashed or (found.name == recipe.name and config == wanted), "taken without a word"
        run.title()
        run.command()

    try:
        cases = fuzzing.cases([good, json.dumps(json.loads(good)).encode()], NUM // 2, seed=11 + hashed, kept=KEPT_CONFIGS)
        accepted = fuzzing.try_all(cases, parse, refused=(UserError,), seconds=5.0)
    finally:
        path.write_bytes(good)
    assert accepted < NUM / 4


# ---- manifests of checkpoints ----------------------------------------------------------------------------------------

KEPT_MANIFESTS = [
    b"",
    b"{}",
    b"[]",
    b"[" * 100_000,
    b'{"format":2}',
    b'{"format":1,"sha256":{"state.json":1}}',
    b'{"format":NaN}',
]


@pytest.mark.parametrize("degrees", [Dist(), Dist(shard=2)], ids=["alone", "sharded"])
@pytest.mark.parametrize("hashed", [False, True], ids=["as it is", "hash renewed"])
def test_fuzz_checkpoint_manifest(folder: Path, degrees: Dist, hashed: bool) -> None:
    (saved,) = set(saved_by(folder, degrees))
    path = saved / "manifest.json"
    good, wanted = path.read_bytes(), checkpoint_loading.load(saved)

    def renew(value: dict[str, Any]) -> dict[str, Any]:
        rest = {key: one for key, one in value.items() if key != "hash"}
        return {**rest, "hash": checkpoint.digest(rest)}

    def parse(data: bytes) -> None:
        path.write_bytes(renewed(data, renew) if hashed else data)
        found = checkpoint_loading.load(saved)
        if not hashed:
            assert equal(found.tensors, wanted.tensors) and found.state == wanted.state, "loaded something else"
        assert all(bool(torch.isfinite(t).all()) for group in found.tensors.values() for t in group.values()), "uninitialised"

    cases = fuzzing.cases([good, json.dumps(json.loads(good)).encode()], NUM // 2, seed=21 + hashed, kept=KEPT_MANIFESTS)
    accepted = fuzzing.try_all(cases, parse, refused=(checkpoint_loading.Damaged,), seconds=5.0)
    assert accepted < NUM / 4


# ---- manifests of stores ---------------------------------------------------------------------------------------------

KEPT_STORES = [b"", b"{}", b"[]", b"[" * 100_000, b'{"hash":' * 2000, b'{"hash":null}']


@pytest.mark.parametrize("hashed", [False, True], ids=["as it is", "hash renewed"])
def test_fuzz_store_manifest(folder: Path, hashed: bool) -> None:
    writer = Writer(folder / "store", "a plan")
    writer.array("tokens", np.dtype("<u2"))
    writer.array("frames", np.dtype("|u1"), (2, 3))
    writer.append("tokens", np.arange(40, dtype="<u2"))
    writer.append("frames", np.arange(240, dtype="u1").reshape(40, 2, 3))
    (writer.aside / "extra.json").write_text("{}")
    splits = {"train": (0, 30), "valid": (30, 40)}
    facts_ = {"source": {"name": "numbers"}, "tokenizer": {"vocab_size": 41}, "counts": {"num_bytes": 9}, "rebuild": "again"}
    made = writer.commit(splits=splits, limits={"tokens": 41}, extra=["extra.json"], **facts_)
    path = made.path / "manifest.json"
    good, wanted = path.read_bytes(), {name: array.copy() for name, array in made.arrays.items()}

    def renew(value: dict[str, Any]) -> dict[str, Any]:
        rest = {key: one for key, one in value.items() if key != "hash"}
        return {**rest, "hash": stores.digest(rest)}

    def parse(data: bytes) -> None:
        path.write_bytes(renewed(data, renew) if hashed else data)
        found = Store.open(made.path)
        for split in ("train", "valid"):
            if split in found.manifest["splits"]:
                found.split(split, next(iter(found.arrays)))
        problems = found.verify()
        if not hashed:
            assert not problems and found.fingerprint == made.fingerprint and found.manifest["splits"] == made.manifest["splits"]
            assert all(np.array_equal(found.arrays[name], array) for name, array in wanted.items()), "opened something else"

    cases = fuzzing.cases([good, json.dumps(json.loads(good)).encode()], NUM, seed=31 + hashed, kept=KEPT_STORES)
    accepted = fuzzing.try_all(cases, parse, refused=(UserError,), seconds=5.0)
    assert accepted < NUM / 2


# ---- rows.jsonl ------------------------------------------------------------------------------------------------------

KEPT_ROWS = [
    b'{"step":1\n"loss":2}\n',  # two broken lines that join into one row
    b'{"step":1},{"step":2}\n',
    b'{"step":1}\n{"step":2},{"step":3}\n',
    b'{"a":' * 900 + b"1" + b"}" * 900 + b"\n",
    b'{"step":1e400,"loss":NaN}\n{"step":"x","loss":[]}\n',
    b'{"step":' + b"9" * 5000 + b"}\n",
    b"\x00\x00\x00{}\n",
]


def own_reading(data: bytes) -> list[dict[str, Any]]:
    """The rows of a file by the plainest reader there is: line by line."""
    found = []
    for line in data.split(b"\n"):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and not jsonl.is_deep(value):
            found.append(value)
    return found


def same(a: Any, b: Any) -> bool:
    return json.dumps(a) == json.dumps(b)  # NaN is NaN there


def test_fuzz_rows_jsonl(run: Run) -> None:
    path = run.path / "rows.jsonl"
    good = path.read_bytes()

    def parse(data: bytes) -> None:
        path.write_bytes(data)
        wanted = own_reading(data)
        assert same(run.rows(), wanted), "other rows than those in the file"
        ended = own_reading(data[: data.rfind(b"\n") + 1])
        columns = Columns(path).refresh()
        assert columns.num_rows == len(ended) and same(Objects(path).refresh(), ended)
        for key in ("step", "loss"):
            for value, row in zip(columns.column(key), ended, strict=True):
                assert_number(value, row.get(key))
        assert all(math.isfinite(value) for value in thumbnail(path, "loss", 20))
        summaries.summary(run)
        top.pace(run)
        verbs.results(run)

    try:
        accepted = fuzzing.try_all(
            fuzzing.cases([good, good[:400]], NUM, seed=41, kept=KEPT_ROWS), parse, refused=(), seconds=5.0
        )
    finally:
        path.write_bytes(good)
    assert accepted == NUM + len(KEPT_ROWS)


def assert_number(value: float, written: Any) -> None:
    if isinstance(written, int | float) and abs(written) < 1e300:
        assert value == float(written)
    elif not isinstance(written, int | float):
        assert math.isnan(value)


def test_fuzz_rewind_keeps_every_row_up_to_the_step(run: Run) -> None:
    path = run.path / "rows.jsonl"
    good = path.read_bytes()

    def parse(data: bytes) -> None:
        path.write_bytes(data)
        kept = [row for row in own_reading(data) if not (isinstance(row.get("step"), int | float) and row["step"] > 12)]
        rewind(run, 12, events=False)
        assert same(run.rows(), kept)

    try:
        cases = fuzzing.cases([good], NUM // 50, seed=51, kept=KEPT_ROWS)
        fuzzing.try_all(cases, parse, refused=(), seconds=5.0)
    finally:
        path.write_bytes(good)
