"""The workbench in a real browser: live curves, comparison, filters, notes, sweeps, the player and the playground.

Every test ends with a screenshot in its temporary folder, no error in the console, and no request to another host.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from _runs import make_runs
from conftest import ROOT
from helpers import TOY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

TINY = ("model.depth=1", "model.width=32", "every.log=2", "every.eval=4", "every.save=4", "--dirty")
ENV = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


def seedbed(*words: str) -> list[str]:
    return [sys.executable, "-c", "import sys; from seedbed.cli import main; sys.exit(main())", *words]


def typed(root: Path, *words: str) -> None:
    """A command as a person types it, to its end."""
    env = {**ENV, "SEEDBED_CACHE": os.environ["SEEDBED_CACHE"]}
    command = [*seedbed("--runs", str(root)), *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dozen made-up runs, and a sweep that was trained."""
    root = tmp_path_factory.mktemp("bench") / "runs"
    make_runs(root, 10, 400, num_per_sweep=10)
    typed(root, "sweep", TOY, "optim.lr=1e-3,1e-2,3e-2", "model.width=4,8", "steps=8", "--name", "map", "--no-check", "--dirty")
    return root


@contextmanager
def process(words: list[str], out: int = subprocess.PIPE) -> Iterator[subprocess.Popen[str]]:
    env = {**ENV, "SEEDBED_CACHE": os.environ["SEEDBED_CACHE"]}
    with subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, text=True, env=env) as started:
        try:
            yield started
        finally:
            started.send_signal(signal.SIGTERM)


@pytest.fixture(scope="module")
def address(root: Path) -> Iterator[str]:
    with process(seedbed("--runs", str(root), "serve", "--port", "0")) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        found = re.search(r"http://\S+(?=/)", line)
        assert found, line + server.stdout.read()
        yield found[0]


@pytest.fixture
def visit(browser: Any, address: str, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Open a page of the workbench; at the end nothing may have gone wrong in any tab."""
    wrong: list[str] = []
    tabs: list[Any] = []

    def open_page(path: str, **options: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1400, "height": 900}, **options})
        page = context.new_page()
        page.set_default_timeout(40_000)
        page.on("console", lambda printed: wrong.append(printed.text) if printed.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda asked: None if own(asked.url) else wrong.append(f"asked {asked.url}"))
        page.on("websocket", lambda opened: None if own(opened.url) else wrong.append(f"opened {opened.url}"))
        tabs.append(page)
        page.goto(address + path)
        return page

    def own(url: str) -> bool:
        return url.startswith((address, address.replace("http:", "ws:"), "data:", f"blob:{address}"))

    yield open_page
    for number, page in enumerate(tabs):
        page.screenshot(path=tmp_path / f"page-{number}.png")
        page.context.close()
    assert not wrong, wrong


def until(page: Any, expression: str, seconds: float = 40.0) -> None:
    """Wait until an expression holds in the page; the pages' policy forbids them to evaluate it themselves."""
    end = time.monotonic() + seconds
    while not page.evaluate(expression):
        assert time.monotonic() < end, f"never: {expression}"
        page.wait_for_timeout(100)


def names(page: Any) -> list[str]:
    return page.locator("tr[data-path] .name a").all_inner_texts()


def test_run_list_is_sorted_filtered_searched_and_grouped(visit):
    page = visit("/")
    page.wait_for_selector("tr[data-path]")
    assert "map" in names(page) and "map-0001" not in names(page)
    page.click("text=Loss")
    page.locator("th[aria-sort=ascending]", has_text="Loss").wait_for()
    shown = [float(text) for text in page.locator("td.c-num:not(.c-rate)").all_inner_texts() if re.fullmatch(r"\d\.\d+", text)]
    assert len(shown) >= 10 and shown == sorted(shown)
    page.click("text=Loss")
    page.locator("th[aria-sort=descending]", has_text="Loss").wait_for()
    page.keyboard.press("/")
    page.keyboard.type("half the depth")
    until(page, "document.querySelectorAll('tr[data-path]').length < 5")
    assert set(names(page)) == {"run-0000", "run-0006"}
    page.keyboard.press("Escape")
    page.select_option("select[aria-label=Recipe]", label="flow/shapes")
    until(page, "document.querySelectorAll('tr[data-path]').length < 5")
    assert set(names(page)) == {"run-0001", "run-0005", "run-0009"}
    page.select_option("select[aria-label=Recipe]", label="All recipes")
    page.click("button.fold")
    page.wait_for_selector("text=map-0001")
    page.select_option("select[aria-label=Group]", "parent")
    page.wait_for_selector(".indent")
    page.click("button.chip:has-text('done')")
    assert page.locator("button.chip[aria-pressed=true]").inner_text().startswith("done")


def test_live_run_is_updated_without_a_reload(visit, root: Path):
    settings = ("steps=500000", "every.eval=2000", "every.save=100000", "guard.policy=skip")
    words = seedbed("--runs", str(root), "train", TOY, *settings, "--run", "growing", "--dirty", "--no-check")
    with process(words, out=subprocess.DEVNULL):
        page = visit("/")
        page.locator("tr", has_text="growing").locator(".status.running").wait_for()
        page.click("text=growing")
        page.wait_for_selector(".wide .chart .scatterlayer path")
        page.evaluate("window.stays = true")
        page.locator(".tile .v").first.wait_for()
        step = "Number(document.querySelector('.tile .v')?.textContent.replace(/,/g, ''))"  # the page may be drawing it
        first = page.evaluate(step)
        drawn = "Math.max(...document.querySelector('.wide .chart').data[0].x)"
        end = page.evaluate(drawn)
        until(page, f"{step} > {first} && {drawn} > {end}")
        assert page.evaluate("window.stays"), "the page was loaded again"
        assert page.locator(".head .status").inner_text() == "running"
    page.locator(".head .status.interrupted").wait_for()


def test_curves_zoom_smooth_and_change_their_axes(visit):
    page = visit("/run/run-0000")
    page.wait_for_selector(".wide .chart .scatterlayer path")
    chart = "document.querySelector('.wide .chart')"
    assert page.evaluate(f"{chart}.layout.shapes.length") == 1, "the spike is marked"
    page.click("button:has-text('Time')")
    until(page, f"{chart}.layout.xaxis.title.text.includes('seconds')")
    assert page.evaluate(f"Math.max(...{chart}.data[0].x)") == pytest.approx(0.123 * 400)
    page.click("text=log y")
    until(page, f"{chart}.layout.yaxis.type === 'log'")
    box = page.locator(".wide .chart .nsewdrag").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 160, steps=5)
    with page.expect_response(lambda answer: "low=" in answer.url):
        page.mouse.up()
    until(page, f"Math.max(...{chart}.data[0].x) < 40")


