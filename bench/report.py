"""A table of one benchmark file's times and rates, or of what changed between two.

Usage: python bench/report.py NEW.json [OLD.json]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def load(path: str) -> dict[str, dict[str, Any]]:
    """Benchmarks of a file by name."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        return {b["name"].partition("[")[2].rstrip("]"): b for b in data["benchmarks"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"{path}: not a benchmark file: {error}")


def seconds(value: float) -> str:
    """Seconds for people."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def rate(items: float, value: float) -> str:
    """Evaluations per second for people."""
    per_s = items / value
    for scale, unit in ((1e9, "G/s"), (1e6, "M/s"), (1e3, "k/s")):
        if per_s >= scale:
            return f"{per_s / scale:.3g} {unit}"
    return f"{per_s:.3g} /s"


def aligned(rows: list[list[str]]) -> str:
    """Columns of equal width, the first to the left and the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            row[0].ljust(widths[0]),
            *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)),
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def table(found: dict[str, dict[str, Any]]) -> str:
    """One file: median time, rate, and the ratio to the kernel where there is one."""
    rows = [["subject", "median", "rate", "call/kernel", "target"]]
    for name, b in found.items():
        info, median = b["extra_info"], b["stats"]["median"]
        ratio = f"{info['ratio']:.2f}x" if "ratio" in info else ""
        rows.append(
            [
                name,
                seconds(median),
                rate(info.get("items", 1), median),
                ratio,
                info.get("target", ""),
            ]
        )
    return aligned(rows)


def comparison(new: dict[str, dict[str, Any]], old: dict[str, dict[str, Any]]) -> str:
    """Two files: old and new medians, and how many times faster the new one is."""
    rows = [["subject", "old", "new", "faster"]]
    for name in {**old, **new}:
        before, after = (b[name]["stats"]["median"] if name in b else None for b in (old, new))
        rows.append(
            [
                name,
                seconds(before) if before else "-",
                seconds(after) if after else "-",
                f"{before / after:.2f}x" if before and after else "",
            ]
        )
    return aligned(rows)


def main(arguments: list[str]) -> None:
    """Print the table for one file or the comparison of two."""
    if len(arguments) not in (1, 2):
        sys.exit((__doc__ or "").strip())
    loaded = [load(path) for path in arguments]
    print(table(loaded[0]) if len(loaded) == 1 else comparison(*loaded))


if __name__ == "__main__":
    main(sys.argv[1:])
