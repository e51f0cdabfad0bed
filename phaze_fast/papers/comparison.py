"""Baselines of a search with the same cost model, and its sensitivity to single terms of it.

If the winner stays the same when a term of the model is halved or doubled, it does not depend on
that term.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from phaze_fast.errors import InvalidInputError, MissingExtraError, nearest
from phaze_fast.explore import (
    ChipGroups,
    ExactEvaluator,
    Outcome,
    SearchProblem,
    find_chips,
    scaled_cluster,
    tier_names,
)
from phaze_fast.hardware import (
    Accelerator,
    ArchitectureSpace,
    Cluster,
    area_batch,
    chip_records,
    presets,
)
from phaze_fast.papers.fixed_plans import BUILT, Baseline, FixedChip, as_searched, given_chip
from phaze_fast.papers.searches import bayesian, early_stop, random_search
from phaze_fast.planning import plan
from phaze_fast.tables import Array

BASELINES = ("none", "tpuv4", "all")
"""Which other methods a search is compared with: none, TPU v4 (the paper's chip and the one that
was built), or all."""

Baselines = str | Accelerator | Sequence[str | Accelerator]
"""Names of `BASELINES`, chips, names of chips or their files; a text may join several by commas."""

Say = Callable[[str], None]

_MINUTE_S = 60.0
_FACTORS = (0.5, 2.0)
_AREAS = ("tensor_mm2", "vector_mm2", "buffer_mm2", "network_mm2", "hbm_mm2")


def _silent(_: str) -> None:
    """Ignore a progress message."""


# ---- baselines ----


def _item(
    baseline: Baseline,
    best_s: float,
    problems: Sequence[SearchProblem],
    space: ArchitectureSpace,
) -> dict[str, Any]:
    """Return a baseline as plain data, with the speed-up of the search's winner."""
    fits = math.isfinite(baseline.score)
    batch = problems[0].training.global_batch
    chip, plans = baseline.chip, [baseline.plan] if baseline.plan is not None else []
    if baseline.winner is not None:
        chip, plans = space[baseline.winner.chip], list(baseline.winner.plans)
    return {
        "title": baseline.title,
        "time_s": baseline.score if fits else None,
        "samples_per_s": batch / baseline.score if fits else None,
        "speedup": baseline.score / best_s if fits else None,
        "evaluations": baseline.evaluations,
        "seconds": baseline.seconds,
        "chip": chip.to_dict() if chip is not None else None,
        "chip_text": str(chip) if chip is not None else "",
        "plan_text": "; ".join(map(str, plans)),
        "mfu": plans[0].mfu if len(plans) == 1 else None,
        "note": baseline.note,
    }


def read_baselines(which: Baselines) -> tuple[set[str], list[Accelerator]]:
    """Separate names of `BASELINES` from chips, and load the chips.

    Raises
    ------
    InvalidInputError
        Where a text is neither a name of `BASELINES`, a preset of a chip nor a file of one.

    Examples
    --------
    >>> methods, chips = read_baselines("tpuv4,h100")
    >>> methods, [chip.name for chip in chips]
    ({'tpuv4'}, ['h100'])
    """
    methods: set[str] = set()
    chips: list[Accelerator] = []
    for item in [which] if isinstance(which, str | Accelerator) else which:
        if isinstance(item, Accelerator):
            chips.append(item)
            continue
        for name in (part.strip() for part in item.split(",")):
            if name.lower() in BASELINES:
                methods.add(name.lower())
            else:
                chips.append(_own_chip(name))
    return methods, chips


def _own_chip(name: str) -> Accelerator:
    try:
        return presets.chip(name)
    except InvalidInputError as error:
        if name.endswith((".yaml", ".yml", ".json")):
            raise
        known = [*BASELINES, *presets.chip_names()]
        raise InvalidInputError(
            f"baselines: {name!r} is not accepted; {nearest(name, known)}, or a file of a chip"
        ) from error


