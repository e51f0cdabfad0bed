"""Ranks of a plan: the part of the plan that each has, and the groups that it communicates in."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

from phaze_fast.opgraph import context_widths
from phaze_fast.planning import Plan
from phaze_fast.planning.sizes import StrategySizes
from phaze_fast.planning.training import block_mode, recompute_code


@dataclass(frozen=True)
class Place:
    """The part of a plan that a rank has."""

    rank: int
    tensor: int
    context: int
    replica: int
    stage: int


@dataclass(frozen=True)
class Ranks:
    """Ranks of a plan: tensor groups are adjacent, then context groups, then the rest."""

    KINDS: ClassVar = (
        *("tensor", "expert-tensor", "context", "context-heads", "context-ring", "expert"),
        *("expert-mesh", "data", "expert-data", "copies"),
    )
    """Kinds of groups that communicate."""
    plan: Plan

    def __len__(self) -> int:
        return self.plan.devices

    def rank(self, tensor: int, context: int, replica: int, stage: int) -> int:
        """Return the rank of a place.

        Ranks of a stage are consecutive, unless the plan's rank order puts stages inside replicas.
        """
        plan = self.plan
        if plan.rank_order == "stages-inside":
            outer = stage + plan.pp * replica
        else:
            outer = replica + plan.dp * stage
        return tensor + plan.tp * (context + plan.cp * outer)

    def place(self, rank: int) -> Place:
        """Return the place of a rank."""
        plan = self.plan
        inner, tensor = divmod(rank, plan.tp)
        outer, context = divmod(inner, plan.cp)
        if plan.rank_order == "stages-inside":
            replica, stage = divmod(outer, plan.pp)
        else:
            stage, replica = divmod(outer, plan.dp)
        return Place(rank, tensor, context, replica, stage)

    def group(self, place: Place, kind: str) -> tuple[int, ...]:
        """Return the ranks that a place communicates with, itself included.

        Parameters
        ----------
        place
            Place of a rank.
        kind
            ``tensor``, ``expert-tensor`` (ranks that split an expert), ``context``,
            ``context-heads`` and ``context-ring`` (parts of a context group that mixes ulysses and
            ring), ``expert``, ``expert-mesh`` (ranks that together have one copy of the experts),
            ``data`` (ranks with the same weights that shard their state), ``expert-data`` (such
            ranks for experts) or ``copies`` (ranks with the same shard of state).
        """
        plan, t, c, d, s = self.plan, place.tensor, place.context, place.replica, place.stage
        if kind == "tensor":
            return tuple(self.rank(k, c, d, s) for k in range(plan.tp))
        if kind.startswith("context"):
            inside = context_widths(plan.cp_kind, plan.cp)[0]
            first = c - c % inside
            parts = {
                "context": range(plan.cp),
                "context-heads": range(first, first + inside),
                "context-ring": range(c % inside, plan.cp, inside),
            }
            return tuple(self.rank(t, k, d, s) for k in parts[kind])
        if kind == "copies":
            return tuple(self.rank(t, c, r, s) for r in range(d % plan.shard, plan.dp, plan.shard))
        begin, end = d - d % plan.shard, d - d % plan.shard + plan.shard
        if kind == "data":
            return tuple(self.rank(t, k, r, s) for r in range(begin, end) for k in range(plan.cp))
        return self._expert_group(place, kind, begin, end)

    def _expert_group(self, place: Place, kind: str, begin: int, end: int) -> tuple[int, ...]:
        """Return a group of an expert kind, by the order of devices in a stage; see `Strategy.etp`.

        Replicas from `begin` to `end` shard the state of `place`.
        """
        plan, inner = self.plan, self.plan.tp * self.plan.cp
        width = plan.etp or plan.tp
        copy = width * plan.ep  # devices with one copy of all experts
        own = place.tensor + plan.tp * place.context + inner * place.replica
        if kind == "expert-tensor":
            devices = range(own - own % width, own - own % width + width)
        elif kind == "expert-mesh":
            devices = range(own - own % copy, own - own % copy + copy)
        elif kind == "expert":
            first = own - own % copy
            devices = range(first + own % width, first + copy, width)
        else:
            devices = range(inner * begin + own % copy, inner * end, copy)
        return tuple(
            self.rank(at % plan.tp, at // plan.tp % plan.cp, at // inner, place.stage)
            for at in devices
        )

    def group_name(self, place: Place, kind: str) -> str:
        """Return the name of a group by its first rank; empty for a group of one rank."""
        ranks = self.group(place, kind)
        return f"{kind}.{min(ranks)}" if len(ranks) > 1 else ""


def stage_layers(plan: Plan, sizes: StrategySizes, stage: int) -> list[list[tuple[int, str]]]:
    """Return, for each chunk of a stage, the kind and the recompute mode of its layers.

    Embedding and head are not recomputed.
    """
    own, graph = plan.stages[stage], sizes.graph
    code = recompute_code(own.recompute, sizes.variant_of)
    positions = iter(own.layers)
    chunks = []
    for count in own.chunks:
        layers, blocks = [], 0
        for position in islice(positions, count):
            kind = graph.order[position]
            is_block = graph.layers[kind].kind not in ("embedding", "head")
            blocks += is_block
            mode = block_mode(code, blocks, sizes.variants) if is_block else "none"
            layers.append((kind, mode))
        chunks.append(layers)
    return chunks
