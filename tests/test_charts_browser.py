"""Compare, sweeps, ablations and all charts in a real browser: panels, cursor, zoom, legend, address, downloads, paper, phone."""

import csv
import io
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit
from xml.etree import ElementTree

import pytest
from chart_samples import MANY, NUM_PARTS, NUM_ROWS, NUM_RUNS, make_all
from test_serve_browser import address, until, visit  # noqa: F401

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
DRAWN = ".panel .js-plotly-plot .scatterlayer .trace"
LOSS = "document.querySelector('.panel[data-key=loss] .chart')"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("charts") / "runs"
    make_all(root)
    return root


def compare(*names: str, **view: Any) -> str:
    pairs = [("run", name) for name in names] + [(key, value) for key, value in view.items()]
    return "/compare?" + "&".join(f"{key}={value}" for key, value in pairs)


def opened(visit: Callable[..., Any], path: str, **options: Any) -> Any:  # noqa: F811
    page = visit(path, **options)
    page.wait_for_selector(DRAWN, state="attached")
    return page


def state(page: Any) -> dict[str, list[str]]:
    return parse_qs(urlsplit(page.url).query)


def keys(page: Any) -> list[str]:
    return page.evaluate("[...document.querySelectorAll('.panel')].map(one => one.dataset.key)")


def range_of(key: str, axis: str = "xaxis") -> str:
    return f"document.querySelector('.panel[data-key={key}] .chart')._fullLayout.{axis}.range"


# ---- the grid ----------------------------------------------------------------------------------------------------------


def test_compare_grid_of_24_runs_and_60_metrics_is_drawn_where_it_is_seen(visit):  # noqa: F811
    started = time.monotonic()
    page = opened(visit, compare(*MANY))
    assert time.monotonic() - started < 20
    shown = keys(page)
    assert len(shown) == 60 and shown[:2] == ["loss", "eval/loss"], "evaluation is beside training"
    assert page.inner_text("header .num") == "60 of 60 metrics"
    until(page, "document.querySelectorAll('.panel .js-plotly-plot').length >= 8")
    assert page.evaluate("document.querySelectorAll('.panel .js-plotly-plot').length") < 30, "panels out of sight wait"
    assert page.evaluate(f"{LOSS}.data.length") == 2 * NUM_RUNS, "each curve as measured and smoothed"
    colours = page.evaluate(f"{LOSS}.data.filter(one => one.meta.smooth).map(one => one.line.color)")
    assert colours == page.evaluate("import('/static/chart.js').then(c => [...Array(24).keys()].map(i => c.palette(i)))")
    page.locator(".panel[data-key=part_50]").scroll_into_view_if_needed()
    until(page, "!!document.querySelector('.panel[data-key=part_50] .scatterlayer .trace')")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_of_24_runs_stay_apart(visit, scheme: str):  # noqa: F811
    page = visit("/compare", color_scheme=scheme)
    page.wait_for_selector("main h1")
    found = page.evaluate("import('/static/chart.js').then(c => [...Array(24).keys()].map(i => c.palette(i)))")
    labs = [oklab(colour) for colour in found]
    nearest = min(math.dist(one, other) for i, one in enumerate(labs) for other in labs[:i])
    assert nearest > 0.05, "a difference that is seen between thin lines; 0.02 is the least that is seen at all"
    card = page.evaluate("import('/static/chart.js').then(c => c.colour('card'))")
    assert min(contrast(colour, card) for colour in found) >= 2.95


def linear(colour: str) -> list[float]:
    values = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]


def contrast(one: str, other: str) -> float:
    light = [0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in map(linear, (one, other))]
    return (max(light) + 0.05) / (min(light) + 0.05)


def oklab(colour: str) -> list[float]:
    r, g, b = linear(colour)
    cones = [
        0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b,
        0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b,
        0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b,
    ]
    x, y, z = (math.cbrt(v) for v in cones)
    return [
        0.2104542553 * x + 0.7936177850 * y - 0.0040720468 * z,
        1.9779984951 * x - 2.4285922050 * y + 0.4505937099 * z,
        0.0259040371 * x + 0.7827717662 * y - 0.8086757660 * z,
    ]


