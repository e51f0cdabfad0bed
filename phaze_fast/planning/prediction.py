"""Time and memory of given plans: one plan in full, or arrays of many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np

from phaze_fast import _core
from phaze_fast.errors import InvalidInputError, InvalidTypeError, nearest
from phaze_fast.hardware import Cluster
from phaze_fast.memory import SCHEDULE_CODES, SCHEDULES
from phaze_fast.models import Model
from phaze_fast.opgraph import DISPATCHERS, check_context_kind, context_code, context_kind
from phaze_fast.planning.evaluator import (
    ANY_LIMIT_BYTES,
    ESTIMATE_COLUMNS,
    ESTIMATE_PARTS,
    ESTIMATE_TERMS,
    Placed,
    PlanEvaluator,
    checked_model,
)
from phaze_fast.planning.plan_spec import PlanSpec
from phaze_fast.planning.plans import Plan
from phaze_fast.planning.sizes import StrategySizes, strategy_faults, strategy_sizes
from phaze_fast.planning.times import KindTimes, free_times_on_chip, memory_of
from phaze_fast.planning.training import (
    OVERLAPPING,
    RANK_ORDERS,
    RECOMPUTE,
    Training,
    TrainingStep,
    check_stage_recompute,
    modes_in,
    recompute_code,
)
from phaze_fast.schedule import ScheduleCache
from phaze_fast.tables import Array, Table
from phaze_fast.threads import thread_count

# ---- one plan ----


@lru_cache(maxsize=256)
def _evaluator(model: Model, cluster: Cluster, spec: PlanSpec) -> PlanEvaluator:
    """Prepare the evaluator of one plan; the latest are cached."""
    if spec.devices > cluster.devices or (spec.devices < cluster.devices and not spec.idle):
        raise InvalidInputError(
            f"tp x pp x dp x cp: {spec.tp} x {spec.pp} x {spec.dp} x {spec.cp} = {spec.devices} is "
            f"not accepted; expected the cluster's {cluster.devices} devices"
        )
    strategy = spec.strategy
    broken = strategy_faults(model, strategy, spec.software)
    if broken:
        raise InvalidInputError(f"{model.name}: {broken[0]}")
    training = Training(**{name: getattr(spec, name) for name in TrainingStep.model_fields})
    runs = (spec.software, spec.precision, spec.fusion)
    sizes = strategy_sizes(model, strategy, spec.modes, *runs)
    capacity = float(memory_of(cluster.chip).capacity_bytes)
    evaluator = PlanEvaluator(model, cluster, training, [capacity], ([sizes], spec.layout))
    # A given plan is estimated even if it does not fit.
    evaluator.fits = np.ones((len(spec.layout), 1), dtype=np.uint8)
    return evaluator


def _partition(spec: PlanSpec, evaluator: PlanEvaluator, times: KindTimes) -> Placed:
    """Find where the stages of a given plan begin, and what each recomputes."""
    sizes = evaluator.sizes[0]
    one = isinstance(spec.recompute, str) and spec.recompute != "auto"
    variant = recompute_code(str(spec.recompute), sizes.variant_of) if one else -1
    limit_bytes = float(max(evaluator.limits_bytes[0], 0.0))
    code, cuts, variants = evaluator.space.even_partition(times, 0, variant, limit_bytes)
    layers, stages = len(sizes.graph.order), spec.stages
    if stages is not None:
        if sum(stages) != layers:
            raise InvalidInputError(
                f"stages: {' + '.join(map(str, stages))} = {sum(stages)} layers; "
                f"expected the {layers} of {evaluator.model.name}, embedding and head counted"
            )
        cuts = np.array([0, *accumulate(stages)], dtype=np.int32)
        variants = np.full(spec.pp, max(variant, 0), dtype=np.int32)
    elif code:
        raise InvalidInputError(
            f"pp, vpp: {spec.pp} x {spec.vpp} with {sizes.blocks} blocks is not accepted; "
            f"{_core.PLAN_STATUS_SENTENCES[code]}"
        )
    if isinstance(spec.recompute, tuple):
        codes = [recompute_code(word, sizes.variant_of) for word in spec.recompute]
        variants = np.array(codes, dtype=np.int32)
    elif stages is not None and spec.recompute == "auto":
        variants = evaluator.space.recompute(times, 0, cuts, limit_bytes)
    return Placed(0.0, 0.0, 0, tuple(cuts.tolist()), tuple(variants.tolist()))


def predict(
    model: Model | str,
    cluster: Cluster,
    plan: Plan | PlanSpec | Mapping[str, Any],
    cache: ScheduleCache | None = None,
) -> Plan:
    """Predict a given plan; `over_bytes` is the missing memory where it does not fit.

    Parameters
    ----------
    model
        What is trained, or its name.
    cluster
        Devices with their chip and fabric.
    plan
        A `Plan`, a `PlanSpec`, or the fields of one; blocks are divided over stages as its
        software does, mostly evenly, where it does not give their layers.
    cache
        Cache of layer schedules.

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


