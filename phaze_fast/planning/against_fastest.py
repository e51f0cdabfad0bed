"""Why a plan that a user has in mind is not the fastest: what it would give, and where it loses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from phaze_fast.errors import InvalidInputError
from phaze_fast.planning.planner import Plans, infeasible, plan
from phaze_fast.planning.plans import PARTS, Plan
from phaze_fast.records import FrozenDict
from phaze_fast.units import format_bytes, format_time

__all__ = ["WhyNot", "read_asked", "why_not"]

_FIELDS = (
    *("tp", "pp", "dp", "cp", "cp_kind", "ep", "etp", "zero", "shard", "micro_batch"),
    *("schedule", "vpp", "recompute", "rank_order"),
)


@dataclass(frozen=True)
class WhyNot:
    """The best plan of those a user asks about, beside the fastest of all."""

    asked: Mapping[str, Any]
    """The fields that were fixed."""
    fastest: Plan
    plan: Plan | None
    """The fastest of those asked about; None where there is none."""
    reason: str
    """Where there is none: which rule it breaks, or by how much it does not fit."""

    @property
    def slower_by(self) -> float | None:
        """Share by which it takes longer than the fastest; None where there is no such plan."""
        return None if self.plan is None else self.plan.time_s / self.fastest.time_s - 1.0

    @property
    def parts_s(self) -> Mapping[str, float]:
        """Seconds by which each part of the step is longer than the fastest's."""
        if self.plan is None:
            return FrozenDict({})
        mine, best = self.plan.parts_s, self.fastest.parts_s
        return FrozenDict({name: mine[name] - best[name] for name in PARTS})

    def to_dict(self) -> dict[str, Any]:
        """Give it as plain data."""
        return {
            "asked": dict(self.asked),
            "plan": None if self.plan is None else self.plan.to_dict(),
            "slower_by": self.slower_by,
            "parts_s": dict(self.parts_s),
            "reason": self.reason,
            "text": str(self),
        }

    def __str__(self) -> str:
        words = ", ".join(f"{name} {value}" for name, value in self.asked.items())
        if self.plan is None:
            return f"{words}: there is no such plan. {self.reason}"
        if self.plan.time_s <= self.fastest.time_s:
            return f"{words}: that is the fastest, {format_time(self.plan.time_s)}."
        by_size = sorted(self.parts_s.items(), key=lambda item: -abs(item[1]))
        named = [
            f"{name} {'+' if more > 0 else '-'}{format_time(abs(more))}"
            for name, more in by_size[:4]
            if abs(more) > 0.01 * (self.plan.time_s - self.fastest.time_s)
        ]
        return (
            f"{words}: the best such plan ({self.plan}) takes {self.slower_by:.1%} longer than the "
            f"fastest ({self.fastest}), {format_bytes(self.plan.memory_bytes)} of "
            f"{format_bytes(self.plan.limit_bytes)}; parts of the step against the fastest: "
            f"{', '.join(named)}."
        )


def read_asked(text: str) -> dict[str, Any]:
    """Read fields of a plan, such as ``tp=8,pp=4,schedule=1f1b``.

    Examples
    --------
    >>> read_asked("tp=8,pp=4,schedule=1f1b")
    {'tp': 8, 'pp': 4, 'schedule': '1f1b'}
    """
    found: dict[str, Any] = {}
    for item in text.split(","):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals or name not in _FIELDS or not value:
            raise InvalidInputError(
                f"why-not: {item!r} is not accepted; expected name=value with a name of "
                f"{', '.join(_FIELDS)}"
            )
        found[name] = int(value) if value.isdigit() else value
    return found


def why_not(plans: Plans, asked: Mapping[str, Any], threads: int | None = None) -> WhyNot:
    """Find the best plan with some fields fixed, and hold it against the fastest of all.

    Parameters
    ----------
    plans
        What `plan` found.
    asked
        Fields of a plan and their values: tp, pp, dp, cp, cp_kind, ep, etp, zero, shard,
        micro_batch, schedule, vpp, recompute, rank_order. The others stay as free as they were.
    threads
        At most this many, by default all cores; the answer does not depend on it.

    Raises
    ------
    InvalidInputError
        Where a field is unknown or its value malformed.

    Examples
    --------
    >>> import phaze_fast as pf
    >>> cluster = pf.Cluster(devices=8, fabric="dgx-h100", chip="h100")
    >>> plans = pf.plan("llama2-7b", cluster, pf.Training(global_batch=64, micro_batch=(1, 2)))
    >>> answer = why_not(plans, {"tp": 8})
    >>> answer.plan.tp, answer.slower_by > 0
    (8, True)
    >>> why_not(plans, {"tp": 3}).plan is None
    True
    """
    unknown = [name for name in asked if name not in _FIELDS]
    if unknown or not asked:
        raise InvalidInputError(
            f"asked: {unknown[0] if unknown else {}!r} is not accepted; expected fields of "
            f"{', '.join(_FIELDS)}"
        )
    data = plans.training.to_dict()
    training = type(plans.training).from_dict({**data, **asked})
    found = plan(plans.model, plans.cluster, training, top=1, threads=threads)
    best = found.plans[0] if found.plans else None
    reason = "" if found.plans else str(infeasible(found))
    return WhyNot(FrozenDict(dict(asked)), plans.best, best, reason)
