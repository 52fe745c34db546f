"""JSON responses and websocket messages; always valid JSON, whatever a run's files contain."""

import json
import re
from typing import Any

from starlette.responses import Response
from starlette.websockets import WebSocket, WebSocketDisconnect

from seedbed.track import jsonl

_SURROGATE = re.compile("[\ud800-\udfff]")


def to_text(values: Any) -> str:
    """JSON text; lone surrogates, as in names that are not UTF-8, become replacement characters."""
    text = json.dumps(jsonl.finite(values), ensure_ascii=False, separators=(",", ":"))
    return _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", text)


def read_object(text: str) -> dict[str, Any] | None:
    """The JSON object of a message; None when it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


async def receive_text(socket: WebSocket) -> str:
    """The next text message of a page; anything else counts as a disconnect."""
    message = await socket.receive()
    if message["type"] != "websocket.receive" or message.get("text") is None:
        raise WebSocketDisconnect(1003)
    return message["text"]


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_text(content).encode()
