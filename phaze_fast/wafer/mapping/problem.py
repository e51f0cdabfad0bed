"""A model to be trained on a wafer: operator prices, and an evaluator compiled per layout."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from phaze_fast import _core, models
from phaze_fast.cost import estimate_costs
from phaze_fast.documents import digest
from phaze_fast.errors import InvalidInputError, InvalidTypeError, check_type, not_accepted
from phaze_fast.hardware import Accelerator
from phaze_fast.memory.optimizer import optimizer
from phaze_fast.models import TransformerModel
from phaze_fast.opgraph.builder import OperatorSpec
from phaze_fast.opgraph.graph import loose
from phaze_fast.planning.layouts import divisors
from phaze_fast.tables import Array
from phaze_fast.wafer.hardware.wafer import Wafer, load_wafer
from phaze_fast.wafer.mapping.layout import (
    Layout,
    even_split,
    layout_fault,
    layouts,
    slots_of,
    stages_on,
)
from phaze_fast.wafer.mapping.operators import (
    EDGE_KINDS,
    OUTPUTS,
    OVERLAPS,
    PARTS,
    PIECES,
    ROLES,
    WEIGHTS,
    MeshOperator,
    Workload,
    passes,
    workload,
)
from phaze_fast.wafer.mapping.placement import Placement

Times = dict[int, dict[tuple[int, ...], list[float]]]
"""Per operator and local shape: seconds of the forward pass, of the backward pass and of the weight
gradient; live bytes."""


@lru_cache(maxsize=16)
def priced_times(chip: str, model: str, seq: int) -> Times:
    """Return the cache of prices on one die; callers add to it."""
    del chip, model, seq  # the cache key
    return {}


class PriceTable(NamedTuple):
    """Prices of operators on one die: a row per operator, a column per split of `combinations`."""

    forward_s: Array
    backward_s: Array
    stash_bytes: Array
    """Bytes of the output that are stored for the backward pass."""
    live_bytes: Array
    """Bytes of inputs and outputs while the operator runs, without weights."""
    parameters: Array
    """Number of parameters that a die works with."""
    weight_grad_s: Array
    """The part of `backward_s` spent on weight gradients."""

    @classmethod
    def zeros(cls, operators: int, splits: int) -> PriceTable:
        """Return a table of zeros."""
        return cls(*(np.zeros((operators, splits)) for _ in cls._fields))

    def columns(self) -> dict[str, Array]:
        """Return each field by name as a flat array for the kernel."""
        return {name: table.reshape(-1) for name, table in self._asdict().items()}


class LeastWork(NamedTuple):
    """Seconds of a micro-batch with each operator at its fastest split."""

    before_s: float
    block_s: float
    behind_s: float
    weight_share: float
    """Largest share of the weight gradient in any operator's time, over all splits."""


def alike(operators: Sequence[MeshOperator]) -> list[int]:
    """Return for each operator the first one of the same kind and size, which costs the same."""
    first: dict[object, int] = {}
    representatives = []
    for i, op in enumerate(operators):
        bare = replace(op.spec, name="", inputs=())
        key = (bare, op.seq_rows, op.units, op.inner_units)
        representatives.append(first.setdefault(key, i))
    return representatives


@lru_cache(maxsize=512)
def combinations(dies: int) -> tuple[Array, Array, Array]:
    """Return the divisors of `dies`, the column of each split, and the (B, M, N, K) splits."""
    parts = divisors(dies)
    column = np.full(len(parts) ** 4, -1, dtype=np.int32)
    splits: list[tuple[int, ...]] = []
    for at, factors in enumerate(product(parts, repeat=4)):
        if dies % math.prod(factors) == 0:
            column[at] = len(splits)
            splits.append(factors)
    return np.array(parts, dtype=np.int32), column, np.array(splits)


