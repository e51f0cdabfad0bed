"""Interconnects between devices: flat, tiered, torus and mesh, and clusters of devices on one.

Ranks are numbered innermost first: on tiers, ranks 0 to 7 share a node of 8; on a torus, rank r has
coordinate r mod dims[0] in the first dimension. How a communication library uses the links of a
tier is data too (`CollectiveTuning`), which an ideal interconnect lacks; for clusters of GPUs these
constants are fitted to measured collectives or follow from published figures, as `sources` says.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    ValidationError,
    model_serializer,
    model_validator,
)

from phaze_fast import _core
from phaze_fast.documents import Presets
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware.chip import CHIPS, Accelerator
from phaze_fast.records import (
    Bandwidth,
    Bytes,
    Count,
    FrozenDict,
    NamedOr,
    Record,
    Seconds,
    Share,
    explain,
)
from phaze_fast.units import format_bandwidth

# ---- communication libraries ----


Operation = Literal["all-reduce", "reduce-scatter", "all-gather"]
_TRANSFERS: tuple[Operation, ...] = ("all-reduce", "reduce-scatter", "all-gather")
_EXCHANGE = 3


class Protocol(Record):
    """One protocol by which a communication library moves messages.

    Of the protocols that allow a message's size, the fastest is used. A reduce-scatter or
    all-gather of V bytes over p ranks takes startup_s + (p - 1) step_s + V x seconds, an all-reduce
    twice as long. x is linear in (p - 1)/p, between the seconds per byte of two ranks, where
    (p - 1)/p = 1/2, and of very many ranks, where it is 1.
    """

    what: ClassVar[str] = "protocol"
    name: str = Field(min_length=1)
    """Name of the protocol, such as NCCL's LL, LL128 and Simple."""
    startup_s: Seconds
    """Start-up time of a collective that reaches this tier."""
    step_s: Seconds
    """Latency of one step between neighbours of a ring."""
    two_rank_share: Share
    """Share of the tier's bandwidth that two ranks reach."""
    many_rank_share: Share
    """Share that very many ranks reach; less than twice `two_rank_share`."""
    operations: FrozenDict[Operation, tuple[Share, Share]] = FrozenDict()
    """Both shares, by collective, where a collective has other values."""
    most_bytes_per_rank: Bytes = 0
    """Most bytes of the vector per rank for which the protocol is used; 0 = no limit."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        pairs = [(self.two_rank_share, self.many_rank_share), *self.operations.values()]
        for two, many in pairs:
            if many >= 2.0 * two:
                raise ValueError(
                    f"many_rank_share: {many!r} is not accepted; expected less than twice "
                    f"two_rank_share {two!r}, or more ranks would take less time"
                )
        return self

    def shares(self, operation: str) -> tuple[float, float]:
        """Return the shares of bandwidth that two and very many ranks reach in an operation."""
        for name, pair in self.operations.items():
            if name == operation:
                return pair
        return self.two_rank_share, self.many_rank_share


class InSwitch(Record):
    """All-reduces summed in the switch of a tier (NVLink SHARP), for three or more ranks."""

    what: ClassVar[str] = "in_switch"
    startup_s: Seconds
    """Start-up time of one all-reduce."""
    share: Share
    """Share of the tier's bandwidth, counting the bytes of a ring, 2 (p - 1)/p of the vector."""


class CollectiveTuning(Record):
    """How a communication library uses one tier.

    Examples
    --------
    >>> from phaze_fast.hardware import presets
    >>> [p.name for p in presets.fabric("dgx-h100").tiers[0].library.ring]
    ['LL', 'LL128', 'Simple']
    """

    what: ClassVar[str] = "library"
    ring: Annotated[tuple[Protocol, ...], Field(min_length=1, max_length=_core.MAX_PROTOCOLS)]
    """Protocols of all-reduce, reduce-scatter, all-gather, broadcast; the last allows any size."""
    exchange: Annotated[tuple[Protocol, ...], Field(min_length=1, max_length=_core.MAX_PROTOCOLS)]
    """Protocols of all-to-all and point-to-point; the last allows messages of any size."""
    in_switch: InSwitch | None = None
    """All-reduces in the switch; none if the switch does not support them."""
    fitted: tuple[str, ...] = ()
    """Constants that were fitted to measurements of this interconnect."""
    sources: tuple[str, ...] = ()
    """Measurements that the constants were fitted on, or publications that give them."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for field in ("ring", "exchange"):
            protocols: tuple[Protocol, ...] = getattr(self, field)
            if protocols[-1].most_bytes_per_rank:
                last = len(protocols) - 1
                raise ValueError(
                    f"{field}.{last}.most_bytes_per_rank: "
                    f"{protocols[-1].most_bytes_per_rank} is not accepted; the last protocol "
                    "must move messages of any size"
                )
        return self

    @property
    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the protocols of both lists; all tiers of an interconnect have the same."""
        return tuple(p.name for p in self.ring), tuple(p.name for p in self.exchange)


