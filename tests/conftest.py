"""Settings for every test: one thread per process, no screen, and helpers to find and run the package."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

# Before anything imports torch or matplotlib.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["MPLBACKEND"] = "Agg"

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def seedbed(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the command line in its own process and in an empty folder: `seedbed("runs", "list").returncode`."""

    def call(*arguments: str, python: tuple[str, ...] = (), cwd: Path | None = None, timeout: float = 240):
        code = "import sys; from seedbed.cli import main; sys.exit(main())"
        env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "120"}
        return subprocess.run(
            [sys.executable, *python, "-c", code, *arguments],
            cwd=cwd or tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return call
