"""Signals that stop a run: it saves at the end of the step and can be resumed."""

import signal
from typing import Any, Protocol

STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


class Stoppable(Protocol):
    stop_signal: int


def catch(job: Stoppable) -> dict[int, Any]:
    """The first signal ends the run at the next step; a second Ctrl-C ends it at once. Returns the previous handlers."""

    def on_signal(number: int, _frame: Any) -> None:
        if job.stop_signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        job.stop_signal = number

    try:
        return {number: signal.signal(number, on_signal) for number in STOPPING if not is_ignored(number)}
    except ValueError:  # not in the main thread: the caller owns the signals
        return {}


def is_ignored(number: int) -> bool:
    """Whether the parent process set the signal to be ignored, as nohup does."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


def restore(handlers: dict[int, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)
