"""What the compiled evaluation of mappings refuses, one line for each fault."""

import numpy as np
import pytest
from mapping_cases import TABLES, arguments, compiled, packed, small
from reference.mapping_oracle import OFFLOAD, RECOMPUTE, STASH, OperatorMapping

from phaze_fast import _core
from phaze_fast.errors import InvalidInputError

# ---- bad input ----


def with_field(array, name, value):
    changed = array.copy()
    changed[name] = value
    return changed


NAN = float("nan")
BROKEN = {
    "slots: not an array": lambda a: {"slots": [(0, 2, 1)]},
    "slots: wrong type": lambda a: {"slots": np.zeros(1, np.int32)},
    "slots: axis": lambda a: {"slots": with_field(a["slots"], "axis", 2)},
    "slots: size": lambda a: {"slots": with_field(a["slots"], "size", 1)},
    "slots: too many": lambda a: {"slots": np.repeat(a["slots"], 11)},
    "ops: none": lambda a: {"ops": a["ops"][:0]},
    "ops: too many": lambda a: {"ops": np.repeat(a["ops"], 25)},
    "edges: from": lambda a: {"edges": with_field(a["edges"], "from", -1)},
    "edges: to": lambda a: {"edges": with_field(a["edges"], "to", 2)},
    "edges: backwards": lambda a: {"edges": with_field(a["edges"], "from", 1)},
    "edges: kind": lambda a: {"edges": with_field(a["edges"], "kind", 4)},
    "edges: bytes": lambda a: {"edges": with_field(a["edges"], "bytes", NAN)},
    "rules: two": lambda a: {"rules": np.repeat(a["rules"], 2)},
    "rules: capacity": lambda a: {"rules": with_field(a["rules"], "capacity_bytes", 0.0)},
    "rules: links": lambda a: {"rules": with_field(a["rules"], "x_bytes_per_s", NAN)},
    "rules: micro_batches": lambda a: {"rules": with_field(a["rules"], "micro_batches", 0)},
    "rules: modes": lambda a: {"rules": with_field(a["rules"], "modes", 0)},
    "rules: hop": lambda a: {"rules": with_field(a["rules"], "hop_s", NAN)},
    "rules: memory rate": lambda a: {"rules": with_field(a["rules"], "memory_bytes_per_s", 0.0)},
    "rules: stream rate": lambda a: {"rules": with_field(a["rules"], "stream_capacity_bytes", 1.0)},
    "divisors: one is missing": lambda a: {"divisors": np.array([1, 4], np.int32)},
    "divisors: falling": lambda a: {"divisors": a["divisors"][::-1].copy()},
    "column: short": lambda a: {"column": a["column"][:-1]},
    "column: large": lambda a: {"column": a["column"] + 100},
    "column: none": lambda a: {"column": np.full_like(a["column"], -1)},
    "tables: one is short": lambda a: {"live_bytes": a["live_bytes"][:-1]},
    "tables: sizes": lambda a: {name: a[name][:-1] for name in TABLES.values()},
    **{
        f"{name}: {value}": lambda a, name=name, v=value: {name: np.full_like(a[name], v)}
        for name in TABLES.values()
        for value in (NAN, -1.0)
    },
    "blocks: none": lambda a: {"blocks": a["blocks"][:0]},
    "blocks: negative": lambda a: {"blocks": -a["blocks"]},
    "boundary_s: size": lambda a: {"boundary_s": np.zeros(2)},
    "boundary_s: value": lambda a: {"boundary_s": np.full(1, NAN)},
    "chain: none": lambda a: {"chain": a["chain"][:0]},
    "chain: twice": lambda a: {"chain": np.array([0, 0, 1], np.int32)},
    "chain: outside": lambda a: {"chain": np.array([0, 2], np.int32)},
    "chain: no edge": lambda a: {"edges": a["edges"][:0]},
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_problems_are_refused(name):
    given = arguments(small())
    if name == "divisors: one is missing":
        given = arguments(small(slots=((0, 2, 1), (0, 2, 2))))
        given["column"] = np.zeros(16, np.int32)
    with pytest.raises(InvalidInputError, match=r"^\w+: .*"):
        _core.Mapping(**(given | BROKEN[name](given)))


def test_op_mappings_and_outputs_that_are_not_accepted_are_refused():
    case = small()
    case.ops[0].roles, case.ops[0].outputs = "BN", (STASH, RECOMPUTE)
    mapping, good = compiled(case), packed([OperatorMapping(("B",)), OperatorMapping(("K",))])
    for name in ("score", "stages", "op_mappings"):
        with pytest.raises(InvalidInputError, match="op_mappings: none yet"):
            getattr(mapping, name)()
    for bad in (
        OperatorMapping(("M",)),
        OperatorMapping(("-",)),
        OperatorMapping(("B",), 1),
        OperatorMapping(("B",), 9),
        OperatorMapping(("B",), 0, 4),
    ):
        with pytest.raises(InvalidInputError, match="op_mappings: operator 0 breaks"):
            mapping.assign(packed([bad, OperatorMapping(("K",))]))
    for bad in (good[:1], good.tolist(), good["slots"], np.repeat(good, 2)):
        with pytest.raises(InvalidInputError, match="op_mappings: "):
            mapping.assign(bad)
    mapping.assign(good)
    for op in (-1, 2):
        with pytest.raises(InvalidInputError, match="op: "):
            mapping.change(op, good[:1])
        with pytest.raises(InvalidInputError, match="op: "):
            mapping.choices(op)
    overlapping = with_field(good[:1], "slots", [1, 0, 1, 0, 0])
    with pytest.raises(InvalidInputError, match="op_mappings: operator 0 breaks"):
        mapping.change(0, overlapping)
    for bad in ([0], [0, 1], [OFFLOAD, 0], [3, 0]):
        with pytest.raises(InvalidInputError, match="outputs: "):
            mapping.score(np.array(bad, np.uint8))
    with pytest.raises(InvalidInputError, match="outputs: "):
        mapping.score(np.zeros(2))
    assert mapping.score(np.array([RECOMPUTE, 0], np.uint8)).shape == (1,)
    assert mapping.op_mappings().tobytes() == good.tobytes()
