"""Costs of operators worked out by hand: by the oracle, and by the kernels with all they record."""

from dataclasses import replace

import numpy as np
import pytest
from reference.gemm import (
    Chip,
    Precision,
    Tuning,
    array_cycles,
    attention_time,
    best_mapping,
    bound,
    hbm_bytes,
    ladder,
    port_width,
    vector_time,
)
from test_gemm import cost_of, records

from phaze_fast import _core
from phaze_fast.cost import attention_ops, product_ops, vector_ops

BF16 = Precision()
PLAIN = Tuning()

# One 4x4 array at 1 Hz, so that seconds are cycles; nothing but the array and its port.
ONE = Chip(
    cores=1,
    rows=4,
    cols=4,
    local_bytes=0,
    vector_cores=1,
    lanes=4,
    alus=1,
    buffer_bytes=0,
    buffer_bytes_per_cycle=0,
    port_bytes_per_cycle=1000,
    hbm_bytes_per_s=0,
    clock_hz=1,
)


@pytest.mark.parametrize(
    ("dataflow", "overlapped", "cycles"),
    [
        # m, k, n = 10, 7, 9 on 4 x 5.
        ("os", False, 84),  # F = 3*2, T = 7, L = 4+5-2 = 7: 6*14
        ("os", True, 49),  # 5*7 + 7 + 7
        ("ws", False, 84),  # F = 2*2, T = 10, L = 8+5-2 = 11: 4*21
        ("ws", True, 51),  # 3*10 + 10 + 11
        ("is", False, 80),  # F = 2*2, T = 9, L = 11: 4*20
        ("is", True, 47),  # 3*9 + 9 + 11
    ],
)
def test_one_array(dataflow, overlapped, cycles):
    assert array_cycles(10, 7, 9, 4, 5, dataflow, overlapped) == cycles


def test_short_folds_wait_for_the_rows_to_load():
    # os, F = 2, T = 3 < R = 8, L = 14: 1*8 + 3 + 14
    assert array_cycles(16, 3, 8, 8, 8, "os", True) == 25


def test_ladder():
    assert ladder(25) == [1, 2, 3, 4, 6, 8, 12, 16, 24]


@pytest.mark.parametrize(
    ("capacity", "moved"),
    [
        # 64 x 64 x 64 in bf16: A = B = D = 8192.
        # Outputs stay whole: 64*64*4 + 2*64*128*2 = 49152; inputs stay whole:
        # 64*64*2 + 2*64*64*2 + 2*64*64*4 = 57344. Either reads everything once.
        (49152, 24576),
        # One byte less. Outputs, j = 2: 64*32*4 + 128*96*2 = 32768, A twice: 32768 bytes. The
        # same with i = 2. Inputs, i = 2, c = 2: 2*32*64*2 + 128*64*2 + 128*32*4 = 40960, B twice.
        (49151, 32768),
        (32768, 32768),
        # Outputs, j = 3: t_n = 22, 64*22*4 + 128*86*2 = 27648: 3*8192 + 8192 + 8192.
        # i = j = 2 needs 32*32*4 + 128*64*2 = 20480 for the same 40960.
        (32767, 40960),
        (20480, 40960),
        # Outputs 1 x 1 need 4 + 512 bytes and nothing is smaller: A and B for all 64 columns or rows.
        (100, 64 * 8192 * 2 + 8192),
    ],
)
def test_memory_of_a_small_product(capacity, moved):
    assert hbm_bytes(64, 64, 64, capacity, BF16) == moved


def test_memory_where_an_operand_stays():
    # m = 300, k = 10, n = 1: A = 6000, B = 20, D = 600. The weights stay whole (t_n = 1, t_k = 10)
    # in 20 + 2560 + 512 = 3092 bytes, and everything is read once. In a byte less, j = 2 (t_k = 5,
    # c = 2) needs 20 + 1280 + 512 for 2*300*4 = 2400 bytes more. Outputs stay where
    # 4*t_m + 256*(t_m + 1) <= 3091, so t_m = 10 with i = 32 (24 gives 13): 6000 + 32*20 + 600.
    assert hbm_bytes(300, 10, 1, 3092, BF16) == 6620
    assert hbm_bytes(300, 10, 1, 3091, BF16) == 7240


def test_memory_where_nothing_fits():
    # 65 x 8 x 130: A = 1040 for each of 130 columns, B = 2080 for each of 65 rows, D = 16900.
    assert hbm_bytes(65, 8, 130, 10, BF16) == 130 * 1040 + 65 * 2080 + 16900


