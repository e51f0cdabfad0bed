"""Plans of other systems as mappings: by default, and tuned within their rules.

A plan of Megatron-LM or ZeRO-3 assigns each slot of the rectangle to tensor or to data parallelism.
Every plan is an encoding, evaluated by the same evaluator as ours. `default` is the plan of a user
who follows the system's own advice; `tuned` is the best plan that its rules allow. Megatron-LM and
ZeRO-3 number dies row by row, so each is tuned twice: in that linear order, and with its groups in
the best tiling (`tiled`).

AccPar (Song et al., HPCA 2020) bisects the array of accelerators recursively. At each cut a dynamic
program along the layers assigns one of three types to each layer - split by the batch (I), by the
inner dimension (II), by the columns (III) - so that the cost of communication and of the
computation that overlaps it is least. HyPar (Song et al., HPCA 2019) does the same with types I and
II and counts bytes only. Equal parts have equal work, so on equal dies only the bytes matter. Both
store all activations and replicate weights over the dies that split the batch. The costs are
theirs, not ours: a partial sum is always reduced, and bytes take the bandwidth of one link.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise, product
from math import prod
from typing import Any

import numpy as np

from phaze_fast import _core
from phaze_fast.errors import InvalidInputError, check_one_of
from phaze_fast.opgraph.graph import SELECTIVE
from phaze_fast.planning.layouts import divisors
from phaze_fast.tables import Array
from phaze_fast.wafer.mapping.encoding import Encoding
from phaze_fast.wafer.mapping.evaluate import Evaluation, evaluation_of
from phaze_fast.wafer.mapping.layout import Layout, slots_of, stages_on
from phaze_fast.wafer.mapping.operators import (
    OUTPUTS,
    ROLES,
    ROW_WISE,
    WEIGHTS,
    MeshOperator,
    plain_name,
)
from phaze_fast.wafer.mapping.packing import is_bent, tiles
from phaze_fast.wafer.mapping.problem import Problem
from phaze_fast.wafer.search.bounds import roofline

AxisAssignment = tuple[str, ...]
"""Use of each slot in a plan: ``tensor`` or ``data``."""

RECOMPUTE = ("none", "selective", "full")

OFFLOADED = ("offload", "full-offload")
"""Offload modes: every output of a block, or only its input with the rest recomputed."""

_FEED_FORWARD = ("up", "gate", "expert-up", "expert-gate", "shared-up", "shared-gate")
_COLUMN_WISE = ("q", "k", "v", "qkv", *_FEED_FORWARD, "logits")
_INSIDE = ("attention", "batched-gemm", "softmax", "rotary", "activation", "multiply")


def _tensor_role(op: MeshOperator, sequence_parallel: bool) -> str:
    """Role of a tensor-parallel slot (Shoeybi et al. 2019; Korthikanti et al. 2022)."""
    name, kind = plain_name(op.name), op.spec.kind
    if name in _COLUMN_WISE or kind == "cross-entropy":
        return "columns"
    if name in ROW_WISE or kind == "embedding":
        return "inner"
    in_region = op.part == "block" and (kind in _INSIDE or name == "score-dropout")
    if in_region and op.name != "weigh":  # weigh follows the region of experts
        return "columns"
    if op.product:  # the head's transform, which Megatron-LM replicates on every device
        return "rows"
    return "rows" if sequence_parallel else "copies"


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
    sizes = [slot.size for slot in slots_of(layout.width, layout.height)]
    widths = [prod(sizes[:count]) for count in range(len(sizes) + 1)]
    if tp not in widths:
        raise InvalidInputError(
            f"tp: {tp} is not accepted on {layout.width} x "
            f"{layout.height} dies; expected a product of the sides' innermost factors"
        )
    count = widths.index(tp)
    return ("tensor",) * count + ("data",) * (len(sizes) - count)


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
        inner = [("tensor",) * cut + ("data",) * (count - cut) for cut in range(count + 1)]
        sides.append(list(dict.fromkeys(way for some in inner for way in (some, some[::-1]))))

    def width(uses: AxisAssignment) -> int:
        return prod(slot.size for slot, use in zip(slots, uses, strict=True) if use == "tensor")

    return [x + y for x, y in product(*sides) if width(x + y) == tp]


def _mask(axis_assignment: Sequence[str], use: str) -> int:
    return sum(1 << k for k, slot_use in enumerate(axis_assignment) if slot_use == use)


def op_mappings_of(roles: Sequence[Mapping[str, int]], weights: str) -> Array:
    """Convert the slots of each role (bit masks, one dictionary per operator) to an array."""
    check_one_of("weights", weights, WEIGHTS)
    op_mappings = np.zeros(len(roles), dtype=_core.OP_MAPPING_DTYPE)
    slots = op_mappings["slots"]
    for i, mask_by_role in enumerate(roles):
        for role, mask in mask_by_role.items():
            slots[i, ROLES.index(role)] = mask
    op_mappings["mode"] = WEIGHTS.index(weights)
    return op_mappings


def encode(
    problem: Problem, layout: Layout, op_mappings: Array, recompute: str = "none"
) -> Encoding:
    """Return operator mappings with a recompute mode as an encoding."""
    outputs = np.tile(outputs_of(problem, recompute), layout.stages)
    return Encoding.from_arrays(problem, layout, op_mappings, outputs)


def outputs_of(problem: Problem, recompute: str) -> Array:
    """Return a code of `OUTPUTS` per operator, given a mode of `RECOMPUTE` or `OFFLOADED`."""
    check_one_of("recompute", recompute, (*RECOMPUTE, *OFFLOADED))
    codes = np.zeros(len(problem.work.operators), dtype=np.uint8)
    for i, op in enumerate(problem.work.operators):
        selected = recompute == "selective" and plain_name(op.name) in SELECTIVE
        again = op.part == "block" and (selected or recompute in ("full", "full-offload"))
        chosen = "recompute" if again else "stash"
        if recompute == "offload" or (recompute == "full-offload" and i in problem.work.entering):
            chosen = "offload"
        codes[i] = OUTPUTS.index(chosen if chosen in problem.accepted_outputs(i) else "stash")
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
    >>> problem = Problem("gpt3-13b", "dram-wafer")
    >>> plan = megatron(problem, Layout(4, 2, 5, 2), tp=4, sequence_parallel=True)
    >>> {op_mapping.operator: op_mapping.x for op_mapping in plan.operator_mappings}["proj"]
    (('inner', 4),)
    """
    if axis_assignment is None:
        axis_assignment = linear_axis_assignment(layout, tp)
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
    >>> problem = Problem("llama2-7b", "dram-wafer")
    >>> zero3(problem, Layout(8, 4, 1, 32)).operator_mappings[1].partition["batch"]
    32
    """
    return encode(problem, layout, zero3_op_mappings(problem, layout), recompute)


def zero3_op_mappings(problem: Problem, layout: Layout, weights: str = "zero3") -> Array:
    """Operator mappings that split the batch over all dies, with the weight mode `weights`."""
    every = (1 << len(slots_of(layout.width, layout.height))) - 1
    return op_mappings_of([{"batch": every} for _ in problem.work.operators], weights)


def megatron_variants(
    problem: Problem, tp: int, weights: Iterable[str]
) -> Iterator[tuple[bool, str, bool]]:
    """Yield sequence parallelism, weight mode and whether replicas split the experts."""
    spread = (False, True) if any(op.expert for op in problem.work.operators) else (False,)
    yield from product((False, True) if tp > 1 else (False,), weights, spread)


def heads(problem: Problem) -> int | None:
    """Return the number of units into which attention can be split; None without attention."""
    return min((op.units for op in problem.work.operators if op.per_head), default=None)


def plan_starts(problem: Problem, layout: Layout) -> Iterator[Array]:
    """Yield the operator mappings that other systems would use in this layout."""
    every, most = layout.dies, heads(problem) or layout.dies
    for t in divisors(every):
        if t > most or every // t > layout.micro_batch:
            continue
        for axis_assignment in axis_assignments(layout, t)[:4]:
            for variant in megatron_variants(problem, t, ("zero1", "zero3")):
                yield megatron_op_mappings(problem, axis_assignment, *variant)
    if every <= layout.micro_batch and slots_of(layout.width, layout.height):
        yield zero3_op_mappings(problem, layout)


# ---- AccPar and HyPar ----

TYPES = ("batch", "inner", "columns")
"""AccPar's types I, II and III by the dimension that they split."""


