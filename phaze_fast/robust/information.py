"""Value of information: how often each chip is best, and which constant matters most.

Only the chips that the box does not rule out are evaluated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phaze_fast.errors import not_accepted
from phaze_fast.explore import ChipGroups
from phaze_fast.robust.area_range import AreaRange, widened_space
from phaze_fast.robust.constants import Constant, Uncertainty
from phaze_fast.robust.scenarios import Point, Scenarios, UncertainSearch

_LISTED_CHIPS = 12


@dataclass(frozen=True, eq=False)
class Information:
    """The value of knowing each constant, and the probability of each chip to be best."""

    possible_winners: int
    known: dict[str, int]
    """By constant: number of possible winners left if its value is known to be the nominal one;
    fewest first."""
    shares: list[dict[str, Any]]
    """For each chip, the fraction of the samples in which it is the best; largest first."""
    samples: int
    seed: int
    one_at_a_time: dict[str, Any]
    """Regrets of the listed ``chips`` with each of the ``constants`` at an end of its interval."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "possible_winners": self.possible_winners,
            "left_if_known": self.known,
            "probability": self.shares,
            "distribution": "each constant uniform over its interval, all independent",
            "samples": self.samples,
            "seed": self.seed,
            "one_at_a_time": self.one_at_a_time,
        }


def information(
    search: UncertainSearch,
    uncertainty: Uncertainty,
    *,
    samples: int = 32,
    seed: int = 0,
    robust: int | None = None,
) -> Information:
    """Find how often each chip is best, and which constant would leave the fewest winners if known.

    Parameters
    ----------
    search
        The search: models, chips, cluster and step.
    uncertainty
        The box.
    samples
        Points drawn from the box, each constant uniform over its interval and all independent.
    seed
        Seed of the samples.
    robust
        Position in the grid of the chip of least largest regret, to be listed as well.
    """
    if isinstance(samples, bool) or not isinstance(samples, int) or not 1 <= samples <= 10_000:
        raise not_accepted("samples", samples, "a whole number from 1 to 10000")
    wide = widened_space(search.space, uncertainty)
    groups = ChipGroups.of(wide)
    winners = Scenarios(search, groups, uncertainty).possible_winners()
    few = groups.take(winners)
    left = {}
    for constant in uncertainty.constants:
        box = uncertainty.at({constant.name: constant.nominal})
        left[constant.name] = len(Scenarios(search, few, box).possible_winners())
    positions = few.chip.max(axis=1)
    chips = [str(wide[int(position)]) for position in positions]
    counts = _wins(Scenarios(search, few, uncertainty), samples, seed)
    also = np.flatnonzero(wide.index[positions] == robust).tolist() if robust is not None else []
    listed, rows = _one_at_a_time(Scenarios(search, few, uncertainty), also)
    return Information(
        possible_winners=len(winners),
        known=dict(sorted(left.items(), key=lambda item: item[1])),
        shares=[{"chip_text": chips[g], "share": count / samples} for g, count in counts],
        samples=samples,
        seed=seed,
        one_at_a_time={
            "chips": [chips[g] for g in listed],
            "robust": bool(also),
            "constants": rows,
        },
    )


def _wins(scenes: Scenarios, samples: int, seed: int) -> list[tuple[int, int]]:
    """Count how often each group is the fastest that fits, over samples of the box."""
    rng = np.random.default_rng(seed)
    scenes.least_anywhere()
    wins: Counter[int] = Counter()
    for _ in range(samples):
        values = {c.name: float(rng.uniform(c.low, c.high)) for c in scenes.box.constants}
        box = scenes.box.at(
            {c.name: values[c.name] for c in scenes.box.constants if c.kind == "area"}
        )
        areas = AreaRange.of(scenes.search.space, scenes.groups.records, box)
        fits = np.flatnonzero(areas.fits_always)
        if len(fits):
            point = tuple(values[c.name] for c in scenes.rates)
            wins[scenes.fastest(point, fits).group] += 1
    return sorted(wins.items(), key=lambda item: (-item[1], item[0]))


def _at_end(
    scenes: Scenarios, nominal: Uncertainty, constant: Constant, value: float
) -> tuple[Point, AreaRange]:
    """Point and areas with one constant at a value and all others at their nominal values."""
    box, point = nominal, list(scenes.nominal)
    if constant.kind == "area":
        box = box.at({constant.name: value})
    else:
        names = [c.name for c in scenes.rates]
        point[names.index(constant.name)] = value
    return tuple(point), AreaRange.of(scenes.search.space, scenes.groups.records, box)


def _one_at_a_time(
    scenes: Scenarios, also: Sequence[int]
) -> tuple[list[int], list[dict[str, Any]]]:
    """Evaluate chips with each constant at either end of its interval, all others nominal.

    Parameters
    ----------
    scenes
        Chips that may be best somewhere in the box.
    also
        Chip groups to list besides the best ones.

    Returns
    -------
    tuple
        Chip groups that are best somewhere, the nominal winner first; and a row for each constant:
        ``constant``, ``step`` (step time of the nominal winner at the low and the high end, over
        that at the nominal value) and ``regret`` of each group at the worse of the two ends.
    """
    scenes.least_anywhere()
    nominal = scenes.box.at({c.name: c.nominal for c in scenes.box.constants})

    def fastest(point: Point, areas: AreaRange) -> tuple[int, float]:
        best = scenes.fastest(point, np.flatnonzero(areas.fits_always))
        return best.group, best.value

    areas = AreaRange.of(scenes.search.space, scenes.groups.records, nominal)
    winner, winner_s = fastest(scenes.nominal, areas)
    ends = []
    for constant in scenes.box.constants:
        for value in (constant.low, constant.high):
            point, areas = _at_end(scenes, nominal, constant, value)
            ends.append((point, areas, *fastest(point, areas)))
    groups = list(dict.fromkeys([winner, *also, *(end[2] for end in ends)]))[:_LISTED_CHIPS]
    rows = []
    for k, constant in enumerate(scenes.box.constants):
        steps, regrets = [], []
        for point, areas, _, fastest_s in ends[2 * k : 2 * k + 2]:
            excess = np.array([areas.largest_excess(g) for g in groups])
            times = scenes.scores(point, groups) * excess
            steps.append(float(times[0] / winner_s))
            regrets.append(times / fastest_s)
        worse = np.maximum(np.max(regrets, axis=0), 1.0)
        rows.append({"constant": constant.name, "step": steps, "regret": worse.tolist()})
    return groups, rows
