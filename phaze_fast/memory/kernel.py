"""Takes rows of pipeline stages, gives their bytes by term. Compiled by Numba on first use.

Loaded late, by `footprint`, because Numba takes a while to import; the compiled code is cached on
disk, so that only the first process on a machine compiles it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

__all__ = ["fill"]


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def _in_flight(schedule: int, stages: int, stage: int, microbatches: int, virtual: int) -> float:
    """Micro-batches whose activations a stage holds at its worst moment."""
    if schedule == 1:  # GPipe: all of them
        return float(microbatches)
    if schedule == 2:  # interleaved: counted in chunks of 1/virtual of the stage
        chunks = 2 * (stages - stage - 1) + (virtual - 1) * stages + 1
        return min(chunks, microbatches * virtual) / virtual
    if schedule == 3:  # zero-bubble: kept until the weight gradient, which waits
        return float(min(microbatches, stages))
    return float(min(microbatches, stages - stage))  # 1F1B


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def fill(rows: np.ndarray[Any, Any], out: np.ndarray[Any, Any], fragmentation: float) -> None:
    """Write the terms of every row; arrays have the dtypes of `footprint`."""
    for i in range(rows.shape[0]):
        row = rows[i]
        shards = float(row["data_parallel"])
        zero = row["zero"]
        held = row["parameters"]
        # An expert is on as many replicas as there are for each expert-parallel device.
        experts = row["expert_parameters"]
        copies = max(1.0, shards / max(1, row["expert_parallel"]))
        spread = (held - experts) / shards + experts / copies
        weights = held * row["weight_bytes"]
        gradients = held * row["gradient_bytes"]
        state = held * row["state_bytes"]
        if zero >= 1:
            state = spread * row["state_bytes"]
        if zero >= 2:
            gradients = spread * row["gradient_bytes"]
        gathered = 0.0
        if zero >= 3:
            weights = spread * row["weight_bytes"]
            # The layer at work and the one fetched ahead of it are whole for a moment.
            gathered = 2.0 * row["largest_layer"] * row["weight_bytes"] * (1.0 - 1.0 / shards)
        waiting = _in_flight(
            row["schedule"], row["stages"], row["stage"], row["microbatches"], row["virtual"]
        )
        activations = waiting * row["stash_bytes"]
        logits = min(waiting, 1.0) * row["head_bytes"]
        communication = row["buffer_bytes"] + gathered
        moving = activations + row["live_bytes"] + logits + communication
        out[i]["weights"] = weights
        out[i]["gradients"] = gradients
        out[i]["optimizer"] = state
        out[i]["activations"] = activations
        out[i]["recompute"] = row["live_bytes"]
        out[i]["logits"] = logits
        out[i]["communication"] = communication
        out[i]["fragmentation"] = fragmentation * moving
        out[i]["total"] = weights + gradients + state + moving + fragmentation * moving
