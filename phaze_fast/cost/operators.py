"""Single operators, from their shapes to the records that the cost kernels read.

Graphs come with their operators; this is for asking about operators on their own. Bytes are counted
as in graphs: every array once, bf16 unless told otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from phaze_fast import _core
from phaze_fast.errors import InvalidInputError, nearest
from phaze_fast.opgraph.graph import KINDS, UNITS

__all__ = ["attention_ops", "product_ops", "vector_ops"]

Array = np.ndarray[Any, Any]

_ELEMENT_BYTES = 2.0
_CODES = {name: code for code, name in enumerate(_core.FUNCTIONS)}
_ARRAYS_READ = {"add": 2, "multiply": 2}
_ADAM_BYTES = 14.0  # parameter and two moments read and written, gradient read
_ID_BYTES = 8.0


def _is_whole(array: Array) -> bool:
    if not array.size or array.dtype.kind == "i":
        return True
    return array.dtype.kind == "u" and int(array.max()) < 2**63


def _whole(name: str, values: Any) -> Array:
    """Whole numbers as int64, or an error that names the argument."""
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):
        array = np.zeros(1)
    if not _is_whole(array):
        raise InvalidInputError(
            f"{name}: dtype {array.dtype} is not accepted; expected whole numbers below 2^63"
        )
    return array.astype(np.int64)


def _columns(**given: Any) -> list[Array]:
    """Columns of whole numbers of one length."""
    made = [_whole(name, values) for name, values in given.items()]
    if any(column.ndim != 1 or len(column) != len(made[0]) for column in made):
        raise InvalidInputError(f"{', '.join(given)}: expected lists of one length")
    return made


def product_ops(shapes: Sequence[tuple[int, int, int, int]] | Array) -> Array:
    """Matrix products as operator records.

    Parameters
    ----------
    shapes
        (b, m, k, n) of each: b products of m x k by k x n.

    Examples
    --------
    >>> int(product_ops([(1, 512, 1024, 2048)])["n"][0])
    2048
    """
    try:
        table = np.asarray(shapes)
    except (ValueError, OverflowError):
        table = np.zeros(1)
    if table.size and (table.ndim != 2 or table.shape[1] != 4):
        raise InvalidInputError("shapes: expected rows of four whole numbers (b, m, k, n)")
    table = _whole("shapes", table).reshape(-1, 4)
    ops = np.zeros(len(table), dtype=_core.OPERATOR_DTYPE)
    ops["kind"], ops["unit"] = KINDS.index("gemm"), UNITS.index("TC")
    for column, name in enumerate("bmkn"):
        ops[name] = table[:, column]
    b, m, k, n = (ops[name].astype(np.float64) for name in "bmkn")
    ops["flops"] = 2.0 * b * m * k * n
    ops["collective"] = -1
    return ops


def vector_ops(function: str, rows: Sequence[int], cols: Sequence[int]) -> Array:
    """Vector operators of one function as operator records.

    Parameters
    ----------
    function
        One of ``_core.FUNCTIONS``, such as ``gelu`` or ``layernorm-backward``; for ``adamw`` rows
        are parameters and there is one column.
    rows, cols
        Size of each.

    Examples
    --------
    >>> float(vector_ops("add", [4], [8])["read_bytes"][0])
    128.0
    """
    if function not in _CODES or _CODES[function] < _CODES["add"]:
        raise InvalidInputError(
            f"function: {function!r} is not accepted; {nearest(function, _core.FUNCTIONS[4:])}"
        )
    heights, widths = _columns(rows=rows, cols=cols)
    ops = np.zeros(len(heights), dtype=_core.OPERATOR_DTYPE)
    ops["unit"], ops["function"] = UNITS.index("VC"), _CODES[function]
    ops["b"], ops["m"], ops["n"] = 1, heights, widths
    ops["collective"] = -1
    elements = ops["m"].astype(np.float64) * ops["n"]
    base = function.removesuffix("-backward")
    arrays = float(_ARRAYS_READ.get(base, 1))
    read, write = arrays * _ELEMENT_BYTES * elements, _ELEMENT_BYTES * elements
    if base == "embedding":
        read = read + _ID_BYTES * ops["m"]
    if base == "adamw":
        read, write = (_ADAM_BYTES - 6.0) * elements, 6.0 * elements
    elif base != function:  # gradients read what was read and what arrives, and write one each
        read, write = read + write, read
    ops["read_bytes"], ops["write_bytes"] = read, write
    return ops


def attention_ops(
    pairs: Sequence[int],
    seq: Sequence[int],
    width: Sequence[int],
    causal: Sequence[bool],
    backward: bool = False,
) -> Array:
    """Fused attention of `pairs` heads of `seq` tokens as operator records.

    Examples
    --------
    >>> float(attention_ops([16], [512], [64], [False])["flops"][0])
    1073741824.0
    """
    heads, lengths, sizes = _columns(pairs=pairs, seq=seq, width=width)
    ops = np.zeros(len(heads), dtype=_core.OPERATOR_DTYPE)
    name = "attention-backward" if backward else "attention"
    ops["kind"], ops["unit"] = KINDS.index(name), UNITS.index("TC+VC")
    ops["function"] = _CODES[name]
    ops["b"], ops["m"], ops["n"], ops["k"] = heads, lengths, lengths, sizes
    ops["causal"], ops["collective"] = causal, -1
    one = _ELEMENT_BYTES * ops["b"].astype(np.float64) * ops["m"] * ops["k"]
    ops["flops"] = (5.0 if backward else 2.0) * one * ops["n"]
    ops["read_bytes"], ops["write_bytes"] = (4.0 * one, 3.0 * one) if backward else (3.0 * one, one)
    return ops
