"""The collectives of a mapping, the bytes on links in one step, and a description in text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import prod
from typing import TypeVar

import numpy as np

from phaze_fast.tables import Array
from phaze_fast.units import format_bytes
from phaze_fast.wafer.mapping.encoding import Encoding, OperatorMapping, Runs
from phaze_fast.wafer.mapping.layout import slots_of
from phaze_fast.wafer.mapping.mesh import Flow, MeshGroup, Run, collective_loads
from phaze_fast.wafer.mapping.operators import PARTS, ROLES, MeshOperator
from phaze_fast.wafer.mapping.packing import mesh_of
from phaze_fast.wafer.mapping.placement import Dies, Placement, opposite, stream_loads
from phaze_fast.wafer.mapping.problem import Problem

Load = TypeVar("Load", float, Array)

_STEPS = ((1, 0), (-1, 0), (0, 1), (0, -1))


@dataclass(frozen=True)
class Transfer:
    """One collective of one micro-batch, or of one step."""

    operator: str
    """Operator whose tensor is communicated."""
    target: str
    """Operator that receives the tensor; empty for weights."""
    when: str
    """When it runs: forward, backward, again (stored inputs, for the backward pass) or step."""
    op: str
    """Collective: all-gather, reduce-scatter, all-reduce or all-to-all."""
    runs: tuple[Run, ...]
    """Runs of dies that form one group."""
    payload_bytes: float
    """Payload as defined by `mesh_collective`."""
    hidden: bool
    """Whether the collective overlaps with the computation of the pass."""
    overlaps: str = ""
    """Product with which the collective may overlap in pieces, if that is faster; empty if there is
    none."""

    def __str__(self) -> str:
        shape = " and ".join(
            f"{run.size} along {'xy'[run.axis]}" + (f" by {run.stride}" if run.stride > 1 else "")
            for run in self.runs
        )
        to = f" to {self.target}" if self.target else ""
        note = ", overlaps with work" if self.hidden else ""
        note += f", in pieces with {self.overlaps} where shorter" if self.overlaps else ""
        size = format_bytes(self.payload_bytes)
        return f"{self.when}: {self.op}{to} over {shape}, {size}{note}"

    @property
    def ranks(self) -> int:
        """Number of dies of one group."""
        return prod(run.size for run in self.runs)

    @property
    def sent_bytes(self) -> float:
        """Lower bound of the bytes that one die sends."""
        once = self.payload_bytes * (self.ranks - 1) / self.ranks
        return 2.0 * once if self.op == "all-reduce" else once


class _Slots:
    """Slots of one rectangle (see `slots_of`), and the role of each slot for every operator."""

    def __init__(self, problem: Problem, encoding: Encoding) -> None:
        self.slots = slots_of(encoding.layout.width, encoding.layout.height)
        roles, slots = range(len(ROLES)), range(len(self.slots))
        self.role = [
            [next(ROLES[r] for r in roles if masks[r] >> k & 1) for k in slots]
            for masks in encoding.arrays(problem)[0]["slots"].tolist()
        ]

    def runs(self, chosen: list[int]) -> tuple[Run, ...]:
        """Return the runs of some slots; adjacent slots of one axis are merged into one run."""
        runs: list[Run] = []
        for k in chosen:
            slot, last = self.slots[k], runs[-1] if runs else None
            if last and last.axis == slot.axis and last.stride * last.size == slot.stride:
                runs[-1] = Run(slot.axis, last.size * slot.size, last.stride)
            else:
                runs.append(slot)
        return tuple(runs)

    def size(self, chosen: list[int]) -> int:
        return prod(self.slots[k].size for k in chosen)


# State of a tensor along a slot, by the slot's role for the operator that writes or reads it.
_ANY = {"batch": "batch", "rows": "rows", "copies": "whole"}
_MADE = {**_ANY, "columns": "features", "inner": "partial"}
_PRODUCT_TAKES = {**_ANY, "inner": "features", "columns": "whole"}
_OTHER_TAKES = {**_ANY, "columns": "features", "inner": "whole"}
_PRODUCT_RETURNS = {**_PRODUCT_TAKES, "columns": "partial"}
_WANTS_BACK = {**_MADE, "inner": "whole"}
_SPLITS = ("batch", "rows", "features", "experts")


def _states(op: MeshOperator, table: dict[str, str], roles: list[str]) -> list[str]:
    """Return the state of a tensor along each slot; rows of an expert operator are experts."""
    states = [table[role] for role in roles]
    return ["experts" if state == "rows" else state for state in states] if op.expert else states


def _conversion(
    slots: _Slots, before: list[str], after: list[str], whole_bytes: float, limits: dict[str, int]
) -> Iterator[tuple[str, list[int], float]]:
    """Yield the collectives that convert a tensor between two states: (op, slots, payload)."""
    pick = list(range(len(before)))
    split_slots = [k for k in pick if before[k] in _SPLITS]
    allowed = {
        name: slots.size([k for k in pick if name in (before[k], after[k])]) <= most
        for name, most in limits.items()
    }
    sliced = [k for k in pick if before[k] == "whole" and allowed.get(after[k], False)]
    scatter = [k for k in pick if before[k] == "partial" and after[k] in _SPLITS]
    exchange = [k for k in split_slots if after[k] in _SPLITS and after[k] != before[k]]
    reduce = [k for k in pick if before[k] == "partial" and after[k] == "whole"]
    gather = [k for k in split_slots if after[k] == "whole"]
    here = whole_bytes / slots.size(split_slots) / slots.size(sliced)
    if scatter:
        yield "reduce-scatter", scatter, here
        here /= slots.size(scatter)
    if exchange:
        yield "all-to-all", exchange, here
    if reduce:
        yield "all-reduce", reduce, here
    if gather:
        yield "all-gather", gather, here * slots.size(gather)


def _edges(problem: Problem, slots: _Slots, micro_batch: int) -> Iterator[Transfer]:
    ops = problem.work.operators
    paid: set[tuple[int, str, str, tuple[str, ...]]] = set()

    def takes_of(target: int) -> list[str]:
        table = _PRODUCT_TAKES if ops[target].product else _OTHER_TAKES
        return _states(ops[target], table, slots.role[target])

    homes = {edge.target: edge.source for edge in problem.work.edges if edge.kind == "wrap"}
    after_it = dict(pairwise(problem.work.chain))  # edges of the chain pay for shared conversions
    for edge in sorted(problem.work.edges, key=lambda e: after_it.get(e.source) != e.target):
        source, target = ops[edge.source], ops[edge.target]
        overlaps = source.name if source.overlaps == "output" else ""
        if not overlaps and target.overlaps == "input":
            overlaps = target.name
        if edge.kind == "entry" or not problem.overlap:
            overlaps = ""
        source_states = _states(source, _MADE, slots.role[edge.source])
        wants = _states(source, _WANTS_BACK, slots.role[edge.source])
        if edge.kind == "entry":  # into the split in which blocks pass tensors on
            home = homes.get(edge.target, problem.work.chain[-1])
            takes = back = [_WANTS_BACK[r] for r in slots.role[home]]
        else:
            takes = takes_of(edge.target)
            table = _PRODUCT_RETURNS if target.product else _OTHER_TAKES
            back = _states(target, table, slots.role[edge.target])
        again = edge.kind != "entry" and any(
            other.again and takes_of(other.target) == takes
            for other in problem.work.edges
            if (other.source, other.kind) == (edge.source, edge.kind)
        )
        limits = {
            name: source.limit(role, micro_batch)
            for name, role in zip(_SPLITS[:3], ("batch", "rows", "columns"), strict=True)
        }
        size = edge.bytes * micro_batch
        passes = (("forward", source_states, takes), ("backward", back, wants))
        for when, before, after in passes:
            key = (edge.source, edge.kind, when, tuple(after if when == "forward" else before))
            if key in paid:
                continue  # consumers with the same split share one conversion
            paid.add(key)
            for op, chosen, payload in _conversion(slots, before, after, size, limits):
                own = (op, slots.runs(chosen), payload)
                yield Transfer(source.name, target.name, when, *own, False, overlaps)
                if again and op in ("all-gather", "all-to-all") and when == "forward":
                    yield Transfer(source.name, target.name, "again", *own, True)


def _own(
    problem: Problem, slots: _Slots, i: int, op_mapping: OperatorMapping, micro_batch: int
) -> Iterator[Transfer]:
    """Yield the collectives of an operator's statistics, keys and values, and weights."""
    op: MeshOperator = problem.work.operators[i]
    of = {role: [k for k, r in enumerate(slots.role[i]) if r == role] for role in ROLES}
    parts = op_mapping.partition
    move = partial(Transfer, op.name, "")
    if op.stat_bytes and of["columns"]:
        size = op.stat_bytes * micro_batch / (parts["batch"] * parts["rows"])
        for when in ("forward", "backward"):
            yield move(when, "all-reduce", slots.runs(of["columns"]), size, hidden=False)
    if op.gather_bytes and of["rows"]:
        size = op.gather_bytes * micro_batch / (parts["batch"] * parts["columns"])
        runs = slots.runs(of["rows"])
        yield move("forward", "all-gather", runs, size, hidden=False)
        yield move("backward", "reduce-scatter", runs, size, hidden=False)
        yield move("again", "all-gather", runs, size, hidden=True)
    if not op.parameters:
        return
    summed = sorted(of["batch"] + ([] if op.expert else of["rows"]))
    copies = sorted(summed + of["copies"])
    dies = slots.size(list(range(len(slots.slots))))
    parameters = problem.parameters(i, dies, micro_batch, parts)
    sizes = {"all-gather": parameters * problem.weight_bytes}
    add, share = slots.runs(summed), slots.runs(copies)
    mode = op_mapping.weights
    if mode == "replicated":
        steps = [("step", "all-reduce", add, False)]
    elif mode == "zero1":
        steps = [("step", "reduce-scatter", add, False), ("step", "all-gather", share, False)]
    elif mode in ("zero2", "offload"):
        steps = [("backward", "reduce-scatter", add, True), ("step", "all-gather", share, False)]
    else:
        steps = [
            ("forward", "all-gather", share, True),
            ("backward", "all-gather", share, True),
            ("backward", "reduce-scatter", add, True),
        ]
    for when, name, runs, hidden in steps:
        if runs:
            size = sizes.get(name, parameters * problem.gradient_bytes)
            yield move(when, name, runs, size, hidden=hidden)


