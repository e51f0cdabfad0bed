"""The command `check`: what a file says, or the JSON Schema of files of its kind."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from phaze_fast.cli.output import Output
from phaze_fast.documents import read_document, to_yaml
from phaze_fast.errors import InvalidInputError, check_one_of
from phaze_fast.schemas import KINDS, parse_as, schema


@dataclass(frozen=True)
class Checking:
    """What to check."""

    kind: str | None = None
    """The kind of the file, of those that --schema takes; by default guessed."""
    schema: Annotated[str | None, typer.Option(metavar="KIND")] = None
    """Print the JSON Schema of files of a kind instead: chip, fabric, cluster, space, wafer,
    wafer-space, fault-map, energy-table, model, software, graph, plan, or all."""


def check(
    file: Annotated[Path | None, typer.Argument(help="A .yaml or .json file.")] = None,
    *,
    how: Checking,
    output: Output,
) -> None:
    """Check a file, or print the JSON Schema of its kind.

    The content of the file is printed with every default filled in.

    Example: phaze-fast check chip.yaml
    """
    if (file is None) == (how.schema is None):
        raise InvalidInputError("FILE, --schema: expected one of them")
    if how.schema is not None:
        check_one_of("--schema", how.schema, [*KINDS, "all"])
        every = how.schema == "all"
        output.write({name: schema(name) for name in KINDS} if every else schema(how.schema))
        return
    data = read_document(str(file))
    kind = how.kind or _guess_kind(data)
    record = parse_as(kind, data, str(file)).model_dump(mode="json")
    output.emit(
        lambda: {"kind": kind, "record": record},
        lambda: [f"{file}: a valid {kind}", to_yaml(record).rstrip()],
    )


def _guess_kind(data: object) -> str:
    keys = set(data) if isinstance(data, dict) else set()
    if "layers" in keys:
        return "model"
    if keys & {"tp", "pp", "dp", "plan", "plans", "global_batch"}:
        return "plan"
    if "die" in keys:
        return "wafer"
    axes = data.get("axes") if isinstance(data, dict) else None
    if isinstance(axes, dict) and any(str(field).startswith("die.") for field in axes):
        return "wafer-space"
    if keys & {"axes", "base"}:
        return "space"
    if keys & {"devices", "fabric"}:
        return "cluster"
    if keys & {"kind", "tiers", "dims", "bandwidth_bytes_per_s", "link_bandwidth_bytes_per_s"}:
        return "fabric"
    return "software" if keys & {"host_s", "attention"} else "chip"
