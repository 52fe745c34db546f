"""Ends of commands that fail: errors of the user in a line, bugs with their traceback."""

import errno
import os
import sys
import time
import traceback

from seedbed.errors import EXIT_FAILED, EXIT_USER

# Disk errors that the user can fix; any other OSError is a bug.
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}


def print_error(text: str) -> int:
    """Print an error that the user can fix."""
    print(f"seedbed: {_rank()}" + text.replace("\n", "\n  "), file=sys.stderr)
    return EXIT_USER


def _rank() -> str:
    """Prefix with the rank; other ranks wait, since the primary one reports common errors first and ends them."""
    rank = os.environ.get("RANK", "0") if os.environ.get("WORLD_SIZE", "1") != "1" else "0"
    if rank == "0":
        return ""
    time.sleep(2.0)
    return f"rank {rank}: "


def explain(error: Exception) -> int:
    """Print what an unexpected error means: a disk, another rank, the user's recipe, or a bug of ours."""
    if isinstance(error, OSError) and error.errno in _DISK:
        return print_error(f"{error.strerror}: {error.filename or 'while writing'}")
    if _has_lost_a_rank(error):
        return print_error("another rank has stopped, so this one stops too; see the error of that rank")
    from seedbed.recipes import user_files
    from seedbed.track.code import version

    traceback.print_exception(error)
    place = user_files.place_of(error)
    if place:
        print(f"seedbed: the error above was raised by your recipe, {place}", file=sys.stderr)
    else:
        text = f"seedbed: this is a bug in seedbed {version()}; please report it with the command and the lines above"
        print(text, file=sys.stderr)
    return EXIT_FAILED


def _has_lost_a_rank(error: Exception) -> bool:
    """Whether the connection to another rank was lost."""
    words = ("Connection closed by peer", "Connection reset by peer", "DistBackendError", "Connection refused")
    return "WORLD_SIZE" in os.environ and any(word in f"{type(error).__name__} {error}" for word in words)