def step_s(model: Model | str, cluster: Cluster, plan: PlanSpec | Mapping[str, Any]) -> float:
    """Predict only the seconds of a step, in half the time that `predict` takes.

    Examples
    --------
    >>> import phaze_fast as pf
    >>> cluster = pf.Cluster(devices=8, fabric="dgx-h100", chip="h100")
    >>> given = {"tp": 8, "global_batch": 8}
    >>> step_s("llama2-7b", cluster, given) == predict("llama2-7b", cluster, given).time_s
    True
    """
    evaluator, times, placed = evaluated(model, cluster, plan)
    own = times.at(slice(0, 1))
    estimate, _ = evaluator.space.estimate(own, placed.layout, *placed.arrays, ANY_LIMIT_BYTES, ())
    return float(estimate[0]["time_s"])


def evaluated(
    model: Model | str,
    cluster: Cluster,
    plan: Plan | PlanSpec | Mapping[str, Any],
    cache: ScheduleCache | None = None,
) -> tuple[PlanEvaluator, KindTimes, Placed]:
    """Return the evaluator, layer times and partition of one plan; see `predict`."""
    spec = PlanSpec.of(plan)
    known = checked_model(model, spec.software, spec.seq)
    memory_of(cluster.chip)
    evaluator = _evaluator(known, cluster, spec)
    times = evaluator.times(cluster, cache)
    return evaluator, times, _partition(spec, evaluator, times)


# ---- many plans at once ----


