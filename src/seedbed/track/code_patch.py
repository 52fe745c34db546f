"""State of a git work tree: commit, branch, and uncommitted changes as one patch of tracked changes and new files.

What is large or looks like a secret is left out.
"""

import fnmatch
import math
import os
import re
import shutil
import subprocess
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePath
from typing import Any

from seedbed.track import files, jsonl
from seedbed.track.run import Run

MAX_PATCH = 2_000_000
MAX_FILE = 500_000
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
    patch, left_out = make(top, commit is not None, untracked) if changed or untracked else ("", [])
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


def make(top: Path, has_commit: bool, untracked: Sequence[str]) -> tuple[str, list[str]]:
    """One patch with tracked changes and new files, and the reasons for what is left out of it."""
    wanted, left_out = _select(top, untracked)
    against = "HEAD" if has_commit else (git_output(top, "hash-object", "-t", "tree", "--stdin") or b"").decode().strip()
    with tempfile.TemporaryDirectory() as scratch:
        env = {"GIT_INDEX_FILE": str(Path(scratch) / "index")}
        # A copy, so that naming new files for the patch leaves the user's index as it is.
        index = top / os.fsdecode((git_output(top, "rev-parse", "--git-path", "index") or b"").rstrip(b"\n"))
        if index.is_file():
            shutil.copyfile(index, env["GIT_INDEX_FILE"])
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


def _secret_in(path: Path) -> str:
    """The kind of secret that a new file contains, if any; of a symbolic link git stores only its target."""
    if path.is_symlink():
        return ""
    try:
        return found(files.read_regular(path, MAX_FILE))
    except OSError as error:
        return f"what cannot be read: {error.strerror}"


def _without_secrets(text: str) -> tuple[str, list[str]]:
    """A patch without the files whose name or changed lines look like secrets, and the names of those with the reason."""
    kept, left_out = [], []
    for part in re.split(r"^(?=diff --git )", text, flags=re.M):
        heading = part.partition("\n")[0]
        same = re.fullmatch(r"diff --git \"?a/(.*?)\"? \"?b/\1\"?", heading)
        name = same[1] if same else heading.removeprefix("diff --git ")
        what = "may hold secrets" if same and named(name) else found(part.encode(errors="surrogateescape"))
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
        elif named(name):
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


def copy_files(paths: Iterable[Path], run: Run) -> None:
    """Copy the files of a user's own recipe into the run folder, except those that contain a secret."""
    for path in paths:
        if what := found(path.read_bytes()):
            run.warn(f"{path.name} holds {what}, so it is not copied into the run folder; read it from the environment instead")
        else:
            shutil.copy2(path, run.path / path.name)
            run.remember(path.name)


# Names of files that may hold secrets, and the forms of known keys and tokens.
_SECRETS = tomllib.loads(Path(__file__).with_name("secrets.toml").read_text())
_KNOWN = {what: re.compile(pattern) for what, pattern in _SECRETS["forms"].items()}
_WORD = r"(?:secret|token|passwd|password|api[_-]?key|access[_-]?key|private[_-]?key|auth|credential)"
# TOKEN=... as shells and .env files write it, and token = "..." as programs do. All repeats are bounded: lines may be long.
_GAP, _MORE = r"[ \t]{0,40}", "[A-Z0-9_]{0,60}"
_ENVIRONMENT = re.compile(rf"^[+ -]?{_GAP}(?:export )?{_MORE}{_WORD.upper()}{_MORE}=([^\s\"'$(<]{{8,500}})$", re.M)
_ASSIGNED = re.compile(
    rf"(?i)(?:^|[^a-z]){_WORD}(?![a-z])[\w-]{{0,60}}[\"']?{_GAP}[:=]{_GAP}[\"']([^\"'\s]{{20,200}})[\"']", re.M
)


def named(path: str) -> bool:
    *folders, name = PurePath(path.lower()).parts or ("",)
    is_source = name.endswith(tuple(_SECRETS["sources"]))
    if is_source and re.fullmatch(_SECRETS["source_names"], name):
        return True
    parts = folders if is_source else [*folders, name]
    return any(fnmatch.fnmatchcase(part, pattern) for part in parts for pattern in _SECRETS["names"])


def found(content: bytes) -> str:
    """The kind of secret that a file contains, without repeating it; empty when there is none."""
    text = content.decode("utf-8", "replace")
    for what, pattern in _KNOWN.items():
        if pattern.search(text):
            return what
    if any(not one[1].isdigit() for one in _ENVIRONMENT.finditer(text)):
        return "a secret in a variable"
    return "a secret in an assignment" if any(_is_random(one[1]) for one in _ASSIGNED.finditer(text)) else ""


def _is_random(value: str) -> bool:
    """Whether a string looks random: hexadecimal, or letters and digits of high entropy."""
    if re.fullmatch(r"[0-9a-fA-F]{32,}", value):
        return len(set(value)) > 6
    if "://" in value or value.startswith(("/", ".", "<", "{", "$")) or (value.count("/") == 1 and len(value) < 60):
        return False
    shares = [count / len(value) for count in Counter(value).values()]
    bits_per_character = -math.fsum(share * math.log2(share) for share in shares)
    return all(re.search(kind, value) for kind in ("[a-z]", "[A-Z]", "[0-9]")) and bits_per_character > 3.6