def test_metrics_are_searched_by_words_and_regex_and_pinned(visit):  # noqa: F811
    page = opened(visit, compare("known", "many-00"))
    page.keyboard.press("/")
    page.keyboard.type("PART_0[0-3]$|^eval")
    until(page, "document.querySelectorAll('.panel').length === 5")
    assert keys(page) == ["eval/loss", *(f"part_0{k}" for k in range(4))]
    page.click("[aria-label='Pin to the top: part_02']")
    assert keys(page)[0] == "part_02" and state(page)["pin"] == ["part_02"]
    page.fill("[aria-label='Search metrics']", "part_(")  # half of a group: searched as it stands
    until(page, "document.querySelectorAll('.panel').length === 1")
    assert keys(page) == ["part_02"], "what is pinned stays"
    page.keyboard.press("Escape")
    until(page, "document.querySelectorAll('.panel').length > 50")
    page.click("[aria-label='Larger: part_02']")
    assert page.locator(".panel.wide").get_attribute("data-key") == "part_02" and state(page)["wide"] == ["part_02"]
    page.reload()
    page.wait_for_selector(DRAWN, state="attached")
    assert keys(page)[0] == "part_02" and page.locator(".panel.wide").count() == 1


# ---- cursor, legend, zoom ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_cursor_is_one_over_all_panels_with_the_values_of_all_runs(visit, scheme: str):  # noqa: F811
    page = opened(visit, compare(*MANY, find="part_0"), color_scheme=scheme)
    until(page, "document.querySelectorAll('.panel .js-plotly-plot').length >= 8")
    box = page.locator(".panel[data-key=part_01] .nsewdrag").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + box["height"] / 2)
    page.wait_for_selector("[data-key=part_01] .readout.full .rows > div")
    places = page.evaluate("""[...document.querySelectorAll('.panel .chart')]
        .filter(el => el.querySelector('.cursor') && !el.querySelector('.cursor').hidden)
        .map(el => el._fullLayout.xaxis.p2d(new DOMMatrix(el.querySelector('.cursor').style.transform).m41
             - el._fullLayout.xaxis._offset))""")
    assert len(places) >= 8 and max(places) - min(places) < 1e-6 * max(places)
    full = page.locator("[data-key=part_01] .readout.full .rows > div").all_inner_texts()
    assert len(full) == NUM_RUNS and {text.split()[0] for text in full} == set(MANY)
    assert page.locator("[data-key=part_00] .readout .rows > div").count() == NUM_RUNS
    # What is shown is the nearest drawn point: smoothed, and as measured in parentheses.
    shown = next(text.split() for text in full if text.startswith("many-05"))
    near = """([at, smooth]) => { const { x, y } = document.querySelector('[data-key=part_01] .chart').data
        .find(t => t.name === 'many-05' && !!t.meta.smooth === smooth);
        return y[x.reduce((best, one, i) => Math.abs(one - at) < Math.abs(x[best] - at) ? i : best, 0)]; }"""
    expected = [page.evaluate(near, [places[0], smooth]) for smooth in (True, False)]
    assert [float(shown[1]), float(shown[2].strip("()"))] == pytest.approx(expected, abs=5.1e-5)
    assert tooltip_contrast(page, "[data-key=part_01] .readout") >= 7
    page.mouse.move(5, 5)
    until(page, "[...document.querySelectorAll('.readout')].every(one => one.hidden)")


def tooltip_contrast(page: Any, selector: str) -> float:
    read = """s => { const style = getComputedStyle(document.querySelector(s)), pen = new OffscreenCanvas(1, 1).getContext('2d');
        return [style.color, style.backgroundColor].map(c => { pen.fillStyle = c; return pen.fillStyle; }); }"""
    return contrast(*page.evaluate(read, selector))


