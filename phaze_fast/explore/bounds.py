"""Takes chips and a workload's totals, gives times that no schedule or placement can beat.

This is the first and cheapest of the bounds a search prunes with: arithmetic alone, perfectly
balanced over all devices, with nothing to wait for.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from phaze_fast.errors import InvalidInputError

__all__ = ["ADAM_STATE_BYTES", "compute_bound_s", "training_flops"]

Array = np.ndarray[Any, Any]

ADAM_STATE_BYTES = 16
"""Bytes per parameter of mixed-precision Adam with 2-byte gradients: 2 weight, 2 gradient, 4 master
weight, 4 + 4 moments (Rajbhandari et al., ZeRO, SC 2020)."""


def training_flops(parameters: float, tokens: float) -> float:
    """Matrix FLOPs of one training step: 6 per parameter and token.

    Two for the forward pass and four for the backward (Kaplan et al. 2020, section 2.1); attention
    scores and recomputation come on top, so this is a lower bound for a dense model.

    Examples
    --------
    >>> training_flops(1e9, 1e6)
    6000000000000000.0
    """
    for name, value in (("parameters", parameters), ("tokens", tokens)):
        if not isinstance(value, int | float | np.number) or not (np.isfinite(value) and value > 0):
            raise InvalidInputError(f"{name}: {value!r} is not accepted; expected a number > 0")
    flops = 6.0 * parameters * tokens
    if not np.isfinite(flops):
        raise InvalidInputError(f"parameters x tokens: {parameters!r} x {tokens!r} is too large")
    return flops


def compute_bound_s(chips: Array, flops: float, devices: int, rate: float = 1.0) -> Array:
    """Seconds that `flops` take at least on `devices` of each chip.

    Parameters
    ----------
    chips
        Records such as `ArchitectureSpace.chips` gives.
    flops
        Matrix FLOPs of the step.
    devices
        How many chips share them.
    rate
        Multiply-accumulates per cycle of the number format, relative to the array's size (the
        chip's ``tensor_core.rates``).

    Examples
    --------
    >>> from phaze_fast.hardware import chip_records, presets
    >>> bound = compute_bound_s(chip_records([presets.chip("tpuv4")]), 275.2512e12, devices=1)
    >>> bound.tolist()
    [1.0]
    """
    if devices < 1:
        raise InvalidInputError(f"devices: {devices!r} is not accepted; expected a number >= 1")
    macs = chips["tensor_cores"].astype(np.float64)
    macs *= chips["tensor_width"] * chips["tensor_depth"]
    bound: Array = flops / (2.0 * rate * macs * chips["clock_hz"] * devices)
    return bound
