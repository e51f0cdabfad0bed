"""Job configurations of torchtitan (TOML): written from a plan, and read as a plan."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from typing import Any

from phaze_fast.errors import InvalidInputError, not_accepted, printable
from phaze_fast.export.request import (
    Chunk,
    FlagNames,
    Request,
    Unexpressed,
    flag_names,
    nested_value,
    shipped_name,
    whole_number,
)
from phaze_fast.models import TransformerModel
from phaze_fast.planning.frameworks import framework_precisions
from phaze_fast.software import BF16


def _modules(chunk: Chunk) -> list[str]:
    """Names that torchtitan's decoders have for the modules of a chunk."""
    blocks = [f"layers.{i}" for i in chunk.blocks]
    return ["tok_embeddings"] * chunk.embedding + blocks + ["norm", "output"] * chunk.head


def write_torchtitan(request: Request) -> tuple[str, list[Unexpressed]]:
    """Write a plan as a job configuration of torchtitan."""
    names, spec = flag_names("torchtitan"), request.spec
    name, flavor = shipped_name(request.model, "torchtitan") or ("", "")
    recomputable = request.modes <= {"none"} or request.modes == {"full"}
    missing = request.unexpressed(names, recompute=not recomputable)
    missing += request.unexpressed_model(
        names, model=not name and request.text_decoder, decoder=not request.text_decoder
    )
    replicated = spec.zero == 0 and spec.tp * spec.pp * spec.cp == 1
    shard = 1 if replicated else spec.shard or spec.dp
    settings: dict[str, object] = {
        "description": f"{request.title}, {names.version}",
        "model": name or request.model.name,
        "flavor": flavor or "own",
        "optimizer": "AdamW",
        "micro_batch_pp1": spec.micro_batch if spec.pp == 1 else spec.global_batch // spec.dp,
        "global_batch": spec.global_batch,
        "seq": spec.seq or request.model.seq,
        "steps": 10,
        "precision": names.tables["param_formats"].get(spec.optimizer_name, "bfloat16"),
        "reduce": "float32",
        "replicas": spec.dp // shard,
        "shards": shard,
        "reshard": names.tables["reshard"][max(spec.zero, 2)],
        "tp": spec.tp,
        "cp": spec.cp,
        "ep": spec.ep,
        "pp": spec.pp,
    }
    if spec.cp > 1:
        settings["cp_kind"] = names.tables["cp_kinds"].get(spec.cp_kind, "allgather")
    if spec.ep > 1:
        settings["etp"] = 1 if spec.etp == 1 else spec.tp
    if spec.pp > 1:
        settings["schedule"] = names.tables["schedules"].get(spec.schedule, "1F1B")
        settings["micro_batch"] = spec.micro_batch
        settings["stages"] = [_modules(chunk) for chunk in request.chunks]
    settings["recompute"] = "none" if request.modes <= {"none"} else "full"
    if spec.precision.name in framework_precisions("torchtitan", request.model)[1:]:
        settings["converters"] = _converters(names, request.model)
        settings["float8"] = names.tables["float8"][spec.precision.name]
        settings["unconverted"] = ["output", "router.gate"]
        if request.model.moe is not None:
            settings["converted_experts"] = ["experts"]
    lines = request.remarks(names, missing)
    head = "".join(f"# {printable(line)}\n" for line in lines)
    return head + _toml({names[key]: value for key, value in settings.items()}), missing


def _converters(names: FlagNames, model: TransformerModel) -> list[str]:
    """Names of the converters of linear layers and of experts: the sections of their settings."""
    keys = ["float8", "converted_experts"] if model.moe is not None else ["float8"]
    return [names[key].rpartition(".")[0] for key in keys]


def _toml(settings: Mapping[str, object]) -> str:
    sections: dict[str, list[str]] = {}
    for path, value in settings.items():
        section, _, key = path.rpartition(".")
        sections.setdefault(section, []).append(f"{key} = {_value(value)}\n")
    return "".join(f"\n[{section}]\n{''.join(lines)}" for section, lines in sections.items())


def _value(value: object) -> str:
    if isinstance(value, list) and value and isinstance(value[0], list):
        return "[\n" + "".join(f"  {json.dumps(row, ensure_ascii=False)},\n" for row in value) + "]"
    return json.dumps(value, ensure_ascii=False)


# ---- read ----


class _Job:
    """The settings of a job configuration, by the keys of the data file."""

    def __init__(self, text: str) -> None:
        self.names = flag_names("torchtitan")
        try:
            self._data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise InvalidInputError(f"not TOML: {error}") from None

    def value(self, key: str) -> Any:
        return nested_value(self._data, self.names[key])

    def number(self, key: str, default: int) -> int:
        value = self.value(key)
        number = default if value is None else value
        if isinstance(number, str):
            raise not_accepted(self.names[key], number, "a whole number")
        return whole_number(self.names[key], number, least=-1)


