"""A table of best plans over many points: models, clusters with their chips, training steps.

Every point becomes a row, in the order given: the best plan, or the reason why there is none. A
sweep that writes to a directory resumes where it stopped.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import pickle
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from phaze_fast.documents import digest
from phaze_fast.errors import InvalidInputError, InvalidTypeError, check_one_of, check_type, nearest
from phaze_fast.hardware import Cluster, area
from phaze_fast.models import Model, model_from_dict
from phaze_fast.planning import Plan, Training, plan, predict, predict_batch
from phaze_fast.planning.training import TrainingStep
from phaze_fast.runs.executors import Lost, Workers, run_chunks
from phaze_fast.runs.journal import Journal, manifest
from phaze_fast.tables import Array, Table
from phaze_fast.threads import thread_count

VERSION = "phaze-fast point 1"
"""Part of every key; it changes with the meaning of records, so that old rows are not found."""

Row = dict[str, Any]
Evaluate = Callable[["Point"], Row]
Progress = Callable[[int, int], None]

COLUMNS: dict[str, type] = {
    "key": str,
    "status": str,
    "reason": str,
    "model": str,
    "chip": str,
    "devices": int,
    "fabric": str,
    "global_batch": int,
    "seq": int,
    "area_mm2": float,
    "time_s": float,
    "samples_per_s": float,
    "tokens_per_s": float,
    "mfu": float,
    "memory_bytes": float,
    "devices_used": int,
    "tp": int,
    "pp": int,
    "dp": int,
    "cp": int,
    "ep": int,
    "zero": int,
    "micro_batch": int,
    "micro_batches": int,
    "schedule": str,
    "vpp": int,
    "recompute": str,
    "rank_order": str,
    "layers_proven": bool,
}
"""Columns of every row and their types; None in a row where there is no plan."""

_OF_POINT = {"key", "status", "reason", "model", "chip", "devices", "fabric", "area_mm2"}
_OF_PLAN = COLUMNS.keys() - _OF_POINT - {"global_batch", "devices_used", "samples_per_s"}
_MISSING: dict[type, Any] = {str: "", int: -1, float: math.nan, bool: False}


@dataclass(frozen=True)
class Point:
    """One problem of a sweep: a model, the hardware and a training step.

    Examples
    --------
    >>> import phaze_fast as pf
    >>> cluster = pf.Cluster(devices=8, fabric="dgx-h100", chip="h100")
    >>> point = Point(pf.models.load("bertlarge"), cluster, pf.Training(global_batch=64))
    >>> Point.from_dict(point.to_dict()).key == point.key
    True
    """

    model: Model
    cluster: Cluster
    """The cluster, with its chip."""
    training: Training

    def __post_init__(self) -> None:
        for name, kind in _TYPES.items():
            expected = getattr(kind, "__name__", "TransformerModel")
            check_type(name, getattr(self, name), kind, f"a {expected}")
        if self.cluster.chip is None:
            raise InvalidInputError("cluster.chip: missing; expected a cluster with its chip")

    @cached_property
    def key(self) -> str:
        """Hash of the content, the same on every machine."""
        return digest([VERSION, *(getattr(self, name).digest() for name in _PARTS)])

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that `from_dict` reads back."""
        return {name: getattr(self, name).to_dict() for name in _PARTS}

    @classmethod
    def from_dict(cls, data: object, source: str = "") -> Point:
        """Validate plain data; an InvalidInputError names the field and what is accepted."""
        prefix = f"{source}: " if source else ""
        if not isinstance(data, dict):
            raise InvalidInputError(f"{prefix}point: expected a mapping of {', '.join(_PARTS)}")
        for name in data:
            if name not in _PARTS:
                raise InvalidInputError(
                    f"{prefix}point: unknown key {str(name)!r}; {nearest(str(name), _PARTS)}"
                )
        for name in _PARTS:
            if name not in data:
                raise InvalidInputError(f"{prefix}{name}: is missing and has no default")
        parts = [read(data[name], f"{prefix}{name}") for name, read in _PARTS.items()]
        return cls(*parts)


_TYPES: dict[str, Any] = {"model": Model, "cluster": Cluster, "training": Training}
_PARTS: dict[str, Any] = {
    "model": model_from_dict,
    "cluster": Cluster.from_dict,
    "training": Training.from_dict,
}


