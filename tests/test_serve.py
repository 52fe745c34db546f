"""The workbench's answers: what runs folders hold, however they were left, and nothing beyond them."""

import asyncio
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from _runs import make_runs
from starlette.testclient import TestClient
from starlette.websockets import WebSocket

from seedbed.serve import app, auth, playground, run_index, views
from seedbed.track.run import Run

TOKEN, HERE = "token", "127.0.0.1:8765"
TRUSTED = {"cookie": f"seedbed={TOKEN}", "origin": f"http://{HERE}"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs that no test changes."""
    root = tmp_path_factory.mktemp("shared") / "runs"
    make_runs(root, 12, 300, num_kinds=6, num_per_sweep=2)
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_runs(tmp_path / "runs", 4, 60)
    return tmp_path / "runs"


def guarded(root: Path) -> auth.Auth:
    return auth.Auth(app.workbench(root), auth.LOOPBACK, token=TOKEN)


@contextmanager
def client(root: Path) -> Iterator[TestClient]:
    with TestClient(guarded(root), base_url=f"http://{HERE}", headers=TRUSTED) as found:
        yield found


def get(root: Path, path: str) -> Any:
    with client(root) as found:
        answer = found.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()


# ---- curves ------------------------------------------------------------------------------------------------------------


def test_columns_returned_earlier_do_not_change(root: Path):
    kept = run_index.RunIndex(root)
    before = kept.columns("run-0000")
    with open(root / "run-0000" / "rows.jsonl", "a") as file:
        file.write('{"step": 9999, "loss": 0.5, "new": 1}\n')
    after = kept.columns("run-0000")
    assert (before.num_rows, len(before.column("loss")), len(before.column("new"))) == (60, 60, 60)
    assert (after.num_rows, len(after.column("loss")), after.column("new")[-1]) == (61, 61, 1.0)


@pytest.mark.parametrize("axis", [*views.AXES, "tokens"])
def test_every_page_of_a_run_that_grows_between_two_reads_is_answered(root: Path, monkeypatch: pytest.MonkeyPatch, axis: str):
    grown: list[int] = []

    def columns(index: run_index.RunIndex, name: str) -> Any:
        grown.append(10_000 + len(grown))
        with open(index.root / name / "rows.jsonl", "a") as file:
            file.write(json.dumps({"step": grown[-1], "loss": 0.5, "items": 7, "seconds": 9.0}) + "\n")
        return whole(index, name)

    whole = run_index.RunIndex.columns
    monkeypatch.setattr(run_index.RunIndex, "columns", columns)
    query = f"key=loss&key=lr&key=eval/loss&smooth=0.6&x={axis}"
    with client(root) as found:
        for path in ("runs/run-0000", "compare?run=run-0000&run=run-0002", f"series?run=run-0000&{query}"):
            assert found.get(f"/api/{path}").status_code == 200, path
        curves = found.get(f"/api/runs/run-0000/series?{query}").json()
    assert len(curves["loss"]["raw"]["x"]) == len(curves["loss"]["raw"]["y"]) and len(grown) > 8
    assert axis == "tokens" or curves["loss"]["raw"]["x"][-1] in (*grown, 7, 9.0)


def test_series_on_every_axis(shared: Path):
    name = "run-0000"
    rows = Run.open(shared, name).rows()
    for axis in views.AXES:
        found = get(shared, f"/api/runs/{name}/series?x={axis}&key=loss&key=eval/loss&points=4000")
        assert found["loss"]["raw"] == {"x": [row[axis] for row in rows], "y": [row["loss"] for row in rows]}
        by_step = {row["step"]: row[axis] for row in rows}
        evals = [e for e in Run.open(shared, name).events() if e["kind"] == "eval"]
        last = found["eval/loss"]["raw"]
        assert last["y"] == [e["loss"] for e in evals] and last["x"][-1] == pytest.approx(by_step[evals[-1]["step"]])
    zoomed = get(shared, f"/api/runs/{name}/series?key=loss&low=1000&high=1200&smooth=0.5")["loss"]
    assert zoomed["raw"]["x"][0] == 990 and zoomed["raw"]["x"][-1] == 1210 and zoomed["smooth"]["x"] == zoomed["raw"]["x"]


def test_series_of_more_than_40_keys_are_all_answered(root: Path):
    keys = [f"part_{n:02d}" for n in range(60)]
    (root / "run-0000" / "rows.jsonl").write_text(
        "".join(json.dumps({"step": s} | dict.fromkeys(keys, s)) + "\n" for s in (1, 2))
    )
    found = get(root, "/api/runs/run-0000/series?" + "&".join(f"key={key}" for key in keys))
    assert list(found) == keys and found["part_59"]["raw"] == {"x": [1, 2], "y": [1, 2]}


def test_series_of_several_runs_are_those_of_each(shared: Path):
    names, query = ["run-0000", "run-0001"], "x=seconds&key=loss&key=eval/loss&points=100&smooth=0.5&low=3&high=20"
    found = get(shared, f"/api/series?{'&'.join(f'run={name}' for name in (*names, 'gone'))}&{query}")
    assert found == {"runs": {name: get(shared, f"/api/runs/{name}/series?{query}") for name in names}, "unknown": []}
    with client(shared) as asked:
        assert asked.get(f"/api/series?{query}").status_code == 404
        assert asked.get("/api/series?run=run-0000&x=nothing").status_code == 404


def test_tokens_and_flops_of_a_run_are_an_axis_where_its_files_say(root: Path):
    events = root / "run-0000" / "events.jsonl"
    events.write_text(events.read_text() + '{"step": 0, "kind": "model", "flops_per_item": 2e6}\n')
    config = json.loads((root / "run-0001" / "config.json").read_text())
    config["config"]["data"] = {"block": 32}
    (root / "run-0001" / "config.json").write_text(json.dumps(config))
    items = [row["items"] for row in Run.open(root, "run-0000").rows()]
    for axis, known, unknown, each in (("flops", "run-0000", "run-0001", 2e6), ("tokens", "run-0001", "run-0000", 32)):
        found = get(root, f"/api/series?run=run-0000&run=run-0001&x={axis}&key=loss&key=eval/loss")
        assert found["unknown"] == [unknown] and found["runs"][unknown]["loss"]["raw"] == {"x": [], "y": []}
        assert found["runs"][known]["loss"]["raw"]["x"] == [each * n for n in items]
        assert found["runs"][known]["eval/loss"]["raw"]["x"][-1] == each * items[-1]
    row = {"step": 1, "loss": 1.0, "items": 5, "tokens": 77}
    (root / "run-0002" / "rows.jsonl").write_text(json.dumps(row) + "\n")
    assert get(root, "/api/series?run=run-0002&x=tokens&key=loss")["runs"]["run-0002"]["loss"]["raw"]["x"] == [77], "the row says"


def test_rate_of_an_earlier_version_does_not_end_below_zero(root: Path):
    lines = [{"step": 1, "lr": 1e-3, "z": -1.0, "lrs": {"a": -1e-18}}, {"step": 2, "lr": -1.3e-18, "z": -1.3e-18}]
    (root / "run-0000" / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = get(root, "/api/runs/run-0000/series?key=lr&key=lrs.a&key=z")
    assert [found[key]["raw"]["y"] for key in ("lr", "lrs.a", "z")] == [[1e-3, 0.0], [0.0], [-1.0, -1.3e-18]]


def test_ablations_and_sweeps_are_listed_whatever_their_files_hold(root: Path):
    top = root.parent / "ablations"
    kept = {
        "identity": {"recipe": "gpt/demo"},
        "facts": {"created": "2025-01-01"},
        "rows": [{"label": "a", "repeats": {"1": {}}}],
    }
    broken = {
        "whole": json.dumps(kept),
        "half": '{"identity": 3, "facts": 4}',
        "none": "[",
        "list": "[]",
        "facts": '{"facts": "x"}',
    }
    for name, text in broken.items():
        (top / name).mkdir(parents=True)
        (top / name / "report.json").write_text(text)
    found = get(root, "/api/studies")
    assert {one["name"] for one in found} >= {"whole"} and not {one["name"] for one in found} & {"none", "list"}
    whole = next(one for one in found if one["name"] == "whole")
    assert whole == {
        **{"kind": "ablations", "name": "whole", "recipe": "gpt/demo"},
        "preset": "",
        "why": "",
        "created": "2025-01-01",
    }
    page = get(root, "/api/ablations/whole")
    assert page["rows"] == [{"label": "a", "axis": None, "outcome": None, "prediction": None}] and page["summary"] is None
    with client(root) as asked:
        assert asked.get("/ablation/whole").status_code == 200
        for path in (
            "/api/ablations/none",
            "/api/ablations/list",
            "/api/ablations/%2e%2e",
            "/api/ablations/nothing",
            "/ablation/nothing",
        ):
            assert asked.get(path).status_code == 404, path


WRONG = ["x=nothing", "points=many", "points=1", "points=1e9", "smooth=2", "smooth=nan", "low=nan", "low=x"]


@pytest.mark.parametrize("query", WRONG)
def test_wrong_query_is_a_one_line_error(shared: Path, query: str):
    with client(shared) as found:
        answer = found.get(f"/api/runs/run-0000/series?key=loss&{query}")
        assert answer.status_code == 404 and answer.json()["error"]


# ---- pages -------------------------------------------------------------------------------------------------------------


def test_run_list_of_the_api(shared: Path):
    found = get(shared, "/api/runs")
    assert [run["name"] for run in found["runs"]] == sorted((r["name"] for r in found["runs"]), key=lambda n: created(shared, n))[
        ::-1
    ]
    run = next(run for run in found["runs"] if run["name"] == "run-0000")
    assert (run["status"], run["title"], run["step"], run["metric"]) == ("done", "gpt/demo", 3000, "loss")
    assert run["rate"] > 0 and 20 < len(run["spark"]) <= run_index.NUM_SPARK + 1
    assert {run["sweep"] for run in found["runs"]} == {None, "gpt-demo-04"}


def created(root: Path, name: str) -> str:
    return Run.open(root, name).config_json()["created"]


def test_run_with_a_parent(shared: Path):
    page = get(shared, "/api/runs/run-0002")
    assert page["summary"]["parent"] == "run-0001"
    moved = {c["key"]: (c["parent"], c["value"]) for c in page["config"] if c["parent"] is not None}
    assert moved == {"seed": ("1", "2"), "optim.lr": ("0.002", "0.003")}
    assert [c["key"] for c in page["config"] if c["changed"]] == ["optim.lr"]
    assert get(shared, "/api/runs/run-0001")["children"] == ["run-0002"]
    assert [parent["name"] for parent in page["parents"]] == ["run-0001"] and page["code_json"]["version"] == "0.1.0"
    # The preset of today has other settings than these runs were made up with.
    command = page["reproduce"]["command"].split()
    assert command[:3] == ["seedbed", "train", "ebt/demo"] and {"batch=64", "steps=1000", "seed=2"} <= set(command)
    assert page["reproduce"]["remarks"][0].startswith("the preset has changed since")
    assert page["time"]["seconds"]["train"] > page["time"]["seconds"]["eval"] > 0
    assert "loss" in page["keys"] and "eval/loss" in page["keys"] and "step" not in page["keys"]


def test_parents_are_listed_from_the_root_to_one_that_was_removed(root: Path):
    for name, parent in (("run-0000", "gone"), ("run-0001", "run-0000")):
        config = root / name / "config.json"
        config.write_text(config.read_text().replace('"parent": null', f'"parent": "{parent}"'))
    found = get(root, "/api/runs/run-0002")["parents"]
    assert [one["name"] for one in found] == ["gone", "run-0000", "run-0001"] and "status" not in found[0]


def test_events_have_a_position_on_every_axis(shared: Path):
    spike = next(e for e in get(shared, "/api/runs/run-0000")["events"] if e["kind"] == "spike")
    assert spike["severity"] == "warning"
    assert spike["at"] == {
        "step": 1500,
        "seconds": pytest.approx(0.123 * 150),
        "items": 640 * 150,
    }


def test_comparison_distinguishes_noise_from_change(root: Path):
    for name, level in (("a", 2.0), ("b", 1.0), ("c", 2.001), ("d", 3.0)):
        make_flat(root / name, level)
    for seed in (1, 2):
        make_flat(root / f"a-{seed}", 2.0, seed=seed, shift=0.01 * seed)
    found = get(root, "/api/compare?run=a&run=b&run=c&run=d")
    words = [run.get("verdicts", {}).get("step", {}).get("word") for run in found["runs"]]
    assert words == [None, "better", "equal", "worse"]
    decided = found["runs"][1]["verdicts"]
    assert decided["step"]["num_seeds"] == [1, 3] and decided["step"]["metric"] == "error" and decided["step"]["end"] == 40
    assert decided["seconds"]["word"] == "better"
    by_score = get(root, "/api/compare?run=a&run=b&metric=psnr")["runs"][1]
    assert (by_score["verdicts"]["step"]["word"], by_score["metric"], by_score["best"]) == ("worse", "psnr", 1.0)
    alone = get(root, "/api/compare?run=b&run=d")["runs"][1]["verdicts"]["step"]
    assert alone["word"] == "unknown" and "one seed: unknown" in alone["why"]
    (root / "d" / "config.json").write_text("{")
    assert get(root, "/api/compare?run=a&run=d")["runs"][1]["verdicts"]["step"]["word"] == "unknown"
    make_flat(root / "d", 3.0)
    found = get(root, "/api/compare?run=a&run=b&run=c&run=d")
    assert found["settings"] == [{"key": "optim.lr", "values": {"a": "2.0", "b": "1.0", "c": "2.001", "d": "3.0"}}]
    assert found["num_equal"] == 2
    with client(root) as asked:
        assert asked.get("/api/compare").status_code == 404
        assert asked.get("/api/compare?run=a&run=nothing").status_code == 404
        assert asked.get("/api/compare?" + "&".join(f"run=r{i}" for i in range(70))).status_code == 404


def make_flat(path: Path, level: float, seed: int = 0, shift: float = 0.0) -> None:
    (path / "checkpoints").mkdir(parents=True, exist_ok=True)
    config = {"steps": 40, "seed": seed, "optim": {"lr": level}}
    (path / "config.json").write_text(json.dumps({"recipe": "gpt", "preset": "demo", "config": config}))
    rng = random.Random(0)
    rows = [{"step": i, "loss": level + rng.gauss(0, 0.05), "seconds": i, "items": i} for i in range(1, 41)]
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    numbers = {"error": level + shift, "psnr": level + shift}
    evaluated = [{"step": i, "kind": "eval", **numbers, "seconds": i} for i in range(8, 41, 8)]
    (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in evaluated))


def test_samples_console_and_files(root: Path):
    run = Run.open(root, "run-0001")
    (run.path / "samples" / "step-000010").mkdir()
    (run.path / "samples" / "step-000010" / "grid & more.png").write_bytes(b"\x89PNG")
    run.event(10, "sample", text="<script>alert(1)</script>", files=["samples/step-000010/grid & more.png"])
    run.close()
    (sample,) = [s for s in get(root, "/api/runs/run-0001/samples") if s["step"] == 10]
    assert sample["text"] == "<script>alert(1)</script>"
    with client(root) as found:
        answer = found.get(sample["files"][0])
        assert (answer.status_code, answer.content, answer.headers["content-type"]) == (200, b"\x89PNG", "image/png")
    (run.path / "console.log").write_text("".join(f"line {i}\n" for i in range(20_000)))
    shown = get(root, "/api/runs/run-0001/console")
    assert shown["cut"] and shown["text"].startswith("line ") and shown["text"].endswith("line 19999\n")


# ---- runs that are not as they should be -------------------------------------------------------------------------------


def newer(path: Path) -> None:
    """As a later version might write it: other words, other keys, other shapes."""
    facts = json.loads((path / "config.json").read_text()) | {"version": "9.9.9", "format": {"kind": "new"}, "changes": {}}
    facts["config"]["model"] = {"shape": [{"a": 1}, None], "name": "x"}
    (path / "config.json").write_text(json.dumps(facts))
    (path / "status.json").write_text(json.dumps({"status": "sleeping", "step": "many", "clock": [1, 2], "best": {"loss": 1}}))
    with open(path / "events.jsonl", "a") as file:
        file.write(
            '{"step": "x", "kind": "dream", "deep": {"a": [1]}}\n{"kind": 7}\n{"step": 1, "kind": "sample", "files": null}\n'
        )
    with open(path / "rows.jsonl", "a") as file:
        file.write('{"step": 700, "loss": {"main": 1.0}, "tensor": [1, 2]}\n')


DAMAGE = {
    "half a row": lambda p: (p / "rows.jsonl").write_text((p / "rows.jsonl").read_text()[:-20]),
    "no rows": lambda p: (p / "rows.jsonl").unlink(),
    "no config": lambda p: (p / "config.json").unlink(),
    "config is no JSON": lambda p: (p / "config.json").write_text("{"),
    "config is a list": lambda p: (p / "config.json").write_text("[]"),
    "config lacks parts": lambda p: (p / "config.json").write_text('{"recipe": 3}'),
    "no status": lambda p: (p / "status.json").unlink(),
    "status is no JSON": lambda p: (p / "status.json").write_text("\0"),
    "events are noise": lambda p: (p / "events.jsonl").write_bytes(os.urandom(300)),
    "a newer version": newer,
    "only a folder": lambda p: [f.unlink() for f in p.iterdir() if f.is_file()],
    "a checkpoint in pieces": lambda p: (p / "checkpoints" / "step-00000x").mkdir(),
    "preflight is no JSON": lambda p: (p / "preflight.json").write_text("[1"),
    "parent is gone": lambda p: (p.parent / "run-0001").rename(p.parent / "renamed"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_run_is_shown_as_far_as_possible(root: Path, damage: str):
    DAMAGE[damage](root / "run-0002")
    with client(root) as found:
        assert len(found.get("/api/runs").json()["runs"]) == 4
        for path in ("", "/samples", "/console", "/series?key=loss&key=eval/loss&smooth=0.5", "/series?x=items&key=tensor"):
            answer = found.get(f"/api/runs/run-0002{path}")
            assert answer.status_code == 200, (path, answer.text)
        assert found.get("/api/compare?run=run-0000&run=run-0002").status_code == 200
        assert found.get("/api/journal").status_code == 200


def test_run_removed_while_its_page_is_open(root: Path):
    with client(root) as found:
        assert found.get("/api/runs/run-0003").status_code == 200
        (root / "run-0003").rename(root / "moved")
        answer = found.get("/api/runs/run-0003/series?key=loss")
        assert answer.status_code == 404 and "run-0003" in answer.json()["error"]
        names = [run["name"] for run in found.get("/api/runs").json()["runs"]]
        assert "moved" in names and "run-0003" not in names


def test_markup_in_names_is_escaped(root: Path):
    name = "<img src=x onerror=alert(1)>"
    (root / "run-0000").rename(root / name)
    with client(root) as found:
        assert name in [run["name"] for run in found.get("/api/runs").json()["runs"]]
        page = found.get("/run/" + "%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E")
        assert page.status_code == 200 and name not in page.text
        answer = found.get("/api/runs/%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E")
        assert answer.json()["summary"]["name"] == name and answer.headers["content-type"] == "application/json"


def test_empty_runs_folder_is_served(tmp_path: Path):
    assert get(tmp_path / "nowhere" / "runs", "/api/runs")["runs"] == []
    assert get(tmp_path / "nowhere" / "runs", "/api/journal") == []


# ---- paths that lead out -----------------------------------------------------------------------------------------------

OUT = [
    "/files/runs/run-0000/../../secret.txt",
    "/files/runs/run-0000/%2e%2e/%2e%2e/secret.txt",
    "/files/runs/run-0000/..%2f..%2fsecret.txt",
    "/files/runs/%2e%2e/secret.txt",
    "/files/runs/..%2f/secret.txt",
    "/files/runs/run-0000/%2fetc%2fpasswd",
    "/files/runs/run-0000//etc/passwd",
    "/files/runs/run-0000/config.json%00.png",
    "/files/runs/run-0000%00/config.json",
    "/files/runs/run-0000/..%5c..%5csecret.txt",
    "/files/runs/run-0000/link.txt",
    "/files/runs/run-0000/folder/secret.txt",
    "/files/runs/run-0000/.hidden.txt",
    "/files/runs/run-0000/page.html",
    "/files/runs/run-0000/code.py",
    "/files/runs/run-0000/picture.svg",
    "/files/runs/run-0000/samples",
    "/files/runs/run-0000/",
    "/files/runs//config.json",
    "/files/other/run-0000/config.json",
    "/files/sweeps/run-0000/config.json",
    "/static/../app.py",
    "/static/%2e%2e/app.py",
    "/static/%2e%2e/%2e%2e/errors.py",
    "/static//etc/passwd",
    "/static/%00",
    "/api/runs/%2e%2e",
    "/api/runs/..%2f..",
    "/api/runs/.journal-lock",
    "/api/runs/%00",
    "/api/runs/nothing",
    "/api/runs/%2e%2e/series?key=loss",
    "/api/runs/%2e%2e/console",
    "/api/sweeps/%2e%2e",
    "/api/sweeps/nothing",
    "/run/%2e%2e",
    "/run/nothing",
    "/sweep/nothing",
    "/ablation/nothing",
    "/api/ablations/%2e%2e",
    "/api/ablations/..%2f..",
    "/api/series?run=%2e%2e&key=loss",
    "/nothing",
]


@pytest.fixture(scope="module")
def tangled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """A run with traps in it, and a secret beside the runs."""
    root = tmp_path_factory.mktemp("tangled") / "runs"
    make_runs(root, 1, 20)
    (root.parent / "secret.txt").write_text("secret")
    run = root / "run-0000"
    for name in (".hidden.txt", "page.html", "code.py", "picture.svg"):
        (run / name).write_text("secret")
    (run / "link.txt").symlink_to(root.parent / "secret.txt")
    (run / "folder").symlink_to(root.parent)
    with client(root) as found:
        assert found.get("/files/runs/run-0000/config.json").status_code == 200
        yield found


@pytest.mark.parametrize("path", OUT)
def test_path_traversal_is_refused(tangled: TestClient, path: str):
    answer = tangled.get(f"http://{HERE}{path}")
    assert answer.status_code == 404
    assert "secret" not in answer.text.replace("secret.txt", "") and "root:" not in answer.text


# ---- notes -------------------------------------------------------------------------------------------------------------


def test_note_is_added_to_the_journal_and_amended(root: Path):
    with client(root) as found:
        added = found.post("/api/runs/run-0001/note", json={"text": "depth <b>matters</b>\n--> more than width"})
        assert [note["text"] for note in added.json()] == ["depth <b>matters</b> --&gt; more than width"]
        text = (root.parent / "JOURNAL.md").read_text()
        assert "- conclusion, " in text and "depth <b>matters</b>" in text
        old = added.json()[0]["text"]
        changed = found.post("/api/runs/run-0001/note", json={"text": "it does not", "instead_of": old})
        assert [note["text"] for note in changed.json()] == ["it does not"]
        assert "matters" not in (root.parent / "JOURNAL.md").read_text()
        late = found.post("/api/runs/run-0001/note", json={"text": "late", "instead_of": old})
        assert late.status_code == 409 and "meantime" in late.json()["error"]
        (entry,) = found.get("/api/journal").json()
        assert (entry["run"], entry["open"], entry["there"]) == ("run-0001", False, True)
        assert entry["concluded"][0][1] == "it does not"


NO_NOTES = [b"", b"{", b"[]", b'{"text": 3}', b'{"text": "x", "instead_of": 3}', b"3", b'{"note": "x"}']


@pytest.mark.parametrize("body", NO_NOTES)
def test_malformed_note_is_refused(root: Path, body: bytes):
    with client(root) as found:
        assert found.post("/api/runs/run-0001/note", content=body).status_code == 400
        assert not (root.parent / "JOURNAL.md").exists()


@pytest.mark.parametrize(("name", "text"), [("run-0001", "  "), ("nothing", "x"), ("%2e%2e", "x")])
def test_note_on_an_unknown_or_empty_target_is_refused(root: Path, name: str, text: str):
    with client(root) as found:
        assert found.post(f"/api/runs/{name}/note", json={"text": text}).status_code in (400, 409)
        assert found.get("/api/runs/run-0001/note").status_code == 405
    assert not (root.parent / "JOURNAL.md").exists()


# ---- live --------------------------------------------------------------------------------------------------------------

LIVE = f"ws://{HERE}/api/live"


def test_live_updates_of_the_list_and_of_a_run(root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(app, "PERIOD", 0.05)
    with client(root) as found:
        version = found.get("/api/runs").json()["version"]
        with found.websocket_connect(LIVE) as socket:
            socket.send_json({"list": True, "version": version, "runs": ["run-0000"]})
            time.sleep(0.2)
            with open(root / "run-0000" / "rows.jsonl", "a") as file:
                file.write('{"step": 9999, "loss": 0.5}\n')
            news: dict[str, Any] = {}
            while not {"list", "runs"} <= set(news):
                news |= socket.receive_json()
            assert news["runs"] == {"run-0000": ["rows"]}
            assert [(run["name"], run["step"], run["loss"]) for run in news["list"]["runs"]] == [("run-0000", 9999, 0.5)]
            (root / "run-0001").rename(root / "elsewhere")
            reported = socket.receive_json()["list"]
            assert (reported["gone"], [run["name"] for run in reported["runs"]]) == (["run-0001"], ["elsewhere"])


def test_slow_websocket_client_is_disconnected(root: Path, monkeypatch: pytest.MonkeyPatch):
    """Its connection is full, so that nothing can be sent any more: it must not be waited for, nor kept."""
    monkeypatch.setattr(app, "PERIOD", 0.02)
    monkeypatch.setattr(app, "SEND_SECONDS", 0.1)

    async def receive() -> dict[str, Any]:
        if printed:
            return printed.pop(0)
        await asyncio.sleep(60)
        return {"type": "websocket.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] != "websocket.accept":
            await asyncio.sleep(60)

    printed: list[dict[str, Any]] = [{"type": "websocket.connect"}, {"type": "websocket.receive", "text": '{"list": true}'}]
    pages = app.Live(run_index.RunIndex(root))

    async def stay() -> None:
        socket = WebSocket({"type": "websocket", "path": "/", "headers": []}, receive, send)  # type: ignore[arg-type]
        await asyncio.wait_for(pages.page(socket), 5)

    asyncio.run(stay())
    assert pages._num_pages == 0 and pages._polling is None


@pytest.mark.parametrize("first", ["", "{", "[]", '{"runs": 3}', '{"version": "x"}', "null"])
def test_malformed_websocket_request_is_disconnected(root: Path, first: str):
    with client(root) as found, found.websocket_connect(LIVE) as socket:
        socket.send_text(first)
        assert socket.receive()["type"] == "websocket.close"


# ---- the playground, against a process that only pretends --------------------------------------------------------------

PRETENDER = """
import json, sys
print(json.dumps({"ready": {"options": {"prompt": None, "tokens": 3}, "device": "cpu", "recipe": "x"}}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked.get("stop"):
        print(json.dumps({"end": {"files": [], "stopped": True}}), flush=True)
    elif asked["request"].get("prompt") == "die":
        sys.exit(1)
    elif asked["request"].get("prompt") == "endless":
        print(json.dumps({"piece": "on "}), flush=True)
    else:
        for piece in "abc":
            print(json.dumps({"piece": piece}), flush=True)
        print(json.dumps({"end": {"files": ["samples/asked/a b.png"]}}), flush=True)
"""


@pytest.fixture
def loaded_run(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(playground, "process_for", lambda index, name: (sys.executable, "-c", PRETENDER))
    (root / "run-0000" / "checkpoints" / "step-000010").mkdir()
    return root


def test_playground_streams_generated_text(loaded_run: Path):
    with client(loaded_run) as found, found.websocket_connect(f"ws://{HERE}/api/runs/run-0000/playground") as socket:
        assert socket.receive_json()["ready"]["options"] == {"prompt": None, "tokens": 3}
        socket.send_json({"request": {"prompt": "x"}})
        assert [socket.receive_json() for _ in range(3)] == [{"piece": "a"}, {"piece": "b"}, {"piece": "c"}]
        assert socket.receive_json() == {"end": {"files": ["/files/runs/run-0000/samples/asked/a%20b.png"]}}
        socket.send_json({"request": {"prompt": "endless"}})
        assert socket.receive_json() == {"piece": "on "}
        socket.send_json({"stop": True})
        assert socket.receive_json()["end"]["stopped"]
        socket.send_json({"request": {"prompt": "die"}})
        assert "ended" in socket.receive_json()["error"]
        socket.send_text("nonsense")
        socket.send_json({"request": {}})
        assert socket.receive_json() == {"piece": "a"}


@pytest.mark.parametrize("name", ["run-0001", "nothing", "%2e%2e", "mine"])
def test_playground_refuses_runs_without_sampling(loaded_run: Path, name: str):
    """Without a checkpoint, not there, outside, or of a recipe file that a web page must not run."""
    config = {"recipe": "/somewhere/evil.py", "preset": "x", "config": {}}
    (loaded_run / "mine" / "checkpoints" / "step-000001").mkdir(parents=True)
    (loaded_run / "mine" / "config.json").write_text(json.dumps(config))
    with client(loaded_run) as found, found.websocket_connect(f"ws://{HERE}/api/runs/{name}/playground") as socket:
        printed = socket.receive_json()
        assert printed["final"] and printed["error"]


@dataclass(frozen=True)
class SpeakerOptions:
    prompt: str | None = None
    tokens: int = 3
    temperature: float = 0.8
    shapes: tuple[str, ...] = ()


class Speaker:
    """A system that says three words, unless somebody stops it."""

    sample_options = SpeakerOptions

    def sample(self, request: Any, engine: Any) -> Any:
        from seedbed.train.system import Sample

        options = asdict(request.read(SpeakerOptions))
        for word in ("one ", "two ", "three"):
            request.write(word)
        return Sample("one two three", (request.folder / "a.png",), options)


def test_playground_worker_messages(tmp_path: Path):
    import io
    from contextlib import nullcontext
    from types import SimpleNamespace

    from seedbed.errors import UserError
    from seedbed.inference import TrainedModel
    from seedbed.launch import sample_worker

    some: Any = SimpleNamespace(evaluating=nullcontext, path=tmp_path)
    trained = TrainedModel(some, some, some, some, Speaker(), some, with_all_data=lambda: trained)  # type: ignore[arg-type]
    assert sample_worker.default_options(trained) == {"prompt": None, "tokens": 3, "temperature": 0.8}
    out, stop = io.StringIO(), threading.Event()
    printed = sample_worker.answer(trained, {"tokens": 5}, sample_worker._Writer(out, stop))
    assert [json.loads(line) for line in out.getvalue().splitlines()] == [{"piece": w} for w in ("one ", "two ", "three")]
    assert (printed["files"], printed["text"]) == (["samples/asked/a.png"], ""), "what was streamed is not said twice"
    stop.set()
    with pytest.raises(sample_worker.Stopped):
        sample_worker.answer(trained, {}, sample_worker._Writer(out, stop))
    with pytest.raises(UserError, match="nonsense"):
        sample_worker.answer(trained, {"nonsense": 1}, sample_worker._Writer(out, threading.Event()))


# ---- a real server -----------------------------------------------------------------------------------------------------


@contextmanager
def server(root: Path) -> Iterator[int]:
    import uvicorn

    from seedbed.serve.server import bind

    bound = bind("127.0.0.1", 0)
    settings: dict[str, Any] = {"log_level": "critical", "http": "h11", "ws": "websockets-sansio", "timeout_graceful_shutdown": 1}
    serving = uvicorn.Server(uvicorn.Config(guarded(root), **settings))
    thread = threading.Thread(target=serving.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        yield bound.getsockname()[1]
    finally:
        serving.should_exit = True
        thread.join(10)
        bound.close()
        assert not thread.is_alive()


def test_live_updates_reach_fifty_pages_beside_one_that_never_reads(shared: Path, monkeypatch: pytest.MonkeyPatch):
    import http.client
    import socket

    from websockets.sync.client import connect

    monkeypatch.setattr(app, "PERIOD", 0.1)
    wrong: list[str] = []

    def visit(port: int, number: int) -> None:
        try:
            with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as asked:
                for path in ("/", "/api/runs", f"/api/runs/run-{number % 8:04d}", "/api/runs/run-0000/series?key=loss"):
                    asked.request("GET", path)
                    answer = asked.getresponse()
                    if answer.status != 200 or not answer.read():
                        wrong.append(f"{path}: {answer.status}")
            headers = TRUSTED | {"origin": f"http://127.0.0.1:{port}"}
            with connect(f"ws://127.0.0.1:{port}/api/live", additional_headers=headers) as page:
                page.send('{"list": true}')
                if "list" not in json.loads(page.recv(timeout=20)):
                    wrong.append("no news")
        except Exception as error:
            wrong.append(repr(error))

    with server(shared) as port:
        silent = socket.create_connection(("127.0.0.1", port))
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        for _ in range(50):
            silent.sendall(b"GET /static/plotly.js HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        guests = [threading.Thread(target=visit, args=(port, i)) for i in range(50)]
        [guest.start() for guest in guests]
        [guest.join(60) for guest in guests]
        silent.close()
    assert not wrong, wrong[:5]


def test_responses_do_not_wait_for_tcp_acknowledgements(shared: Path, monkeypatch: pytest.MonkeyPatch):
    """Small pieces are sent at once; otherwise every request costs 40 ms."""
    import asyncio.selector_events as loops
    import http.client
    import socket

    accepted: list[socket.socket] = []
    real = loops._SelectorSocketTransport.__init__

    def seen(self: Any, loop: Any, sock: socket.socket, *rest: Any, **more: Any) -> None:
        real(self, loop, sock, *rest, **more)
        accepted.append(sock)

    monkeypatch.setattr(loops._SelectorSocketTransport, "__init__", seen)
    with server(shared) as port, closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as asked:
        asked.request("GET", "/")
        assert asked.getresponse().read()
        ours = [sock for sock in accepted if sock.getsockname()[1:2] == (port,)]
        assert ours and all(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for sock in ours)


def test_endless_request_header_is_refused(shared: Path):
    import socket

    with server(shared) as port, socket.create_connection(("127.0.0.1", port), timeout=20) as asked:
        asked.sendall(b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        assert b"200" in asked.recv(4096)[:20]
        sent = 0
        try:
            asked.sendall(b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\nx: ")
            for _ in range(160):
                sent += 65536
                asked.sendall(b"a" * 65536)
        except OSError:
            pass  # closed while we still write
        assert sent < 160 * 65536, "ten megabytes of header were taken"


def test_pages_never_load_torch(shared: Path):
    code = (
        "import sys, pathlib; from starlette.testclient import TestClient; from seedbed.serve.app import workbench\n"
        f"c = TestClient(workbench(pathlib.Path({str(shared)!r})))\n"
        "for p in ('/', '/api/runs', '/api/runs/run-0000', '/api/journal', '/api/compare?run=run-0000&run=run-0001'):\n"
        "    assert c.get(p).status_code == 200, p\n"
        "sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
