"""The journal: every run leaves an honest entry, people's words are never touched, and writers do not lose each other's."""

import errno
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from track_samples import make, train

from seedbed.errors import UserError
from seedbed.report import journal, notes
from seedbed.track import files
from seedbed.track.run import Run


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def read(root: Path) -> str:
    return (root.parent / "JOURNAL.md").read_text()


def entry(root: Path, name: str) -> dict[str, str]:
    """The bullets of an entry, and its heading."""
    found = next(e for e in notes.entries(root) if e["run"] == name)
    bullets = [line[2:].split(": ", 1) for line in found["text"].splitlines() if line.startswith("- ")]
    return {"title": found["title"], **dict(bullets)}


def test_journal_entry_has_reason_changes_and_command(root: Path):
    run = train(make(root, "first", "steps=400", why="does it learn?"))
    journal.record(run)
    found = entry(root, "first")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d · first · done", found["title"])
    assert found["why"] == "does it learn?"
    assert found["recipe"] == "gpt/demo, commit 0123456789 (main)"
    assert found["changed against the preset"] == "steps=400"
    assert found["verdict"].startswith(
        "done at step 400 of 400; loss 2.0030 ± 0.0097 over the last 20 rows; evaluation: best valid_loss "
    )
    assert found["reproduce"] == "`seedbed train gpt/demo steps=400`"
    assert found["conclusion"] == 'open (`seedbed note first "..."`)'
    assert "picture" not in found, "there is none yet"


def test_finish_draws_the_plot_of_the_entry(root: Path):
    warnings: list[str] = []
    journal.finish(train(make(root)), warnings.append)
    link = re.search(r"!\[.*?\]\((.*?)\)", entry(root, "first")["picture"])
    assert link and (root.parent / link[1]).is_file()
    assert warnings == []


LEVELS = [
    (2.0, "no clear difference from mother", "within the noise band of ±0.0804 (1 and 3 seeds)"),
    (2.05, "no clear difference from mother", "0.0500 higher than mother at step 400: within the noise band"),
    (1.5, "better than mother", "valid_loss 0.5000 lower than mother at step 400: outside the noise band of ±0.0804"),
    (2.5, "negative result: worse than mother", "0.5000 higher than mother at step 400: outside the noise band"),
]


def mothers(root: Path, *settings: str, num: int = 3) -> None:
    """A run and the same with other seeds, whose levels have a standard deviation of 0.01."""
    for seed in range(num):
        train(make(root, f"mother-{seed}" if seed else "mother", f"seed={seed}", *settings), level=2.0 + 0.01 * (0, 1, -1)[seed])


@pytest.mark.parametrize(("level", "title", "printed"), LEVELS)
def test_verdict_compares_a_run_with_its_parent(root: Path, level: float, title: str, printed: str):
    mothers(root, "optim.lr=0.25")
    journal.record(train(make(root, "child", "seed=0", "optim.lr=0.5", parent="mother"), level=level))
    found = entry(root, "child")
    assert found["title"].endswith(f" · child · {title}")
    assert printed in found["verdict"] and "evaluation: best valid_loss" in found["verdict"]
    assert found["changed against parent mother"] == "optim.lr 0.25 -> 0.5"


def test_verdict_needs_the_same_metric(root: Path):
    mothers(root)
    journal.record(train(make(root, "child", "optim.lr=0.5", parent="mother"), level=1.0, metric="fid"))
    found = entry(root, "child")
    assert found["title"].endswith("done, not decided against mother")
    assert found["verdict"].endswith("; no evaluation of the same metric")


def test_verdict_on_one_seed_is_not_decided(root: Path):
    """However large the difference: another seed might make it."""
    mothers(root, num=1)
    journal.record(train(make(root, "child", "optim.lr=0.5", parent="mother"), level=1.0))
    found = entry(root, "child")
    assert found["title"].endswith("done, not decided against mother")
    assert "valid_loss 1.0000 lower than mother at step 400: one seed: unknown" in found["verdict"]


