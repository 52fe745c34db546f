"""What the list page can change: labels, archive and trash; who may, and what a large folder costs."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from _runs import make_runs
from starlette.testclient import TestClient
from test_serve import HERE, TRUSTED, client, get, guarded

from seedbed.config import flat
from seedbed.serve import run_index, views
from seedbed.track.run import Run


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_runs(tmp_path / "runs", 4, 30)
    return tmp_path / "runs"


def act(root: Path, action: Any, runs: Any, text: Any = "") -> Any:
    with client(root) as found:
        answer = found.post("/api/actions", json={"action": action, "runs": runs, "text": text})
        assert answer.status_code == 200, answer.text
        return answer.json()


def listed(root: Path) -> dict[str, Any]:
    return {run["name"]: run for run in get(root, "/api/runs")["runs"]}


def contents(root: Path) -> dict[Path, bytes]:
    """Every file except the locks."""
    return {p.relative_to(root): p.read_bytes() for p in root.rglob("*") if p.is_file() and p.name != "lock"}


def test_labels_are_kept_in_the_run_and_nothing_else_changes(root: Path):
    before = {p: p.read_bytes() for p in (root / "run-0001").rglob("*") if p.is_file()}
    for action, text in (
        ("tag", "good"),
        ("tag", "paper"),
        ("tag", "good"),
        ("untag", "paper"),
        ("rename", " the <b>deep</b> one "),
    ):
        assert act(root, action, ["run-0001", "run-0002"], text) == {"done": ["run-0001", "run-0002"], "failed": {}}
    act(root, "archive", ["run-0001"])
    found = listed(root)
    assert (found["run-0001"]["tags"], found["run-0001"]["label"]) == (["good"], "the <b>deep</b> one")
    assert [found[name]["archived"] for name in sorted(found)] == [False, True, False, False]
    act(root, "unarchive", ["run-0001"])
    assert not listed(root)["run-0001"]["archived"]
    after = {p: p.read_bytes() for p in (root / "run-0001").rglob("*") if p.is_file()}
    assert {p: content for p, content in after.items() if p.name != "labels.json"} == before


def test_deleted_runs_come_back_as_they_were(root: Path):
    before = contents(root)
    deleted = act(root, "delete", ["run-0001", "run-0003", "missing"])
    assert list(listed(root)) == ["run-0002", "run-0000"] and get(root, "/api/runs")["trash"] == sorted(deleted["done"])
    assert list(deleted["failed"]) == ["missing"] and "there is no run" in deleted["failed"]["missing"]
    assert act(root, "restore", deleted["done"])["done"] == ["run-0001", "run-0003"]
    assert contents(root) == before
    (entry,) = act(root, "delete", ["run-0001"])["done"]
    shutil.copytree(root / "run-0000", root / "run-0001")
    assert "exists again" in act(root, "restore", [entry])["failed"][entry]
    assert act(root, "purge", [entry])["done"] == [entry] and get(root, "/api/runs")["trash"] == []


def test_run_that_trains_is_not_deleted(root: Path):
    with Run(root / "run-0001").lock():
        failed = act(root, "delete", ["run-0001"])["failed"]
    assert "is in use" in failed["run-0001"] and (root / "run-0001" / "config.json").is_file()


@pytest.mark.parametrize("name", ["..", "../runs", ".trash", "a/b", "", ".", "run-0001/../run-0002", "\0", "x" * 300])
@pytest.mark.parametrize("action", ["delete", "restore", "purge", "tag"])
def test_names_that_lead_elsewhere_are_refused(root: Path, name: str, action: str):
    before = sorted(root.parent.rglob("*"))
    assert list(act(root, action, [name], "x")["failed"]) == [name]
    assert sorted(root.parent.rglob("*")) == before


def test_links_are_neither_deleted_nor_purged(root: Path, tmp_path: Path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").write_text("kept")
    (root / ".trash").mkdir()
    for link in (root / "link", root / ".trash" / "link.1"):
        link.symlink_to(tmp_path / "elsewhere")
    assert act(root, "delete", ["link"])["failed"] and act(root, "purge", ["link.1"])["failed"]
    assert (tmp_path / "elsewhere" / "kept").read_text() == "kept"


@pytest.mark.parametrize("text", ["", "two words", 'a"b', "a,b", "a|b", "\n"])
def test_tag_is_one_word(root: Path, text: str):
    with client(root) as found:
        answer = found.post("/api/actions", json={"action": "tag", "runs": ["run-0001"], "text": text})
    assert answer.status_code == 409 and "one word" in answer.json()["error"]


BROKEN = [
    "[",
    "[]",
    "{}",
    '{"action": "tag"}',
    '{"action": "tag", "runs": "run-0001"}',
    '{"action": 1, "runs": []}',
    '{"action": "tag", "runs": [1]}',
]


@pytest.mark.parametrize("body", [*BROKEN, '{"action": "tag", "runs": ["' + "x" * 70_000 + '"]}'])
def test_bad_actions_are_refused(root: Path, body: str):
    with client(root) as found:
        assert found.post("/api/actions", content=body).status_code == 400
        assert found.get("/api/actions").status_code == 405
        unknown = found.post("/api/actions", json={"action": "format", "runs": []})
        assert unknown.status_code == 409 and "is no action" in unknown.json()["error"]


@pytest.mark.parametrize("without", ["cookie", "origin"])
def test_actions_of_other_pages_are_refused(root: Path, without: str):
    headers = {key: value for key, value in TRUSTED.items() if key != without}
    with TestClient(guarded(root), base_url=f"http://{HERE}", headers=headers) as found:
        answer = found.post("/api/actions", json={"action": "delete", "runs": ["run-0001"]})
        assert answer.status_code == 403 and (root / "run-0001").is_dir()


@pytest.mark.parametrize("content", ["{", "[]", '{"tags": 3}', '{"tags": [1, null, "a"], "label": 5, "archived": "yes"}'])
def test_damaged_labels_hide_no_run(root: Path, content: str):
    (root / "run-0001" / "labels.json").write_text(content)
    found = listed(root)["run-0001"]
    assert found["status"] == "done" and found["archived"] is False and set(found["tags"]) <= {"a"}
    act(root, "tag", ["run-0001"], "b")
    assert "b" in listed(root)["run-0001"]["tags"]


def test_settings_are_sent_by_columns(root: Path):
    (root / "run-0003" / "config.json").write_text("{")
    found = get(root, "/api/settings")
    assert found["names"] == ["run-0000", "run-0001", "run-0002"]
    for row, name in enumerate(found["names"]):
        config = flat(json.loads((root / name / "config.json").read_text())["config"])
        assert {key: float(c["values"][c["at"][row]]) for key, c in found["keys"].items()} == config


def test_large_folder_answers_with_its_newest_runs_first(root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_index, "NUM_FIRST", 2)
    for number in range(4):
        Run(root / f"run-{number:04d}").set_status("done")
    index = run_index.RunIndex(root)
    first = views.run_list(index)
    assert ([run["name"] for run in first["runs"]], first["num"]) == (["run-0003", "run-0002"], 4)
    index.refresh()
    _, changed, gone = index.since(first["version"])
    assert {run["name"] for run in changed} >= {"run-0000", "run-0001"} and not gone
    assert len(views.run_list(index)["runs"]) == 4
