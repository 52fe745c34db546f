"""The data verbs: what they print, their JSON, and their exit codes."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from _sources import WindowSource

from seedbed.data.corpus import TextConfig
from seedbed.data.store import Store
from seedbed.data.text import open_text
from seedbed.errors import UserError
from seedbed.recipes import catalogue
from seedbed.report import data_bench as benching
from seedbed.report import data_verbs as verbs
from seedbed.report.data_bench import compare
from seedbed.report.data_verbs import visible

SRC = Path(__file__).resolve().parents[2] / "src"
TEXT = "".join(f"Line {n}:\tcafé [bold]not markup[/bold]\n" for n in range(300))


@pytest.fixture(autouse=True)
def source(tmp_path, monkeypatch):
    monkeypatch.setenv("SEEDBED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "100")
    path = tmp_path / "a text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(benching, "SECONDS", 0.01)
    monkeypatch.setattr(benching, "TURN", 0.0001)
    monkeypatch.setattr(benching, "MIN_ROUNDS", 3)
    monkeypatch.setattr(benching, "POOL", 1 << 20)


def test_prepare_names_the_store_and_the_next_command(source, capsys):
    assert verbs.prepare(str(source)) == 0
    shown = capsys.readouterr().out
    (store,) = [line.split()[1] for line in shown.splitlines() if line.startswith("store")]
    assert Store.open(Path(store)).verify() == []
    assert f"seedbed train gpt/demo 'data.text={source}'" in shown.replace("\n", " ")
    assert f"{len(TEXT):,} = {len(TEXT) - 1159:,} train + 1,159 valid" in shown


def test_prepare_as_json(source, tmp_path, capsys):
    assert verbs.prepare(str(source), tokenizer="bpe", vocab=300, out=tmp_path / "mine", json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["store"] == str(tmp_path / "mine") and found["tokenizer"]["kind"] == "bpe"
    assert found["train"] == f"seedbed train gpt/demo data.text={tmp_path / 'mine'}"
    assert verbs.prepare(str(source), tokenizer="bpe", vocab=300, json=True) == 0
    assert json.loads(capsys.readouterr().out)["train"].endswith("data.tokenizer=bpe data.vocab=300")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"path": "nowhere.txt"}, "there is no text at nowhere.txt"),
        ({"path": ""}, "data.text is empty"),
        ({"path": "reference", "vocab": 3}, "vocab=3 is out of range"),
        ({"path": "reference", "tokenizer": "nowhere.json"}, "there is no tokenizer at nowhere.json"),
        ({"path": "random:5"}, "is not random:NUM_TOKENS:VOCAB"),
    ],
)
def test_wrong_prepare_arguments_are_one_line(arguments, words):
    with pytest.raises(UserError) as caught:
        verbs.prepare(**arguments)
    assert words in str(caught.value)


def test_prepare_rebuilds_a_damaged_store(source, capsys):
    verbs.prepare(str(source), json=True)
    first = json.loads(capsys.readouterr().out)
    os.truncate(Path(first["store"]) / "tokens.bin", 5)
    assert verbs.verify(first["store"]) == 1
    capsys.readouterr()
    assert verbs.prepare(str(source), json=True) == 0
    again = capsys.readouterr()
    assert "building it again" in again.err and json.loads(again.out)["fingerprint"] == first["fingerprint"]
    assert verbs.verify(first["store"]) == 0


def test_interrupted_prepare_is_reported(source, monkeypatch, capsys):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(verbs, "prepare_text", interrupt)
    assert verbs.prepare(str(source)) == 130
    assert "the same command continues" in capsys.readouterr().err


def test_visible_text_stays_on_a_line_and_harmless():
    assert visible("a b\tc\r\n\x1b[31m\0\u202e") == "a·b→c␍↵\ufffd[31m\ufffd\ufffd"


def test_inspect_shows_samples_and_statistics(source, capsys):
    assert verbs.inspect(str(source)) == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    pairs = [(a, b) for a, b in pairwise(lines) if a.startswith("  x ") and b.startswith("  y ")]
    assert len(pairs) == 4
    assert all(x[5:] == y[4:-1] for x, y in pairs)
    assert pairs[0][0].startswith("  x Line·0:→café·[bold]not·markup[/bold]↵")
    assert "uint8" in shown and "tail of" in shown and "·" in shown


def test_inspect_facts_are_right(source, capsys):
    assert verbs.inspect(str(source), json=True) == 0
    found = json.loads(capsys.readouterr().out)
    n = len(TEXT)
    assert found["num_tokens"] == n and found["num_bytes"] == len(TEXT.encode()) == n + 300
    assert found["bytes_per_token"] == round((n + 300) / n, 4)
    train, valid = found["splits"]["train"], found["splits"]["valid"]
    assert train["num_blocks"] * 256 + train["num_dropped"] == train["end"] - 1
    assert valid["end"] == n and valid["start"] == train["end"]
    top = found["frequent"][0]
    assert TEXT.count(top["text"].replace("·", " ")) / n == pytest.approx(top["share"], abs=1e-5)
    share = np.unique(list(TEXT), return_counts=True)[1] / n
    assert found["unigram_nats"] == pytest.approx(-(share * np.log(share)).sum(), abs=1e-3)
    assert found["num_used_ids"] == len(set(TEXT)) == found["tokenizer"]["vocab_size"]


def test_inspect_takes_stores_recipes_and_random_tokens(source, tmp_path, capsys):
    data = open_text(TextConfig(text=str(source), tokenizer="bpe", vocab=290, block=32), seed=1)
    assert verbs.inspect(str(data.store.path)) == 0
    shown = capsys.readouterr().out
    x = next(line for line in shown.splitlines() if line.startswith("  x "))
    assert "│" in x and x[4:].replace("│", "").replace(" ", "").startswith("Line·0:→")
    asked = []
    recipe = lambda name: asked.append(name) or data  # noqa: E731
    assert verbs.inspect("gpt/demo", json=True, open_recipe=recipe) == 0
    assert asked == ["gpt/demo"] and json.loads(capsys.readouterr().out)["block"] == 32
    assert verbs.inspect("random:5000:300") == 0
    assert "random" in capsys.readouterr().out


def test_inspect_counts_only_the_beginning_of_a_large_store(source, monkeypatch, capsys):
    monkeypatch.setattr(verbs, "COUNT_LIMIT", 1000)
    verbs.inspect(str(source), json=True)
    assert json.loads(capsys.readouterr().out)["counted"] == 1000


def test_verify_finds_damage(source, capsys):
    verbs.prepare(str(source), json=True)
    store = json.loads(capsys.readouterr().out)["store"]
    assert verbs.verify(store) == 0
    assert "is sound" in capsys.readouterr().out
    data = bytearray((Path(store) / "tokens.bin").read_bytes())
    data[7] ^= 128
    (Path(store) / "tokens.bin").write_bytes(data)
    assert verbs.verify(store, json=True) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["sound"] is False and "tokens.bin: chunk 0" in found["problems"][0]
    (Path(store) / "manifest.json").write_text("{}")
    assert verbs.verify(store) == 1
    assert "lacks its checksum" in capsys.readouterr().out
    with pytest.raises(UserError, match="no store"):
        verbs.verify(str(source.parent / "nothing"))


def test_verify_notices_a_foreign_tokenizer(source, capsys):
    verbs.prepare(str(source), json=True)
    store = Path(json.loads(capsys.readouterr().out)["store"])
    text = (store / "tokenizer.json").read_text()
    (store / "tokenizer.json").write_text(text.replace('"a", "b"', '"b", "a"'))
    assert verbs.verify(str(store)) == 1
    shown = capsys.readouterr().out
    assert "tokenizer.json differs" in shown and "fingerprint" in shown


def test_bench_prints_speeds_and_ratios(source, quick, capsys):
    assert verbs.bench(str(source)) == 0
    shown = capsys.readouterr().out
    assert "GB/s" in shown and "memcpy" in shown
    assert verbs.bench(str(source), json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bytes_per_batch"] == 64 * (found["block"] + 1) * 8
    assert found["ratio"] == pytest.approx(found["copy"]["ms"] / found["feed"]["ms"], rel=0.05)
    assert found["ratio_memcpy"] == pytest.approx(found["memcpy"]["ms"] / found["feed"]["ms"], rel=0.05)


@pytest.mark.parametrize(("limit", "tier"), [(None, "device"), (0, "memory-map")])
def test_bench_measures_any_source(quick, limit, tier):
    source = WindowSource({"frame": np.zeros((100, 32, 32, 3), np.uint8)}, {"frame": 4})
    found = compare(source, batch=8, limit_bytes=limit)
    assert found["tier"] == tier and found["bytes_per_batch"] == 8 * 4 * 32 * 32 * 3
    assert found["feed"]["gb_per_s"] == pytest.approx(found["bytes_per_batch"] / found["feed"]["ms"] / 1e6, rel=0.05)


def test_data_verbs_except_bench_load_no_torch(source):
    code = (
        "import sys; from seedbed.report import data_verbs as verbs;"
        f"verbs.prepare({str(source)!r}, json=True); verbs.inspect({str(source)!r}, json=True);"
        "print('torch' in sys.modules)"
    )
    env = {"PYTHONPATH": str(SRC), "SEEDBED_CACHE": os.environ["SEEDBED_CACHE"]}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_long_prepare_shows_rate_and_time_left(monkeypatch, capsys):
    from seedbed.data import store

    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(store.time, "monotonic", lambda: clock.now)
    show = store.Progress("reading")
    show(10_000_000, 60_000_000)
    clock.now += 0.5
    show(20_000_000, 60_000_000)
    assert capsys.readouterr().err == ""
    clock.now += 9.5
    show(30_000_000, 60_000_000)
    assert capsys.readouterr().err == "reading: 30.0 MB of 60.0 MB, 2.0 MB/s, 15 s left\n"


def test_dataset_kind_is_found_by_the_data_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    from seedbed.cli import main
    from seedbed.data import kinds

    class Sound(kinds.DatasetKind):
        name = "sound"

        def can_prepare(self, path: str) -> bool:
            return path.endswith(".wav")

        def prepare(self, given) -> int:
            print(f"prepared {given.path}")
            return 0

    monkeypatch.setattr(kinds, "KINDS", dict(catalogue.dataset_kinds()))  # a kind registered while patched would be lost
    kinds.register(Sound())
    assert main(["data", "prepare", "voice.wav"]) == 0
    assert "prepared voice.wav" in capsys.readouterr().out
