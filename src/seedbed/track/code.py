"""The code a run was made with: commit, branch, uncommitted changes as a patch, and the versions it ran on."""

import fnmatch
import importlib.metadata
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from seedbed.errors import UserError
from seedbed.track import files, lines

MAX_PATCH = 2_000_000
MAX_FILE = 500_000
MAX_NAMES = 200
_CHANGES = ("dirty", "changed", "untracked", "patch_left_out")
_PACKAGES = ("torch", "numpy", "safetensors", "tokenizers")

# Never copied into a run folder, which people share: untracked files that tend to hold passwords.
_SECRET = (
    ".env",
    ".env.*",
    "*.pem",
    "*.key",
    "id_rsa*",
    "id_ed25519*",
    "*credential*",
    "*secret*",
    ".netrc",
    ".npmrc",
    ".pypirc",
)


def version() -> str:
    """The installed version of this package."""
    return _version_of("seedbed") or "0+source"


def state(folder: Path, root: Path | None = None) -> dict[str, Any]:
    """Everything code.json and code.patch hold. The runs folder `root` and its journal do not count as changes."""
    kept = os.environ.get("SEEDBED_CODE")  # a job of a cluster runs a copy of the code, whatever became of the work tree
    return {
        "version": version(),
        **(_kept_state(Path(kept)) if kept else _git_state(Path(folder), _own_files(root))),
        "python": platform.python_version(),
        "packages": {name: found for name in _PACKAGES if (found := _version_of(name))},
        "platform": platform.platform(),
        "machine": platform.machine(),
        "hostname": platform.node(),
        "num_cores": os.cpu_count(),
    }


def require_clean(facts: dict[str, Any], dirty: bool) -> None:
    """Stop before training on code that nobody can find again, unless `--dirty` says it is meant."""
    if facts.get("dirty") and not dirty:
        changed = [*facts["changed"], *facts["untracked"]]
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        raise UserError(
            f"the git work tree has uncommitted changes: {', '.join(changed[:3])}{more}\n"
            "commit them, or add --dirty (the changes are saved with the run either way)"
        )


def describe(facts: dict[str, Any]) -> str:
    """The code state in a few words, such as `commit 1a2b3c4d5e (main) + code.patch`."""
    if not facts.get("commit"):
        return "no commit yet + code.patch" if "dirty" in facts else "not in a git work tree"
    branch = f" ({facts['branch']})" if facts.get("branch") else ""
    return f"commit {facts['commit'][:10]}{branch}" + (" + code.patch" if facts.get("dirty") else "")


def keep(facts: dict[str, Any], folder: Path) -> None:
    """Write a state into a folder, for whoever runs the copy of the code that lies there."""
    files.write_synced(folder / "code.json", lines.pretty({k: v for k, v in facts.items() if k != "patch"}))
    if facts.get("patch"):
        files.write_synced(folder / "code.patch", facts["patch"].encode(errors="surrogateescape"))


def _kept_state(folder: Path) -> dict[str, Any]:
    """What of a kept state belongs to the code and not to the machine."""
    facts = lines.read_object(folder / "code.json")
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


