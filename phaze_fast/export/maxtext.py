"""The flags of MaxText: a plan as a command, and such a command as a plan."""

from __future__ import annotations

from typing import Any

from phaze_fast.errors import InvalidInputError
from phaze_fast.export.megatron import comments, not_used
from phaze_fast.export.names import FlagNames, flag_names
from phaze_fast.export.request import Exported, ReadPlan, Request, Unexpressed, facts_unsaid
from phaze_fast.export.shell import command, settings_of
from phaze_fast.models import TransformerModel
from phaze_fast.planning import PlanSpec
from phaze_fast.software import BF16

__all__ = ["read_maxtext", "write_maxtext"]

_PROGRAM = ("python3", "-m", "MaxText.train", "MaxText/configs/base.yml")
_LARGEST = 2.0**40


def _missing(request: Request, names: FlagNames) -> list[Unexpressed]:
    spec, model, found = request.spec, request.model, facts_unsaid(request.spec)
    rounds = spec.global_batch // (spec.dp * spec.micro_batch)
    if spec.pp > 1:
        if spec.schedule != "gpipe":
            found.append(
                Unexpressed(
                    f"--schedule {spec.schedule}", "all forward passes come first, as in GPipe"
                )
            )
        if not request.even or rounds % spec.pp:
            found.append(
                Unexpressed(
                    f"--stages {','.join(map(str, spec.stages or ()))}, {rounds} micro-batches",
                    "stages are even, and micro-batches a multiple of them",
                )
            )
        found.append(
            Unexpressed("--stages", "embedding and head lie outside the pipeline, on all stages")
        )
    elif spec.vpp > 1:
        found.append(Unexpressed(f"--vpp {spec.vpp}", "one stage has no chunks"))
    if spec.precision.name not in (BF16, *names.tables["precision"]):
        found.append(Unexpressed(f"--precision {spec.precision.name}", "written as bf16"))
    if spec.cp > 1 and spec.cp_kind != "all-gather":
        found.append(Unexpressed(f"--cp-kind {spec.cp_kind}", "written as all-gather"))
    if spec.ep > 1 and spec.etp not in (None, spec.tp):
        found.append(Unexpressed(f"--etp {spec.etp}", "experts are split as all else"))
    if spec.zero == 1 and spec.shard is not None and spec.shard < spec.dp:
        found.append(Unexpressed(f"--shard {spec.shard}", "with ZeRO 1 all replicas share"))
    if spec.zero == 2:
        found.append(Unexpressed("--zero 2", "written as 3: weights are shared too"))
    if _policy(request, names) is None:
        said = spec.recompute if isinstance(spec.recompute, str) else ",".join(spec.recompute)
        found.append(Unexpressed(f"--recompute {said}", "no such policy; written as full"))
    if spec.rank_order == "stages-inside" and spec.dp > 1 and spec.pp > 1:
        found.append(Unexpressed("--rank-order stages-inside", "replicas lie outside by default"))
    if spec.optimizer not in ("adam", "adam-fp32"):
        found.append(Unexpressed(f"--optimizer {spec.optimizer}", "written as adam"))
    if model.encoder_layers or model.patches is not None or model.head != "lm":
        found.append(Unexpressed(model.name, "MaxText has decoders of text"))
    if spec.cp * spec.ep > 1 and spec.zero < 2:
        found.append(
            Unexpressed(f"--zero {spec.zero}", "weights are shared along sequence and experts")
        )
    return found


_CUSTOM = "custom"
_AGAIN = ("norms", "activations", "gated-product")
"""What every policy but full makes again."""


def _policy(request: Request, names: FlagNames) -> dict[str, str] | None:
    """Give the settings that recompute as a plan does, none where there are no such."""
    known = {frozenset(mode.split("+")): word for mode, word in names.tables["recompute"].items()}
    if len(request.modes) != 1:
        return None
    sets, tensors = frozenset(next(iter(request.modes)).split("+")), names.tables["custom"]
    if sets in known:
        return {names["recompute"]: known[sets]}
    if not sets.issuperset(_AGAIN) or sets - {*_AGAIN, *tensors}:
        return None
    kept = [tensor for own, made in tensors.items() if own not in sets for tensor in made.split()]
    return {names["recompute"]: _CUSTOM, **dict.fromkeys(kept, "device")}


def write_maxtext(request: Request) -> Exported:
    """Write a plan as a command that runs MaxText on made-up data."""
    names, spec, model = flag_names("maxtext"), request.spec, request.model
    missing = _missing(request, names)
    rounds = spec.global_batch // (spec.dp * spec.micro_batch)
    shared = spec.zero >= 2
    outer, sharing = spec.dp // spec.ep, (spec.shard or spec.dp) // spec.ep
    at_once = spec.dp * spec.micro_batch * (rounds if spec.pp > 1 else 1)
    values: dict[str, Any] = {
        "model": names.tables["models"].get(model.name, "default"),
        "tp_sequence" if spec.sequence_parallel and spec.tp > 1 else "tp": spec.tp,
        "cp": spec.cp,
        "ep": spec.ep,
        "data": outer // sharing if shared else outer,
        "fsdp": sharing if shared else 1,
        "zero_1": spec.zero == 1,
        "pp": spec.pp,
        "device_batch": at_once / spec.devices,
        "seq": spec.seq or model.seq,
        "optimizer": "adamw",
        "weights": "float32",
        "dtype": "float32" if spec.optimizer == "adam-fp32" else "bfloat16",
        "dataset": "synthetic",
        "steps": 10,
    }
    if spec.pp > 1:
        values["micro_batches"] = rounds
        values["stage_layers"] = max(len(chunk.blocks) for chunk in request.chunks)
        values["repeats"] = spec.vpp
    else:
        values["accumulation"] = rounds
    if spec.precision.name in names.tables["precision"]:
        values["quantization"] = names.tables["precision"][spec.precision.name]
    if values["model"] == "default":
        values |= _model(model)
    settings = {names[key]: value for key, value in values.items()}
    settings |= _policy(request, names) or {names["recompute"]: "full"}
    text = command(
        comments(names, request, missing),
        _PROGRAM,
        [[f"{key}={value}"] for key, value in settings.items()],
    )
    return Exported("maxtext", text, tuple(missing))


