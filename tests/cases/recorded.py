"""Records of answers in files of ``golden``: written, and compared with today's."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

SAME = 1e-9


def plain(value: Any) -> Any:
    """Plain data as a file has it: numbers to 13 digits, which differ by less on other machines."""
    if isinstance(value, dict):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.13g}")
    return value if isinstance(value, int | str | None) else str(value)


@cache
def recorded_rows(file: Path) -> Any:
    """Read the rows of a record, once."""
    return json.loads(file.read_text("utf-8"))


def write_record(file: Path, rows: list[Any]) -> None:
    """Write one row of the record on each line."""
    lines = ",\n".join(json.dumps(row, sort_keys=True) for row in rows)
    file.write_text(f"[\n{lines}\n]\n", "utf-8")


def assert_as_recorded(found: Any, recorded: Any, where: str = "", same: float = SAME) -> None:
    """Compare numbers to a billionth, all else exactly; the message names the part that differs."""
    if isinstance(recorded, float) and isinstance(found, float | int):
        assert math.isclose(found, recorded, rel_tol=same), (where, found, recorded)
    elif isinstance(recorded, dict) and isinstance(found, dict):
        assert sorted(found) == sorted(recorded), where
        for name, part in recorded.items():
            assert_as_recorded(found[name], part, f"{where}.{name}", same)
    elif isinstance(recorded, list) and isinstance(found, list):
        assert len(found) == len(recorded), (where, found, recorded)
        for position, part in enumerate(recorded):
            assert_as_recorded(found[position], part, f"{where}[{position}]", same)
    else:
        assert found == recorded, (where, found, recorded)
