"""Files of placement problems: one in a .json file, or many in a .jsonl file, one a line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phaze_fast.documents import parse_json, read_text
from phaze_fast.errors import InvalidInputError

__all__ = ["ProblemRecord", "read_records"]


@dataclass(frozen=True)
class ProblemRecord:
    """One problem of a file as plain data, or what is wrong with its text."""

    name: str
    """What to call it where it has no name."""
    where: str
    """File and line, for messages."""
    data: Any
    error: str = ""
    """Why there is no data."""


def read_records(path: Path | str) -> Iterator[ProblemRecord]:
    """Read what a file holds; empty lines are passed over.

    Raises
    ------
    InvalidInputError
        Where the file cannot be read or holds nothing. Lines that are not JSON come back with
        their error, so that the others are not lost.
    """
    file = Path(path)
    text = read_text(file)
    many = file.suffix == ".jsonl"
    lines = text.split("\n") if many else [text]
    if not text.strip():
        raise InvalidInputError(f"{file}: it is empty; expected at least one problem")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{file}:{number}" if many else str(file)
        name = f"{file.stem}:{number}" if len(lines) > 1 else file.stem
        try:
            yield ProblemRecord(name, where, parse_json(line))
        except InvalidInputError as error:
            yield ProblemRecord(name, where, None, str(error))
