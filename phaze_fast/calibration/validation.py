"""Predictions against measurements: published training runs, and steps on one device.

Every row goes through `phaze_fast.predict`: there is no second model for validation.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from phaze_fast.calibration.published import (
    PublishedRun,
    RowRefusedError,
    UnsupportedError,
    read_run,
)
from phaze_fast.calibration.run_table import is_run_table, standard_cells
from phaze_fast.cost.validation import ErrorSizes, measured_model
from phaze_fast.documents import CsvRow, csv_rows, read_document
from phaze_fast.errors import InvalidInputError, PhazeError, nearest
from phaze_fast.hardware import Accelerator, AnyFabric, Cluster, FlatFabric
from phaze_fast.models import Model, from_hf
from phaze_fast.planning import Plan, predict
from phaze_fast.software import Software, load_software
from phaze_fast.tables import Array

# ---- sizes of errors ----


@dataclass(frozen=True)
class ErrorSummary(ErrorSizes):
    """Errors of predictions of runs, and how well the predictions rank the runs."""

    rank_correlation: float | None
    """Spearman's, of predicted and measured values; None for fewer than three rows or all equal."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def _ranks(values: Array) -> Array:
    """Return ranks from 1; ties get their mean rank."""
    order = np.argsort(values, kind="stable")
    _, inverse, counts = np.unique(values[order], return_inverse=True, return_counts=True)
    ranks = np.empty(len(values))
    ranks[order] = (np.cumsum(counts) - (counts - 1) / 2.0)[inverse]
    return ranks


