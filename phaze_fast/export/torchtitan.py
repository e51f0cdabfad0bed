"""The job files of torchtitan: a plan as TOML, and TOML as a plan."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from phaze_fast.errors import InvalidInputError
from phaze_fast.export.megatron import comments
from phaze_fast.export.names import FlagNames, flag_names
from phaze_fast.export.nested import get, put
from phaze_fast.export.request import Chunk, Exported, ReadPlan, Request, Unexpressed, facts_unsaid
from phaze_fast.models import TransformerModel
from phaze_fast.planning import PlanSpec
from phaze_fast.software import BF16

__all__ = ["read_torchtitan", "write_torchtitan"]

_RESHARD = {2: "never", 3: "always"}
_CP_KINDS = {"all-gather": "allgather", "ring": "alltoall"}
_PRECISION = {"adam": "bfloat16", "adam-fp32": "float32"}


def _modules(chunk: Chunk) -> list[str]:
    """Names of the modules of a chunk, as torchtitan's decoders have them."""
    blocks = [f"layers.{i}" for i in chunk.blocks]
    return ["tok_embeddings"] * chunk.embedding + blocks + ["norm", "output"] * chunk.head


def _missing(request: Request, names: FlagNames) -> list[Unexpressed]:
    spec, model, found = request.spec, request.model, facts_unsaid(request.spec)
    if spec.zero == 1 and spec.dp * spec.cp > 1:
        found.append(
            Unexpressed("--zero 1", "weights are shared too; written as ZeRO 2, never resharded")
        )
    alone = spec.tp * spec.pp * spec.cp == 1
    if spec.zero == 0 and spec.dp > 1 and not alone:
        found.append(
            Unexpressed("--zero 0", "replicas stand alone or share weights; written as ZeRO 2")
        )
    elif spec.zero == 0 and spec.cp > 1:
        found.append(Unexpressed("--zero 0", "weights are shared along the sequence as well"))
    if spec.cp > 1 and spec.cp_kind not in _CP_KINDS:
        found.append(Unexpressed(f"--cp-kind {spec.cp_kind}", "written as all-gather"))
    if spec.ep > 1 and spec.etp not in (None, 1, spec.tp):
        found.append(Unexpressed(f"--etp {spec.etp}", f"1 or {spec.tp}; written as {spec.tp}"))
    if spec.schedule not in names.tables["schedules"] and spec.pp > 1:
        found.append(Unexpressed(f"--schedule {spec.schedule}", "written as 1F1B"))
    if spec.vpp > 1 and spec.pp == 1:
        found.append(Unexpressed(f"--vpp {spec.vpp}", "one stage has no chunks"))
    if not request.modes <= {"none"} and request.modes != {"full"}:
        said = spec.recompute if isinstance(spec.recompute, str) else ",".join(spec.recompute)
        found.append(
            Unexpressed(
                f"--recompute {said}",
                "torchtitan recomputes all of every block or none, or by rules of its own; "
                "written as full, which needs no more memory and takes longer",
            )
        )
    if spec.tp > 1 and not spec.sequence_parallel:
        found.append(Unexpressed("--no-sequence-parallel", "norms are always shared"))
    if spec.rank_order == "stages-inside" and spec.dp > 1 and spec.pp > 1:
        found.append(Unexpressed("--rank-order stages-inside", "replicas lie inside"))
    if spec.optimizer not in _PRECISION:
        found.append(Unexpressed(f"--optimizer {spec.optimizer}", "written as adam"))
    if model.encoder_layers or model.patches is not None or model.head != "lm":
        found.append(Unexpressed(model.name, "torchtitan has decoders of text; bring your own"))
    if spec.precision.name != BF16:
        found.append(Unexpressed(f"--precision {spec.precision.name}", "written as bf16"))
    return found


