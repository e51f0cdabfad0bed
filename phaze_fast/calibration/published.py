"""Published training runs: the model, the cluster and the plan that a row of a table describes.

The columns are those of the tables in ``docs/accuracy.md``. Facts that no column has (the kind of
block, the wiring of a node, the software) are looked up in ``data/runs.yaml`` by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from phaze_fast import models
from phaze_fast.calibration.run_table import network_of, standard_cells
from phaze_fast.documents import CsvRow, package_data
from phaze_fast.errors import InvalidInputError, PhazeError
from phaze_fast.hardware import Cluster, Fabric, TieredFabric, presets, sustained_rates
from phaze_fast.memory import OPTIMIZERS
from phaze_fast.models import LatentAttention, MixtureOfExperts, TransformerModel, model_flops
from phaze_fast.planning import Plan, PlanSpec
from phaze_fast.software import UNKNOWN, Software, load_software

UNKNOWN_SHAPE = "a model of the family whose shape is not known"
_PIPELINE_SLOTS = re.compile(r"take a layer slot|layers\+2 divide")
_MAKERS = re.compile(r"(?i)^(nvidia|amd|intel|google( cloud)?|aws)[ -]+")
_ALSO = (
    *("source", "source_url", "framework", "gpu", "table", "notes", "model"),
    *("arguments", "attention", "deterministic", "overlap"),
)
"""Columns for which an entry of data/runs.yaml may have a pattern besides its `match`."""


class RowRefusedError(InvalidInputError):
    """A row whose fields are missing, malformed or contradict one another."""


class UnsupportedError(PhazeError):
    """A valid row that needs a feature that is not modelled; the message names it."""


@dataclass(frozen=True)
class PublishedRun:
    """One row of a table of runs."""

    line: int
    """Line of the row in its file, from 1."""
    source: str
    label: str
    model: TransformerModel
    cluster: Cluster
    plan: PlanSpec
    software: str
    precision: str
    """Number format of the products."""
    time_s: float
    """Seconds of a step as measured; NaN where the run failed."""
    memory_bytes: float
    """Memory of a device in bytes as measured; NaN where the row does not say."""
    evaluated: float = 0.0
    """Sequences that are evaluated for each one trained on, where the measured seconds contain the
    evaluation."""
    status: str = "ok"
    """How the run ended: ``ok``, or what the row says of its failure, such as ``oom``."""
    assumed: tuple[str, ...] = ()
    """What the row does not say and was assumed, in words."""
    reports: Literal["fullest", "last"] = "fullest"
    """Which device's memory the row reports: the fullest device's, or one's of the last stage."""

    def reported_bytes(self, plan: Plan) -> float:
        """Memory that the software would report of a predicted plan: bytes in use and reserved."""
        stage = plan.stages[-1] if self.reports == "last" else plan.fullest
        in_use = stage.memory_bytes - stage.memory["fragmentation"]
        return in_use * (1.0 + self.plan.software.reserved_share)

    @property
    def chip(self) -> str:
        """Name of the chip's preset."""
        return "" if self.cluster.chip is None else self.cluster.chip.name

    @property
    def query(self) -> tuple[Any, ...]:
        """The inputs of a planner: rows with equal inputs are alternatives."""
        batch = self.plan.global_batch
        return self.source, self.model, self.cluster, batch, self.software, self.precision


def _entries(kind: str, text: str, row: CsvRow | None = None) -> Iterator[Mapping[str, Any]]:
    """Yield the entries of a kind whose patterns match a text and other columns of the row."""
    for entry in package_data(__package__, "runs.yaml")[kind]:
        others = [column for column in _ALSO if row and column in entry]
        if re.search(entry["match"], text) and all(
            row and re.search(entry[column], row.text(column)) for column in others
        ):
            yield dict(entry)


def _entry(kind: str, text: str, row: CsvRow | None = None) -> Mapping[str, Any] | None:
    """Find the first entry of a kind whose patterns match, as in `_entries`."""
    return next(_entries(kind, text, row), None)


