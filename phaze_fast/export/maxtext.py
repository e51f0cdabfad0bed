"""MaxText: a plan as a command with settings, and such a command as a plan."""

from __future__ import annotations

from typing import Any

from phaze_fast.errors import InvalidInputError, not_accepted
from phaze_fast.export.request import (
    FlagNames,
    Request,
    Unexpressed,
    command,
    flag_names,
    not_used,
    settings_of,
)
from phaze_fast.models import TransformerModel
from phaze_fast.software import BF16

_PROGRAM = ("python3", "-m", "MaxText.train", "MaxText/configs/base.yml")
_LARGEST = 2.0**40
_CUSTOM = "custom"
_ALWAYS_RECOMPUTED = ("norms", "activations", "gated-product")
"""Operators that every policy but full recomputes."""


def _missing(request: Request, names: FlagNames) -> list[Unexpressed]:
    spec, piped = request.spec, request.spec.pp > 1
    return request.unexpressed(
        names,
        schedule=piped and spec.schedule != "gpipe",
        uneven=piped and (not request.even or request.rounds % spec.pp > 0),
        stages=piped,
        vpp=spec.vpp > 1 and not piped,
        precision=spec.precision.name not in (BF16, *names.tables["precision"]),
        cp_kind=spec.cp > 1 and spec.cp_kind != "all-gather",
        etp=spec.ep > 1 and spec.etp not in (None, spec.tp),
        shard=request.hybrid and spec.zero == 1,
        zero_2=spec.zero == 2,
        recompute=_policy(request, names) is None,
        rank_order=request.stages_inside,
        optimizer=spec.optimizer not in ("adam", "adam-fp32"),
        model=not request.text_decoder,
        zero=spec.cp * spec.ep > 1 and spec.zero < 2,
    )


def _policy(request: Request, names: FlagNames) -> dict[str, str] | None:
    """Return the settings that recompute as a plan does, or None where there are none."""
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
    if operators - {*_ALWAYS_RECOMPUTED, *tensors}:
        return None
    saved = " ".join(words for operator, words in tensors.items() if operator not in operators)
    return {names["recompute"]: _CUSTOM, **dict.fromkeys(saved.split(), "device")}


def write_maxtext(request: Request) -> tuple[str, list[Unexpressed]]:
    """Write a plan as a command that runs MaxText on synthetic data."""
    names, spec, model = flag_names("maxtext"), request.spec, request.model
    missing = _missing(request, names)
    sharded = spec.zero >= 2
    outer, shard = spec.dp // spec.ep, (spec.shard or spec.dp) // spec.ep
    sequences = spec.dp * spec.micro_batch * (request.rounds if spec.pp > 1 else 1)
    values: dict[str, Any] = {
        "model": names.tables["models"].get(model.name, "default"),
        "tp_sequence" if spec.sequence_parallel and spec.tp > 1 else "tp": spec.tp,
        "cp": spec.cp,
        "ep": spec.ep,
        "data": outer // shard if sharded else outer,
        "fsdp": shard if sharded else 1,
        "zero_1": spec.zero == 1,
        "pp": spec.pp,
        "device_batch": sequences / spec.devices,
        "seq": spec.seq or model.seq,
        "optimizer": "adamw",
        "weights": "float32",
        "dtype": "float32" if spec.optimizer == "adam-fp32" else "bfloat16",
        "dataset": "synthetic",
        "steps": 10,
    }
    if spec.pp > 1:
        values["micro_batches"] = request.rounds
        values["stage_layers"] = max(len(chunk.blocks) for chunk in request.chunks)
        values["repeats"] = spec.vpp
    else:
        values["accumulation"] = request.rounds
    if spec.precision.name in names.tables["precision"]:
        values["quantization"] = names.tables["precision"][spec.precision.name]
    if values["model"] == "default":
        values |= _model_values(model)
    settings = {names[key]: value for key, value in values.items()}
    settings |= _policy(request, names) or {names["recompute"]: "full"}
    words = [[f"{key}={value}"] for key, value in settings.items()]
    return command(request.remarks(names, missing), _PROGRAM, words), missing


def _model_values(model: TransformerModel) -> dict[str, Any]:
    values: dict[str, Any] = {
        "layers": model.layers,
        "hidden": model.hidden,
        "ffn": model.ffn,
        "heads": model.heads,
        "kv_heads": model.kv_heads or model.heads,
        "head_dim": model.head_width,
        "vocab": model.vocab,
    }
    if (moe := model.moe) is not None:
        values |= {"experts": moe.experts, "top_k": moe.top_k, "expert_ffn": moe.expert_ffn}
    return values


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

    if (layers := count("layers", model.layers)) != model.layers:
        raise InvalidInputError(
            f"{names['layers']}: {layers} is not accepted; {model.name} has {model.layers}"
        )
    tp = count("tp") * count("tp_sequence")
    pp, cp, ep = count("pp"), count("cp"), count("ep")
    # The fsdp axis takes the devices that the other axes leave.
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
        "recompute": _read_recompute(names, settings),
        "sequence_parallel": tp == 1 or names["tp_sequence"] in settings,
        "optimizer": "adam-fp32" if settings.get(names["dtype"]) == "float32" else "adam",
        "precision": _read_precision(names, settings.get(names["quantization"], "")),
        "idle": True,
    }
    tensors = " ".join(names.tables["custom"].values()).split()
    return fields, not_used([s for s in settings if s not in {*names.names.values(), *tensors}])


def _read_precision(names: FlagNames, word: str) -> str:
    return str(names.meaning("precision", "quantization", word)) if word else BF16


def _read_recompute(names: FlagNames, settings: dict[str, str]) -> str:
    """Read the policy; of tensors that stand for one operator, one that is saved is enough."""
    policy = settings.get(names["recompute"], "full")
    if policy != _CUSTOM:
        return str(names.meaning("recompute", "recompute", policy))
    recomputed = list(_ALWAYS_RECOMPUTED)
    for operator, words in names.tables["custom"].items():
        tensors = words.split()
        values = {settings.get(tensor, "remat") for tensor in tensors}
        always, saved = operator.startswith("kept-"), "device" in values
        if not values <= {"device", "remat"} or (always and not saved):
            raise InvalidInputError(
                f"{', '.join(tensors)}: {', '.join(sorted(values))} is not accepted; "
                f"expected device{'' if always else ' or remat'}"
            )
        recomputed += [] if saved else [operator]
    return "+".join(recomputed)
