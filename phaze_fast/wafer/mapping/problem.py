"""The compiled evaluation of a model's mappings on a wafer in one layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from phaze_fast import _core, models
from phaze_fast.documents import digest
from phaze_fast.errors import InvalidInputError, InvalidTypeError
from phaze_fast.hardware import Accelerator
from phaze_fast.memory.optimizer import optimizer
from phaze_fast.models import TransformerModel
from phaze_fast.opgraph.builder import OperatorSpec
from phaze_fast.wafer.hardware import Wafer, load_wafer
from phaze_fast.wafer.mapping.layout import (
    Layout,
    boundaries,
    even_split,
    layout_fault,
    layouts,
    links_of,
    placed_boundaries,
    refuse_micro_batch,
    slots_of,
    stages_on,
)
from phaze_fast.wafer.mapping.operators import (
    BESIDE,
    EDGE_KINDS,
    PARTS,
    PIECES,
    ROLES,
    WEIGHTS,
    MeshOperator,
    Workload,
    passes,
    workload,
)
from phaze_fast.wafer.mapping.prices import (
    LeastWork,
    Times,
    alike,
    combination,
    combinations,
    network_chip,
    operator_costs,
    priced_times,
)
from phaze_fast.wafer.mapping.streams import foreign_stages_s, stream_link_s, stream_shares

__all__ = [
    "Problem",
    "WaferTraining",
    "class_boundaries",
    "compiled_mapping",
    "replica_sums_s",
]


@dataclass(frozen=True)
class WaferTraining:
    """One training step on a wafer.

    Examples
    --------
    >>> WaferTraining(global_batch=64).optimizer
    'adam-bf16-grad'
    """

    global_batch: int = 512
    """Sequences of one step."""
    seq: int | None = None
    """Tokens of a sequence; by default the model's."""
    optimizer: str = "adam-bf16-grad"
    """A name of `phaze_fast.memory.OPTIMIZERS`; by default ZeRO's 16 bytes per parameter."""

    def __post_init__(self) -> None:
        for name, value in (("global_batch", self.global_batch), ("seq", self.seq)):
            if value is not None and not (isinstance(value, int) and 1 <= value <= 2**24):
                raise InvalidInputError(
                    f"{name}: {value!r} is not accepted; expected a whole number from 1 to 2^24"
                )
        if not isinstance(self.optimizer, str):
            raise InvalidTypeError(
                f"optimizer: {type(self.optimizer).__name__} is not accepted; expected a name"
            )
        optimizer(self.optimizer)


Dies = tuple[tuple[int, int], ...]


def replica_sums_s(problem: Problem, replicas: int, blocks: Sequence[int]) -> float:
    """Seconds in which replicas sum their gradients, in a ring over the wafers' I/O.

    Each wafer has summed those of its own dies before; the one with most parameters counts.
    `blocks` are those of each wafer of a pipeline.
    """
    wafer, work = problem.wafer, problem.work
    if wafer.io is None:
        return 0.0
    each = {part: sum(op.parameters for op in work.operators if op.part == part) for part in PARTS}
    held = [each["block"] * count for count in blocks]
    held[0] += each["before"]
    held[-1] += each["behind"]
    share_s = max(held) * problem.gradient_bytes / replicas / wafer.io.bandwidth_bytes_per_s
    return 2.0 * (replicas - 1) * (share_s + wafer.io.latency_s)


def class_boundaries(
    wafer: Wafer, placed: tuple[Dies, ...], numbers: Sequence[int], border: int
) -> list[tuple[float, float]]:
    """Seconds per byte, and seconds besides, that stages of two classes take to pass tensors on.

    Parameters
    ----------
    wafer
        One of those of a pipeline.
    placed
        Dies of each stage.
    numbers
        Of the wafer that each stage stands on; the ends of a wafer send over its I/O.
    border
        The last stage of the first class.
    """
    found: list[tuple[float, float]] = []
    for number in dict.fromkeys(numbers):
        first = numbers.index(number)
        here = placed[first : first + list(numbers).count(number)]
        found += placed_boundaries(wafer, here, border - first)
    for k in range(len(placed) - 1):
        if numbers[k] != numbers[k + 1]:
            assert wafer.io is not None  # a rule of joined wafers
            for end in (k, k + 1):
                rate_s, fixed_s = found[end]
                rate_s += 1.0 / wafer.io.bandwidth_bytes_per_s
                found[end] = (rate_s, fixed_s + wafer.io.latency_s)
    return found


