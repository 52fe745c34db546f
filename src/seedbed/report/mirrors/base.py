"""One mirror: a bounded queue and a thread that sends rows and events to a service, which may be slow, raise or hang."""

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from seedbed.config import flat
from seedbed.report import facts
from seedbed.report.mirrors import MEMORY
from seedbed.report.tables import model_text
from seedbed.track import jsonl
from seedbed.track.events import details
from seedbed.track.files import write_atomic
from seedbed.track.run import Run
from seedbed.track.text import number, one_line

# Length of the queue; beyond it the oldest items are dropped.
NUM_WAITING = 2000
# After so many consecutive failures a service is disabled for the rest of the run.
MAX_FAILURES = 5
# Seconds that the end of a run waits for its mirrors, without and with checkpoints.
SECONDS, SECONDS_WITH_CHECKPOINTS = 5.0, 60.0

IMAGES, FILMS = (".png", ".jpg", ".jpeg"), (".gif", ".mp4", ".webm")

_remembering = threading.Lock()


class Item(NamedTuple):
    """A row or event of a run; `rewind` withdraws the rows and events after its step."""

    kind: str
    values: dict[str, Any]
    time: float


class Sink(ABC):
    """A service that stores a copy of a run. Called by the mirror's thread only; an exception loses one item."""

    takes_checkpoints = True

    def __init__(self, run: Run, checkpoints: bool = False):
        self.run = run
        self.checkpoints = checkpoints

    @property
    def memory(self) -> dict[str, Any]:
        """What this service needs to find its copy of the run again; no secrets."""
        return remembered(self.run).get(self.name, {})

    @property
    def name(self) -> str:
        return type(self).__name__.lower()

    def remember(self, **facts: Any) -> None:
        self._keep({**self.memory, **facts})

    def forget(self) -> None:
        """The next `open` starts a new copy."""
        self._keep({})

    def _keep(self, memory: dict[str, Any]) -> None:
        with _remembering:
            write_atomic(self.run.path / MEMORY, jsonl.pretty({**remembered(self.run), self.name: memory}))

    @classmethod  # noqa: B027 (most services need nothing besides their package)
    def require(cls) -> None:
        """Raise a UserError where the service would prompt or fail."""

    @abstractmethod
    def open(self, config: dict[str, Any]) -> None:
        """Start the copy, or continue the one in `memory`; `config` is config.json."""

    @abstractmethod
    def numbers(self, step: int, values: dict[str, float], when: float) -> None: ...

    @abstractmethod
    def text(self, step: int, title: str, text: str) -> None: ...

    @abstractmethod
    def media(self, step: int, paths: Sequence[Path]) -> None:
        """Existing image and video files; unsupported ones may be skipped."""

    def checkpoint(self, path: Path, best: bool) -> None:
        """A checkpoint's folder, as an artifact."""
        raise NotImplementedError(f"{self.name} keeps no checkpoints")

    def rewind(self, step: int) -> None:  # noqa: B027 (most services overwrite by step and need not be told)
        """Rows and events after `step` will be sent again."""

    def place(self) -> str:
        return ""

    @abstractmethod
    def close(self, status: dict[str, Any]) -> None:
        """The run has ended as status.json says."""


