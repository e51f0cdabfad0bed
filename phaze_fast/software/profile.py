"""Training software as data: the operators it runs, host overheads, and overlap.

A chip and an interconnect determine how fast an operator is, a profile which operators run. The
functions `*_as_run` apply a profile to a model, a chip or an interconnect. Operator graphs, layer
times and message sizes depend on the profile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import BeforeValidator, Field

from phaze_fast.documents import Presets
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import Accelerator, AnyFabric, TieredFabric
from phaze_fast.hardware.chip import Dtype
from phaze_fast.hardware.tuning import FormatTuning, FunctionCost
from phaze_fast.models import Model, TransformerModel, expanded, recognised
from phaze_fast.records import (
    Bytes,
    Count,
    Fraction,
    FrozenDict,
    Quantity,
    Record,
    Seconds,
    Share,
)

AttentionKernel = Literal["eager", "flash", "flash1", "flash2", "flash3", "cudnn", "splash-split"]
"""How attention is computed: softmax(QK^T)V in three kernels, or fused; ``flash`` is the best fused
kernel of the chip."""

Speed = Annotated[float, Field(strict=True, gt=0, le=2, allow_inf_nan=False)]

GradientSums = Literal["free", "fused", "kernels"]

FRAGMENTATION = 0.03
"""Fraction of the activations and buffers that an allocator loses to fragmentation, unless a
profile says otherwise. It is an allowance, not a fit: caching allocators report a few percent."""

DEFAULT = "megatron-core"
"""The profile where none is named."""
UNKNOWN = "generic"
"""The profile for software without a profile of its own."""


class Software(Record):
    """What a training library runs for one model on one device.

    Examples
    --------
    >>> load_software("megatron-lm-2021").attention
    'eager'
    """

    what: ClassVar[str] = "software"
    name: str = Field(min_length=1)
    """Name of the profile."""
    attention: AttentionKernel = "flash"
    """Kernel of attention; a model that sets ``eager`` itself runs explicit attention instead."""
    attention_speed: FrozenDict[str, Speed] = FrozenDict()
    """Speed of the attention kernel relative to the best one of the chip, by the chip's name; 1
    where a chip is not named."""
    product_speed: FrozenDict[str, Speed] = FrozenDict()
    """Speed of the software's matrix products relative to those that the chip was calibrated with,
    by the chip's name: libraries of a chip's first year are slower."""
    functions: FrozenDict[str, FunctionCost] = FrozenDict()
    """Vector functions with kernels of this software, by name; those of the chip's tuning are
    PyTorch's."""
    fused_qkv: bool = False
    """Whether one product makes queries, keys and values."""
    attention_block: Count = 1
    """Side of a tile of fused attention, in queries and in keys; windows do not make it smaller."""
    added_gradient_bytes: Annotated[int, Field(strict=True, ge=0, le=64)] = 0
    """Bytes that separate kernels move for each parameter in every backward pass to add its
    gradient to those of earlier micro-batches; 0 where products accumulate it themselves."""
    gradient_sums: GradientSums = "free"
    """How gradients that reach one tensor from several operators are summed: by a kernel for each
    but the first, in the kernel that reads them (``fused``), or at no cost."""
    gather_copy_bytes: Quantity = 0.0
    """Bytes that a separate kernel moves for each unsharded parameter in every forward and every
    backward pass, to reorder weights gathered from replicas: those of a plain copy of equal
    duration."""
    scatter_copy_bytes: Quantity = 0.0
    """Such bytes for each gradient in every backward pass, to reorder it for the reduce-scatter."""
    one_hot_embedding: bool = False
    """Whether rows of the embedding are looked up by a product with one-hot vectors."""
    gathers_copied: bool = False
    """Whether rows that tensor-parallel devices gather or reduce-scatter along sequences are copied
    once more: a collective concatenates along the first dimension only."""
    softmax_multiple: Count = 1
    """Pairs of sequence and head in one block of the softmax kernel; where the pairs of a device
    are no multiple of it, explicit attention runs a sequence of fp32 operators instead."""
    dropout: bool = False
    """Whether dropout runs even in models that do not set it."""
    host_s: Seconds = 0.0
    """Seconds of the host to launch one operator; a pass takes at least the sum over its
    operators."""
    product_host_s: Seconds = 0.0
    """Additional seconds of the host for each product, convolution or attention of a forward pass,
    which a module of its own calls with views of rows and weights."""
    gradient_host_s: Seconds = 0.0
    """Additional seconds of the host for each of these in a backward pass, which autograd calls."""
    optimizer_host_s: Seconds | None = None
    """Seconds of the host for a kernel of an optimiser with products; by default `host_s`."""
    recompute_host_s: Seconds = 0.0
    """Additional seconds of the host for each recomputed layer: saving and restoring the random
    state, entering the backward pass again."""
    as_traced: bool = False
    """Whether the operators of a module's own code run one by one, as traced or as known of its
    family of transformers; otherwise a module that is recognised as a transformer runs the fused
    operators of that transformer."""
    compiled: bool = False
    """Whether torch.compile fuses the operators of a module's own code into kernels."""
    overlap_gradients: bool = True
    """Whether the synchronisation of gradients overlaps with the backward pass."""
    overlap_slowdown: Annotated[float, Field(strict=True, ge=1, le=100, allow_inf_nan=False)] = 1.0
    """Factor on the time of work that overlaps with transfers of gradients, weights or the keys of
    a ring: work and transfers use the same memory and some of the same cores."""
    bucket_bytes: Bytes = 100_000_000
    """Bytes of gradients that are synchronised together; the last bucket is not overlapped."""
    network_share: Share = 1.0
    """Share of the bandwidth beyond a node that gathers and reductions among replicas reach."""
    reserved_share: Fraction = 0.0
    """Memory that the allocator reserves beyond the bytes in use, as a share of these, where
    reported figures include it. Plans may use this memory: it is released where memory is short."""
    slice_host_s: Seconds = 0.0
    """Seconds of the host for each matrix and each replica to copy the replica's slice of updated
    weights to its place (ZeRO 1 and 2); 0 where slices are gathered in place."""
    hidden_tensor: Fraction = 0.0
    """Share of the seconds of tensor-parallel collectives that overlaps with products."""
    scattered_messages: bool = False
    """Whether messages between stages are scattered over the tensor-parallel group and gathered by
    the receiver."""
    stage_division: Literal["even", "work", "blocks"] = "even"
    """How layers are divided over stages where a plan does not say: an equal number of blocks to
    each; so that the largest work of a stage, embedding and head counted, is least; or so that the
    largest number of blocks is least, the first stages filled first."""
    vocabulary_multiple: Count = 1
    """The vocabulary is padded to a multiple of this times the tensor-parallel width."""
    loss_passes: Annotated[int, Field(strict=True, ge=0, le=1000)] = 0
    """How often the loss moves fp32 logits through memory, forward and backward together; 0 where
    it is one fused kernel."""
    logit_bytes: Annotated[int, Field(strict=True, ge=1, le=64)] = 4
    """Bytes that each logit takes while the loss is computed, copies and gradients included."""
    fused_activation: bool = False
    """Whether activation and gate of a feed-forward are one kernel, which stores its inputs."""
    expert_moves: Annotated[int, Field(strict=True, ge=0, le=2)] = 0
    """How often separate kernels permute rows before and after experts; see
    `MixtureOfExperts.moves`."""
    expert_sent_once: bool = False
    """Whether a token is sent only once to a node or device that has several of its experts."""
    expert_beside_shared: bool = False
    """Whether shared experts run while rows are on their way to routed experts and back (Megatron's
    ``--moe-shared-expert-overlap``), unless exchanges overlap another micro-batch."""
    expert_tile_rows: Annotated[int, Field(strict=True, ge=0, le=1048576)] = 0
    """Rows of a tile of grouped products; a tile with rows of two experts is computed for both.
    See `MixtureOfExperts.tile_rows`."""
    expert_bias_unfused: bool = False
    """Whether separate kernels add the biases of experts; see `MixtureOfExperts.bias_unfused`."""
    expert_launch_s: Seconds = 0.0
    """Seconds that a forward pass waits for each expert of its device, whose casts and products
    the host launches one by one once it knows how many tokens came; a backward pass twice that."""
    gradient_stand_ins: bool = False
    """Whether unused bf16 gradients are allocated although products accumulate into fp32 buffers:
    one for each shape of weights in a layer, and one for the logits' weights in their backward
    pass."""
    resident_gradients: bool = True
    """Whether buffers of all gradients are allocated all the time; otherwise each is allocated by
    the first backward pass of its layer and freed by the optimiser's step."""
    whole_layers: Literal[1, 2] = 2
    """Layers with unsharded weights at a time where replicas shard weights: 2 for the running layer
    and the next, 1 where each is gathered when it runs."""
    split_storage: bool = False
    """Whether tensor-parallel devices store shares, along the hidden dimension, of what layers pass
    on, although sequences are not split. Times are still those of whole rows."""
    workspace_bytes: Bytes = 0
    """Memory that libraries and the process use on a device, in addition to that of a step."""
    fragmentation: Fraction = FRAGMENTATION
    """Fraction of the activations and buffers that the allocator loses to fragmentation. Zero where
    the lifetimes of all tensors are known, temporaries included: freed blocks that the allocator
    holds (`reserved_share`) are released where memory is short."""
    optimizer: str = "adam"
    """Default optimiser, a name of `phaze_fast.memory.OPTIMIZERS`."""
    step_ratios: tuple[Quantity, Quantity] | None = None
    """80% interval of measured over predicted seconds of a step, from runs of this software;
    absent: an interval is looked up by chip and software."""
    fitted: tuple[str, ...] = ()
    """Fields that were fitted to measured runs; all others are facts about the software."""
    sources: tuple[str, ...] = ()
    """Sources of facts and fits."""
    notes: str = ""
    """Remarks on facts and fits."""

    @property
    def waited_for(self) -> bool:
        """Whether a pass may have to wait for the host to launch its operators."""
        waits = (self.host_s, self.product_host_s, self.gradient_host_s)
        return any((*waits, self.recompute_host_s, self.expert_launch_s))

    @property
    def contention(self) -> float:
        """Share of the seconds of an overlapped collective by which it delays the other work."""
        return 1.0 - 1.0 / self.overlap_slowdown

    @property
    def reference(self) -> str | FrozenDict[str, Any]:
        """The name of the equal preset, else plain data: the form in which files refer to it."""
        return reference_of(_PROFILES, self)