def transfers(problem: Problem, encoding: Encoding) -> list[Transfer]:
    """List every collective of a mapping: of one block, and of the operators around the blocks.

    Forward collectives that recomputation repeats are listed once.

    Examples
    --------
    Megatron-LM's tensor parallelism has two sums per block forward and two backward:

    >>> from phaze_fast.wafer import Layout, megatron
    >>> problem = Problem("gpt3-13b", "dram-wafer")
    >>> plan = megatron(problem, Layout(8, 1, 1, 1), tp=8)
    >>> sums = [t for t in transfers(problem, plan) if t.op == "all-reduce" and t.target]
    >>> [(t.operator, t.when) for t in sums][1:3]
    [('attention-norm', 'backward'), ('proj', 'forward')]
    """
    slots = _Slots(problem, encoding)
    batch = encoding.layout.micro_batch
    collectives = list(_edges(problem, slots, batch))
    for i, op_mapping in enumerate(encoding.operator_mappings):
        collectives += _own(problem, slots, i, op_mapping, batch)
    order = {op.name: i for i, op in enumerate(problem.work.operators)}
    return sorted(collectives, key=lambda t: order[t.operator])


# ---- description ----


def runs_text(runs: Runs) -> str:
    """Describe the splits along one axis, innermost first; empty if there are none.

    Examples
    --------
    >>> runs_text((("columns", 4), ("batch", 2)))
    'columns 4 . batch 2'
    """
    return " . ".join(f"{role} {factor}" for role, factor in runs)


