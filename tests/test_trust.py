"""Code that a folder names is executed only where the user has trained from it or confirmed it, by path and content."""

import json
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import TOY, resume, start

from seedbed import inference, trust
from seedbed.cli import main
from seedbed.errors import UserError
from seedbed.launch import spawn
from seedbed.launch.resume import saved_config
from seedbed.recipes import find
from seedbed.recipes.saved import find_saved
from seedbed.track.run import Run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A runs folder with one finished run, to be copied."""
    root = tmp_path_factory.mktemp("trained") / "runs"
    start(root, "one", "steps=2")
    return root


@pytest.fixture
def root(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A stranger's run in a user's folder; nothing that it names may run."""
    monkeypatch.setenv("SEEDBED_STATE", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, tmp_path / "runs")
    yield tmp_path / "runs"
    assert not (tmp_path / "exploded").exists(), "code that a run folder names was executed"


def plant(path: Path, mark: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"import os\nos.mkdir({str(mark)!r})\n" + Path(TOY).read_text())
    return path


def name_recipe(root: Path, name: str, run: str = "one") -> None:
    path = root / run / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "recipe": name}))


def places(root: Path) -> dict[str, tuple[Path, str]]:
    """Where a stranger's program may lie, and how config.json may name it."""
    top = root.parent
    return {
        "absolute": (top / "elsewhere" / "evil.py", str(top / "elsewhere" / "evil.py")),
        "proc": (root / "evil.py", "/proc/self/cwd/runs/evil.py"),
        "beside runs": (top / "evil.py", str(top / "evil.py")),
        "right inside runs": (root / "evil.py", str(root / "evil.py")),
        "inside the run": (root / "one" / "evil.py", str(root / "one" / "evil.py")),
        "relative": (top / "evil.py", "evil.py"),
        "relative to the run": (root / "one" / "evil.py", "runs/one/evil.py"),
        "with a preset": (top / "evil.py", f"{top / 'evil.py'}:tiny"),
        "dots": (top / "evil.py", str(root / "one" / ".." / ".." / "evil.py")),
    }


@pytest.mark.parametrize("place", places(Path("x/runs")))
def test_recipe_file_named_by_a_run_folder_is_refused(root: Path, place: str) -> None:
    path, name = places(root)[place]
    plant(path, root.parent / "exploded")
    name_recipe(root, name)
    for act in (
        lambda: resume(root, "one", "steps=4"),
        lambda: inference.load(root, "one"),
        lambda: find_saved(name, root / "one"),
    ):
        with pytest.raises(UserError, match="would execute") as refused:
            act()
        reported = str(refused.value)
        assert (
            str(path.resolve()) in reported
            and trust.inspect(path).sha256 in reported
            and "--trust" in reported
            and "\n" not in reported
        )


def test_recipe_file_of_a_linked_run_folder_is_refused(root: Path) -> None:
    foreign = root.parent / "download" / "one"
    shutil.move(root / "one", foreign)
    plant(foreign / "evil.py", root.parent / "exploded")
    (root / "one").symlink_to(foreign)
    name_recipe(root, str(foreign / "evil.py"))
    with pytest.raises(UserError, match="would execute"):
        inference.load(root, "one")
    name_recipe(root, str(root / "one" / "evil.py"))
    with pytest.raises(UserError, match="would execute"):
        inference.load(root, "one")


VERBS = (
    ("resume", "one", "steps=4"),
    ("resume", "one", "steps=4", "--on", "slurm", "--dry"),
    ("resume", "one", "steps=4", "dist.replicate=2"),
    ("sample", "one"),
    ("inference-curve", "one"),
    ("export", "one"),
    ("publish", "one", "--to", "hub:me/one", "--dry"),
    ("play", "one", "--port", "0"),
    ("replay", "one", "2"),
)


@pytest.mark.parametrize("words", VERBS, ids=" ".join)
def test_untrusted_recipe_is_refused_by_every_verb(root: Path, words: tuple[str, ...], capsys) -> None:
    evil = plant(root.parent / "evil.py", root.parent / "exploded")
    name_recipe(root, str(evil))
    assert main(list(words)) == 2
    reported = capsys.readouterr().err
    assert f"would execute {evil.resolve()} (sha256 " in reported and len(reported.strip().splitlines()) == 1


@pytest.mark.parametrize("ending", ["", ":tiny", ":x.py", ".py:"])
def test_pages_execute_no_recipe_file(root: Path, ending: str) -> None:
    """Looking at a run in the browser, or asking it, is no word of the user's: not even for a file with a preset behind it."""
    testclient = pytest.importorskip("starlette.testclient")
    from seedbed.serve.app import workbench

    name_recipe(root, str(plant(root.parent / "evil.py", root.parent / "exploded")) + ending)
    with testclient.TestClient(workbench(root)) as client:
        for page in ("/api/runs", "/api/runs/one", "/api/compare?run=one", "/run/one", "/play/one", "/api/runs/one/samples"):
            assert client.get(page).status_code in (200, 404)
        assert not any(client.get("/api/runs/one").json()["opens"].values())
        with client.websocket_connect("/api/runs/one/playground") as socket:
            assert "cannot be sampled" in socket.receive_json()["error"]
        with client.websocket_connect("/play/one/socket") as socket:
            assert socket.receive_json() == {"loading": "one"} and "error" in socket.receive_json()