_PROFILES = Presets("software", "phaze_fast.software/data", Software.from_dict)


def reference_of(presets: Presets[Any], record: Any) -> str | FrozenDict[str, Any]:
    """Return the name of the preset that a record equals, or the record as plain data."""
    same = record.name in presets.names and presets.load(record.name) == record
    return record.name if same else _frozen(record.to_dict())  # type: ignore[no-any-return]


def _frozen(value: Any) -> Any:
    """Return plain data that cannot change."""
    if isinstance(value, dict):
        return FrozenDict({key: _frozen(inner) for key, inner in value.items()})
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def software_names() -> tuple[str, ...]:
    """Names of the profiles that come with the package.

    Examples
    --------
    >>> "deepspeed" in software_names()
    True
    """
    return _PROFILES.names


def load_software(name_or_path: str | Path) -> Software:
    """Load a profile by name, or from a YAML or JSON file.

    Raises
    ------
    InvalidInputError
        Where no profile has that name, or the file is not accepted.

    Examples
    --------
    >>> load_software("huggingface-eager").name
    'huggingface-eager'
    """
    return _PROFILES.load(name_or_path)


def by_name(what: str, load: Callable[[str | Path], Any]) -> BeforeValidator:
    """Return a validator that accepts a preset's name or file in place of the record."""

    def resolved(value: Any) -> Any:
        if not isinstance(value, str | Path):
            return value
        try:
            return load(value)
        except InvalidInputError as error:
            raise ValueError(str(error).removeprefix(f"{what}: ")) from None

    return BeforeValidator(resolved)


