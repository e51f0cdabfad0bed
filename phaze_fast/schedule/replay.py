"""Exact starts of operators from their modes and order, and the check of a schedule.

Both use only the latencies and core counts of the instance, so that nothing of a solver's
tolerances gets into an answer. An operator that takes no time still needs its cores at its instant.
"""

from __future__ import annotations

from collections.abc import Sequence

from phaze_fast.schedule.instance import LayerInstance

__all__ = ["cores_held", "earliest_starts", "is_feasible"]


def cores_held(
    instance: LayerInstance, mode: Sequence[int], overlap: bool
) -> list[tuple[int, ...]]:
    """Cores of each type that each operator keeps from others while it runs.

    Under the ``exclusive`` rule an operator on all cores keeps those of every type.
    """
    held = []
    for types, modes, choice in zip(instance.types, instance.modes, mode, strict=True):
        asked = modes[choice][0]
        whole_chip = asked == 0 and not overlap
        held.append(
            tuple(
                (have if asked == 0 else min(asked, have)) if whole_chip or types >> r & 1 else 0
                for r, have in enumerate(instance.cores)
            )
        )
    return held


class _Timeline:
    """Operators with fixed starts, and whether another fits beside them."""

    def __init__(self, instance: LayerInstance, held: Sequence[tuple[int, ...]]) -> None:
        self._cores, self._held = instance.cores, held
        self._placed: list[tuple[float, float, int]] = []

    def ends(self) -> list[float]:
        return [end for _, end, _ in self._placed]

    def place(self, op: int, start: float, end: float) -> None:
        self._placed.append((start, end, op))

    def fits(self, op: int, start: float, end: float) -> bool:
        """Whether cores suffice at `start` and wherever another operator starts before `end`."""
        beside = [p for p in self._placed if p[0] < end and start < p[1]]
        instants = {start, *(p[0] for p in beside if p[0] > start)}
        return all(self._room(op, at, beside) for at in instants)

    def _room(self, op: int, at: float, beside: list[tuple[float, float, int]]) -> bool:
        running = [self._held[j] for s, e, j in beside if s <= at < e]
        # Operators of no length follow one another within an instant: each needs room by itself.
        instant = [self._held[j] for s, e, j in beside if s == at == e]
        for r, have in enumerate(self._cores):
            used = self._held[op][r] + sum(held[r] for held in running)
            if used + max((held[r] for held in instant), default=0) > have:
                return False
        return True


def earliest_starts(
    instance: LayerInstance, order: Sequence[int], mode: Sequence[int], overlap: bool
) -> list[float]:
    """Fix operators one by one in `order`, each as early as edges and cores allow.

    This is serial schedule generation: applied to the order of starts of a feasible schedule, it
    gives one in which no operator starts later. O(n^4) for n operators at worst.

    Parameters
    ----------
    instance
        The layer.
    order
        Every operator once, none before an operator that it waits for.
    mode
        Which of its ways each operator runs in.
    overlap
        Whether other types may run beside an operator on all cores.

    Examples
    --------
    >>> from phaze_fast.schedule import instance_from_dict
    >>> ops = [{"id": i, "type": "TC", "lat_single": 2.0} for i in range(3)]
    >>> layer = {"name": "x", "ops": ops, "edges": [[0, 2]], "num_tc": 2, "num_vc": 1}
    >>> earliest_starts(instance_from_dict(layer), [0, 1, 2], [0, 0, 0], False)
    [0.0, 0.0, 2.0]
    """
    before: list[list[int]] = [[] for _ in order]
    for a, b in instance.edges:
        before[b].append(a)
    length = [modes[choice][1] for modes, choice in zip(instance.modes, mode, strict=True)]
    timeline = _Timeline(instance, cores_held(instance, mode, overlap))
    starts = [0.0] * len(order)
    for op in order:
        ready = max((starts[b] + length[b] for b in before[op]), default=0.0)
        instants = sorted({ready, *(end for end in timeline.ends() if end > ready)})
        starts[op] = next(at for at in instants if timeline.fits(op, at, at + length[op]))
        timeline.place(op, starts[op], starts[op] + length[op])
    return starts


def is_feasible(
    instance: LayerInstance, starts: Sequence[float], mode: Sequence[int], overlap: bool
) -> bool:
    """Whether a schedule keeps every edge and never holds more cores than there are."""
    length = [modes[choice][1] for modes, choice in zip(instance.modes, mode, strict=True)]
    ends = [s + d for s, d in zip(starts, length, strict=True)]
    if min(starts) < 0.0 or any(starts[b] < ends[a] for a, b in instance.edges):
        return False
    timeline = _Timeline(instance, cores_held(instance, mode, overlap))
    for op in range(len(instance)):
        if not timeline.fits(op, starts[op], ends[op]):
            return False
        timeline.place(op, starts[op], ends[op])
    return True
