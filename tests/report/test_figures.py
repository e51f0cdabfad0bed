"""Charts as data: what adds up, what is drawn, which axis, and what has no chart."""

import pytest

from phaze_fast.report import figures, report_page

GIB = 2**30
ONE_AT_A_TIME = {
    "chips": ["one: 8 x 4x4 tensor, HBM 1", "two <b>: 4 x 8x8 tensor, HBM 1"],
    "robust": True,
    "constants": [
        {"constant": "matrix_rate", "step": [1.1, 1.0], "regret": [1.0, 1.25]},
        {"constant": "tensor_area", "step": [0.9, 1.3], "regret": [1.12, 1.0]},
    ],
}


def memory_plan(stages):
    memory = [{"weights": 2.0 * GIB, "activations": (k + 1.0) * GIB} for k in range(stages)]
    return {"limit_bytes": 32.0 * GIB, "stages": [{"memory": terms} for terms in memory]}


def test_memory_adds_up_against_the_limit():
    figure = figures.memory_figure(memory_plan(4))
    totals = [sum(bar["x"][k] for bar in figure["data"]) for k in range(4)]
    assert totals == pytest.approx([3.0, 4.0, 5.0, 6.0])
    line = figure["layout"]["shapes"][0]
    assert line["x0"] == line["x1"] == 32.0
    assert figures.memory_figure(memory_plan(20))["data"][0]["orientation"] == "v"
    assert figures.memory_figure({}) is None


def test_a_history_is_thinned_to_what_can_be_seen_and_keeps_its_end():
    points = [{"seconds": float(k), "incumbent_s": 2.0, "bound_s": 1.0} for k in range(54_321)]
    bound, _, best = figures.history_figure(points)["data"]
    assert len(bound["x"]) <= 2001
    assert best["x"][-1] == 54_320
    assert figures.history_figure(points[:1]) is None


def test_objectives_of_a_wide_range_get_a_logarithmic_axis():
    designs = [{"time_s": 1.0, "area_mm2": 1e5}, {"time_s": 2.0, "area_mm2": 300.0}]
    figure = figures.pareto_figure({"objectives": ["time", "area"], "designs": designs}, designs[0])
    assert (figure["axes"]["area"]["type"], figure["axes"]["time"]["type"]) == ("log", "linear")
    assert figure["data"][0]["x"] == [300.0, 1e5]
    assert figures.pareto_figure({"objectives": ["time"], "designs": designs}, designs[0]) is None


def test_points_have_a_trace_for_each_group():
    points = [figures.Point(group, x, 2 * x, "text") for group in ("<a>", "b") for x in (1.0, 50.0)]
    figure = figures.points_figure(points, "Measured", "Predicted", "s", diagonal=True)
    assert [trace["name"] for trace in figure["data"]] == ["&lt;a&gt;", "b"]
    assert figure["data"][0]["x"] == [1.0, 50.0]
    assert figure["layout"]["xaxis"]["type"] == figure["layout"]["yaxis"]["type"] == "log"
    line = figure["layout"]["shapes"][0]
    assert (line["x0"], line["y0"], line["x1"], line["y1"]) == (1.0, 1.0, 100.0, 100.0)


def test_the_tornado_has_two_bars_a_constant_the_widest_first():
    low, high = figures.tornado_figure(ONE_AT_A_TIME)["data"]
    assert low["y"] == high["y"] == ["tensor_area", "matrix_rate"]
    assert low["x"] == pytest.approx([-10.0, 10.0])
    assert high["x"] == pytest.approx([30.0, 0.0])
    assert (low["text"], high["text"]) == (["", "+10.0%"], ["+30.0%", ""])
    assert figures.tornado_figure({}) is figures.tornado_figure({"constants": []}) is None


def test_the_heat_map_has_the_regret_of_each_chip_under_each_constant():
    (heat_map,) = figures.regret_figure(ONE_AT_A_TIME)["data"]
    assert heat_map["z"] == [[1.0, 1.12], [1.25, 1.0]]
    assert heat_map["text"][1][0] == "1.25"
    assert heat_map["y"] == ["nominal: 8 x 4x4", "robust: 4 x 8x8"]
    assert figures.regret_figure({"chips": []}) is None


def test_the_page_of_a_robust_search_shows_both():
    document = {
        "status": "infeasible",
        "robust": {"chip_text": "c <b>", "max_regret": 1.1, "proven": True},
        "constants": {"matrix_rate": {"low": 0.9, "high": 1.0}},
        "information": {"one_at_a_time": ONE_AT_A_TIME},
    }
    section = report_page(document).split('id="robust"')[1]
    assert 'id="plot-regret"' in section
    assert 'id="plot-tornado"' in section
    assert "c &lt;b&gt;" in section
    assert "0.9 to 1" in section


def test_generations_have_a_strip_for_each_feature():
    rows = [
        {"name": f"<v{k}>", "year": 2017 + k, "regret": 1.5}
        | {"real": {"array": 10.0**k, "buffer": 8.0}, "best": {"array": 20.0, "buffer": 16.0}}
        for k in range(3)
    ]
    figure = figures.generations_figure(rows, {"array": "Array", "buffer": "Buffer"})
    best, real, *buffers = figure["data"]
    assert (real["y"], best["y"]) == ([1.0, 10.0, 100.0], [20.0] * 3)
    assert real["x"][0] == "&lt;v0&gt;<br>2017, regret 1.50"
    assert [trace["yaxis"] for trace in buffers] == ["y2", "y2"]
    low, high = figure["layout"]["yaxis1"]["range"]
    assert low < 0.0 < 2.0 < high
