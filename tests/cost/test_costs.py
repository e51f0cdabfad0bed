"""Vector operators, attention, whole graphs: against the oracle, and what a graph's costs add up to."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference import gemm as oracle
from test_gemm import NO_ENERGY, cost_of, random_case, records

from phaze_fast import _core, models
from phaze_fast.cost import (
    attention_ops,
    cost_cache_clear,
    cost_cache_info,
    estimate_costs,
    gemm,
    operator_costs,
    product_ops,
    vector_ops,
)
from phaze_fast.errors import InvalidInputError, InvalidTypeError
from phaze_fast.hardware import ArchitectureSpace, Tuning, presets, tuning_record
from phaze_fast.opgraph import Strategy, layer_graph
from phaze_fast.wafer import load_wafer

VECTOR = _core.FUNCTIONS[4 : _core.FIRST_CONVOLUTION]


@given(st.integers(0, 2**32))
def test_vector_operators_are_those_of_the_oracle(seed):
    rng = random.Random(seed)
    _, chip, tuning, precision = random_case(rng)
    tuning.vector_launch_share = rng.choice([0.5, 1.0])
    function = rng.choice(VECTOR)
    rows, cols = rng.randint(1, 5000), rng.randint(1, 5000)
    ops = vector_ops(function, [rows], [cols])
    costs = (
        rng.choice([0.0, 1.0, 14.0]),
        rng.choice([0.0, 100.0]),
        rng.choice([1.0, 2.0]),
        rng.choice([0.8, 1.0, 1.5]),
        rng.choice([0, 1000]),
        rng.choice([1.0, 2.0]),
        rng.choice([1.0, 1.5]),
        rng.choice([0, 500]),
        rng.choice([0.0, 3.0]),
    )
    made, tuned = records(chip, tuning)
    tuned["vector_launch_share"] = tuning.vector_launch_share
    tuned["functions"][0, _core.FUNCTIONS.index(function)] = costs
    p = precision
    numbers = (p.in_bytes, p.out_bytes, p.acc_bytes, p.rate, 64.0, 2.0, 2.0)
    for one_core in (False, True):
        arguments = (ops, made, np.zeros(1, np.int32), tuned, numbers, one_core)
        (found,) = _core.op_costs(*arguments, NO_ENERGY, np.zeros(1), 1)
        moved = float(ops["read_bytes"][0]), float(ops["write_bytes"][0])
        wanted = oracle.vector_time(rows, cols, *moved, chip, tuning, *costs, one_core=one_core)
        assert found["time_s"] == pytest.approx(wanted, rel=1e-12)
        assert found["bound_s"] <= found["time_s"]
        assert found["time_s"] == _core.op_times(*arguments, 1)[0]
        assert found["bound_s"] == _core.op_bounds(*arguments, 1)[0]


@given(st.integers(0, 2**32))
def test_attention_is_that_of_the_oracle(seed):
    rng = random.Random(seed)
    _, chip, tuning, precision = random_case(rng)
    tuning.attention_unit_s = rng.choice([0.0, 1e-7])
    tuning.attention_least = rng.choice([1, 3, 16, 64, 128, 128])
    tuning.attention_most = rng.choice([128, 128, 256, 2048])
    tuning.attention_efficiency = rng.choice([0.6, 1.0])
    tuning.attention_backward_efficiency = rng.choice([0.6, 1.0])
    pairs, seq, width = rng.randint(1, 200), rng.randint(1, 4000), rng.choice([32, 64, 80, 128])
    causal, backward = rng.random() < 0.5, rng.random() < 0.5
    ops = attention_ops([pairs], [seq], [width], [causal], backward)
    for one_core in (False, True):
        (found,) = cost_of(ops, chip, tuning, precision, one_core)
        shape = (pairs, seq, seq, width, float(ops["read_bytes"][0]), float(ops["write_bytes"][0]))
        wanted = oracle.attention_time(*shape, causal, backward, chip, tuning, precision, one_core)
        assert found["time_s"] == pytest.approx(wanted, rel=1e-11)
        assert 0 < found["bound_s"] <= found["time_s"]
        rows = int(found["block_m"])
        if rows < 128:  # keys and values once per unit
            keys = min(seq, (seq + rows) / 2) if causal else seq
            units = pairs * -(-seq // rows)
            least = units * keys * width * 2 * precision.in_bytes
            assert found["port_bytes"] == found["buffer_bytes"] >= least


def test_attention_in_smaller_units_is_never_slower_and_spreads():
    die = load_wafer("wse3-like").chip
    whole = die.replace(tuning=Tuning())
    assert die.tuning.attention.least_queries == 1
    for pairs, causal, backward in itertools.product((1, 40, 5000), (False, True), (False, True)):
        ops = attention_ops([pairs], [512], [64], [causal], backward)
        (small,), (large,) = operator_costs(die, ops), operator_costs(whole, ops)
        assert small.time_s <= large.time_s
        assert small.bound_s == large.bound_s <= small.time_s
    ops = attention_ops([40], [512], [64], [False])
    (small,), (large,) = operator_costs(die, ops), operator_costs(whole, ops)
    # 160 units of 128 queries for 10,714 cores, or 20,480 of one query.
    assert large.time_s > 20 * small.time_s
    # Where all cores are busy anyway, keys need not be loaded more often.
    ops = attention_ops([10714 * 40], [128], [64], [False])
    assert operator_costs(die, ops)[0].time_s == operator_costs(whole, ops)[0].time_s


def test_energy_is_the_sum_of_its_events():
    chip = presets.chip("tpuv4")
    cost = gemm(chip, 2048, 2048, 2048)
    table = np.zeros(1, dtype=_core.ENERGY_DTYPE)
    prices = {"mac_j": 2.0, "local_byte_j": 3.0, "buffer_byte_j": 5.0, "hbm_byte_j": 7.0}
    for name, price in prices.items():
        table[name] = price
    made, tuned = np.zeros(1, dtype=_core.CHIP_DTYPE), tuning_record(Tuning())
    made[0] = tuple(chip.to_row()[name] for name in _core.CHIP_DTYPE.names)
    asked = (product_ops([(1, 2048, 2048, 2048)]), made, np.zeros(1, np.int32), tuned)
    (row,) = _core.op_costs(
        *asked, (2.0, 2.0, 4.0, 1.0, 64.0, 2.0, 2.0), False, table, np.array([11.0]), 1
    )
    moved = 3 * cost.port_bytes + 5 * cost.buffer_bytes + 7 * cost.hbm_bytes
    assert row["energy_j"] == pytest.approx(2 * 2048.0**3 + moved + 11 * cost.time_s)
    assert cost.energy_j > 2048**3 * 5.9e-13


# ---- graphs ----


def graph(name="llama2-7b", **strategy):
    return layer_graph(models.load(name), Strategy(**strategy))


def test_every_operator_is_priced_as_if_asked_alone():
    chips = [presets.chip("tpuv4"), presets.chip("h200"), presets.chip("tpuv4")]
    asked = graph()
    costs = estimate_costs(asked, chips)
    assert len(costs.graphs) == 2 * len(asked.layers)
    for i, flat in enumerate(costs.graphs):
        for c, chip in enumerate(chips):
            alone = operator_costs(chip, flat.ops)
            assert costs.time_s(i)[c].tolist() == [cost.time_s for cost in alone]
            assert costs.one_core_s(i, c)[0].tolist() == [cost.one_core_s for cost in alone]
            assert costs.energy_j(i)[c].tolist() == [cost.energy_j for cost in alone]
        assert (costs.bound_s(i) <= costs.time_s(i)).all()
    assert costs.evaluations < 2 * sum(len(flat) for flat in costs.graphs)
    assert costs.total_s().shape == (len(costs.graphs), 3)


def test_chips_that_differ_in_capacity_alone_are_priced_once():
    space = ArchitectureSpace.tpuv4_area().chips[:50].copy()
    both = np.concatenate([space, space])
    both["hbm_bytes"][50:] *= 2
    costs = estimate_costs(graph("bertlarge"), both)
    assert costs.evaluations == estimate_costs(graph("bertlarge"), space).evaluations
    times = costs.time_s(2)
    assert np.array_equal(times[:50], times[50:])


def test_products_are_priced_once_per_tensor_core_configuration():
    chips = ArchitectureSpace.tpuv4_area().chips
    fields = ["tensor_cores", "tensor_width", "tensor_depth", "buffer_bytes"]
    chosen = chips[:: len(chips) // 3000]
    asked = graph("gpt3-175b")
    costs = estimate_costs(asked, chosen)
    products, others = costs._tables
    assert len(products.time_s) == len(np.unique(chosen[fields])) < len(others.time_s)
    for c in (0, len(chosen) // 2, len(chosen) - 1):
        alone = estimate_costs(asked, chosen[c : c + 1])
        for g in range(len(costs.graphs)):
            assert costs.time_s(g, c).tobytes() == alone.time_s(g).tobytes()
            assert costs.energy_j(g, c).tobytes() == alone.energy_j(g).tobytes()


def test_threads_and_cache_give_the_same_bits():
    space = ArchitectureSpace.tpuv4_area().chips[:300]
    asked = graph("bertlarge")
    cost_cache_clear()
    one = estimate_costs(asked, space, threads=1)
    assert cost_cache_info()[:3] == (0, 2, 2)
    again = estimate_costs(asked, space, threads=2)
    assert cost_cache_info()[:2] == (2, 2)
    cost_cache_clear()
    two = estimate_costs(asked, space, threads=2)
    for i in range(len(one.graphs)):
        assert one.time_s(i).tobytes() == two.time_s(i).tobytes() == again.time_s(i).tobytes()
        assert one.one_core_s(i).tobytes() == two.one_core_s(i).tobytes()
    estimate_costs(asked, space, tuning=Tuning(efficiency=0.5))
    assert cost_cache_info().misses == 4


def test_answers_cannot_be_changed():
    costs = estimate_costs(graph("bertlarge"), presets.chip("tpuv4"))
    with pytest.raises(ValueError, match="read-only"):
        costs._tables[0].time_s[0, 0] = 1.0


def test_collectives_need_a_fabric():
    asked = graph(tp=4)
    with pytest.raises(InvalidInputError, match="fabric: .* has collectives"):
        estimate_costs(asked, presets.chip("h200"))
    costs = estimate_costs(asked, presets.chip("h200"), presets.fabric("dgx-h100"))
    block = next(i for i, g in enumerate(costs.graphs) if g.name.endswith("block/forward"))
    ops = costs.graphs[block].ops
    times = costs.time_s(block)[0]
    assert (times[ops["collective"] >= 0] > 0).all()
    alone = estimate_costs(asked, presets.chip("h200"), presets.fabric("phaze-flat"))
    assert alone.time_s(block)[0].sum() > times.sum()


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (lambda g: (g, []), InvalidInputError, "chips: an empty list"),
        (lambda g: ([1], presets.chip("h200")), InvalidTypeError, "graphs: int"),
        (lambda g: (g, np.zeros(3)), InvalidTypeError, "chips: dtype float64"),
        (lambda g: (g, np.zeros(3, _core.CHIP_DTYPE)), InvalidInputError, "chip record"),
    ],
)
def test_bad_questions(arguments, error, words):
    with pytest.raises(error, match=words):
        estimate_costs(*arguments(graph("bertlarge")))


def test_formats_scale_the_bytes_of_graphs():
    chip, asked = presets.chip("h200"), graph()
    totals = {}
    for dtype in ("bf16", "fp8", "tf32"):
        costs = estimate_costs(asked, chip, dtype=dtype)
        block = costs.graphs[2].ops
        op = int(np.flatnonzero(block["function"] == 0)[0])
        shape = [int(block[d][op]) for d in "mkn"]
        assert costs.time_s(2)[0, op] == pytest.approx(gemm(chip, *shape, dtype=dtype).time_s)
        totals[dtype] = costs.time_s(2).sum()
    assert totals["fp8"] < totals["bf16"] < totals["tf32"]


def test_no_block_fits_is_said():
    chip = presets.chip("tpuv4")
    starved = chip.replace(
        tensor_core=chip.tensor_core.replace(local_buffer_bytes=0),
        tuning=chip.tuning.replace(dataflows=("ws",)),
    )
    with pytest.raises(InvalidInputError, match="no block of the product fits"):
        gemm(starved, 512, 512, 512)
    with pytest.raises(InvalidInputError, match=r"chips\[1\].*no block"):
        estimate_costs(graph("bertlarge"), [chip, starved])


def test_records_say_nothing_of_other_formats():
    space = ArchitectureSpace.tpuv4_area().chips[:3]
    with pytest.raises(InvalidInputError, match="fp8"):
        estimate_costs(graph("bertlarge"), space, dtype="fp8")
    bad = space.copy()
    bad["hbm_stacks"][2] = -1
    with pytest.raises(InvalidInputError, match=r"chips\[2\]"):
        estimate_costs(graph("bertlarge"), bad)


def test_collectives_of_a_graph_alone_are_refused():
    layer = graph(tp=4).layers[1]
    with pytest.raises(InvalidInputError, match="over how many ranks"):
        estimate_costs(layer.forward, presets.chip("h200"), presets.fabric("dgx-h100"))


def test_a_mask_never_makes_attention_slower():
    chip = presets.chip("h200")
    for pairs, seq in ((132, 256), (264, 128), (66, 512), (1, 128), (500, 1000)):
        plain, causal = (
            operator_costs(chip, attention_ops([pairs], [seq], [128], [c]))[0].time_s
            for c in (False, True)
        )
        assert causal <= plain


def test_unknown_functions_and_formats_are_refused():
    with pytest.raises(InvalidInputError, match="did you mean 'gelu'"):
        vector_ops("gelo", [1], [1])
    with pytest.raises(InvalidInputError, match="fp4"):
        estimate_costs(graph("bertlarge"), presets.chip("h200"), dtype="fp4")
