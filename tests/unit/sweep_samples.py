"""Sweeps without training: folders whose results are written by hand."""

from pathlib import Path
from typing import Any

from seedbed.config import Config
from seedbed.track import files, jsonl
from seedbed.tune.sweep import grid as grids
from seedbed.tune.sweep.folder import Sweep, Trial, TrialStatus

BASE = Config(model=None, data=None)


def make(root: Path, *words: str, seeds: int | None = None, name: str = "some", sampler: str | None = None) -> Sweep:
    """A sweep over these words, nothing trained yet."""
    grid = grids.read(BASE, words, seeds, suggest=sampler is not None)
    cells = [] if sampler else grids.cells(grid)
    facts: dict[str, Any] = {"recipe": "gpt", "preset": "demo", "patience": 0, "sampler": sampler, "suggest": 20}
    return Sweep.create_or_join(root, name, grid, cells, **facts, why="to see", code={"commit": None})


def end(sweep: Sweep, trial: Trial, best: float | None, state: str = "done", error: str = "", **more: Any) -> None:
    """Let a trial have ended."""
    found = TrialStatus(
        trial, state, sweep.run_name(trial), step=8, loss=1.0, best=best, error=error, **{"metric": "error", **more}
    )
    files.write_atomic(sweep.path / "results" / f"{trial.number:04d}.json", jsonl.pretty(found.to_json()))
