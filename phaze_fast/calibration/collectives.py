"""Measured collectives: tables of one node's collectives, and the output of nccl-tests.

A table has the columns system, op, num_gpus, bytes and latency_ms. Sizes are those of nccl-tests:
the vector of an all-reduce, the full input of a reduce-scatter or output of an all-gather, the
send buffer of an all-to-all.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from phaze_fast.cost import ColumnError, collective_batch
from phaze_fast.cost.validation import column_error
from phaze_fast.documents import CsvRow, csv_rows, package_data, read_text
from phaze_fast.errors import InvalidInputError, nearest
from phaze_fast.hardware import AnyFabric, presets
from phaze_fast.tables import Array

_COLUMNS = ("system", "op", "num_gpus", "bytes", "latency_ms")
_LARGE_BYTES = 2**20  # bandwidth dominates from this size on, latency below


def _names(kind: str) -> dict[str, str]:
    return dict(package_data(__package__, "runs.yaml")["collectives"][kind])


@dataclass
class CollectiveRows:
    """Measured collectives, one per row."""

    system: list[str] = field(default_factory=list)
    """Name of the machine; empty where the file does not say."""
    op: list[str] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    payload_bytes: list[float] = field(default_factory=list)
    time_s: list[float] = field(default_factory=list)

    def add(self, system: str, op: str, ranks: int, payload: float, time_s: float) -> None:
        """Append one row."""
        self.extend(CollectiveRows([system], [op], [ranks], [payload], [time_s]))

    def extend(self, rows: CollectiveRows) -> None:
        """Append the rows of another file."""
        for name, values in vars(rows).items():
            getattr(self, name).extend(values)

    def predicted_s(self, fabric: AnyFabric | None = None) -> Array:
        """Predict seconds on a fabric, or on the preset of each row's system."""
        times_s = np.empty(len(self.op))
        for name in dict.fromkeys(self.system):
            at = np.flatnonzero(np.array(self.system) == name)
            times_s[at] = collective_batch(
                presets.fabric(_names("fabrics")[name]) if fabric is None else fabric,
                [self.op[i] for i in at],
                np.array(self.payload_bytes)[at],
                np.array(self.ranks)[at],
            ).time_s
        return times_s


@dataclass(frozen=True)
class CollectiveValidation:
    """Predicted collectives against measured ones."""

    rows: CollectiveRows
    predicted_s: Array
    columns: dict[str, ColumnError]
    """Errors of all rows, of those from 1 MiB and of those below."""
    groups: dict[str, ColumnError]
    """Errors by system and operation."""

    def to_dict(self) -> dict[str, Any]:
        """Return the errors as plain data."""
        return {
            "kind": "collectives",
            "columns": {name: vars(error) for name, error in self.columns.items()},
            "by_operation": {name: vars(error) for name, error in self.groups.items()},
        }


def _is_nccl_tests(text: str) -> bool:
    head = text[:20_000]
    return "nThread" in head and "algbw" in head


def is_collective_table(path: Path | str) -> bool:
    """Whether a file has measured collectives rather than operators.

    Examples
    --------
    >>> is_collective_table("nowhere.csv")
    False
    """
    file = Path(path)
    if not file.is_file():
        return False
    text = read_text(file)
    header = next((x for x in text.splitlines() if x.strip() and not x.startswith("#")), "")
    names = {name.strip() for name in header.removeprefix("\ufeff").split(",")}
    return set(_COLUMNS) <= names or _is_nccl_tests(text)


def _table(path: Path) -> CollectiveRows:
    rows, operations = CollectiveRows(), _names("operations")
    for line, cells in csv_rows(path)[1]:
        row = CsvRow(f"{path}, line {line}", cells)
        op = row.text("op")
        if op not in operations:
            raise InvalidInputError(
                f"{row.where}: op: {op!r} is unknown; {nearest(op, operations)}"
            )
        ranks, payload = row.whole("num_gpus"), row.positive("bytes")
        time_s = 1e-3 * row.positive("latency_ms")
        rows.add(row.text("system"), operations[op], ranks, payload, time_s)
    return rows


