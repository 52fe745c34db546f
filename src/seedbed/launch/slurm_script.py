"""The sbatch script of a run or a sweep, from job.bash: plain bash that can be read, edited and submitted by hand."""

import math
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from seedbed import config as configs
from seedbed import trust
from seedbed.config import Config, number, seconds
from seedbed.errors import UserError
from seedbed.track.text import one_line

NAME = "job.sbatch"


@dataclass(frozen=True)
class Resources:
    """The resources of a job, set by `slurm.KEY=VALUE`. Empty values are left to the cluster."""

    partition: str = ""
    account: str = ""
    constraint: str = ""
    nodes: int = number(1, low=1)
    gpus: int | None = number(None, low=0)  # per node; by default as many as dist.* and device need
    cpus: int = number(0, low=0)  # cores per process
    time: str = ""
    warn: float = seconds(120.0)  # seconds before the time limit at which the run is saved and requeued
    workers: int = number(0, low=0)  # tasks of a sweep
    container: str = ""
    python: str = ""
    setup: str = ""
    extra: str = ""


@dataclass(frozen=True)
class _Group:
    slurm: Resources = Resources()

    def __post_init__(self) -> None:
        configs.validate(self)


def read(assignments: list[str]) -> tuple[Resources, list[str]]:
    """The job's settings, checked, and the remaining assignments, which belong to the run."""
    own = [text for text in assignments if text.startswith("slurm.")]
    resources = configs.override(_Group(), own).slurm
    for key in ("partition", "account", "constraint", "extra", "container", "python"):
        if "\n" in getattr(resources, key):
            raise UserError(f"slurm.{key} must be one line")
    if resources.extra and not resources.extra.startswith("-"):
        raise UserError(f"slurm.extra={resources.extra} must be options of sbatch, as in slurm.extra='--qos=high --mem=64G'")
    if resources.time and _seconds(resources.time) <= resources.warn:
        raise UserError(
            f"slurm.time={resources.time} leaves no time to train: "
            f"the run is saved {resources.warn:g} s before its end (slurm.warn)"
        )
    return resources, [text for text in assignments if not text.startswith("slurm.")]


_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def _seconds(text: str) -> int:
    """Seconds of a time limit: 90m, 4h or 2d, or in Slurm's notation: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS."""
    if found := re.fullmatch(r"(\d+)([smhd])", text):
        return int(found[1]) * _UNITS[found[2]]
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if not found:
        raise UserError(f"slurm.time={text} is not a time; write 90m, 4h or 2d, or as Slurm does: 1-12:00:00")
    days, *parts = found.groups()
    given = [int(part) for part in parts if part is not None]
    if days is None and len(given) < 3:
        given = [0, *given]  # minutes come first
    hours, minutes, second = [*given, 0, 0][:3]
    return ((24 * int(days or 0) + hours) * 60 + minutes) * 60 + second


def _slurm_time(num_seconds: int) -> str:
    minutes, second = divmod(num_seconds, 60)
    days, minutes = divmod(minutes, 24 * 60)
    return f"{days}-{minutes // 60:02d}:{minutes % 60:02d}:{second:02d}"


@dataclass(frozen=True)
class Layout:
    """Number of nodes, and processes and GPUs per node."""

    nodes: int
    processes: int
    gpus: int

    @property
    def world(self) -> int:
        return self.nodes * self.processes


def layout(resources: Resources, config: Config) -> Layout:
    """One process per GPU, dist.replicate x dist.shard in all. A UserError says what does not match."""
    world = config.dist.world
    degrees = f"dist.replicate x dist.shard = {world}"
    each, rest = divmod(world, resources.nodes)
    if rest:
        raise UserError(f"{degrees} processes do not divide over slurm.nodes={resources.nodes}; choose a divisor")
    gpus = resources.gpus if resources.gpus is not None else 0 if config.device == "cpu" else each
    total = resources.nodes * gpus
    if gpus and total != world:
        words = f"slurm.nodes={resources.nodes} with slurm.gpus={gpus} each are {total} GPUs, but {degrees}"
        raise UserError(f"{words}; make them equal, as in dist.replicate={total}")
    return Layout(resources.nodes, each, gpus)


