"""Single values of the cost kernels, worked out by hand: thresholds, ties, records, refusals."""

from dataclasses import replace

import numpy as np
import pytest
from reference import gemm as oracle
from test_gemm import cost_of, records
from test_gemm_reference import ONE

from phaze_fast import _core
from phaze_fast.cost import attention_ops, product_ops, vector_ops

T, P = oracle.Tuning, oracle.Precision
BF = (2.0, 2.0, 4.0, 1.0)


PLAIN, HALF = T(), P()


def one(ops, chip, tuning=PLAIN, precision=HALF, one_core=False):
    return cost_of(ops, chip, tuning, precision, one_core)[0]


EIGHT = product_ops([(1, 8, 8, 8)])


def time_of(ops=EIGHT, chip=(), tuning=(), numbers=BF, tiles=(), index=0):
    """Seconds on one small chip, fields of its records changed; NaN where it is refused."""
    made, tuned = records(ONE, T(tiles=tiles))
    for record, changes in ((made, chip), (tuned, tuning)):
        for field, value in dict(changes).items():
            record[field] = value
    index = np.array([index], np.int32)
    return _core.op_times(ops, made, index, tuned, numbers, False, 1)[0]


COUNTS = ("tensor_cores", "tensor_width", "tensor_depth")
COUNTS += ("vector_cores", "vector_lanes", "vector_alus_per_lane")
RATES = ("buffer_bytes_per_cycle", "buffer_port_bytes_per_cycle", "hbm_bytes_per_s")
REFUSED = [
    *({"chip": {field: value}} for field in COUNTS for value in (0, 2**40 + 1)),
    *({"chip": {field: -1}} for field in ("tensor_local_bytes", "buffer_bytes", "hbm_bytes")),
    *({"chip": {field: value}} for field in RATES for value in (-1.0, np.nan, np.inf)),
    *({"numbers": numbers} for numbers in ((2.0, 8.5, 4.0, 1.0), (2.0, 2.0, 0.0, 1.0))),
    {"tuning": {"attention_ops": -1.0}},
    {"tuning": {"attention_backward_ops": -1.0}},
    *({"tiles": (tile,)} for tile in ((4, 0), (0, 4), (2**40 + 1, 4), (4, 2**40 + 1))),
    *(
        {"tuning": {field: value}}
        for field, values in {
            "efficiency": (0.0, 1.5),
            "launch_s": (np.nan, -1.0),
            "tiles": (99,),
            "even_tiles": (99,),
            "odd_tiles": (1,),
            "unaligned_reduction_s": (-1.0,),
            "dataflows": (0, 8),
            "hbm_share": (np.inf,),
        }.items()
        for value in values
    ),
    {"tuning": {"dataflows": 2}, "tiles": ((4, 4),)},
    {"index": -1},
]


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_records_that_cannot_be_are_refused(case):
    assert np.isnan(time_of(**case))


@pytest.mark.parametrize("case", [{"chip": {f: 2**40}} for f in COUNTS], ids=str)
def test_the_largest_counts_are_accepted(case):
    assert not np.isnan(time_of(**case))
    assert not np.isnan(time_of(numbers=(2.0, 8.0, 4.0, 1.0)))


def test_tuning_clock():
    assert time_of(tuning={"clock_factor": 2.0}) == 19


@pytest.mark.parametrize(
    ("shape", "chip", "split"),
    [
        ((1, 4, 128, 4), {"cores": 64}, 32),
        ((1, 1, 4, 1), {"rows": 1, "cols": 1, "cores": 4}, 4),  # all of k
        ((1, 1, 5, 1), {"rows": 1, "cols": 1, "cores": 64}, 3),  # not beyond k
        ((1, 4, 64, 4), {"port_bytes_per_cycle": 1}, 1),  # a tie of the port
    ],
)
def test_splits(shape, chip, split):
    assert one(product_ops([shape]), replace(ONE, **chip))["split"] == split


def test_limits():
    ops = product_ops([(1, 8, 8, 8)])
    assert _core.LIMITS[one(ops, ONE, T(sustained_macs_per_s=1))["limit"]] == "power"
    assert _core.LIMITS[one(ops, ONE, T(launch_s=1000))["limit"]] == "launch"
    assert _core.LIMITS[one(ops, ONE)["limit"]] == "compute"
    assert _core.LIMITS[one(ops, replace(ONE, port_bytes_per_cycle=0.01))["limit"]] == "port"


def test_record():
    r = one(product_ops([(1, 8, 8, 8)]), ONE, T(efficiency=0.5, launch_s=3, unit_overhead_s=0.5))
    assert (r["compute_cycles"], r["fixed_s"], r["time_s"]) == (38, 3, 3 + 76 + 2)
    assert r["utilization"] == pytest.approx(512 / (81 * 16))
    ops = product_ops([(2, 8, 8, 8)])
    ops["epilogue"] = 6
    assert one(ops, ONE)["vector_ops"] == 6 * 2 * 64


def test_extra_bytes_in_bound():
    ops = product_ops([(1, 8, 8, 8)])
    ops["read_bytes"] = 384 + 1e6
    r = one(ops, replace(ONE, hbm_bytes_per_s=1, buffer_bytes=10**6))
    assert r["bound_s"] == pytest.approx(1e6 + 384)


