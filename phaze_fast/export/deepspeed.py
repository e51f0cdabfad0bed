"""DeepSpeed: a plan as a configuration file, and such a file as a plan.

The file has neither stages nor what is recomputed: DeepSpeed takes both from the program.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from phaze_fast.errors import InvalidInputError
from phaze_fast.export.names import flag_names
from phaze_fast.export.nested import get, put
from phaze_fast.export.request import Exported, ReadPlan, Request, Unexpressed, facts_unsaid
from phaze_fast.models import TransformerModel
from phaze_fast.planning import PlanSpec
from phaze_fast.software import BF16

__all__ = ["read_deepspeed", "write_deepspeed"]

_GRADIENTS = {"adam": "fp32", "adam-bf16-grad": "bf16"}


def _missing(request: Request) -> list[Unexpressed]:
    spec, found = request.spec, facts_unsaid(request.spec)
    if spec.pp > 1:
        found.append(
            Unexpressed(
                f"--pp {spec.pp}, --schedule {spec.schedule}, --stages",
                "the program says them: PipelineModule(num_stages=...)",
            )
        )
    if spec.vpp > 1 and spec.pp == 1:
        found.append(Unexpressed(f"--vpp {spec.vpp}", "DeepSpeed has no chunks"))
    if spec.cp > 1:
        found.append(Unexpressed(f"--cp {spec.cp}", "no ring over the sequence"))
    if spec.ep > 1:
        found.append(Unexpressed(f"--ep {spec.ep}", "the program says it: MoE(ep_size=...)"))
    if not request.modes <= {"none"}:
        said = spec.recompute if isinstance(spec.recompute, str) else ",".join(spec.recompute)
        found.append(Unexpressed(f"--recompute {said}", "the program says which blocks"))
    if spec.tp > 1 and spec.sequence_parallel:
        found.append(
            Unexpressed("--sequence-parallel", "its tensor parallelism does not share norms")
        )
    if spec.optimizer not in _GRADIENTS:
        found.append(Unexpressed(f"--optimizer {spec.optimizer}", "written as adam"))
    if spec.rank_order == "stages-inside" and spec.dp > 1 and spec.pp > 1:
        found.append(Unexpressed("--rank-order stages-inside", "the program says it"))
    if spec.shard is not None and spec.shard < spec.dp and spec.zero < 3:
        found.append(Unexpressed(f"--shard {spec.shard}", "MiCS shares with ZeRO 3 alone"))
    if spec.seq is not None and spec.seq != request.model.seq:
        found.append(Unexpressed(f"--seq {spec.seq}", "the data say it"))
    if spec.precision.name != BF16:
        found.append(Unexpressed(f"--precision {spec.precision.name}", "written as bf16"))
    return found


def write_deepspeed(request: Request) -> Exported:
    """Write a plan as a DeepSpeed configuration."""
    names, spec = flag_names("deepspeed"), request.spec
    data: dict[str, Any] = {}
    put(data, names["global_batch"], spec.global_batch)
    put(data, names["micro_batch"], spec.micro_batch)
    rounds = spec.global_batch // (spec.dp * spec.micro_batch)
    put(data, names["micro_batches"], rounds)
    if spec.tp > 1:
        put(data, names["tp"], spec.tp)
    put(data, names["zero"], spec.zero)
    if spec.zero == 3 and spec.shard is not None and spec.shard < spec.dp:
        put(data, names["shard"], spec.shard)
    put(data, names["overlap"], True)
    put(data, names["bf16"], True)
    put(data, names["gradients"], _GRADIENTS.get(spec.optimizer, "fp32"))
    put(data, names["optimizer"], "AdamW")
    put(data, names["optimizer_settings"], {"lr": 1e-4})
    return Exported("deepspeed", json.dumps(data, indent=2) + "\n", tuple(_missing(request)))


def _count(data: Mapping[str, Any], name: str, source: str, default: int | None = None) -> int:
    value = get(data, name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidInputError(
            f"{source}: {name}: {value!r} is not accepted; expected a whole number"
        )
    return value


def _read_shard(data: Mapping[str, Any], name: str, source: str) -> int | None:
    """Replicas that share state by MiCS; it is off where the size is not positive."""
    value = get(data, name)
    return None if value in (None, -1, 0) else _count(data, name, source)


def read_deepspeed(
    data: Mapping[str, Any], source: str, model: TransformerModel, devices: int | None
) -> ReadPlan:
    """Read a DeepSpeed configuration as a plan: one stage, nothing recomputed."""
    names = flag_names("deepspeed")
    batch = _count(data, names["global_batch"], source)
    micro_batch = _count(data, names["micro_batch"], source, 1)
    rounds = _count(data, names["micro_batches"], source, 1)
    if micro_batch * rounds == 0 or batch % (micro_batch * rounds):
        raise InvalidInputError(
            f"{source}: {names['global_batch']}: {batch} is not accepted; expected a multiple of "
            f"{micro_batch} x {rounds}"
        )
    tp = _count(data, names["tp"], source, 1)
    dp = batch // (micro_batch * rounds)
    half = get(data, names["gradients"]) == "bf16"
    fields = {
        "tp": tp,
        "dp": dp,
        "micro_batch": micro_batch,
        "global_batch": batch,
        "zero": _count(data, names["zero"], source, 0),
        "shard": _read_shard(data, names["shard"], source),
        "recompute": "none",
        "sequence_parallel": tp == 1,
        "optimizer": "adam-bf16-grad" if half else "adam",
        "idle": True,
    }
    note = f"{source}: {model.name} in one stage, nothing recomputed; the program says otherwise"
    if devices is not None and tp * dp != devices:
        note += f"; it uses {tp * dp} of {devices} devices"
    return ReadPlan(PlanSpec.from_dict(fields, source), (note,))