def baselines_of(
    problems: Sequence[SearchProblem],
    space: ArchitectureSpace,
    weights: Sequence[float],
    outcome: Outcome,
    which: Baselines = "tpuv4",
    *,
    threads: int = 1,
    seed: int = 0,
    say: Say | None = None,
) -> dict[str, dict[str, Any]]:
    """Run other methods with the same cost model.

    Parameters
    ----------
    problems, space, weights
        Problems, space and weights of the models, as in the search.
    outcome
        Outcome of the search: the baselines get as many evaluations, and as many seconds.
    which
        Names of `BASELINES`, and chips of the user's own: presets, files or records.
    threads
        At most this many.
    seed
        Seed of random and Bayesian search.
    say
        Called with a line on the progress.
    """
    methods, chips = read_baselines(which)
    say = say or _silent
    baselines: list[Baseline] = []
    first = problems[0]
    if methods & {"tpuv4", "all"} and len(problems) == 1:
        say("baselines: the TPUv4-like chip with the published hand plan, a Megatron plan, ours")
        like = as_searched(presets.chip("phaze-tpuv4"), first)
        fixed = FixedChip(first.cluster, first.training, first.capacities, like)
        for method in (fixed.hand_plan, fixed.megatron_plan, fixed.our_plan):
            baselines.append(method(first.model))
        say("baselines: TPU v4 as it was built")
        built = given_chip(problems, weights, presets.chip(BUILT))
        baselines.append(replace(built, key="built", title=f"{BUILT} as built, our plan"))
    for chip in chips:
        say(f"baselines: the best plan on {chip.name}")
        baselines.append(given_chip(problems, weights, chip))
    if "all" in methods:
        exact = ExactEvaluator(problems, ChipGroups.of(space), tuple(weights), threads)
        baselines += _searches(exact, space, outcome, seed, say)
    best_s = outcome.winners[0].time_s
    return {baseline.key: _item(baseline, best_s, problems, space) for baseline in baselines}


def _at(baseline: Baseline, name: str, evaluations: float, seconds: float) -> Baseline:
    """Return a baseline as it was after `evaluations` chips or `seconds`, under a new `name`."""
    score = baseline.best_by(evaluations, seconds)
    known = [h for h in baseline.history if h[0] <= evaluations and h[1] <= seconds]
    looked, spent = (known[-1][0], known[-1][1]) if known else (0, 0.0)
    note = baseline.note
    if math.isfinite(evaluations) and looked < evaluations:
        note = f"stopped after {looked} of {int(evaluations)} chips, {spent:.0f} s"
    same = baseline.winner is not None and score == baseline.score
    return replace(
        baseline,
        key=f"{baseline.key}_{name}",
        title=f"{baseline.title}, equal {name}",
        score=score,
        evaluations=looked,
        seconds=spent,
        winner=baseline.winner if same else None,
        note=note,
    )


def _searches(
    exact: ExactEvaluator, space: ArchitectureSpace, outcome: Outcome, seed: int, say: Say
) -> list[Baseline]:
    """Run the published early stop, random and Bayesian search.

    The latter two evaluate as many chips as the search placed, unless their time runs out: that of
    the search, and a minute at least.
    """
    say("baselines: the published early stop")
    baselines = [early_stop(exact)]
    chips, limit_s = max(1, outcome.groups_placed), max(outcome.seconds, _MINUTE_S)
    runs: dict[str, Callable[[], Baseline]] = {
        "random": lambda: random_search(exact, chips, seed, limit_s),
        "bayesian": lambda: bayesian(exact, space, chips, seed, limit_s),
    }
    for name, run in runs.items():
        say(f"baselines: {name} search, for {limit_s:.0f} s at most")
        try:
            baseline = run()
        except MissingExtraError as error:
            say(str(error))
            continue
        baselines.append(_at(baseline, "time", math.inf, outcome.seconds))
        baselines.append(_at(baseline, "evaluations", chips, math.inf))
    return baselines