@dataclass(frozen=True)
class LayerSize:
    """Elements of the tensors of one product in AccPar's model: features F, errors E, weights W."""

    name: str
    inputs: float
    """Size of F_l: rows times inner dimension; E_l has the same size."""
    outputs: float
    """Size of F_(l+1): rows times columns; E_(l+1) has the same size."""
    weights: float

    def cut(self, kind: str, parts: int) -> LayerSize:
        """Return the sizes of one of `parts` equal parts after a split of type `kind`."""
        return LayerSize(
            self.name,
            self.inputs / (parts if kind in ("batch", "inner") else 1),
            self.outputs / (parts if kind in ("batch", "columns") else 1),
            self.weights / (parts if kind in ("inner", "columns") else 1),
        )


def intra_layer(kind: str, layer: LayerSize) -> float:
    """Elements of the partial sum that a type produces: dW, F_(l+1) or E_l."""
    return {"batch": layer.weights, "inner": layer.outputs, "columns": layer.inputs}[kind]


def inter_layer(before: str, after: str, size: float, parts: int = 2) -> float:
    """Elements that one part fetches between two layers, of F and of E together.

    Parameters
    ----------
    before, after
        Types of a layer and of the next.
    size
        Elements of the tensor between them, the same for F and E.
    parts
        Number of equal parts of the cut.

    Examples
    --------
    AccPar's table for equal halves: types I to II exchange a quarter each of F and of E.

    >>> inter_layer("batch", "inner", 8.0)
    4.0
    >>> [inter_layer(a, "columns", 8.0) for a in TYPES]
    [4.0, 0.0, 4.0]
    """
    mine, others = 1.0 / parts, 1.0 - 1.0 / parts
    table = {
        ("batch", "inner"): 2.0 * mine * others,
        ("batch", "columns"): others,
        ("inner", "batch"): others,
        ("inner", "inner"): others,
        ("columns", "batch"): 2.0 * mine * others,
        ("columns", "columns"): others,
    }
    return size * table.get((before, after), 0.0)


