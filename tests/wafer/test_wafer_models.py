"""Models with experts, encoder-decoders, and figures of the literature."""

import csv
import itertools
import math
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import wafer_benchmark
import wafer_score
from mapping_cases import CLOSE, compiled, packed, small
from reference import mapping_layouts as layouts
from reference import mapping_oracle as oracle
from reference.mapping_oracle import RECOMPUTE, OperatorMapping

from phaze_fast import _core, models
from phaze_fast.errors import InvalidInputError
from phaze_fast.wafer import (
    Effort,
    Layout,
    Problem,
    WaferTraining,
    compare_mappings,
    evaluate,
    load_wafer,
    step_energy,
    transfers,
)
from phaze_fast.wafer.mapping.details import local_specs
from phaze_fast.wafer.mapping.encoding import Encoding
from phaze_fast.wafer.mapping.operators import ROLES, WEIGHTS, workload
from phaze_fast.wafer.search.baselines import (
    System,
    Tuner,
    candidates_of,
    encode,
    megatron_op_mappings,
)

# ---- experts ----


MIXTRAL = models.load("mixtral-8x7b")
SMALL = MIXTRAL.replace(
    name="small-mixture", layers=4, hidden=512, heads=8, kv_heads=8, ffn=1024, seq=256, vocab=4096
)
DRAM = load_wafer("dram-wafer")
WAFER = DRAM.replace(columns=4, rows=2)
PROBLEM = Problem(SMALL, WAFER, WaferTraining(32))
LAYOUT = Layout(4, 2, 1, 8)
DATA = ("data",) * 3


def plan(ep):
    """Eight replicas; with or without their experts shared out."""
    op_mappings = megatron_op_mappings(PROBLEM, DATA, False, "zero1", ep)
    return encode(PROBLEM, LAYOUT, op_mappings)


@pytest.mark.parametrize("model", [MIXTRAL, SMALL], ids=lambda model: model.name)
def test_operators_have_the_models_parameters(model):
    work = workload(model)
    assert work.parameters == model.parameters()
    experts = [op for op in work.operators if op.expert]
    assert {op.name for op in experts} >= {"expert-up", "expert-gate", "expert-down"}
    assert {op.seq_rows for op in experts} == {8}
    assert {"dispatch", "weigh"} <= {work.operators[i].name for i in work.chain}


def test_tokens_reach_their_experts_by_an_all_to_all():
    """GShard (Lepikhin et al., 2020): each token goes to k experts and back, both passes."""
    moves = [t for t in transfers(PROBLEM, plan(True)) if t.op == "all-to-all"]
    routed = 8 * SMALL.seq * SMALL.moe.top_k * SMALL.hidden * 2
    ends = {("dispatch", "expert-gate"), ("expert-down", "weigh")}  # the chain's next operator
    for when in ("forward", "backward"):
        found = [t for t in moves if t.when == when]
        assert {(t.operator, t.target) for t in found} == ends
        assert [t.payload_bytes for t in found] == [routed / 8] * 2
        assert all(t.ranks == 8 for t in found)
    assert not [t for t in transfers(PROBLEM, plan(False)) if t.op == "all-to-all"]


def test_a_die_has_the_weights_of_its_experts():
    shared, whole = evaluate(PROBLEM, plan(True)), evaluate(PROBLEM, plan(False))
    experts = 4 * 8 * 3 * SMALL.hidden * SMALL.moe.expert_ffn
    state = shared.stages[0].state_bytes, whole.stages[0].state_bytes
    # Weights, gradients (2 bytes each) of an eighth of the experts instead of all; the optimiser's
    # 12 bytes are shared out either way.
    assert state[1] - state[0] == pytest.approx(4 * experts * 7 / 8)
    sums = [t for t in transfers(PROBLEM, plan(True)) if t.when == "step"]
    assert not [t for t in sums if t.operator.startswith("expert-")]


