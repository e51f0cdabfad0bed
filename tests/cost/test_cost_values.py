"""Single values of the cost kernels, worked out by hand: thresholds, ties, records, refusals."""

from dataclasses import replace

import numpy as np
import pytest
from reference import gemm as oracle
from test_gemm import cost_of, records
from test_gemm_reference import ONE

from phaze_fast import _core
from phaze_fast.cost import array_cycles, attention_ops, product_ops, vector_ops
from phaze_fast.errors import InvalidInputError

T, P = oracle.Tuning, oracle.Precision
BF = (2.0, 2.0, 4.0, 1.0)


PLAIN, HALF = T(), P()


def one(ops, chip, tuning=PLAIN, precision=HALF, one_core=False):
    return cost_of(ops, chip, tuning, precision, one_core)[0]


def flow(r):
    return ("os", "ws", "is")[r["dataflow"]]


def refused(chip=None, tuning=None, numbers=BF, tiles=()):
    made, tuned = records(ONE, T(tiles=tiles))
    for k, v in (chip or {}).items():
        made[k] = v
    for k, v in (tuning or {}).items():
        tuned[k] = v
    return bool(
        np.isnan(
            _core.op_times(
                product_ops([(1, 8, 8, 8)]), made, np.zeros(1, np.int32), tuned, numbers, False, 1
            )[0]
        )
    )


COUNTS = (
    "tensor_cores",
    "tensor_width",
    "tensor_depth",
    "vector_cores",
    "vector_lanes",
    "vector_alus_per_lane",
)


@pytest.mark.parametrize("f", COUNTS)
def test_counts(f):
    assert refused({f: 0})
    assert refused({f: 2**40 + 1})
    assert not refused({f: 2**40})


@pytest.mark.parametrize("f", ["tensor_local_bytes", "buffer_bytes", "hbm_bytes"])
def test_bytes(f):
    assert refused({f: -1})


@pytest.mark.parametrize(
    "f", ["buffer_bytes_per_cycle", "buffer_port_bytes_per_cycle", "hbm_bytes_per_s"]
)
def test_rates(f):
    assert all(refused({f: v}) for v in (-1.0, np.nan, np.inf))


def test_precision():
    assert refused(numbers=(2.0, 8.5, 4.0, 1.0))
    assert not refused(numbers=(2.0, 8.0, 4.0, 1.0))


@pytest.mark.parametrize("f", ["attention_ops", "attention_backward_ops"])
def test_attention_constants(f):
    assert refused(tuning={f: -1.0})


def test_tiles():
    assert refused(tiles=((4, 0),))
    assert refused(tiles=((0, 4),))
    assert refused(tiles=((2**40 + 1, 4),))
    assert refused(tiles=((4, 2**40 + 1),))
    assert refused(tuning={"dataflows": 8})
    assert refused(tuning={"dataflows": 2}, tiles=((4, 4),))


def test_tuning_clock():
    made, tuned = records(ONE, T())
    tuned["clock_factor"] = 2.0
    assert (
        _core.op_times(
            product_ops([(1, 8, 8, 8)]), made, np.zeros(1, np.int32), tuned, BF, False, 1
        )[0]
        == 19
    )


def test_split_32():
    assert one(product_ops([(1, 4, 128, 4)]), replace(ONE, cores=64))["split"] == 32


def test_split_all_of_k():
    assert one(product_ops([(1, 1, 4, 1)]), replace(ONE, rows=1, cols=1, cores=4))["split"] == 4


def test_split_not_beyond_k():
    assert one(product_ops([(1, 1, 5, 1)]), replace(ONE, rows=1, cols=1, cores=64))["split"] == 3


def test_local_bytes_exactly():
    r = one(product_ops([(1, 16, 8, 16)]), replace(ONE, port_bytes_per_cycle=1, local_bytes=512))
    assert (r["block_m"], r["block_n"], r["time_s"]) == (8, 8, 1024)


def test_resident():
    chip = replace(ONE, buffer_bytes=1024, hbm_bytes_per_s=1)
    ops = product_ops([(2, 8, 8, 8)])
    assert one(ops, chip, T(resident_share=0.5))["hbm_bytes"] == 256
    ops["read_bytes"] = 100.0
    assert one(ops, chip, T(resident_share=0.5))["hbm_bytes"] == 256


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


def test_ties_go_to_the_first():
    r = one(product_ops([(1, 8, 8, 8)]), ONE)
    assert (flow(r), r["block_m"], r["block_n"], r["split"]) == ("os", 4, 4, 1)


