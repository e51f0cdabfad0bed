"""Pipeline schedules and joined wafers: closed forms against a play, sums by hand, one-line faults."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace

import numpy as np
import pytest
from mapping_cases import compiled, small
from reference.mapping_oracle import OperatorMapping
from wafer_cases import refusal

from phaze_fast import models
from phaze_fast.errors import InvalidInputError
from phaze_fast.planning import pipelines
from phaze_fast.wafer import (
    Effort,
    Encoding,
    Layout,
    Problem,
    WaferTraining,
    baselines,
    evaluate,
    load_wafer,
    megatron,
    search_mapping,
    step_energy,
    step_mfu,
)
from phaze_fast.wafer.mapping.encoding import layout_faults
from phaze_fast.wafer.mapping.layout import layouts, weighed_split
from phaze_fast.wafer.mapping.placement import Placement
from phaze_fast.wafer.search.baselines import baselines_on

TILE = load_wafer("dojo-tile-like").replace(columns=2, rows=2)
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
    (fault,) = layout_faults(problem, layout)
    assert text in fault
    assert text in refusal(lambda: problem.mapping(layout))


# ---- joined wafers ----


def test_wafers_without_links_to_others_are_not_joined():
    dram = load_wafer("dram-wafer")
    assert refusal(lambda: dram.replace(wafer_count=2)) == (
        "wafer_count: 2 wafers without io are not accepted; expected the bandwidth of their links to "
        "each other, or 1 wafer"
    )


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
    inner = Placement(TILE, (replace(layout, stages=2),)).sends()
    byte_s, message_s = 1.0 / PAIR.io.bandwidth_bytes_per_s, PAIR.io.latency_s
    found = Placement(PAIR, (layout,)).sends()
    assert found[0] == inner[0]
    assert found[3] == inner[1]
    assert found[1] == (inner[1][0] + byte_s, inner[1][1] + message_s)
    assert found[2] == (inner[0][0] + byte_s, inner[0][1] + message_s)


def test_layouts_of_joined_wafers_are_those_that_the_rules_accept():
    problem = Problem("bertlarge", PAIR, WaferTraining(4))
    listed = list(layouts(PAIR, problem.work.blocks, 4))
    assert len(listed) == len(set(listed))
    assert all(layout_faults(problem, each) == [] for each in listed)
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
