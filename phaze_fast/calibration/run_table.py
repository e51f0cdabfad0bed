"""Tables of training runs as others write them: columns by other names, words around numbers.

`standard_cells` returns a row under the column names that `phaze_fast.calibration.published` reads;
`network_of` reads an interconnect described in words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from phaze_fast.documents import package_data

_NEEDED = frozenset(["model", "n_gpus", "iter_time_s", "global_batch"])
"""Columns without which a table is not one of training runs."""

_NUMBERS = frozenset(
    [
        *("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq", "n_gpus", "tp", "pp"),
        *("vp", "dp", "cp", "ep", "etp", "micro_batch", "global_batch", "experts", "topk"),
    ]
)


@cache
def _names() -> dict[str, str]:
    """Return the columns by the other names that they are accepted under."""
    columns = package_data(__package__, "runs.yaml")["columns"]
    return {other: name for name, others in columns.items() for other in others}


def is_run_table(header: Sequence[str]) -> bool:
    """Whether columns are those of a table of training runs.

    Examples
    --------
    >>> is_run_table(["model", "chip", "devices", "tp", "global_batch", "step_s"])
    True
    """
    return frozenset(_names().get(column, column) for column in header) >= _NEEDED


def _number(text: str) -> str:
    """Drop a remark behind a number, and a dash that stands for none."""
    known = re.fullmatch(r"([\d.e+]+) *\(.*\)", text)
    return known[1] if known else "" if text == "-" else text


def standard_cells(cells: Mapping[str, str]) -> dict[str, str]:
    """Return a row under the names that `read_run` takes, numbers without remarks.

    Examples
    --------
    >>> standard_cells({"devices": "8", "vocab": "250880 (250k)", "dp": "4;4"})
    {'n_gpus': '8', 'vocab': '250880', 'dp': '4'}
    """
    found: dict[str, str] = {}
    for column, cell in cells.items():
        name, text = _names().get(column, column), (cell or "").strip()
        if name in _NUMBERS:
            parts = {part.strip() for part in text.split(";")}  # one value for each stage
            text = _number(parts.pop() if len(parts) == 1 else text)
        if text or name not in found:
            found[name] = text
    peak = re.search(r"max_mem\w*'?\s*[:=]\s*(\d+)", found.get("other", ""))
    if peak and not found.get("memory_bytes"):
        found["memory_bytes"] = peak[1]
    return found


# ---- networks in words ----

_BITS = {"tb/s": 1e12, "gb/s": 1e9, "tbps": 1e12, "gbps": 1e9}
_NODE = re.compile(r"(\d+)[ -](?:\w+ )?(?:GPU|device|NeuronCore|accelerator|TPU)s?\b", re.I)
_RATE = re.compile(
    r"(?:(\d+) ?x ?)?([\d.]+) ?(Tb/s|Gb/s|Tbps|Gbps|GB/s|TB/s)[^,;]*?\b(?:per|a|an|each) (\w+)"
)


@dataclass(frozen=True)
class Network:
    """What words say of an interconnect."""

    node_devices: int | None
    """Devices of a node; None where they are not said."""
    beyond_node_bytes_per_s: float | None
    """Bandwidth of one device beyond its node; None where it is not said."""


def network_of(words: str, node_devices: int) -> Network:
    """Read an interconnect described in words.

    Parameters
    ----------
    words
        Such as ``8-GPU NVLink nodes, 4 x 100 Gb/s Omni-Path per node``.
    node_devices
        Devices of a node where the words do not say.

    Examples
    --------
    >>> network_of("8-GPU NVLink nodes, 4 x 100 Gb/s Omni-Path per node", 8)
    Network(node_devices=8, beyond_node_bytes_per_s=6250000000.0)
    """
    node, rate = _NODE.search(words), _RATE.search(words)
    size = int(node[1]) if node else None
    if rate is None:
        return Network(size, None)
    count, value, unit, owner = rate.groups()
    bits = _BITS.get(unit.lower(), 0.0) if unit[1] == "b" else {"GB/s": 8e9, "TB/s": 8e12}[unit]
    shared = size or node_devices
    if re.match(r"(?i)gpu|device|neuroncore|accelerator|tpu|chip", owner):
        shared = 1
    return Network(size, int(count or 1) * float(value) * bits / 8.0 / shared)
