"""Every page in Chromium: no error, first paint, no overflow on a phone, hover and filters."""

import pytest
from report_cases import document_pages, hostile_document, plan_pages, search_document, sweep_pages
from robustness.browser import CHROMIUM, Browser

from phaze_fast.report import report_page

MOST_BYTES, MOST_PAINT_S, PHONE = 5e6, 2.0, 375
WIDTH = "document.documentElement.scrollWidth"


def search_pages():
    document = search_document()
    return {"search": report_page(document), "hostile": report_page(hostile_document(document))}


def hovered(browser, name):
    """Point at something of each page; give the text that is shown then."""
    plots = {"search": "pareto", "hostile": "pareto", "sweep": "devices"}
    plots |= {"validate": "rows-0", "backtest": "TPU"}
    if name in plots:
        text = f"document.querySelector('#plot-{plots[name]} .hoverlayer').textContent"
        return browser.said_at(f"#plot-{plots[name]} .scatterlayer .point", text, at=0)
    drawing = ".wafer rect" if name == "wafer" else ".lanes svg path"
    text = f"(document.querySelector('{drawing}:hover title') || {{}}).textContent"
    return browser.said_at(drawing, text, at=1)


def chosen(browser, selector, value, event):
    browser.run(
        f"(box => {{ box.value = {value!r}; box.dispatchEvent(new Event({event!r})); }})"
        f"(document.querySelector({selector!r}))"
    )


def check_filters(browser, name):
    if name == "search":
        title = "document.querySelector('#plot-pareto .xtitle').textContent"
        before = browser.until(title)
        chosen(browser, "select[data-axis=x]", "energy", "change")
        browser.until(f"{title} !== {before!r}")
    if name == "sweep":
        points = "document.querySelectorAll('#plot-devices .scatterlayer .point').length"
        before = browser.run(points)
        browser.click("#plot-devices .legendtoggle")
        browser.until(f"{points} === {before // 2}")
        chosen(browser, "input[data-rows]", "a100", "input")
        assert (
            browser.run("document.querySelectorAll('#points-table tbody tr[hidden]').length") == 2
        )


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_pages_in_a_browser(tmp_path):
    pages = plan_pages() | search_pages() | sweep_pages() | document_pages()
    with Browser(tmp_path / "profile") as browser:
        for name, page in pages.items():
            path = tmp_path / f"{name}.html"
            path.write_text(page, "utf-8")
            assert path.stat().st_size <= MOST_BYTES, name
            browser.look(width=PHONE, height=800, dark=True)
            assert browser.open(path) <= MOST_PAINT_S, name
            assert browser.run(WIDTH) <= PHONE, name
            browser.look()
            assert browser.run(WIDTH) <= 1280, name
            assert browser.run("document.documentElement.dataset.errors || ''") == "", name
            assert browser.run("document.querySelectorAll('img').length") == 0, name
            assert hovered(browser, name), name
            check_filters(browser, name)
            assert browser.said == [], name
