"""Kernels over rows of stages or layouts, compiled by Numba: their bytes, and whether they fit.

Loaded late, by `footprint`, because Numba takes a while to import; the compiled code is cached on
disk, so that only the first process on a machine compiles it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

__all__ = ["fill", "layouts_fit"]


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def _in_flight(schedule: int, stages: int, stage: int, micro_batches: int, vpp: int) -> float:
    """Micro-batches whose activations a stage holds at its worst moment."""
    if schedule == 1:  # GPipe: all of them
        return float(micro_batches)
    if schedule == 2:  # interleaved: counted in chunks of 1/vpp of the stage
        chunks = 2 * (stages - stage - 1) + (vpp - 1) * stages + 1
        return min(chunks, micro_batches * vpp) / vpp
    if schedule == 3 or schedule == 5:  # ZB-H1, ZB-V: kept until the weight gradient, which waits
        return float(min(micro_batches, stages))
    if schedule == 4:  # ZB-H2
        return float(min(micro_batches, 2 * stages - 1))
    if schedule == 6:  # DualPipe
        return (stages + 1) / 2.0
    if schedule == 7:  # DualPipeV
        return (2 * stages + 1) / 2.0
    return float(min(micro_batches, stages - stage))  # 1F1B


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def _shared(held: float, experts: float, shards: float, ep: float) -> float:
    """Parameters that a device is left with where replicas share them.

    An expert is on as many replicas as there are for each expert-parallel device.
    """
    copies = max(1.0, shards / max(1.0, ep))
    return (held - experts) / shards + experts / copies


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def _gathered(zero: int, largest: float, weight_bytes: float, shards: float) -> float:
    """Bytes of the layer at work and the one fetched ahead of it, whole for a moment."""
    if zero < 3:
        return 0.0
    return 2.0 * largest * weight_bytes * (1.0 - 1.0 / shards)


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def _copied(size: float, zero: int, held: float, spread: float) -> float:
    """Bytes that go with the weights, such as their copies in a smaller format."""
    return size * (spread / held) if zero >= 3 and held > 0.0 else size


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def _peak(
    stash: float,
    live: float,
    once: float,
    buffers: float,
    late: tuple[float, float, float, float],
    waiting: float,
    micro_batches: float,
    lost: float,
) -> tuple[int, float, float, float, float, float]:
    """Find the most over the instants of a step, but for what is always there.

    `late` are gradients that are not: all, those after the blocks, those of the first block and
    what is before it, and what these keep. cpp/src/placement/memory_rule.hpp has the same rule.

    Returns
    -------
    instant, activations, live, once, gradients, total
    """
    every, last, first, first_stash = late
    kept, others = waiting * stash, max(waiting - 1.0, 0.0) * stash
    loss = min(waiting, 1.0) * once
    share = lost - 1.0
    before = micro_batches > waiting
    grown = every if before else 0.0
    moving = kept + loss + buffers
    found = (0, kept, 0.0, loss, grown, grown + moving + share * moving)
    grown = every if before else last
    moving = kept + live + buffers
    total = grown + moving + share * moving
    if total > found[5]:
        found = (1, kept, live, 0.0, grown, total)
    if before:
        return found
    moving = others + first_stash + live + buffers
    total = every - first + moving + share * moving
    if total > found[5]:
        found = (2, others + first_stash, live, 0.0, every - first, total)
    working = live if waiting > 1.0 else 0.0  # of the second micro-batch
    moving = others + working + buffers
    total = every + moving + share * moving
    if total > found[5]:
        found = (1 if waiting > 1.0 else 3, others, working, 0.0, every, total)
    return found


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def fill(rows: np.ndarray[Any, Any], out: np.ndarray[Any, Any], fragmentation: float) -> None:
    """Write the terms of every row; arrays have the dtypes of `footprint`."""
    for i in range(rows.shape[0]):
        row = rows[i]
        shards = float(row["dp"])
        zero = row["zero"]
        held = row["parameters"]
        spread = _shared(held, row["expert_parameters"], shards, float(row["ep"]))
        weights = (spread if zero >= 3 else held) * row["weight_bytes"]
        weights += _copied(row["copy_bytes"], zero, held, spread)
        gradients = (spread if zero >= 2 else held) * row["gradient_bytes"]
        state = (spread if zero >= 1 else held) * row["state_bytes"]
        gathered = _gathered(zero, row["largest_layer"], row["weight_bytes"], shards)
        waiting = _in_flight(
            row["schedule"], row["stages"], row["stage"], row["micro_batches"], row["vpp"]
        )
        late = (0.0, 0.0, 0.0, 0.0)
        if row["late_gradients"]:
            each, shared = row["gradient_bytes"], zero >= 2
            last, first = row["last_parameters"], row["first_parameters"]
            if shared:
                last /= shards
                first = _shared(first, row["first_experts"], shards, float(row["ep"]))
            late = (gradients, last * each, first * each, row["first_stash_bytes"])
            gradients = 0.0
        communication = row["buffer_bytes"] + gathered
        instant, activations, live, logits, grown, total = _peak(
            row["stash_bytes"], row["live_bytes"], row["head_bytes"], communication, late, waiting,
            float(row["micro_batches"]), 1.0 + fragmentation,
        )  # fmt: skip
        moving = activations + live + logits + communication
        out[i]["weights"] = weights
        out[i]["gradients"] = gradients + grown
        out[i]["optimizer"] = state
        out[i]["activations"] = activations
        out[i]["recompute"] = live
        out[i]["logits"] = logits
        out[i]["communication"] = communication
        out[i]["fragmentation"] = fragmentation * moving
        out[i]["total"] = weights + gradients + state + total
        out[i]["instant"] = instant


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def _resident(
    sizes: np.ndarray[Any, Any],
    layout: Any,
    strategy: Any,
    training: Any,
    out: np.ndarray[Any, Any],
    lates: np.ndarray[Any, Any],
    gathers: np.ndarray[Any, Any],
) -> None:
    """Write the state, late gradients and gathered weights of one layer of each kind, bytes."""
    sharing = layout["shard"] if layout["shard"] > 0 else layout["dp"]
    shards = float(sharing * strategy["cp"])
    zero = layout["zero"]
    for k in range(sizes.shape[0]):
        held = sizes[k]["parameters"]
        spread = _shared(held, sizes[k]["expert_parameters"], shards, float(strategy["ep"]))
        gradients = (spread if zero >= 2 else held) * training["gradient_bytes"]
        lates[k] = gradients if training["late_gradients"] else 0.0
        out[k] = (
            (spread if zero >= 3 else held) * training["weight_bytes"]
            + (gradients - lates[k])
            + (spread if zero >= 1 else held) * training["state_bytes"]
        ) + _copied(sizes[k]["copy_bytes"], zero, held, spread)
        gathers[k] = 0.0
        if sizes[k]["boundary"] == 0:
            gathers[k] = sizes[k]["shape_bytes"]
            gathers[k] += _gathered(zero, held, training["weight_bytes"], shards)


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def _packed(
    stop: int,
    last: int,
    waiting: float,
    micro_batches: float,
    room: float,
    order: np.ndarray[Any, Any],
    sizes: np.ndarray[Any, Any],
    resident: np.ndarray[Any, Any],
    lates: np.ndarray[Any, Any],
    gathers: np.ndarray[Any, Any],
    buffers: float,
    variants: int,
    lost: float,
) -> int:
    """Find where the longest stage that ends before position `last` begins and still fits.

    Stages that begin before `stop` are not looked at.
    """
    first = last
    for v in range(variants):
        state, stash, live, once, gather = 0.0, 0.0, 0.0, 0.0, 0.0
        every, tail = 0.0, 0.0
        i = last
        while i > stop:
            k = order[i - 1]
            end = sizes[k]["boundary"] != 0
            state += resident[k]
            stash += sizes[k]["stash_bytes"][v]
            live = max(live, sizes[k]["live_bytes"][v])
            once += sizes[k]["once_bytes"]
            gather = max(gather, gathers[k])
            every += lates[k]
            if end and i == len(order):
                tail = lates[k]
            begun, begun_stash = lates[k], sizes[k]["stash_bytes"][v]
            if end and i == 1 and last > 1:
                begun += lates[order[1]]
                begun_stash += sizes[order[1]]["stash_bytes"][v]
            late = (every, tail, begun, begun_stash)
            peak = _peak(stash, live, once, buffers + gather, late, waiting, micro_batches, lost)
            if state + peak[5] > room:
                break
            i -= 1
        first = min(first, i)
        if first == stop:
            break
    return first


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def _dealt_may_fit(
    layout: Any,
    room: float,
    counts: np.ndarray[Any, Any],
    sizes: np.ndarray[Any, Any],
    resident: np.ndarray[Any, Any],
    lates: np.ndarray[Any, Any],
    gathers: np.ndarray[Any, Any],
    buffers: float,
    variants: int,
    lost: float,
) -> bool:
    """Whether a stage without ends would fit with the fewest blocks it can be dealt."""
    stages, chunks = layout["pp"], layout["vpp"]
    blocks, state, gather, late = 0, np.inf, np.inf, np.inf
    for k in range(len(counts)):
        if counts[k] > 0 and sizes[k]["boundary"] == 0:
            blocks += counts[k]
            state, gather = min(state, resident[k]), min(gather, gathers[k])
            late = min(late, lates[k])
    least = chunks * (blocks // (stages * chunks)) - (2 if stages <= 2 else 0)
    if least <= 0:
        return True
    stage = 1 if stages > 2 else 0
    waiting = _in_flight(layout["schedule"], stages, stage, layout["micro_batches"], chunks)
    if layout["micro_batches"] > waiting:  # gradients of earlier ones are there
        state += late
    for v in range(variants):
        stash, live = np.inf, np.inf
        for k in range(len(counts)):
            if counts[k] > 0 and sizes[k]["boundary"] == 0:
                stash = min(stash, sizes[k]["stash_bytes"][v])
                live = min(live, sizes[k]["live_bytes"][v])
        moving = waiting * least * stash + live + buffers + gather
        if least * state + lost * moving <= room:
            return True
    return False


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def _room_for_all(
    layout: Any,
    reach: np.ndarray[Any, Any],
    room: float,
    order: np.ndarray[Any, Any],
    sizes: np.ndarray[Any, Any],
    resident: np.ndarray[Any, Any],
    lates: np.ndarray[Any, Any],
    gathers: np.ndarray[Any, Any],
    buffers: float,
    variants: int,
    lost: float,
) -> bool:
    """Whether all stages have a layer and fit, given where the longest stages from the end begin.

    Stages before the one that would leave too few layers for the rest have one layer each.
    """
    stages = layout["pp"]
    for s in range(1, stages + 1):
        if reach[s] > stages - s:
            continue
        for k in range(s + 1, stages + 1):
            waiting = _in_flight(layout["schedule"], stages, stages - k, layout["micro_batches"], 1)
            last = stages - k + 1
            first = _packed(
                last - 1, last, waiting, float(layout["micro_batches"]), room, order, sizes,
                resident, lates, gathers, buffers, variants, lost,
            )  # fmt: skip
            if first == last:
                return False
        return True
    return False


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def layouts_fit(
    layouts: np.ndarray[Any, Any],
    strategies: np.ndarray[Any, Any],
    sizes: np.ndarray[Any, Any],
    order: np.ndarray[Any, Any],
    training: Any,
    rooms: np.ndarray[Any, Any],
    fits: np.ndarray[Any, Any],
) -> None:
    """Mark the layouts of which some partition fits, one column per room.

    Of schedules whose layers are dealt to chunks, those are marked of which a deal may fit.

    Stages are packed from the last to the first, each as long as it fits in some variant. Memory
    of a 1F1B stage depends on how many follow it, not on how many there are, so that layouts which
    differ in stages alone and stand next to each other share where their stages begin. Layers that
    must stay together are not looked at.

    Parameters
    ----------
    layouts, strategies, sizes, order, training
        As the plan kernel takes them; `sizes` has shape (strategies, kinds + 1), the last kind
        being the head with a copied embedding.
    rooms
        Bytes of a device for the model.
    fits
        Written: 1 where a layout fits, shape (layouts, rooms).
    """
    kinds = sizes.shape[1] - 1
    resident, lates, gathers = np.zeros(kinds + 1), np.zeros(kinds + 1), np.zeros(kinds + 1)
    lost = 1.0 + training["fragmentation"]
    own = order.copy()
    counts = np.zeros(kinds, dtype=np.int64)  # layers of each kind
    for k in order:
        counts[k] += 1
    reach = np.zeros(len(order) + 2, dtype=np.int64)
    for c in range(len(rooms)):
        room = rooms[c] * (1.0 + 1e-12)
        packed = 0
        for r in range(len(layouts)):
            layout = layouts[r]
            strategy = strategies[layout["strategy"]]
            mine = sizes[layout["strategy"]]
            stages, m, variants = layout["pp"], layout["micro_batches"], strategy["variants"]
            goes_on = (
                r > 0
                and layout["schedule"] == 0
                and layouts[r - 1]["schedule"] == 0
                and layouts[r - 1]["strategy"] == layout["strategy"]
                and layouts[r - 1]["dp"] == layout["dp"]
                and layouts[r - 1]["zero"] == layout["zero"]
                and layouts[r - 1]["shard"] == layout["shard"]
                and 1 < layouts[r - 1]["pp"] <= stages
            )
            buffers = training["workspace_bytes"] + strategy["gathered_bytes"]
            if stages > 1:
                buffers += 2.0 * strategy["message_bytes"]
            if not goes_on:
                _resident(mine, layout, strategy, training, resident, lates, gathers)
                own[-1] = kinds if stages > 1 else order[-1]
                packed, reach[0] = 0, len(order)
            fits[r, c] = False
            packs = layout["schedule"] == 0 or (layout["schedule"] == 3 and m >= stages)
            if stages > 1 and not packs:
                fits[r, c] = _dealt_may_fit(
                    layout, room, counts, mine, resident, lates, gathers, buffers, variants, lost
                )
            elif stages <= len(order):
                while packed < stages:
                    waiting = _in_flight(layout["schedule"], stages, stages - packed - 1, m, 1)
                    reach[packed + 1] = _packed(
                        0, reach[packed], waiting, float(m), room, own, mine, resident, lates,
                        gathers, buffers, variants, lost,
                    )  # fmt: skip
                    packed += 1
                fits[r, c] = _room_for_all(
                    layout, reach, room, own, mine, resident, lates, gathers, buffers, variants,
                    lost,
                )  # fmt: skip
