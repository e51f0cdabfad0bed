"""Bytes of every stage of a pipeline plan, by term, under an optimiser.

One stage of one plan is one row; `footprint_batch` evaluates whole grids of rows in one call.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import BeforeValidator, model_validator

from phaze_fast.errors import InvalidInputError, InvalidTypeError
from phaze_fast.memory.optimizer import Optimizer, optimizer
from phaze_fast.opgraph import GROUPS, Layer, LayerGraph
from phaze_fast.records import Count, Record
from phaze_fast.units import format_bytes

__all__ = [
    "FOLDED",
    "FRAGMENTATION",
    "INSTANTS",
    "SCHEDULES",
    "STAGE_DTYPE",
    "TERMS",
    "TERMS_DTYPE",
    "TWO_CHUNKS",
    "Footprint",
    "Pipeline",
    "ScheduleName",
    "check_chunks",
    "context_bytes",
    "footprint",
    "footprint_batch",
    "layouts_fit",
    "places",
    "stage_row",
    "stage_rows",
]

Array = np.ndarray[Any, Any]

SCHEDULES = (
    "1f1b",
    "gpipe",
    "interleaved",
    "zb-h1",
    "zb-h2",
    "zb-v",
    "dualpipe",
    "dualpipe-v",
)
"""Orders of forward and backward passes; the position is the code that the kernels use."""
FOLDED = ("zb-v", "dualpipe-v")
"""Schedules with two chunks a stage, the model folded into a V."""
TWO_CHUNKS = (*FOLDED, "dualpipe")
"""Schedules with two chunks a stage; by DualPipe these are the two ends of the model, which is held
twice."""


def places(schedule: str, stages: int, vpp: int) -> int:
    """Chunks that a model is cut into.

    Examples
    --------
    >>> places("dualpipe-v", 4, 2), places("dualpipe", 4, 2)
    (8, 4)
    """
    return stages if schedule == "dualpipe" else stages * vpp


def _schedule_name(value: Any) -> Any:
    """Take the name that ZB-H1 had before there were others."""
    return "zb-h1" if value == "zero-bubble" else value


ScheduleName = Annotated[
    Literal["1f1b", "gpipe", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe", "dualpipe-v"],
    BeforeValidator(_schedule_name),
]
TERMS = (
    "weights",
    "gradients",
    "optimizer",
    "activations",
    "recompute",
    "logits",
    "communication",
    "fragmentation",
)
FRAGMENTATION = 0.03
"""Share of everything but weights, gradients and optimiser state that an allocator loses between
blocks. An allowance, not a fit: caching allocators report a few percent."""

STAGE_DTYPE = np.dtype(
    [
        ("parameters", "f8"),  # on this device
        ("expert_parameters", "f8"),  # of those, in experts that few replicas share
        ("ep", "i8"),  # replicas an expert is spread over; 0 = 1
        ("largest_layer", "f8"),  # parameters of the largest single layer on this device
        ("stash_bytes", "f8"),  # kept per micro-batch by all layers of the stage
        ("live_bytes", "f8"),  # of one layer while it is recomputed
        ("head_bytes", "f8"),  # kept by the head, on the last stage
        ("buffer_bytes", "f8"),  # of collectives and of messages between stages
        ("weight_bytes", "f8"),  # per parameter, as the two below
        ("gradient_bytes", "f8"),
        ("state_bytes", "f8"),
        ("copy_bytes", "f8"),  # of weights in a smaller format, all layers together
        ("last_parameters", "f8"),  # of what stands after the blocks
        ("first_parameters", "f8"),  # of the first block and what stands before it
        ("first_experts", "f8"),  # of those, in experts
        ("first_stash_bytes", "f8"),  # that these keep
        ("dp", "i8"),
        ("zero", "i4"),
        ("schedule", "i4"),
        ("stages", "i4"),
        ("stage", "i4"),
        ("micro_batches", "i4"),
        ("vpp", "i4"),
        ("late_gradients", "i4"),  # 1: gradients come with their layer's first backward pass
    ]
)
TERMS_DTYPE = np.dtype([*((term, "f8") for term in (*TERMS, "total")), ("instant", "i8")])
INSTANTS = ("loss", "backward", "first layer backward", "step")
"""When a device holds most: as the last forward pass in flight ends, with the loss where there is
one; as the last layer runs backward; as the first layer of the first micro-batch does; as all
gradients are there."""


def check_chunks(schedule: str, vpp: int) -> None:
    """Check the number of chunks per stage that a schedule is given.

    Raises
    ------
    ValueError
        Where the schedule has another one.
    """
    if schedule in TWO_CHUNKS:
        good, takes = vpp == 2, "2"
    else:
        good, takes = (vpp > 1) == (schedule == "interleaved"), "1"
    if schedule == "interleaved":
        takes = "2 or more"
    if not good:
        raise ValueError(
            f"vpp: {vpp} is not accepted with {schedule}; {schedule} takes {takes} chunks a stage"
        )


class Pipeline(Record):
    """How a model's layers and micro-batches pass through devices."""

    what: ClassVar[str] = "pipeline"
    pp: Count = 1
    """Pipeline stages."""
    micro_batches: Count = 1
    """Micro-batches a replica works through in one step."""
    schedule: ScheduleName = "1f1b"
    """Order of forward and backward passes."""
    vpp: Count = 1
    """Chunks of layers per stage: 2 or more where interleaved, 2 by zb-v, dualpipe and dualpipe-v,
    else 1."""
    dp: Count = 1
    """Replicas."""
    zero: Literal[0, 1, 2, 3] = 0
    """What replicas share: optimiser state (1), gradients (2), weights (3)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_chunks(self.schedule, self.vpp)
        return self


@dataclass(frozen=True)
class Footprint:
    """Bytes of one device by term."""

    terms: dict[str, float]

    @property
    def total(self) -> float:
        """All terms together, bytes."""
        return sum(self.terms.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{t} {format_bytes(v)}" for t, v in self.terms.items() if v)
        return f"{format_bytes(self.total)}: {parts}"


def _stage_layers(graph: LayerGraph, pp: int, stage: int) -> list[Layer]:
    """Layers of one stage when they are dealt out as evenly as they come."""
    if not 0 <= stage < pp:
        raise InvalidInputError(f"stage: {stage} is not accepted; expected 0 to {pp - 1}")
    blocks = [i for i in graph.order if graph.layers[i].kind not in ("embedding", "head")]
    if pp > len(blocks):
        raise InvalidInputError(
            f"pp: {pp} is not accepted; {graph.model.name} has {len(blocks)} blocks"
        )
    first, last = stage * len(blocks) // pp, (stage + 1) * len(blocks) // pp
    return [graph.layers[i] for i in blocks[first:last]]


def stage_row(
    graph: LayerGraph,
    pipeline: Pipeline,
    stage: int = 0,
    recompute: str | Iterable[str] = "none",
    optimizer_name: str | Optimizer = "adam",
) -> Array:
    """Describe one stage of one plan as a row for `footprint_batch`.

    Parameters
    ----------
    graph
        The layers of a model under a strategy.
    pipeline
        Stages, micro-batches, schedule, replicas.
    stage
        Which stage, 0 being the one with the embedding.
    recompute
        As `OpGraph.stashed_bytes` takes it.
    optimizer_name
        A name of `OPTIMIZERS`, or an `Optimizer`.
    """
    spec, strategy = optimizer(optimizer_name), graph.strategy
    again = recompute if isinstance(recompute, str) else frozenset(recompute)
    layers = _stage_layers(graph, pipeline.pp, stage)
    kinds = {layer.kind: layer for layer in graph.layers}
    embedding, head = kinds.get("embedding"), kinds.get("head")
    kept = {layer.kind: layer.forward.stashed_bytes(again) for layer in layers}
    whole = {layer.kind: layer.forward.stashed_bytes() for layer in layers}
    stash = float(sum(kept[layer.kind] for layer in layers))
    parameters = sum(layer.device_parameters for layer in layers)
    first, last = stage == 0, stage == pipeline.pp - 1
    if first and embedding is not None:
        stash += embedding.forward.stashed_bytes()
        parameters += embedding.device_parameters
    if last and head is not None:
        parameters += head.device_parameters
        if not first:
            parameters += graph.copied_parameters  # a copy of the first stage's table
    row = np.zeros(1, dtype=STAGE_DTYPE)
    row["parameters"] = parameters
    row["expert_parameters"] = sum(layer.expert_parameters for layer in layers)
    row["ep"] = strategy.expert_replicas
    row["largest_layer"] = max(layer.device_parameters for layer in layers)
    row["stash_bytes"] = stash
    work = {layer.kind: layer.work_bytes for layer in layers}
    row["live_bytes"] = max(whole[kind] - kept[kind] + work[kind] for kind in kept)
    row["head_bytes"] = head.forward.stashed_bytes() if last and head is not None else 0.0
    row["buffer_bytes"] = _buffers(graph, pipeline)
    row["weight_bytes"], row["gradient_bytes"] = spec.weight_bytes, spec.gradient_bytes
    row["state_bytes"] = spec.state_bytes
    row["copy_bytes"] = sum(layer.copy_bytes for layer in layers)
    row["dp"], row["zero"] = pipeline.dp, pipeline.zero
    row["schedule"] = SCHEDULES.index(pipeline.schedule)
    row["stages"], row["stage"] = pipeline.pp, stage
    row["micro_batches"], row["vpp"] = pipeline.micro_batches, pipeline.vpp
    return row


def _buffers(graph: LayerGraph, pipeline: Pipeline) -> float:
    """Count gathered rows, what context parallelism holds, and a message in and one out."""
    strategy, share = graph.strategy, graph.message_bytes
    split = strategy.sequence_parallel and strategy.tp > 1
    whole = share * strategy.tp * split
    return whole + context_bytes(graph) + 2.0 * share * (pipeline.pp > 1)


def context_bytes(graph: LayerGraph) -> float:
    """Bytes that a layer holds for a moment to attend to rows of other devices.

    Gathered keys and values, and their gradients; in a ring those at work and those that arrive;
    where rows are exchanged for heads, what is sent.
    """
    s, found = graph.strategy, 0.0
    if s.cp == 1:
        return found
    times = {"all-gather": 2.0, "ring": 4.0 / s.cp, "ulysses": 1.0}
    for layer in graph.layers:
        ops = layer.forward.ops[layer.forward.ops["group"] == GROUPS.index("context")]
        found = max(found, float(ops["payload_bytes"].max(initial=0.0)))
    return times[s.cp_kind] * found


def stage_rows(
    graph: LayerGraph,
    pipeline: Pipeline,
    recompute: str | Iterable[str] = "none",
    optimizer_name: str | Optimizer = "adam",
) -> Array:
    """Describe every stage of one plan, first to last."""
    return np.concatenate(
        [
            stage_row(graph, pipeline, stage, recompute, optimizer_name)
            for stage in range(pipeline.pp)
        ]
    )


def footprint_batch(rows: Array) -> Array:
    """Bytes by term of many stages in one call.

    Parameters
    ----------
    rows
        One-dimensional array of ``STAGE_DTYPE``.

    Returns
    -------
    numpy.ndarray
        Read-only, ``TERMS_DTYPE``, one row each.

    Raises
    ------
    InvalidInputError
        Where `rows` has another dtype or shape, or a value that no plan can have.

    Examples
    --------
    >>> from phaze_fast import models
    >>> from phaze_fast.opgraph import layer_graph
    >>> graph = layer_graph(models.load("gpt2-small"))
    >>> terms = footprint_batch(stage_rows(graph, Pipeline(pp=4, micro_batches=8)))
    >>> bool(terms["activations"][0] > terms["activations"][3])
    True
    """
    if not isinstance(rows, np.ndarray) or rows.dtype != STAGE_DTYPE:
        found = rows.dtype if isinstance(rows, np.ndarray) else type(rows).__name__
        raise InvalidTypeError(f"rows: {found} is not accepted; expected an array of STAGE_DTYPE")
    if rows.ndim != 1:
        raise InvalidInputError(f"rows: {rows.ndim} dimensions are not accepted; expected 1")
    for name in ("dp", "stages", "micro_batches", "vpp"):
        if rows.size and rows[name].min() < 1:
            raise InvalidInputError(
                f"rows.{name}: {rows[name].min()} is not accepted; expected >= 1"
            )
    for name, low, high in (("zero", 0, 3), ("schedule", 0, len(SCHEDULES) - 1)):
        if rows.size and not (low <= rows[name].min() and rows[name].max() <= high):
            raise InvalidInputError(f"rows.{name}: expected {low} to {high}")
    if rows.size and ((rows["stage"] < 0) | (rows["stage"] >= rows["stages"])).any():
        raise InvalidInputError("rows.stage: expected 0 to stages - 1")
    from phaze_fast.memory.kernel import fill

    out = np.zeros(len(rows), dtype=TERMS_DTYPE)
    fill(np.ascontiguousarray(rows), out, FRAGMENTATION)
    out.setflags(write=False)
    return out


def layouts_fit(
    layouts: Array,
    strategies: Array,
    sizes: Array,
    order: Array,
    training: Any,
    rooms: Array,
    fits: Array,
) -> None:
    """Mark the layouts of which some partition fits; see `phaze_fast.memory.kernel.layouts_fit`."""
    from phaze_fast.memory import kernel

    kernel.layouts_fit(layouts, strategies, sizes, order, training, rooms, fits)


def footprint(
    graph: LayerGraph,
    pipeline: Pipeline | None = None,
    stage: int = 0,
    recompute: str | Iterable[str] = "none",
    optimizer_name: str | Optimizer = "adam",
) -> Footprint:
    """Bytes by term of one stage of one plan; arguments as `stage_row`.

    Examples
    --------
    >>> from phaze_fast import models
    >>> from phaze_fast.opgraph import Strategy, layer_graph
    >>> graph = layer_graph(models.load("gpt3-175b"), Strategy(tp=8))
    >>> plan = Pipeline(pp=12, micro_batches=64)
    >>> footprint(graph, plan, recompute="full").total < footprint(graph, plan).total
    True
    """
    row = stage_row(graph, pipeline or Pipeline(), stage, recompute, optimizer_name)
    terms = footprint_batch(row)[0]
    return Footprint({term: float(terms[term]) for term in TERMS})