def _model(model: TransformerModel) -> dict[str, Any]:
    values: dict[str, Any] = {
        "layers": model.layers,
        "hidden": model.hidden,
        "ffn": model.ffn,
        "heads": model.heads,
        "kv_heads": model.kv_heads or model.heads,
        "head_dim": model.head_width,
        "vocab": model.vocab,
    }
    if model.moe is not None:
        values |= {
            "experts": model.moe.experts,
            "top_k": model.moe.top_k,
            "expert_ffn": model.moe.expert_ffn,
        }
    return values


# ---- read ----


def read_maxtext(text: str, source: str, model: TransformerModel, devices: int | None) -> ReadPlan:
    """Read a command that runs MaxText as a plan."""
    names = flag_names("maxtext")
    given = settings_of(text, source)

    def number(key: str, default: float) -> float:
        word = given.get(names[key], str(default))
        try:
            value = float(word.replace("_", ""))
        except ValueError:
            value = -1.0
        if not 0 < value < _LARGEST:
            raise InvalidInputError(
                f"{source}: {names[key]}: {word!r} is not accepted; expected a number above 0"
            )
        return value

    def count(key: str, default: int = 1) -> int:
        return round(number(key, default))

    _check_layers(names, count("layers", model.layers), model, source)
    tp = count("tp") * count("tp_sequence")
    pp, cp, ep = count("pp"), count("cp"), count("ep")
    data, fsdp = count("data"), count("fsdp", _rest(devices, tp * pp * cp * ep))
    dp = data * fsdp * ep
    used = tp * pp * cp * dp
    rounds = count("micro_batches", pp) if pp > 1 else count("accumulation")
    batch = round(number("device_batch", 12.0) * used) * (1 if pp > 1 else rounds)
    if batch % (dp * rounds):
        raise InvalidInputError(
            f"{source}: {names['device_batch']}: {batch} sequences a step are not accepted; "
            f"expected a multiple of {dp} replicas x {rounds} micro-batches"
        )
    repeats = count("repeats") if pp > 1 else 1
    shared = fsdp > 1 or (data == 1 and cp * ep > 1)
    zero = 3 if shared else int(given.get(names["zero_1"], "False").lower() == "true")
    fields: dict[str, Any] = {
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "ep": ep,
        "dp": dp,
        "micro_batch": batch // (dp * rounds),
        "global_batch": batch,
        "seq": count("seq", 2048),
        "zero": zero,
        "shard": fsdp * ep if data > 1 and fsdp > 1 else None,
        "schedule": "1f1b" if pp == 1 else "gpipe" if repeats == 1 else "interleaved",
        "vpp": repeats,
        "recompute": _read_recompute(names, given, source),
        "sequence_parallel": tp == 1 or names["tp_sequence"] in given,
        "optimizer": "adam-fp32" if given.get(names["dtype"]) == "float32" else "adam",
        "precision": _read_precision(names, given.get(names["quantization"], ""), source),
        "idle": True,
    }
    tensors = " ".join(names.tables["custom"].values()).split()
    unused = [name for name in given if name not in {*names.names.values(), *tensors}]
    return ReadPlan(PlanSpec.from_dict(fields, source), not_used(source, unused))


def _check_layers(names: FlagNames, layers: int, model: TransformerModel, source: str) -> None:
    if layers != model.layers:
        raise InvalidInputError(
            f"{source}: {names['layers']}: {layers} is not accepted; {model.name} has "
            f"{model.layers}"
        )


def _rest(devices: int | None, used: int) -> int:
    """Devices that are left for the axis that takes the rest."""
    return max(1, devices // used) if devices is not None else 1


def _read_recompute(names: FlagNames, given: dict[str, str], source: str) -> str:
    known = {policy: mode for mode, policy in names.tables["recompute"].items()}
    word = given.get(names["recompute"], "full")
    if word == _CUSTOM:
        return _read_custom(names, given, source)
    if word not in known:
        raise InvalidInputError(
            f"{source}: {names['recompute']}: {word!r} is not accepted; expected one of "
            f"{', '.join((*known, _CUSTOM))}"
        )
    return str(known[word])


def _read_custom(names: FlagNames, given: dict[str, str], source: str) -> str:
    """Read which tensors are kept; of those that stand for one operator, one is enough."""
    made_again = list(_AGAIN)
    for own, made in names.tables["custom"].items():
        tensors = made.split()
        said = {given.get(tensor, "remat") for tensor in tensors}
        always, kept = own.startswith("kept-"), "device" in said
        if not said <= {"device", "remat"} or (always and not kept):
            raise InvalidInputError(
                f"{source}: {', '.join(tensors)}: {', '.join(sorted(said))} is not accepted; "
                f"expected device{'' if always else ' or remat'}"
            )
        made_again += [] if kept else [own]
    return "+".join(made_again)


def _read_precision(names: FlagNames, word: str, source: str) -> str:
    known = {"": BF16, **{flag: name for name, flag in names.tables["precision"].items()}}
    if word not in known:
        raise InvalidInputError(
            f"{source}: {names['quantization']}: {word!r} is not accepted; expected one of "
            f"{', '.join(filter(None, known))}"
        )
    return str(known[word])
