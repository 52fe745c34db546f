"""Authentication of every request: host name, origin and a token per start.

Listening on a loopback address is not sufficient: any web page that the user visits can send requests to it.
"""

import contextlib
import hmac
import secrets
import socket
from collections.abc import Iterable
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MAX_BODY = 1 << 16
READING = ("GET", "HEAD")
_MISSING_TOKEN = "the token is missing or wrong; open the address that `seedbed serve` printed"

# Scripts only from our own files, nothing from other hosts, no embedding in frames.
# Inline styles are allowed because plotly needs them.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "media-src 'self' blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


class Auth:
    """ASGI middleware. Reading is open on a loopback address unless `locked`; writes and sockets always need the token.

    The token is sent in a SameSite cookie: `?token=...` in the first address sets it, and where
    reading is open every page sets it. Scripts may send it as `Authorization: Bearer`.
    """

    def __init__(self, app: ASGIApp, names: Iterable[str], *, token: str, cookie: str = "seedbed", locked: bool = False) -> None:
        self.app, self.token, self.cookie, self.locked = app, token, cookie, locked
        self.names = frozenset(name.lower() for name in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self.app(scope, receive, send)
        headers = Headers(scope=scope)
        answer = self._refusal(scope, headers) or self._redirect_without_token(scope)
        if scope["type"] == "websocket":
            if answer is None:
                return await self.app(scope, receive, send)
            await receive()  # closing before accepting rejects the handshake with 403
            return await send({"type": "websocket.close", "code": 1008})
        go = answer or self.app
        await go(scope, _limit_body(receive), self._with_headers(scope, send))

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        host = headers.get("host", "")
        # Without its port: a tunnel may change it, and the origin must match anyway.
        name, _, port = host.rpartition(":")
        name = name if port.isdigit() and not host.endswith("]") else host
        if name.strip("[]").lower() not in self.names:
            unknown = f"this server does not answer to the name {host[:80]!r}"
            return _forbidden(f"{unknown}; open the address that `seedbed serve` printed")
        changing = scope["type"] == "websocket" or scope["method"] not in READING
        origin = headers.get("origin")
        if (origin is not None or changing) and origin not in (f"http://{host}", f"https://{host}"):
            return _forbidden("requests of other pages are refused")
        given = self._token_of(scope, headers)
        if given is None:
            return _forbidden(_MISSING_TOKEN) if changing or self.locked else None
        return None if hmac.compare_digest(given.encode(), self.token.encode()) else _forbidden(_MISSING_TOKEN)

    def _token_of(self, scope: Scope, headers: Headers) -> str | None:
        """The token of a request, from its address, header or cookie; an outdated cookie counts as none."""
        if asked := parse_qs(scope["query_string"].decode("latin-1")).get("token"):
            return asked[0]
        kind, _, word = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            return word
        try:
            found = SimpleCookie(headers.get("cookie", "")).get(self.cookie)
        except CookieError:
            return None
        return found.value if found and hmac.compare_digest(found.value.encode(), self.token.encode()) else None

    def _redirect_without_token(self, scope: Scope) -> Response | None:
        """Redirect an address with a token to the same without it, to keep it out of the browser's history."""
        query = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        if scope["type"] != "http" or scope["method"] not in READING or not query.pop("token", None):
            return None
        # A path that begins with two slashes would be a redirect to another host.
        path = "/" + scope["path"].lstrip("/\\")
        return RedirectResponse(path + ("?" + urlencode(query, doseq=True) if query else ""), 303)

    def _with_headers(self, scope: Scope, send: Send) -> Send:
        """Add security headers to every response, and the cookie to responses for authorised clients."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("cache-control", "no-store")
                kind = headers.get("content-type", "")
                if message["status"] == 303 or (message["status"] < 400 and kind.startswith("text/html")):
                    headers.append("set-cookie", f"{self.cookie}={self.token}; Path=/; HttpOnly; SameSite=Strict")
            await send(message)

        return send_with_headers


def new_token() -> str:
    return secrets.token_urlsafe(24)


def is_loopback(host: str) -> bool:
    return host in LOOPBACK or host.startswith("127.")


def host_names(host: str) -> set[str]:
    """The host names that a server bound to `host` accepts; exact ones, against DNS rebinding."""
    names = {*LOOPBACK, host}
    if is_loopback(host):
        return names
    names |= {socket.gethostname(), socket.getfqdn()}
    with contextlib.suppress(OSError):
        names |= {str(found[4][0]) for found in socket.getaddrinfo(socket.gethostname(), None)}
    return names - {"0.0.0.0", "::", ""}


def _forbidden(why: str) -> Response:
    return PlainTextResponse(why + "\n", 403)


def _limit_body(receive: Receive) -> Receive:
    """Disconnect clients whose request body is larger than a note."""
    num_bytes = 0

    async def limited() -> Message:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        return {"type": "http.disconnect"} if num_bytes > MAX_BODY else message

    return limited
