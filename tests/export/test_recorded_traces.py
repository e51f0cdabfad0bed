"""Recorded Chakra traces: the operators, messages, bytes and seconds of some ranks.

`PYTHONPATH=tests/cases python tests/export/test_recorded_traces.py` writes the record anew; a commit
that changes it says why.
"""

from __future__ import annotations

import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from recorded import assert_as_recorded, plain, recorded_rows, write_record

import phaze_fast as pf
from phaze_fast.models import Lora

FILE = Path(__file__).parents[1] / "golden" / "recorded_traces.json"
DENSE = pf.models.load("gpt2-small").replace(layers=4)
ADAPTED = DENSE.with_lora(Lora(rank=16))
EXPERTS = pf.models.load("mixtral-8x7b").replace(layers=4)
PLANS: tuple[tuple[pf.TransformerModel, dict[str, Any]], ...] = (
    (DENSE, {"dp": 4, "tp": 2, "zero": 0, "recompute": "full"}),
    (DENSE, {"dp": 4, "tp": 2, "zero": 1}),
    (DENSE, {"dp": 8, "zero": 2, "rank_order": "stages-inside"}),
    (DENSE, {"dp": 8, "zero": 3, "shard": 4, "recompute": "selective"}),
    (DENSE, {"dp": 4, "zero": 3, "pp": 2}),
    (DENSE, {"dp": 4, "zero": 2, "shard": 2, "pp": 2, "rank_order": "stages-inside"}),
    (DENSE, {"dp": 2, "pp": 2, "cp": 2, "schedule": "interleaved", "vpp": 2, "zero": 1}),
    (DENSE, {"dp": 2, "cp": 4, "cp_kind": "ring", "zero": 3}),
    (DENSE, {"dp": 2, "cp": 4, "cp_kind": "ulysses:2/ring", "zero": 1}),
    (DENSE, {"dp": 4, "pp": 2, "schedule": "zb-v", "vpp": 2}),
    (DENSE, {"dp": 4, "pp": 2, "schedule": "gpipe", "zero": 1}),
    (DENSE, {"dp": 2, "pp": 4, "schedule": "dualpipe", "vpp": 2, "zero": 1}),
    (DENSE, {"dp": 4, "pp": 2, "schedule": "dualpipe-v", "vpp": 2}),
    (DENSE, {"dp": 4, "cp": 2, "zero": 2, "shard": 2}),
    (DENSE, {"dp": 4, "pp": 2, "zero": 3, "shard": 2, "recompute": "full:1/norms"}),
    (ADAPTED, {"dp": 4, "tp": 2, "zero": 3}),
    (ADAPTED, {"dp": 4, "tp": 2, "zero": 2}),
    (ADAPTED, {"dp": 8, "zero": 1, "shard": 4}),
    (EXPERTS, {"dp": 8, "ep": 4, "zero": 1}),
    (EXPERTS, {"dp": 4, "tp": 2, "ep": 4, "etp": 1, "zero": 3}),
    (EXPERTS, {"dp": 4, "tp": 2, "ep": 4, "dispatcher": "all-gather", "zero": 2}),
    (EXPERTS, {"dp": 2, "tp": 4, "ep": 2, "etp": 2, "zero": 3, "recompute": "norms"}),
    (EXPERTS, {"dp": 2, "cp": 4, "cp_kind": "ulysses:2/ring", "ep": 8, "zero": 3}),
    (EXPERTS, {"dp": 2, "pp": 2, "cp": 2, "ep": 4, "etp": 1, "zero": 1}),
)


def traced(number: int) -> dict[str, Any]:
    """What a trace says of three ranks: kinds of nodes, their bytes and seconds, and names."""
    from phaze_fast.export.chakra import chakra_trace

    model, given = PLANS[number]
    cluster = pf.Cluster(devices=8, fabric="dgx-h100", chip="h100")
    trace = chakra_trace(model, cluster, {"global_batch": 16, "recompute": "none", **given})
    groups = "\n".join(f"{name} {ranks}" for name, ranks in trace.groups.items())
    found: dict[str, Any] = {"groups": zlib.crc32(groups.encode())}
    for rank in (0, 3, 7):
        kinds, numbers = Counter(), Counter()
        names = []
        for node in trace.nodes(rank):
            kinds[str(node.type)] += 1
            numbers["us"] += float(node.duration_micros)
            names.append(node.name)
            for attribute in node.attr:
                for field, value in attribute.ListFields():
                    if field.name != "name" and isinstance(value, int):
                        numbers[attribute.name] += value
                    elif field.name != "name":
                        names.append(f"{attribute.name}={value}")
        crc = zlib.crc32("\n".join(names).encode())
        found[str(rank)] = {"kinds": kinds, "numbers": numbers, "names": crc}
    return plain(found)


@pytest.mark.parametrize("number", range(len(PLANS)))
def test_traces_are_what_was_recorded(number: int) -> None:
    pytest.importorskip("google.protobuf")
    assert_as_recorded(traced(number), recorded_rows(FILE)[number])


if __name__ == "__main__":
    write_record(FILE, [traced(number) for number in range(len(PLANS))])
