"""Bytes on the links of a wafer in one step of a mapping."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import numpy as np

from phaze_fast.wafer.mapping.encoding import Encoding
from phaze_fast.wafer.mapping.layout import links_of, stages_on, whole_runs
from phaze_fast.wafer.mapping.mesh import Links, MeshGroup, collective_loads, link_loads
from phaze_fast.wafer.mapping.packing import stage_dies
from phaze_fast.wafer.mapping.problem import Problem
from phaze_fast.wafer.mapping.streams import opposite, stream_loads
from phaze_fast.wafer.mapping.traffic import Transfer, transfers

Array = np.ndarray[Any, Any]
Flow = tuple[int, int, float]
Placed = tuple[tuple[tuple[int, int], ...], ...]

_STEPS = ((1, 0), (-1, 0), (0, 1), (0, -1))


def class_counts(
    problem: Problem, encoding: Encoding
) -> list[tuple[Encoding, dict[str, list[int]]]]:
    """List the classes of stages, each with the count of every model part in every stage."""
    classes = encoding.classes
    counted_classes = []
    for k, stage_class in enumerate(classes):
        others = [0] * (stage_class.layout.stages - 1)
        counts = {
            "before": [int(k == 0), *others],
            "block": list(problem.blocks(stage_class.layout)),
            "behind": [*others, int(k == len(classes) - 1)],
        }
        counted_classes.append((stage_class, counts))
    return counted_classes


def held_parameters(problem: Problem, encoding: Encoding) -> list[tuple[float, float, str]]:
    """Return for each operator: parameters per die, dies with a copy of them, weight mode."""
    layout = encoding.layout
    by_operator = []
    for i, op_mapping in enumerate(encoding.operator_mappings):
        parts = op_mapping.partition
        mine = problem.parameters(i, layout.dies, layout.micro_batch, parts)
        rows = 1 if problem.work.operators[i].expert else parts["rows"]
        by_operator.append(
            (mine, float(parts["batch"] * rows * parts["copies"]), op_mapping.weights)
        )
    return by_operator


def streamed_bytes(problem: Problem, encoding: Encoding) -> Array:
    """Bytes that a die of each stage reads from and writes to off-wafer memory in a step.

    Returns
    -------
    numpy.ndarray
        Shape (stages, 2): read, written.
    """
    return np.concatenate(
        [_streamed(problem, *counted_class) for counted_class in class_counts(problem, encoding)]
    )


def _streamed(problem: Problem, encoding: Encoding, counts: dict[str, list[int]]) -> Array:
    """Streamed bytes of the stages of one class."""
    layout, work = encoding.layout, problem.work
    batches = problem.batches(layout)
    streamed = np.zeros((layout.stages, 2))
    for i, (mine, among, mode) in enumerate(held_parameters(problem, encoding)):
        op, mapped = work.operators[i], encoding.operator_mappings[i]
        times = np.array(counts[op.part], dtype=np.float64)[:, None]
        weights, gradients = problem.weight_bytes * mine / among, problem.gradient_bytes * mine
        written_bytes = gradients / among * batches
        if mode == "stream":
            streamed += times * (2.0 * weights * batches, written_bytes)
        elif mode == "offload":
            streamed += times * (weights, written_bytes)
        if op.part == "block" and "offload" in mapped.output:
            codes = mapped.output * (layout.stages if len(mapped.output) == 1 else 1)
            parts = mapped.partition
            size = op.kept_bytes * layout.micro_batch * batches
            size /= parts["batch"] * parts["rows"] * parts["columns"]
            streamed += times * [[size * (code == "offload")] for code in codes]
    return streamed


def _stream_step_loads(problem: Problem, encoding: Encoding, placed: Placed) -> Array:
    """Link loads of the streams of a step; `placed` lists the dies of every stage."""
    columns, rows = problem.wafer.grid
    total = np.zeros((rows, columns, 4))
    for dies, (read_bytes, written_bytes) in zip(
        placed, streamed_bytes(problem, encoding), strict=True
    ):
        unit = stream_loads(problem.wafer, dies)
        if unit is not None:
            total += read_bytes * unit + written_bytes * opposite(unit)
    return total


def _by_part(problem: Problem, encoding: Encoding, links: Links) -> dict[str, Array]:
    """Bytes on the links of one stage's rectangle in a whole step, by part of the model.

    The part ``block`` is for one block. Collectives of a micro-batch are counted for all
    micro-batches of the step.
    """
    layout = encoding.layout
    batches = problem.batches(layout)
    parts = {op.name: op.part for op in problem.work.operators}
    algorithms = {
        op_mapping.operator: op_mapping.collective for op_mapping in encoding.operator_mappings
    }
    shape = (layout.height, layout.width, 4)
    loads_by_part = {part: np.zeros(shape) for part in ("before", "block", "behind")}
    rectangle = (0, 0, layout.width, layout.height)

    def loads(move: Transfer) -> Array:
        how = algorithms[move.operator] if move.op != "all-to-all" else "auto"
        group = MeshGroup(move.op, move.payload_bytes, move.runs, rectangle, how)
        return collective_loads(layout.width, layout.height, [group], links)

    for move in transfers(problem, encoding):
        part = parts[move.operator]
        if part == "block" and parts.get(move.target, "block") == "behind":
            part = "behind"
        loads_by_part[part] += loads(move) * (1 if move.when == "step" else batches)
    return loads_by_part


def _to_switches(problem: Problem, encoding: Encoding) -> dict[str, float]:
    """Bytes that one die of a stage sends to the switches in a whole step, by part of the model."""
    batches = problem.batches(encoding.layout)
    assert problem.wafer.switch is not None
    parts = {op.name: op.part for op in problem.work.operators}
    bytes_by_part = dict.fromkeys(("before", "block", "behind"), 0.0)
    for move in transfers(problem, encoding):
        part = parts[move.operator]
        if part == "block" and parts.get(move.target, "block") == "behind":
            part = "behind"
        summed = move.op == "all-reduce" and problem.wafer.switch.sums
        sent = move.payload_bytes if summed else move.sent_bytes
        bytes_by_part[part] += sent * (1 if move.when == "step" else batches)
    return bytes_by_part


def _switch_loads(problem: Problem, encoding: Encoding) -> Array:
    """Bytes that each die sends to the switches and receives from them."""
    wafer, layout = problem.wafer, encoding.layout
    columns, rows = wafer.grid
    here = stages_on(wafer, layout)
    placed = stage_dies(wafer, layout.width, layout.height, here) * (layout.stages // here)
    parts, blocks = _to_switches(problem, encoding), problem.blocks(layout)
    share = problem.work.boundary_bytes * problem.batches(layout) * layout.micro_batch / layout.dies
    loads = np.zeros((rows, columns, 4))
    for stage, dies in enumerate(placed):
        used = blocks[stage] * parts["block"]
        used += parts["before"] if stage == 0 else 0.0
        used += parts["behind"] if stage == layout.stages - 1 else 0.0
        at_end = (stage % here == 0) + (stage % here == here - 1)
        sends = 0 if here == 1 else 2 * layout.chunks - at_end
        for x, y in dies:
            loads[y, x, :2] += used + sends * share
    return loads / (layout.stages // here)


def step_loads(problem: Problem, encoding: Encoding) -> Array:
    """Add up the bytes on each link in one step: collectives, streams, sends between stages.

    Collectives that recomputation repeats are not counted again, as in `transfers`. On several
    wafers, the result is the mean over the wafers of one pipeline.

    Returns
    -------
    numpy.ndarray
        Bytes, shape (rows, columns, 4): links towards +x, -x, +y and -y of each die. With
        switches: bytes to them, bytes from them, and two zeros.

    Examples
    --------
    >>> from phaze_fast import models
    >>> from phaze_fast.wafer import Layout, load_wafer, megatron
    >>> problem = Problem(models.load("bertlarge"), load_wafer("dram-wafer"))
    >>> loads = step_loads(problem, megatron(problem, Layout(4, 1, 1, 8), 4))
    >>> loads.shape, bool(loads[0, 0, 0] > 0), bool(loads[1:].any())
    ((5, 8, 4), True, False)
    """
    wafer, layout = problem.wafer, encoding.layout
    columns, rows = wafer.grid
    if encoding.second_class is not None:
        if wafer.switch is not None:
            return _switch_class_loads(problem, encoding)
        return _class_loads(problem, encoding)
    if wafer.switch is not None:
        return _switch_loads(problem, encoding)
    here = stages_on(wafer, layout)
    placed = stage_dies(wafer, layout.width, layout.height, here) * (layout.stages // here)
    (_, counts), *_ = class_counts(problem, encoding)
    flows = _own_flows(problem, encoding, counts, placed, links_of(wafer, layout))
    share = problem.work.boundary_bytes * problem.batches(layout) * layout.micro_batch / layout.dies
    sends = [(k, k + 1, layout.chunks) for k in range(layout.stages - 1) if (k + 1) % here]
    if layout.chunks > 1 and here == layout.stages:
        sends.append((layout.stages - 1, 0, layout.chunks - 1))
    for first, second, times in sends:
        for (x, y), (u, v) in zip(placed[first], placed[second], strict=True):
            flows.append((y * columns + x, v * columns + u, times * share))
            flows.append((v * columns + u, y * columns + x, times * share))
    dead = tuple(sorted(wafer.dead))
    total = link_loads(columns, rows, flows, dead, wafer.dead_links)
    total = total + _stream_step_loads(problem, encoding, placed)
    return total / (layout.stages // here)


def _own_flows(
    problem: Problem,
    encoding: Encoding,
    counts: dict[str, list[int]],
    placed: Placed,
    links: Links,
) -> list[Flow]:
    """Flows between neighbouring dies due to the collectives of one class."""
    columns, width = problem.wafer.grid[0], encoding.layout.width
    parts = _by_part(problem, encoding, links)
    flows: list[Flow] = []
    for stage, dies in enumerate(placed):
        used = sum(
            (counts[part][stage] * loads for part, loads in parts.items()),
            np.zeros_like(parts["block"]),
        )
        flows += _on_dies(used, dies, width, columns)
    return flows


def _on_dies(
    loads: Array, dies: tuple[tuple[int, int], ...], width: int, columns: int
) -> list[Flow]:
    """Convert link loads of a rectangle to flows between the dies at which it is placed."""
    flows = []
    for j, i, direction in zip(*np.nonzero(loads), strict=True):
        (x, y), (u, v) = (
            dies[j * width + i],
            dies[(j + _STEPS[direction][1]) * width + i + _STEPS[direction][0]],
        )
        flows.append((y * columns + x, v * columns + u, float(loads[j, i, direction])))
    return flows


def _class_loads(problem: Problem, encoding: Encoding) -> Array:
    """Link loads of a step with two classes of stages."""
    wafer, first = problem.wafer, encoding.layout
    columns, rows = wafer.grid
    classes = encoding.compiled(problem)
    flows: list[Flow] = []
    size = problem.work.boundary_bytes * problem.batches(first) * first.micro_batch
    for k, (stage_class, counts) in enumerate(class_counts(problem, encoding)):
        placed, layout = classes.places[k].stages, stage_class.layout
        flows += _own_flows(problem, stage_class, counts, placed, classes.links(k))
        at = placed[-1] if k == 0 else placed[0]  # redistributes tensors of the other class
        group = MeshGroup(
            "all-to-all",
            size / layout.dies,
            whole_runs(layout.width, layout.height),
            (0, 0, layout.width, layout.height),
        )
        loads = collective_loads(layout.width, layout.height, [group], classes.links(k))
        flows += _on_dies(loads, at, layout.width, columns)
    border = first.stages - 1
    for k, (here, there) in enumerate(pairwise(classes.dies)):
        if classes.wafers[k] != classes.wafers[k + 1]:
            continue
        pairs = list(product(here, there) if k == border else zip(here, there, strict=True))
        share = size / len(pairs)
        for (x, y), (u, v) in pairs:
            flows.append((y * columns + x, v * columns + u, share))
            flows.append((v * columns + u, y * columns + x, share))
    total = link_loads(columns, rows, flows, tuple(sorted(wafer.dead)), wafer.dead_links)
    total = total + _stream_step_loads(problem, encoding, classes.dies)
    return total / len(classes.by_wafer)


def _switch_class_loads(problem: Problem, encoding: Encoding) -> Array:
    """Bytes between the dies of two classes and the switches."""
    wafer, (first, _) = problem.wafer, encoding.classes
    columns, rows = wafer.grid
    classes = encoding.compiled(problem)
    size = problem.work.boundary_bytes * problem.batches(first.layout) * first.layout.micro_batch
    border = first.layout.stages - 1
    loads = np.zeros((rows, columns, 4))
    at = 0
    for stage_class, counts in class_counts(problem, encoding):
        parts = _to_switches(problem, stage_class)
        share = size / stage_class.layout.dies
        for stage in range(stage_class.layout.stages):
            used = sum(counts[part][stage] * parts[part] for part in parts)
            if at in (border, border + 1):  # redistributes tensors of the other class
                used += share * (1.0 - 1.0 / stage_class.layout.dies)
            near = [k for k in (at - 1, at + 1) if 0 <= k < len(classes.dies)]
            sends = sum(classes.wafers[k] == classes.wafers[at] for k in near)
            for x, y in classes.dies[at]:
                loads[y, x, :2] += used + sends * share
            at += 1
    return loads / len(classes.by_wafer)