def test_sweep_that_names_a_recipe_file_is_refused(root: Path, capsys) -> None:
    evil = plant(root.parent / "evil.py", root.parent / "exploded")
    folder = root.parent / "sweeps" / "s"
    folder.mkdir(parents=True)
    facts = {"recipe": str(evil), "preset": "tiny", "axes": {"seed": [1, 2]}, "spans": {}, "fixed": {}}
    (folder / "sweep.json").write_text(json.dumps(facts))
    for more in ((), ("--on", "slurm", "--dry")):
        assert main(["sweep", "--join", "s", *more, "--dirty"]) == 2
        assert "would execute" in capsys.readouterr().err


def test_untrusted_recipe_is_not_executed_to_count_ranks(root: Path) -> None:
    name_recipe(root, str(plant(root.parent / "evil.py", root.parent / "exploded")))
    assert spawn.to_resume(root, "one", []) == 0


# ---- what is trusted -------------------------------------------------------------------------------------------------


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's own recipe, with a module beside it."""
    monkeypatch.setenv("SEEDBED_STATE", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine" / "own.py"
    path.parent.mkdir()
    module = f"beside_{tmp_path.name}".replace("-", "_")
    path.write_text(f"import {module}\n" + Path(TOY).read_text())
    (path.parent / f"{module}.py").write_text("VALUE = 1\n")
    return path


def test_trained_recipe_is_trusted_until_it_changes(own: Path, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    start(root, "one", "steps=2", recipe=str(own))
    assert resume(root, "one", "steps=4") == 0
    own.write_text(own.read_text() + "\n# edited\n")
    with pytest.raises(UserError, match="would execute"):
        inference.load(root, "one")


def test_trust_covers_the_modules_beside_a_recipe(own: Path, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    start(root, "one", "steps=2", recipe=str(own))
    beside = next(p for p in own.parent.glob("beside_*.py"))
    beside.write_text(f"import os\nos.mkdir({str(tmp_path / 'exploded')!r})\n")
    with pytest.raises(UserError, match="would execute"):
        inference.load(root, "one")
    assert not (tmp_path / "exploded").exists()


def test_trust_is_for_a_path_not_for_a_copy(own: Path, tmp_path: Path) -> None:
    """The same text elsewhere may mean something else: other data beside it, other modules that it finds by hand."""
    start(tmp_path / "runs", "one", "steps=2", recipe=str(own))
    copy = tmp_path / "other" / "own.py"
    shutil.copytree(own.parent, copy.parent)
    name_recipe(tmp_path / "runs", str(copy))
    with pytest.raises(UserError, match="would execute"):
        inference.load(tmp_path / "runs", "one")


def test_trust_flag_confirms_what_it_shows(own: Path, tmp_path: Path, capsys) -> None:
    root = tmp_path / "runs"
    start(root, "one", "steps=2", recipe=str(own))
    shutil.rmtree(tmp_path / "state")
    assert main(["resume", "one", "steps=4"]) == 2
    assert "--trust" in capsys.readouterr().err
    assert main(["resume", "one", "steps=4", "--trust"]) == 0
    assert f"trusted: {own} (sha256 " in capsys.readouterr().err
    assert main(["resume", "one", "steps=6"]) == 0
    assert main(["resume", "one", "steps=8", "--trust"]) == 0


def test_installed_recipes_need_no_trust(root: Path) -> None:
    assert find_saved("gpt", root / "one").name == "gpt"
    assert not trust.store().exists()


def test_stale_bytecode_beside_a_recipe_is_not_executed(own: Path, tmp_path: Path) -> None:
    """A .pyc with the source's time and size, as somebody could send along."""
    import importlib.util
    import py_compile

    beside = next(p for p in own.parent.glob("beside_*.py"))
    source = beside.read_text()
    evil = f"__import__('os').mkdir({str(tmp_path / 'exploded')!r})"
    beside.write_text(evil)
    py_compile.compile(str(beside), cfile=importlib.util.cache_from_source(str(beside)), doraise=True)
    seconds = beside.stat().st_mtime
    beside.write_text(source + "#" * (len(evil) - len(source)))
    os.utime(beside, (seconds, seconds))
    find(str(own))
    assert not (tmp_path / "exploded").exists()


def test_job_of_a_cluster_carries_the_trust_of_its_submission(own: Path, tmp_path: Path, monkeypatch) -> None:
    """On a node with another home, and after the files were edited: the copy is executed, and nothing else."""
    from seedbed.launch import slurm
    from seedbed.launch.slurm_script import Resources

    root = tmp_path / "runs"
    start(root, "one", "steps=2", recipe=str(own))
    run = Run.open(root, "one")
    recipe, config = saved_config(run)
    slurm._keep_code(run.path, recipe, {"version": "1"})
    script = slurm._run_script("t", run.path, slurm.SubmitOptions(root), [], Resources(), recipe, config)
    exported = next(line for line in script.text().splitlines() if line.startswith("export SEEDBED_TRUST="))
    for path in own.parent.iterdir():
        if path.is_file():
            path.write_text(f"import os\nos.mkdir({str(tmp_path / 'exploded')!r})\n")
    monkeypatch.setenv("SEEDBED_STATE", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("SEEDBED_CODE", str(run.path / "code"))
    with pytest.raises(UserError, match="would execute"):
        saved_config(run)
    monkeypatch.setenv("SEEDBED_TRUST", exported.partition("=")[2])
    assert saved_config(run)[0].name == str(own)
    assert not (tmp_path / "exploded").exists()


# ---- the store -------------------------------------------------------------------------------------------------------


def test_store_is_private_and_only_grows(own: Path, tmp_path: Path) -> None:
    code = trust.inspect(own)
    for _ in range(3):
        trust.record(code, "trained")
    own.write_text(own.read_text() + "#")
    trust.record(trust.inspect(own), "confirmed")
    store = trust.store()
    assert store.is_relative_to(tmp_path / "state") and stat.S_IMODE(store.stat().st_mode) == 0o600
    found = [json.loads(line) for line in store.read_text().splitlines()]
    assert [line["how"] for line in found] == ["trained", "confirmed"] and trust.is_trusted(code)


def test_store_that_others_can_write_is_refused(own: Path) -> None:
    code = trust.inspect(own)
    trust.record(code, "trained")
    trust.store().chmod(0o666)
    with pytest.raises(UserError, match="chmod 600"):
        trust.is_trusted(code)


def test_store_survives_torn_lines_and_concurrent_writers(own: Path) -> None:
    trust.store().parent.mkdir(parents=True)
    trust.store().write_bytes(b'{"path": "/x", "sha\n[1]\nnull\n' + b"[" * 100_000 + b'\n{"path"')
    trust.store().chmod(0o600)
    codes = [trust.Code(own, f"{n:064x}", {}) for n in range(40)]
    threads = [threading.Thread(target=trust.record, args=(code, "trained")) for code in codes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(trust.is_trusted(code) for code in codes)


def test_state_folder_that_cannot_be_written_costs_a_warning(own: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SEEDBED_STATE", str(tmp_path / "file"))
    monkeypatch.setenv("SEEDBED_TRUST", "")
    code = trust.inspect(own)
    trust.record(code, "trained")
    assert "cannot be written" in capsys.readouterr().err and trust.is_trusted(code)


def test_trust_by_the_environment_names_a_hash(own: Path, monkeypatch) -> None:
    code = trust.inspect(own)
    assert not trust.is_trusted(code)
    monkeypatch.setenv("SEEDBED_TRUST", f"{'0' * 64},{code.sha256}")
    assert trust.is_trusted(code)
    monkeypatch.setenv("SEEDBED_TRUST", code.sha256[:12])
    assert not trust.is_trusted(code)


def test_hash_of_a_single_file_equals_sha256sum(tmp_path: Path) -> None:
    import hashlib

    path = tmp_path / "alone.py"
    path.write_text("import torch, json\nfrom seedbed import Config\n")
    assert trust.inspect(path).sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "loop", "missing"])
def test_recipe_that_is_no_regular_file_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "odd.py"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind != "missing":
        path.symlink_to({"device": "/dev/zero", "folder": "/tmp", "loop": str(path)}[kind])
    with pytest.raises(UserError, match="cannot be read"):
        find_saved(str(path), tmp_path)


# ---- functions that settings name ------------------------------------------------------------------------------------


def test_encoder_named_by_a_run_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of the flow recipe whose settings name a module that lies on the path."""
    monkeypatch.setenv("SEEDBED_STATE", str(tmp_path / "state"))
    monkeypatch.syspath_prepend(tmp_path)
    module = f"evil_{os.getpid()}"
    (tmp_path / f"{module}.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'exploded')!r})\n")
    recipe, _ = find("flow")
    preset = next(iter(recipe.presets))
    run = Run.create(tmp_path / "runs", "flow", preset, recipe.preset(preset), name="one", code={})
    path = run.path / "config.json"
    facts = {key: value for key, value in json.loads(path.read_text()).items() if key not in ("hash", "id")}
    facts["config"]["data"] |= {"encode": f"{module}:go", "flip": False, "crop": "center"}
    path.write_text(json.dumps(facts))
    for name in (f"{module}:go", "no_such_module_there:go", f"{module}.deeper:go"):
        facts["config"]["data"]["encode"] = name
        path.write_text(json.dumps(facts))
        with pytest.raises(UserError, match=r"would execute|there is no module"):
            inference.load(tmp_path / "runs", "one")
    assert not (tmp_path / "exploded").exists()
