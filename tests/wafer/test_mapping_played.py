"""Whole mappings at random against a play of their packets on the links of the wafer."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from reference.mapping_player import Player
from reference.mesh_simulator import Collective

from phaze_fast import models
from phaze_fast.hardware import presets
from phaze_fast.wafer import Encoding, Layout, Problem, WaferTraining, mesh_collective, transfers
from phaze_fast.wafer.layout import boundaries, links_of, slots_of
from phaze_fast.wafer.mesh import Run
from phaze_fast.wafer.packing import stage_dies
from phaze_fast.wafer.prices import combination
from phaze_fast.wafer.problem import WEIGHTS

WITHIN = 0.03
COPIED = ("inner", "copies")  # slots along which a block's output is whole

# Links slow enough to count beside the work, and no latency: both sides are then exact but for
# packets that wait for one another.
SLOW = presets.wafer("dojo-tile-like").replace(columns=6, rows=4, hop_latency_s=0.0)
SLOW = SLOW.replace(die=SLOW.die.replace(d2d_modules_x=3, d2d_modules_y=4))
SHAPES = (Layout(2, 2, 3, 8), Layout(3, 2, 2, 6), Layout(2, 4, 2, 8), Layout(3, 2, 4, 6))


def random_mapping(problem, layout, rng):
    """Legal axis assignments and weight modes at random; what a block keeps stays."""
    mapping = problem.mapping(layout)
    rows = []
    for i in range(len(problem.work.operators)):
        row = mapping.choices(i)[rng.randrange(len(mapping.choices(i)))].copy()
        row["mode"] = rng.choice([WEIGHTS.index(w) for w in problem.modes])
        row["algorithm"] = rng.randrange(4)
        rows.append(row)
    mapping.assign(np.array(rows, dtype=mapping.op_mappings().dtype))
    outputs = np.zeros(layout.stages * len(rows), dtype=np.uint8)
    encoding = Encoding.from_arrays(problem, layout, mapping.op_mappings(), outputs)
    return mapping.stages(outputs)[0][:, 0], encoding


def parts_of(problem, encoding):
    """Collectives by part of the model and by when they run: for one rectangle at (0, 0)."""
    layout, links = encoding.layout, links_of(problem.wafer, encoding.layout)
    part = {op.name: op.part for op in problem.work.operators}
    how = {each.operator: each.collective for each in encoding.operator_mappings}
    found = {}
    for each in transfers(problem, encoding):
        if each.when == "step":
            continue
        mine = part[each.operator]
        if mine == "block" and part.get(each.target, "block") == "behind":
            mine = "behind"
        wanted = how[each.operator] if each.op != "all-to-all" else "auto"
        chosen = mesh_collective(each.op, each.payload_bytes, each.runs, links, wanted).algorithm
        when = "backward" if each.when == "again" else each.when
        runs = tuple(tuple(run) for run in each.runs)
        key = (mine, when, each.hidden)
        found.setdefault(key, []).append((each.op, chosen, each.payload_bytes, runs))
    return found, (layout.width, layout.height)


def roles_of(mapped):
    """Role of each slot of the rectangle, along x from the inside out and then along y."""
    runs = [run for side in (mapped.x, mapped.y) for run in side]
    return [role for role, factor in runs for _ in primes(factor)]


def primes(number):
    found = []
    for p in (2, 3, 5):
        while number % p == 0:
            found.append(p)
            number //= p
    return found


def _runs(slots):
    """Neighbouring slots of one axis as one run."""
    found = []
    for slot in slots:
        if (
            found
            and found[-1].axis == slot.axis
            and found[-1].stride * found[-1].size == slot.stride
        ):
            found[-1] = Run(slot.axis, found[-1].size * slot.size, found[-1].stride)
        else:
            found.append(slot)
    return found


def streams_of(problem, encoding):
    """Bytes in and out of a die for one pass of each part of the model."""
    layout = encoding.layout
    found = {part: [0.0, 0.0] for part in ("before", "block", "behind")}
    for i, each in enumerate(encoding.operator_mappings):
        op, parts = problem.work.operators[i], each.partition
        held = problem.parameters(i, layout.dies, layout.microbatch, parts)
        rows = 1 if op.expert else parts["rows"]
        held /= parts["batch"] * rows * parts["copies"]
        if each.weights == "stream":
            found[op.part][0] += 2.0 * problem.weight_bytes * held
        if each.weights in ("stream", "offload"):
            found[op.part][1] += problem.gradient_bytes * held
    return found


def played(problem, encoding, rng):
    """Seconds that each stage takes for one micro-batch, starts apart by up to a pass."""
    layout, wafer = encoding.layout, problem.wafer
    columns, rows = wafer.grid
    links = links_of(wafer, layout)
    used = wafer.off_wafer.bandwidth_bytes_per_s
    player = Player(columns, rows, links, (used,))
    placed = stage_dies(wafer, layout.width, layout.height, layout.stages)
    works, sides = parts_of(problem, encoding)
    streams = streams_of(problem, encoding)
    table = problem._table(layout.dies, layout.microbatch)
    seconds = {part: [0.0, 0.0] for part in streams}
    for i, each in enumerate(encoding.operator_mappings):
        cut = tuple(each.partition[role] for role in ("batch", "rows", "columns", "inner"))
        column = combination(layout.dies, cut)
        for way in (0, 1):
            seconds[problem.work.operators[i].part][way] += float(table[way][i, column])
    ends, starts = [], []
    for k, dies in enumerate(placed):
        at = (*dies[0], *sides)

        def made(key, at=at):
            return [
                Collective(op, how, size, at, runs) for op, how, size, runs in works.get(key, [])
            ]

        node = player.traffic.pause(rng.random() * 1e-3, [])
        starts.append(node)
        own = (["before"] if k == 0 else []) + ["block"]
        own += ["behind"] if k == layout.stages - 1 else []
        for part in own:
            begun = node
            for way, when in enumerate(("forward", "backward")):
                node = player.in_turn(made((part, when, False)), node)
                node = player.beside(seconds[part][way], made((part, when, True)), node)
            moved = [(0, size) for size in streams[part] if size for _ in dies]
            node = player.traffic.join([node, player.streamed(moved, begun)])
        ends.append(node)
    return player, placed, starts, ends


def sends_of(problem, encoding):
    """Of each stage: bytes that a die sends on, and what spreads copies of what it receives.

    Either every die sends all that its counterpart wants, or a part that is gathered there.
    """
    layout, links = encoding.layout, links_of(problem.wafer, encoding.layout)
    last = encoding.operator_mappings[problem.work.chain[-1]]
    slots = slots_of(layout.width, layout.height)
    whole = [slot for slot, role in zip(slots, roles_of(last), strict=True) if role in COPIED]
    size = problem.work.boundary_bytes * layout.microbatch
    copies = math.prod(slot.size for slot in whole)
    runs, held = _runs(whole), size * copies / layout.dies
    found = []
    for k, (byte_s, _) in enumerate(boundaries(problem.wafer, layout)):
        ways = (k > 0) + (k < layout.stages - 1)
        spread = None
        if runs:
            gather = mesh_collective("all-gather", held, runs, links, last.collective)
            if size * byte_s + ways * gather.time_s < copies * size * byte_s:
                spread = ("all-gather", gather.algorithm, held, tuple(map(tuple, runs)))
        found.append((size / layout.dies * (1 if spread else copies), spread))
    return found


@pytest.mark.parametrize(
    "count", [1, pytest.param(20, marks=pytest.mark.slow)], ids=["some", "many"]
)
def test_whole_mappings_with_concurrent_traffic(count):
    """All stages at once, each from a start of its own; then what they send, both ways."""
    rng = random.Random(count)
    model = models.load("bertlarge")
    for case in range(count):
        layout = SHAPES[case % len(SHAPES)]
        small = model.replace(layers=layout.stages)
        problem = Problem(small, SLOW, WaferTraining(layout.microbatch * 2))
        loads, encoding = random_mapping(problem, layout, rng)
        player, placed, starts, ends = played(problem, encoding, rng)
        sent = player.played_sends(placed, encoding, sends_of(problem, encoding), ends)
        player.traffic.play()
        at = player.traffic.ends
        for k, (start, end) in enumerate(zip(starts, ends, strict=True)):
            took = at[end] - at[start] + sum(at[b] - at[a] for a, b in sent[k])
            assert took == pytest.approx(loads[k], rel=WITHIN), (case, layout, k)
