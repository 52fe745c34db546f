"""Messages that a stranger's page can send: none ends in a traceback or hangs, and the pages that behave go on."""

import asyncio
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from _runs import make_runs
from fuzzing import cases, mutate, try_all

pytest.importorskip("starlette")
pytest.importorskip("httpx")

from starlette.testclient import TestClient
from starlette.websockets import WebSocket, WebSocketDisconnect

from seedbed.cli import main
from seedbed.report import facts
from seedbed.serve import app, playground
from seedbed.serve.app import Live, read_request
from seedbed.serve.run_index import RunIndex

SEEDS = [
    b'{"list": true, "version": 3}',
    b'{"runs": ["run-0000", "run-0001"], "version": 0}',
    b'{"runs": ["run-0000"], "list": false, "version": 12345678901234567890}',
    json.dumps({"runs": [f"run-{n:04d}" for n in range(40)], "list": True, "version": 1}).encode(),
]
# Each of these broke something once.
KEPT = [b'{"version":1e400}', b"[" * 60_000, b'{"a":' * 20_000, b'{"version": NaN}', b'{"version": "9"}', b'{"runs": {"a": 1}}']


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("live") / "runs"
    make_runs(root, 3, 30)
    return root


def visit(found: Live, first: dict[str, Any]) -> list[dict[str, Any]]:
    """One page that sends this message and leaves; what it was sent."""
    messages = [{"type": "websocket.connect"}, first, {"type": "websocket.disconnect", "code": 1001}]
    sent: list[dict[str, Any]] = []

    async def receive() -> Any:
        return messages.pop(0) if messages else await asyncio.sleep(3600)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "websocket", "path": "/api/live", "headers": [], "query_string": b"", "subprotocols": []}
    asyncio.run(asyncio.wait_for(found.page(WebSocket(scope, receive, send)), 30.0))
    return sent


@pytest.mark.parametrize("data", KEPT, ids=lambda data: data[:20].decode())
def test_live_socket_refuses_malformed_requests(root: Path, data: bytes) -> None:
    sent = visit(Live(RunIndex(root)), {"type": "websocket.receive", "text": data.decode()})
    assert sent[-1] == {"type": "websocket.close", "code": 1003, "reason": ""}


@pytest.mark.parametrize("frame", [{"bytes": b"\x00\xff"}, {"bytes": b"{}", "text": None}, {}])
def test_binary_frame_is_refused(root: Path, frame: dict[str, Any]) -> None:
    sent = visit(Live(RunIndex(root)), {"type": "websocket.receive", **frame})
    assert sent[-1]["code"] == 1003


def test_binary_frame_to_a_playground_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    pretender = 'import sys\nprint(\'{"ready": {"options": {}}}\', flush=True)\nsys.stdin.read()'
    monkeypatch.setattr(playground, "process_for", lambda index, name: [sys.executable, "-c", pretender])
    monkeypatch.setattr(playground.views, "run_page", lambda index, name: {"opens": {"playground": True}})
    with TestClient(app.workbench(root)) as client, client.websocket_connect("/api/runs/run-0000/playground") as socket:
        assert "ready" in socket.receive_json()
        socket.send_bytes(b"\xff")


def test_live_socket_accepts_a_valid_page(root: Path) -> None:
    sent = visit(Live(RunIndex(root)), {"type": "websocket.receive", "text": SEEDS[1].decode()})
    assert sent[0]["type"] == "websocket.accept" and sent[-1]["code"] == 1000


@pytest.mark.slow
def test_fuzzed_requests_are_read_or_refused() -> None:
    """20,000 mutated messages through the parser: names, a flag and a version, or ValueError."""

    def parse(data: bytes) -> None:
        names, wants_list, version = read_request(data.decode(errors="replace"))
        assert len(names) <= app.MAX_WATCHED and all(isinstance(name, str) for name in names)
        assert isinstance(wants_list, bool) and isinstance(version, int)

    accepted = try_all(cases(SEEDS, 20_000, seed=20, kept=KEPT), parse, refused=(ValueError,), seconds=5.0)
    assert 1000 < accepted < 20_000, accepted