def output_text(op_mapping: OperatorMapping) -> str:
    """Describe whether an output is stashed, recomputed or offloaded, by number of stages."""
    if len(op_mapping.output) == 1:
        return op_mapping.output[0]
    counts = {name: op_mapping.output.count(name) for name in dict.fromkeys(op_mapping.output)}
    return ", ".join(f"{name} in {n} stages" for name, n in counts.items())


def describe(problem: Problem, encoding: Encoding) -> str:
    """Describe a mapping: splits, outputs and collectives of each operator.

    Examples
    --------
    >>> from phaze_fast.wafer import Layout, megatron
    >>> problem = Problem("gpt3-13b", "dram-wafer")
    >>> print(describe(problem, megatron(problem, Layout(8, 1, 1, 1), 8)).splitlines()[6])
    qkv              x: columns 8 | weights replicated | output stash
    """
    layout = encoding.layout
    lines = [f"{encoding.stages_text}, {layout.micro_batch} sequence(s) at once"]
    moves: dict[str, list[Transfer]] = {}
    for transfer in transfers(problem, encoding):
        moves.setdefault(transfer.operator, []).append(transfer)
    for op, op_mapping in zip(problem.work.operators, encoding.operator_mappings, strict=True):
        axes = {"x": op_mapping.x, "y": op_mapping.y}
        parts = ["; ".join(f"{k}: {runs_text(v)}" for k, v in axes.items() if v) or "whole"]
        if op.parameters:
            parts.append(f"weights {op_mapping.weights}")
        if op.kept_bytes:
            parts.append(f"output {output_text(op_mapping)}")
        lines.append(f"{op.name:<16} {' | '.join(parts)}")
        for transfer in moves.get(op.name, []):
            lines.append(f"    {transfer}")
    return "\n".join(lines)


