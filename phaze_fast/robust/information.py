"""What knowing a constant better is worth, and how often each chip is the best.

Both look only at the chips that a box of constants does not rule out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phaze_fast.errors import InvalidInputError
from phaze_fast.explore.chip_groups import ChipGroups
from phaze_fast.hardware import ArchitectureSpace, Cluster
from phaze_fast.models import Model
from phaze_fast.planning import Training
from phaze_fast.robust.area_range import AreaRange, widened_space
from phaze_fast.robust.constants import AREA_TERMS, Uncertainty
from phaze_fast.robust.one_at_a_time import one_at_a_time
from phaze_fast.robust.scenarios import Scenarios

__all__ = ["Information", "information", "possible_winners"]

Array = np.ndarray[Any, Any]

_TIES = 1e-6
"""Steps that differ by less than this part are not told apart where only the fastest counts."""


@dataclass(frozen=True, eq=False)
class Information:
    """What the constants of a box decide."""

    possible_winners: int
    known: dict[str, int]
    """Possible winners left where one constant is known to have its nominal value, by constant;
    the most telling first."""
    shares: list[dict[str, Any]]
    """How often each chip is the best over the samples, most often first."""
    samples: int
    seed: int
    one_at_a_time: dict[str, Any]
    """Regrets of some chips with one constant at an end: ``chips`` and ``constants``."""

    def to_dict(self) -> dict[str, Any]:
        """Give it as plain data."""
        return {
            "possible_winners": self.possible_winners,
            "left_if_known": self.known,
            "probability": self.shares,
            "distribution": "each constant uniform over its interval, all independent",
            "samples": self.samples,
            "seed": self.seed,
            "one_at_a_time": self.one_at_a_time,
        }


def possible_winners(scenarios: Scenarios, areas: AreaRange) -> Array:
    """Find the groups that are not slower everywhere than one that always fits.

    A group whose fastest step in the box takes longer than the slowest step of a chip that fits
    whatever the areas are is never the fastest. In a wider box steps are slower at the slow end,
    faster at the fast end and fewer chips always fit, so none is lost.
    """
    fits = np.flatnonzero(areas.fits_always)
    somewhere = np.flatnonzero(areas.fits_somewhere)
    least = scenarios.least_anywhere()
    if not len(fits):
        return somewhere[np.isfinite(least[somewhere])]
    first = fits[np.argmin(least[fits])]
    most = float(scenarios.scores(scenarios.slow, [first])[0]) * (1.0 + 1e-9)
    found = scenarios.least_share(scenarios.slow, fits, np.ones(len(fits)), most, _TIES)
    if scenarios.slow == scenarios.fast and len(fits) == len(somewhere):
        return np.array([found.group])  # one point: the best chip
    return somewhere[scenarios.not_ruled_out(somewhere, found.value)]


def information(
    models: Sequence[Model],
    space: ArchitectureSpace,
    cluster: Cluster,
    training: Training,
    uncertainty: Uncertainty,
    weights: Sequence[float] = (),
    samples: int = 32,
    seed: int = 0,
    threads: int = 1,
    robust: int | None = None,
) -> Information:
    """Say which constant, known better, would leave the fewest possible winners, and who wins.

    Parameters
    ----------
    models, space, cluster, training, weights
        The search.
    uncertainty
        The box.
    samples
        Points drawn from it, each constant uniform over its interval and all independent.
    seed
        Of the samples.
    threads
        At most this many; nothing depends on it.
    robust
        Position in the grid of the chip of least largest regret, where it is known.
    """
    if isinstance(samples, bool) or not isinstance(samples, int) or not 1 <= samples <= 10_000:
        raise InvalidInputError(
            f"samples: {samples!r} is not accepted; expected a whole number from 1 to 10000"
        )
    wide = widened_space(space, uncertainty)
    groups = ChipGroups.of(wide)
    areas = AreaRange.of(space, groups.records, uncertainty)

    def scenes(some: ChipGroups, box: Uncertainty) -> Scenarios:
        return Scenarios(models, some, cluster, training, box.rates, weights, threads)

    near = possible_winners(scenes(groups, uncertainty), areas)
    few = groups.take(near)
    left = {}
    for constant in uncertainty.constants:
        box = uncertainty.narrowed(constant.name, constant.nominal, constant.nominal)
        own = AreaRange.of(space, few.records, box)
        left[constant.name] = len(possible_winners(scenes(few, box), own))
    ranked = dict(sorted(left.items(), key=lambda item: item[1]))
    shares = _shares(scenes(few, uncertainty), space, uncertainty, samples, seed)
    listed = [
        {"chip_text": str(wide[int(few.chip[g].max())]), "share": count / samples}
        for g, count in shares
    ]
    own = wide.index[few.chip.max(axis=1)]
    also = np.flatnonzero(own == robust).tolist() if robust is not None else []
    apart = one_at_a_time(scenes(few, uncertainty), space, uncertainty, also)
    chips = [str(wide[int(few.chip[g].max())]) for g in apart.groups]
    pictured = {"chips": chips, "robust": bool(also), "constants": apart.rows}
    return Information(len(near), ranked, listed, samples, seed, pictured)


def _shares(
    scenes: Scenarios, space: ArchitectureSpace, box: Uncertainty, samples: int, seed: int
) -> list[tuple[int, int]]:
    """Count how often each group is the fastest that fits, over samples of the box."""
    rng = np.random.default_rng(seed)
    scenes.least_anywhere()
    won: Counter[int] = Counter()
    for _ in range(samples):
        drawn = {c.name: float(rng.uniform(c.low, c.high)) for c in box.constants}
        there = box
        for term in AREA_TERMS:
            name = f"{term}_area"
            if name in drawn:
                there = there.narrowed(name, drawn[name], drawn[name])
        fits = np.flatnonzero(AreaRange.of(space, scenes.groups.records, there).fits_always)
        if not len(fits):
            continue
        point = tuple(drawn[c.name] for c in scenes.rates)
        known = scenes.least_anywhere()[fits]
        first = fits[np.argmin(known)]
        most = float(scenes.scores(point, [first])[0]) * (1.0 + 1e-9)
        found = scenes.least_share(point, fits, np.ones(len(fits)), most, _TIES)
        won[found.group] += 1
    return sorted(won.items(), key=lambda item: (-item[1], item[0]))
