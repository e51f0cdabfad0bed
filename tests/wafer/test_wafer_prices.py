"""What parts of operators cost on a die: as operators of their own, and never less than a share."""

import pytest

from phaze_fast import models
from phaze_fast.cost import attention_ops, operator_costs, product_ops, vector_ops
from phaze_fast.wafer import Layout, Problem, WaferTraining, load_wafer
from phaze_fast.wafer.mapping.problem import combination, network_chip
from phaze_fast.wafer.mapping.problem import operator_costs as wafer_costs
from phaze_fast.wafer.search.bounds import roofline, work_bound
from phaze_fast.wafer.search.result import Effort
from phaze_fast.wafer.search.search import search_mapping

QUICK = Effort(seeds=1, steps=1500, promising=2)


@pytest.mark.slow
def test_explicit_attention_is_mapped_too():
    """Scores and softmax as operators of their own, heads in groups or not."""
    fused = models.load("bertlarge")
    times = []
    for model in (fused, fused.replace(attention="eager"), fused.replace(kv_heads=4)):
        problem = Problem(model, load_wafer("dram-wafer"), WaferTraining(16))
        times.append(search_mapping(problem, QUICK).best.time_s)
        for dies, micro_batch in ((1, 1), (6, 4)):
            least = problem.least_work(Layout(dies, 1, 1, micro_batch))
            assert roofline(problem).work.block_s * micro_batch / dies <= least.block_s
    assert times[1] > times[0] > times[2]


@pytest.mark.parametrize("model", ["bertlarge", "llama2-70b", "gpt2"])
@pytest.mark.parametrize("wafer", ["dram-wafer", "dojo-tile-like", "wse2-like"])
def test_no_part_of_an_operator_takes_less_than_its_share_of_the_roofline(model, wafer):
    slow = load_wafer(wafer).die.replace(
        chip=load_wafer(wafer).die.chip.replace(launch_latency_s=1e-4)
    )
    given = load_wafer(wafer).replace(die=slow)
    problem = Problem(models.load(model), given, WaferTraining(64))
    over = roofline(problem)
    for dies, micro_batch in ((1, 1), (4, 2), (12, 16), (35, 64)):
        layout = Layout(dies, 1, 1, micro_batch)
        least = problem.least_work(layout)
        share = micro_batch / dies
        assert over.work.block_s * share <= least.block_s
        assert over.work.before_s * share <= least.before_s
        assert over.work.behind_s * share <= least.behind_s
        every = problem.work.blocks * least.block_s + least.before_s + least.behind_s
        assert work_bound(problem, layout) == pytest.approx(64 / micro_batch * every)


def test_parts_of_operators_are_priced_as_the_operators_they_are():
    """A split product, norm and attention cost what the same sizes cost on their own."""
    model, wafer = models.load("llama2-70b"), load_wafer("dram-wafer")
    problem = Problem(model, wafer, WaferTraining(64))
    forward, backward, kept, _, parameters, of_weights = problem.price_table(12, 16)
    at = {op.name: i for i, op in enumerate(problem.work.operators)}
    seq, hidden = problem.work.seq, model.hidden

    def seconds(ops):
        return float(sum(cost.time_s for cost in operator_costs(wafer.chip, ops)))

    # Batch in 2, rows in 3, columns in 2: 8 sequences of 1366 rows, half of the columns.
    split = combination(12, (2, 3, 2, 1))
    rows = 8 * -(-seq // 3)
    up, width = at["up"], model.ffn // 2
    assert forward[up, split] == seconds(product_ops([(1, rows, hidden, width)]))
    assert backward[up, split] == seconds(
        product_ops([(1, rows, width, hidden), (1, hidden, rows, width)])
    )
    assert of_weights[up, split] == seconds(product_ops([(1, hidden, rows, width)]))
    assert parameters[up, split] == hidden * width
    # Columns in 4, inner in 3: the rows of all 16 sequences.
    down = at["down"]
    split = combination(12, (1, 1, 4, 3))
    inner = -(-model.ffn // 3)
    assert forward[down, split] == seconds(product_ops([(1, 16 * seq, inner, hidden // 4)]))
    # Rows of a norm; all 12 dies.
    norm = next(i for i, op in enumerate(problem.work.operators) if op.spec.kind == "norm")
    split = combination(12, (4, 3, 1, 1))
    rows = 4 * -(-seq // 3)
    assert forward[norm, split] == seconds(vector_ops("rmsnorm", [rows], [hidden]))
    # Batch in 4, columns in 3: 4 sequences, and 3 of 8 groups of heads of 64.
    attention = at["attention"]
    split = combination(12, (4, 1, 3, 1))
    pairs = 4 * 3 * (model.heads // model.kv_heads)
    alone = operator_costs(
        wafer.chip, attention_ops([pairs], [seq], [hidden // model.heads], [True])
    )[0]
    assert forward[attention, split] == pytest.approx(alone.time_s, rel=0.05)  # keys are shared
    assert kept[attention, split] > 0


def test_products_share_operands_over_the_network_of_a_die():
    wafer = load_wafer("dram-wafer")
    slow = network_chip(wafer.replace(die=wafer.die.replace(network_bytes_per_s=1e9)))
    specs = [(op.spec, 1) for op in Problem("bertlarge", wafer).work.operators]
    seconds, joules = wafer_costs(wafer.chip, slow, specs)
    products = 0
    for at, (spec, count) in enumerate(specs):
        product = "gemm" in spec.kind or spec.kind.startswith("attention")
        own = slow if product else wafer.chip
        isolated_s, alone_j = wafer_costs(own, own, [(spec, count)])
        assert (seconds[at], joules[at]) == (isolated_s[0], alone_j[0])
        products += product and seconds[at] > wafer_costs(wafer.chip, wafer.chip, [(spec, 1)])[0][0]
    assert products > 0