def blank_row(point: Point, status: str, reason: str = "") -> Row:
    """Return the row of a point that has no plan.

    `status` is ``infeasible`` or ``error``; `reason` says which constraint binds, or what happened.
    """
    chip = point.cluster.chip
    assert chip is not None  # every point has a chip
    area_mm2 = area(chip).total_mm2
    row: Row = dict.fromkeys(COLUMNS)
    row |= {"key": point.key, "status": status, "reason": reason, "devices": point.cluster.devices}
    row |= {"model": point.model.name, "chip": chip.name}
    row |= {"fabric": point.cluster.fabric.name, "global_batch": point.training.global_batch}
    row["area_mm2"] = area_mm2 if math.isfinite(area_mm2) else None
    return row


def plan_row(point: Point, best: Plan) -> Row:
    """Return the row of a point and its best plan; units are s, bytes, mm2 and 1/s."""
    row = blank_row(point, "optimal")
    row |= {name: getattr(best, name) for name in _OF_PLAN}
    row["devices_used"] = best.devices
    row["samples_per_s"] = point.training.global_batch / best.time_s if best.time_s > 0 else None
    return row


def evaluate_point(point: Point) -> Row:
    """Find the best plan of a point.

    Examples
    --------
    >>> import phaze_fast as pf
    >>> cluster = pf.Cluster(devices=4, fabric="dgx-h100", chip="h100")
    >>> step = pf.Training(global_batch=16, micro_batch=4, tp=1)
    >>> row = evaluate_point(Point(pf.models.load("bertlarge"), cluster, step))
    >>> row["status"], row["dp"]
    ('optimal', 4)
    """
    plans = plan(point.model, point.cluster, point.training, top=1, threads=1)
    if not plans.plans:
        return blank_row(point, "infeasible", str(plans.infeasible))
    return plan_row(point, plans.best)


_GRID: dict[str, Any] = {
    "tp": 1,
    "pp": 1,
    "cp": 1,
    "ep": 1,
    "micro_batch": 1,
    "zero": 0,
    "recompute": "auto",
    "schedule": "1f1b",
    "vpp": 1,
    "rank_order": "replicas-inside",
}


@functools.lru_cache(maxsize=4)
def _columns(axes: tuple[tuple[str, tuple[Any, ...]], ...], devices: int) -> dict[str, Array]:
    """Return every combination of axes that divides the devices; the latest are cached."""
    sizes = [len(values) for _, values in axes]
    inner = np.ones(sizes, dtype=np.int64)
    for at, (name, values) in enumerate(axes):
        if name in ("tp", "pp", "cp"):
            inner *= np.array(values).reshape([-1 if k == at else 1 for k in range(len(sizes))])
    at_each = np.nonzero(devices % inner == 0)
    columns = {name: np.array(values)[at] for (name, values), at in zip(axes, at_each, strict=True)}
    columns["dp"] = devices // inner[at_each]
    for column in columns.values():
        column.setflags(write=False)
    return columns


class PlanGrid:
    """Predicts every plan of a grid on each point of a sweep, in place of a search.

    Data parallelism takes the devices that the other widths leave; combinations that do not divide
    them are no plans. The row of a point is that of the fastest plan that fits, with the number of
    plans of the grid and of those that fit as `plans` and `plans_fit`.

    Parameters
    ----------
    axes
        Values of arguments of `predict_batch`, by name: one or several each. The grid has every
        combination.

    Examples
    --------
    >>> import phaze_fast as pf
    >>> cluster = pf.Cluster(devices=8, fabric="dgx-h100", chip="h100")
    >>> point = Point(pf.models.load("bertlarge"), cluster, pf.Training(global_batch=64))
    >>> grid = PlanGrid(tp=(1, 2, 4), micro_batch=(1, 2, 4), zero=(0, 1), recompute="none")
    >>> row = sweep([point], evaluate=grid).rows[0]
    >>> row["status"], row["plans"], row["tp"]
    ('optimal', 18, 1)
    """

    def __init__(self, **axes: Any) -> None:
        for name in axes:
            check_one_of("axis", name, _GRID)
        given = {name: axes.get(name, default) for name, default in _GRID.items()}
        self.axes = {name: np.atleast_1d(np.asarray(values)) for name, values in given.items()}

    @property
    def name(self) -> str:
        """Text that is unique to the grid, since results on disk must not mix grids."""
        return f"PlanGrid {digest({name: own.tolist() for name, own in self.axes.items()})}"

    def columns(self, devices: int) -> dict[str, Array]:
        """Return the plans for a number of devices, as columns for `predict_batch`."""
        axes = tuple((name, tuple(values.tolist())) for name, values in self.axes.items())
        return dict(_columns(axes, devices))

    def __call__(self, point: Point) -> Row:
        """Return the row of a point."""
        columns = self.columns(point.cluster.devices)
        found = predict_batch(point.model, point.cluster, point.training, **columns, threads=1)
        fits = np.flatnonzero(found.status == 0)
        counts = {"plans": len(found), "plans_fit": len(fits)}
        if not len(fits):
            return blank_row(point, "infeasible", "none of the plans of the grid fits") | counts
        best = int(fits[np.argmin(found.time_s[fits])])
        given = {name: values[best].item() for name, values in columns.items()}
        step = {name: getattr(point.training, name) for name in TrainingStep.model_fields}
        return plan_row(point, predict(point.model, point.cluster, {**step, **given})) | counts


