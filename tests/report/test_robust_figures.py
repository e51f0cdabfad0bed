"""Pictures of a robust search: what is drawn, and what is not."""

from phaze_fast.report.robust import robust_section
from phaze_fast.report.robust_figures import chips_by_constants, tornado

FOUND = {
    "chips": ["one: 8 x 4x4 tensor, HBM 1", "two <b>: 4 x 8x8 tensor, HBM 1"],
    "robust": True,
    "constants": [
        {"constant": "matrix_rate", "step": [1.1, 1.0], "regret": [1.0, 1.25]},
        {"constant": "tensor_area", "step": [0.9, 1.3], "regret": [1.12, 1.0]},
    ],
}


def test_the_tornado_has_two_bars_a_constant_the_widest_first():
    drawn = tornado(FOUND)
    assert drawn.count("<rect") == 4
    assert drawn.index("tensor_area") < drawn.index("matrix_rate")
    assert "+30.0%" in drawn
    assert tornado({}) == tornado({"constants": []}) == ""


def test_chips_by_constants_has_a_cell_for_each_with_its_regret():
    drawn = chips_by_constants(FOUND)
    assert drawn.count('class="cell"') == 4
    assert "1.25" in drawn
    assert "nominal: 8 x 4x4" in drawn
    assert "robust: 4 x 8x8" in drawn
    assert chips_by_constants({"chips": []}) == ""


def test_the_section_of_a_search_shows_both():
    document = {
        "robust": {"chip_text": "c", "max_regret": 1.1, "proven": True},
        "constants": {"matrix_rate": {"low": 0.9, "high": 1.0}},
        "information": {"one_at_a_time": FOUND},
    }
    drawn = robust_section(document)
    assert drawn.count('class="picture"') == 2
    assert "<b>" not in drawn