def test_legend_toggles_a_run_everywhere_and_back_undoes_it(visit):  # noqa: F811
    page = opened(visit, compare("known", "many-00", "many-01"))
    until(page, "document.querySelectorAll('.panel .js-plotly-plot').length >= 8")
    shown = """[...document.querySelectorAll('.panel .js-plotly-plot')].flatMap(el => el.data)
        .filter(t => t.name === 'many-00').map(t => t.visible)"""
    assert all(page.evaluate(shown))
    page.click(".legend [data-run=many-00]")
    until(page, f"{shown}.every(v => v === false)")
    assert state(page)["hide"] == ["many-00"] and page.locator("[aria-label='Show many-00']").is_checked() is False
    page.click(".legend [data-run=known]", modifiers=["Shift"])
    assert set(state(page)["hide"]) == {"many-00", "many-01"}
    page.go_back()
    page.wait_for_selector(".legend [data-run=many-00][aria-pressed=false]")
    assert state(page)["hide"] == ["many-00"]
    page.go_back()
    page.wait_for_selector(".legend [data-run=many-00][aria-pressed=true]")
    page.wait_for_selector(DRAWN, state="attached")
    assert "hide" not in state(page) and all(page.evaluate(shown))


def drag(page: Any, key: str, left: float, right: float) -> None:
    box = page.locator(f".panel[data-key={key}] .nsewdrag").bounding_box()
    page.mouse.move(box["x"] + box["width"] * left, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * right, box["y"] + 70, steps=5)
    page.mouse.up()


def test_zoom_is_shared_kept_in_the_address_and_undone_by_back(visit):  # noqa: F811
    page = opened(visit, compare("known", "many-00"))
    until(page, "document.querySelectorAll('.panel .js-plotly-plot').length >= 4")
    drag(page, "loss", 0.3, 0.5)
    page.wait_for_url("**low=**")
    low, high = (float(state(page)[key][0]) for key in ("low", "high"))
    assert 100 < low < high < 300
    for key in ("loss", "part_00"):
        until(page, f"Math.abs({range_of(key)}[0] - {low}) < 1e-6 && Math.abs({range_of(key)}[1] - {high}) < 1e-6")
    until(page, f"Math.max(...{LOSS}.data[0].x) <= {high} + 10")
    page.click("button[data-flag=logx]")
    until(page, f"Math.abs({range_of('part_00')}[0] - Math.log10({low})) < 1e-6")
    page.go_back()
    page.wait_for_selector("button[data-flag=logx][aria-pressed=false]")
    page.go_back()
    page.wait_for_selector(DRAWN, state="attached")
    until(page, f"{range_of('loss')}[1] > 400")
    assert "low" not in state(page)
    page.fill("[aria-label=from]", "200")
    page.keyboard.press("Tab")
    until(page, f"{range_of('part_00')}[0] === 200")
    page.click("[aria-label='Reset zoom']")
    until(page, f"{range_of('part_00')}[0] < 100")


def test_link_reproduces_the_view(visit):  # noqa: F811
    page = opened(visit, compare("known", "many-00", "many-01"))
    page.select_option("[aria-label='Horizontal axis']", "seconds")
    for flag in ("logx", "logy", "together"):
        page.click(f"button[data-flag={flag}]")
    page.fill("[aria-label='Search metrics']", "loss|part_1")
    page.locator("[aria-label=Smoothing]").fill("0.5")
    page.click(".legend [data-run=many-01]")
    page.click("[aria-label='Pin to the top: part_13']")
    page.fill("[aria-label=from]", "1")
    page.fill("[aria-label=to]", "6")
    page.keyboard.press("Tab")
    until(page, "location.search.includes('low=1') && location.search.includes('smooth=0.5')")
    wanted = """[...document.querySelectorAll('.panel')].slice(0, 4).map(one => { const el = one.querySelector('.chart'),
        l = el._fullLayout; return l && [one.dataset.key, l.xaxis.type, l.yaxis.type, l.xaxis.range, l.xaxis.title.text,
        el.data.map(t => [t.name, t.visible, t.line.dash, t.x.length, t.y.at(-1)])]; })"""
    until(page, f"{wanted}.every(one => one && one[3][0] === 0 && one[5][0][3] < 50)")
    page.wait_for_timeout(500)
    other = opened(visit, urlsplit(page.url)._replace(scheme="", netloc="").geturl())
    until(other, f"{wanted}.every(one => one && one[3][0] === 0)")
    assert other.evaluate(wanted) == page.evaluate(wanted)
    names = {(name, dash) for name, _, dash, *_ in other.evaluate(wanted)[1][5]}
    assert ("known", "solid") in names and ("known", "dash") in names, "evaluation is dashed in the panel of training"
    assert other.input_value("[aria-label='Search metrics']") == "loss|part_1"
    assert other.locator("[aria-label=Smoothing]").input_value() == "0.5"


