"""A page about a sweep: every point, over the axes that vary."""

from __future__ import annotations

from collections import Counter
from typing import Any

from phaze_fast.errors import InvalidInputError
from phaze_fast.report.figures import Point, points_figure
from phaze_fast.report.render import render
from phaze_fast.report.text import area, count, is_number, percent, plan_text, seconds, size
from phaze_fast.runs.sweep import SweepTable

Row = dict[str, Any]

_NAMES = {"model": "Model", "chip": "Chip", "fabric": "Fabric"}
_NUMBERS = {
    "devices": ("Devices", count),
    "global_batch": ("Sequences of a step", count),
    "seq": ("Tokens of a sequence", count),
    "area_mm2": ("Die area", area),
}
"""Columns of numbers in which points may differ: heading and formatter of each."""
_HEADINGS = _NAMES | {name: heading for name, (heading, _) in _NUMBERS.items()}
_MAX_ROWS = 1000


def _varying(rows: list[Row]) -> list[str]:
    """Return the columns in which points differ, without those determined by an earlier column."""
    varying: list[str] = []
    for name in _HEADINGS:
        if len({row.get(name) for row in rows}) < 2:
            continue
        # A column is determined by another if equal values in the other imply equal values in it.
        follows = any(
            len({(row.get(other), row.get(name)) for row in rows})
            == len({row.get(other) for row in rows})
            for other in varying
        )
        if not follows:
            varying.append(name)
    return varying


def _group(row: Row, varying: list[str]) -> str:
    return ", ".join(str(row.get(n)) for n in _NAMES if n in varying) or str(row.get("model"))


def _plan_text(row: Row) -> str:
    return plan_text({name: value for name, value in row.items() if value is not None})


def _text(row: Row) -> str:
    return (
        f"{count(row.get('devices'))} devices, {count(row.get('global_batch'))} sequences of a "
        f"step: {seconds(row.get('time_s'))}, {count(row.get('tokens_per_s'))} tokens/s, "
        f"{_plan_text(row)}"
    )


def _figures(planned: list[Row], varying: list[str]) -> dict[str, Row]:
    figures = {}
    for name in [n for n in _NUMBERS if n in varying] or ["devices"]:
        points = [
            Point(_group(row, varying), float(row[name]), float(row["tokens_per_s"]), _text(row))
            for row in planned
            if is_number(row.get(name))
        ]
        if points:
            figure = points_figure(points, _HEADINGS[name], "Tokens per second")
            figures[name.replace("_", "-")] = figure
    return figures


def _table(planned: list[Row], varying: list[str]) -> Row:
    fastest_first = sorted(planned, key=lambda row: -row["tokens_per_s"])[:_MAX_ROWS]
    names = [n for n in _NAMES if n in varying]
    numbers = {n: _NUMBERS[n] for n in _NUMBERS if n in varying}
    columns = [_NAMES[n] for n in names] + [f"{heading}>" for heading, _ in numbers.values()]
    cells = []
    for row in fastest_first:
        varied = [str(row.get(n)) for n in names]
        varied += [formatter(row.get(n)) for n, (_, formatter) in numbers.items()]
        rates = [seconds(row["time_s"]), count(row["tokens_per_s"]), percent(row.get("mfu"))]
        cells.append([*varied, *rates, size(row.get("memory_bytes")), _plan_text(row)])
    columns += ["Step>", "Tokens / s>", "MFU>", "Memory>", "Plan<"]
    return {"columns": columns, "rows": cells, "total": len(planned)}


def sweep_page(table: SweepTable, title: str = "Sweep", command: str = "") -> str:
    """Render the rows of a sweep as one page of HTML that works offline.

    Parameters
    ----------
    table
        The table that `phaze_fast.sweep` returns.
    title
        Title of the page.
    command
        The command that made the sweep.

    Raises
    ------
    InvalidInputError
        Where the sweep has no row.

    Examples
    --------
    >>> import phaze_fast as pf
    >>> cluster = pf.Cluster(devices=4, fabric="dgx-h100", chip="h100")
    >>> steps = [pf.Training(global_batch=16, micro_batch=m, tp=1) for m in (1, 2)]
    >>> points = [pf.Point(pf.models.load("bertlarge"), cluster, step) for step in steps]
    >>> "Tokens per second" in sweep_page(pf.sweep(points))
    True
    """
    rows = table.rows
    if not rows:
        raise InvalidInputError("sweep: no row is not accepted; expected a point at least")
    planned = [row for row in rows if is_number(row.get("tokens_per_s"))]
    varying = _varying(rows)
    best = []
    if planned:
        fastest = max(planned, key=lambda row: row["tokens_per_s"])
        per_device = max(planned, key=lambda row: row["tokens_per_s"] / row["devices"])
        best.append(("Most tokens a second", _group(fastest, varying), _text(fastest)))
        if per_device is not fastest:
            best.append(("Most of them per device", _group(per_device, varying), _text(per_device)))
    reasons = Counter(
        (str(row.get("status")), str(row.get("reason") or ""))
        for row in rows
        if row.get("status") != "optimal"
    )
    return render(
        "sweep",
        title,
        "sweep",
        _figures(planned, varying),
        points=len(rows),
        states=Counter(str(row.get("status")) for row in rows),
        varying=[_HEADINGS[name].lower() for name in varying],
        best=best,
        table=_table(planned, varying),
        unplanned=[[state, why, count(n)] for (state, why), n in reasons.most_common(_MAX_ROWS)],
        unplanned_points=sum(reasons.values()),
        command=command,
    )
