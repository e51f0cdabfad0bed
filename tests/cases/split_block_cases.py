"""What tests of two groups of dies that share every block start from: a plain evaluator, and cases."""

from __future__ import annotations

import itertools
import math

import numpy as np
from reference import mapping_oracle as oracle
from reference import pipeline_events
from wafer.test_wafer_classes import case_of
from wafer.test_wafer_tiny import tiny_problem

from phaze_fast import models
from phaze_fast.errors import InvalidInputError
from phaze_fast.opgraph.builder import ELEMENT_BYTES, OperatorSpec
from phaze_fast.wafer.classes import classes_fault
from phaze_fast.wafer.operators import Edge, MeshOperator, Workload
from phaze_fast.wafer.split_block import SplitBlock, cut_points, group_layout
from phaze_fast.wafer.streams import foreign_link_s


def messages(blocks):
    """Tensors and gradients that each group sends for one micro-batch, counted one by one."""
    sent = [0, 0]
    for block in range(blocks):
        sent[0] += 1  # into the second half
        sent[1] += 1  # its gradient
        if block + 1 < blocks:
            sent[1] += 1  # into the next block
            sent[0] += 1  # its gradient
    return sent


def forward_s(case, part, moved_bytes=0.0):
    hidden = part.hidden[0] + oracle.own_link_seconds(case, moved_bytes, 0.0)
    return part.blocking[0] + max(part.work[0], hidden)


def plain_step(problem, split, op_mappings):
    """Seconds of a step and its groups: each by the oracle, the step by a play of its passes."""
    blocks, stages, passes = problem.work.blocks, [], []
    for which in (0, 1):
        case = case_of(split.part(which), split, which)
        case.boundary_s = tuple(
            b * sent for b, sent in zip(case.boundary_s, messages(blocks), strict=True)
        )
        if problem.stream is not None:
            case.foreign_s = foreign_link_s(problem.wafer, split.dies, 2).tolist()
            case.own_stages = range(which, which + 1)
        parts, items = oracle.parts_of(case, op_mappings[which])
        stage = oracle.stage_of(case, op_mappings[which], parts, items, which)
        end = parts[2 * which]
        block_f = forward_s(case, parts[1], stage.block_moved_bytes)
        passes.append(([block_f, stage.block_s], [forward_s(case, end), end.seconds()]))
        stages.append(stage)
    links_s = oracle.charge(case.rules, case.foreign_s, stages) if case.foreign_s else 0.0
    each = [[], []]  # forward, backward: seconds by group and block
    for which, (stage, ((block_f, block), (end_f, end))) in enumerate(
        zip(stages, passes, strict=True)
    ):
        rest = (stage.load_s - blocks * block - end) / (2 * blocks)
        at = (0, blocks - 1)[which]
        each[0].append([block_f + rest + end_f * (k == at) for k in range(blocks)])
        each[1].append([block - block_f + rest + (end - end_f) * (k == at) for k in range(blocks)])
    batches = -(-problem.training.global_batch // split.layouts[0].micro_batch)
    none = [[0.0] * blocks] * 2
    timeline = pipeline_events.simulate("interleaved", *each, none, batches)
    more_s = (batches - 1) * max(0.0, links_s - max(s.load_s for s in stages))
    tail_s = max(s.tail_s for s in stages)
    return pipeline_events.makespan(timeline) + more_s + tail_s, stages, timeline


def every_split(problem):
    """Every cut, two shapes and micro-batch with a place."""
    columns, rows = problem.wafer.grid
    sides = [(w, h) for w in range(1, columns + 1) for h in range(1, rows + 1)]
    batch = problem.training.global_batch
    divisors = [b for b in range(1, batch + 1) if batch % b == 0]
    for cut in cut_points(problem.work):
        for one, other, b in itertools.product(sides, sides, divisors):
            pair = group_layout(problem, *one, b), group_layout(problem, *other, b)
            if not classes_fault(problem, pair):
                yield cut, pair


def compiled(problem, cut, pair):
    try:
        return SplitBlock(problem, pair, cut)
    except InvalidInputError:
        return None


def splits_at_random(rng, count):
    """Tiny problems, each with one way to share its blocks."""
    while count:
        problem = tiny_problem(rng)
        every = list(itertools.islice(every_split(problem), 200)) if problem.work.blocks > 1 else []
        split = compiled(problem, *rng.choice(every)) if every else None
        if split is not None:
            count -= 1
            yield problem, split


def fastest(split, problem, most=40):
    """The best of all operator mappings of two groups; None where there are too many."""
    sides = []
    for which, mapping in enumerate(split.mappings):
        if mapping.ways() > most:
            return None
        rows = []
        choices = [
            [
                (row, mode)
                for row in mapping.choices(i)
                for mode in (range(len(problem.modes)) if op.parameters else (0,))
            ]
            for i, op in enumerate(split.part(which).work.operators)
        ]
        for some in itertools.product(*choices):
            op_mappings = np.array([row for row, _ in some], dtype=mapping.op_mappings().dtype)
            op_mappings["mode"] = [mode for _, mode in some]
            mapping.assign(op_mappings)
            split.times(which)
            score = mapping.score()[0]
            if score["over_bytes"] + score["stream_over_bytes"] <= 0:
                rows.append(op_mappings)
        sides.append(rows)
    best = math.inf
    for one, other in itertools.product(*sides):
        split.mappings[0].assign(one)
        split.mappings[1].assign(other)
        best = min(best, split.score()["time_s"])
    return best


def two_products(blocks, width=1024, seq=8):
    """A model whose blocks are two products that can be split by sequences alone."""
    size = float(ELEMENT_BYTES * seq * width)
    ops = []
    for name in ("first", "second"):
        spec = OperatorSpec(
            name,
            "gemm",
            "TC",
            (-1,),
            m=seq,
            n=width,
            k=width,
            flops=2.0 * seq * width * width,
            read_bytes=size + ELEMENT_BYTES * width * width,
            write_bytes=size,
        )
        ops.append(MeshOperator(name, "block", spec, 1, 1, 1, size, True, width * width, 0.0, 0.0))
    edges = Edge(0, 1, "inside", size, True), Edge(1, 0, "wrap", size, True)
    model = models.load("bertlarge")
    return Workload(model, seq, tuple(ops), edges, (0, 1), size, blocks=blocks)