_ASSUMED_BLOCKS = {
    True: {"norm": "rmsnorm", "activation": "silu", "gated": True, "positions": "rotary",
           "biases": False, "tied": False},
    False: {"norm": "layernorm", "activation": "gelu", "gated": False, "positions": "learned",
            "biases": True, "tied": True},
}  # fmt: skip


def _family(row: CsvRow, assumed: list[str]) -> Mapping[str, Any]:
    """Find the fields of a model that no column gives; an unknown name gets Llama's or GPT-3's.

    A feed-forward that is not four times as wide as the model is taken to be gated, as Llama's.
    """
    name = row.text("model")
    family = _entry("families", name, row)
    if family is None:
        if not (row.text("layers") and row.text("hidden")):
            raise UnsupportedError(f"model {name}: no known shape")
        gated = row.text("ffn") != "" and row.whole("ffn") != 4 * row.whole("hidden")
        kind = "gated blocks as Llama's" if gated else "blocks as GPT-3's"
        assumed.append(f"model {name}: {kind}")
        return {"like": _ASSUMED_BLOCKS[gated]}
    if "unsupported" in family:
        raise UnsupportedError(family["unsupported"])
    return family


def _arguments(row: CsvRow) -> tuple[dict[str, str], dict[str, Any]]:
    """Read Megatron's arguments: their values by name, and the fields of a block that they set."""
    words = [word.strip() for word in row.text("arguments").split(";") if word.strip()]
    known, changed = package_data(__package__, "runs.yaml")["arguments"], {}
    for word in words:
        entry = known.get(word) or known.get(word.partition("=")[0]) or {}
        if "unsupported" in entry:
            raise UnsupportedError(entry["unsupported"])
        changed.update(entry.get("like", {}))
    return dict(word.partition("=")[::2] for word in words), changed


def _experts(row: CsvRow, given: Mapping[str, str], known: Any, ffn: int) -> Any:
    """Read a mixture of experts from the columns, else as its family has it."""
    if row.text("experts") in ("", "0"):
        return None if known is None else MixtureOfExperts(**{"expert_ffn": ffn, **known})
    shared = row.whole("shared_expert_ffn", 0)
    dense = re.fullmatch(
        r"\(\[0\]\*(\d+)\+\[1\]\*\d+\)", given.get("moe-layer-freq", "([0]*0+[1]*1)")
    )
    if dense is None:
        raise UnsupportedError("experts in layers that follow no simple rule")
    return MixtureOfExperts(
        experts=row.whole("experts"),
        top_k=row.whole("topk", 1),
        expert_ffn=row.whole("moe_ffn", ffn),
        shared_experts=1 if shared else 0,
        shared_ffn=shared or None,
        dense_layers=int(dense[1]),
    )


def _latent(row: CsvRow, given: Mapping[str, str]) -> LatentAttention | None:
    if row.text("mla") in ("", "0"):
        return None
    names = ("q-lora-rank", "kv-lora-rank", "qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim")
    if not all(name in given for name in names):
        raise UnsupportedError("latent attention whose ranks are not said")
    ranks = [int(given[name]) for name in names]
    fields = ("query_rank", "kv_rank", "plain_width", "rotary_width", "value_width")
    return LatentAttention(**dict(zip(fields, ranks, strict=True)))


def _preset(row: CsvRow) -> TransformerModel | None:
    """Find the preset that a row names, if neither its columns nor a family give the shape."""
    family = _entry("families", row.text("model"), row) or {}
    shaped = row.text("layers") or row.text("hidden") or "layers" in family.get("shape", {})
    name = re.sub(r"[^a-z0-9.]+", "-", row.text("model").lower())
    name = re.sub(r"^(?:meta-)?llama-(\d)(?:\.1)?-(\d+b)(-base)?$", r"llama\1-\2", name)
    if (
        shaped
        or name not in models.names()
        or family.get("unsupported", UNKNOWN_SHAPE) != UNKNOWN_SHAPE
    ):
        return None
    preset = models.load(name)
    if not isinstance(preset, TransformerModel):
        return None
    return preset.replace(seq=row.whole("seq", preset.seq))


