"""A shared page in a real browser without a network: it asks for nothing, complains of nothing, and fits on a phone."""

from pathlib import Path
from typing import Any

import pytest
from test_html_report import EVIL, a_run

from seedbed.report import html_report

pytestmark = pytest.mark.slow


def test_pages_open_offline_in_light_and_dark_and_on_a_phone(tmp_path: Path, browser: Any):
    one, other = a_run(tmp_path, "one", why=EVIL), a_run(tmp_path, "other", shift=0.5)
    pages = {"run": html_report.run_page(one), "both": html_report.compare_page([one, other])}
    for name, text in pages.items():
        path = tmp_path / f"{name}.html"
        path.write_text(text)
        papers = set()
        for scheme, width in (("light", 1200), ("dark", 1200), ("dark", 390)):
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
            asked, printed, dialogs = [], [], []
            page.on("request", lambda request, asked=asked: asked.append(request.url))
            page.on("console", lambda message, printed=printed: printed.append(message.text))
            page.on("dialog", lambda dialog, dialogs=dialogs: (dialogs.append(dialog.message), dialog.dismiss()))
            page.goto(path.as_uri())
            papers.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
            assert [url for url in asked if not url.startswith("data:")] == [path.as_uri()]
            assert printed == [] and dialogs == []
            assert page.evaluate("[...document.images].every(image => image.naturalWidth > 0)")
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing reaches beyond the screen"
            page.screenshot(path=tmp_path / f"{name}-{scheme}-{width}.png", full_page=True)
            page.close()
        assert len(papers) == 2, "light and dark differ"
