"""What a step takes by a plan that is given: one plan in full, or arrays of many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np

from phaze_fast import _core
from phaze_fast.errors import InvalidInputError, InvalidTypeError
from phaze_fast.hardware import Cluster
from phaze_fast.memory import SCHEDULES
from phaze_fast.models import Model, load
from phaze_fast.opgraph import CONTEXT_KINDS, Strategy, reasons
from phaze_fast.planning.batch_rules import BAD_STRATEGY, SCHEDULE_CODES, statuses
from phaze_fast.planning.columns import coded, distinct, recompute_words, whole
from phaze_fast.planning.evaluator import Placed, PlanEvaluator
from phaze_fast.planning.plan_spec import PlanSpec
from phaze_fast.planning.plans import Plan
from phaze_fast.planning.recompute import RECOMPUTE, modes_in, recompute_code
from phaze_fast.planning.sizes import StrategySizes, strategy_sizes
from phaze_fast.planning.times import KindTimes, free_times_on_chip, memory_of
from phaze_fast.planning.training import RANK_ORDERS, Training, expert_fields
from phaze_fast.schedule import ScheduleCache
from phaze_fast.software import Software, planned_model
from phaze_fast.tables import Table
from phaze_fast.threads import thread_count

__all__ = ["Predictions", "evaluated", "predict", "predict_batch"]

Array = np.ndarray[Any, Any]


def _checked_model(model: Model | str, software: Software) -> Model:
    found = load(model) if isinstance(model, str) else model
    if not isinstance(found, Model):
        raise InvalidTypeError(
            f"model: {type(model).__name__} is not accepted; expected a TransformerModel or a name"
        )
    return planned_model(found, software)


def _layout(spec: PlanSpec) -> Array:
    row: Array = np.zeros(1, dtype=_core.LAYOUT_DTYPE)
    row["schedule"] = SCHEDULES.index(spec.schedule)
    row["stages"], row["vpp"], row["zero"] = spec.pp, spec.vpp, spec.zero
    row["rank_order"] = RANK_ORDERS.index(spec.rank_order)
    row["dp"] = spec.dp
    row["shard"] = 0 if spec.shard == spec.dp else spec.shard or 0
    row["micro_batches"] = spec.global_batch // (spec.dp * spec.micro_batch)
    return row


@lru_cache(maxsize=256)
def _evaluator(model: Model, cluster: Cluster, spec: PlanSpec) -> PlanEvaluator:
    """Prepare the evaluator of one plan; kept for the next call."""
    if spec.devices > cluster.devices or (spec.devices < cluster.devices and not spec.idle):
        raise InvalidInputError(
            f"tp x pp x dp x cp: {spec.tp} x {spec.pp} x {spec.dp} x {spec.cp} = {spec.devices} is "
            f"not accepted; expected the cluster's {cluster.devices} devices"
        )
    strategy = spec.strategy
    broken = reasons(model, strategy)
    if broken:
        raise InvalidInputError(f"{model.name}: {broken[0]}")
    training = Training(
        global_batch=spec.global_batch,
        seq=spec.seq,
        optimizer=spec.optimizer,
        sequence_parallel=spec.sequence_parallel,
        reserved_bytes=spec.reserved_bytes,
        software=spec.software,
        precision=spec.precision,
    )
    stride = strategy.tp * strategy.cp
    if spec.rank_order == "stages-inside":
        stride *= spec.pp
    apart = stride if spec.ep > 1 else 0
    sizes = strategy_sizes(model, strategy, spec.modes, apart, spec.software, spec.precision)
    capacity = float(memory_of(cluster.chip).capacity_bytes)
    return PlanEvaluator(model, cluster, training, [capacity], ([sizes], _layout(spec)))


def _partition(spec: PlanSpec, evaluator: PlanEvaluator, times: KindTimes) -> Placed:
    """Where the stages of a given plan begin, and what each recomputes."""
    sizes = evaluator.sizes[0]
    one = isinstance(spec.recompute, str) and spec.recompute != "auto"
    variant = recompute_code(str(spec.recompute), sizes.variant_of) if one else -1
    room = float(max(evaluator.rooms[0], 0.0))
    code, cuts, variants = evaluator.space.even_partition(times, 0, variant, room)
    layers = len(sizes.graph.order)
    if spec.stages is not None:
        if sum(spec.stages) != layers:
            raise InvalidInputError(
                f"stages: {' + '.join(map(str, spec.stages))} = {sum(spec.stages)} layers; "
                f"expected the {layers} of {evaluator.model.name}, embedding and head counted"
            )
        cuts = np.array([0, *accumulate(spec.stages)], dtype=np.int32)
        variants = np.full(spec.pp, max(variant, 0), dtype=np.int32)
    elif code:
        said = _core.PLAN_STATUS_SENTENCES[code]
        raise InvalidInputError(
            f"pp, vpp: {spec.pp} x {spec.vpp} with {sizes.blocks} blocks is not accepted; {said}"
        )
    if isinstance(spec.recompute, tuple):
        codes = [recompute_code(word, sizes.variant_of) for word in spec.recompute]
        variants = np.array(codes, dtype=np.int32)
    elif spec.stages is not None and spec.recompute == "auto":
        variants = evaluator.space.recompute(times, 0, cuts, room)
    return Placed(0.0, 0.0, 0, tuple(cuts.tolist()), tuple(variants.tolist()))


def predict(
    model: Model | str,
    cluster: Cluster,
    plan: Plan | PlanSpec | Mapping[str, Any],
    cache: ScheduleCache | None = None,
) -> Plan:
    """Time a given plan; it is not refused for memory, `over_bytes` says how much it lacks.

    Parameters
    ----------
    model
        What is trained, or its name.
    cluster
        Devices with their chip and fabric.
    plan
        A plan that `phaze_fast.plan` found, a `PlanSpec`, or the fields of one; with stages as
        given, or else blocks dealt out evenly.
    cache
        Where layer schedules are looked up and kept.

    Raises
    ------
    InvalidInputError
        Where the widths do not multiply to the devices, do not divide batch or model, or a field is
        malformed; the message has the arithmetic.

    Examples
    --------
    >>> import phaze_fast as pf
    >>> cluster = pf.Cluster(devices=16, fabric="dgx-h100", chip="h100")
    >>> given = {"tp": 4, "pp": 2, "dp": 2, "micro_batch": 1, "global_batch": 32, "zero": 1}
    >>> predicted = predict("llama2-7b", cluster, given)
    >>> predicted.over_bytes, round(sum(predicted.parts_s.values()) / predicted.time_s, 9)
    (0.0, 1.0)
    """
    evaluator, times, placed = evaluated(model, cluster, plan, cache)
    return evaluator.plan(placed, times)


def evaluated(
    model: Model | str,
    cluster: Cluster,
    plan: Plan | PlanSpec | Mapping[str, Any],
    cache: ScheduleCache | None = None,
) -> tuple[PlanEvaluator, KindTimes, Placed]:
    """Give the evaluator of one plan, the times of its layers, and its partition; see `predict`."""
    spec = PlanSpec.of(plan)
    known = _checked_model(model, spec.software)
    memory_of(cluster.chip)
    evaluator = _evaluator(known, cluster, spec)
    times = evaluator.times(cluster, cache)
    return evaluator, times, _partition(spec, evaluator, times)


# ---- many plans at once ----


@dataclass(frozen=True, eq=False)
class Predictions(Table):
    """What many plans take; read-only arrays of one length, in the order of the plans."""

    time_s: Array
    """Seconds of a step; NaN where there is no such plan."""
    memory_bytes: Array
    """Of the fullest device."""
    over_bytes: Array
    """Bytes that it lacks; 0 where the plan fits."""
    energy_j: Array
    parts_s: dict[str, Array]
    """Seconds by what they are spent on."""
    memory: dict[str, Array]
    """Bytes of the fullest device by term."""
    instant: Array
    """When that device holds most, a position in `phaze_fast.memory.INSTANTS`."""
    status: Array
    """0 where the plan fits, 1 where it needs more memory than there is, else a code into
    `reasons`."""
    reasons: ClassVar[tuple[str, ...]] = _core.PLAN_STATUS_SENTENCES

    def __len__(self) -> int:
        return len(self.time_s)

    def headline(self) -> str:
        """Say how many of the plans fit."""
        return f"Predictions of which {(self.status == 0).sum():,} fit"

    def to_columns(self) -> dict[str, Any]:
        """Give the arrays by name, as `to_dict` does."""
        return dict(self.to_dict())

    def to_dict(self) -> dict[str, Array]:
        """Give the arrays by name, parts and terms as columns of their own."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        parts, memory = found.pop("parts_s"), found.pop("memory")
        found.update({f"{name}_s": array for name, array in parts.items()})
        found.update({f"{name}_bytes": array for name, array in memory.items()})
        return found


