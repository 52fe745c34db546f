"""Files of rows, followed while they grow, however they were left; and glimpses of long ones."""

import json
import math
import os
import random
from pathlib import Path

import numpy as np
import pytest

from seedbed.track import jsonl
from seedbed.track.rows import Columns, Objects, Tail, thumbnail


@pytest.mark.parametrize("seed", range(6))
def test_file_that_grows_is_read_once_and_whole(tmp_path: Path, seed: int):
    rng, path = random.Random(seed), tmp_path / "rows.jsonl"
    rows = [{"step": i, "loss": rng.random(), **({"extra": {"a": i}} if i % 3 else {})} for i in range(60)]
    text = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    tail, objects, columns, found = Tail(path), Objects(path), Columns(path), []
    at = 0
    while at < len(text):
        step = rng.randrange(1, 400)
        with open(path, "ab") as file:
            file.write(text[at : at + step])
        at += step
        found += tail.read()[1]
        objects.refresh(), columns.refresh()
    assert [json.loads(line) for line in found] == rows == objects.found
    assert list(columns.column("loss")) == [row["loss"] for row in rows]
    assert columns.names() == ["step", "loss", "extra.a"]
    assert np.array_equal(columns.column("extra.a"), [i if i % 3 else math.nan for i in range(60)], equal_nan=True)


@pytest.mark.parametrize("how", ["cut", "replaced", "removed"])
def test_file_that_was_rewritten_is_read_again(tmp_path: Path, how: str):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 1, "loss": 1}\n{"step": 2, "loss": 2}\n')
    columns = Columns(path).refresh()
    if how == "cut":
        path.write_text('{"step": 1, "loss": 7}\n')
    elif how == "replaced":
        (tmp_path / "new").write_text('{"step": 1, "loss": 7}\n{"step": 2, "loss": 8}\n')
        os.replace(tmp_path / "new", path)
    else:
        path.unlink()
    assert list(columns.refresh().column("loss")) == {"cut": [7], "replaced": [7, 8], "removed": []}[how]


BROKEN = [
    '{"step": 3, "lo',
    "not json",
    "[1, 2]",
    "null",
    '{"step": 4, "loss": "high"}',
    '{"step": 5, "loss": null}',
    "\x00\x00",
    "",
]


@pytest.mark.parametrize("line", BROKEN)
def test_broken_row_costs_itself(tmp_path: Path, line: str):
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"step": 1, "loss": 1.5}}\n{line}\n{{"step": 9, "loss": 2.5}}\n')
    losses = [v for v in Columns(path).refresh().column("loss") if not math.isnan(v)]
    assert losses == [1.5, 2.5]
    assert thumbnail(path, "loss", 10)[-1] == 2.5


def test_glimpse_is_a_part_in_order(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"step": i, "loss": float(i), "pad": "x" * 90}) + "\n" for i in range(5000)))
    seen = thumbnail(path, "loss", 40)
    assert seen == sorted(set(seen)) and 30 <= len(seen) <= 40
    assert seen[0] < 300 and seen[-1] > 4900


def test_broken_lines_do_not_join_into_rows(tmp_path: Path):
    """Two halves of a line, several objects on one line, and nesting that nobody writes: passed over, line by line."""
    deep = b'{"a":' * 900 + b"1" + b"}" * 900
    for broken in (b'{"step":1\n"loss":2}', b'{"step":1},{"step":2}', b'{"step":7,"x":[{}\n{}]}', deep):
        path = tmp_path / "rows.jsonl"
        path.write_bytes(b'{"step":1,"loss":3.0}\n' + broken + b'\n{"step":9,"loss":1.0}\n')
        assert list(Columns(path).refresh().column("step")) == [1, 9], broken
        assert [row["step"] for row in jsonl.read(path)] == [1, 9]
