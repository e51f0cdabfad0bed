"""Baselines of a search, and how its winner moves when a term of the cost model does."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from phaze_fast.errors import InvalidInputError, MissingExtraError, nearest
from phaze_fast.explore.chip_groups import ChipGroups
from phaze_fast.explore.exact import ExactEvaluator
from phaze_fast.explore.find import find_chips
from phaze_fast.explore.problem import SearchProblem
from phaze_fast.explore.result import Outcome
from phaze_fast.hardware import Accelerator, ArchitectureSpace, presets
from phaze_fast.papers.bayesian import bayesian
from phaze_fast.papers.early_stop import early_stop, random_search
from phaze_fast.papers.fixed_plans import (
    Baseline,
    given_chip,
    hand_plan,
    megatron_plan,
    our_plan,
)
from phaze_fast.papers.sensitivity import variations

__all__ = ["BASELINES", "Baselines", "baselines_of", "read_baselines", "sensitivity_of"]

BASELINES = ("none", "tpuv4", "all")
"""Which other methods a search is compared with: none, the TPUv4-like chip's plans, or all."""

Baselines = str | Accelerator | Sequence[str | Accelerator]
"""Names of `BASELINES`, chips, and names or files of chips; texts may hold several, with commas."""

Say = Callable[[str], None]

_MINUTE_S = 60.0


def _say(say: Say | None, text: str) -> None:
    if say is not None:
        say(text)


def _item(
    baseline: Baseline,
    best_s: float,
    problems: Sequence[SearchProblem],
    space: ArchitectureSpace,
) -> dict[str, Any]:
    """Give a baseline as plain data, with how much faster the search's answer is."""
    there = math.isfinite(baseline.score)
    batch = problems[0].training.global_batch
    chip, text = baseline.chip, str(baseline.plan) if baseline.plan is not None else ""
    if baseline.winner is not None:
        chip = space[baseline.winner.chip]
        text = "; ".join(str(plan) for plan in baseline.winner.plans)
    return {
        "title": baseline.title,
        "time_s": baseline.score if there else None,
        "samples_per_s": batch / baseline.score if there else None,
        "speedup": baseline.score / best_s if there else None,
        "evaluations": baseline.evaluations,
        "seconds": baseline.seconds,
        "chip": chip.to_dict() if chip is not None else None,
        "chip_text": str(chip) if chip is not None else "",
        "plan_text": text,
        "note": baseline.note,
    }


def read_baselines(which: Baselines) -> tuple[set[str], list[Accelerator]]:
    """Tell names of `BASELINES` from chips, and look the chips up.

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
    given = [which] if isinstance(which, str | Accelerator) else list(which)
    methods: set[str] = set()
    chips: list[Accelerator] = []
    for each in given:
        for part in each.split(",") if isinstance(each, str) else [each]:
            name = part.strip() if isinstance(part, str) else part
            if isinstance(name, Accelerator):
                chips.append(name)
            elif name.lower() in BASELINES:
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
    threads: int = 1,
    seed: int = 0,
    say: Say | None = None,
) -> dict[str, dict[str, Any]]:
    """Run other methods with the same cost model.

    Parameters
    ----------
    problems, space, weights
        What was searched.
    outcome
        What was found: the other searches get as many evaluations, and as many seconds.
    which
        Names of `BASELINES`, and chips of the user's own: presets, files or records.
    threads
        At most this many.
    seed
        Of random and Bayesian search.
    say
        Called with what is done next.
    """
    methods, chips = read_baselines(which)
    found: dict[str, Baseline] = {}
    first = problems[0]
    if methods & {"tpuv4", "all"} and len(problems) == 1:
        given = (first.model, first.cluster, first.training, first.capacities)
        _say(
            say,
            "baselines: the TPUv4-like chip with the published hand plan, a Megatron plan, ours",
        )
        for method in (hand_plan, megatron_plan, our_plan):
            baseline = method(*given)
            found[baseline.key] = baseline
    for chip in chips:
        _say(say, f"baselines: the best plan on {chip.name}")
        baseline = given_chip(problems, weights, chip)
        found[baseline.key] = baseline
    if "all" in methods:
        exact = ExactEvaluator(problems, ChipGroups.of(space), tuple(weights), threads)
        found |= _searches(exact, space, outcome, seed, say)
    best_s = outcome.winners[0].time_s
    return {key: _item(each, best_s, problems, space) for key, each in found.items()}


def _at(baseline: Baseline, name: str, evaluations: float, seconds: float) -> Baseline:
    """Give a run of a method as it stood after so many chips, or so many seconds."""
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
    exact: ExactEvaluator, space: ArchitectureSpace, outcome: Outcome, seed: int, say: Say | None
) -> dict[str, Baseline]:
    """Run the published early stop, random and Bayesian search.

    The latter two look at as many chips as the search placed, unless their time runs out: that of
    the search, and a minute at least.
    """
    _say(say, "baselines: the published early stop")
    found = {"early_stop": early_stop(exact)}
    looked, limit_s = max(1, outcome.groups_placed), max(outcome.seconds, _MINUTE_S)
    runs: dict[str, Callable[[], Baseline]] = {
        "random": lambda: random_search(exact, looked, seed, limit_s),
        "bayesian": lambda: bayesian(exact, space, looked, seed, limit_s),
    }
    for name, run in runs.items():
        _say(say, f"baselines: {name} search, for {limit_s:.0f} s at most")
        try:
            made = run()
        except MissingExtraError as error:
            _say(say, str(error))
            continue
        for each in (
            _at(made, "time", math.inf, outcome.seconds),
            _at(made, "evaluations", looked, math.inf),
        ):
            found[each.key] = each
    return found


def sensitivity_of(
    problems: Sequence[SearchProblem],
    space: ArchitectureSpace,
    weights: Sequence[float],
    outcome: Outcome,
    threads: int = 1,
    say: Say | None = None,
) -> list[dict[str, Any]]:
    """Search again with every rate and every area term halved and doubled, one at a time."""
    models = [problem.model for problem in problems]
    cluster, training = problems[0].cluster, problems[0].training
    best = outcome.winners[0]
    was = space[best.chip]
    found = []
    for each in variations(space, cluster):
        _say(say, f"with {each.what} x {each.factor:g}")
        winner = None
        if len(each.space):  # with larger areas no chip may be within the limit
            args = (models, each.space, each.cluster, training, weights)
            other = find_chips(*args, top=1, threads=threads)
            winner = other.winners[0] if other.winners else None
        chip = each.space[winner.chip] if winner is not None else None
        same = chip is not None and (
            (chip.tensor_core, chip.vector_core, chip.buffer.capacity_bytes)
            == (was.tensor_core, was.vector_core, was.buffer.capacity_bytes)
        )
        found.append(
            {
                "what": each.what,
                "factor": each.factor,
                "time_s": winner.score if winner is not None else None,
                "change": winner.score / best.score - 1.0 if winner is not None else None,
                "same_chip": same,
                "chip": chip.to_dict() if chip is not None else None,
                "chip_text": str(chip) if chip is not None else "",
            }
        )
    return found