def predict_batch(
    model: Model | str,
    cluster: Cluster,
    training: Training,
    tp: Any = 1,
    pp: Any = 1,
    dp: Any = 1,
    micro_batch: Any = 1,
    zero: Any = 0,
    recompute: Any = "auto",
    schedule: Any = "1f1b",
    vpp: Any = 1,
    cp: Any = 1,
    ep: Any = 1,
    rank_order: Any = "replicas-inside",
    shard: Any = 0,
    cp_kind: Any = "all-gather",
    etp: Any = 0,
    threads: int | None = None,
) -> Predictions:
    """Time many plans in one call, each with blocks dealt out evenly; the GIL is released.

    Parameters
    ----------
    model
        What is trained, or its name.
    cluster
        Devices with their chip and fabric.
    training
        The step: batch, sequence, optimiser, reserved bytes, sequence parallelism. What it leaves
        free is of no account.
    tp, pp, dp, micro_batch, zero, vpp, cp, ep
        Whole numbers, or arrays of one length.
    recompute
        What all stages recompute, as in `PlanSpec`, or an array of such words.
    schedule
        Names as in `PlanSpec`, or an array of these.
    rank_order
        ``replicas-inside`` or ``stages-inside``, or an array of these.
    shard
        Neighbouring replicas that share what ZeRO shares; 0: all.
    etp
        Devices that share the matrices of each expert; 0: the tensor-parallel width.
    cp_kind
        Names of `phaze_fast.opgraph.CONTEXT_KINDS`, or an array of these.
    threads
        At most this many threads, by default all cores; the answer does not depend on it.

    Returns
    -------
    Predictions
        One row per plan. A plan that cannot be carries its reason as a status; nothing is raised
        for it.

    Raises
    ------
    InvalidInputError
        Where an argument as a whole is malformed.

    Examples
    --------
    >>> import phaze_fast as pf
    >>> cluster = pf.Cluster(devices=16, fabric="dgx-h100", chip="h100")
    >>> step = pf.Training(global_batch=64)
    >>> found = predict_batch("llama2-7b", cluster, step, tp=[1, 2, 4, 3],
    ...                       dp=[16, 8, 4, 5], zero=1)
    >>> found.status.tolist()
    [0, 0, 0, 3]
    """
    known = _checked_model(model, training.software)
    workers = thread_count(threads)
    words, mode = recompute_words(recompute)
    columns = {
        "t": whole("tp", tp, 1),
        "p": whole("pp", pp, 1),
        "d": whole("dp", dp, 1),
        "b": whole("micro_batch", micro_batch, 1),
        "zero": whole("zero", zero, 0),
        "v": whole("vpp", vpp, 1),
        "cp": whole("cp", cp, 1),
        "ep": whole("ep", ep, 1),
        "shard": whole("shard", shard, 0),
        "kind": coded("cp_kind", cp_kind, {n: k for k, n in enumerate(CONTEXT_KINDS)}),
        "own": whole("etp", etp, 0),
        "mode": mode,
        "schedule": coded("schedule", schedule, SCHEDULE_CODES),
        "order": coded("rank_order", rank_order, {n: k for k, n in enumerate(RANK_ORDERS)}),
    }
    try:
        rows = dict(zip(columns, np.broadcast_arrays(*columns.values()), strict=True))
    except ValueError:
        raise InvalidInputError("plans: expected scalars or arrays of one length") from None
    rows = {name: np.atleast_1d(array) for name, array in rows.items()}
    if rows["t"].ndim != 1:
        raise InvalidInputError("plans: expected scalars or one-dimensional arrays")
    return _predicted(known, cluster, training, words, rows, workers)


