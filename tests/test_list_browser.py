"""The list of runs in a real browser: filter expressions, columns, groups of seeds, tags, archive, trash, and 5,000 runs."""

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from _runs import make_runs
from test_serve_browser import address, names, process, seedbed, until, visit  # noqa: F401

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve runs: four recipes, three seeds, and five learning rates; run-0000 differs from run-0020 in the seed only."""
    root = tmp_path_factory.mktemp("list") / "runs"
    make_runs(root, 12, 60, num_per_sweep=100)
    for seed in (1, 2):
        twin = root / f"twin-{seed}"
        twin.mkdir()
        for name in ("config.json", "status.json", "rows.jsonl", "events.jsonl"):
            text = (root / "run-0000" / name).read_text()
            changed = re.sub(r'"best": [\d.]+', f'"best": {2.4 + 0.1 * seed}', text) if name == "status.json" else text
            (twin / name).write_text(changed.replace('"seed": 0', f'"seed": {seed}'))
    return root


def chosen(page: Any, text: str) -> set[str]:
    """The runs that are listed for a filter."""
    page.fill("[aria-label='Search runs']", text)
    until(page, "!document.querySelector('.remarks').textContent.includes('reading')")
    return set(names(page)) if page.locator("tr[data-path]").count() else set()


def configs(root: Path) -> dict[str, dict[str, Any]]:
    return {path.parent.name: json.loads(path.read_text()) for path in root.glob("*/config.json")}


def test_filter_expressions(visit, root: Path):  # noqa: F811
    page, known = visit("/"), configs(root)
    wanted: dict[str, Callable[[str, dict[str, Any]], bool]] = {
        "optim.lr>3e-3": lambda name, c: c["config"]["optim"]["lr"] > 3e-3,
        "optim.lr<=2e-3 recipe:gpt": lambda name, c: c["config"]["optim"]["lr"] <= 2e-3 and c["recipe"] == "gpt",
        "seed=1|2": lambda name, c: c["config"]["seed"] in (1, 2),
        "-seed=0 -recipe:flow": lambda name, c: c["config"]["seed"] and c["recipe"] != "flow",
        "recipe:ebt/demo status:done": lambda name, c: c["recipe"] == "ebt",
        'why:"decay matter"': lambda name, c: "decay matter" in (c["why"] or ""),
        "twin optim.lr=0.001": lambda name, c: name.startswith("twin"),
        "name:run-001 -name:0010": lambda name, c: name == "run-0011",
        "age>1000d": lambda name, c: False,
        "status:running": lambda name, c: False,
        "status!=done": lambda name, c: False,
        "step>=60 loss>0": lambda name, c: True,
    }
    for text, holds in wanted.items():
        assert chosen(page, text) == {name for name, config in known.items() if holds(name, config)}, text
    assert chosen(page, "optim.lrr>1") == set()
    assert "no run has a setting or metric called optim.lrr" in page.locator(".remarks").inner_text()


def test_columns_are_chosen_sorted_and_kept(visit, root: Path):  # noqa: F811
    page = visit("/")
    page.click("summary:has-text('Columns')")
    page.check("[data-column='optim.lr']")
    page.check("[data-column='loss']")
    assert page.locator("[data-column='model.width']").count() == 0, "equal in all runs: only found by its name"
    page.fill("[aria-label='Search columns']", "model.w")
    page.check("[data-column='model.width']")
    heads = page.locator("th.c-own").all_inner_texts()
    assert heads == ["optim.lr", "loss", "model.width"]
    page.click("th.c-own button:has-text('optim.lr')")
    shown = [float(text) for text in page.locator("td.c-own[title='optim.lr']").all_inner_texts()]
    assert shown == sorted(shown) and len(set(shown)) == 5
    page.click("summary:has-text('Columns')")
    page.reload()
    until(page, "document.querySelectorAll('th.c-own').length === 3")


def test_seeds_are_grouped_with_mean_and_band(visit, root: Path):  # noqa: F811
    page = visit("/")
    page.select_option("[aria-label='Group']", "seeds")
    until(page, "document.querySelector('.fold') !== null")
    line = page.locator("tr:has(.fold)")
    assert line.count() == 1 and "3 seeds" in line.inner_text() and "±" in line.locator(".c-best").inner_text()
    page.click(".fold")
    assert [name for name in names(page) if name.startswith("twin") or name == "run-0000"].count("run-0000") == 2
    assert {"twin-1", "twin-2"} <= set(names(page))


def test_tags_archive_rename_and_bulk(visit, root: Path):  # noqa: F811
    page = visit("/")
    assert chosen(page, "recipe:flow") == {"run-0001", "run-0005", "run-0009"}
    page.check("[aria-label='Choose all that are listed']")
    page.click(".tray button:has-text('Tag')")
    page.keyboard.type("good")
    page.keyboard.press("Enter")
    until(page, "document.querySelectorAll('.tag-chip').length === 3")
    assert chosen(page, "tag:good") == {"run-0001", "run-0005", "run-0009"}
    page.click(".tray button:has-text('Archive')")
    until(page, "document.querySelector('.remarks') && !document.querySelectorAll('tr[data-path]').length")
    assert chosen(page, "archived:yes") == {"run-0001", "run-0005", "run-0009"}
    page.click(".tray button:has-text('Unarchive')")
    until(page, "!document.querySelectorAll('tr[data-path]').length")
    assert len(chosen(page, "")) == 14
    page.click(".tray button:has-text('Clear')")
    page.check("[aria-label='Choose run-0005']")
    page.click(".tray button:has-text('Rename')")
    page.keyboard.type("<i>the best</i>")
    page.keyboard.press("Enter")
    until(page, "[...document.querySelectorAll('.name a')].some(one => one.textContent === '<i>the best</i>')")
    page.click(".tray button:has-text('Untag')")
    page.keyboard.type("good")
    page.keyboard.press("Enter")
    until(page, "document.querySelectorAll('.tag-chip').length === 2")
    page.click("tr .tag-chip >> nth=0")
    until(page, "document.querySelectorAll('tr[data-path]').length === 2")


def test_deleted_runs_come_back_by_undo(visit, root: Path):  # noqa: F811
    page = visit("/")
    for name in ("run-0002", "run-0003"):
        page.check(f"[aria-label='Choose {name}']")
    page.click(".tray button:has-text('Delete')")
    until(page, "document.querySelectorAll('tr[data-path]').length === 12")
    assert not (root / "run-0002").exists() and "2 deleted" in page.locator(".tray").inner_text()
    page.click(".tray button:has-text('Undo')")
    until(page, "document.querySelectorAll('tr[data-path]').length === 14")
    assert (root / "run-0002" / "rows.jsonl").is_file() and (root / "run-0003").is_dir()
    page.wait_for_selector(".tray", state="hidden")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_list_fits_a_phone(visit, scheme: str):  # noqa: F811
    page = visit("/", color_scheme=scheme, **PHONE)
    page.wait_for_selector("tr[data-path]")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_5000_runs_show_the_newest_at_once_and_are_then_complete(browser: Any, tmp_path: Path):
    """The first lines at once, the others while one looks; as many rows in the page as were scrolled to."""
    root = tmp_path / "runs"
    make_runs(root, 5000, 40, num_per_sweep=10_000)
    with process(seedbed("--runs", str(root), "serve", "--port", "0")) as server:
        assert server.stdout is not None
        address = re.search(r"http://\S+(?=/)", server.stdout.readline())[0]  # type: ignore[index]
        page = browser.new_context(viewport={"width": 1400, "height": 900}).new_page()
        page.set_default_timeout(60_000)
        began = time.monotonic()
        page.goto(address)
        page.wait_for_selector("tr[data-path]")
        painted = time.monotonic() - began
        until(page, "document.querySelector('.chip b').textContent === '5000'")
        rows = page.locator("tr[data-path]").count()
        assert rows <= 300, "not all of them are drawn"
        page.fill("[aria-label='Search runs']", "optim.lr>4e-3 recipe:gpt seed=0")
        until(page, "!document.querySelector('.remarks').textContent.includes('reading')")
        known = configs(root)
        expected = sum(
            c["config"]["optim"]["lr"] > 4e-3 and c["recipe"] == "gpt" and c["config"]["seed"] == 0 for c in known.values()
        )
        shown = page.locator("tr[data-path]").count()
        assert shown == min(expected, 150)
        memory = int(re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{server.pid}/status").read_text())[1]) / 1000  # type: ignore[index]
        page.context.close()
    print(f"first paint {painted:.2f} s, at most {memory:.0f} MB")
    # A limit for machines that do other work meanwhile: 0.8 and 1.5 s were measured on such ones.
    assert painted < 5 and memory < 500
