"""Matrix products: closed forms, brute force over the mapping space, laws, other tools' figures."""

import csv
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from case_counts import some_or_many
from hypothesis import given
from hypothesis import strategies as st
from reference import gemm as oracle

from phaze_fast import _core
from phaze_fast.cost import array_cycles, gemm
from phaze_fast.cost.operators import product_ops
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import Accelerator, Tuning, presets, tuning_record

GOLDEN = Path(__file__).parents[1] / "golden"
FLOWS = ("os", "ws", "is")


def peers():
    with (GOLDEN / "op_cycles_peers.csv").open() as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


# ---- one array ----


def test_cycles_of_scale_sim_on_every_row():
    rows = [r for r in peers() if r["peer"].startswith(("formula", "scalesim"))]
    assert len(rows) == 78
    for row in rows:
        size = int(row["array"])
        m, k, n = (int(row[d]) for d in "MKN")
        # SCALE-Sim counts from zero: it reports the number of the last cycle.
        assert array_cycles(m, k, n, size, size, row["dataflow"]) - 1 == int(row["cycles"])


sizes = st.integers(1, 2**20)
sides = st.integers(1, 600)


@given(sizes, sizes, sizes, sides, sides, st.sampled_from(FLOWS), st.booleans())
def test_cycles_are_the_closed_forms(m, k, n, rows, cols, flow, overlapped):
    expected = oracle.array_cycles(m, k, n, rows, cols, flow, overlapped)
    if expected < 2**63:
        assert array_cycles(m, k, n, rows, cols, flow, overlapped) == expected
    else:
        with pytest.raises(InvalidInputError, match="too large"):
            array_cycles(m, k, n, rows, cols, flow, overlapped)


def test_huge_counts_are_exact_or_refused():
    big = 2**40
    assert array_cycles(big, 7, 5, 3, 2, "os") == oracle.array_cycles(big, 7, 5, 3, 2, "os", False)
    with pytest.raises(InvalidInputError, match="too large"):
        array_cycles(big, big, big, 1, 1, "ws")
    with pytest.raises(InvalidInputError, match="too large"):
        array_cycles(2**41, 1, 1, 1, 1, "ws")
    with pytest.raises(InvalidInputError, match="zero or negative"):
        array_cycles(0, 1, 1, 1, 1, "os")
    with pytest.raises(InvalidInputError, match="'so' is not accepted"):
        array_cycles(1, 1, 1, 1, 1, "so")


def test_overlapped_folds_lie_between_ideal_and_serial():
    rng = random.Random(1)
    for _ in range(500):
        m, k, n = (rng.randint(1, 3000) for _ in range(3))
        rows, cols = rng.randint(1, 300), rng.randint(1, 300)
        for flow in FLOWS:
            both = [array_cycles(m, k, n, rows, cols, flow, o) for o in (True, False)]
            assert m * k * n / (rows * cols) <= both[0] <= both[1]


def test_single_array_beside_other_tools():
    rows = [r for r in peers() if not r["peer"].startswith(("formula", "scalesim"))]
    near = 0
    for row in rows:
        m, k, n, size = (int(row[c]) for c in ("M", "K", "N", "array"))
        ours = min(array_cycles(m, k, n, size, size, flow, overlapped=True) for flow in FLOWS)
        assert m * k * n / size**2 <= ours <= array_cycles(m, k, n, size, size, "os")
        if row["peer"].startswith(("zigzag", "maestro")):
            near += 1  # on every row, not only where their buffers hold the operands
            assert ours == pytest.approx(float(row["cycles"]), rel=0.10), row
    assert near == 54


# ---- the mapping space ----


