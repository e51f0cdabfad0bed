"""Memory of the stages of pipeline plans by term, in bytes, under an optimiser.

A row describes one stage of one plan; `footprint_batch` evaluates whole grids of rows in one call.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import BeforeValidator, model_validator

from phaze_fast import _core
from phaze_fast.errors import InvalidInputError, InvalidTypeError
from phaze_fast.memory.optimizer import Optimizer, optimizer
from phaze_fast.models import TransformerModel
from phaze_fast.opgraph import Layer, LayerGraph, context_widths
from phaze_fast.records import Count, Record
from phaze_fast.software import FRAGMENTATION
from phaze_fast.tables import Array
from phaze_fast.units import format_bytes

SCHEDULES: tuple[str, ...] = _core.PIPELINE_SCHEDULES
"""Names of pipeline schedules; the position is the code that the kernels use."""
SCHEDULE_ALIASES: dict[str, str] = {"zero-bubble": "zb-h1"}
"""Other names of schedules: ``zero-bubble`` means ZB-H1."""
SCHEDULE_CODES: dict[str, int] = {name: code for code, name in enumerate(SCHEDULES)}
SCHEDULE_CODES |= {name: SCHEDULE_CODES[own] for name, own in SCHEDULE_ALIASES.items()}
"""Codes of schedules by name, aliases included."""
TWO_CHUNKS = tuple(name for name, two in zip(SCHEDULES, _core.HAS_TWO_CHUNKS, strict=True) if two)
"""Schedules with two chunks per stage. With zb-v and dualpipe-v the model is folded into a V; with
dualpipe, which holds every stage twice, the chunks come from both ends of the model."""


def places(schedule: str, stages: int, vpp: int) -> int:
    """Count the chunks that a model is split into.

    Examples
    --------
    >>> places("dualpipe-v", 4, 2), places("dualpipe", 4, 2)
    (8, 4)
    """
    return stages if schedule == "dualpipe" else stages * vpp


def _schedule_name(value: Any) -> Any:
    return SCHEDULE_ALIASES.get(value, value) if isinstance(value, str) else value


ScheduleName = Annotated[Literal[SCHEDULES], BeforeValidator(_schedule_name)]  # type: ignore[valid-type]
"""Field type of schedule names."""
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

STAGE_DTYPE = np.dtype(
    [
        ("parameters", "f8"),  # on this device
        ("expert_parameters", "f8"),  # those of `parameters` that are in experts
        ("ep", "f8"),  # replicas that have different experts (`Strategy.expert_spread`); 0 = 1
        ("largest_layer", "f8"),  # parameters of the largest single layer on this device
        ("largest_trained", "f8"),  # trained parameters of the layer that has most of them
        ("stash_bytes", "f8"),  # activations of one micro-batch, all layers of the stage
        ("live_bytes", "f8"),  # activations of one layer while it is recomputed
        ("head_bytes", "f8"),  # activations of the head, on the last stage
        ("buffer_bytes", "f8"),  # buffers of collectives and of messages between stages
        ("weight_bytes", "f8"),  # bytes per parameter, like the next two
        ("gradient_bytes", "f8"),
        ("state_bytes", "f8"),
        ("gather_bytes", "f8"),  # bytes of a sharded weight while it is gathered
        ("copy_bytes", "f8"),  # copies of weights in a smaller format, all layers together
        ("last_parameters", "f8"),  # of the layers after the blocks
        ("first_parameters", "f8"),  # of the first block and the layers before it
        ("first_experts", "f8"),  # those of `first_parameters` that are in experts
        ("first_stash_bytes", "f8"),  # activations of the same layers, one micro-batch
        ("dp", "i8"),
        ("zero", "i4"),
        ("schedule", "i4"),
        ("stages", "i4"),
        ("stage", "i4"),
        ("micro_batches", "i4"),
        ("vpp", "i4"),
        ("late_gradients", "i4"),  # 1: gradients are allocated by their layer's first backward pass
        ("frozen_parameters", "f8"),  # without gradients and optimiser state
        ("frozen_experts", "f8"),  # those of `frozen_parameters` that are in experts
        ("packed_parameters", "f8"),  # frozen parameters in a smaller format, and their bytes
        ("packed_bytes", "f8"),
        ("more_state_bytes", "f8"),  # of the optimiser, on top of state_bytes per trained parameter
    ]
)
TERMS_DTYPE = np.dtype([*((term, "f8") for term in (*TERMS, "total")), ("instant", "i8")])
INSTANTS = ("loss", "backward", "first layer backward", "step")
"""Instants at which memory may peak: the end of the last forward pass in flight, with the loss on
the last stage; while the last layer runs backward; while the first layer runs the backward pass of
the first micro-batch; when all gradients are allocated."""


def check_chunks(schedule: str, vpp: int) -> None:
    """Check the number of chunks per stage against a schedule.

    Raises
    ------
    ValueError
        Where the schedule does not allow that number.
    """
    if not _core.takes_chunks(SCHEDULE_CODES[schedule], vpp):
        takes = "2" if schedule in TWO_CHUNKS else "2 or more" if schedule == "interleaved" else "1"
        raise ValueError(
            f"vpp: {vpp} is not accepted with {schedule}; {schedule} takes {takes} chunks a stage"
        )


class Pipeline(Record):
    """A pipeline: stages, micro-batches, schedule and replicas."""

    what: ClassVar[str] = "pipeline"
    pp: Count = 1
    """Pipeline stages."""
    micro_batches: Count = 1
    """Micro-batches of a replica in one step."""
    schedule: ScheduleName = "1f1b"
    """Order of forward and backward passes."""
    vpp: Count = 1
    """Chunks of layers per stage: 2 or more where interleaved, 2 by zb-v, dualpipe and dualpipe-v,
    else 1."""
    dp: Count = 1
    """Number of replicas."""
    zero: Literal[0, 1, 2, 3] = 0
    """What replicas shard: nothing (0), optimiser state (1), also gradients (2) and weights (3)."""

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
        """Sum of all terms, bytes."""
        return sum(self.terms.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{t} {format_bytes(v)}" for t, v in self.terms.items() if v)
        return f"{format_bytes(self.total)}: {parts}"


def _stage_layers(graph: LayerGraph, pp: int, stage: int) -> list[Layer]:
    """List the blocks of one stage of an even partition."""
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
    stash_by_kind = {layer.kind: layer.forward.stashed_bytes(again) for layer in layers}
    whole = {layer.kind: layer.forward.stashed_bytes() for layer in layers}
    stash = float(sum(stash_by_kind[layer.kind] for layer in layers))
    first, last = stage == 0, stage == pipeline.pp - 1
    resident = list(layers)
    if first and embedding is not None:
        stash += embedding.forward.stashed_bytes()
        resident.append(embedding)
    if last and head is not None:
        resident.append(head)
    row = np.zeros(1, dtype=STAGE_DTYPE)
    _add_parameters(row, resident, spec)
    if last and head is not None and not first:  # the head's copy of the tied embedding
        row["parameters"] += graph.copied_parameters
        row["frozen_parameters"] += graph.copied_frozen
        row["more_state_bytes"] += copied_state_bytes(graph, spec)
    row["ep"] = strategy.expert_spread
    row["largest_layer"] = max(layer.device_parameters for layer in layers)
    row["largest_trained"] = max(
        layer.device_parameters - layer.frozen_parameters for layer in layers
    )
    row["stash_bytes"] = stash
    work = {layer.kind: layer.work_bytes for layer in layers}
    row["live_bytes"] = max(
        whole[kind] - stash_by_kind[kind] + work[kind] for kind in stash_by_kind
    )
    row["head_bytes"] = head.forward.stashed_bytes() if last and head is not None else 0.0
    row["buffer_bytes"] = _buffers(graph, pipeline)
    row["weight_bytes"], row["gradient_bytes"] = spec.weight_bytes, spec.gradient_bytes
    row["state_bytes"], row["gather_bytes"] = spec.state_bytes, spec.gathered_bytes
    row["copy_bytes"] = sum(layer.copy_bytes for layer in layers)
    row["dp"], row["zero"] = pipeline.dp, pipeline.zero
    row["schedule"] = SCHEDULES.index(pipeline.schedule)
    row["stages"], row["stage"] = pipeline.pp, stage
    row["micro_batches"], row["vpp"] = pipeline.micro_batches, pipeline.vpp
    return row


def _add_parameters(row: Array, layers: Iterable[Layer], spec: Optimizer) -> None:
    """Add the parameters of layers to a row, and `more_state_bytes` of their optimiser state."""
    for layer in layers:
        row["parameters"] += layer.device_parameters
        row["expert_parameters"] += layer.expert_parameters
        row["frozen_parameters"] += layer.frozen_parameters
        row["frozen_experts"] += layer.frozen_experts
        row["packed_parameters"] += layer.packed_parameters
        row["packed_bytes"] += layer.packed_bytes
        row["more_state_bytes"] += layer_state_bytes(layer, spec)


def layer_state_bytes(layer: Layer, spec: Optimizer) -> float:
    """Return the bytes of a layer's optimiser state on top of `state_bytes` per parameter."""
    trained = layer.device_parameters - layer.frozen_parameters
    return spec.more_state_bytes(trained, layer.matrices, layer.kind in ("embedding", "head"))


