"""Uncommitted changes as one patch: tracked changes and new files, without what is large or looks like a secret."""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from seedbed.track import files, secrets
from seedbed.track.code import git_call, git_output

MAX_PATCH = 2_000_000
MAX_FILE = 500_000


def make(top: Path, has_commit: bool, untracked: Sequence[str]) -> tuple[str, list[str]]:
    """One patch with tracked changes and new files, and the reasons for what is left out of it."""
    wanted, left_out = _select(top, untracked)
    against = "HEAD" if has_commit else (git_output(top, "hash-object", "-t", "tree", "--stdin") or b"").decode().strip()
    with tempfile.TemporaryDirectory() as scratch:
        env = {"GIT_INDEX_FILE": str(Path(scratch) / "index")}
        _copy_index(top, Path(scratch) / "index")
        if wanted:
            listed = "\0".join(wanted).encode(errors="surrogateescape")
            git_output(top, "add", "--intent-to-add", "--pathspec-from-file=-", "--pathspec-file-nul", env=env, stdin=listed)
        plain = ["diff", "--binary", "--no-color", "--no-ext-diff", "--no-textconv", "--no-renames", against]
        text = _git_head(top, *plain, env=env, limit=MAX_PATCH + 1)
    if text is None:
        return "", [*left_out, "everything (git could not make the patch)"]
    if len(text) > MAX_PATCH:
        left_out = [*left_out, f"the end (over {MAX_PATCH:,} bytes)"]
    patch, secret = _without_secrets(text[:MAX_PATCH].decode(errors="surrogateescape"))
    return patch, [*left_out, *secret]


def _copy_index(top: Path, target: Path) -> None:
    # A copy, so that naming new files for the patch leaves the user's index as it is.
    found = git_output(top, "rev-parse", "--git-path", "index")
    index = top / os.fsdecode((found or b"").rstrip(b"\n"))
    if index.is_file():
        shutil.copyfile(index, target)


def _secret_in(path: Path) -> str:
    """The kind of secret that a new file contains, if any; of a symbolic link git stores only its target."""
    if path.is_symlink():
        return ""
    try:
        return secrets.found(files.read_regular(path, MAX_FILE))
    except OSError as error:
        return f"what cannot be read: {error.strerror}"


def _without_secrets(text: str) -> tuple[str, list[str]]:
    """A patch without the files whose name or changed lines look like secrets, and the names of those with the reason."""
    kept, left_out = [], []
    for part in re.split(r"^(?=diff --git )", text, flags=re.M):
        heading = part.partition("\n")[0]
        same = re.fullmatch(r"diff --git \"?a/(.*?)\"? \"?b/\1\"?", heading)
        name = same[1] if same else heading.removeprefix("diff --git ")
        what = "may hold secrets" if same and secrets.named(name) else secrets.found(part.encode(errors="surrogateescape"))
        if part and what:
            left_out.append(f"{name} ({what if what.startswith('may') else f'holds {what}'})")
        else:
            kept.append(part)
    return "".join(kept), left_out


def _select(top: Path, untracked: Iterable[str]) -> tuple[list[str], list[str]]:
    """The new files to include in the patch, and the others with the reason."""
    wanted, left_out, total = [], [], 0
    for name in untracked:
        path = top / name
        size = path.lstat().st_size if os.path.lexists(path) else 0
        if name.endswith("/"):
            left_out.append(f"{name} (a repository of its own)")
        elif secrets.named(name):
            left_out.append(f"{name} (may hold secrets)")
        elif size > MAX_FILE or total + size > MAX_PATCH:
            left_out.append(f"{name} ({size:,} bytes)")
        elif what := _secret_in(path):
            left_out.append(f"{name} (holds {what})")
        else:
            wanted.append(name)
            total += size
    return wanted, left_out


def _git_head(top: Path, *words: str, env: dict[str, str], limit: int) -> bytes | None:
    """The first `limit` bytes that git prints, without holding the rest in memory."""
    command, env = git_call(words, env)
    with subprocess.Popen(command, cwd=top, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        text = process.stdout.read(limit)
        cut = len(text) == limit
        if cut:
            process.kill()
    return text if cut or process.returncode == 0 else None
