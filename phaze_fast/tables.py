"""Results as tables: named columns for pandas, CSV or Parquet, and their non-dominated rows."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from phaze_fast.errors import InvalidInputError, MissingExtraError, brief

Array = np.ndarray[Any, Any]


def needed(module: str, extra: str, what: str) -> Any:
    """Import an optional package, or raise a MissingExtraError with the extra that installs it."""
    try:
        return import_module(module)
    except ImportError:
        raise MissingExtraError(f"{what} needs: pip install 'phaze-fast[{extra}]'") from None


def picked(record: object, *names: str) -> dict[str, Any]:
    """Return some attributes of a record as plain data, by name.

    Examples
    --------
    >>> picked(3 + 4j, "real", "imag")
    {'real': 3.0, 'imag': 4.0}
    """
    return {name: getattr(record, name) for name in names}


def flat_row(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings into columns; lists are omitted.

    Examples
    --------
    >>> flat_row({"tp": 4, "parts_s": {"compute": 1.0}, "stages": [1, 2]})
    {'tp': 4, 'parts_s.compute': 1.0}
    """
    row: dict[str, Any] = {}
    for name, value in data.items():
        if isinstance(value, Mapping):
            row.update(flat_row(value, f"{prefix}{name}."))
        elif not isinstance(value, list | tuple):
            row[f"{prefix}{name}"] = value
    return row


_ODD = np.uint64(0x9E3779B97F4A7C15)
"""Factor of hashes."""


def words_of(records: Array) -> list[Array]:
    """Return columns of 64-bit words that two records share only if all their bytes are equal.

    The size of a record is a multiple of 8 bytes.
    """
    count = records.dtype.itemsize // 8
    words = np.ascontiguousarray(records).view(np.uint64).reshape(len(records), count)
    return list(np.ascontiguousarray(words.T))


def distinct_rows(columns: Sequence[Array]) -> tuple[Array, Array]:
    """Return the first of each set of equal rows, and the number of each row's set.

    Parameters
    ----------
    columns
        At least one, of 64-bit words.

    Examples
    --------
    >>> first, number = distinct_rows([np.array([7, 8, 7], dtype=np.uint64)])
    >>> sorted(first.tolist()), bool(number[0] == number[2] != number[1])
    ([0, 1], True)
    """
    varying = [own for own in columns if len(own) and (own != own[0]).any()] or columns[:1]
    hashes: Array = np.zeros(len(columns[0]), dtype=np.uint64)
    for word in varying:
        hashes = (hashes ^ word) * _ODD
        hashes ^= hashes >> 32
    _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    at = first[inverse]
    if not all((word[at] == word).all() for word in varying):  # two have one hash
        _, first, inverse = np.unique(
            np.stack(varying, axis=1), axis=0, return_index=True, return_inverse=True
        )
    return first, inverse.reshape(-1)


_ROWS, _WIDTH = 12, 100