def rank_correlation(measured: Sequence[float], predicted: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation, or None where it is not defined.

    Examples
    --------
    >>> rank_correlation([1.0, 2.0, 4.0], [10.0, 20.0, 30.0])
    1.0
    """
    x, y = np.asarray(measured, dtype=float), np.asarray(predicted, dtype=float)
    if len(x) < 3:
        return None
    x, y = _ranks(x), _ranks(y)
    x, y = x - x.mean(), y - y.mean()
    size = float(np.sqrt((x * x).sum() * (y * y).sum()))
    return None if size == 0.0 else round(float((x * y).sum()) / size, 12)


def summarise(measured: Sequence[float], predicted: Sequence[float]) -> ErrorSummary:
    """Summarise relative errors.

    Parameters
    ----------
    measured, predicted
        Values of the same rows, at least one row; measured values are greater than 0.

    Examples
    --------
    >>> found = summarise([1.0, 2.0], [1.1, 1.8])
    >>> round(found.mean_abs_err, 3), round(found.bias, 3)
    (0.1, 0.0)
    """
    x, y = np.asarray(measured, dtype=float), np.asarray(predicted, dtype=float)
    return ErrorSummary(
        **ErrorSizes.sizes(x, y), rank_correlation=rank_correlation(measured, predicted)
    )


def pick_regret(rows: Iterable[tuple[Hashable, float, float]]) -> Mapping[str, float | int] | None:
    """Return the regret of running the plan that is predicted to be fastest.

    Parameters
    ----------
    rows
        (query, measured seconds, predicted seconds); rows with the same query are alternatives.

    Returns
    -------
    mapping or None
        Number of ``groups`` of two or more alternatives, ``mean`` and ``max`` of the seconds lost
        relative to the fastest alternative as measured; None where no row has an alternative.

    Examples
    --------
    >>> pick_regret([("a", 1.0, 3.0), ("a", 1.2, 2.0), ("b", 1.0, 1.0)])["groups"]
    1
    """
    groups: dict[Hashable, list[tuple[float, float]]] = {}
    for query, measured, predicted in rows:
        groups.setdefault(query, []).append((predicted, measured))
    lost = [
        min(options)[1] / min(measured for _, measured in options) - 1.0
        for options in groups.values()
        if len(options) > 1
    ]
    if not lost:
        return None
    return {"groups": len(lost), "mean": float(np.mean(lost)), "max": float(max(lost))}


# ---- published runs ----


@dataclass(frozen=True)
class PredictedRun:
    """A published run and its prediction."""

    run: PublishedRun
    plan: Plan

    @property
    def time_s(self) -> float:
        """Seconds of a step as the source reports them: including its share of evaluation, if any.

        Evaluation runs forward passes only: a third of a step without recomputation.
        """
        recompute_s = self.plan.parts_s["recompute"]
        return self.plan.time_s + self.run.evaluated * (self.plan.time_s - recompute_s) / 3.0

    @property
    def interval_s(self) -> tuple[float, float]:
        """Ends of the prediction interval of `time_s`."""
        low, high = (self.time_s / self.plan.time_s * bound for bound in self.plan.interval_s)
        return low, high

    @property
    def error(self) -> float:
        """Relative error of the step time; positive where the prediction is too long."""
        return self.time_s / self.run.time_s - 1.0

    @property
    def reported_bytes(self) -> float:
        """Memory that the software would report for the fullest device."""
        return self.run.reported_bytes(self.plan)

    @property
    def fits(self) -> bool | None:
        """Whether the run is predicted to fit in memory; None where memory is not predicted."""
        return self.plan.over_bytes == 0


@dataclass(frozen=True)
class OtherPrediction(PredictedRun):
    """A published run as another model predicts it."""

    time_s: float = math.nan
    reported_bytes: float = math.nan
    fits: bool | None = None


GROUPINGS: Mapping[str, Callable[[PublishedRun], str]] = {
    "source": lambda run: run.source,
    "chip": lambda run: run.chip,
    "software": lambda run: run.software,
    "model": lambda run: run.model.name,
}
"""Columns that rows can be grouped by."""


@dataclass(frozen=True)
class RunGroup:
    """The predicted rows of one group, and why its other rows were not predicted."""

    name: str
    rows: tuple[PredictedRun, ...]
    unsupported: Mapping[str, int]
    """Number of rows that are not predicted, by reason."""

    @property
    def timed(self) -> list[PredictedRun]:
        """Rows with a measured step."""
        return [row for row in self.rows if row.run.time_s > 0 and row.time_s > 0]

    @property
    def time(self) -> ErrorSummary | None:
        """Errors of the seconds of a step."""
        rows = self.timed
        return summarise([r.run.time_s for r in rows], [r.time_s for r in rows]) if rows else None

    @property
    def fits(self) -> Mapping[str, tuple[int, int]]:
        """By status: the number of rows, and how many of these are predicted to fit in memory."""
        found: dict[str, tuple[int, int]] = {}
        for row in self.rows:
            if row.fits is not None:
                rows, fit = found.get(row.run.status, (0, 0))
                found[row.run.status] = rows + 1, fit + row.fits
        return found

    @property
    def assumed(self) -> Mapping[str, int]:
        """Number of rows by what the row does not say and was assumed."""
        return Counter(words for row in self.rows for words in row.run.assumed)

    @property
    def memory(self) -> ErrorSummary | None:
        """Errors of the memory of a device, for rows that report it."""
        known = [row for row in self.rows if row.run.memory_bytes > 0 and row.reported_bytes > 0]
        if not known:
            return None
        measured = [row.run.memory_bytes for row in known]
        return summarise(measured, [row.reported_bytes for row in known])

    @property
    def regret(self) -> Mapping[str, float | int] | None:
        """Regret of running the plan predicted to be fastest, where rows are alternatives."""
        return pick_regret((row.run.query, row.run.time_s, row.time_s) for row in self.timed)

    @property
    def coverage(self) -> float | None:
        """Share of measured step times inside the interval of their prediction."""
        rows = self.timed
        inside = [r.interval_s[0] <= r.run.time_s <= r.interval_s[1] for r in rows]
        return sum(inside) / len(inside) if inside else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        time, memory = self.time, self.memory
        return {
            "iter_time_s": {"rows": 0} if time is None else time.to_dict(),
            "memory_gib": {"rows": 0} if memory is None else memory.to_dict(),
            "unsupported": dict(self.unsupported),
            "assumed": dict(self.assumed),
            "fits": {status: {"rows": n, "fit": fit} for status, (n, fit) in self.fits.items()},
            "pick_regret": self.regret,
            "interval_coverage": self.coverage,
        }


@dataclass(frozen=True)
class RunValidation:
    """Predictions against a table of published runs."""

    by: str
    groups: tuple[RunGroup, ...]
    refused: tuple[str, ...]
    """One line for each row whose fields are missing or contradict one another."""

    @property
    def all_rows(self) -> RunGroup:
        """The rows of all groups as one group."""
        unsupported: Counter[str] = Counter()
        for group in self.groups:
            unsupported.update(group.unsupported)
        rows = tuple(row for group in self.groups for row in group.rows)
        return RunGroup("all", rows, dict(unsupported))

    def worst(self, count: int = 8) -> list[PredictedRun]:
        """Rows with the largest errors of time, largest first."""
        return sorted(self.all_rows.timed, key=lambda row: -abs(row.error))[:count]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: groups by name, and all rows together as columns."""
        total = self.all_rows.to_dict()
        return {
            "kind": "runs",
            "by": self.by,
            "groups": {group.name: group.to_dict() for group in self.groups},
            "columns": {name: total[name] for name in ("iter_time_s", "memory_gib")},
            "unsupported": total["unsupported"],
            "assumed": total["assumed"],
            "refused": list(self.refused),
        }


def compare_predictions(validation: RunValidation, path: Path | str) -> tuple[RunGroup, RunGroup]:
    """Score another model's predictions of a table of runs and ours, on rows that both predict.

    Parameters
    ----------
    validation
        Our predictions of the table.
    path
        CSV with the other model's predictions: ``row``, the line of the run in its table (the
        header is line 1), and any of ``step_s``, ``memory_bytes`` or ``memory_gib``, and ``fits``
        (yes or no).

    Returns
    -------
    ours, theirs
        The same rows as predicted by either model, with the measures that both predict.

    Raises
    ------
    InvalidInputError
        Where the file is no such CSV, or has no row of these runs.
    """
    ours = {row.run.line: row for row in validation.all_rows.rows}
    theirs = []
    for line, cells in csv_rows(path)[1]:
        row = CsvRow(f"{path}, line {line}", cells)
        known = ours.get(row.whole("row"))
        if known is None:
            continue
        said = row.text("fits").lower()
        if said not in ("", "yes", "no"):
            raise row.fault("fits", "yes or no")
        gib = row.positive("memory_gib", math.nan)
        theirs.append(
            OtherPrediction(
                known.run,
                known.plan,
                row.positive("step_s", math.nan),
                row.positive("memory_bytes", gib * 2**30),
                {"yes": True, "no": False}.get(said),
            )
        )
    if not theirs:
        raise InvalidInputError(f"{path}: no row of the table of runs is predicted")
    common = tuple(
        OtherPrediction(
            own.run,
            own.plan,
            math.nan if math.isnan(row.time_s) else own.time_s,
            math.nan if math.isnan(row.reported_bytes) else own.reported_bytes,
            None if row.fits is None else own.fits,
        )
        for row in theirs
        for own in (ours[row.run.line],)
    )
    return RunGroup("phaze-fast", common, {}), RunGroup(Path(path).stem, tuple(theirs), {})


def validate_runs(
    path: Path | str,
    by: str = "source",
    progress: Callable[[int, int], None] | None = None,
    software: Software | str | None = None,
    fabric: AnyFabric | None = None,
) -> RunValidation:
    """Predict every row of a table of training runs and compare.

    Parameters
    ----------
    path
        CSV with a row for each run: model, devices, plan, seconds of a step, optionally bytes;
        `phaze_fast.calibration.run_table` has the names of its columns.
    by
        Key to group rows by, a name of `GROUPINGS`.
    progress
        Called with the number of rows done and the number of all rows.
    software
        Profile that all rows are taken to be runs of; by default the one that each row names, or
        ``generic`` where its software has no profile.
    fabric
        Interconnect that all rows are taken to use; by default that of each row.

    Raises
    ------
    InvalidInputError
        Where the file is not such a table. Rows that are not accepted are listed in `refused`.

    Examples
    --------
    >>> import tempfile
    >>> row = {"model": "llama2-7b", "devices": "8", "global_batch": "8", "step_s": ""}
    >>> with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
    ...     _ = file.write(",".join(row) + chr(10) + ",".join(row.values()) + chr(10))
    ...     file.flush()
    ...     validate_runs(file.name).refused
    ('row 2: iter_time_s: is missing; expected a number from 1e-9 to 1e18',)
    """
    profile = load_software(software) if isinstance(software, str) else software
    if by not in GROUPINGS:
        raise InvalidInputError(f"by: {by!r} is not accepted; {nearest(by, GROUPINGS)}")
    header, rows = csv_rows(path)
    if not is_run_table(header):
        raise InvalidInputError(f"{path}: not a table of training runs")
    predicted: dict[str, list[PredictedRun]] = {}
    unsupported: dict[str, Counter[str]] = {}
    refused: list[str] = []
    for done, (line, cells) in enumerate(rows):
        source = (cells.get("source") or "").strip() or "(no source)"
        group = source if by == "source" else standard_cells(cells).get(_COLUMN[by], "")
        try:
            run = read_run(line, cells, profile)
            if fabric is not None:
                run = replace(run, cluster=run.cluster.replace(fabric=fabric))
            group = GROUPINGS[by](run)
            predicted.setdefault(group, []).append(PredictedRun(run, _predicted(run)))
        except UnsupportedError as error:
            unsupported.setdefault(group, Counter())[str(error)] += 1
        except PhazeError as error:
            text = str(error).splitlines()[0]
            refused.append(text if isinstance(error, RowRefusedError) else f"row {line}: {text}")
        if progress is not None:
            progress(done + 1, len(rows))
    groups = (
        RunGroup(name, tuple(predicted.get(name, ())), dict(unsupported.get(name, {})))
        for name in dict.fromkeys([*predicted, *unsupported])
    )
    return RunValidation(by, tuple(groups), tuple(refused))


_COLUMN = {"chip": "gpu", "software": "framework", "model": "model"}
"""Column whose text groups rows that cannot be read, by the key to group by."""


def _predicted(run: PublishedRun) -> Plan:
    try:
        return predict(run.model, run.cluster, run.plan)
    except PhazeError as error:
        text = str(error).splitlines()[0]
        _, _, reason = text.partition(": ")  # without the field, to count equal reasons
        raise UnsupportedError(reason or text) from None


# ---- steps on one device ----

_WRITTEN_BLOCKS = frozenset(
    ["model", "layers", "seq", "mbs", "accum", "recompute", "step_ms", "peak_bytes"]
)
_HUGGINGFACE = frozenset(["model", "seq", "mbs", "recompute", "mode", "step_ms", "peak_bytes"])
_COLUMNS = ("step_ms", "peak_bytes")
# Non-reentrant checkpoints of PyTorch stop at the last tensor that the backward pass needs.
_MODES = {"False": "none", "True": "needed", "none": "none", "full": "needed"}
_ONE_DEVICE = FlatFabric(name="one device", bandwidth_bytes_per_s=1e9)


@dataclass(frozen=True)
class StepValidation:
    """Predictions against steps measured on one device."""

    chip: str
    kind: str
    labels: tuple[str, ...]
    measured: Mapping[str, tuple[float, ...]]
    """Measured values by column: ``step_ms`` in milliseconds, ``peak_bytes`` in bytes."""
    predicted: Mapping[str, tuple[float, ...]]
    refused: tuple[str, ...]
    """One line for each row that is not accepted."""

    @property
    def columns(self) -> dict[str, ErrorSummary]:
        """Errors by column."""
        return {name: summarise(self.measured[name], self.predicted[name]) for name in _COLUMNS}

    def worst(self, count: int = 5) -> list[tuple[str, str, float, float, float]]:
        """(row, column, measured, predicted, error) of the largest errors, largest first."""
        rows = [
            (label, column, y, x, x / y - 1.0)
            for column in _COLUMNS
            for label, y, x in zip(
                self.labels, self.measured[column], self.predicted[column], strict=True
            )
        ]
        return sorted(rows, key=lambda row: -abs(row[4]))[:count]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "chip": self.chip,
            "kind": self.kind,
            "columns": {name: error.to_dict() for name, error in self.columns.items()},
            "refused": list(self.refused),
        }