def test_order():
    chip = replace(ONE, buffer_bytes=3092, hbm_bytes_per_s=1)
    r = one(product_ops([(1, 300, 10, 1)]), chip)  # weights whole
    assert (_core.ORDERS[r["order"]], r["tiles_i"], r["tiles_j"]) == ("weights", 1, 1)
    r = one(product_ops([(1, 300, 10, 1)]), replace(chip, buffer_bytes=3091))
    assert (_core.ORDERS[r["order"]], r["tiles_i"], r["tiles_j"]) == ("outputs", 32, 1)


@pytest.mark.parametrize(
    "s", [(13, 31, 7, 425, 1.1, 1.3, 5194.7), (36, 28, 33, 2190, 0.1, 1.1, 2661.6)]
)
def test_fractional_bytes(s):
    m, k, n, cap, i, a, want = s
    assert one(
        product_ops([(1, m, k, n)]),
        replace(ONE, buffer_bytes=cap, hbm_bytes_per_s=1),
        T(),
        P(i, 2, a, 1),
    )["hbm_bytes"] == pytest.approx(want)


def att(chip, tuning, pairs, seq, width, causal, backward=False, keys=None):
    ops = attention_ops([pairs], [seq], [width], [causal], backward)
    ops["n"] = keys or seq
    moved = float(ops["read_bytes"][0]), float(ops["write_bytes"][0])
    shape = (pairs, seq, keys or seq, width)
    want = oracle.attention_time(*shape, *moved, causal, backward, chip, tuning, P())
    found = one(ops, chip, tuning)
    assert found["time_s"] == pytest.approx(want, rel=1e-11)
    return ops, found


def test_attention_wide_arrays():
    att(replace(ONE, rows=64), T(attention_ops=0), 3, 8, 32, False)
    att(replace(ONE, rows=256, cols=256), T(attention_ops=0), 3, 64, 32, False)


def test_attention_queries_and_keys_differ():
    att(replace(ONE, cores=2), T(), 3, 300, 32, False, keys=1000)


def test_attention_record():
    chip = replace(ONE, cores=2, rows=4, hbm_bytes_per_s=1e9, vector_cores=2)
    ops, r = att(chip, T(attention_efficiency=1, attention_backward_ops=16), 4, 128, 32, True, True)
    side = 14 * 4 * 128 * 32
    bytes_ = float(ops["read_bytes"][0] + ops["write_bytes"][0])
    assert r["macs"] == 0.5 * 5 * 4 * 128 * 128 * 32
    assert r["vector_ops"] == 0.5 * 16 * 4 * 128 * 128
    assert r["port_bytes"] == r["buffer_bytes"] == r["hbm_bytes"] == bytes_ + side
    assert r["compute_cycles"] == pytest.approx(r["compute_s"])
    macs_s, vec_s = r["macs"] / (2 * 16), r["vector_ops"] / (2 * 4)
    assert r["bound_s"] == pytest.approx(macs_s + vec_s + side / 1e9)
    slow = one(ops, replace(chip, hbm_bytes_per_s=0.01))
    assert _core.LIMITS[slow["limit"]] == "hbm"
    assert slow["bound_s"] == pytest.approx(100 * (bytes_ + side))
    assert _core.LIMITS[one(ops, chip, T(launch_s=1e9))["limit"]] == "launch"


def test_vector_record():
    ops = vector_ops("add", [4], [8])
    chip = replace(ONE, hbm_bytes_per_s=1.0, buffer_bytes_per_cycle=1000.0)
    r = one(ops, chip)
    fields = ("vector_ops", "port_bytes", "buffer_bytes", "hbm_bytes", "vector_s")
    assert [r[field] for field in fields] == [32, 192, 192, 192, 8]
    assert r["utilization"] == pytest.approx(8 / 192)
    assert r["bound_s"] == pytest.approx(192)
    assert _core.LIMITS[r["limit"]] == "hbm"
    assert one(ops, ONE)["hbm_bytes"] == 0
    assert _core.LIMITS[one(ops, replace(ONE, port_bytes_per_cycle=1.0))["limit"]] == "port"
    assert _core.LIMITS[one(ops, replace(ONE, buffer_bytes_per_cycle=1.0))["limit"]] == "buffer"
    functions = records(ONE, T())[1]["functions"]
    functions[0, 4] = (1, 0, 1, 1, 8, 5, 1)
    assert time_of(ops, tuning={"functions": functions}) == 8


def test_vector_batch_rows():
    ops = vector_ops("add", [4], [8])
    ops["b"] = 3
    assert one(ops, ONE)["vector_ops"] == 96


@pytest.mark.parametrize("field", ["function", "epilogue", "read_bytes", "write_bytes"])
def test_operators_that_cannot_be_are_marked(field):
    for value in (-1, *([32] if field == "function" else [])):
        ops = EIGHT.copy()
        ops[field] = value
        assert one(ops, ONE)["status"] != 0


def test_energy_of_vectors():
    prices = np.zeros(1, _core.ENERGY_DTYPE)
    prices["vector_op_j"] = 2
    made, tuned = records(ONE, T())
    asked = (vector_ops("add", [4], [8]), made, np.zeros(1, np.int32), tuned, BF, False)
    assert _core.op_costs(*asked, prices, np.zeros(1), 1)["energy_j"][0] == 64


def test_collective_is_idle():
    ops = product_ops([(1, 8, 8, 8)])
    ops["function"] = 3
    r = one(ops, ONE)
    assert (r["time_s"], r["bound_s"], _core.LIMITS[r["limit"]]) == (0, 0, "launch")
    made, tuned = records(ONE, T())
    assert _core.op_bounds(ops, made, np.zeros(1, np.int32), tuned, BF, False, 1)[0] == 0
