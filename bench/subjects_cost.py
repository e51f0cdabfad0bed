"""Subjects of the cost stage: collectives."""

from __future__ import annotations

from typing import Any

import numpy as np
from registry import Subject, register

from phaze_fast import _core
from phaze_fast.cost import CollectiveTimes, collective, collective_batch
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
