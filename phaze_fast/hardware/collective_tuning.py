"""How a communication library uses the links of a tier: factors that the collective kernel reads.

An ideal fabric needs none of this. For clusters of GPUs the constants are fitted to measured
collectives, or follow from published figures; `sources` says which.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import AfterValidator, Field, model_validator

from phaze_fast import _core
from phaze_fast.records import Bytes, FrozenDict, Record, Seconds

__all__ = ["CollectiveTuning", "InSwitch", "Protocol", "fill_protocols"]

Share = Annotated[float, Field(strict=True, gt=0, le=1, allow_inf_nan=False)]
"""More than 0, at most 1."""

Operation = Literal["all-reduce", "reduce-scatter", "all-gather"]
_TRANSFERS: tuple[Operation, ...] = ("all-reduce", "reduce-scatter", "all-gather")
_EXCHANGE = 3


class Protocol(Record):
    """One way in which a library moves messages; of those that may, the fastest counts.

    A reduce-scatter or all-gather of V bytes over p ranks takes startup_s + (p - 1) step_s + V x,
    with x a line through (p - 1)/p = 1/2, where it is what two ranks reach, and 1, where it is what
    very many reach. An all-reduce is two of them.
    """

    what: ClassVar[str] = "protocol"
    name: str = Field(min_length=1)
    """What to call it, such as NCCL's LL, LL128 and Simple."""
    startup_s: Seconds
    """Beginning a collective that reaches this tier."""
    step_s: Seconds
    """One step between neighbours."""
    two_rank_share: Share
    """Share of the tier's bandwidth that two ranks reach."""
    many_rank_share: Share
    """Share that very many ranks reach; at most twice the other."""
    operations: Annotated[dict[Operation, tuple[Share, Share]], AfterValidator(FrozenDict)] = Field(
        default={}, validate_default=True
    )
    """Both shares of collectives that differ, by name."""
    most_bytes_per_rank: Bytes = 0
    """Not used where one rank's part of the vector is larger; 0 = no limit."""

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
        """Return what two and what very many ranks reach in an operation."""
        for name, pair in self.operations.items():
            if name == operation:
                return pair
        return self.two_rank_share, self.many_rank_share


class InSwitch(Record):
    """All-reduces that the switch of a tier adds up (NVLink SHARP), for three or more ranks."""

    what: ClassVar[str] = "in_switch"
    startup_s: Seconds
    """Beginning one."""
    share: Share
    """Share of the tier's bandwidth, counting the bytes of a ring, 2 (p - 1)/p of the vector."""


class CollectiveTuning(Record):
    """What a library makes of one tier.

    Examples
    --------
    >>> from phaze_fast.hardware import presets
    >>> [p.name for p in presets.fabric("dgx-h100").tiers[0].library.ring]
    ['LL', 'LL128', 'Simple']
    """

    what: ClassVar[str] = "library"
    ring: Annotated[tuple[Protocol, ...], Field(min_length=1, max_length=_core.MAX_PROTOCOLS)]
    """For all-reduce, reduce-scatter, all-gather and broadcast; the last has no limit of bytes."""
    exchange: Annotated[tuple[Protocol, ...], Field(min_length=1, max_length=_core.MAX_PROTOCOLS)]
    """For all-to-all and point-to-point; the last has no limit of bytes."""
    in_switch: InSwitch | None = None
    """All-reduces in the switch; none where it cannot."""
    fitted: tuple[str, ...] = ()
    """Constants that were fitted to measurements of this fabric."""
    sources: tuple[str, ...] = ()
    """What they were fitted on, or where they come from."""

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
        """Names of both lists of protocols, which all tiers of a fabric share."""
        return tuple(p.name for p in self.ring), tuple(p.name for p in self.exchange)


def fill_protocols(
    row: np.ndarray[Any, Any], level: int, bandwidth_bytes_per_s: float, tuning: CollectiveTuning
) -> None:
    """Write one tier's protocols into a fabric's record, dtype ``_core.FABRIC_DTYPE``."""
    lists = [tuning.ring] * _EXCHANGE + [tuning.exchange]
    for transfer, protocols in enumerate(lists):
        row["protocols"][0, transfer] = len(protocols)
        operation = _TRANSFERS[transfer] if transfer < _EXCHANGE else "exchange"
        for i, protocol in enumerate(protocols):
            two, many = protocol.shares(operation)
            cell = row["protocol"][0, transfer, i]
            # Outer tiers may set a smaller limit; the largest one holds for the whole fabric.
            cell["most_bytes"] = max(float(cell["most_bytes"]), protocol.most_bytes_per_rank)
            cell["startup_s"][level] = protocol.startup_s
            cell["step_s"][level] = protocol.step_s
            # Seconds per byte at (p - 1)/p = 1/2 and 1 make a slope and what it starts from.
            steepness = max(2.0 / many - 1.0 / two, 0.0)
            level_copy = max(1.0 / two - 1.0 / many, 0.0)
            if two <= many:
                cell["share"][level] = 1.0 / steepness
                cell["copy_s_per_byte"][level] = level_copy / bandwidth_bytes_per_s
            else:  # many ranks reach less: charged to all
                cell["share"][level] = many
    if tuning.in_switch is not None:
        row["in_switch_startup_s"][0, level] = tuning.in_switch.startup_s
        row["in_switch_share"][0, level] = tuning.in_switch.share
