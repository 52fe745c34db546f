"""Playing: what a visitor may say, what is recorded, and that nothing a page sends does harm."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from play_samples import CountingPlayer
from starlette.applications import Starlette
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from seedbed import inference
from seedbed.errors import UserError
from seedbed.recipes.world import player
from seedbed.recipes.world.recording.recording import open_recording
from seedbed.serve import web_page
from seedbed.serve.auth import Auth
from seedbed.serve.play import MAX_MESSAGE, MAX_SESSIONS, PlayServer, PlaySession, encode, play_routes

STEP = {"do": "step", "controls": [1.0, 0.0, 0.05]}


@pytest.fixture
def session(tmp_path: Path) -> PlaySession:
    return PlaySession("walk", CountingPlayer(), tmp_path)


def opened(packet: bytes) -> tuple[dict[str, Any], list[np.ndarray]]:
    size = int.from_bytes(packet[:4], "little")
    header, at, pictures = json.loads(packet[4 : 4 + size]), 4 + size, []
    for one in header["images"]:
        pictures.append(np.array(Image.open(io.BytesIO(packet[at : at + one["bytes"]]))))
        at += one["bytes"]
    assert at == len(packet)
    return header, pictures


def ask(session: PlaySession, **message: Any) -> dict[str, Any]:
    answer = session.answer(json.dumps(message))
    return answer if isinstance(answer, dict) else opened(answer)[0]


# ---- one visitor ---------------------------------------------------------------------------------------------------------


def test_step_returns_the_image_of_the_rollout(session: PlaySession):
    header, (picture,) = opened(session.answer(json.dumps({**STEP, "id": 5})))
    assert header["id"] == 5 and header["steps"] == 1 and header["action"][0] == 1.0 and header["recorded"] is None
    assert np.array_equal(picture, session.rollout.frame_HWC) and picture[0, 0, 1] == 1


def test_reference_image_is_returned_beside_the_rollout(session: PlaySession):
    header, (rollout, reference) = opened(session.answer(json.dumps({"do": "reset", "seed": 3, "reference": "simulator"})))
    assert header["seed"] == 3 and np.array_equal(reference, 255 - rollout)
    assert [one["kind"] for one in header["images"]] == ["rollout", "reference"]


def test_memory_images_are_returned_on_request(session: PlaySession):
    header, pictures = opened(session.answer(json.dumps({**STEP, "memory": True})))
    assert [one["num"] for one in header["images"] if one["kind"] == "memory"] == [4, 8]
    assert [p.shape for p in pictures[1:]] == [(8, 48, 3), (2, 24, 3)]


def test_hello_is_plain_json_and_complete(session: PlaySession):
    hello = json.loads(json.dumps(session.hello(), allow_nan=False))
    assert [axis["name"] for axis in hello["axes"]] == ["x", "yaw", "dt"] and hello["axes"][2]["is_time"]
    assert {"height", "width", "num_seeds", "references", "seconds", "ramp", "joint", "runtime"} <= set(hello)


WRONG = [
    (None, "JSON objects"),
    ("", "not JSON"),
    ("{", "not JSON"),
    ("[" * 5000, "not JSON"),
    ("[]", "not a JSON object"),
    ('"step"', "not a JSON object"),
    ("{}", "the player knows step"),
    ('{"do": "fly"}', "not 'fly'"),
    ('{"do": ["step"]}', "the player knows"),
    ('{"do": "step"}', "3 finite numbers"),
    ('{"do": "step", "controls": [1, 2]}', "3 finite numbers"),
    ('{"do": "step", "controls": [1, 2, "3"]}', "3 finite numbers"),
    ('{"do": "step", "controls": [1, 2, NaN]}', "3 finite numbers"),
    ('{"do": "step", "controls": [1, 2, Infinity]}', "3 finite numbers"),
    ('{"do": "step", "controls": [1, 2, 1e30]}', "3 finite numbers"),
    ('{"do": "step", "controls": [1, 2, true]}', "3 finite numbers"),
    ('{"do": "step", "controls": {"0": 1}}', "3 finite numbers"),
    ('{"do": "reset"}', "whole number from 0 to 6"),
    ('{"do": "reset", "seed": 7}', "whole number from 0 to 6"),
    ('{"do": "reset", "seed": -1}', "whole number from 0 to 6"),
    ('{"do": "reset", "seed": 1.5}', "whole number from 0 to 6"),
    ('{"do": "reset", "seed": 0, "reference": "../.."}', "nothing, simulator, recording"),
    ('{"do": "reset", "seed": 0, "reference": []}', "nothing, simulator, recording"),
    ('{"do": "anchor"}', "no reference"),
    ('{"do": "set", "level": -1}', "0 to 2"),
    ('{"do": "set", "level": "high"}', "0 to 2"),
    ('{"do": "set", "locked": 1}', "true or false"),
    ('{"do": "record"}', "rollout or simulator"),
    ('{"do": "record", "of": "/etc"}', "rollout or simulator"),
    ('{"do": "record", "of": "simulator"}', "not running"),
    ('{"do": "save"}', "nothing is being recorded"),
    ('{"do": "' + "x" * MAX_MESSAGE + '"}', "too long"),
]


@pytest.mark.parametrize(("text", "says"), WRONG, ids=[str(says)[:24] for _, says in WRONG])
def test_malformed_message_is_refused_and_changes_nothing(session: PlaySession, text: str | None, says: str):
    ask(session, **STEP)
    before = session.rollout.frame_HWC.copy()
    answer = session.answer(text)
    assert isinstance(answer, dict) and says in answer["error"], answer
    assert len(answer["error"]) < 200
    assert session.recorder is None and session.rollout.num_steps == 1 and np.array_equal(session.rollout.frame_HWC, before)
    assert ask(session, **STEP)["steps"] == 2


def test_end_of_the_recorded_controls_is_reported(session: PlaySession):
    ask(session, do="reset", seed=0, reference="recording")
    answers = [ask(session, **STEP) for _ in range(7)]
    assert [bool(a.get("ended")) for a in answers] == [False] * 5 + [True] * 2


def test_image_encoding_is_lossless_for_small_images():
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    kind, data = encode(noise)
    assert kind == "image/png" and np.array_equal(np.array(Image.open(io.BytesIO(data))), noise)
    ramp = np.broadcast_to(np.linspace(0, 255, 256, dtype=np.uint8)[None, :, None], (192, 256, 3))
    kind, data = encode(np.ascontiguousarray(ramp))
    assert kind == "image/jpeg" and np.abs(np.array(Image.open(io.BytesIO(data)), int) - ramp).max() <= 6


# ---- recordings of a walk ------------------------------------------------------------------------------------------------


def test_rollout_is_recorded_by_the_control_convention(session: PlaySession):
    ask(session, do="record", of="rollout")
    for number in range(24):
        if number == 12:
            assert ask(session, do="reset", seed=2)["recorded"] == 14
        ask(session, do="step", controls=[float(number), 0.0, 0.05])
    saved = ask(session, do="save")
    assert saved["num_frames"] == 26 and saved["recorded"] is None
    recording = open_recording(saved["saved"])
    assert Path(saved["saved"]).parent == session.folder / "recordings"
    assert recording.frames_THWC.shape == (26, 8, 12, 3) and recording.pose_T44 is None
    assert recording.episode_T.tolist() == [0] * 13 + [1] * 13
    # The control of a step belongs to the frame before it; the last of an episode leads nowhere.
    assert recording.actions_TA[:, 0].tolist() == [*range(12), 0.0, *range(12, 24), 0.0]
    assert recording.frames_THWC[:13, 0, 0, 1].tolist() == list(range(13))
    assert recording.frames_THWC[13, 0, 0, 0] == 2
    assert np.allclose(np.diff(recording.time_T), 0.05)
    assert recording.facts["source"] == {"name": "played", "of": "rollout", "run": "walk"}


def test_simulator_recording_has_executed_and_requested_controls(session: PlaySession):
    ask(session, do="reset", seed=0, reference="simulator")
    ask(session, do="record", of="simulator")
    assert "save the recording first" in ask(session, do="reset", seed=0)["error"]
    for _ in range(15):
        ask(session, do="step", controls=[2.0, 0.0, 0.05])
    path = ask(session, do="save")["saved"]
    done, asked = open_recording(path), open_recording(path, "command")
    assert done.actions_TA[:-1, 0].tolist() == [1.0] * 15 and asked.actions_TA[:-1, 0].tolist() == [2.0] * 15
    assert done.pose_T44 is not None and np.allclose(np.diff(done.pose_T44[:, 0, 3]), 1.0)
    assert done.facts["simulator"] == {"name": "counting"}
    assert (done.frames_THWC[:, 0, 0, 1] == 255 - np.arange(16)).all()


def test_reset_begins_an_episode(session: PlaySession):
    ask(session, do="reset", seed=0, reference="simulator")
    ask(session, do="record", of="rollout")
    for number in range(12):
        ask(session, **STEP)
        if number == 5:
            ask(session, do="anchor")
    assert open_recording(ask(session, do="save")["saved"]).episode_T.max() == 1


def test_recording_that_is_too_short_is_discarded(session: PlaySession):
    ask(session, do="record", of="rollout")
    ask(session, **STEP)
    assert "already" in ask(session, do="record", of="rollout")["error"]
    assert "at least 10" in ask(session, do="save")["error"]
    assert session.recorder is None and not (session.folder / "recordings").exists()


@pytest.mark.parametrize("place", ["_take", "save"])
def test_full_disk_drops_the_recording_and_the_session_continues(
    session: PlaySession, monkeypatch: pytest.MonkeyPatch, place: str
):
    ask(session, do="record", of="rollout")
    ask(session, **STEP)

    def full(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(player.Recorder, place, full)
    answer = ask(session, **(STEP if place == "_take" else {"do": "save"}))
    assert answer["error"] == "the recording was stopped: No space left on device" and session.recorder is None
    assert ask(session, **STEP)["recorded"] is None
    session.close()


def test_recording_at_its_limit_is_saved(session: PlaySession, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("seedbed.recipes.world.player.MAX_FRAMES", 15)
    ask(session, do="record", of="rollout")
    answers = [ask(session, **STEP) for _ in range(16)]
    assert [n for n, a in enumerate(answers) if "saved" in a] == [13] and session.recorder is None


# ---- many visitors, through the socket -----------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PlayServer:
    """A folder with a playable run, one of another recipe, and nothing else."""
    for name in ("walk", "other"):
        (tmp_path / name / "checkpoints").mkdir(parents=True)

    def player(root: Path, name: str, *rest: str) -> CountingPlayer:
        if name == "other":
            raise UserError("runs of this recipe cannot be played")
        return CountingPlayer()

    monkeypatch.setattr("seedbed.inference.player", player)
    return PlayServer(tmp_path)


@pytest.fixture
def client(server: PlayServer):
    app = Auth(Starlette(routes=play_routes(server.root, server)), {"testserver"}, token="secret")
    with TestClient(app, base_url="http://testserver", cookies={"seedbed": "secret"}) as client:
        yield client


ORIGIN = {"origin": "http://testserver"}


def enter(client: TestClient, run: str = "walk"):
    return client.websocket_connect(f"/play/{run}/socket", headers=ORIGIN)


def test_concurrent_sessions_are_independent(client: TestClient, server: PlayServer):
    with enter(client) as one, enter(client) as two:
        for socket in (one, two):
            assert socket.receive_json() == {"loading": "walk"}
            assert socket.receive_json()["hello"] == "walk"
        for _ in range(3):
            one.send_json(STEP)
            assert opened(one.receive_bytes())[0]["steps"]
        two.send_json({"do": "reset", "seed": 4})
        assert opened(two.receive_bytes())[0]["steps"] == 0
        one.send_json(STEP)
        header, (picture,) = opened(one.receive_bytes())
        assert header["steps"] == 4 and picture[0, 0].tolist() == [0, 4, 4]
        assert server.num_sessions == 2


def test_malformed_socket_messages_are_harmless(client: TestClient):
    with enter(client) as socket:
        socket.receive_json(), socket.receive_json()
        for text, _ in WRONG:
            if text is None:
                socket.send_bytes(b"\x00\xff")
            else:
                socket.send_text(text)
            assert "error" in socket.receive_json()
        socket.send_json(STEP)
        assert opened(socket.receive_bytes())[0]["steps"] == 1


def test_closed_tab_frees_its_session_and_saves_its_recording(client: TestClient, server: PlayServer):
    with enter(client) as socket:
        socket.receive_json(), socket.receive_json()
        socket.send_json({"do": "record", "of": "rollout"})
        socket.receive_bytes()
        for _ in range(12):
            socket.send_json(STEP)
            socket.receive_bytes()
    server._pool.shutdown()
    (kept,) = (path for path in (server.root / "walk" / "recordings").iterdir() if not path.name.startswith("."))
    assert open_recording(kept).num_frames == 13 and server.num_sessions == 0


@pytest.mark.parametrize(
    ("run", "says"), [("nothing", "no run 'nothing'"), ("other", "cannot be played"), ("%2e%2e", "no run"), ("..%2fwalk", "")]
)
def test_unplayable_run_is_a_one_line_error(client: TestClient, server: PlayServer, run: str, says: str):
    if not says:
        with pytest.raises(WebSocketDisconnect), enter(client, run) as socket:
            socket.receive_json()
        return
    with enter(client, run) as socket:
        while "error" not in (message := socket.receive_json()):
            assert "loading" in message
        assert says in message["error"] and message["fatal"] and "\n" not in message["error"]
        with pytest.raises(WebSocketDisconnect):
            socket.receive_json()
    assert server.num_sessions == 0


def test_session_limit_is_reported(client: TestClient, server: PlayServer):
    server.num_sessions = MAX_SESSIONS
    with enter(client) as socket:
        assert "sessions are open" in socket.receive_json()["error"]
    assert server.num_sessions == MAX_SESSIONS


def test_play_page_and_its_files_are_served(client: TestClient):
    page = client.get("/play/walk")
    assert page.status_code == 200 and "page.js" in page.text
    assert (
        "<script>" not in page.text
        and "onclick" not in page.text
        and "http://" not in page.text + page.text.replace("https", "http")
    )
    assert client.get("/play/nothing").status_code == 404
    for name, kind in (("page.js", "text/javascript"), ("play.css", "text/css")):
        found = client.get(f"/static/play/{name}")
        assert found.status_code == 200 and found.headers["content-type"].startswith(kind)
    for name in ("index.html", "..%2fapp.py", "%2e%2e/run.py", "none.js", "%00.js", "../play.py"):
        assert client.get(f"/static/play/{name}").status_code == 404, name


def test_socket_without_a_token_is_refused(client: TestClient):
    for headers in ({}, {"origin": "http://evil.example"}):
        with pytest.raises(WebSocketDisconnect), client.websocket_connect("/play/walk/socket", headers=headers) as socket:
            socket.receive_json()
    client.cookies.clear()
    with pytest.raises(WebSocketDisconnect), enter(client) as socket:
        socket.receive_json()


def test_player_is_reloaded_only_for_a_better_checkpoint(server: PlayServer):
    first = server.player("walk")
    step = server.root / "walk" / "checkpoints" / "step-000004"
    step.mkdir()
    (step.parent / "best").symlink_to("step-000004")
    second = server.player("walk")
    assert second is not first and server.player("walk") is second


# ---- recipes that cannot, commands ---------------------------------------------------------------------------------------


def test_play_and_web_export_are_refused_for_recipes_without_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    from helpers import train_once

    train_once(tmp_path, "toy", "steps=2")
    with pytest.raises(UserError, match="cannot be played"):
        inference.player(tmp_path, "toy")
    with pytest.raises(UserError, match="no web page"):
        inference.export(tmp_path, "toy", tmp_path / "out", to="web")
    with pytest.raises(UserError, match="not optimised at inference time"):
        inference.inference_curve(tmp_path, "toy", {})


def test_onnx_runtime_is_found_or_requested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="--fetch-ort"), web_page.runtime_files(None, False):
        pass
    with pytest.raises(UserError, match="does not hold"), web_page.runtime_files(tmp_path, False):
        pass
    with pytest.raises(UserError, match="use one of them"), web_page.runtime_files(tmp_path, True):
        pass
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="needs npm"), web_page.runtime_files(None, True):
        pass
    dist = tmp_path / "node_modules" / "onnxruntime-web" / "dist"
    dist.mkdir(parents=True)
    for name in web_page.RUNTIME:
        (dist / name).write_text(name)
    for given in (None, tmp_path, dist, dist.parent):
        with web_page.runtime_files(given, False) as found:
            assert found.resolve() == dist


def test_exported_page_is_self_contained(tmp_path: Path):
    dist, out = tmp_path / "dist", tmp_path / "out"
    dist.mkdir(), out.mkdir()
    for name in web_page.RUNTIME:
        (dist / name).write_text(name)
    web_page.write_page(out, dist, "a <b> run")
    html = (out / "index.html").read_text()
    assert 'content="web"' in html and "/static/" not in html and "<title>a &lt;b&gt; run · seedbed</title>" in html
    for name in web_page.PAGE_FILES:
        text = (out / name).read_text()
        assert "://" not in text.replace("http://www.w3.org", ""), f"{name} speaks to somebody"
    assert {path.name for path in (out / "ort").iterdir()} == set(web_page.RUNTIME)


def test_play_and_export_errors_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    from helpers import start

    from seedbed.cli import main

    monkeypatch.chdir(tmp_path)
    dist = tmp_path / "dist"
    dist.mkdir()
    for name in web_page.RUNTIME:
        (dist / name).write_text(name)
    start(tmp_path / "runs", "sums", "steps=4")
    table = [
        (["play", "nothing"], "there is no run 'nothing'"),
        (["play", "sums"], "runs of this recipe cannot be played"),
        (["play", "sums", "--runtime", "onnx"], "cannot be played"),
        (["play", "sums", "--runtime", "tpu"], "invalid choice"),
        (["play", "sums", "--port", "99999"], "between 0 and 65535"),
        (["play", "sums", "--checkpoint", "step-000099"], "no checkpoint"),
        (["play"], "RUN"),
        (["export", "sums", "--to", "web"], "--fetch-ort"),
        (["export", "sums", "--to", "web", "--ort", "dist"], "no web page"),
        (["export", "sums", "--to", "paper"], "invalid choice"),
        (["export", "sums", "--ort", "dist"], "belong to --to web"),
    ]
    for words, says in table:
        capsys.readouterr()
        assert main(words) == 2, words
        shown = capsys.readouterr().err
        assert says in shown and len(shown.strip().splitlines()) <= 2, shown
    assert not (tmp_path / "sums-web").exists()
