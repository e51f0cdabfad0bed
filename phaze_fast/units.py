"""Quantities as people write them ("128 MiB", "200 Gb/s"), read to SI numbers and formatted back.

Inside the package every number is SI (seconds, bytes, bytes per second, hertz, watts) except area,
which is in mm2; conversion happens here, at the edge, and nowhere else.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal

from phaze_fast.errors import InvalidInputError

KIB = 1024
MIB = 1024**2
GIB = 1024**3
GB = 10**9

_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
_SMALL = {"": 1.0, "m": 1e-3, "u": 1e-6, "µ": 1e-6, "n": 1e-9, "p": 1e-12}
_BYTES = {f"{prefix}B": scale for prefix, scale in {**_DECIMAL, **_BINARY}.items()}
_BITS = {f"{prefix}b": scale / 8 for prefix, scale in {**_DECIMAL, **_BINARY}.items()}

_UNITS: dict[str, dict[str, float]] = {
    "bytes": _BYTES,
    "bytes/s": {f"{unit}/s": scale for unit, scale in {**_BYTES, **_BITS}.items()},
    "Hz": {f"{prefix}Hz": scale for prefix, scale in _DECIMAL.items()},
    "s": {
        **{f"{prefix}s": scale for prefix, scale in _SMALL.items()},
        "min": 60.0,
        "h": 3600.0,
        "d": 86400.0,
    },
    "W": {f"{prefix}W": scale for prefix, scale in {**_SMALL, **_DECIMAL}.items()},
    "mm2": {"mm2": 1.0, "mm^2": 1.0, "um2": 1e-6, "cm2": 100.0},
}
_EXAMPLES = {
    "bytes": "'128 MiB'",
    "bytes/s": "'1.2 TB/s' or '200 Gb/s'",
    "Hz": "'1.05 GHz'",
    "s": "'2 us', '10 min' or '1 h'",
    "W": "'400 W'",
    "mm2": "'278.83 mm2'",
}
_QUANTITY = re.compile(
    r"\s*([+-]?(?:\d+(?:_\d+)*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([^\s\d]\S*)?\s*"
)


def parse_quantity(value: object, unit: str) -> float:
    """Convert a number, or a string with a unit, into an SI number.

    Parameters
    ----------
    value
        A number already in `unit`, or text such as ``"128 MiB"``.
    unit
        One of ``bytes``, ``bytes/s``, ``Hz``, ``s``, ``W``, ``mm2``.

    Returns
    -------
    float
        The value in `unit`.

    Raises
    ------
    InvalidInputError
        Where the text is no number, or its unit is not one of this kind.

    Examples
    --------
    >>> parse_quantity("128 MiB", "bytes")
    134217728.0
    >>> parse_quantity("200 Gb/s", "bytes/s")
    25000000000.0
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        kind = type(value).__name__
        raise InvalidInputError(f"a {kind} is not accepted; expected a number of {unit}")
    if not isinstance(value, str):
        try:
            return float(value)
        except OverflowError:
            raise InvalidInputError(f"a number of {unit} this large is not accepted") from None
    value = value.strip()[:80].replace("\u03bc", "\u00b5")  # Greek mu for the micro sign
    match = _QUANTITY.fullmatch(value)
    if match is None:
        raise InvalidInputError(
            f"{value!r} is not accepted; expected a number of {unit}, such as {_EXAMPLES[unit]}"
        )
    number, suffix = match.groups()
    scale = 1.0 if suffix is None else _UNITS[unit].get(suffix)
    if scale is None:
        raise InvalidInputError(
            f"{value!r} is not accepted: no unit {suffix!r} of {unit}; write {_EXAMPLES[unit]}"
        )
    try:  # in decimal, so that 4.1 GB is 4,100,000,000 bytes to the last one
        return float(Decimal(number) * Decimal(repr(scale)))
    except ArithmeticError:  # the exponent is too large for a float
        return float(number)


def format_scaled(value: float, steps: list[tuple[float, str]]) -> str:
    """Format a number in the first of some units, largest first, that it reaches, or the last.

    Examples
    --------
    >>> format_scaled(1234.0, [(1e3, "kJ"), (1.0, "J")])
    '1.234 kJ'
    """
    scale, suffix = next((step for step in steps if abs(value) >= step[0]), steps[-1])
    return f"{value / scale:.4g} {suffix}"


def format_bytes(value: float) -> str:
    """Format bytes for people, in binary multiples.

    Examples
    --------
    >>> format_bytes(134217728)
    '128 MiB'
    """
    if value >= 1000 * 2.0**50:
        return f"{value:.4g} B"
    steps = [(s, f"{p}B") for p, s in reversed(_BINARY.items())]
    return format_scaled(value, [*steps, (1.0, "B")])


def format_bandwidth(value: float) -> str:
    """Format bytes per second for people, in decimal multiples.

    Examples
    --------
    >>> format_bandwidth(1.2e12)
    '1.2 TB/s'
    """
    return format_scaled(value, [(1e15, "PB/s"), (1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s")])


def format_flops(value: float) -> str:
    """Format floating-point operations per second for people.

    Examples
    --------
    >>> format_flops(275.25e12)
    '275.2 TFLOP/s'
    """
    return format_scaled(value, [(1e15, "PFLOP/s"), (1e12, "TFLOP/s"), (1e9, "GFLOP/s")])


def format_time(value: float) -> str:
    """Format seconds for people.

    Examples
    --------
    >>> format_time(0.00125)
    '1.25 ms'
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g} s"
    return format_scaled(value, [(1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")])


def format_area(value: float) -> str:
    """Format an area in mm2 for people.

    Examples
    --------
    >>> format_area(278.826676)
    '278.83 mm2'
    """
    return f"{value:.2f} mm2"


def format_count(value: int) -> str:
    """Format an integer for people.

    Examples
    --------
    >>> format_count(29360)
    '29,360'
    """
    return f"{value:,}"