class Mirror:
    """Queues items from the training thread and sends them from a background thread."""

    def __init__(self, sink: Sink, warn: Callable[[str], None], backlog: Sequence[Item] = ()):
        self.sink = sink
        self.name = sink.name
        self.num_dropped = 0
        self._warn = warn
        self._waiting: deque[Item] = deque()
        self._backlog = deque(backlog)
        self._is_sending = False
        self._news = threading.Condition()
        self._closing = False
        self._error = self._reported = ""
        self._num_failures = 0
        self._given_up = False
        self._thread = threading.Thread(target=self._work, name=f"mirror-{self.name}", daemon=True)
        self._thread.start()

    # ---- training's side ---------------------------------------------------------------------------------------------

    def __call__(self, kind: str, values: dict[str, Any]) -> None:
        with self._news:
            self._waiting.append(Item(kind, dict(values), time.time()))
            if self._given_up or len(self._waiting) > NUM_WAITING:
                self._waiting.popleft()
                self.num_dropped += 1
            self._news.notify()
        self._warn_once()

    def _warn_once(self) -> None:
        """Warn once about a failure of the background thread, from the training thread."""
        if self._error and not self._reported:
            self._reported = self._error
            self._warn(f"mirror {self.name}: {self._reported}; training goes on")

    def close(self, deadline: float) -> None:
        """Wait until `deadline` (time.monotonic) for the queue to be sent, and warn about the rest."""
        with self._news:
            self._closing = True
            self._news.notify()
        self._thread.join(max(deadline - time.monotonic(), 0.0))
        self._warn_once()
        with self._news:
            slow = self._thread.is_alive()
            missing = self.num_dropped + len(self._backlog) + len(self._waiting) + self._is_sending
        if missing:
            why = "gave up" if self._given_up else "it does not answer" if slow else "it was too slow"
            again = f"the run's folder has all: seedbed runs mirror {self.sink.run.name} --to {self.name}"
            self._warn(f"mirror {self.name}: {missing} rows and events were not sent ({why}); {again}")
        elif slow:
            self._warn(f"mirror {self.name}: all was sent, but it has not confirmed the end of the run")

    # ---- its own thread ----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        if not self._tried(lambda: self.sink.open(self.sink.run.config_json())):
            self._give_up()
            return
        while (item := self._next()) is not None:
            if not self._tried(lambda item=item: relay(self.sink, item)):
                with self._news:
                    self.num_dropped += 1
        if not self._given_up:
            self._tried(lambda: self.sink.close(self.sink.run.status()))

    def _next(self) -> Item | None:
        with self._news:
            self._is_sending = False
            while not self._backlog and not self._waiting and not self._closing and not self._given_up:
                self._news.wait()
            found = self._backlog or self._waiting
            self._is_sending = bool(found)
            return found.popleft() if found else None

    def _tried(self, act: Callable[[], None]) -> bool:
        try:
            act()
        except BaseException as error:  # a package may call sys.exit
            self._num_failures += 1
            self._error = self._error or f"{type(error).__name__}: {one_line(str(error))[:200]}"
            if self._num_failures >= MAX_FAILURES:
                self._give_up()
            return False
        self._num_failures = 0
        return True

    def _give_up(self) -> None:
        with self._news:
            self._given_up = True
            self.num_dropped += len(self._backlog) + len(self._waiting)
            self._backlog.clear()
            self._waiting.clear()


def remembered(run: Run) -> dict[str, Any]:
    """mirrors.json: the run's mirrors and their state; empty for most runs."""
    try:
        return next(iter(jsonl.decode([(run.path / MEMORY).read_bytes()])), {})
    except OSError:
        return {}


def relay(sink: Sink, item: Item) -> None:
    """Send an item through the calls that every service has: numbers, text, media, checkpoint."""
    kind, values = item.kind, item.values
    step = _step(values)
    if kind in ("row", "eval", "test"):
        sink.numbers(step, named("train" if kind == "row" else kind, values), item.time)
    elif kind == "sample":
        if values.get("text"):
            sink.text(step, "sample", str(values["text"]))
        paths = [sink.run.path / str(name) for name in values.get("files") or []]
        sink.media(step, [path for path in paths if path.is_file()])
    elif kind == "model":
        sink.text(step, "model", model_text(values))
    elif kind == "checkpoint":
        path = sink.run.path / "checkpoints" / str(values.get("path"))
        # The checkpoint may have been replaced by a newer one in the meantime.
        if sink.checkpoints and path.is_dir():
            sink.checkpoint(path, bool(values.get("best")))
    elif kind == "rewind":
        sink.rewind(step)
    else:
        known = flat(details(values))
        words = [f"{key} {number(value)}" for key, value in known.items() if value not in (None, "", [])]
        sink.text(step, f"event/{kind}", ", ".join(words))


def named(prefix: str, values: dict[str, Any]) -> dict[str, float]:
    """The finite numbers of a row or event without the step, under names such as train/loss."""
    known = {key: value for key, value in values.items() if key not in ("step", "time")}
    return {f"{prefix}/{key.replace('.', '/')}": float(v) for key, v in flat(known).items() if facts.is_number(v)}


def backlog(run: Run) -> list[Item]:
    """The rows and events that a run has written so far, by step. Rows have no time: they get that of the preceding event."""
    found = [("row", row) for row in run.rows()] + [(str(event.get("kind")), event) for event in run.events()]
    out, now = [], 0.0
    for kind, values in sorted(found, key=lambda item: (_step(item[1]), item[0] != "row")):
        now = values["time"] if facts.is_number(values.get("time")) else now
        out.append(Item(kind, values, now or time.time()))
    return out


def _step(values: dict[str, Any]) -> int:
    return int(values["step"]) if facts.is_number(values.get("step")) else 0
