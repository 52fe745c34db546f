"""The page of a run in a real browser: sections, search, lineage, difference, console, samples, keyboard, phone, both themes."""

import json
import random
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _runs import make_run
from chart_samples import rows
from PIL import Image
from test_serve_browser import address, typed, until, visit  # noqa: F401
from toy_recipe import __file__ as TOY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
THEMES = {"light": "rgb(247, 246, 242)", "dark": "rgb(16, 20, 18)"}
NOW = datetime(2026, 1, 2, tzinfo=UTC)
FIRST_WORDS = ("earlier", "later", "last")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A family of runs made up: one of text, one of pictures, one of films, and one that was trained and resumed."""
    root = tmp_path_factory.mktemp("page") / "runs"
    for number, name in enumerate(("root", "middle", "text", "grandchild")):
        parent = {"middle": "root", "text": "middle", "grandchild": "text"}.get(name)
        make_run(root / name, rows(2.0, random.Random(number), **{"group.a": 0.5 + number}), 0, NOW, parent=parent)
    make_run(root / "many", rows(1.0, random.Random(9), **{f"own_{letter}": 1.0 for letter in "abcdefghijklm"}), 1, NOW)
    make_run(root / "pictures", rows(1.0, random.Random(7)), 1, NOW)
    make_run(root / "film", rows(1.0, random.Random(8)), 1, NOW, parent="was-removed")
    event(root / "text", step=400, kind="test", accuracy=0.75)
    event(root / "text", step=250, kind="resume", device="cpu", changed={"optim.lr": [0.002, 0.001]}, severity="notice")
    wall = {"start": 2.7163698480002267, "train": 70.99859715899993}
    event(root / "text", step=500, kind="end", status="done", wall=wall)
    for step, word in enumerate(FIRST_WORDS):
        event(root / "text", step=100 * step, kind="sample", text=f"{word} words", files=[])
        event(root / "pictures", step=100 * step, kind="sample", text="", files=[picture(root / "pictures", step)])
    event(root / "film", step=500, kind="sample", text="a table", files=film(root / "film"))
    config = json.loads((root / "text" / "config.json").read_text())
    config["config"]["optim"]["lr"] = 0.125
    (root / "text" / "config.json").write_text(json.dumps(config))
    facts = {"version": "0.0.9", "commit": "a" * 40, "dirty": True, "python": "3.12.0", "packages": {"torch": "2.0.0"}}
    (root / "root" / "code.json").write_text(json.dumps(facts))
    (root / "root" / "code.patch").write_text("+ a line\n")
    (root / "text" / "console.log").write_text("".join(f"step {n} loss {n / 7:.3f}\n" for n in range(300)))
    typed(root, "train", TOY, "--run", "resumed", "--no-check", "--dirty", "--until", "5")
    typed(root, "resume", "resumed", "steps=20")
    return root


def event(path: Path, **facts: Any) -> None:
    with open(path / "events.jsonl", "a") as file:
        file.write(json.dumps({"time": 1.0, **facts}) + "\n")


def picture(path: Path, step: int) -> str:
    name = f"samples/sheet-{step}.png"
    Image.fromarray(np.random.default_rng(step).integers(0, 255, (24, 32, 3), np.uint8)).save(path / name)
    return name


def film(path: Path) -> list[str]:
    """A film as a world writes it: a GIF, an MP4 of the same frames, and a sheet."""
    from seedbed.recipes.world import show

    pages = [Image.fromarray(np.full((64, 96, 3), 20 * n, np.uint8)) for n in range(10)]
    pages[0].save(path / "samples" / "rollout.gif", save_all=True, append_images=pages[1:])
    made = vars(show)["_mp4"](pages, path / "samples" / "rollout.mp4") if has_av() else None
    return [*([f"samples/{made.name}"] if made else []), "samples/rollout.gif", picture(path, 9)]


def has_av() -> bool:
    import importlib.util

    return importlib.util.find_spec("av") is not None


def opened(visit: Any, path: str, **options: Any) -> Any:  # noqa: F811
    page = visit(path, **options)
    page.wait_for_selector(".panel .scatterlayer .trace", state="attached")
    return page


def sections(page: Any) -> dict[str, bool]:
    """The sections that are shown, and whether they are open."""
    script = "[...document.querySelectorAll('.section')].filter(one => !one.hidden).map(one => [one.dataset.section, one.open])"
    return dict(page.evaluate(script))


def keys(page: Any, section: str) -> list[str]:
    return page.evaluate(f"[...document.querySelectorAll('[data-section={section}] .panel')].map(one => one.dataset.key)")


# ---- curves ------------------------------------------------------------------------------------------------------------


def test_run_sections_hold_training_evaluation_system_and_own_groups(visit):  # noqa: F811
    page = opened(visit, "/run/text")
    assert sections(page) == {"Training": True, "Evaluation": True, "System": True, "group": False}
    assert keys(page, "System") == ["items_per_s", "memory"] and keys(page, "Evaluation") == ["eval/loss"]
    assert keys(page, "Training")[0] == "loss" and keys(page, "group") == ["group.a"]
    assert keys(page, "Training")[1:] == ["psnr", "part_00", "lr"], "metrics that differ in a number share a panel"
    page.click("[data-section=group] > summary")
    page.click("[data-section=System] > summary")
    page.wait_for_selector("[data-key='group.a'] .scatterlayer .trace", state="attached")
    page.reload()
    page.wait_for_selector(".panel .scatterlayer .trace", state="attached")
    assert sections(page) == {"Training": True, "Evaluation": True, "System": False, "group": True}, "kept in the browser"
    other = page.context.new_page()
    other.goto(page.url.replace("/text", "/many"))
    other.wait_for_selector("[data-section=Evaluation] .scatterlayer .trace", state="attached")
    assert sections(other) == {"Training": False, "Evaluation": True, "System": False}, "many panels start closed"
    page.locator("[data-section=System] > summary").focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("[data-section=System] .panel[data-key=memory] .scatterlayer .trace", state="attached")
    assert "1.20 GB" in page.inner_text("[data-key=memory] .chart-title") or "1.2 GB" in page.inner_text("[data-key=memory]")
    assert str(page.text_content("[data-key=items_per_s] .ytitle")).endswith("/s")


def test_metric_measured_once_is_in_a_table(visit):  # noqa: F811
    page = opened(visit, "/run/text")
    row = page.locator("[data-section=Evaluation] table.once tr[data-key='test/accuracy']")
    assert row.inner_text().split() == ["test/accuracy", "0.7500", "400"]
    assert "test/accuracy" not in keys(page, "Evaluation")


def test_metric_search_opens_what_matches(visit):  # noqa: F811
    page = opened(visit, "/run/text")
    page.keyboard.press("/")
    page.keyboard.type("part_0[0-3]$|group")
    until(page, "document.querySelector('#curves [role=status]').textContent.startsWith('5 of')")
    assert sections(page) == {"Training": True, "group": True} and keys(page, "group") == ["group.a"]
    page.fill("[aria-label='Search metrics']", "no such metric")
    page.wait_for_selector("text=No metric matches.")
    page.keyboard.press("Escape")
    until(page, "document.querySelectorAll('.section:not([hidden])').length === 4")
    assert sections(page)["group"] is False, "the choice of before is back"


@pytest.mark.parametrize("scheme", THEMES)
def test_run_cursor_is_over_all_panels_with_units(visit, scheme: str):  # noqa: F811
    page = opened(visit, "/run/text", color_scheme=scheme)
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == THEMES[scheme]
    until(page, "document.querySelectorAll('.panel .js-plotly-plot').length >= 3")
    page.locator("[data-key=memory]").scroll_into_view_if_needed()
    box = page.locator("[data-key=memory] .nsewdrag").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + box["height"] / 2)
    readout = page.locator("[data-key=memory] .readout.full")
    readout.wait_for()
    assert "memory" in readout.inner_text() and "GB" in readout.inner_text()
    assert page.locator("[data-key=items_per_s] .readout .rows > div").count() == 1, "one cursor"
    ink, paper = readout.evaluate("el => [getComputedStyle(el).color, getComputedStyle(el).backgroundColor]")
    light = [sum(int(n) for n in colour[4:-1].split(",")) for colour in (ink, paper)]
    assert abs(light[0] - light[1]) > 450, "read in both themes"


def test_run_zoom_is_shared_by_keyboard_and_a_panel_downloads(visit):  # noqa: F811
    page = opened(visit, "/run/text")
    chart = page.locator("[data-section=System] .panel[data-key=items_per_s] .chart")
    chart.scroll_into_view_if_needed()
    chart.locator(".scatterlayer .trace").first.wait_for(state="attached")
    chart.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("[data-key=items_per_s] .readout.full")
    page.keyboard.press("+")
    span = "document.querySelector('[data-key={}] .chart')._fullLayout.xaxis.range"
    until(page, f"{span.format('memory')}[1] < 450 && {span.format('items_per_s')}[1] < 450")
    page.click("text=all of the axis")
    until(page, f"{span.format('memory')}[1] > 480")
    page.locator("[data-key=items_per_s] .menu summary").click()
    with page.expect_download() as got:
        page.locator("[data-key=items_per_s] .menu button", has_text="CSV").click()
    lines = Path(got.value.path()).read_text().splitlines()
    assert lines[0] == "name,metric,step,value,smoothed" and len(lines) == 51


def test_evaluation_is_beside_the_loss_and_events_are_marked(visit):  # noqa: F811
    page = opened(visit, "/run/root?")
    page.evaluate("localStorage.setItem('seedbed-run-sections', '{\"Training\": true}')")
    page.reload()
    chart = "document.querySelector('[data-section=Training] [data-key=loss] .chart')"
    until(page, f"!!{chart}?.data")
    names = page.evaluate(f"{chart}.data.map(one => one.name)")
    assert {"loss", "eval/loss"} <= set(names) and page.evaluate(f"{chart}.layout.shapes.length") == 1


# ---- facts -------------------------------------------------------------------------------------------------------------


def test_lineage_shows_parents_children_and_resumes(visit):  # noqa: F811
    page = opened(visit, "/run/text")
    page.wait_for_selector("#lineage ol li:nth-child(3)")
    chain = [text.split()[0] for text in page.locator("#lineage ol li").all_inner_texts()]
    assert chain == ["root", "middle", "text"], "the root first"
    assert page.locator("#lineage .children li").all_inner_texts() == ["grandchild"]
    assert page.inner_text("#lineage .resumes").split("step ")[1].replace("\n", " ").startswith("250")
    assert "optim.lr 0.002 -> 0.001" in page.inner_text("#lineage .resumes")
    page.click("#lineage .children a")
    page.wait_for_url("**/run/grandchild")
    page = opened(visit, "/run/film")
    page.wait_for_selector("text=was-removed (removed)")


def test_lineage_of_a_trained_run_names_what_the_resume_changed(visit, root: Path):  # noqa: F811
    page = opened(visit, "/run/resumed")
    page.wait_for_selector("#lineage .resumes")
    assert "steps 12 -> 20" in page.inner_text("#lineage .resumes")
    commands = page.locator("#config .command code").all_inner_texts()
    assert (
        "--no-check" in commands[-1]
        and "steps=12 --name resumed-again --until 5 && seedbed resume resumed-again steps=20" in commands[-1]
    )
    assert commands[-1].startswith("seedbed train ")


def test_difference_to_any_run_is_in_the_address(visit):  # noqa: F811
    page = opened(visit, "/run/text")
    page.wait_for_selector("#difference .empty")
    page.click("[aria-label='Compare with run']")
    page.wait_for_selector("#other-runs option[value=root]", state="attached")
    page.fill("[aria-label='Compare with run']", "root")
    page.wait_for_selector("#difference table[data-part=setting]")
    shown = page.locator("#difference tr[data-key='optim.lr'] td").all_inner_texts()
    assert shown == ["optim.lr", "0.001", "0.125"]
    assert "against=root" in page.url
    page.reload()
    page.wait_for_selector("#difference table[data-part=code]")
    code = {
        row.split("\t")[0]: row.split("\t")[1:] for row in page.locator("#difference [data-part=code] tbody tr").all_inner_texts()
    }
    assert code["seedbed"] == ["0.0.9", "0.1.0"] and code["torch"][0] == "2.0.0" and code["commit"][0] == "a" * 40
    assert code["uncommitted changes"][0].startswith("patch ") and code["uncommitted changes"][1] == "none"
    page.click("#difference button:has-text('parent')")
    page.wait_for_selector("#difference th a:has-text('middle')")
    assert "against=middle" in page.url
    page.fill("[aria-label='Compare with run']", "nobody")
    page.keyboard.press("Enter")
    page.wait_for_selector("#difference [role=alert]:has-text('no run nobody')")


def test_reproduce_puts_the_code_back_and_says_what_differs(visit, root: Path):  # noqa: F811
    page = opened(visit, "/run/root")
    before, command = page.locator("#config .command code").all_inner_texts()
    assert before == f"git checkout {'a' * 40} && git apply {root / 'root' / 'code.patch'}"
    assert command.startswith("seedbed train gpt/demo --dirty ")
    assert "seedbed 0.0.9 trained it" in page.inner_text("#config .reproduce")


def test_what_happened_is_told_as_people_read_it(visit):  # noqa: F811
    page = opened(visit, "/run/text")
    text = page.inner_text("#events")
    assert "done, wall time 1:14 (train 1:11, start 2.7 s)" in text and "2.716" not in text
    assert "optim.lr 0.002 -> 0.001" in text


# ---- console and samples -----------------------------------------------------------------------------------------------


def test_console_search_counts_steps_and_filters_while_the_run_grows(visit, root: Path):  # noqa: F811
    page = opened(visit, "/run/text")
    page.wait_for_selector(".console")
    field, count = "[aria-label='Search the console']", "#console [role=status]"
    page.fill(field, "STEP 29")
    until(page, f"document.querySelector('{count}').textContent === '11 of 11'")
    page.press(field, "Enter")
    assert page.inner_text(count) == "1 of 11" and page.inner_text(".console mark.now") == "step 29"
    page.press(field, "Shift+Enter")
    assert page.inner_text(count) == "11 of 11"
    page.press(field, "Shift+Enter")
    page.wait_for_timeout(50)
    place = page.evaluate("document.querySelector('.console').scrollTop")
    with open(root / "text" / "console.log", "a") as file:
        file.write("step 2999 has come\n")
    until(page, f"document.querySelector('{count}').textContent === '10 of 12'")
    assert page.evaluate("document.querySelector('.console').scrollTop") == pytest.approx(place, abs=2), "it stays where it was"
    assert page.evaluate("document.activeElement.ariaLabel") == "Search the console", "and so does the keyboard"
    page.click("text=only matching lines")
    assert len(page.inner_text(".console").strip().splitlines()) == 12
    page.press(field, "Escape")
    assert len(page.inner_text(".console").strip().splitlines()) > 300 or page.locator(".console mark").count() == 0


def test_samples_move_by_slider_and_arrow_keys(visit):  # noqa: F811
    page = opened(visit, "/run/text")
    page.wait_for_selector("text=last words")
    slider = page.locator("[aria-label=Sample]")
    slider.focus()
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector("text=later words")
    page.keyboard.press("Home")
    page.wait_for_selector("#samples .sample-text")
    assert slider.get_attribute("aria-valuetext") == "step 500 · 1 of 4"
    page.keyboard.press("End")
    page.wait_for_selector("text=last words")


def test_small_pictures_are_enlarged_pixel_by_pixel(visit):  # noqa: F811
    page = opened(visit, "/run/pictures")
    picture = page.locator("#samples .pictures img")
    picture.scroll_into_view_if_needed()
    until(page, "document.querySelector('#samples img')?.naturalWidth === 32")
    assert picture.evaluate("el => [el.clientWidth, getComputedStyle(el).imageRendering]") == [352, "pixelated"]
    first = picture.get_attribute("src")
    page.locator("[aria-label=Sample]").focus()
    page.keyboard.press("ArrowLeft")
    until(page, f"document.querySelector('#samples img').getAttribute('src') !== '{first}'")
    page.locator("#samples .picture").focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("dialog img.pixels")
    assert page.evaluate("document.querySelector('dialog img').clientWidth") > 900
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")


@pytest.mark.skipif(not has_av(), reason="films need av")
def test_film_is_shown_once_and_plays(visit):  # noqa: F811
    page = opened(visit, "/run/film")
    page.wait_for_selector("#samples video")
    page.locator("#samples video").scroll_into_view_if_needed()
    until(page, "document.querySelector('#samples video').readyState >= 1")
    assert page.evaluate("document.querySelector('#samples video').videoWidth") == 96
    assert page.locator("#samples img").count() == 1, "the GIF is the same film"
    page.evaluate("document.querySelector('#samples video').play()")
    until(page, "document.querySelector('#samples video').currentTime > 0")


# ---- everywhere --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", THEMES)
@pytest.mark.parametrize("name", ["text", "pictures", "film", "resumed"])
def test_run_page_fits_a_phone(visit, scheme: str, name: str):  # noqa: F811
    page = opened(visit, f"/run/{name}?against=root", color_scheme=scheme, **PHONE)
    page.wait_for_selector("#difference table")
    for summary in page.locator(".section:not([open]) > summary").all():
        summary.click()
    page.fill("[aria-label='Search the console']", "step")
    page.wait_for_timeout(300)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == THEMES[scheme]


def test_every_control_of_a_run_is_reached_by_tab(visit):  # noqa: F811
    page = opened(visit, "/run/text?against=root")
    page.wait_for_selector("#difference table")
    wanted = {"Search metrics", "Search the console", "Sample", "New note", "Compare with run", "Search settings", "Smoothing"}
    found: set[str] = set()
    for _ in range(160):
        page.keyboard.press("Tab")
        found.add(page.evaluate("document.activeElement.ariaLabel || document.activeElement.textContent.slice(0, 40)") or "")
    assert wanted <= found and any(label.startswith("Curves of") for label in found), wanted - found


def test_run_page_prints_open_sections_on_white(visit):  # noqa: F811
    page = visit("/run/text", color_scheme="dark")
    page.wait_for_selector(".panel .scatterlayer .trace", state="attached")
    page.evaluate("window.print = () => { window.printed = document.querySelectorAll('.section[open] .chart.loading').length }")
    page.click("button:has-text('Print')")
    until(page, "window.printed === 0")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.querySelector('.card')).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.locator("[aria-label='Search metrics']").is_visible() and page.locator("#config").is_visible()


def test_run_without_rows_says_so(visit, root: Path):  # noqa: F811
    shutil.copytree(root / "middle", root / "silent")
    for name in ("rows.jsonl", "events.jsonl"):
        (root / "silent" / name).write_text("")
    page = visit("/run/silent")
    page.wait_for_selector("text=This run left no rows.")
    page.wait_for_selector("text=No samples yet.")
