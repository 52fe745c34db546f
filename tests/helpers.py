"""Helpers for tests that train: start, stop at a step, resume, compare what is left on disk bit for bit, and watch a step."""

import contextlib
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from seedbed.launch import local
from seedbed.launch import resume as resuming
from seedbed.track.run import Run
from seedbed.train import checkpoint_loading, loop
from seedbed.train.engine import EvalEngine

TOY = str(Path(__file__).parent / "toy_recipe.py")
# The roundings of a noised value: a logarithm, a root, a cosine, their product, and a mixture of two.
NOISED_TERMS = 7
# What may differ between equal runs: how long things took and when.
CLOCKS = {"seconds", "memory", "items_per_s", "wait", "mfu", "mfu_measured", "time"}


def start(root: Path, name: str, *assignments: str, recipe: str = TOY) -> int:
    return local.train(recipe, list(assignments), root=root, run_name=name, dirty=True)


def train_once(root: Path, name: str, *assignments: str, recipe: str = TOY) -> None:
    """A run in a folder that tests share: the first that needs it trains it. A run that fails leaves nothing."""
    if (root / name).is_dir():
        return
    status = None
    try:
        status = start(root, name, *assignments, recipe=recipe)
    finally:
        if status != 0:
            shutil.rmtree(root / name, ignore_errors=True)
    assert status == 0, f"{name} ended with {status}"


def resume(root: Path, name: str, *assignments: str) -> int:
    return resuming.resume(root, name, list(assignments))


def stop_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next run be interrupted, as by SIGTERM, once it has taken `step` steps."""
    real = loop.take_step

    def take(job: loop.Job) -> None:
        real(job)
        if job.step == step:
            job.stop_signal = signal.SIGTERM
            monkeypatch.setattr(loop, "take_step", real)

    monkeypatch.setattr(loop, "take_step", take)


def offline(system: Any) -> EvalEngine:
    """An engine without optimizers, for calls to one method of a system."""
    return EvalEngine(system, system.config, next(system.parameters()).device)


def newest(root: Path, name: str) -> checkpoint_loading.Checkpoint:
    saved = checkpoint_loading.load_newest(root / name / "checkpoints")
    assert saved is not None
    return saved


def rows(root: Path, name: str) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in CLOCKS} for row in Run.open(root, name).rows()]


def kinds(root: Path, name: str) -> list[str]:
    return [event["kind"] for event in Run.open(root, name).events()]


def assert_same_end(root: Path, one: str, other: str) -> None:
    """Weights, moments, averages, counters, rows and evaluations of two runs are equal in every bit."""
    a, b = newest(root, one), newest(root, other)
    assert a.tensors.keys() == b.tensors.keys()
    for file, group in a.tensors.items():
        assert group.keys() == b.tensors[file].keys()
        for name, tensor in group.items():
            assert torch.equal(tensor, b.tensors[file][name]), f"{file}: {name} differs"
    assert {k: v for k, v in a.state.items() if k != "clock"} == {k: v for k, v in b.state.items() if k != "clock"}
    assert rows(root, one) == rows(root, other)
    evals = [
        [(e["step"], next(iter(e.items()))) for e in Run.open(root, n).events() if e["kind"] == "eval"] for n in (one, other)
    ]
    assert evals[0] == evals[1]


@contextlib.contextmanager
def no_host_sync() -> Iterator[None]:
    """Where the host would wait for a CUDA device, torch raises. The mode belongs to the process: it always ends here."""
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def float_limit(num_terms: int, dtype: torch.dtype = torch.float32) -> float:
    """How far two orders of summing the same `num_terms` terms may be apart, relative to the size of the sum.

    An addition rounds by half of eps at most, up as often as down. The roundings of n additions add up to less than
    6 * sqrt(n) * eps / 2 but for one sum in thirty million, and those of two orders differ by less than twice that.
    For a value that has passed through several sums in a row (layers, steps of an optimizer or of a walk) n counts the terms of
    all of them, along the longest way.
    """
    return 6 * num_terms**0.5 * torch.finfo(dtype).eps


def assert_close_in_float(one: Tensor | float, other: Tensor | float, num_terms: int) -> None:
    """Equal but for the order in which `num_terms` terms were summed; an entry in which terms cancel is judged by the largest.

    For computations by different kernels or of different shapes. Where the same kernels run on the same shapes: torch.equal.
    """
    one, other = torch.as_tensor(one).detach(), torch.as_tensor(other).detach()
    if not one.is_floating_point():
        assert torch.equal(one, other)
        return
    largest = max((tensor.abs().max().item() for tensor in (one, other) if tensor.numel()), default=0.0)
    torch.testing.assert_close(one, other, rtol=0.0, atol=float_limit(num_terms, one.dtype) * largest)


class NoHost(TorchDispatchMode):
    """Refuses what a captured step must not do: read a value, depend on one in shape, or bring a constant from the host."""

    refused = ("_local_scalar_dense", "nonzero", "lift_fresh", "masked_select", "is_nonzero", "rand", "unique", "bernoulli")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert not any(word in name for word in self.refused), f"{name} in a captured step"
        assert not (name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])), "boolean index"
        return func(*args, **(kwargs or {}))
