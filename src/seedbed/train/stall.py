"""The report of a stalled run: the stack of every thread, printed and written into its folder."""

import contextlib
import re
import sys
import threading
import traceback
from pathlib import Path
from types import FrameType

from seedbed.track import files
from seedbed.train.job import Job

_PACKAGE = str(Path(__file__).parents[1])


def report(job: Job, seconds: float) -> None:
    """Print the stacks of all threads, and record them with the run."""
    # The stack of every thread but this one, innermost frame last.
    frames: dict[int, FrameType] = sys._current_frames()
    frames.pop(threading.get_ident())
    stacks = {ident: list(traceback.extract_stack(frame)) for ident, frame in frames.items()}
    where = _where(stacks.get(threading.main_thread().ident or 0, []))
    samples = f"samples {job.counter} to {job.counter + job.config.batch - 1}"
    what = f"step {job.step + 1} ({samples}) has not ended after {seconds:.0f} s"
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    text = "\n".join(f"thread {names.get(i, i)}\n{''.join(traceback.format_list(stack))}" for i, stack in stacks.items())
    print(f"\n{text}\nseedbed: {what}; it is at {where}", file=sys.stderr)
    print(f"seedbed: stopped; go on from the last checkpoint with: seedbed resume {job.run.name}", file=sys.stderr, flush=True)
    rank = "" if job.ranks.is_primary else f"-rank{job.ranks.rank}"
    with contextlib.suppress(OSError):
        files.write_atomic(job.run.path / f"stacks{rank}.txt", f"{what}\n\n{text}\n")
    job.run.event(job.step + 1, "stall", what=what, where=where, seconds=round(seconds, 1))
    job.run.set_status("stalled", step=job.step, error=f"{what}; it is at {where}")


def _where(stack: list[traceback.FrameSummary]) -> str:
    """The innermost line of the user's code or of seedbed, not a library's, and the collective that it waits in."""
    called = [f.name for f in stack if f.filename.endswith(("distributed_c10d.py", "dist/reducer.py"))]
    waits = f", waiting for other ranks in {called[-1].replace('finish', 'all_reduce of gradients')}" if called else ""
    own = [f for f in stack if f.filename.startswith(_PACKAGE) or not re.search(r"site-packages|/lib/python", f.filename)]
    found = (own or stack)[-1:]
    return f"{found[0].filename}:{found[0].lineno} in {found[0].name}{waits}" if found else "an unknown line"