def is_step_table(header: frozenset[str]) -> bool:
    """Whether columns are those of a table of measured steps."""
    return header >= _WRITTEN_BLOCKS or header >= _HUGGINGFACE


def _configurations(path: Path, configs: Path | None) -> Mapping[str, Any]:
    file = path.with_name(f"{path.stem}_configs.json") if configs is None else configs
    if configs is None and not file.exists():
        raise InvalidInputError(
            f"{path}: its models are described in {file.name}, which is missing; put it next to "
            "the file or give --configs"
        )
    by_name = read_document(file)
    if not isinstance(by_name, Mapping):
        raise InvalidInputError(f"{file}: expected configurations by name")
    return by_name


def _huggingface(name: str, configs: Mapping[str, Any]) -> Model:
    if name not in configs:
        raise InvalidInputError(f"model: {name!r} is unknown; {nearest(name, configs)}")
    config = dict(configs[name])
    config["model_type"] = str(config.pop("architecture", "")).lower()
    return from_hf(config).replace(name=name)


def _plan_of(row: CsvRow, software: str) -> dict[str, Any]:
    recompute = row.text("recompute")
    if recompute not in _MODES:
        raise InvalidInputError(
            f"recompute: {recompute!r} is not accepted; {nearest(recompute, _MODES)}"
        )
    micro_batch = row.whole("mbs")
    return {
        "micro_batch": micro_batch,
        "global_batch": micro_batch * row.whole("accum", 1),
        "recompute": _MODES[recompute],
        "seq": row.whole("seq"),
        "software": software,
    }