# ---- the gain by cause ----

_CAUSES = {
    "HBM": ("hbm",),
    "multipliers": ("tensor_core", "other_tensor_core", "clock_hz", "dies"),
    "vector units": ("vector_core",),
    "buffer": ("buffer",),
}
"""Parts of a chip by cause, exchanged in this order; all other parts are exchanged last."""


def gain_by_cause(problem: SearchProblem, chip: Accelerator, time_s: float) -> list[dict[str, Any]]:
    """Split the gain of a chip over TPU v4 as built into causes.

    The first row is TPU v4 with the best Megatron-style plan. Then the plan becomes the best one,
    and after it one part of the hardware at a time becomes that of `chip`. Changes accumulate, so
    their order matters; the product of all gains is the whole gain.

    Parameters
    ----------
    problem
        A model on the devices and the fabric that were searched.
    chip
        The winner, with its HBM.
    time_s
        Seconds of a step with the best plan on `chip`.

    Returns
    -------
    list
        Each cause with the seconds of a step that it leads to and its gain; the first row is TPU
        v4. Empty where the model does not fit TPU v4 or a chip on the way.
    """
    mixed, rows = as_searched(presets.chip(BUILT), problem), []

    def best_s() -> float:
        found = plan(problem.model, problem.cluster.replace(chip=mixed), problem.training, top=1)
        return found.best.time_s if found.plans else math.inf

    capacity = mixed.hbm.capacity_bytes if mixed.hbm is not None else 0
    fixed = FixedChip(problem.cluster, problem.training, [capacity], mixed)
    rows = [(f"{BUILT}, best Megatron-style plan", fixed.megatron_plan(problem.model).score)]
    rows.append(("plan", best_s()))
    for cause, parts in _CAUSES.items():
        mixed = mixed.replace(**{part: getattr(chip, part) for part in parts})
        rows.append((cause, best_s()))
    rows.append(("other constants", time_s))
    if not all(math.isfinite(step_s) for _, step_s in rows):
        return []
    before = [rows[0][1], *(step_s for _, step_s in rows)]
    return [
        {"cause": cause, "time_s": step_s, "gain": last / step_s}
        for (cause, step_s), last in zip(rows, before, strict=False)
    ]


# ---- sensitivity ----


@dataclass(frozen=True)
class Variation:
    """A space and a cluster that differ from those of the search in one term."""

    what: str
    factor: float
    space: ArchitectureSpace
    cluster: Cluster


_FIELD = {
    "buffer bandwidth": "buffer.bytes_per_cycle",
    "core port bandwidth": "buffer.port_bytes_per_cycle",
    "HBM bandwidth": "hbm.bandwidth_bytes_per_s",
}


def _rates(space: ArchitectureSpace, field: str, factor: float) -> ArchitectureSpace | None:
    """Scale a rate of all chips of a space."""
    spec = space.spec
    if field in spec.axes:
        scaled = {**spec.axes, field: tuple(float(v) * factor for v in spec.axes[field])}
        return ArchitectureSpace(spec.replace(axes=scaled), space.selection)
    part, _, name = field.partition(".")
    rates = getattr(spec.base, part)
    if rates is None or not getattr(rates, name):  # the chip has no such rate
        return None
    base = spec.base.replace(**{part: rates.replace(**{name: getattr(rates, name) * factor})})
    return ArchitectureSpace(spec.replace(base=base), space.selection)


