"""The release: what sdist and wheel hold, and that the installed wheel trains and serves outside of the repository."""

import contextlib
import email
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
import tomllib
import urllib.error
import urllib.request
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def data_files() -> set[str]:
    """Files of the package that are not Python."""
    found = (path for path in (ROOT / "src" / "seedbed").rglob("*") if path.is_file())
    return {path.relative_to(ROOT / "src").as_posix() for path in found if path.suffix not in (".py", ".pyc")}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """sdist and wheel, built from a copy of the sources without a network; the wheel is built from the sdist."""
    copy = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    shutil.copytree(ROOT / "tests", copy / "tests", ignore=shutil.ignore_patterns("__pycache__", "old_runs"))
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", "out"]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return {path.suffix: path for path in (copy / "out").iterdir()}


@pytest.fixture(scope="module")
def installed(built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command of a new environment with the wheel; everything else it imports from the environment of the tests."""
    home = tmp_path_factory.mktemp("installed")
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(built[".whl"])]
    done = subprocess.run(install, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # After the installation, so that pip does not see another seedbed. Paths in a .pth file do not execute .pth files in turn.
    (found,) = home.glob("lib/python3*/site-packages")
    (found / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return home / "bin" / "seedbed"


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COV_"))}


def call(command: Path, *words: str, cwd: Path) -> str:
    done = subprocess.run([command, *words], cwd=cwd, env=environment(), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_wheel_holds_every_file_of_the_package(built: dict[str, Path]):
    with zipfile.ZipFile(built[".whl"]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        metadata = email.message_from_bytes(wheel.read(f"seedbed-{PROJECT['version']}.dist-info/METADATA"))
    assert {name for name in names if not name.endswith(".py")} == data_files() >= {"seedbed/py.typed", "seedbed/report/page.css"}
    sources = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "seedbed").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == sources
    assert (metadata["Version"], metadata["License-Expression"]) == (PROJECT["version"], "MIT")
    assert set(metadata.get_all("Provides-Extra")) == set(EXTRAS)


@pytest.mark.slow
def test_sdist_holds_sources_and_no_tests(built: dict[str, Path]):
    with tarfile.open(built[".gz"]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {f"src/{name}" for name in data_files()} | {"pyproject.toml", "README.md", "LICENSE"} <= names
    assert not [name for name in names if name.startswith("tests")]


@pytest.mark.slow
def test_installed_wheel_trains_samples_and_serves(installed: Path, tmp_path: Path):
    """`seedbed demo` is this training with more steps; it reads no other files."""
    assert call(installed, "--version", cwd=tmp_path).strip() == f"seedbed {PROJECT['version']}"
    settings = ("steps=8", "every.log=2", "every.eval=4", "model.width=32")
    call(installed, "train", "gpt/demo", *settings, "--run", "first", cwd=tmp_path)
    made = {path.name for path in (tmp_path / "runs" / "first").iterdir()}
    assert {"rows.jsonl", "report.md", "plots", "checkpoints"} <= made
    assert call(installed, "sample", "first", "--prompt", "The ", "--tokens", "8", cwd=tmp_path)
    call(installed, "report", "first", "--html", cwd=tmp_path)  # page.css
    assert "<style>" in (tmp_path / "first.html").read_text()
    with served(installed, tmp_path) as address:
        for name in sorted(data_files()):
            folder, _, path = name.partition("/serve/static/")
            if path and not path.startswith("play/"):
                with urllib.request.urlopen(f"{address}/static/{path}", timeout=20) as answer:
                    assert answer.read() == (ROOT / "src" / name).read_bytes(), folder
        with urllib.request.urlopen(f"{address}/api/runs", timeout=20) as answer:
            assert b'"first"' in answer.read()


@contextlib.contextmanager
def served(command: Path, folder: Path) -> Iterator[str]:
    """The address of a server on a free port."""
    with (folder / "server.log").open("w+") as log:
        words = [command, "serve", "--port", "0"]
        server = subprocess.Popen(words, cwd=folder, env={**environment(), "PYTHONUNBUFFERED": "1"}, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 60
            while not (found := re.search(r"http://[\w.]+:\d+", (folder / "server.log").read_text())):
                assert server.poll() is None and time.monotonic() < deadline, (folder / "server.log").read_text()
                time.sleep(0.1)
            yield found[0]
        finally:
            server.terminate()
            server.wait(20)


def test_version_has_one_source():
    """pyproject.toml names it; the package asks its installed metadata."""
    literal = re.compile(r"__version__\s*=|" + re.escape(f'"{PROJECT["version"]}"'))
    assert [str(path) for path in (ROOT / "src" / "seedbed").rglob("*.py") if literal.search(path.read_text())] == []
    from seedbed.track import code

    assert code.version() in (PROJECT["version"], "0+source")


def test_page_on_installing_lists_every_extra():
    """The table has a line per extra, with its packages; `dev` and `bench` are for work on seedbed itself."""
    page = (ROOT / "docs" / "install.md").read_text()
    listed = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", page, re.MULTILINE))
    names = {extra: [re.split(r"[<>=\[ ]", one)[0] for one in EXTRAS[extra]] for extra in EXTRAS if extra not in ("dev", "bench")}
    assert {extra: line.split(", ") for extra, line in listed.items()} == names
    assert f"Python {PROJECT['requires-python'].removeprefix('>=')} or newer" in page


def test_publishing_uses_an_identity_and_no_secret():
    text = (ROOT / ".github" / "workflows" / "publish.yml").read_text()
    assert "secrets." not in text and "password" not in text.partition("name:")[2]
    build, publish = text.split("\n  publish:\n")
    assert "id-token: write" in publish and "id-token" not in build and "environment: pypi" in publish
    assert all("@" in used for used in re.findall(r"uses: (\S+)", text))