def write_torchtitan(request: Request) -> Exported:
    """Write a plan as a job configuration of torchtitan."""
    names, spec = flag_names("torchtitan"), request.spec
    missing = _missing(request, names)
    data: dict[str, Any] = {}
    name, flavor = names.tables["flavors"].get(request.model.name, ("", ""))
    texts = {
        "description": f"{request.title}, {names.version}",
        "model": name or request.model.name,
        "flavor": flavor or "own",
        "optimizer": "AdamW",
    }
    for key, value in texts.items():
        put(data, names[key], value)
    replicated = spec.zero == 0 and spec.tp * spec.pp * spec.cp == 1
    zero = max(spec.zero, 2)
    local = spec.micro_batch if spec.pp == 1 else spec.global_batch // spec.dp
    values: dict[str, object] = {
        "micro_batch_pp1": local,
        "global_batch": spec.global_batch,
        "seq": spec.seq or request.model.seq,
        "steps": 10,
        "precision": _PRECISION.get(spec.optimizer, "bfloat16"),
        "reduce": "float32",
        "replicas": spec.dp if replicated else spec.dp // (spec.shard or spec.dp),
        "shards": 1 if replicated else spec.shard or spec.dp,
        "reshard": _RESHARD[zero],
        "tp": spec.tp,
        "cp": spec.cp,
        "ep": spec.ep,
        "pp": spec.pp,
    }
    if spec.cp > 1:
        values["cp_kind"] = _CP_KINDS.get(spec.cp_kind, "allgather")
    if spec.ep > 1:
        values["etp"] = 1 if spec.etp == 1 else spec.tp
    if spec.pp > 1:
        values["schedule"] = names.tables["schedules"].get(spec.schedule, "1F1B")
        values["micro_batch"] = spec.micro_batch
        values["stages"] = [_modules(chunk) for chunk in request.chunks]
    values["recompute"] = "none" if request.modes <= {"none"} else "full"
    for key, value in values.items():
        put(data, names[key], value)
    lines = comments(names, request, missing)
    if not name:
        lines.append("torchtitan has no such model: register it, and name it under [model].")
    text = "".join(f"# {line}\n" for line in lines) + _toml(data)
    return Exported("torchtitan", text, tuple(missing))


def _toml(data: Mapping[str, Mapping[str, Any]]) -> str:
    parts = []
    for section, values in data.items():
        lines = [f"{key} = {_value(value)}" for key, value in values.items()]
        parts.append(f"\n[{section}]\n" + "\n".join(lines) + "\n")
    return "".join(parts)


def _value(value: object) -> str:
    if isinstance(value, list) and value and isinstance(value[0], list):
        return "[\n" + "".join(f"  {json.dumps(each)},\n" for each in value) + "]"
    return json.dumps(value)


# ---- read ----


def read_torchtitan(
    text: str, source: str, model: TransformerModel, devices: int | None
) -> ReadPlan:
    """Read a job configuration of torchtitan as a plan."""
    names = flag_names("torchtitan")
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidInputError(f"{source}: not TOML: {error}") from None

    def number(key: str, default: int) -> int:
        value = get(data, names[key])
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidInputError(
                f"{source}: {names[key]}: {value!r} is not accepted; expected a whole number"
            )
        return value

    tp, pp, cp = number("tp", 1), number("pp", 1), number("cp", 1)
    replicas, shards = number("replicas", 1), number("shards", -1)
    if shards < 0:
        if devices is None or devices % (tp * pp * cp * replicas):
            raise InvalidInputError(
                f"{source}: {names['shards']}: {shards} is not accepted; {devices} devices are not "
                f"a multiple of {tp} x {pp} x {cp} x {replicas}"
            )
        shards = devices // (tp * pp * cp * replicas)
    dp = replicas * shards
    micro_batch = number("micro_batch", 1) if pp > 1 else number("micro_batch_pp1", 8)
    local = number("micro_batch_pp1", 8)
    batch = number("global_batch", -1)
    schedule, vpp, sizes = _read_stages(data, names, pp, source)
    if sizes is not None and sum(sizes) != model.layers + model.encoder_layers + 2:
        raise InvalidInputError(
            f"{source}: {names['stages']}: {sum(sizes)} modules are not accepted; {model.name} has "
            f"{model.layers + 2}, tok_embeddings and output counted"
        )
    fields = {
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "dp": dp,
        "cp_kind": _read_cp_kind(data, names, source) if cp > 1 else "all-gather",
        "ep": number("ep", 1),
        "etp": None if number("etp", tp) == tp else number("etp", tp),
        "micro_batch": micro_batch,
        "global_batch": batch if batch > 0 else local * dp,
        "seq": number("seq", 2048),
        "zero": _read_zero(data, names, shards * cp, pp, source),
        "shard": shards if replicas > 1 and shards * cp > 1 else None,
        "schedule": schedule,
        "vpp": vpp,
        "stages": sizes,
        "recompute": _read_recompute(data, names, source),
        "optimizer": "adam-fp32" if get(data, names["precision"]) == "float32" else "adam",
        "idle": True,
    }
    return ReadPlan(PlanSpec.from_dict(fields, source), _notes(source, pp, local, fields))


