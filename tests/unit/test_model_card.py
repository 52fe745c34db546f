"""The model card: measured facts of the run folder, in Markdown, without folders of the machine."""

import json
from pathlib import Path

import pytest

from seedbed.report.model_card import model_card, without_folders
from seedbed.track.run import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    text = "/srv/private/book.txt"
    config = {"model": {"depth": 1}, "data": {"text": text}}
    known = {
        "recipe": "gpt",
        "preset": "demo",
        "config": config,
        "version": "1.2",
        "changes": {"data.text": "/srv/private/book.txt"},
    }
    (tmp_path / "config.json").write_text(json.dumps(known))
    (tmp_path / "code.json").write_text(
        json.dumps({"commit": "1a2b3c4d5e6f", "python": "3.11", "num_cores": 2, "machine": "x86_64"})
    )
    (tmp_path / "status.json").write_text(json.dumps({"status": "done", "step": 9, "last_step": 9, "clock": {"train": 61.2}}))
    data = {"name": text, "num_tokens": 12345, "store": "/srv/cache/book"}
    events = [
        {"step": 0, "kind": "start", "device": "cpu", "data": data},
        {"step": 0, "kind": "model", "parameters": 868352},
        {"step": 5, "kind": "eval", "loss": 2.5},
        {"step": 9, "kind": "eval", "loss": 2.25},
        {"step": 9, "kind": "sample", "text": "a | b\n# no heading"},
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return Run(tmp_path)


def test_card_states_what_the_run_recorded(run: Run):
    card = model_card(run, "me/tiny")
    facts = ["gpt/demo", "868,352", "12,345 tokens", "step 9 of 9", "best loss 2.2500 at step 9", "train 1:01", "cpu, 2 cores"]
    facts += ["commit 1a2b3c4d5e", "seedbed train gpt/demo data.text=book.txt", 'seedbed.load(Path("tiny"))']
    assert [fact for fact in facts if fact not in card] == []
    assert card.startswith("---\nlibrary_name: seedbed\n")
    assert "\n    # no heading" in card, "a sample is a block of code"
    assert "/srv" not in card and str(run.path.parent) not in card


def test_card_of_a_run_that_lost_its_files(run: Run):
    for name in ("code.json", "status.json", "events.jsonl"):
        (run.path / name).unlink()
    assert "gpt/demo" in model_card(run)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("data.text=/srv/me/x.txt", "data.text=x.txt"),
        ("'/srv/me/my file.txt' b", "'my file.txt' b"),
        ("'data.text=/srv/my own/a b.txt' steps=2 'data.x=/srv/o o/'", "'data.text=a b.txt' steps=2 'data.x=o o'"),
        ('{"a": "/srv/my own/x.txt", "b": "c/d e"}', '{"a": "x.txt", "b": "c/d e"}'),
        ("~/x/y/", "y"),
        ("~me/y", "y"),
        (r"C:\Data\me\z.txt", "z.txt"),
        (r"\\host\share\z.txt", "z.txt"),
        ("//host/share/z.txt", "z.txt"),
        ("a,/b/c,d", "a,c,d"),
    ],
)
def test_absolute_paths_lose_their_folders(text: str, expected: str):
    assert without_folders(text) == expected


@pytest.mark.parametrize("text", ["https://a.b/c/d", "a/b/c.py", "../x/y", "1/2 and / or", "</s>", "gpt/demo", "18.3 items/s"])
def test_other_text_stays(text: str):
    assert without_folders(text) == text