def test_the_work_is_the_same_however_experts_lie():
    """As many FLOPs; shared out, fewer weights pass a die's HBM, which saves time and energy."""
    shared, whole = evaluate(PROBLEM, plan(True)), evaluate(PROBLEM, plan(False))
    flops = [
        sum(float(spec.flops.sum()) for some in specs for spec in some if spec.k)
        for specs in (local_specs(PROBLEM, each.encoding) for each in (shared, whole))
    ]
    assert flops[0] == flops[1]
    joules = [step_energy(PROBLEM, each).operators_j for each in (shared, whole)]
    assert joules[0] < joules[1]
    assert shared.compute_s < whole.compute_s


def test_no_more_parts_than_experts():
    wide = load_wafer("dram-wafer").replace(columns=8, rows=2)
    problem = Problem(SMALL, wide, WaferTraining(32))
    op_mappings = megatron_op_mappings(problem, ("data",) * 4, False, "zero1", True)
    made = encode(problem, Layout(8, 2, 1, 16), op_mappings)
    with pytest.raises(InvalidInputError, match=r"rows: 16 parts of 8; expected at most 8"):
        evaluate(problem, made)


def test_experts_in_some_blocks_only_are_refused():
    mixed = SMALL.replace(moe=SMALL.moe.replace(dense_layers=1))
    with pytest.raises(InvalidInputError, match="expected one kind of block"):
        workload(mixed)


# ---- encoder-decoders on a mesh: one stage has a block of each in turn ----


T5 = models.load("t5-small")
SQUARE = DRAM.replace(columns=2, rows=2)
ON_T5 = Problem(T5, SQUARE, WaferTraining(8))
PAIR = Problem(T5, SQUARE.replace(rows=1), WaferTraining(2))
WHOLE = Layout(2, 2, 1, 8)


def test_a_block_has_an_encoders_and_a_decoders_operators():
    """All parameters but those of the encoder's last norm and of relative positions."""
    work = workload(T5)
    shared = T5.vocab * T5.hidden  # a tied table, held where it is looked up and where it ends
    positions = T5.parameters_by_part()["relative positions"]
    assert work.parameters == T5.parameters() + shared - T5.norm_parameters - positions
    names = [op.name for op in work.operators]
    assert {"encoder-q", "encoder-down", "cross-k", "cross-attention", "q", "down"} <= set(names)
    into = {names[e.target]: names[e.source] for e in work.edges if e.kind == "wrap"}
    assert into["encoder-attention-norm"] == "encoder-ffn-residual"
    assert into["attention-norm"] == "ffn-residual"
    memory = [names[e.target] for e in work.edges if names[e.source] == "encoder-ffn-residual"]
    assert {"cross-k", "cross-v"} <= set(memory)


def test_work_is_that_of_an_encoder_and_of_a_decoder_with_one_more_attention():
    """In products: 12 h^2 of an encoder's block, 16 h^2 of a decoder's, for feed-forwards of 4 h."""
    model = T5.replace(hidden=512, heads=8, ffn=2048)
    products = [op.spec for op in workload(model).operators if op.product and op.part == "block"]
    hidden = 512
    assert sum(spec.k * spec.n for spec in products) == (12 + 16) * hidden**2


def test_tensor_parallelism_sums_twice_in_an_encoder_and_three_times_in_a_decoder():
    """Shoeybi et al. (2019), for each sublayer: one sum forward, behind its row-wise product."""
    roles = megatron_op_mappings(ON_T5, ("tensor", "tensor"), False, "replicated")
    plan = encode(ON_T5, WHOLE, roles)
    sums = [t for t in transfers(ON_T5, plan) if t.op == "all-reduce" and t.when == "forward"]
    inside = [t.operator for t in sums if t.operator.split("-")[-1] in ("proj", "down")]
    assert sorted(inside) == ["cross-proj", "down", "encoder-down", "encoder-proj", "proj"]


@pytest.mark.parametrize("problem", [PROBLEM, PAIR], ids=["experts", "encoder-decoder"])
def test_search_bound_and_baselines(problem):
    quick = Effort(seeds=1, steps=500, promising=2)
    found = compare_mappings(problem, quick, ablations=False, equal_speed_memory=False)
    best = found.ours.best
    assert best.fits
    assert found.ours.bound_s <= best.time_s
    if problem is PAIR:
        assert best.encoding.layout.stages == 1
        assert "one stage" in found.ours.bound_space
    for each in found.baselines.values():
        assert not each.best.fits or best.time_s <= each.best.time_s
    again = Encoding.from_list(best.encoding.to_list())
    assert evaluate(problem, again).time_s == best.time_s


