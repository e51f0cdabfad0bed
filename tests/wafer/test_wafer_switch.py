"""Dies behind switches: collectives against a play of packets, places, rules, whole searches."""

from __future__ import annotations

import random

import pytest
from reference.mesh_simulator import Traffic

from phaze_fast.errors import InvalidInputError
from phaze_fast.wafer import (
    Effort,
    Problem,
    WaferTraining,
    die_map,
    load_wafer,
    mesh_collective,
    search_mapping,
)
from phaze_fast.wafer.mapping.details import details
from phaze_fast.wafer.mapping.layout import Layout, layouts
from phaze_fast.wafer.mapping.mesh import Links, Run
from phaze_fast.wafer.mapping.placement import Placement

WITHIN = 0.03
PLAIN, SUMMING = 1, 2
QUICK = Effort(seeds=1, steps=200, promising=1)
BASE = load_wafer("switch-wafer")


class Switch(Traffic):
    """Dies that have one link up to a switch and one down from it; it sums where that is asked."""

    def __init__(self, dies, rate, hop_s, packets=60):
        super().__init__(1, 1, (rate, rate), hop_s, paced=True)
        self.dies, self.packets = dies, packets
        self.seconds_per_byte = [1.0 / rate] * (2 * dies)

    def to_each(self, group, chunk):
        """Every die sends every other one a chunk of its own, the next die first."""
        size = len(group)
        for at, source in enumerate(group):
            behind = None
            for step in range(1, size):
                target = group[(at + step) % size]
                for _ in range(self.packets):
                    route = (source, self.dies + target)
                    behind = self.send_along(route, chunk / self.packets, [], behind)

    def summed(self, group, volume):
        """Every packet goes up from all; its sum comes down to all."""
        parts = self.packets * len(group)
        ups = dict.fromkeys(group)
        for _ in range(parts):
            for die in group:
                ups[die] = self.send_along((die,), volume / parts, [], ups[die])
            sum_ = self.join(list(ups.values()))
            for die in group:
                self.send_along((self.dies + die,), volume / parts, [sum_])


def groups_of(rng):
    """Twelve dies in groups of one size, whichever they are."""
    size = rng.choice([2, 3, 4, 6, 12])
    dies = rng.sample(range(12), 12)
    return [dies[k : k + size] for k in range(0, 12, size)], size


@pytest.mark.parametrize("op", ["all-gather", "reduce-scatter", "all-to-all", "all-reduce"])
def test_collectives_of_all_groups_at_once_against_packets(op):
    rng = random.Random(op)
    for _ in range(6):
        groups, size = groups_of(rng)
        rate, hop_s, volume = rng.uniform(1e11, 1e12), rng.choice([0.0, 1e-7]), 8e6
        switch = Switch(12, rate, hop_s)
        for group in groups:
            switch.to_each(group, volume / size)
        took = switch.play() * (2 if op == "all-reduce" else 1)
        found = mesh_collective(op, volume, [Run(0, size)], Links(rate, rate, hop_s, PLAIN))
        assert found.time_s == pytest.approx(took, rel=WITHIN)


def test_switches_that_sum_end_an_all_reduce_sooner():
    rng = random.Random(1)
    for _ in range(6):
        groups, size = groups_of(rng)
        rate, hop_s, volume = rng.uniform(1e11, 1e12), rng.choice([0.0, 1e-7]), 8e6
        switch = Switch(12, rate, hop_s)
        for group in groups:
            switch.summed(group, volume)
        links = Links(rate, rate, hop_s, SUMMING)
        found = mesh_collective("all-reduce", volume, [Run(0, size)], links)
        assert found.time_s == pytest.approx(switch.play(), rel=WITHIN)
        assert found.time_s <= mesh_collective(
            "all-reduce", volume, [Run(0, size)], links._replace(fabric=PLAIN)
        ).time_s * (1 + 1e-12)


def test_stages_send_over_their_own_links():
    """Both ways at once: a stage in the middle sends twice what the ends send."""
    wafer = BASE.replace(hop_latency_s=0.0)
    sent = [rate_s for rate_s, _ in Placement(wafer, (Layout(5, 1, 4, 8),)).sends()]
    switch = Switch(20, wafer.switch.bandwidth_bytes_per_s, 0.0)
    for k in range(4):
        for to in (k - 1, k + 1):
            for die in range(5):
                behind = None
                for _ in range(24 if 0 <= to < 4 else 0):
                    route = (5 * k + die, 20 + 5 * to + die)
                    behind = switch.send_along(route, 1.0 / 5 / 24, [], behind)
    assert max(sent) == pytest.approx(switch.play(), rel=WITHIN)
    assert sent[1] == pytest.approx(2 * sent[0])


def test_any_dies_that_work_make_up_a_stage():
    dead = BASE.replace(dead=((0, 0), (2, 1)))
    assert max(each.dies for each in layouts(dead, 24, 18)) == 18
    assert {each.height for each in layouts(dead, 24, 18)} == {1}
    assert die_map(dead, Layout(9, 1, 2, 9)).split().count("X") == 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"switch": {"bandwidth_bytes_per_s": "90 TB/s"}}, "expected at most 28.672 TB/s"),
        ({"dead_links": [[[0, 0], [1, 0]]]}, "dead_links are not accepted beside switches"),
        ({"switch": {"bandwidth_bytes_per_s": "3 TB/s", "sums": "yes"}}, "sums"),
        ({"switch": {"rate": 3}}, "switch"),
    ],
)
def test_packages_that_cannot_be_are_refused(given, said):
    with pytest.raises(InvalidInputError, match=said):
        type(BASE).from_dict(BASE.to_dict() | given, "given")


def test_a_search_and_what_it_says():
    problem = Problem("bertlarge", BASE.replace(columns=2, rows=2), WaferTraining(16))
    found = search_mapping(problem, QUICK, threads=1)
    assert found.bound_s <= found.best.time_s
    assert "any dies with switches" in found.bound_space
    links = details(problem, found.best)["links"]
    assert links["busy"] == []
    assert 0.0 < links["busiest"] < 1.0
    slower = problem.wafer.replace(switch=BASE.switch.replace(bandwidth_bytes_per_s=1e10))
    worse = search_mapping(Problem("bertlarge", slower, WaferTraining(16)), QUICK, threads=1)
    assert worse.best.time_s >= found.best.time_s