def test_largest():
    chip = replace(ONE, port_bytes_per_cycle=1e9)
    assert one(product_ops([(1, 2**31, 2**31, 1)]), chip)["status"] == 0
    assert one(product_ops([(1, 2**40, 1, 1)]), chip)["status"] == 0
    with pytest.raises(InvalidInputError, match="too large"):
        array_cycles(2**40, 2, 2**22, 1, 1, "os", True)


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


def att(chip, tuning, pairs, seq, width, causal, backward=False):
    ops = attention_ops([pairs], [seq], [width], [causal], backward)
    r = one(ops, chip, tuning)
    want = oracle.attention_time(
        pairs,
        seq,
        seq,
        width,
        float(ops["read_bytes"][0]),
        float(ops["write_bytes"][0]),
        causal,
        backward,
        chip,
        tuning,
        P(),
    )
    assert r["time_s"] == pytest.approx(want, rel=1e-11)
    return ops, r


def test_attention_wide_arrays():
    att(replace(ONE, rows=64), T(attention_ops=0), 3, 8, 32, False)
    att(replace(ONE, rows=256, cols=256), T(attention_ops=0), 3, 64, 32, False)


def test_attention_as_many_units_as_cores():
    att(replace(ONE, cores=4), T(), 4, 128, 32, True)


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
    assert (r["vector_ops"], r["port_bytes"], r["buffer_bytes"], r["hbm_bytes"], r["vector_s"]) == (
        32,
        192,
        192,
        192,
        8,
    )
    assert r["utilization"] == pytest.approx(8 / 192)
    assert r["bound_s"] == pytest.approx(192)
    assert _core.LIMITS[r["limit"]] == "hbm"
    assert one(ops, ONE)["hbm_bytes"] == 0
    assert _core.LIMITS[one(ops, replace(ONE, port_bytes_per_cycle=1.0))["limit"]] == "port"
    assert _core.LIMITS[one(ops, replace(ONE, buffer_bytes_per_cycle=1.0))["limit"]] == "buffer"
    made, tuned = records(ONE, T())
    tuned["functions"][0, 4] = (1, 0, 1, 1, 8, 5, 1)
    assert _core.op_times(ops, made, np.zeros(1, np.int32), tuned, BF, False, 1)[0] == 8


def test_vector_batch_rows():
    ops = vector_ops("add", [4], [8])
    ops["b"] = 3
    assert one(ops, ONE)["vector_ops"] == 96


def test_bad_ops():
    for f, v in (
        ("function", 32),
        ("function", -1),
        ("epilogue", -1),
        ("read_bytes", -1.0),
        ("write_bytes", -1.0),
    ):
        ops = product_ops([(1, 8, 8, 8)])
        ops[f] = v
        assert one(ops, ONE)["status"] != 0


def test_energy_of_vectors():
    made, tuned = records(ONE, T())
    e = np.zeros(1, _core.ENERGY_DTYPE)
    e["vector_op_j"] = 2
    assert (
        _core.op_costs(
            vector_ops("add", [4], [8]),
            made,
            np.zeros(1, np.int32),
            tuned,
            BF,
            False,
            e,
            np.zeros(1),
            1,
        )["energy_j"][0]
        == 64
    )


def test_negative_tuning_index():
    made, tuned = records(ONE, T())
    assert np.isnan(
        _core.op_times(
            product_ops([(1, 8, 8, 8)]), made, np.array([-1], np.int32), tuned, BF, False, 1
        )[0]
    )


def test_attention_queries_and_keys_differ():
    ops = attention_ops([3], [300], [32], [False])
    ops["n"] = 1000
    chip = replace(ONE, cores=2)
    want = oracle.attention_time(
        3,
        300,
        1000,
        32,
        float(ops["read_bytes"][0]),
        float(ops["write_bytes"][0]),
        False,
        False,
        chip,
        T(),
        P(),
    )
    assert one(ops, chip)["time_s"] == pytest.approx(want)


def test_collective_is_idle():
    ops = product_ops([(1, 8, 8, 8)])
    ops["function"] = 3
    r = one(ops, ONE)
    assert (r["time_s"], r["bound_s"], _core.LIMITS[r["limit"]]) == (0, 0, "launch")
    made, tuned = records(ONE, T())
    assert _core.op_bounds(ops, made, np.zeros(1, np.int32), tuned, BF, False, 1)[0] == 0


def test_ties_of_the_port():
    assert one(product_ops([(1, 4, 64, 4)]), replace(ONE, port_bytes_per_cycle=1))["split"] == 1
