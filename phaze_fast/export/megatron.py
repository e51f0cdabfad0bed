"""Megatron-LM: a plan as a command with arguments, and such a command as a plan."""

from __future__ import annotations

from collections.abc import Sequence

from phaze_fast.errors import InvalidInputError
from phaze_fast.export.megatron_model import model_terms, program
from phaze_fast.export.megatron_plan import Terms, plan_terms, read_terms
from phaze_fast.export.names import FlagNames, flag_names
from phaze_fast.export.request import Exported, ReadPlan, Request, Unexpressed
from phaze_fast.export.shell import Options, command, options_of, whole
from phaze_fast.models import TransformerModel
from phaze_fast.planning import PlanSpec

__all__ = ["read_megatron", "write_megatron"]

_WHOLE = (
    *("tp", "pp", "cp", "ep", "expert_tp", "vpp", "virtual_layers", "first_stage"),
    *(
        "last_stage",
        "micro_batch",
        "global_batch",
        "seq",
        "recompute_layers",
        "layers",
        "instances",
    ),
)
_FLAGS = (
    *("count_embedding", "count_head", "sequence_parallel", "stages_inside", "zero_1", "fsdp"),
    *("recompute_selective", "bf16", "gradients_bf16"),
)
_WORDS = (
    "layout",
    "cp_kind",
    "fsdp_strategy",
    "recompute",
    "recompute_method",
    "optimizer",
    "sgd_momentum",
)
_FORMATS = ("fp8_format", "fp8_recipe", "fp4_format", "fp4_recipe")


def comments(names: FlagNames, request: Request, missing: Sequence[Unexpressed]) -> list[str]:
    """Give the first lines of a file: what it is of, and what of the plan it does not say."""
    lines = [f"{request.title}: {names.title}", f"Names of flags as in {names.version}."]
    return lines + [f"Not expressed: {item}" for item in missing]


def _arguments(names: FlagNames, terms: Terms) -> list[list[object]]:
    found: list[list[object]] = []
    for key, value in terms.items():
        if value is False or value is None or key not in names.names:
            continue
        if value is True:
            found.append([names[key]])
        else:
            found.append([names[key], *(value if isinstance(value, list) else [value])])
    return found


def write_megatron(request: Request) -> Exported:
    """Write a plan as a command that runs Megatron-LM on made-up data."""
    names = flag_names("megatron")
    terms, missing = plan_terms(request)
    of_model, unsaid = model_terms(request.model, terms["seq"])
    missing += unsaid
    if "layout" in terms:
        terms.pop("vpp", None)  # Megatron-LM reads it off the layout
    nodes, each = request.world
    start = ["torchrun", names["nodes"], str(nodes), names["node_devices"], str(each)]
    text = command(
        comments(names, request, missing),
        [*start, program(request.model)],
        _arguments(names, {**terms, **of_model}),
    )
    return Exported("megatron", text, tuple(missing))


def read_megatron(text: str, source: str, model: TransformerModel, devices: int | None) -> ReadPlan:
    """Read a command that runs Megatron-LM as a plan."""
    names = flag_names("megatron")
    options = options_of(text, source)
    terms: Terms = {}
    for key in _WHOLE:
        if names[key] in options:
            terms[key] = whole(options, names[key], 0)
    terms |= {key: names[key] in options for key in _FLAGS}
    for key in (*_WORDS, *_FORMATS):
        if options.get(names[key]):
            terms[key] = options[names[key]][0]
    if names["recompute_modules"] in options:
        terms["recompute_modules"] = options[names["recompute_modules"]]
    terms |= read_world(names, options)
    try:
        fields = read_terms(terms, model, devices, names.__getitem__)
    except InvalidInputError as error:
        raise InvalidInputError(f"{source}: {error}") from None
    used = set(names.names.values()) | _spellings(names)
    unused = [name for name in options if name not in used]
    return ReadPlan(PlanSpec.from_dict(fields, source), not_used(source, unused))


def read_world(names: FlagNames, options: Options) -> Terms:
    """Nodes and devices of each that a command starts, where it says so."""
    spelled: Options = {name.replace("_", "-"): value[:1] for name, value in options.items()}
    if names["node_devices"] not in spelled:
        return {}
    return {
        "nodes": whole(spelled, names["nodes"], 1),
        "node_devices": whole(spelled, names["node_devices"], 1),
    }


def _spellings(names: FlagNames) -> set[str]:
    """Give the names that torchrun takes with underscores as well."""
    return {
        "--" + names[key].removeprefix("--").replace("-", "_") for key in ("nodes", "node_devices")
    }


def not_used(source: str, unused: Sequence[str]) -> tuple[str, ...]:
    """Say which options of a file the prediction does not look at."""
    if not unused:
        return ()
    return (f"{source}: the prediction does not depend on {', '.join(unused)}",)
