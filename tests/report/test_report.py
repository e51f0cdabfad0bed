"""The page about a search: what it says, that it says nothing unescaped, and that it draws."""

import copy
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_cases import NASTY, nasty

import phaze_fast as pf
from phaze_fast.errors import InvalidInputError
from phaze_fast.report import report_page, write_report
from phaze_fast.report import words as say
from phaze_fast.report.drawing import chip_drawing
from phaze_fast.report.figures import history_figure, memory_figure, pareto_figure
from phaze_fast.report.markup import Html, escape, script_json, table, tag


@pytest.fixture(scope="session")
def plan():
    cluster = pf.Cluster(devices=16, fabric="tpuv4-pod", chip="tpuv4")
    step = pf.Training(global_batch=32, micro_batch=1, tp=2, pp=4, schedule="1f1b", zero=1)
    best = pf.plan(pf.models.load("llama2-7b"), cluster, step).best
    names = ["tp", "pp", "dp", "cp", "ep", "zero", "micro_batch", "micro_batches", "schedule"]
    names += ["vpp", "rank_order", "recompute", "devices", "time_s", "memory_bytes"]
    stages = [
        {name: getattr(stage, name) for name in ("kinds", "recompute", "load_s", "memory")}
        | {"layers": list(stage.layers), "memory_bytes": stage.memory_bytes}
        for stage in best.stages
    ]
    return {name: getattr(best, name) for name in [*names, "tokens_per_s", "parts_s"]} | {
        "limit_bytes": cluster.chip.hbm.capacity_bytes,
        "stages": stages,
    }


def design(plan, k=0, stages=True):
    chip = pf.presets.chip("tpuv4").to_dict() | {"name": f"example-{k}"}
    chip["tensor_core"] = chip["tensor_core"] | {"count": 8 - k}
    kept = plan if stages else {name: v for name, v in plan.items() if name != "stages"}
    return {
        "chip": chip,
        "index": k,
        "plan": kept,
        "plans": {"example": kept},
        "time_s": plan["time_s"] * (1 + k / 10),
        "samples_per_s": 32 / plan["time_s"],
        "area_mm2": 300.0 - 10 * k,
        "energy_j": 1e5 - k,
        "hbm_bytes": plan["limit_bytes"],
        "cost_usd": 1e6,
        "bottleneck": "compute",
    }


@pytest.fixture
def document(plan):
    best = design(plan)
    front = [
        {**{n: v for n, v in design(plan, k).items() if n not in ("plan", "plans")}}
        | {"plan_text": "an example's plan"}
        for k in range(4)
    ]
    steps = {"memory": 1000, "roofline": 90, "mapped": 0, "schedule_bound": 5, "placed": 4}
    return copy.deepcopy(
        {
            "status": "optimal",
            "models": ["example"],
            "points": 123_456,
            "designs": 1100,
            "evaluated": 5,
            "pruned": steps,
            "bound": best["time_s"],
            "gap": 0.0,
            "best": best,
            "top": [design(plan, k, stages=False) for k in range(3)],
            "pareto": {
                "objectives": ["time", "area", "energy"],
                "status": "optimal",
                "designs": front,
            },
            "baselines": {
                "one": {
                    "title": "an example's baseline",
                    "time_s": 2 * best["time_s"],
                    "speedup": 2.0,
                }
                | {"samples_per_s": 1.0, "evaluations": 7, "seconds": 1.5, "chip": "example-7"}
                | {"plan_text": "tp 1", "note": "an example's note"},
                "none": {"title": "finds nothing", "time_s": None, "speedup": None, "chip": None},
            },
            "history": [
                {"seconds": 0.0, "placed": 0, "incumbent_s": None, "bound_s": 0.1},
                {"seconds": 1.0, "placed": 2, "incumbent_s": float("inf"), "bound_s": 0.1},
                {"seconds": 2.0, "placed": 3, "incumbent_s": 9.0, "bound_s": 0.2},
                {"seconds": 3.0, "placed": 5, "incumbent_s": 8.0, "bound_s": 8.0},
            ],
            "sensitivity": [
                {"what": "HBM bandwidth", "factor": 0.8, "time_s": 1.0, "change": 0.05}
                | {"same_chip": True, "chip_text": ""},
                {"what": "fabric bandwidth", "factor": 2.0, "time_s": 1.0, "change": -0.1}
                | {"same_chip": False, "chip_text": "another example"},
            ],
            "manifest": {
                "version": "0.0.0",
                "digest": "0" * 32,
                "seed": 0,
                "seconds": 4.0,
                "threads": 2,
                "inputs": {"models": ["example"], "cluster": {"devices": 16}},
                "command": "phaze-fast search example --report example.html",
            },
        }
    )


