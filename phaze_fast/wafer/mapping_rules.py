"""What makes a mapping legal, as data: `RULES` for each operator, and the limits of a layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from phaze_fast import _core
from phaze_fast.errors import nearest
from phaze_fast.wafer.layout import (
    Layout,
    accepts_micro_batch,
    micro_batch_fault,
    slots_of,
)
from phaze_fast.wafer.mesh import MESH_ALGORITHMS
from phaze_fast.wafer.operator_mapping import OperatorMapping
from phaze_fast.wafer.operators import ROLES, MeshOperator
from phaze_fast.wafer.packing import place_fault
from phaze_fast.wafer.problem import OUTPUTS, Problem

__all__ = ["RULES", "MappingRule", "RuleCase", "layout_faults"]


@dataclass(frozen=True)
class RuleCase:
    """One operator's mapping, as a rule looks at it."""

    problem: Problem
    layout: Layout
    op: MeshOperator
    op_mapping: OperatorMapping
    last: bool


@dataclass(frozen=True)
class MappingRule:
    """One condition that an operator mapping must meet."""

    name: str
    text: str
    broken: Callable[[RuleCase], str]
    """Gives what is wrong, or an empty text."""


def _sides(c: RuleCase) -> str:
    for axis, runs, side in (
        ("x", c.op_mapping.x, c.layout.width),
        ("y", c.op_mapping.y, c.layout.height),
    ):
        size = 1
        for _, factor in runs:
            size *= factor
        if size != side:
            return f"{axis}: factors multiply to {size}; expected {side}, the rectangle's side"
    return ""


def _slots(c: RuleCase) -> str:
    slots = slots_of(c.layout.width, c.layout.height)
    for axis, (name, runs) in enumerate((("x", c.op_mapping.x), ("y", c.op_mapping.y))):
        sizes = [slot.size for slot in slots if slot.axis == axis]
        for _, factor in runs:
            rest = factor
            while rest > 1 and sizes and rest % sizes[0] == 0:
                rest //= sizes.pop(0)
            if rest != 1:
                return f"{name}: {factor} does not follow the side's prime factors, smallest first"
    return ""


def _runs(c: RuleCase) -> str:
    for name, runs in (("x", c.op_mapping.x), ("y", c.op_mapping.y)):
        if len(runs) > _core.RUNS_PER_AXIS:
            return f"{name}: {len(runs)} roles; expected at most {_core.RUNS_PER_AXIS}"
    return ""


def _roles(c: RuleCase) -> str:
    for role, factor in c.op_mapping.partition.items():
        if factor > 1 and role not in c.op.roles:
            return f"{role}: x{factor} is not accepted; accepted: {', '.join(c.op.roles)}"
    return ""


def _limits(c: RuleCase) -> str:
    for role in ROLES[:4]:
        factor, limit = c.op_mapping.partition[role], c.op.limit(role, c.layout.micro_batch)
        if factor > 1 and factor > limit:
            return f"{role}: {factor} parts of {limit}; expected at most {limit}"
    return ""


def _weights(c: RuleCase) -> str:
    if c.op_mapping.weights not in c.problem.modes:
        hint = nearest(c.op_mapping.weights, c.problem.modes)
        return f"weights: {c.op_mapping.weights!r} is not accepted; {hint}"
    return ""


def _collective(c: RuleCase) -> str:
    if c.op_mapping.collective not in MESH_ALGORITHMS:
        return (
            f"collective: {c.op_mapping.collective!r} is not accepted; "
            f"{nearest(c.op_mapping.collective, MESH_ALGORITHMS)}"
        )
    return ""


def _outputs(c: RuleCase) -> str:
    bits = c.problem._outputs(c.op, c.last)
    accepted = [name for code, name in enumerate(OUTPUTS) if bits >> code & 1]
    for output in c.op_mapping.output:
        if output not in accepted:
            return f"output: {output!r} is not accepted; accepted: {', '.join(accepted)}"
    count = c.layout.stages if c.op.part == "block" else 1
    if len(c.op_mapping.output) not in (1, count):
        given = len(c.op_mapping.output)
        return f"output: {given} values; expected 1, or one for each of {count} stages"
    return ""


RULES = (
    MappingRule("sides", "factors along an axis multiply to the rectangle's side", _sides),
    MappingRule("slots", "factors follow the side's prime factors, smallest first", _slots),
    MappingRule("runs", "at most three changes of role along an axis, the first included", _runs),
    MappingRule("roles", "an operator has only roles its kind accepts", _roles),
    MappingRule("limits", "no dimension is cut into more parts than it has", _limits),
    MappingRule("weights", "weights stream only from a tier that is there", _weights),
    MappingRule("collective", "a collective runs by an algorithm that is known", _collective),
    MappingRule("output", "what enters a block is kept; ends keep what they make", _outputs),
)
"""What makes an operator mapping legal, in the order it is checked."""


def layout_faults(problem: Problem, layout: Layout) -> list[str]:
    """Say what is wrong with a layout, one line each; none where it is legal."""
    wafer, batch = problem.wafer, problem.training.global_batch
    wafers = max(1, wafer.joined // layout.replicas)
    sides = (layout.width, layout.height)
    place = place_fault(wafer, sides, layout.stages, wafers, problem.work.blocks)
    found = [place] if place else []
    if not accepts_micro_batch(batch, layout):
        found.append(micro_batch_fault(batch, layout))
    elif not found and problem.fault(layout):
        found.append(problem.fault(layout))
    return found
