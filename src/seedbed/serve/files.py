"""Files of runs and sweeps for the browser: inside their folder only, of types that cannot execute anything."""

import os
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, Response

from seedbed.report import media
from seedbed.serve.run_index import RunIndex, is_name

# Other types are not served: an HTML or script file in a run folder must not run with our origin.
KINDS = {
    **media.KINDS,
    ".wav": "audio/wav",
    **dict.fromkeys((".txt", ".md", ".log", ".json", ".jsonl", ".csv", ".patch"), "text/plain; charset=utf-8"),
}


def file_response(index: RunIndex, kind: str, name: str, path: str) -> Response:
    found = resolved(index, kind, name, path)
    if not os.access(found, os.R_OK):
        raise HTTPException(404)
    # Plots of a running sweep are replaced under the same name, so browsers must revalidate.
    return FileResponse(found, media_type=KINDS[found.suffix.lower()], headers={"cache-control": "no-cache"})


def resolved(index: RunIndex, kind: str, name: str, path: str) -> Path:
    """The resolved path of a file of a run or a sweep; 404 for missing files and for path traversal, links included."""
    top = {"runs": index.root, "sweeps": index.root.parent / "sweeps"}.get(kind)
    if top is None or not is_name(name) or "\0" in path or "\\" in path:
        raise HTTPException(404)
    try:
        base = (top / name).resolve(strict=True)
        found = (base / path).resolve(strict=True)
    except (OSError, ValueError, RuntimeError):
        raise HTTPException(404) from None
    # The run's folder may be a link; nothing inside may point outside of it.
    hidden = any(part.startswith(".") for part in Path(path).parts)
    if hidden or not found.is_relative_to(base) or not found.is_file() or found.suffix.lower() not in KINDS:
        raise HTTPException(404)
    return found