_Choice = tuple[float, tuple[str, ...]]
"""Cost and types of the first layers of a chain."""


def types_of(
    layers: Sequence[LayerSize], parts: int, kinds: Sequence[str] = TYPES
) -> tuple[str, ...]:
    """Choose AccPar's partition type of each layer of a chain, for one split into equal parts.

    A dynamic program minimises the number of elements moved.

    Examples
    --------
    Layers with large weights and few rows are not split by the batch:

    >>> types_of([LayerSize("a", 8.0, 8.0, 4096.0), LayerSize("b", 8.0, 8.0, 4096.0)], 2)
    ('columns', 'inner')
    """
    best: dict[str, _Choice] = {kind: (intra_layer(kind, layers[0]), (kind,)) for kind in kinds}
    for previous, layer in pairwise(layers):
        following: dict[str, _Choice] = {}
        for kind in kinds:
            cost, at = min(
                (best[before][0] + inter_layer(before, kind, previous.outputs, parts), at)
                for at, before in enumerate(kinds)
            )
            following[kind] = (cost + intra_layer(kind, layer), (*best[kinds[at]][1], kind))
        best = following
    return min(best.values(), key=lambda choice: choice[0])[1]


def _products(problem: Problem, micro_batch: int) -> list[LayerSize]:
    """Products in the order of the data flow, parallel ones one after another."""
    layers = []
    for op in problem.work.operators:
        if op.product:
            rows = float(op.spec.b * op.spec.m * micro_batch)  # of all experts, if there are any
            weights = float(op.spec.b * op.spec.k * op.spec.n)
            layers.append(LayerSize(op.name, rows * op.spec.k, rows * op.spec.n, weights))
    return layers


