"""A loop over many stages, compiled by Numba: memory in bytes.

The memory of a device is defined in the compiled core: the loop calls the core's functions by name
(cpp/include/phaze/memory_c.hpp), so that grids and single plans have the same bytes. `footprint`
imports this module when it is first needed, because Numba takes a while to import; the compiled
loop is cached on disk.
"""

from __future__ import annotations

from ctypes import CFUNCTYPE, c_double, c_int64, c_void_p
from typing import Any

import numpy as np
from llvmlite import binding  # type: ignore[import-untyped, unused-ignore]
from numba import config as numba_config
from numba import njit, types

from phaze_fast import _core
from phaze_fast.tables import Array

_f8, _i8 = types.float64, types.int64
_out: Any = types.CPointer(_f8)  # type: ignore[no-untyped-call, unused-ignore]


def _rule(name: str, result: Any, *arguments: Any) -> Any:
    """Make a function of the compiled core callable from compiled loops, or from plain Python."""
    address = _core.MEMORY_RULE[name]
    config: Any = numba_config
    if not config.DISABLE_JIT:
        binding.add_symbol(name, address)
        return types.ExternalFunction(name, result(*arguments))
    kinds: dict[Any, Any] = {_f8: c_double, _i8: c_int64, _out: c_void_p, types.void: None}
    call = CFUNCTYPE(kinds[result], *(kinds[kind] for kind in arguments))(address)
    return lambda *values: call(*(v.item() if isinstance(v, np.generic) else v for v in values))


_in_flight = _rule("phaze_in_flight", _f8, *[_i8] * 5)
_shared = _rule("phaze_shared_parameters", _f8, *[_f8] * 4)
_state_bytes = _rule("phaze_state_bytes", types.void, *[_f8] * 10, _i8, *[_f8] * 3, _out)
_mean_weight_bytes = _rule("phaze_mean_weight_bytes", _f8, *[_f8] * 4)
_unsharded = _rule("phaze_unsharded_bytes", _f8, _i8, *[_f8] * 6)
_peak = _rule("phaze_peak", _i8, *[_f8] * 11, _i8, _f8, _f8, _out)


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def fill(rows: Array, out: Array, fragmentation: float) -> None:
    """Write the memory terms of every stage in `rows`, bytes; `footprint` defines both dtypes."""
    share = (1.0 + fragmentation) - 1.0
    state, peak = np.zeros(4), np.zeros(5)
    for i in range(rows.shape[0]):
        row = rows[i]
        shards, zero = float(row["dp"]), row["zero"]
        ep = row["ep"] if row["ep"] > 0.0 else 1.0
        _state_bytes(
            row["parameters"], row["expert_parameters"], row["frozen_parameters"],
            row["frozen_experts"], row["packed_parameters"], row["packed_bytes"],
            row["more_state_bytes"], row["copy_bytes"], shards, ep, zero, row["weight_bytes"],
            row["gradient_bytes"], row["state_bytes"], state.ctypes,
        )  # fmt: skip
        weights, gradients = state[0] + state[3], state[1]
        waiting = _in_flight(
            row["schedule"], row["stages"], row["stage"], row["micro_batches"], row["vpp"]
        )
        late, last, first, first_stash = 0.0, 0.0, 0.0, 0.0
        if row["late_gradients"]:
            last, first = row["last_parameters"], row["first_parameters"]
            if zero >= 2:
                last /= shards
                first = _shared(first, row["first_experts"], shards, ep)
            late, first_stash = gradients, row["first_stash_bytes"]
            last *= row["gradient_bytes"]
            first *= row["gradient_bytes"]
            gradients = 0.0
        buffers = row["buffer_bytes"]
        weight_bytes = _mean_weight_bytes(
            row["parameters"], row["packed_parameters"], row["packed_bytes"], row["gather_bytes"]
        )
        buffers += _unsharded(
            zero, row["largest_layer"], row["largest_trained"], weight_bytes,
            0.0 if row["late_gradients"] else row["gradient_bytes"], shards, 2.0,
        )  # fmt: skip
        instant = _peak(
            row["stash_bytes"], row["live_bytes"], row["head_bytes"], buffers, late, last, first,
            first_stash, waiting, float(row["micro_batches"]), share, 0, 0.0, 0.0, peak.ctypes,
        )  # fmt: skip
        out[i]["weights"] = weights
        out[i]["gradients"] = gradients + peak[3]
        out[i]["optimizer"] = state[2]
        out[i]["activations"] = peak[0]
        out[i]["recompute"] = peak[1]
        out[i]["logits"] = peak[2]
        out[i]["communication"] = buffers
        out[i]["fragmentation"] = fragmentation * (peak[0] + peak[1] + peak[2] + buffers)
        out[i]["total"] = weights + gradients + state[2] + peak[4]
        out[i]["instant"] = instant