# ---- bytes of a step ----


def part_counts(problem: Problem, encoding: Encoding) -> dict[str, list[int]]:
    """Count how often each stage has each part of the model."""
    others = [0] * (encoding.layout.stages - 1)
    blocks = list(problem.blocks(encoding.layout))
    return {"before": [1, *others], "block": blocks, "behind": [*others, 1]}


def held_parameters(problem: Problem, encoding: Encoding) -> list[tuple[float, float, str]]:
    """Return for each operator: parameters per die, dies with the same ones, weight mode."""
    layout = encoding.layout
    by_operator = []
    for i, op_mapping in enumerate(encoding.operator_mappings):
        parts = op_mapping.partition
        mine = problem.parameters(i, layout.dies, layout.micro_batch, parts)
        rows = 1 if problem.work.operators[i].expert else parts["rows"]
        among = float(parts["batch"] * rows * parts["copies"])
        by_operator.append((mine, among, op_mapping.weights))
    return by_operator


def streamed_bytes(problem: Problem, encoding: Encoding) -> Array:
    """Bytes that a die of each stage reads from and writes to off-wafer memory in a step.

    Returns
    -------
    numpy.ndarray
        Shape (stages, 2): read, written.
    """
    layout, work, counts = encoding.layout, problem.work, part_counts(problem, encoding)
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


def _by_part(
    problem: Problem, encoding: Encoding, none: Load, load_of: Callable[[Transfer], Load]
) -> dict[str, Load]:
    """Add up the loads of the collectives of one stage in a whole step, by part of the model.

    The part ``block`` is for one block. Collectives of a micro-batch are counted for all
    micro-batches of the step.
    """
    batches = problem.batches(encoding.layout)
    parts = {op.name: op.part for op in problem.work.operators}
    loads = dict.fromkeys(PARTS, none)
    for move in transfers(problem, encoding):
        part = parts[move.operator]
        if part == "block" and parts.get(move.target, "block") == "behind":
            part = "behind"
        loads[part] = loads[part] + load_of(move) * (1 if move.when == "step" else batches)
    return loads


