"""Constants of a fabric's innermost tier fitted to measured collectives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from phaze_fast.calibration.collective_tables import CollectiveRows, read_collectives
from phaze_fast.calibration.fit import Constant
from phaze_fast.calibration.fitted import Calibrated, calibrated
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware.fabric import (
    CollectiveTuning,
    FlatFabric,
    MeshFabric,
    TieredFabric,
    TorusFabric,
)

__all__ = ["calibrate_fabric"]

Array = np.ndarray[Any, Any]

_RANGES = {  # of one protocol: seconds, seconds, a share, a ratio
    "startup_s": (5e-7, 5e-4),
    "step_s": (1e-8, 1e-4),
    "two_rank_share": (1e-3, 0.995),
    "many_over_two": (1.0, 1.95),
}
_HIGHEST = 0.995


def _joined(files: Sequence[Path | str]) -> CollectiveRows:
    rows = CollectiveRows()
    for file in files:
        found = read_collectives(file)
        for row in zip(
            found.system, found.op, found.ranks, found.payload_bytes, found.time_s, strict=True
        ):
            rows.add(*row)
    systems = {name for name in rows.system if name}
    if len(systems) > 1:
        raise InvalidInputError(
            f"files: systems {', '.join(sorted(systems))} are not accepted together; expected one"
        )
    return rows


def _constants(tuning: CollectiveTuning, rows: CollectiveRows) -> list[Constant]:
    """List what the rows can say something about, from the tuning's own values."""
    found: list[Constant] = []

    def add(name: str, kind: str, value: float) -> None:
        low, high = _RANGES[kind]
        found.append(Constant(f"{name}.{kind}", float(np.clip(value, low, high)), low, high))

    operations = set(rows.op)
    lists = {
        "ring": operations & {"all-reduce", "reduce-scatter", "all-gather", "broadcast"},
        "exchange": operations & {"all-to-all", "point-to-point"},
    }
    for field, present in lists.items():
        if not present:
            continue
        for protocol in getattr(tuning, field):
            name = f"{field}.{protocol.name}"
            for kind in ("startup_s", "step_s", "two_rank_share"):
                add(name, kind, getattr(protocol, kind))
            last = protocol is getattr(tuning, field)[-1]
            if last:
                add(name, "many_over_two", protocol.many_rank_share / protocol.two_rank_share)
            for op in ("reduce-scatter", "all-gather"):
                if last and field == "ring" and op in present:
                    two, many = protocol.shares(op)
                    add(f"{name}.{op}", "two_rank_share", two)
                    add(f"{name}.{op}", "many_over_two", many / two)
    large = any(r > 2 and op == "all-reduce" for r, op in zip(rows.ranks, rows.op, strict=True))
    if tuning.in_switch is not None and large:
        add("in_switch", "startup_s", tuning.in_switch.startup_s)
        add("in_switch", "two_rank_share", tuning.in_switch.share)
    return found


def _many(two: float, ratio: float) -> float:
    return float(min(two * ratio, _HIGHEST))


def _with(tuning: CollectiveTuning, values: dict[str, float]) -> CollectiveTuning:
    """Give the tuning with other constants."""
    changed: dict[str, Any] = {}
    for field in ("ring", "exchange"):
        protocols = []
        for protocol in getattr(tuning, field):
            name = f"{field}.{protocol.name}"
            two = values.get(f"{name}.two_rank_share", protocol.two_rank_share)
            old = protocol.many_rank_share / protocol.two_rank_share
            pairs = {}
            for op in ("reduce-scatter", "all-gather"):
                own = values.get(f"{name}.{op}.two_rank_share")
                if own is not None:
                    pairs[op] = (own, _many(own, values[f"{name}.{op}.many_over_two"]))
            protocols.append(
                protocol.replace(
                    startup_s=values.get(f"{name}.startup_s", protocol.startup_s),
                    step_s=values.get(f"{name}.step_s", protocol.step_s),
                    two_rank_share=two,
                    many_rank_share=_many(two, values.get(f"{name}.many_over_two", old)),
                    operations={**protocol.operations, **pairs},
                )
            )
        changed[field] = protocols
    if tuning.in_switch is not None and "in_switch.startup_s" in values:
        changed["in_switch"] = tuning.in_switch.replace(
            startup_s=values["in_switch.startup_s"], share=values["in_switch.two_rank_share"]
        )
    return tuning.replace(**changed)


def calibrate_fabric(
    files: Sequence[Path | str],
    fabric: FlatFabric | TieredFabric | TorusFabric | MeshFabric,
    name: str = "",
) -> Calibrated:
    """Fit what measured collectives say about the innermost tier; the rest stays as it is.

    Parameters
    ----------
    files
        Tables of collectives or nccl-tests output, all of one machine.
    fabric
        Where the fit begins: bandwidths, sizes and protocols are taken as they are.
    name
        What to call the result; by default the fabric's name.

    Raises
    ------
    InvalidInputError
        Where a file is not accepted, the fabric has no protocols to fit, a group reaches beyond the
        innermost tier, or there are too few rows.
    """
    if not isinstance(fabric, TieredFabric) or fabric.tiers[0].library is None:
        raise InvalidInputError(
            f"fabric: {fabric.name} has no protocols to fit; expected a tiered fabric whose tiers "
            "have a library, such as dgx-h100"
        )
    rows = _joined(files)
    inner = fabric.tiers[0]
    if inner.size is not None and max(rows.ranks) > inner.size:
        raise InvalidInputError(
            f"files: a group of {max(rows.ranks)} ranks reaches beyond a {inner.name} of "
            f"{inner.size}; expected collectives inside one"
        )
    assert inner.library is not None
    tuning = inner.library
    constants = _constants(tuning, rows)
    measured = np.array(rows.time_s)

    def rebuilt(values: Array) -> TieredFabric:
        named = {c.name: float(v) for c, v in zip(constants, values, strict=True)}
        tier = inner.replace(library=_with(tuning, named))
        return fabric.replace(tiers=[tier, *fabric.tiers[1:]])

    def log_errors(values: Array) -> Array:
        found: Array = np.log(rows.predicted_s(rebuilt(values)) / measured)
        return found

    def described(values: Array) -> dict[str, Any]:
        plain = rebuilt(values).to_dict()
        library = plain["tiers"][0]["library"]
        library["fitted"] = [c.name for c in constants]
        names = ", ".join(Path(file).name for file in files)
        library["sources"] = [f"phaze-fast calibrate, {len(measured)} collectives of {names}"]
        return {**plain, "name": name or fabric.name}

    sizes = np.where(np.array(rows.payload_bytes) >= 2**20, ">= 1 MiB", "< 1 MiB")
    units = np.ones(len(constants))
    return calibrated("fabric", log_errors, constants, units, sizes, described)
