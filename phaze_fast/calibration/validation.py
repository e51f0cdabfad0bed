"""Predictions of published training runs against what was measured, by group.

Every row goes through `phaze_fast.predict`: there is no second model for validation.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phaze_fast.calibration.published import (
    PublishedRun,
    RowRefusedError,
    UnsupportedError,
    is_run_table,
    read_run,
)
from phaze_fast.calibration.statistics import ErrorSummary, pick_regret, summarise
from phaze_fast.documents import read_text
from phaze_fast.errors import InvalidInputError, PhazeError, nearest
from phaze_fast.planning import Plan, predict

__all__ = ["GROUPINGS", "PredictedRun", "RunGroup", "RunValidation", "csv_rows", "validate_runs"]


@dataclass(frozen=True)
class PredictedRun:
    """A published run and the plan it was predicted by."""

    run: PublishedRun
    plan: Plan

    @property
    def time_s(self) -> float:
        """Seconds of a step as the source counts them: with its share of evaluation, if any.

        An evaluation is forward passes: a third of what a step takes but for what it computes
        again.
        """
        again = self.plan.parts_s["recompute"]
        return self.plan.time_s + self.run.evaluated * (self.plan.time_s - again) / 3.0

    @property
    def interval_s(self) -> tuple[float, float]:
        """Bounds of the same seconds."""
        low, high = (self.time_s / self.plan.time_s * bound for bound in self.plan.interval_s)
        return low, high

    @property
    def error(self) -> float:
        """Of the seconds of a step, as a fraction; positive where predicted too long."""
        return self.time_s / self.run.time_s - 1.0

    @property
    def reported_bytes(self) -> float:
        """What the software would report of the fullest device."""
        return self.plan.allocated_bytes * (1.0 + self.run.plan.software.reserved_share)


GROUPINGS: Mapping[str, Callable[[PublishedRun], str]] = {
    "source": lambda run: run.source,
    "chip": lambda run: run.chip,
    "software": lambda run: run.software,
    "model": lambda run: run.model.name,
}
"""What rows can be grouped by."""


@dataclass(frozen=True)
class RunGroup:
    """The rows of one group: errors, and what was left out."""

    name: str
    rows: tuple[PredictedRun, ...]
    unsupported: Mapping[str, int]
    """Why rows are not predicted, and how many."""

    @property
    def time(self) -> ErrorSummary | None:
        """Errors of the seconds of a step."""
        if not self.rows:
            return None
        measured = [row.run.time_s for row in self.rows]
        return summarise(measured, [row.time_s for row in self.rows])

    @property
    def memory(self) -> ErrorSummary | None:
        """Errors of the bytes of a device, where rows say them."""
        known = [row for row in self.rows if row.run.memory_bytes > 0]
        if not known:
            return None
        measured = [row.run.memory_bytes for row in known]
        return summarise(measured, [row.reported_bytes for row in known])

    @property
    def regret(self) -> Mapping[str, float | int] | None:
        """What the plan that is predicted to be fastest loses, where rows are alternatives."""
        return pick_regret((row.run.query, row.run.time_s, row.time_s) for row in self.rows)

    @property
    def coverage(self) -> float | None:
        """Share of measured steps inside the interval of their prediction."""
        rows = self.rows
        inside = [r.interval_s[0] <= r.run.time_s <= r.interval_s[1] for r in rows]
        return sum(inside) / len(inside) if inside else None

    def to_dict(self) -> dict[str, Any]:
        """Give it as plain data."""
        time, memory = self.time, self.memory
        return {
            "iter_time_s": {"rows": 0} if time is None else time.to_dict(),
            "memory_gib": {"rows": 0} if memory is None else memory.to_dict(),
            "unsupported": dict(self.unsupported),
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
        """All groups as one."""
        unsupported: Counter[str] = Counter()
        for group in self.groups:
            unsupported.update(group.unsupported)
        rows = tuple(row for group in self.groups for row in group.rows)
        return RunGroup("all", rows, dict(unsupported))

    def worst(self, count: int = 8) -> list[PredictedRun]:
        """Rows with the largest errors of time, largest first."""
        return sorted(self.all_rows.rows, key=lambda row: -abs(row.error))[:count]

    def to_dict(self) -> dict[str, Any]:
        """Give it as plain data: groups by name, and all rows together as columns."""
        total = self.all_rows.to_dict()
        return {
            "kind": "runs",
            "by": self.by,
            "groups": {group.name: group.to_dict() for group in self.groups},
            "columns": {name: total[name] for name in ("iter_time_s", "memory_gib")},
            "unsupported": total["unsupported"],
            "refused": list(self.refused),
        }


def csv_rows(path: Path | str) -> tuple[list[str], list[tuple[int, dict[str, str]]]]:
    """Read a CSV file: its header, and its rows with the line that each begins on.

    Raises
    ------
    InvalidInputError
        Where the file cannot be read or is not CSV.
    """
    text = read_text(Path(path)).removeprefix("\ufeff")
    reader = csv.reader(text.splitlines(keepends=True), strict=True)
    rows: list[tuple[int, dict[str, str]]] = []
    header: list[str] = []
    begins = 1
    try:
        for cells in reader:
            if cells and not cells[0].startswith("#"):
                if not header:
                    header = [name.strip() for name in cells]
                else:
                    rows.append((begins, dict(zip(header, cells, strict=False))))
            begins = reader.line_num + 1
    except csv.Error as error:
        raise InvalidInputError(f"{path}: not a CSV file: {error}") from None
    return header, rows


def _reason(error: PhazeError) -> str:
    """Say in one clause why there is no prediction, without the numbers of one row."""
    text = str(error).splitlines()[0]
    return text.split(": ", 1)[1] if ": " in text else text


def validate_runs(
    path: Path | str, by: str = "source", progress: Callable[[int, int], None] | None = None
) -> RunValidation:
    """Predict every row of a table of published training runs and say how far off it is.

    Parameters
    ----------
    path
        CSV with a row for each run: model, devices, plan, seconds of a step, perhaps bytes.
    by
        What rows are grouped by, a name of `GROUPINGS`.
    progress
        Called with rows done and rows in all.

    Raises
    ------
    InvalidInputError
        Where the file is not such a table. A row that is not accepted is listed in `refused`, and
        the run goes on.

    Examples
    --------
    >>> import tempfile
    >>> from phaze_fast.calibration.published import RUN_COLUMNS
    >>> row = dict.fromkeys(sorted(RUN_COLUMNS), "") | {"source": "mine", "model": "llama2-7b"}
    >>> with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
    ...     _ = file.write(",".join(row) + chr(10) + ",".join(row.values()) + chr(10))
    ...     file.flush()
    ...     validate_runs(file.name).refused
    ('row 2: iter_time_s: is missing; expected the seconds of a step',)
    """
    if by not in GROUPINGS:
        raise InvalidInputError(f"by: {by!r} is not accepted; {nearest(by, GROUPINGS)}")
    header, rows = csv_rows(path)
    if not is_run_table(header):
        raise InvalidInputError(f"{path}: not a table of training runs")
    return validated(rows, by, progress)


def validated(
    rows: Sequence[tuple[int, Mapping[str, str]]],
    by: str = "source",
    progress: Callable[[int, int], None] | None = None,
) -> RunValidation:
    """Predict rows of a table of runs, each with its line; as `validate_runs`."""
    name_of = GROUPINGS[by]
    found: dict[str, list[PredictedRun]] = {}
    unsupported: dict[str, Counter[str]] = {}
    refused: list[str] = []
    for done, (line, cells) in enumerate(rows):
        source = (cells.get("source") or "").strip() or "(no source)"
        group = source if by == "source" else (cells.get(_COLUMN[by]) or "").strip()
        try:
            run = read_run(line, cells)
            group = name_of(run)
            found.setdefault(group, []).append(PredictedRun(run, _predicted(run)))
        except RowRefusedError as error:
            refused.append(str(error))
        except UnsupportedError as error:
            unsupported.setdefault(group, Counter())[str(error)] += 1
        if progress is not None:
            progress(done + 1, len(rows))
    groups = (
        RunGroup(name, tuple(found.get(name, ())), dict(unsupported.get(name, {})))
        for name in dict.fromkeys([*found, *unsupported])
    )
    return RunValidation(by, tuple(groups), tuple(refused))


_COLUMN = {"chip": "gpu", "software": "framework", "model": "model"}
"""Column by which rows that cannot be read are grouped."""


def _predicted(run: PublishedRun) -> Plan:
    try:
        return predict(run.model, run.cluster, run.plan)
    except PhazeError as error:
        raise UnsupportedError(_reason(error)) from None


def errors_of(rows: Iterable[PredictedRun]) -> list[float]:
    """Signed relative errors of time."""
    return [row.error for row in rows]
