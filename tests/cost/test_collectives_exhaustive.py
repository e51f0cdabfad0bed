"""Every regular group on every small grid, against explicit messages over explicit links."""

import math
from itertools import product

import pytest
from reference import links

from phaze_fast.cost import collective
from phaze_fast.hardware import MeshFabric, TorusFabric

pytestmark = pytest.mark.slow

GRIDS = [
    *((n,) for n in range(2, 17)),
    *product(range(2, 7), repeat=2),
    *product((2, 3, 4), repeat=3),
]


def tilings(dims):
    """(ranks, stride) whose groups tile the grid and all lie on it alike."""
    total = math.prod(dims)
    for ranks in range(2, min(total, 48) + 1):
        for stride in range(1, total // ranks + 1):
            if total % (ranks * stride) == 0:
                shapes = {
                    tuple(tuple(x - y for x, y in zip(m, group[0], strict=True)) for m in group)
                    for group in links.groups(dims, ranks, stride)
                }
                if len(shapes) == 1:
                    yield ranks, stride


def covers_whole_rings(dims, ranks, stride):
    """Whether in every dimension the group has one member or goes all the way round."""
    group = links.groups(dims, ranks, stride)[0]
    for d, size in enumerate(dims):
        places = sorted({m[d] for m in group})
        if len(places) > 1 and len(places) * (places[1] - places[0]) != size:
            return False
    return True


@pytest.mark.parametrize("kind", [TorusFabric, MeshFabric])
def test_all_to_all_loads_the_busiest_link_as_routed(kind):
    """Routing dimension by dimension loads each as the formula says, all dimensions at once."""
    exact = 0
    for dims in GRIDS:
        fabric = kind(name="g", dims=dims, link_bandwidth_bytes_per_s=1.0)
        for ranks, stride in tilings(dims):
            found = collective(fabric, "all-to-all", 5040.0, ranks, stride).time_s
            routed = float(links.all_to_all_load(dims, kind is TorusFabric, ranks, stride, 5040))
            if kind is MeshFabric or covers_whole_rings(dims, ranks, stride):
                assert found == pytest.approx(routed, rel=1e-12), (dims, ranks, stride)
                exact += 1
            else:  # a part of a ring is charged as a line
                assert found >= routed * (1 - 1e-12), (dims, ranks, stride)
    assert exact > 200


@pytest.mark.parametrize("kind", [TorusFabric, MeshFabric])
def test_point_to_point_loads_the_busiest_link_as_routed(kind):
    for dims in GRIDS:
        fabric = kind(name="g", dims=dims, link_bandwidth_bytes_per_s=1.0)
        for distance in range(1, math.prod(dims)):
            found = collective(fabric, "point-to-point", 60.0, 2, distance).time_s
            routed = float(links.shift_load(dims, kind is TorusFabric, distance, 60))
            assert found == pytest.approx(routed, rel=1e-12), (dims, distance)
