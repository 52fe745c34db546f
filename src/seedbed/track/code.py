"""Source state of a run: commit, branch, uncommitted changes as a patch, and installed versions."""

import hashlib
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seedbed.errors import UserError
from seedbed.track import files, jsonl

MAX_NAMES = 200
_CHANGES = ("dirty", "changed", "untracked", "patch_left_out")
_PACKAGES = ("torch", "numpy", "safetensors", "tokenizers")


def version() -> str:
    """The installed version of this package."""
    return _version_of("seedbed") or "0+source"


def source_digest() -> str:
    """Hash of this package's source files; an edited work tree has the same version but another hash."""
    found, top = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(top.rglob("*.py")):
        found.update(str(path.relative_to(top)).encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()[:16]


def state(folder: Path, root: Path | None = None) -> dict[str, Any]:
    """Everything code.json and code.patch hold. The runs folder `root` and its journal do not count as changes."""
    kept = os.environ.get("SEEDBED_CODE")  # a cluster job runs a copy of the code; the work tree may have changed since
    return {
        "version": version(),
        **(_kept_state(Path(kept)) if kept else _git_state(Path(folder), _own_files(root))),
        "python": platform.python_version(),
        "packages": {name: found for name in _PACKAGES if (found := _version_of(name))},
        "source": source_digest(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "hostname": platform.node(),
        "num_cores": os.cpu_count(),
    }


def require_clean(facts: dict[str, Any], dirty: bool) -> None:
    """Refuse to train from uncommitted code that cannot be recovered, unless `--dirty` is given."""
    if facts.get("dirty") and not dirty:
        changed = [*facts["changed"], *facts["untracked"]]
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise UserError(
            f"the git work tree has uncommitted changes: {', '.join(changed[:3])}{more}\n"
            "commit them, or add --dirty (the changes are saved with the run either way)"
        )


def left_out(facts: dict[str, Any]) -> str:
    """A line on what the patch of a run does not hold; empty when it holds everything."""
    names = facts.get("patch_left_out") or []
    more = f" and {len(names) - 5} more, see code.json" if len(names) > 5 else ""
    return f"left out of code.patch: {', '.join(names[:5])}{more}" if names else ""


def describe(facts: dict[str, Any]) -> str:
    """The code state in a few words, such as `commit 1a2b3c4d5e (main) + code.patch`."""
    if not facts.get("commit"):
        return "no commit yet + code.patch" if "dirty" in facts else "not in a git work tree"
    branch = f" ({facts['branch']})" if facts.get("branch") else ""
    return f"commit {facts['commit'][:10]}{branch}" + (" + code.patch" if facts.get("dirty") else "")


def keep(facts: dict[str, Any], folder: Path) -> None:
    """Write a code state into a folder, next to the copy of the code that will run."""
    files.write_synced(folder / "code.json", jsonl.pretty({k: v for k, v in facts.items() if k != "patch"}))
    if facts.get("patch"):
        files.write_synced(folder / "code.patch", facts["patch"].encode(errors="surrogateescape"))


def _kept_state(folder: Path) -> dict[str, Any]:
    """The parts of a saved state that describe the code and not the machine."""
    facts = jsonl.read_object(folder / "code.json")
    patch = folder / "code.patch"
    text = patch.read_bytes().decode(errors="surrogateescape") if patch.is_file() else ""
    found = {key: facts[key] for key in ("commit", "branch", *_CHANGES) if key in facts}
    return {**found, "patch": text} if "dirty" in found else found


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _own_files(root: Path | None) -> list[Path]:
    return [Path(root).resolve(), Path(root).resolve().parent / "JOURNAL.md"] if root else []


def git_call(words: Sequence[str], env: dict[str, str] | None) -> tuple[list[str], dict[str, str]]:
    options = ["-c", "core.fsmonitor=false", "-c", "core.quotepath=off", "--literal-pathspecs"]
    quiet = {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    return ["git", *options, *words], {**os.environ, **quiet, **(env or {})}


def git_output(top: Path, *words: str, env: dict[str, str] | None = None, stdin: bytes = b"") -> bytes | None:
    """Output of git; None when git is missing, fails or times out."""
    command, env = git_call(words, env)
    try:
        done = subprocess.run(command, cwd=top, env=env, input=stdin, capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout


def _git_state(folder: Path, own: Sequence[Path]) -> dict[str, Any]:
    where = git_output(folder, "rev-parse", "--show-toplevel")
    if where is None:
        return {"commit": None, "branch": None}
    top = Path(os.fsdecode(where.rstrip(b"\n")))
    commit = git_output(top, "rev-parse", "--verify", "--quiet", "HEAD")
    branch = git_output(top, "symbolic-ref", "--short", "--quiet", "HEAD")
    changed, untracked = _changes(top, own)
    patch, left_out = "", []
    if changed or untracked:
        from seedbed.track import code_patch

        patch, left_out = code_patch.make(top, commit is not None, untracked)
    return {
        "commit": commit.decode().strip() if commit else None,
        "branch": branch.decode(errors="replace").strip() if branch else None,
        "dirty": bool(changed or untracked),
        "changed": changed[:MAX_NAMES],
        "untracked": untracked[:MAX_NAMES],
        "patch_left_out": left_out,
        "patch": patch,
    }


def _changes(top: Path, own: Sequence[Path]) -> tuple[list[str], list[str]]:
    """Paths changed since the commit (staged or not), and untracked paths, without the runs' own files."""
    listed = git_output(top, "status", "--porcelain=v1", "-z", "--untracked-files=all", "--no-renames") or b""
    changed, untracked = [], []
    for entry in filter(None, listed.split(b"\0")):
        mark, name = entry[:2], os.fsdecode(entry[3:])
        path = top.resolve() / name
        if not any(path == mine or mine in path.parents for mine in own):
            (untracked if mark == b"??" else changed).append(name)
    return changed, untracked
