"""Times of a layer's collectives, priced where its groups of ranks lie on the fabric.

Ranks count tensor-parallel devices first, then those of a context group, then replicas.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from phaze_fast import _core
from phaze_fast.cost.collectives import AnyFabric, collective_batch
from phaze_fast.errors import InvalidInputError, InvalidTypeError
from phaze_fast.hardware import Cluster, TieredFabric
from phaze_fast.opgraph import GROUPS, LayerGraph, OpGraph

__all__ = ["RankGroups", "collectives_s", "rank_groups"]

Array = np.ndarray[Any, Any]


class RankGroups(NamedTuple):
    """How the groups of a strategy lie."""

    ranks: tuple[int, ...]
    """Of each group of `GROUPS`."""
    stride: tuple[int, ...]
    """Ranks between neighbours of each."""
    runs: tuple[int, ...]
    """Of each, how many such runs of ranks there are."""
    apart: tuple[int, ...]
    """Ranks from one such run to the next."""
    visits: tuple[int, ...]
    """Of each, how many of its ranks a row goes to that is sent once to each unit of the fabric; 0:
    a row is sent as often as its payload says."""

    @property
    def devices(self) -> int:
        """Devices from the first rank of the groups to the last."""
        rows = zip(GROUPS, self.ranks, self.stride, self.runs, self.apart, strict=True)
        reach = {name: ((n - 1) * s, (runs - 1) * apart) for name, n, s, runs, apart in rows}
        inside = self.apart[GROUPS.index("expert")] > 0  # its runs are parts of tensor groups
        beyond = reach["expert"][1] if inside else reach["expert"][0]
        return 1 + reach["tensor"][0] + reach["context"][0] + beyond

    @property
    def widths(self) -> str:
        """Names and numbers, as a message shows them."""
        named = zip(GROUPS, self.ranks, self.runs, strict=True)
        shown = {"tensor": "tp", "context": "cp", "expert": "ep"}
        return ", ".join(f"{shown[name]} {n * runs}" for name, n, runs in named if name in shown)


def rank_groups(graph: OpGraph | LayerGraph, expert_stride: int | None) -> RankGroups | None:
    """Lay out the groups of a graph's strategy; None for an operator graph, which has none."""
    if isinstance(graph, OpGraph):
        return None
    s = graph.strategy
    inner = s.tp * s.cp
    apart = inner if expert_stride is None else expert_stride
    if not isinstance(apart, int) or isinstance(apart, bool):
        raise InvalidTypeError(
            f"expert_stride: {type(apart).__name__} is not accepted; expected a whole number"
        )
    if apart < inner and s.ep > 1:
        raise InvalidInputError(
            f"expert_stride: {apart} is not accepted; expected at least {inner}, the devices of "
            f"tp {s.tp} and cp {s.cp}"
        )
    moe = getattr(graph.model, "moe", None)
    visits = moe.top_k if moe is not None and moe.sent_once else 0
    laid_out = {
        "none": (1, 1, 1, 0, 0),
        "tensor": (s.tp, 1, 1, 0, 0),
        "context": (s.cp, s.tp, 1, 0, 0),
        "expert": (s.ep, apart, 1, 0, visits),
        "expert-tensor": (s.expert_width, 1, 1, 0, 0),
    }
    if s.expert_parts > 1:  # the parts of a tensor group, on so many replicas
        laid_out["expert"] = (s.expert_parts, s.expert_width, s.expert_replicas, apart, visits)
    return RankGroups(*zip(*(laid_out[name] for name in GROUPS), strict=True))


def _refuse_too_few_devices(groups: RankGroups, fabric: AnyFabric | Cluster) -> None:
    devices = fabric.devices if isinstance(fabric, Cluster) else fabric.capacity
    if devices is not None and groups.devices > devices:
        raise InvalidInputError(
            f"{groups.widths}: the groups take {groups.devices} devices, and the fabric has "
            f"{devices}"
        )


def _sent_share(groups: RankGroups, group: int, fabric: AnyFabric | Cluster) -> float:
    """Share of an exchange that is sent where a row goes once to each unit that it visits.

    Of n nodes (or of n devices, where the group lies in one node), k visits at random meet
    n(1 - (1 - 1/n)^k).
    """
    k = groups.visits[group]
    wired = fabric.fabric if isinstance(fabric, Cluster) else fabric
    if not k:
        return 1.0
    units = groups.ranks[group] * groups.runs[group]
    size = wired.tiers[0].size if isinstance(wired, TieredFabric) else None
    if size is not None:
        first = np.arange(groups.ranks[group]) * groups.stride[group]
        ranks = first[:, None] + np.arange(groups.runs[group]) * groups.apart[group]
        nodes = len(np.unique(ranks // size))
        units = nodes if nodes > 1 else units
    return float(units * (1.0 - (1.0 - 1.0 / units) ** k) / k)


def collectives_s(
    graph: OpGraph, fabric: AnyFabric | Cluster | None, groups: RankGroups | None
) -> Array:
    """Seconds of a graph's collectives over the fabric, zero elsewhere, shape (operators,).

    Raises
    ------
    InvalidInputError
        Where there are collectives and no fabric, no groups, or fewer devices than the groups take.
    """
    times = np.zeros(len(graph))
    wanted = graph.ops["collective"] >= 0
    if not wanted.any():
        return times
    if groups is None:
        raise InvalidInputError(
            f"graphs: {graph.name} has collectives, and alone it does not say over how many ranks; "
            "expected the LayerGraph it belongs to"
        )
    if fabric is None:
        raise InvalidInputError(
            f"fabric: {graph.name} has collectives; expected a fabric or a cluster to price them on"
        )
    ops = graph.ops[wanted]
    share = np.array([_sent_share(groups, g, fabric) for g in range(len(GROUPS))])
    asked = collective_batch(
        fabric,
        ops["collective"].astype(np.uint8),
        ops["payload_bytes"] * share[ops["group"]],
        np.array(groups.ranks)[ops["group"]],
        np.array(groups.stride)[ops["group"]],
        outer_ranks=np.array(groups.runs)[ops["group"]],
        outer_stride=np.array(groups.apart)[ops["group"]],
    )
    _refuse_too_few_devices(groups, fabric)
    if asked.status.any():
        worst = int(np.flatnonzero(asked.status)[0])
        raise InvalidInputError(f"{graph.name}: {_core.STATUS_SENTENCES[int(asked.status[worst])]}")
    times[wanted] = asked.time_s
    return times
