"""Losses far from those before: a spike, or a sudden dip. Loaded when one occurs."""

import statistics
from contextlib import closing

import torch
from torch import Tensor

from seedbed.data.feed import Feed
from seedbed.train import rollback
from seedbed.train.guard import TAIL
from seedbed.train.job import Job
from seedbed.train.reporting import raise_alarms
from seedbed.train.stepper import StepResult
from seedbed.train.system import Batch
from seedbed.train.watch import Alarm

# The share of degenerate rows in a batch, and how much larger it must be than in the batches before.
SHARE, MORE, NUM_BEFORE = 0.25, 0.2, 4


def accept(job: Job, result: StepResult) -> bool:
    """Report a loss that is far from those before; False where the run was rolled back or ended."""
    watch = job.incidents.watch
    far, watch.far = watch.far, 0.0
    if not far:
        return rollback.on_spike(job, result)
    alarm = _dip(job, result)
    if alarm:
        alarm = _degenerate(job, result) or alarm
        if alarm.kind not in job.watch.raised:
            job.watch.raised.add(alarm.kind)
            raise_alarms(job, result.step, [alarm])
    return True


def _dip(job: Job, result: StepResult) -> Alarm | None:
    # The mean of the losses before the last, how far they lie below it at most, and the width of their band.
    *before, _ = job.incidents.watch.losses
    mean = statistics.fmean(before)
    width = job.config.guard.sigmas * max(statistics.pstdev(before), 1e-3 * abs(mean), 1e-9)
    if not mean - result.loss > max(width, TAIL * (mean - min(before))):
        return None
    why = "an easy or empty batch, targets that leak into the inputs, or a mask that leaves few targets"
    fix = f"seedbed replay {job.run.name} {result.step}"
    return Alarm("dip", f"loss {result.loss:.4g} fell far below {mean:.4g} in one step", "the batch of this step", why, fix)


def _degenerate(job: Job, result: StepResult) -> Alarm | None:
    """An alarm where the batch of a step is degenerate; it is read again, on the host."""
    counter = next((entry[1] for entry in job.step_history.entries if entry[0] == result.step), None)
    if counter is None or not job.ranks.is_single:
        return None
    size, batches = job.config.batch, []
    with closing(Feed(job.data.train, batch=size, parts=1, seed=job.config.seed, device=torch.device("cpu"))) as feed:
        for first in range(max(0, counter - NUM_BEFORE * size), counter + 1, size):
            feed.load(first)
            batches.append({name: value.clone() for name, value in feed.part(0).items()})
    found = degenerate(batches[-1], batches[:-1]) if len(batches) > 1 else None
    if found is None:
        return None
    why = "the step learns from fewer items than it counts, and its loss says little"
    fix = "look at what makes the batch: an index that repeats, a buffer that is written twice, an item that was not decoded"
    return Alarm("degenerate", f"{found[0]}, unlike the batches before", type(job.data.train).__name__, why, fix)


def degenerate(batch: Batch, known: list[Batch]) -> tuple[str, list[int]] | None:
    """What is degenerate about a batch, and its rows; None where earlier batches are like it."""
    count = max((len(value) for value in batch.values() if value.ndim), default=0)
    for name, value in batch.items():
        if name == "index" or not value.ndim or len(value) != count or count < 2:
            continue
        for word, find in (("constant", constant_rows), ("repeated", _repeated_rows)):
            rows = find(value)
            before = [len(find(other[name])) / max(len(other[name]), 1) for other in known if name in other]
            if len(rows) / count >= SHARE and len(rows) / count > max(before, default=0.0) + MORE:
                return f"{len(rows)} of {count} rows of `{name}` are {word}", rows
    return None


def constant_rows(value: Tensor) -> list[int]:
    """Rows that hold one number only."""
    flat = value.detach().reshape(len(value), -1)
    return (flat == flat[:, :1]).all(1).nonzero().flatten().tolist() if flat.shape[1] > 1 else []


def _repeated_rows(value: Tensor) -> list[int]:
    """Rows that equal an earlier one; a few numbers, such as labels, repeat anyway."""
    seen: set[bytes] = set()
    rows = []
    for row, item in enumerate(value.detach().cpu().contiguous() if value[0].numel() > 3 else ()):
        key = item.view(torch.uint8).numpy().tobytes() if item.ndim else b""
        rows += [row] if key in seen else []
        seen.add(key)
    return rows