@dataclass(frozen=True, eq=False)
class Predictions(Table):
    """Predictions of many plans; read-only arrays of one length, in the order of the plans."""

    time_s: Array
    """Seconds of a step; NaN where there is no such plan."""
    memory_bytes: Array
    """Peak memory of the fullest device."""
    over_bytes: Array
    """Bytes by which that device exceeds its memory limit; 0 where the plan fits."""
    energy_j: Array
    parts_s: dict[str, Array]
    """Seconds by part of the step."""
    memory: dict[str, Array]
    """Peak memory of the fullest device by term, bytes."""
    instant: Array
    """When memory of that device peaks: a position in `phaze_fast.memory.INSTANTS`."""
    status: Array
    """Position in `reasons`: 0 where the plan fits, 1 where it exceeds memory, else a broken
    rule."""
    reasons: ClassVar[tuple[str, ...]] = _core.PLAN_STATUS_SENTENCES

    def __len__(self) -> int:
        return len(self.time_s)

    def headline(self) -> str:
        """Describe how many of the plans fit."""
        return f"Predictions of which {(self.status == 0).sum():,} fit"

    def to_columns(self) -> dict[str, Any]:
        """Convert to columns, as `to_dict` does."""
        return dict(self.to_dict())

    def to_dict(self) -> dict[str, Array]:
        """Convert to arrays by name; parts and terms are columns of their own."""
        columns = {f.name: getattr(self, f.name) for f in fields(self)}
        parts, memory = columns.pop("parts_s"), columns.pop("memory")
        columns.update({f"{name}_s": array for name, array in parts.items()})
        columns.update({f"{name}_bytes": array for name, array in memory.items()})
        return columns


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
    dispatcher: Any = "all-to-all",
    offload_optimizer: Any = False,
    threads: int | None = None,
) -> Predictions:
    """Predict many plans in one call, with stages as `predict` divides; the GIL is released.

    Parameters
    ----------
    model
        What is trained, or its name.
    cluster
        Devices with their chip and fabric.
    training
        The step: batch, sequence, optimiser, reserved bytes, sequence parallelism. Its widths and
        schedules are ignored.
    tp, pp, dp, micro_batch, zero, vpp, cp, ep
        Whole numbers, or arrays of one length.
    recompute
        Recomputation of all stages, as in `PlanSpec`, or an array of such texts.
    schedule
        Names as in `PlanSpec`, or an array of these.
    rank_order
        ``replicas-inside`` or ``stages-inside``, or an array of these.
    shard
        Neighbouring replicas over which ZeRO shards state; 0: all.
    etp
        Devices that share the matrices of each expert; 0: the tensor-parallel width.
    cp_kind
        Kinds as in `PlanSpec`, or an array of these.
    dispatcher
        ``all-to-all`` or ``all-gather``, or an array of these.
    offload_optimizer
        Whether the host has the optimiser's state and updates it: a bool, or an array of bools.
    threads
        Most threads to use, by default all cores; the answer does not depend on it.

    Returns
    -------
    Predictions
        One row per plan. An impossible plan has its reason as a status and raises nothing.

    Raises
    ------
    InvalidInputError
        Where an argument as a whole is malformed.

    Examples
    --------
    >>> import phaze_fast as pf
    >>> cluster = pf.Cluster(devices=16, fabric="dgx-h100", chip="h100")
    >>> step = pf.Training(global_batch=64)
    >>> predictions = predict_batch("llama2-7b", cluster, step, tp=[1, 2, 4, 3],
    ...                             dp=[16, 8, 4, 5], zero=1)
    >>> predictions.status.tolist()
    [0, 0, 0, 3]
    """
    known = checked_model(model, training.software, training.seq)
    workers = thread_count(threads)
    texts, text_of = _recompute_texts(recompute)
    families = _families(texts)
    family_of = np.zeros(len(texts), dtype=np.int64)
    for n, family in enumerate(families):
        family_of[family] = n
    columns = {
        "tp": _whole("tp", tp, 1),
        "pp": _whole("pp", pp, 1),
        "dp": _whole("dp", dp, 1),
        "micro_batch": _whole("micro_batch", micro_batch, 1),
        "zero": _whole("zero", zero, 0),
        "vpp": _whole("vpp", vpp, 1),
        "cp": _whole("cp", cp, 1),
        "ep": _whole("ep", ep, 1),
        "shard": _whole("shard", shard, 0),
        "cp_kind": _context_codes(cp_kind),
        "etp": _whole("etp", etp, 0),
        "dispatcher": _coded("dispatcher", dispatcher, {n: k for k, n in enumerate(DISPATCHERS)}),
        "offload_optimizer": np.asarray(offload_optimizer).astype(np.int64),
        "recompute": family_of[text_of],
        "schedule": _coded("schedule", schedule, SCHEDULE_CODES),
        "rank_order": _coded("rank_order", rank_order, {n: k for k, n in enumerate(RANK_ORDERS)}),
    }
    try:
        shape = np.broadcast(*columns.values()).shape
    except ValueError:
        raise InvalidInputError("plans: expected scalars or arrays of one length") from None
    if len(shape) > 1:
        raise InvalidInputError("plans: expected scalars or one-dimensional arrays")
    # What rows with equal layouts have in common is computed once.
    given = {name: np.atleast_1d(column) for name, column in columns.items()}
    first, which = _core.distinct_rows(list(given.values()))
    rows = {n: c[first] if len(c) > 1 else np.repeat(c, len(first)) for n, c in given.items()}
    widths = [rows[name] for name in _core.WIDTHS]
    status = _core.check_widths(widths, cluster.devices, training.global_batch).copy()
    sizes, strategy, codes = _strategies(known, training, texts, families, rows, status)
    layouts, place = _layouts(rows, strategy, training.global_batch)
    limit_bytes = float(memory_of(cluster.chip).capacity_bytes) - float(training.reserved_bytes)
    if not len(layouts):
        nothing = (
            np.full(len(which), np.nan),
            *(np.zeros(len(which)),) * (len(ESTIMATE_COLUMNS) - 1),
        )
        estimates = dict(zip(ESTIMATE_COLUMNS, nothing, strict=True)) | {"status": status[which]}
        return _predictions(estimates, limit_bytes)
    evaluator = PlanEvaluator(known, cluster, training, [], (sizes, layouts))
    estimates = evaluator.estimate_even(
        evaluator.times(cluster, threads=workers),
        place[which],
        codes[strategy[which], text_of],
        max(limit_bytes, 0.0),
        free_times_on_chip(sizes, cluster, evaluator.optimizer, threads=workers),
        status[which],
        workers,
    )
    return _predictions(estimates, limit_bytes)


