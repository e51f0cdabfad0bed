"""Published communication volumes, as mappings written down by hand; and the sets behind them."""

import itertools
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
from mapping_cases import CLOSE, compiled, small
from reference import mapping_layouts as layouts
from reference import mapping_oracle as oracle
from reference.mapping_oracle import RECOMPUTE, OperatorMapping

from phaze_fast import _core
from phaze_fast.models import load
from phaze_fast.wafer import load_wafer
from phaze_fast.wafer.mapping.layout import Layout
from phaze_fast.wafer.mapping.operators import ROLES, WEIGHTS
from phaze_fast.wafer.mapping.problem import Problem, WaferTraining

WAFER = load_wafer("dram-wafer")
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
            group = [
                o for o in have if all(o[k] == die[k] for k in range(len(o)) if k not in slots)
            ]
            merged = {}
            for other in group:
                for position, terms in have[other].items():
                    merged[position] = merged.get(position, set()) | terms
            keep = slots if kind in ("reduce-scatter", "all-to-all") else ()
            new[die] = {p: t for p, t in merged.items() if layouts.meets(p, die, after, keep)}
            others = [o for o in group if o != die]
            if kind == "all-gather":
                sent = len(held) * len(others)
            elif (
                kind == "all-reduce"
            ):  # its part of the sum to each, the sum of its own part to each
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
    terms = {
        t for held in layouts.holdings(before, sizes).values() for p in held.values() for t in p
    }
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
    problem = Problem(load(name), WAFER, training, volume=True)
    mapping = problem.mapping(layout)
    op_mappings = np.zeros(len(problem.work.operators), dtype=_core.OP_MAPPING_DTYPE)
    for row, op in zip(op_mappings, problem.work.operators, strict=True):
        everywhere = (1 << len(_slots(layout))) - 1
        row["slots"] = [everywhere if role == role_of(op) else 0 for role in ROLES]
        row["mode"] = WEIGHTS.index(mode)
    mapping.assign(op_mappings)
    return problem, mapping


def _slots(layout):
    return [p for side in (layout.width, layout.height) for p in _primes(side)]


def _primes(number):
    return next(([p, *_primes(number // p)] for p in range(2, number + 1) if number % p == 0), [])


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
    expected = {
        "replicated": 2,
        "zero1": 2,
        "zero2": 1 + micro_batches,
        "zero3": 3 * micro_batches,
    }
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
