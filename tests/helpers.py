"""Helpers for tests that train: start, stop at a step, resume, compare what is left on disk bit for bit, and watch a step."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from seedbed.launch import local
from seedbed.track.run import Run
from seedbed.train import checkpoint, loop

TOY = str(Path(__file__).parent / "toy_recipe.py")
# What may differ between equal runs: how long things took and when.
CLOCKS = {"seconds", "memory", "items_per_s", "wait", "mfu", "mfu_measured", "time"}


def start(root: Path, name: str, *assignments: str, recipe: str = TOY) -> int:
    return local.train(recipe, list(assignments), root=root, run_name=name, dirty=True)


def resume(root: Path, name: str, *assignments: str) -> int:
    return local.resume(root, name, list(assignments))


def stop_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next run be interrupted, as by SIGTERM, once it has taken `step` steps."""
    real = loop._take_step

    def take(job: loop.Job) -> None:
        real(job)
        if job.step == step:
            job.stop_signal = signal.SIGTERM
            monkeypatch.setattr(loop, "_take_step", real)

    monkeypatch.setattr(loop, "_take_step", take)


def newest(root: Path, name: str) -> checkpoint.Checkpoint:
    saved = checkpoint.load_newest(root / name / "checkpoints")
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


class NoHost(TorchDispatchMode):
    """Refuses what a captured step must not do: read a value, depend on one in shape, or bring a constant from the host."""

    refused = ("_local_scalar_dense", "nonzero", "lift_fresh", "masked_select", "is_nonzero", "rand", "unique", "bernoulli")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert not any(word in name for word in self.refused), f"{name} in a captured step"
        assert not (name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])), "boolean index"
        return func(*args, **(kwargs or {}))
