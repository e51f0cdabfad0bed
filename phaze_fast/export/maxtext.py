"""MaxText: a plan as a command with settings, and such a command as a plan."""

from __future__ import annotations

import json
from typing import Any

from phaze_fast.errors import InvalidInputError, not_accepted
from phaze_fast.export.request import (
    FlagNames,
    Request,
    Unexpressed,
    command,
    field_value,
    flag_names,
    has_fields,
    not_used,
    settings_of,
    shipped_name,
    stage_sizes,
)
from phaze_fast.models import MixtureOfExperts, TransformerModel
from phaze_fast.opgraph import DISPATCHERS, OFFLOAD
from phaze_fast.software import BF16

_PROGRAM = ("python3", "-m", "MaxText.train", "MaxText/configs/base.yml")
_LARGEST = 2.0**40
_CUSTOM = "custom"
_LATENT = ("query_rank", "kv_rank", "plain_width", "rotary_width", "value_width")
_OF_EXPERTS = ("experts", "top_k", "expert_ffn")
_SIZES = ("layers", "hidden", "heads", *_OF_EXPERTS)
"""Settings in which a command and the model must agree."""
_ALWAYS_RECOMPUTED = ("norms", "activations", "gated-product")
"""Operators that every remat policy recomputes; ``full`` recomputes all others as well."""


def _missing(request: Request, names: FlagNames) -> list[Unexpressed]:
    spec = request.spec
    return request.unexpressed(
        names,
        uneven=spec.pp > 1 and (not request.even or request.rounds % spec.pp > 0),
        recompute=_policy(request, names) is None,
    )


def _policy(request: Request, names: FlagNames) -> dict[str, str] | None:
    """Return the settings for the recomputation of a plan, or None if no settings express it."""
    policies = {
        frozenset(mode.split("+")): word for mode, word in names.tables["recompute"].items()
    }
    if len(request.modes) != 1:
        return None
    operators, tensors = frozenset(next(iter(request.modes)).split("+")), names.tables["custom"]
    if operators in policies:
        return {names["recompute"]: policies[operators]}
    if not operators.issuperset(_ALWAYS_RECOMPUTED):
        return None
    if operators - {*_ALWAYS_RECOMPUTED, *tensors, OFFLOAD}:
        return None
    saved = " ".join(words for operator, words in tensors.items() if operator not in operators)
    if OFFLOAD in operators:
        saved, word = f"{names['layer_input']} {saved}", "offload"
    else:
        word = "device"
    return {names["recompute"]: _CUSTOM, **dict.fromkeys(saved.split(), word)}


def write_maxtext(request: Request) -> tuple[str, list[Unexpressed]]:
    """Write a plan as a command that runs MaxText on synthetic data."""
    names, spec, model = flag_names("maxtext"), request.spec, request.model
    own = shipped_name(model, "maxtext")
    missing = _missing(request, names) + _missing_model(request, names)
    sharded = spec.zero >= 2
    shared = spec.shard or spec.dp
    ep = spec.ep if shared % spec.ep == 0 else 1
    outer, shard = spec.dp // ep, shared // ep
    sequences = spec.dp * spec.micro_batch * (request.rounds if spec.pp > 1 else 1)
    values: dict[str, Any] = {
        "model": own or "default",
        "tp_sequence" if spec.sequence_parallel and spec.tp > 1 else "tp": spec.tp,
        "cp": spec.cp,
        "ep": ep,
        "data": outer // shard if sharded else outer,
        "fsdp": shard if sharded else 1,
        "zero_1": spec.zero == 1,
        "pp": spec.pp,
        "device_batch": sequences / spec.devices,
        "seq": spec.seq or model.seq,
        "optimizer": "adamw",
        "weights": "float32",
        "dtype": "float32" if spec.optimizer_name == "adam-fp32" else "bfloat16",
        "dataset": "synthetic",
        "steps": 10,
    }
    if spec.strategy.dispatcher == "all-gather" and ep > 1:
        values["gathered"] = True
    values |= _pipeline(request)
    if spec.precision.name in names.tables["precision"]:
        values["quantization"] = names.tables["precision"][spec.precision.name]
    values |= _groups(model) if own else _model_values(model, _decoder(request, names) or "llama2")
    settings = {names[key]: value for key, value in values.items()}
    settings |= _policy(request, names) or {names["recompute"]: "full"}
    words = [[f"{key}={value}"] for key, value in settings.items()]
    return command(request.remarks(names, missing), _PROGRAM, words), missing


