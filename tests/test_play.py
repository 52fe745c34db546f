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

from seedbed.data.recording import open_recording
from seedbed.errors import UserError
from seedbed.serve import play_record, web_page
from seedbed.serve.doors import Doors
from seedbed.serve.play import MAX_VISITORS, House, play_routes
from seedbed.serve.play_visit import MAX_MESSAGE, Visit, encode
from seedbed.train.system import System

STEP = {"do": "step", "controls": [1.0, 0.0, 0.05]}


@pytest.fixture
def visit(tmp_path: Path) -> Visit:
    return Visit("walk", CountingPlayer(), tmp_path)


def opened(packet: bytes) -> tuple[dict[str, Any], list[np.ndarray]]:
    size = int.from_bytes(packet[:4], "little")
    header, at, pictures = json.loads(packet[4 : 4 + size]), 4 + size, []
    for one in header["pictures"]:
        pictures.append(np.array(Image.open(io.BytesIO(packet[at : at + one["bytes"]]))))
        at += one["bytes"]
    assert at == len(packet)
    return header, pictures


def ask(visit: Visit, **message: Any) -> dict[str, Any]:
    answer = visit.answer(json.dumps(message))
    return answer if isinstance(answer, dict) else opened(answer)[0]


# ---- one visitor ---------------------------------------------------------------------------------------------------------


def test_a_step_gives_the_picture_that_was_dreamed(visit: Visit):
    header, (picture,) = opened(visit.answer(json.dumps({**STEP, "id": 5})))
    assert header["id"] == 5 and header["steps"] == 1 and header["action"][0] == 1.0 and header["recorded"] is None
    assert np.array_equal(picture, visit.dream.frame_HWC) and picture[0, 0, 1] == 1


def test_what_really_happens_stands_beside(visit: Visit):
    header, (dream, beside) = opened(visit.answer(json.dumps({"do": "reset", "seed": 3, "beside": "simulator"})))
    assert header["seed"] == 3 and np.array_equal(beside, 255 - dream)
    assert [one["kind"] for one in header["pictures"]] == ["dream", "beside"]


def test_the_memory_comes_as_it_is_when_asked_for(visit: Visit):
    header, pictures = opened(visit.answer(json.dumps({**STEP, "memory": True})))
    assert [one["num"] for one in header["pictures"] if one["kind"] == "memory"] == [4, 8]
    assert [p.shape for p in pictures[1:]] == [(8, 48, 3), (2, 24, 3)]


def test_hello_is_plain_json_and_complete(visit: Visit):
    hello = json.loads(json.dumps(visit.hello(), allow_nan=False))
    assert [axis["name"] for axis in hello["axes"]] == ["x", "yaw", "dt"] and hello["axes"][2]["is_time"]
    assert {"height", "width", "num_seeds", "besides", "seconds", "ramp", "joint", "runtime"} <= set(hello)


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
    ('{"do": "reset", "seed": 0, "beside": "../.."}', "nothing, simulator, recording"),
    ('{"do": "reset", "seed": 0, "beside": []}', "nothing, simulator, recording"),
    ('{"do": "anchor"}', "nothing real"),
    ('{"do": "set", "level": -1}', "0 to 2"),
    ('{"do": "set", "level": "high"}', "0 to 2"),
    ('{"do": "set", "locked": 1}', "true or false"),
    ('{"do": "record"}', "dream or the simulator"),
    ('{"do": "record", "of": "/etc"}', "dream or the simulator"),
    ('{"do": "record", "of": "simulator"}', "not running beside"),
    ('{"do": "save"}', "nothing is being recorded"),
    ('{"do": "' + "x" * MAX_MESSAGE + '"}', "too long"),
]


@pytest.mark.parametrize(("text", "says"), WRONG, ids=[str(says)[:24] for _, says in WRONG])
def test_a_wrong_message_gets_a_sentence_and_changes_nothing(visit: Visit, text: str | None, says: str):
    ask(visit, **STEP)
    before = visit.dream.frame_HWC.copy()
    answer = visit.answer(text)
    assert isinstance(answer, dict) and says in answer["trouble"], answer
    assert len(answer["trouble"]) < 200
    assert visit.recorder is None and visit.dream.num_steps == 1 and np.array_equal(visit.dream.frame_HWC, before)
    assert ask(visit, **STEP)["steps"] == 2


def test_the_end_of_a_steering_recording_is_said(visit: Visit):
    ask(visit, do="reset", seed=0, beside="recording")
    answers = [ask(visit, **STEP) for _ in range(7)]
    assert [bool(a.get("ended")) for a in answers] == [False] * 5 + [True] * 2


