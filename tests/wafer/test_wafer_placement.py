"""Where stages lie: packing, faults, pipelines, switches, streams."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from case_counts import some_or_many
from golden_files import refused_calls
from mapping_cases import compiled, small
from reference.mapping_oracle import OperatorMapping
from reference.mapping_player import back, rim_routes
from reference.mesh_simulator import Switch, Traffic
from refusals import refusal
from wafer_cli_cases import DRAM, EFFORT, document, refused

from phaze_fast import models
from phaze_fast.errors import InvalidInputError
from phaze_fast.planning import pipelines
from phaze_fast.wafer import (
    Effort,
    Encoding,
    FaultMap,
    Layout,
    Problem,
    Wafer,
    WaferTraining,
    baselines,
    die_map,
    evaluate,
    fault_study,
    load_faults,
    load_wafer,
    megatron,
    mesh_collective,
    sample_faults,
    search_mapping,
    step_energy,
    step_loads,
    step_mfu,
)
from phaze_fast.wafer.mapping.details import details
from phaze_fast.wafer.mapping.layout import layouts, weighed_split
from phaze_fast.wafer.mapping.mesh import Links, Run
from phaze_fast.wafer.mapping.packing import (
    is_bent,
    longest_line,
    stage_capacity,
    stage_dies,
    tiles,
)
from phaze_fast.wafer.mapping.placement import Placement, stream_link_s, stream_loads
from phaze_fast.wafer.search.baselines import baselines_on, is_linear

# ---- packing ----


DOJO = load_wafer("dojo-tile-like")


def regions(wafer):
    """Sets of dies that can reach one another, by repeated merging."""
    (columns, rows), cut = wafer.grid, {frozenset(link) for link in wafer.dead_links}
    parts = [{(x, y)} for x in range(columns) for y in range(rows) if wafer.alive(x, y)]
    for x, y in [(x, y) for x in range(columns) for y in range(rows)]:
        for near in ((x + 1, y), (x, y + 1)):
            ends = [part for part in parts if (x, y) in part or near in part]
            joined = set().union(*ends)
            if len(ends) == 2 and {(x, y), near} <= joined and frozenset(((x, y), near)) not in cut:
                parts = [part for part in parts if part not in ends] + [joined]
    return parts


def lattice(wafer, width, height):
    """Most rectangles of one lattice, whatever its offset, in one connected part."""
    (columns, rows), best = wafer.grid, 0
    for part in regions(wafer):
        others = {(x, y) for x in range(columns) for y in range(rows)} - part
        best = max(best, in_lattice(wafer, width, height, others))
    return best


def in_lattice(wafer, width, height, dead):
    (columns, rows), best = wafer.grid, 0
    for dy in range(rows % height + 1 if height <= rows else 0):
        for dx in range(columns % width + 1 if width <= columns else 0):
            origins = [
                (dx + i * width, dy + j * height)
                for j in range((rows - dy) // height)
                for i in range((columns - dx) // width)
            ]
            free = [o for o in origins if not covers(o, width, height, dead, wafer.dead_links)]
            best = max(best, len(free))
    return best


def covers(origin, width, height, dead, links):
    """Whether something dead lies inside a rectangle."""
    x, y = origin
    inside = {(x + i, y + j) for i in range(width) for j in range(height)}
    return bool(inside & set(dead)) or any(set(link) <= inside for link in links)


def broken(rng):
    """A grid with a few dead dies and links."""
    columns, rows = rng.randint(1, 6), rng.randint(1, 6)
    places = [(x, y) for x in range(columns) for y in range(rows)]
    dead = rng.sample(places, rng.randint(0, min(3, len(places) - 1)))
    links = [(d, (d[0] + 1, d[1])) for d in places if d[0] + 1 < columns]
    links += [(d, (d[0], d[1] + 1)) for d in places if d[1] + 1 < rows]
    cut = rng.sample(links, rng.randint(0, min(3, len(links))))
    return DOJO.replace(columns=columns, rows=rows, dead=tuple(sorted(dead)), dead_links=tuple(cut))


def test_rectangles_lie_apart_and_on_working_dies():
    rng = random.Random(1)
    for _ in range(25):
        wafer = broken(rng)
        for width in range(1, wafer.grid[0] + 1):
            for height in range(1, wafer.grid[1] + 1):
                found = tiles(wafer, width, height)
                assert len(found) >= lattice(wafer, width, height)
                if not (wafer.dead or wafer.dead_links):
                    assert len(found) == lattice(wafer, width, height)
                stages = stage_capacity(wafer, width, height)
                dies = [d for stage in stage_dies(wafer, width, height, stages) for d in stage]
                assert len(dies) == len(set(dies)) == stages * width * height
                assert all(wafer.alive(*die) for die in dies)
                assert not dies or any(set(dies) <= part for part in regions(wafer))
                for origin in found:
                    assert not covers(origin, width, height, wafer.dead, wafer.dead_links)
                if stages:  # whoever sends can reach whoever receives
                    Placement(wafer, Layout(width, height, stages, 1)).sends()


@pytest.mark.parametrize(
    ("dead", "shape"), [((2, 2), (5, 2)), ((2, 2), (2, 5)), ((2, 1), (2, 5)), ((0, 2), (5, 2))]
)
def test_two_rectangles_beside_a_dead_die(dead, shape):
    """One lattice has room for one of them only."""
    wafer = DOJO.replace(dead=(dead,))
    assert (lattice(wafer, *shape), stage_capacity(wafer, *shape)) == (1, 2)


def links_between(one, other, wafer):
    """Links of one step of a walk; through the die between where it leads two dies on."""
    gap = abs(one[0] - other[0]) + abs(one[1] - other[1])
    if gap == 1:
        return [[frozenset((one, other))]]
    assert gap == 2
    near = [(one[0] + dx, one[1] + dy) for dx, dy in ((0, 1), (1, 0), (0, -1), (-1, 0))]
    (columns, rows), cut = wafer.grid, {frozenset(link) for link in wafer.dead_links}
    relays = [
        die
        for die in near
        if abs(die[0] - other[0]) + abs(die[1] - other[1]) == 1
        and 0 <= die[0] < columns
        and 0 <= die[1] < rows
        and wafer.alive(*die)
        and not cut & {frozenset((one, die)), frozenset((die, other))}
    ]
    return [[frozenset((one, relay)), frozenset((relay, other))] for relay in relays]


def test_a_walk_uses_each_link_once():
    rng = random.Random(2)
    whole = 0
    for _ in range(25):
        wafer = broken(rng)
        line = longest_line(wafer)
        assert len(set(line.dies)) == len(line.dies)
        assert all(wafer.alive(*die) for die in line.dies)
        steps = [links_between(a, b, wafer) for a, b in zip(line.dies, line.dies[1:], strict=False)]
        assert max((len(ways[0]) for ways in steps), default=1) == line.hops
        used = {link for ways in steps if len(ways[0]) == 1 for link in ways[0]}
        assert not used & {frozenset(link) for link in wafer.dead_links}
        for ways in (ways for ways in steps if len(ways[0]) == 2):
            free = [way for way in ways if not used & set(way)]
            assert free
            used |= set(free[0])
        whole += len(line.dies) == max(map(len, regions(wafer)))
    assert whole >= 18


def test_every_single_fault_of_the_tile_leaves_a_walk_over_all_others():
    for x in range(5):
        for y in range(5):
            line = longest_line(DOJO.replace(dead=((x, y),)))
            assert len(line.dies) == 24
            assert line.hops == 1 + (x + y) % 2  # a die of the rarer colour: one step leads two on


def test_a_line_that_bends_has_the_slower_links():
    wafer = DOJO.replace(die=DOJO.die.replace(d2d_modules_y=72))
    x, y = wafer.link_bytes_per_s
    assert y == x / 2
    bent, straight = Layout(24, 1, 1, 8), Layout(5, 1, 5, 8)
    assert Placement(wafer, bent).links().x_bytes_per_s == y
    assert Placement(wafer, straight).links().x_bytes_per_s == x
    broken_one = wafer.replace(dead=((1, 0),))
    assert Placement(broken_one, bent).links().hop_s == 2 * wafer.hop_latency_s
    assert is_bent(wafer, 3, 1, 6)
    assert not is_bent(wafer, 3, 1, 5)
    problem = Problem("bertlarge", wafer)
    assert not is_linear(problem, bent)
    assert is_linear(problem, straight)
    alone = wafer.replace(die=wafer.die.replace(d2d_modules_y=0), rows=1)
    assert (stage_capacity(alone, 5, 1), stage_capacity(alone, 6, 1)) == (1, 0)


def test_the_map_of_lines():
    wafer = DOJO.replace(dead=((4, 4),))
    drawn = die_map(wafer, Layout(12, 1, 2, 8)).split()
    assert [drawn.count(mark) for mark in "01X."] == [12, 12, 1, 0]
    sends = Placement(wafer, Layout(12, 1, 2, 8)).sends()
    assert all(rate_s > 0 and fixed_s > 0 for rate_s, fixed_s in sends)


@pytest.mark.slow
@pytest.mark.parametrize("dead", [(0, 0), (1, 0), (2, 2)])
@pytest.mark.parametrize("model", ["llama2-7b", "bertlarge"])
def test_one_dead_die_of_25_costs_15_percent_at_most(model, dead):
    """It took Llama-2 7B from 15.7 to 45.6 s while rectangles came from one lattice."""
    quick = Effort(seeds=1, steps=500, promising=2)
    whole = search_mapping(Problem(model, DOJO), quick)
    problem = Problem(model, DOJO.replace(dead=(dead,)))
    found = search_mapping(problem, quick)
    assert whole.bound_s <= found.best.time_s <= 1.15 * whole.best.time_s
    assert found.bound_s <= found.best.time_s
    assert evaluate(problem, found.best.encoding).time_s == found.best.time_s


# ---- faults ----


QUICK = Effort(seeds=1, steps=150, promising=1)
MAP = {"dead_dies": [[0, 2]], "dead_links": [[[1, 0], [1, 1]]]}


@pytest.fixture
def written(tmp_path):
    def write(data, name="map.yaml"):
        file = tmp_path / name
        file.write_text(data if isinstance(data, str) else json.dumps(data))
        return file

    return write


# ---- files ----


@pytest.mark.parametrize("name", ["map.yaml", "map.json"])
def test_a_map_breaks_dies_and_links(run, small, written, name):
    file = written(MAP, name)
    found = document(run("bertlarge", "--wafer", small, "--faults", file, *EFFORT, "--json"))
    assert found["faults"] == MAP
    assert found["dies"]["stage"][0][2] == -2
    assert found["dies"]["dead_links"] == MAP["dead_links"]
    assert found["bound"] <= found["ours"]["time_s"]
    assert 0 < found["mfu"] < 1
    assert found["energy_j"] > 0
    assert "one connected part" in found["bound_space"]
    whole = document(run("bertlarge", "--wafer", small, *EFFORT, "--json"))
    assert "faults" not in whole
    assert whole["ours"]["time_s"] <= found["ours"]["time_s"]


@pytest.mark.parametrize(("data", "words"), refused_calls("fault maps"))
def test_wrong_maps_are_one_line(run, small, written, data, words):
    text = refused(run("bertlarge", "--wafer", small, "--faults", written(data), *EFFORT))
    assert words in text
    assert text.count("\n") == 1


def test_a_map_that_is_not_there_or_of_a_space(run, written, tmp_path):
    missing = refused(run("bertlarge", "--wafer", "dram-wafer", "--faults", tmp_path / "no.yaml"))
    assert missing.count("\n") == 1
    said = refused(run("bertlarge", "--wafer", "wafer-space", "--faults", written(MAP)))
    assert "--faults: wafer-space is not accepted with it; expected wafers, not a space" in said


def test_a_map_adds_to_what_a_wafer_has(written):
    faults = load_faults(written(MAP))
    wafer = DOJO.replace(dead=((4, 4),), dead_links=(((0, 1), (1, 1)),))
    found = faults.on(wafer)
    assert found.dead == ((2, 0), (4, 4))
    assert found.dead_links == (((0, 1), (1, 1)),)
    assert faults.to_plain() == MAP


# ---- no stage and no message meets a fault ----


def test_no_message_passes_a_dead_die_or_link():
    rng = random.Random(4)
    for faults in sample_faults(DOJO, 5, seed=7, die_fault=0.1, link_fault=0.1):
        wafer = faults.on(DOJO)
        problem = Problem("bertlarge", wafer, WaferTraining(64))
        every = [each for each in layouts(wafer, 24, 64) if each.micro_batch == 8]
        layout = rng.choice(every)
        try:
            mapping = problem.mapping(layout)
        except InvalidInputError:
            continue  # some operator cannot be split so far
        found = search_mapping(problem, Effort(1, 20, 1), wanted=[layout])
        assert mapping is not None
        loads = step_loads(problem, found.best.encoding)
        for x, y in wafer.dead:
            assert not loads[y, x].any()
        for (x, y), (u, v) in wafer.dead_links:
            way = 0 if y == v else 2
            assert loads[y, x, way] == loads[v, u, way + 1] == 0.0
        placed = stage_dies(wafer, layout.width, layout.height, layout.stages)
        assert all(wafer.alive(*die) for stage in placed for die in stage)


SPLIT = DRAM.replace(columns=5, rows=4, dead=tuple((x, 2) for x in range(5)))


@pytest.mark.parametrize("model", ["gpt-3.6b", "gpt-7.5b"])
def test_where_faults_split_a_wafer_what_is_missing_is_said(model):
    """Both said that no rectangle suits, or the right bytes, by chance."""
    tight = SPLIT.replace(reserved_bytes="30 GB")
    found = search_mapping(Problem(model, tight, WaferTraining(64)), QUICK)
    assert not found.best.fits
    assert found.best.reason.startswith("OOM: ")
    roomy = search_mapping(Problem(model, SPLIT, WaferTraining(64)), QUICK)
    assert roomy.best.fits
    layout = roomy.best.encoding.layout
    rows = {y for stage in stage_dies(SPLIT, layout.width, layout.height, layout.stages) for _, y in stage}  # fmt: skip
    assert rows <= {0, 1} or rows <= {3}


@pytest.mark.parametrize("model", ["gpt-3.6b", "bertlarge"])
def test_a_tiny_budget_still_looks_at_one_layout(model):
    for wafer in (SPLIT, DRAM.replace(columns=5, rows=1, reserved_bytes="31 GB")):
        found = search_mapping(Problem(model, wafer, WaferTraining(64)), Effort(1, 10, 1, 1e-9))
        assert found.best.fits or found.best.reason.startswith("OOM: ")


# ---- many maps ----


def test_maps_are_drawn_with_their_probabilities():
    maps = sample_faults(DOJO, 4000, seed=3, die_fault=0.05, link_fault=0.02)
    assert maps == sample_faults(DOJO, 4000, seed=3, die_fault=0.05, link_fault=0.02)
    dies = sum(len(each.dead_dies) for each in maps) / 4000
    links = sum(len(each.dead_links) for each in maps) / 4000
    assert dies == pytest.approx(25 * 0.05, rel=0.05)
    assert links == pytest.approx(40 * 0.02, rel=0.05)
    by_yield = sample_faults(DRAM.replace(known_good_dies=False), 2000)
    dead = sum(len(each.dead_dies) for each in by_yield) / 2000
    assert dead == pytest.approx(40 * (1 - DRAM.die_yield), rel=0.05)
    for wrong in ({"die_fault": 1.0}, {"link_fault": -0.1}, {"count": 0}):
        with pytest.raises(InvalidInputError, match=next(iter(wrong))):
            sample_faults(DOJO, **{"count": 1, **wrong})


@pytest.mark.slow
def test_expected_and_worst_throughput():
    """As good as a search of each map by itself, and whole where nothing is dead."""
    wafer = DOJO.replace(columns=3, rows=2)
    problem = Problem("bertlarge", wafer, WaferTraining(16))
    maps = [FaultMap(), *sample_faults(wafer, 6, seed=2, die_fault=0.25, link_fault=0.1)]
    study = fault_study(problem, maps)
    assert study.times_s[0] == study.whole_s
    for faults, time_s in zip(maps, study.times_s, strict=True):
        alone = search_mapping(Problem("bertlarge", faults.on(wafer), WaferTraining(16)), QUICK)
        expected = alone.best.time_s if alone.best.fits else float("inf")
        assert time_s == pytest.approx(expected, rel=0.02)
        assert time_s >= alone.bound_s
    data = study.to_dict()
    assert data["worst_per_s"] == min(study.rates) <= data["expected_per_s"] <= data["whole_per_s"]
    rows = data["by_spares"]
    assert rows[-1]["share"] == 1.0
    assert all(a["share"] <= b["share"] and a["least_per_s"] >= b["least_per_s"] for a, b in pairwise(rows))  # fmt: skip


def test_fault_maps_of_the_command(run, two):
    words = ["--fault-maps", "5", "--die-fault", "0.2", "--link-fault", "0.1"]
    found = document(run("bertlarge", "--wafer", two, *EFFORT, *words, "--json"))
    assert found["fault_study"]["maps"] == 5
    assert found["fault_study"]["worst_per_s"] <= found["fault_study"]["expected_per_s"]
    _, out, _ = run("bertlarge", "--wafer", two, *EFFORT, *words)
    assert "over 5 fault maps" in out
    said = refused(run("bertlarge", "--wafer", two, *EFFORT, "--fault-maps", 5, "--die-fault", 2))
    assert "--die-fault: 2.0 is not accepted" in said


# ---- pipelines ----


TILE = DOJO.replace(columns=2, rows=2)
PAIR = TILE.replace(wafer_count=2)

# ---- schedules ----


@pytest.mark.parametrize(
    ("schedule", "rules"),
    [
        ("1f1b", {}),
        ("zb-h1", {"zero_bubble": 1}),
        ("interleaved", {"chunks": 2}),
        ("interleaved", {"chunks": 3}),
    ],
)
def test_the_time_of_a_step_is_that_of_a_play(schedule, rules):
    """Never below the play of the same passes; equal where stages are, 3% above at most."""
    rng = random.Random(3)
    for equal in (True, False, False):
        stages, m = rng.choice([2, 3, 4]), 12
        case = small(1, (), micro_batches=m, outer_tail_s=0.0, **rules)
        chunks = case.rules["chunks"]
        blocks = [6 * chunks] * stages
        if not equal and chunks == 1:
            blocks[rng.randrange(stages)] -= 1
        case.blocks, case.boundary_s = tuple(blocks), (0.0,) * stages
        cut = (1, 1, 1, 1)
        for name, value in (("forward", 1.0), ("backward", 2.0), ("weight_grad", 0.9)):
            case.tables[name] = {(0, cut): value}
        case.tables["parameters"] = {(0, cut): 0.0}
        found = float(compiled(case, [OperatorMapping("")]).score()["time_s"][0])
        shape = (stages, chunks) if chunks > 1 else (stages,)
        each = np.repeat(np.array(blocks)[:, None] / chunks, chunks, axis=1).reshape(shape)
        play = pipelines.play(schedule, each, 2.0 * each, m, weight_grad_s=0.9 * each)
        assert found == pytest.approx(play.step_s, rel=1e-9 if equal else 0.03)
        assert found >= play.step_s * (1 - 1e-12)


def test_a_shorter_bubble_costs_memory_or_messages():
    problem = Problem("bertlarge", TILE.replace(columns=4), WaferTraining(32))
    plan = megatron(problem, Layout(2, 1, 4, 1), 2)
    by_name = {}
    for schedule, chunks in (("1f1b", 1), ("zb-h1", 1), ("interleaved", 3)):
        layout = replace(plan.layout, schedule=schedule, chunks=chunks)
        by_name[schedule] = evaluate(problem, Encoding(layout, plan.operator_mappings))
    plain, late, runs = by_name.values()
    assert late.time_s < plain.time_s
    assert late.stages[0].activation_bytes == plain.stages[0].activation_bytes
    assert late.stages[-1].activation_bytes > plain.stages[-1].activation_bytes
    assert runs.stages[0].activation_bytes > plain.stages[0].activation_bytes
    assert runs.stages[1].load_s > plain.stages[1].load_s


def test_schedules_and_replicas_are_read_back():
    problem = Problem("bertlarge", PAIR.replace(wafer_count=4), WaferTraining(32))
    plan = megatron(problem, Layout(2, 1, 4, 2, "interleaved", 3, replicas=2), 2)
    assert plan.faults(problem) == []
    again = Encoding.from_list(plan.to_list())
    assert again == plan
    assert evaluate(problem, again) == evaluate(problem, plan)


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (Layout(2, 1, 2, 2, "gpipe"), "schedule: 'gpipe' is not accepted; expected 1f1b, zb-h1, inter"),
        (Layout(2, 1, 2, 2, "zb-h1", 2), "chunks: 2 is not accepted; expected 1 (zb-h1)"),
        (Layout(2, 1, 2, 2, "interleaved", 5), "chunks: 5 is not accepted; expected 2 to 4"),
        (Layout(2, 1, 2, 2, "interleaved", 1), "chunks: 1 is not accepted; expected 2 to 4"),
        (Layout(1, 1, 8, 2, "interleaved", 2), "expected 8 stages x 2 runs to divide 24 blocks"),
        (Layout(2, 1, 4, 32, "interleaved", 2), "expected 1 micro-batches to be a multiple of 4"),
        (Layout(2, 1, 3, 2), "stages: 3 is not accepted; expected a multiple of the 2 wafers"),
        (Layout(2, 1, 2, 2, replicas=3), "micro_batch: 2 is not accepted; expected a divisor of the glo"),
    ],
)  # fmt: skip
def test_what_a_pipeline_cannot_do_is_one_line(layout, text):
    problem = Problem("bertlarge", PAIR, WaferTraining(32))
    assert text in problem.fault(layout)
    assert text in refusal(lambda: problem.mapping(layout))


# ---- joined wafers ----


def test_replicas_on_two_wafers_take_half_a_batch_each_and_sum_their_gradients():
    one, two = (
        Problem("bertlarge", TILE, WaferTraining(8)),
        Problem("bertlarge", PAIR, WaferTraining(16)),
    )
    plan = megatron(one, Layout(2, 2, 1, 4), 2)
    alone = evaluate(one, plan)
    both = evaluate(two, Encoding(replace(plan.layout, replicas=2), plan.operator_mappings))
    size = two.work.parameters * two.gradient_bytes
    sums_s = size / PAIR.io.bandwidth_bytes_per_s + 2 * PAIR.io.latency_s
    assert both.time_s == pytest.approx(alone.time_s + sums_s, rel=1e-12)
    assert step_mfu(two, both) == pytest.approx(step_mfu(one, alone) * alone.time_s / both.time_s)
    energy, double = step_energy(one, alone), step_energy(two, both)
    assert double.operators_j == pytest.approx(2 * energy.operators_j)
    assert double.links_j == pytest.approx(2 * energy.links_j)
    assert double.stream_j > 2 * energy.stream_j


def test_a_pipeline_over_two_wafers_sends_over_their_io():
    layout = Layout(2, 1, 4, 1)
    inner = Placement(TILE, replace(layout, stages=2)).sends()
    byte_s, message_s = 1.0 / PAIR.io.bandwidth_bytes_per_s, PAIR.io.latency_s
    found = Placement(PAIR, layout).sends()
    assert found[0] == inner[0]
    assert found[3] == inner[1]
    assert found[1] == (inner[1][0] + byte_s, inner[1][1] + message_s)
    assert found[2] == (inner[0][0] + byte_s, inner[0][1] + message_s)


def test_layouts_of_joined_wafers_are_those_that_the_rules_accept():
    problem = Problem("bertlarge", PAIR, WaferTraining(4))
    listed = list(layouts(PAIR, problem.work.blocks, 4))
    assert len(listed) == len(set(listed))
    assert all(problem.fault(each) == "" for each in listed)
    assert {each.replicas for each in listed} == {1, 2}
    assert all(each.stages % 2 == 0 for each in listed if each.replicas == 1)


def test_the_bound_holds_on_joined_wafers():
    problem = Problem("bertlarge", PAIR, WaferTraining(4))
    found = search_mapping(problem, Effort(seeds=1, steps=300, promising=2), threads=1)
    assert found.best.fits
    rng = random.Random(5)
    every = list(layouts(PAIR, problem.work.blocks, 4))
    for layout in rng.sample(every, 20):
        mapping = problem.mapping(layout)
        mapping.anneal(1, 30, 0.1)
        score = mapping.score()[0]
        if score["over_bytes"] + score["stream_over_bytes"] <= 0:
            assert found.bound_s <= score["time_s"]
            assert mapping.relaxation().bound(1.0, 0.0)[0] <= score["time_s"]


def test_joined_wafers_on_the_command_line(run, tmp_path):
    file = tmp_path / "tile.yaml"
    file.write_text(TILE.replace(rows=1).to_yaml())
    words = ("bertlarge", "--global-batch", 2, "--seeds", 1, "--steps", 200, "--promising", 1)
    code, out, _ = run(*words, "--wafer", file, "--wafer-count", 2, "--json")
    found = json.loads(out)
    assert code == 0
    assert "2 wafers" in found["bound_space"]
    assert 0 < found["bound"] <= found["ours"]["time_s"]
    for name, text in (
        ("dram-wafer", "--wafer-count: 2 wafers without io are not accepted"),
        ("wafer-space", "--wafer-count: wafer-space is not accepted with it"),
    ):
        code, out, err = run(*words, "--wafer", name, "--wafer-count", 2)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert text in err


def test_systems_without_pipelines_need_a_batch_that_wafers_divide():
    assert "zero3" in baselines_on(Problem("bertlarge", PAIR, WaferTraining(8)))
    odd = baselines_on(Problem("bertlarge", PAIR, WaferTraining(9)))
    assert odd == ("megatron", "megatron_offload")
    found = baselines(Problem("bertlarge", PAIR, WaferTraining(9)), odd)
    assert all(each.best.encoding.layout.replicas == 1 for each in found.values())


def test_blocks_are_shared_out_so_that_the_slowest_stage_is_least():
    rng = random.Random(4)
    for _ in range(40):
        blocks = rng.randint(2, 9)
        stages, ends = min(blocks, rng.randint(2, 4)), (rng.uniform(0, 3), rng.uniform(0, 3))

        def slowest(counts, ends=ends):
            return max(*counts[1:-1], counts[0] + ends[0], counts[-1] + ends[1])

        every = itertools.product(range(1, blocks + 1), repeat=stages)
        least = min(slowest(counts) for counts in every if sum(counts) == blocks)
        assert slowest(weighed_split(blocks, stages, ends)) == pytest.approx(least)


def test_fewer_blocks_beside_a_large_vocabulary_are_faster():
    """Its head counts as almost two blocks: one stage of four has fewer of them."""
    model = models.load("llama3-8b").replace(layers=8)
    wafer = load_wafer("dram-wafer").replace(columns=4, rows=1)
    problem = Problem(model, wafer, WaferTraining(8))
    even = Layout(1, 1, 4, 1)
    uneven = next(each for each in problem.layouts() if each.blocks and each.stages == 4).blocks
    quick = Effort(seeds=1, steps=200, promising=1)
    times = [
        search_mapping(problem, quick, wanted=[each]).best.time_s
        for each in (even, replace(even, blocks=uneven))
    ]
    assert times[1] < 0.95 * times[0]
    encoding = megatron(problem, replace(even, blocks=uneven), 1)
    assert Encoding.from_list(encoding.to_list()) == encoding
    stages = evaluate(problem, encoding, True).stages
    assert tuple(stage.blocks for stage in stages) == uneven


@pytest.mark.parametrize("blocks", [[1, 1, 1, 1], [8, 0, 8, 8], [24], [12, 12, 1, -1]])
def test_blocks_that_do_not_make_up_the_model_are_refused(blocks):
    problem = Problem("bertlarge", "dram-wafer", WaferTraining(8))
    data = megatron(problem, Layout(1, 1, 4, 1), 1).to_list()
    with pytest.raises(InvalidInputError, match="blocks"):
        Encoding.from_list([entry | {"blocks": blocks} for entry in data]).check(problem)


# ---- switch ----


WITHIN = 0.03
PLAIN, SUMMING = 1, 2
BASE = load_wafer("switch-wafer")


def groups_of(rng):
    """Twelve dies in groups of one size, whichever they are."""
    size = rng.choice([2, 3, 4, 6, 12])
    dies = rng.sample(range(12), 12)
    return [dies[k : k + size] for k in range(0, 12, size)], size


@some_or_many(3, 6)
@pytest.mark.parametrize(
    "op", ["all-gather", "reduce-scatter", "all-to-all", "all-reduce", "summed all-reduce"]
)
def test_collectives_of_all_groups_at_once_against_packets(op, cases):
    """Also where switches sum, which ends an all-reduce sooner."""
    rng, kind = random.Random(op), op.removeprefix("summed ")
    for _ in range(cases):
        groups, size = groups_of(rng)
        rate, hop_s, volume = rng.uniform(1e11, 1e12), rng.choice([0.0, 1e-7]), 8e6
        switch, plain = Switch(12, rate, hop_s), Links(rate, rate, hop_s, PLAIN)
        found = mesh_collective(kind, volume, [Run(0, size)], plain)
        for group in groups:
            switch.summed(group, volume) if op != kind else switch.to_each(group, volume / size)
        took = switch.play() * (2 if op == "all-reduce" else 1)
        if op != kind:
            summing = plain._replace(fabric=SUMMING)
            sooner = mesh_collective(kind, volume, [Run(0, size)], summing)
            assert sooner.time_s <= found.time_s * (1 + 1e-12)
            found = sooner
        assert found.time_s == pytest.approx(took, rel=WITHIN)


def test_stages_send_over_their_own_links():
    """Both ways at once: a stage in the middle sends twice what the ends send."""
    wafer = BASE.replace(hop_latency_s=0.0)
    sent = [rate_s for rate_s, _ in Placement(wafer, Layout(5, 1, 4, 8)).sends()]
    switch = Switch(20, wafer.switch.bandwidth_bytes_per_s, 0.0)
    for k in range(4):
        for to in (k - 1, k + 1):
            for die in range(5):
                behind = None
                for _ in range(24 if 0 <= to < 4 else 0):
                    route = (5 * k + die, 20 + 5 * to + die)
                    behind = switch.send_along(route, 1.0 / 5 / 24, [], behind)
    assert max(sent) == pytest.approx(switch.play(), rel=WITHIN)
    assert sent[1] == pytest.approx(2 * sent[0])


def test_any_dies_that_work_make_up_a_stage():
    dead = BASE.replace(dead=((0, 0), (2, 1)))
    assert max(each.dies for each in layouts(dead, 24, 18)) == 18
    assert {each.height for each in layouts(dead, 24, 18)} == {1}
    assert die_map(dead, Layout(9, 1, 2, 9)).split().count("X") == 2


@pytest.mark.parametrize(("given", "said"), refused_calls("switches of a wafer"))
def test_packages_that_cannot_be_are_refused(given, said):
    with pytest.raises(InvalidInputError, match=said):
        type(BASE).from_dict(BASE.to_dict() | given, "given")


def test_a_search_and_what_it_says():
    problem = Problem("bertlarge", BASE.replace(columns=2, rows=2), WaferTraining(16))
    found = search_mapping(problem, QUICK, threads=1)
    assert found.bound_s <= found.best.time_s
    assert "any dies with switches" in found.bound_space
    links = details(problem, found.best)["links"]
    assert links["busy"] == []
    assert 0.0 < links["busiest"] < 1.0
    slower = problem.wafer.replace(switch=BASE.switch.replace(bandwidth_bytes_per_s=1e10))
    worse = search_mapping(Problem("bertlarge", slower, WaferTraining(16)), QUICK, threads=1)
    assert worse.best.time_s >= found.best.time_s


# ---- memory off the wafer: what it puts on the links between the rim and the dies ----


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
    wafer = at_edges(DOJO, edges)
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
        wafer = at_edges(DOJO, edges, columns=columns, rows=rows)
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
        wafer = at_edges(DOJO, edges, columns=columns, rows=rows)
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
    dead = at_edges(DOJO, ("top",), columns=4, rows=3, dead=((1, 1),))
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
    assert unit_loads(at_edges(DOJO, ("top",), dead=((2, 0),)), layout)[0, 2].sum() == 0.0


def test_memory_behind_a_rim_that_is_cut_off_has_no_room():
    """The edge's dies are all dead: state off the wafer has no place, and the search says so."""
    wafer = at_edges(DOJO, ("top",), dead=tuple((x, 0) for x in range(5)))
    layout = Layout(5, 4, 1, 20)
    assert stream_link_s(wafer, used_dies(wafer, layout))[0] == float("inf")
    problem = Problem("bertlarge", wafer, WaferTraining(20))
    plan = megatron(problem, layout, 1, weights="stream")
    assert evaluate(problem, plan).stream_over_bytes > 0.0
    assert evaluate(Problem("bertlarge", DOJO, WaferTraining(20)), plan).stream_over_bytes == 0.0


