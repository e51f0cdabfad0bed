"""Two classes of stages on joined wafers and behind switches: plain evaluators, brute force, laws."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from reference import mapping_oracle as oracle
from wafer.test_wafer_classes import case_of, drawn, fastest, sends_s, shaped
from wafer.test_wafer_switch import WITHIN, Switch
from wafer.test_wafer_tiny import tiny_problem
from wafer_cli_cases import document, refused

from phaze_fast import models
from phaze_fast.errors import InvalidInputError
from phaze_fast.wafer import (
    Effort,
    Encoding,
    Layout,
    Problem,
    WaferTraining,
    describe,
    die_map,
    evaluate,
    load_wafer,
    search_mapping,
    step_energy,
)
from phaze_fast.wafer.mapping.classes import Classes, classes_fault
from phaze_fast.wafer.mapping.details import details
from phaze_fast.wafer.mapping.evaluate import evaluation_of_classes
from phaze_fast.wafer.mapping.layout import boundaries, slots_of
from phaze_fast.wafer.mapping.packing import class_places
from phaze_fast.wafer.mapping.problem import class_boundaries
from phaze_fast.wafer.mapping.streams import cross_stage_link_s
from phaze_fast.wafer.search.bounds import any_placement_bound
from phaze_fast.wafer.search.class_search import improved_classes

TILE = load_wafer("dojo-tile-like")
SWITCHED = load_wafer("switch-wafer")
DRAM = load_wafer("dram-wafer")
KINDS = ("joined", "switch", "both")

# ---- a plain evaluator ----


def elsewhere(problem, rng, kind):
    """The same problem on joined wafers, behind switches, or both."""
    wafer = problem.wafer
    if kind != "joined":
        rate = rng.choice([1e10, 1e11, 1e12])
        switch = SWITCHED.switch.replace(bandwidth_bytes_per_s=rate, sums=rng.random() < 0.5)
        wafer = wafer.replace(switch=switch)
    if kind != "switch":
        wafer = wafer.replace(wafer_count=rng.choice([2, 2, 3, 4]), io=TILE.io)
    model, _, *others = problem._inputs()
    return Problem(model, wafer, *others)


def every_pair(problem):
    """Every two shapes, numbers of stages and replicas, shares of blocks and micro-batches."""
    wafer, batch = problem.wafer, problem.training.global_batch
    columns, rows = wafer.grid
    sides = [(w, h) for w in range(1, columns + 1) for h in range(1, rows + 1)]
    if wafer.switch is not None:
        sides = [(w, 1) for w in range(1, wafer.dies)]
    counts = range(1, problem.work.blocks)
    replicas = [
        r for r in range(1, wafer.wafer_count + 1) if wafer.wafer_count % r == batch % r == 0
    ]
    for one, other in itertools.permutations(sides, 2):
        for n, k, r in itertools.product(counts, counts, replicas):
            shapes = (*one, n), (*other, k)
            if n + k > problem.work.blocks or not class_places(
                wafer, shapes, wafer.wafer_count // r
            ):
                continue
            for micro_batch in (b for b in range(1, batch // r + 1) if batch // r % b == 0):
                for pair in shaped(problem, shapes, micro_batch):
                    yield tuple(replace(each, replicas=r) for each in pair)


def plain_sends(wafer, dies, numbers, border):
    """Seconds per byte and seconds of each stage: mesh or switches on each wafer, I/O between."""
    found = [[0.0, 0.0] for _ in dies]
    for number in sorted(set(numbers)):
        here = [k for k, on in enumerate(numbers) if on == number]
        if wafer.switch is None:
            inner = sends_s(wafer, [dies[k] for k in here], border - here[0])
            for k, (rate, fixed) in zip(here, inner, strict=True):
                found[k] = [rate, fixed]
            continue
        for k, other in itertools.permutations(here, 2):
            if abs(k - other) == 1:
                fewer = min(len(dies[k]), len(dies[other]))
                found[k][0] += 1 / fewer / wafer.switch.bandwidth_bytes_per_s
                found[k][1] += 2 * wafer.hop_latency_s
    for k, (one, other) in enumerate(itertools.pairwise(numbers)):
        for end in (k, k + 1) if one != other else ():
            found[end][0] += 1 / wafer.io.bandwidth_bytes_per_s
            found[end][1] += wafer.io.latency_s
    return found


def plain_cross_stage(problem, classes):
    """Streams of stages past one another, on each wafer by itself."""
    stages = len(classes.dies)
    found = np.zeros((stages, stages, 2))
    for number in set(classes.wafers):
        here = [k for k in range(stages) if classes.wafers[k] == number]
        placed = tuple(classes.dies[k] for k in here)
        found[np.ix_(here, here)] = cross_stage_link_s(problem.wafer, placed, len(here))
    return found.tolist()


def plain_sums_s(problem, classes):
    """Replicas' sums over I/O: the wafer with most parameters, in a ring."""
    io, replicas = problem.wafer.io, classes.layouts[0].replicas
    if replicas == 1:
        return 0.0
    blocks = classes.layouts[0].blocks + classes.layouts[1].blocks
    ops = problem.work.operators
    held = dict.fromkeys(classes.wafers, 0.0)
    for k, number in enumerate(classes.wafers):
        parts = {"block": blocks[k], "before": k == 0, "behind": k == len(blocks) - 1}
        held[number] += sum(op.parameters * parts[op.part] for op in ops)
    volume = max(held.values()) * problem.gradient_bytes
    return 2 * (replicas - 1) * (volume / replicas / io.bandwidth_bytes_per_s + io.latency_s)


