"""The player's page and the exported page in a real browser: keys, mouse, fingers, gamepad, toggles, recordings, self-test."""

import contextlib
import functools
import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT

from seedbed.errors import UserError
from seedbed.recipes.world.recording.recording import open_recording
from seedbed.serve import web_page
from seedbed.train.system import Sample

pytestmark = pytest.mark.slow

SMALL = ["steps=40", "data.frames=700", "every.eval=40", "every.save=40", "model.size=0.1m", "ema=0", "optim.lr=0.005"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of world/demo, trained for a moment."""
    from seedbed.launch import local
    from seedbed.recipes.world.system import World

    root = tmp_path_factory.mktemp("play") / "runs"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(World, "sample", lambda *given: Sample())  # nobody reads its examination
        assert local.train("world/demo", SMALL, root=root, run_name="place", dirty=True) == 0
    return root


@pytest.fixture(scope="module")
def address(runs: Path) -> Iterator[str]:
    """`seedbed play place`, in a process of its own."""
    code = "import sys; from seedbed.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "--runs", str(runs), "play", "place", "--port", "0"]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found, line + server.stdout.read()
        yield found.group(0)
        server.terminate()


class Visitor:
    """A tab, with what went wrong in it."""

    def __init__(self, browser: Any, address: str, **options: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **options})
        self.page = self.context.new_page()
        self.wrong: list[str] = []
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("console", lambda printed: self.wrong.append(printed.text) if printed.type == "error" else None)
        self.page.on("requestfailed", lambda request: self.wrong.append(f"{request.url} failed"))
        home = "/".join(address.split("/")[:3])
        self.page.on("request", lambda r: None if r.url.startswith((home, "data:", "blob:")) else self.wrong.append(r.url))
        self.page.goto(address)

    def ready(self) -> "Visitor":
        self.page.wait_for_selector("#state:text-is('ready')", timeout=120_000)
        self.until(lambda: self.frame() > 0)
        return self

    def frame(self) -> int:
        text = self.page.inner_text("#frame")
        return int(text) if text.isdigit() else 0

    def pixels(self, canvas: str = "rollout") -> np.ndarray:
        script = """id => { const canvas = document.getElementById(id);
          return Array.from(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data) }"""
        return np.array(self.page.evaluate(script, canvas))

    def value(self, axis: int) -> float:
        return float(self.page.inner_text(f".axis:nth-child({axis + 1}) output").split()[0])

    def until(self, holds: Any, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, f"it did not happen; {self.wrong} {self.page.inner_text('#note')}"
            self.page.wait_for_timeout(50)

    def walk(self, num: int, seed_reset: bool = True) -> None:
        """Pause, go back to the start, and take single steps."""
        if "Pause" in self.page.inner_text("#pause"):
            self.page.click("#pause")
        if seed_reset:
            self.page.click("#reset")
            self.until(lambda: self.frame() == 0)
        for number in range(num):
            before = self.frame()
            self.page.click("#step")
            self.until(lambda before=before: self.frame() == before + 1)
            assert number >= 0


@pytest.fixture
def visitor(browser: Any, address: str) -> Iterator[Visitor]:
    visitor = Visitor(browser, address).ready()
    yield visitor
    assert visitor.wrong == []
    visitor.context.close()


def test_keys_change_the_image(visitor: Visitor):
    visitor.walk(12)
    still = visitor.pixels()
    visitor.page.keyboard.down("KeyW")
    visitor.page.keyboard.down("ArrowLeft")
    visitor.walk(12)
    moved = visitor.pixels()
    assert visitor.value(0) > 0 and visitor.value(5) > 0
    visitor.page.keyboard.up("KeyW")
    visitor.page.keyboard.up("ArrowLeft")
    assert not np.array_equal(still, moved)
    visitor.walk(12)
    assert np.array_equal(visitor.pixels(), still), "without keys the same walk comes back"
    assert visitor.value(0) == 0


def test_playback_runs_and_can_be_paused(visitor: Visitor):
    visitor.page.keyboard.press("Space")
    visitor.page.wait_for_timeout(300)
    held = visitor.frame()
    visitor.page.wait_for_timeout(300)
    assert visitor.frame() == held
    visitor.page.keyboard.press(".")
    visitor.until(lambda: visitor.frame() == held + 1)
    visitor.page.keyboard.press("Space")
    visitor.until(lambda: visitor.frame() > held + 10)
    assert visitor.page.inner_text("#fps").isdigit() and "ms" in visitor.page.inner_text("#latency")


def test_reference_toggle_shows_simulator_and_recording(visitor: Visitor, runs: Path):
    page = visitor.page
    assert page.is_hidden("#reference-figure")
    page.click("button[data-reference=simulator]")
    visitor.until(lambda: page.is_visible("#reference-figure"))
    page.keyboard.down("KeyA")
    visitor.walk(1)
    near = visitor.pixels("reference")
    visitor.walk(8, seed_reset=False)
    page.keyboard.up("KeyA")
    assert not np.array_equal(visitor.pixels("reference"), near) and page.inner_text("#reference-name") == "simulator"
    page.click("#anchor")
    visitor.until(lambda: np.array_equal(visitor.pixels("reference"), visitor.pixels()))
    assert page.inner_text("#difference") == "equal"
    page.click("button[data-reference=recording]")
    visitor.walk(2)
    assert page.inner_text("#reference-name") == "recording" and abs(visitor.value(6) - 0.033) < 0.002
    page.click("button[data-reference=nothing]")
    visitor.until(lambda: page.is_hidden("#reference-figure"))


def test_memory_and_starts_are_shown(visitor: Visitor):
    visitor.walk(1)
    assert "4 frames of 32 \u00d7 32" in visitor.page.inner_text("#memory")
    first = visitor.pixels()
    visitor.page.click("#seed-next")
    visitor.until(lambda: visitor.page.inner_text("#seed-number").startswith("2 of"))
    visitor.until(lambda: not np.array_equal(visitor.pixels(), first))


@pytest.mark.parametrize("of", ["rollout", "simulator"])
def test_recording_is_written(visitor: Visitor, runs: Path, of: str, capsys: pytest.CaptureFixture[str]):
    from seedbed.cli import main

    page = visitor.page
    if of == "simulator":
        page.click("button[data-reference=simulator]")
        visitor.until(lambda: page.is_visible("#reference-figure"))
    page.keyboard.press("Enter")
    page.keyboard.down("KeyW")
    visitor.until(lambda: int((re.search(r"\d+", page.inner_text("#record")) or [0])[0]) > 60)
    page.keyboard.up("KeyW")
    page.click("#record")
    visitor.until(lambda: "seedbed data inspect" in page.inner_text("#note"))
    found = re.search(r"frames in (\S+)", page.inner_text("#note"))
    assert found
    recording = open_recording(found.group(1))
    assert recording.num_frames > 60 and recording.facts["source"]["of"] == of
    assert recording.actions_TA[10:50, 0].max() > 0
    assert main(["data", "inspect", found.group(1)]) == 0, capsys.readouterr().err
    assert main(["data", "verify", found.group(1)]) == 0, capsys.readouterr().err


def test_sessions_of_two_tabs_are_independent(browser: Any, address: str):
    one, two = (Visitor(browser, address).ready() for _ in range(2))
    two.page.click("#seed-next")
    two.until(lambda: two.page.inner_text("#seed-number").startswith("2 of"))
    one.walk(3)
    two.walk(3)
    assert one.frame() == two.frame() == 3 and not np.array_equal(one.pixels(), two.pixels())
    kept = one.pixels()
    two.page.click("#pause")
    two.page.close()
    one.walk(3)
    assert np.array_equal(one.pixels(), kept), "somebody else's tab changed this walk"
    assert one.wrong == []
    one.context.close()


def test_malformed_message_from_the_page_does_no_harm(visitor: Visitor):
    """Messages that our own page never sends, over a second socket of the same page."""
    script = """() => new Promise((done) => {
      const socket = new WebSocket(location.href.replace("http", "ws") + "/socket");
      const heard = [];
      socket.onmessage = (event) => {
        if (typeof event.data === "string") heard.push(event.data);
        if (heard.length === 4) done(heard);
      };
      socket.onopen = () => { socket.send("{"); socket.send(new Uint8Array(9)); };
    })"""
    heard = visitor.page.evaluate(script)
    assert "hello" in heard[1] and "not JSON" in heard[2] and "JSON objects" in heard[3]
    before = visitor.frame()
    visitor.until(lambda: visitor.frame() > before + 5)


def test_missing_run_shows_an_error(browser: Any, address: str):
    context = browser.new_context()
    page = context.new_page()
    answer = page.goto(address.replace("place", "plaice"))
    assert answer.status == 404 and "nearest: place" in page.inner_text("body")
    context.close()


def test_controls_stay_in_the_recorded_range(visitor: Visitor):
    script = """async () => {
      const { toRaw, bind } = await import("/static/play/controls.js");
      const axis = { name: "x", half: [-1, 2], full: [-3, 5], limit: 6 };
      const button = { name: "fire", half: [0, 1], full: [0, 1], limit: 1 };
      const raw = [-2, -1, -0.75, -0.5, -0.25, 0, 0.25, 0.5, 0.75, 1, 2].map((u) => toRaw(axis, u));
      return [raw, bind([axis, button, { ...axis, dead: true }])];
    }"""
    raw, bound = visitor.page.evaluate(script)
    assert raw == [-6, -3, -2, -1, -0.5, 0, 1, 2, 3.5, 5, 10]
    assert bound[0][1]["keys"] == ["KeyW"] and bound[1] == [None, {"keys": ["Digit1"]}] and bound[2] == [None, None]


def test_buttons_are_binary_and_exclusive_as_recorded(visitor: Visitor):
    script = """async (facts) => {
      const { Controls } = await import("/static/play/controls.js");
      const names = ["noop", "fire", "up", "right", "upright", "uprightfire"];
      const axes = names.map((name) => ({ name, half: [0, 1], full: [0, 1], limit: 1, scale: 1 }));
      axes.push({ name: "dt", is_time: true, scale: 0.5 });
      const sticks = { left: document.createElement("i"), right: document.createElement("i") };
      const buttons = [...names.map(() => true), false];
      const controls = new Controls(axes, { buttons, ...facts }, document.createElement("i"), sticks);
      return [[], ["KeyW"], ["ArrowUp", "KeyD"], ["KeyW", "KeyD", "KeyJ"], ["KeyJ", "KeyW"], ["KeyS"]].map((keys) => {
        controls.pressed = new Set(keys);
        return controls.next();
      });
    }"""
    chosen = [row.index(1) for row in visitor.page.evaluate(script, {"one_of": True})]
    assert chosen[:4] == [0, 2, 4, 5] and chosen[4] in (1, 2) and chosen[5] == 0
    rows = visitor.page.evaluate(script, {"one_of": False})
    assert rows[0] == [0, 0, 0, 0, 0, 0, 0.5] and rows[3][:4] == [0, 1, 1, 1]


def test_controls_are_ramped_and_shift_marks_unrecorded_ones(visitor: Visitor):
    page = visitor.page
    visitor.walk(1)
    page.keyboard.down("KeyW")
    values = []
    for _ in range(14):
        visitor.walk(1, seed_reset=False)
        values.append(visitor.value(0))
    assert 0 < values[0] < values[-1] and values == sorted(values) and values[-1] == values[-2]
    assert page.is_hidden("#warning")
    others = ["Shift", "KeyA", "KeyR", "ArrowLeft", "ArrowUp", "KeyE"]
    for key in others:
        page.keyboard.down(key)
    for _ in range(14):
        visitor.walk(1, seed_reset=False)
    assert visitor.value(0) > 1.9 * values[-1] and page.is_visible("#warning")
    for key in [*others, "KeyW"]:
        page.keyboard.up(key)
    for _ in range(26):
        visitor.walk(1, seed_reset=False)
    assert visitor.value(0) == 0 and page.is_hidden("#warning")


def test_keyboard_focus_returns_to_the_rollout_after_a_click(visitor: Visitor):
    page = visitor.page
    page.click("#seed-next")
    assert page.evaluate("() => document.activeElement.id") == "rollout"
    page.focus("#seed")
    page.keyboard.press("ArrowRight")
    visitor.until(lambda: page.inner_text("#seed-number").startswith("3 of"))
    assert page.evaluate("() => document.activeElement.id") == "seed" and visitor.value(5) == 0
    page.focus("#pause")
    page.keyboard.press("Space")
    visitor.until(lambda: "Resume" in page.inner_text("#pause"))


def test_mouse_controls_the_view(visitor: Visitor):
    box = visitor.page.locator("#rollout").bounding_box()
    middle = (box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    visitor.walk(1)
    visitor.page.mouse.move(*middle)
    visitor.page.mouse.down()
    visitor.page.mouse.move(middle[0] + 40, middle[1] - 40)
    visitor.page.keyboard.press(".")
    visitor.until(lambda: visitor.value(5) != 0)
    # To the right is a negative yaw; upwards is a negative pitch.
    assert visitor.value(5) < 0 and visitor.value(4) < 0
    visitor.page.mouse.up()


def test_touch_controls_on_a_phone(browser: Any, address: str):
    phone = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
    visitor = Visitor(browser, address, **phone).ready()
    width = visitor.page.evaluate("() => document.documentElement.scrollWidth")
    assert width <= 390, "the page is wider than the phone"
    box = visitor.page.locator("#rollout").bounding_box()
    script = """([kind, id, x, y]) => document.getElementById("rollout").dispatchEvent(new PointerEvent(kind,
      { pointerId: id, pointerType: "touch", clientX: x, clientY: y, bubbles: true, isPrimary: true }))"""
    visitor.page.evaluate("() => { document.getElementById('rollout').setPointerCapture = () => {}; }")
    left, top = box["x"] + 0.25 * box["width"], box["y"] + 0.5 * box["height"]
    visitor.page.evaluate(script, ["pointerdown", 7, left, top])
    visitor.page.evaluate(script, ["pointermove", 7, left, top - 70])
    visitor.until(lambda: visitor.value(0) > 0)
    assert visitor.page.is_visible("#stick-left")
    visitor.page.evaluate(script, ["pointerup", 7, left, top - 70])
    visitor.until(lambda: visitor.value(0) == 0)
    assert visitor.page.is_hidden("#stick-left") and visitor.wrong == []
    visitor.context.close()


def test_gamepad_controls(browser: Any, address: str):
    context = browser.new_context()
    context.add_init_script(
        "navigator.getGamepads = () => [{ connected: true, axes: [0, -1, 0.6, 0], buttons: Array(17).fill({ value: 0 }) }]"
    )
    page = context.new_page()
    page.goto(address)
    page.wait_for_selector("#state:text-is('ready')", timeout=120_000)
    page.wait_for_timeout(1500)
    forward, turn = (float(page.inner_text(f".axis:nth-child({n}) output").split()[0]) for n in (1, 6))
    assert forward > 0 > turn
    context.close()


# ---- the exported page ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runtime() -> Iterator[Path]:
    """ONNX Runtime Web, from $SEEDBED_ORT or fetched by npm."""
    given = os.environ.get("SEEDBED_ORT")
    with contextlib.ExitStack() as stack:
        try:
            yield stack.enter_context(web_page.runtime_files(Path(given) if given else None, fetch=not given))
        except UserError as problem:
            pytest.skip(f"no ONNX Runtime Web: {problem}")


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *words: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def self_test(browser: Any, folder: Path) -> tuple[dict[str, Any], Visitor]:
    with served(folder) as address:
        visitor = Visitor(browser, address)
        visitor.page.wait_for_function("window.selfTest", timeout=200_000)
        result = visitor.page.evaluate("window.selfTest")
        if result["ok"]:
            visitor.ready()
            visitor.page.keyboard.down("KeyW")
            visitor.walk(2)
            assert visitor.value(0) > 0
        return result, visitor


def test_exported_page_equals_torch(browser: Any, runs: Path, runtime: Path, tmp_path: Path):
    from seedbed.cli import main

    out = tmp_path / "web"
    assert main(["--runs", str(runs), "export", "place", "--to", "web", "--out", str(out), "--ort", str(runtime)]) == 0
    result, visitor = self_test(browser, out)
    assert result["ok"] and result["output"] < 1e-3 and result["packing"] == 0 == result["scales"], result
    assert visitor.wrong == [] and visitor.page.inner_text("#run") == "place" and visitor.page.is_hidden("#record")
    visitor.context.close()
    # A page whose network differs from its golden outputs says so instead of playing.
    places = (out / "arrays.bin").read_bytes()
    (out / "arrays.bin").write_bytes(places[:-4000] + bytes(4000))
    result, visitor = self_test(browser, out)
    assert not result["ok"] and "self-test failed" in visitor.page.inner_text("#error")
    visitor.context.close()
    shutil.rmtree(out / "ort")
    result, visitor = self_test(browser, out)
    assert not result["ok"] and "is the folder ort/ beside this page?" in visitor.page.inner_text("#error")
    visitor.context.close()


@pytest.mark.timeout(900)
def test_five_million_generator_runs_in_the_page(browser: Any, runtime: Path, tmp_path: Path):
    """192x256 pixels and memories at four sizes: what the page packs is what training packs, to the last bit."""
    import torch
    from play import built

    from seedbed.recipes.world.export_web import export_web

    system = built("world/log5m", tmp_path, [])
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in system.parameters():  # nothing stays zero, as it is at birth: every input counts
            parameter += 0.005 * torch.randn(parameter.shape, generator=generator)
    out = tmp_path / "web"
    export_web(system.play("torch"), out)
    web_page.write_page(out, runtime, "five")
    result, visitor = self_test(browser, out)
    assert result["ok"] and result["output"] < 1e-3 and result["packing"] == 0, result
    strips = visitor.page.inner_text("#memory")
    assert visitor.wrong == [] and "4 frames of 256 \u00d7 192" in strips and "32 frames of 4 \u00d7 3" in strips
    visitor.context.close()
