"""Subjects of the cost stage: collectives, fused groups."""

from __future__ import annotations

from typing import Any

import numpy as np
from registry import Subject, register

from phaze_fast import _core
from phaze_fast.cost import (
    BufferRules,
    CollectiveTimes,
    FusedGroup,
    collective,
    collective_batch,
    group_traffic,
    product_bytes,
)
from phaze_fast.hardware import presets

TARGET = ">= 10 M/s"
N = 1_000_000


def _question(names: tuple[str, ...], n: int, op: str | None) -> dict[str, Any]:
    """Random good questions: every operation (or one) over groups that fit every fabric."""
    rng = np.random.default_rng(11)
    fabrics = [presets.fabric(name) for name in names]
    code = _core.COLLECTIVE_OPS.index(op) if op else -1
    ops = np.full(n, code, np.uint8) if op else rng.integers(0, 6, n).astype(np.uint8)
    ranks = 2 ** rng.integers(1, 7, n)
    return {
        "fabrics": fabrics,
        "op": ops,
        "payload_bytes": 10.0 ** rng.uniform(3, 10, n),
        "ranks": np.where(ops == 5, 2, ranks),
        "stride": np.ones(n, np.int64),
        "fabric": rng.integers(0, len(fabrics), n).astype(np.int32),
        "threads": 1,
    }


def _ask(question: dict[str, Any]) -> CollectiveTimes:
    return collective_batch(**question)


def _check(question: dict[str, Any], found: CollectiveTimes) -> None:
    assert not found.status.any()
    for i in range(0, len(found), max(1, len(found) // 50)):
        alone = collective(
            question["fabrics"][question["fabric"][i]],
            _core.COLLECTIVE_OPS[question["op"][i]],
            float(question["payload_bytes"][i]),
            int(question["ranks"][i]),
        )
        assert alone.time_s == found.time_s[i]


for _name, _op in (
    ("phaze-flat", "all-reduce"),
    ("dgx-a100", "all-reduce"),
    ("tpuv4-pod", "all-reduce"),
    ("wafer-mesh", "all-reduce"),
):
    register(
        Subject(
            name=f"{_op}-{_name}",
            stage="cost",
            items=N,
            build=lambda name=_name, op=_op: _question((name,), N, op),
            run=_ask,
            check=_check,
            target=TARGET,
        )
    )

register(
    Subject(
        name="all-collectives-all-fabrics",
        stage="cost",
        items=N,
        build=lambda: _question(presets.fabric_names(), N, None),
        run=_ask,
        check=_check,
        target=TARGET,
    )
)

register(
    Subject(
        name="collective-call-of-1000",
        stage="cost",
        items=1000,
        build=lambda: _question(presets.fabric_names(), 1000, None),
        run=_ask,
        check=_check,
    )
)


# ---- fused groups ----

MIB = 2.0**20
GROUPS = {
    "bert-mlp": FusedGroup(2048, 1024, 4096, 1024),
    "llama-gated": FusedGroup(2048, 4096, 11008, 4096, first=2.0, held=3.0),
    "gpt3-mlp": FusedGroup(2048, 12288, 49152, 12288),
    "bert-scores": FusedGroup(512, 64, 512, 64, count=16),
}
EXACT = BufferRules(sum_bytes=2, strip_depth=1, strip_copies=1)
LEAST_MIB = {"bert-mlp": 24.0, "gpt3-mlp": 2784.0}
"""Least MiB with 64 MiB of buffer, by an exact mapper (AccelForge 1.0.467): fused where that is
less than two products alone, which it is not for GPT-3."""


def _traffic(sizes: np.ndarray[Any, Any]) -> dict[str, Any]:
    return {name: group_traffic(group, sizes, EXACT).hbm_bytes for name, group in GROUPS.items()}


def _check_traffic(sizes: np.ndarray[Any, Any], found: dict[str, Any]) -> None:
    at = int(np.argmin(np.abs(sizes - 64 * MIB)))
    for name, least in LEAST_MIB.items():
        group = GROUPS[name]
        alone = product_bytes(group.rows, group.inner, group.hidden, sizes[at : at + 1], EXACT)
        alone = alone + product_bytes(
            group.rows, group.hidden, group.outer, sizes[at : at + 1], EXACT
        )
        assert min(found[name][at], alone[0]) == least * MIB
    assert all((np.diff(moved) <= 0).all() for moved in found.values())


SIZES = np.append(np.linspace(1.0, 63.0, 63), 64.0) * MIB
register(
    Subject(
        name="fused-groups",
        stage="cost",
        items=len(GROUPS) * len(SIZES),
        build=lambda: SIZES,
        run=_traffic,
        check=_check_traffic,
        target="< 30 us per group and buffer size",
    )
)
