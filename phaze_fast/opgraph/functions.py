"""The functions that a cost model prices operators as, by kind of operator.

A kind says what an operator is in the graph; a function says what it computes: a norm may be a
layer norm or an RMS norm, an activation one of three curves.
"""

from __future__ import annotations

from phaze_fast import _core

__all__ = ["FUNCTIONS", "function_code"]

FUNCTIONS: tuple[str, ...] = _core.FUNCTIONS
"""Names of functions in the order of their codes; the first four are no rows of a vector table."""

_CODES = {name: code for code, name in enumerate(FUNCTIONS)}
_OF_KIND = {"residual": "add", "norm": "layernorm", "activation": "gelu"}


def function_code(kind: str, function: str = "") -> int:
    """Code of an operator's function; one that is not named is the usual one of its kind.

    Examples
    --------
    >>> FUNCTIONS[function_code("norm-backward", "rmsnorm")]
    'rmsnorm-backward'
    >>> FUNCTIONS[function_code("gemm-weight-gradient")]
    'product'
    """
    base = kind.removesuffix("-backward")
    if "gemm" in base:
        return _CODES["product"]
    name = function or _OF_KIND.get(base, base)
    return _CODES[name + kind.removeprefix(base)]
