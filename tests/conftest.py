"""Settings for every test: one thread per process, no screen, a cache of its own, and a way to run the command line."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

# Before anything imports torch or matplotlib.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["MPLBACKEND"] = "Agg"

import pytest

PERTURBED = pytest.StashKey[Any]()
ROOT = Path(__file__).resolve().parents[1]

GPU_TESTS = ROOT / "tests" / "gpu"
# What torch says about itself when it compiles, and when it watches for waits: no fault of ours.
GPU_WARNINGS = (
    "ignore::DeprecationWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf",
    "ignore:TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled",
    "ignore:\\s*Online softmax is disabled on the fly",
    "ignore:Synchronization debug mode is a prototype feature",
)


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """The limits on time are pytest-timeout's. Where it is not installed they are known and do nothing."""
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "seconds that a test may take; needs pytest-timeout")
    parser.addoption("--perturb-kernels", action="store_true", help="let kernels round otherwise for every other shape")


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): needs pytest-timeout")
    if config.getoption("perturb_kernels"):
        import perturbation

        config.stash[PERTURBED] = perturbation.install()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m gpu` imports nothing but tests/gpu, which needs torch and pytest alone."""
    above = GPU_TESTS.is_relative_to(collection_path) or collection_path.is_relative_to(GPU_TESTS)
    return True if config.option.markexpr == "gpu" and not above else None


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test in tests/gpu is marked `gpu` and skipped where there is no CUDA device."""
    for item in items:
        if item.path.is_relative_to(GPU_TESTS):
            import torch

            item.add_marker("gpu")
            item.add_marker(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))
            for words in GPU_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(words))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Outside of tests/gpu, `device=auto` is the CPU on any machine: in the test, in its fixtures and in what they start.

    What is marked as in need of CUDA names its device.
    """
    needs = [str(mark.kwargs.get("reason", "")) for mark in item.iter_markers("skipif")]
    if item.path.is_relative_to(GPU_TESTS) or any("CUDA" in reason for reason in needs):
        return (yield)
    with pytest.MonkeyPatch.context() as patch:
        if torch := sys.modules.get("torch"):
            torch.cuda.is_available()  # torch reads the variable the first time it is asked
            patch.setattr(torch.cuda, "is_available", lambda: False)
            patch.setattr(torch.backends.mps, "is_available", lambda: False)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        return (yield)


@pytest.fixture(scope="session", autouse=True)
def _cache_of_this_session(tmp_path_factory: pytest.TempPathFactory):
    """Prepared texts are shared by the tests of a session, and never taken from or left in the user's cache."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SEEDBED_CACHE", str(shared / "cache"))
        patch.setenv("SEEDBED_STATE", str(base / "state"))
        for name in ("SEEDBED_RUNS", "SEEDBED_TRUST"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(autouse=True)
def _no_global_hook_is_left() -> Iterator[None]:
    """A hook on all modules that outlives its test runs in the others, and torch.compile warns about it."""
    yield
    if "torch" in sys.modules:
        from torch.nn.modules import module

        assert not module._has_any_global_hook()


@pytest.fixture
def no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run draws no figures and writes no report at its end, which takes seconds."""
    from seedbed.launch import local

    monkeypatch.setattr(local.journal, "finish", lambda run, warn: None)


@pytest.fixture
def exact_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """For comparisons closer than the float32 in which noise is drawn: numbers of variance 1 that no shape rounds otherwise."""
    from seedbed.nn import rng

    monkeypatch.setattr(rng, "normal", lambda key, num: (rng.uniform(key, num) - 0.5) * 12**0.5)


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
