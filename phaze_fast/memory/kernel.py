"""Loops over many stages or layouts, compiled by Numba: memory in bytes, and whether it fits.

The memory of a device is defined in the compiled core: the loops call the core's functions by name
(cpp/include/phaze/memory_c.hpp), so that grids and single plans have the same bytes. `footprint`
imports this module when it is first needed, because Numba takes a while to import; the compiled
loops are cached on disk.
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

_1F1B, _ZB_H1 = (_core.PIPELINE_SCHEDULES.index(name) for name in ("1f1b", "zb-h1"))
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
_peak_total = _rule("phaze_peak_total", _f8, *[_f8] * 11, _i8, _f8, _f8)
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


# Columns of the arrays that `_write_kinds` fills, one row per kind of layer, bytes.
_STATE, _LATE, _UNSHARDED = 0, 1, 2


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def _write_kinds(sizes: Array, layout: Any, strategy: Any, training: Any, kinds: Array) -> None:
    """Write one layer's state, late gradients and unsharded bytes, for each kind of layer."""
    sharing = layout["shard"] if layout["shard"] > 0 else layout["dp"]
    shards, zero = float(sharing * strategy["cp"]), layout["zero"]
    ep = float(strategy["etp"] * strategy["ep"]) / float(strategy["tp"])
    state = np.zeros(4)
    for k in range(sizes.shape[0]):
        parameters = sizes[k]["parameters"]
        _state_bytes(
            parameters, sizes[k]["expert_parameters"], sizes[k]["frozen_parameters"],
            sizes[k]["frozen_experts"], sizes[k]["packed_parameters"], sizes[k]["packed_bytes"],
            sizes[k]["more_state_bytes"], sizes[k]["copy_bytes"], shards, ep, zero,
            training["weight_bytes"], training["gradient_bytes"],
            training["state_bytes"] * (1.0 - sizes[k]["host_state"]), state.ctypes,
        )  # fmt: skip
        late = state[1] if training["late_gradients"] else 0.0
        kinds[k, _STATE] = (state[0] + (state[1] - late) + state[2]) + state[3]
        kinds[k, _LATE] = late
        kinds[k, _UNSHARDED] = 0.0
        if sizes[k]["boundary"] == 0:
            kinds[k, _UNSHARDED] = sizes[k]["shape_bytes"]
            weight_bytes = _mean_weight_bytes(
                parameters, sizes[k]["packed_parameters"], sizes[k]["packed_bytes"],
                training["gather_bytes"],
            )  # fmt: skip
            kinds[k, _UNSHARDED] += _unsharded(
                zero, parameters, parameters - sizes[k]["frozen_parameters"], weight_bytes,
                0.0 if training["late_gradients"] else training["gradient_bytes"], shards,
                float(training["whole_layers"]),
            )  # fmt: skip


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def _longest_stage(
    stop: int,
    last: int,
    stage: int,
    layout: Any,
    limit: float,
    order: Array,
    sizes: Array,
    kinds: Array,
    buffers: float,
    variants: int,
    share: float,
) -> int:
    """Return the first layer of the longest stage that ends before position `last` and fits.

    No stage that begins before `stop` is considered.
    """
    micro_batches = layout["micro_batches"]
    waiting = _in_flight(layout["schedule"], layout["pp"], stage, micro_batches, 1)
    by_layer, first = sizes[0]["layer_peaks"], last
    for v in range(variants):
        state, stash, live, once, gathered = 0.0, 0.0, 0.0, 0.0, 0.0
        late, late_last, freed, later, most = 0.0, 0.0, 0.0, 0.0, -np.inf
        i = last
        while i > stop:
            k = order[i - 1]
            boundary = sizes[k]["boundary"] != 0
            state += kinds[k, _STATE]
            own = sizes[k]["live_bytes"][v]
            if by_layer:
                layer_peak = own - stash + (0.0 if micro_batches > waiting else late)
                if layer_peak > most:
                    most, live, freed, later = layer_peak, own, stash, late
            else:
                live = max(live, own)
            stash += sizes[k]["stash_bytes"][v]
            once += sizes[k]["once_bytes"]
            gathered = max(gathered, kinds[k, _UNSHARDED])
            late += kinds[k, _LATE]
            if boundary and i == len(order):
                late_last = kinds[k, _LATE]
            late_first, first_stash = kinds[k, _LATE], sizes[k]["stash_bytes"][v]
            if boundary and i == 1 and last > 1:
                late_first += kinds[order[1], _LATE]
                first_stash += sizes[order[1]]["stash_bytes"][v]
            peak = _peak_total(
                stash, live, once, buffers + gathered, late, late_last, late_first, first_stash,
                waiting, float(micro_batches), share, by_layer, freed, later,
            )  # fmt: skip
            if state + peak > limit:
                break
            i -= 1
        first = min(first, i)
        if first == stop:
            break
    return first


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def _fewest_blocks_fit(
    layout: Any,
    limit: float,
    counts: Array,
    sizes: Array,
    kinds: Array,
    buffers: float,
    variants: int,
    lost: float,
) -> bool:
    """Whether a stage without boundary layers fits with the fewest blocks it can be assigned."""
    stages, chunks = layout["pp"], layout["vpp"]
    blocks, state, gathered, late = 0, np.inf, np.inf, np.inf
    for k in range(len(counts)):
        if counts[k] > 0 and sizes[k]["boundary"] == 0:
            blocks += counts[k]
            state, gathered = min(state, kinds[k, _STATE]), min(gathered, kinds[k, _UNSHARDED])
            late = min(late, kinds[k, _LATE])
    fewest = chunks * (blocks // (stages * chunks)) - (2 if stages <= 2 else 0)
    if chunks == 1 and sizes["stage_work"].max() > 0.0:  # layers are divided by work, not count
        fewest = min(fewest, 1 if stages > 2 else 0)
    if fewest <= 0:
        return True
    stage = 1 if stages > 2 else 0
    waiting = _in_flight(layout["schedule"], stages, stage, layout["micro_batches"], chunks)
    if layout["micro_batches"] > waiting:  # gradients of earlier micro-batches are resident
        state += late
    for v in range(variants):
        stash, live = np.inf, np.inf
        for k in range(len(counts)):
            if counts[k] > 0 and sizes[k]["boundary"] == 0:
                stash = min(stash, sizes[k]["stash_bytes"][v])
                live = min(live, sizes[k]["live_bytes"][v])
        moving = waiting * fewest * stash + live + buffers + gathered
        if fewest * state + lost * moving <= limit:
            return True
    return False


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def _all_stages_fit(
    layout: Any,
    begins: Array,
    limit: float,
    order: Array,
    sizes: Array,
    kinds: Array,
    buffers: float,
    variants: int,
    share: float,
    alone: Array,
) -> bool:
    """Whether all stages fit; the last `s` stages, each as long as fits, begin at `begins[s]`.

    Once at most one layer per earlier stage is left, the earlier stages must fit with one each.
    `alone` stores whether one layer fits, by kind and micro-batches in flight; -1: not known.
    """
    stages = layout["pp"]
    for s in range(1, stages + 1):
        if begins[s] > stages - s:
            continue
        for k in range(s + 1, stages + 1):
            last = stages - k + 1
            kind, flying = order[last - 1], layout["micro_batches"]
            waiting = int(_in_flight(layout["schedule"], stages, stages - k, flying, 1))
            if alone[kind, waiting] < 0:
                first = _longest_stage(
                    last - 1, last, stages - k, layout, limit, order, sizes, kinds, buffers,
                    variants, share,
                )  # fmt: skip
                alone[kind, waiting] = first < last
            if alone[kind, waiting] == 0:
                return False
        return True
    return False


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def _same_shares(before: Any, layout: Any) -> bool:
    """Whether devices hold the same share of each layer's state in two layouts."""
    return bool(
        before["strategy"] == layout["strategy"]
        and before["dp"] == layout["dp"]
        and before["zero"] == layout["zero"]
        and before["shard"] == layout["shard"]
    )


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def _differ_in_stages(before: Any, layout: Any) -> bool:
    """Whether two consecutive 1F1B layouts differ only in the number of stages."""
    return bool(
        layout["schedule"] == _1F1B
        and before["schedule"] == _1F1B
        and _same_shares(before, layout)
        and 1 < before["pp"] <= layout["pp"]
    )


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def layouts_fit(
    layouts: Array,
    strategies: Array,
    sizes: Array,
    order: Array,
    training: Any,
    limits: Array,
    fits: Array,
) -> None:
    """Mark the layouts with a partition that fits, one column per memory limit.

    Stages are packed from the last to the first, each with as many layers as fit in some recompute
    variant. Memory of a 1F1B stage depends on the number of stages after that stage, not on their
    total, so consecutive layouts that differ only in the number of stages share this packing.
    With schedules that assign layers to chunks, a layout is marked unless the fewest blocks of a
    stage do not fit. Layers that must be in one stage are not considered.

    Parameters
    ----------
    layouts, strategies, sizes, order, training
        As the plan kernel takes them; `sizes` has shape (strategies, kinds + 1), the last kind
        being the head with a copied embedding.
    limits
        Usable memory of a device, bytes.
    fits
        Written: 1 where a layout fits, shape (layouts, limits).
    """
    count = sizes.shape[1] - 1
    kinds = np.zeros((count + 1, 3))
    lost = 1.0 + training["fragmentation"]
    share = lost - 1.0
    own = order.copy()
    counts = np.zeros(count, dtype=np.int64)  # layers of each kind
    for k in order:
        counts[k] += 1
    begins = np.zeros(len(order) + 2, dtype=np.int64)
    alone = np.zeros((count + 1, len(order) + 1), dtype=np.int8)
    for c in range(len(limits)):
        limit = limits[c] * (1.0 + 1e-12)
        packed = 0
        for r in range(len(layouts)):
            layout = layouts[r]
            strategy, mine = strategies[layout["strategy"]], sizes[layout["strategy"]]
            stages, variants = layout["pp"], strategy["variants"]
            buffers = training["workspace_bytes"] + strategy["gathered_bytes"]
            if stages > 1:
                buffers += 2.0 * strategy["message_bytes"]
            if r == 0 or not _differ_in_stages(layouts[r - 1], layout):
                if r == 0 or not _same_shares(layouts[r - 1], layout):
                    _write_kinds(mine, layout, strategy, training, kinds)
                own[-1] = count if stages > 1 else order[-1]
                packed, begins[0] = 0, len(order)
                alone[:] = -1
            fits[r, c] = False
            schedule, full = layout["schedule"], layout["micro_batches"] >= stages
            if stages > 1 and schedule != _1F1B and not (schedule == _ZB_H1 and full):
                fits[r, c] = _fewest_blocks_fit(
                    layout, limit, counts, mine, kinds, buffers, variants, lost
                )
            elif stages <= len(order):
                while packed < stages:
                    begins[packed + 1] = _longest_stage(
                        0, begins[packed], stages - packed - 1, layout, limit, own, mine, kinds,
                        buffers, variants, share,
                    )  # fmt: skip
                    packed += 1
                fits[r, c] = _all_stages_fit(
                    layout, begins, limit, own, mine, kinds, buffers, variants, share, alone
                )
