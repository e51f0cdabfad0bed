"""Collectives in batches: the same as one by one, bad rows marked, bad arguments refused."""

import math

import numpy as np
import pytest

from phaze_fast import _core
from phaze_fast.cost import collective, collective_batch
from phaze_fast.errors import InvalidInputError, InvalidTypeError
from phaze_fast.hardware import (
    Cluster,
    FlatFabric,
    presets,
)

FLAT = FlatFabric(name="f", bandwidth_bytes_per_s=100.0, latency_s=0.5)


def one(fabric, op, payload, ranks, stride=1):
    return collective(fabric, op, payload, ranks, stride)


def question(rng, n, listed):
    """Random rows, a tenth of them bad."""
    return {
        "op": rng.integers(0, 7, n).astype(np.uint8),
        "payload_bytes": np.where(rng.random(n) < 0.05, np.nan, rng.uniform(-1e8, 1e9, n)),
        "ranks": rng.integers(-1, 70, n),
        "stride": rng.integers(0, 20, n),
        "fabric": rng.integers(-1, len(listed) + 1, n).astype(np.int32),
    }


def test_batch_is_a_loop_of_singles_and_any_thread_count_gives_the_same_bits():
    listed = [presets.fabric(name) for name in presets.fabric_names()]
    rng = np.random.default_rng(7)
    asked = question(rng, 40_000, listed)
    first = collective_batch(listed, **asked, threads=1)
    for threads in (2, 3, 8):
        again = collective_batch(listed, **asked, threads=threads)
        assert first.time_s.tobytes() == again.time_s.tobytes()
        assert first.algorithm.tobytes() == again.algorithm.tobytes()
        assert first.status.tobytes() == again.status.tobytes()
    assert {0, 1, 2, 3, 4, 5, 6, 7} <= set(first.status.tolist())
    assert np.isnan(first.time_s[first.status != 0]).all()
    assert np.isfinite(first.time_s[first.status == 0]).all()
    for i in range(2000):
        if first.status[i] in (6, 7):
            continue
        fabric, op = listed[asked["fabric"][i]], _core.COLLECTIVE_OPS[asked["op"][i]]
        arguments = [asked[name][i].item() for name in ("payload_bytes", "ranks", "stride")]
        if first.status[i]:
            with pytest.raises(InvalidInputError):
                collective(fabric, op, *arguments)
        else:
            assert collective(fabric, op, *arguments).time_s == first.time_s[i]


def test_batch_broadcasts_numbers_and_results_are_read_only():
    times = collective_batch(presets.fabric("dgx-h100"), "all-gather", [1e6, 2e6], ranks=8)
    assert len(times) == 2
    assert times.time_s[1] > times.time_s[0]
    with pytest.raises(ValueError, match="read-only"):
        times.time_s[0] = 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"op": "all-redoce"}, "did you mean 'all-reduce'"),
        ({"ranks": [1.5]}, "ranks: dtype float64 is not accepted; expected integers"),
        ({"ranks": [2**70]}, "ranks: dtype object is not accepted"),
        ({"payload_bytes": ["x"]}, "payload_bytes: dtype <U1 is not accepted; expected numbers"),
        ({"payload_bytes": [[1.0]]}, "payload_bytes: 2 dimensions are not accepted"),
        ({"payload_bytes": [1.0, 2.0, 3.0], "ranks": [1, 2]}, "length 2 is not accepted"),
        ({"threads": 0}, "threads: 0 is not accepted"),
        ({"fabrics": []}, "fabrics: an empty list"),
        ({"fabrics": 8}, "fabric: int is not accepted"),
        ({"fabrics": "dgx"}, "fabric: 'dgx' is neither a preset"),
    ],
)
def test_malformed_batches_name_the_argument(changes, message):
    asked = {"fabrics": FLAT, "op": "all-reduce", "payload_bytes": [1.0], "ranks": [2], **changes}
    with pytest.raises(InvalidInputError, match=message.replace("(", r"\(")):
        collective_batch(**asked)


def test_wrong_types_are_type_errors():
    with pytest.raises(TypeError):
        collective_batch(FLAT, "all-reduce", [1.0], ranks=[True])
    with pytest.raises(InvalidTypeError):
        collective_batch(FLAT, "all-reduce", [1j], ranks=[2])


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((math.nan, 2, 1), "NaN or infinite"),
        ((math.inf, 2, 1), "NaN or infinite"),
        ((-1.0, 2, 1), "negative"),
        ((1.0, 0, 1), "ranks must be at least 1"),
        ((1.0, 2, 0), "stride must be at least 1"),
        ((1.0, 65, 1), "does not fit the fabric"),
        ((1.0, 33, 2), "does not fit the fabric"),
    ],
)
def test_bad_questions_say_why(arguments, reason):
    with pytest.raises(InvalidInputError, match=reason):
        collective(presets.fabric("wafer-mesh"), "all-reduce", *arguments)


def test_huge_values_do_not_overflow():
    fabric = presets.fabric("phaze-flat")
    assert math.isfinite(collective(fabric, "all-reduce", 1e300, 2**40, 2**20).time_s)
    with pytest.raises(InvalidInputError, match="finite"):
        collective(fabric.replace(bandwidth_bytes_per_s=1e-9), "all-reduce", 1e305, 8)


def test_a_cluster_has_only_so_many_devices():
    cluster = Cluster(devices=16, fabric=presets.fabric("dgx-a100"))
    assert collective(cluster, "all-reduce", 1e9, 16).time_s > 0
    with pytest.raises(InvalidInputError, match="does not fit the fabric"):
        collective(cluster, "all-reduce", 1e9, 17)
    times = collective_batch(
        [cluster, presets.fabric("dgx-a100")], "all-gather", 1e6, [17, 17], fabric=[0, 1]
    )
    assert times.status.tolist() == [5, 0]


def test_empty_batches_are_empty():
    assert len(collective_batch(FLAT, "all-reduce", [], 8)) == 0
    assert len(collective_batch(FLAT, "all-reduce", np.zeros(0), np.zeros(0, int))) == 0
    for bad in (None, [None], 3):
        with pytest.raises((InvalidInputError, TypeError)):
            collective_batch(FLAT, bad, [1.0], [2])


def test_costs_are_values():
    first, again = (one(FLAT, "all-reduce", 10.0, 4) for _ in range(2))
    assert first == again
    assert hash(first) == hash(again)


def test_a_cluster_cuts_the_torus_to_size():
    cluster = Cluster(devices=64, fabric=presets.fabric("tpuv4-pod"))
    assert cluster.fabric.dims == (4, 4, 4)
    whole = collective(cluster, "all-reduce", 1e9, 64)
    # bandwidth-optimal on three rings each way: 2 (63/64) V / (6 B), plus latency
    assert whole.time_s == pytest.approx(2 * 63 / 64 * 1e9 / (6 * 50e9) + 18e-6, rel=1e-12)
    assert whole.bound_s == pytest.approx(2 * 63 / 64 * 1e9 / (6 * 50e9), rel=1e-12)