def test_smoothing_keeps_the_measured_values_visible(visit):  # noqa: F811
    page = opened(visit, compare("known"))
    raw, smooth = page.evaluate(f"{LOSS}.data.map(t => [t.opacity ?? 1, t.y.length, t.visible])")
    assert raw == [0.34, NUM_ROWS, True] and smooth == [1, NUM_ROWS, True]
    page.locator("[aria-label=Smoothing]").fill("0")
    until(page, f"{LOSS}.data.length === 1")
    assert page.evaluate(f"[{LOSS}.data[0].opacity, {LOSS}.data[0].y.length]") == [1, NUM_ROWS]
    assert state(page)["smooth"] == ["0"]


def test_tokens_and_flops_are_drawn_where_they_are_known_and_named_where_not(visit):  # noqa: F811
    page = opened(visit, compare("known", "many-00", x="tokens"))
    assert page.evaluate(f"{LOSS}.data[0].x.at(-1)") == 640 * NUM_ROWS * 64
    assert page.inner_text(".remarks") == "Tokens: not known for many-00; neither rows nor settings say."
    assert page.evaluate(f"{LOSS}.data.find(t => t.name === 'many-00').x.length") == 0
    page.select_option("[aria-label='Horizontal axis']", "flops")
    until(page, f"{LOSS}.data[0].x.at(-1) === {640 * NUM_ROWS} * 1e6")
    assert page.inner_text(".remarks").startswith("FLOPs: not known for many-00")
    page.select_option("[aria-label='Horizontal axis']", "items")
    until(page, f"{LOSS}.data[0].x.at(-1) === {640 * NUM_ROWS} && document.querySelector('.remarks').textContent === ''")


def test_units_are_on_the_axes_and_unknown_names_stay_bare(visit):  # noqa: F811
    page = opened(visit, compare("known", find="loss|psnr|items_per_s|memory|part_00"))
    until(page, "document.querySelectorAll('.panel .js-plotly-plot').length === 6")
    unit = """[...document.querySelectorAll('.panel')]
        .map(p => [p.dataset.key, p.querySelector('.chart').layout.yaxis.title?.text ?? ''])"""
    found = dict(page.evaluate(unit))
    assert found == {
        **{"loss": "nats", "eval/loss": "nats", "psnr": "dB", "items_per_s": "blocks/s"},
        **{"memory": "B", "part_00": ""},
    }
    page = visit("/run/known")
    page.wait_for_selector(".wide .js-plotly-plot .trace")
    assert page.evaluate("document.querySelector('.wide .chart').layout.yaxis.title.text") == "nats"


# ---- files and paper ---------------------------------------------------------------------------------------------------


def download(page: Any, menu: Any, kind: str) -> tuple[str, bytes]:
    menu.locator("summary").click()
    with page.expect_download() as waiting:
        menu.locator("button", has_text=kind).click()
    return waiting.value.suggested_filename, Path(waiting.value.path()).read_bytes()


PANELS = {
    compare("known", "many-00"): ".panel[data-key=loss]",
    "/run/known": "#curves .wide",
    "/sweep/some": ".card:has(.heat)",
    "/sweep/some#lines": ".card:has(.parallel)",
    "/sweep/some#importance": ".card:has(h2:text('What matters'))",
    "/ablation/first": ".card:has(h2:text('Predicted'))",
}


