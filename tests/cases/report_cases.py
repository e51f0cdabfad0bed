"""What tests of pages share: hostile text, a reader that checks a page, pages of every kind."""

from html.parser import HTMLParser

import numpy as np

import phaze_fast as pf
from phaze_fast.cost.validation import Validation, column_error
from phaze_fast.planning import timeline
from phaze_fast.report import report_page
from phaze_fast.report.backtest_page import backtest_page
from phaze_fast.report.plan_page import compare_page, plan_page
from phaze_fast.report.sweep_page import sweep_page
from phaze_fast.report.validation_page import validation_page

NASTY = "</script><img src=x onerror=alert(1)> & \"q\" 'r' <b>{{ title }}</b> %{x}"
VOID = {"meta", "br", "input", "img"}


def nasty(value):
    """Put hostile text wherever a document has text of a user's."""
    if isinstance(value, dict):
        return {k: nasty(v) for k, v in value.items()}
    if isinstance(value, list):
        return [nasty(each) for each in value]
    return NASTY if isinstance(value, str) else value


class Reader(HTMLParser):
    """Reads a page and checks it: elements are closed, ids are unique, nothing is requested."""

    def __init__(self, page):
        super().__init__()
        self.open, self.attributes, self.names, self.text = [], [], [], []
        self.feed(page)
        self.close()
        assert self.open == []
        ids = [value for name, value in self.attributes if name == "id"]
        assert len(ids) == len(set(ids))
        for name, value in self.attributes:
            assert not name.startswith("on"), name
            if name in ("src", "href", "action", "srcset", "data"):
                assert value.startswith("#"), value
        assert {"link", "iframe", "img", "object", "base"}.isdisjoint(self.names)

    def handle_starttag(self, name, attributes):
        self.handle_startendtag(name, attributes)
        if name not in VOID:
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

    @property
    def sections(self):
        return [value for name, value in self.attributes if name == "href"]


# ---- the document of a search ----


def search_document():
    """The document of a small search, with baselines and sensitivities as a command adds them."""
    space = pf.ArchitectureSpace.published()[45_000:45_012]
    step = pf.Training(global_batch=64, micro_batch=1, pp=4, tp=1)
    cluster = pf.Cluster(devices=8, fabric="tpuv4-pod")
    front = ("time", "area", "energy")
    document = pf.search("bert-large", space, cluster, step, top=3, pareto=front).to_dict()
    baseline = {"title": "a baseline", "time_s": 2 * document["best"]["time_s"], "speedup": 2.0}
    baseline |= {"evaluations": 7, "seconds": 1.5, "chip": "a chip", "plan_text": "tp 1"}
    document["baselines"] = {"one": baseline, "none": {"title": "no plan", "time_s": None}}
    change = {"factor": 2.0, "time_s": 1.0, "change": -0.1}
    same = {"what": "HBM bandwidth", "same_chip": True, "chip_text": ""}
    other = {"what": "fabric bandwidth", "same_chip": False, "chip_text": "another chip"}
    document["sensitivity"] = [change | same, change | other]
    document["history"] = [
        {"seconds": 0.0, "placed": 0, "incumbent_s": None, "bound_s": 0.1},
        {"seconds": 2.0, "placed": 3, "incumbent_s": 9.0, "bound_s": 0.2},
        {"seconds": 3.0, "placed": 5, "incumbent_s": 8.0, "bound_s": 8.0},
    ]
    document["manifest"]["command"] = "phaze-fast search bert-large --report page.html"
    return document


def hostile_document(document):
    """Put hostile text into every text of a search's document, and into keys that are names."""
    hostile = nasty(document) | {"status": "optimal"}
    hostile["pareto"]["objectives"] = ["time", "area", NASTY]
    hostile["pruned"] = {NASTY: 3}
    hostile["best"]["plans"] = {NASTY: hostile["best"]["plan"]}
    hostile["best"]["plan"]["parts_s"] = {NASTY: 1.0}
    for stage in hostile["best"]["plan"]["stages"]:
        stage["memory"], stage["kinds"] = {NASTY: 1e9}, {NASTY: 2}
    return hostile


# ---- a page of each other kind, with hostile names of models, files and chips ----


def plan_pages():
    cluster = pf.Cluster(devices=16, fabric="dgx-h100", chip="h100")
    model = pf.models.load("bert-large").replace(name=NASTY)
    spec = {"pp": 4, "dp": 4, "global_batch": 64, "recompute": "full"}
    plans = [pf.predict(model, cluster, {**spec, "zero": zero}) for zero in (1, 0)]
    steps = [timeline(model, cluster, plan) for plan in plans]
    return {
        "plan": plan_page(model, cluster, plans, NASTY),
        "compare": compare_page(*steps, ["a.json", NASTY], NASTY),
    }


def sweep_pages():
    model = pf.models.load("bert-large").replace(name=NASTY)
    points = [
        pf.Point(
            model,
            pf.Cluster(devices=devices, fabric="dgx-h100", chip=chip),
            pf.Training(global_batch=64, micro_batch=2, tp=1),
        )
        for devices in (4, 8)
        for chip in ("h100", "a100-80")
    ]
    measured, predicted = np.array([1.0, 2.0, 50.0]), np.array([1.1, 1.9, 60.0])
    columns = ({"us_median": measured}, {"us_median": predicted})
    errors = {"us_median": column_error(measured, predicted)}
    validation = Validation("h200", "gemm", (NASTY, "mm b", "mm c"), *columns, errors)
    return {
        "sweep": sweep_page(pf.sweep(points), NASTY),
        "validate": validation_page(validation, NASTY),
    }


def document_pages():
    """Pages of a back-test and of a wafer with a dead die and a dead link."""
    features = ("array", "arrays", "multipliers", "vector_cores", "buffer_mib")
    features += ("hbm_bytes_per_flop", "link_bytes_per_s")
    chip = {"name": "chip", "family": "TPU", "year": 2017, "model": "m", "rank": 2, "chips": 5}
    chip |= {"regret": 1.5, "time_s": 1.0, "best_text": "b", "sources": ["s"]}
    chip |= {which: dict.fromkeys(features, 2.0) for which in ("real", "best")}
    change = {"from": "a", "to": "b", "agree": dict.fromkeys(features, True)}
    run = {"name": "r", "chip": "c", "devices": 8, "mfu": 0.4, "published_mfu": None}
    run |= {"points": None, "note": "n", "source": "s"}
    backtest = nasty({"generations": [chip], "directions": [change], "runs": [run]})
    backtest["generations"][0]["family"] = "TPU"
    wafer = {"model": "m", "wafer": {"name": "w"}, "ours": {"reason": "r", "time_s": 1.0}}
    wafer |= {"dies": {"stage": [[0, -1], [1, -2]], "dead_links": [[[0, 0], [0, 1]]]}}
    wafer |= {"links": {"busy": [[[0.1, 0.2, 0.3, 0.4]] * 2] * 2, "busiest": 0.4}}
    wafer |= {"baselines": {"megatron": {"tuned": {"time_s": 2.0, "reason": "x"}}}}
    hostile = nasty(wafer)
    hostile["ours"]["status"] = "ok"
    return {"backtest": backtest_page(backtest), "wafer": report_page(hostile)}
