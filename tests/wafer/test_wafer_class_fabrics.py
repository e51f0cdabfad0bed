"""Two classes of stages on joined wafers and behind switches: plain evaluators, brute force, laws."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from wafer.test_wafer_switch import WITHIN, Switch
from wafer_cli_cases import document, refused

from phaze_fast import models
from phaze_fast.errors import InvalidInputError
from phaze_fast.report.page import write_report
from phaze_fast.wafer import (
    Effort,
    Encoding,
    Layout,
    Problem,
    WaferTraining,
    describe,
    die_map,
    load_wafer,
    search_mapping,
    step_energy,
)
from phaze_fast.wafer.mapping.details import details
from phaze_fast.wafer.mapping.encoding import classes_fault
from phaze_fast.wafer.mapping.evaluate import Classes, evaluation_of_classes
from phaze_fast.wafer.mapping.packing import class_places
from phaze_fast.wafer.mapping.placement import Placement

TILE = load_wafer("dojo-tile-like")
SWITCHED = load_wafer("switch-wafer")
DRAM = load_wafer("dram-wafer")

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
    assert classes.placement.wafers == (0, 1, 1)
    sent = classes.placement.sends()
    inner = Placement(TILE, (Layout(5, 2, 2, 16),)).sends()
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
    whole, first, second = (Layout(5, 1, stages, 8) for stages in (4, 3, 1))
    two = Placement(SWITCHED, (first, second))
    assert two.sends() == Placement(SWITCHED, (whole,)).sends()


@pytest.mark.parametrize("sizes", [(12, 8), (4, 16), (7, 3)])
def test_packets_between_classes_behind_switches_take_as_long(sizes):
    """Every die of one class sends each die of the other as much, on and back at once."""
    wafer = SWITCHED.replace(hop_latency_s=0.0)
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
    for rate_s, _ in Placement(wafer, tuple(Layout(size, 1, 1, 1) for size in sizes)).sends():
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
        (TILE, PAIR, {}, ""),
        (TILE, PAIR, {"blocks": (10,)}, "blocks: 25 in all"),
        (TILE, PAIR, {"blocks": ()}, "at least 1 for each of 1 stages"),
        (TILE, PAIR, {"micro_batch": 8}, "micro_batch: 8 is not accepted; expected 16"),
        (TILE, PAIR, {"micro_batch": 7}, "micro_batch: 7"),
        (TILE, PAIR, {"height": 3}, "have no place together"),
        (TILE, PAIR, {"schedule": "zb-h1"}, "only 1f1b"),
    ],
)
def test_classes_that_are_none_are_refused(wafer, pair, changed, said):
    problem = Problem("bertlarge", wafer, WaferTraining(64))
    wrong = pair[0], replace(pair[1], **changed)
    assert said in classes_fault(problem, wrong)
    assert bool(said) == bool(classes_fault(problem, wrong))
    if said:
        with pytest.raises(InvalidInputError, match="accepted|place"):
            Classes(problem, wrong)


def test_a_third_class_is_refused():
    problem = Problem("bertlarge", TILE, WaferTraining(64))
    data = evaluation_of_classes(Classes(problem, PAIR)).encoding.to_list()
    data = [{**entry, "class": 2 * entry["class"]} for entry in data]
    with pytest.raises(InvalidInputError, match="class: 2 is not accepted; expected 0 or 1"):
        Encoding.from_list(data)


@pytest.mark.parametrize(
    ("wafer", "pair"),
    [
        (SWITCHED, (Layout(12, 1, 1, 16, blocks=(15,)), Layout(8, 1, 1, 16, blocks=(9,)))),
        (DRAM.replace(wafer_count=2, io=TILE.io), LINES),
        (DRAM, PAIR),
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
    write_report(answer, tmp_path / "page.html")
    first, second = (f"{each.stages} of {each.width} \u00d7 {each.height} dies" for each in pair)
    assert f"{first} and {second}" in (tmp_path / "page.html").read_text()
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
    any_shapes = found.bound_space.startswith("stages of any shapes and sizes")
    assert any_shapes == (found.best.encoding.second_class is not None)
    same = search_mapping(problem, Effort(seeds=1, steps=200, promising=2), threads=2)
    assert same.best == found.best