def typed_op_mappings(problem: Problem, layout: Layout, kinds: Sequence[str]) -> Array:
    """Operator mappings of a partition by types, one cut per slot; weights are replicated."""
    layers = _products(problem, layout.micro_batch)
    slots = slots_of(layout.width, layout.height)
    left = {
        op.name: {r: op.limit(r, layout.micro_batch) for r in TYPES}
        for op in problem.work.operators
        if op.product
    }
    types: list[dict[str, str]] = [{} for _ in slots]
    # The first cut is the coarsest: the outermost slots, the longer side first.
    for position in sorted(range(len(slots)), key=lambda k: -slots[k].stride):
        size = slots[position].size
        for layer, kind in zip(layers, types_of(layers, size, kinds), strict=True):
            if left[layer.name][kind] < size:
                kind = max(kinds, key=lambda k: left[layer.name][k])
            left[layer.name][kind] //= size
            types[position][layer.name] = kind
        layers = [layer.cut(types[position][layer.name], size) for layer in layers]
    return op_mappings_of(_roles_of(problem, types), "replicated")


def accpar(problem: Problem, layout: Layout) -> Encoding:
    """Partition as AccPar does: its own costs, types I, II and III, one cut per slot.

    Examples
    --------
    >>> problem = Problem("bertlarge", "dram-wafer")
    >>> len(accpar(problem, Layout(4, 2, 1, 64)).operator_mappings) == len(problem.work.operators)
    True
    """
    return encode(problem, layout, typed_op_mappings(problem, layout, TYPES))


def hypar(problem: Problem, layout: Layout) -> Encoding:
    """Partition as HyPar does: types I and II, one cut per slot.

    Examples
    --------
    >>> problem = Problem("bertlarge", "dram-wafer")
    >>> plan = hypar(problem, Layout(4, 2, 1, 64))
    >>> {m.partition["columns"] for m in plan.operator_mappings if m.operator == "up"}
    {1}
    """
    return encode(problem, layout, typed_op_mappings(problem, layout, TYPES[:2]))


def _roles_of(problem: Problem, types: Sequence[Mapping[str, str]]) -> list[dict[str, int]]:
    """Return the slots of each role by operator; operators without a type follow their input.

    `types` gives for each slot the role (batch, inner or columns: AccPar's types I, II and III) of
    each product by its name.
    """
    feeds: dict[int, int] = {}
    for kinds in (("inside", "exit"), ("wrap",)):
        for edge in problem.work.edges:
            if edge.kind in kinds:
                feeds.setdefault(edge.target, edge.source)
    roles: list[dict[str, int]] = [{} for _ in problem.work.operators]
    for slot, by_name in enumerate(types):
        role_of: dict[int, str] = {}
        for i, op in enumerate(problem.work.operators):
            before = role_of.get(feeds.get(i, -1), "batch")
            role_of[i] = by_name.get(op.name) or _following(op, before)
            roles[i][role_of[i]] = roles[i].get(role_of[i], 0) | 1 << slot
    return roles


def _following(op: MeshOperator, made: str) -> str:
    """Role of an operator without weights whose input was produced in the role `made`."""
    role = {"batch": "batch", "rows": "rows", "columns": "columns"}.get(made, "copies")
    if role in op.roles:
        return role
    return "columns" if "columns" in op.roles and op.spec.kind != "norm" else "batch"


# ---- systems and their candidates ----

Candidate = tuple[Array, Array | None]
"""Operator mappings, and output codes for one stage (None: outputs are chosen exactly)."""

Candidates = Callable[[Layout], Iterator[Candidate]]
"""Yields the candidates of a layout."""


@dataclass(frozen=True)
class System:
    """The plans that one system may make."""

    split: str
    """pairs: products by columns, then rows, as Megatron-LM does; replicas: the batch over all
    dies; types: as AccPar does."""
    weights: tuple[str, ...] = ("replicated",)
    """Weight modes of the plans, of `WEIGHTS`."""
    outputs: tuple[str, ...] = RECOMPUTE
    """Modes of outputs, of `RECOMPUTE` and `OFFLOADED`; empty: outputs are chosen exactly."""
    one_stage: bool = True
    """Whether all plans have one stage, without a pipeline."""
    off_wafer: bool = False
    """Whether the plans need memory off the wafer."""
    types: tuple[str, ...] = TYPES
    """Types that products may be split by, of `TYPES`."""


