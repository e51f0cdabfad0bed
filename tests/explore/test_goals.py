"""Fronts held to plain loops over every pair of points, and waves to a plain sort."""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest

from phaze_fast.explore.best_first import first_of, first_of_parts
from phaze_fast.explore.objectives import OBJECTIVES, Front
from phaze_fast.tables import non_dominated

goals = sys.modules[Front.__module__]  # as an attribute, `search` is the function


def random_points(rng: np.random.Generator, count: int, width: int) -> np.ndarray:
    """Points of which some tie in some objectives or in all, and some are infinite."""
    points = rng.integers(0, 2 + int(rng.integers(1, 40)), (count, width)).astype(float)
    if rng.random() < 0.5:
        points += rng.random(points.shape).round(int(rng.integers(0, 3)))
    points[rng.random(points.shape) < 0.03] = np.inf
    return points


def plain_front(points: np.ndarray) -> list[int]:
    """Positions of points that no other point is at most everywhere, of equal ones the first."""
    kept = []
    points = points.tolist()
    for k, own in enumerate(points):
        for other, row in enumerate(points):
            if all(a <= b for a, b in zip(row, own, strict=True)) and (row != own or other < k):
                break
        else:
            kept.append(k)
    return kept


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5])
def test_front_of_is_what_a_plain_loop_finds(width):
    rng = np.random.default_rng(width)
    for count in (0, 1, 2, 7, 30, 60):
        for _ in range(5):
            points = random_points(rng, count, width)
            assert non_dominated(points).tolist() == plain_front(points)


@pytest.mark.parametrize("width", [2, 3, 4, 5])
def test_below_s_is_the_least_time_of_points_at_most_another(width):
    rng = np.random.default_rng(100 + width)
    bounded = open_ended = 0
    for count, asked in itertools.product((0, 1, 5, 9, 40, 150), (0, 1, 50)):
        front = Front.empty(OBJECTIVES[:width])
        points = random_points(rng, count, width)
        for k, values in enumerate(points):
            front.add((k,), values)
        assert sorted(p for (p,) in front.points) == plain_front(points)
        others = random_points(rng, asked, width - 1)
        wanted = [
            min(
                (
                    row[0]
                    for row in points.tolist()
                    if all(a <= b for a, b in zip(row[1:], other, strict=True))
                ),
                default=np.inf,
            )
            for other in others.tolist()
        ]
        assert front.below_s(others).tolist() == wanted
        bounded += int(np.isfinite(wanted).sum())
        open_ended += int(np.isinf(wanted).sum())
    assert bounded > 50
    assert open_ended > 20


def test_below_s_does_not_depend_on_how_many_are_held_against_it_at_once(monkeypatch):
    rng = np.random.default_rng(7)
    points, others = rng.random((500, 3)), rng.random((200, 2))
    front = Front.empty(("time", "area", "energy"))
    for k, values in enumerate(points):
        front.add((k,), values)
    whole = front.below_s(others)
    for few, pairs in ((1, 1), (3, 700), (10_000, 10_000)):
        monkeypatch.setattr(goals, "_FIRST_BLOCK", few)
        monkeypatch.setattr(goals, "_COMPARISONS", pairs)
        assert front.below_s(others).tolist() == whole.tolist()


def test_the_first_of_parts_are_those_of_all_in_the_same_order():
    rng = np.random.default_rng(11)
    for _ in range(300):
        sizes = rng.integers(0, 30, int(rng.integers(0, 6)))
        parts = [rng.integers(0, 12, size).astype(float) for size in sizes]
        listed = [(key, number, at) for number, p in enumerate(parts) for at, key in enumerate(p)]
        count = int(rng.integers(0, 40))
        wanted = sorted(listed)[:count]
        owners, at = first_of_parts(iter(parts), count)
        assert owners.tolist() == [number for _, number, _ in wanted]
        assert at.tolist() == [place for _, _, place in wanted]
        if count:
            together = np.concatenate([np.zeros(0), *parts])
            offsets = np.concatenate([[0], np.cumsum(sizes)])[:-1].astype(int)
            assert first_of(together, count).tolist() == [offsets[n] + a for _, n, a in wanted]
