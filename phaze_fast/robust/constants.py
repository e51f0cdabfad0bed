"""Constants of the cost and area models as intervals, and chips at one point of the intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from phaze_fast.documents import package_data, read_document
from phaze_fast.errors import InvalidInputError, InvalidTypeError, nearest, not_accepted
from phaze_fast.explore import ChipGroups, scaled_cluster, tier_names
from phaze_fast.hardware import PUBLISHED_AREA, Accelerator, ArchitectureSpace, Cluster
from phaze_fast.tables import Array

AREA_TERMS = (
    *("tensor", "tensor_local", "vector", "vector_local"),
    *("buffer", "network", "hbm", "control", "links"),
)
"""Terms of a chip's area: multipliers, lanes, their local SRAM, and what the cores share."""


@dataclass(frozen=True)
class Constant:
    """One constant and the interval in which it lies.

    A factor multiplies a property of the chips or the cluster; its nominal value is 1.
    """

    name: str
    low: float
    high: float
    nominal: float
    """The value in a search without intervals."""
    kind: str
    """``rate`` (more is faster), ``latency`` (more is slower) or ``area``."""
    unit: str
    """``factor`` or ``s``."""
    source: str
    """Where the interval comes from."""

    @property
    def slow(self) -> float:
        """End of the interval at which a step takes longest."""
        return self.low if self.kind == "rate" else self.high

    @property
    def fast(self) -> float:
        """End of the interval at which a step is fastest."""
        return self.high if self.kind == "rate" else self.low

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, without the name."""
        return {k: v for k, v in asdict(self).items() if k != "name"}


_AT_MOST_ONE = ("matrix_rate", "port_bandwidth", "hbm_write_rate")


def _suffixes(cluster: Cluster) -> list[str]:
    """Suffixes of the names of the fabric's constants: one per tier, empty without tiers."""
    return [f".{name}" if name else "" for name in tier_names(cluster)]


@dataclass(frozen=True)
class Uncertainty:
    """A box: each constant lies anywhere in its interval, independently of the others.

    Examples
    --------
    >>> import phaze_fast as pf
    >>> space = pf.ArchitectureSpace.published()
    >>> box = default_uncertainty(space, pf.Cluster(devices=8, fabric="tpuv4-pod"))
    >>> len(box.constants), box["hbm_bandwidth"].low
    (12, 0.9)
    """

    constants: tuple[Constant, ...]

    def __getitem__(self, name: str) -> Constant:
        return {c.name: c for c in self.constants}[name]

    @property
    def rates(self) -> tuple[Constant, ...]:
        """The constants that a step's time depends on."""
        return tuple(c for c in self.constants if c.kind != "area")

    def area_range(self) -> tuple[Array, Array]:
        """Least and largest factor of each area term."""
        ends = {c.name.removesuffix("_area"): (c.low, c.high) for c in self.constants}
        factors = np.array([ends.get(term, (1.0, 1.0)) for term in AREA_TERMS])
        return factors[:, 0], factors[:, 1]

    def at(self, values: Mapping[str, float]) -> Uncertainty:
        """Return the part of the box in which some constants have given values."""
        ends = [values.get(c.name) for c in self.constants]
        pairs = zip(self.constants, ends, strict=True)
        return Uncertainty(tuple(c if v is None else replace(c, low=v, high=v) for c, v in pairs))

    def to_dict(self) -> dict[str, Any]:
        """Return the constants by name, as plain data."""
        return {constant.name: constant.to_dict() for constant in self.constants}

    @classmethod
    def load(
        cls,
        what: str | Path | Mapping[str, Any] | Uncertainty,
        space: ArchitectureSpace,
        cluster: Cluster,
    ) -> Uncertainty:
        """Read a box: ``default``, a YAML or JSON file, or plain data ``{name: [low, high]}``.

        Constants that are not named keep their nominal value.

        Raises
        ------
        InvalidInputError
            Where a name is unknown, an interval is inverted or there is no constant.
        """
        if isinstance(what, Uncertainty):
            return what
        if isinstance(what, str | Path) and str(what) == "default":
            return default_uncertainty(space, cluster)
        if isinstance(what, Mapping):
            data: Any = dict(what)
        elif isinstance(what, str | Path):
            if not str(what).endswith((".yaml", ".yml", ".json")):
                raise not_accepted("uncertainty", str(what), "default, or a .yaml or .json file")
            data = read_document(what)
        else:
            raise InvalidTypeError(
                f"uncertainty: {type(what).__name__} is not accepted; expected default, a file or "
                "a mapping of names to [low, high]"
            )
        known = {c.name: c for c in _known(space, cluster)}
        if not isinstance(data, Mapping) or not data:
            raise InvalidInputError(
                "uncertainty: an empty box is not accepted; expected an interval [low, high] for "
                f"at least one of {', '.join(known)}"
            )
        return cls(tuple(_given(known, str(name), value) for name, value in data.items()))


