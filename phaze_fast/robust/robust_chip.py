"""The chip of least largest regret over a box of constants, with a proof.

Points at which some chip is beaten are kept as witnesses: at each of them every other chip's regret
has a lower bound, from rooflines up to its exact step. The chip whose regret at the witnesses is
least goes next; its largest regret over the box is bounded (`regret`), and where that is too large
another witness is found. When no chip's regret at the witnesses is below the best bound by more
than the tolerance, nothing is left to find.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phaze_fast.errors import InvalidInputError
from phaze_fast.explore.chip_groups import ChipGroups
from phaze_fast.explore.exact import ExactEvaluator
from phaze_fast.explore.problem import problems_of
from phaze_fast.explore.result import Winner
from phaze_fast.hardware import Accelerator, ArchitectureSpace, Cluster
from phaze_fast.models import Model
from phaze_fast.planning import Training
from phaze_fast.robust.area_range import AreaRange, widened_space
from phaze_fast.robust.constants import Uncertainty
from phaze_fast.robust.information import possible_winners
from phaze_fast.robust.regret import LargestRegret, RegretBounds, Witness
from phaze_fast.robust.scenarios import Scenarios

__all__ = ["TOLERANCE", "RobustResult", "robust_chip"]

Array = np.ndarray[Any, Any]

TOLERANCE = 0.05
"""How far, at most, a largest regret may be from its bound."""
_INNER = 0.75
"""Part of the tolerance for bounding one chip's regret; the rest is for telling chips apart."""
_WAVE = 32


@dataclass(frozen=True, eq=False)
class RobustResult:
    """The chip of least largest regret, and what is known of others."""

    chip: Accelerator
    index: int
    """Position in the grid of the space."""
    max_regret: float
    """Nowhere in the box does its step take longer than so many times the fastest chip's there."""
    attained: float
    """At some point of the box it does take so many times as long."""
    bound: float
    """No chip's largest regret is less."""
    proven: bool
    """Whether `max_regret` is at most `bound` times 1 + tolerance."""
    tolerance: float
    time_s: float
    """Step at the nominal constants."""
    worst_at: dict[str, float]
    """Where `attained` is."""
    rival: Accelerator
    """The fastest chip there."""
    possible_winners: int
    """Chips that are not ruled out as the fastest at every point of the box."""
    nominal: LargestRegret
    """Of the chip that is best at the nominal constants."""
    nominal_chip: Accelerator
    nominal_s: float
    uncertainty: Uncertainty
    seconds: float
    evaluations: int

    def to_dict(self) -> dict[str, Any]:
        """Give it as plain data."""
        return {
            "robust": {
                "chip": self.chip.to_dict(),
                "chip_text": str(self.chip),
                "grid_index": self.index,
                "max_regret": self.max_regret,
                "attained_regret": self.attained,
                "bound": self.bound,
                "proven": self.proven,
                "tolerance": self.tolerance,
                "time_s": self.time_s,
                "cost": self.time_s / self.nominal_s - 1.0,
                "worst_at": self.worst_at,
                "rival_text": str(self.rival),
            },
            "possible_winners": self.possible_winners,
            "nominal_max_regret": self.nominal.bound,
            "nominal_attained_regret": self.nominal.attained,
            "constants": self.uncertainty.to_dict(),
            "robust_seconds": self.seconds,
        }


class _Candidates:
    """Lower bounds of every candidate's largest regret, from witnesses."""

    def __init__(self, scenarios: Scenarios, areas: AreaRange, candidates: Array) -> None:
        self.scenes, self.areas, self.groups = scenarios, areas, candidates
        self.ratios = np.zeros(len(candidates))
        """Largest known ratio of each candidate's step to a rival's; below 1 it beats them."""
        self.witnesses: list[tuple[Witness, Array]] = []
        self.done = np.zeros(len(candidates), dtype=np.int64)
        """Witnesses at which each candidate's regret is exact."""

    def add(self, witness: Witness) -> None:
        """Take in a witness."""
        excess = self.areas.excess_where_fits(witness.rival, self.groups)
        self.witnesses.append((witness, excess))
        floor = self.scenes.least_anywhere()[self.groups]
        self.ratios = np.maximum(self.ratios, excess * floor / witness.rival_s)

    @property
    def least(self) -> Array:
        """Lower bounds of every candidate's largest regret."""
        return np.maximum(self.ratios, 1.0)

    def next(self, below: float) -> int:
        """Position of the candidate whose regret at the witnesses is least; -1: none is below."""
        while True:
            unsure = self.done < len(self.witnesses)  # of equal ones those that are exact
            order = np.lexsort((self.ratios, unsure, self.least))
            first = int(order[0])
            if self.least[first] >= below:
                return -1
            if not unsure[first]:
                return first
            wave = order[:_WAVE]
            wave = wave[(self.done[wave] < len(self.witnesses)) & (self.least[wave] < below)]
            for k, (witness, excess) in enumerate(self.witnesses):
                todo = wave[(self.done[wave] <= k) & (self.least[wave] < below)]
                if len(todo):
                    limits = below * witness.rival_s / excess[todo]
                    exact, least = self.scenes.within(witness.point, self.groups[todo], limits)
                    reached = np.where(np.isfinite(exact), exact, np.maximum(least, limits))
                    regret = excess[todo] * reached / witness.rival_s
                    self.ratios[todo] = np.maximum(self.ratios[todo], regret)
                    self.done[todo] = k + 1


