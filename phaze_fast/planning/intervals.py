"""How far measured steps lay from predicted ones, by kind of run: intervals of a prediction.

The table is learnt from published runs (`phaze_fast.calibration`) and kept as data. A run is looked
up by chip, software, reach (one node or several) and kind of plan, and less and less of these where
too few runs of its own kind were measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Any

from phaze_fast.documents import parse_text
from phaze_fast.hardware import Cluster
from phaze_fast.planning.layouts import node_devices
from phaze_fast.planning.plans import Plan
from phaze_fast.software import load_precision

__all__ = ["NOMINAL", "groups_of", "plan_groups", "plan_interval_s", "plan_kind"]

NOMINAL = 0.8
"""Share of measured steps that intervals are meant to cover."""


FEWER_BITS = "fewer than 16 bits"
"""All runs whose products are neither bf16 nor fp16."""


EXPERTS = "with experts"
"""All runs whose experts are shared out: exchanges of tokens shape their errors most."""


def plan_kind(tp: int, pp: int, cp: int, zero: int, devices: int) -> str:
    """Say what most shapes the error of a plan, in one word.

    Examples
    --------
    >>> plan_kind(tp=8, pp=4, cp=1, zero=1, devices=64), plan_kind(1, 1, 1, 3, 8)
    ('pipeline', 'sharded')
    """
    if pp > 1:
        return "pipeline"
    if tp > 1 or cp > 1:
        return "tensor"
    if devices == 1:
        return "one device"
    return "sharded" if zero == 3 else "replicas"


def groups_of(chip: str, software: str, beyond_node: bool, kind: str) -> Iterator[str]:
    """Name the groups that a run belongs to, the most alike first.

    Examples
    --------
    >>> list(groups_of("h100", "megatron-core", True, "pipeline"))[-2:]
    ['megatron-core', 'all']
    """
    reach = "cluster" if beyond_node else "node"
    yield f"{chip}, {software}, {reach}, {kind}"
    yield f"{chip}, {software}, {reach}"
    yield f"{chip}, {software}"
    yield software
    yield "all"


@cache
def _table() -> Mapping[str, Any]:
    file = resources.files(__package__) / "data" / "intervals.yaml"
    found: dict[str, Any] = parse_text(file.read_text("utf-8"), "intervals.yaml")
    return found


def plan_groups(plan: Plan, cluster: Cluster) -> Iterator[str]:
    """Name the groups that a plan on a cluster belongs to, the most alike first."""
    kind = plan_kind(plan.tp, plan.pp, plan.cp, plan.zero, plan.devices)
    named = "" if cluster.chip is None else cluster.chip.name
    precision, software = load_precision(plan.precision), plan.software
    if precision.low:  # told apart, down to the last but one
        software = f"{software} in {precision.format}"
    if plan.ep > 1:
        software = f"{software}, {EXPERTS}"
    for group in groups_of(named, software, plan.devices > node_devices(cluster), kind):
        if group == "all" and plan.ep > 1:
            yield EXPERTS
        elif group == "all" and precision.low:
            yield FEWER_BITS
        yield group


def plan_interval_s(plan: Plan, cluster: Cluster) -> tuple[float, float]:
    """Give seconds between which a measured step lies in four of five cases."""
    known = _table()["ratios"]
    low, high = next(known[name] for name in plan_groups(plan, cluster) if name in known)
    return (plan.time_s * low, plan.time_s * high)