SoftwareOrName = Annotated[Software, by_name("software", load_software)]
"""A profile, also by its name or as a file."""


# ---- a model, a chip and a fabric as the software runs them ----


def planned_model(model: Model, software: Software, seq: int | None = None) -> Model:
    """Return the model to plan: the transformer that a graph is recognised as, or the graph.

    Software that runs a module's own operators (`as_traced`) runs a graph as it was traced, and a
    model read from a configuration as the graph of its module, on sequences of `seq` tokens.

    Examples
    --------
    >>> from phaze_fast import models
    >>> from phaze_fast.software import load_software
    >>> gpt = models.load("gpt2-xl")
    >>> planned_model(gpt, load_software("megatron-core")) is gpt
    True
    """
    if isinstance(model, TransformerModel):
        own_code = software.as_traced and model.module is not None
        return expanded(model, seq, software.compiled) if own_code else model
    if software.compiled and model.kernels == "eager":
        if model.compiled is None:
            raise InvalidInputError(
                f"model: the graph {model.name} does not hold the kernels of torch.compile, which "
                f"{software.name} runs; trace it again, or choose software: pytorch-eager"
            )
        return model.compiled
    if model.as_traced:
        return model
    known = None if software.as_traced else recognised(model)
    return model.replace(as_traced=True) if known is None else known


