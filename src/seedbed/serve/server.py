"""Run a web application on a local port, with authentication, until Ctrl-C."""

import contextlib
import errno
import importlib.util
import socket
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from seedbed.errors import UserError

if TYPE_CHECKING:
    from starlette.types import ASGIApp

PORT = 8765
EXTRA = 'pip install "seedbed[serve]"'


def serve_app(
    app: "ASGIApp",
    host: str = "127.0.0.1",
    port: int = PORT,
    *,
    locked: bool = False,
    path: str = "/",
    what: str = "the workbench",
    then: Callable[[str], object] = lambda address: None,
) -> int:
    """Serve until a signal. With `locked`, reading needs the token too; `then` is called with the address."""
    needs()
    import uvicorn

    from seedbed.serve import auth, slow_clients

    if not auth.is_loopback(host) and not locked:
        raise UserError(f"--host {host} lets other machines in: add --token, and give its address only to whom it concerns")
    token = auth.new_token()
    bound = bind(host, port)
    port = bound.getsockname()[1]
    guarded = auth.Auth(app, auth.host_names(host), token=token, cookie=f"seedbed-{port}", locked=locked)
    shown = socket.gethostname() if host in ("0.0.0.0", "::") else host
    shown = f"[{shown}]" if ":" in shown else shown
    address = f"http://{shown}:{port}{path}" + (f"?token={token}" if locked else "")
    settings: dict[str, Any] = {"log_level": "warning", "access_log": False, "server_header": False, "proxy_headers": False}
    # Limits of headers (h11) and of websocket messages: a few settings and a prompt.
    settings |= {"http": slow_clients.BoundedProtocol, "backlog": slow_clients.BACKLOG, "h11_max_incomplete_event_size": 1 << 16}
    settings |= {"ws": "websockets-sansio", "ws_max_size": 1 << 16, "timeout_graceful_shutdown": 1}
    server = uvicorn.Server(uvicorn.Config(guarded, **settings))
    slow_clients.limit_logs()
    print(f"{what}: {address}\nCtrl-C stops it", flush=True)
    with contextlib.closing(bound), contextlib.suppress(KeyboardInterrupt):
        then(address)
        server.run(sockets=[bound])
    return 0


def needs() -> None:
    """A UserError that says what to install when packages are missing."""
    if missing := [name for name in ("starlette", "uvicorn", "websockets") if importlib.util.find_spec(name) is None]:
        raise UserError(f"the web pages need {', '.join(missing)}: {EXTRA}")


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With an explicit protocol asyncio sets TCP_NODELAY; without it every response waits 40 ms for an acknowledgement.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if sys.platform != "win32":
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(128)  # connections are queued from here on
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"port {port} is taken; another one: --port {port + 1}, or any free one: --port 0") from None
        raise UserError(f"{host}:{port} cannot be opened: {error.strerror or error}") from None
    return bound
