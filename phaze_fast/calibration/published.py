"""Published training runs: the model, the cluster and the plan that a row of a table describes.

The columns are those of the tables in ``docs/accuracy.md``. What columns do not say (the kind of
block, the wiring of a node, the software) is looked up in ``data/runs.yaml`` by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from phaze_fast.documents import CsvRow, parse_text
from phaze_fast.errors import InvalidInputError, PhazeError
from phaze_fast.hardware import Cluster, TieredFabric, presets
from phaze_fast.models import MixtureOfExperts, TransformerModel
from phaze_fast.planning import PlanSpec
from phaze_fast.software import load_software

RUN_COLUMNS = frozenset(
    [
        *("source", "model", "layers", "hidden", "heads", "ffn", "seq", "precision", "gpu"),
        *("n_gpus", "tp", "pp", "dp", "micro_batch", "global_batch", "recompute", "framework"),
        "iter_time_s",
    ]
)
"""Columns by which a table of training runs is recognised."""

_PIPELINE_SLOTS = re.compile(r"take a layer slot|layers\+2 divide")
_ALSO = ("source", "source_url", "framework", "gpu", "table", "notes", "model")
"""Columns that entries of data/runs.yaml may have patterns for."""


class RowRefusedError(InvalidInputError):
    """A row whose fields are missing, malformed or contradict one another."""


class UnsupportedError(PhazeError):
    """A row that is in order but needs what is not modelled; the message says what."""


@dataclass(frozen=True)
class PublishedRun:
    """One row of a table of runs."""

    line: int
    """In the file, from 1."""
    source: str
    label: str
    model: TransformerModel
    cluster: Cluster
    plan: PlanSpec
    software: str
    precision: str
    """Number format of the products."""
    time_s: float
    """Seconds of a step as measured."""
    memory_bytes: float
    """Of a device as measured; NaN where the row does not say."""
    evaluated: float = 0.0
    """Sequences that are evaluated for each one trained on, where the measured seconds contain
    that."""

    @property
    def chip(self) -> str:
        """Name of the chip's preset."""
        return "" if self.cluster.chip is None else self.cluster.chip.name

    @property
    def query(self) -> tuple[Any, ...]:
        """The inputs of a planner: rows with equal inputs are alternatives."""
        batch = self.plan.global_batch
        return self.source, self.model, self.cluster, batch, self.software, self.precision


@cache
def _names() -> Mapping[str, Any]:
    file = resources.files(__package__) / "data" / "runs.yaml"
    names: dict[str, Any] = parse_text(file.read_text("utf-8"), "runs.yaml")
    return names


def _entry(kind: str, text: str, row: CsvRow | None = None) -> Mapping[str, Any] | None:
    """Find the first entry of a kind whose patterns a text, and other columns of a row, match."""
    for entry in _names()[kind]:
        others = [column for column in _ALSO if row and column in entry]
        if re.search(entry["match"], text) and all(
            row and re.search(entry[column], row.text(column)) for column in others
        ):
            return dict(entry)
    return None


def _model(row: CsvRow) -> TransformerModel:
    name = row.text("model")
    family = _entry("families", name, row)
    if family is None:
        raise UnsupportedError(f"model {name}: no known kind of block")
    if "unsupported" in family:
        raise UnsupportedError(family["unsupported"])
    shape, moe, like = family.get("shape", {}), family.get("moe"), dict(family["like"])
    biases = dict.fromkeys(("qkv_bias", "out_bias", "ffn_bias"), like.pop("biases"))
    tied = like.pop("tied")
    size = {c: row.whole(c, shape.get(c)) for c in ("layers", "hidden", "heads", "ffn", "seq")}
    experts = None if moe is None else MixtureOfExperts(**{"expert_ffn": size["ffn"], **moe})
    try:
        return TransformerModel(
            name=name,
            **size,
            kv_heads=row.whole("kv_heads", shape.get("kv_heads", size["heads"])),
            head_dim=shape.get("head_dim"),
            vocab=row.whole("vocab", shape.get("vocab", 51200)),
            max_positions=size["seq"] if like["positions"] == "learned" else None,
            tied_embeddings=tied,
            moe=experts,
            **like,
            **biases,
            **family.get("fields", {}),
        )
    except InvalidInputError as error:
        raise RowRefusedError(f"{row.where}: {str(error).splitlines()[0]}") from None


def _cluster(row: CsvRow) -> Cluster:
    devices, gpu = row.whole("n_gpus"), row.text("gpu")
    entry = _entry("gpus", gpu)
    if entry is None:
        raise UnsupportedError(f"device {gpu or '(none)'}: no preset")
    fabric = entry["fabric"]
    if "beyond" in entry and devices > entry["beyond"][0]:
        fabric = entry["beyond"][1]
    wired = presets.fabric(fabric)
    wiring = _entry("wiring", row.text("source"))
    if isinstance(wired, TieredFabric):
        tiers = [tier.model_dump() for tier in wired.tiers]
        if wiring is not None:
            tiers[-1]["bandwidth_bytes_per_s"] = wiring["beyond_node_bytes_per_s"]
        used = entry.get("used_of_a_node", tiers[0]["size"])
        if devices > used and devices % tiers[0]["size"] and devices % used == 0:
            tiers[0]["size"] = used
        if tiers != [tier.model_dump() for tier in wired.tiers]:
            wired = wired.replace(name=f"{wired.name}, as wired", tiers=tiers)
    try:
        return Cluster(devices=devices, fabric=wired, chip=presets.chip(entry["chip"]))
    except InvalidInputError as error:
        raise UnsupportedError(str(error).splitlines()[0].removeprefix("cluster.")) from None