def _checked(tolerance: float) -> float:
    good = isinstance(tolerance, int | float) and not isinstance(tolerance, bool)
    if not good or not 1e-6 <= tolerance <= 1.0:
        raise InvalidInputError(
            f"tolerance: {tolerance!r} is not accepted; expected a number from 1e-06 to 1"
        )
    return float(tolerance)


def robust_chip(
    models: Sequence[Model],
    space: ArchitectureSpace,
    cluster: Cluster,
    training: Training,
    uncertainty: Uncertainty,
    nominal: Winner,
    weights: Sequence[float] = (),
    tolerance: float = TOLERANCE,
    time_limit_s: float = math.inf,
    threads: int = 1,
    say: Callable[[str], None] | None = None,
) -> RobustResult:
    """Find the chip of least largest regret over a box of constants; see `phaze_fast.search`.

    Parameters
    ----------
    nominal
        The best chip at the nominal constants, as the search found it.
    tolerance
        How far the least largest regret may be from its bound, as a fraction.
    time_limit_s
        Stop after so many seconds; what is not proven then says so.
    say
        Called with what is done next.
    """
    began, tolerance = time.monotonic(), _checked(tolerance)
    wide = widened_space(space, uncertainty)
    groups = ChipGroups.of(wide)
    areas = AreaRange.of(space, groups.records, uncertainty)
    scenes = Scenarios(models, groups, cluster, training, uncertainty.rates, weights, threads)
    bounds = RegretBounds(scenes, areas, tolerance * _INNER, began + time_limit_s)
    first_chip = groups.chip.max(axis=1)
    inside = np.isin(wide.index[first_chip], space.index) & areas.fits_somewhere
    table = _Candidates(scenes, areas, np.flatnonzero(inside))
    start = int(np.flatnonzero(wide.index == space.index[nominal.chip])[0])
    start = int(groups.of_chip[start, 0])

    def told(text: str) -> None:
        if say is not None:
            say(text)

    told("largest regret of the nominal winner")
    first = RegretBounds(scenes, areas, tolerance, bounds.deadline).largest(start)
    table.add(first.witness)
    best, reached = start, first
    while time.monotonic() < bounds.deadline:
        at = table.next(reached.bound / (1.0 + tolerance))
        if at < 0:
            break
        group = int(table.groups[at])
        told(
            f"chip {group}: regret {table.least[at]:.4f} at the witnesses, best {reached.bound:.4f}"
        )
        tried = bounds.largest(group, reached.bound, _worst_witness(table, at))
        if tried.bound < reached.bound:
            best, reached = group, tried
        table.add(tried.witness)
        table.ratios[at] = max(table.ratios[at], tried.attained)
        table.done[at] = len(table.witnesses)
    return _result(
        scenes, areas, wide, table, (start, first), (best, reached), uncertainty, tolerance, began
    )


def _worst_witness(table: _Candidates, at: int) -> Witness:
    """Find the witness at which a candidate does worst."""
    regrets = [
        float(excess[at] * table.scenes.scores(w.point, [table.groups[at]])[0] / w.rival_s)
        for w, excess in table.witnesses
    ]
    return table.witnesses[int(np.argmax(regrets))][0]


class _AtNominal:
    """Chip groups at the nominal constants, each with its best HBM."""

    def __init__(self, scenes: Scenarios) -> None:
        problems = problems_of(scenes.models, scenes.groups, scenes.cluster, scenes.training)
        self._exact = ExactEvaluator(problems, scenes.groups, scenes.weights, scenes.threads)
        self._groups = scenes.groups

    def time_s(self, group: int) -> float:
        """Seconds of its step."""
        return float(self._exact.scores([group])[0])

    def position(self, group: int) -> int:
        """Which chip it is, with the HBM of its best plan."""
        winner = self._exact.winners([group])[0]
        return int(self._groups.chip[group].max()) if winner is None else winner.chip


def _result(
    scenes: Scenarios,
    areas: AreaRange,
    wide: ArchitectureSpace,
    table: _Candidates,
    nominal: tuple[int, LargestRegret],
    best: tuple[int, LargestRegret],
    uncertainty: Uncertainty,
    tolerance: float,
    began: float,
) -> RobustResult:
    """Put together what came out."""
    start, first = nominal
    group, reached = best
    least = max(1.0, min(float(table.least.min()), reached.attained))
    witness = reached.witness
    at_nominal = _AtNominal(scenes)
    own, usual = at_nominal.time_s(group), at_nominal.time_s(start)
    chip = at_nominal.position
    names = [c.name for c in scenes.rates]
    return RobustResult(
        chip=wide[chip(group)],
        index=int(wide.index[chip(group)]),
        max_regret=reached.bound,
        attained=reached.attained,
        bound=least,
        proven=reached.bound <= least * (1.0 + tolerance) * (1.0 + 1e-9),
        tolerance=tolerance,
        time_s=own,
        worst_at=dict(zip(names, witness.point, strict=True)),
        rival=wide[chip(witness.rival)],
        possible_winners=len(possible_winners(scenes, areas)),
        nominal=first,
        nominal_chip=wide[chip(start)],
        nominal_s=usual,
        uncertainty=uncertainty,
        seconds=time.monotonic() - began,
        evaluations=scenes.evaluations,
    )
