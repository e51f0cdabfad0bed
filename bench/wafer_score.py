"""Score a mapping of a wafer benchmark instance: plain Python, nothing of the package's own.

    python3 bench/wafer_score.py INSTANCE.json ANSWER.json

The rules are those of docs/wafer.md as tests/reference/mapping_oracle.py writes them down; it
shares no code with the search. Prints one line of JSON, or one line that says what is wrong (exit
code 2). docs/wafer-benchmark.md describes both files.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from reference import mapping_oracle as oracle

ROLES = {"batch": "B", "rows": "M", "columns": "N", "inner": "K", "copies": "R"}
COLLECTIVES = ("auto", "ordered", "ring", "split")
OUTPUTS = ("stash", "recompute", "offload")
TABLES = ("forward", "backward", "stash", "live", "parameters", "weight_grad")
RUNS_PER_AXIS = 3


class RefusedError(ValueError):
    """An answer that breaks a rule; says which."""


def case_of(layout: dict[str, Any]) -> oracle.Case:
    """Read one layout of an instance as the oracle's problem."""
    ops, tables = [], {name: {} for name in TABLES}
    for i, op in enumerate(layout["operators"]):
        outputs = tuple(OUTPUTS.index(name) for name in op["outputs"])
        roles = "".join(ROLES[name] for name in op["roles"])
        fields = {k: op[k] for k in ("product", "kept", "expert", "stat_bytes", "gather_bytes")}
        fields["overlaps"] = {"takes": "input", "makes": "output"}.get(op.get("beside", ""), "")
        ops.append(oracle.Op(op["part"], roles, outputs, limit=tuple(op["limit"]), **fields))
        for row in op["splits"]:
            cut, values = tuple(row[:4]), row[4:]
            for name, value in zip(TABLES, values, strict=True):
                tables[name][i, cut] = value
    return oracle.Case(
        slots=tuple(tuple(slot) for slot in layout["slots"]),
        ops=ops,
        edges=[oracle.Edge(*edge) for edge in layout["edges"]],
        rules=layout["rules"],
        tables=tables,
        blocks=tuple(layout["blocks"]),
        boundary_s=tuple(layout["boundary_s"]),
        chain=tuple(layout["chain"]),
    )


def mapping_of(case: oracle.Case, answer: dict[str, Any]) -> list[oracle.OperatorMapping]:
    """Read and check an answer's operator mappings."""
    given = answer["operators"]
    if len(given) != len(case.ops):
        raise RefusedError(f"operators: {len(given)} given; expected {len(case.ops)}")
    found = []
    for i, (op, entry) in enumerate(zip(case.ops, given, strict=True)):
        where = f"operators[{i}]"
        if len(entry["roles"]) != len(case.slots):
            raise RefusedError(f"{where}.roles: expected one for each of {len(case.slots)} slots")
        if unknown := [role for role in entry["roles"] if role not in ROLES]:
            raise RefusedError(f"{where}.roles: {unknown[0]!r} is not one of {', '.join(ROLES)}")
        roles = "".join(ROLES[role] for role in entry["roles"])
        mode = entry.get("weights", "replicated")
        collective = entry.get("collective", "auto")
        if mode not in oracle.MODES or not case.rules["modes"] >> oracle.MODES.index(mode) & 1:
            raise RefusedError(f"{where}.weights: {mode!r} is not accepted here")
        if collective not in COLLECTIVES:
            raise RefusedError(f"{where}.collective: {collective!r} is not accepted")
        mapped = oracle.OperatorMapping(
            roles, oracle.MODES.index(mode), COLLECTIVES.index(collective)
        )
        if not set(roles) <= set(op.roles):
            raise RefusedError(f"{where}.roles: accepted are {', '.join(op.roles)} of BMNKR")
        cut = oracle.factors(case, mapped)
        if any(f > max(most, 1) for f, most in zip(cut, op.limit, strict=True)):
            raise RefusedError(f"{where}.roles: more parts than the dimension has, {op.limit}")
        for axis in (0, 1):
            along = [r for r, slot in zip(roles, case.slots, strict=True) if slot[0] == axis]
            changes = sum(1 for k, r in enumerate(along) if k == 0 or along[k - 1] != r)
            if changes > RUNS_PER_AXIS:
                raise RefusedError(f"{where}.roles: more than {RUNS_PER_AXIS} runs along an axis")
        found.append(mapped)
    return found


def outputs_of(case: oracle.Case, answer: dict[str, Any]) -> list[dict[int, int]] | None:
    """Read what becomes of outputs, stage by stage; None: the scorer tries every way."""
    if "outputs" not in answer:
        return None
    found = []
    for k, row in enumerate(answer["outputs"]):
        for i, name in enumerate(row):
            if name not in OUTPUTS or OUTPUTS.index(name) not in (0, *case.ops[i].outputs):
                raise RefusedError(f"outputs[{k}][{i}]: {name!r} is not accepted")
        found.append({i: OUTPUTS.index(name) for i, name in enumerate(row)})
    if len(found) != len(case.blocks):
        raise RefusedError(f"outputs: {len(found)} stages given; expected {len(case.blocks)}")
    return found


def score(instance: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """Give seconds of a step and whether it fits; `RefusedError` where the answer breaks a rule."""
    if answer.get("instance") != instance["name"]:
        raise RefusedError(f"instance: {answer.get('instance')!r} is not {instance['name']!r}")
    place = answer.get("layout")
    if not isinstance(place, int) or not 0 <= place < len(instance["layouts"]):
        raise RefusedError(f"layout: {place!r} is not one of 0 to {len(instance['layouts']) - 1}")
    case = case_of(instance["layouts"][place])
    time_s, stages = oracle.evaluate(case, mapping_of(case, answer), outputs_of(case, answer))
    over = max(stage.over_bytes for stage in stages)
    room = case.rules["stream_capacity_bytes"] * (1 + 1e-12)
    streamed = max(0.0, max(stage.stream_bytes for stage in stages) - room)
    fits = over <= 1e-9 * case.rules["capacity_bytes"] and streamed <= 0
    return {
        "instance": instance["name"],
        "time_s": time_s,
        "fits": fits,
        "memory_bytes": max(stage.memory_bytes for stage in stages),
        "over_bytes": 0.0 if fits else over + streamed,
    }


def main(words: list[str]) -> int:
    """Score one file against another."""
    if len(words) != 2:
        print("usage: wafer_score.py INSTANCE.json ANSWER.json", file=sys.stderr)
        return 2
    try:
        instance, answer = (json.loads(Path(word).read_text()) for word in words)
        print(json.dumps(score(instance, answer)))
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else error
        print(f"{words[1]}: {what}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