def _checked(point: Point, row: Any) -> Row:
    """Add the key of the point to a row, after checking that its values can be written as JSON."""
    if not isinstance(row, dict) or row.get("status") not in ("optimal", "infeasible", "error"):
        raise InvalidTypeError(
            f"evaluate: {type(row).__name__} is not accepted; expected a dict with a status of "
            "optimal, infeasible or error"
        )
    plain = {n: v.item() if isinstance(v, np.generic) else v for n, v in row.items()}
    for name, value in plain.items():
        good = value is None or isinstance(value, str | int | float)
        if not good or (isinstance(value, float) and not math.isfinite(value)):
            raise InvalidTypeError(
                f"evaluate: {name} = {str(value)[:60]!r} is not accepted; expected text, a finite "
                "number, true, false or None"
            )
    return {**plain, "key": point.key}


def _layers_of(point: Point) -> tuple[Model, Cluster]:
    """Return what the layers of a point take their times from."""
    return point.model, point.cluster


def _rows_of(evaluate: Evaluate, points: list[Point]) -> list[Row]:
    """Evaluate points; an error becomes the row of its point."""
    rows = []
    for point in points:
        try:
            rows.append(_checked(point, evaluate(point)))
        except (Exception, SystemExit) as error:
            rows.append(blank_row(point, "error", f"{type(error).__name__}: {error}"))
    return rows


@dataclass(frozen=True)
class SweepTable(Table):
    """Rows of a sweep, in the order of its points.

    Examples
    --------
    >>> table = SweepTable([{"status": "optimal", "time_s": 0.5}, {"status": "infeasible"}])
    >>> table["time_s"].tolist()
    [0.5, nan]
    """

    rows: list[Row]
    notes: tuple[str, ...] = ()
    """Faults of the results on disk, and what was done about them."""
    repeated: int = 0
    """Points that repeat an earlier one, which are evaluated once."""
    resumed: int = 0
    """Distinct points that an earlier run had finished."""

    shown: ClassVar[tuple[str, ...]] = (
        *("model", "chip", "devices", "global_batch", "status", "time_s", "mfu"),
        *("tp", "pp", "dp", "cp", "ep", "zero", "micro_batch"),
    )

    def __len__(self) -> int:
        return len(self.rows)

    def headline(self) -> str:
        """Describe how many of the points have a plan; all plans are proven optimal."""
        optimal = sum(row["status"] == "optimal" for row in self.rows)
        return f"Sweep with the best plan of {optimal:,} points"

    def __getitem__(self, name: str) -> Array:
        check_one_of("column", name, self.columns)
        return self.columns[name]

    @cached_property
    def columns(self) -> dict[str, Array]:
        """Read-only arrays by name; where a row has no value: NaN, -1, False or an empty text."""
        arrays: dict[str, Array] = {}
        for name, (kind, values) in self._typed().items():
            filled = [_MISSING[kind] if value is None else value for value in values]
            arrays[name] = np.array(filled, dtype=kind)
            arrays[name].flags.writeable = False
        return arrays

    def _typed(self) -> dict[str, tuple[type, list[Any]]]:
        """Return the type and the values of each column."""
        names = dict.fromkeys(name for row in self.rows for name in row) or COLUMNS
        typed = {}
        for name in names:
            values = [row.get(name) for row in self.rows]
            kinds = {type(v) for v in values if v is not None}
            order = (str, float, int, bool)  # the first type in this order that a column contains
            kind = next((k for k in order if k in kinds), COLUMNS.get(name, float))
            if kind is str:
                values = [v if v is None else str(v) for v in values]
            typed[name] = (float if kind is int and COLUMNS.get(name) is float else kind, values)
        return typed

    def to_columns(self) -> dict[str, Any]:
        """Return the rows as named columns; None where a row has no value."""
        return {name: values for name, (_, values) in self._typed().items()}

    def to_json(self, path: Path | str) -> None:
        """Write rows, notes and counts as one JSON object."""
        data: Row = {"rows": self.rows, "notes": self.notes}
        data |= {"repeated": self.repeated, "resumed": self.resumed}
        try:
            Path(path).write_text(json.dumps(data, allow_nan=False) + "\n", "utf-8")
        except OSError as error:
            raise InvalidInputError(f"{path}: cannot be written: {error.strerror}") from None


