"""Constants of the cost and area models as intervals, and chips at one point of the intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from phaze_fast.documents import read_document
from phaze_fast.errors import InvalidInputError, InvalidTypeError, nearest
from phaze_fast.explore import ChipGroups, scaled_cluster, tier_names
from phaze_fast.hardware import PUBLISHED_AREA, Accelerator, ArchitectureSpace, Cluster

__all__ = ["AREA_TERMS", "Constant", "Uncertainty", "at_point", "default_uncertainty"]

Array = np.ndarray[Any, Any]

AREA_TERMS = (
    "tensor",
    "tensor_local",
    "vector",
    "vector_local",
    "buffer",
    "network",
    "hbm",
    "control",
    "links",
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
        """The end at which a step takes longest."""
        return self.low if self.kind == "rate" else self.high

    @property
    def fast(self) -> float:
        """The end at which a step is fastest."""
        return self.high if self.kind == "rate" else self.low

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, without the name."""
        return {k: v for k, v in asdict(self).items() if k != "name"}


_MEASURED = "this package's GPU presets, fitted to measurements"
_RATES: dict[str, tuple[float, float, str]] = {
    "matrix_rate": (
        0.9,
        1.0,
        "assumption: share of an ideal array's rate that compiled products sustain",
    ),
    "vector_rate": (
        0.8,
        1.25,
        "assumption: lane operations per element are counts of arithmetic, off by a quarter",
    ),
    "buffer_bandwidth": (
        0.8,
        1.25,
        "assumption: 4,096 B/cycle is not published for TPU v4, off by a quarter",
    ),
    "hbm_bandwidth": (0.9, 1.0, f"share of peak that streams reach: {_MEASURED} (0.88 to 0.93)"),
}
_OTHER_RATES: dict[str, tuple[float, float, str]] = {
    "clock": (0.95, 1.05, "assumption: sustained against rated clock, +-5%"),
    "port_bandwidth": (0.74, 1.0, f"share of a core's port that is reached: {_MEASURED} (0.739)"),
    "hbm_write_rate": (0.85, 1.0, f"writing against reading: {_MEASURED} (0.849)"),
}
"""Not in the default box: they act much like constants that are."""
_FABRIC_RATE = (0.9, 1.0, "assumption: share of a link's rate that collectives reach")
_FABRIC_LATENCY = (0.9, 1.1, "assumption: latencies are rounded or assumed in the fabric presets")
_LAUNCH_S = 5e-8
_LAUNCH = "assumption: next to none in a compiled program (3.5 us on a GPU: h100 preset)"
_AREAS: dict[str, tuple[float, float, str]] = {
    "tensor_area": (0.8, 1.2, "assumption: synthesis of the PHAZE template against layout, +-20%"),
    "tensor_local_area": (0.8, 1.2, "assumption: SRAM estimates of the PHAZE template, +-20%"),
    "vector_area": (0.8, 1.2, "assumption: synthesis of the PHAZE template against layout, +-20%"),
    "vector_local_area": (0.8, 1.2, "assumption: SRAM estimates of the PHAZE template, +-20%"),
    "buffer_area": (0.8, 1.2, "assumption: SRAM estimates of the PHAZE template, +-20%"),
    "network_area": (
        0.67,
        1.5,
        "assumption: LLMCompass (ISCA 2024) takes the mean of two chips that differ",
    ),
    "hbm_area": (0.8, 1.2, "assumption: LLMCompass (ISCA 2024) reads it off die photographs"),
    "control_area": (
        0.5,
        1.54,
        "LLMCompass (ISCA 2024): 0.73 to 1.53 M transistors a lane, mean 1.0 M; half where there "
        "are few registers",
    ),
    "links_area": (
        0.7,
        1.75,
        "LLMCompass (ISCA 2024): NVLink 4 and Infinity Fabric against NVLink 3, per byte/s",
    ),
}
_AT_MOST_ONE = ("matrix_rate", "port_bandwidth", "hbm_write_rate")


def _suffixes(cluster: Cluster) -> list[str]:
    """Suffixes of the fabric's constants: one for each tier, none where there are no tiers."""
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

    @property
    def is_point(self) -> bool:
        """Whether every interval is one value."""
        return all(c.low == c.high for c in self.constants)

    def area_range(self) -> tuple[Array, Array]:
        """Least and largest factor of each area term."""
        ends = {c.name.removesuffix("_area"): (c.low, c.high) for c in self.constants}
        found = np.array([ends.get(term, (1.0, 1.0)) for term in AREA_TERMS])
        return found[:, 0], found[:, 1]

    def narrowed(self, name: str, low: float, high: float) -> Uncertainty:
        """Return the box with another interval of one constant."""
        new = [replace(c, low=low, high=high) if c.name == name else c for c in self.constants]
        return Uncertainty(tuple(new))

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
            Where a name is unknown, an interval is inverted or nothing is named.
        """
        if isinstance(what, Uncertainty):
            return what
        if isinstance(what, str | Path) and str(what) == "default":
            return default_uncertainty(space, cluster)
        if isinstance(what, Mapping):
            data: Any = dict(what)
        elif isinstance(what, str | Path):
            if not str(what).endswith((".yaml", ".yml", ".json")):
                raise InvalidInputError(
                    f"uncertainty: {str(what)!r} is not accepted; expected default, or a .yaml or "
                    ".json file"
                )
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
    """Read one interval."""
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
    rates = {**_RATES, **_OTHER_RATES} if every else _RATES
    found = [
        Constant(name, low, high, 1.0, "rate", "factor", source)
        for name, (low, high, source) in rates.items()
    ]
    for tier in _suffixes(cluster):
        low, high, source = _FABRIC_RATE
        found.append(Constant(f"fabric_bandwidth{tier}", low, high, 1.0, "rate", "factor", source))
        low, high, source = _FABRIC_LATENCY
        found.append(Constant(f"fabric_latency{tier}", low, high, 1.0, "latency", "factor", source))
    launch = space.spec.base.launch_latency_s
    found.append(Constant("launch", launch, launch + _LAUNCH_S, launch, "latency", "s", _LAUNCH))
    limit = space.spec.area
    terms = PUBLISHED_AREA if limit is None else limit.terms
    counted = {name: getattr(terms, name) for name in ("network", "hbm", "control", "links")}
    for name, (low, high, source) in _AREAS.items():
        if counted.get(name.removesuffix("_area"), True):
            found.append(Constant(name, low, high, 1.0, "area", "factor", source))
    return found


def default_uncertainty(space: ArchitectureSpace, cluster: Cluster) -> Uncertainty:
    """Return the default box of a space and a cluster: 12 constants or more, each with a source."""
    return Uncertainty(tuple(_known(space, cluster, every=False)))


def _tuned(like: Accelerator, values: Mapping[str, float]) -> Accelerator:
    """Return the chip that others are like, with the constants of its tuning at a point."""
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