def _pipeline(request: Request) -> dict[str, Any]:
    """Return the pipeline: equal stages of some blocks, with the other blocks after it."""
    spec, blocks = request.spec, request.model.blocks
    if spec.pp == 1:
        return {"accumulation": request.rounds}
    repeats = spec.vpp if blocks >= spec.pp * spec.vpp else 1
    stage_layers = blocks // (spec.pp * repeats)
    values = {
        "micro_batches": request.rounds,
        "stage_layers": stage_layers,
        "repeats": repeats,
    }
    pipelined = spec.pp * repeats * stage_layers
    return values if pipelined == blocks else {**values, "pipelined": pipelined}


def _decoder(request: Request, names: FlagNames) -> str | None:
    """Return the name of MaxText's decoder block with the model's fields, or None."""
    known = names.tables["decoders"].items()
    return next((name for name, fields in known if has_fields(request.model, fields)), None)


def _missing_model(request: Request, names: FlagNames) -> list[Unexpressed]:
    model, decoder = request.model, _decoder(request, names)
    rotary, biased = model.rotary, decoder in ("gpt_oss", "gpt3")
    return request.unexpressed_model(
        names,
        text=not request.text_decoder,
        decoder=request.text_decoder and decoder is None,
        out_bias=model.out_bias and not biased,
        ffn_bias=model.ffn_bias and not biased,
        rotary=rotary is not None and rotary.scaling not in names.tables["rotary"],
        rotary_share=rotary is not None and rotary.share < 1,
        full_layers=decoder == "gpt_oss"
        and set(model.full_attention_layers) != set(range(1, model.layers, 2)),
    )


def _groups(model: TransformerModel) -> dict[str, Any]:
    """Return the groups of experts, which the files of MaxText's models leave out."""
    moe = model.moe
    grouped = moe is not None and moe.groups
    return {"groups": moe.groups, "top_groups": moe.top_groups} if moe and grouped else {}


def _model_values(model: TransformerModel, decoder: str) -> dict[str, Any]:
    """Return the architecture of a model that MaxText has no file of."""
    activations = [model.activation, *(["linear"] if model.gated else [])]
    values: dict[str, Any] = {
        "decoder": decoder,
        "layers": model.layers,
        "hidden": model.hidden,
        "ffn": model.ffn,
        "heads": model.heads,
        "kv_heads": model.kv_heads or model.heads,
        "head_dim": model.head_width,
        "vocab": model.vocab,
        "activations": json.dumps(activations, separators=(",", ":")),
        "tied": model.tied_embeddings,
        "qkv_bias": model.qkv_bias,
        "ffn_bias": model.ffn_bias,
        "qk_norm": model.qk_norm == "head",
    }
    if model.window is not None:
        values |= {"window": model.window, "sinks": model.sinks}
        values["layer_cycle"] = 1 + min(model.full_attention_layers, default=0)
    if (latent := model.latent) is not None:
        values |= {name: getattr(latent, name) for name in _LATENT if getattr(latent, name)}
        values |= {"attention": "mla"}
        values.setdefault("query_rank", 0)  # queries are made from the residual stream
    if (rotary := model.rotary) is not None:
        words = flag_names("maxtext").tables["rotary"]
        values |= {"rotary": words.get(rotary.scaling, "default"), "rotary_base": rotary.base}
        if rotary.scaling != "none":
            values["rotary_factor"] = rotary.factor
        if rotary.original_positions:
            values["original_positions"] = rotary.original_positions
    return {**values, **_experts(model.moe), **_groups(model)} if model.moe else values


def _experts(moe: MixtureOfExperts) -> dict[str, Any]:
    values: dict[str, Any] = {
        "experts": moe.experts,
        "top_k": moe.top_k,
        "expert_ffn": moe.expert_ffn,
        "dense_layers": moe.dense_layers,
        "shared_experts": moe.shared_experts,
        "scores": moe.scores,
        "scores_factor": moe.scores_factor,
        "balancing_bias": moe.balancing_bias or moe.router_bias,
        "normalised": moe.scores_normalised,
    }
    return values if moe.capacity_factor is None else {**values, "capacity": moe.capacity_factor}


# ---- read ----


