"""A mapping as one operator mapping per operator: rules, JSON and arrays.

An operator mapping says how an operator's dimensions are split along both axes of the rectangle of
dies of a stage, innermost first; whether its output is stashed, recomputed or offloaded; how its
weights are stored; and how its collectives run. All blocks of a model share their operator
mappings. `RULES` lists the conditions of a legal mapping.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Annotated, Any, ClassVar, Self

import numpy as np
from pydantic import BeforeValidator, Field, model_validator

from phaze_fast import _core
from phaze_fast.errors import InvalidInputError, nearest, not_accepted
from phaze_fast.records import Record
from phaze_fast.tables import Array, picked
from phaze_fast.wafer.mapping.layout import SCHEDULES, Layout, slots_of
from phaze_fast.wafer.mapping.mesh import MESH_ALGORITHMS
from phaze_fast.wafer.mapping.operators import OUTPUTS, ROLES, WEIGHTS
from phaze_fast.wafer.mapping.placement import Placement
from phaze_fast.wafer.mapping.problem import Problem

Runs = tuple[tuple[str, int], ...]
"""Roles and factors along an axis of a rectangle of dies, from the inside out."""


@dataclass(frozen=True)
class OperatorMapping:
    """How one operator is mapped to the dies of a stage."""

    operator: str
    x: Runs
    """(role, factor) pairs along a row of the stage's rectangle of dies, from the inside out."""
    y: Runs
    """(role, factor) pairs along a column, from the inside out."""
    output: tuple[str, ...] = ("stash",)
    """Treatment of the output, of `OUTPUTS`: one value for all stages, or one per stage."""
    weights: str = "replicated"
    """Storage mode of the weights, one of `WEIGHTS`."""
    collective: str = "auto"
    """Algorithm of the operator's collectives, one of `MESH_ALGORITHMS`."""

    @property
    def partition(self) -> dict[str, int]:
        """Number of parts of each dimension, and number of copies, by role."""
        parts = dict.fromkeys(ROLES, 1)
        for role, factor in (*self.x, *self.y):
            parts[role] *= factor
        return parts


RULES = {
    "sides": "factors along an axis multiply to the rectangle's side",
    "slots": "factors follow the side's prime factors, smallest first",
    "runs": "at most three changes of role along an axis, the first included",
    "roles": "an operator has only roles its kind accepts",
    "limits": "no dimension is cut into more parts than it has",
    "weights": "weights stream only from a tier that is there",
    "collective": "a collective runs by an algorithm that is known",
    "output": "what enters a block is kept; ends keep what they make",
}
"""Conditions of a legal operator mapping by name, in the order in which they are checked."""


def _broken_rules(
    problem: Problem, layout: Layout, index: int, op_mapping: OperatorMapping
) -> Iterator[tuple[str, str]]:
    """Yield the rules that the mapping of one operator breaks, each with the reason."""
    op, parts = problem.work.operators[index], op_mapping.partition
    axes = (("x", op_mapping.x, layout.width), ("y", op_mapping.y, layout.height))
    for axis, runs, side in axes:
        size = prod(factor for _, factor in runs)
        if size != side:
            yield (
                "sides",
                f"{axis}: factors multiply to {size}; expected {side}, the rectangle's side",
            )
    for at, (axis, runs, _) in enumerate(axes):
        sizes = [slot.size for slot in slots_of(layout.width, layout.height) if slot.axis == at]
        for _, factor in runs:
            rest = factor
            while rest > 1 and sizes and rest % sizes[0] == 0:
                rest //= sizes.pop(0)
            if rest != 1:
                yield (
                    "slots",
                    f"{axis}: {factor} does not follow the side's prime factors, smallest first",
                )
    for axis, runs, _ in axes:
        if len(runs) > _core.RUNS_PER_AXIS:
            yield "runs", f"{axis}: {len(runs)} roles; expected at most {_core.RUNS_PER_AXIS}"
    for role, factor in parts.items():
        if factor > 1 and role not in op.roles:
            yield "roles", f"{role}: x{factor} is not accepted; accepted: {', '.join(op.roles)}"
    for role in ROLES[:4]:
        limit = op.limit(role, layout.micro_batch)
        if 1 < parts[role] > limit:
            yield "limits", f"{role}: {parts[role]} parts of {limit}; expected at most {limit}"
    for name, accepted in (("weights", problem.modes), ("collective", MESH_ALGORITHMS)):
        given = getattr(op_mapping, name)
        if given not in accepted:
            yield name, f"{name}: {given!r} is not accepted; {nearest(given, accepted)}"
    outputs, accepted = op_mapping.output, problem.accepted_outputs(index)
    for output in outputs:
        if output not in accepted:
            yield "output", f"output: {output!r} is not accepted; accepted: {', '.join(accepted)}"
    count = layout.stages if op.part == "block" else 1
    if len(outputs) not in (1, count):
        yield (
            "output",
            f"output: {len(outputs)} values; expected 1, or one for each of {count} stages",
        )