def _strategies(
    model: Model,
    training: Training,
    texts: Sequence[str],
    families: Sequence[Sequence[int]],
    rows: Mapping[str, Array],
    status: Array,
) -> tuple[list[StrategySizes], Array, Array]:
    """Size every strategy of the legal rows; mark rows in `status` that the model does not allow.

    Rows that differ in what they recompute share a strategy, so that they are estimated together;
    rows that recompute what fits have one of their own, since other rows' modes are not options for
    them.

    Returns
    -------
    sizes, strategy, codes
        The strategies, the position of each row's strategy (-1: none), and by strategy the code of
        each of the `texts` (-1: the fastest that fits), with a last row for rows without one.
    """
    legal = np.flatnonzero(status == 0)
    own = {name: column[legal] for name, column in rows.items()}
    many = own["ep"] > 1
    columns = (
        *(own[name] for name in ("tp", "cp", "ep", "micro_batch")),
        np.where(own["cp"] > 1, own["cp_kind"], 0),
        np.where(own["etp"] == own["tp"], 0, own["etp"]),
        (_OVERLAPPING[own["schedule"]] & (own["pp"] > 1) & many).astype(np.int64),
        np.where(many, own["dispatcher"], 0),
        own["offload_optimizer"],
        own["recompute"],
    )
    first, which = _core.distinct_rows(columns)
    kinds = zip(*(column[first].tolist() for column in columns), strict=True)
    known = _known_strategies(model, training.model_copy(update={"global_batch": 0}))
    sizes: list[StrategySizes] = []
    number = np.full(len(first), -1)
    codes: list[list[int]] = []
    named = [tuple(texts[n] for n in family) for family in families]
    for k, (*fields_of, family) in enumerate(kinds):
        key = (*fields_of, named[family])
        if key not in known:
            known[key] = _sized(model, training, *key)
        sized = known[key]
        if sized is not None:
            number[k] = len(sizes)
            sizes.append(sized[0])
            codes.append([-1] * len(texts))
            for text, code in zip(families[family], sized[1], strict=True):
                codes[-1][text] = code
    codes.append([-1] * len(texts))
    strategy = np.full(len(status), -1)
    strategy[legal] = number[which]
    status[legal[number[which] < 0]] = _core.PlanStatus.BAD_STRATEGY
    return sizes, strategy, np.array(codes, dtype=np.int32)


def _layouts(rows: Mapping[str, Array], strategy: Array, global_batch: int) -> tuple[Array, Array]:
    """List the layouts of the rows that have a strategy, those of one shape together.

    Returns
    -------
    layouts, place
        The layouts by strategy, and the position of each row's layout (-1: none).
    """
    legal = np.flatnonzero(strategy >= 0)
    own = {name: column[legal] for name, column in rows.items()} | {"strategy": strategy[legal]}
    own["micro_batches"] = global_batch // (own["dp"] * own["micro_batch"])
    own["vpp"] = np.minimum(own["vpp"], np.iinfo(np.int32).max)  # no plan has more
    shapes, shape = _core.distinct_rows(
        [own[name] for name in ("strategy", "pp", "vpp", "schedule", "micro_batches")]
    )
    order = np.argsort(own["strategy"] * len(shapes) + shape, kind="stable")
    layouts: Array = np.empty(len(legal), dtype=_core.LAYOUT_DTYPE)
    for name in layouts.dtype.names or ():
        layouts[name] = own[name][order]
    place = np.full(len(strategy), -1)
    place[legal[order]] = np.arange(len(legal))
    return layouts, place


_OVERLAPPING = np.array([name in OVERLAPPING for name in SCHEDULES])
"""Whether exchanges among experts overlap passes, by code of the schedule."""


def _families(texts: Sequence[str]) -> list[list[int]]:
    """Divide texts that say what plans recompute into families that one strategy can have.

    A family has the positions of its texts, which do not depend on the order of rows.
    """
    families: list[list[int]] = []
    last: list[int] = []  # the family that still grows
    for n in sorted(range(len(texts)), key=texts.__getitem__):
        modes = modes_in([texts[k] for k in (*last, n)]) if texts[n] != "auto" else ()
        if modes and last and len(modes) <= _core.MAX_VARIANTS:
            last.append(n)
            continue
        families.append([n])
        if modes:
            last = families[-1]
    return families


