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

_NEEDED = frozenset(["model", "n_gpus", "global_batch"])
"""Columns without which a table is not one of training runs."""
MEASURED = (
    "iter_time_s",
    "tokens_per_s_per_gpu",
    "tflops_per_gpu",
    "tokens_per_s",
    "samples_per_s",
)
"""Columns of which a table of training runs has at least one."""

_NUMBERS = frozenset(
    [
        *("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq", "n_gpus", "tp", "pp"),
        *("vp", "dp", "cp", "ep", "etp", "micro_batch", "global_batch", "experts", "topk"),
    ]
)


_UNSAID = frozenset(["", "-", "--", "n/a", "na", "nan", "none", "null", "unknown", "?"])
_FAILED = re.compile(r"(?i)\b(oom|out of memory|crash\w*|fail\w*|error|timeout)\b")
_RAN = frozenset(["", "ok", "success", "succeeded", "completed", "done", "passed", "ran"])


@cache
def _names() -> dict[str, tuple[str, float]]:
    """Return, by each other name of a column, the column's name here and the unit of that name."""
    data = package_data(__package__, "runs.yaml")
    names = {other: (name, 1.0) for name, others in data["columns"].items() for other in others}
    return names | {other: (name, unit) for other, (name, unit) in data["units"].items()}


def _named(column: str) -> tuple[str, float]:
    """Return a column's name here and its unit; case, blanks and punctuation do not matter."""
    plain = re.sub(r"[^a-z0-9]+", "_", column.lower()).strip("_")
    return _names().get(plain, (plain, 1.0))


def is_run_table(header: Sequence[str]) -> bool:
    """Whether columns are those of a table of training runs.

    Examples
    --------
    >>> is_run_table(["model", "chip", "devices", "tp", "global_batch", "step_s"])
    True
    """
    names = frozenset(_named(column)[0] for column in header)
    return names >= _NEEDED and not names.isdisjoint(MEASURED)


def _number(text: str) -> str:
    """Drop a remark after a number, commas between thousands, and words that mean no number."""
    known = re.fullmatch(r"([\d.,e+]+) *\(.*\)", text)
    text = known[1] if known else text
    if re.fullmatch(r"\d{1,3}(,\d{3})+(\.\d*)?", text):
        return text.replace(",", "")
    return "" if text.lower() in _UNSAID else text


def _in_unit(text: str, unit: float) -> str:
    """Convert a number from another unit to the column's own; return any other text unchanged."""
    try:
        return text if unit == 1.0 else repr(float(text) * unit)
    except ValueError:
        return text


def standard_cells(cells: Mapping[str, str]) -> dict[str, str]:
    """Return a row under the names and in the units that `read_run` takes, with its status.

    Examples
    --------
    >>> standard_cells({"GPUs": "8", "vocab": "250,880 (250k)", "dp": "4;4", "step_ms": "OOM"})
    {'n_gpus': '8', 'vocab': '250880', 'dp': '4', 'iter_time_s': '', 'status': 'oom'}
    """
    found: dict[str, str] = {}
    for column, cell in cells.items():
        (name, unit), text = _named(column or ""), (cell or "").strip()
        if name in _NUMBERS:
            parts = {part.strip() for part in text.split(";")}  # a cell may list one per stage
            text = _number(parts.pop() if len(parts) == 1 else text)
        elif name in MEASURED or name.startswith("memory_"):
            text = _in_unit(_number(text), unit)
        if text or name not in found:
            found[name] = text
    status, measured = found.get("status", "").lower(), found.get("iter_time_s", "")
    if status in _RAN and _FAILED.search(measured):  # such as OOM in place of the seconds
        status, found["iter_time_s"] = measured.lower(), ""
    found["status"] = "ok" if status in _RAN else status
    peak = re.search(r"max_mem\w*'?\s*[:=]\s*(\d+)", found.get("other", ""))
    if peak and not found.get("memory_bytes"):
        found["memory_bytes"] = peak[1]
    return found


# ---- networks in words ----

_BITS = {"tb/s": 1e12, "gb/s": 1e9, "tbps": 1e12, "gbps": 1e9}
_NODE = re.compile(
    r"(?:(\d+)[ -](?:\w+ )?(?:GPU|device|NeuronCore|accelerator|TPU)s?|NVL-?(\d+))\b", re.I
)
_RATE = re.compile(
    r"(?:(\d+) ?x ?)?(\d+(?:\.\d+)?) ?(Tb/s|Gb/s|Tbps|Gbps|GB/s|TB/s)"
    r"[^,;]*?\b(?:per|a|an|each) (\w+)"
)


@dataclass(frozen=True)
class Network:
    """What a text says of an interconnect."""

    node_devices: int | None
    """Devices of a node; None where the text does not say."""
    beyond_node_bytes_per_s: float | None
    """Bandwidth of one device beyond its node; None where the text does not say."""


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
    size = (int(node[1] or node[2]) or None) if node else None
    if rate is None:
        return Network(size, None)
    count, value, unit, owner = rate.groups()
    bits = _BITS.get(unit.lower(), 0.0) if unit[1] == "b" else {"GB/s": 8e9, "TB/s": 8e12}[unit]
    shared = size or node_devices
    if re.match(r"(?i)gpu|device|neuroncore|accelerator|tpu|chip", owner):
        shared = 1
    reached = int(count or 1) * float(value) * bits / 8.0 / shared
    return Network(size, reached or None)
