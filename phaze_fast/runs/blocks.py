"""Sweeps of any length in memory that does not grow: block after block, each in a directory.

A sweep keeps all its points and rows; ten million of them do not fit. Here points come from an
iterator, a block at a time, and rows stay on disk.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phaze_fast.documents import digest
from phaze_fast.errors import InvalidInputError
from phaze_fast.runs.journal import RESULTS, decode_line
from phaze_fast.runs.sweep import Point, sweep

__all__ = ["BlockCounts", "read_blocks", "sweep_blocks"]

DONE = "done.json"


@dataclass(frozen=True)
class BlockCounts:
    """What a sweep in blocks has on disk.

    Examples
    --------
    >>> BlockCounts(points=3, rows=3, resumed=0, statuses={"optimal": 3}).rows
    3
    """

    points: int
    rows: int
    """Distinct points of each block, added up."""
    resumed: int
    """Of these, rows that were there before."""
    statuses: dict[str, int]


def _folder(out: Path, number: int) -> Path:
    return out / f"{number // 1000:04}" / f"{number % 1000:03}"


def _finished(folder: Path, asked: str) -> dict[str, int] | None:
    """Statuses of a block that was finished with these points before."""
    try:
        found = json.loads((folder / DONE).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict) or found.get("asked") != asked:
        return None
    statuses = found.get("statuses")
    if not isinstance(statuses, dict) or not all(isinstance(n, int) for n in statuses.values()):
        return None
    return {str(name): int(count) for name, count in statuses.items()}


def sweep_blocks(
    points: Iterable[Point], out: Path | str, block: int = 10_000, **options: Any
) -> BlockCounts:
    """Evaluate points block after block into directories below `out`.

    Parameters
    ----------
    points
        Any number, in the same order each time; taken `block` at a time and not kept.
    out
        Directory; the same call finds there what is done and goes on.
    block
        Points that are held in memory at once.
    options
        Of `sweep`, such as executor, chunk, threads and evaluate.

    Returns
    -------
    BlockCounts
        How many points and rows there are. `read_blocks` reads the rows.

    Raises
    ------
    InvalidInputError
        Where a directory cannot be used, or holds other points.

    Examples
    --------
    >>> import tempfile
    >>> import phaze_fast as pf
    >>> cluster = pf.Cluster(devices=4, fabric="dgx-h100", chip="h100")
    >>> steps = [pf.Training(global_batch=n, micro_batch=4, tp=1) for n in (16, 32, 48)]
    >>> points = [Point(pf.models.load("bertlarge"), cluster, step) for step in steps]
    >>> with tempfile.TemporaryDirectory() as out:
    ...     counts = sweep_blocks(points, out, block=2)
    ...     counts.points, len(list(read_blocks(out)))
    (3, 3)
    """
    if not isinstance(block, int) or isinstance(block, bool) or block < 1:
        raise InvalidInputError(f"block: {block!r} is not accepted; expected 1 or more")
    coming = iter(points)
    statuses: Counter[str] = Counter()
    count, resumed = 0, 0
    for number in itertools.count():
        own = list(itertools.islice(coming, block))
        if not own:
            break
        count += len(own)
        folder = _folder(Path(out), number)
        asked = digest(sorted({point.key for point in own}))
        known = _finished(folder, asked)
        if known is None:
            table = sweep(own, folder, **options)
            distinct = {row["key"]: row["status"] for row in table.rows}
            known = dict(Counter(distinct.values()))
            resumed += table.resumed
            text = json.dumps({"asked": asked, "statuses": known}) + "\n"
            (folder / DONE).write_text(text, "utf-8")
        else:
            resumed += sum(known.values())
        statuses.update(known)
    return BlockCounts(count, sum(statuses.values()), resumed, dict(statuses))


def read_blocks(out: Path | str) -> Iterator[dict[str, Any]]:
    """Rows that a sweep in blocks has on disk, block after block, one at a time.

    Lines that are damaged are left out; the sweep itself mends them.
    """
    for file in sorted(Path(out).glob(f"*/*/{RESULTS}")):
        rows: dict[str, dict[str, Any]] = {}
        with file.open("rb") as lines:
            for line in lines:
                row = decode_line(line.rstrip(b"\n"))
                if row is not None:
                    rows[row["key"]] = row
        yield from rows.values()