class Reader(HTMLParser):
    """Reads a page: elements that are not closed, attributes, text outside scripts."""

    VOID = {"meta", "br", "input", "rect", "img"}

    def __init__(self, page):
        super().__init__()
        self.open, self.attributes, self.text, self.names = [], [], [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, name, attributes):
        self.names.append(name)
        self.attributes += attributes
        if name not in self.VOID:
            self.open.append(name)

    def handle_startendtag(self, name, attributes):
        self.names.append(name)
        self.attributes += attributes

    def handle_endtag(self, name):
        assert self.open.pop() == name

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("script", "style"):
            self.text.append(data)

    @property
    def words(self):
        return " ".join(" ".join(self.text).replace("\xa0", " ").split())


@pytest.fixture
def no_plotly(monkeypatch):
    monkeypatch.setattr("phaze_fast.report.frame._plotly", lambda: "/* no Plotly in this test */")


ANCHORS = ["certificate", "best", "stages", "pareto", "pruning", "progress", "baselines"]
ANCHORS += ["sensitivity", "top", "inputs"]


def anchors(page):
    return re.findall(r'<section id="(\w+)"', page)


def test_every_section_is_there_in_order(document, no_plotly):
    page = report_page(document)
    read = Reader(page)
    assert read.open == []
    assert anchors(page) == ANCHORS
    assert page.count("<table") == page.count("<caption")
    for words in (
        "Proven optimal",
        "123,456",
        "275.3 TFLOP/s bf16",
        f"2{say.TIMES} as long",
        "no answer",
    ):
        assert words in read.words
    for words in ("phaze-fast search example", "0" * 32, "in 1 of 2 cases", "another example"):
        assert words in read.words
    assert "limit 32 GiB" in page


def test_the_page_asks_for_nothing(document, no_plotly):
    read = Reader(report_page(document))
    for name, value in read.attributes:
        if name in ("src", "href", "action", "srcset", "data"):
            assert value.startswith("#")
    assert {"link", "iframe", "img", "object", "base"}.isdisjoint(read.names)
    style = (Path(pf.__file__).parent / "report" / "page.css").read_text("utf-8")
    assert "url(" not in style
    assert "@import" not in style
    policy = next(v for _, v in read.attributes if v and v.startswith("default-src"))
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-inline' " not in policy.split("style-src")[0]


@pytest.mark.parametrize("part", ["top", "pareto", "baselines", "history", "sensitivity"])
@pytest.mark.parametrize("empty", [True, False])
def test_a_part_may_be_missing_or_empty(document, no_plotly, part, empty):
    whole = anchors(report_page(document))
    if empty:
        document[part] = type(document[part])()
    else:
        del document[part]
    gone = "progress" if part == "history" else part
    assert anchors(report_page(document)) == [each for each in whole if each != gone]


def test_the_least_document(no_plotly):
    page = report_page({"status": "feasible", "best": {"time_s": 1.0}})
    assert anchors(page) == ["certificate", "best"]
    assert "Best found, not proven" in page


