"""Takes a search that has run, gives what came out of it as plain data that can be kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from phaze_fast.explore.placing import Found
from phaze_fast.explore.searcher import Moment, Searcher, Winner
from phaze_fast.explore.timing import STEPS

__all__ = ["FrontPoint", "Outcome", "counts_of"]


@dataclass(frozen=True)
class FrontPoint:
    """A point of the front."""

    chip: int
    """Position in the space."""
    strategies: tuple[int, ...]
    found: tuple[Found, ...]
    time_s: float
    area_mm2: float
    energy_j: float
    hbm_bytes: int
    cost_usd: float


def _finite(value: float) -> float | str:
    return value if np.isfinite(value) else str(value)


def _found(data: Mapping[str, Any]) -> Found:
    stages, variants = tuple(data["stage_of"]), tuple(data["variant_of"])
    return Found(float(data["time_s"]), int(data["layout"]), stages, variants)


def counts_of(search: Searcher) -> dict[str, int]:
    """Points by the step that settled them; ``placed`` in full, ``open`` not at all.

    With a budget, points whose bound does not rule them out stay open.
    """
    found = dict.fromkeys(("rules", "memory", *STEPS, "open"), 0)
    has = search.dies.chip >= 0
    for pairs, open_ in search.states():
        found["rules"] += sum(pairs.work.rejected.values()) * int(has.sum())
        for s, strategic in enumerate(pairs.work.strategies):
            for c, rows in enumerate(strategic.rows):
                mine = has[:, c]
                if not len(rows):
                    why = "memory" if strategic.layouts else "rules"
                    found[why] += int(mine.sum())
                    continue
                found["open"] += int((open_[s] & mine).sum())
                levels = pairs.level[s][mine & ~open_[s]]
                for k, name in enumerate(STEPS):
                    found[name] += int((levels == k + 1).sum())
    return found


@dataclass(frozen=True)
class Outcome:
    """The best chips of a space, the front, and the proof."""

    complete: bool
    """Whether the search went to the end."""
    bound: float
    """Nothing in the space has a better score, seconds."""
    winners: tuple[Winner, ...]
    front: tuple[FrontPoint, ...]
    objectives: tuple[str, ...]
    counts: dict[str, int]
    """Points by the step that settled them."""
    points: int
    designs: int
    """Chips, each with its HBM."""
    dies_placed: int
    """Dies of which some strategy was evaluated in full."""
    unproven: int
    """Placed pairs with a layer whose schedule is not proven to be the best."""
    history: tuple[Moment, ...]
    seconds: float
    notes: tuple[str, ...] = ()
    """What was mended on the way."""
    recalled: bool = False
    """Whether it was found by an earlier run and looked up."""

    @property
    def gap(self) -> float:
        """How much better something might be, as a fraction of the bound."""
        if not self.winners:
            return 0.0 if self.complete else float("inf")
        if not self.bound > 0:
            return float("inf")
        return max(0.0, self.winners[0].score / self.bound - 1.0)

    @property
    def status(self) -> str:
        """``optimal`` only with a proof over all points; else ``feasible`` or ``infeasible``."""
        if not self.winners:
            return "infeasible" if self.complete else "unknown"
        return "optimal" if self.complete and self.gap == 0.0 else "feasible"

    @classmethod
    def of(cls, search: Searcher, complete: bool) -> Outcome:
        """Read it off a search."""
        counts = counts_of(search)
        return cls(
            complete=complete,
            bound=search.bound,
            winners=tuple(search.winners()),
            front=tuple(
                FrontPoint(
                    chip=int(search.dies.chip[point[0], point[1]]),
                    strategies=tuple(a.strategy for a in answers),
                    found=tuple(a.found for a in answers),
                    time_s=score,
                    area_mm2=float(search.dies.area_mm2[point[0]]),
                    energy_j=sum(a.energy_j for a in answers),
                    hbm_bytes=int(search.dies.capacities[point[1]]),
                    cost_usd=search.cost_usd(point[0], point[1]),
                )
                for point, score, answers in search.front_points()
            ),
            objectives=search.front.objectives if search.objectives else (),
            counts=counts,
            points=sum(counts.values()),
            designs=int((search.dies.chip >= 0).sum()),
            dies_placed=search.dies_placed,
            unproven=search.unproven,
            history=tuple(search.history),
            seconds=search.history[-1].seconds,
        )

    def to_dict(self) -> dict[str, Any]:
        """Give it as plain data that `from_dict` reads back."""
        data = asdict(self)
        data["bound"] = _finite(self.bound)
        data["history"] = [
            {name: _finite(value) for name, value in asdict(moment).items()}
            for moment in self.history
        ]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Outcome:
        """Read it back."""

        def plans(item: Mapping[str, Any]) -> dict[str, Any]:
            found = tuple(_found(f) for f in item["found"])
            return {**item, "strategies": tuple(item["strategies"]), "found": found}

        def moment(item: Mapping[str, Any]) -> Moment:
            numbers: dict[str, Any] = {
                k: float(v) if isinstance(v, str) else v for k, v in item.items()
            }
            return Moment(**numbers)

        read = {
            "bound": float(data["bound"]),
            "winners": tuple(Winner(**plans(w)) for w in data["winners"]),
            "front": tuple(FrontPoint(**plans(p)) for p in data["front"]),
            "objectives": tuple(data["objectives"]),
            "history": tuple(moment(m) for m in data["history"]),
            "notes": tuple(data["notes"]),
        }
        return cls(**{**data, **read})