def test_a_product_on_one_array():
    # 8 x 8 x 8. The local buffer is empty, so only one fold under os is allowed: l = 4 x 4.
    # s = 1: U = W = 4, T = 8, L = 6: 3*8 + 8 + 6 = 38. s = 2: k_c = 4, W = 8: 7*4 + 4 + 6 = 38.
    # The tie goes to s = 1. Port: 4*max(8*8*2, 16*2) = 512 over 1000.
    found = best_mapping(1, 8, 8, 8, ONE, PLAIN, BF16)
    assert (found["dataflow"], found["block"], found["split"]) == ("os", (4, 4), 1)
    assert found["time_s"] == found["compute_s"] == 38
    assert found["port_s"] == 0.512
    assert found["port_bytes"] == 4 * (128 + 32)
    # p = 2, g = 1: 128*2 + 128*2 + 64*2.
    assert found["buffer_bytes"] == 640
    assert found["hbm_bytes"] == found["hbm_s"] == found["fill_s"] == 0


def test_local_bytes_admit_larger_blocks():
    # 16 x 8 x 16. Blocks of 8 x 8 need 2*16*4*2 + 64*4 = 512 bytes. The port (1 byte per cycle)
    # then passes 4*max(16*8*2, 64*2) = 1024, and 16*max(8*8*2, 16*2) = 2048 with blocks of 4 x 4.
    # 4 x 16 needs 2*20*4*2 + 64*4 = 576, 8 x 4 passes 8*(12*8*2) = 1536.
    slow = replace(ONE, port_bytes_per_cycle=1)
    assert best_mapping(1, 16, 8, 16, replace(slow, local_bytes=511), PLAIN, BF16)["time_s"] == 1536
    found = best_mapping(1, 16, 8, 16, replace(slow, local_bytes=512), PLAIN, BF16)
    assert (found["block"], found["time_s"]) == ((8, 8), 1024)


def test_cores_share_a_wave():
    # Four cores, 8 x 8 x 8: with l = 4 x 4 and s = 1, W = 1: 8 + 6 = 14. s = 2: W = 2, k_c = 4:
    # 4 + 4 + 6 = 14 again. rho = 2, g = 2 x 2: every operand is read once, 128*3 = 384 bytes at 2
    # per cycle = 192. With s = 2: 256 + 64*8*2 = 1280 bytes.
    # Buffer of 8192: HBM moves A + B + D = 384 bytes at 4 = 96; fill is (4 + 4)*4*2 = 64 at 4.
    chip = replace(ONE, cores=4, buffer_bytes=8192, buffer_bytes_per_cycle=2, hbm_bytes_per_s=8)
    tuning = Tuning(launch_s=5, unit_overhead_s=0.5, reduction_s=7, hbm_share=0.5)
    found = best_mapping(1, 8, 8, 8, chip, tuning, BF16, extra_bytes=16)
    assert (found["compute_s"], found["buffer_s"], found["hbm_s"]) == (14, 192, 100)
    assert (found["fill_s"], found["time_s"]) == (16, 5 + 192 + 16)
    # One core: p = 2, g = 1: 640 bytes; fill (4 + 4)*4*2 = 64.
    alone = best_mapping(1, 8, 8, 8, chip, tuning, BF16, one_core=True)
    assert (alone["compute_s"], alone["buffer_s"]) == (38, 320)
    assert (alone["hbm_s"], alone["fill_s"], alone["time_s"]) == (96, 16, 5 + 320 + 16)


def test_uneven_waves():
    # Three cores, 12 x 8 x 4: p = 3 x 1. rho = 1: g_m = 1, g_n = min(1, 3) = 1, g_m = min(3, 3).
    # B is read once: 192 + 64 + 96 bytes.
    found = best_mapping(1, 12, 8, 4, replace(ONE, cores=3), PLAIN, BF16)
    assert (found["compute_s"], found["buffer_bytes"]) == (14, 352)


def test_split_of_a_long_product():
    # Four cores, 4 x 64 x 4: s = 1 takes 64 + 6 = 70. s = 4: k_c = 16, W = 1: 22, the least; s = 8:
    # k_c = 8, W = 2: 8 + 8 + 6 = 22 ties; s = 3: 22 + 6. Out: 4*4*2*4 = 128 bytes a unit.
    chip = replace(ONE, cores=4)
    found = best_mapping(1, 4, 64, 4, chip, Tuning(reduction_s=10), BF16)
    assert (found["split"], found["time_s"]) == (4, 32)
    assert found["port_bytes"] == 4 * (8 * 16 * 2 + 128)
    assert found["buffer_bytes"] == 4 * 64 * 2 * 2 + 16 * 8 * 4
    assert best_mapping(1, 4, 64, 4, chip, Tuning(reduction_s=48), BF16)["split"] == 1