SYSTEMS = {
    "megatron": System("pairs", ("replicated", "zero1"), one_stage=False),
    "zero3": System("replicas", ("zero3",)),
    "accpar": System("types", outputs=("none",)),
    "hypar": System("types", outputs=("none",), types=TYPES[:2]),
    # Optimiser state, gradients and activations of Megatron-LM off the wafer.
    "megatron_offload": System(
        "pairs",
        weights=("replicated", "zero1", "offload"),
        outputs=(*RECOMPUTE, *OFFLOADED),
        one_stage=False,
        off_wafer=True,
    ),
    # Replicas on the wafer; gradients and optimiser state off it (Ren et al. 2021).
    "zero_offload": System("replicas", ("offload",), off_wafer=True),
    # All state and checkpoints off the wafer (Rajbhandari et al. 2021).
    "zero_infinity": System("replicas", ("stream",), (*RECOMPUTE, "full-offload"), off_wafer=True),
    # Cerebras: all weights streamed, activations on the wafer (Lie 2022).
    "weight_streaming": System("pairs", ("stream",), off_wafer=True),
}
"""Other systems by name."""

BASELINES = tuple(SYSTEMS)
"""Names of other systems; the last ones need off-wafer memory."""

OFF_WAFER = tuple(name for name, system in SYSTEMS.items() if system.off_wafer)
"""Systems that use off-wafer memory."""


