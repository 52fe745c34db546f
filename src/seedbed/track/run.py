"""The run folder: config, code state, rows, events and status of one training run, written crash-safely.

Every listing loads this module, so what only new runs need is imported inside functions.
"""

import contextlib
import datetime
import errno
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from seedbed import config as configs
from seedbed.errors import UserError
from seedbed.track import events, files, folders, jsonl
from seedbed.track.text import format_value

# What follows a run while it trains, such as a mirror: gets "row", an event's kind or "rewind", and its values as they are
# written; must neither raise nor block.
Listener = Callable[[str, dict[str, Any]], None]


class Run:
    """One folder under `runs/`. Rows and events are appended to open files; a full disk never stops training."""

    def __init__(self, path: Path):
        self.path = path
        self.name = path.name
        self.warn: Callable[[str], None] = lambda text: print(f"seedbed: warning: {text}", file=sys.stderr)
        self.listeners: list[Listener] = []
        self.wall: Callable[[], dict[str, float]] | None = None  # seconds by kind of work, of the process that trains it
        self.was_removed = False
        self.on_removed: Callable[[], None] = lambda: None
        self.appenders: dict[str, files.Appender] = {}
        self._failing: set[str] = set()
        self.last_step = 0
        self._held: folders.FolderHandle | None = None
        self.kept_files: dict[str, bytes] = {}
        self.new_lock: int | None = None

    @classmethod
    def create(
        cls,
        root: Path,
        recipe: str,
        preset: str,
        config: Any,
        *,
        name: str | None = None,
        why: str = "",
        parent: str | None = None,
        code: dict[str, Any],
        base: Any = None,
        sweep: str | None = None,
    ) -> "Run":
        """Create a run folder atomically. Differences from `base`, the preset's config, are recorded."""
        root = Path(root)
        parent = cls.open(root, parent).name if parent else None
        if name is not None and os.path.lexists(root / folders.check_name(name)):
            raise UserError(f"run {name} exists already; choose another --name NAME, or continue with: seedbed resume {name}")
        now = datetime.datetime.now().astimezone()
        facts = {
            "id": os.urandom(8).hex(),
            "recipe": recipe,
            "preset": preset,
            **described(config, base),
            "parent": parent,
            **({"sweep": sweep} if sweep else {}),
            "why": why,
            "created": now.isoformat(timespec="seconds"),
            "version": code.get("version"),
        }
        try:
            root.mkdir(parents=True, exist_ok=True)
            for leftover in files.leftover_folders(root):
                shutil.rmtree(leftover, ignore_errors=True)
            return cls(_make_folder(root, facts, code, name, now))
        except OSError as error:
            raise UserError(f"the run cannot be created in {root}: {error.strerror or error}") from None

    @classmethod
    def open(cls, root: Path, name: str) -> "Run":
        """Open an existing run by its name or its path."""
        from seedbed.track.run_names import folder_of

        return cls(folder_of(Path(root), name))

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the run for this process; a UserError names the process that holds it."""
        try:
            fd = folders.open_lock(self.path / "lock")
        except OSError as error:
            raise UserError(f"run {self.name} cannot be locked ({error.strerror}); is the folder writable?") from None
        try:
            self._acquire(fd)
            folders.sign(fd)
            for leftover in files.leftover_files(self.path):
                with contextlib.suppress(OSError):
                    leftover.unlink()
            with contextlib.suppress(OSError):
                self._held = folders.FolderHandle(self.path)
            # What is needed to create the folder again, should it be removed.
            self.remember("config.json", "code.json", "code.patch", "mirrors.json", *(p.name for p in self.path.glob("*.py")))
            yield
        finally:
            if self._held is not None:
                self._held.close()
                self._held = None
            if self.new_lock is not None:
                folders.release(self.new_lock)
                self.new_lock = None
            folders.release(fd)

    def remember(self, *names: str) -> None:
        """Keep the content of small files in memory, in case the folder is removed during training."""
        for name in names:
            with contextlib.suppress(OSError):
                self.kept_files[name] = (self.path / name).read_bytes()

    def locate(self) -> Path:
        """The current path of the run's folder, looked up before every write while the run is locked.

        A renamed folder is followed. A removed one is created again under another name, and `on_removed` is called.
        """
        held = self._held
        if held is not None and not held.is_at(self.path):
            from seedbed.track import moved_folder

            self._held = None  # no recursion by the writes that follow
            self._held = moved_folder.follow(self, held)
        return self.path

    def _acquire(self, fd: int) -> None:
        deadline = time.monotonic() + 0.5
        while True:
            try:
                if folders.try_lock(fd):
                    return
            except OSError as error:
                self.warn(f"{self.path} is on a disk without locks ({error.strerror}): train this run from one process only")
                return
            # A listing in another process holds the lock for an instant; a training process keeps it.
            if time.monotonic() > deadline:
                from seedbed.track.lock_holders import holder

                raise UserError(f"run {self.name} is in use by {holder(self.path / 'lock')}; stop that one first or wait for it")
            time.sleep(0.02)

    def is_running(self) -> bool:
        """Whether a live process holds the lock, whatever status.json says."""
        from seedbed.track.lock_holders import is_locked

        return is_locked(self.path / "lock")

    def config_json(self) -> dict[str, Any]:
        """config.json: recipe, preset, config, hash, changes, parent, why, created, version."""
        facts = jsonl.read_object(self.path / "config.json")
        if not isinstance(facts.get("config"), dict) or not all(isinstance(facts.get(k), str) for k in ("recipe", "preset")):
            raise UserError(f"{self.path / 'config.json'} is damaged: it lacks recipe, preset or config")
        is_ours = all(isinstance(facts.get(k) or kind(), kind) for k, kind in _KINDS.items())
        if not is_ours or not _is_history(facts.get("history")):
            raise UserError(f"{self.path / 'config.json'} is damaged: it holds values of another kind than we write")
        return facts

    def origin(self, config: Any) -> dict[str, Any]:
        """What a checkpoint records about its run; empty in a folder that is not a run, such as those of checks."""
        if not (self.path / "config.json").exists():
            return {}
        values = {"hash": configs.digest(config), "config": configs.to_json(config)}
        return {"id": self.config_json().get("id"), "name": self.name, **values}

    def code_json(self) -> dict[str, Any]:
        """code.json: version, git state and environment at the start; empty when it is lost."""
        return self._read_or_empty("code.json")

    def status(self) -> dict[str, Any]:
        """status.json as it was last written; empty when it is lost."""
        return self._read_or_empty("status.json")

    def _read_or_empty(self, name: str) -> dict[str, Any]:
        try:
            return jsonl.read_object(self.path / name)
        except UserError:
            return {}

    def set_status(self, status: str, **facts: Any) -> None:
        """Record running, done, interrupted, failed, stalled, nan or diverged; facts (step, loss ...) add to the earlier ones."""
        self.locate()
        earlier = {key: value for key, value in self.status().items() if key != "error"}
        wall = {"wall": self.wall()} if self.wall else {}
        now = datetime.datetime.now().astimezone()
        values = {**earlier, "status": status, **facts, **wall, "updated": now.isoformat(timespec="seconds")}
        try:
            files.write_atomic(self.path / "status.json", jsonl.pretty(values))
            self._failing.discard("status.json")
        except OSError as error:
            self.warn_once("status.json", error)

    def row(self, values: dict[str, Any]) -> None:
        self.last_step = values.get("step", self.last_step)
        self._append("rows.jsonl", values)
        for listener in self.listeners:
            listener("row", values)

    def event(self, step: int, kind: str, **facts: Any) -> None:
        """Append to events.jsonl. `kind` is one of seedbed.track.events; the first number of an "eval" decides `best`."""
        self.last_step = step
        values = {"step": step, "kind": kind, **facts}
        if events.is_at_least("notice", values):
            values["severity"] = events.severity_of(values)
        values["time"] = round(time.time(), 3)
        self._append("events.jsonl", values)
        for listener in self.listeners:
            listener(kind, values)

    def _append(self, name: str, values: dict[str, Any]) -> None:
        self.locate()
        line = jsonl.encode(values)
        try:
            appender = self.appenders.get(name)
            if appender is None:
                appender = self.appenders[name] = files.Appender(self.path / name)
            appender.write(line)
            self._failing.discard(name)
        except OSError as error:
            self.warn_once(name, error)

    def sync(self) -> None:
        """fsync rows and events, so that a checkpoint never survives a power cut without them."""
        for name, appender in self.appenders.items():
            try:
                appender.sync()
            except OSError as error:
                self.warn_once(name, error)
        with contextlib.suppress(OSError):
            files.sync_folder(self.path)

    def warn_once(self, name: str, error: OSError) -> None:
        """Warn once per series of failed writes instead of raising: training can continue without them."""
        if name not in self._failing:
            self._failing.add(name)
            reason = error.strerror or error
            self.warn(f"{self.path / name} cannot be written ({reason}); training goes on, lines may be lost")

    def rows(self) -> list[dict[str, Any]]:
        return jsonl.read(self.path / "rows.jsonl")

    def events(self) -> list[dict[str, Any]]:
        return jsonl.read(self.path / "events.jsonl")

    def close(self) -> None:
        """Close the open files; the next row opens them again."""
        for appender in self.appenders.values():
            appender.close()
        self.appenders.clear()

    def checkpoints(self) -> tuple[list[str], str | None]:
        """Names of the checkpoint folders, oldest first, and the one that `best` points at."""
        found, best = folders.step_names(self.path / "checkpoints"), None
        with contextlib.suppress(OSError):
            best = os.readlink(self.path / "checkpoints" / "best")
        return found, best if best in found else None

    def title(self) -> str:
        """Recipe, preset, hash of the config and version, in a line."""
        facts = self.config_json()
        return f"{full_name(facts['recipe'], facts['preset'])}, config {facts.get('hash')}, seedbed {facts.get('version')}"

    def command(self, changes: dict[str, Any] | None = None) -> str:
        """The commands that repeat this run, with stops where settings were changed; `changes` are against another preset."""
        facts = self.config_json()
        history = facts.get("history") or []
        begun = dict((facts.get("changes") or {}) if changes is None else changes)
        for past in reversed(history):
            begun |= {key: old for key, (old, _) in past["changed"].items()}
        outcomes = [event.get("outcome") for event in self.events() if event.get("kind") == "preflight"]
        flags = ["--dirty"] * (self.code_json().get("dirty") is True) + ["--no-check"] * ("skipped" in outcomes)
        flags += ["--force"] * ("forced" in outcomes)
        commands = [["seedbed", "train", full_name(facts["recipe"], facts["preset"]), *flags, *_words(begun)]]
        for past in history:
            commands[0] += ["--name", f"{self.name}-again"] * (past is history[0])
            commands[-1] += ["--until", str(past["step"])]
            changed = {key: new for key, (_, new) in past["changed"].items()}
            commands.append(["seedbed", "resume", f"{self.name}-again", *_words(changed)])
        return " && ".join(map(shlex.join, commands))


# Types of the optional parts of config.json.
_KINDS = {"id": str, "hash": str, "changes": dict, "parent": str, "why": str, "created": str, "sweep": str, "accepted": list}


def _is_history(value: Any) -> bool:
    """Whether this is a valid history of changes: steps, and old and new values by key."""
    return value is None or (
        isinstance(value, list)
        and all(isinstance(past, dict) and type(past.get("step")) is int for past in value)
        and all(isinstance(past.get("changed"), dict) for past in value)
        and all(isinstance(pair, list) and len(pair) == 2 for past in value for pair in past["changed"].values())
    )


def full_name(recipe: str, preset: str) -> str:
    """How a recipe and its preset are written on the command line: gpt/demo, or path/to/file.py:preset."""
    if not recipe.endswith(".py"):
        return f"{recipe}/{preset}"
    return f"{min(recipe, os.path.relpath(recipe), key=len)}:{preset}"


def _words(values: dict[str, Any]) -> list[str]:
    return [f"{key}={format_value(value)}" for key, value in values.items()]


def described(config: Any, base: Any) -> dict[str, Any]:
    """The parts of config.json derived from the values; `changes` are those that differ from the preset."""
    new = configs.to_json(config)
    changes = configs.diff(configs.flat(configs.to_json(base)), configs.flat(new)) if base is not None else {}
    return {"config": new, "hash": configs.digest(config), "changes": {key: now for key, (_, now) in changes.items()}}


def _make_folder(root: Path, facts: dict[str, Any], code: dict[str, Any], name: str | None, now: datetime.datetime) -> Path:
    """The folder of a new run, which gets its name once all is written."""
    from seedbed.track.code import keep

    aside = root / f".new-{os.getpid()}-{time.monotonic_ns()}.tmp"
    aside.mkdir()
    try:
        (aside / "samples").mkdir()
        (aside / "checkpoints").mkdir()
        files.write_synced(aside / "config.json", jsonl.pretty(facts))
        keep(code, aside)
        files.sync_folder(aside)
        while True:
            path = root / (name or folders.new_name(facts["recipe"], now, set(os.listdir(root))))
            try:
                # Renaming a folder onto one that holds something fails, so two processes cannot share a name.
                files.replace(aside, path)
                files.sync_folder(root)
                return path
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
                if name is not None:
                    raise UserError(f"run {name} exists already; choose another --name NAME") from None
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
