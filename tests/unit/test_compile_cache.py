"""The folder of compiled code: whose it is, what names it, and what happens where it cannot be used."""

import errno
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from seedbed.train import compile_cache
from seedbed.train.compile_cache import INDUCTOR, TRITON

SRC = Path(__file__).parents[2] / "src"


@pytest.fixture(autouse=True)
def no_folder_yet(tmp_path, monkeypatch):
    monkeypatch.setenv("SEEDBED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compile_cache, "_set_here", set())
    for name in (INDUCTOR, TRITON):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)


def enabled() -> tuple[Path, list[str]]:
    printed: list[str] = []
    compile_cache.enable(printed.append)
    return Path(os.environ[INDUCTOR]), printed


def test_compile_cache_folder_is_named_by_version(tmp_path):
    folder, printed = enabled()
    assert folder.parent == tmp_path / "cache" / "compiled" and torch.__version__ in folder.name and folder.is_dir()
    assert Path(os.environ[TRITON]).parent == folder and not printed
    assert folder.stat().st_mode & 0o077 == 0
    assert torch._functorch.config.autograd_cache_allow_custom_autograd_functions


def test_compile_cache_folder_of_the_user_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv(INDUCTOR, str(tmp_path / "own"))
    folder, printed = enabled()
    assert folder == tmp_path / "own" and not printed and TRITON not in os.environ


def test_compile_cache_folder_depends_on_versions_and_kernels(monkeypatch, tmp_path):
    first = compile_cache.folder().name
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    second = compile_cache.folder().name
    (tmp_path / "nn").mkdir()
    (tmp_path / "nn" / "kernels.py").write_text("x = 1\n")
    monkeypatch.setattr(compile_cache.errors, "__file__", str(tmp_path / "errors.py"))
    third = compile_cache.folder().name
    (tmp_path / "nn" / "kernels.py").write_text("x = 2\n")
    assert len({first, second, third, compile_cache.folder().name}) == 4


def spoil_with_a_file(root: Path) -> None:
    root.write_text("a file where a folder should be")


def spoil_by_mode(root: Path) -> None:
    folder = root / "compiled" / compile_cache.folder().name
    folder.mkdir(parents=True)
    folder.chmod(0o777)


@pytest.mark.parametrize(("spoil", "reason"), [(spoil_with_a_file, "Not a directory"), (spoil_by_mode, "others may write to it")])
def test_compile_cache_falls_back_to_a_temporary_folder(tmp_path, spoil, reason):
    spoil(tmp_path / "cache")
    folder, printed = enabled()
    assert len(printed) == 1 and reason in printed[0] and "temporary folder" in printed[0]
    assert folder.is_dir() and tmp_path not in folder.parents
    assert Path(os.environ[TRITON]).parent == folder


def test_compile_cache_on_a_full_disk_warns_before_compiling(monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr(compile_cache.shutil, "disk_usage", lambda path: usage)
    folder, printed = enabled()
    assert os.strerror(errno.ENOSPC) in printed[0] and folder.name.startswith("seedbed-compiled-")


def test_compile_cache_moves_when_the_disk_fails_later(monkeypatch):
    enabled()
    printed: list[str] = []
    compile_cache.use_temporary_folder("it is full", printed.append)
    assert os.environ[TRITON].startswith(os.environ[INDUCTOR]) and "it is full" in printed[0]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ENOSPC, "full"), True),
        (PermissionError(errno.EACCES, "no"), True),
        (FileNotFoundError(errno.ENOENT, "gone"), False),
        (RuntimeError("unsupported"), False),
    ],
)
def test_compile_cache_disk_errors_are_found_in_chained_errors(error, expected):
    outer = RuntimeError("backend compiler failed")
    outer.__cause__ = error
    assert compile_cache.is_disk_error(outer) is expected


def test_compile_cache_folders_of_old_versions_are_removed(tmp_path):
    root = tmp_path / "cache" / "compiled"
    for name, age in (("torch-1-old", 15), ("torch-1-new", 13)):
        (root / name).mkdir(parents=True)
        (root / name / "last-used").write_text("")
        then = time.time() - age * 24 * 3600
        os.utime(root / name / "last-used", (then, then))
    (root / "torch-mine").mkdir()  # without a mark: not ours to remove
    folder, _ = enabled()
    assert {p.name for p in root.iterdir()} == {"torch-1-new", "torch-mine", folder.name}


# ---- whole processes ---------------------------------------------------------------------------------------------------

SCRIPT = """
import json, sys
from seedbed.cli import main
code = main(["train", "gpt/demo", "device=cpu", "compile=whole", "steps=3", "batch=2", "model.depth=1", "model.width=16",
             "model.heads=2", "data.block=8", "every.log=1", "every.eval=0", "--no-check", "--dirty", "--run", sys.argv[1]])
from torch._dynamo.utils import counters
hits = counters["aot_autograd"]["autograd_cache_hit"]
losses = [json.loads(line)["loss"] for line in open(f"runs/{sys.argv[1]}/rows.jsonl")]
print("RESULT", json.dumps({"code": code, "hits": hits, "losses": losses}))
"""


def started(name: str, folder: Path) -> subprocess.Popen:
    env = {k: v for k, v in os.environ.items() if k not in (INDUCTOR, TRITON)}
    env |= {"PYTHONPATH": str(SRC), "SEEDBED_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", SCRIPT, name]
    return subprocess.Popen(words, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ended(process: subprocess.Popen) -> dict:
    out, _ = process.communicate(timeout=280)
    assert "RESULT" in out, out
    return json.loads(out.rpartition("RESULT")[2]) | {"out": out}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling on the CPU needs g++")
def test_compile_cache_concurrent_repeated_and_damaged_starts(tmp_path):
    first, beside = (started(name, tmp_path) for name in ("a", "b"))
    a, b = ended(first), ended(beside)
    again = ended(started("c", tmp_path))
    assert a["losses"] == b["losses"] == again["losses"] and a["code"] == b["code"] == again["code"] == 0
    assert again["hits"] >= 1
    rng = random.Random(0)
    files = sorted(p for p in (tmp_path / "cache" / "compiled").rglob("*") if p.is_file() and p.name != "last-used")
    for path in files:
        path.write_bytes(path.read_bytes()[: rng.randrange(1 + path.stat().st_size)])
    damaged = ended(started("d", tmp_path))
    assert damaged["code"] == 0 and damaged["losses"] == pytest.approx(a["losses"], rel=1e-5), damaged["out"]


def test_compile_cache_folder_that_torch_chose_is_replaced(tmp_path, monkeypatch):
    """Parts of torch's compiler set both variables when they are loaded: that is nobody's wish."""
    from torch._inductor.runtime import cache_dir_utils

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(cache_dir_utils.tempfile, "tempdir", None)
    monkeypatch.delenv(INDUCTOR, raising=False)  # loading torch's module may have set it
    chosen = Path(cache_dir_utils.cache_dir())
    monkeypatch.setenv(TRITON, cache_dir_utils.triton_cache_dir(0))
    assert os.environ[INDUCTOR] == str(chosen) and chosen.is_relative_to(tmp_path)
    folder, printed = enabled()
    assert folder.parent == tmp_path / "cache" / "compiled" and not printed
    assert Path(os.environ[TRITON]).parent == folder
    enabled()
    assert Path(os.environ[INDUCTOR]) == folder
