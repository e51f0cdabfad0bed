"""Memory off the wafer: what it puts on the links between the rim and the dies."""

import random

import numpy as np
import pytest
from reference.mapping_player import back, rim_routes
from reference.mesh_simulator import Traffic

from phaze_fast.errors import InvalidInputError
from phaze_fast.wafer import Layout, Problem, Wafer, WaferTraining, evaluate, load_wafer, megatron
from phaze_fast.wafer.mapping.packing import stage_dies
from phaze_fast.wafer.mapping.placement import stream_link_s, stream_loads
from phaze_fast.wafer.mapping.traffic import step_loads

TILE = load_wafer("dojo-tile-like")
ALL = ("left", "right", "top", "bottom")
SIDES = (("top",), ("left",), ("left", "bottom"), ("left", "right"), ALL)


def at_edges(wafer: Wafer, edges, **changed) -> Wafer:
    return wafer.replace(off_wafer=wafer.off_wafer.replace(edges=edges), **changed)


def used_dies(wafer, layout):
    placed = stage_dies(wafer, layout.width, layout.height, layout.stages)
    return tuple(die for dies in placed for die in dies)


def unit_loads(wafer, layout):
    return stream_loads(wafer, used_dies(wafer, layout))


@pytest.mark.parametrize(
    ("edges", "busiest"), [(("top",), 4.0), (("left", "right"), 2.0), (ALL, 1.5)]
)
def test_the_busiest_link_of_a_whole_tile(edges, busiest):
    """One edge of five: four of five dies of a column are behind its first link. Two edges that
    face each other: each carries half. All four, 16 dies: through the links beside the middle."""
    wafer = at_edges(TILE, edges)
    loads = unit_loads(wafer, Layout(5, 5, 1, 1))
    assert loads.max() == pytest.approx(busiest, rel=1e-12)
    one, both = stream_link_s(wafer, used_dies(wafer, Layout(5, 5, 1, 1)))
    assert one == pytest.approx(loads.max() / wafer.link_bytes_per_s[0], rel=1e-12)
    assert one <= both <= 2 * one


