"""`pytest -m gpu` runs tests/gpu, all of it and nothing else, also where pytest has no plugins."""

import os
import re
import subprocess
import sys

import pytest
from conftest import GPU_TESTS, ROOT


def collected(*arguments: str) -> list[str]:
    """The files whose tests a plain pytest would run, given these arguments."""
    bare = [f"-pno:{plugin}" for plugin in ("timeout", "xdist", "cacheprovider")]
    command = [sys.executable, "-m", "pytest", *bare, "--collect-only", "-q"]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([*command, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 5), done.stdout[-2000:] + done.stderr[-2000:]  # 5: no test was left
    return [line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line]


def test_no_other_file_uses_the_marker():
    files = [path for path in (ROOT / "tests").rglob("*.py") if not path.is_relative_to(GPU_TESTS)]
    assert files and not [path for path in files if re.search(r"mark\.gpu" + r"\b", path.read_text())]


@pytest.mark.slow
def test_gpu_marker_selects_every_gpu_test_without_plugins():
    files = {str(path.relative_to(ROOT)) for path in GPU_TESTS.glob("test_*.py")}
    by_marker, by_folder = collected("-m", "gpu"), collected("tests/gpu")
    assert set(by_marker) == files
    assert by_marker == by_folder
    assert not collected("-m", "not gpu", "tests/gpu")
