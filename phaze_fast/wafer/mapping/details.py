"""Utilisation, energy and time of one step of a mapping, and maps of its stages and links."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from phaze_fast.hardware import energy_table
from phaze_fast.memory import optimizer
from phaze_fast.models import model_flops
from phaze_fast.opgraph.builder import OperatorSpec
from phaze_fast.planning.throughput import mfu
from phaze_fast.tables import Array
from phaze_fast.wafer.hardware.wafer import Wafer
from phaze_fast.wafer.mapping.encoding import Encoding
from phaze_fast.wafer.mapping.evaluate import Evaluation
from phaze_fast.wafer.mapping.layout import Layout
from phaze_fast.wafer.mapping.operators import ROLES, passes
from phaze_fast.wafer.mapping.placement import Placement
from phaze_fast.wafer.mapping.problem import Problem, operator_costs
from phaze_fast.wafer.mapping.traffic import (
    held_parameters,
    part_counts,
    step_loads,
    streamed_bytes,
)


def step_mfu(problem: Problem, found: Evaluation) -> float:
    """Model FLOPs utilisation of a step over all dies that work, idle ones included.

    Examples
    --------
    >>> from phaze_fast.wafer import Layout, evaluate, megatron
    >>> problem = Problem("bertlarge", "dram-wafer")
    >>> scored = evaluate(problem, megatron(problem, Layout(4, 2, 4, 16), 4))
    >>> 0.0 < step_mfu(problem, scored) < 1.0
    True
    """
    wafer = problem.wafer
    flops = model_flops(problem.model, problem.work.seq, problem.training.global_batch)
    return mfu(flops, found.time_s, wafer.all_dies, wafer.die.chip.peak_flops())


@dataclass(frozen=True)
class StepEnergy:
    """Joules of one step by cause."""

    operators_j: float
    """Arithmetic, SRAM and HBM of all operators, recomputed ones included."""
    optimizer_j: float
    """Optimiser traffic in the dies' own memory: weights, gradients and state."""
    links_j: float
    """Traffic on links between dies; a byte counts on every link of its route."""
    stream_j: float
    """Traffic to and from off-wafer memory and other wafers."""
    static_j: float
    """Static power of all working dies over the step."""

    @property
    def total_j(self) -> float:
        """Sum over all causes."""
        return float(sum(asdict(self).values()))


