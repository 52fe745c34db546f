"""Settings for every test: one thread per process, no screen, a cache of its own, and a way to run the command line."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Before anything imports torch or matplotlib.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["MPLBACKEND"] = "Agg"

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session", autouse=True)
def _cache_of_this_session(tmp_path_factory: pytest.TempPathFactory):
    """Prepared texts are shared by the tests of a session, and never taken from or left in the user's cache."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SEEDBED_CACHE", str(shared / "cache"))
        patch.delenv("SEEDBED_RUNS", raising=False)
        yield


@pytest.fixture
def seedbed(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command line in its own process and in an empty folder: `seedbed("runs", "list").returncode`."""

    def call(*arguments: str, python: tuple[str, ...] = (), cwd: Path | None = None, timeout: float = 240):
        code = "import sys; from seedbed.cli import main; sys.exit(main())"
        return subprocess.run(
            [sys.executable, *python, "-c", code, *arguments],
            cwd=cwd or tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "120"},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return call


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless Chromium that asks nobody for anything by itself."""
    driver = pytest.importorskip("playwright.sync_api")
    found = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no Chromium is installed")
    quiet = ("background-networking", "component-update", "sync", "gpu")
    flags = ["--no-sandbox", "--no-first-run", *(f"--disable-{word}" for word in quiet)]
    with driver.sync_playwright() as play:
        started = play.chromium.launch(executable_path=found, args=flags)
        yield started
        started.close()