@dataclass(frozen=True)
class Script:
    """Content of a script. `folder` is that of the run or sweep; `saved` is the run's name, or the prefix of its trials."""

    title: str
    folder: Path
    saved: Path
    words: tuple[str, ...]
    resources: Resources
    layout: Layout
    workers: int = 0
    trust: tuple[str, ...] = ()  # hashes of the user's code that the job may execute on any node

    def text(self) -> str:
        """The sections of job.bash with this job's values; those that mention an empty value are left out."""
        values = {
            "head": self._head(),
            "code": shlex.quote(str(self.folder / "code")),
            "trust": f"{trust.VARIABLE}={shlex.quote(','.join(self.trust))}" if self.trust else "",
            "setup": self.resources.setup,
            "world": f"{self.layout.world}" if self.layout.world > 1 else "",
            "processes": f"{self.layout.processes}",
            "runs": shlex.quote(str(self.saved)) + ("-*" if self.workers else ""),
            "step": self._step(),
        }
        sections = Path(__file__).with_name("job.bash").read_text(encoding="utf-8").rstrip().split("\n\n")
        needed = [text for text in sections if all(values[name] for name in re.findall(r"@(\w+)@", text))]
        return "\n\n".join(re.sub(r"@(\w+)@", lambda found: values[found[1]], text) for text in needed) + "\n"

    def _head(self) -> str:
        resources, plan = self.resources, self.layout
        options = {
            "job-name": self.folder.name,
            "chdir": Path.cwd(),
            "output": str(self.folder).replace("%", "%%") + ("/slurm-%A_%a.out" if self.workers else "/slurm-%j.out"),
            "open-mode": "append",
            "array": f"1-{self.workers}" if self.workers else "",
            "nodes": plan.nodes,
            "ntasks-per-node": plan.processes,
            "gpus-per-node": plan.gpus or "",
            "cpus-per-task": resources.cpus or "",
            "partition": resources.partition,
            "account": resources.account,
            "constraint": resources.constraint,
            "time": _slurm_time(_seconds(resources.time)) if resources.time else "",
            "signal": f"B:USR1@{math.ceil(resources.warn)}",
        }
        lines = [f"#SBATCH --{key}={_quoted(str(value))}" for key, value in options.items() if value != ""]
        about = f"# seedbed: {one_line(self.title)}. By hand: sbatch {shlex.quote(str(self.folder / NAME))}"
        return "\n".join(
            ["#!/bin/bash", about, *lines, "#SBATCH --requeue", *([f"#SBATCH {resources.extra}"] if resources.extra else [])]
        )

    def _step(self) -> str:
        container = shlex.split(self.resources.container)
        inside = bool(container) and container[0].startswith("-")
        srun = ["srun", "--kill-on-bad-exit=1", *([f"--cpus-per-task={self.resources.cpus}"] if self.resources.cpus else [])]
        srun += container if inside else []
        python = self.resources.python or ("python3" if container else sys.executable)
        command = [*([] if inside else container), python, "-P", "-m", "seedbed", *self.words]
        ranked = ["bash", "-c", 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec "$@"', "rank"] if self.layout.world > 1 else []
        return f"{shlex.join(srun)} \\\n    {shlex.join([*ranked, *command])} &\nstep=$!"


def _quoted(text: str) -> str:
    """A value quoted for an #SBATCH line."""
    if any(mark in text for mark in "\"'\\\n"):
        raise UserError(f"{text!r} cannot be written into an sbatch script: it contains a quote, a backslash or a line break")
    return f'"{text}"' if re.search(r"[\s#]", text) else text