def test_the_oracle_agrees_on_every_term():
    """Its tensors between blocks, and into the first, are an encoder's and a decoder's own."""
    rng = random.Random(3)
    case = wafer_score.case_of(wafer_benchmark._layout(ON_T5, WHOLE))
    mapping = ON_T5.mapping(WHOLE)
    kept = [dict.fromkeys(range(len(case.ops)), oracle.STASH)]
    for _ in range(4):
        op_mappings = []
        for i in range(len(case.ops)):
            masks = rng.choice(mapping.choices(i))["slots"]
            slots = range(len(case.slots))
            roles = [oracle.ROLES[next(r for r in range(5) if masks[r] >> k & 1)] for k in slots]
            op_mappings.append(oracle.OperatorMapping(tuple(roles), rng.randrange(4)))
        mapping.assign(packed(op_mappings))
        score = mapping.score()[0]
        assert score["over_bytes"] == 0.0
        expected = oracle.evaluate(case, op_mappings, kept)[0]
        assert score["time_s"] == pytest.approx(expected, rel=1e-5)  # a case has seven digits


def test_what_encoder_decoders_are_not_accepted():
    with pytest.raises(InvalidInputError, match=r"stages: 2 is not accepted.*expected 1"):
        ON_T5.mapping(Layout(2, 1, 2, 8))
    with pytest.raises(InvalidInputError, match=r"3 encoder blocks.*as decoder blocks, 6"):
        workload(T5.replace(encoder_layers=3))


# ---- literature ----


VECTOR = ("norm", "dropout", "residual")


# ---- dies and digits ----


def play(before, after, sizes):
    """Run a conversion die by die: what each die ends with, and of each step V and what is sent.

    V counts the positions a die starts from, for an all-gather those it ends with.
    """
    have = layouts.holdings(before, sizes)
    sliced = [k for k in range(len(sizes)) if before[k] == "-" and after[k] in "BMN"]
    for die, held in have.items():
        have[die] = {p: terms for p, terms in held.items() if layouts.meets(p, die, after, sliced)}
    done = []
    for kind, slots, _ in layouts.steps(before, after, sizes):
        new, most = {}, 0
        for die, held in have.items():
            kept = [k for k in range(len(die)) if k not in slots]
            group = [o for o in have if all(o[k] == die[k] for k in kept)]
            merged = {}
            for other in group:
                for position, terms in have[other].items():
                    merged[position] = merged.get(position, set()) | terms
            keep = slots if kind in ("reduce-scatter", "all-to-all") else ()
            new[die] = {p: t for p, t in merged.items() if layouts.meets(p, die, after, keep)}
            others = [o for o in group if o != die]
            if kind == "all-gather":
                sent = len(held) * len(others)
            elif kind == "all-reduce":  # its part of each sum to others, its own sum to each
                sent = 2 * len(held) * len(others) / len(group)
            else:
                sent = sum(layouts.meets(p, o, after, slots) for o in others for p in held)
            most = max(most, sent)
        vector = max(len(h) for h in (new if kind == "all-gather" else have).values())
        done.append((kind, slots, vector, most))
        have = new
    return have, done


def converts(before, after, sizes):
    """Play a conversion: everyone ends with its part, and sends as much as the formulas say."""
    have, done = play(before, after, sizes)
    every = layouts.holdings(before, sizes).values()
    terms = {t for held in every for p in held.values() for t in p}
    for die, wanted in layouts.holdings(after, sizes).items():
        assert have[die] == dict.fromkeys(wanted, terms), (before, after, die)
    positions = math.prod(sizes) ** len(layouts.SPLITS)
    case = SimpleNamespace(rules={"volume": True}, sizes=sizes)
    for (kind, slots, share), (_, _, vector, sent) in zip(
        layouts.steps(before, after, sizes), done, strict=True
    ):
        assert vector == pytest.approx(share * positions, rel=CLOSE)
        assert sent == pytest.approx(layouts.seconds(case, kind, slots, vector), rel=CLOSE)