@pytest.mark.slow
def test_fuzzed_live_socket_neither_breaks_nor_hangs(root: Path, caplog: pytest.LogCaptureFixture, monkeypatch) -> None:
    """10,000 mutated messages through the socket itself, text and binary; afterwards it watches nothing and still answers."""
    monkeypatch.setattr(app, "SEND_SECONDS", 5.0)
    found = Live(RunIndex(root))
    with caplog.at_level(logging.WARNING):
        for number in range(10_000):
            data = mutate(SEEDS, seed=21, number=number)
            binary = number % 10 == 0
            frame = {"bytes": data} if binary else {"text": data.decode(errors="surrogateescape")}
            sent = visit(found, {"type": "websocket.receive", **frame})
            assert sent[-1]["type"] == "websocket.close" and sent[-1]["code"] in (1000, 1003), f"seed 21 number {number}"
    assert not caplog.records and not found._watched and not found._num_pages
    test_live_socket_accepts_a_valid_page(root)


@pytest.mark.slow
def test_fuzzed_messages_over_a_real_connection(root: Path) -> None:
    """Through starlette's own server side, with what a client library puts around a message."""
    with TestClient(app.workbench(root)) as client:
        for number in range(300):
            data = mutate(SEEDS, seed=22, number=number)
            with client.websocket_connect("/api/live") as socket:
                if number % 3:
                    socket.send_text(data.decode(errors="replace"))
                else:
                    socket.send_bytes(data)
                    with pytest.raises(WebSocketDisconnect):
                        socket.receive_text()
        assert client.get("/api/runs").status_code == 200


# ---- numbers and names that a run may hold ---------------------------------------------------------------------------


@pytest.mark.parametrize("value", [1e308, -1e308, 1.7e308, 1e155, 10**400, -(10**400), 5e-324, 1e400])
def test_compare_with_extreme_losses(tmp_path: Path, value: float) -> None:
    make_runs(tmp_path / "runs", 2, 30)
    with open(tmp_path / "runs" / "run-0000" / "rows.jsonl", "a") as file:
        file.writelines(json.dumps({"step": 100 + n, "loss": value, "items_per_s": value}) + "\n" for n in range(30))
    with open(tmp_path / "runs" / "run-0000" / "events.jsonl", "a") as file:
        file.write(json.dumps({"step": value, "kind": "eval", "loss": value}) + "\n")
    with TestClient(app.workbench(tmp_path / "runs")) as client:
        for page in ("compare?run=run-0000&run=run-0001", "runs/run-0000", "runs/run-0000/series?key=loss&smooth=0.5", "runs"):
            answer = client.get(f"/api/{page}")
            assert answer.status_code == 200, page
            answer.json()


def test_mean_and_deviation_of_large_values() -> None:
    mean, sd = facts.mean_and_sd([1e308, 1.2e308, 1.4e308, 1.6e308])
    assert abs(mean / 1e308 - 1.3) < 1e-12 and abs(sd / 1e308 - 0.2581988897471611) < 1e-12
    mean, sd = facts.mean_and_sd([1e200, -1e200, 0.0])
    assert mean == 0.0 and abs(sd / 1e200 - 1.0) < 1e-12


@pytest.mark.parametrize("name", ["__proto__", "constructor", "toString", "hasOwnProperty"])
def test_metric_with_a_name_of_javascript(tmp_path: Path, name: str) -> None:
    make_runs(tmp_path / "runs", 1, 30)
    with open(tmp_path / "runs" / "run-0000" / "rows.jsonl", "a") as file:
        file.writelines(json.dumps({"step": 100 + n, "loss": 1.0, name: 2.0}) + "\n" for n in range(30))
    with TestClient(app.workbench(tmp_path / "runs")) as client:
        assert name in client.get("/api/runs/run-0000").json()["keys"]
        assert client.get(f"/api/runs/run-0000/series?key={name}").json()[name]["raw"]["y"]


STATIC = sorted(app.STATIC.rglob("*.js"))


@pytest.mark.parametrize("path", STATIC, ids=lambda path: path.name)
def test_tables_of_scripts_have_no_prototype(path: Path) -> None:
    """A metric or a status called __proto__ must not find anything in a table that is asked for it."""
    text = path.read_text()
    tables = re.findall(r"^const ([A-Z_]+) = \{(\s*\S+)", text, re.M)
    assert all(first.strip() == "__proto__:" for _, first in tables), tables
    filled = re.findall(r"[\w.]+ = \{\};|\.reduce\(.*, \{\}\)", text)
    assert not filled, "a table that is filled by names begins as { __proto__: null }"


@pytest.mark.parametrize(
    "words", [("train", "gpt/demo", "--run=--"), ("--runs=--", "runs", "list"), ("sample", "x", "--prompt=--")]
)
def test_option_whose_value_is_two_dashes(words: tuple[str, ...], capsys) -> None:
    assert main(list(words)) == 2
    reported = capsys.readouterr().err
    assert "needs a value" in reported and "Traceback" not in reported