def test_comparison_of_two_runs(visit):
    page = visit("/")
    for name in ("run-0001", "run-0002"):
        page.check(f"[aria-label='Choose {name}']")
    page.click(".tray .primary")
    page.wait_for_selector("[data-key=loss] .chart .scatterlayer path")
    assert page.evaluate("document.querySelector('[data-key=loss] .chart').data.length") == 4, "two curves, raw and smooth"
    assert page.locator(".delta .tag").count() == 1
    settings = page.locator("section", has_text="Settings that differ").locator("tbody tr td:first-child").all_inner_texts()
    assert settings == ["seed", "optim.lr"]
    until(page, "document.querySelector(\"[data-key='eval/loss'] .chart\").data?.[0].x.length === 8")


def test_note_is_found_in_the_journal(visit, root: Path):
    page = visit("/run/run-0003")
    page.fill("[aria-label='New note']", "width <b>beats</b> depth here")
    page.click("text=Add note")
    page.wait_for_selector(".note p")
    assert page.locator(".note p").inner_text() == "width <b>beats</b> depth here"
    assert "width <b>beats</b> depth here" in (root.parent / "JOURNAL.md").read_text()
    page.click(".note button:has-text('edit')")
    page.fill("[aria-label='Edit note']", "it was the seed")
    page.click("text=Save")
    page.wait_for_selector("text=it was the seed")
    text = (root.parent / "JOURNAL.md").read_text()
    assert "it was the seed" in text and "beats" not in text
    page.click("nav >> text=Journal")
    page.wait_for_selector("article")
    assert "it was the seed" in page.inner_text("main")


def test_sweep_page_has_a_map_and_parallel_lines(visit):
    page = visit("/sweep/map")
    page.wait_for_selector(".heat .hm image")
    z = page.evaluate("document.querySelector('.heat').data[0].z")
    assert len(z) == 2 and len(z[0]) == 3 and all(isinstance(v, float) for row in z for v in row)
    assert page.locator(".parallel path").count() == 6
    page.locator(".parallel path").first.focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**/run/map-000*")


COMPARED = "/compare?run=run-0000&run=run-0001"
SMALL = {"/": "dark", "/run/run-0000": "light", COMPARED: "dark", "/sweep/map": "dark", "/journal": "light"}


def test_phone_layout_of_pages(visit):
    for path, scheme in SMALL.items():
        page = visit(path, viewport={"width": 390, "height": 800}, color_scheme=scheme)
        page.wait_for_selector("main > div > *")
        page.wait_for_timeout(600)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, f"{path} is wider than a phone"
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(16, 20, 18)"
        assert dark == (scheme == "dark")


