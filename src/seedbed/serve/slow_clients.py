"""Limits for slow clients: time per request, number of connections, lines in the log.

When all connections are in use, the oldest one with an incomplete request is closed.
"""

import asyncio
import logging
import resource
import time
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

# Seconds from the first byte of a request, or the opening of a connection, to the end of the request.
REQUEST_SECONDS = 15.0
# Seconds that a response may wait for a client that does not read.
ANSWER_SECONDS = 60.0
MAX_CONNECTIONS = 256
# Connections accepted per iteration of the event loop: more could exhaust file descriptors before any is closed.
BACKLOG = 32
MAX_LOG_LINES, LOG_SECONDS = 30, 60.0


class BoundedProtocol(H11Protocol):
    """uvicorn's connection with deadlines."""

    # Connections with an incomplete request, oldest first.
    unfinished: ClassVar[dict["BoundedProtocol", None]] = {}

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._refused = False
        self._request_timer: asyncio.TimerHandle | None = None
        self._answer_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = MAX_CONNECTIONS if files == resource.RLIM_INFINITY else max(4, min(MAX_CONNECTIONS, files // 4))
        if len(self.connections) >= most:
            oldest = next(iter(self.unfinished), None)
            if oldest is None:
                self._refused = True
                return transport.abort()
            oldest._give_up()
        super().connection_made(transport)
        self._watch_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._request_ended()
        self._answer_timer = _cancelled(self._answer_timer)
        if not self._refused:
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused or self.transport.is_closing():
            return
        super().data_received(data)
        self._watch_request()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._answer_timer = _cancelled(self._answer_timer) or self.loop.call_later(ANSWER_SECONDS, self._give_up)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._answer_timer = _cancelled(self._answer_timer)

    def _watch_request(self) -> None:
        """Start the timeout with the first byte of a request; further bytes do not extend it."""
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            return self._request_ended()
        if self._request_timer is None:
            self.unfinished[self] = None
            self._request_timer = self.loop.call_later(REQUEST_SECONDS, self._give_up)

    def _request_ended(self) -> None:
        self.unfinished.pop(self, None)
        self._request_timer = _cancelled(self._request_timer)

    def _give_up(self) -> None:
        self._request_ended()
        self.connections.discard(self)
        self.transport.abort()


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


class LogLimit(logging.Filter):
    """Limits the log to some lines per minute, so that clients cannot fill the disk."""

    def __init__(self) -> None:
        super().__init__()
        self._since, self._num = 0.0, 0

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        if now - self._since > LOG_SECONDS or not self._num:
            self._since, self._num = now, 0
        self._num += 1
        if self._num == MAX_LOG_LINES:
            record.msg, record.args, record.exc_info = "more of this; further lines of this minute are left out", (), None
        return self._num <= MAX_LOG_LINES


def limit_logs() -> None:
    for name in ("uvicorn.error", "asyncio"):
        logger = logging.getLogger(name)
        if not any(isinstance(one, LogLimit) for one in logger.filters):
            logger.addFilter(LogLimit())
