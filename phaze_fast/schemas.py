"""JSON Schemas of the files that this package reads, computed from the records; and parsers."""

from __future__ import annotations

import json
from typing import Any, cast

from pydantic import TypeAdapter

from phaze_fast.errors import InvalidInputError, nearest
from phaze_fast.hardware import (
    Accelerator,
    Cluster,
    EnergyTable,
    Fabric,
    SpaceSpec,
    fabric_from_dict,
)
from phaze_fast.models import GraphModel, TransformerModel
from phaze_fast.planning import PlanSpec
from phaze_fast.records import Record
from phaze_fast.software import Software
from phaze_fast.wafer import FaultMap, Wafer, WaferSpace

_TYPES: dict[str, Any] = {
    "chip": Accelerator,
    "fabric": Fabric,
    "cluster": Cluster,
    "space": SpaceSpec,
    "wafer": Wafer,
    "wafer-space": WaferSpace,
    "fault-map": FaultMap,
    "energy-table": EnergyTable,
    "model": TransformerModel,
    "software": Software,
    "graph": GraphModel,
    "plan": PlanSpec,
}
KINDS = tuple(_TYPES)
"""Kinds of file that can be read."""


def schema(kind: str) -> dict[str, Any]:
    """Return the JSON Schema of a kind of file.

    Examples
    --------
    >>> schema("chip")["title"]
    'Accelerator'
    """
    document = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:phaze-fast:{kind}",
        **TypeAdapter(_TYPES[kind]).json_schema(mode="validation"),
    }
    plain: dict[str, Any] = json.loads(json.dumps(document, sort_keys=True))
    return plain


def parse_as(kind: str, data: object, source: str) -> Record:
    """Validate plain data as a kind of file.

    Raises
    ------
    InvalidInputError
        Where the kind is unknown, or the data is not a valid file of that kind.
    """
    if kind not in KINDS:
        raise InvalidInputError(f"kind: {kind!r} is not accepted; {nearest(kind, KINDS)}")
    if kind == "fabric":
        return fabric_from_dict(data, source)
    if kind == "plan":  # the whole JSON output of the command `plan` is accepted too
        return PlanSpec.of(cast("Any", data))
    return cast("type[Record]", _TYPES[kind]).from_dict(data, source)