def test_small_pictures_keep_every_byte_and_large_ones_are_close():
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    kind, data = encode(noise)
    assert kind == "image/png" and np.array_equal(np.array(Image.open(io.BytesIO(data))), noise)
    ramp = np.broadcast_to(np.linspace(0, 255, 256, dtype=np.uint8)[None, :, None], (192, 256, 3))
    kind, data = encode(np.ascontiguousarray(ramp))
    assert kind == "image/jpeg" and np.abs(np.array(Image.open(io.BytesIO(data)), int) - ramp).max() <= 6


# ---- recordings of a walk ------------------------------------------------------------------------------------------------


def test_a_walk_becomes_a_recording_by_the_convention(visit: Visit):
    ask(visit, do="record", of="dream")
    for number in range(24):
        if number == 12:
            assert ask(visit, do="reset", seed=2)["recorded"] == 14
        ask(visit, do="step", controls=[float(number), 0.0, 0.05])
    saved = ask(visit, do="save")
    assert saved["num_frames"] == 26 and saved["recorded"] is None
    recording = open_recording(saved["saved"])
    assert Path(saved["saved"]).parent == visit.folder / "recordings"
    assert recording.frames_THWC.shape == (26, 8, 12, 3) and recording.pose_T44 is None
    assert recording.episode_T.tolist() == [0] * 13 + [1] * 13
    # The control of a step belongs to the frame before it; the last of an episode leads nowhere.
    assert recording.actions_TA[:, 0].tolist() == [*range(12), 0.0, *range(12, 24), 0.0]
    assert recording.frames_THWC[:13, 0, 0, 1].tolist() == list(range(13))
    assert recording.frames_THWC[13, 0, 0, 0] == 2
    assert np.allclose(np.diff(recording.time_T), 0.05)
    assert recording.facts["source"] == {"name": "played", "of": "dream", "run": "walk"}


def test_a_recorded_simulator_tells_what_was_done_and_what_was_asked(visit: Visit):
    ask(visit, do="reset", seed=0, beside="simulator")
    ask(visit, do="record", of="simulator")
    assert "save the recording first" in ask(visit, do="reset", seed=0)["trouble"]
    for _ in range(15):
        ask(visit, do="step", controls=[2.0, 0.0, 0.05])
    path = ask(visit, do="save")["saved"]
    done, asked = open_recording(path), open_recording(path, "command")
    assert done.actions_TA[:-1, 0].tolist() == [1.0] * 15 and asked.actions_TA[:-1, 0].tolist() == [2.0] * 15
    assert done.pose_T44 is not None and np.allclose(np.diff(done.pose_T44[:, 0, 3]), 1.0)
    assert done.facts["simulator"] == {"name": "counting"}
    assert (done.frames_THWC[:, 0, 0, 1] == 255 - np.arange(16)).all()


def test_waking_up_begins_an_episode(visit: Visit):
    ask(visit, do="reset", seed=0, beside="simulator")
    ask(visit, do="record", of="dream")
    for number in range(12):
        ask(visit, **STEP)
        if number == 5:
            ask(visit, do="anchor")
    assert open_recording(ask(visit, do="save")["saved"]).episode_T.max() == 1


def test_a_walk_too_short_leaves_nothing(visit: Visit):
    ask(visit, do="record", of="dream")
    ask(visit, **STEP)
    assert "already" in ask(visit, do="record", of="dream")["trouble"]
    assert "at least 10" in ask(visit, do="save")["trouble"]
    assert visit.recorder is None and not (visit.folder / "recordings").exists()


