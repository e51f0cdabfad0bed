"""Megatron-LM and Megatron Bridge (NeMo): a plan as a shell command, and such a command as a plan.

Megatron-LM takes arguments, Megatron Bridge overrides of a recipe. Both set the same options of
Megatron-Core, which are called terms here: a dictionary by the keys of ``data/megatron.yaml``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from phaze_fast.errors import InvalidInputError, not_accepted
from phaze_fast.export.megatron_model import (
    Terms,
    check_sizes,
    missing_model,
    model_terms,
    pattern_text,
)
from phaze_fast.export.request import (
    Chunk,
    FlagNames,
    Request,
    Unexpressed,
    command,
    flag_names,
    flattened,
    not_used,
    options_of,
    settings_of,
    shipped_name,
    stage_sizes,
    whole_number,
)
from phaze_fast.models import TransformerModel
from phaze_fast.opgraph import context_widths
from phaze_fast.planning.frameworks import framework_table

_WHOLE = frozenset(
    [
        *("nodes", "node_devices", "tp", "pp", "cp", "ep", "expert_tp", "vpp", "virtual_layers"),
        *("first_stage", "last_stage", "layers", "micro_batch", "global_batch", "seq"),
        *("recompute_layers", "offload_layers", "instances"),
    ]
)
"""Terms that are whole numbers."""
_LISTS = ("recompute_modules", "cp_sizes")
"""Terms that are lists of words."""
_MIXED = "ulysses:N/ring"


# ---- pipelines as a layout string ----

_LONGEST_LAYOUT = 100_000
_REPEATED = re.compile(r"\(([^()]*)\)\*(\d+)|([Etm L|])\*(\d+)")


def layout_text(chunks: Sequence[Chunk]) -> str:
    """Write chunks, in the order of the model, as Megatron-Core's layout string.

    The string has a letter for each layer: E the embedding, t a block, L the loss with the head.
    Bars end chunks, a star repeats a letter or a group in brackets, commas and blanks are ignored.

    Examples
    --------
    >>> layout_text([Chunk(True, range(3), False, "none"), Chunk(False, range(3, 4), True, "none")])
    'Et*3|tL'
    """

    def letters(chunk: Chunk) -> str:
        count = len(chunk.blocks)
        blocks = "t" * count if count < 2 else f"t*{count}"
        return "E" * chunk.embedding + blocks + "L" * chunk.head

    return "|".join(letters(chunk) for chunk in chunks)


def read_layout(text: str, name: str) -> list[int]:
    """Read a layout string: the number of layers of each chunk, embedding and head counted.

    Parameters
    ----------
    text
        The layout string.
    name
        The option that gave the string, for messages.

    Raises
    ------
    InvalidInputError
        Where the string is malformed, or has layers that a plan does not have.

    Examples
    --------
    >>> read_layout("Et*3|(tt|)*2tL", "--layout")
    [4, 2, 2, 2]
    """
    plain = re.sub(r"[,\s]", "", text)
    while (match := _REPEATED.search(plain)) is not None:
        group, times, letter, count = match.groups()
        part, number = (group, times) if group is not None else (letter, count)
        if len(number) > 6 or len(part) * int(number) > _LONGEST_LAYOUT:
            raise InvalidInputError(f"{name}: {text[:60]!r} is not accepted; it is too long")
        plain = plain[: match.start()] + part * int(number) + plain[match.end() :]
    plain = plain.removesuffix("|")
    if not re.fullmatch(r"[EtL|]+", plain) or plain.count("E") != 1 or plain.count("L") != 1:
        raise InvalidInputError(
            f"{name}: {text[:60]!r} is not accepted; expected one E, one L and letters t, divided "
            "by bars, such as Et*3|t*4|t*3L (m, extra prediction layers, is not known)"
        )
    if not plain.replace("|", "").startswith("E") or not plain.endswith("L"):
        raise InvalidInputError(
            f"{name}: {text[:60]!r} is not accepted; expected E first and L last"
        )
    return [len(part) for part in plain.split("|")]


# ---- written ----


def write_megatron(request: Request) -> tuple[str, list[Unexpressed]]:
    """Write a plan as a command that runs Megatron-LM on mock data."""
    names = flag_names("megatron")
    terms, missing = _plan_terms(request)
    missing += missing_model(request)
    terms |= model_terms(request.model, terms["seq"])
    terms |= {
        "tokenizer": "NullTokenizer",
        "vocab": max(request.model.vocab - 1, 1),  # the tokenizer adds an end-of-document token
        "vocab_multiple": 1,
        "mock_data": True,
        "steps": 10,
    }
    if "layout" in terms:
        terms.pop("vpp", None)  # Megatron-LM derives vpp from the layout
    arguments: list[list[object]] = []
    terms.pop("offload_on", None)  # implied by the number of offloaded layers
    for key, value in terms.items():
        if value is True:
            arguments.append([names[key]])
        elif isinstance(value, tuple):
            arguments.append([names[key], pattern_text(value)])
        elif value is not False and value is not None:
            arguments.append([names[key], *(value if isinstance(value, list) else [value])])
    program = "pretrain_bert.py" if request.model.head == "mlm" else "pretrain_gpt.py"
    words = [*_torchrun(names, request), program]
    return command(request.remarks(names, missing), words, arguments), missing


_RUNNER = "scripts/training/run_recipe.py"


def _recipe(model: TransformerModel) -> tuple[str, str]:
    """Return a recipe of Megatron Bridge to start from, and a remark on it."""
    own, bases = shipped_name(model, "bridge"), flag_names("bridge").tables["recipes"]
    if own is not None:
        return own, "The recipe is of this model; the overrides repeat its sizes."
    base = bases["latent" if model.latent else "other"]
    return base, "There is no recipe of this model: the overrides give its architecture."


def write_bridge(request: Request) -> tuple[str, list[Unexpressed]]:
    """Write a plan as a command that overrides a recipe of Megatron Bridge."""
    names, model = flag_names("bridge"), request.model
    (recipe, remark), shipped = _recipe(model), shipped_name(model, "bridge") is not None
    terms, missing = _plan_terms(request)
    missing += missing_model(request, any_activation=True)
    of_model = model_terms(model, terms["seq"])
    terms["gradients_fp32"] = not terms.pop("gradients_bf16", False)
    terms["dataset_seq"] = terms["seq"]
    if terms.get("zero_1"):
        terms["zero_1_optimizer"] = True
    of_model |= {
        "kv_heads": model.kv_heads or model.heads,
        "tied": model.tied_embeddings,
        "bias": not of_model["no_bias"],
        "vocab": model.vocab,
        "vocab_multiple": 1,
        "tokenizer": "NullTokenizer",
        "tokens": max(model.vocab - 1, 1),
        "mtp": model.mtp_layers or None,
    }
    if not shipped:
        of_model["activation"] = model.activation
    terms |= {key: value for key, value in of_model.items() if key in names.names}
    if "window" in terms:
        terms["window"] = [int(tokens) for tokens in terms["window"].split(",")]
    remarks = [*request.remarks(names, missing), remark]
    overrides = [[f"{names[key]}={_override(value)}"] for key, value in terms.items()]
    words = [*_torchrun(names, request), _RUNNER, names["recipe"], recipe]
    return command(remarks, words, overrides), missing


def _override(value: object) -> str:
    plain = value is None or isinstance(value, bool | list | tuple)
    return json.dumps(value) if plain else str(value)


def _torchrun(names: FlagNames, request: Request) -> list[str]:
    nodes, used = request.world
    return ["torchrun", names["nodes"], str(nodes), names["node_devices"], str(used)]


def _plan_terms(request: Request) -> tuple[Terms, list[Unexpressed]]:
    """Return a plan as terms of Megatron-Core, and the parts of it that terms cannot express."""
    spec, model, tables = request.spec, request.model, flag_names("megatron").tables
    recompute, recomputable = _recompute(request)
    terms: Terms = {"tp": spec.tp, "pp": spec.pp, "cp": spec.cp}
    if spec.cp > 1:
        sizes = context_widths(spec.cp_kind, spec.cp)
        terms["cp_kind"] = tables["cp_kinds"][spec.cp_kind if 1 in sizes else _MIXED]
        terms |= {"cp_sizes": list(sizes)} if 1 not in sizes else {}
    if model.moe is not None:
        terms |= {"ep": spec.ep, "expert_tp": spec.etp or spec.tp}
        terms["dispatcher"] = tables["dispatchers"][spec.strategy.dispatcher]
    terms |= {
        "micro_batch": spec.micro_batch,
        "global_batch": spec.global_batch,
        "seq": spec.seq or model.seq,
        "sequence_parallel": spec.sequence_parallel and spec.tp > 1,
        "stages_inside": spec.rank_order == "stages-inside" and spec.zero < 2,
        **_stages(request),
        **_sharding(request),
        **recompute,
        **tables["precisions"].get(spec.precision.name, {}),
        **tables["optimizers"].get(spec.optimizer_name, tables["optimizers"]["adam"]),
    }
    return terms, request.unexpressed(flag_names("megatron"), recompute=not recomputable)


def _stages(request: Request) -> Terms:
    """Return the terms of the stages."""
    spec = request.spec
    known = spec.schedule in framework_table("megatron")["schedules"] or spec.pp * spec.vpp == 1
    if not known and spec.vpp > 1:  # ZB-V and DualPipe have chunks, 1F1B does not
        return _even_stages(request)
    terms: Terms = {} if request.even else {"layout": layout_text(request.chunks)}
    if spec.vpp > 1:
        terms["vpp"] = spec.vpp
    return terms


def _even_stages(request: Request) -> Terms:
    """Return one chunk per stage, as even as possible, with larger stages last."""
    pp, blocks = request.spec.pp, request.model.layers + request.model.encoder_layers
    blocks_per_stage, left = divmod(blocks, pp)
    if not left:
        return {}
    counts = [blocks_per_stage + (k >= pp - left) for k in range(pp)]
    return {"layout": "E" + "|".join(f"t*{count}" if count else "" for count in counts) + "L"}


_OFFLOADED: Mapping[str, Any] = {
    "offload": True,
    "offload_share": 1.0,
    "offload_overlap": True,
    "offload_precise": True,  # required by the two terms above
}
"""Terms of an optimiser whose state is stored and updated by the host."""


def _sharding(request: Request) -> Terms:
    spec = request.spec
    copies = spec.tp // ((spec.etp or spec.tp) * spec.ep)  # copies of an expert in one replica
    if spec.dp * spec.cp == 1 and (copies == 1 or request.model.moe is None):
        return {"zero_1": True, **_OFFLOADED} if spec.offload_optimizer else {}
    terms: Terms = {"overlap_gradients": True}
    if spec.offload_optimizer and spec.zero == 1:
        terms |= _OFFLOADED
    if spec.zero:
        terms |= {"zero_1": True, "overlap_weights": True}
    if request.hybrid:
        terms["instances"] = spec.dp // (spec.shard or spec.dp)
    if spec.zero >= 2:
        strategies = flag_names("megatron").tables["fsdp_strategies"]
        terms |= {"fsdp": True, "fsdp_strategy": strategies[spec.zero]}
        terms["fsdp_checkpoints"] = "fsdp_dtensor"  # no other format is accepted
    return terms


def _recompute(request: Request) -> tuple[Terms, bool]:
    """Return the terms of recomputation, and whether they express what the plan recomputes."""
    full: Terms = {"recompute": "full", "recompute_method": "uniform", "recompute_layers": 1}
    modes = request.modes
    if modes <= {"none"}:
        return {}, True
    if modes == {"full"}:
        return full, True
    if (count := request.offloaded_blocks) is not None:
        return {"offload_layers": count, "offload_on": True}, True
    if request.full_blocks is not None:
        return {**full, "recompute_method": "block", "recompute_layers": request.full_blocks}, True
    modules = _modules(request.model, next(iter(modes))) if len(modes) == 1 else None
    if modules is None:
        return full, False
    return {"recompute": "selective", "recompute_modules": modules}, True


def _modules(model: TransformerModel, mode: str) -> list[str] | None:
    """Return the modules of Megatron-Core that recompute what a mode does; None if none do."""
    if mode == "selective":
        return ["core_attn"]
    operators = set(mode.split("+"))
    if operators == {"attention"} and model.attention == "eager":
        return None  # Megatron reads core_attn as selective
    of_module = _operators_of_modules(model)
    modules = [module for module, own in of_module.items() if own <= operators]
    expressed = set().union(*(of_module[module] for module in modules))
    return modules if operators == expressed else None


def _operators_of_modules(model: TransformerModel) -> dict[str, set[str]]:
    """Return the operators that each module recomputes; moe_act only if every block has experts."""
    modules = {"core_attn": {"attention"}, "layernorm": {"norms"}}
    if model.moe is not None and not model.moe.dense_layers:
        modules["moe_act"] = {"activations", "gated-product"} if model.gated else {"activations"}
    return modules


# ---- read ----


def read_megatron(
    text: str, model: TransformerModel, devices: int | None
) -> tuple[Terms, list[str]]:
    """Read a command that runs Megatron-LM: fields of a plan, and notes."""
    names, options = flag_names("megatron"), _options(text)
    terms: Terms = {}
    for key, name in names.names.items():
        if name in options:
            words: list[Any] = options[name] or ["" if key in _WHOLE else True]
            terms[key] = _term(key, name, words if key in _LISTS else words[0])
    unused = [name for name in options if name not in names.names.values()]
    return _fields(terms, model, devices, names), not_used(unused)


def read_bridge(
    text: str | Mapping[str, Any], model: TransformerModel, devices: int | None
) -> tuple[Terms, list[str]]:
    """Read overrides of a recipe, as a command or as nested data: fields, and notes."""
    names = flag_names("bridge")
    settings = dict(settings_of(text)) if isinstance(text, str) else flattened(text)
    values: dict[str, Any] = settings
    if isinstance(text, str):
        values = {**settings, **{name: words[0] for name, words in _options(text).items() if words}}
    terms = {
        key: _term(key, name, values[name])
        for key, name in names.names.items()
        if str(values.get(name)) not in ("", "null", "None", "none")
    }
    terms["bf16"] = terms.get("bf16", True)
    terms["gradients_bf16"] = not terms.get("gradients_fp32", True)
    unused = [name for name in settings if name not in names.names.values()]
    return _fields(terms, model, devices, names), not_used(unused)


def _options(text: str) -> dict[str, list[str]]:
    """Read the options of a command; torchrun takes underscores in place of dashes."""
    return {
        name.replace("_", "-") if name.startswith(("--nproc", "--nnodes")) else name: words
        for name, words in options_of(text).items()
    }


def _term(key: str, name: str, value: Any) -> Any:
    """Convert the value of an option to the type of its term."""
    if key in _WHOLE:
        return whole_number(name, value)
    if str(value).lower() in ("true", "false"):
        return str(value).lower() == "true"
    if key in _LISTS and isinstance(value, str):
        return [word.strip(" '\"") for word in value.strip("[]").split(",")]
    return value


def _fields(
    terms: Terms, model: TransformerModel, devices: int | None, names: FlagNames
) -> dict[str, Any]:
    """Return the fields of a `PlanSpec` from terms.

    Parameters
    ----------
    terms
        Values by the keys of `names`.
    model
        The model to train.
    devices
        Devices of the cluster, where the terms have no nodes.
    names
        Options by key, for messages.
    """
    check_sizes(terms, model, names)
    tp, pp, cp = (terms.get(name, 1) for name in ("tp", "pp", "cp"))
    world = devices
    if "node_devices" in terms:
        world = terms.get("nodes", 1) * terms["node_devices"]
    if world is None or world % (tp * pp * cp):
        raise InvalidInputError(
            f"{names['node_devices']}: {world} devices are not accepted; expected a multiple of "
            f"tp x pp x cp = {tp} x {pp} x {cp}"
        )
    sizes, vpp = _read_stages(terms, model, pp, names)
    dp, micro_batch = world // (tp * pp * cp), terms.get("micro_batch", 1)
    expert_tp = terms.get("expert_tp", tp)
    return {
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "dp": dp,
        "cp_kind": _read_cp_kind(terms, model, cp, names),
        "ep": terms.get("ep", 1),
        "etp": None if expert_tp == tp else expert_tp,
        "dispatcher": _read_dispatcher(terms, names),
        "offload_optimizer": _read_offload(terms, names),
        "micro_batch": micro_batch,
        "global_batch": terms.get("global_batch", dp * micro_batch),
        "seq": terms.get("seq"),
        **_read_sharding(terms, dp, names),
        "schedule": "interleaved" if vpp > 1 else "1f1b",
        "vpp": vpp,
        "stages": sizes,
        "recompute": _read_recompute(terms, model, names),
        "rank_order": "stages-inside" if terms.get("stages_inside") else "replicas-inside",
        "sequence_parallel": bool(terms.get("sequence_parallel")) or tp == 1,
        "precision": _read_precision(terms, names),
        "optimizer": _read_optimizer(terms, names),
        "idle": "node_devices" in terms,
    }


def _read_stages(
    terms: Terms, model: TransformerModel, pp: int, names: FlagNames
) -> tuple[tuple[int, ...], int]:
    """Return the layers of each chunk, and the chunks of a stage."""
    blocks = model.layers + model.encoder_layers
    if terms.get("layout"):
        sizes = read_layout(str(terms["layout"]), names["layout"])
        if len(sizes) % pp:
            raise InvalidInputError(
                f"{names['layout']}: {len(sizes)} chunks are not accepted; expected a multiple of "
                f"{names['pp']}, {pp}"
            )
        return tuple(sizes), len(sizes) // pp
    vpp = terms.get("vpp") or 1
    if terms.get("virtual_layers"):
        vpp = max(1, blocks // (pp * terms["virtual_layers"]))
    if "first_stage" in terms or "last_stage" in terms:
        return _uneven_ends(terms, blocks, pp, vpp, names), vpp
    chunks, counted = pp * vpp, [bool(terms.get(k)) for k in ("count_embedding", "count_head")]
    layers_per_chunk, left = divmod(blocks + sum(counted), chunks)
    if left:
        raise InvalidInputError(
            f"{names['pp']}: {blocks} blocks in {chunks} chunks is not accepted; expected a "
            f"divisor, or {names['layout']}"
        )
    blocks_of = [layers_per_chunk] * chunks
    blocks_of[0] -= counted[0]
    blocks_of[-1] -= counted[1]
    return stage_sizes(blocks_of), vpp


def _uneven_ends(terms: Terms, blocks: int, pp: int, vpp: int, names: FlagNames) -> tuple[int, ...]:
    """Return the layers of each chunk where options set the blocks of the first or last stage."""
    first, last = terms.get("first_stage"), terms.get("last_stage")
    ends = {k: count for k, count in ((0, first), (pp - 1, last)) if count is not None}
    others = pp - len(ends)
    blocks_per_stage, left = divmod(blocks - sum(ends.values()), others) if others else (0, 0)
    per_stage = [ends.get(k, blocks_per_stage) for k in range(pp)]
    if left or sum(per_stage) != blocks or any(count % vpp for count in per_stage):
        raise InvalidInputError(
            f"{names['first_stage']}, {names['last_stage']}: {first} and {last} of {blocks} blocks "
            "are not accepted; expected the other stages to be even"
        )
    return stage_sizes([per_stage[k % pp] // vpp for k in range(pp * vpp)])


def _read_cp_kind(terms: Terms, model: TransformerModel, cp: int, names: FlagNames) -> str:
    """Return how context-parallel devices exchange keys and values; a ring by default."""
    if cp == 1:
        return "all-gather"
    word = str(terms.get("cp_kind", "p2p" if model.attention == "flash" else "allgather"))
    kind = str(flag_names("megatron").meaning("cp_kinds", "cp_kind", word))
    if kind != _MIXED:
        return kind
    sizes = [whole_number(names["cp_sizes"], size) for size in terms.get("cp_sizes") or []]
    if len(sizes) != 2 or sizes[0] * sizes[1] != cp:
        raise InvalidInputError(
            f"{names['cp_sizes']}: {sizes} is not accepted with {names['cp_kind']} {word}; "
            f"expected two numbers whose product is {names['cp']}, {cp}"
        )
    mixed = kind.replace("N", str(sizes[0]))
    return mixed if 1 not in sizes else "ring" if sizes[0] == 1 else "ulysses"


def _read_offload(terms: Terms, names: FlagNames) -> bool:
    """Return whether the host stores the optimiser's state, either all of it or nothing."""
    share = str(terms.get("offload_share", 1.0))
    if terms.get("offload") and share not in ("1.0", "1"):
        raise not_accepted(names["offload_share"], share, "1.0: all state is in the host's memory")
    return bool(terms.get("offload"))