def fill_protocols(
    row: np.ndarray[Any, Any], level: int, bandwidth_bytes_per_s: float, tuning: CollectiveTuning
) -> None:
    """Write one tier's protocols into an interconnect's record, dtype ``_core.FABRIC_DTYPE``."""
    lists = [tuning.ring] * _EXCHANGE + [tuning.exchange]
    for transfer, protocols in enumerate(lists):
        row["protocols"][0, transfer] = len(protocols)
        operation = _TRANSFERS[transfer] if transfer < _EXCHANGE else "exchange"
        for i, protocol in enumerate(protocols):
            two, many = protocol.shares(operation)
            cell = row["protocol"][0, transfer, i]
            # Tiers may set different limits; the kernel takes the largest.
            cell["most_bytes"] = max(float(cell["most_bytes"]), protocol.most_bytes_per_rank)
            cell["startup_s"][level] = protocol.startup_s
            cell["step_s"][level] = protocol.step_s
            # Slope and intercept of the line through the seconds per byte at (p - 1)/p = 1/2 and 1.
            steepness = max(2.0 / many - 1.0 / two, 0.0)
            level_copy = max(1.0 / two - 1.0 / many, 0.0)
            if two <= many:
                cell["share"][level] = 1.0 / steepness
                cell["copy_s_per_byte"][level] = level_copy / bandwidth_bytes_per_s
            else:  # two ranks are faster per byte than many: all get the rate of many
                cell["share"][level] = many
    if tuning.in_switch is not None:
        row["in_switch_startup_s"][0, level] = tuning.in_switch.startup_s
        row["in_switch_share"][0, level] = tuning.in_switch.share


# ---- interconnects ----


_SWITCHED, _GRID = 0, 1  # phaze::FabricKind
_PEAK = "-peak"  # suffix of a preset's name: links at their peak, without a library's tuning


class _Level(NamedTuple):
    """One tier of switches or dimension of a grid, with the fields of the kernels' record."""

    size: int
    """Units of the level below in one unit; 0 where there is no limit."""
    bytes_per_s: float
    latency_s: float
    wrapped: bool = False
    """Whether a dimension closes into a ring."""
    full_mesh: bool = False
    """Whether the units of a tier are linked pair by pair."""
    library: CollectiveTuning | None = None
    """Tuning of a communication library; absent where links reach their own rates."""


