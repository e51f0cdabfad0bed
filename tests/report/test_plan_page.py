"""Pages of plans, sweeps, validations, back-tests and wafers: whole, offline, escaped; explanations."""

from dataclasses import replace

import pytest
from report_cases import NASTY, Reader, document_pages, plan_pages, sweep_pages

import phaze_fast as pf
from phaze_fast import models
from phaze_fast.planning import timeline
from phaze_fast.report.explain import difference, explain_plan
from phaze_fast.report.plan_page import compare_page, plan_page

MODEL = models.load("gpt2-xl").replace(name="small <script>", layers=12, heads=24, hidden=1536)
CLUSTER = pf.Cluster(devices=16, fabric="dgx-h100", chip="h100")
SPEC = {"pp": 4, "dp": 4, "global_batch": 64, "recompute": "full"}


@pytest.fixture(scope="module")
def plans():
    return [pf.predict(MODEL, CLUSTER, {**SPEC, "zero": zero}) for zero in (1, 0)]


@pytest.mark.parametrize("pages", [plan_pages, sweep_pages, document_pages])
def test_names_from_files_are_text_on_every_page(pages):
    for name, page in pages().items():
        read = Reader(page)
        assert "<img" not in page, name
        assert NASTY in " ".join(read.text), name
        # The page's script; with charts their data and Plotly as well.
        assert page.count("<script") == (3 if 'id="plotly"' in page else 1), name
        assert len(page) < 5e6, name


def test_the_page_of_plans(plans):
    page = plan_page(MODEL, CLUSTER, plans, "phaze-fast plan <x>")
    read = Reader(page)
    assert "small &lt;script&gt;" in page
    assert "small <script>" not in page
    sections = ("timeline", "parts", "memory", "stages", "why", "runners", "again")
    assert read.sections == [f"#{anchor}" for anchor in sections]
    assert page.count('role="img"') >= 2 * 4  # a lane of passes and one of memory for each stage
    assert page.count("forward of micro-batch 15") >= 4
    alone = plan_page(MODEL, CLUSTER, plans[:1])
    assert "#runners" not in Reader(alone).sections
    assert "Predicted</span>" in alone


def test_a_plan_that_does_not_fit_says_so(plans):
    over = replace(plans[0], limit_bytes=plans[0].memory_bytes - 2.0**30)
    words = Reader(plan_page(MODEL, CLUSTER, [over])).words
    assert "Predicted; it does not fit" in words
    assert "1 GiB too much" in words


def test_two_plans_side_by_side(plans):
    steps = [timeline(MODEL, CLUSTER, plan) for plan in plans]
    page = compare_page(*steps, ["a.json", "<b>.json"])
    Reader(page)
    assert "&lt;b&gt;.json is" in page
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
    # No rate that is twice as good makes the step longer.
    assert all(each.doubled <= 1.0 + 1e-9 for each in found.worth)