@pytest.mark.slow
def test_conversions_leave_every_die_with_its_part():
    for before, after in itertools.product("BMN-+", "BMN-"):
        for size in (2, 3, 4):
            converts(before, after, (size,))
    pairs = list(itertools.product("BMN-+", "BMN-"))
    for (b, a), (c, d) in itertools.product(pairs, repeat=2):
        converts(b + c, a + d, (2, 2))
    rng = random.Random(2)
    for _ in range(4):
        chosen = [rng.choice(pairs) for _ in range(3)]
        converts("".join(b for b, _ in chosen), "".join(a for _, a in chosen), (2, 2, 2))


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        *((split, split, None) for split in "BMN-"),
        *((a, b, "all-to-all") for a, b in itertools.permutations("BMN", 2)),
        *((split, "-", "all-gather") for split in "BMN"),
        *(("-", split, None) for split in "BMN"),
        *(("+", split, "reduce-scatter") for split in "BMN"),
        ("+", "-", "all-reduce"),
    ],
)
def test_sets_of_digits_need_the_collective_of_the_table(before, after, kind):
    assert {layouts.needed(before, after, size) for size in (2, 3, 5)} == {kind}


# ---- models on a rectangle, volumes only ----


def mapped(name, layout, role_of, mode="replicated", micro_batches=1):
    """A model whose operators each give one role to all slots; collectives cost what dies send."""
    training = WaferTraining(layout.micro_batch * micro_batches)
    problem = Problem(models.load(name), DRAM, training, volume=True)
    mapping = problem.mapping(layout)
    op_mappings = np.zeros(len(problem.work.operators), dtype=_core.OP_MAPPING_DTYPE)
    for row, op in zip(op_mappings, problem.work.operators, strict=True):
        everywhere = (1 << len(layouts.primes(layout.width) + layouts.primes(layout.height))) - 1
        row["slots"] = [everywhere if role == role_of(op) else 0 for role in ROLES]
        row["mode"] = WEIGHTS.index(mode)
    mapping.assign(op_mappings)
    return problem, mapping


def megatron(vectors):
    """Roles of tensor parallelism; `vectors` is what norms, dropouts and residuals do."""

    def role_of(op):
        if op.spec.kind in VECTOR:
            return vectors
        if op.name in ("proj", "down", "look-up"):
            return "inner"
        return "columns"

    return role_of


SIDES = [(2, 1), (4, 1), (2, 2), (4, 2)]


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("name", ["gpt3-13b", "llama2-7b", "bertlarge"])
def test_tensor_parallelism_sums_four_times_per_block(name, sides):
    """Shoeybi et al. 2019: two all-reduces forward and two backward of b s h elements."""
    layout, t = Layout(*sides, 1, 2), math.prod(sides)
    problem, mapping = mapped(name, layout, megatron("copies"))
    tensor = 2 * layout.micro_batch * problem.work.seq * problem.model.hidden
    score = mapping.score()[0]
    assert score["blocking_s"] == pytest.approx(4 * 2 * (t - 1) / t * tensor, rel=CLOSE)
    assert score["hidden_s"] == 0.0


@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("name", ["gpt3-13b", "llama2-7b"])
def test_sequence_parallelism_moves_as_much_and_gathers_again(name, sides):
    """Korthikanti et al. 2022: a reduce-scatter and an all-gather for each all-reduce; what the
    first product of each half takes is kept split and gathered once more for its weights."""
    layout, t = Layout(*sides, 1, 2), math.prod(sides)
    problem, mapping = mapped(name, layout, megatron("rows"))
    tensor = 2 * layout.micro_batch * problem.work.seq * problem.model.hidden
    score = mapping.score()[0]
    assert score["blocking_s"] == pytest.approx(4 * 2 * (t - 1) / t * tensor, rel=CLOSE)
    assert score["hidden_s"] == pytest.approx(2 * (t - 1) / t * tensor, rel=CLOSE)