class Brief:
    """A result that prints one short line per field: shapes of arrays, other values abbreviated."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__repr__" not in cls.__dict__:  # dataclasses would otherwise print every field in full
            cls.__repr__ = Brief.__repr__  # type: ignore[method-assign]

    def __str__(self) -> str:
        lines = [
            f"  {name}: {_abbreviated(value)}"
            for name, value in vars(self).items()
            if not name.startswith("_")
        ]
        return "\n".join([type(self).__name__, *lines])

    def __repr__(self) -> str:
        return str(self)


def _abbreviated(value: Any) -> str:
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple):
        names = value.dtype.names
        several = f"array of {shape} records: {', '.join(names or ())}"
        return several if names else f"{value.dtype} array of shape {shape}"
    if isinstance(value, list | tuple | dict) and len(value) > 4:
        return f"{len(value):,} entries"
    return brief(value)


class Table(Brief):
    """Base of results that are tables: subclasses define `to_columns`, which the exports use.

    A table prints as a headline and the first rows, with those columns of `shown` (by default of
    all) that fit in a line, and says how to get the others.
    """

    shown: ClassVar[tuple[str, ...]] = ()

    def to_columns(self) -> dict[str, Any]:
        """Return the columns by name, all of one length."""
        raise AssertionError("every table has columns of its own")

    def headline(self) -> str:
        """Describe the table, and what is proven about it, in one line."""
        return type(self).__name__

    def __str__(self) -> str:
        columns = self.to_columns()
        count = len(next(iter(columns.values()), ()))
        first = [name for name in self.shown if name in columns]
        more = f"{count - _ROWS:,} more rows; " if count > _ROWS else ""
        return "\n".join(
            [
                f"{self.headline()}: {count:,} row{'' if count == 1 else 's'}",
                *printed_columns({name: columns[name] for name in first or columns}),
                f"{more}all of it: to_columns(), to_pandas(), to_csv(path)",
            ]
        )

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame; needs pandas (extra ``table``)."""
        pandas = needed("pandas", "table", "a DataFrame")
        return pandas.DataFrame({name: list(values) for name, values in self.to_columns().items()})

    def to_csv(self, path: Path | str) -> None:
        """Write a CSV file with a header.

        Text that a spreadsheet would run as a formula is prefixed with an apostrophe.
        """
        columns = self.to_columns()
        try:
            with Path(path).open("w", encoding="utf-8", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(columns)
                for row in zip(*columns.values(), strict=True):
                    writer.writerow([_spreadsheet_text(cell) for cell in row])
        except OSError as error:
            raise InvalidInputError(f"{path}: cannot be written: {error.strerror}") from None

    def to_parquet(self, path: Path | str) -> None:
        """Write a Parquet file; needs pyarrow (extra ``table``)."""
        arrow = needed("pyarrow", "table", "writing Parquet")
        parquet = needed("pyarrow.parquet", "table", "writing Parquet")
        columns = {name: arrow.array(list(values)) for name, values in self.to_columns().items()}
        try:
            parquet.write_table(arrow.table(columns), str(path))
        except OSError as error:
            raise InvalidInputError(f"{path}: cannot be written: {error}") from None


def _spreadsheet_text(cell: Any) -> Any:
    """Return a cell that no spreadsheet runs as a formula."""
    risky = isinstance(cell, str) and len(cell) > 1 and cell[0] in "=+-@\t\r"
    return f"'{cell}" if risky else cell


def printed_columns(columns: Mapping[str, Any]) -> list[str]:
    r"""Lay out the first rows of a table, and the first columns that fit in a line.

    Examples
    --------
    >>> print("\n".join(printed_columns({"tp": [1, 2], "time_s": [0.5, 0.123456]})))
    tp    time_s
     1       0.5
     2  0.123456
    """
    laid_out: list[list[str]] = []
    for name, values in columns.items():
        cells = [name, *(_cell(value) for value in list(values[:_ROWS]))]
        width = max(map(len, cells))
        if sum(len(column[0]) + 2 for column in laid_out) + width > _WIDTH:
            break
        laid_out.append([cell.rjust(width) for cell in cells])
    return ["  ".join(cells).rstrip() for cells in zip(*laid_out, strict=True)]


def _cell(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 40 else text[:37] + "..."


def joined_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Turn rows into columns; a field that a row lacks is None."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def non_dominated(values: Array) -> Array:
    """Positions of the non-dominated rows, ascending; of equal rows only the first.

    A row dominates another where it is at most as large in every column. Takes O(f n) comparisons
    of rows, where f of the n rows are non-dominated.

    Parameters
    ----------
    values
        One row per point and one column per objective; smaller is better.

    Examples
    --------
    >>> non_dominated(np.array([[1.0, 3.0], [2.0, 2.0], [2.0, 3.0], [2.0, 2.0]])).tolist()
    [0, 1]
    """
    at = np.lexsort((np.arange(len(values)), *values.T[::-1]))
    columns = [np.ascontiguousarray(column[at]) for column in values.T]
    front: list[int] = []
    while len(at):  # no remaining row dominates the lexicographically first one
        front.append(int(at[0]))
        dominated = np.logical_and.reduce([column[0] <= column[1:] for column in columns])
        stay = np.flatnonzero(~dominated) + 1
        at, columns = at[stay], [column[stay] for column in columns]
    return np.array(sorted(front), dtype=np.int64)