def _model(row: CsvRow, assumed: list[str]) -> TransformerModel:
    preset = _preset(row)
    if preset is not None:
        return preset
    family = _family(row, assumed)
    given, changed = _arguments(row)
    shape, like = dict(family.get("shape", {})), {**family["like"], **changed}
    fields = {**family.get("fields", {})}
    biases = dict.fromkeys(("qkv_bias", "out_bias", "ffn_bias"), like.pop("biases"))
    tied = like.pop("tied")
    if row.text("hidden"):  # Megatron's defaults, megatron/training/arguments.py
        hidden = row.whole("hidden")
        shape.setdefault("ffn", hidden * 8 // 3 // 64 * 64 if like["gated"] else 4 * hidden)
    size = {c: row.whole(c, shape.get(c)) for c in ("layers", "hidden", "heads", "ffn", "seq")}
    if not row.text("seq"):
        assumed.append(f"sequences of {size['seq']} tokens")
    latent = _latent(row, given)
    if latent is not None:
        fields["latent"] = latent
    vocab = int(given.get("vocab-size") or shape.get("vocab", 51200))
    try:
        return TransformerModel(
            name=row.text("model"),
            **size,
            kv_heads=row.whole("kv_heads", shape.get("kv_heads", size["heads"])),
            head_dim=int(given["kv-channels"]) if "kv-channels" in given else shape.get("head_dim"),
            vocab=row.whole("vocab", vocab),
            max_positions=size["seq"] if like["positions"] == "learned" else None,
            tied_embeddings=tied,
            mtp_layers=row.whole("mtp", 0),
            moe=_experts(row, given, family.get("moe"), size["ffn"]),
            **like,
            **biases,
            **fields,
        )
    except RowRefusedError:
        raise
    except InvalidInputError as error:
        raise RowRefusedError(f"{row.where}: {str(error).splitlines()[0]}") from None


def _routed(row: CsvRow, model: TransformerModel) -> TransformerModel:
    """Return the model; with a token's experts in one group if the benchmark routes so."""
    settings = _entries("settings", row.text("framework"), row)
    if model.moe is None or not any(setting.get("neighbouring_experts") for setting in settings):
        return model
    groups = model.moe.experts // model.moe.top_k
    return model.replace(moe=model.moe.replace(groups=groups, top_groups=1))


def _wired(
    row: CsvRow, entry: Mapping[str, Any], wired: TieredFabric, devices: int, assumed: list[str]
) -> TieredFabric:
    """Return the interconnect with node size and bandwidth from the row's words or its source."""
    tiers, words = [tier.model_dump() for tier in wired.tiers], row.text("network")
    said = network_of(words, tiers[0]["size"])
    wiring = _entry("networks", words, row) or _entry("wiring", row.text("source"))
    if said.node_devices is not None:
        tiers[0]["size"] = said.node_devices
    if said.beyond_node_bytes_per_s is not None:
        tiers[-1]["bandwidth_bytes_per_s"] = said.beyond_node_bytes_per_s
    elif wiring is not None:
        reached = wiring["beyond_node_bytes_per_s"]
        tiers[-1]["bandwidth_bytes_per_s"] = reached
        if words and devices > tiers[0]["size"]:
            assumed.append(f"network {words}: {reached / 1e9:g} GB/s a device")
    used = entry.get("used_of_a_node", tiers[0]["size"])
    if devices > used and devices % tiers[0]["size"] and devices % used == 0:
        tiers[0]["size"] = used
    if tiers == [tier.model_dump() for tier in wired.tiers]:
        return wired
    return wired.replace(name=f"{wired.name}, as wired", tiers=tiers)


def _cluster(row: CsvRow, assumed: list[str]) -> Cluster:
    devices, gpu = row.whole("n_gpus"), _MAKERS.sub("", row.text("gpu"))
    kinds = [kind for kind in re.split(r"[;+]", gpu) if kind]
    if len(set(kinds)) > 1:
        raise UnsupportedError("devices of several kinds")
    entry = _entry("gpus", gpu, row)
    if entry is None and gpu.lower() in presets.chip_names():
        chip = presets.chip(gpu)
        entry = {"chip": gpu, "fabric": chip.usual_fabric} if chip.usual_fabric else None
    if entry is None:
        raise UnsupportedError(f"device {gpu or '(none)'}: no preset")
    if "assumed" in entry:
        assumed.append(f"device {gpu or '(not stated)'}: {entry['chip']}")
    fabric = entry["fabric"]
    if "beyond" in entry and devices > entry["beyond"][0]:
        fabric = entry["beyond"][1]
    if row.text("network").lower() in presets.fabric_names():
        fabric = row.text("network")
    wired, chip = presets.fabric(fabric), presets.chip(entry["chip"])
    if "sustained" in entry:
        chip = sustained_rates(entry["sustained"]).applied(chip)
    if isinstance(wired, TieredFabric):
        wired = _wired(row, entry, wired, devices, assumed)
    try:
        return Cluster(devices=devices, fabric=wired, chip=chip)
    except InvalidInputError as error:
        raise UnsupportedError(str(error).splitlines()[0].removeprefix("cluster.")) from None


def _zero(row: CsvRow, unstated: int) -> int:
    """Read the ZeRO stage; `unstated` is the default of the software."""
    said, sharded = row.text("zero_or_dist_opt").lower(), row.text("fsdp")
    stage = re.match(r"(?:zero)?[ -]*(?:stage)?[ -]*([0-3])(?![.]?[1-9])", said)
    if stage:
        return int(stage[1])
    if said.startswith("shard_grad_op"):
        return 2
    if re.search(r"full_shard|fsdp", said) or sharded not in ("", "0"):
        return 3
    if re.search(r"distributed optimi[sz]er|dist-opt", said):
        return 1
    if said in _NO | _UNSHARDED:
        return 0 if said else unstated
    raise row.fault("zero_or_dist_opt", "0 to 3, fsdp, or distributed optimizer")


def _shard(row: CsvRow, fabric: Fabric, widths: Mapping[str, int], zero: int) -> int | None:
    """Read how many replicas shard the weights; None where all do, or weights are not sharded.

    On a torus, groups lie along dimensions rather than consecutive ranks, and no collective leaves
    the links of a pod: there all replicas shard. A count of -1 means all devices of a slice that
    other widths leave (MaxText, ici_fsdp_parallelism).
    """
    dp = widths["dp"]
    if zero < 3 or not isinstance(fabric, TieredFabric):
        return None
    said = re.fullmatch(r"fsdp (-1|\d+)", row.text("zero_or_dist_opt"))
    size = row.whole("fsdp") if row.text("fsdp") not in ("", "0", "1") else dp
    size = int(said[1]) if said else size
    if size == -1:
        size = (fabric.tiers[0].size or 1) // (widths["tp"] * widths["cp"])
    return size if 0 < size < dp and dp % size == 0 else None


def _folded(widths: Mapping[str, int], entry: Mapping[str, Any]) -> bool:
    """Whether experts are not split by tensor parallelism: expert groups span tensor groups.

    They are not split if `ep` does not divide the replicas, or if the recipe says so.
    """
    tp, dp, ep = widths["tp"], widths["dp"], widths["ep"]
    whole = entry.get("etp") == 1 or dp % ep > 0
    return ep > 1 and tp > 1 and whole and tp * widths["cp"] * dp % ep == 0


def _software(row: CsvRow, entry: Mapping[str, Any], given: Software | None) -> Software:
    """Return the software's profile with the fields that the recipe and the row change."""
    software = given or load_software(entry["software"]).replace(**entry.get("fields", {}))
    changed: dict[str, Any] = {}
    workspace_mib = 0.0
    for setting in _entries("settings", row.text("framework"), row):
        changed |= setting.get("fields", {})
        workspace_mib += setting.get("workspace_mib", 0.0)
    if workspace_mib:
        changed["workspace_bytes"] = int(workspace_mib * 2**20)
    return software.replace(**changed) if changed else software


def _optimizer(row: CsvRow, software: Software) -> str:
    said = row.text("optimizer").lower()
    if said in ("", "adam", "adamw"):
        return software.optimizer
    if said not in OPTIMIZERS:
        raise UnsupportedError(f"optimiser {said}")
    return said


def _stages(row: CsvRow, model: TransformerModel, pp: int, vpp: int) -> tuple[int, ...] | None:
    """Read the layers of each stage; None where blocks are divided evenly."""
    chunks, said = pp * vpp, re.findall(r"\d+", row.text("stages"))
    if said:
        layers = [int(count) for count in said]
        if sum(layers) == model.layers:  # embedding and head are not counted
            layers[0], layers[-1] = layers[0] + 1, layers[-1] + 1
        return tuple(layers)
    if _PIPELINE_SLOTS.search(row.text("notes")) or vpp > 1:
        slots, over = divmod(model.layers + 2, chunks)
        if slots and not over:
            return (slots,) * chunks
    return None


def _widths(row: CsvRow, devices: int) -> dict[str, int]:
    """Read the parallel widths; an unstated `dp` takes the devices that other widths leave."""
    widths = {c: row.whole(c, 1) for c in ("tp", "pp", "dp", "cp", "ep")}
    product = math.prod(widths[c] for c in ("tp", "pp", "dp", "cp"))
    if not row.text("dp") and devices % product == 0:
        return {**widths, "dp": devices // product}
    if product != devices:
        parts = " x ".join(f"{c} {widths[c]}" for c in ("tp", "pp", "dp", "cp"))
        raise RowRefusedError(
            f"{row.where}: n_gpus: {devices} is not accepted; {parts} is {product}"
        )
    return widths


def _sequence_parallel(row: CsvRow) -> bool:
    """Read whether rows of norms are split; an empty cell means no, no column the default."""
    said = row.text("sp").lower()
    if "sp" not in row.cells:
        return bool(PlanSpec.model_fields["sequence_parallel"].default)
    if said not in _YES | _NO:
        raise row.fault("sp", "1 or 0, yes or no, true or false")
    return said in _YES


_YES = frozenset(["1", "yes", "true", "on"])
_NO = frozenset(["", "0", "no", "false", "off", "-"])
_UNSHARDED = frozenset(["none", "ddp", "n/a", "replicated"])


def _plan(
    row: CsvRow,
    model: TransformerModel,
    cluster: Cluster,
    named: str,
    entry: Mapping[str, Any],
    software: Software,
) -> PlanSpec:
    widths, batch = _widths(row, cluster.devices), row.whole("global_batch")
    zero = _zero(row, entry.get("unstated_zero", 0))
    vpp = row.whole("vp", 1) if widths["pp"] > 1 else 1
    recompute = _entry("recompute", row.text("recompute"), row)
    if recompute is None:
        raise row.fault("recompute", "none, selective, full or partial")
    if "unsupported" in recompute:
        raise UnsupportedError(recompute["unsupported"])
    folded = _folded(widths, entry)
    etp = row.whole("etp", 0) or (1 if folded else None)
    fields: dict[str, Any] = {
        **widths,
        "etp": etp if model.moe is not None else None,
        # Recipes of benchmarks route evenly (moe_router_force_load_balancing of Megatron-Core) or
        # at random (use_random_routing of MaxText).
        "expert_imbalance": entry.get("expert_imbalance", 1.0),
        "expert_overlap": entry.get("expert_overlap", 0.0),
        "global_batch": batch,
        "micro_batch": batch // widths["dp"]
        if entry.get("whole_batch")
        else row.whole("micro_batch"),
        "schedule": "interleaved" if vpp > 1 else "1f1b",
        "vpp": vpp,
        "recompute": recompute["mode"],
        "stages": _stages(row, model, widths["pp"], vpp),
        "zero": zero,
        "shard": _shard(row, cluster.fabric, widths, zero),
        "sequence_parallel": folded or _sequence_parallel(row),
        "seq": model.seq,
        "precision": named,
        "software": software,
        "optimizer": _optimizer(row, software),
    }
    try:
        return PlanSpec(**fields)
    except InvalidInputError as error:
        text = str(error).splitlines()[0]
        if text.startswith(("ep:", "plan.ep:", "schedule", "plan.schedule")):
            raise UnsupportedError(text) from None
        raise RowRefusedError(f"{row.where}: {text}") from None


def _evaluated(row: CsvRow) -> float:
    """Read the number of evaluated sequences for each sequence trained on."""
    entry = _entry("evaluation", row.text("verified"), row)
    if entry is None:
        return 0.0
    batch = row.whole("global_batch")
    return float(-(-entry["sequences"] // batch) * batch / entry["every"])


def _measured_s(row: CsvRow, model: TransformerModel) -> float:
    """Read the seconds of a step, or derive them from tokens or operations per second."""
    if row.text("iter_time_s"):
        return row.positive("iter_time_s")
    if row.text("status") != "ok":
        return math.nan
    batch, devices = row.whole("global_batch", 1), row.whole("n_gpus")
    if row.text("samples_per_s") and row.text("global_batch"):
        return batch / row.positive("samples_per_s")
    if row.text("tokens_per_s") and row.text("global_batch"):
        return batch * model.seq / row.positive("tokens_per_s")
    if row.text("tokens_per_s_per_gpu") and row.text("global_batch"):
        return batch * model.seq / devices / row.positive("tokens_per_s_per_gpu")
    if row.text("tflops_per_gpu") and row.text("global_batch"):
        flops = model_flops(model, seq=model.seq, sequences=batch).total
        return flops / devices / (1e12 * row.positive("tflops_per_gpu"))
    return row.positive("iter_time_s")


def _profile(row: CsvRow, assumed: list[str]) -> Mapping[str, Any]:
    """Find the software's profile; `generic` where none is known."""
    framework = row.text("framework")
    entry = _entry("software", framework, row)
    if entry is None:
        assumed.append(f"software {framework or '(not stated)'}: profile {UNKNOWN}")
        return {"software": UNKNOWN}
    return entry


def read_run(line: int, cells: Mapping[str, str], software: Software | None = None) -> PublishedRun:
    """Read one row of a table of training runs.

    Parameters
    ----------
    line
        Line of the row in its file.
    cells
        Text by column, under any of the names in `phaze_fast.calibration.run_table`.
    software
        The profile to take instead of the one that the row names.

    Raises
    ------
    RowRefusedError
        Where fields are missing or contradict one another; the message has the row's number.
    UnsupportedError
        Where the row needs a feature that is not modelled.
    """
    row = CsvRow(f"row {line}", standard_cells(cells), RowRefusedError)
    assumed: list[str] = []
    precision = _entry("precision", row.text("precision") or "bf16", row)
    if precision is None:
        raise row.fault("precision", "bf16, fp16, fp8, mxfp8, nvfp4 or int8")
    if "unsupported" in precision:
        raise UnsupportedError(precision["unsupported"])
    if not row.text("precision"):
        assumed.append("products in bf16")
    entry = {"software": software.name} if software else _profile(row, assumed)
    model = _routed(row, _model(row, assumed))
    time_s = _measured_s(row, model)
    cluster = _cluster(row, assumed)
    profile = _software(row, entry, software)
    plan = _plan(row, model, cluster, precision["format"], entry, profile)
    label = (
        f"{model.name} on {cluster.devices} x {row.text('gpu')}, tp {plan.tp} pp {plan.pp} "
        f"dp {plan.dp}, micro-batch {plan.micro_batch}"
    )
    if plan.recompute == "auto":
        assumed.append("the fastest recomputation that fits")
    return PublishedRun(
        line=line,
        source=row.text("source") or "(no source)",
        label=label,
        model=model,
        cluster=cluster,
        plan=plan,
        software=entry["software"],
        precision=precision["format"],
        time_s=time_s,
        memory_bytes=row.positive("memory_bytes", row.positive("memory_gib", math.nan) * 2**30),
        evaluated=_evaluated(row),
        status=row.text("status"),
        assumed=tuple(assumed),
        reports="last" if entry.get("reports") == "last" else "fullest",
    )
