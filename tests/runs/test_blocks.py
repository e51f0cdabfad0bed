"""Sweeps in blocks: the rows of one sweep, in memory of one block, taken up where they stopped."""

import functools
import time

import pytest
from sweep_points import counted, counts, fake, many

from phaze_fast.errors import InvalidInputError
from phaze_fast.runs.sweep import DONE, read_blocks, sweep, sweep_blocks


def by_key(rows):
    return {row["key"]: row for row in rows}


def test_blocks_have_the_rows_of_one_sweep(tmp_path):
    points = many(11)
    found = sweep_blocks(iter(points), tmp_path, 4, evaluate=fake)
    assert (found.points, found.rows, found.resumed) == (11, 11, 0)
    assert found.statuses == {"optimal": 11}
    rows = list(read_blocks(tmp_path))
    assert [row["key"] for row in rows] == [point.key for point in points]
    assert by_key(rows) == by_key(sweep(points, evaluate=fake).rows)


def stops(path, at, point):
    if point.training.global_batch == at:
        raise KeyboardInterrupt
    return counted(path, point)


def test_what_was_stopped_goes_on_and_nothing_is_done_twice(tmp_path):
    log, out = tmp_path / "log", tmp_path / "out"
    options = {"threads": 1, "chunk": 1}
    with pytest.raises(KeyboardInterrupt):
        sweep_blocks(many(11), out, 4, evaluate=functools.partial(stops, log, 28), **options)
    assert 4 <= len(counts(log)) <= 6
    found = sweep_blocks(many(11), out, 4, evaluate=functools.partial(stops, log, 0), **options)
    assert (found.rows, found.resumed) == (11, 6)
    assert set(counts(log).values()) == {1}


@pytest.mark.parametrize("text", ["", "[]", '{"asked": "x"}', "\x00", None])
def test_a_mark_that_is_damaged_costs_no_row(tmp_path, text):
    log = tmp_path / "log"
    evaluate = functools.partial(counted, log)
    sweep_blocks(many(6), tmp_path / "out", 3, evaluate=evaluate)
    (mark, _) = sorted((tmp_path / "out").glob(f"*/*/{DONE}"))
    mark.unlink() if text is None else mark.write_text(text)
    found = sweep_blocks(many(6), tmp_path / "out", 3, evaluate=evaluate)
    assert (found.rows, found.resumed) == (6, 6)
    assert set(counts(log).values()) == {1}


def test_other_points_in_a_block_are_refused(tmp_path):
    sweep_blocks(many(6), tmp_path, 3, evaluate=fake)
    with pytest.raises(InvalidInputError, match="points that are not asked for"):
        sweep_blocks(many(6)[::-1], tmp_path, 3, evaluate=fake)
    with pytest.raises(InvalidInputError, match=r"block: 0 is not accepted; expected 1 or more"):
        sweep_blocks(many(1), tmp_path, 0)


@pytest.mark.parametrize("jump_s", [-86_400.0 * 400, 86_400.0 * 400])
def test_a_clock_that_jumps_changes_nothing(tmp_path, monkeypatch, jump_s):
    """Half of the points before the jump, the others after it."""
    began, real = time.time(), time.time
    points = many(8)
    sweep(points[:4], tmp_path, evaluate=fake)
    monkeypatch.setattr(time, "time", lambda: real() + jump_s)
    assert abs(time.time() - began - jump_s) < 60.0
    found = sweep(points, tmp_path, evaluate=fake)
    assert found.resumed == 4
    assert found.rows == sweep(points, evaluate=fake).rows
