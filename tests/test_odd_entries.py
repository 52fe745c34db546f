"""One odd entry in the runs folder hides nothing: it is listed with the reason, and nobody waits for it or reads without end."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from fuzzing import time_limit
from helpers import start

from seedbed.cli import main
from seedbed.errors import UserError
from seedbed.report import summaries
from seedbed.track import files, jsonl
from seedbed.track.rows import Columns, tail_lines, thumbnail
from seedbed.track.run import Run
from seedbed.track.run_names import run_names

pytest.importorskip("starlette")
pytest.importorskip("httpx")

from starlette.testclient import TestClient

from seedbed.serve.app import workbench

FILES = ("config.json", "status.json", "rows.jsonl", "events.jsonl", "console.log", "code.json", "lock", "slurm.json")


def linked(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


KINDS: dict[str, Callable[[Path], None]] = {
    "zero": linked("/dev/zero"),
    "tty": linked("/dev/tty"),
    "fifo": os.mkfifo,
    "loop": lambda path: path.symlink_to(path),
    "dangling": linked("nowhere"),
    "folder": lambda path: path.mkdir(),
    "binary": lambda path: path.write_bytes(b"\xff\xfe\x00{" * 100) and None,
    "brackets": lambda path: path.write_bytes(b"[" * 60_000 + b"\n") and None,
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("odd") / "runs"
    start(root, "good", "steps=2")
    return root


@pytest.fixture
def root(good: Path, tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "good").symlink_to(good / "good")
    return tmp_path / "runs"


def odd_run(root: Path, good: Path, file: str, kind: str) -> Path:
    """A run like the good one, with one file that is something else."""
    folder = root / "odd"
    folder.mkdir()
    for path in (good / "good").iterdir():
        if path.is_file() and path.name != file:
            (folder / path.name).write_bytes(path.read_bytes())
    KINDS[kind](folder / file)
    return folder


def assert_listed(root: Path, capsys: pytest.CaptureFixture[str], odd: str = "odd") -> None:
    """Every listing names the good run and the odd one, in seconds."""
    capsys.readouterr()
    with time_limit(20.0, "listing"):
        found = {one["name"]: one for one in summaries.summaries(root)}
        assert found["good"]["status"] == "done" and odd in found
        assert main(["--runs", str(root), "runs", "list", "--json"]) == 0
        assert {"good", odd} <= {one["name"] for one in json.loads(capsys.readouterr().out)}
        assert main(["--runs", str(root), "runs", "list"]) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("file", FILES)
def test_odd_file_of_a_run_hides_nothing(root: Path, good: Path, file: str, kind: str, capsys) -> None:
    odd_run(root, good, file, kind)
    assert_listed(root, capsys)
    with time_limit(20.0, f"pages with {file} as {kind}"), TestClient(workbench(root)) as client:
        runs = client.get("/api/runs", headers={"host": "127.0.0.1"})
        assert runs.status_code == 200 and {"good", "odd"} <= {one["name"] for one in runs.json()["runs"]}
        for page in ("", "/samples", "/console", "/series?key=loss"):
            assert client.get(f"/api/runs/odd{page}").status_code in (200, 404), page
        assert client.get("/api/compare?run=good&run=odd").status_code in (200, 404)
        assert client.get("/api/journal").status_code == 200


@pytest.mark.parametrize("name", ["loop", "latin"])
def test_odd_name_in_the_runs_folder_hides_nothing(root: Path, name: str, capsys) -> None:
    """The first of these emptied the whole list, with exit code 0."""
    odd = os.fsdecode(b"na\xefve") if name == "latin" else name
    if name == "latin":
        (root / odd).mkdir()
    else:
        KINDS[name](root / odd)
    assert_listed(root, capsys, odd)
    reported = next(one for one in summaries.summaries(root) if one["name"] == odd)
    assert reported["status"] == "damaged" and "cannot be read" in reported["why"]
    with TestClient(workbench(root)) as client:
        runs = client.get("/api/runs")
        assert runs.status_code == 200 and len(runs.json()["runs"]) == 2
        runs.content.decode()


def test_note_that_is_not_utf8_does_not_break_the_page(root: Path, good: Path, capsys) -> None:
    folder = odd_run(root, good, "none", "folder")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_bytes(jsonl.pretty({**config, "why": os.fsdecode(b"gr\xfcn")}))
    assert_listed(root, capsys)
    with TestClient(workbench(root)) as client:
        for page in ("/api/runs", "/api/runs/odd", "/api/compare?run=odd&run=good"):
            answer = client.get(page)
            assert answer.status_code == 200 and "gr\N{REPLACEMENT CHARACTER}n" in answer.content.decode(), page


@pytest.mark.parametrize("value", [7, [], {}, "\x00", "x" * 5000, 1e308, True, None])
@pytest.mark.parametrize("key", ["created", "why", "parent", "sweep", "preset", "recipe", "hash", "changes", "version"])
def test_odd_values_in_config_hide_nothing(root: Path, good: Path, key: str, value: object, capsys) -> None:
    folder = odd_run(root, good, "none", "folder")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: value}))
    assert_listed(root, capsys)
    with TestClient(workbench(root), raise_server_exceptions=False) as client:
        assert client.get("/api/runs").status_code == 200


# ---- what reads them -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["zero", "fifo", "loop", "folder"])
def test_readers_take_regular_files_only(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    KINDS[kind](path)
    with time_limit(10.0, kind):
        for read in (files.open_regular, files.open_append, lambda path: files.read_regular(path, 10)):
            with pytest.raises(OSError):
                read(path)
        with pytest.raises(UserError):
            jsonl.read_object(path)
        with pytest.raises(UserError):
            jsonl.read(path)
        assert tail_lines(path) == [] and thumbnail(path, "loss", 5) == [] and Columns(path).refresh().num_rows == 0


def test_links_to_regular_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "real").write_text('{"a": 1}\n')
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert jsonl.read_object(tmp_path / "link") == {"a": 1} and jsonl.read(tmp_path / "link") == [{"a": 1}]


def test_reads_are_bounded(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 100)
    assert len(files.read_regular(tmp_path / "file", 100)) == 100
    with pytest.raises(OSError, match="larger than"):
        files.read_regular(tmp_path / "file", 99)


@pytest.mark.parametrize("name", ["rows.jsonl", "events.jsonl", "console.log", "lock"])
def test_links_in_a_run_do_not_lead_writes_elsewhere(root: Path, good: Path, name: str, tmp_path: Path) -> None:
    """A stranger's run whose log is a link to a file of the user's."""
    folder = odd_run(root, good, name, "dangling")
    (tmp_path / "mine").write_text("precious")
    (folder / name).unlink()
    (folder / name).symlink_to(tmp_path / "mine")
    run = Run(folder)
    run.warn = lambda text: None
    run.row({"step": 1, "loss": 2.0})
    run.event(1, "start")
    from seedbed.track.console import Console

    Console(folder / "console.log").line("words")
    with pytest.raises(UserError) if name == "lock" else run.lock():
        if name == "lock":
            with run.lock():
                pass
    assert (tmp_path / "mine").read_text() == "precious"


@pytest.mark.parametrize("length", [255, 256, 300, 5000])
def test_names_that_no_disk_takes_are_refused(root: Path, length: int) -> None:
    for name in ("x" * length, "\N{SNOWMAN}" * length):
        with pytest.raises(UserError, match="there is no run"):
            Run.open(root, name)
        with TestClient(workbench(root)) as client:
            for page in ("/run/", "/play/", "/sweep/", "/playground/", "/api/runs/", "/api/sweeps/", "/api/compare?run="):
                assert client.get(page + name).status_code == 404, page


def test_listing_reads_every_entry_by_itself(root: Path) -> None:
    for name, make in KINDS.items():
        make(root / f"odd-{name}")
    assert set(run_names(root)) == {"good", "odd-loop", "odd-folder"}