def _name_of(evaluate: Any) -> str:
    if isinstance(evaluate, PlanGrid):
        return evaluate.name
    while isinstance(evaluate, functools.partial):
        evaluate = evaluate.func
    named = evaluate if hasattr(evaluate, "__qualname__") else type(evaluate)
    return f"{named.__module__}.{named.__qualname__}"


def _check(points: Sequence[Point], chunk: int, evaluate: Evaluate) -> None:
    for at, point in enumerate(points):
        check_type(f"points[{at}]", point, Point, "a Point")
    if not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1:
        raise InvalidInputError(f"chunk: {chunk!r} is not accepted; expected 1 or more")
    if not callable(evaluate):
        raise InvalidTypeError(
            f"evaluate: {evaluate!r} is not accepted; expected a function of a Point"
        )


def _check_travels(evaluate: Evaluate) -> None:
    try:
        pickle.dumps(evaluate)
    except Exception as error:
        raise InvalidInputError(
            f"evaluate: {evaluate!r} is not accepted by other processes; expected a function at "
            f"the top of a module ({error})"
        ) from None


def sweep(
    points: Iterable[Point],
    out: Path | str | None = None,
    executor: Executor | str | None = None,
    chunk: int = 32,
    threads: int | None = None,
    progress: Progress | None = None,
    evaluate: Evaluate = evaluate_point,
    retry_errors: bool = False,
) -> SweepTable:
    """Evaluate many points; a sweep that was stopped resumes.

    Parameters
    ----------
    points
        Points to evaluate; repeated points are evaluated once.
    out
        Directory to write rows to as they finish. The same sweep, or one of more points, resumes
        from it.
    executor
        A ``concurrent.futures.Executor``, or a name that `executor_for` takes; by default threads.
    chunk
        Most points of one task, and of one write to disk. A task has points of one model and
        cluster, whose layers its worker prices once.
    threads
        Threads or processes of a local executor. Rows do not depend on it.
    progress
        Called with the number of distinct points done and the number of all distinct points.
    evaluate
        Function that evaluates one point and returns its row; for other processes, a function at
        the top level of a module. A `PlanGrid` predicts given plans instead of searching.
    retry_errors
        Whether points that ended in an error before are evaluated again.

    Returns
    -------
    SweepTable
        A row for each point, in their order. A point with no plan has status ``infeasible``, one
        that raised an exception or killed its workers ``error``; both have a reason.

    Raises
    ------
    InvalidInputError
        Where the directory cannot be written, is in use, or has results of another run.

    Examples
    --------
    >>> import phaze_fast as pf
    >>> cluster = pf.Cluster(devices=4, fabric="dgx-h100", chip="h100")
    >>> steps = [pf.Training(global_batch=16, micro_batch=m, tp=1) for m in (1, 2, 4)]
    >>> table = sweep(Point(pf.models.load("bertlarge"), cluster, step) for step in steps)
    >>> table["time_s"].argmin()
    np.int64(2)
    """
    all_points = list(points)
    _check(all_points, chunk, evaluate)
    distinct = {point.key: point for point in all_points}
    rows: dict[str, Row] = {}
    notes: list[str] = []
    with contextlib.ExitStack() as stack:
        journal = None
        if out is not None:
            description = manifest(distinct.keys(), _name_of(evaluate))
            journal = stack.enter_context(Journal(out, description, distinct.keys()))
            rows = dict(journal.rows)
            if retry_errors:
                rows = {key: row for key, row in rows.items() if row["status"] != "error"}
            notes = journal.notes
        resumed = len(rows)
        remaining = [point for key, point in distinct.items() if key not in rows]
        workers = stack.enter_context(Workers(executor, thread_count(threads)))
        if workers.separate:
            _check_travels(evaluate)
        if progress is not None:
            progress(len(rows), len(distinct))
        call = functools.partial(_rows_of, evaluate)
        most = min(chunk, max(1, -(-len(remaining) // workers.width)))
        for chunk_points, results in run_chunks(call, remaining, most, workers, _layers_of):
            if isinstance(results, Lost):
                results = [blank_row(point, "error", results.reason) for point in chunk_points]
            if journal is not None:
                journal.append(results)
            rows.update((row["key"], row) for row in results)
            if progress is not None:
                progress(len(rows), len(distinct))
    ordered = [dict(rows[point.key]) for point in all_points]
    return SweepTable(ordered, tuple(notes), len(all_points) - len(distinct), resumed)
