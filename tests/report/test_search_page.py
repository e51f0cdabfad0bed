"""The page about a search: what it shows, that all of it is escaped, and that it is one file."""

import copy
import json
import re
from pathlib import Path

import pytest
from report_cases import NASTY, Reader, hostile_document, search_document

import phaze_fast as pf
from phaze_fast.errors import InvalidInputError
from phaze_fast.report import report_page, write_report
from phaze_fast.report import text as say

STYLE = (Path(pf.__file__).parent / "report" / "templates" / "page.css").read_text("utf-8")


ANCHORS = ["certificate", "best", "stages", "layers", "operators", "pareto", "pruning", "progress"]
ANCHORS += ["baselines", "sensitivity", "top", "inputs"]


@pytest.fixture(scope="module")
def found():
    return search_document()


@pytest.fixture
def document(found):
    return copy.deepcopy(found)


def anchors(page):
    return re.findall(r'<section id="(\w+)"', page)


def figures_of(page):
    return json.loads(re.search(r'id="figures">(.*?)</script>', page).group(1))


def test_every_section_is_there_in_order(document):
    page = report_page(document)
    read = Reader(page)
    assert anchors(page) == ANCHORS
    assert read.sections == [f"#{anchor}" for anchor in ANCHORS[1:]]
    assert page.count("<table") == page.count("<caption")
    best, manifest = document["best"], document["manifest"]
    for words in ("Proven optimal", best["chip"]["name"], say.seconds(best["time_s"]), "12 chips"):
        assert words in read.words
    for words in (f"2{say.TIMES} as long", "no answer", "in 1 of 2 cases", "another chip"):
        assert words in read.words
    for words in (manifest["command"], manifest["digest"], "ffn-dropout"):
        assert words in read.words
    assert f"limit {say.size(best['plan']['limit_bytes'])}" in page
    rank = document["layers"][1]["rank"]
    assert f"on number {rank} of the best chips, which differs in: " in read.words
    assert page.count(">All, as scheduled<") == len(document["layers"][0]["models"]["bert-large"])


def test_the_page_requests_nothing_and_runs_no_script_but_its_own(document):
    read = Reader(report_page(document))
    assert "url(" not in STYLE
    assert "@import" not in STYLE
    policy = next(v for _, v in read.attributes if v and v.startswith("default-src"))
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-inline' " not in policy.split("style-src")[0]


@pytest.mark.parametrize("part", ["top", "pareto", "baselines", "history", "sensitivity"])
@pytest.mark.parametrize("empty", [True, False])
def test_a_part_may_be_missing_or_empty(document, part, empty):
    if empty:
        document[part] = type(document[part])()
    else:
        del document[part]
    gone = "progress" if part == "history" else part
    assert anchors(report_page(document)) == [anchor for anchor in ANCHORS if anchor != gone]


def test_columns_without_a_value_are_left_out(document):
    assert "Energy of a step</th>" in report_page(document).split('id="top"')[1]
    for design in document["top"]:
        del design["energy_j"]
    top = report_page(document).split('id="top"')[1]
    assert "Energy of a step</th>" not in top
    assert '<th scope="col" class="number">Die area</th>' in top


def test_the_least_document():
    page = report_page({"status": "feasible", "best": {"time_s": 1.0}})
    assert anchors(page) == ["certificate", "best"]
    assert "Best found, not proven" in page


def test_a_search_stopped_before_it_found_a_plan_is_not_infeasible():
    reason = "m: the budget ended before any plan was found"
    page = report_page({"status": "unknown", "reason": reason, "models": ["m"]})
    assert "No plan was found, which proves nothing" in page
    assert reason in page
    assert "No design fits" not in page


def test_an_infeasible_document_says_why_and_has_no_charts():
    page = report_page(
        {
            "status": "infeasible",
            "reason": "example: 3 GiB short <on> stage 0",
            "models": ["example"],
            "designs": 20,
            "points": 20,
            "evaluated": 0,
            "pruned": {"memory": 20},
        }
    )
    assert "No design fits" in page
    assert "3 GiB short &lt;on&gt; stage 0" in page
    assert anchors(page) == ["certificate", "pruning"]
    assert len(page) < 50_000


