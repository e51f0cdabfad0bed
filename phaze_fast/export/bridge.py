"""Megatron Bridge (NeMo): a plan as overrides of a recipe, and such overrides as a plan."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from phaze_fast.errors import InvalidInputError
from phaze_fast.export.megatron import comments, not_used, read_world
from phaze_fast.export.megatron_model import model_terms
from phaze_fast.export.megatron_plan import Terms, plan_terms, read_terms
from phaze_fast.export.names import flag_names
from phaze_fast.export.nested import flat
from phaze_fast.export.request import Exported, ReadPlan, Request
from phaze_fast.export.shell import command, options_of, settings_of
from phaze_fast.models import TransformerModel
from phaze_fast.planning import PlanSpec

__all__ = ["read_bridge", "write_bridge"]

_RECIPE = "examples/recipes/llama/pretrain_llama3_8b.py"
_MODEL = (
    *("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "experts", "top_k"),
    "expert_ffn",
)
_WHOLE = (
    *("tp", "pp", "cp", "ep", "expert_tp", "vpp", "first_stage", "last_stage", "layers"),
    *("micro_batch", "global_batch", "seq", "recompute_layers", "instances"),
)
_NOTHING = ("", "null", "None", "none")


def _written(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return json.dumps(value) if isinstance(value, list) else str(value)


def write_bridge(request: Request) -> Exported:
    """Write a plan as a command that overrides a recipe of Megatron Bridge."""
    names = flag_names("bridge")
    terms, missing = plan_terms(request)
    of_model, unsaid = model_terms(request.model, terms["seq"])
    missing += unsaid
    terms["gradients_fp32"] = not terms.pop("gradients_bf16", False)
    terms["dataset_seq"] = terms["seq"]
    if terms.get("zero_1"):
        terms["zero_1_optimizer"] = True
    terms |= {key: of_model[key] for key in _MODEL if key in of_model}
    if request.model.kv_heads is None:
        terms["kv_heads"] = request.model.heads
    nodes, each = request.world
    start = ["torchrun", names["nodes"], str(nodes), names["node_devices"], str(each)]
    text = command(
        [*comments(names, request, missing), "Any recipe will do: what matters is overridden."],
        [*start, _RECIPE],
        [[f"{names[key]}={_written(value)}"] for key, value in terms.items()],
    )
    return Exported("bridge", text, tuple(missing))


def read_bridge(
    text: str | Mapping[str, Any], source: str, model: TransformerModel, devices: int | None
) -> ReadPlan:
    """Read overrides of a recipe, as a command or as nested data, as a plan."""
    names = flag_names("bridge")
    given: dict[str, Any] = settings_of(text, source) if isinstance(text, str) else flat(text)
    terms: Terms = {}
    for key, name in names.names.items():
        value = given.get(name)
        if value is None or str(value) in _NOTHING:
            continue
        if key in _WHOLE:
            value = _number(name, value, source)
        elif str(value).lower() in ("true", "false"):
            value = str(value).lower() == "true"
        elif key == "recompute_modules" and isinstance(value, str):
            value = [word.strip(" '\"") for word in value.strip("[]").split(",")]
        terms[key] = value
    terms["bf16"] = terms.get("bf16", True)
    terms["gradients_bf16"] = not terms.get("gradients_fp32", True)
    if isinstance(text, str):
        terms |= read_world(names, options_of(text, source))
    try:
        fields = read_terms(terms, model, devices, names.__getitem__)
    except InvalidInputError as error:
        raise InvalidInputError(f"{source}: {error}") from None
    unused = [name for name in given if name not in set(names.names.values())]
    return ReadPlan(PlanSpec.from_dict(fields, source), not_used(source, unused))


def _number(name: str, value: object, source: str) -> int:
    try:
        return int(str(value))
    except ValueError:
        raise InvalidInputError(
            f"{source}: {name}: {value!r} is not accepted; expected a whole number"
        ) from None
