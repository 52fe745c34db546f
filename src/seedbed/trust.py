"""Trusted code files of this user on this machine: those used for training or confirmed with --trust.

A run folder names code; only this store, in the user's own state folder, says whether it may be executed.
"""

import ast
import datetime
import hashlib
import importlib.util
import json
import os
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.machinery import PathFinder, all_suffixes
from pathlib import Path

from seedbed.errors import UserError
from seedbed.track import files

# Hashes trusted in this process and its children, separated by commas.
VARIABLE = "SEEDBED_TRUST"
MAX_STORE = 64 << 20
MAX_FILES, MAX_BYTES = 2000, 64 << 20


@dataclass(frozen=True)
class Code:
    """A Python file to execute, with the modules in its folder that it imports."""

    path: Path  # with links resolved
    sha256: str  # of the file if it is the only one, as sha256sum prints it; otherwise of the list of all files
    contents: dict[Path, bytes] = field(repr=False)  # by absolute path, the file itself first
    whole: bool = True  # False when there are more modules than are read

    def __str__(self) -> str:
        return f"{self.path} (sha256 {self.sha256})"


def inspect(path: Path, source: Path | None = None) -> Code:
    """Read a Python file and the modules it imports from its folder, executing none; `source` is a copy to read instead."""
    if "\0" in str(path):
        raise UserError(f"recipe file {str(path)!r} cannot be read: no name of a file")
    source = Path(os.path.realpath(source or path))
    contents = {source: _read(source)}
    whole = _add_siblings(source.parent, contents)
    return Code(Path(os.path.realpath(path)), _digest(source.parent, contents), contents, whole)


def inspect_module(name: str) -> Code:
    """The file of an importable module by its dotted name, without executing it or its packages."""
    first, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(first)  # nothing is imported for a name without dots
    except (ImportError, ValueError):
        spec = None
    for depth, part in enumerate(rest, 2):
        places = spec.submodule_search_locations if spec else None
        spec = PathFinder.find_spec(".".join([first, *rest][:depth]), places) if part and places else None
    if spec is None or not spec.origin or not Path(spec.origin).is_file():
        raise UserError(f"there is no module {name}, which a setting names; is it installed, or on PYTHONPATH?")
    path = Path(spec.origin).resolve()
    contents = {path: _read(path)}
    return Code(path, _digest(path.parent, contents), contents)


def record(code: Code, how: str) -> None:
    """Record that the user trained from this code or confirmed it."""
    if is_trusted(code) or not code.whole:
        return
    line = {"path": str(code.path), "sha256": code.sha256, "how": how, "when": _now()}
    try:
        _append(json.dumps(line).encode() + b"\n")
    except OSError as error:
        # Trusted at least in this process and its children.
        os.environ[VARIABLE] = ",".join(filter(None, (os.environ.get(VARIABLE), code.sha256)))
        text = f"{store()} cannot be written ({error.strerror}): later commands will ask for --trust to use {code.path}"
        print(f"seedbed: warning: {text}", file=sys.stderr)


def is_trusted(code: Code) -> bool:
    """Whether exactly these files were trained from or confirmed by this user on this machine."""
    if not code.whole:
        return False
    if code.sha256 in os.environ.get(VARIABLE, "").split(","):
        return True
    return (str(code.path), code.sha256) in _known()


def require(code: Code, folder: Path, example: str) -> None:
    """Refuse to execute code that only a run folder names."""
    if is_trusted(code):
        return
    if not code.whole:
        raise UserError(f"{folder} would execute {code.path}, which imports too many files beside it; move it elsewhere")
    raise UserError(
        f"{folder} would execute {code}, which was neither trained nor confirmed on this machine; "
        f"if you have read and trust it, add --trust: {example}"
    )


def store() -> Path:
    """The file of trusted hashes; SEEDBED_STATE names another folder for it."""
    own = os.environ.get("SEEDBED_STATE")
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(own) / "trusted.jsonl" if own else Path(base) / "seedbed" / "trusted.jsonl"


def _known() -> set[tuple[str, str]]:
    path = store()
    try:
        content = files.read_regular(path, MAX_STORE)
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return set()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); it lists the recipe files that you trust") from None
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UserError(f"{path} can be written by others, so nothing in it can be trusted; make it yours: chmod 600 {path}")
    return set(_entries(content))


def _entries(content: bytes) -> Iterator[tuple[str, str]]:
    for line in content.split(b"\n"):
        try:
            found = json.loads(line)
            yield found["path"], found["sha256"]
        except (ValueError, KeyError, TypeError, RecursionError):
            continue  # truncated by a crash


def _append(line: bytes) -> None:
    path = store()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        size = os.fstat(fd).st_size
        torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        # One append per record: lines of two processes cannot mix.
        files.write(fd, b"\n" * torn + line)
        files.fsync(fd)
    finally:
        os.close(fd)


def _read(path: Path) -> bytes:
    try:
        return files.read_regular(path, MAX_BYTES)
    except OSError as error:
        raise UserError(f"recipe file {path} cannot be read: {error.strerror}") from None


def _digest(home: Path, contents: dict[Path, bytes]) -> str:
    each = {os.path.relpath(path, home): hashlib.sha256(content).hexdigest() for path, content in contents.items()}
    if len(each) == 1:
        return next(iter(each.values()))
    listed = "".join(f"{digest}  {name}\n" for name, digest in sorted(each.items()))
    return hashlib.sha256(listed.encode(errors="surrogateescape")).hexdigest()


def _add_siblings(home: Path, contents: dict[Path, bytes]) -> bool:
    """Read all modules in `home` that these files import, recursively; False when there are too many."""
    waiting, names, seen, total = list(contents), set(sys.stdlib_module_names) | {"seedbed"}, set(contents), 0
    while waiting:
        for name in _imported(contents[waiting.pop()]) - names:
            names.add(name)
            for path in _module_files(home, name):
                if path in seen:
                    continue
                seen.add(path)
                contents[path] = _read(path)
                total += len(contents[path])
                if len(contents) > MAX_FILES or total > MAX_BYTES:
                    return False
                waiting.append(path)
    return True


def _imported(content: bytes) -> set[str]:
    """Top-level names of all imports in a source."""
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()  # not executable either, or no source
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found.add(node.module.partition(".")[0])
    return found


def _module_files(home: Path, name: str) -> Iterator[Path]:
    for suffix in all_suffixes():
        if (home / f"{name}{suffix}").is_file():
            yield home / f"{name}{suffix}"
    seen = set()
    for folder, inside, found in os.walk(home / name, followlinks=True):
        here = os.path.realpath(folder)
        if here in seen:
            inside.clear()
            continue
        seen.add(here)
        inside[:] = [one for one in inside if one != "__pycache__"]
        yield from (Path(folder, one) for one in found if one.endswith(tuple(all_suffixes())) and Path(folder, one).is_file())


def _now() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")