Array = np.ndarray[Any, Any]


def compiled_mapping(
    problem: Problem,
    layout: Layout,
    rules: Array,
    boundary_s: Array,
    foreign_s: Array | None = None,
) -> _core.Mapping:
    """Compile the evaluator of a layout; each operator starts at its first legal mapping.

    Parameters
    ----------
    problem, layout
        What is mapped, and onto which dies.
    rules
        One record of `MAP_RULES_DTYPE`.
    boundary_s
        Seconds per byte that each stage takes to pass tensors on, both ways.
    foreign_s
        What `foreign_link_s` gives; None where no stage streams past another.

    Raises
    ------
    InvalidInputError
        Where some operator cannot be split over that many dies at all.
    """
    divisors, column, _ = combinations(layout.dies)
    runs = [tuple(run) for run in slots_of(layout.width, layout.height)]
    mapping = _core.Mapping(
        np.array(runs, dtype=_core.MESH_RUN_DTYPE),
        *problem._graph(layout.micro_batch),
        rules,
        divisors,
        column,
        tuple(t.reshape(-1) for t in problem._table(layout.dies, layout.micro_batch)),
        np.array(problem.blocks(layout), dtype=np.int32),
        boundary_s,
        np.array(problem.work.chain, dtype=np.int32),
        None if foreign_s is None else np.ascontiguousarray(foreign_s).reshape(-1),
    )
    first = [mapping.choices(i)[:1] for i in range(len(problem.work.operators))]
    for op, choice in zip(problem.work.operators, first, strict=True):
        if not len(choice):
            raise InvalidInputError(
                f"layout: {layout.width} x {layout.height} dies are not accepted with a "
                f"micro-batch of {layout.micro_batch}; {op.name} cannot be split over them"
            )
    mapping.assign(np.array([choice[0] for choice in first], dtype=_core.OP_MAPPING_DTYPE))
    return mapping


