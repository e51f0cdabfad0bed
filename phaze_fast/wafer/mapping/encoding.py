"""A mapping as one operator mapping per operator: rules, JSON and arrays.

An operator mapping says how an operator's dimensions are split along each axis of its rectangle of
dies, innermost first; whether its output is stashed, recomputed or offloaded; how its weights are
stored; and how its collectives run. All blocks of a model share their operator mappings. `RULES`
lists the conditions of a legal mapping.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from phaze_fast import _core
from phaze_fast.errors import InvalidInputError, nearest
from phaze_fast.wafer.mapping.classes import classes_fault
from phaze_fast.wafer.mapping.layout import (
    SCHEDULES,
    Layout,
    accepts_micro_batch,
    micro_batch_fault,
    slots_of,
)
from phaze_fast.wafer.mapping.mesh import MESH_ALGORITHMS
from phaze_fast.wafer.mapping.operators import OUTPUTS, ROLES, WEIGHTS, MeshOperator
from phaze_fast.wafer.mapping.packing import place_fault
from phaze_fast.wafer.mapping.placement import Placement
from phaze_fast.wafer.mapping.problem import Problem

Runs = tuple[tuple[str, int], ...]
"""Roles and factors along an axis of a rectangle of dies, from the inside out."""


@dataclass(frozen=True)
class OperatorMapping:
    """How one operator is mapped."""

    operator: str
    x: Runs
    """(role, factor) along a row of its rectangle, from the inside out."""
    y: Runs
    """(role, factor) along a column."""
    output: tuple[str, ...] = ("stash",)
    """stash, recompute or offload: one value for all stages, or one per stage."""
    weights: str = "replicated"
    """One of `WEIGHTS`."""
    collective: str = "auto"
    """One of `MESH_ALGORITHMS`."""

    @property
    def partition(self) -> dict[str, int]:
        """Number of parts of each dimension, and number of copies."""
        parts = dict.fromkeys(ROLES, 1)
        for role, factor in (*self.x, *self.y):
            parts[role] *= factor
        return parts


@dataclass(frozen=True)
class RuleCase:
    """Input of a rule: the mapping of one operator."""

    problem: Problem
    layout: Layout
    index: int
    """Position of the operator in the problem's list."""
    op_mapping: OperatorMapping

    @property
    def op(self) -> MeshOperator:
        """The operator."""
        return self.problem.work.operators[self.index]


@dataclass(frozen=True)
class MappingRule:
    """One condition that an operator mapping must meet."""

    name: str
    text: str
    broken: Callable[[RuleCase], str]
    """Returns the reason why the mapping is illegal, or an empty string."""


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
    accepted = c.problem.accepted_outputs(c.index)
    for output in c.op_mapping.output:
        if output not in accepted:
            return f"output: {output!r} is not accepted; accepted: {', '.join(accepted)}"
    count = c.layout.stages if c.op.part == "block" else 1
    if len(c.op_mapping.output) not in (1, count):
        output_count = len(c.op_mapping.output)
        return f"output: {output_count} values; expected 1, or one for each of {count} stages"
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
"""Conditions of a legal operator mapping, in the order in which they are checked."""


