"""What the list page changes: tags, shown names and the archive, kept in labels.json of a run; and a trash that can be undone."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from seedbed.errors import UserError
from seedbed.serve.run_index import RunIndex, is_name, labels
from seedbed.track import files, jsonl
from seedbed.track.text import one_line

MAX_TEXT = 60
TRASH = ".trash"  # hidden, so that nothing takes what is in it for runs


def act(index: RunIndex, action: str, names: list[str], text: str) -> dict[str, Any]:
    """Do it to every run; `done` are those changed (in the trash: what `restore` takes), `failed` are reasons by name."""
    found = _ACTIONS.get(action)
    if found is None:
        raise UserError(f"{action[:40]!r} is no action; there are: {', '.join(_ACTIONS)}")
    text = one_line(text)[:MAX_TEXT].strip()
    if action in ("tag", "untag") and (not text or set(text) & set(' ,"|')):
        raise UserError("a tag is one word without commas, quotes and bars")
    done, failed = [], {}
    for name in names:
        try:
            done.append(found(index, name, text))
        except (UserError, OSError) as problem:
            failed[name] = str(problem)
    index.refresh()
    return {"done": done, "failed": failed}


def _label(change: Callable[[dict[str, Any], str], dict[str, Any]]) -> Callable[[RunIndex, str, str], str]:
    def apply(index: RunIndex, name: str, text: str) -> str:
        run = index.run(name)
        old = labels(run)
        files.write_atomic(run.path / "labels.json", jsonl.pretty({**old, **change(old, text)}))
        return name

    return apply


def _delete(index: RunIndex, name: str, text: str) -> str:
    run = index.run(name)
    if run.path.is_symlink():
        raise UserError(f"{run.path} is a link; remove it yourself, its target stays")
    (entry := index.root / TRASH / f"{name}.{time.time_ns():x}").parent.mkdir(exist_ok=True)
    with run.lock():
        run.path.rename(entry)
    return entry.name


def _restore(index: RunIndex, name: str, text: str) -> str:
    entry, target = _in_trash(index, name), index.root / name.rpartition(".")[0]
    if target.exists():
        raise UserError(f"{target.name} exists again; remove or rename that one first")
    entry.rename(target)
    return target.name


def _purge(index: RunIndex, name: str, text: str) -> str:
    shutil.rmtree(_in_trash(index, name))
    return name


def _in_trash(index: RunIndex, name: str) -> Path:
    if not is_name(name) or not (path := index.root / TRASH / name).is_dir() or path.is_symlink():
        raise UserError(f"{name!r} is not in the trash")
    return path


_ACTIONS: dict[str, Callable[[RunIndex, str, str], str]] = {
    "tag": _label(lambda old, text: {"tags": [*dict.fromkeys([*old["tags"], text])]}),
    "untag": _label(lambda old, text: {"tags": [tag for tag in old["tags"] if tag != text]}),
    "rename": _label(lambda old, text: {"label": text}),
    "archive": _label(lambda old, text: {"archived": True}),
    "unarchive": _label(lambda old, text: {"archived": False}),
    "delete": _delete,
    "restore": _restore,
    "purge": _purge,
}