class Problem:
    """A model to be trained on one wafer; compiles an evaluator per layout.

    Parameters
    ----------
    model
        What is trained, or a preset's name.
    wafer
        What it is trained on, or a preset's name.
    training
        Batch, sequence length and optimiser.
    recompute
        Whether outputs may be computed again in the backward pass.
    volume
        Price collectives at the bytes a die sends, and everything else at nothing.
    linear
        Dies are numbered row by row and given out in that order, tensor splits innermost.
    capacity_bytes
        Of each die's local tier that a mapping may use; by default all of it.
    overlap
        Whether collectives of activations may run in pieces beside the product they feed or follow.
    work
        Operators to map; by default those of the model.

    Examples
    --------
    >>> from phaze_fast.wafer import load_wafer
    >>> from phaze_fast import models
    >>> problem = Problem(models.load("bertlarge"), load_wafer("dram-wafer"))
    >>> mapping = problem.mapping(Layout(4, 2, 1, 8))
    >>> mapping.score()["time_s"].shape
    (1,)
    """

    def __init__(
        self,
        model: TransformerModel | str,
        wafer: Wafer | str,
        training: WaferTraining | None = None,
        recompute: bool = True,
        volume: bool = False,
        linear: bool = False,
        capacity_bytes: float | None = None,
        work: Workload | None = None,
        overlap: bool = True,
    ) -> None:
        loaded = models.load(model) if isinstance(model, str) else model
        if isinstance(loaded, models.GraphModel):
            loaded = models.recognised(loaded) or loaded
        wafer = load_wafer(wafer) if isinstance(wafer, str) else wafer
        for name, value, wanted in (
            ("model", loaded, TransformerModel),
            ("wafer", wafer, Wafer),
            ("training", training, WaferTraining | None),
        ):
            if not isinstance(value, wanted):
                raise InvalidTypeError(f"{name}: {type(value).__name__} is not accepted")
        assert isinstance(loaded, TransformerModel)  # checked above
        self.model, self.wafer = loaded, wafer
        self.training = training or WaferTraining()
        self.work: Workload = work or workload(loaded, self.training.seq)
        self._given = work
        self.recompute, self.volume, self.linear = recompute, volume, linear
        self.overlap = overlap
        self.chip = wafer.chip
        whole = float(wafer.memory_bytes)
        self.capacity_bytes = whole if capacity_bytes is None else min(capacity_bytes, whole)
        self.stream = next((t for t in wafer.tiers() if t.name == "stream"), None)
        self._alike = alike(self.work.operators)
        key = (self.chip.digest() + self.network_chip.digest(), loaded.digest(), self.work.seq)
        self._times: Times = priced_times(*key) if work is None else {}
        self._tables: dict[tuple[int, int], tuple[Array, ...]] = {}
        self._compiled: dict[int, tuple[Array, Array]] = {}
        self._least: dict[tuple[int, int], LeastWork] = {}

    def variant(
        self,
        recompute: bool = True,
        volume: bool = False,
        linear: bool = False,
        capacity_bytes: float | None = None,
        overlap: bool = True,
    ) -> Problem:
        """Return the same problem under other rules; priced operators are shared."""
        given = (recompute, volume, linear, capacity_bytes)
        made = Problem(self.model, self.wafer, self.training, *given, self._given, overlap)
        made._times = self._times
        if not volume and not self.volume:
            made._tables, made._least = self._tables, self._least
        return made

    def on(self, wafer: Wafer) -> Problem:
        """Return the same problem on a wafer that differs in faults alone; prices are shared."""
        made = Problem(self.model, wafer, *self._inputs()[2:])
        made._times, made._tables, made._least = self._times, self._tables, self._least
        return made

    def _inputs(self) -> tuple[Any, ...]:
        rules = (self.recompute, self.volume, self.linear, self.capacity_bytes)
        return (self.model, self.wafer, self.training, *rules, self._given, self.overlap)

    def __reduce__(self) -> tuple[Any, ...]:
        return Problem, self._inputs()  # what is compiled or priced stays where it is

    @cached_property
    def digest(self) -> str:
        """Hash of the content, the same on every machine; empty where operators were given."""
        if self._given is not None:
            return ""
        model, wafer, training, *rules, _, overlap = self._inputs()
        return digest([model.digest(), wafer.digest(), asdict(training), *rules, overlap])

    @property
    def modes(self) -> tuple[str, ...]:
        """Ways to keep weights that the wafer accepts."""
        return WEIGHTS if self.stream is not None else WEIGHTS[:4]

    @property
    def weight_bytes(self) -> float:
        """Of one parameter as the passes read it."""
        return float(optimizer(self.training.optimizer).weight_bytes)

    @property
    def gradient_bytes(self) -> float:
        """Of one parameter's gradient."""
        return float(optimizer(self.training.optimizer).gradient_bytes)

    def parameters(
        self, op: int, layout_dies: int, micro_batch: int, parts: dict[str, int]
    ) -> float:
        """Parameters of one operator that a die works with."""
        column = combination(layout_dies, tuple(parts[role] for role in ROLES[:4]))
        return float(self._table(layout_dies, micro_batch)[4][op, column])

    # ---- prices of local operators ----

    def _price(self, wanted: dict[int, list[tuple[int, ...]]]) -> None:
        """Price shapes of operators: forward, and all their gradients together."""
        specs: list[tuple[OperatorSpec, int]] = []
        made: list[tuple[int, list[bool], Array]] = []
        for i, shapes in wanted.items():
            spec: Any = self.work.operators[i].parts(np.array(shapes))
            every = passes(spec)
            specs += [(each, len(shapes)) for each in every]
            weights = 2.0 * spec.k * spec.n * spec.b if spec.kind == "gemm" else 0.0
            of_weights = [each.kind == "gemm-weight-gradient" for each in every]
            made.append((i, of_weights, spec.read_bytes + spec.write_bytes - weights))
        seconds = operator_costs(self.chip, self.network_chip, specs)[0]
        for i, of_weights, live in made:
            mine, seconds = np.split(seconds, [len(of_weights) * len(live)])
            forward, *backward = runs = mine.reshape(len(of_weights), -1)
            own = sum((s for s, w in zip(runs, of_weights, strict=True) if w), np.zeros(len(live)))
            values = np.stack([forward, sum(backward, np.zeros(len(live))), own, live], axis=1)
            self._times.setdefault(i, {}).update(zip(wanted[i], values.tolist(), strict=True))

    @cached_property
    def network_chip(self) -> Accelerator:
        """One die as products see it: its shared buffer is as fast as the die's network."""
        return network_chip(self.wafer)

    def _table(self, dies: int, micro_batch: int) -> tuple[Array, ...]:
        """Work, kept, live bytes and parameters of each operator under each split."""
        key = (dies, micro_batch)
        if key in self._tables:
            return self._tables[key]
        parts = combinations(dies)[2]
        tables = tuple(np.zeros((len(self.work.operators), len(parts))) for _ in range(6))
        splits: dict[int, tuple[Array, Array, list[tuple[int, ...]]]] = {}
        wanted: dict[int, list[tuple[int, ...]]] = {}
        for i in set(self._alike):
            op, known = self.work.operators[i], self._times.get(i, {})
            sizes = np.array([op.limit(role, micro_batch) for role in ROLES[:4]])
            allowed = np.array([role in op.roles for role in ROLES[:4]])
            good = np.flatnonzero(((parts == 1) | (allowed & (parts <= sizes))).all(axis=1))
            local = -(-np.maximum(sizes, 1) // parts[good])
            shapes = list(map(tuple, op.shapes(local).tolist()))
            splits[i] = (good, local, shapes)
            missing = [shape for shape in dict.fromkeys(shapes) if shape not in known]
            if missing:
                wanted[i] = missing
        if wanted:
            self._price(wanted)
        values = {
            i: np.array([self._times[i][shape] for shape in shapes])
            for i, (_, _, shapes) in splits.items()
        }
        least, each = dict.fromkeys(PARTS, 0.0), [0.0] * len(self.work.operators)
        share = 0.0  # the most of an operator's work that its weight gradient is
        for i, op in enumerate(self.work.operators):
            good, local, _ = splits[self._alike[i]]
            forward, backward, of_weights, live = values[self._alike[i]].T
            if not self.volume:
                tables[0][i, good], tables[1][i, good] = forward, backward
                tables[5][i, good] = of_weights
                each[i] = float((forward + backward).min())
                least[op.part] += each[i]
                share = max(share, float((of_weights / (forward + backward)).max()))
            held = local[:, 0] * (local[:, 1] / op.seq_rows) * (local[:, 2] / op.units)
            tables[2][i, good] = op.kept_bytes * held
            tables[3][i, good] = live
            inner = local[:, 3] / op.inner_units if op.inner_units else 1.0
            experts = local[:, 1] / op.seq_rows if op.expert else 1.0
            tables[4][i, good] = op.parameters * (local[:, 2] / op.units) * inner * experts
        self._least[key] = LeastWork(
            least["before"], least["block"], least["behind"], share, tuple(each)
        )
        self._tables[key] = tables
        return tables

    def least_work(self, layout: Layout) -> LeastWork:
        """Seconds of a micro-batch, each operator split at its best."""
        self._table(layout.dies, layout.micro_batch)
        return self._least[layout.dies, layout.micro_batch]

    # ---- the compiled problem ----

    def _graph(self, micro_batch: int) -> tuple[Array, Array]:
        """Operators and edges for one micro-batch, kept for the next layout."""
        if micro_batch not in self._compiled:
            self._compiled[micro_batch] = (self._ops(micro_batch), self._edges(micro_batch))
        return self._compiled[micro_batch]

    def _ops(self, micro_batch: int) -> Array:
        found = np.zeros(len(self.work.operators), dtype=_core.MAP_OP_DTYPE)
        for i, op in enumerate(self.work.operators):
            found[i] = (
                PARTS.index(op.part),
                sum(1 << ROLES.index(role) for role in op.roles),
                self._outputs(op, i in self.work.entering),
                op.product,
                op.output_kept,
                op.expert,
                BESIDE.index(op.beside),
                tuple(op.limit(role, micro_batch) for role in ROLES[:4]),
                op.stat_bytes * micro_batch,
                op.gather_bytes * micro_batch,
            )
        return found

    def _outputs(self, op: MeshOperator, enters: bool) -> int:
        """Bits of what may become of an output; ends, and what enters a block, are kept."""
        if op.part != "block" or not op.kept_bytes:
            return 1
        recompute = 2 if self.recompute and not enters else 0
        return 1 | recompute | (4 if self.stream is not None else 0)

    def _edges(self, micro_batch: int) -> Array:
        found = np.zeros(len(self.work.edges), dtype=_core.MAP_EDGE_DTYPE)
        for i, edge in enumerate(self.work.edges):
            ends = (edge.source, edge.target, EDGE_KINDS.index(edge.kind))
            found[i] = (*ends, edge.again, edge.bytes * micro_batch)
        return found

    def _rules(self, layout: Layout) -> Array:
        spec, wafer, stream = optimizer(self.training.optimizer), self.wafer, self.stream
        links = links_of(wafer, layout)
        link_s = stream_link_s(wafer, layout) if stream and not self.volume else (0.0, 0.0)
        used = layout.dies * stages_on(wafer, layout)
        shares = stream_shares(wafer, stream, used, link_s)
        hbm, memory = self.chip.hbm, self.chip.buffer_bandwidth_bytes_per_s
        # Read and written once each: weights, gradients (read only) and state.
        moved = 2.0 * (spec.weight_bytes + spec.state_bytes) + spec.gradient_bytes
        found = np.zeros(1, dtype=_core.MAP_RULES_DTYPE)
        found[0] = (
            links.x_bytes_per_s or 1.0,  # a layout that needs links not there is not offered
            links.y_bytes_per_s or 1.0,
            links.hop_s,
            self.capacity_bytes,
            shares["stream_capacity_bytes"],
            shares["stream_bytes_per_s"],
            hbm.bandwidth_bytes_per_s if hbm else memory,
            spec.weight_bytes,
            spec.gradient_bytes,
            spec.state_bytes,
            0.0 if self.volume else moved,
            self.work.boundary_bytes * layout.micro_batch,
            self.batches(layout),
            (1 << len(self.modes)) - 1,
            self.volume,
            self.linear,
            wafer.off_wafer is not None and not wafer.off_wafer.duplex,
            layout.chunks,
            layout.schedule == "zb-h1",
            links.fabric,
            PIECES if self.overlap and not self.volume else 1,
            self.outer_tail_s(layout),
            *(shares["stream_link_s"], shares["stream_both_s"]),
            *(0, 0, 0.0, 0.0, 0.0),  # no other classes of stages
        )
        return found

    def _boundary(self, layout: Layout) -> Array:
        if not self.volume:
            size = self.work.boundary_bytes * layout.micro_batch
            return np.array([rate + fixed / size for rate, fixed in boundaries(self.wafer, layout)])
        last = layout.stages - 1
        both = 2 * layout.chunks if last else 2
        ways = [both - (k == 0) - (k == last) for k in range(layout.stages)]
        return np.array(ways) / layout.dies

    def batches(self, layout: Layout) -> int:
        """Micro-batches of a pipeline; the last is padded where the batch is no multiple."""
        return -(-self.training.global_batch // layout.replicas // layout.micro_batch)

    def outer_tail_s(self, layout: Layout) -> float:
        """Seconds in which replicas on joined wafers sum their gradients after a step."""
        if layout.replicas == 1 or self.volume:
            return 0.0
        blocks, here = self.blocks(layout), stages_on(self.wafer, layout)
        held = [sum(blocks[k : k + here]) for k in range(0, layout.stages, here)]
        return replica_sums_s(self, layout.replicas, held)

    def blocks(self, layout: Layout) -> tuple[int, ...]:
        """Blocks of each stage: as the layout says, else alike but for one."""
        return layout.blocks or even_split(self.work.blocks, layout.stages)

    def layouts(self) -> Iterator[Layout]:
        """List every layout of the wafer."""
        found = layouts(self.wafer, self.work.blocks, self.training.global_batch, self.work.ends)
        return filter(lambda each: each.stages == 1, found) if self.work.encodes else found

    def fault(self, layout: Layout) -> str:
        """Say why pipelines of the model cannot run as a layout says; empty where they can."""
        if self.work.encodes and layout.stages > 1:
            return f"stages: {layout.stages} is not accepted for an encoder-decoder; expected 1"
        return layout_fault(self.wafer, self.work.blocks, self.training.global_batch, layout)

    def mapping(self, layout: Layout) -> _core.Mapping:
        """Compile the evaluator of one layout; each operator starts at its first legal mapping.

        Raises
        ------
        InvalidInputError
            Where some operator cannot be split over that many dies at all.
        """
        refuse_micro_batch(self.training.global_batch, layout)
        if fault := self.fault(layout):
            raise InvalidInputError(fault)
        streams = self.stream is not None and not self.volume
        foreign = foreign_stages_s(self.wafer, layout) if streams else None
        return compiled_mapping(self, layout, self._rules(layout), self._boundary(layout), foreign)
