"""The sbatch script of a run or a sweep: plain bash that a person can read, change and submit by hand."""

import math
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from seedbed import config as configs
from seedbed.config import Config, number, seconds
from seedbed.errors import UserError
from seedbed.track.text import one_line

NAME = "job.sbatch"


@dataclass(frozen=True)
class Ask:
    """What a job asks of the cluster, as `slurm.KEY=VALUE`; what is left empty, the cluster decides."""

    partition: str = ""
    account: str = ""
    constraint: str = ""
    nodes: int = number(1, low=1)
    gpus: int | None = number(None, low=0)  # on each node; otherwise what dist.* and device call for
    cpus: int = number(0, low=0)  # cores for each process
    time: str = ""
    warn: float = seconds(120.0)  # how long before the end of the time the run is saved and queued again
    workers: int = number(0, low=0)  # of a sweep
    container: str = ""
    python: str = ""
    setup: str = ""
    extra: str = ""


@dataclass(frozen=True)
class _Group:
    slurm: Ask = Ask()

    def __post_init__(self) -> None:
        configs.validate(self)


def read(assignments: list[str]) -> tuple[Ask, list[str]]:
    """The settings of the job, checked, and the other assignments, which are the run's."""
    own = [text for text in assignments if text.startswith("slurm.")]
    ask = configs.override(_Group(), own).slurm
    for key in ("partition", "account", "constraint", "extra", "container", "python"):
        if "\n" in getattr(ask, key):
            raise UserError(f"slurm.{key} must be one line")
    if ask.extra and not ask.extra.startswith("-"):
        raise UserError(f"slurm.extra={ask.extra} are further options of sbatch, as in slurm.extra='--qos=high --mem=64G'")
    if ask.time and _seconds(ask.time) <= ask.warn:
        raise UserError(
            f"slurm.time={ask.time} leaves nothing to train: the run is saved {ask.warn:g} s before its end (slurm.warn)"
        )
    return ask, [text for text in assignments if not text.startswith("slurm.")]


_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def _seconds(text: str) -> int:
    """A time limit: 90m, 4h or 2d, or as Slurm writes it: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS."""
    if found := re.fullmatch(r"(\d+)([smhd])", text):
        return int(found[1]) * _UNITS[found[2]]
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if not found:
        raise UserError(f"slurm.time={text} is not a time; write 90m, 4h or 2d, or as Slurm does: 1-12:00:00")
    days, *parts = found.groups()
    given = [int(part) for part in parts if part is not None]
    if days is None and len(given) < 3:
        minutes, second = [*given, 0][:2]
        return 60 * minutes + second
    hours, minutes, second = [*given, 0, 0][:3]
    return ((24 * int(days or 0) + hours) * 60 + minutes) * 60 + second


def _spelled(num_seconds: int) -> str:
    minutes, second = divmod(num_seconds, 60)
    days, minutes = divmod(minutes, 24 * 60)
    return f"{days}-{minutes // 60:02d}:{minutes % 60:02d}:{second:02d}"


@dataclass(frozen=True)
class Layout:
    """Processes and GPUs on each of the nodes."""

    nodes: int
    processes: int
    gpus: int

    @property
    def world(self) -> int:
        return self.nodes * self.processes


def layout(ask: Ask, config: Config) -> Layout:
    """One process per GPU, as many as dist.replicate and dist.shard make; or a line on what does not match."""
    world = config.dist.world
    degrees = f"dist.replicate x dist.shard = {world}"
    each, rest = divmod(world, ask.nodes)
    if rest:
        raise UserError(f"{degrees} processes do not divide over slurm.nodes={ask.nodes}; choose a divisor")
    gpus = ask.gpus if ask.gpus is not None else 0 if config.device == "cpu" else each
    total = ask.nodes * gpus
    if gpus and total != world:
        words = f"slurm.nodes={ask.nodes} with slurm.gpus={gpus} each are {total} GPUs, but {degrees}"
        raise UserError(f"{words}; make them equal, as in dist.replicate={total}")
    return Layout(ask.nodes, each, gpus)