def combination(dies: int, factors: tuple[int, ...]) -> int:
    """Return the table column of a split into (B, M, N, K) parts."""
    parts, column, _ = combinations(dies)
    at = 0
    for factor in factors:
        at = at * len(parts) + int(np.searchsorted(parts, factor))
    return int(column[at])


def network_chip(wafer: Wafer) -> Accelerator:
    """Return the die for pricing products: its shared buffer has the rate of the die's network.

    Examples
    --------
    >>> from phaze_fast.wafer import load_wafer
    >>> chip = network_chip(load_wafer("dojo-tile-like"))
    >>> chip.buffer_bandwidth_bytes_per_s / 1e12
    10.0
    """
    rate, chip = wafer.die.network_bytes_per_s, wafer.chip
    if rate is None:
        return chip
    cycles = min(rate / chip.clock_hz, chip.buffer.bytes_per_cycle)
    return chip.replace(buffer=chip.buffer.replace(bytes_per_cycle=cycles))


def operator_costs(
    chip: Accelerator, network: Accelerator, specs: list[tuple[OperatorSpec, int]]
) -> tuple[Array, Array]:
    """Seconds, and joules without static power, of operators on one die.

    Products share their operands over the die's network; other operands stay in the cores' SRAM.

    Parameters
    ----------
    chip, network
        The die, and the die for pricing products; see `network_chip`.
    specs
        Operators, each with the number of shapes in its size arrays.
    """
    graph = loose("wafer", specs)
    costs = estimate_costs(graph, chip)
    seconds, joules = costs.time_s(0)[0], costs.dynamic_j(0)[0]
    if network != chip:
        shared = estimate_costs(graph, network)
        products = ["gemm" in s.kind or s.kind.startswith("attention") for s, _ in specs]
        over = np.repeat(products, [count for _, count in specs])
        seconds = np.where(over, shared.time_s(0)[0], seconds)
        joules = np.where(over, shared.dynamic_j(0)[0], joules)
    return seconds, joules


@dataclass(frozen=True)
class WaferTraining:
    """The training step on a wafer.

    Examples
    --------
    >>> WaferTraining(global_batch=64).optimizer
    'adam-bf16-grad'
    """

    global_batch: int = 512
    """Sequences of one training step."""
    seq: int | None = None
    """Sequence length in tokens; by default the model's."""
    optimizer: str = "adam-bf16-grad"
    """The optimiser, whose state takes memory; by default with ZeRO's 16 bytes per parameter."""

    def __post_init__(self) -> None:
        for name, value in (("global_batch", self.global_batch), ("seq", self.seq)):
            if value is not None and not (isinstance(value, int) and 1 <= value <= 2**24):
                raise not_accepted(name, value, "a whole number from 1 to 2^24")
        check_type("optimizer", self.optimizer, str, "a name")
        spec = optimizer(self.optimizer)
        if spec.vector_state_bytes is not None or spec.newton_schulz_steps is not None:
            raise not_accepted(
                "optimizer", self.optimizer, "one with as many bytes of state for every parameter"
            )


