"""How state, sequences and experts are shared: options of `plan` and of `predict`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from phaze_fast.cli.plan_options import several

__all__ = ["Sharing", "SharingTried"]

Imbalance = Annotated[
    float | None,
    typer.Option(
        metavar="FACTOR",
        help="Tokens of the busiest device of an expert group over their mean (default 1).",
    ),
]
Overlap = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE",
        help="Share of the time of exchanges among experts that other work hides (default 0).",
    ),
]


def _given(named: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in named.items() if value is not None}


@dataclass(frozen=True)
class SharingTried:
    """What `plan` may try."""

    shard: Annotated[
        str | None,
        typer.Option(
            help="Neighbouring replicas that share what --zero shares, in groups that hold copies "
            "(hybrid sharding): counts, all, or node; several to try. By default all, and with "
            "ZeRO 2 and 3 node too."
        ),
    ] = None
    cp_kind: Annotated[
        str | None,
        typer.Option(
            help="How devices that share a sequence attend to all of it: all-gather, ring or "
            "ulysses; several to try. By default all that the model allows."
        ),
    ] = None
    etp: Annotated[
        str | None,
        typer.Option(
            help="Devices that share each expert (expert-tensor parallelism); several to try. By "
            "default as many as --tp."
        ),
    ] = None
    expert_imbalance: Imbalance = None
    expert_overlap: Overlap = None

    def given(self) -> dict[str, Any]:
        """Give what was said, by the names of `Training`."""
        return _given(
            {
                "shard": self.shard and tuple(self.shard.lower().split(",")),
                "cp_kind": self.cp_kind and tuple(self.cp_kind.lower().split(",")),
                "etp": several(self.etp, "etp"),
                "expert_imbalance": self.expert_imbalance,
                "expert_overlap": self.expert_overlap,
            }
        )


@dataclass(frozen=True)
class Sharing:
    """What a plan that is given has."""

    shard: Annotated[
        int | None,
        typer.Option(
            help="Neighbouring replicas that share what --zero shares, in groups that hold copies "
            "(hybrid sharding; default all)."
        ),
    ] = None
    cp_kind: Annotated[
        str | None,
        typer.Option(
            help="How devices that share a sequence attend to all of it: all-gather (default), "
            "ring or ulysses."
        ),
    ] = None
    etp: Annotated[
        int | None,
        typer.Option(help="Devices that share each expert (default: as many as --tp)."),
    ] = None
    expert_imbalance: Imbalance = None
    expert_overlap: Overlap = None

    def given(self) -> dict[str, Any]:
        """Give what was said, by the names of `PlanSpec`."""
        return _given(
            {
                "shard": self.shard,
                "cp_kind": self.cp_kind and self.cp_kind.lower(),
                "etp": self.etp,
                "expert_imbalance": self.expert_imbalance,
                "expert_overlap": self.expert_overlap,
            }
        )
