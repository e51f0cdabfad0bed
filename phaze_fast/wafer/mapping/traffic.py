"""The collectives of a mapping, and a description of it in text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from phaze_fast.units import format_bytes
from phaze_fast.wafer.mapping.encoding import Encoding, OperatorMapping
from phaze_fast.wafer.mapping.layout import slots_of
from phaze_fast.wafer.mapping.mesh import Run
from phaze_fast.wafer.mapping.operators import ROLES, MeshOperator
from phaze_fast.wafer.mapping.problem import Problem


@dataclass(frozen=True)
class Transfer:
    """One collective of one micro-batch, or of one step."""

    operator: str
    """Operator whose tensor is communicated."""
    target: str
    """Operator that receives the tensor; empty for weights."""
    when: str
    """forward, backward, again (stored inputs, for the backward pass) or step."""
    op: str
    """all-gather, reduce-scatter, all-reduce or all-to-all."""
    runs: tuple[Run, ...]
    """Runs of dies that form one group."""
    payload_bytes: float
    """Payload as defined by `mesh_collective`."""
    hidden: bool
    """Whether it overlaps with the computation of the pass."""
    overlaps: str = ""
    """Product with which it may overlap in pieces, if that is faster; empty if it does not
    overlap."""

    @property
    def ranks(self) -> int:
        """Number of dies of one group."""
        size = 1
        for run in self.runs:
            size *= run.size
        return size

    @property
    def sent_bytes(self) -> float:
        """Lower bound of the bytes that one die sends."""
        once = self.payload_bytes * (self.ranks - 1) / self.ranks
        return 2.0 * once if self.op == "all-reduce" else once


class _Slots:
    """Slots of one rectangle, and the role of each slot for every operator."""

    def __init__(self, problem: Problem, encoding: Encoding) -> None:
        self.slots = slots_of(encoding.layout.width, encoding.layout.height)
        op_mappings, _ = encoding.arrays(problem)
        self.role = [
            [
                next(ROLES[r] for r in range(len(ROLES)) if int(op_mapping["slots"][r]) >> k & 1)
                for k in range(len(self.slots))
            ]
            for op_mapping in op_mappings
        ]

    def runs(self, chosen: list[int]) -> tuple[Run, ...]:
        """Return the runs of some slots; adjacent slots of one axis are merged into one run."""
        merged_runs: list[Run] = []
        for k in chosen:
            slot = self.slots[k]
            if (
                merged_runs
                and merged_runs[-1].axis == slot.axis
                and (merged_runs[-1].stride * merged_runs[-1].size == slot.stride)
            ):
                merged_runs[-1] = Run(
                    slot.axis, merged_runs[-1].size * slot.size, merged_runs[-1].stride
                )
            else:
                merged_runs.append(slot)
        return tuple(merged_runs)

    def size(self, chosen: list[int]) -> int:
        product = 1
        for k in chosen:
            product *= self.slots[k].size
        return product


_MADE = {
    "batch": "batch",
    "rows": "rows",
    "columns": "features",
    "inner": "partial",
    "copies": "whole",
}
_PRODUCT_TAKES = {
    "batch": "batch",
    "rows": "rows",
    "inner": "features",
    "columns": "whole",
    "copies": "whole",
}
_OTHER_TAKES = {
    "batch": "batch",
    "rows": "rows",
    "columns": "features",
    "inner": "whole",
    "copies": "whole",
}
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
    after_it = dict(pairwise(problem.work.chain))  # pays first if consumers share a conversion
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
                move = partial(
                    Transfer,
                    source.name,
                    target.name,
                    op=op,
                    runs=slots.runs(chosen),
                    payload_bytes=payload,
                )
                yield move(when=when, hidden=False, overlaps=overlaps)
                repeatable = op in ("all-gather", "all-to-all") and when == "forward"
                if repeatable and again:
                    yield move(when="again", hidden=True)


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

    >>> from phaze_fast import models
    >>> from phaze_fast.wafer import Layout, load_wafer, megatron
    >>> problem = Problem(models.load("gpt3-13b"), load_wafer("dram-wafer"))
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


def _place(op_mapping: OperatorMapping) -> str:
    along = []
    for axis, runs in (("x", op_mapping.x), ("y", op_mapping.y)):
        if runs:
            along.append(f"{axis}: " + " . ".join(f"{role} {factor}" for role, factor in runs))
    return "; ".join(along) or "whole"


def _outputs(op_mapping: OperatorMapping) -> str:
    if len(op_mapping.output) == 1:
        return op_mapping.output[0]
    counts = {name: op_mapping.output.count(name) for name in dict.fromkeys(op_mapping.output)}
    return ", ".join(f"{name} in {n} stages" for name, n in counts.items())


def describe(problem: Problem, encoding: Encoding) -> str:
    """Describe a mapping: splits, outputs and collectives of each operator.

    Examples
    --------
    >>> from phaze_fast import models
    >>> from phaze_fast.wafer import Layout, load_wafer, megatron
    >>> problem = Problem(models.load("gpt3-13b"), load_wafer("dram-wafer"))
    >>> print(describe(problem, megatron(problem, Layout(8, 1, 1, 1), 8)).splitlines()[6])
    qkv              x: columns 8 | weights replicated | output stash
    """
    if encoding.second_class is not None:
        return "\n".join(describe(problem, stage_class) for stage_class in encoding.classes)
    layout = encoding.layout
    lines = [f"{encoding.stages_text}, {layout.micro_batch} sequence(s) at once"]
    moves: dict[str, list[Transfer]] = {}
    for transfer in transfers(problem, encoding):
        moves.setdefault(transfer.operator, []).append(transfer)
    for op, op_mapping in zip(problem.work.operators, encoding.operator_mappings, strict=True):
        parts = [_place(op_mapping)]
        if op.parameters:
            parts.append(f"weights {op_mapping.weights}")
        if op.kept_bytes:
            parts.append(f"output {_outputs(op_mapping)}")
        lines.append(f"{op.name:<16} {' | '.join(parts)}")
        for transfer in moves.get(op.name, []):
            shape = " and ".join(
                f"{run.size} along {'xy'[run.axis]}"
                + (f" by {run.stride}" if run.stride > 1 else "")
                for run in transfer.runs
            )
            to = f" to {transfer.target}" if transfer.target else ""
            note = ", overlaps with work" if transfer.hidden else ""
            note += (
                f", in pieces with {transfer.overlaps} where shorter" if transfer.overlaps else ""
            )
            lines.append(
                f"    {transfer.when}: {transfer.op}{to} over {shape}, "
                f"{format_bytes(transfer.payload_bytes)}{note}"
            )
    return "\n".join(lines)