@pytest.mark.parametrize("path", PANELS, ids=["compare", "run", "map", "lines", "importance", "ablation"])
def test_panel_downloads_as_png_svg_and_csv(visit, path: str):  # noqa: F811
    page = visit(path, accept_downloads=True)
    panel = page.locator(PANELS[path]).first
    panel.locator(".main-svg, .parallel").first.wait_for()
    page.wait_for_timeout(200)
    menu = panel.locator(".menu").last
    name, png = download(page, menu, "PNG")
    assert name.endswith(".png") and png.startswith(b"\x89PNG\r\n") and len(png) > 4000
    name, svg = download(page, menu, "SVG")
    tree = ElementTree.fromstring(svg)
    assert name.endswith(".svg") and tree.tag.endswith("svg") and len(list(tree.iter())) > 20
    assert b"foreignObject" not in svg and b"<script" not in svg
    name, table = download(page, menu, "CSV")
    head, *lines = csv.reader(io.StringIO(table.decode()))
    assert name.endswith(".csv") and lines and all(len(line) == len(head) for line in lines)
    if path.startswith("/compare"):
        assert head == ["name", "metric", "step", "value", "smoothed"] and len(lines) == 2 * NUM_ROWS
        known = page.evaluate("fetch('/api/runs/known/series?key=loss&points=4000').then(r => r.json())")["loss"]["raw"]
        assert [[float(x), float(y)] for who, _, x, y, _ in lines if who == "known"] == [
            list(p) for p in zip(known["x"], known["y"], strict=True)
        ]
    if path == "/sweep/some":
        assert len(lines) == 6 and head == ["optim.lr", "batch", "error", "sd"]
    if path.endswith("#lines"):
        assert len(lines) == 18


def test_csv_cells_with_commas_and_quotes_are_quoted(visit):  # noqa: F811
    page = visit("/sweeps")
    page.wait_for_selector("h1")
    given = [['a"b', "c,d"], ["x\ny", None], [1e-9, ""]]
    text = page.evaluate("rows => import('/static/download.js').then(d => d.csv(rows))", given)
    assert list(csv.reader(io.StringIO(text, newline=""))) == [['a"b', "c,d"], ["x\ny", ""], ["1e-9", ""]]
    name = "name => import('/static/download.js').then(d => d.fileName(name))"
    assert page.evaluate(name, "../eval/loss <b>") == "eval_loss_b" and page.evaluate(name, "///") == "chart"


def test_print_draws_every_panel_on_white_without_controls(visit):  # noqa: F811
    page = opened(visit, compare("known", find="part_"), color_scheme="dark")
    widths = "[...document.querySelectorAll('.panel .main-svg')].map(one => one.clientWidth)"
    page.evaluate(f"() => {{ window.print = () => {{ window.printed = {widths}; }}; }}")
    page.click("button:has-text('Print')")
    until(page, "window.printed !== undefined")
    found = page.evaluate("printed")
    assert page.locator(".panel").count() == NUM_PARTS and len(found) >= NUM_PARTS
    assert set(found) == {found[0]} and found[0] < 345
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.is_visible(".curves > header") and not page.is_visible(".top") and page.is_visible(".legend")
    ink = "getComputedStyle(document.querySelector('.panel .xtick text')).fill"
    assert page.evaluate(ink) == "rgb(34, 34, 34)"


# ---- keyboard and phone ------------------------------------------------------------------------------------------------


def test_keyboard_moves_the_cursor_zooms_and_downloads(visit):  # noqa: F811
    page = opened(visit, compare("known", "many-00"), accept_downloads=True)
    until(page, "document.querySelectorAll('.panel .js-plotly-plot').length >= 4")
    page.focus(".legend [data-run=many-00]")
    page.keyboard.press("Enter")
    page.wait_for_selector(".legend [data-run=many-00][aria-pressed=false]")
    assert page.evaluate("document.activeElement.dataset.run") == "many-00", "the focus stays"
    page.keyboard.press("Enter")
    for _ in range(12):  # all of it is reached with Tab
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.matches('.panel summary')"):
            break
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    with page.expect_download() as waiting:
        page.keyboard.press("Enter")
    assert waiting.value.suggested_filename == "loss.csv"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('.panel').dataset.key") == "loss"
    at = "new DOMMatrix(document.querySelector('[data-key=part_00] .cursor').style.transform).m41"
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("[data-key=part_00] .cursor:not([hidden])")
    before = page.evaluate(at)
    page.keyboard.press("ArrowRight")
    until(page, f"{at} > {before}")
    page.keyboard.press("+")
    page.wait_for_url("**low=**")
    until(page, f"{range_of('part_00')}[0] > 100")
    page.keyboard.press("0")
    until(page, "!location.search.includes('low=')")