def test_keyboard_opens_and_compares_runs(visit):
    page = visit("/")
    page.wait_for_selector("tr[data-path]")
    page.select_option("select[aria-label=Recipe]", label="flow/shapes")
    page.click("h1")
    for key in "jxjxc":
        page.keyboard.press(key)
    page.wait_for_url("**/compare?run=*&run=*")
    page.keyboard.press("g")
    page.wait_for_selector("tr[data-path]")
    page.keyboard.press("?")
    page.wait_for_selector("dialog kbd")
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url("**/run/*")


def test_empty_pages_say_so(browser: Any, tmp_path: Path):
    page = browser.new_page()
    page.set_default_timeout(40_000)
    words = seedbed("--runs", str(tmp_path / "runs"), "serve", "--port")
    with process([*words, "0"]) as server:
        assert server.stdout is not None
        address = server.stdout.readline().split()[-1]
        page.goto(address)
        page.wait_for_selector("text=Nothing has been sown here yet")
        page.screenshot(path=tmp_path / "empty.png")
        (tmp_path / "runs" / "first").mkdir(parents=True)
        page.wait_for_selector("tr >> text=first")
    page.wait_for_selector(".lamp.off")
    # Started again, with another token: the page that is still open finds its way back.
    with process([*words, address.rstrip("/").rpartition(":")[2]]):
        page.wait_for_selector(".lamp.on")
        (tmp_path / "runs" / "second").mkdir()
        page.wait_for_selector("tr >> text=second")
    page.close()


def test_markup_in_names_and_reasons_stays_text(visit, root: Path):
    bad = "<img src=x onerror=document.title='broken'>"
    shutil.copytree(root / "run-0004", root / bad)
    config = root / bad / "config.json"
    config.write_text(config.read_text().replace('"why": "', f'"why": "{bad}'))
    try:
        page = visit("/")
        page.fill("[type=search]", "onerror")
        page.locator("tr[data-path] a").click()
        page.wait_for_selector(".wide .chart .scatterlayer path")
        assert page.inner_text("h1") == bad and page.locator("main img[src=x]").count() == 0
        assert page.title().startswith(bad)
        page.click("nav >> text=Journal")  # a page that watches a run says so when it is removed
        page.wait_for_selector("h1:has-text('Journal')")
    finally:
        shutil.rmtree(root / bad)


@pytest.mark.parametrize(("recipe", "options"), [("gpt/demo", ()), ("ebt/demo", ("batch=4",))])
def test_playground_streams_text(visit, root: Path, recipe: str, options: tuple[str, ...]):
    name = f"asked-{recipe[:3]}"
    typed(root, "train", recipe, "steps=4", *TINY, *options, "--run", name, "--no-check")
    page = visit(f"/run/{name}")
    page.click("text=Playground")
    page.wait_for_selector(".options input[name=temperature]")
    assert page.locator(".options input[name=optimize_steps]").count() == (recipe == "ebt/demo")
    page.fill("[aria-label=Prompt]", "The statement")
    page.fill(".options input[name=tokens]", "5000")
    page.evaluate("""() => {
        const output = document.querySelector('.output');
        window.seen = [];
        new MutationObserver(() => seen.push(output.textContent.length)).observe(output, { childList: true, subtree: true });
    }""")
    page.click("button:has-text('Generate')")
    until(page, "document.querySelector('.output').textContent.startsWith('The statement') && seen.length > 8")
    sizes = page.evaluate("seen")
    assert len(set(sizes)) > 5, "words came all at once"
    page.click("button:has-text('Stop')")
    page.wait_for_selector("button.primary:has-text('Generate')")
    page.fill(".options input[name=temperature]", "-1")
    page.click("button:has-text('Generate')")
    page.wait_for_selector(".output [role=alert]")


def test_play_page_opens_from_the_run_page(visit, root: Path, monkeypatch: pytest.MonkeyPatch):
    from seedbed.launch import local
    from seedbed.recipes.world.system import World
    from seedbed.train.system import Sample

    monkeypatch.setattr(World, "sample", lambda *given: Sample())  # nobody reads its examination
    small = ["steps=10", "data.frames=400", "every.eval=10", "every.save=10", "model.size=0.1m", "ema=0"]
    assert local.train("world/demo", small, root=root, run_name="place", dirty=True) == 0
    page = visit("/run/place")
    page.click("text=Play")
    page.wait_for_selector("canvas")
    until(
        page,
        """(() => {
        const shown = document.querySelector('canvas'), copy = new OffscreenCanvas(shown.width, shown.height);
        const pen = copy.getContext('2d', { willReadFrequently: true });
        pen.drawImage(shown, 0, 0);
        const pixels = pen.getImageData(0, 0, shown.width, shown.height).data;
        return pixels.some((value, index) => index % 4 < 3 && value > 0);
    })()""",
    )