class _FabricBase(Record):
    what: ClassVar[str] = "fabric"
    name: str = Field(min_length=1)
    """Name of the interconnect."""
    sources: tuple[str, ...] = ()
    """Where the figures come from."""
    notes: str = ""
    """Remarks on the figures."""

    @property
    def capacity(self) -> int | None:
        """Most devices of the interconnect; None where it has no limit."""
        raise AssertionError("every fabric defines its capacity")

    def _levels(self) -> list[_Level]:
        """Return the tiers or dimensions, innermost first."""
        raise AssertionError("every fabric defines its levels")

    def at_peak(self) -> Self:
        """Return the same interconnect with collectives at the links' own rates and latencies."""
        return self

    @cached_property
    def _record(self) -> np.ndarray[Any, Any]:
        row = np.zeros(1, dtype=_core.FABRIC_DTYPE)
        levels = self._levels()
        row["kind"] = _GRID if isinstance(self, _GridFabric) else _SWITCHED
        row["levels"] = len(levels)
        for at, level in enumerate(levels):
            row["size"][0, at] = level.size
            row["bytes_per_s"][0, at] = level.bytes_per_s
            row["latency_s"][0, at] = level.latency_s
            row["wrap"][0, at] = level.wrapped
            row["full_mesh"][0, at] = level.full_mesh
            if level.library is not None:
                fill_protocols(row, at, level.bytes_per_s, level.library)
        row.setflags(write=False)
        return row

    @model_serializer(mode="wrap")
    def _keep_kind(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Without its kind an interconnect cannot be read back, even where defaults are omitted.
        return {"kind": getattr(self, "kind", None), **write(self)}


class FlatFabric(_FabricBase):
    """Every device reaches every other at one bandwidth, through a non-blocking switch."""

    kind: Literal["flat"] = "flat"
    """Kind of interconnect."""
    bandwidth_bytes_per_s: Bandwidth
    """Bandwidth of one device, per direction."""
    latency_s: Seconds = 0.0
    """Latency of one message."""

    @property
    def capacity(self) -> int | None:
        """Most devices of the interconnect: None, no limit."""
        return None

    def _levels(self) -> list[_Level]:
        return [_Level(0, self.bandwidth_bytes_per_s, self.latency_s)]

    def __str__(self) -> str:
        return f"{self.name}: flat, {format_bandwidth(self.bandwidth_bytes_per_s)} per device"


class Tier(Record):
    """One level of a hierarchy of switches.

    Examples
    --------
    >>> spine = Tier(name="spine", bandwidth_bytes_per_s="400 Gb/s", oversubscription=7)
    >>> round(spine.share_bytes_per_s / 1e9, 3)
    7.143
    """

    what: ClassVar[str] = "tier"
    name: str = Field(min_length=1)
    """Name of one unit: node, rack, cluster."""
    size: Count | None = None
    """Units of the tier below (devices, in the first tier) in one unit; none = no limit."""
    bandwidth_bytes_per_s: Bandwidth
    """Bandwidth of one device's port, per direction, to devices that share this tier but no lower
    tier."""
    latency_s: Seconds = 0.0
    """Latency of one message at this tier."""
    oversubscription: Annotated[float, Field(ge=1, le=1e6, allow_inf_nan=False)] = 1.0
    """Bandwidth of the ports below over that of the uplinks of this tier: 7 where a switch has
    seven times as much going in as going up. All devices are taken to send across the tier at once,
    so each gets 1/oversubscription of its port's bandwidth."""
    links: Literal["switch", "full-mesh"] = "switch"
    """How the `size` units are wired: through a switch, or each to every other by a link of its
    own, as GPUs connected by xGMI are. In a full mesh of n units a device reaches one other at
    1/(n - 1) of its bandwidth, and each device of a group of k uses k - 1 links."""
    library: CollectiveTuning | None = None
    """Constants of a communication library; absent = the bandwidth and latency above."""

    @property
    def share_bytes_per_s(self) -> float:
        """Bytes per second of one device where all send across this tier at once."""
        return self.bandwidth_bytes_per_s / self.oversubscription

    def __str__(self) -> str:
        size = "any number" if self.size is None else str(self.size)
        if self.links == "full-mesh":
            size += " in a full mesh"
        taper = f" (1:{self.oversubscription:g})" if self.oversubscription > 1 else ""
        return f"{self.name} of {size} at {format_bandwidth(self.bandwidth_bytes_per_s)}{taper}"


class TieredFabric(_FabricBase):
    """Switches inside switches: devices in a node, nodes in a rack, racks in a cluster."""

    kind: Literal["tiered"] = "tiered"
    """Kind of interconnect."""
    tiers: Annotated[tuple[Tier, ...], Field(min_length=1, max_length=_core.MAX_LEVELS)]
    """The tiers, innermost first; only the last may be without a size."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for i, tier in enumerate(self.tiers[:-1]):
            if tier.size is None:
                raise ValueError(f"tiers.{i}.size: is missing; only the last tier may have none")
        for i, tier in enumerate(self.tiers):
            if tier.links == "full-mesh" and (tier.size or 0) < 2:
                raise ValueError(
                    f"tiers.{i}.size: {tier.size} is not accepted; a full mesh needs 2 or more"
                )
        if (self.capacity or 0) > 2**62:
            raise ValueError("tiers: sizes multiply to more devices than 2^62")
        names = {None if tier.library is None else tier.library.names for tier in self.tiers}
        if len(names) > 1:
            raise ValueError(
                "tiers: either all have a library or none; libraries list the same "
                "protocols in one order"
            )
        return self

    def at_peak(self) -> Self:
        """Return the same interconnect with collectives at the links' own rates and latencies.

        Examples
        --------
        >>> from phaze_fast.hardware import presets
        >>> presets.fabric("dgx-h100").at_peak() == presets.fabric("dgx-h100-peak")
        True
        """
        if self.tiers[0].library is None:
            return self
        name = f"{self.name}{_PEAK}"
        return self.replace(name=name, tiers=[t.replace(library=None) for t in self.tiers])

    @property
    def capacity(self) -> int | None:
        """Most devices of the interconnect; None where the last tier has no size."""
        sizes = [tier.size for tier in self.tiers]
        return None if sizes[-1] is None else math.prod(size or 1 for size in sizes)

    def _levels(self) -> list[_Level]:
        return [
            _Level(
                tier.size or 0,
                tier.share_bytes_per_s,
                tier.latency_s,
                full_mesh=tier.links == "full-mesh",
                library=tier.library,
            )
            for tier in self.tiers
        ]

    def __str__(self) -> str:
        return f"{self.name}: {', '.join(map(str, self.tiers))} per device"


class _GridFabric(_FabricBase):
    dims: Annotated[tuple[Count, ...], Field(min_length=1, max_length=_core.MAX_LEVELS)]
    """Devices along each dimension, the fastest-varying rank coordinate first."""
    link_bandwidth_bytes_per_s: Bandwidth
    """Bandwidth of one link, per direction."""
    hop_latency_s: Seconds = 0.0
    """Latency of one hop."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if math.prod(self.dims) > 2**62:
            raise ValueError("dims: sizes multiply to more devices than 2^62")
        return self

    @property
    def capacity(self) -> int | None:
        """Devices of the grid."""
        return math.prod(self.dims)

    def _levels(self) -> list[_Level]:
        rate, latency = self.link_bandwidth_bytes_per_s, self.hop_latency_s
        return [_Level(size, rate, latency) for size in self.dims]

    def sized(self, devices: int) -> Self:
        """Return the most cubical slice of this grid with exactly that many devices.

        The slice keeps this grid's links; on a torus its dimensions wrap where `wrap_multiple`
        allows, as reconfigurable pods provide. Of equally cubical slices the one with the larger
        inner dimensions is taken.

        Raises
        ------
        InvalidInputError
            Where no slice of this grid has that many devices.

        Examples
        --------
        >>> from phaze_fast.hardware import presets
        >>> presets.fabric("tpuv4-pod").sized(1024).dims
        (16, 8, 8)
        """
        devices = int(devices)
        best = _most_cubical(devices, self.dims) if 1 <= devices <= 2**31 else None
        if best is None:
            raise InvalidInputError(
                f"devices: {devices} is not accepted by {self.name}; expected a product of "
                f"{len(self.dims)} sizes within {'x'.join(map(str, self.dims))}"
            )
        return self.replace(dims=best)

    def __str__(self) -> str:
        dims = "x".join(map(str, self.dims))
        rate = format_bandwidth(self.link_bandwidth_bytes_per_s)
        return f"{self.name}: {dims} {self.what}, {rate} per link and direction"


class TorusFabric(_GridFabric):
    """Neighbours linked along each dimension, each dimension closed into a ring."""

    what: ClassVar[str] = "torus"
    kind: Literal["torus"] = "torus"
    """Kind of interconnect."""
    wrap_multiple: Count = 1
    """A dimension closes into a ring only where its size is a multiple of this; others stay open.
    TPU pods built of 4x4x4 blocks wrap at multiples of 4, a TPU v5e pod only at its full side of
    16."""

    def _levels(self) -> list[_Level]:
        levels = super()._levels()
        return [level._replace(wrapped=level.size % self.wrap_multiple == 0) for level in levels]


class MeshFabric(_GridFabric):
    """Neighbours linked along each dimension, open at the ends."""

    what: ClassVar[str] = "mesh"
    kind: Literal["mesh"] = "mesh"
    """Kind of interconnect."""


AnyFabric = FlatFabric | TieredFabric | TorusFabric | MeshFabric
"""An interconnect of any kind."""
Fabric = Annotated[AnyFabric, Field(discriminator="kind")]
"""Type of a record's field that holds an interconnect; its `kind` tells the kinds apart."""

_ADAPTER: TypeAdapter[AnyFabric] = TypeAdapter(Fabric)


def fabric_from_dict(data: object, source: str = "") -> AnyFabric:
    """Validate plain data as the interconnect that its `kind` names.

    Raises
    ------
    InvalidInputError
        One line per fault.

    Examples
    --------
    >>> fabric_from_dict({"kind": "flat", "name": "lab", "bandwidth_bytes_per_s": "100 Gb/s"}).name
    'lab'
    """
    try:
        return _ADAPTER.validate_python(data)
    except ValidationError as error:
        raise InvalidInputError(explain(error, "fabric", source)) from None


def fabric_record(fabric: AnyFabric) -> np.ndarray[Any, Any]:
    """Return an interconnect as the one-row record the kernels take, dtype ``_core.FABRIC_DTYPE``.

    The array is read-only and cached per record.
    """
    return fabric._record


def cluster_record(fabric: AnyFabric, devices: int) -> np.ndarray[Any, Any]:
    """Return the record of an interconnect with only `devices` devices on it."""
    row = fabric._record.copy()
    row["devices"] = devices
    return row


def _divisors(number: int) -> list[int]:
    """Return all divisors, largest first."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)}, reverse=True)


def _most_cubical(devices: int, limits: tuple[int, ...]) -> tuple[int, ...] | None:
    """Factorise `devices` into sizes within `limits` with the smallest maximum, then sum."""
    if len(limits) == 1:
        return (devices,) if devices <= limits[0] else None
    best: tuple[int, ...] | None = None
    for size in _divisors(devices):
        if size > limits[0]:
            continue
        rest = _most_cubical(devices // size, limits[1:])
        if rest is None:
            continue
        shape = (size, *rest)
        if best is None or (max(shape), sum(shape)) < (max(best), sum(best)):
            best = shape
    return best


class _FabricPresets(Presets[AnyFabric]):
    def preset(self, name: str) -> AnyFabric:
        base = name.removesuffix(_PEAK)
        if base != name and base in self.names:
            return self.load(base).at_peak()
        return super().preset(name)


FABRICS = _FabricPresets("fabric", "phaze_fast.hardware/data/fabrics", fabric_from_dict)
"""Interconnects that come with the package; see `presets.fabric`."""


# ---- clusters ----


class Cluster(Record):
    """A number of devices on an interconnect.

    Examples
    --------
    >>> from phaze_fast.hardware import presets
    >>> Cluster(devices=1024, fabric=presets.fabric("dgx-a100")).devices
    1024
    """

    what: ClassVar[str] = "cluster"
    devices: Annotated[int, Field(strict=True, ge=1, le=2**20)]
    """Number of devices, at most 2**20 because messages are priced device by device."""
    fabric: Annotated[Fabric, NamedOr()]
    """The interconnect; a torus or mesh is cut to a slice of that many devices. In a file also a
    preset's name."""
    chip: Annotated[Accelerator, NamedOr()] | None = None
    """The chip of all devices; absent where a search chooses it. In a file also a preset's name."""

    @model_validator(mode="before")
    @classmethod
    def _resolve_names_and_size(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        fields = dict(data)
        if isinstance(fields.get("chip"), str):
            fields["chip"] = CHIPS.load(fields["chip"])
        fabric, devices = fields.get("fabric"), fields.get("devices")
        if isinstance(fabric, str):
            fabric = FABRICS.load(fabric)
        if isinstance(fabric, dict):
            try:
                fabric = fabric_from_dict(fabric)
            except InvalidInputError:
                return fields  # validated again below, where messages get the full path
        if (
            isinstance(fabric, TorusFabric | MeshFabric)
            and isinstance(devices, int)
            and 1 <= devices < math.prod(fabric.dims)
        ):
            fabric = fabric.sized(devices)
        return fields if fabric is None else {**fields, "fabric": fabric}

    @model_validator(mode="after")
    def _check(self) -> Self:
        capacity = self.fabric.capacity
        if capacity is not None and self.devices > capacity:
            raise ValueError(
                f"devices: {self.devices} is not accepted; {self.fabric.name} holds {capacity}"
            )
        return self