def _given(known: Mapping[str, Constant], name: str, value: object) -> Constant:
    """Read the interval of one constant."""
    if name not in known:
        raise InvalidInputError(f"uncertainty: unknown constant {name!r}; {nearest(name, known)}")
    like = known[name]
    source = "given"
    if isinstance(value, Mapping):
        extra = [key for key in value if key not in ("low", "high", "source")]
        if extra or not {"low", "high"} <= set(value):
            raise InvalidInputError(
                f"uncertainty.{name}: keys {', '.join(map(str, value))} are not accepted; expected "
                "low, high and, if you like, source"
            )
        source = str(value.get("source", source))
        value = [value["low"], value["high"]]
    numbers = isinstance(value, list | tuple) and len(value) == 2
    if not numbers or not all(_is_number(v) for v in value):  # type: ignore[attr-defined]
        raise InvalidInputError(
            f"uncertainty.{name}: {str(value)[:60]} is not accepted; expected [low, high], two "
            "numbers"
        )
    low, high = (float(v) for v in value)  # type: ignore[attr-defined]
    if low > high:
        raise InvalidInputError(
            f"uncertainty.{name}: [{low:g}, {high:g}] is inverted; expected the lower end first"
        )
    least = 0.0 if like.kind == "latency" else 1e-3
    most = 1.0 if name in _AT_MOST_ONE else 1e3
    if like.unit == "s":
        most = 1.0
    if low < least or high > most:
        raise InvalidInputError(
            f"uncertainty.{name}: [{low:g}, {high:g}] is not accepted; expected an interval within "
            f"[{least:g}, {most:g}]"
        )
    return replace(like, low=low, high=high, source=source)


def _is_number(value: object) -> bool:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    return good and math.isfinite(value)  # type: ignore[arg-type]


def _known(space: ArchitectureSpace, cluster: Cluster, every: bool = True) -> list[Constant]:
    """List the constants of a space and a cluster, with their default intervals."""
    defaults, constants = package_data(__package__, "constants.yaml"), []

    def add(name: str, kind: str, interval: Mapping[str, Any]) -> None:
        constants.append(Constant(name, nominal=1.0, kind=kind, unit="factor", **interval))

    for name, interval in {
        **defaults["rates"],
        **(defaults["other_rates"] if every else {}),
    }.items():
        add(name, "rate", interval)
    for tier in _suffixes(cluster):
        add(f"fabric_bandwidth{tier}", "rate", defaults["fabric"]["bandwidth"])
        add(f"fabric_latency{tier}", "latency", defaults["fabric"]["latency"])
    launch, added = space.spec.base.launch_latency_s, defaults["launch"]
    most = launch + added["added_s"]
    constants.append(
        Constant("launch", launch, most, launch, kind="latency", unit="s", source=added["source"])
    )
    limit = space.spec.area
    terms = PUBLISHED_AREA if limit is None else limit.terms
    counted = {
        "network_area": terms.network,
        "hbm_area": terms.hbm,
        "control_area": terms.control,
        "links_area": terms.links,
    }
    for name, interval in defaults["areas"].items():
        if counted.get(name, True):
            add(name, "area", interval)
    return constants


def default_uncertainty(space: ArchitectureSpace, cluster: Cluster) -> Uncertainty:
    """Return the default box of a space and a cluster: 12 constants or more, each with a source."""
    return Uncertainty(tuple(_known(space, cluster, every=False)))


def _tuned(like: Accelerator, values: Mapping[str, float]) -> Accelerator:
    """Return a chip with the constants of its tuning, and its launch latency, at a point."""
    tuning = like.tuning
    changed: dict[str, Any] = {}
    matrix, vector = values.get("matrix_rate", 1.0), values.get("vector_rate", 1.0)
    if matrix != 1.0:
        changed["efficiency"] = tuning.efficiency * matrix
        if tuning.sustained_flops is not None:
            changed["sustained_flops"] = tuning.sustained_flops * matrix
        changed["attention"] = tuning.attention.replace(
            efficiency=tuning.attention.efficiency * matrix,
            backward_efficiency=tuning.attention.backward_efficiency * matrix,
        )
    if values.get("port_bandwidth", 1.0) != 1.0:
        changed["port_share"] = tuning.port_share * values["port_bandwidth"]
    if values.get("hbm_write_rate", 1.0) != 1.0:
        changed["hbm_write_share"] = tuning.hbm_write_share * values["hbm_write_rate"]
    if changed:
        tuning = tuning.replace(**changed)
    if vector != 1.0:
        tuning = tuning.with_vector_rate(vector)
    launch = values.get("launch", like.launch_latency_s)
    if tuning is like.tuning and launch == like.launch_latency_s:
        return like
    return like.replace(tuning=tuning, launch_latency_s=launch)


_COLUMNS = {
    "clock": "clock_hz",
    "buffer_bandwidth": "buffer_bytes_per_cycle",
    "hbm_bandwidth": "hbm_bytes_per_s",
}


def at_point(
    groups: ChipGroups, cluster: Cluster, values: Mapping[str, float]
) -> tuple[ChipGroups, Cluster]:
    """Return chips and cluster with some constants at other values than their nominal ones."""
    records = groups.records
    for name, column in _COLUMNS.items():
        if values.get(name, 1.0) != 1.0:
            records = records.copy() if records is groups.records else records
            records[column] = records[column] * values[name]
    wired = scaled_cluster(
        cluster,
        [values.get(f"fabric_bandwidth{tier}", 1.0) for tier in _suffixes(cluster)],
        [values.get(f"fabric_latency{tier}", 1.0) for tier in _suffixes(cluster)],
    )
    return replace(groups, records=records, like=_tuned(groups.like, values)), wired