@dataclass(frozen=True)
class MeasuredStep:
    """One row of a file of measured steps, with the arguments of `predict`."""

    line: int
    """Line of the row in the file."""
    label: str
    model: Model
    cluster: Cluster
    plan: dict[str, Any]
    measured: tuple[float, ...]
    """Milliseconds of the step and peak bytes."""

    @property
    def time_s(self) -> float:
        """Measured seconds of the step."""
        return self.measured[0] / 1e3


def measured_steps(
    path: Path | str, chip: Accelerator, configs: Path | None = None
) -> tuple[list[MeasuredStep], list[str], str]:
    """Read a file of measured steps; see `validate_steps`.

    Returns
    -------
    steps, refused, kind
        Rows that are accepted, a line for each that is not, and the kind of file: ``steps`` or
        ``huggingface steps``.
    """
    path = Path(path)
    header, rows = csv_rows(path)
    written = frozenset(header) >= _WRITTEN_BLOCKS
    configurations = {} if written else _configurations(path, configs)
    software = "pytorch-eager" if written else "huggingface-eager"
    cluster = Cluster(devices=1, fabric=_ONE_DEVICE, chip=chip)
    steps, refused = [], []
    for line, cells in rows:
        row = CsvRow("", cells)
        try:
            model: Model
            if written:
                model = measured_model(cells, row.whole("seq"), row.whole("layers"))
            else:
                model = _huggingface(row.text("model"), configurations)
            values = tuple(row.positive(column) for column in _COLUMNS)
            spec = _plan_of(row, software)
        except PhazeError as error:
            refused.append(f"row {line}: {str(error).splitlines()[0]}")
            continue
        label = f"{row.text('model')} {spec['seq']}x{spec['micro_batch']} {spec['recompute']}"
        steps.append(MeasuredStep(line, label, model, cluster, spec, values))
    return steps, refused, "steps" if written else "huggingface steps"


