"""Every page in Chromium: no error, first paint, no overflow on a phone, hover and filters."""

import numpy as np
import pytest
from browser import CHROMIUM, Browser
from report_cases import NASTY, nasty

import phaze_fast as pf
from phaze_fast.cost.validation import Validation, column_error
from phaze_fast.planning import timeline
from phaze_fast.report import report_page
from phaze_fast.report.plan_page import compare_page, plan_page
from phaze_fast.report.sweep_page import sweep_page
from phaze_fast.report.validation_page import validation_page

MOST_BYTES, MOST_PAINT_S, PHONE = 5e6, 2.0, 375
WIDTH = "document.documentElement.scrollWidth"


def plan_pages():
    cluster = pf.Cluster(devices=16, fabric="dgx-h100", chip="h100")
    model = pf.models.load("bert-large").replace(name=NASTY)
    given = {"pp": 4, "dp": 4, "global_batch": 64, "recompute": "full", "zero": 1}
    plans = [pf.predict(model, cluster, {**given, "zero": z}) for z in (1, 0)]
    sides = [timeline(model, cluster, plan) for plan in plans]
    return {
        "plan": plan_page(model, cluster, plans, NASTY),
        "compare": compare_page(*sides, ["a.json", NASTY]),
    }


def search_pages():
    space = pf.ArchitectureSpace.published()[45_000:45_040]
    cluster = pf.Cluster(devices=8, fabric="tpuv4-pod")
    step = pf.Training(global_batch=64, micro_batch=(1, 2))
    found = pf.search("bert-large", space, cluster, step, pareto=("time", "area", "energy"))
    document = found.to_dict()
    hostile = nasty(document) | {"status": "optimal"}
    hostile["pareto"]["objectives"] = ["time", "area", "energy"]
    return {"search": report_page(document), "hostile": report_page(hostile)}


def sweep_pages():
    model = pf.models.load("bert-large")
    points = [
        pf.Point(
            model,
            pf.Cluster(devices=n, fabric="dgx-h100", chip=chip),
            pf.Training(global_batch=64, micro_batch=2, tp=1),
        )
        for n in (4, 8)
        for chip in ("h100", "a100-80")
    ]
    took, said = np.array([1.0, 2.0, 50.0]), np.array([1.1, 1.9, 60.0])
    errors = {"us_median": column_error(took, said)}
    rows = ({"us_median": took}, {"us_median": said})
    found = Validation("h200", "gemm", (NASTY, "mm b", "mm c"), *rows, errors)
    return {"sweep": sweep_page(pf.sweep(points)), "validate": validation_page(found, NASTY)}


def hovered(browser, name):
    """Point at something of each page; give what is said then."""
    if name in ("search", "hostile"):
        said = "document.querySelector('#plot-pareto .hoverlayer').textContent"
        return browser.said_at("#plot-pareto .scatterlayer .point", said, at=1)
    if name in ("sweep", "validate"):
        tip = "document.querySelector('.tip').textContent"
        return browser.said_at(
            ".points i", f"(t => t.startsWith('Point at') ? '' : t)({tip})", at=1
        )
    said = "(document.querySelector('.lanes svg path:hover title') || {}).textContent"
    return browser.said_at(".lanes svg path", said, at=1)


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
        chosen(browser, "select[data-points]", "1", "change")
        assert (
            browser.run("document.querySelectorAll('#points-devices i:not([hidden])').length") == 2
        )
        chosen(browser, "input[data-rows]", "a100", "input")
        assert (
            browser.run("document.querySelectorAll('#points-table tbody tr[hidden]').length") == 2
        )


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_pages_in_a_browser(tmp_path):
    pytest.importorskip("plotly", reason="needs the extra `plot`")
    pages = plan_pages() | search_pages() | sweep_pages()
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
