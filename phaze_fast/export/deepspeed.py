"""DeepSpeed: a plan as a configuration file, and such a file as a plan.

The file has neither stages nor what is recomputed: DeepSpeed takes both from the program.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from phaze_fast.errors import InvalidInputError
from phaze_fast.export.request import (
    FlagNames,
    Request,
    Unexpressed,
    flag_names,
    nested_value,
    set_nested,
    whole_number,
)
from phaze_fast.models import TransformerModel
from phaze_fast.software import BF16


def _missing(request: Request, names: FlagNames) -> list[Unexpressed]:
    spec = request.spec
    return request.unexpressed(
        names,
        pp=spec.pp > 1,
        vpp=spec.vpp > 1 and spec.pp == 1,
        cp=spec.cp > 1,
        ep=spec.ep > 1,
        recompute=not request.modes <= {"none"},
        sequence_parallel=spec.tp > 1 and spec.sequence_parallel,
        optimizer=spec.optimizer not in names.tables["gradient_formats"],
        rank_order=request.stages_inside,
        shard=request.hybrid and spec.zero < 3,
        seq=spec.seq not in (None, request.model.seq),
        precision=spec.precision.name != BF16,
    )


def write_deepspeed(request: Request) -> tuple[str, list[Unexpressed]]:
    """Write a plan as a DeepSpeed configuration."""
    names, spec = flag_names("deepspeed"), request.spec
    settings: dict[str, Any] = {
        "global_batch": spec.global_batch,
        "micro_batch": spec.micro_batch,
        "micro_batches": request.rounds,
    }
    if spec.tp > 1:
        settings["tp"] = spec.tp
    settings["zero"] = spec.zero
    if spec.zero == 3 and request.hybrid:
        settings["shard"] = spec.shard
    settings |= {
        "overlap": True,
        "bf16": True,
        "gradients": names.tables["gradient_formats"].get(spec.optimizer, "fp32"),
        "optimizer": "AdamW",
        "optimizer_settings": {"lr": 1e-4},
    }
    data: dict[str, Any] = {}
    for key, value in settings.items():
        set_nested(data, names[key], value)
    return json.dumps(data, indent=2) + "\n", _missing(request, names)


def read_deepspeed(
    data: Mapping[str, Any], model: TransformerModel, devices: int | None
) -> tuple[dict[str, Any], list[str]]:
    """Read a DeepSpeed configuration as the fields of a plan, and notes.

    The file has one stage and recomputes nothing.
    """
    names = flag_names("deepspeed")

    def count(key: str, default: int | None = None) -> int:
        value = nested_value(data, names[key])
        return whole_number(names[key], default if value is None else value)

    batch, micro_batch = count("global_batch"), count("micro_batch", 1)
    rounds = count("micro_batches", 1)
    if micro_batch * rounds == 0 or batch % (micro_batch * rounds):
        raise InvalidInputError(
            f"{names['global_batch']}: {batch} is not accepted; expected a multiple of "
            f"{micro_batch} x {rounds}"
        )
    tp, dp = count("tp", 1), batch // (micro_batch * rounds)
    sharded = nested_value(data, names["shard"]) not in (None, -1, 0)  # MiCS is off by default
    half = nested_value(data, names["gradients"]) == "bf16"
    fields = {
        "tp": tp,
        "dp": dp,
        "micro_batch": micro_batch,
        "global_batch": batch,
        "zero": count("zero", 0),
        "shard": count("shard") if sharded else None,
        "recompute": "none",
        "sequence_parallel": tp == 1,
        "optimizer": "adam-bf16-grad" if half else "adam",
        "idle": True,
    }
    note = f"{model.name} in one stage, nothing recomputed; the program says otherwise"
    if devices is not None and tp * dp != devices:
        note += f"; it uses {tp * dp} of {devices} devices"
    return fields, [note]