@pytest.mark.parametrize("edges", SIDES)
def test_every_link_carries_what_the_routes_say(edges):
    """Rectangles at some place, several stages: each route added up by itself."""
    for columns, rows, layout in (
        (5, 5, Layout(2, 2, 3, 1)),
        (4, 3, Layout(4, 1, 2, 1)),
        (1, 5, Layout(1, 5, 1, 1)),
        (1, 1, Layout(1, 1, 1, 1)),
    ):
        wafer = at_edges(TILE, edges, columns=columns, rows=rows)
        expected = np.zeros(columns * rows * 4)
        for die in used_dies(wafer, layout):
            for route, share in rim_routes(columns, rows, edges, die):
                for link in route:
                    expected[link] += share
        found = unit_loads(wafer, layout)
        assert found.reshape(-1) == pytest.approx(expected, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("ways", [("in",), ("out",), ("in", "out")])
def test_packets_from_the_rim_take_as_long(ways):
    """Every die draws on every die of the rim at once; the last packet comes within 3%."""
    rng = random.Random(3)
    for edges in SIDES:
        columns, rows = rng.choice([(4, 4), (4, 3), (3, 4)])
        wafer = at_edges(TILE, edges, columns=columns, rows=rows)
        wafer = wafer.replace(die=wafer.die.replace(d2d_modules_y=rng.choice([36, 144])))
        layout = rng.choice(
            [Layout(columns, rows, 1, 1), Layout(3, 1, 2, 1), Layout(1, rows, 2, 1)]
        )
        traffic = Traffic(columns, rows, wafer.link_bytes_per_s, paced=True)
        for die in used_dies(wafer, layout):
            for route, share in rim_routes(columns, rows, edges, die):
                for way in ways if route else ():
                    path, behind = back(columns, route) if way == "out" else route, None
                    for _ in range(48):
                        behind = traffic.send_along(path, share * 1e9 / 48, [], behind)
        seconds = stream_link_s(wafer, used_dies(wafer, layout))[len(ways) - 1]
        assert traffic.play() == pytest.approx(1e9 * seconds, rel=0.03)


def test_streams_go_around_what_is_dead():
    layout = Layout(4, 1, 1, 1)
    dead = at_edges(TILE, ("top",), columns=4, rows=3, dead=((1, 1),))
    loads = unit_loads(dead, layout)
    used = used_dies(dead, layout)
    assert loads[1, 1].sum() == 0.0
    # What goes into each die less what leaves it: its byte, less what it brings in at the rim.
    into = np.zeros((3, 4))
    for y, x, way in zip(*np.nonzero(loads), strict=True):
        dx, dy = ((1, 0), (-1, 0), (0, 1), (0, -1))[way]
        into[y, x] -= loads[y, x, way]
        into[y + dy, x + dx] += loads[y, x, way]
    for x, y in ((x, y) for y in range(3) for x in range(4) if (x, y) != (1, 1)):
        brought = len(used) / 4 if y == 0 else 0.0
        assert into[y, x] == pytest.approx(((x, y) in used) - brought, abs=1e-12)
    # A die of the rim that is dead carries nothing: the others carry its part.
    assert unit_loads(at_edges(TILE, ("top",), dead=((2, 0),)), layout)[0, 2].sum() == 0.0


def test_memory_behind_a_rim_that_is_cut_off_has_no_room():
    """The edge's dies are all dead: state off the wafer has no place, and the search says so."""
    wafer = at_edges(TILE, ("top",), dead=tuple((x, 0) for x in range(5)))
    layout = Layout(5, 4, 1, 20)
    assert stream_link_s(wafer, used_dies(wafer, layout))[0] == float("inf")
    problem = Problem("bertlarge", wafer, WaferTraining(20))
    plan = megatron(problem, layout, 1, weights="stream")
    assert evaluate(problem, plan).stream_over_bytes > 0.0
    assert evaluate(Problem("bertlarge", TILE, WaferTraining(20)), plan).stream_over_bytes == 0.0


def test_a_stream_fills_links_beside_the_work():
    """More edges, or faster links, make a step that streams its weights no slower."""
    layout = Layout(5, 5, 1, 25)
    slow = TILE.replace(die=TILE.die.replace(d2d_modules_x=4, d2d_modules_y=4))
    times = []
    for wafer in (at_edges(slow, ("top",)), at_edges(slow, ("top", "bottom")), at_edges(slow, ALL)):
        problem = Problem("bertlarge", wafer, WaferTraining(25))
        times.append(evaluate(problem, megatron(problem, layout, 1, weights="stream")).time_s)
    assert times[0] > 1.05 * times[1] > 1.05 * times[2]


def test_switches_carry_it_at_no_charge():
    wafer = load_wafer("switch-wafer")
    assert stream_link_s(wafer, used_dies(wafer, Layout(20, 1, 1, 1))) == (0.0, 0.0)


def test_loads_of_a_step_have_the_stream():
    """Weights come twice, gradients go once, for every micro-batch, over the links of each way."""
    problem = Problem("bertlarge", TILE, WaferTraining(50))
    layout = Layout(5, 5, 1, 25)
    stream, kept = (
        step_loads(problem, megatron(problem, layout, 1, weights=how))
        for how in ("stream", "zero3")
    )
    unit = unit_loads(TILE, layout)
    each = problem.work.parameters / 25
    more = stream - kept
    assert more[1:4, 2, 2] == pytest.approx(2 * 2 * 2 * each * unit[1:4, 2, 2], rel=1e-9)
    assert more[1:4, 2, 3] == pytest.approx(2 * 2 * each * unit[0:3, 2, 2], rel=1e-9)


@pytest.mark.parametrize("edges", [[], ["north"], "top"])
def test_edges_that_are_none_are_refused(edges):
    with pytest.raises(InvalidInputError, match="edges"):
        TILE.replace(off_wafer={**TILE.off_wafer.to_dict(), "edges": edges})


def test_edges_have_one_order():
    given = TILE.off_wafer.replace(edges=("bottom", "left", "bottom"))
    assert given.edges == ("left", "bottom")
    assert TILE.off_wafer.edges == ("top",)
    assert load_wafer("dram-stream-wafer").off_wafer.edges == ALL
