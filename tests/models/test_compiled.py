"""Steps as torch.compile runs them: cuts against enumeration, fused kernels against laws."""

import math
from dataclasses import replace
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st
from recordings import Recording

from phaze_fast.models import expanded, from_hf
from phaze_fast.models.aten import figures
from phaze_fast.models.compiled import FUSED, compiled
from phaze_fast.models.partition import JointGraph, cheapest_stores

# ---- what is stored: minimum cuts ----


@st.composite
def joint_graphs(draw):
    """A few tensors of a forward pass, each computed from earlier ones, and what reads them."""
    count = draw(st.integers(2, 8))
    inputs = [()]
    for at in range(1, count):
        inputs.append(tuple(sorted(draw(st.sets(st.integers(0, at - 1), max_size=2)))))
    wanted = draw(st.sets(st.integers(0, count - 1), min_size=1))
    fixed = draw(st.sets(st.integers(0, count - 1)))
    fixed |= {at for at in range(count) if not inputs[at]}
    costs = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    inputs.append(tuple(sorted(wanted)))  # the backward pass, as one tensor
    readers = [tuple(r for r, read in enumerate(inputs) if at in read) for at in range(count + 1)]
    graph = JointGraph(
        bytes=[float(cost) for cost in [*costs, 0]],
        inputs=inputs,
        readers=readers,
        backward=[False] * count + [True],
        fusible=[True] * (count + 1),
        recomputable=[True] * (count + 1),
        free=[False] * (count + 1),
    )
    return graph, fixed, [float(cost) for cost in costs] + [0.0]


def is_enough(graph, fixed, stored):
    """Whether all that the backward pass reads is stored or can be computed from what is."""

    def known(at):
        return at in stored or (at not in fixed and all(map(known, graph.inputs[at])))

    return all(map(known, graph.inputs[-1]))


@given(joint_graphs())
@settings(deadline=None)
def test_the_stored_tensors_are_the_cheapest_of_all_choices(case):
    graph, fixed, costs = case
    stored = cheapest_stores(graph, fixed, costs)
    tensors = range(len(costs) - 1)
    choices = (c for size in range(len(costs)) for c in combinations(tensors, size))
    best = min(sum(costs[at] for at in c) for c in choices if is_enough(graph, fixed, set(c)))
    free = {at for at in tensors if costs[at] == 0}
    assert is_enough(graph, fixed, stored | free)
    assert sum(costs[at] for at in stored) == best


# ---- kernels: random steps with a backward pass ----


class Step(Recording):
    """A recorded step, written as a module and its autograd would run it."""

    backward = False

    def array(self, *shape, parameter=False):
        made = super().array(*shape, parameter=parameter)
        if parameter:
            self.parameters[made.storage] = math.prod(shape)
        return made

    def run(self, name, reads, written):
        self.call(name, reads, [written], self.backward, (), self.sequence)
        return written

    def save(self, array):
        if not array.parameter:
            super().save(array, ())


WIDTH = 8
OPERATORS = ("add", "mul", "silu", "mm", "mean")


def recorded(program, rows):
    """Record a program, forward and backward, for a number of rows."""
    step = Step(rows)
    values = [step.array(rows, WIDTH)]
    step.writer[values[0].storage] = -1
    tape = []
    for name, first, second in program:
        step.sequence += 1
        a, b = (values[at % len(values)] for at in (first, second))
        reads = [a, b] if name in ("add", "mul") else [a]
        if name == "mm":
            reads.append(step.array(WIDTH, WIDTH, parameter=True))
        shape = (rows, 1) if name == "mean" else (rows, WIDTH)
        out = step.run(name, reads, step.array(*shape))
        for array in reads if name in ("mul", "silu", "mm") else ():
            step.save(array)
        tape.append((step.sequence, name, reads, out))
        values.append(out if name != "mean" else step.run("mul", [a, out], step.array(rows, WIDTH)))
        if name == "mean":
            step.save(a)
            step.save(out)
            tape.append((step.sequence, "mul", [a, out], values[-1]))
    differentiate(step, tape, values[-1])
    return step


def differentiate(step, tape, last):
    step.backward = True
    gradients = {last.storage: step.array(*last.shape)}
    step.writer[gradients[last.storage].storage] = -1
    for sequence, name, reads, out in reversed(tape):
        if out.storage not in gradients:
            continue
        step.sequence, upstream = sequence, gradients[out.storage]
        for at, array in enumerate(reads):
            others = {"mul": [reads[1 - at]] if len(reads) > 1 else [], "silu": [array]}
            rest = reads[1 - at : 2 - at] if name == "mm" else others.get(name, [])
            kind = {"silu": "silu_backward", "mean": "div", "add": "clone"}.get(name, name)
            own = step.run(kind, [upstream, *rest], step.array(*array.shape))
            if array.storage in gradients:
                total = [gradients[array.storage], own]
                own = step.run("add", total, step.array(*array.shape))
            gradients[array.storage] = own