def test_a_stream_fills_links_beside_the_work():
    """More edges, or faster links, make a step that streams its weights no slower."""
    layout = Layout(5, 5, 1, 25)
    slow = DOJO.replace(die=DOJO.die.replace(d2d_modules_x=4, d2d_modules_y=4))
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
    problem = Problem("bertlarge", DOJO, WaferTraining(50))
    layout = Layout(5, 5, 1, 25)
    stream, kept = (
        step_loads(problem, megatron(problem, layout, 1, weights=how))
        for how in ("stream", "zero3")
    )
    unit = unit_loads(DOJO, layout)
    each = problem.work.parameters / 25
    more = stream - kept
    assert more[1:4, 2, 2] == pytest.approx(2 * 2 * 2 * each * unit[1:4, 2, 2], rel=1e-9)
    assert more[1:4, 2, 3] == pytest.approx(2 * 2 * each * unit[0:3, 2, 2], rel=1e-9)


@pytest.mark.parametrize("edges", [[], ["north"], "top"])
def test_edges_that_are_none_are_refused(edges):
    with pytest.raises(InvalidInputError, match="edges"):
        DOJO.replace(off_wafer={**DOJO.off_wafer.to_dict(), "edges": edges})


def test_edges_have_one_order():
    given = DOJO.off_wafer.replace(edges=("bottom", "left", "bottom"))
    assert given.edges == ("left", "bottom")
    assert DOJO.off_wafer.edges == ("top",)
    assert load_wafer("dram-stream-wafer").off_wafer.edges == ALL
