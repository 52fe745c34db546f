"""The run folder: everything one training run leaves behind, in open files that a crash cannot half-write.

Every listing loads this module, so what only a new run needs is imported where it is used.
"""

import contextlib
import datetime
import errno
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from seedbed.errors import UserError
from seedbed.track import files, lines, locks, names
from seedbed.track.text import spell


class Listener(Protocol):
    """Hears what is written to a run, as it is written; must neither raise nor wait."""

    def row(self, values: dict[str, Any]) -> None: ...
    def event(self, values: dict[str, Any]) -> None: ...
    def rewind(self, step: int) -> None: ...


class Run:
    """One folder under `runs/`. Rows and events are appended to open files; a full disk never stops training."""

    def __init__(self, path: Path):
        self.path = path
        self.name = path.name
        self.warn = _warn
        self.listeners: list[Listener] = []
        self._appenders: dict[str, files.Appender] = {}
        self._troubled: set[str] = set()

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
        """A new run folder, complete or not there at all. `base` is the preset's own config: the changes are recorded."""
        root = Path(root)
        parent = cls.open(root, parent).name if parent else None
        if name is not None and os.path.lexists(root / names.check_name(name)):
            raise UserError(f"run {name} exists already; choose another --run NAME, or go on with: seedbed resume {name}")
        now = datetime.datetime.now().astimezone()
        facts = {
            "recipe": recipe,
            "preset": preset,
            **_described(config, base),
            "parent": parent,
            **({"sweep": sweep} if sweep else {}),
            "why": why,
            "created": now.isoformat(timespec="seconds"),
            "version": code.get("version"),
        }
        try:
            root.mkdir(parents=True, exist_ok=True)
            aside = _build_aside(root, facts, code)
            return cls(_give_name(aside, root, name, recipe, now))
        except OSError as error:
            raise UserError(f"the run cannot be created in {root}: {error.strerror or error}") from None

    @classmethod
    def open(cls, root: Path, name: str) -> "Run":
        """An existing run by its name, or by its path as the shell completes it."""
        root = Path(root)
        typed = Path(name)
        if len(typed.parts) > 1 and typed.parent.resolve() == root.resolve():
            name = typed.name
        path = root / name
        if name and Path(name).name == name and not name.startswith(".") and path.is_dir():
            return cls(path)
        import difflib

        known = run_names(root)
        if not known:
            raise UserError(f"there is no run {name!r}: {root} holds no runs yet; start one with: seedbed train RECIPE/PRESET")
        near = difflib.get_close_matches(name, known, 3, 0.4) or [n for n in known if name and name in n][-3:] or known[-3:]
        raise UserError(f"there is no run {name!r} in {root}; nearest: {', '.join(near)}")

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run for this process; a UserError names the process that has it. The system frees it when we die."""
        try:
            fd = locks.open_lock(self.path / "lock")
        except OSError as error:
            raise UserError(f"run {self.name} cannot be locked ({error.strerror}); is the folder writable?") from None
        try:
            self._acquire(fd)
            locks.sign(fd, _now())
            for leftover in files.leftovers(self.path, older_than=0):
                leftover.unlink(missing_ok=True)
            yield
        finally:
            locks.release(fd)

    def _acquire(self, fd: int) -> None:
        deadline = time.monotonic() + 0.5
        while True:
            try:
                if locks.try_lock(fd):
                    return
            except OSError as error:
                self.warn(f"{self.path} is on a disk without locks ({error.strerror}): train this run from one process only")
                return
            # A listing in another process touches the lock for an instant; a training process keeps it.
            if time.monotonic() > deadline:
                raise UserError(self._holder())
            time.sleep(0.02)

    def _holder(self) -> str:
        try:
            facts = json.loads((self.path / "lock").read_bytes())
            who = f"process {facts['pid']} on {facts['host']} since {facts['since']}"
        except (OSError, ValueError, KeyError, TypeError):
            who = "another process"
        return f"run {self.name} is in use by {who}; stop that one first or wait for it"

    def is_running(self) -> bool:
        """Whether a live process holds the lock; what status.json says does not matter."""
        return locks.is_locked(self.path / "lock")

    def config_json(self) -> dict[str, Any]:
        """config.json: recipe, preset, config, hash, changes, parent, why, created, version."""
        facts = lines.read_object(self.path / "config.json")
        if not isinstance(facts.get("config"), dict) or not all(isinstance(facts.get(k), str) for k in ("recipe", "preset")):
            raise UserError(f"{self.path / 'config.json'} is damaged: it lacks recipe, preset or config")
        return facts

    def change_config(self, config: Any, base: Any = None) -> None:
        """Let config.json say what the run trains with from now on; without `base`, changes add to those it tells of."""
        facts = self.config_json()
        new = {**facts, **_described(config, base)}
        if base is None:
            from seedbed.config import diff

            since = {key: now for key, (_, now) in diff(flat(facts["config"]), flat(new["config"])).items()}
            new["changes"] = {**(facts.get("changes") or {}), **since}
        if new != facts:
            files.write_atomic(self.path / "config.json", lines.pretty(new))

    def code_json(self) -> dict[str, Any]:
        """code.json: version, git state and environment at the start; empty when it is lost."""
        try:
            return lines.read_object(self.path / "code.json")
        except UserError:
            return {}

    def status(self) -> dict[str, Any]:
        """status.json as it was last written; empty when it is lost."""
        try:
            return lines.read_object(self.path / "status.json")
        except UserError:
            return {}

    def set_status(self, status: str, **facts: Any) -> None:
        """Record running, done, interrupted, failed, stalled, nan or diverged; facts (step, loss ...) add to the earlier ones."""
        earlier = {key: value for key, value in self.status().items() if key != "error"}
        values = {**earlier, "status": status, **facts, "updated": _now()}
        try:
            files.write_atomic(self.path / "status.json", lines.pretty(values))
            self._troubled.discard("status.json")
        except OSError as error:
            self._tolerate("status.json", error)

    def row(self, values: dict[str, Any]) -> None:
        """Append one log point to rows.jsonl."""
        self._append("rows.jsonl", values)
        for listener in self.listeners:
            listener.row(values)

    def event(self, step: int, kind: str, **facts: Any) -> None:
        """Append to events.jsonl. The first number of an "eval" event is the one that decides `best`."""
        values = {"step": step, "kind": kind, **facts, "time": round(time.time(), 3)}
        self._append("events.jsonl", values)
        for listener in self.listeners:
            listener.event(values)

    def _append(self, name: str, values: dict[str, Any]) -> None:
        line = lines.encode(values)
        try:
            appender = self._appenders.get(name)
            if appender is None:
                appender = self._appenders[name] = files.Appender(self.path / name)
            appender.write(line)
            self._troubled.discard(name)
        except OSError as error:
            self._tolerate(name, error)

    def sync(self) -> None:
        """Rows and events survive a power cut from here on: a checkpoint must not outlive the story that led to it."""
        for name, appender in self._appenders.items():
            try:
                appender.sync()
            except OSError as error:
                self._tolerate(name, error)
        with contextlib.suppress(OSError):
            files.sync_folder(self.path)

    def _tolerate(self, name: str, error: OSError) -> None:
        """Training can do without this write: the first failure of a series warns, and nothing is raised."""
        if name not in self._troubled:
            self._troubled.add(name)
            reason = error.strerror or error
            self.warn(f"{self.path / name} cannot be written ({reason}); training goes on, lines may be lost")

    def rows(self) -> list[dict[str, Any]]:
        return lines.read(self.path / "rows.jsonl")

    def events(self) -> list[dict[str, Any]]:
        return lines.read(self.path / "events.jsonl")

    def rewind(self, step: int, *, events: bool = True) -> None:
        """Forget rows (and events) after `step`, and any half-written tail: training will write them again."""
        self.close()
        for name in ("rows.jsonl", "events.jsonl") if events else ("rows.jsonl",):
            path = self.path / name
            old = path.read_bytes() if path.exists() else b""
            kept = b"".join(line + b"\n" for line in old.split(b"\n") if _is_upto(line, step))
            if kept != old:
                files.write_atomic(path, kept)
        for listener in self.listeners:
            listener.rewind(step)

    def close(self) -> None:
        """Close the open files; the next row opens them again."""
        for appender in self._appenders.values():
            appender.close()
        self._appenders.clear()

    def checkpoints(self) -> tuple[list[str], str | None]:
        """Names of the checkpoint folders, oldest first, and the one that `best` points at."""
        folder = self.path / "checkpoints"
        try:
            found = sorted(e.name for e in os.scandir(folder) if e.name.startswith("step-") and e.is_dir(follow_symlinks=False))
        except OSError:
            return [], None
        try:
            best = os.readlink(folder / "best")
        except OSError:
            return found, None
        return found, best if best in found else None

    def title(self) -> str:
        """Recipe, preset, hash of the config and version, in a line."""
        facts = self.config_json()
        return f"{full_name(facts['recipe'], facts['preset'])}, config {facts.get('hash')}, seedbed {facts.get('version')}"

    def command(self) -> str:
        """What to type to train this run again."""
        import shlex

        facts = self.config_json()
        changes = facts.get("changes") or {}
        words = [f"{key}={spell(value)}" for key, value in changes.items()]
        return shlex.join(["seedbed", "train", full_name(facts["recipe"], facts["preset"]), *words])


def run_names(root: Path) -> list[str]:
    """Every folder that is or was meant to be a run, in order of name."""
    try:
        with os.scandir(root) as entries:
            return sorted(e.name for e in entries if not e.name.startswith(".") and e.is_dir())
    except OSError:
        return []


def full_name(recipe: str, preset: str) -> str:
    """How a recipe and its preset are typed: gpt/demo, or path/to/file.py:preset, relative where that is shorter."""
    if not recipe.endswith(".py"):
        return f"{recipe}/{preset}"
    return f"{min(recipe, os.path.relpath(recipe), key=len)}:{preset}"


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key to value for a config as it is saved."""
    found = {}
    for key, value in values.items():
        found.update(flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return found


def _described(config: Any, base: Any) -> dict[str, Any]:
    """The parts of config.json that follow from the values; `changes` are those that differ from the preset's."""
    from seedbed import config as configs

    new = configs.to_json(config)
    changes = configs.diff(flat(configs.to_json(base)), flat(new)) if base is not None else {}
    return {"config": new, "hash": configs.digest(config), "changes": {key: now for key, (_, now) in changes.items()}}


def _build_aside(root: Path, facts: dict[str, Any], code: dict[str, Any]) -> Path:
    import shutil

    from seedbed.track.code import keep

    for leftover in files.leftovers(root):
        shutil.rmtree(leftover, ignore_errors=True)
    aside = root / f".new-{os.getpid()}-{time.monotonic_ns()}.tmp"
    aside.mkdir()
    try:
        (aside / "samples").mkdir()
        (aside / "checkpoints").mkdir()
        files.write_synced(aside / "config.json", lines.pretty(facts))
        keep(code, aside)
        files.sync_folder(aside)
    except OSError:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return aside


def _give_name(aside: Path, root: Path, name: str | None, recipe: str, now: datetime.datetime) -> Path:
    try:
        while True:
            path = root / (name or names.new_name(recipe, now, set(os.listdir(root))))
            try:
                # Renaming a folder onto one that holds something fails, so two processes cannot share a name.
                files.replace(aside, path)
                files.sync_folder(root)
                return path
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
                if name is not None:
                    raise UserError(f"run {name} exists already; choose another --run NAME") from None
    except BaseException:
        import shutil

        shutil.rmtree(aside, ignore_errors=True)
        raise


def _is_upto(line: bytes, step: int) -> bool:
    found = lines.decode([line])
    at = found[0].get("step") if found else None
    return bool(found) and not (isinstance(at, int | float) and at > step)


def _now() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


def _warn(text: str) -> None:
    print(f"seedbed: warning: {text}", file=sys.stderr)