@pytest.mark.parametrize("place", ["_take", "save"])
def test_a_full_disk_costs_the_recording_and_not_the_walk(visit: Visit, monkeypatch: pytest.MonkeyPatch, place: str):
    ask(visit, do="record", of="dream")
    ask(visit, **STEP)

    def full(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(play_record.Recorder, place, full)
    answer = ask(visit, **(STEP if place == "_take" else {"do": "save"}))
    assert answer["trouble"] == "the recording was given up: No space left on device" and visit.recorder is None
    assert ask(visit, **STEP)["recorded"] is None
    visit.close()


def test_a_recording_that_is_full_saves_itself(visit: Visit, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(play_record, "MAX_FRAMES", 15)
    ask(visit, do="record", of="dream")
    answers = [ask(visit, **STEP) for _ in range(16)]
    assert [n for n, a in enumerate(answers) if "saved" in a] == [13] and visit.recorder is None


# ---- many visitors, through the socket -----------------------------------------------------------------------------------


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> House:
    """A folder with a playable run, one of another recipe, and nothing else."""
    for name in ("walk", "other"):
        (tmp_path / name / "checkpoints").mkdir(parents=True)

    def player(root: Path, name: str, *rest: str) -> CountingPlayer:
        if name == "other":
            System().play("torch")
        return CountingPlayer()

    monkeypatch.setattr("seedbed.launch.local.player", player)
    return House(tmp_path)


@pytest.fixture
def client(house: House):
    app = Doors(Starlette(routes=play_routes(house.root, house)), {"testserver"}, token="secret")
    with TestClient(app, base_url="http://testserver", cookies={"seedbed": "secret"}) as client:
        yield client


ORIGIN = {"origin": "http://testserver"}


def enter(client: TestClient, run: str = "walk"):
    return client.websocket_connect(f"/play/{run}/walk", headers=ORIGIN)


def test_two_players_at_once_have_their_own_walks(client: TestClient, house: House):
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
        assert house.num_visitors == 2


def test_nonsense_over_the_socket_does_no_harm(client: TestClient):
    with enter(client) as socket:
        socket.receive_json(), socket.receive_json()
        for text, _ in WRONG:
            if text is None:
                socket.send_bytes(b"\x00\xff")
            else:
                socket.send_text(text)
            assert "trouble" in socket.receive_json()
        socket.send_json(STEP)
        assert opened(socket.receive_bytes())[0]["steps"] == 1


def test_a_closed_tab_frees_its_place_and_keeps_its_recording(client: TestClient, house: House):
    with enter(client) as socket:
        socket.receive_json(), socket.receive_json()
        socket.send_json({"do": "record", "of": "dream"})
        socket.receive_bytes()
        for _ in range(12):
            socket.send_json(STEP)
            socket.receive_bytes()
    house._threads().shutdown()
    (kept,) = (path for path in (house.root / "walk" / "recordings").iterdir() if not path.name.startswith("."))
    assert open_recording(kept).num_frames == 13 and house.num_visitors == 0


@pytest.mark.parametrize(
    ("run", "says"), [("nothing", "no run 'nothing'"), ("other", "cannot be played"), ("%2e%2e", "no run"), ("..%2fwalk", "")]
)
def test_a_run_that_cannot_be_played_gets_one_sentence(client: TestClient, house: House, run: str, says: str):
    if not says:
        with pytest.raises(WebSocketDisconnect), enter(client, run) as socket:
            socket.receive_json()
        return
    with enter(client, run) as socket:
        while "trouble" not in (message := socket.receive_json()):
            assert "loading" in message
        assert says in message["trouble"] and message["fatal"] and "\n" not in message["trouble"]
        with pytest.raises(WebSocketDisconnect):
            socket.receive_json()
    assert house.num_visitors == 0


def test_too_many_visitors_are_asked_to_wait(client: TestClient, house: House):
    house.num_visitors = MAX_VISITORS
    with enter(client) as socket:
        assert "visitors are here" in socket.receive_json()["trouble"]
    assert house.num_visitors == MAX_VISITORS


def test_pages_and_files(client: TestClient):
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


def test_a_stranger_gets_no_socket(client: TestClient):
    for headers in ({}, {"origin": "http://evil.example"}):
        with pytest.raises(WebSocketDisconnect), client.websocket_connect("/play/walk/walk", headers=headers) as socket:
            socket.receive_json()
    client.cookies.clear()
    with pytest.raises(WebSocketDisconnect), enter(client) as socket:
        socket.receive_json()


def test_a_run_is_loaded_once_until_it_has_better_weights(house: House):
    first = house.player("walk")
    step = house.root / "walk" / "checkpoints" / "step-000004"
    step.mkdir()
    (step.parent / "best").symlink_to("step-000004")
    second = house.player("walk")
    assert second is not first and house.player("walk") is second


# ---- recipes that cannot, commands ---------------------------------------------------------------------------------------


def test_other_recipes_say_so(tmp_path: Path):
    with pytest.raises(UserError, match="cannot be played"):
        System().play("torch")
    with pytest.raises(UserError, match="no web page"):
        System().export_web(tmp_path)


def test_the_runtime_of_the_page_is_found_or_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
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


def test_the_exported_page_needs_nothing_but_its_folder(tmp_path: Path):
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


def test_commands_say_what_is_wrong_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
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
        (["play", "sums"], "cannot be played; those of world can"),
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
