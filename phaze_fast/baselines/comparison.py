"""Takes what a search found, gives what other methods find, and how the winner moves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from phaze_fast.errors import InvalidInputError, MissingExtraError, nearest
from phaze_fast.explore.baselines import bayesian, early_stop, random_search
from phaze_fast.explore.designs import plan_text
from phaze_fast.explore.dies import Dies
from phaze_fast.explore.fixed_plans import Baseline, hand_plan, megatron_plan, our_plan
from phaze_fast.explore.judge import Judge
from phaze_fast.explore.outcome import Outcome
from phaze_fast.explore.search import find_chips
from phaze_fast.explore.sensitivity import variations
from phaze_fast.explore.workload import Question
from phaze_fast.hardware import ArchitectureSpace

__all__ = ["BASELINES", "baselines_of", "sensitivity_of"]

BASELINES = ("none", "tpuv4", "all")
"""Which other methods stand beside a search: nobody, the TPUv4-like chip's plans, or all."""

Say = Callable[[str], None]

_MINUTE_S = 60.0


def _say(say: Say | None, text: str) -> None:
    if say is not None:
        say(text)


def _item(
    baseline: Baseline,
    best_s: float,
    questions: Sequence[Question],
    space: ArchitectureSpace,
) -> dict[str, Any]:
    """Give a baseline as plain data, with how much faster the search's answer is."""
    there = math.isfinite(baseline.score)
    batch = questions[0].training.global_batch
    chip, text = baseline.chip, str(baseline.plan) if baseline.plan is not None else ""
    if baseline.winner is not None:
        chip = space[baseline.winner.chip]
        plans = zip(questions, baseline.winner.strategies, baseline.winner.found, strict=True)
        text = "; ".join(plan_text(q.workload(), s, found) for q, s, found in plans)
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


def baselines_of(
    questions: Sequence[Question],
    space: ArchitectureSpace,
    weights: Sequence[float],
    outcome: Outcome,
    which: str = "tpuv4",
    threads: int = 1,
    seed: int = 0,
    say: Say | None = None,
) -> dict[str, dict[str, Any]]:
    """Run other methods with the same cost model.

    Parameters
    ----------
    questions, space, weights
        What was searched.
    outcome
        What was found: the other searches get as many evaluations, and as many seconds.
    which
        A name of `BASELINES`.
    threads
        At most this many.
    seed
        Of random and Bayesian search.
    say
        Called with what is done next.
    """
    if which not in BASELINES:
        raise InvalidInputError(
            f"baselines: {which!r} is not accepted; {nearest(str(which), BASELINES)}"
        )
    found: dict[str, Baseline] = {}
    first = questions[0]
    if which != "none" and len(questions) == 1:
        given = (first.model, first.cluster, first.training, first.capacities)
        _say(
            say,
            "beside it: the TPUv4-like chip with the published hand plan, a Megatron plan, ours",
        )
        for make in (hand_plan, megatron_plan, our_plan):
            made = make(*given)
            found[made.key] = made
    if which == "all":
        judge = Judge(questions, Dies.of(space), tuple(weights), threads)
        found |= _searches(judge, space, outcome, seed, say)
    best_s = outcome.winners[0].score
    return {key: _item(each, best_s, questions, space) for key, each in found.items()}


def _at(baseline: Baseline, name: str, evaluations: float, seconds: float) -> Baseline:
    """Give a run of a method as it stood after so many dies, or so many seconds."""
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
    judge: Judge, space: ArchitectureSpace, outcome: Outcome, seed: int, say: Say | None
) -> dict[str, Baseline]:
    """Run the published early stop, random and Bayesian search.

    The latter two look at as many dies as the search placed, unless their time runs out: that of
    the search, and a minute at least.
    """
    _say(say, "beside it: the published early stop")
    found = {"early_stop": early_stop(judge)}
    looked, limit_s = max(1, outcome.dies_placed), max(outcome.seconds, _MINUTE_S)
    runs: dict[str, Callable[[], Baseline]] = {
        "random": lambda: random_search(judge, looked, seed, limit_s),
        "bayesian": lambda: bayesian(judge, space, looked, seed, limit_s),
    }
    for name, run in runs.items():
        _say(say, f"beside it: {name} search, for {limit_s:.0f} s at most")
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
    questions: Sequence[Question],
    space: ArchitectureSpace,
    weights: Sequence[float],
    outcome: Outcome,
    threads: int = 1,
    say: Say | None = None,
) -> list[dict[str, Any]]:
    """Search again with every rate and every area term halved and doubled, one at a time."""
    models = [q.model for q in questions]
    cluster, training = questions[0].cluster, questions[0].training
    best = outcome.winners[0]
    was = space[best.chip]
    found = []
    for each in variations(space, cluster):
        _say(say, f"with {each.what} x {each.factor:g}")
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
                "chip_text": str(chip) if chip is not None else "",
            }
        )
    return found
