"""What `plan` and `predict` are both told: the hardware and the step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from phaze_fast.cli.model_argument import MODEL_HELP
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import Cluster, presets
from phaze_fast.software import BF16, DEFAULT, precision_names, software_names

__all__ = ["Hardware", "ModelName", "PrecisionName", "SoftwareName", "Step", "several"]


SoftwareName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE",
        help=f"Profile of the software that runs the step: {', '.join(software_names())}, or a "
        f"file (default {DEFAULT}).",
    ),
]


PrecisionName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=f"Number format of the blocks' products: {', '.join(precision_names())} (default "
        f"{BF16}).",
        autocompletion=lambda: list(precision_names()),
    ),
]


def _models() -> list[str]:
    from phaze_fast import models

    return list(models.names())


def _chips() -> list[str]:
    return list(presets.chip_names())


def _fabrics() -> list[str]:
    return list(presets.fabric_names())


ModelName = Annotated[
    str,
    typer.Argument(
        help=MODEL_HELP,
        autocompletion=_models,
    ),
]


def several(text: str | None, name: str) -> tuple[int, ...] | None:
    """Read whole numbers, separated by commas.

    Examples
    --------
    >>> several("1,2,4", "tp")
    (1, 2, 4)
    """
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InvalidInputError(
            f"{name}: {text!r} is not accepted; expected whole numbers separated by commas"
        ) from None


@dataclass(frozen=True)
class Hardware:
    """The cluster."""

    chip: Annotated[
        str,
        typer.Option(
            help="The chip: a preset (`phaze-fast chips` lists them) or a file.",
            autocompletion=_chips,
        ),
    ]
    devices: Annotated[int, typer.Option(help="How many devices the cluster has.")]
    fabric: Annotated[
        str | None,
        typer.Option(
            help="How the devices are wired: a preset (`phaze-fast fabrics` lists them) or a file; "
            "by default the chip's usual one.",
            autocompletion=_fabrics,
        ),
    ] = None

    def cluster(self) -> Cluster:
        """Look chip and fabric up; the fabric is the chip's usual one where none is given."""
        chip = presets.chip(self.chip)
        fabric = self.fabric or chip.usual_fabric
        if not fabric:
            raise InvalidInputError(
                f"fabric: missing, and {chip.name} has no default fabric; accepted: "
                f"{', '.join(presets.fabric_names())}, or a file"
            )
        return Cluster.from_dict({"devices": self.devices, "fabric": fabric, "chip": self.chip})


@dataclass(frozen=True)
class Step:
    """The step, as far as both commands mean the same by it."""

    seq: Annotated[
        int | None, typer.Option(help="Tokens of a sequence (default: as the model is published).")
    ] = None
    sequence_parallel: Annotated[
        bool | None,
        typer.Option(help="Share the rows of norms among tensor-parallel devices (default yes)."),
    ] = None
    reserve: Annotated[
        str | None,
        typer.Option(
            help="Memory of each device that is not for the model, such as 3GiB or 1500 MB "
            "(default 1.5 GiB)."
        ),
    ] = None
    optimizer: Annotated[
        str | None, typer.Option(help="The optimiser, whose state takes memory (default adam).")
    ] = None
    precision: PrecisionName = None
    software: SoftwareName = None

    def given(self) -> dict[str, Any]:
        """Give what was said, by the names of the records' fields."""
        named = {
            "seq": self.seq,
            "sequence_parallel": self.sequence_parallel,
            "reserved_bytes": self.reserve,
            "optimizer": self.optimizer,
            "precision": self.precision,
            "software": self.software,
        }
        return {name: value for name, value in named.items() if value is not None}