@pytest.mark.parametrize(("vectors", "factor"), [("copies", 10 + 24 / 4), ("rows", 34 / 4)])
def test_kept_bytes_of_a_block(vectors, factor):
    """Korthikanti et al. 2022 without their scores: s b h (10 + 24/t) bytes, with sequence
    parallelism 34/t; statistics of norms and of attention are what they leave out."""
    layout, t = Layout(2, 2, 1, 2), 4
    problem, mapping = mapped("gpt3-13b", layout, megatron(vectors))
    ends = sum(
        op.kept_bytes / (1 if vectors == "copies" and op.spec.kind in VECTOR else t)
        for op in problem.work.operators
        if op.part != "block"
    )
    kept = mapping.stages(np.zeros(len(problem.work.operators), np.uint8))[0]["activation_bytes"][0]
    kept -= ends * layout.micro_batch
    elements = layout.micro_batch * problem.work.seq * problem.model.hidden
    assert kept == pytest.approx(problem.work.blocks * factor * elements, rel=2e-3)


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("name", ["gpt3-13b", "bertlarge"])
def test_data_parallelism_moves_what_zero_says(name, micro_batches):
    """Rajbhandari et al. 2020: 2 psi (d-1)/d per step in ZeRO-1, as when replicated; in ZeRO-2
    once per step and once per micro-batch; in ZeRO-3 3 psi (d-1)/d per pair of passes."""
    d, layout = 4, Layout(4, 1, 1, 4)
    moved = {}
    for mode in WEIGHTS[:4]:
        problem, mapping = mapped(name, layout, lambda op: "batch", mode, micro_batches)
        score = mapping.score()[0]
        moved[mode] = score["time_s"] / (2 * problem.work.parameters * (d - 1) / d)
        assert score["blocking_s"] == 0.0
    expected = {"replicated": 2, "zero1": 2, "zero2": 1 + micro_batches, "zero3": 3 * micro_batches}
    assert moved == pytest.approx(expected, rel=CLOSE)


@pytest.mark.parametrize("mode", WEIGHTS[:4])
def test_states_of_zero(mode):
    """Rajbhandari et al. 2020: of 16 psi bytes 2 + 2 + 12, 2 + 2 + 12/d, 2 + 14/d and 16/d stay."""
    d, layout = 4, Layout(2, 2, 1, 4)
    problem, mapping = mapped("bertlarge", layout, lambda op: "batch", mode)
    state = mapping.stages()[0]["state_bytes"][0] / problem.work.parameters
    expected = {"replicated": 16, "zero1": 4 + 12 / d, "zero2": 2 + 14 / d, "zero3": 16 / d}
    assert state == pytest.approx(expected[mode], rel=CLOSE)


# ---- AccPar ----

TYPES = {"I": "B", "II": "K", "III": "N"}
# Song et al. 2020, table of conversions between layers for equal halves: parts of F forward and of
# E backward that each of two accelerators fetches.
ACCPAR = {
    ("I", "I"): (0.0, 0.0),
    ("I", "II"): (0.25, 0.25),
    ("I", "III"): (0.5, 0.0),
    ("II", "I"): (0.0, 0.5),
    ("II", "II"): (0.0, 0.5),
    ("II", "III"): (0.0, 0.0),
    ("III", "I"): (0.25, 0.25),
    ("III", "II"): (0.0, 0.0),
    ("III", "III"): (0.5, 0.0),
}


@pytest.mark.parametrize("pair", ACCPAR)
def test_accpar_conversions_between_two_layers(pair):
    """AccPar sums first (F behind a split inner dimension, E behind split columns) and cuts the sum
    afterwards; here what is summed straight into a split is a reduce-scatter: half of it."""
    case, tensor = small(2, volume=1), 3.0
    for op in case.ops:
        op.product = True
    case.edges = [case.edges[0]._replace(bytes=tensor)]
    op_mappings = [OperatorMapping((TYPES[kind],)) for kind in pair]
    forward, backward, *_ = oracle.tensor_terms(case, op_mappings, 0, oracle.INSIDE)
    assert compiled(case, op_mappings).score()["blocking_s"][0] == pytest.approx(forward + backward)
    sums_f, sums_e = pair[0] == "II", pair[1] == "III"
    whole_f, whole_e = pair[1] == "III", pair[0] == "II"  # who takes it wants all of it
    f, e = (share * tensor for share in ACCPAR[pair])
    assert forward == pytest.approx(f + (sums_f and (1.0 if whole_f else 0.5) * tensor))
    assert backward == pytest.approx(e + (sums_e and (1.0 if whole_e else 0.5) * tensor))
    theirs = f + e + (sums_f + sums_e) * tensor
    cheaper = (sums_f and not whole_f) + (sums_e and not whole_e)
    assert forward + backward == pytest.approx(theirs - 0.5 * cheaper * tensor)


