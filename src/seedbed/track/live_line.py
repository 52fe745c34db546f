"""The line of a terminal that shows how far a run is."""

from collections.abc import Sequence

from seedbed.track.text import duration

_LONGEST = 60


def live_line(share: float, columns: Sequence[str], eta: float | None, width: int) -> str:
    """Progress as a bar, in per cent and as time left, around these columns; the bar takes what room there is."""
    words = [f"{min(share, 1.0):4.0%}", *(" ".join(column.split()) for column in columns)]
    text = "  ".join([*words, f"{duration(eta)} left"] if eta is not None else words)
    room = min(width - len(text) - 2, _LONGEST)
    return f"{'━' * round(room * min(share, 1.0)):─<{room}} {text}" if room >= 8 else text
