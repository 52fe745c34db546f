"""Which mirrors a run has: `--mirror`, checked before training, stored in the run's folder for resuming."""

import contextlib
import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from seedbed.errors import UserError
from seedbed.report.mirrors import MEMORY, base
from seedbed.report.mirrors.services import SINKS
from seedbed.track import jsonl
from seedbed.track.files import write_atomic
from seedbed.track.run import Run


class Choice(NamedTuple):
    """A service, and whether it gets the checkpoints too."""

    name: str
    checkpoints: bool = False

    def __str__(self) -> str:
        return self.name + ("+checkpoints" if self.checkpoints else "")


def read(text: str) -> tuple[Choice, ...]:
    """Parse `wandb+checkpoints,tensorboard`; a UserError says which package or login is missing."""
    if text in ("", "none"):
        return ()
    choices = []
    for word in text.split(","):
        name, plus, extra = word.strip().partition("+")
        if plus and extra != "checkpoints":
            raise UserError(f"--mirror {word}: only +checkpoints can be added to a mirror")
        choices.append(Choice(name, bool(plus)))
    for choice in choices:
        require(choice)
    if len({choice.name for choice in choices}) < len(choices):
        raise UserError(f"--mirror {text} names a mirror twice")
    return tuple(choices)


def require(choice: Choice) -> None:
    if choice.name not in SINKS:
        raise UserError(f"there is no mirror {choice.name!r}; there are: {', '.join(SINKS)}")
    kind = SINKS[choice.name]
    if choice.checkpoints and not kind.takes_checkpoints:
        takers = [name for name, other in SINKS.items() if other.takes_checkpoints]
        raise UserError(f"{choice.name} keeps no checkpoints; these do: {', '.join(takers)}")
    if importlib.util.find_spec(choice.name) is None:
        raise UserError(f'the mirror {choice.name} needs a package that is not installed: pip install "seedbed[{choice.name}]"')
    kind.require()


def keep(run: Run, choices: Sequence[Choice]) -> None:
    """Record the mirrors in the run's folder; their stored state is kept."""
    known = base.remembered(run)
    if choices or known:
        write_atomic(run.path / MEMORY, jsonl.pretty({**known, "mirrors": [str(choice) for choice in choices]}))


@contextlib.contextmanager
def mirrored(run: Run, say: Callable[[str], None], warn: Callable[[str], None]) -> Iterator[None]:
    """Send rows and events to the run's mirrors while the block runs; leaving it takes a few seconds at most."""
    choices, mirrors = [], []
    for word in base.remembered(run).get("mirrors") or []:
        try:
            choices += read(str(word))
        except UserError as problem:  # a resumed run may lack a mirror here
            warn(f"{problem}; the run goes on without it")
    for choice in choices:
        sink = SINKS[choice.name](run, choice.checkpoints)
        # A mirror that is added later gets the earlier rows and events first.
        mirrors.append(base.Mirror(sink, warn, () if sink.memory else base.backlog(run)))
    run.listeners += mirrors
    try:
        yield
    finally:
        asked = any(choice.checkpoints for choice in choices)
        deadline = time.monotonic() + (base.SECONDS_WITH_CHECKPOINTS if asked else base.SECONDS)
        for mirror in mirrors:
            run.listeners.remove(mirror)
            mirror.close(deadline)
            say(f"mirror  {mirror.name}  {mirror.sink.place()}".rstrip())


def send(run: Run, choices: Sequence[Choice], say: Callable[[str], Any]) -> None:
    """Send a finished run from its folder, in this thread."""
    items = base.backlog(run)
    for choice in choices:
        sink = SINKS[choice.name](run, choice.checkpoints)
        sink.forget()
        try:
            sink.open(run.config_json())
            for item in items:
                base.relay(sink, item)
            sink.close(run.status())
        except Exception as error:
            # An error of the service's package: a traceback would not help.
            raise UserError(f"mirror {choice.name}: {type(error).__name__}: {error}") from error
        say(f"{run.name}: {len(items)} rows and events sent to {choice.name}  {sink.place()}".rstrip())
