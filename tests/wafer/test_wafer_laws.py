"""Laws of wafers: what fits a window, how many dies stand there, what links carry."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wafer_cases import DRAM, SMALL, SRAM, refusal, with_die

from phaze_fast.errors import InvalidInputError
from phaze_fast.wafer import Die, Wafer, WaferRules
from phaze_fast.wafer.hardware.wafer import extent_mm


def test_more_stacks_mean_fewer_dies():
    roomy = with_die(DRAM, chip=SMALL, d2d_modules_y=0, height_mm=20.0)
    dies = [with_die(roomy, hbm_stacks=k).dies for k in range(5)]
    assert dies == sorted(dies, reverse=True)
    assert dies == [80, 48, 48, 32, 32]
    memory = [with_die(roomy, hbm_stacks=k).memory_bytes for k in range(1, 5)]
    assert memory == sorted(memory)
    assert SRAM.dies > DRAM.dies


def test_stacks_stand_between_rows():
    depth = DRAM.rules.hbm_stack_depth_mm
    # Two stacks of 8.5 mm fit side by side beside a die of 25 mm, four do not.
    for stacks, between in ((0, 0), (1, 1), (2, 1), (4, 2)):
        wafer = with_die(DRAM, chip=SMALL, d2d_modules_y=0, hbm_stacks=stacks)
        one, two = (extent_mm(wafer, 1, rows)[1] for rows in (1, 2))
        assert two - one == pytest.approx(25.0 + 0.5 + between * depth)
        assert one == pytest.approx(25.0 + min(stacks, 2) * depth)


@st.composite
def drawn_wafers(draw):
    rules = WaferRules(window_mm=draw(st.floats(60.0, 300.0)))
    die = Die(
        width_mm=draw(st.floats(4.0, 33.0)),
        height_mm=draw(st.floats(4.0, 33.0)),
        chip=SMALL,
        d2d_modules_x=draw(st.integers(0, 64)),
        d2d_modules_y=draw(st.integers(0, 64)),
        hbm_stacks=draw(st.integers(0, 6)),
    )
    try:
        return Wafer(name="drawn", die=die, gap_mm=draw(st.floats(0.0, 5.0)), rules=rules)
    except InvalidInputError:
        return None


@given(drawn_wafers())
def test_the_grid_fits_and_no_more_would(wafer):
    if wafer is None:
        return
    window = wafer.rules.window_mm
    columns, rows = wafer.grid
    assert max(wafer.size_mm) <= window * (1 + 1e-9)
    assert extent_mm(wafer, columns + 1, rows)[0] > window
    assert extent_mm(wafer, columns, rows + 1)[1] > window
    for changes in ({"columns": columns + 1}, {"rows": rows + 1}):
        assert refusal(lambda c=changes: wafer.replace(**c)).startswith("window: ")
    assert wafer.dies * wafer.die.outline_mm2 <= wafer.area_mm2 * (1 + 1e-9)


@given(drawn_wafers())
def test_links_never_exceed_their_shoreline(wafer):
    if wafer is None:
        return
    die, rules = wafer.die, wafer.rules
    per_mm = rules.d2d_module_bytes_per_s / rules.d2d_module_mm * (1 + 1e-8)
    free = die.width_mm - die.stacks_on_edges[0] * rules.hbm_stack_mm
    assert wafer.link_bytes_per_s[0] <= die.height_mm * per_mm
    assert wafer.link_bytes_per_s[1] <= free * per_mm + 1e-3
    assert sum(die.stacks_on_edges) == die.hbm_stacks
