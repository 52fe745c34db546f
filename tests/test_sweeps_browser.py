"""Sweeps and ablations in a real browser: the map as in heatmap.png, what matters, the trials, the list."""

from pathlib import Path
from typing import Any

import pytest
from test_charts_browser import address, contrast, root, visit  # noqa: F401

from seedbed.report import heatmap
from seedbed.tune.sweep import report as sweep_report

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def test_sweep_map_has_the_orientation_of_the_png(visit, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # noqa: F811
    drawn: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        sweep_report, "draw_panels", lambda path, panels, labels, title, **more: drawn.append((panels, labels, more))
    )
    assert sweep_report.draw_map(sweep_report.read_report(sweep_report.Sweep.open(root, "some")), tmp_path / "map.png")
    ((panel,), (down, across, down_key, across_key), colours) = drawn[0]
    page = visit("/sweep/some")
    page.wait_for_selector(".heat .hm image")
    found = page.evaluate("(({x, y, z}) => ({x, y, z}))(document.querySelector('.heat').data[0])")
    axes = page.evaluate("(l => [l.xaxis.title.text, l.yaxis.title.text])(document.querySelector('.heat')._fullLayout)")
    assert (axes, found["x"], found["y"]) == ([across_key, down_key], across, down)
    for mine, theirs in zip(found["z"], panel.values, strict=True):
        assert mine == pytest.approx(theirs)
    # In the picture the first row is on top: so it is in the page, by the place of the labels on the screen.
    tops = [page.locator(f".heat .ytick text:text-is('{label}')").bounding_box()["y"] for label in down]
    lefts = [page.locator(f".heat .xtick text:text-is('{label}')").bounding_box()["x"] for label in across]
    assert tops == sorted(tops) and lefts == sorted(lefts)
    # The smallest is bright in both.
    assert colours["low"] > colours["high"]
    scale, reverse = page.evaluate("(t => [t.colorscale[0][1], t.reversescale])(document.querySelector('.heat').data[0])")
    assert scale == "#fde725" and not reverse
    assert heatmap.draw_panels is not sweep_report.draw_panels


def test_sweep_page_shows_what_matters_with_its_error(visit):  # noqa: F811
    page = visit("/sweep/some", color_scheme="dark")
    card = page.locator(".card", has_text="What matters")
    card.locator(".bars path, .trace.bars .point").first.wait_for()
    asked = page.evaluate("fetch('/api/sweeps/some').then(r => r.json())")["importance"]
    trace = page.evaluate("[...document.querySelectorAll('.js-plotly-plot')].find(el => el.data[0].type === 'bar').data[0]")
    assert trace["y"] == [one["key"] for one in asked] and trace["x"] == [one["share"] for one in asked]
    assert {one["key"] for one in asked} == {"optim.lr", "batch"} and all(0 < one["error"] < 1 for one in asked)
    assert trace["error_x"]["array"] == [min(2 * one["error"], 1 - one["share"]) for one in asked]
    assert page.locator(".parallel path").count() == 18


def test_sweeps_and_ablations_are_listed_and_opened(visit):  # noqa: F811
    page = visit("/")
    page.click("nav >> text=Sweeps")
    page.wait_for_selector(".studies")
    assert page.locator(".studies a").all_inner_texts()[0] == "some"
    page.click("text=first")
    page.wait_for_selector("h1:has-text('first')")
    row = page.locator("tr", has_text="compile=blocks").inner_text()
    assert "1.250x" in row and "1.500x" in row and "[1.470x, 1.530x]" in row and "faster" in row
    assert "it needs precision=bf16" in page.inner_text("table")
    page.wait_for_selector(".js-plotly-plot .errorbar")
    measured, predicted = page.evaluate("document.querySelector('.js-plotly-plot').data.map(t => [t.x, t.error_x?.array])")
    assert measured == [[1.5], [pytest.approx(0.03)]] and predicted[0] == [1.25]
    page = visit("/ablation/going")
    page.wait_for_selector("text=Not finished: predictions only")
    assert page.locator("tbody tr", has_text="1.250x").count() == 3
    page = visit("/sweeps")
    page.wait_for_selector(".studies")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_tooltip_of_a_map_is_readable(visit, scheme: str):  # noqa: F811
    page = visit("/sweep/some", color_scheme=scheme)
    page.wait_for_selector(".heat .hm image")
    page.hover(".heat .nsewdrag")
    page.wait_for_selector(".hoverlayer .hovertext text")
    read = """[...document.querySelectorAll('.hoverlayer .hovertext')]
        .map(one => ['text', 'path'].map(part => one.querySelector(part).style.fill))"""
    hexed = "(c) => { const pen = document.createElement('canvas').getContext('2d'); pen.fillStyle = c; return pen.fillStyle; }"
    for ink, paper in page.evaluate(read):
        assert contrast(page.evaluate(hexed, ink), page.evaluate(hexed, paper)) >= 7
    page.mouse.move(5, 5)