def _read_dispatcher(terms: Terms, names: FlagNames) -> str:
    """Return how rows reach experts; by default they are sent in Bridge, else gathered."""
    default = "alltoall" if names.format == "bridge" else "allgather"
    word = str(terms.get("dispatcher", default))
    if terms.get("ep", 1) == 1 or word == "flex":
        return "all-to-all"
    return str(flag_names("megatron").meaning("dispatchers", "dispatcher", word))


def _read_sharding(terms: Terms, dp: int, names: FlagNames) -> dict[str, int | None]:
    """Return the ZeRO stage, and the replicas that shard state."""
    zero, instances = 1 if terms.get("zero_1") else 0, terms.get("instances") or 1
    if terms.get("fsdp"):
        word = str(terms.get("fsdp_strategy", "optim_grads_params"))
        zero = flag_names("megatron").meaning("fsdp_strategies", "fsdp_strategy", word)
    if dp % instances:
        raise InvalidInputError(
            f"{names['instances']}: {instances} is not accepted; expected a divisor of {dp} "
            "replicas"
        )
    return {"zero": zero, "shard": dp // instances if zero and instances > 1 else None}


def _read_recompute(terms: Terms, model: TransformerModel, names: FlagNames) -> str:
    if terms.get("offload_layers"):
        return f"offload:{terms['offload_layers']}"
    kind = terms.get("recompute") or ("selective" if terms.get("recompute_selective") else None)
    if kind is None:
        return "none"
    if kind == "full":
        some = terms.get("recompute_method") == "block"
        return f"full:{terms.get('recompute_layers') or 1}" if some else "full"
    modules = list(terms.get("recompute_modules") or ["core_attn"])
    if modules == ["core_attn"]:
        return "attention" if model.attention == "flash" else "selective"
    of_module = _operators_of_modules(model)
    unknown = [word for word in modules if word not in of_module]
    if unknown:
        raise InvalidInputError(
            f"{names['recompute_modules']}: {unknown[0]!r} is not accepted; expected some of "
            f"{', '.join(of_module)}"
        )
    return "+".join(operator for word in modules for operator in sorted(of_module[word]))


def _read_precision(terms: Terms, names: FlagNames) -> str:
    """Return the precision of products; fp8 without a recipe is delayed scaling."""
    if terms.get("fp4_format"):
        return "nvfp4"
    if not terms.get("fp8_format"):
        return "bf16"
    recipe = str(terms.get("fp8_recipe") or "delayed")
    precisions = flag_names("megatron").tables["precisions"]
    by_recipe = {own["fp8_recipe"]: name for name, own in precisions.items() if "fp8_recipe" in own}
    if recipe not in by_recipe:
        raise InvalidInputError(
            f"{names['fp8_recipe']}: {recipe!r} is not accepted; expected {', '.join(by_recipe)}"
        )
    return str(by_recipe[recipe])


def _read_optimizer(terms: Terms, names: FlagNames) -> str:
    name, mixed = str(terms.get("optimizer", "adam")), bool(terms.get("bf16"))
    if name == "adam":
        half = "adam-bf16-grad" if terms.get("gradients_bf16") else "adam"
        return half if mixed else "adam-fp32"
    if name == "sgd" and mixed and not terms.get("gradients_bf16"):
        return "sgd-momentum" if float(terms.get("sgd_momentum", 0.9)) else "sgd"
    raise InvalidInputError(
        f"{names['optimizer']}: {name!r} is not accepted; expected adam, or sgd with bf16"
    )