def step_loads(problem: Problem, encoding: Encoding) -> Array:
    """Add up the bytes on each link in one step: collectives, streams, sends between stages.

    Collectives that recomputation repeats are not counted again, as in `transfers`. On several
    wafers, the result is the mean over the wafers of one pipeline.

    Returns
    -------
    numpy.ndarray
        Bytes, shape (rows, columns, 4): links towards +x, -x, +y and -y of each die. With
        switches: bytes to the switches, bytes from them, and two zeros.

    Examples
    --------
    >>> from phaze_fast.wafer import Layout, megatron
    >>> problem = Problem("bertlarge", "dram-wafer")
    >>> loads = step_loads(problem, megatron(problem, Layout(4, 1, 1, 8), 4))
    >>> loads.shape, bool(loads[0, 0, 0] > 0), bool(loads[1:].any())
    ((5, 8, 4), True, False)
    """
    wafer, placement = problem.wafer, encoding.placement(problem)
    columns = wafer.grid[0]
    if wafer.switch is not None:
        return _switch_loads(problem, encoding, placement)
    share = _boundary_bytes(problem, encoding) / encoding.layout.dies
    flows = _own_flows(problem, encoding, placement)
    for first, second, times in placement.pairs():
        for (x, y), (u, v) in zip(placement.dies[first], placement.dies[second], strict=True):
            flows.append((y * columns + x, v * columns + u, times * share))
            flows.append((v * columns + u, y * columns + x, times * share))
    total = mesh_of(wafer).loads(flows)
    streams = np.zeros_like(total)
    streamed = streamed_bytes(problem, encoding)
    for dies, (read_bytes, written_bytes) in zip(placement.dies, streamed, strict=True):
        unit = stream_loads(wafer, dies)
        if unit is not None:
            streams += read_bytes * unit + written_bytes * opposite(unit)
    return (total + streams) / len(placement.by_wafer)


def _boundary_bytes(problem: Problem, encoding: Encoding) -> float:
    """Bytes of the tensors that a stage sends to the next one in a step."""
    layout = encoding.layout
    return problem.work.boundary_bytes * problem.batches(layout) * layout.micro_batch


def _own_flows(problem: Problem, encoding: Encoding, placement: Placement) -> list[Flow]:
    """Flows between neighbouring dies due to collectives."""
    width, height = encoding.layout.width, encoding.layout.height
    counts, links = part_counts(problem, encoding), placement.links()
    algorithms = {mapped.operator: mapped.collective for mapped in encoding.operator_mappings}

    def loads_of(move: Transfer) -> Array:
        how = algorithms[move.operator] if move.op != "all-to-all" else "auto"
        group = MeshGroup(move.op, move.payload_bytes, move.runs, (0, 0, width, height), how)
        return collective_loads(width, height, [group], links)

    none = np.zeros((height, width, 4))
    parts = _by_part(problem, encoding, none, loads_of)
    flows: list[Flow] = []
    for stage, dies in enumerate(placement.dies):
        used = sum((counts[part][stage] * loads for part, loads in parts.items()), none)
        flows += _on_dies(used, dies, width, problem.wafer.grid[0])
    return flows


def _on_dies(loads: Array, dies: Dies, width: int, columns: int) -> list[Flow]:
    """Convert link loads of a rectangle to flows between the dies at which it is placed."""
    flows = []
    for j, i, direction in zip(*np.nonzero(loads), strict=True):
        dx, dy = _STEPS[direction]
        (x, y), (u, v) = dies[j * width + i], dies[(j + dy) * width + i + dx]
        flows.append((y * columns + x, v * columns + u, float(loads[j, i, direction])))
    return flows


def _switch_loads(problem: Problem, encoding: Encoding, placement: Placement) -> Array:
    """Bytes that each die sends to the switches and receives from them."""
    wafers, chunks = placement.wafers, encoding.layout.chunks
    share = _boundary_bytes(problem, encoding) / encoding.layout.dies
    loads = np.zeros((*problem.wafer.grid[::-1], 4))

    def sent_bytes(move: Transfer) -> float:
        summed = move.op == "all-reduce" and placement.links().fabric == 2
        return move.payload_bytes if summed else move.sent_bytes

    counts, parts = part_counts(problem, encoding), _by_part(problem, encoding, 0.0, sent_bytes)
    for stage, dies in enumerate(placement.dies):
        used = sum(counts[part][stage] * parts[part] for part in parts)
        near = [k for k in (stage - 1, stage + 1) if 0 <= k < len(wafers)]
        neighbours = sum(wafers[k] == wafers[stage] for k in near)
        sends = neighbours + 2 * (chunks - 1) if neighbours else 0
        for x, y in dies:
            loads[y, x, :2] += used + sends * share
    return loads / len(placement.by_wafer)