def random_case(rng):
    """A small chip, tuning, format and shape, with every feature on now and then."""
    chip = oracle.Chip(
        cores=rng.choice([1, 2, 3, 4, 6, 8, 13, 64]),
        rows=rng.choice([1, 2, 3, 4, 8, 16]),
        cols=rng.choice([1, 2, 4, 5, 8, 16]),
        local_bytes=rng.choice([0, 64, 300, 1024, 5000, 10**6]),
        vector_cores=rng.choice([1, 2, 5]),
        lanes=rng.choice([1, 4, 16]),
        alus=rng.choice([1, 2]),
        buffer_bytes=rng.choice([0, 100, 2000, 10**4, 50_000, 10**6]),
        buffer_bytes_per_cycle=rng.choice([0.0, 3.0, 64.0, 1e4]),
        port_bytes_per_cycle=rng.choice([1.0, 8.0, 100.0]),
        hbm_bytes_per_s=rng.choice([0.0, 1e8, 2e9, 1e11]),
        clock_hz=rng.choice([1e9, 1.4e9]),
    )
    tuning = oracle.Tuning()
    if rng.random() < 0.5:
        tuning = oracle.Tuning(
            launch_s=rng.choice([0.0, 1e-7]),
            efficiency=rng.choice([0.5, 0.9, 1.0]),
            unit_overhead_s=rng.choice([0.0, 1e-8]),
            reduction_s=rng.choice([0.0, 1e-8]),
            sustained_macs_per_s=rng.choice([0.0, 1e10, 1e12]),
            hbm_share=rng.choice([0.7, 1.0]),
            hbm_write_share=rng.choice([0.8, 1.0]),
            product_hbm_share=rng.choice([0.9, 1.0]),
            port_share=rng.choice([0.6, 1.0]),
            port_even_bytes_per_cycle=rng.choice([0.0, 2.0]),
            port_odd_bytes_per_cycle=rng.choice([0.0, 1.0]),
            resident_share=rng.choice([0.0, 0.5]),
            overlapped=rng.random() < 0.5,
            tiles=rng.choice([(), (), ((8, 4), (4, 8), (16, 16))]),
        )
        if tuning.tiles and rng.random() < 0.5:
            tuning.vector_launch_share = rng.choice([0.5, 1.0])
            tuning.unaligned_unit_overhead_s = rng.choice([0.0, 2e-8])
            tuning.unaligned_reduction_s = rng.choice([0.0, 3e-8])
            tuning.even_tiles = rng.choice([(), ((2, 2), (8, 8))])
            tuning.odd_tiles = rng.choice([(), ((4, 4), (8, 16), (16, 8))])
    precision = rng.choice(
        [oracle.Precision(), oracle.Precision(1, 2, 4, 2.0), oracle.Precision(4, 4, 4, 0.5)]
    )
    shape = (rng.choice([1, 1, 2, 5]), *(rng.randint(1, 40) for _ in range(3)))
    return shape, chip, tuning, precision


def records(chip, tuning):
    """The same chip and tuning as the kernels take them."""
    made = np.zeros(1, dtype=_core.CHIP_DTYPE)
    made["tensor_cores"], made["tensor_width"], made["tensor_depth"] = (
        chip.cores,
        chip.cols,
        chip.rows,
    )
    made["tensor_local_bytes"], made["vector_cores"] = chip.local_bytes, chip.vector_cores
    made["vector_lanes"], made["vector_alus_per_lane"] = chip.lanes, chip.alus
    made["buffer_bytes"], made["clock_hz"] = chip.buffer_bytes, chip.clock_hz
    made["buffer_bytes_per_cycle"] = chip.buffer_bytes_per_cycle
    made["buffer_port_bytes_per_cycle"] = chip.port_bytes_per_cycle
    made["hbm_bytes_per_s"] = chip.hbm_bytes_per_s
    tuned = tuning_record(Tuning(), tuning.launch_s)
    for name in vars(tuning):
        if name in tuned.dtype.names and not name.endswith("tiles"):
            tuned[name] = getattr(tuning, name)
    if tuning.tiles:
        tuned["dataflows"] = 1
    for name, kind in (("tiles", "tile"), ("even_tiles", "even"), ("odd_tiles", "odd")):
        tuned[name] = len(getattr(tuning, name))
        for i, (m, n) in enumerate(getattr(tuning, name)):
            tuned[f"{kind}_m"][0, i], tuned[f"{kind}_n"][0, i] = m, n
    return made, tuned


NO_ENERGY = np.zeros(1, dtype=_core.ENERGY_DTYPE)


def cost_of(ops, chip, tuning, precision, one_core=False):
    made, tuned = records(chip, tuning)
    p = precision
    numbers = (p.in_bytes, p.out_bytes, p.acc_bytes, p.rate, 64.0, 2.0, 2.0)
    index, watts = np.zeros(1, dtype=np.int32), np.zeros(1)
    return _core.op_costs(ops, made, index, tuned, numbers, one_core, NO_ENERGY, watts, 1)


TERMS = ("compute_s", "port_s", "buffer_s", "hbm_s", "power_s", "vector_s", "fill_s", "hbm_bytes")


def check_case(rng):
    shape, chip, tuning, precision = random_case(rng)
    ops = product_ops([shape])
    epilogue = rng.choice([0, 0, 1, 3])
    b, m, k, n = shape
    own = b * ((m * k + k * n) * precision.in_bytes + m * n * precision.out_bytes)
    extra = rng.choice([0.0, 128.0]) if epilogue else 0.0
    ops["epilogue"], ops["read_bytes"], ops["write_bytes"] = epilogue, own + extra, 0.0
    for one_core in (False, True):
        (found,) = cost_of(ops, chip, tuning, precision, one_core)
        wanted = oracle.best_mapping(
            *shape, chip, tuning, precision, one_core, float(epilogue), extra
        )
        context = (shape, chip, tuning, precision, one_core)
        assert found["status"] == 0
        assert found["time_s"] == pytest.approx(wanted["time_s"], rel=1e-11), context
        bound = oracle.bound(*shape, chip, tuning, precision, one_core, float(epilogue))
        assert bound * (1 - 1e-9) <= found["time_s"], context
        assert found["bound_s"] <= found["time_s"]
        assert found["bound_s"] >= bound * (1 - 1e-9), context
        if FLOWS[found["dataflow"]] != wanted["dataflow"]:
            continue  # a tie, broken by the last bit
        block = (found["block_m"], found["block_n"])
        if block == wanted["block"] and found["split"] == wanted["split"]:
            for term in (*TERMS, "buffer_bytes", "port_bytes"):
                assert found[term] == pytest.approx(wanted[term], rel=1e-11), (term, context)


