"""Clients that send half a request, or take no answer, hold nothing for long and shut nobody out."""

import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

pytest.importorskip("uvicorn")

from seedbed.serve.slow_clients import LOG_SECONDS, MAX_LOG_LINES, LogLimit

SERVER = """
import resource, sys
limit = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
from pathlib import Path
from seedbed.serve import slow_clients
from seedbed.serve.app import workbench
from seedbed.serve.server import serve_app
slow_clients.REQUEST_SECONDS, slow_clients.ANSWER_SECONDS = 2.0, 2.0
serve_app(workbench(Path(sys.argv[1])), "127.0.0.1", 0)
"""


@contextlib.contextmanager
def server(folder: Path, num_files: int) -> Iterator[tuple[int, Path]]:
    """A server that may open so many files: its port, and what it says."""
    (folder / "runs").mkdir(exist_ok=True)
    printed = folder / "said.txt"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with printed.open("wb") as log:
        words = [sys.executable, "-P", "-c", SERVER, str(folder / "runs"), str(num_files)]
        process = subprocess.Popen(words, stdout=log, stderr=log, env=env, cwd=folder)
    try:
        deadline = time.monotonic() + 60
        while "http://" not in printed.read_text() or "Ctrl-C" not in printed.read_text():
            assert process.poll() is None and time.monotonic() < deadline, printed.read_text()
            time.sleep(0.05)
        yield int(printed.read_text().partition("127.0.0.1:")[2].partition("/")[0]), printed
        assert process.poll() is None, printed.read_text()[-2000:]
    finally:
        process.kill()
        process.wait()


def answered(port: int, seconds: float = 5.0) -> bool:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/runs", timeout=seconds) as answer:
        return answer.status == 200


def connect(port: int, words: bytes) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", port), timeout=5)
    with contextlib.suppress(OSError):
        made.sendall(words)
    return made


def is_closed(one: socket.socket) -> bool:
    """Whether the other side has ended the connection."""
    one.settimeout(0.01)
    try:
        return one.recv(1 << 16) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


HALVES = {
    "nothing": b"",
    "half a header": b"GET /api/runs HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ",
    "half a body": b"POST /api/runs/x/note HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n{",
}


SLOW = [name if name == "half a header" else pytest.param(name, marks=pytest.mark.slow) for name in HALVES]


@pytest.mark.parametrize("half", SLOW)
def test_incomplete_requests_do_not_block_others(tmp_path: Path, half: str) -> None:
    """More of them than the server may have files: it answers at once, lets go of all, and its log stays short."""
    with server(tmp_path, 256) as (port, printed), contextlib.ExitStack() as stack:
        held = [stack.enter_context(connect(port, HALVES[half])) for _ in range(300)]
        began = time.monotonic()
        assert all(answered(port) for _ in range(5)) and time.monotonic() - began < 10.0
        deadline = time.monotonic() + 20
        while not all(is_closed(one) for one in held):
            assert time.monotonic() < deadline, "half requests are held"
        assert answered(port)
        assert printed.stat().st_size < 100_000 and "Traceback" not in printed.read_text()


@pytest.mark.slow
def test_request_timeout_is_not_extended_by_further_bytes(tmp_path: Path) -> None:
    with server(tmp_path, 256) as (port, _), connect(port, b"GET / HTTP/1.1\r\n") as drip:
        began = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - began < 15:
                drip.sendall(b"a: b\r\n")
                time.sleep(0.2)
                if is_closed(drip):
                    break
        assert time.monotonic() - began < 8.0, "a byte now and then keeps the connection"


def test_request_timeout_applies_to_every_request_of_a_connection(tmp_path: Path) -> None:
    whole = b"GET /api/runs HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with server(tmp_path, 256) as (port, _), connect(port, whole) as one:
        assert b"200 OK" in one.recv(1 << 16)
        one.sendall(whole[:20])
        began = time.monotonic()
        while not is_closed(one):
            assert time.monotonic() - began < 8.0, "half of a second request is held"


@pytest.mark.slow
def test_client_that_does_not_read_is_disconnected(tmp_path: Path) -> None:
    (tmp_path / "runs" / "big").mkdir(parents=True)
    (tmp_path / "runs" / "big" / "large.txt").write_bytes(b"x" * (64 << 20))
    asked = b"GET /files/runs/big/large.txt HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with server(tmp_path, 256) as (port, _), connect(port, asked) as one:
        time.sleep(6.0)
        one.settimeout(5)
        taken = 0
        with contextlib.suppress(OSError):
            while piece := one.recv(1 << 20):
                taken += len(piece)
        assert taken < 64 << 20, "an answer waited for a client that takes nothing"
        assert answered(port)


@pytest.mark.slow
def test_slow_but_steady_reader_gets_the_whole_response(tmp_path: Path) -> None:
    (tmp_path / "runs" / "big").mkdir(parents=True)
    (tmp_path / "runs" / "big" / "large.txt").write_bytes(b"x" * (32 << 20))
    asked = b"GET /files/runs/big/large.txt HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
    with server(tmp_path, 256) as (port, _), connect(port, asked) as one:
        one.settimeout(20)
        taken = 0
        while piece := one.recv(4 << 20):
            taken += len(piece)
            time.sleep(0.05)
        assert taken > 32 << 20


def test_malformed_requests_do_not_fill_the_log(tmp_path: Path) -> None:
    with server(tmp_path, 256) as (port, printed):
        for _ in range(300):
            with connect(port, b"\x00\xff not http\r\n\r\n") as one:
                is_closed(one)
        assert answered(port) and printed.stat().st_size < 20_000


def test_log_limit_reports_dropped_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    limit = LogLimit()

    def tell(num: int) -> list[str]:
        made = [logging.LogRecord("x", logging.WARNING, "f", 1, "word %d", (n,), None) for n in range(num)]
        return [record.getMessage() for record in made if limit.filter(record)]

    first = tell(1000)
    assert len(first) == MAX_LOG_LINES and first[0] == "word 0" and "left out" in first[-1]
    assert tell(5) == []
    now[0] += LOG_SECONDS + 1
    assert tell(2) == ["word 0", "word 1"]
