"""Run folders made by hand, for the tests of track and of the command line."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seedbed.config import Config, override
from seedbed.track.run import Run

CODE = {"version": "0.0.1", "commit": "0123456789abcdef", "branch": "main", "dirty": False}


@dataclass(frozen=True)
class Model:
    width: int = 128
    sizes: tuple[int, ...] = (1, 2)


@dataclass(frozen=True)
class Data:
    source: str = "reference"


BASE = Config(model=Model(), data=Data())


def make(root: Path, name: str | None = "first", *settings: str, **facts: Any) -> Run:
    """A run that has not begun."""
    facts = {"recipe": "gpt", "preset": "demo", "code": CODE, "base": BASE, **facts}
    return Run.create(root, facts.pop("recipe"), facts.pop("preset"), override(BASE, settings), name=name, **facts)


def train(run: Run, num_rows: int = 40, level: float = 2.0, status: str = "done", metric: str = "valid_loss") -> Run:
    """Rows of a falling loss with a little regular noise, four evaluations, a sample and an end."""
    run.event(0, "start", device="cpu")
    step, loss, best = 0, math.nan, math.inf
    for index in range(num_rows):
        step = 10 * (index + 1)
        loss = level + 2 * math.exp(-10 * index / num_rows) + 0.01 * (index % 3 - 1)
        rates = {"items_per_s": 1200.0, "wait": 0.01, "memory": 5e8, "seconds": step * 0.05}
        run.row({"step": step, "loss": loss, "lr": 1e-3, **rates})
        if (index + 1) % max(num_rows // 4, 1) == 0:
            best = min(best, loss + 0.1)
            run.event(step, "eval", **{metric: loss + 0.1, "bits_per_byte": 1.5}, weights="live", best=True, seconds=1.0)
    run.event(step, "sample", text="a falling\nleaf", files=[])
    run.event(step, "end", status=status)
    run.set_status(status, step=step, last_step=step, loss=loss, best=best)
    run.close()
    return run
