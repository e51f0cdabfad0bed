"""Ranks of a plan: which device has which part, and with whom it communicates."""

from __future__ import annotations

from dataclasses import dataclass

from phaze_fast.planning import Plan

__all__ = ["Place", "Ranks"]


@dataclass(frozen=True)
class Place:
    """What a rank has of a plan."""

    rank: int
    tensor: int
    context: int
    replica: int
    stage: int


@dataclass(frozen=True)
class Ranks:
    """Ranks of a plan: tensor groups lie next to each other, then context groups, then the rest."""

    plan: Plan

    def __len__(self) -> int:
        return self.plan.devices

    def rank(self, tensor: int, context: int, replica: int, stage: int) -> int:
        """Give the rank of a place.

        Stages lie outside replicas, or inside where the plan's rank order says so.
        """
        plan = self.plan
        if plan.rank_order == "stages-inside":
            outer = stage + plan.pp * replica
        else:
            outer = replica + plan.dp * stage
        return tensor + plan.tp * (context + plan.cp * outer)

    def place(self, rank: int) -> Place:
        """Give the place of a rank."""
        plan = self.plan
        inner, tensor = divmod(rank, plan.tp)
        outer, context = divmod(inner, plan.cp)
        if plan.rank_order == "stages-inside":
            replica, stage = divmod(outer, plan.pp)
        else:
            stage, replica = divmod(outer, plan.dp)
        return Place(rank, tensor, context, replica, stage)

    def group(self, place: Place, kind: str) -> tuple[int, ...]:
        """Give the ranks that a place communicates with, itself included.

        Parameters
        ----------
        place
            Of a rank.
        kind
            ``tensor``, ``expert-tensor`` (that share an expert), ``context``, ``expert``, ``data``
            (all that hold the same weights and share their state), ``expert-data`` (all that hold
            the same experts and share theirs) or ``copies`` (all with the same share of state).
        """
        plan, t, c, d, s = self.plan, place.tensor, place.context, place.replica, place.stage
        if kind == "tensor":
            return tuple(self.rank(k, c, d, s) for k in range(plan.tp))
        if kind == "context":
            return tuple(self.rank(t, k, d, s) for k in range(plan.cp))
        width = plan.etp or plan.tp
        if kind == "expert-tensor":
            near = t - t % width
            return tuple(self.rank(near + k, c, d, s) for k in range(width))
        spread = max(1, plan.ep // max(1, plan.tp // width))
        first = d - d % spread
        if kind == "expert":  # parts of the tensor group, on so many replicas
            parts = range(t % width, plan.tp, width) if plan.ep > 1 else [t]
            return tuple(self.rank(k, c, first + r, s) for r in range(spread) for k in parts)
        if kind == "copies":
            return tuple(self.rank(t, c, r, s) for r in range(d % plan.shard, plan.dp, plan.shard))
        begin = d - d % plan.shard
        end = begin + plan.shard
        replicas = range(begin, end)
        if kind == "expert-data":
            replicas = range(begin + d % spread, end, spread)
        return tuple(self.rank(t, k, r, s) for r in replicas for k in range(plan.cp))