def plain_step(problem, classes, op_mappings):
    """Seconds of a step and its stages, each class by the oracle, the step by its own formula."""
    first, stages = classes.layouts[0], []
    border = first.stages
    sent = plain_sends(problem.wafer, classes.dies, classes.wafers, border - 1)
    for which in (0, 1):
        case = case_of(problem, classes, which, sent)
        own = range(border) if which == 0 else range(border, len(case.blocks))
        if problem.stream is not None and problem.wafer.switch is None:
            case.cross_stage_s, case.own_stages = plain_cross_stage(problem, classes), own
        parts, items = oracle.parts_of(case, op_mappings[which])
        stages += [oracle.stage_of(case, op_mappings[which], parts, items, k) for k in own]
    links_s = oracle.charge(case.rules, case.cross_stage_s, stages) if case.cross_stage_s else 0.0
    loads = [stage.load_s for stage in stages]
    share = problem.training.global_batch // first.replicas
    tail_s = max(s.tail_s for s in stages) + plain_sums_s(problem, classes)
    batches = -(-share // first.micro_batch)
    return (batches - 1) * max(*loads, links_s) + sum(loads) + tail_s, stages


@pytest.mark.parametrize("kind", KINDS)
def test_whole_mappings_agree_with_a_plain_evaluator(kind):
    rng = random.Random(kind)
    checked, spread, shared = 0, 0, 0
    while checked < 20:
        problem = elsewhere(tiny_problem(rng), rng, kind)
        pairs = list(itertools.islice(every_pair(problem), 300))
        if not pairs:
            continue
        pair = rng.choice(pairs)
        try:
            classes = Classes(problem, pair)
        except InvalidInputError:
            continue
        checked += 1
        spread += len(classes.by_wafer) > 1
        shared += pair[0].replicas > 1
        plain = [
            drawn(rng, mapping, len(slots_of(each.width, each.height)), len(problem.modes))
            for mapping, each in zip(classes.mappings, pair, strict=True)
        ]
        time_s, stages = plain_step(problem, classes, plain)
        found = evaluation_of_classes(classes)
        assert found.time_s == pytest.approx(time_s, rel=1e-9)
        assert [s.load_s for s in found.stages] == pytest.approx(
            [s.load_s for s in stages], rel=1e-9
        )
        assert found.memory_bytes == pytest.approx(max(s.memory_bytes for s in stages), rel=1e-9)
        again = Encoding.from_list(json.loads(found.encoding.to_json()))
        assert again == found.encoding
        assert evaluate(problem, again).time_s == found.time_s
        if found.fits:
            assert sum(details(problem, found)["breakdown"]["causes"].values()) == pytest.approx(
                found.time_s
            )
    assert kind == "switch" or (spread and shared)


@pytest.mark.parametrize("kind", KINDS)
def test_brute_force_over_every_pair(kind):
    """A search of one pair comes near its best; no bound is above the best of all."""
    rng = random.Random(kind)
    done, near, tried = 0, 0, 0
    while done < 3:
        problem = elsewhere(tiny_problem(rng), rng, kind)
        if problem.work.blocks not in (2, 3) or len(problem.work.operators) > 3:
            continue
        best = math.inf
        for pair in itertools.islice(every_pair(problem), 12):
            time_s = fastest(problem, pair)
            if time_s is None or time_s == math.inf:
                continue
            best = min(best, time_s)
            found, _ = improved_classes(problem, pair, [], 300, 0)
            assert not found.fits or found.time_s >= time_s * (1 - 1e-9)
            tried, near = tried + 1, near + (found.fits and found.time_s <= 1.01 * time_s)
        if best == math.inf:
            continue
        done += 1
        assert any_placement_bound(problem) <= best * (1 + 1e-12)
        result = search_mapping(problem, Effort(seeds=1, steps=200, promising=2))
        assert result.bound_s <= result.best.time_s * (1 + 1e-12)
        if result.best.encoding.second_class is not None:
            assert "any shapes" in result.bound_space
            assert result.bound_s <= best * (1 + 1e-12)
    assert near >= 0.9 * tried > 0


# ---- laws ----

PAIR = (Layout(5, 3, 1, 16, blocks=(15,)), Layout(5, 2, 1, 16, blocks=(9,)))
LINES = (Layout(8, 3, 1, 8, "1f1b", 1, 2, (15,)), Layout(8, 2, 1, 8, "1f1b", 1, 2, (9,)))


def test_replicas_take_half_a_batch_each_and_sum_their_gradients():
    one = Problem("bertlarge", TILE, WaferTraining(64))
    two = Problem("bertlarge", TILE.replace(wafer_count=2), WaferTraining(128))
    alone = evaluation_of_classes(Classes(one, PAIR))
    first, second = (replace(each, replicas=2) for each in PAIR)
    both = evaluation_of_classes(Classes(two, (first, second)))
    size = two.work.parameters * two.gradient_bytes
    sums_s = size / TILE.io.bandwidth_bytes_per_s + 2 * TILE.io.latency_s
    assert both.time_s == pytest.approx(alone.time_s + sums_s, rel=1e-12)
    assert both.tail_s == pytest.approx(alone.tail_s + sums_s, rel=1e-12)
    energy, double = step_energy(one, alone), step_energy(two, both)
    assert double.operators_j == pytest.approx(2 * energy.operators_j)
    assert double.links_j == pytest.approx(2 * energy.links_j)


def test_each_wafer_takes_as_many_of_the_next_stages_as_have_a_place():
    rng = random.Random(8)
    placed = 0
    for _ in range(300):
        wafer = TILE if rng.random() < 0.5 else SWITCHED.replace(columns=5, rows=3)
        high = [1] if wafer.switch else [1, 1, 2, 3]
        shapes = tuple((rng.randint(1, 9), rng.choice(high), rng.randint(1, 4)) for _ in range(2))
        wafers = rng.randint(1, 4)
        places = class_places(wafer, shapes, wafers)
        if places is None:
            continue
        placed += 1
        numbers = [number for place in places for number in place.wafers]
        assert numbers == sorted(numbers)
        assert set(numbers) == set(range(wafers))
        for place, (width, height, count) in zip(places, shapes, strict=True):
            assert [len(dies) for dies in place.stages] == [width * height] * count
        dies = [stage for place in places for stage in place.stages]
        for number in range(wafers):
            here = [die for k, on in enumerate(numbers) if on == number for die in dies[k]]
            assert len(here) == len(set(here)) <= wafer.dies
    assert placed > 50


def test_a_border_between_two_wafers_passes_their_io():
    wafer = TILE.replace(wafer_count=2)
    problem = Problem("bertlarge", wafer, WaferTraining(64))
    pair = Layout(5, 4, 1, 16, blocks=(14,)), Layout(5, 2, 2, 16, blocks=(5, 5))
    classes = Classes(problem, pair)
    assert classes.wafers == (0, 1, 1)
    sent = class_boundaries(wafer, classes.dies, classes.wafers, 0)
    inner = boundaries(TILE, Layout(5, 2, 2, 16))
    byte_s, message_s = 1.0 / wafer.io.bandwidth_bytes_per_s, wafer.io.latency_s
    assert sent[0] == (byte_s, message_s)
    assert sent[1] == (inner[0][0] + byte_s, inner[0][1] + message_s)
    assert sent[2] == inner[1]
    shown = die_map(wafer, *pair)
    assert [shown.count(str(k)) for k in range(3)] == [20, 10, 10]
    assert "\n\n" in shown
    found = evaluation_of_classes(classes)
    grids = details(problem, replace(found, over_bytes=0.0))["dies"]["wafers"]
    assert [sum(row.count(0) for row in grid) for grid in grids] == [20, 0]
    assert describe(problem, found.encoding).count("stage(s) of") == 2


def test_equal_sizes_behind_switches_send_as_stages_of_one_shape_do():
    layout = Layout(5, 1, 4, 8)
    placed = class_places(SWITCHED, ((5, 1, 3), (5, 1, 1)))
    dies = tuple(stage for place in placed for stage in place.stages)
    assert class_boundaries(SWITCHED, dies, (0,) * 4, 2) == list(boundaries(SWITCHED, layout))


@pytest.mark.parametrize("sizes", [(12, 8), (4, 16), (7, 3)])
def test_packets_between_classes_behind_switches_take_as_long(sizes):
    """Every die of one class sends each die of the other as much, on and back at once."""
    wafer = SWITCHED.replace(hop_latency_s=0.0)
    placed = class_places(wafer, tuple((size, 1, 1) for size in sizes))
    dies = tuple(stage for place in placed for stage in place.stages)
    switch = Switch(sum(sizes), wafer.switch.bandwidth_bytes_per_s, 0.0)
    first, second = range(sizes[0]), range(sizes[0], sum(sizes))
    for senders, takers in ((first, second), (second, first)):
        behind = dict.fromkeys(senders)
        for packet in range(24):
            for turn in range(len(takers)):
                for sender in senders:
                    to = takers[(sender + turn + packet) % len(takers)]
                    route, size = (sender, switch.dies + to), 1.0 / sizes[0] / sizes[1] / 24
                    behind[sender] = switch.send_along(route, size, [], behind[sender])
    took = switch.play()
    for rate_s, _ in class_boundaries(wafer, dies, (0, 0), 0):
        assert rate_s == pytest.approx(took, rel=WITHIN)


# ---- searches, files and refusals ----


@pytest.mark.slow
def test_two_classes_pay_on_joined_wafers_where_dies_are_dead():
    """On each of two tiles as on one: lines of 12 and of 11 of 23 dies."""
    wafer = TILE.replace(dead=((0, 0), (2, 2)), wafer_count=2)
    problem = Problem("llama2-7b", wafer, WaferTraining(1024))
    found = search_mapping(problem, Effort(seeds=1, steps=500, promising=3))
    assert found.best.encoding.second_class is not None
    assert {each.layout.replicas for each in found.best.encoding.classes} == {2}
    assert found.best.time_s < 0.99 * min(e.time_s for e in found.runners_up if e.fits)
    assert found.bound_s <= found.best.time_s
    assert "stages of any shapes and sizes" in found.bound_space


@pytest.mark.parametrize(
    ("wafer", "pair", "changed", "said"),
    [
        (
            TILE.replace(wafer_count=2),
            PAIR,
            {},
            "no place together on 2 dojo-tile-like, each with a",
        ),
        (
            TILE.replace(wafer_count=2),
            PAIR,
            {"replicas": 2},
            "replicas: 2 is not accepted; expected 1",
        ),
        (TILE.replace(wafer_count=2), PAIR, {"replicas": 3}, "expected a divisor of 2 wafers"),
        (TILE, PAIR, {"replicas": 2}, "expected a divisor of 1 wafers"),
        (SWITCHED, PAIR, {}, "1 of 5 x 3 and 1 of 5 x 2 dies have no place together"),
    ],
)
def test_classes_that_are_none_are_refused(wafer, pair, changed, said):
    problem = Problem("bertlarge", wafer, WaferTraining(64))
    assert said in classes_fault(problem, (pair[0], replace(pair[1], **changed)))


@pytest.mark.parametrize(
    ("wafer", "pair"),
    [
        (SWITCHED, (Layout(12, 1, 1, 16, blocks=(15,)), Layout(8, 1, 1, 16, blocks=(9,)))),
        (DRAM.replace(wafer_count=2, io=TILE.io), LINES),
    ],
)
def test_files_of_two_classes_are_read_on_any_fabric(run, tmp_path, wafer, pair):
    problem = Problem("bertlarge", wafer, WaferTraining(64))
    found = evaluation_of_classes(Classes(problem, pair))
    (tmp_path / "wafer.yaml").write_text(wafer.to_yaml())
    (tmp_path / "pair.json").write_text(found.encoding.to_json())
    words = ["bertlarge", "--wafer", tmp_path / "wafer.yaml", "--global-batch", 64]
    words += ["--encoding", tmp_path / "pair.json"]
    answer = document(run(*words, "--json"))
    assert answer["ours"]["time_without_limit_s"] == found.time_s
    assert answer["ours"]["layout"]["second_class"]["stages"] == 1
    code, out, _ = run(*words, "--describe")
    assert code == 0
    assert out.count("stage(s) of") >= 2
    data = found.encoding.to_list()
    for entry in data:
        entry["replicas"] = 3
    (tmp_path / "pair.json").write_text(json.dumps(data))
    assert "replicas: 3 is not accepted" in refused(run(*words))


def test_a_search_behind_switches_tries_two_sizes():
    """Of seven dies and five blocks, two sizes may have what equal stages cannot."""
    model = models.load("bertlarge").replace(layers=5)
    wafer = SWITCHED.replace(columns=7, rows=1)
    problem = Problem(model, wafer, WaferTraining(64))
    found = search_mapping(problem, Effort(seeds=1, steps=200, promising=2), threads=1)
    assert found.bound_s <= found.best.time_s
    said = found.bound_space
    assert "not two classes" in said or said.startswith("stages of any shapes and sizes")
    same = search_mapping(problem, Effort(seeds=1, steps=200, promising=2), threads=2)
    assert same.best == found.best