def validate_steps(
    path: Path | str, chip: Accelerator, configs: Path | None = None
) -> StepValidation:
    """Predict every row of a file of measured steps on a chip.

    Parameters
    ----------
    path
        CSV of one of two kinds. Steps of blocks that were written for the measurement have the
        columns model, layers, seq, mbs, accum, recompute, step_ms and peak_bytes, and the shape as
        `phaze_fast.cost.validation` reads it. Steps of HuggingFace models have model, seq, mbs,
        recompute, mode, step_ms and peak_bytes.
    chip
        The chip they were measured on.
    configs
        Configurations of HuggingFace models by the names in the file; by default the file
        ``NAME_configs.json`` in the folder of ``NAME.csv``.

    Raises
    ------
    InvalidInputError
        Where the file or its configurations are not accepted. A row that is not accepted is listed
        in `refused`.
    """
    steps, refused, kind = measured_steps(path, chip, configs)
    labels, predicted, measured = [], [], []
    for step in steps:
        try:
            plan = predict(step.model, step.cluster, step.plan)
        except PhazeError as error:
            refused.append(f"row {step.line}: {str(error).splitlines()[0]}")
            continue
        predicted.append((1e3 * plan.time_s, plan.allocated_bytes))
        measured.append(step.measured)
        labels.append(step.label)
    if not labels:
        raise InvalidInputError(f"{path}: no row is accepted: {(refused or ['it has none'])[0]}")
    return StepValidation(
        chip=chip.name,
        kind=kind,
        labels=tuple(labels),
        measured=dict(zip(_COLUMNS, zip(*measured, strict=True), strict=True)),
        predicted=dict(zip(_COLUMNS, zip(*predicted, strict=True), strict=True)),
        refused=tuple(refused),
    )