@dataclass(frozen=True)
class Script:
    """All that goes into a script. `folder` is the run's or the sweep's; `saved` the run's, or how those of the sweep begin."""

    title: str
    name: str
    folder: Path
    cwd: Path
    saved: Path
    words: tuple[str, ...]
    ask: Ask
    layout: Layout
    workers: int = 0

    def text(self) -> str:
        parts = [self._head(), self._code(), self._setup(), self._ranks(), self._traps(), self._step(), _END]
        return "\n\n".join(part for part in parts if part) + "\n"

    def _head(self) -> str:
        ask, plan = self.ask, self.layout
        options = {
            "job-name": self.name,
            "chdir": self.cwd,
            "output": str(self.folder).replace("%", "%%") + ("/slurm-%A_%a.out" if self.workers else "/slurm-%j.out"),
            "open-mode": "append",
            "array": f"1-{self.workers}" if self.workers else "",
            "nodes": plan.nodes,
            "ntasks-per-node": plan.processes,
            "gpus-per-node": plan.gpus or "",
            "cpus-per-task": ask.cpus or "",
            "partition": ask.partition,
            "account": ask.account,
            "constraint": ask.constraint,
            "time": _spelled(_seconds(ask.time)) if ask.time else "",
            "signal": f"B:USR1@{math.ceil(ask.warn)}",
        }
        lines = [f"#SBATCH --{key}={_quoted(str(value))}" for key, value in options.items() if value != ""]
        about = f"# seedbed: {one_line(self.title)}. By hand: sbatch {shlex.quote(str(self.folder / NAME))}"
        return "\n".join(["#!/bin/bash", about, *lines, "#SBATCH --requeue", *([f"#SBATCH {ask.extra}"] if ask.extra else [])])

    def _code(self) -> str:
        return (
            "# The code as it was when this was submitted: what changes later does not reach the job.\n"
            f"export SEEDBED_CODE={shlex.quote(str(self.folder / 'code'))}\n"
            'export PYTHONPATH="$SEEDBED_CODE${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1'
        )

    def _setup(self) -> str:
        return f"# slurm.setup\n{self.ask.setup}" if self.ask.setup else ""

    def _ranks(self) -> str:
        if self.layout.world == 1:
            return ""
        return (
            "# One process per rank, told its place in the words of torchrun; they meet on the first node.\n"
            'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
            "export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))\n"
            f"export WORLD_SIZE={self.layout.world} LOCAL_WORLD_SIZE={self.layout.processes}"
        )

    def _traps(self) -> str:
        return (
            "# USR1: the time is nearly up; passed on, so that the run saves. TERM (preemption, scancel) reaches it by itself.\n"
            "warned=\n"
            """trap 'warned=yes; kill -USR1 "$step"' USR1\n"""
            "trap : TERM\n"
            f"saved() {{ ls -d {self._runs()}/checkpoints/step-* 2>/dev/null; }}\n"
            "before=$(saved)"
        )

    def _runs(self) -> str:
        """The folders whose checkpoints show that something was done, as a pattern of the shell."""
        return shlex.quote(str(self.saved)) + ("-*" if self.workers else "")

    def _step(self) -> str:
        container = shlex.split(self.ask.container)
        inside = bool(container) and container[0].startswith("-")
        srun = ["srun", "--kill-on-bad-exit=1", *([f"--cpus-per-task={self.ask.cpus}"] if self.ask.cpus else [])]
        srun += container if inside else []
        python = self.ask.python or ("python3" if container else sys.executable)
        command = [*([] if inside else container), python, "-m", "seedbed", *self.words]
        ranked = ["bash", "-c", 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec "$@"', "rank"] if self.layout.world > 1 else []
        return f"{shlex.join(srun)} \\\n    {shlex.join([*ranked, *command])} &\nstep=$!"


_END = """\
while kill -0 "$step" 2>/dev/null; do wait "$step"; done # a signal ends a wait before its time
wait "$step"
status=$?

if [ -n "$warned" ] && [ "$status" -gt 128 ]; then
    if [ "$(saved)" = "$before" ]; then
        echo "seedbed: nothing new was saved before the time was up, so the job is not queued again; give it a longer slurm.time"
    else
        scontrol requeue "${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}"
    fi
fi
exit "$status\""""


def _quoted(text: str) -> str:
    """A value as sbatch reads it in a comment of the script."""
    if any(mark in text for mark in "\"'\\\n"):
        raise UserError(f"{text!r} cannot be written into an sbatch script: it holds a quote, a backslash or a line break")
    return f'"{text}"' if re.search(r"[\s#]", text) else text
