"""A model and a chip as a training library runs them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, cast

from phaze_fast.hardware import Accelerator, FlatFabric, MeshFabric, TieredFabric, TorusFabric
from phaze_fast.hardware.chip import Dtype
from phaze_fast.hardware.tuning import FormatTuning
from phaze_fast.models import GraphModel, Model, TransformerModel, recognised
from phaze_fast.software.profile import Software

__all__ = ["chip_as_run", "fabric_as_run", "model_as_run", "planned_model"]


def planned_model(model: Model, software: Software) -> Model:
    """Give what is planned of a model: the transformer that a graph makes up, if it makes up one.

    Software that runs a module's own operators runs a graph as it was traced.

    Examples
    --------
    >>> from phaze_fast import models
    >>> from phaze_fast.software import load_software
    >>> gpt = models.load("gpt2-xl")
    >>> planned_model(gpt, load_software("megatron-core")) is gpt
    True
    """
    if not isinstance(model, GraphModel) or model.as_traced:
        return model
    known = None if software.as_traced else recognised(model)
    return model.replace(as_traced=True) if known is None else known


@lru_cache(maxsize=512)
def model_as_run(model: Model, software: Software, tp: int = 1) -> Model:
    """Give the model whose operators the software runs: its attention, padding and dropout.

    Examples
    --------
    >>> from phaze_fast import models
    >>> from phaze_fast.software import load_software
    >>> gpt = models.load("gpt2-xl")
    >>> model_as_run(gpt, load_software("megatron-lm-2021"), 4).vocab, gpt.vocab
    (50688, 50257)
    """
    model = planned_model(model, software)
    if not isinstance(model, TransformerModel):
        return model  # its operators are given
    changed: dict[str, Any] = {}
    if software.attention == "eager":
        changed["attention"] = "eager"
        changed["softmax_multiple"] = software.softmax_multiple
    if model.window is not None:
        changed["attention_block"] = software.attention_block
    if software.fused_qkv:
        changed["fused_qkv"] = True
    if software.gathers_copied and tp > 1:
        changed["gathers_copied"] = True
    copied = (software.gather_copy_bytes, software.gather_copy_bytes + software.scatter_copy_bytes)
    if any(copied):
        changed["copied_bytes"] = copied
    if software.one_hot_embedding and model.vocab and model.patches is None:
        changed["one_hot_embedding"] = True
    if software.gradient_sums != "free":
        changed["gradient_sums"] = software.gradient_sums
    if software.added_gradient_bytes:
        changed["added_gradient_bytes"] = software.added_gradient_bytes
    if software.dropout:
        changed["dropout"] = True
    if model.gelu_new and not software.fused_gelu:
        changed["gelu_by_steps"] = True
    if software.fused_activation and model.gated:
        changed["fused_activation"] = True
    if software.norm_by_steps and model.norm == "rmsnorm":
        changed["norm_by_steps"] = True
    moved = {
        "moves": software.expert_moves,
        "sent_once": software.expert_sent_once,
        "tile_rows": software.expert_tile_rows,
    }
    if model.moe is not None and any(moved.values()):
        changed["moe"] = model.moe.replace(**moved)
    logit_bytes = software.logit_bytes
    if model.head == "mlm" and software.masked_logit_bytes is not None:
        logit_bytes = software.masked_logit_bytes
    if logit_bytes != 4:
        changed["logit_bytes"] = logit_bytes
    if software.loss_passes:
        changed["loss_passes"] = software.loss_passes
    multiple = software.vocabulary_multiple * tp
    if software.vocabulary_multiple > 1 and model.vocab:
        changed["vocab"] = -(-model.vocab // multiple) * multiple
    if all(getattr(model, name) == value for name, value in changed.items()):
        return model
    return model.replace(**changed)


def _step_share(chip: Accelerator, dtype: str) -> float:
    """Share of a lone product's rate that the products of a running job keep.

    A chip that is limited by power runs at a lower clock, which slows every product down alike. A
    format without a rate of its own loses the share that bf16 loses.
    """
    tuning = chip.tuning
    named = cast(Dtype, dtype if dtype in tuning.step_flops else "bf16")
    if named not in tuning.step_flops:
        return 1.0
    own = tuning.formats.get(named, FormatTuning())
    alone = chip.peak_flops(named) * tuning.clock_factor * (own.efficiency or tuning.efficiency)
    if own.sustained_flops is not None:
        alone = min(alone, own.sustained_flops)
    elif tuning.sustained_flops is not None:
        alone = min(alone, tuning.sustained_flops * chip.tensor_core.rates[named])
    return min(1.0, tuning.step_flops[named] / alone)


def _slowed(format_tuning: FormatTuning, share: float) -> FormatTuning:
    """Scale the rates of a number format that has its own."""
    rates = {name: getattr(format_tuning, name) for name in ("efficiency", "sustained_flops")}
    return format_tuning.replace(**{n: v * share for n, v in rates.items() if v is not None})


@lru_cache(maxsize=512)
def chip_as_run(chip: Accelerator, software: Software) -> Accelerator:
    """Give the chip as whole steps see it: rates of a running job, attention by its kernel.

    Parameters
    ----------
    chip
        Whose `tuning.step_flops` says what its products reach for as long as a step takes.
    software
        Whose attention kernel is used.

    Examples
    --------
    >>> from phaze_fast.hardware import presets
    >>> from phaze_fast.software import load_software
    >>> chip = presets.chip("tpuv4")
    >>> chip_as_run(chip, load_software("megatron-core")) == chip
    True
    """
    tuning = chip.tuning
    changed: dict[str, Any] = {}
    speed_of_products = software.product_speed.get(chip.name, 1.0)
    share = _step_share(chip, "bf16") * speed_of_products
    if share != 1.0:
        changed["efficiency"] = tuning.efficiency * share
        if tuning.sustained_flops is not None:
            changed["sustained_flops"] = tuning.sustained_flops * share
        for name in ("port_even_bytes_per_cycle", "port_odd_bytes_per_cycle"):
            changed[name] = getattr(tuning, name) * share  # unaligned products: the port binds them
    formats = {
        name: _slowed(own, _step_share(chip, name) * speed_of_products)
        for name, own in tuning.formats.items()
    }
    if formats != dict(tuning.formats):
        changed["formats"] = formats
    if software.functions and tuning.functions:
        changed["functions"] = {**tuning.functions, **software.functions}
    kernels = {str(name): kernel for name, kernel in tuning.attention_kernels.items()}
    own = kernels.get(software.attention, tuning.attention)
    if own != tuning.attention:
        changed["attention"] = own
    speed = software.attention_speed.get(chip.name, 1.0)
    if speed != 1.0:
        changed["attention"] = own.replace(
            efficiency=min(1.0, own.efficiency * speed),
            backward_efficiency=min(1.0, own.backward_efficiency * speed),
            ops_per_score=own.ops_per_score / speed,
            backward_ops_per_score=own.backward_ops_per_score / speed,
        )
    return chip.replace(tuning=tuning.replace(**changed)) if changed else chip


AnyFabric = FlatFabric | TieredFabric | TorusFabric | MeshFabric


@lru_cache(maxsize=128)
def fabric_as_run(fabric: AnyFabric, software: Software) -> AnyFabric:
    """Give the fabric as gathers and reductions among replicas see it.

    Examples
    --------
    >>> from phaze_fast.hardware import presets
    >>> from phaze_fast.software import load_software
    >>> fabric = presets.fabric("dgx-a100")
    >>> fabric_as_run(fabric, load_software("megatron-core")) == fabric
    True
    """
    if software.network_share == 1.0 or not isinstance(fabric, TieredFabric):
        return fabric
    tiers = [tier.model_dump() for tier in fabric.tiers]
    for tier in tiers[1:]:
        tier["bandwidth_bytes_per_s"] *= software.network_share
    return fabric.replace(tiers=tiers)
