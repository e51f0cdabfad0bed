"""Takes the layouts of a strategy and what layers add up to, gives times no step can beat.

For each layout and count of stages p, with m micro-batches a replica, W the work and B the backward
work of one micro-batch, and l the load of the longest stage, the step takes at least

- by 1F1B with m > p + 1: (m - p - 1) x l + 2 W; else: W + (m - 1) / p x B,
- by any schedule: m x l, and what of the gradients no backward pass hides,

and l is at least W / p, and at least what the longest stage must hold: blocks are whole, the first
and the last stage have the ends as well, and every stage has room for so many blocks without
recomputation, and for so many with it. docs/search.md has the proofs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from phaze_fast.explore.timing import Totals
from phaze_fast.placement.layouts import Layout
from phaze_fast.placement.sizes import Frame, LayerSizes

__all__ = ["Rows", "rows_of"]

Array = np.ndarray[Any, Any]

_SURE = 1.0 - 1e-9
"""Sums in another order differ in their last digits; a bound must not be above what it bounds."""
_LOOSE = 1.0 + 1e-9
_SHARES = 32
"""Recomputing a block takes a share of its work; bounds are kept for shares in steps of 1/32."""
_COLUMNS = (
    "loads",
    "works",
    "backs",
    "microbatches",
    "part",
    "again",
    "sends_s",
    "tail_s",
    "step_bytes",
    "sync_s",
    "whole",
    "filled",
    "even",
)


class Rows:
    """Bounds of the layouts that may fit, with each count of stages.

    `layout` is the position in the list of layouts, `stages` the count; the other columns are the
    coefficients of the bounds.
    """

    def __init__(self, parts: list[_Part]) -> None:
        self._parts = parts
        names = ("layout", "stages", *_COLUMNS)
        columns = [
            np.concatenate([part.columns[k] for part in parts]) if parts else np.zeros(0)
            for k in range(len(names))
        ]
        self.layout, self.stages = columns[0].astype(np.int64), columns[1]
        self._columns = tuple(columns[2:])
        self._longest: dict[int, Array] = {}

    def __len__(self) -> int:
        return len(self.layout)

    def _longest_at(self, share: int) -> Array:
        """Blocks of the longest stage, at least, where recomputing one takes `share` / 32 of it."""
        if share not in self._longest:
            r = share / _SHARES
            self._longest[share] = np.concatenate([part.longest(r) for part in self._parts])
        return self._longest[share]

    @staticmethod
    def _bounds(totals: Totals, rate: Array, columns: tuple[Array, ...]) -> Array:
        (loads, works, backs, m, part, again, sends_s, tail_s, step_bytes, sync_s) = (
            column[:, None] for column in columns[:10]
        )
        work = totals.work_s + again * totals.again_s + sends_s
        load = np.maximum(work * part, columns[13][:, None] * totals.block_s)
        np.maximum(load, _with_ends(totals, *columns[10:13]), out=load)
        found = np.maximum(loads * load + works * work + backs * totals.backward_s, m * load)
        step_s = step_bytes / rate
        # Of the step, all but the backward work; and that hides as much of the gradients at most.
        less = np.maximum(
            loads * load + np.maximum(works - 1.0, 0.0) * work + backs * totals.backward_s,
            np.maximum(m - 1.0 / part, 0.0) * load,
        )
        exposed = totals.work_s - totals.backward_s + less + sync_s
        # The optimiser's time is that of the first stage, which need not be the one meant here.
        exposed = exposed + np.where(part == 1.0, step_s, 0.0)
        found = np.maximum(found + tail_s + step_s, exposed)
        found *= _SURE
        least: Array = found
        return least

    def each(self, totals: Totals, rate: Array) -> Array:
        """Bounds of every row on one chip, shape (rows,)."""
        longest = self._longest_at(int(_shares(totals)[0]))
        return self._bounds(totals, rate, (*self._columns, longest))[:, 0]

    @cached_property
    def _lines(self) -> tuple[Array, Array]:
        """Slope and height over the work of a micro-batch, of the lines that are lowest somewhere.

        What is known of blocks, ends, recomputation and the optimiser is left out.
        """
        loads, works, _, m, part, _, sends_s, tail_s, _, _ = self._columns[:10]
        slope = np.maximum(loads * part + works, m * part)
        return _lowest(slope, slope * sends_s + tail_s)

    def rough(self, work_s: Array) -> Array:
        """Bound every chip from its work alone: for very many chips."""
        found = np.full(len(work_s), np.inf)
        for slope, height in zip(*self._lines, strict=True) if len(self) else ():
            np.minimum(found, slope * work_s + height, out=found)
        return found * _SURE

    def least(self, totals: Totals, rate: Array) -> Array:
        """Give the smallest bound on every chip; infinite where no layout fits."""
        found = np.full(len(totals.work_s), np.inf)
        if not len(self):
            return found
        shares = _shares(totals)
        for share in np.unique(shares):
            columns = (*self._columns, self._longest_at(int(share)))
            mine = np.flatnonzero(shares == share)
            piece = max(1, 2**18 // len(self))
            for begin in range(0, len(mine), piece):
                at = mine[begin : begin + piece]
                found[at] = self._bounds(totals.at(at), rate[at], columns).min(axis=0)
        return found


def _lowest(slope: Array, height: Array) -> tuple[Array, Array]:
    """Lines of which none is above another everywhere to the right of zero."""
    order = np.lexsort((slope, height))
    least = np.minimum.accumulate(slope[order])
    kept = order[np.concatenate([[True], slope[order][1:] < least[:-1]])]
    return slope[kept], height[kept]


def _with_ends(totals: Totals, whole: Array, filled: Array, even: Array) -> Array:
    """Load of the longest stage, were there room for all, shape (rows, chips).

    With `whole` blocks a stage at most, `filled` places stay empty, negated; each end takes as many
    as blocks of its length would. Where that is too many, the longest stage has a block more, or
    `whole` blocks and what is left of an end.
    """
    block = np.maximum(totals.block_s, 1e-300)
    first, last = totals.first_s / block, totals.last_s / block
    taken_first, taken_last = np.ceil(first * _SURE), np.ceil(last * _SURE)
    rest_first = first - np.maximum(taken_first - 1, 0)
    rest_last = last - np.maximum(taken_last - 1, 0)
    short = filled[:, None] + taken_first + taken_last  # places that are missing
    low, high = np.minimum(rest_first, rest_last), np.maximum(rest_first, rest_last)
    more = np.minimum(np.where(short <= 1, low, high), 1.0) * (short > 0)
    more = np.where(even[:, None] > 0, np.maximum(first, last), more)
    found: Array = (whole[:, None] + more) * totals.block_s
    return found


def _shares(totals: Totals) -> Array:
    """Say what recomputing a block takes of its work, in steps, rounded down."""
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(totals.block_s > 0, totals.again_s / totals.block_s, 0.0)
    found: Array = np.clip(np.floor(share * _SHARES * (1 - 1e-9)), 0, 4 * _SHARES).astype(np.int64)
    return found


@dataclass(frozen=True, eq=False)
class _Part:
    """The rows of one layout."""

    columns: tuple[Array, ...]
    counts: Array
    plain: Array
    """Blocks that the last stage has room for without recomputation, that before it, and so on."""
    lean: Array
    """The same with recomputation."""
    blocks: int
    even: bool
    """Whether every stage holds as many as any other."""

    def longest(self, r: float) -> Array:
        """Load of the longest stage for each count, in blocks that are not recomputed."""
        if self.even:
            own = self.blocks // self.counts[0]
            return np.array([own * (1.0 + r * bool((self.plain < own).any()))])
        most = np.arange(1, self.blocks + 1)
        loads = np.unique(np.concatenate([most, most * (1.0 + r)]))
        plain = np.minimum(np.floor(loads * _LOOSE)[:, None], self.plain)
        lean = np.minimum(np.floor(loads / (1.0 + r) * _LOOSE)[:, None], self.lean)
        held = np.cumsum(np.maximum(plain, lean), axis=1)[:, self.counts - 1]
        found: Array = loads[np.argmax(held >= self.blocks, axis=0)]
        return found


class _Room:
    """How many blocks a stage of a layout has room for, with each of several capacities."""

    def __init__(self, sizes: LayerSizes, layout: Layout, memory_bytes: Array) -> None:
        frame = sizes.frame(layout.groups, layout.zero, layout.stages[1] > 1)
        first, last = sizes.inner_span
        blocks, before, after = slice(first, last), slice(0, first), slice(last, None)
        self.most = sizes.blocks
        self.resident = float(frame.resident_bytes[blocks].min())
        self.stash = frame.stash_bytes[:, blocks].min(axis=1)[:, None]
        once = frame.live_bytes[:, blocks].min(axis=1) + frame.gather_bytes[blocks].min()
        piped = sizes.piped_bytes if layout.stages[1] > 1 else 0.0
        self.left = ((memory_bytes - sizes.gathered_bytes - piped) * _LOOSE)[:, None, None]
        self.once = once[:, None]
        held = frame.resident_bytes + frame.once_bytes
        # The first stage holds what stands before all blocks, the last what stands after them.
        self.first = float(held[before].sum())
        self.first_stash = frame.stash_bytes[:, before].sum(axis=1)[:, None]
        self.last = float(held[after].sum())

    def blocks(self, waiting: Array, first: bool = False, last: bool = False) -> Array:
        """By capacity, variant and micro-batches in flight; negative where no end fits."""
        left = self.left
        if first:
            left = left - (self.first + waiting * self.first_stash)
        if last:
            left = left - self.last
        each = np.maximum(self.resident + waiting * self.stash, 1.0)
        fit = np.floor((left - self.once) / each * _LOOSE)
        none = np.where(left >= 0.0, 0.0, -np.inf)  # a stage of ends alone
        found: Array = np.minimum(np.maximum(fit, none), self.most)
        return found


def _waiting(layout: Layout) -> Array:
    """Micro-batches in flight on the last stage, the one before it, and so on."""
    last, m = layout.stages[1], layout.microbatches
    behind: Array = np.arange(last)
    flying: Array
    if layout.schedule == "interleaved":
        flying = 2 * behind + (layout.virtual - 1) * last + 1
        flying = np.minimum(flying, m * layout.virtual) / layout.virtual
    else:
        flying = np.minimum(behind + 1, m).astype(float)
    return flying


def _held(room: _Room, waiting: Array, counts: Array) -> Array:
    """Blocks that all stages have room for: by capacity, without and with recomputation, stages."""

    def both(found: Array) -> Array:
        return np.stack([found[:, 0], found.max(axis=1)], axis=1)

    if counts[-1] == 1:
        return both(room.blocks(waiting[:1], first=True, last=True))
    back = both(room.blocks(waiting[:1], last=True))
    front = both(room.blocks(waiting[counts - 1], first=True))
    behind = np.cumsum(np.maximum(both(room.blocks(waiting)), 0.0), axis=2)
    found: Array = front + behind[:, :, np.maximum(counts - 2, 0)] - behind[:, :, :1] + back
    return found


def _coefficients(layout: Layout, counts: Array) -> tuple[Array, Array, Array]:
    """Of the longest load, of the work and of the backward work."""
    m, nothing, one = float(layout.microbatches), np.zeros(len(counts)), np.ones(len(counts))
    if layout.schedule == "zero-bubble":
        return nothing, nothing, nothing
    if layout.schedule == "interleaved":
        return nothing, one, nothing
    many = m > counts + 1
    return (
        np.where(many, m - counts - 1, nothing),
        np.where(many, 2.0, np.where(counts == 1, m, one)),
        np.where(many | (counts == 1), nothing, (m - 1) / counts),
    )


def _columns_of(sizes: LayerSizes, number: int, layout: Layout, counts: Array) -> list[Array]:
    """List the columns of a layout's rows, in order, as far as capacities do not matter."""
    frame = sizes.frame(layout.groups, layout.zero, layout.stages[1] > 1)
    ones, even = np.ones(len(counts)), layout.schedule == "interleaved"
    alone = counts[-1] == 1
    # Of several stages the first holds the first layer at least; where they are even, more.
    mine = slice(None) if alone else slice(0, 1)
    if even:
        mine = slice(0, sizes.inner_span[0] + sizes.blocks // (int(counts[0]) * layout.virtual))
    sync, shared, step = (
        float(x[mine].sum()) for x in (frame.sync_s, frame.shared_s, frame.step_bytes)
    )
    sends = 2.0 * (counts - 1) * frame.edge_s * (layout.schedule != "zero-bubble")
    whole = np.ceil(sizes.blocks / counts)
    return [
        number * ones,
        counts * ones,
        *_coefficients(layout, counts),
        layout.microbatches * ones,
        1.0 / counts,
        0.0 * ones,
        sends,
        (min(sync, sizes.bucket_s(layout.groups)) + shared) * ones,
        step * ones,
        _most_synced(sizes, frame, counts),
        whole,
        sizes.blocks - counts * whole,
        even * ones,
    ]


def _most_synced(sizes: LayerSizes, frame: Frame, counts: Array) -> Array:
    """Seconds of gradients and weights of the stage that has most of them, at least."""
    each = frame.sync_s + frame.shared_s
    first, last = sizes.inner_span
    least = np.ceil(sizes.blocks / counts) * float(each[first:last].min())
    found: Array = np.maximum(np.maximum(each.sum() / counts, least), float(each.max()))
    return found


_AGAIN = 2 + _COLUMNS.index("again")


def _parts(
    sizes: LayerSizes, number: int, layout: Layout, memory_bytes: Array
) -> list[_Part | None]:
    """Bound one layout with each capacity; none where it does not fit."""
    room, waiting = _Room(sizes, layout, memory_bytes), _waiting(layout)
    if layout.schedule == "zero-bubble":  # every stage has as many in flight; the least counts
        waiting = np.full(len(waiting), float(min(layout.stages[0], layout.microbatches)))
    counts = np.arange(layout.stages[0], layout.stages[1] + 1)
    held = _held(room, waiting, counts)
    fits = held[:, 1] >= sizes.blocks
    even = layout.schedule == "interleaved"
    if not fits.any():
        return [None] * len(fits)
    all_room = np.maximum(room.blocks(waiting), 0.0)
    if even:
        own = sizes.blocks // int(counts[0])
        fits &= (all_room.max(axis=1) >= own).all(axis=1, keepdims=True)
    columns = _columns_of(sizes, number, layout, counts)
    found: list[_Part | None] = []
    for c, fit in enumerate(fits):
        if not fit.any():
            found.append(None)
            continue
        again = np.maximum(0.0, sizes.blocks - np.maximum(0.0, held[c, 0]))
        own_columns = [*columns[:_AGAIN], again, *columns[_AGAIN + 1 :]]
        lean = all_room[c, 1:].max(axis=0) if all_room.shape[1] > 1 else np.zeros(len(waiting))
        found.append(
            _Part(
                tuple(column[fit] for column in own_columns),
                counts[fit],
                all_room[c, 0],
                lean,
                sizes.blocks,
                even,
            )
        )
    return found


def rows_of(sizes: LayerSizes, layouts: list[Layout], memory_bytes: Array) -> list[Rows]:
    """Bound every layout that may fit into so many bytes of a device, for several capacities."""
    found: list[list[_Part]] = [[] for _ in memory_bytes]
    for k, layout in enumerate(layouts):
        for own, part in zip(found, _parts(sizes, k, layout, memory_bytes), strict=True):
            if part is not None:
                own.append(part)
    return [Rows(own) for own in found]
