"""Pages of plans: whole, offline, escaped; in a browser without an error and without overflow."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

import phaze_fast as pf
from phaze_fast import models
from phaze_fast.planning import timeline
from phaze_fast.report.explain import difference, explain_plan
from phaze_fast.report.plan_page import compare_page, plan_page

MODEL = models.load("gpt2-xl").replace(name="small <b>", layers=12, heads=24, hidden=1536)
CLUSTER = pf.Cluster(devices=16, fabric="dgx-h100", chip="h100")
GIVEN = {"pp": 4, "dp": 4, "global_batch": 64, "recompute": "full", "zero": 1}


class Tags(HTMLParser):
    """Checks that every element that is opened is closed."""

    def __init__(self):
        super().__init__()
        self.open, self.ids = [], []

    def handle_starttag(self, tag, attrs):
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in {"meta", "line", "polyline"}:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.ids += [value for name, value in attrs if name == "id"]


def checked(page):
    parser = Tags()
    parser.feed(page)
    assert parser.open == []
    assert len(parser.ids) == len(set(parser.ids))
    assert not re.search(r"(?:src|href)=\"https?:", page)
    assert len(page) < 5e6
    return page


@pytest.fixture(scope="module")
def plans():
    return [pf.predict(MODEL, CLUSTER, {**GIVEN, "zero": z}) for z in (1, 0)]


def test_the_page_of_plans(plans):
    page = checked(plan_page(MODEL, CLUSTER, plans, "phaze-fast plan <x>"))
    assert "small &lt;b&gt;" in page
    assert "small <b>" not in page
    for anchor in ("timeline", "parts", "memory", "stages", "why", "runners", "again"):
        assert f'id="{anchor}"' in page
    assert page.count('role="img"') >= 2 * 4  # a lane of passes and one of memory for each stage
    assert page.count("forward of micro-batch 15") >= 4
    alone = checked(plan_page(MODEL, CLUSTER, plans[:1]))
    assert 'id="runners"' not in alone
    assert "Predicted" in alone


def test_a_plan_that_does_not_fit_says_so(plans):
    large = [replace(plans[0], limit_bytes=1e9)]
    assert "it does not fit" in plan_page(MODEL, CLUSTER, large) or large[0].over_bytes > 0


def test_two_plans_side_by_side(plans):
    one, other = (timeline(MODEL, CLUSTER, plan) for plan in plans)
    page = checked(compare_page(one, other, ["a.json", "<b>.json"]))
    assert "&lt;b&gt;.json" in page
    found = difference(*plans)
    assert found["fields"] == {"zero": [1, 0]}
    assert found["speedup"] == plans[0].time_s / plans[1].time_s
    for part, (a, b, d) in found["parts_s"].items():
        assert d == pytest.approx(b - a, abs=1e-15), part


def test_an_explanation_adds_up(plans):
    found = explain_plan(MODEL, CLUSTER, plans[0])
    assert sum(s for _, s in found.path) == pytest.approx(plans[0].time_s, rel=1e-6)
    worth = {each.what: each for each in found.worth}
    assert -1.0 <= worth["tensor core rate"].elasticity <= 0.0
    assert worth["HBM bandwidth"].doubled <= 1.0
    # All rates together: twice as fast in everything takes half the time, latencies halved too.
    assert all(each.doubled <= 1.0 + 1e-9 for each in found.worth)
