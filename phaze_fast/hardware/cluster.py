"""A cluster: a number of devices, the fabric between them, and perhaps their chip."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware.chip import Accelerator, load_chip
from phaze_fast.hardware.fabric import (
    Fabric,
    MeshFabric,
    TorusFabric,
    fabric_from_dict,
    load_fabric,
)
from phaze_fast.records import NamedOr, Record

__all__ = ["Cluster"]


class Cluster(Record):
    """A number of devices on a fabric.

    Examples
    --------
    >>> from phaze_fast.hardware import presets
    >>> Cluster(devices=1024, fabric=presets.fabric("dgx-a100")).devices
    1024
    """

    what: ClassVar[str] = "cluster"
    devices: Annotated[int, Field(strict=True, ge=1, le=2**20)]
    """How many devices, at most 2**20: messages are priced device by device."""
    fabric: Annotated[Fabric, NamedOr()]
    """How they are wired; a torus or mesh is cut to a slice of that many devices. In a file also a
    preset's name."""
    chip: Annotated[Accelerator, NamedOr()] | None = None
    """What the devices are; absent where a search chooses it. In a file also a preset's name."""

    @model_validator(mode="before")
    @classmethod
    def _resolve_names_and_size(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        found = dict(data)
        if isinstance(found.get("chip"), str):
            found["chip"] = load_chip(found["chip"])
        fabric, devices = found.get("fabric"), found.get("devices")
        if isinstance(fabric, str):
            fabric = load_fabric(fabric)
        if isinstance(fabric, dict):
            try:
                fabric = fabric_from_dict(fabric)
            except InvalidInputError:
                return found  # validated again below, where faults get their whole path
        if (
            isinstance(fabric, TorusFabric | MeshFabric)
            and isinstance(devices, int)
            and 1 <= devices < math.prod(fabric.dims)
        ):
            fabric = fabric.sized(devices)
        return found if fabric is None else {**found, "fabric": fabric}

    @model_validator(mode="after")
    def _check(self) -> Self:
        held = self.fabric.capacity
        if held is not None and self.devices > held:
            raise ValueError(
                f"devices: {self.devices} is not accepted; {self.fabric.name} holds {held}"
            )
        return self