def _nccl_tests(path: Path, text: str) -> CollectiveRows:
    operations = _names("operations")
    known = "|".join(sorted(operations, key=len, reverse=True))
    named = re.search(rf"({known})_perf", text) or re.search(rf"({known})", path.name)
    if named is None:
        raise InvalidInputError(
            f"{path}: the operation is not named; expected e.g. all_reduce_perf in the output or "
            "all_reduce in the file's name"
        )
    ranks = len(re.findall(r"^#\s+Rank\s+\d+", text, flags=re.M))
    if ranks < 2:
        raise InvalidInputError(
            f"{path}: {ranks} lines '# Rank ...' were found; expected 2 or more"
        )
    rows, column = CollectiveRows(), 0
    for number, line in enumerate(text.splitlines(), start=1):
        cells = line.split()
        if cells[:1] == ["#"] and "time" in cells:
            column = cells.index("time") - 1  # the header line begins with a further word, "#"
        elif len(cells) > column > 0 and cells[0].isdigit() and (size := float(cells[0])) > 0:
            row = CsvRow(f"{path}, line {number}", {"time": cells[column]})
            seconds = 1e-6 * row.positive("time")
            rows.add("", operations[named.group(1)], ranks, size, seconds)
    return rows


def read_collectives(path: Path | str) -> CollectiveRows:
    """Read measured collectives.

    Raises
    ------
    InvalidInputError
        Where the file cannot be read or a cell is not accepted; the message names line and column.
    """
    file = Path(path)
    text = read_text(file)
    rows = _nccl_tests(file, text) if _is_nccl_tests(text) else _table(file)
    if not rows.op:
        raise InvalidInputError(f"{path}: there are no rows")
    return rows


def validate_collectives(path: Path | str, fabric: AnyFabric | None = None) -> CollectiveValidation:
    r"""Predict measured collectives and compare.

    Parameters
    ----------
    path
        A table, or the output of nccl-tests.
    fabric
        The interconnect that the collectives ran on; by default the preset of each row's `system`.

    Raises
    ------
    InvalidInputError
        Where the file is not accepted, a system is unknown, or a group does not fit the fabric.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder) / "mine.csv"
    ...     text = "system,op,num_gpus,bytes,latency_ms\nh100,all_reduce,8,1073741824,4.0\n"
    ...     _ = file.write_text(text)
    ...     found = validate_collectives(file)
    >>> found.columns["latency_ms"].rows
    1
    """
    rows = read_collectives(path)
    if fabric is None:
        for name in dict.fromkeys(rows.system):
            if name not in _names("fabrics"):
                said = f"system: {name!r} is unknown" if name else "no system is named"
                raise InvalidInputError(
                    f"{path}: {said}; expected --fabric, or one of {', '.join(_names('fabrics'))}"
                )
    predicted, measured = rows.predicted_s(fabric), np.array(rows.time_s)
    if not np.isfinite(predicted).all():
        bad = int(np.flatnonzero(~np.isfinite(predicted))[0])
        raise InvalidInputError(
            f"{path}: {rows.op[bad]} over {rows.ranks[bad]} ranks does not fit the fabric"
        )
    large = np.array(rows.payload_bytes) >= _LARGE_BYTES
    names = np.array([f"{s} {o}".strip() for s, o in zip(rows.system, rows.op, strict=True)])
    by_size = {"latency_ms": large | ~large, "latency_ms >= 1 MiB": large}
    by_size["latency_ms < 1 MiB"] = ~large
    by_name = {name: names == name for name in dict.fromkeys(names.tolist())}

    def errors(parts: dict[str, Array]) -> dict[str, ColumnError]:
        return {n: column_error(measured[k], predicted[k]) for n, k in parts.items() if k.any()}

    return CollectiveValidation(rows, predicted, errors(by_size), errors(by_name))
