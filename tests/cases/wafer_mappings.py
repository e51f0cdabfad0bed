"""Legal operator mappings at random, for tests of encodings and of what they send."""

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from phaze_fast import models
from phaze_fast.wafer import Layout, Problem, WaferTraining, load_wafer, megatron
from phaze_fast.wafer.mapping.encoding import Encoding
from phaze_fast.wafer.mapping.mesh import MESH_ALGORITHMS
from phaze_fast.wafer.mapping.operators import OUTPUTS

DRAM = load_wafer("dram-wafer")
STREAM = load_wafer("dram-stream-wafer")


def problem_of(name="bertlarge", wafer=DRAM):
    return Problem(models.load(name), wafer, WaferTraining(64))


BERT = problem_of()
STREAMED = problem_of(wafer=STREAM)
LAYOUT = Layout(4, 2, 3, 8)
PLAN = megatron(BERT, LAYOUT, tp=4)

_MAPPINGS = {}


def compiled(problem, layout):
    """A compiled mapping and every operator's choices, made once."""
    key = (problem, layout)
    if key not in _MAPPINGS:
        mapping = problem.mapping(layout)
        count = len(problem.work.operators)
        _MAPPINGS[key] = mapping, [mapping.choices(i) for i in range(count)]
    return _MAPPINGS[key]


def random_op_mappings(problem, layout, rng):
    """Legal operator mappings, and legal outputs for every stage."""
    _, choices = compiled(problem, layout)
    op_mappings = np.array([some[rng.randrange(len(some))] for some in choices])
    outputs = np.zeros((layout.stages, len(op_mappings)), dtype=np.uint8)
    for i, op in enumerate(problem.work.operators):
        if op.parameters:  # elsewhere there is nothing to keep
            op_mappings[i]["mode"] = rng.randrange(len(problem.modes))
        op_mappings[i]["algorithm"] = rng.randrange(len(MESH_ALGORITHMS))
        accepted = [OUTPUTS.index(name) for name in problem.accepted_outputs(i)]
        if op.part == "block":
            outputs[:, i] = [rng.choice(accepted) for _ in range(layout.stages)]
    return op_mappings, outputs.reshape(-1)


layouts_of = st.sampled_from([Layout(1, 1, 3, 8), Layout(4, 2, 3, 8), Layout(2, 3, 2, 16)])
seeds = st.integers(0, 2**32)


def changed(operator, encoding=PLAN, **changes):
    """The plan with one operator's mapping changed."""
    op_mappings = tuple(
        replace(op_mapping, **changes) if op_mapping.operator == operator else op_mapping
        for op_mapping in encoding.operator_mappings
    )
    return Encoding(encoding.layout, op_mappings)