SMALL = {compare("known", "many-00"): "dark", compare(*MANY): "light", "/sweep/some": "light", "/sweeps": "dark"}
SMALL |= {"/ablation/first": "dark", "/ablation/going": "light", "/run/known": "light"}


def test_phone_shows_every_page_without_scrolling_sideways(visit):  # noqa: F811
    for path, scheme in SMALL.items():
        page = visit(path, color_scheme=scheme, **PHONE)
        page.locator(".js-plotly-plot .main-svg, .studies").first.wait_for()
        page.wait_for_timeout(300)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, f"{path} is wider than a phone"
        assert page.evaluate("getComputedStyle(document.documentElement).colorScheme") == scheme
        assert page.locator("#theme").bounding_box()["x"] < 380, "the last button of the header is on the screen"


def test_phone_tap_shows_values(visit):  # noqa: F811
    page = opened(visit, compare("known", "many-00", find="loss"), **PHONE)
    page.locator(".panel[data-key=loss] .nsewdrag").tap()
    page.wait_for_selector("[data-key=loss] .readout.full .who")
    assert page.locator("[data-key=loss] .readout .who").all_inner_texts() == ["known", "many-00"]


# ---- faults that were there ----------------------------------------------------------------------------------------------


def test_run_with_more_than_40_metrics_is_drawn(visit):  # noqa: F811
    page = visit("/run/known")
    page.wait_for_selector("#curves .js-plotly-plot .trace")
    until(page, "document.querySelectorAll('#curves [data-key^=part_] .js-plotly-plot').length === 1")
    assert page.evaluate("document.querySelector('#curves [data-key^=part_] .chart').data.length") == NUM_PARTS


def test_constant_curve_is_drawn_at_its_value(visit):  # noqa: F811
    page = opened(visit, compare("known", find="^lr$|memory"))
    for flags in ("", "logy"):
        if flags:
            page.click(f"button[data-flag={flags}]")
            until(page, "document.querySelector('.panel[data-key=lr] .chart')._fullLayout.yaxis.type === 'log'")
        low, high = page.evaluate(range_of("lr", "yaxis"))
        value = math.log10(3e-4) if flags else 3e-4
        assert low < value < high and 0.3 < (value - low) / (high - low) < 0.7
        assert flags or low > 0, "told apart from 0"
    spark = "import('/static/dom.js').then(d => d.spark([3, 3, 3], 'still').querySelector('circle').getAttribute('cy'))"
    assert page.evaluate(spark) == "13", "a thumbnail of a constant is in the middle"


def test_rate_that_ended_below_zero_by_rounding_is_zero(visit):  # noqa: F811
    page = visit("/run/odd")
    page.wait_for_selector("[data-key=lr] .js-plotly-plot .trace", state="attached")
    assert page.evaluate("document.querySelector('[data-key=lr] .chart').data[0].y.slice(-2)") == [3e-4, 0]
    assert page.inner_text("[data-key=lr] .chart-title .faint") == "0"


def test_runs_without_rows_leave_no_chart_waiting(visit):  # noqa: F811
    page = visit(compare("silent"))
    page.wait_for_selector("text=These runs have left no rows yet.")
    assert page.locator(".loading").count() == 0
    page = opened(visit, compare("silent", "known", find="^loss$"))
    assert page.evaluate(f"{LOSS}.data.map(t => t.name)") == ["silent", "known", "known"]
    page = visit(compare("many-00", x="flops", find="^loss$"))
    page.wait_for_selector(".panel .annotation-text:has-text('no values')")
    assert page.locator(".loading").count() == 0


def test_metric_named_like_a_property_of_every_object(visit):  # noqa: F811
    page = opened(visit, compare("odd", "many-00", find="proto|constructor"))
    until(page, "document.querySelectorAll('.panel .js-plotly-plot').length === 3")
    assert set(keys(page)) == {"eval/__proto__", "__proto__", "constructor"}
    ys = "key => document.querySelector(`.panel[data-key='${key}'] .chart`).data[0].y"
    assert set(page.evaluate(ys, "__proto__")) == {1.5} and page.evaluate(ys, "eval/__proto__") == [10, 20, 30]
    page = visit("/run/odd")
    page.wait_for_selector("[data-key=__proto__] .js-plotly-plot .trace", state="attached")