@lru_cache(maxsize=16)
def _known_strategies(
    _model: Model, _training: Training
) -> dict[tuple[Any, ...], tuple[StrategySizes, list[int]] | None]:
    """Return the cache of `_sized` for a model and what all batches have in common."""
    return {}


def _sized(
    model: Model,
    training: Training,
    tp: int,
    cp: int,
    ep: int,
    micro_batch: int,
    kind: int,
    etp: int,
    overlapping: int,
    dispatcher: int,
    offload_optimizer: int,
    recompute: tuple[str, ...],
) -> tuple[StrategySizes, list[int]] | None:
    """Size a strategy, with the code of each text; None where the model does not allow it.

    The code is -1 for the fastest that fits.
    """
    widths = (tp, cp, context_kind(kind), ep, etp or None, micro_batch)
    choices = (bool(overlapping), DISPATCHERS[dispatcher], bool(offload_optimizer))
    strategy = training.strategy_of(*widths, *choices)
    if strategy_faults(model, strategy, training.software):
        return None
    auto = recompute == ("auto",)
    modes = RECOMPUTE if auto else modes_in(recompute)
    runs = (training.software, training.precision, training.fusion)
    sizes = strategy_sizes(model, strategy, modes, *runs)
    if auto:
        return sizes, [-1]
    return sizes, [recompute_code(text, sizes.variant_of) for text in recompute]


def _predictions(estimates: Mapping[str, Array], limit_bytes: float) -> Predictions:
    status = estimates["status"]
    excess = estimates["memory_bytes"] - limit_bytes
    over_bytes = np.where(status == int(_core.PlanStatus.OVER_MEMORY), excess, 0.0)
    for column in (over_bytes, *estimates.values()):
        column.setflags(write=False)
    return Predictions(
        time_s=estimates["time_s"],
        memory_bytes=estimates["memory_bytes"],
        over_bytes=over_bytes,
        energy_j=estimates["energy_j"],
        parts_s={name.removesuffix("_s"): estimates[name] for name in ESTIMATE_PARTS},
        memory={name: estimates[name] for name in ESTIMATE_TERMS},
        instant=estimates["instant"],
        status=status,
    )


# ---- columns of plan fields ----


def _words(name: str, values: Any) -> tuple[list[str], Array]:
    """List the distinct words of a column, and the position of each row's word."""
    words = np.asarray(values)
    if words.dtype.kind not in "UO":
        raise InvalidTypeError(f"{name}: dtype {words.dtype} is not accepted; expected words")
    flat = np.ascontiguousarray(words.astype(str, copy=False).reshape(-1))
    first, which = _core.distinct_words(flat)
    return flat[first].tolist(), which.reshape(words.shape)


def _coded(name: str, values: Any, accepted: Mapping[str, int]) -> Array:
    """Replace words by codes."""
    words, which = _words(name, values)
    for word in words:
        if word not in accepted:
            raise InvalidInputError(f"{name}: {word!r} is not accepted; {nearest(word, accepted)}")
    codes: Array = np.array([accepted[word] for word in words], dtype=np.int64)
    return codes[which]


def _context_codes(kinds: Any) -> Array:
    """Replace kinds of context parallelism by their codes."""
    words, which = _words("cp_kind", kinds)
    codes: Array = np.array([context_code(check_context_kind(word)) for word in words])
    return codes[which]


def _recompute_texts(recompute: Any) -> tuple[list[str], Array]:
    """List the distinct texts that say what plans recompute, and the position of each plan's."""
    texts, text_of = _words("recompute", recompute)
    for text in texts:
        if text != "auto":
            check_stage_recompute(text)
    return texts, text_of


def _whole(name: str, values: Any, least: int) -> Array:
    """Check that values are whole numbers of at least `least`."""
    array = np.asarray(values)
    if array.dtype.kind not in "iu":
        raise InvalidTypeError(f"{name}: dtype {array.dtype} is not accepted; expected integers")
    if array.size and int(array.min()) < least:
        raise InvalidInputError(f"{name}: {array.min()} is not accepted; expected {least} or more")
    return array.astype(np.int64, copy=False)