def local_specs(problem: Problem, encoding: Encoding) -> list[list[OperatorSpec]]:
    """Return the passes of each operator on one die for one micro-batch, forward first."""
    specs = []
    for op, op_mapping in zip(problem.work.operators, encoding.operator_mappings, strict=True):
        parts = op_mapping.partition
        sizes = [max(op.limit(role, encoding.layout.micro_batch), 1) for role in ROLES[:4]]
        cut = [parts[role] for role in ROLES[:4]]
        local = -(-np.array([sizes]) // np.array([cut]))
        specs.append(passes(op.parts(op.shapes(local))))
    return specs


def _local_costs(
    problem: Problem, encoding: Encoding
) -> list[tuple[list[OperatorSpec], list[float], list[float]]]:
    """Return the passes of each operator on one die, with their seconds and joules."""
    every = local_specs(problem, encoding)
    flat = [(spec, 1) for some in every for spec in some]
    costs = operator_costs(problem.chip, problem.network_chip, flat)
    seconds, joules = (iter(values.tolist()) for values in costs)
    return [(some, [next(seconds) for _ in some], [next(joules) for _ in some]) for some in every]


def _runs_again(problem: Problem, encoding: Encoding) -> list[float]:
    """Count, for each operator, the blocks of all stages in which it is recomputed.

    An operator that stores nothing runs again with each of its recomputed consumers.
    """
    work, layout = problem.work, encoding.layout
    blocks = problem.blocks(layout)
    again = [0.0] * len(work.operators)
    for i, op_mapping in enumerate(encoding.operator_mappings):
        if work.operators[i].part != "block" or "recompute" not in op_mapping.output:
            continue
        codes = op_mapping.output * (layout.stages if len(op_mapping.output) == 1 else 1)
        count = sum(b for b, code in zip(blocks, codes, strict=True) if code == "recompute")
        ran, todo = {i}, [i] if work.operators[i].output_kept else []
        while todo:
            at = todo.pop()
            for edge in work.edges:
                source = work.operators[edge.source]
                new = edge.kind == "inside" and edge.target == at and edge.source not in ran
                if new and source.part == "block" and not source.output_kept:
                    ran.add(edge.source)
                    todo.append(edge.source)
        for op in ran:
            again[op] += count
    return again


def _operators_j(problem: Problem, found: Evaluation) -> float:
    encoding, counts = found.encoding, part_counts(problem, found.encoding)
    layout = encoding.layout
    operators = zip(problem.work.operators, _runs_again(problem, encoding), strict=True)
    total = 0.0
    costs = _local_costs(problem, encoding)
    for (op, more), (_, _, (forward, *backward)) in zip(operators, costs, strict=True):
        total += sum(counts[op.part]) * (forward + sum(backward)) + more * forward
    return total * layout.dies * problem.batches(layout) * layout.replicas


def _moved_bytes(problem: Problem, found: Evaluation) -> tuple[float, float]:
    """Bytes per step that the optimiser moves on the dies, and that enter or leave the wafer."""
    spec = optimizer(problem.training.optimizer)
    each_step = 2.0 * (spec.weight_bytes + spec.state_bytes) + spec.gradient_bytes
    encoding, counts = found.encoding, part_counts(problem, found.encoding)
    dies = encoding.layout.dies * encoding.layout.replicas
    stepped = 0.0
    for i, (mine, among, mode) in enumerate(held_parameters(problem, encoding)):
        shared = mine if mode == "replicated" else mine / among
        if mode not in ("stream", "offload"):
            times = sum(counts[problem.work.operators[i].part])
            stepped += times * shared * each_step * dies
    streamed = float(streamed_bytes(problem, encoding).sum(axis=1).sum()) * dies
    return stepped, streamed + _between_wafers(problem, found)


def _between_wafers(problem: Problem, found: Evaluation) -> float:
    """Bytes per step between wafers: sends between stages, and gradient sums of replicas."""
    layout, wafers = found.encoding.layout, problem.wafer.wafer_count
    depth = wafers // layout.replicas
    crossings = (depth - 1) * layout.chunks + (layout.chunks - 1) * (depth > 1)
    size = problem.work.boundary_bytes * layout.micro_batch * problem.batches(layout)
    rings = 2.0 * (layout.replicas - 1) * problem.work.parameters * problem.gradient_bytes
    return 2.0 * crossings * size * layout.replicas + rings


def step_energy(problem: Problem, found: Evaluation, loads: Array | None = None) -> StepEnergy:
    """Energy of one step of a mapping by cause.

    Parameters
    ----------
    problem, found
        The model, the wafer and the step; and an evaluated mapping.
    loads
        Result of `step_loads`; computed by default.

    Examples
    --------
    >>> from phaze_fast.wafer import Layout, evaluate, megatron
    >>> problem = Problem("bertlarge", "dram-wafer")
    >>> scored = evaluate(problem, megatron(problem, Layout(4, 2, 4, 16), 4))
    >>> energy = step_energy(problem, scored)
    >>> energy.total_j > energy.operators_j > energy.links_j > 0
    True
    """
    wafer, table = problem.wafer, energy_table()
    loads = step_loads(problem, found.encoding) if loads is None else loads
    stepped, streamed = _moved_bytes(problem, found)
    own_byte_j = table.hbm_byte_j if problem.chip.hbm is not None else table.local_byte_j
    static_w = table.static_w_per_mm2 * wafer.die.outline_mm2 * wafer.all_dies
    return StepEnergy(
        operators_j=_operators_j(problem, found),
        optimizer_j=stepped * own_byte_j,
        links_j=float(loads.sum()) * wafer.wafer_count * wafer.rules.d2d_byte_j,
        stream_j=streamed * table.network_byte_j,
        static_j=static_w * found.time_s,
    )


def causes(problem: Problem, found: Evaluation) -> dict[str, float]:
    """Seconds of a step by cause, along its slowest stage; they add up to the step.

    Examples
    --------
    >>> from phaze_fast.wafer import Layout, evaluate, megatron
    >>> problem = Problem("bertlarge", "dram-wafer")
    >>> scored = evaluate(problem, megatron(problem, Layout(4, 2, 4, 16), 4))
    >>> abs(sum(causes(problem, scored).values()) / scored.time_s - 1.0) < 1e-9
    True
    """
    batches = problem.batches(found.encoding.layout)
    slowest = max(found.stages, key=lambda stage: stage.load_s)
    work_s = batches * slowest.blocks * found.compute_s
    waits_s = batches * slowest.blocks * found.blocking_s
    return {
        "work_s": work_s,
        "collectives_s": waits_s,
        # Recomputation, embedding and head, sends to the next stage, exposed streams and gathers.
        "other_s": batches * slowest.load_s - work_s - waits_s,
        "bubble_s": max(0.0, found.time_s - found.tail_s - batches * slowest.load_s),
        "tail_s": found.tail_s,
    }


def operator_times(problem: Problem, found: Evaluation) -> list[dict[str, Any]]:
    """Seconds of each operator on one die for one micro-batch, and the share of peak it reaches.

    Examples
    --------
    >>> from phaze_fast.wafer import Layout, evaluate, megatron
    >>> problem = Problem("bertlarge", "dram-wafer")
    >>> scored = evaluate(problem, megatron(problem, Layout(4, 2, 4, 16), 4))
    >>> block = [row for row in operator_times(problem, scored) if row["part"] == "block"]
    >>> work_s = sum(row["forward_s"] + row["backward_s"] for row in block)
    >>> abs(work_s / scored.compute_s - 1.0) < 1e-9
    True
    """
    peak = problem.chip.peak_flops()
    rows = []
    costs = _local_costs(problem, found.encoding)
    for op, (some, (forward, *backward), _) in zip(problem.work.operators, costs, strict=True):
        flops = sum(float(np.sum(spec.flops)) for spec in some)
        busy = forward + sum(backward)
        share = flops / (busy * peak) if busy > 0 else 0.0
        row = {"operator": op.name, "part": op.part, "forward_s": forward}
        rows.append(row | {"backward_s": sum(backward), "of_peak": share})
    return rows


def details(problem: Problem, found: Evaluation) -> dict[str, Any]:
    """Describe a mapping as plain data; all values are null if the mapping does not fit.

    Examples
    --------
    >>> from phaze_fast.wafer import Layout, evaluate, megatron
    >>> problem = Problem("bertlarge", "dram-wafer")
    >>> scored = evaluate(problem, megatron(problem, Layout(4, 2, 4, 16), 4))
    >>> sorted(details(problem, scored))
    ['breakdown', 'dies', 'energy', 'energy_j', 'links', 'mfu', 'power_w']
    """
    if not found.fits:
        names = ("mfu", "energy_j", "power_w", "energy", "breakdown", "dies", "links")
        return dict.fromkeys(names)
    loads = step_loads(problem, found.encoding)
    energy = step_energy(problem, found, loads)
    x, y = problem.wafer.link_bytes_per_s
    busy = loads / (np.array([x, x, y, y]) + (np.array([x, x, y, y]) == 0)) / found.time_s
    batches = problem.batches(found.encoding.layout)
    work_s = [batches * stage.blocks * found.compute_s for stage in found.stages]
    return {
        "mfu": step_mfu(problem, found),
        "energy_j": energy.total_j,
        "power_w": energy.total_j / found.time_s,
        "energy": asdict(energy),
        "breakdown": {
            "causes": causes(problem, found),
            "operators": operator_times(problem, found),
        },
        "dies": {
            "stage": stage_grid(problem.wafer, found.encoding.layout),
            "busy": [seconds / found.time_s for seconds in work_s],
            "dead_links": [[list(at)[::-1] for at in link] for link in problem.wafer.dead_links],
        },
        "links": {
            "bytes": float(loads.sum()),
            "busiest": float(busy.max()),
            "busy": [] if problem.wafer.switch else np.round(busy, 6).tolist(),
            **({"to_switches": np.round(busy[..., 0], 6).tolist()} if problem.wafer.switch else {}),
        },
    }


# ---- maps in text ----

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def stage_grid(wafer: Wafer, layout: Layout) -> list[list[int]]:
    """Stage of each die, row by row; -1 where it is idle, -2 where it is dead.

    The grid is that of a pipeline's first wafer; stages lie the same way on its other wafers.

    Examples
    --------
    >>> from phaze_fast.wafer import load_wafer
    >>> stage_grid(load_wafer("dojo-tile-like"), Layout(2, 5, 2, 8))[0]
    [0, 0, 1, 1, -1]
    """
    columns, rows = wafer.grid
    grid = [[-1 if wafer.alive(x, y) else -2 for x in range(columns)] for y in range(rows)]
    placement = Placement(wafer, layout)
    for stage, dies in enumerate(placement.dies[: placement.here]):
        for x, y in dies:
            grid[y][x] = stage
    return grid


def die_map(wafer: Wafer, layout: Layout) -> str:
    """Draw the wafer, one die a cell: its stage, `.` idle, `X` dead.

    Examples
    --------
    >>> from phaze_fast.wafer import load_wafer
    >>> print(die_map(load_wafer("dojo-tile-like"), Layout(2, 2, 4, 8)))
    0 0 1 1 .
    0 0 1 1 .
    3 3 2 2 .
    3 3 2 2 .
    . . . . .
    """
    wide = layout.stages > len(_DIGITS)

    def cell(stage: int) -> str:
        text = (str(stage) if wide else _DIGITS[stage]) if stage >= 0 else ".X"[-1 - stage]
        return text.rjust(3) if wide else text

    return "\n".join(" ".join(map(cell, row)) for row in stage_grid(wafer, layout))


def link_map(wafer: Wafer, loads: Array) -> str:
    """Draw the links between dies: 1 to 9 by busy time relative to the busiest link.

    The busier direction counts; `.` carries nothing, `x` is dead, `o` is a die and `X` a dead one.
    With switches, each die is drawn as the digit of its link to them.

    Parameters
    ----------
    wafer
        The dies.
    loads
        Bytes of each link, as `step_loads` gives them.

    Examples
    --------
    >>> from phaze_fast.wafer import load_wafer
    >>> tile = load_wafer("dojo-tile-like").replace(columns=3, rows=1)
    >>> loads = np.zeros((1, 3, 4))
    >>> loads[0, 0, 0], loads[0, 1, 0] = 9.0, 1.0
    >>> print(link_map(tile, loads))
    o9o1o
    """
    columns, rows = wafer.grid
    if wafer.switch is not None:
        shares = loads.max(axis=2) / (float(loads.max()) or 1.0)
        lines = [[_digit(share) for share in row] for row in shares]
        for x, y in wafer.dead:
            lines[y][x] = "X"
        return "\n".join(map(" ".join, lines))
    rates = [rate or 1.0 for rate in wafer.link_bytes_per_s]
    seconds = loads / np.repeat(rates, 2)
    most = float(seconds.max()) or 1.0
    cut = {frozenset(link) for link in wafer.dead_links}

    def mark(here: tuple[int, int], there: tuple[int, int], direction: int) -> str:
        if frozenset((here, there)) in cut:
            return "x"
        (u, v), (s, t) = here, there
        return _digit(max(seconds[v, u, direction], seconds[t, s, direction + 1]) / most)

    drawn = []
    for y in range(rows):
        dies = ["o" if wafer.alive(x, y) else "X" for x in range(columns)]
        right = [mark((x, y), (x + 1, y), 0) for x in range(columns - 1)]
        drawn.append("".join(die + link for die, link in zip(dies, [*right, ""], strict=True)))
        if y + 1 < rows:
            drawn.append(" ".join(mark((x, y), (x, y + 1), 2) for x in range(columns)))
    return "\n".join(drawn)


def _digit(busy: float) -> str:
    return "." if busy <= 0 else str(max(1, min(9, round(9 * busy))))
