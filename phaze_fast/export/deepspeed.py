"""DeepSpeed: a plan as a configuration file, and such a file as a plan.

A DeepSpeed configuration has neither stages nor recomputation: the user's program sets both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from phaze_fast.errors import InvalidInputError
from phaze_fast.export.request import (
    Request,
    Unexpressed,
    flag_names,
    nested_value,
    whole_number,
)
from phaze_fast.models import TransformerModel


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
    if spec.offload_optimizer and spec.zero:
        settings |= {"offload": "cpu", "offload_pinned": True}
    settings |= {
        "overlap": True,
        "bf16": True,
        "gradients": names.tables["gradient_formats"].get(spec.optimizer_name, "fp32"),
        "optimizer": "AdamW",
        "optimizer_settings": {"lr": 1e-4},
    }
    missing = request.unexpressed(
        names,
        recompute=not request.modes <= {"none"},
        seq=spec.seq not in (None, request.model.seq),
    )
    missing += request.unexpressed_model(names, program=True)
    return json.dumps(names.nested(settings), indent=2) + "\n", missing


def read_deepspeed(
    data: Mapping[str, Any], model: TransformerModel, devices: int | None
) -> tuple[dict[str, Any], list[str]]:
    """Read a DeepSpeed configuration as the fields of a plan, and notes.

    The result has one stage and no recomputation, since the file has neither.
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
        "offload_optimizer": nested_value(data, names["offload"]) == "cpu",
        "recompute": "none",
        "sequence_parallel": tp == 1,
        "optimizer": "adam-bf16-grad" if half else "adam",
        "idle": True,
    }
    note = f"{model.name} in one stage, nothing recomputed; the program says otherwise"
    if devices is not None and tp * dp != devices:
        note += f"; it uses {tp * dp} of {devices} devices"
    return fields, [note]
