"""State of a git work tree: commit, branch, changed and untracked files, and a patch of them."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seedbed.track import jsonl

MAX_NAMES = 200
_CHANGES = ("dirty", "changed", "untracked", "patch_left_out")


def git_state(folder: Path, own: Sequence[Path]) -> dict[str, Any]:
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


def kept_state(folder: Path) -> dict[str, Any]:
    """The parts of a saved state that describe the code and not the machine."""
    facts = jsonl.read_object(folder / "code.json")
    patch = folder / "code.patch"
    text = patch.read_bytes().decode(errors="surrogateescape") if patch.is_file() else ""
    found = {key: facts[key] for key in ("commit", "branch", *_CHANGES) if key in facts}
    return {**found, "patch": text} if "dirty" in found else found
