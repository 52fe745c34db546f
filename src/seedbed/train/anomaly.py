"""Autograd's anomaly mode for a whole run: the backward pass stops at the first NaN and names the forward line."""

import contextlib
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from seedbed.errors import UserError
from seedbed.train.job import Job

_TORCH = str(Path(torch.__file__).parent)


def last_line_outside_torch(text: str, skip: tuple[str, ...] = ()) -> tuple[str, str, str] | None:
    """File, line and function of the innermost frame of a printed traceback that is not in torch."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in (.+)', text)
    kept = [frame for frame in frames if not frame[0].startswith((_TORCH, "<", *skip))]
    return kept[-1] if kept else None


@contextlib.contextmanager
def detecting(job: Job) -> Iterator[None]:
    """Run the block in anomaly mode; a NaN in the backward pass becomes an event and an error that names the forward line."""
    with warnings.catch_warnings(record=True) as caught, torch.autograd.set_detect_anomaly(True):
        warnings.simplefilter("always")
        try:
            yield
        except RuntimeError as error:
            if "returned nan values" not in str(error):
                raise
            raise UserError(_explain(job, str(error), [str(w.message) for w in caught])) from None
        finally:
            messages = [str(w.message) for w in caught]
            for text in dict.fromkeys(t for t in messages if "forward call" not in t):
                job.console.warn(text)


def _explain(job: Job, problem: str, messages: list[str]) -> str:
    found = last_line_outside_torch(next((t for t in messages if "forward call" in t), ""))
    where = f"{found[0]}:{found[1]} {found[2]}" if found else "an unknown line"
    what = problem.strip().rstrip(".").splitlines()[0]
    job.run.event(job.step + 1, "anomaly", what=what, where=where)
    return f"step {job.step + 1}: {what}; its forward call is at {where}\n`seedbed train` without --anomaly guards and replays it"
