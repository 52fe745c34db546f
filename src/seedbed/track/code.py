"""Source state of a run: commit, branch, uncommitted changes as a patch, and installed versions."""

import hashlib
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

from seedbed.errors import UserError
from seedbed.track import files, jsonl

_PACKAGES = ("torch", "numpy", "safetensors", "tokenizers")


def version() -> str:
    return _version_of("seedbed") or "0+source"


def source_digest() -> str:
    """Hash of this package's source files; an edited work tree has the same version but another hash."""
    found, top = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(top.rglob("*.py")):
        found.update(str(path.relative_to(top)).encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()[:16]


def state(folder: Path, root: Path | None = None) -> dict[str, Any]:
    """Everything code.json and code.patch hold. The runs folder `root` and its journal do not count as changes."""
    return {
        "version": version(),
        **_git_state(Path(folder), root),
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


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_state(folder: Path, root: Path | None) -> dict[str, Any]:
    """Commit, branch and uncommitted changes; git is not asked where no folder above is a work tree."""
    if kept := os.environ.get("SEEDBED_CODE"):  # a cluster job runs a copy of the code; the work tree may have changed since
        from seedbed.track.code_patch import kept_state

        return kept_state(Path(kept))
    above = (folder.resolve(), *folder.resolve().parents)
    if "GIT_DIR" not in os.environ and not any((path / ".git").exists() for path in above):
        return {"commit": None, "branch": None}
    from seedbed.track.code_patch import git_state

    return git_state(folder, [Path(root).resolve(), Path(root).resolve().parent / "JOURNAL.md"] if root else [])