@dataclass(frozen=True)
class Encoding:
    """A whole mapping: a layout of the wafer, and one operator mapping per operator."""

    layout: Layout
    operator_mappings: tuple[OperatorMapping, ...]

    @property
    def dies(self) -> int:
        """Number of dies in use on all wafers, those of every replica included.

        Examples
        --------
        >>> Encoding(Layout(5, 2, 3, 1, replicas=4), ()).dies
        120
        """
        return self.layout.dies * self.layout.stages * self.layout.replicas

    @property
    def stages_text(self) -> str:
        """Number and shape of the stages.

        Examples
        --------
        >>> Encoding(Layout(5, 2, 3, 1), ()).stages_text
        '3 stage(s) of 5 x 2 dies'
        """
        layout = self.layout
        return f"{layout.stages} stage(s) of {layout.width} x {layout.height} dies"

    def placement(self, problem: Problem) -> Placement:
        """Place the stages on the problem's wafer."""
        return Placement(problem.wafer, self.layout)

    # ---- legality ----

    def faults(self, problem: Problem) -> list[str]:
        """Return the rules that the mapping breaks, one line each; empty if it is legal."""
        fault = problem.fault(self.layout)
        found = [fault] if fault else []
        names = [op.name for op in problem.work.operators]
        operator_names = [op_mapping.operator for op_mapping in self.operator_mappings]
        if operator_names != names:
            missing = [name for name in names if name not in operator_names]
            extra = [name for name in operator_names if name not in names]
            twice = [name for name, count in Counter(operator_names).items() if count > 1]
            difference = "in another order"
            if missing or extra or twice:
                difference = f"missing {missing}, unknown {extra}, given twice {twice}"
            found.append(f"operators: {difference}; expected each once, as the model has them")
        if found:
            return found
        for i, op_mapping in enumerate(self.operator_mappings):
            rule, fault = next(_broken_rules(problem, self.layout, i, op_mapping), ("", ""))
            if rule:
                found.append(f"{op_mapping.operator}.{fault} (rule: {rule})")
        return found

    def check(self, problem: Problem) -> None:
        """Raise an error if the mapping is not legal.

        Raises
        ------
        InvalidInputError
            One line per operator that breaks a rule.
        """
        faults = self.faults(problem)
        if faults:
            raise InvalidInputError("\n".join(faults))

    # ---- arrays ----

    def arrays(self, problem: Problem) -> tuple[Array, Array]:
        """Return mappings (operators,) and outputs (stages x operators,) for the kernel."""
        slots = slots_of(self.layout.width, self.layout.height)
        op_mappings = np.zeros(len(self.operator_mappings), dtype=_core.OP_MAPPING_DTYPE)
        outputs = np.zeros((self.layout.stages, len(self.operator_mappings)), dtype=np.uint8)
        masks = op_mappings["slots"]
        for i, op_mapping in enumerate(self.operator_mappings):
            at = 0
            for runs in (op_mapping.x, op_mapping.y):
                for role, factor in runs:
                    rest = factor
                    while rest > 1:
                        masks[i, ROLES.index(role)] |= 1 << at
                        rest //= slots[at].size
                        at += 1
            op_mappings[i]["mode"] = WEIGHTS.index(op_mapping.weights)
            op_mappings[i]["algorithm"] = MESH_ALGORITHMS.index(op_mapping.collective)
            codes = [OUTPUTS.index(name) for name in op_mapping.output]
            if problem.work.operators[i].part == "block":
                outputs[:, i] = codes
        return op_mappings, outputs.reshape(-1)

    @classmethod
    def from_arrays(
        cls, problem: Problem, layout: Layout, op_mappings: Array, outputs: Array
    ) -> Encoding:
        """Build a mapping from the arrays of the kernel."""
        slots = slots_of(layout.width, layout.height)
        by_stage = outputs.reshape(layout.stages, -1)
        operator_mappings = []
        every = op_mappings["slots"].tolist()
        for i, op in enumerate(problem.work.operators):
            masks = every[i]
            axes: list[Runs] = []
            for axis in (0, 1):
                assigned = [
                    (next(ROLES[r] for r, mask in enumerate(masks) if mask >> k & 1), slot.size)
                    for k, slot in enumerate(slots)
                    if slot.axis == axis
                ]
                runs = groupby(assigned, key=lambda pair: pair[0])
                axes.append(tuple((role, prod(size for _, size in some)) for role, some in runs))
            codes = by_stage[:, i] if op.part == "block" else by_stage[:1, i]
            names = tuple(OUTPUTS[int(code)] for code in codes)
            operator_mappings.append(
                OperatorMapping(
                    op.name,
                    axes[0],
                    axes[1],
                    names[:1] if len(set(names)) == 1 else names,
                    WEIGHTS[int(op_mappings[i]["mode"])] if op.parameters else WEIGHTS[0],
                    MESH_ALGORITHMS[int(op_mappings[i]["algorithm"])],
                )
            )
        return cls(layout, tuple(operator_mappings))

    # ---- plain data ----

    def to_list(self) -> list[dict[str, Any]]:
        """Return plain data, one mapping per operator; `from_list` reads it back."""
        return [
            {
                **picked(own, "operator", "partition"),
                "x": [list(run) for run in own.x],
                "y": [list(run) for run in own.y],
                "output": own.output[0] if len(own.output) == 1 else list(own.output),
                **picked(own, "weights", "collective"),
                **self.layout.to_dict(),
            }
            for own in self.operator_mappings
        ]

    def to_json(self) -> str:
        """Return one line of JSON."""
        return json.dumps(self.to_list())

    @classmethod
    def from_list(cls, data: object, source: str = "encoding") -> Encoding:
        """Read plain data.

        Raises
        ------
        InvalidInputError
            The message names the entry and the field that is missing or malformed.
        """
        if not isinstance(data, list) or not data:
            raise InvalidInputError(f"{source}: expected a list of one mapping per operator")
        entries = []
        for i, entry in enumerate(data):
            where = f"{source}[{i}]"
            if not isinstance(entry, Mapping):
                raise not_accepted(where, entry, "a mapping")
            entries.append(_Entry.from_dict(entry, where))
        if len({entry.layout for entry in entries}) > 1:
            raise InvalidInputError(
                f"{source}: operators disagree in rectangle, stages or micro_batch; expected one "
                "layout for all"
            )
        return cls(entries[0].layout, tuple(entry.op_mapping for entry in entries))


