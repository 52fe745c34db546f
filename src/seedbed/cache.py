"""The cache folder: data stores, preflight reports, compiled code."""

import os
from pathlib import Path


def cache_folder(named: str = "") -> Path:
    """`named` (data.cache), else $SEEDBED_CACHE, else `seedbed` in the user's cache folder."""
    named = named or os.environ.get("SEEDBED_CACHE", "")
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(named or f"{home}/seedbed").expanduser().absolute()