def _zero(row: CsvRow, unstated: int) -> int:
    """Read the ZeRO stage; `unstated` is the software's own where a row does not say."""
    said, sharded = row.text("zero_or_dist_opt"), row.text("fsdp")
    if said.startswith("SHARD_GRAD_OP"):
        return 2
    if re.search(r"ZeRO-3|FULL_SHARD|FSDP", said) or sharded not in ("", "0"):
        return 3
    if re.search(r"ZeRO-1|distributed optimizer", said):
        return 1
    return 0 if said else unstated


def _shard(row: CsvRow, cluster: Cluster, dp: int, zero: int) -> int | None:
    """Read how many replicas shard weights, where other groups of replicas hold copies.

    On a torus no collective leaves the links of a pod, and groups lie along its dimensions, which
    consecutive ranks do not: there all replicas shard.
    """
    size = row.whole("fsdp") if row.text("fsdp") not in ("", "0", "1") else dp
    tiered = isinstance(cluster.fabric, TieredFabric)
    return size if tiered and zero == 3 and size < dp and dp % size == 0 else None


def _folded(widths: Mapping[str, int], entry: Mapping[str, Any]) -> bool:
    """Whether experts are not split by tensor parallelism: expert groups span tensor groups.

    They are not where they need more devices than there are replicas, and where recipes say so.
    """
    tp, dp, ep = widths["tp"], widths["dp"], widths["ep"]
    whole = entry.get("etp") == 1 or dp % ep > 0
    return ep > 1 and tp > 1 and whole and ep % tp == 0 and tp * dp % ep == 0


def _plan(
    row: CsvRow,
    model: TransformerModel,
    cluster: Cluster,
    named: str,
    zero: int,
    entry: Mapping[str, Any],
) -> PlanSpec:
    software = load_software(entry["software"]).replace(**entry.get("fields", {}))
    widths = {c: row.whole(c, 1) for c in ("tp", "pp", "dp", "cp", "ep")}
    product = math.prod(widths[c] for c in ("tp", "pp", "dp", "cp"))
    if product != cluster.devices:
        parts = " x ".join(f"{c} {widths[c]}" for c in ("tp", "pp", "dp", "cp"))
        raise RowRefusedError(
            f"{row.where}: n_gpus: {cluster.devices} is not accepted; {parts} is {product}"
        )
    vpp = row.whole("vp", 1) if widths["pp"] > 1 else 1
    recompute = _entry("recompute", row.text("recompute"), row)
    if recompute is None:
        raise row.fault("recompute", "none, selective, full or partial")
    stages = None
    chunks = widths["pp"] * vpp
    if _PIPELINE_SLOTS.search(row.text("notes")) or (model.layers % chunks and vpp > 1):
        slots, over = divmod(model.layers + 2, chunks)
        if slots and not over:
            stages = (slots,) * chunks
    folded = _folded(widths, entry)
    fields: dict[str, Any] = {
        **widths,
        "etp": 1 if folded else None,
        "expert_overlap": entry.get("expert_overlap", 0.0),
        "global_batch": row.whole("global_batch"),
        "micro_batch": row.whole("micro_batch"),
        "schedule": "interleaved" if vpp > 1 else "1f1b",
        "vpp": vpp,
        "recompute": recompute["mode"],
        "stages": stages,
        "zero": zero,
        "shard": _shard(row, cluster, widths["dp"], zero),
        "sequence_parallel": folded or row.text("sp") not in ("", "0"),
        "seq": model.seq,
        "precision": named,
        "software": software,
        "optimizer": software.optimizer,
    }
    try:
        return PlanSpec(**fields)
    except InvalidInputError as error:
        text = str(error).splitlines()[0]
        if text.startswith(("ep:", "plan.ep:", "schedule", "plan.schedule")):
            raise UnsupportedError(text) from None
        raise RowRefusedError(f"{row.where}: {text}") from None


def _evaluated(row: CsvRow) -> float:
    """Read how many sequences are evaluated for each one trained on; whole batches are."""
    entry = _entry("evaluation", row.text("verified"), row)
    if entry is None:
        return 0.0
    batch = row.whole("global_batch")
    return float(-(-entry["sequences"] // batch) * batch / entry["every"])


def read_run(line: int, cells: Mapping[str, str]) -> PublishedRun:
    """Read one row of a table of training runs.

    Raises
    ------
    RowRefusedError
        Where fields are missing or contradict one another; the message has the row's number.
    UnsupportedError
        Where the row asks for what is not modelled.
    """
    row = CsvRow(f"row {line}", cells, RowRefusedError)
    time_s, gib = row.positive("iter_time_s"), row.positive("memory_gib", math.nan)
    precision = _entry("precision", row.text("precision"), row)
    if precision is None:
        raise row.fault("precision", "bf16, fp16, fp8, mxfp8, nvfp4 or int8")
    software = _entry("software", row.text("framework"), row)
    if software is None:
        raise UnsupportedError(f"software {row.text('framework') or '(none)'}: no profile")
    model = _model(row)
    cluster = _cluster(row)
    zero = _zero(row, software.get("unstated_zero", 0))
    plan = _plan(row, model, cluster, precision["format"], zero, software)
    label = (
        f"{model.name} on {cluster.devices} x {row.text('gpu')}, tp {plan.tp} pp {plan.pp} "
        f"dp {plan.dp}, micro-batch {plan.micro_batch}"
    )
    return PublishedRun(
        line=line,
        source=row.text("source") or "(no source)",
        label=label,
        model=model,
        cluster=cluster,
        plan=plan,
        software=software["software"],
        precision=precision["format"],
        time_s=time_s,
        memory_bytes=gib * 2**30,
        evaluated=_evaluated(row),
    )


def is_run_table(header: Sequence[str]) -> bool:
    """Whether columns are those of a table of training runs."""
    return frozenset(header) >= RUN_COLUMNS