def test_each_of_several_models_has_its_plan_and_chart(document):
    document["models"] = ["example a", "example b"]
    document["best"]["plans"] = dict.fromkeys(document["models"], document["best"]["plan"])
    page = report_page(document)
    words = Reader(page).words
    for text in ("example a and example b", "Plan of example a", "Plan of example b"):
        assert text in words
    assert {"memory-0", "memory-1"} <= set(figures_of(page))
    assert page.count('id="plot-memory-') == 2


def test_nothing_of_the_document_is_read_as_html_script_or_template(document):
    page, plain = report_page(hostile_document(document)), report_page(document)
    read = Reader(page)
    assert page.count("<script") == plain.count("<script")
    assert "<img" not in page
    assert NASTY in " ".join(read.text)
    # Charts are escaped twice: for the script element, and for Plotly, which reads tags.
    shown = figures_of(page)["pareto"]["data"][0]["hovertext"]
    assert all("&lt;/script&gt;&lt;img" in text for text in shown)
    assert not any("<img" in text for text in shown)


def test_a_missing_objective_is_null_in_the_chart(document):
    document["pareto"]["designs"][0]["area_mm2"] = float("nan")
    assert figures_of(report_page(document))["pareto"]["data"][0]["x"][-1] is None


@pytest.mark.parametrize("bad", [None, [], {}, {"status": "best"}, {"status": "optimal"}])
def test_what_is_no_document_is_refused(bad):
    with pytest.raises(InvalidInputError, match="document: "):
        report_page(bad)


def test_a_report_is_written_whole_or_not_at_all(document, tmp_path, monkeypatch):
    target = tmp_path / "page.html"
    write_report(document, target)
    before = target.read_text("utf-8")
    assert before.endswith("</html>\n")

    def full(self, other):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(InvalidInputError, match=r"page\.html: cannot be written: No space left"):
        write_report(document, str(target))
    assert target.read_text("utf-8") == before
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("name", ["", "missing/page.html"])
def test_a_place_that_cannot_be_written_is_named(tmp_path, name):
    with pytest.raises(InvalidInputError, match=re.escape(str(tmp_path / name))):
        write_report({"status": "infeasible"}, tmp_path / name)


def test_every_preset_chip_can_be_drawn_and_described():
    for name in pf.presets.chip_names():
        chip = pf.presets.chip(name).to_dict()
        page = report_page({"status": "feasible", "best": {"chip": chip}})
        Reader(page)
        assert len(page) < 150_000
        assert page.count('<rect x="') >= 3
        assert "None" not in say.chip_text(chip)
        assert len(say.chip_parts(chip)) >= 3


def test_values_are_written_with_units():
    assert say.seconds(0.0015) == "1.5 ms"
    assert (say.seconds(600), say.seconds(7200)) == ("10 min", "2 h")
    assert say.energy(2.1e6) == "2.1 MJ"
    assert say.cost(1_234_567.8) == "1,234,568 USD"
    assert say.area(12.5) == "12.50 mm²"
    for formatter in (say.seconds, say.size, say.rate, say.percent, say.ratio, say.count):
        assert formatter(None) == formatter(float("nan")) == formatter(True) == say.MISSING


def brightness(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
def test_text_can_be_read(mode):
    """WCAG 2.1, success criterion 1.4.3: at least 4.5 to 1."""
    block = re.findall(r":root[^{]*\{(.*?)\}", STYLE, re.S)[mode]
    colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", block))
    for ground in ("bg", "surface", "tint"):
        for ink in ("ink", "soft", "accent", "good", "warn", "bad"):
            pair = sorted(brightness(colours[name]) for name in (ground, ink))
            assert (pair[1] + 0.05) / (pair[0] + 0.05) >= 4.5, (ground, ink)
