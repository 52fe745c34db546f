"""Files of runs and sweeps for the browser: by kind and name, inside their folder only, of kinds that cannot run anything."""

import os
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, Response

from seedbed.serve.shelf import Shelf, is_name
from seedbed.track import media

# Anything else is not given out: a page or a script that somebody put into a run must not become one of ours.
KINDS = {
    **media.KINDS,
    ".wav": "audio/wav",
    **dict.fromkeys((".txt", ".md", ".log", ".json", ".jsonl", ".csv", ".patch"), "text/plain; charset=utf-8"),
}


def resolved(shelf: Shelf, kind: str, name: str, path: str) -> Path:
    """The real path of a file of a run or a sweep; 404 for whatever is not there or leads out, links included."""
    top = {"runs": shelf.root, "sweeps": shelf.root.parent / "sweeps"}.get(kind)
    if top is None or not is_name(name) or "\0" in path or "\\" in path:
        raise HTTPException(404)
    try:
        base = (top / name).resolve(strict=True)
        found = (base / path).resolve(strict=True)
    except (OSError, ValueError, RuntimeError):
        raise HTTPException(404) from None
    # The run itself may be a link that its owner made; nothing inside may lead anywhere else.
    hidden = any(part.startswith(".") for part in Path(path).parts)
    if hidden or not found.is_relative_to(base) or not found.is_file() or found.suffix.lower() not in KINDS:
        raise HTTPException(404)
    return found


def give(shelf: Shelf, kind: str, name: str, path: str) -> Response:
    found = resolved(shelf, kind, name, path)
    if not os.access(found, os.R_OK):
        raise HTTPException(404)
    # Pictures of a running sweep are redrawn under their names: the browser asks again, and mostly hears "not modified".
    return FileResponse(found, media_type=KINDS[found.suffix.lower()], headers={"cache-control": "no-cache"})