@lru_cache(maxsize=512)
def model_as_run(model: Model, software: Software, tp: int = 1) -> Model:
    """Return the model whose operators the software runs: its attention, padding and dropout.

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
        return model  # a graph lists its operators, which software does not change
    changed: dict[str, Any] = {
        "fused_qkv": model.fused_qkv or software.fused_qkv,
        "gathers_copied": model.gathers_copied or (software.gathers_copied and tp > 1),
        "dropout": model.dropout or software.dropout,
        "fused_activation": model.fused_activation or (software.fused_activation and model.gated),
        "added_gradient_bytes": software.added_gradient_bytes or model.added_gradient_bytes,
        "loss_passes": software.loss_passes or model.loss_passes,
        **_embedding_and_logits(model, software, tp),
    }
    if software.attention == "eager":
        changed |= {"attention": "eager", "softmax_multiple": software.softmax_multiple}
    if model.window is not None:
        changed["attention_block"] = software.attention_block
    copied = (software.gather_copy_bytes, software.gather_copy_bytes + software.scatter_copy_bytes)
    if any(copied):
        changed["copied_bytes"] = copied
    if software.gradient_sums != "free":
        changed["gradient_sums"] = software.gradient_sums
    moved = {
        "moves": software.expert_moves,
        "sent_once": software.expert_sent_once,
        "tile_rows": software.expert_tile_rows,
        "bias_unfused": software.expert_bias_unfused and model.ffn_bias,
    }
    if model.moe is not None and any(moved.values()):
        changed["moe"] = model.moe.replace(**moved)
    if all(getattr(model, name) == value for name, value in changed.items()):
        return model
    return model.replace(**changed)


def _embedding_and_logits(model: TransformerModel, software: Software, tp: int) -> dict[str, Any]:
    """Return the fields of embedding, vocabulary and logits that the software changes."""
    changed: dict[str, Any] = {}
    if software.one_hot_embedding and model.vocab and model.patches is None:
        changed["one_hot_embedding"] = True
    if software.logit_bytes != 4:
        changed["logit_bytes"] = software.logit_bytes
    if software.vocabulary_multiple > 1 and model.vocab:
        multiple = software.vocabulary_multiple * tp
        changed["vocab"] = -(-model.vocab // multiple) * multiple
    return changed


def _step_share(chip: Accelerator, dtype: str) -> float:
    """Return the rate of products in a running job as a share of that of a product measured alone.

    A power-limited chip runs at a lower clock, which slows all products equally. A format without
    a rate of its own loses the same share as bf16.
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
    """Scale the rates of a number format that has rates of its own."""
    rates = {name: getattr(format_tuning, name) for name in ("efficiency", "sustained_flops")}
    return format_tuning.replace(**{n: v * share for n, v in rates.items() if v is not None})


@lru_cache(maxsize=512)
def chip_as_run(chip: Accelerator, software: Software) -> Accelerator:
    """Return the chip with the rates of a running job and the attention kernel of the software.

    Parameters
    ----------
    chip
        The chip, whose `tuning.step_flops` is the rate of products in a running job.
    software
        The profile, of which the attention kernel and the speed of products are used.

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
            changed[name] = getattr(tuning, name) * share  # unaligned products: limited by the port
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


@lru_cache(maxsize=128)
def fabric_as_run(fabric: AnyFabric, software: Software) -> AnyFabric:
    """Return the fabric with the bandwidth that collectives among replicas reach.

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