def _areas(space: ArchitectureSpace, term: str, factor: float) -> ArchitectureSpace | None:
    """Scale one term of the area; the limit stays, or follows the area of the space's base chip.

    Returns none where the term is zero or the space has no limit. The space may be empty.
    """
    spec, limit = space.spec, space.spec.area
    if limit is None:
        return None
    by_term = area_batch(chip_records([spec.base]), limit.terms)
    if by_term[term][0] <= 0.0:
        return None

    def scaled(chips: Array) -> tuple[Array, Array]:
        """Return the areas of chips with the term scaled, and unscaled."""
        areas = area_batch(chips, limit.terms)
        total: Array = areas["total_mm2"]
        return total + (factor - 1.0) * areas[term], total

    most = limit.max_mm2
    if limit.follows_base:
        most *= float(scaled(chip_records([spec.base]))[0][0]) / float(by_term["total_mm2"][0])
    whole = ArchitectureSpace(spec.replace(area=None))
    selected = []
    for chunk in whole.chunks():
        size, was = scaled(chunk.chips)
        # Under a fixed upper limit, chips that met the minimum area unscaled still meet it.
        least = size if limit.follows_base else np.maximum(size, was)
        small = least >= limit.min_fraction * most
        if limit.keep_small_single_core:
            small |= (chunk.chips["tensor_cores"] == 1) | (chunk.chips["vector_cores"] == 1)
        selected.append(chunk.index[(size <= most) & small])
    chosen = np.concatenate(selected)
    if space.selection is not None:
        chosen = np.intersect1d(chosen, space.selection)
    return ArchitectureSpace(spec.replace(area=None), chosen)


def variations(space: ArchitectureSpace, cluster: Cluster) -> Iterator[Variation]:
    """Halve and double each rate and each area term, one at a time.

    Examples
    --------
    >>> small = ArchitectureSpace.published()
    >>> cluster = Cluster(devices=8, fabric="tpuv4-pod")
    >>> [v.what for v in variations(small, cluster) if v.factor == 2][:3]
    ['buffer bandwidth', 'HBM bandwidth', 'fabric bandwidth']
    """
    for rate_name, field in _FIELD.items():
        for factor in _FACTORS:
            other = _rates(space, field, factor)
            if other is not None:
                yield Variation(rate_name, factor, other, cluster)
    tiers = len(tier_names(cluster))
    for factor in _FACTORS:
        scaled = scaled_cluster(cluster, [factor] * tiers)
        yield Variation("fabric bandwidth", factor, space, scaled)
    for term in _AREAS:
        for factor in _FACTORS:
            other = _areas(space, term, factor)
            if other is not None:
                yield Variation(f"{term.removesuffix('_mm2')} area", factor, other, cluster)


def sensitivity_of(
    problems: Sequence[SearchProblem],
    space: ArchitectureSpace,
    weights: Sequence[float],
    outcome: Outcome,
    *,
    threads: int = 1,
    say: Say | None = None,
) -> list[dict[str, Any]]:
    """Search again with every rate and every area term halved and doubled, one at a time."""
    models = [problem.model for problem in problems]
    cluster, training = problems[0].cluster, problems[0].training
    best = outcome.winners[0]
    was = space[best.chip]
    rows = []
    for variation in variations(space, cluster):
        (say or _silent)(f"with {variation.what} x {variation.factor:g}")
        winner = None
        if len(variation.space):  # with larger areas, perhaps no chip is within the limit
            other = find_chips(
                models,
                variation.space,
                variation.cluster,
                training,
                weights=weights,
                top=1,
                threads=threads,
            )
            winner = other.winners[0] if other.winners else None
        chip = variation.space[winner.chip] if winner is not None else None
        same = chip is not None and (
            (chip.tensor_core, chip.vector_core, chip.buffer.capacity_bytes)
            == (was.tensor_core, was.vector_core, was.buffer.capacity_bytes)
        )
        rows.append(
            {
                "what": variation.what,
                "factor": variation.factor,
                "time_s": winner.score if winner is not None else None,
                "change": winner.score / best.score - 1.0 if winner is not None else None,
                "same_chip": same,
                "chip": chip.to_dict() if chip is not None else None,
                "chip_text": str(chip) if chip is not None else "",
            }
        )
    return rows