class Problem:
    """A model to be trained on a wafer; compiles an evaluator per layout.

    Parameters
    ----------
    model
        The model to train, or a preset's name.
    wafer
        The wafer to train on, or a preset's name.
    training
        Batch, sequence length and optimiser.
    recompute
        Whether the backward pass may recompute outputs.
    volume
        Whether the objective is communication volume: a collective costs the bytes that a die
        sends, and everything else is free.
    linear
        Whether dies are numbered row by row and assigned in that order, tensor-parallel splits
        innermost.
    capacity_bytes
        Usable local memory per die in bytes; by default all of it.
    overlap
        Whether activation collectives may overlap, in pieces, with the preceding or next product.
    work
        Operators to map; by default those of the model.

    Examples
    --------
    >>> problem = Problem("bertlarge", "dram-wafer")
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
        if loaded.lora is not None:
            raise not_accepted("model.lora", loaded.lora.rank, "none: wafers train all parameters")
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
        self._tables: dict[tuple[int, int], PriceTable] = {}
        self._graphs: dict[int, tuple[Array, Array]] = {}
        self._least: dict[tuple[int, int], LeastWork] = {}

    def variant(self, **rules: Any) -> Problem:
        """Return this problem with other `rules`; the rest have defaults, and prices are shared."""
        problem = Problem(self.model, self.wafer, self.training, work=self._given, **rules)
        problem._times = self._times
        if not problem.volume and not self.volume:
            problem._tables, problem._least = self._tables, self._least
        return problem

    def on(self, wafer: Wafer) -> Problem:
        """Return this problem on a wafer that differs only in faults; prices are shared."""
        problem = Problem(self.model, wafer, *self._inputs()[2:])
        problem._times, problem._tables, problem._least = self._times, self._tables, self._least
        return problem

    def _inputs(self) -> tuple[Any, ...]:
        rules = (self.recompute, self.volume, self.linear, self.capacity_bytes)
        return (self.model, self.wafer, self.training, *rules, self._given, self.overlap)

    def __reduce__(self) -> tuple[Any, ...]:
        return Problem, self._inputs()  # caches are not pickled

    @cached_property
    def digest(self) -> str:
        """Hash of the content, the same on every machine; empty if operators were given."""
        if self._given is not None:
            return ""
        model, wafer, training, *rules, _, overlap = self._inputs()
        return digest([model.digest(), wafer.digest(), asdict(training), *rules, overlap])

    @property
    def modes(self) -> tuple[str, ...]:
        """Weight modes that the wafer accepts, a subset of `WEIGHTS`."""
        return WEIGHTS if self.stream is not None else WEIGHTS[:4]

    def accepted_outputs(self, op: int) -> tuple[str, ...]:
        """Names of `OUTPUTS` that an operator accepts.

        Operators outside the blocks, and those whose output enters the next block, never recompute.
        """
        spec = self.work.operators[op]
        if spec.part != "block" or not spec.kept_bytes:
            return ("stash",)
        recompute = self.recompute and op not in self.work.entering
        allowed = {"stash": True, "recompute": recompute, "offload": self.stream is not None}
        return tuple(name for name in OUTPUTS if allowed[name])

    @property
    def weight_bytes(self) -> float:
        """Bytes per parameter as read by the forward and backward passes."""
        return float(optimizer(self.training.optimizer).weight_bytes)

    @property
    def gradient_bytes(self) -> float:
        """Bytes of the gradient per parameter."""
        return float(optimizer(self.training.optimizer).gradient_bytes)

    def parameters(self, op: int, dies: int, micro_batch: int, parts: dict[str, int]) -> float:
        """Parameters of one operator that a die works with, split into `parts` over `dies`."""
        column = combination(dies, tuple(parts[role] for role in ROLES[:4]))
        return float(self.price_table(dies, micro_batch).parameters[op, column])

    # ---- prices of local operators ----

    def _price(self, wanted: dict[int, list[tuple[int, ...]]]) -> None:
        """Price local shapes of operators: the forward pass, and the sum of all gradients."""
        specs: list[tuple[OperatorSpec, int]] = []
        priced: list[tuple[int, list[bool], Array]] = []
        for i, shapes in wanted.items():
            spec: Any = self.work.operators[i].parts(np.array(shapes))
            every = passes(spec)
            specs += [(p, len(shapes)) for p in every]
            weights = 2.0 * spec.k * spec.n * spec.b if spec.kind == "gemm" else 0.0
            of_weights = [p.kind == "gemm-weight-gradient" for p in every]
            priced.append((i, of_weights, spec.read_bytes + spec.write_bytes - weights))
        seconds = operator_costs(self.chip, self.network_chip, specs)[0]
        for i, of_weights, live in priced:
            mine, seconds = np.split(seconds, [len(of_weights) * len(live)])
            forward, *backward = runs = mine.reshape(len(of_weights), -1)
            own = sum((s for s, w in zip(runs, of_weights, strict=True) if w), np.zeros(len(live)))
            values = np.stack([forward, sum(backward, np.zeros(len(live))), own, live], axis=1)
            self._times.setdefault(i, {}).update(zip(wanted[i], values.tolist(), strict=True))

    @cached_property
    def network_chip(self) -> Accelerator:
        """The die for pricing products: its buffer has the bandwidth of the die's network."""
        return network_chip(self.wafer)

    def price_table(self, dies: int, micro_batch: int) -> PriceTable:
        """Return times, stashed and live bytes and parameters per operator and split."""
        key = (dies, micro_batch)
        if key not in self._tables:
            splits = self._splits(dies, micro_batch)
            self._tables[key] = self._filled_table(key, splits)
        return self._tables[key]

    def _splits(
        self, dies: int, micro_batch: int
    ) -> dict[int, tuple[Array, Array, list[tuple[int, ...]]]]:
        """Return accepted table columns, local sizes and shapes by operator; price the shapes."""
        parts = combinations(dies)[2]
        splits: dict[int, tuple[Array, Array, list[tuple[int, ...]]]] = {}
        unpriced: dict[int, list[tuple[int, ...]]] = {}
        for i in set(self._alike):
            op, known = self.work.operators[i], self._times.get(i, {})
            sizes = np.array([op.limit(role, micro_batch) for role in ROLES[:4]])
            allowed = np.array([role in op.roles for role in ROLES[:4]])
            accepted = np.flatnonzero(((parts == 1) | (allowed & (parts <= sizes))).all(axis=1))
            local = -(-np.maximum(sizes, 1) // parts[accepted])
            shapes = list(map(tuple, op.shapes(local).tolist()))
            splits[i] = (accepted, local, shapes)
            missing = [shape for shape in dict.fromkeys(shapes) if shape not in known]
            if missing:
                unpriced[i] = missing
        if unpriced:
            self._price(unpriced)
        return splits

    def _filled_table(
        self, key: tuple[int, int], splits: dict[int, tuple[Array, Array, list[tuple[int, ...]]]]
    ) -> PriceTable:
        operators = self.work.operators
        table = PriceTable.zeros(len(operators), len(combinations(key[0])[2]))
        values = {
            i: np.array([self._times[i][shape] for shape in shapes])
            for i, (_, _, shapes) in splits.items()
        }
        least = dict.fromkeys(PARTS, 0.0)
        weight_share = 0.0
        for i, op in enumerate(operators):
            accepted, local, _ = splits[self._alike[i]]
            forward, backward, of_weights, live = values[self._alike[i]].T
            if not self.volume:
                table.forward_s[i, accepted], table.backward_s[i, accepted] = forward, backward
                table.weight_grad_s[i, accepted] = of_weights
                least[op.part] += float((forward + backward).min())
                share = float((of_weights / (forward + backward)).max())
                weight_share = max(weight_share, share)
            local_share = local[:, 0] * (local[:, 1] / op.seq_rows) * (local[:, 2] / op.units)
            table.stash_bytes[i, accepted] = op.kept_bytes * local_share
            table.live_bytes[i, accepted] = live
            inner = local[:, 3] / op.inner_units if op.inner_units else 1.0
            experts = local[:, 1] / op.seq_rows if op.expert else 1.0
            parameters = op.parameters * (local[:, 2] / op.units) * inner * experts
            table.parameters[i, accepted] = parameters
        self._least[key] = LeastWork(least["before"], least["block"], least["behind"], weight_share)
        return table

    def least_work(self, layout: Layout) -> LeastWork:
        """Seconds of a micro-batch with each operator at its fastest split."""
        self.price_table(layout.dies, layout.micro_batch)
        return self._least[layout.dies, layout.micro_batch]

    # ---- the compiled problem ----

    def _graph(self, micro_batch: int) -> tuple[Array, Array]:
        """Operators and edges of one micro-batch as the kernel's records, cached."""
        if micro_batch not in self._graphs:
            self._graphs[micro_batch] = (self._ops(micro_batch), self._edges(micro_batch))
        return self._graphs[micro_batch]

    def _ops(self, micro_batch: int) -> Array:
        records = np.zeros(len(self.work.operators), dtype=_core.MAP_OP_DTYPE)
        for i, (op, record) in enumerate(zip(self.work.operators, records, strict=True)):
            record["part"] = PARTS.index(op.part)
            record["roles"] = sum(1 << ROLES.index(role) for role in op.roles)
            record["outputs"] = sum(1 << OUTPUTS.index(name) for name in self.accepted_outputs(i))
            record["product"] = op.product
            record["output_stored"] = op.output_kept
            record["expert"] = op.expert
            record["overlap"] = OVERLAPS.index(op.overlaps)
            record["limit"] = [op.limit(role, micro_batch) for role in ROLES[:4]]
            record["stat_bytes"] = op.stat_bytes * micro_batch
            record["gather_bytes"] = op.gather_bytes * micro_batch
        return records

    def _edges(self, micro_batch: int) -> Array:
        records = np.zeros(len(self.work.edges), dtype=_core.MAP_EDGE_DTYPE)
        for edge, record in zip(self.work.edges, records, strict=True):
            record["from"], record["to"] = edge.source, edge.target
            record["kind"] = EDGE_KINDS.index(edge.kind)
            record["again"] = edge.again
            record["bytes"] = edge.bytes * micro_batch
        return records

    def rules(self, placement: Placement) -> Array:
        """Return one record of `MAP_RULES_DTYPE` for the stages of a pipeline."""
        spec, wafer = optimizer(self.training.optimizer), self.wafer
        layout, links = placement.layout, placement.links()
        hbm, sram_rate = self.chip.hbm, self.chip.buffer_bandwidth_bytes_per_s
        # Weights and state are read and written once, gradients are only read.
        moved = 2.0 * (spec.weight_bytes + spec.state_bytes) + spec.gradient_bytes
        values = {
            "x_bytes_per_s": links.x_bytes_per_s or 1.0,  # layouts never use a missing link
            "y_bytes_per_s": links.y_bytes_per_s or 1.0,
            "hop_s": links.hop_s,
            "capacity_bytes": self.capacity_bytes,
            "memory_bytes_per_s": hbm.bandwidth_bytes_per_s if hbm else sram_rate,
            "weight_bytes": spec.weight_bytes,
            "gradient_bytes": spec.gradient_bytes,
            "state_bytes": spec.state_bytes,
            "step_bytes": 0.0 if self.volume else moved,
            "boundary_bytes": self.work.boundary_bytes * layout.micro_batch,
            "micro_batches": self.batches(layout),
            "modes": (1 << len(self.modes)) - 1,
            "volume": self.volume,
            "linear": self.linear,
            "stream_shared": wafer.off_wafer is not None and not wafer.off_wafer.duplex,
            "chunks": layout.chunks,
            "zero_bubble": layout.schedule == "zb-h1",
            "fabric": links.fabric,
            "pieces": PIECES if self.overlap and not self.volume else 1,
            "outer_tail_s": self.outer_tail_s(layout),
            **placement.stream_shares(self.stream, links=not self.volume),
        }
        record = np.zeros(1, dtype=_core.MAP_RULES_DTYPE)
        for name, value in values.items():
            record[name] = value
        return record

    def boundary_s(self, placement: Placement) -> Array:
        """Seconds per byte of a tensor between blocks that each stage takes for all its sends."""
        layout = placement.layout
        last = layout.stages - 1
        if self.volume:
            both = 2 * layout.chunks if last else 2
            sent = [both - (k == 0) - (k == last) for k in range(last + 1)]
            return np.array(sent) / layout.dies
        size = self.work.boundary_bytes * layout.micro_batch
        return np.array([rate_s + fixed_s / size for rate_s, fixed_s in placement.sends()])

    def batches(self, layout: Layout) -> int:
        """Micro-batches per pipeline and step; the last one is padded if necessary."""
        return -(-self.training.global_batch // layout.replicas // layout.micro_batch)

    def outer_tail_s(self, layout: Layout) -> float:
        """Seconds that replicas take to sum their gradients in a ring over the wafers' I/O.

        Each wafer first sums the gradients of its own dies; the wafer with most parameters
        determines the time.
        """
        io, counts = self.wafer.io, dict.fromkeys(PARTS, 0)
        if layout.replicas == 1 or self.volume or io is None:
            return 0.0
        for op in self.work.operators:
            counts[op.part] += op.parameters
        here, blocks, replicas = stages_on(self.wafer, layout), self.blocks(layout), layout.replicas
        starts = range(0, layout.stages, here)
        by_wafer = [counts["block"] * sum(blocks[k : k + here]) for k in starts]
        by_wafer[0] += counts["before"]
        by_wafer[-1] += counts["behind"]
        share_s = max(by_wafer) * self.gradient_bytes / replicas / io.bandwidth_bytes_per_s
        return 2.0 * (replicas - 1) * (share_s + io.latency_s)

    def blocks(self, layout: Layout) -> tuple[int, ...]:
        """Blocks of each stage: those of the layout, by default an even split."""
        return layout.blocks or even_split(self.work.blocks, layout.stages)

    def layouts(self) -> Iterator[Layout]:
        """List every layout of the wafer."""
        every = layouts(self.wafer, self.work.blocks, self.training.global_batch, self.work.ends)
        return (layout for layout in every if layout.stages == 1 or not self.work.encodes)

    def fault(self, layout: Layout) -> str:
        """Return why the model cannot run in a layout; empty if it can."""
        if self.work.encodes and layout.stages > 1:
            return f"stages: {layout.stages} is not accepted for an encoder-decoder; expected 1"
        return layout_fault(self.wafer, self.work.blocks, self.training.global_batch, layout)

    def mapping(self, layout: Layout) -> _core.Mapping:
        """Compile the evaluator of one layout; each operator starts at its first legal mapping.

        Raises
        ------
        InvalidInputError
            If the layout is not accepted, or some operator cannot be split over a stage's dies.
        """
        if fault := self.fault(layout):
            raise InvalidInputError(fault)
        placement = Placement(self.wafer, layout)
        streams = self.stream is not None and not self.volume
        cross_stage_s = placement.cross_stage_s if streams else None
        parts, column, _ = combinations(layout.dies)
        runs = [tuple(run) for run in slots_of(layout.width, layout.height)]
        ops, edges = self._graph(layout.micro_batch)
        mapping = _core.Mapping(
            slots=np.array(runs, dtype=_core.MESH_RUN_DTYPE),
            ops=ops,
            edges=edges,
            rules=self.rules(placement),
            divisors=parts,
            column=column,
            **self.price_table(layout.dies, layout.micro_batch).columns(),
            blocks=np.array(self.blocks(layout), dtype=np.int32),
            boundary_s=np.ascontiguousarray(self.boundary_s(placement)),
            chain=np.array(self.work.chain, dtype=np.int32),
            cross_stage_s=None if cross_stage_s is None else cross_stage_s.reshape(-1),
        )
        first = [mapping.choices(i)[:1] for i in range(len(self.work.operators))]
        stuck = (op for op, some in zip(self.work.operators, first, strict=True) if not len(some))
        if (op := next(stuck, None)) is not None:
            raise InvalidInputError(
                f"layout: {layout.width} x {layout.height} dies are not accepted with a "
                f"micro-batch of {layout.micro_batch}; {op.name} cannot be split over them"
            )
        mapping.assign(np.concatenate(first))
        return mapping
