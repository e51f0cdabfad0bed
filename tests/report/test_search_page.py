"""The page about a search: what it shows, that all of it is escaped, and that it is one file."""

import copy
import json
import re
from pathlib import Path

import pytest
from report_cases import NASTY, Reader, nasty

import phaze_fast as pf
from phaze_fast.errors import InvalidInputError
from phaze_fast.report import report_page, write_report
from phaze_fast.report import text as say

STYLE = (Path(pf.__file__).parent / "report" / "templates" / "page.css").read_text("utf-8")


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


ANCHORS = ["certificate", "best", "stages", "pareto", "pruning", "progress", "baselines"]
ANCHORS += ["sensitivity", "top", "inputs"]


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
    for words in ("Proven optimal", "123,456", "275.3 TFLOP/s bf16", f"2{say.TIMES} as long"):
        assert words in read.words
    for words in ("no answer", "phaze-fast search example", "0" * 32, "in 1 of 2 cases"):
        assert words in read.words
    assert "another example" in read.words
    assert "limit 32 GiB" in page


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


def test_each_of_several_models_has_its_plan_and_chart(document, plan):
    document["models"] = ["example a", "example b"]
    document["best"]["plans"] = {"example a": plan, "example b": plan}
    page = report_page(document)
    words = Reader(page).words
    for text in ("example a and example b", "Plan of example a", "Plan of example b"):
        assert text in words
    assert {"memory-0", "memory-1"} <= set(figures_of(page))
    assert page.count('id="plot-memory-') == 2


def test_nothing_of_the_document_is_read_as_html_script_or_template(document):
    hostile = nasty(document) | {"status": "optimal"}
    hostile["pareto"] |= {"objectives": ["time", NASTY]}
    hostile["pruned"] = {NASTY: 3}
    hostile["best"]["plans"] = {NASTY: hostile["best"]["plan"]}
    hostile["best"]["plan"]["parts_s"] = {NASTY: 1.0}
    for stage in hostile["best"]["plan"]["stages"]:
        stage["memory"], stage["kinds"] = {NASTY: 1e9}, {NASTY: 2}
    page, plain = report_page(hostile), report_page(document)
    read = Reader(page)
    assert page.count("<script") == plain.count("<script")
    assert "<img" not in page
    assert NASTY.split("\u2028")[0].strip() in " ".join(read.text)
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


@pytest.mark.parametrize("name", pf.presets.chip_names())
def test_every_preset_chip_can_be_drawn_and_described(name):
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