def read_maxtext(
    text: str, model: TransformerModel, devices: int | None
) -> tuple[dict[str, Any], list[str]]:
    """Read a command that runs MaxText: fields of a plan, and notes."""
    names, settings = flag_names("maxtext"), settings_of(text)

    def number(key: str, default: float) -> float:
        word = settings.get(names[key], str(default))
        try:
            value = float(word.replace("_", ""))
        except ValueError:
            value = -1.0
        if not 0 < value < _LARGEST:
            raise not_accepted(names[key], word, "a number above 0")
        return value

    def count(key: str, default: int = 1) -> int:
        return round(number(key, default))

    for key in _SIZES:
        own = field_value(model, "moe." + key) if key in _OF_EXPERTS else getattr(model, key)
        if own and (size := count(key, own)) != own:
            raise InvalidInputError(f"{names[key]}: {size} is not accepted; {model.name} has {own}")
    tp = count("tp") * count("tp_sequence")
    pp, cp, ep = count("pp"), count("cp"), count("ep")
    # The size of the fsdp axis is the number of devices divided by the other axes.
    rest = max(1, devices // (tp * pp * cp * ep)) if devices is not None else 1
    data, fsdp = count("data"), count("fsdp", rest)
    dp = data * fsdp * ep
    rounds = count("micro_batches", pp) if pp > 1 else count("accumulation")
    batch = round(number("device_batch", 12.0) * tp * pp * cp * dp) * (1 if pp > 1 else rounds)
    if batch % (dp * rounds):
        raise InvalidInputError(
            f"{names['device_batch']}: {batch} sequences a step are not accepted; "
            f"expected a multiple of {dp} replicas x {rounds} micro-batches"
        )
    repeats = count("repeats") if pp > 1 else 1
    stages = _read_stages(model, pp, repeats, count("pipelined", model.blocks), names)
    sharded = fsdp > 1 or (data == 1 and cp * ep > 1)
    zero_1 = settings.get(names["zero_1"], "False").lower() == "true"
    fields: dict[str, Any] = {
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "ep": ep,
        "dp": dp,
        "micro_batch": batch // (dp * rounds),
        "global_batch": batch,
        "seq": count("seq", 2048),
        "zero": 3 if sharded else int(zero_1),
        "shard": fsdp * ep if data > 1 and fsdp > 1 else None,
        "schedule": "1f1b" if pp == 1 else "gpipe" if repeats == 1 else "interleaved",
        "vpp": repeats,
        "stages": stages,
        "recompute": _read_recompute(names, settings),
        "dispatcher": DISPATCHERS[settings.get(names["gathered"], "").lower() == "true"],
        "sequence_parallel": tp == 1 or names["tp_sequence"] in settings,
        "optimizer": "adam-fp32" if settings.get(names["dtype"]) == "float32" else "adam",
        "precision": _read_precision(names, settings.get(names["quantization"], "")),
        "idle": True,
    }
    tensors = " ".join(names.tables["custom"].values()).split()
    return fields, not_used([s for s in settings if s not in {*names.names.values(), *tensors}])


def _read_stages(
    model: TransformerModel, pp: int, repeats: int, pipelined: int, names: FlagNames
) -> tuple[int, ...] | None:
    """Return the layers of each chunk; blocks after the pipeline count to the last."""
    chunks = pp * repeats
    if pp == 1:
        return None
    if pipelined % chunks or pipelined > model.blocks:
        raise InvalidInputError(
            f"{names['pp']}: {pipelined} blocks in {pp} stages with {repeats} repeats are not "
            f"accepted; expected a multiple, or {names['pipelined']}"
        )
    blocks = [pipelined // chunks] * chunks
    blocks[-1] += model.blocks - pipelined
    return stage_sizes(blocks)


def _read_precision(names: FlagNames, word: str) -> str:
    return str(names.meaning("precision", "quantization", word)) if word else BF16


def _read_recompute(names: FlagNames, settings: dict[str, str]) -> str:
    """Read the remat policy; an operator is not recomputed if one of its tensors is saved."""
    policy = settings.get(names["recompute"], "full")
    if policy != _CUSTOM:
        return str(names.meaning("recompute", "recompute", policy))
    recomputed = list(_ALWAYS_RECOMPUTED)
    offloaded = settings.get(names["layer_input"], "device") == "offload"
    kept = "offload" if offloaded else "device"
    for operator, words in names.tables["custom"].items():
        tensors = words.split()
        values = {settings.get(tensor, "remat") for tensor in tensors}
        always, saved = operator.startswith("kept-"), kept in values
        if not values <= {kept, "remat"} or (always and not saved):
            expected = f"{kept}{'' if always else ' or remat'}"
            raise InvalidInputError(
                f"{', '.join(tensors)}: {', '.join(sorted(values))} is not accepted; "
                f"expected {expected}, as {names['layer_input']} is {kept}"
            )
        recomputed += [] if saved else [operator]
    return "+".join([*recomputed, *[OFFLOAD] * offloaded])