programs = st.lists(
    st.tuples(st.sampled_from(OPERATORS), st.integers(0, 9), st.integers(0, 9)),
    min_size=1,
    max_size=12,
)


def moved(step):
    return sum(a.bytes for call in step.calls for a in (*call.reads, *call.writes))


def stored(step):
    arrays = {one.array.storage: one.array.held_bytes for one in step.saved}
    return sum(arrays.values())


def products(step):
    return sorted(f.sizes for f in map(figures, step.calls) if f.flops)


@given(programs)
@settings(deadline=None)
def test_a_compiled_step_does_the_same_and_moves_no_more(program):
    eager = recorded(program, 4)
    small, large = compiled(recorded(program, 2), eager)
    assert products(large) == products(eager)
    assert moved(large) <= moved(eager)
    assert stored(large) <= stored(eager)
    assert [call.name for call in small.calls] == [call.name for call in large.calls]


@given(programs)
@settings(deadline=None)
def test_kernels_read_what_was_written_before(program):
    eager = recorded(program, 4)
    _, step = compiled(recorded(program, 2), eager)
    made = {a.storage for call in eager.calls for a in call.writes}
    written = {a.storage for call in step.calls for a in call.writes}
    seen = set()
    for at, call in enumerate(step.calls):
        inside = {a.storage for a in call.reads} & (made | written)
        assert inside <= seen
        assert all(source < at for source in call.sources)
        seen |= {a.storage for a in call.writes}
    read = {a.storage for call in eager.calls for a in call.reads}
    results = {a.storage for call in eager.calls for a in call.writes} - read
    assert results <= written


def test_a_chain_is_one_kernel_and_its_backward_pass_computes_it_again():
    program = [("mm", 0, 0), ("silu", 1, 0), ("mul", 2, 1), ("mm", 3, 0)]
    step, _ = compiled(recorded(program, 2), recorded(program, 4))
    names = [call.name for call in step.calls if not call.backward]
    assert names == ["mm", f"{FUSED}_silu_mul", "mm"]
    fused = [call for call in step.calls if call.name.startswith(FUSED) and call.backward]
    assert len(fused) == 1  # the activation again, both of its gradients, and their sum
    assert len(fused[0].reads) == 2
    assert len(fused[0].writes) == 1


def test_constants_of_positions_make_a_kernel_costlier():
    step = [recorded([("mm", 0, 0), ("silu", 1, 0)], rows) for rows in (2, 4)]
    for one in step:
        table = one.array(one.samples, WIDTH)
        call = next(c for c in one.calls if c.name == "silu")
        at = one.calls.index(call)
        one.calls[at] = replace(call, name="mul", reads=(*call.reads, table))
    small, _ = compiled(*step)
    kernel = next(c for c in small.calls if c.name == f"{FUSED}_mul")
    assert kernel.options["function"] == "rotary"
    plain, _ = compiled(*(recorded([("mm", 0, 0), ("silu", 1, 0)], rows) for rows in (2, 4)))
    kernel = next(c for c in plain.calls if c.name == f"{FUSED}_silu")
    assert kernel.options["function"] == "copy"


# ---- branches of transformers ----

BERT = {
    "model_type": "bert",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "vocab_size": 512,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def test_compiled_encoders_attend_operator_by_operator_in_fp32():
    seq, heads, width = 64, 4, 16
    eager, whole = (expanded(from_hf(BERT), seq, compiles) for compiles in (False, True))
    blocks = [next(x for x in graph.layers if x.count > 1) for graph in (eager, whole)]
    names = [[op.kind for op in (*block.forward, *block.backward)] for block in blocks]
    assert "attention" in names[0]
    assert not {"attention", "attention-backward"} & set(names[1])
    scores = [op for op in (*blocks[1].forward, *blocks[1].backward) if op.b == heads]
    assert sum(op.flops for op in scores) == 6 * 2.0 * heads * seq * seq * width
    stored = {tensor.bytes for tensor in blocks[1].saved}
    assert 4.0 * heads * seq * seq in stored  # shares of attention
    assert 4.0 * heads * seq * width in stored  # queries, keys and values