def read_torchtitan(
    text: str, model: TransformerModel, devices: int | None
) -> tuple[dict[str, Any], list[str]]:
    """Read a job configuration of torchtitan as the fields of a plan, and notes."""
    job = _Job(text)
    names, number = job.names, job.number
    tp, pp, cp = number("tp", 1), number("pp", 1), number("cp", 1)
    replicas, shards = number("replicas", 1), number("shards", -1)
    if shards < 0:
        if devices is None or devices % (tp * pp * cp * replicas):
            raise InvalidInputError(
                f"{names['shards']}: {shards} is not accepted; {devices} devices are not "
                f"a multiple of {tp} x {pp} x {cp} x {replicas}"
            )
        shards = devices // (tp * pp * cp * replicas)
    dp, ep = replicas * shards, number("ep", 1)
    etp = number("etp", 1) if ep > 1 else tp
    local, batch = number("micro_batch_pp1", 8), number("global_batch", -1)
    batch = local * dp if batch < 0 else batch
    schedule, vpp, sizes = _read_stages(job, pp, model)
    cp_kind = "all-gather"
    if cp > 1:
        cp_kind = names.meaning("cp_kinds", "cp_kind", job.value("cp_kind") or "allgather")
    fields = {
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "dp": dp,
        "cp_kind": cp_kind,
        "ep": ep,
        "etp": None if etp == tp else etp,
        "micro_batch": number("micro_batch", 1) if pp > 1 else local,
        "global_batch": batch,
        "seq": number("seq", 2048),
        "zero": _read_zero(job, shards * cp, pp),
        "shard": shards if replicas > 1 and shards * cp > 1 else None,
        "schedule": schedule,
        "vpp": vpp,
        "stages": sizes,
        "recompute": _read_recompute(job),
        "optimizer": "adam-fp32" if job.value("precision") == "float32" else "adam",
        "precision": _read_precision(job, model),
        "idle": True,
    }
    rounds = batch // max(1, dp * local)
    note = f"the pipeline is filled and drained {rounds} times a step; timed as once"
    return fields, [note] if pp > 1 and rounds != 1 else []


def _read_zero(job: _Job, sharded: int, pp: int) -> int:
    if sharded == 1:
        return 0
    word = job.value("reshard") or "default"
    if word == "default":
        return 2 if pp > 1 else 3
    return int(job.names.meaning("reshard", "reshard", word))


def _read_precision(job: _Job, model: TransformerModel) -> str:
    converters = job.value("converters") or []
    if converters == []:
        return BF16
    if converters != _converters(job.names, model):
        expected = (
            f"{_converters(job.names, model)} or none: a plan has one format for all products"
        )
        raise not_accepted(job.names["converters"], converters, expected)
    recipe = job.value("float8") or "tensorwise"
    name = str(job.names.meaning("float8", "float8", recipe))
    converted = "experts" in (job.value("converted_experts") or [])
    if model.moe is not None and not (converted and name == "fp8-rowwise"):
        expected = "['experts'] and rowwise scaling: a plan has one format for all products"
        shown = job.value("converted_experts") or []
        raise not_accepted(job.names["converted_experts"], shown, expected)
    return name


def _read_recompute(job: _Job) -> str:
    word = job.value("recompute") or "selective"
    if word not in ("none", "full"):
        expected = "none or full (torchtitan's selective rules are its own)"
        raise not_accepted(job.names["recompute"], word, expected)
    return str(word)


def _read_stages(
    job: _Job, pp: int, model: TransformerModel
) -> tuple[str, int, tuple[int, ...] | None]:
    """Return the schedule, the chunks of a stage, and the layers of each chunk."""
    if pp == 1:
        return "1f1b", 1, None
    names = job.names
    schedule = names.meaning("schedules", "schedule", job.value("schedule") or "1F1B")
    parts = job.value("stages")
    if not isinstance(parts, list):
        return schedule, 1 if schedule in ("1f1b", "gpipe") else 2, None
    # The last norm belongs to the head.
    sizes = tuple(sum(1 for name in part if name != "norm") for part in parts)
    if len(sizes) % pp:
        raise InvalidInputError(
            f"{names['stages']}: {len(sizes)} parts are not accepted; expected a multiple of {pp}"
        )
    if sum(sizes) != model.blocks + 2:
        raise InvalidInputError(
            f"{names['stages']}: {sum(sizes)} modules are not accepted; {model.name} has "
            f"{model.blocks + 2}, tok_embeddings and output counted"
        )
    return schedule, len(sizes) // pp, sizes