def _predicted(
    model: Model,
    cluster: Cluster,
    training: Training,
    words: Sequence[str],
    rows: Mapping[str, Array],
    threads: int,
) -> Predictions:
    modes = RECOMPUTE if "auto" in words[:1] else ()
    modes = tuple(dict.fromkeys([*modes, *modes_in(words[1:])])) or ("none",)
    status = statuses(rows, cluster.devices, training.global_batch)
    good = np.flatnonzero(status == 0)
    inside = (rows["order"] == 1) & (rows["ep"] > 1)
    apart = np.where(inside, rows["p"], 0)
    kind = np.where(rows["cp"] > 1, rows["kind"], 0)
    own = np.where(rows["own"] == rows["t"], 0, rows["own"])
    wide = [rows[name] for name in ("t", "cp", "ep", "b")]
    kinds, which = distinct([column[good] for column in (*wide, apart, kind, own)])
    sizes: list[StrategySizes] = []
    number = np.full(len(kinds), -1)
    for k, (t, cp, ep, b, stages, kind, own) in enumerate(kinds.tolist()):
        strategy = Strategy(
            tp=t,
            sequence_parallel=training.sequence_parallel and t > 1,
            cp=cp,
            cp_kind=CONTEXT_KINDS[kind],
            ep=ep,
            etp=own or None,
            **({} if ep == 1 else expert_fields(training)),
            micro_batch=b,
            seq=training.seq,
        )
        if not reasons(model, strategy):
            number[k] = len(sizes)
            stride = t * cp * max(stages, 1) if ep > 1 else 0
            runs = (training.software, training.precision)
            sizes.append(strategy_sizes(model, strategy, modes, stride, *runs))
    strategy_of = number[which]
    status[good[strategy_of < 0]] = BAD_STRATEGY
    good, strategy_of = good[strategy_of >= 0], strategy_of[strategy_of >= 0]
    estimates: Array = np.zeros(len(status), dtype=_core.ESTIMATE_DTYPE)
    estimates["time_s"], estimates["status"] = np.nan, status
    room = float(memory_of(cluster.chip).capacity_bytes) - float(training.reserved_bytes)
    if len(good):
        order = np.argsort(strategy_of, kind="stable")
        some = {name: array[good][order] for name, array in rows.items()}
        layouts: Array = np.zeros(len(good), dtype=_core.LAYOUT_DTYPE)
        layouts["strategy"], layouts["schedule"] = strategy_of[order], some["schedule"]
        layouts["stages"], layouts["vpp"] = some["p"], some["v"]
        layouts["zero"], layouts["rank_order"] = some["zero"], some["order"]
        layouts["dp"], layouts["shard"] = some["d"], some["shard"]
        layouts["micro_batches"] = training.global_batch // (some["d"] * some["b"])
        evaluator = PlanEvaluator(model, cluster, training, [], (sizes, layouts))
        estimates[good[order]] = evaluator.estimate_even(
            evaluator.times(cluster, threads=threads),
            words[1:],
            some["mode"],
            max(room, 0.0),
            free_times_on_chip(sizes, cluster, evaluator.optimizer, threads=threads),
            threads,
        )
    return _read(estimates, room)


def _read(estimates: Array, room: float) -> Predictions:
    def column(values: Array) -> Array:
        made = np.ascontiguousarray(values)
        made.setflags(write=False)
        return made

    parts, memory = estimates["parts"], estimates["memory"]
    lacking = np.maximum(0.0, estimates["memory_bytes"] - room)
    return Predictions(
        time_s=column(estimates["time_s"]),
        memory_bytes=column(estimates["memory_bytes"]),
        over_bytes=column(np.where(estimates["status"] == 1, lacking, 0.0)),
        energy_j=column(estimates["energy_j"]),
        parts_s={name.removesuffix("_s"): column(parts[name]) for name in parts.dtype.names or ()},
        memory={name: column(memory[name]) for name in memory.dtype.names or ()},
        instant=column(estimates["instant"]),
        status=column(estimates["status"]),
    )