@pytest.mark.parametrize("status", ["nan", "diverged", "failed"])
def test_verdict_of_negative_results(root: Path, status: str):
    train(make(root, "mother"))
    journal.record(train(make(root, "child", parent="mother"), level=0.5, status=status))
    assert entry(root, "child")["title"].endswith(f"negative result: {status}")


@pytest.mark.parametrize("num_rows", [0, 1, 2])
def test_verdict_needs_enough_rows_for_noise(root: Path, num_rows: int):
    train(make(root, "mother"), num_rows=num_rows)
    journal.record(train(make(root, "child", parent="mother"), num_rows=num_rows))
    found = entry(root, "child")
    assert "outside" not in found["verdict"] and "within" not in found["verdict"]
    assert "better" not in found["title"] and "worse" not in found["title"]


def test_verdict_without_a_readable_parent(root: Path):
    for name, damage in [("gone", None), ("hurt", "{")]:
        mother = train(make(root, name))
        run = train(make(root, f"child-of-{name}", "steps=7", parent=name))
        if damage is None:
            mother.path.rename(root.parent / "away")
        else:
            (mother.path / "config.json").write_text(damage)
        journal.record(run)
        assert entry(root, run.name)["changed against the preset"] == "steps=7"


def test_killed_run_is_interrupted(root: Path):
    run = train(make(root))
    run.set_status("running", step=123)
    journal.record(run)
    assert entry(root, "first")["title"].endswith("interrupted")
    assert entry(root, "first")["verdict"].startswith("interrupted at step 123")


def test_journal_entry_is_updated_in_place(root: Path):
    for name in ("a", "b", "c"):
        journal.record(train(make(root, name), status="interrupted"))
    Run.open(root, "b").set_status("done")
    journal.record(Run.open(root, "b"))
    assert [(e["run"], e["title"].split(" · ")[2]) for e in notes.entries(root)] == [
        ("a", "interrupted"),
        ("b", "done"),
        ("c", "interrupted"),
    ]


def test_journal_record_is_idempotent(root: Path):
    for name in ("a", "b"):
        journal.record(train(make(root, name)))
    before = read(root)
    for name in ("a", "b", "a"):
        journal.record(Run.open(root, name))
    assert read(root) == before


def test_journal_keeps_user_text(root: Path):
    own = [
        "# My journal\n\nA plan.",
        "A thought under a.\n\n```\n## not a heading\n```",
        "## 2026-01-01 · an entry of my own",
        "The end.",
    ]
    (root.parent / "JOURNAL.md").write_text(own[0])
    journal.record(train(make(root, "a")))
    path = root.parent / "JOURNAL.md"
    path.write_text(path.read_text() + f"\n{own[1]}\n\n{own[2]}\n\nwith text\n")
    journal.record(train(make(root, "b")))
    path.write_text(path.read_text() + f"\n{own[3]}")
    notes.note(root, "a", "learned a lot")
    notes.note(root, "b", "learned little")
    journal.record(Run.open(root, "a"))
    text = read(root)
    positions = [text.index(part) for part in own]
    assert positions == sorted(positions)
    assert text.count("with text") == 1
    assert text.index("learned a lot") < text.index("<!-- run b -->") < text.index("learned little")


def test_notes_accumulate_under_their_run(root: Path):
    for name in ("a", "b", "c"):
        journal.record(train(make(root, name)))
    for name, words in [("b", "one"), ("a", "two"), ("b", "three"), ("c", "four")]:
        notes.note(root, name, words)
    texts = {e["run"]: e["text"] for e in notes.entries(root)}
    assert [re.findall(r"^- conclusion, \d{4}-\d\d-\d\d: (.*)$", texts[name], re.M) for name in "abc"] == [
        ["two"],
        ["one", "three"],
        ["four"],
    ]
    assert "conclusion: open" not in read(root)


