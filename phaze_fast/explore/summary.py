"""What a best-first search found, read off its tables: winners, front, counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from phaze_fast.explore.bounds import STEPS
from phaze_fast.explore.candidates import PLACED, Answer
from phaze_fast.explore.result import Outcome, Winner
from phaze_fast.planning.times import free_times

if TYPE_CHECKING:
    from phaze_fast.explore.best_first import BestFirstSearch

__all__ = ["counts_of", "front_points_of", "outcome_of", "winners_of"]


def _winner(
    search: BestFirstSearch, group: int, c: int, score: float, answers: Sequence[Answer]
) -> Winner:
    record = search.groups.records[group]
    plans = []
    for answer, table in zip(answers, search.tables, strict=True):
        peak = search.groups.peak_flops(record)
        problem, s = table.problem.of(answer.strategy)
        chip = problem.price(s, np.array([record]))
        own = answer.times.at(slice(answer.row, answer.row + 1))
        rate = chip.parts.hbm_bytes_per_s
        free = free_times([problem.evaluator.sizes[s]], chip.costs, rate, [own])[0]
        made = problem.evaluator.plan(answer.placed, answer.times, answer.row, c, peak, free)
        plans.append(made)
    return Winner(
        group=group,
        capacity=c,
        chip=int(search.groups.chip[group, c]),
        score=score,
        time_s=search.scores.mean([plan.time_s for plan in plans]),
        area_mm2=float(search.groups.area_mm2[group]),
        energy_j=sum(answer.energy_j for answer in answers),
        hbm_bytes=int(search.groups.capacities[c]),
        cost_usd=float(search.usd[group, c]),
        plans=tuple(plans),
    )


def winners_of(search: BestFirstSearch) -> list[Winner]:
    """List the best groups, each with its best capacity, best first; at most `top`."""
    ranked = []
    for group, score in search.best.scores.items():
        if score > search.best.limit and not search.every:
            continue
        for c in range(search.has.shape[1]):
            own = [chosen.get((group, c)) for chosen in search.chosen]
            answers = [answer for answer in own if answer is not None]
            if len(answers) < len(own):
                continue
            energy = sum(answer.energy_j for answer in answers)
            rank = (float(search.scores.scores[group, c]), float(search.groups.area_mm2[group]))
            place = (energy, int(search.groups.capacities[c]), int(search.groups.chip[group, c]))
            ranked.append(((*rank, *place), group, c, answers))
    ranked.sort(key=lambda item: item[0])
    first: dict[int, Any] = {}
    for item in ranked:
        first.setdefault(item[1], item)
    best = list(first.values())[: search.best.top]
    return [_winner(search, group, c, rank[0], answers) for rank, group, c, answers in best]


def front_points_of(search: BestFirstSearch) -> list[Winner]:
    """List the front, fastest first."""
    points = []
    for point, values in zip(search.front.points, search.front.values, strict=True):
        group, c = point[:2]
        if len(search.tables) == 1:
            answers = [search.points[point]]
        else:
            answers = [chosen[group, c] for chosen in search.chosen]
        points.append((float(values[0]), point, answers))
    points.sort(key=lambda item: (item[0], item[1]))
    return [_winner(search, p[0], p[1], score, answers) for score, p, answers in points]


def counts_of(search: BestFirstSearch) -> dict[str, int]:
    """Points by the step that settled them; ``placed`` in full, ``open`` not at all.

    With a budget, points whose bound does not rule them out stay open.
    """
    counts = dict.fromkeys(("rules", "memory", *STEPS, "open"), 0)
    waiting = [np.zeros(table.level.shape, dtype=bool) for table in search.tables]
    for i, mask in enumerate(waiting):
        own = search.left[:, search.left[0] == i]
        mask[own[1], own[2]] = True
    for table, open_ in zip(search.tables, waiting, strict=True):
        evaluator = table.evaluator
        counts["rules"] += evaluator.strategies_rejected * int(search.has.sum())
        fits = evaluator.strategy_fits
        for s in range(len(evaluator)):
            for c in range(search.has.shape[1]):
                mine = search.has[:, c]
                if not fits[s, c]:
                    why = "memory" if evaluator.layout_counts[s] else "rules"
                    counts[why] += int(mine.sum())
                    continue
                counts["open"] += int((open_[s] & mine).sum())
                levels = table.level[s][mine & ~open_[s]]
                for k, name in enumerate(STEPS):
                    counts[name] += int((levels == k + 1).sum())
    return counts


def outcome_of(search: BestFirstSearch, complete: bool) -> Outcome:
    """Give what came out."""
    counts = counts_of(search)
    placed = [(table.level == PLACED).any(axis=0) for table in search.tables]
    return Outcome(
        complete=complete,
        bound=search.bound,
        winners=tuple(winners_of(search)),
        front=tuple(front_points_of(search)) if search.objectives else (),
        objectives=search.front.objectives if search.objectives else (),
        counts=counts,
        points=sum(counts.values()),
        designs=int(search.has.sum()),
        groups_placed=int(np.any(placed, axis=0).sum()),
        unproven=sum(len(table.unproven) for table in search.tables),
        history=tuple(search.history),
        seconds=search.history[-1].seconds,
    )