def copied_state_bytes(graph: LayerGraph, spec: Optimizer) -> float:
    """Return `layer_state_bytes` of the last stage's copy of a tied embedding."""
    trained = graph.copied_parameters - graph.copied_frozen
    if not trained or not isinstance(graph.model, TransformerModel):
        return 0.0
    hidden = graph.model.hidden
    return spec.more_state_bytes(trained, ((1, trained // hidden, hidden),), table=True)


def _buffers(graph: LayerGraph, pipeline: Pipeline) -> float:
    """Sum the buffers of gathered rows, of context parallelism, and of messages."""
    strategy, share = graph.strategy, graph.message_bytes
    split = strategy.sequence_parallel and strategy.tp > 1
    whole = share * strategy.tp * split
    return whole + exchange_bytes(graph) + 2.0 * share * (pipeline.pp > 1)


def exchange_bytes(graph: LayerGraph) -> float:
    """Return the bytes of a layer's buffers for context parallelism, and for rows of experts.

    Context parallelism by all-gather buffers keys, values and their gradients; by a ring the blocks
    in use and those being received; by ulysses the send buffer; ring and ulysses mixed both.
    """
    s = graph.strategy
    if s.cp == 1 and s.dispatcher == "all-to-all":
        return 0.0
    groups = context_widths(s.cp_kind, s.cp)[1]
    whole = {"all-gather": 2.0, "ring": 4.0 / groups}.get(s.cp_kind, 1.0)
    times = {
        "context": whole,
        "context-heads": 1.0,
        "context-ring": 4.0 / groups,
        "expert-mesh": 1.0,
    }
    forward, total = [layer.forward for layer in graph.layers], 0.0
    for name, factor in times.items():
        total += factor * max(own.largest_payload(name) for own in forward)
    return total


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
    """Compute the bytes by term of many stages in one call.

    Parameters
    ----------
    rows
        One-dimensional array of ``STAGE_DTYPE``.

    Returns
    -------
    numpy.ndarray
        Read-only, ``TERMS_DTYPE``, one row per stage.

    Raises
    ------
    InvalidInputError
        Where `rows` has another dtype or shape, or an impossible value.

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
        received = rows.dtype if isinstance(rows, np.ndarray) else type(rows).__name__
        raise InvalidTypeError(
            f"rows: {received} is not accepted; expected an array of STAGE_DTYPE"
        )
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


def footprint(
    graph: LayerGraph,
    pipeline: Pipeline | None = None,
    stage: int = 0,
    recompute: str | Iterable[str] = "none",
    optimizer_name: str | Optimizer = "adam",
) -> Footprint:
    """Compute the bytes by term of one stage of one plan; arguments as `stage_row`.

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