def layout_faults(problem: Problem, layout: Layout) -> list[str]:
    """Return the faults of a layout, one line each; empty if it is legal."""
    wafer, batch = problem.wafer, problem.training.global_batch
    wafers = max(1, wafer.wafer_count // layout.replicas)
    sides = (layout.width, layout.height)
    place = place_fault(wafer, sides, layout.stages, wafers, problem.work.blocks)
    faults = [place] if place else []
    if not accepts_micro_batch(batch, layout):
        faults.append(micro_batch_fault(batch, layout))
    elif not faults and problem.fault(layout):
        faults.append(problem.fault(layout))
    return faults


Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Encoding:
    """A whole mapping: a layout of the wafer, and one operator mapping per operator.

    If a pipeline has two classes of stages, this is the first class and `second_class` the other;
    each class has a layout with its own stages and blocks.
    """

    layout: Layout
    operator_mappings: tuple[OperatorMapping, ...]
    second_class: Encoding | None = None

    @property
    def classes(self) -> tuple[Encoding, ...]:
        """The classes of stages, each as a mapping of its own: one or two."""
        if self.second_class is None:
            return (self,)
        return (Encoding(self.layout, self.operator_mappings), self.second_class)

    def layouts_dict(self) -> dict[str, Any]:
        """Return the layout as plain data, the layout of the second class as `second_class`."""
        data = self.layout.to_dict()
        if self.second_class is not None:
            data["second_class"] = self.second_class.layout.to_dict()
        return data

    @property
    def dies(self) -> int:
        """Number of dies in use."""
        return sum(
            stage_class.layout.dies * stage_class.layout.stages for stage_class in self.classes
        )

    @property
    def stages_text(self) -> str:
        """Number and shape of the stages.

        Examples
        --------
        >>> Encoding(Layout(5, 2, 3, 1), ()).stages_text
        '3 stage(s) of 5 x 2 dies'
        """
        every = [stage_class.layout for stage_class in self.classes]
        shapes = [
            f"{layout.stages} stage(s) of {layout.width} x {layout.height}" for layout in every
        ]
        return " and ".join(shapes) + " dies"

    def placement(self, problem: Problem) -> Placement:
        """Place the stages of all classes on the problem's wafer."""
        return Placement(problem.wafer, tuple(some.layout for some in self.classes))

    # ---- legality ----

    def faults(self, problem: Problem) -> list[str]:
        """Return the rules that the mapping breaks, one line each; empty if it is legal."""
        if self.second_class is None:
            return self._faults(problem, layout_faults(problem, self.layout))
        pair = (self.layout, self.second_class.layout)
        if fault := classes_fault(problem, pair):
            return [fault]
        return [line for stage_class in self.classes for line in stage_class._faults(problem, [])]

    def _faults(self, problem: Problem, found: list[str]) -> list[str]:
        """Check the operators of one class of stages."""
        names = [op.name for op in problem.work.operators]
        operator_names = [op_mapping.operator for op_mapping in self.operator_mappings]
        if operator_names != names:
            missing = [name for name in names if name not in operator_names]
            extra = [name for name in operator_names if name not in names]
            twice = [
                name for name in dict.fromkeys(operator_names) if operator_names.count(name) > 1
            ]
            difference = "in another order"
            if missing or extra or twice:
                difference = f"missing {missing}, unknown {extra}, given twice {twice}"
            found.append(f"operators: {difference}; expected each once, as the model has them")
        if found:
            return found
        for i, op_mapping in enumerate(self.operator_mappings):
            case = RuleCase(problem, self.layout, i, op_mapping)
            for rule in RULES:
                fault = rule.broken(case)
                if fault:
                    found.append(f"{op_mapping.operator}.{fault} (rule: {rule.name})")
                    break
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
                runs = []
                for role, some in groupby(assigned, key=lambda pair: pair[0]):
                    factor = 1
                    for _, size in some:
                        factor *= size
                    runs.append((role, factor))
                axes.append(tuple(runs))
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
        """Return plain data, one mapping per operator and class; `from_list` reads it back."""
        if self.second_class is not None:
            entries = [stage_class.to_list() for stage_class in self.classes]
            return [{**entry, "class": k} for k, some in enumerate(entries) for entry in some]
        return [
            {
                "operator": op_mapping.operator,
                "partition": op_mapping.partition,
                "x": [list(run) for run in op_mapping.x],
                "y": [list(run) for run in op_mapping.y],
                "output": (
                    op_mapping.output[0] if len(op_mapping.output) == 1 else list(op_mapping.output)
                ),
                "weights": op_mapping.weights,
                "collective": op_mapping.collective,
                **self.layout.to_dict(),
            }
            for op_mapping in self.operator_mappings
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
            Naming the entry and the field that is missing or malformed.
        """
        if not isinstance(data, list) or not data:
            raise InvalidInputError(f"{source}: expected a list of one mapping per operator")
        classes: tuple[list[tuple[str, Mapping[str, Any]]], ...] = ([], [])
        for i, entry in enumerate(data):
            where = f"{source}[{i}]"
            if not isinstance(entry, Mapping):
                raise InvalidInputError(f"{where}: {entry!r} is not accepted; expected a mapping")
            number = entry.get("class", 0)
            if isinstance(number, bool) or number not in (0, 1):
                raise InvalidInputError(
                    f"{where}.class: {number!r} is not accepted; expected 0 or 1"
                )
            classes[number].append((where, entry))
        if not classes[0]:
            raise InvalidInputError(f"{source}: no operator of class 0; expected one class or two")
        first = cls._class_of(classes[0], source)
        second = cls._class_of(classes[1], source) if classes[1] else None
        return cls(first.layout, first.operator_mappings, second)

    @classmethod
    def _class_of(cls, entries: list[tuple[str, Mapping[str, Any]]], source: str) -> Encoding:
        op_mappings, layouts = [], set()
        for where, entry in entries:
            layouts.add(_layout_of(entry, where))
            op_mapping = _op_mapping_of(entry, where)
            stated = entry.get("partition", op_mapping.partition)
            if stated != op_mapping.partition:
                raise InvalidInputError(
                    f"{where}.partition: {stated!r} is not what x and y say; expected "
                    f"{op_mapping.partition}"
                )
            op_mappings.append(op_mapping)
        if len(layouts) > 1:
            raise InvalidInputError(
                f"{source}: operators disagree in rectangle, stages or micro_batch; expected one "
                "layout for all"
            )
        return cls(layouts.pop(), tuple(op_mappings))


_OF_LAYOUT = ("rectangle", "stages", "micro_batch", "schedule", "chunks", "replicas", "blocks")
_OF_ENTRY = (*_OF_LAYOUT, "class")


def _whole(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 2**24:
        raise InvalidInputError(
            f"{where}: {value!r} is not accepted; expected a whole number from 1 to 2^24"
        )
    return value


def _layout_of(entry: Mapping[str, Any], where: str) -> Layout:
    sides = entry.get("rectangle")
    if not isinstance(sides, list | tuple) or len(sides) != 2:
        raise InvalidInputError(f"{where}.rectangle: {sides!r} is not accepted; expected two sides")
    width, height = (_whole(side, f"{where}.rectangle") for side in sides)
    stages, micro_batch = (_whole(entry.get(k), f"{where}.{k}") for k in ("stages", "micro_batch"))
    chunks, replicas = (_whole(entry.get(k, 1), f"{where}.{k}") for k in ("chunks", "replicas"))
    schedule = _name(entry.get("schedule", "1f1b"), f"{where}.schedule", SCHEDULES)
    blocks = entry.get("blocks", [])
    if not isinstance(blocks, list | tuple):
        raise InvalidInputError(
            f"{where}.blocks: {blocks!r} is not accepted; expected a list, one number per stage"
        )
    counts = tuple(_whole(count, f"{where}.blocks") for count in blocks)
    return Layout(width, height, stages, micro_batch, schedule, chunks, replicas, counts)


def _runs_of(value: object, where: str) -> Runs:
    if not isinstance(value, list | tuple):
        raise InvalidInputError(
            f"{where}: {value!r} is not accepted; expected pairs of role and factor"
        )
    runs = []
    for pair in value:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or pair[0] not in ROLES:
            raise InvalidInputError(
                f"{where}: {pair!r} is not accepted; expected [role, factor] with a role of "
                f"{', '.join(ROLES)}"
            )
        runs.append((str(pair[0]), _whole(pair[1], where)))
    return tuple(runs)


def _names(value: object, where: str, accepted: Iterable[str]) -> tuple[str, ...]:
    values = value if isinstance(value, list | tuple) else [value]
    accepted = list(accepted)
    for name in values:
        if name not in accepted:
            raise InvalidInputError(
                f"{where}: {name!r} is not accepted; {nearest(str(name), accepted)}"
            )
    return tuple(values)


def _name(value: object, where: str, accepted: Iterable[str]) -> str:
    if isinstance(value, list | tuple):
        raise InvalidInputError(f"{where}: {value!r} is not accepted; expected one name")
    return _names(value, where, accepted)[0]


def _op_mapping_of(entry: Mapping[str, Any], where: str) -> OperatorMapping:
    known = ("operator", "partition", "x", "y", "output", "weights", "collective")
    for key in entry:
        if key not in (*known, *_OF_ENTRY):
            raise InvalidInputError(f"{where}: unknown key {key!r}; {nearest(str(key), known)}")
    return OperatorMapping(
        str(entry.get("operator", "")),
        _runs_of(entry.get("x"), f"{where}.x"),
        _runs_of(entry.get("y"), f"{where}.y"),
        _names(entry.get("output", "stash"), f"{where}.output", OUTPUTS),
        _name(entry.get("weights", "replicated"), f"{where}.weights", WEIGHTS),
        _name(entry.get("collective", "auto"), f"{where}.collective", MESH_ALGORITHMS),
    )