@pytest.mark.parametrize(("kind", "moved"), [("I", 1.0), ("II", 0.0), ("III", 0.0)])
def test_accpar_sums_weight_gradients_of_a_split_batch_alone(kind, moved):
    case = small(1, volume=1, step_bytes=0.0)
    score = compiled(case, [OperatorMapping((TYPES[kind],))]).score()[0]
    weights = case.rules["gradient_bytes"] * case.tables["parameters"][0, (1, 1, 1, 1)]
    assert score["tail_s"] == pytest.approx(moved * weights)


# ---- recomputation ----


@pytest.mark.parametrize(
    ("name", "op", "sums"),
    [
        ("gpt3-13b", "attention-residual", 1),  # of proj, whose dropout keeps its mask alone
        ("gpt3-13b", "attention-norm", 0),
        ("gpt3-13b", "activation", 0),
        ("llama2-7b", "attention-residual", 1),
        ("bertlarge", "ffn-residual", 1),
    ],
)
def test_recomputation_runs_the_collectives_of_what_it_runs(name, op, sums):
    """Chen et al. 2016: an output comes again from what is kept, with all that lies between."""
    layout, t = Layout(4, 1, 1, 2), 4
    problem, mapping = mapped(name, layout, megatron("copies"))
    names = [o.name for o in problem.work.operators]
    given = np.zeros(len(names), np.uint8)
    given[names.index(op)] = RECOMPUTE
    tensor = 2 * layout.micro_batch * problem.work.seq * problem.model.hidden
    more = mapping.stages(given)[0]["load_s"][0] - mapping.stages(given * 0)[0]["load_s"][0]
    expected = problem.work.blocks * sums * 2 * (t - 1) / t * tensor
    assert more == pytest.approx(expected, abs=1.0)


# ---- measured ----


GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "cerebras_throughput.csv"
WAFERS = {"CS-2": "wse2-like", "CS-3": "wse3-like"}
# docs/wafer.md: predicted over measured, weights streamed as these systems do, and the layout in
# which that is fastest of all.
EXPECTED = {
    ("CS-2", "bert-large"): (3.56, Layout(74, 1, 1, 518)),
    ("CS-2", "gpt-j-6b"): (1.37, Layout(80, 1, 1, 10)),
    ("CS-3", "gpt-j-6b"): (1.17, Layout(80, 1, 1, 15)),
}


def measured():
    lines = [line for line in GOLDEN.read_text().splitlines() if not line.startswith("#")]
    return list(csv.DictReader(lines))


def model_of(name):
    if name == "bert-large":
        return models.load("bertlarge")
    sizes = models.load("gpt-7.5b").to_dict()  # of GPT-J: the public configuration's
    for each in ("published_parameters", "published_digits", "sources"):
        sizes.pop(each)
    return models.TransformerModel(
        **sizes | {"name": name, "layers": 28, "heads": 16, "vocab": 50257, "dropout": False}
    )


@pytest.mark.parametrize("row", measured(), ids=lambda row: f"{row['system']}-{row['model']}")
def test_weight_streaming_beside_what_was_measured(row):
    systems = int(row["systems"])
    training = WaferTraining(int(row["batch"]) // systems, seq=int(row["sequence"]))
    problem = Problem(model_of(row["model"]), WAFERS[row["system"]], training)
    expected, layout = EXPECTED[row["system"], row["model"]]
    best = Tuner(problem).best([layout], candidates_of(problem, System("pairs", ("stream",))))
    assert best is not None
    assert best.fits
    rate = systems * training.global_batch / best.time_s
    assert rate / float(row["samples_per_s"]) == pytest.approx(expected, rel=0.01)