# ---- one entry of a file ----


def _one_of(accepted: Sequence[str]) -> BeforeValidator:
    def check(name: object) -> object:
        if name not in accepted:
            raise ValueError(f"{name!r} is not accepted; {nearest(str(name), accepted)}")
        return name

    return BeforeValidator(check)


def _as_list(value: object) -> object:
    return value if isinstance(value, list | tuple) else [value]


_Whole = Annotated[int, Field(strict=True, ge=1, le=2**24)]
_Runs = tuple[tuple[Annotated[str, _one_of(ROLES)], _Whole], ...]


class _Entry(Record):
    """The mapping of one operator in a file, with the layout of its stages."""

    what: ClassVar[str] = "operator mapping"
    operator: str = ""
    x: _Runs
    y: _Runs
    output: Annotated[tuple[Annotated[str, _one_of(OUTPUTS)], ...], BeforeValidator(_as_list)] = (
        "stash",
    )
    weights: Annotated[str, _one_of(WEIGHTS)] = "replicated"
    collective: Annotated[str, _one_of(MESH_ALGORITHMS)] = "auto"
    partition: dict[str, int] | None = None
    """Number of parts of each dimension; derived from `x` and `y`."""
    rectangle: tuple[_Whole, _Whole]
    stages: _Whole
    micro_batch: _Whole
    schedule: Annotated[str, _one_of(SCHEDULES)] = "1f1b"
    chunks: _Whole = 1
    replicas: _Whole = 1
    blocks: tuple[_Whole, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        derived = self.op_mapping.partition
        if self.partition not in (None, derived):
            raise ValueError(
                f"partition: {self.partition!r} is not what x and y say; expected {derived}"
            )
        return self

    @property
    def op_mapping(self) -> OperatorMapping:
        """The mapping of the operator."""
        return OperatorMapping(**picked(self, *OperatorMapping.__dataclass_fields__))

    @property
    def layout(self) -> Layout:
        """The layout of the stages."""
        others = list(Layout.__dataclass_fields__)[2:]
        return Layout(*self.rectangle, **picked(self, *others))
