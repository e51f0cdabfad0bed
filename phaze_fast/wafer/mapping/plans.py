"""Plans of Megatron-LM, DeepSpeed and others as mappings.

A plan assigns each slot of the rectangle to tensor or to data parallelism; `PATTERNS` gives the
role of a tensor-parallel slot for each operator.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from phaze_fast import _core
from phaze_fast.errors import InvalidInputError, nearest
from phaze_fast.opgraph.graph import SELECTIVE
from phaze_fast.wafer.mapping.encoding import Encoding
from phaze_fast.wafer.mapping.layout import Layout, slots_of
from phaze_fast.wafer.mapping.operators import (
    OUTPUTS,
    ROLES,
    ROW_WISE,
    WEIGHTS,
    MeshOperator,
    plain_name,
)
from phaze_fast.wafer.mapping.problem import Problem

Array = np.ndarray[Any, Any]
AxisAssignment = tuple[str, ...]
"""Use of each slot in a plan: ``tensor`` or ``data``."""

RECOMPUTE = ("none", "selective", "full")

OFFLOADED = ("offload", "full-offload")
"""Offload modes: every output of a block, or only its input with the rest recomputed."""

_FEED_FORWARD = ("up", "gate", "expert-up", "expert-gate", "shared-up", "shared-gate")
_COLUMN_WISE = ("q", "k", "v", "qkv", *_FEED_FORWARD, "logits")
_INSIDE = ("attention", "batched-gemm", "softmax", "rotary", "activation", "multiply")

PATTERNS: Mapping[str, str] = {
    "column-wise product": "columns",
    "row-wise product": "inner",
    "inside the region": "columns",
    "outside the region": "copies",
    "outside, sequence-parallel": "rows",
    "embedding": "inner",
    "loss": "columns",
}
"""Role of a tensor-parallel slot, by the operator's position in the block (Shoeybi et al. 2019;
Korthikanti et al. 2022)."""


def _tensor_role(op: MeshOperator, sequence_parallel: bool) -> str:
    name = plain_name(op.name)
    if name in _COLUMN_WISE:
        return PATTERNS["column-wise product"]
    if name in ROW_WISE:
        return PATTERNS["row-wise product"]
    if op.spec.kind == "embedding":
        return PATTERNS["embedding"]
    if op.spec.kind == "cross-entropy":
        return PATTERNS["loss"]
    in_block = op.part == "block" and (op.spec.kind in _INSIDE or name == "score-dropout")
    in_block = in_block and op.name != "weigh"  # after the experts' region
    if in_block:
        return PATTERNS["inside the region"]
    if op.product:  # the head's transform, which Megatron-LM replicates on every device
        return "rows"
    outside = "outside, sequence-parallel" if sequence_parallel else "outside the region"
    return PATTERNS[outside]


def linear_axis_assignment(layout: Layout, tp: int) -> AxisAssignment:
    """Assign the innermost slots in rank order to tensor parallelism, the others to data.

    Ranks are counted along the rows of the rectangle, as software that ignores the mesh does.

    Raises
    ------
    InvalidInputError
        If the width is not a product of the innermost slots.

    Examples
    --------
    >>> linear_axis_assignment(Layout(4, 2, 1, 8), 2)
    ('tensor', 'data', 'data')
    """
    axis_assignment, left = [], tp
    for slot in slots_of(layout.width, layout.height):
        if left > 1 and left % slot.size == 0:
            axis_assignment.append("tensor")
            left //= slot.size
        elif left > 1:
            break
        else:
            axis_assignment.append("data")
    if left != 1:
        raise InvalidInputError(
            f"tp: {tp} is not accepted on {layout.width} x "
            f"{layout.height} dies; expected a product of the sides' innermost factors"
        )
    return tuple(axis_assignment)


def axis_assignments(layout: Layout, tp: int) -> list[AxisAssignment]:
    """List the placements of tensor-parallel groups: inner or outer slots along each axis.

    Examples
    --------
    >>> len(axis_assignments(Layout(4, 4, 1, 16), 4))
    6
    """
    slots = slots_of(layout.width, layout.height)
    sides: list[list[AxisAssignment]] = []
    for axis in (0, 1):
        count = sum(slot.axis == axis for slot in slots)
        options = []
        for cut in range(count + 1):
            options.append(("tensor",) * cut + ("data",) * (count - cut))
            options.append(("data",) * (count - cut) + ("tensor",) * cut)
        sides.append(list(dict.fromkeys(options)))
    wanted = []
    for x in sides[0]:
        for y in sides[1]:
            axis_assignment = x + y
            size = 1
            for slot, use in zip(slots, axis_assignment, strict=True):
                size *= slot.size if use == "tensor" else 1
            if size == tp:
                wanted.append(axis_assignment)
    return wanted


def _mask(axis_assignment: Sequence[str], use: str) -> int:
    return sum(1 << k for k, slot_use in enumerate(axis_assignment) if slot_use == use)


def op_mappings_of(roles: Sequence[Mapping[str, int]], weights: str) -> Array:
    """Convert the slots of each role (bit masks, one dictionary per operator) to an array."""
    if weights not in WEIGHTS:
        raise InvalidInputError(
            f"weights: {weights!r} is not accepted; {nearest(weights, WEIGHTS)}"
        )
    op_mappings = np.zeros(len(roles), dtype=_core.OP_MAPPING_DTYPE)
    slots = op_mappings["slots"]
    for i, mask_by_role in enumerate(roles):
        for role, mask in mask_by_role.items():
            slots[i, ROLES.index(role)] = mask
    op_mappings["mode"] = WEIGHTS.index(weights)
    return op_mappings


def encode(
    problem: Problem, layout: Layout, op_mappings: Array, recompute: str | Sequence[str] = "none"
) -> Encoding:
    """Return operator mappings with a recompute mode as an encoding."""
    outputs = np.tile(outputs_of(problem, recompute), layout.stages)
    return Encoding.from_arrays(problem, layout, op_mappings, outputs)


def outputs_of(problem: Problem, recompute: str | Sequence[str]) -> Array:
    """Return a code of `OUTPUTS` per operator, given a mode or the recomputed operators."""
    codes = np.zeros(len(problem.work.operators), dtype=np.uint8)
    if recompute == "none":
        return codes
    if isinstance(recompute, str) and recompute not in (*RECOMPUTE, *OFFLOADED):
        raise InvalidInputError(
            f"recompute: {recompute!r} is not accepted; "
            f"{nearest(recompute, (*RECOMPUTE, *OFFLOADED))}"
        )
    for i, op in enumerate(problem.work.operators):
        accepted = problem.accepted_outputs(i)
        if recompute == "offload" or (recompute == "full-offload" and i in problem.work.entering):
            chosen = "offload"
        elif recompute in ("full", "full-offload"):
            chosen = "recompute" if op.part == "block" else "stash"
        elif recompute == "selective":
            selected = op.part == "block" and plain_name(op.name) in SELECTIVE
            chosen = "recompute" if selected else "stash"
        else:
            chosen = "recompute" if op.name in recompute else "stash"
        codes[i] = OUTPUTS.index(chosen if chosen in accepted else "stash")
    return codes


def megatron(
    problem: Problem,
    layout: Layout,
    tp: int,
    sequence_parallel: bool = False,
    recompute: str = "none",
    weights: str = "replicated",
    axis_assignment: AxisAssignment | None = None,
) -> Encoding:
    """Return a Megatron-LM plan: each pair of products split by columns, then rows; data replicas.

    Parameters
    ----------
    problem
        The model, the wafer and the step.
    layout
        Rectangles of tensor-parallel width times replicas dies, and stages of the pipeline; its
        micro-batch is that of all replicas together.
    tp
        Tensor-parallel width: dies that share each matrix.
    sequence_parallel
        Whether these dies also share the rows of norms, residuals and dropouts.
    recompute
        none, selective or full.
    weights
        Weight mode of the replicas: replicated, or zero1 (Megatron-LM's distributed optimizer).
    axis_assignment
        Use of each slot; by default the innermost slots in rank order are tensor-parallel.

    Examples
    --------
    >>> from phaze_fast.wafer import load_wafer
    >>> from phaze_fast import models
    >>> problem = Problem(models.load("gpt3-13b"), load_wafer("dram-wafer"))
    >>> plan = megatron(problem, Layout(4, 2, 5, 2), tp=4, sequence_parallel=True)
    >>> {op_mapping.operator: op_mapping.x for op_mapping in plan.operator_mappings}["proj"]
    (('inner', 4),)
    """
    axis_assignment = (
        linear_axis_assignment(layout, tp) if axis_assignment is None else axis_assignment
    )
    op_mappings = megatron_op_mappings(problem, axis_assignment, sequence_parallel, weights)
    return encode(problem, layout, op_mappings, recompute)


def megatron_op_mappings(
    problem: Problem,
    axis_assignment: AxisAssignment,
    sequence_parallel: bool,
    weights: str,
    ep: bool = False,
) -> Array:
    """Operator mappings of a Megatron-LM plan; with `ep`, replicas split the experts."""
    tensor, data = _mask(axis_assignment, "tensor"), _mask(axis_assignment, "data")
    roles = []
    for op in problem.work.operators:
        role = _tensor_role(op, sequence_parallel)
        over = "rows" if ep and op.expert else "batch"
        roles.append({over: data, role: tensor} if tensor else {over: data})
    return op_mappings_of(roles, weights)


def zero3(problem: Problem, layout: Layout, recompute: str = "none") -> Encoding:
    """Return a DeepSpeed ZeRO-3 plan: data parallelism only, with all state sharded.

    Examples
    --------
    >>> from phaze_fast.wafer import load_wafer
    >>> from phaze_fast import models
    >>> problem = Problem(models.load("llama2-7b"), load_wafer("dram-wafer"))
    >>> zero3(problem, Layout(8, 4, 1, 32)).operator_mappings[1].partition["batch"]
    32
    """
    return encode(problem, layout, zero3_op_mappings(problem, layout), recompute)


def zero3_op_mappings(problem: Problem, layout: Layout, weights: str = "zero3") -> Array:
    """Operator mappings that split the batch over all dies, with the weight mode `weights`."""
    every = (1 << len(slots_of(layout.width, layout.height))) - 1
    return op_mappings_of([{"batch": every} for _ in problem.work.operators], weights)


def expert_options(problem: Problem) -> tuple[bool, ...]:
    """Options for splitting the experts over replicas: both if the model has experts."""
    return (False, True) if any(op.expert for op in problem.work.operators) else (False,)


def plan_starts(problem: Problem, layout: Layout) -> Iterable[Array]:
    """Yield the operator mappings that other systems would use in this layout."""
    every = layout.dies
    widths = [t for t in range(1, every + 1) if every % t == 0]
    heads = min((op.units for op in problem.work.operators if op.per_head), default=every)
    for t in widths:
        if t > heads or every // t > layout.micro_batch:
            continue
        for axis_assignment in axis_assignments(layout, t)[:4]:
            for shared in (False, True) if t > 1 else (False,):
                for weights in ("zero1", "zero3"):
                    for spread in expert_options(problem):
                        yield megatron_op_mappings(
                            problem, axis_assignment, shared, weights, spread
                        )
    if every <= layout.micro_batch and slots_of(layout.width, layout.height):
        yield zero3_op_mappings(problem, layout)


def from_types(
    problem: Problem,
    layout: Layout,
    types: Sequence[Mapping[str, str]],
    weights: str = "replicated",
) -> Encoding:
    """Return one type per product and slot as an encoding; other operators follow their input.

    Parameters
    ----------
    problem, layout
        The model, the wafer and the step; and the layout of the stages.
    types
        For each slot: role (batch, inner or columns: AccPar's types I, II and III) by operator.
    weights
        Weight mode; AccPar and HyPar replicate weights.
    """
    names = [op.name for op in problem.work.operators]
    feeds: dict[int, int] = {}
    for edge in problem.work.edges:
        if edge.kind in ("inside", "exit"):
            feeds.setdefault(edge.target, edge.source)
    for edge in problem.work.edges:
        if edge.kind == "wrap":
            feeds.setdefault(edge.target, edge.source)
    roles: list[dict[str, int]] = [{} for _ in names]
    for slot, by_name in enumerate(types):
        role_of: dict[int, str] = {}
        order = list(range(len(names)))
        for i in order:
            op = problem.work.operators[i]
            if op.name in by_name:
                role_of[i] = by_name[op.name]
            else:
                role_of[i] = _following(op, role_of.get(feeds.get(i, -1), "batch"))
            mask = roles[i].get(role_of[i], 0)
            roles[i][role_of[i]] = mask | 1 << slot
    return encode(problem, layout, op_mappings_of(roles, weights))


def _following(op: MeshOperator, made: str) -> str:
    """Role of an operator without weights whose input was produced in the role `made`."""
    role = {"batch": "batch", "rows": "rows", "columns": "columns"}.get(made, "copies")
    if role in op.roles:
        return role
    return "columns" if "columns" in op.roles and op.spec.kind != "norm" else "batch"