@some_or_many(150, 3_000, 10_000)
def test_the_best_mapping_is_that_of_brute_force(cases):
    rng = random.Random(4)
    for _ in range(cases):
        check_case(rng)


@given(st.integers(0, 2**32))
def test_more_bandwidth_or_buffer_is_never_slower(seed):
    rng = random.Random(seed)
    shape, chip, tuning, precision = random_case(rng)
    shape = (shape[0], *(rng.randint(1, 5000) for _ in range(3)))
    ops = product_ops([shape])
    before = cost_of(ops, chip, tuning, precision)["time_s"][0]
    factor = rng.choice([1.01, 1.5, 2, 7])
    better = [
        replace(chip, hbm_bytes_per_s=chip.hbm_bytes_per_s * factor),
        replace(chip, buffer_bytes_per_cycle=chip.buffer_bytes_per_cycle * factor),
        replace(chip, port_bytes_per_cycle=chip.port_bytes_per_cycle * factor),
        replace(chip, local_bytes=int(chip.local_bytes * factor) + 1)
        if chip.buffer_bytes
        else chip,
        replace(chip, clock_hz=chip.clock_hz * factor),
        replace(chip, lanes=chip.lanes * 2),
    ]
    if chip.buffer_bytes:
        better.append(replace(chip, buffer_bytes=int(chip.buffer_bytes * factor) + 1))
    for changed in better:
        after = cost_of(ops, changed, tuning, precision)["time_s"][0]
        assert after <= before * (1 + 1e-12), changed


@given(st.integers(0, 2**32))
def test_never_below_the_bound_and_larger_products_have_larger_bounds(seed):
    rng = random.Random(seed)
    _, chip, tuning, precision = random_case(rng)
    shape = [rng.choice([1, 3]), *(int(2 ** rng.uniform(0, 16)) for _ in range(3))]
    grown = list(shape)
    grown[rng.randrange(4)] *= rng.choice([2, 3])
    (small,) = cost_of(product_ops([shape]), chip, tuning, precision)
    (large,) = cost_of(product_ops([grown]), chip, tuning, precision)
    assert 0 < small["bound_s"] <= small["time_s"]
    if tuning.resident_share == 0:  # a larger product may stop being resident, never the reverse
        assert small["bound_s"] <= large["bound_s"] * (1 + 1e-12)


# ---- what a user asks ----


def test_a_product_with_its_breakdown():
    cost = gemm(presets.chip("tpuv4"), 2048, 12288, 49152)
    assert cost.bound_s <= cost.time_s
    assert cost.limit == "compute"
    assert cost.utilization == pytest.approx(2048 * 12288 * 49152 / cost.time_s / 137.6256e12)
    assert cost.utilization > 0.95
    assert cost.hbm_bytes >= 2 * (2048 * 12288 + 12288 * 49152 + 2048 * 49152)
    assert cost.one_core_s > 7 * cost.time_s
    assert cost.energy_j > 0


def test_formats_change_speed_and_bytes():
    chip = presets.chip("h200")
    half, eighth = (gemm(chip, 8192, 8192, 8192, dtype=d) for d in ("bf16", "fp8"))
    assert eighth.time_s < 0.6 * half.time_s
    with pytest.raises(InvalidInputError, match="fp32"):
        gemm(chip, 64, 64, 64, dtype="fp32")


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((0, 1, 1), "zero or negative"),
        ((1, -4, 1), "zero or negative"),
        ((2**41, 1, 1), "too large"),
        ((2**30, 2**30, 2**30), "too large"),
        ((2**70, 1, 1), "2\\^63"),
        ((1.5, 1, 1), "whole"),
    ],
)
def test_bad_shapes_are_refused(shape, words):
    with pytest.raises(InvalidInputError, match=words):
        gemm(presets.chip("h200"), *shape)


def test_chips_without_buffer_or_hbm_have_costs():
    for name in ("wse-3", "dojo-d1"):
        cost = gemm(presets.chip(name), 4096, 4096, 4096)
        assert cost.hbm_bytes == 0
        assert cost.bound_s <= cost.time_s < 1


def test_a_chip_may_restrict_dataflows():
    chip = Accelerator.from_dict(
        {**presets.chip("tpuv4").to_dict(), "tuning": {"dataflows": ["ws"]}}
    )
    assert gemm(chip, 512, 512, 512).dataflow == "ws"
    free = gemm(presets.chip("tpuv4"), 512, 512, 512)
    assert free.time_s <= gemm(chip, 512, 512, 512).time_s
