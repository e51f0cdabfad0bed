"""The core's list of layouts against every combination tried one by one."""

import numpy as np
import pytest
from reference.layouts import NODE, layouts

from phaze_fast import _core
from phaze_fast.errors import InvalidInputError
from phaze_fast.memory import SCHEDULES

PIPELINES = [
    (SCHEDULES.index(name), 2 if two else 1)
    for name, two in zip(SCHEDULES, _core.HAS_TWO_CHUNKS, strict=True)
]


def drawn(seed):
    """Rules of a small cluster, with some choices fixed."""
    rng = np.random.default_rng(seed)
    tp, cp, etp, ep = (int(n) for n in rng.choice([1, 1, 2, 4], 4))
    inner, copy = tp * cp, etp * ep
    micro_batch = int(rng.choice([1, 2]))
    some = rng.permutation(len(PIPELINES))[: rng.integers(0, 4)]
    interleaved = SCHEDULES.index("interleaved")
    tried = sorted((s, v) for s, v in (PIPELINES[k] for k in some) if s != interleaved)
    tried += [(interleaved, vpp) for vpp in (2, 3)[: rng.integers(0, 3)]]
    zeros = sorted({int(z) for z in rng.integers(0, 4, 3)})
    words = sorted({int(n) for n in rng.choice([0, NODE, 2, 3, 4], 3)}, key=lambda n: (n > 0, -n))
    pairs = [(z, s) for z in zeros for s in ([0] if z == 0 else words)]
    blocks = int(rng.integers(1, 9))
    return {
        "devices": int(inner * rng.integers(1, 25)),
        "node_devices": int(rng.choice([2, 4, 8])),
        "global_batch": micro_batch * int(rng.choice([8, 12, 24])),
        "blocks": blocks,
        "layers": blocks + 2,
        "widths": [inner, cp, copy, copy // np.gcd(copy, inner), micro_batch],
        "most_stages": int(rng.choice([3, 256])),
        "single_schedule": int(rng.choice([-1, 0, 2])),
        "rank_order": int(rng.choice([-1, -1, 0, 1])),
        "dp": [] if rng.random() < 0.5 else [1, 2, 4, 6],
        "pp": [] if rng.random() < 0.5 else [1, 2, 3],
        "schedules": [schedule for schedule, _ in tried],
        "chunks": [vpp for _, vpp in tried],
        "zero": [zero for zero, _ in pairs],
        "shards": [shard for _, shard in pairs],
    }


def grid_of(rules):
    lists = {k: np.array(v, dtype=np.int64) for k, v in rules.items() if isinstance(v, list)}
    return _core.LayoutGrid(**{**rules, **lists})


def listed(grids, work_s, most_s=np.inf):
    return _core.list_layouts(grids, np.array(work_s), 1.0, most_s)


@pytest.mark.parametrize("seed", range(60))
def test_the_list_is_that_of_all_combinations(seed):
    rules = drawn(seed)
    grid, expected = grid_of(rules), layouts(rules)
    assert listed([grid], [0.0]).tolist() == expected
    assert len(grid) == len(expected)
    assert grid.shares().tolist() == [row[7] / row[2] for row in expected]


def test_random_rules_have_layouts_of_every_kind():
    rows = [row for seed in range(60) for row in layouts(drawn(seed))]
    for at in range(1, 9):
        assert len({row[at] for row in rows}) > 1


@pytest.mark.parametrize("seed", range(0, 60, 6))
def test_long_work_leaves_layouts_out_by_their_shares(seed):
    grids = [grid_of(drawn(seed + k)) for k in range(3)]
    work_s = [1.0, 0.5, 2.0]
    expected = [
        (s, *row[1:])
        for s, grid in enumerate(grids)
        for row, share in zip(listed([grid], [0.0]).tolist(), grid.shares(), strict=True)
        if share * work_s[s] <= 3.0
    ]
    assert listed(grids, work_s, 3.0).tolist() == expected


def test_every_impossible_layout_is_counted_once_by_reason():
    rules = drawn(0) | {
        "devices": 16,
        "widths": [1, 1, 1, 1, 1],
        "global_batch": 16,
        "blocks": 6,
        "layers": 8,
        "rank_order": 0,
        "dp": [1, 2],
        "pp": [1, 2, 4],
        "zero": [0, 1, 1],
        "shards": [0, 0, 2],
        "schedules": [SCHEDULES.index("interleaved")],
        "chunks": [3],
        "most_stages": 256,
    }
    # Of six combinations of widths, two have 4 stages of 3 chunks; dp 1 is no multiple of 2.
    assert grid_of(rules).rejected == [(0, rules["schedules"][0], 3, 2), (2, 0, 2, 3)]


def test_malformed_widths_are_refused():
    with pytest.raises(InvalidInputError, match="widths"):
        grid_of(drawn(0) | {"widths": [1, 0, 1, 1, 1]})