def test_tiles_are_charged_in_full():
    # Tile 8 x 8 on 4 x 4 for m = n = 2, k = 6: F = 4, T = 6, L = 6: 3*6 + 12 = 30 at rate 2 and
    # efficiency 0.5. Port, k and n even but not multiples of 8: in and out, 16*6*2 + 64*2
    # = 320 at 4 per cycle.
    gpu = Tuning(tiles=((8, 8),), efficiency=0.5, port_even_bytes_per_cycle=4)
    found = best_mapping(1, 2, 6, 2, ONE, gpu, Precision(rate=2))
    assert (found["block"], found["compute_s"], found["port_s"]) == ((8, 8), 30, 80)
    serial = replace(gpu, overlapped=False)
    assert best_mapping(1, 2, 6, 2, ONE, serial, Precision(rate=2))["compute_s"] == 48
    assert found["buffer_bytes"] == 24 + 24 + 8


def test_unaligned_rows_have_blocks_of_their_own():
    # k = 6: tile 4 x 4, in and out 8*6*2 + 16*2 = 128 at 4 per cycle; half the launch, own overhead.
    gpu = Tuning(
        tiles=((8, 8),), even_tiles=((4, 4),), odd_tiles=((2, 2),), launch_s=10, reduction_s=99,
        vector_launch_share=0.5, unit_overhead_s=7, unaligned_unit_overhead_s=3,
        port_even_bytes_per_cycle=4,
    )  # fmt: skip
    found = best_mapping(1, 4, 6, 4, ONE, gpu, BF16)
    assert (found["block"], found["port_s"]) == ((4, 4), 32)
    assert found["time_s"] == 5 + 32 + 3 + found["fill_s"]
    assert best_mapping(1, 2, 7, 2, ONE, gpu, BF16)["block"] == (2, 2)
    assert best_mapping(1, 8, 8, 8, ONE, gpu, BF16)["block"] == (8, 8)
    assert bound(1, 4, 6, 4, ONE, gpu, BF16) < bound(
        1, 4, 6, 4, ONE, replace(gpu, even_tiles=()), BF16
    )


def test_port_width():
    tuning = Tuning(port_share=0.5, port_even_bytes_per_cycle=3, port_odd_bytes_per_cycle=2)
    assert [port_width(*kn, ONE, tuning, BF16) for kn in ((8, 16), (8, 6), (6, 2), (8, 7))] == [
        (500, True),
        (3, False),
        (3, False),
        (2, False),
    ]
    assert port_width(7, 8, ONE, Tuning(port_share=0.5), BF16) == (500, True)


def test_resident_operands_power_and_epilogue():
    # b*(A + B) = 2*256 = 512 <= 0.5*1024: HBM moves 2*128 bytes and nothing is filled.
    chip = replace(ONE, cores=2, vector_cores=3, buffer_bytes=1024, hbm_bytes_per_s=1)
    tuning = Tuning(resident_share=0.5, sustained_macs_per_s=2)
    found = best_mapping(2, 8, 8, 8, chip, tuning, BF16, epilogue_ops=6)
    assert (found["hbm_bytes"], found["fill_s"]) == (256, 0)
    # 2*512 MACs at 2 per second; 6*2*64 operations on 12 lanes.
    assert (found["power_s"], found["vector_s"], found["time_s"]) == (512, 64, 512)
    alone = best_mapping(2, 8, 8, 8, chip, tuning, BF16, one_core=True, epilogue_ops=6)
    assert (alone["power_s"], alone["vector_s"]) == (1024, 192)
    less = replace(tuning, resident_share=0.49)
    # Outputs stay where 4*t_m*t_n + 256*(t_m + t_n) <= 1024: 1 x 2 at most, so A 4 times,
    # B 8 times (or the other way), D: 1664. An input stays with t = t_k = 1 at most (772 bytes),
    # i = j = 8: 128 + 1024 + 128 + 2*7*256 bytes.
    assert best_mapping(2, 8, 8, 8, chip, less, BF16)["hbm_bytes"] == 2 * 1664