def test_note_removes_the_open_conclusion(root: Path):
    run = train(make(root, "a"))
    journal.record(run)
    notes.note(root, "a", "clear")
    journal.record(run)
    assert "open (" not in read(root) and read(root).count("clear") == 1


def test_note_on_a_run_without_an_entry_makes_one(root: Path):
    make(root, "a")
    notes.note(root, "a", "stopped it by hand")
    assert entry(root, "a")["title"].endswith("interrupted")
    assert "stopped it by hand" in read(root)


def test_notes_outlive_the_run_folder(root: Path):
    run = train(make(root, "a"))
    journal.record(run)
    run.path.rename(root.parent / "away")
    notes.note(root, "a", "worth it")
    assert "worth it" in read(root)


def test_note_on_an_unknown_run_suggests_the_nearest(root: Path):
    journal.record(train(make(root, "first")))
    with pytest.raises(UserError, match="nearest: first"):
        notes.note(root, "fist", "x")
    for empty in ("", "  \n"):
        with pytest.raises(UserError, match="the note is empty"):
            notes.note(root, "first", empty)


TRICKS = [
    "-->",
    "<!-- run b -->",
    "<!-- end a -->",
    "a\n## heading\n<!-- run z -->",
    "\\1 \\g<0>",
    "`ticks`",
    "\x1b[31m",
    "\udcff",
]


@pytest.mark.parametrize("trick", TRICKS)
def test_note_text_cannot_break_the_journal(root: Path, trick: str):
    for name in ("a", "b"):
        journal.record(train(make(root, name, why=trick)))
        notes.note(root, name, f"x {trick}")
    journal.record(Run.open(root, "a"))
    assert [e["run"] for e in notes.entries(root)] == ["a", "b"]
    assert read(root).count("- conclusion, ") == 2
    assert "\x1b" not in read(root)


def test_full_disk_leaves_the_journal_as_it_was_and_warns(root: Path, monkeypatch):
    journal.record(train(make(root, "a")))
    run, before, warnings = train(make(root, "b")), read(root), []

    def full(fd: int, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "write", full)
    journal.finish(run, warnings.append)
    assert read(root) == before
    assert [w.split(" could not")[0] for w in warnings] == ["the report", "the journal entry"]


def test_plot_failure_is_a_warning(root: Path, monkeypatch):
    def broken(run: Run) -> None:
        raise RuntimeError("no fonts")

    warnings: list[str] = []
    monkeypatch.setattr(journal.run_report, "write", broken)
    journal.finish(train(make(root)), warnings.append)
    assert warnings == ["the report could not be written: RuntimeError: no fonts"]
    assert entry(root, "first")["title"].endswith("done")


def test_journal_that_is_not_text_is_not_changed(root: Path):
    run = train(make(root, "a"))
    (root.parent / "JOURNAL.md").write_bytes(b"\xff\xfe journal")
    with pytest.raises(UserError, match="not UTF-8"):
        journal.record(run)
    assert (root.parent / "JOURNAL.md").read_bytes() == b"\xff\xfe journal"


NOTER = """
import sys
from pathlib import Path
from seedbed.report import notes
for number in range(15):
    notes.note(Path(sys.argv[1]), sys.argv[2], f"{sys.argv[2]} {number}")
"""


def test_journal_writes_of_two_processes_are_kept(root: Path):
    for name in ("a", "b"):
        journal.record(train(make(root, name)))
    writers = [subprocess.Popen([sys.executable, "-c", NOTER, str(root), name]) for name in ("a", "b")]
    for _ in range(10):
        journal.record(Run.open(root, random.Random(1).choice("ab")))
    assert [writer.wait(60) for writer in writers] == [0, 0]
    for name in ("a", "b"):
        text = next(e["text"] for e in notes.entries(root) if e["run"] == name)
        assert re.findall(rf"{name} (\d+)$", text, re.M) == [str(n) for n in range(15)]