def _read_cp_kind(data: Mapping[str, Any], names: FlagNames, source: str) -> str:
    kinds = {word: kind for kind, word in _CP_KINDS.items()}
    word = get(data, names["cp_kind"]) or "allgather"
    if word not in kinds:
        raise InvalidInputError(
            f"{source}: {names['cp_kind']}: {word!r} is not accepted; expected {', '.join(kinds)}"
        )
    return kinds[word]


def _notes(source: str, pp: int, local: int, fields: Mapping[str, Any]) -> tuple[str, ...]:
    rounds = fields["global_batch"] // max(1, fields["dp"] * local)
    if pp == 1 or rounds == 1:
        return ()
    return (f"{source}: the pipeline is filled and drained {rounds} times a step; timed as once",)


def _read_zero(data: Mapping[str, Any], names: FlagNames, shared: int, pp: int, source: str) -> int:
    if shared == 1:
        return 0
    word = get(data, names["reshard"]) or "default"
    known = {"always": 3, "never": 2, "default": 2 if pp > 1 else 3}
    if word not in known:
        raise InvalidInputError(
            f"{source}: {names['reshard']}: {word!r} is not accepted; expected {', '.join(known)}"
        )
    return known[word]


def _read_recompute(data: Mapping[str, Any], names: FlagNames, source: str) -> str:
    word = get(data, names["recompute"]) or "selective"
    if word not in ("none", "full"):
        raise InvalidInputError(
            f"{source}: {names['recompute']}: {word!r} is not accepted; expected none or full "
            "(torchtitan's selective rules are its own)"
        )
    return str(word)


def _read_stages(
    data: Mapping[str, Any], names: FlagNames, pp: int, source: str
) -> tuple[str, int, tuple[int, ...] | None]:
    """Schedule, chunks of a stage, layers of each chunk."""
    if pp == 1:
        return "1f1b", 1, None
    schedules = {word: name for name, word in names.tables["schedules"].items()}
    word = get(data, names["schedule"]) or "1F1B"
    if word not in schedules:
        raise InvalidInputError(
            f"{source}: {names['schedule']}: {word!r} is not accepted; expected one of "
            f"{', '.join(schedules)}"
        )
    parts = get(data, names["stages"])
    if not isinstance(parts, list):
        return schedules[word], 1 if schedules[word] in ("1f1b", "gpipe") else 2, None
    sizes = tuple(_layers(part) for part in parts)
    if len(sizes) % pp:
        raise InvalidInputError(
            f"{source}: {names['stages']}: {len(sizes)} parts are not accepted; expected a "
            f"multiple of {pp}"
        )
    return schedules[word], len(sizes) // pp, sizes


def _layers(part: Sequence[str]) -> int:
    """Layers of a part: embedding, blocks, head; the last norm belongs to the head."""
    return sum(1 for name in part if name != "norm")