def _git_call(words: Sequence[str], env: dict[str, str] | None) -> tuple[list[str], dict[str, str]]:
    options = ["-c", "core.fsmonitor=false", "-c", "core.quotepath=off", "--literal-pathspecs"]
    quiet = {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    return ["git", *options, *words], {**os.environ, **quiet, **(env or {})}


def _git(top: Path, *words: str, env: dict[str, str] | None = None, stdin: bytes = b"") -> bytes | None:
    """What git prints; None when git is missing, refuses or hangs."""
    command, env = _git_call(words, env)
    try:
        done = subprocess.run(command, cwd=top, env=env, input=stdin, capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return None if done.returncode else done.stdout


def _git_start(top: Path, *words: str, env: dict[str, str], limit: int) -> bytes | None:
    """The first `limit` bytes that git prints, without holding the rest in memory."""
    command, env = _git_call(words, env)
    with subprocess.Popen(command, cwd=top, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        text = process.stdout.read(limit)
        cut = len(text) == limit
        if cut:
            process.kill()
    return text if cut or process.returncode == 0 else None


def _git_state(folder: Path, own: Sequence[Path]) -> dict[str, Any]:
    where = _git(folder, "rev-parse", "--show-toplevel")
    if where is None:
        return {"commit": None, "branch": None}
    top = Path(os.fsdecode(where.rstrip(b"\n")))
    commit = _git(top, "rev-parse", "--verify", "--quiet", "HEAD")
    branch = _git(top, "symbolic-ref", "--short", "--quiet", "HEAD")
    changed, untracked = _changes(top, own)
    patch, left_out = _patch(top, commit is not None, untracked) if changed or untracked else ("", [])
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
    """Paths changed since the commit (staged or not), and paths git does not know, the run's own files left aside."""
    listed = _git(top, "status", "--porcelain=v1", "-z", "--untracked-files=all", "--no-renames") or b""
    changed, untracked = [], []
    for entry in filter(None, listed.split(b"\0")):
        mark, name = entry[:2], os.fsdecode(entry[3:])
        path = top.resolve() / name
        if not any(path == mine or mine in path.parents for mine in own):
            (untracked if mark == b"??" else changed).append(name)
    return changed, untracked


def _patch(top: Path, born: bool, untracked: Sequence[str]) -> tuple[str, list[str]]:
    """One patch with tracked changes and new files, and the reasons why something is missing from it."""
    wanted, left_out = _select(top, untracked)
    against = "HEAD" if born else (_git(top, "hash-object", "-t", "tree", "--stdin") or b"").decode().strip()
    with tempfile.TemporaryDirectory() as scratch:
        env = {"GIT_INDEX_FILE": str(Path(scratch) / "index")}
        _copy_index(top, Path(scratch) / "index")
        if wanted:
            listed = "\0".join(wanted).encode(errors="surrogateescape")
            _git(top, "add", "--intent-to-add", "--pathspec-from-file=-", "--pathspec-file-nul", env=env, stdin=listed)
        plain = ["diff", "--binary", "--no-color", "--no-ext-diff", "--no-textconv", "--no-renames", against]
        text = _git_start(top, *plain, env=env, limit=MAX_PATCH + 1)
    if text is None:
        return "", [*left_out, "everything (git could not make the patch)"]
    if len(text) > MAX_PATCH:
        return text[:MAX_PATCH].decode(errors="surrogateescape"), [*left_out, f"the end (over {MAX_PATCH:,} bytes)"]
    return text.decode(errors="surrogateescape"), left_out


def _copy_index(top: Path, target: Path) -> None:
    # A copy, so that naming new files for the patch leaves the user's index as it is.
    found = _git(top, "rev-parse", "--git-path", "index")
    index = top / os.fsdecode((found or b"").rstrip(b"\n"))
    if index.is_file():
        shutil.copyfile(index, target)


def _select(top: Path, untracked: Iterable[str]) -> tuple[list[str], list[str]]:
    """The new files that belong into the patch, and the others with the reason."""
    wanted, left_out, total = [], [], 0
    for name in untracked:
        path = top / name
        size = path.lstat().st_size if os.path.lexists(path) else 0
        looks_secret = any(fnmatch.fnmatch(part.lower(), pattern) for part in path.relative_to(top).parts for pattern in _SECRET)
        if name.endswith("/"):
            left_out.append(f"{name} (a repository of its own)")
        elif looks_secret and path.suffix != ".py":
            left_out.append(f"{name} (may hold secrets)")
        elif size > MAX_FILE or total + size > MAX_PATCH:
            left_out.append(f"{name} ({size:,} bytes)")
        else:
            wanted.append(name)
            total += size
    return wanted, left_out