def test_an_infeasible_document_says_why_and_needs_no_plotly(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
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


def test_without_plotly_the_message_names_the_extra(document, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(InvalidInputError, match=r"pip install 'phaze-fast\[plot\]'"):
        report_page(document)


def test_each_of_several_models_has_its_plan_and_figure(document, plan, no_plotly):
    document["models"] = ["example a", "example b"]
    document["best"]["plans"] = {"example a": plan, "example b": plan}
    page = report_page(document)
    words = Reader(page).words
    assert "example a and example b" in words
    assert "Plan of example a" in words
    assert "Plan of example b" in words
    assert 'id="plot-memory-0"' in page
    assert 'id="plot-memory-1"' in page


def test_nothing_of_the_document_is_read_as_html_or_script(document, no_plotly):
    hostile = nasty(document) | {"status": "optimal"}
    hostile["pareto"] |= {"objectives": ["time", NASTY]}
    hostile["pruned"] = {NASTY: 3}
    hostile["best"]["plans"] = {NASTY: hostile["best"]["plan"]}
    hostile["best"]["plan"]["parts_s"] = {NASTY: 1.0}
    for stage in hostile["best"]["plan"]["stages"]:
        stage["memory"], stage["kinds"] = {NASTY: 1e9}, {NASTY: 2}
    page, plain = report_page(hostile), report_page(document)
    read = Reader(page)
    assert read.open == []
    assert "img" not in read.names
    assert not any(name.startswith("on") for name, _ in read.attributes)
    assert page.count("<script") == plain.count("<script")
    assert "<img" not in page
    assert NASTY.split("\u2028")[0].strip() in " ".join(read.text)


def test_figures_are_escaped_twice_once_for_the_script_and_once_for_plotly(document):
    document["pareto"]["designs"][0]["chip"] = NASTY
    figure = pareto_figure(document["pareto"], document["best"])
    text = script_json(figure)
    assert "<" not in text
    shown = json.loads(text)["data"][0]["hovertext"]
    assert any("&lt;/script&gt;&lt;img" in each for each in shown)
    assert not any("<img" in each for each in shown)


def test_numbers_that_are_none_do_not_break_the_json():
    assert script_json([float("nan"), float("inf"), 1.5]) == "[null,null,1.5]"


def test_markup_escapes_text_and_only_text():
    assert tag("p", "<i>", Html("<i></i>"), title='"') == '<p title="&quot;">&lt;i&gt;<i></i></p>'
    assert escape(escape("&")) == "&amp;"
    laid = table("c", ["name", "empty", "n>"], [["a", "", "1"], ["b", say.NOTHING, "2"]])
    assert "empty" not in laid
    assert '<th scope="col" class="number">n</th>' in laid


@pytest.mark.parametrize("bad", [None, [], {}, {"status": "best"}, {"status": "optimal"}])
def test_what_is_no_document_is_refused(bad):
    with pytest.raises(InvalidInputError, match="document: "):
        report_page(bad)


def test_a_report_is_written_whole_or_not_at_all(document, no_plotly, tmp_path, monkeypatch):
    target = tmp_path / "page.html"
    write_report(document, target)
    assert target.read_text("utf-8").endswith("</html>\n")
    before = target.read_text("utf-8")

    def full(self, other):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(InvalidInputError, match=r"page\.html: cannot be written: No space left"):
        write_report(document, str(target))
    assert target.read_text("utf-8") == before
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("name", ["", "missing/page.html"])
def test_a_place_that_cannot_be_written_is_named(document, no_plotly, tmp_path, name):
    with pytest.raises(InvalidInputError, match=re.escape(str(tmp_path / name))):
        write_report(document, tmp_path / name)


def test_memory_adds_up_and_stands_against_the_limit(plan):
    figure = memory_figure(plan)
    held = [sum(bar["x"][k] for bar in figure["data"]) for k in range(plan["pp"])]
    assert held == pytest.approx([s["memory_bytes"] / 2**30 for s in plan["stages"]])
    line = figure["layout"]["shapes"][0]
    assert line["x0"] == line["x1"] == plan["limit_bytes"] / 2**30
    many = memory_figure(plan | {"stages": plan["stages"] * 5})
    assert many["data"][0]["orientation"] == "v"


def test_a_history_is_thinned_to_what_can_be_seen_and_keeps_its_end():
    points = [{"seconds": float(k), "incumbent_s": 2.0, "bound_s": 1.0} for k in range(54_321)]
    bound, _, best = history_figure(points)["data"]
    assert len(bound["x"]) <= 2001
    assert best["x"][-1] == 54_320


def test_wide_objectives_get_a_logarithmic_axis(document):
    document["pareto"]["designs"][0]["area_mm2"] = 1e5
    axes = pareto_figure(document["pareto"], document["best"])["axes"]
    assert axes["area"]["type"] == "log"
    assert axes["time"]["type"] == "linear"


@pytest.mark.parametrize("name", pf.presets.chip_names())
def test_every_preset_chip_can_be_drawn_and_said(name):
    chip = pf.presets.chip(name).to_dict()
    drawn = chip_drawing(chip)
    assert Reader(drawn).open == []
    assert len(drawn) < 150_000
    assert "None" not in say.chip_text(chip)
    assert len(say.chip_facts(chip)) >= 3


def test_values_are_said_with_units():
    assert say.seconds(0.0015) == "1.5 ms"
    assert (say.seconds(600), say.seconds(7200)) == ("10 min", "2 h")
    assert say.energy(2.1e6) == "2.1 MJ"
    assert say.cost(1_234_567.8) == "1,234,568 USD"
    assert say.area(12.5) == "12.50 mm²"
    for how in (say.seconds, say.size, say.rate, say.percent, say.ratio, say.count):
        assert how(None) == how(float("nan")) == how(True) == say.NOTHING


def brightness(colour):
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
def test_text_can_be_read(mode):
    """WCAG 2.1, success criterion 1.4.3: at least 4.5 to 1."""
    style = (Path(pf.__file__).parent / "report" / "page.css").read_text("utf-8")
    block = re.findall(r":root[^{]*\{(.*?)\}", style, re.S)[mode]
    colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", block))
    for ground in ("bg", "surface", "tint"):
        for ink in ("ink", "soft", "accent", "good", "warn", "bad"):
            pair = sorted(brightness(colours[name]) for name in (ground, ink))
            assert (pair[1] + 0.05) / (pair[0] + 0.05) >= 4.5, (ground, ink)
