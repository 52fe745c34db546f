"""Who is let in: names, origins, tokens, methods and sizes, by tables of requests that must fail and a few that must not."""

import re
import socket
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocket, WebSocketDisconnect

from seedbed.errors import UserError
from seedbed.serve import auth
from seedbed.serve.server import bind, serve_app

TOKEN = "the-token-of-this-test"
HERE = "127.0.0.1:8765"
SOCK = f"ws://{HERE}/sock"
COOKIE = {"cookie": f"seedbed={TOKEN}"}


async def page(request: Request) -> Response:
    return HTMLResponse("<p>page</p>")


async def change(request: Request) -> Response:
    try:
        return PlainTextResponse(str(len(await request.body())))
    except ClientDisconnect:
        return PlainTextResponse("too much", 400)


async def sock(socket: WebSocket) -> None:
    await socket.accept()
    await socket.send_text("hello")
    await socket.close()


def client(locked: bool = False, names: tuple[str, ...] = auth.LOOPBACK) -> TestClient:
    app = Starlette(routes=[Route("/", page), Route("/change", change, methods=["POST"]), WebSocketRoute("/sock", sock)])
    guarded = auth.Auth(app, names, token=TOKEN, locked=locked)
    return TestClient(guarded, base_url=f"http://{HERE}", follow_redirects=False)


def asked(method: str, path: str = "/", locked: bool = False, **headers: str) -> int:
    return client(locked).request(method, path, headers=headers).status_code


READING = [
    ({}, 200),
    ({"host": "localhost:8765"}, 200),
    ({"host": "localhost"}, 200),
    ({"host": "LOCALHOST:9000"}, 200),  # through a tunnel
    ({"host": "[::1]:8765"}, 200),
    ({"host": "evil.example"}, 403),
    ({"host": "evil.example:8765"}, 403),
    ({"host": "127.0.0.1.evil.example"}, 403),
    ({"host": "localhost.evil.example:8765"}, 403),
    ({"host": "127.0.0.1@evil.example"}, 403),
    ({"host": "evil.example/127.0.0.1:8765"}, 403),
    ({"host": ""}, 403),
    ({"origin": f"http://{HERE}"}, 200),
    ({"origin": "http://evil.example"}, 403),
    ({"origin": "null"}, 403),
    ({"origin": "http://127.0.0.1:3000"}, 403),  # another server on this machine
    ({"authorization": "Bearer wrong"}, 403),
    ({"authorization": f"Bearer {TOKEN}"}, 200),
    ({"cookie": "seedbed=of-an-earlier-start"}, 200),
]


@pytest.mark.parametrize(("headers", "status"), READING)
def test_auth_of_reads(headers: dict[str, str], status: int):
    assert asked("GET", **headers) == status


CHANGING = [
    ({}, 403),
    ({"origin": f"http://{HERE}"}, 403),
    (COOKIE, 403),
    ({**COOKIE, "origin": "http://evil.example"}, 403),
    ({**COOKIE, "origin": "http://localhost:8765"}, 403),  # not the name that was asked
    ({**COOKIE, "origin": "null"}, 403),
    ({"cookie": "seedbed=wrong", "origin": f"http://{HERE}"}, 403),
    ({"cookie": "other=x; seedbed=", "origin": f"http://{HERE}"}, 403),
    ({"authorization": "Bearer wrong", "origin": f"http://{HERE}"}, 403),
    ({**COOKIE, "origin": f"http://{HERE}", "host": "evil.example"}, 403),
    ({**COOKIE, "origin": f"http://{HERE}"}, 200),
    ({"authorization": f"Bearer {TOKEN}", "origin": f"http://{HERE}"}, 200),
]


@pytest.mark.parametrize(("headers", "status"), CHANGING)
def test_auth_of_writes(headers: dict[str, str], status: int):
    assert asked("POST", "/change", **headers) == status
    if status == 403:
        with pytest.raises(WebSocketDisconnect), client().websocket_connect(SOCK, headers={"origin": "", **headers}):
            pass
    else:
        with client().websocket_connect(SOCK, headers=headers) as open_socket:
            assert open_socket.receive_text() == "hello"


@pytest.mark.parametrize("method", ["PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"])
def test_token_is_required_for_other_methods(method: str):
    assert asked(method, "/change") == 403


def test_locked_server_requires_the_token():
    assert asked("GET", locked=True) == 403
    assert asked("GET", "/?token=wrong", locked=True) == 403
    assert asked("GET", locked=True, **COOKIE) == 200
    assert asked("GET", locked=True, cookie="seedbed=wrong") == 403


def test_token_is_removed_from_the_address():
    given = client(locked=True).get(f"/?token={TOKEN}&x=1")
    assert (given.status_code, given.headers["location"]) == (303, "/?x=1")
    cookie = given.headers["set-cookie"]
    assert TOKEN in cookie and "HttpOnly" in cookie and "SameSite=Strict" in cookie
    # Two slashes would name another host.
    away = client(locked=True).get(f"http://{HERE}//evil.example/?token={TOKEN}")
    assert away.headers["location"] == "/evil.example/"


def test_cookie_is_not_set_on_refused_requests():
    refused = client(locked=True).get("/")
    assert refused.status_code == 403 and "set-cookie" not in refused.headers


@pytest.mark.parametrize("path", ["/", "/nothing", "/change"])
def test_security_headers_are_on_every_response(path: str):
    given = client().get(path)
    policy = dict(part.strip().partition(" ")[::2] for part in given.headers["content-security-policy"].split(";"))
    assert policy["script-src"] == "'self'"
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert not [word for word in policy.values() if "http" in word or "*" in word]
    assert given.headers["x-content-type-options"] == "nosniff"
    assert not [name for name in given.headers if name.startswith("access-control")]


def test_request_body_is_limited():
    headers = {**COOKIE, "origin": f"http://{HERE}"}
    assert client().post("/change", content=b"x" * auth.MAX_BODY, headers=headers).text == str(auth.MAX_BODY)
    assert client().post("/change", content=b"x" * (auth.MAX_BODY + 1), headers=headers).status_code == 400


def test_tokens_are_random():
    assert len({auth.new_token() for _ in range(50)}) == 50 and len(auth.new_token()) >= 32


def test_host_option_requires_a_token():
    with pytest.raises(UserError, match="--token"):
        serve_app(Starlette(), "0.0.0.0", 0)
    assert "0.0.0.0" not in auth.host_names("0.0.0.0") and socket.gethostname() in auth.host_names("0.0.0.0")


def test_port_in_use_is_a_one_line_error():
    with bind("127.0.0.1", 0) as first, pytest.raises(UserError, match="--port"):
        bind("127.0.0.1", first.getsockname()[1])


def test_host_address_of_another_machine_is_a_one_line_error():
    with pytest.raises(UserError, match=r"192\.0\.2\.1"):
        bind("192.0.2.1", 0)


STATIC = Path(auth.__file__).parent / "static"


@pytest.mark.parametrize("path", [*STATIC.glob("*.js"), *STATIC.glob("*.html")], ids=lambda p: p.name)
def test_pages_parse_no_markup_and_load_nothing_external(path: Path):
    """Text goes in as text; nothing is fetched from elsewhere; no script stands in the page."""
    text = path.read_text()
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "javascript:"):
        assert word not in text, word
    addresses = [part for part in text.split("//")[:-1] if part.endswith(("http:", "https:"))]
    assert all('SVG = "http:' in part for part in addresses), "only the name of SVG's language may look like an address"
    if path.suffix == ".html":
        assert "<script>" not in text and " style=" not in text and not re.search(r"\son\w+=", text)