def test_bound():
    # Two cores: MACs 1024/32 = 32 cycles; buffer 2*384/4 = 192; ports 2*256/(2*1000); HBM 768/2.
    chip = replace(ONE, cores=2, buffer_bytes_per_cycle=4, hbm_bytes_per_s=2, local_bytes=4096)
    assert bound(2, 8, 8, 8, chip, Tuning(launch_s=1), BF16) == 1 + 384
    no_hbm = replace(chip, hbm_bytes_per_s=0)
    assert bound(2, 8, 8, 8, no_hbm, Tuning(launch_s=1), BF16) == 1 + 192
    assert bound(2, 8, 8, 8, replace(no_hbm, buffer_bytes_per_cycle=0), PLAIN, BF16) == 32
    assert bound(2, 8, 8, 8, no_hbm, PLAIN, BF16, epilogue_ops=8) == 2 * 64 * 8 / 4


def test_vector_operators():
    # 10 rows of 20, 3 per element and 4 per row: 640 operations on 2*4 lanes = 80 cycles; 500 bytes
    # twice over 2 ports of 5 = 100; over the buffer of 20 = 50; over HBM of 16 = 62.5.
    chip = replace(
        ONE, vector_cores=2, port_bytes_per_cycle=10, buffer_bytes_per_cycle=20, hbm_bytes_per_s=16
    )
    tuning = Tuning(launch_s=1, port_share=0.5)
    rest = (3, 4, 2, 2, 20, 3, 1.5)
    assert vector_time(10, 20, 300, 200, chip, tuning, *rest) == 2 + 100
    assert vector_time(10, 20, 300, 200, chip, tuning, *rest, one_core=True) == 2 + 200
    # Longer than 19: 1920 operations, 240 cycles; bytes 1500, 150 cycles.
    longer = (3, 4, 2, 2, 19, 3, 1.5)
    assert vector_time(10, 20, 300, 200, chip, tuning, *longer) == 2 + 240
    assert vector_time(10, 20, 300, 200, chip, tuning, 3, 4, 2, 2, 0, 3, 1.5) == 2 + 100


def test_attention():
    # Units of 8 queries, n = 16 keys, k = 4, on 4 x 4 arrays. 8x4x16: os 2*4 folds of 4 = 32, ws
    # 1*4 of 8 = 32, is 1*2 of 16 = 32. 8x16x4: os 2*1 of 16 = 32, ws 4*1 of 8, is 4*2 of 4.
    # Lanes: 8*16*2 operations on half a vector core of 4 lanes = 128. Unit: 64/0.5 + 128 + 10.
    chip = replace(ONE, cores=2, hbm_bytes_per_s=2)
    tuning = Tuning(
        launch_s=1,
        attention_most=8,
        attention_ops=2,
        attention_efficiency=0.5,
        attention_unit_s=10,
        attention_backward_ops=4,
    )
    # b = 3, m = 12: U = 6, W = 3 on two cores, 6 on one, which has a vector core of its own: 64.
    shape = (3, 12, 16, 4, 100, 100)
    assert attention_time(*shape, False, False, chip, tuning, BF16) == 1 + 3 * 266
    assert attention_time(*shape, False, False, chip, tuning, BF16, one_core=True) == 1 + 6 * 202
    # Mean keys 12: 8x4x12 = 24, 8x12x4 = 24; lanes 96: 96 + 96 + 10 = 202. The last: 1 - 2/12.
    causal = attention_time(*shape, True, False, chip, tuning, BF16)
    # 3 * 202 + 266 * (1 - 1/6) is more than without a mask, so that stands.
    assert causal == 1 + 3 * 266
    long = (30, 12, 16, 4, 100, 100)  # U = 60: 30 * 202 + 266 * (1 - 1/60) < 30 * 266
    causal = attention_time(*long, True, False, chip, tuning, BF16)
    assert causal == pytest.approx(1 + 30 * 202 + 266 * (1 - 1 / 60))
    # U = 2 <= P.
    few = attention_time(2, 8, 16, 4, 100, 100, True, False, chip, tuning, BF16)
    assert few == 1 + 266
    # HBM: 2000 bytes at 2.
    read = attention_time(2, 8, 16, 4, 1000, 1000, True, False, chip, tuning, BF16)
    assert read == 1 + 1000
    # Backward: 5*32 + 256 + 10 = 426 a unit; 14*3*12*4 bytes at 2 on top.
    assert attention_time(*shape, False, True, chip, tuning, BF16) == 3 + 3 * 426 + 1008


# ---- the kernels: thresholds, records, refusals ----

BF = (2.0, 2.0, 4.0, 1.0, 64.0, 2.0, 2.0)


