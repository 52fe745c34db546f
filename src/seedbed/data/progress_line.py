"""The progress line itself: amounts in their unit, the rate and the time left."""

import sys


def show(what: str, unit: str, done: int, total: int, rate: float, terminal: bool) -> None:
    """On a terminal it replaces the line before."""
    left = _time((total - done) / rate) if rate > 0 else "unknown"
    line = f"{what}: {_size(done, unit)} of {_size(total, unit)}, {_size(rate, unit)}/s, {left} left"
    sys.stderr.write(f"\r\x1b[2K{line}" if terminal else f"{line}\n")
    sys.stderr.flush()


def _size(count: float, unit: str) -> str:
    if unit != "bytes":
        return f"{count:,.0f} {unit}"
    return f"{count / 1e9:,.2f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