def megatron_shapes(
    problem: Problem, layout: Layout, linear: bool
) -> Iterator[tuple[int, AxisAssignment]]:
    """Yield the tensor-parallel widths of a layout, each with its axis assignments."""
    most = heads(problem) or 1
    for t in divisors(layout.dies):
        if most % t or layout.micro_batch % (layout.dies // t):
            continue
        if linear:
            with suppress(InvalidInputError):
                yield t, linear_axis_assignment(layout, t)
        else:
            for axis_assignment in axis_assignments(layout, t):
                yield t, axis_assignment


def is_linear(problem: Problem, layout: Layout) -> bool:
    """Whether a stage consists of consecutive ranks: part of a row, or whole rows."""
    here = stages_on(problem.wafer, layout)
    if is_bent(problem.wafer, layout.width, layout.height, here):
        return False
    return layout.height == 1 or layout.width == problem.wafer.grid[0]


def layouts_of(problem: Problem, system: System, linear: bool) -> list[Layout]:
    """Layouts without ZB-H1 that suit a system; with `linear`, those of consecutive ranks.

    Replicas need at least one sequence per die.
    """
    return [
        layout
        for layout in problem.layouts()
        if layout.schedule != "zb-h1"
        and (layout.stages == 1 or not system.one_stage)
        and (system.split != "replicas" or layout.micro_batch % layout.dies == 0)
        and (not linear or is_linear(problem, layout))
    ]


def candidates_of(problem: Problem, system: System, linear: bool = False) -> Candidates:
    """Return what yields the splits of a layout by a system, with its weight modes and outputs."""
    codes: list[Array | None] = [outputs_of(problem, mode) for mode in system.outputs] or [None]

    @cache  # micro-batches, stages and schedules share one plan
    def pairs(axis_assignment: AxisAssignment, shared: bool, mode: str, spread: bool) -> Array:
        op_mappings = megatron_op_mappings(problem, axis_assignment, shared, mode, spread)
        op_mappings.setflags(write=False)
        return op_mappings

    def splits(layout: Layout) -> Iterator[Array]:
        if system.split == "replicas":
            yield zero3_op_mappings(problem, layout, system.weights[0])
        elif system.split == "pairs":
            for t, axis_assignment in megatron_shapes(problem, layout, linear):
                for variant in megatron_variants(problem, t, system.weights):
                    yield pairs(axis_assignment, *variant)
        else:
            yield typed_op_mappings(problem, layout, system.types)

    return lambda layout: product(splits(layout), codes)


def largest(found: list[Layout]) -> list[Layout]:
    """Return the layouts with most dies."""
    most = max((layout.dies for layout in found), default=0)
    return [layout for layout in found if layout.dies == most]


# ---- tuning ----

VARIANTS = ("default", "tuned", "tiled")
"""Plans of each system; see `Baseline`."""

_NODE = 8  # devices of a node: Megatron-LM's widest tensor parallelism by its own advice


@dataclass(frozen=True)
class Baseline:
    """Plans of one system on one wafer."""

    name: str
    default: Evaluation
    tuned: Evaluation
    """Best plan within the system's rules, with groups in linear rank order."""
    tiled: Evaluation
    """Best plan within the system's rules, with groups in the best tiling of the mesh."""
    evaluations: int
    default_is_tuned: bool = False
    """Whether the advice gives no plan on this wafer, so that the tuned plan is the default."""

    @property
    def best(self) -> Evaluation:
        """The faster of `tuned` and `tiled`; a plan that fits is preferred to one that does not."""
        return min((self.tuned, self.tiled), key=lambda evaluation: evaluation.rank)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        data = {variant: getattr(self, variant).to_dict() for variant in VARIANTS}
        data["default"]["is_tuned"] = self.default_is_tuned
        return data

    @classmethod
    def from_dict(cls, name: str, data: Mapping[str, Any], evaluations: int) -> Baseline:
        """Read the output of `to_dict`."""
        plans = {kind: Evaluation.from_dict(data[kind]) for kind in VARIANTS}
        stands_in = data["default"]["is_tuned"]
        return cls(name, **plans, evaluations=evaluations, default_is_tuned=stands_in)


class Tuner:
    """Finds the best of a system's candidates, layout by layout."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.roofline = roofline(problem)
        self.evaluations = 0
        self.compiled: dict[Layout, _core.Mapping | None] = {}
        self.tiled: dict[tuple[bytes, int], Array] = {}

    def mapping(self, layout: Layout) -> _core.Mapping | None:
        """Compile a layout, cached; None if some operator cannot be split over its dies."""
        if layout not in self.compiled:
            try:
                self.compiled[layout] = self.problem.mapping(layout)
            except InvalidInputError:
                self.compiled[layout] = None
        return self.compiled[layout]

    def outputs(self, codes: Array, stages: int) -> Array:
        """Repeat the codes of one stage for all stages."""
        key = (codes.tobytes(), stages)
        if key not in self.tiled:
            self.tiled[key] = np.tile(codes, stages)
        return self.tiled[key]

    def best(self, wanted: Iterable[Layout], candidates: Candidates) -> Evaluation | None:
        """Fastest candidate that fits, else the one least over memory; None without candidates."""
        queue = sorted((self.roofline.bound_s(self.problem, own), own) for own in set(wanted))
        top: tuple[float, float] = (float("inf"), float("inf"))
        best_candidate: tuple[Layout, Array, Array | None] | None = None
        for least, layout in queue:
            if top[0] <= 0.0 and least >= top[1]:
                break
            mapping = self.mapping(layout)
            if mapping is None:
                continue
            for op_mappings, codes in candidates(layout):
                try:
                    mapping.assign(op_mappings)
                except InvalidInputError:
                    continue
                outputs = None if codes is None else self.outputs(codes, layout.stages)
                score = mapping.score(outputs)[0]
                self.evaluations += 1
                over = float(score["over_bytes"] + score["stream_over_bytes"])
                rank = (over, float(score["time_s"]))
                if rank < top:
                    top, best_candidate = rank, (layout, op_mappings, outputs)
        if best_candidate is None:
            return None
        layout, op_mappings, outputs = best_candidate
        mapping = self.mapping(layout)
        assert mapping is not None
        mapping.assign(op_mappings)
        return evaluation_of(self.problem, layout, mapping, outputs)


def _megatron_default(problem: Problem, tuner: Tuner) -> Evaluation | None:
    """Tensor parallelism as wide as a node, fewest stages that fit, micro-batches of 1."""
    codes = outputs_of(problem, "full")
    for width in (_NODE, 4, 2, 1):

        def candidates(layout: Layout, width: int = width) -> Iterator[Candidate]:
            for t, axis_assignment in megatron_shapes(problem, layout, True):
                if t == width:
                    yield megatron_op_mappings(problem, axis_assignment, False, "replicated"), codes

        by_stages: dict[int, list[Layout]] = {}
        fits = (heads(problem) or 1) % width == 0
        for layout in layouts_of(problem, SYSTEMS["megatron"], True) if fits else ():
            if layout.dies % width == 0 and layout.micro_batch == layout.dies // width:
                by_stages.setdefault(layout.stages, []).append(layout)
        found: list[Evaluation] = []
        for stages in sorted(by_stages):
            evaluation = tuner.best(largest(by_stages[stages]), candidates)
            found += [evaluation] if evaluation is not None else []
            if found and found[-1].fits:
                break
        if found:
            return min(found, key=lambda evaluation: evaluation.rank)
    return None


def _whole_wafer(problem: Problem) -> list[Layout]:
    """Largest rectangles without a dead die, one stage, the whole batch at once."""
    columns, rows = problem.wafer.grid
    replicas, batch = problem.wafer.wafer_count, problem.training.global_batch
    sides = [(w, h) for h in range(1, rows + 1) for w in range(1, columns + 1)]
    if batch % replicas:
        return []
    placed = [(w, h) for w, h in sides if tiles(problem.wafer, w, h)]
    return largest([Layout(w, h, 1, batch // replicas, replicas=replicas) for w, h in placed])


def baselines_on(problem: Problem) -> tuple[str, ...]:
    """Names of the systems that are applicable to a wafer.

    Some need off-wafer memory; all but Megatron-LM put the whole model on each of several wafers,
    whose number then must divide the batch.

    Examples
    --------
    >>> baselines_on(Problem("bertlarge", "dram-wafer"))
    ('megatron', 'zero3', 'accpar', 'hypar')
    """
    shared = problem.training.global_batch % problem.wafer.wafer_count == 0
    known = [n for n, s in SYSTEMS.items() if not s.off_wafer or problem.stream is not None]
    return tuple(n for n in known if shared or n.startswith("megatron"))


def baselines(problem: Problem, names: Iterable[str] | None = None) -> dict[str, Baseline]:
    """Evaluate other systems' plans of a model on a wafer.

    Parameters
    ----------
    problem
        The model, the wafer and the step.
    names
        Some of `BASELINES`; by default those that are applicable to the wafer.

    Examples
    --------
    >>> problem = Problem("bertlarge", "dram-wafer")
    >>> plans = baselines(problem, ["zero3"])["zero3"]
    >>> plans.tuned.time_s <= plans.default.time_s
    True
    """
    tuner = Tuner(problem)
    by_name: dict[str, Baseline] = {}
    for name in baselines_on(problem) if names is None else names:
        if name not in baselines_on(problem):
            raise InvalidInputError(
                f"baselines: {name!r} is not accepted; accepted on {problem.wafer.name}: "
                f"{', '.join(baselines_on(problem))}"
            )
        before, system = tuner.evaluations, SYSTEMS[name]
        default = _default(problem, tuner, name)
        tuned, tiled = (
            tuner.best(layouts_of(problem, system, linear), candidates_of(problem, system, linear))
            for linear in (True, False)
        )
        stands_in = default is None
        tuned = _or(tuned, tiled, default)
        default = _or(default, tuned)
        # Tuning includes the default plan, and tilings include the linear order.
        tuned = min((tuned, default), key=lambda plan: plan.rank)
        tiled = min((_or(tiled, tuned), tuned), key=lambda plan: plan.rank)
        count = tuner.evaluations - before
        by_name[name] = Baseline(name, default, tuned, tiled, count, stands_in)
    return by_name


def _or(*plans: Evaluation | None) -> Evaluation:
    """Return the first plan that exists."""
    first = next((plan for plan in plans if plan is not None), None)
    if first is None:
        raise InvalidInputError("baselines: no rectangle of this wafer suits any plan")
    return first


def _default(problem: Problem, tuner: Tuner, name: str) -> Evaluation | None:
    """Return the plan that a system's own advice gives; None if it gives none on this wafer."""
    if name == "megatron":
        return _megatron_default(problem, tuner)
    if name == "zero3":
        plain = replace(SYSTEMS[name], outputs=("none",))
        each_one = [own for own in layouts_of(problem, plain, True) if own.micro_batch == own.dies]
        return tuner.best(largest(each_one), candidates_of(problem, plain))
    if name in ("accpar", "hypar"):
        return tuner.best(_whole_wafer(problem), candidates_of(problem, SYSTEMS[name]))
    return None