def one(ops, chip, tuning=PLAIN, precision=BF16, one_core=False):
    return cost_of(ops, chip, tuning, precision, one_core)[0]


EIGHT = product_ops([(1, 8, 8, 8)])


def time_of(ops=EIGHT, chip=(), tuning=(), numbers=BF, tiles=(), index=0):
    """Seconds on one small chip, fields of its records changed; NaN where it is refused."""
    made, tuned = records(ONE, Tuning(tiles=tiles))
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
    *(
        {"numbers": numbers}
        for numbers in ((2.0, 8.5, 4.0, 1.0, 64.0, 2.0, 2.0), (2.0, 2.0, 0.0, 1.0, 64.0, 2.0, 2.0))
    ),
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
    assert not np.isnan(time_of(numbers=(2.0, 8.0, 4.0, 1.0, 64.0, 2.0, 2.0)))


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
    assert _core.LIMITS[one(ops, ONE, Tuning(sustained_macs_per_s=1))["limit"]] == "power"
    assert _core.LIMITS[one(ops, ONE, Tuning(launch_s=1000))["limit"]] == "launch"
    assert _core.LIMITS[one(ops, ONE)["limit"]] == "compute"
    assert _core.LIMITS[one(ops, replace(ONE, port_bytes_per_cycle=0.01))["limit"]] == "port"


def test_record():
    r = one(
        product_ops([(1, 8, 8, 8)]), ONE, Tuning(efficiency=0.5, launch_s=3, unit_overhead_s=0.5)
    )
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
        Tuning(),
        Precision(i, 2, a, 1),
    )["hbm_bytes"] == pytest.approx(want)


def att(chip, tuning, pairs, seq, width, causal, backward=False, keys=None):
    ops = attention_ops([pairs], [seq], [width], [causal], backward)
    ops["n"] = keys or seq
    moved = float(ops["read_bytes"][0]), float(ops["write_bytes"][0])
    shape = (pairs, seq, keys or seq, width)
    want = attention_time(*shape, *moved, causal, backward, chip, tuning, Precision())
    found = one(ops, chip, tuning)
    assert found["time_s"] == pytest.approx(want, rel=1e-11)
    return ops, found


def test_attention_wide_arrays():
    att(replace(ONE, rows=64), Tuning(attention_ops=0), 3, 8, 32, False)
    att(replace(ONE, rows=256, cols=256), Tuning(attention_ops=0), 3, 64, 32, False)


def test_attention_queries_and_keys_differ():
    att(replace(ONE, cores=2), Tuning(), 3, 300, 32, False, keys=1000)


def test_attention_record():
    chip = replace(ONE, cores=2, rows=4, hbm_bytes_per_s=1e9, vector_cores=2)
    ops, r = att(
        chip, Tuning(attention_efficiency=1, attention_backward_ops=16), 4, 128, 32, True, True
    )
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
    assert _core.LIMITS[one(ops, chip, Tuning(launch_s=1e9))["limit"]] == "launch"


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
    functions = records(ONE, Tuning())[1]["functions"]
    functions[0, 4] = (1, 0, 1, 1, 8, 5, 1, 0, 0)
    assert time_of(ops, tuning={"functions": functions}) == 8


def test_vector_batch_rows():
    ops = vector_ops("add", [4], [8])
    ops["b"] = 3
    assert one(ops, ONE)["vector_ops"] == 96


@pytest.mark.parametrize("field", ["function", "epilogue", "read_bytes", "write_bytes"])
def test_operators_that_cannot_be_are_marked(field):
    for value in (-1, *([len(_core.FUNCTIONS)] if field == "function" else [])):
        ops = EIGHT.copy()
        ops[field] = value
        assert one(ops, ONE)["status"] != 0


def test_energy_of_vectors():
    prices = np.zeros(1, _core.ENERGY_DTYPE)
    prices["vector_op_j"] = 2
    made, tuned = records(ONE, Tuning())
    asked = (vector_ops("add", [4], [8]), made, np.zeros(1, np.int32), tuned, BF, False)
    assert _core.op_costs(*asked, prices, np.zeros(1), 1)["energy_j"][0] == 64


def test_collective_is_idle():
    ops = product_ops([(1, 8, 8, 8)])
    ops["function"] = 3
    r = one(ops, ONE)
    assert (r["time_s"], r["bound_s"], _core.LIMITS[r["limit"]]) == (0, 0, "launch")
    made, tuned = records(ONE, Tuning())
    assert _core.op_bounds(ops, made, np.zeros(1, np.int32), tuned, BF, False, 1)[0] == 0
