"""Plans in the terms that Megatron-LM and Megatron Bridge share, written and read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from phaze_fast.errors import InvalidInputError
from phaze_fast.export.layout import layout_text, read_layout, sizes_of
from phaze_fast.export.request import Request, Unexpressed, facts_unsaid
from phaze_fast.models import TransformerModel

__all__ = ["plan_terms", "read_terms"]

Terms = dict[str, Any]
"""Values by what they say, in the keys of the formats' data files."""

_FSDP = {2: "optim_grads", 3: "optim_grads_params"}
_SHARED = {"no_shard": 0, "optim": 1, **{word: stage for stage, word in _FSDP.items()}}
_CP_KINDS = {"all-gather": "allgather", "ring": "p2p", "ulysses": "a2a"}
_OPTIMIZERS: dict[str, Terms] = {
    "adam": {"optimizer": "adam", "bf16": True},
    "adam-bf16-grad": {"optimizer": "adam", "bf16": True, "gradients_bf16": True},
    "adam-fp32": {"optimizer": "adam", "bf16": False},
    "sgd-momentum": {"optimizer": "sgd", "bf16": True, "sgd_momentum": 0.9},
    "sgd": {"optimizer": "sgd", "bf16": True, "sgd_momentum": 0.0},
}


# ---- written ----


_PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": {"fp8_format": "hybrid", "fp8_recipe": "delayed"},
    "fp8-current": {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"},
    "fp8-block": {"fp8_format": "e4m3", "fp8_recipe": "blockwise"},
    "mxfp8": {"fp8_format": "e4m3", "fp8_recipe": "mxfp8"},
    "nvfp4": {"fp4_format": "e2m1", "fp4_recipe": "nvfp4"},
}


def plan_terms(request: Request) -> tuple[Terms, list[Unexpressed]]:
    """Say a plan in the terms of Megatron-Core, and what of it they cannot say."""
    spec = request.spec
    missing: list[Unexpressed] = facts_unsaid(spec)
    terms: Terms = {"tp": spec.tp, "pp": spec.pp, "cp": spec.cp}
    if spec.cp > 1:
        terms["cp_kind"] = _CP_KINDS[spec.cp_kind]
    if request.model.moe is not None:
        terms |= {"ep": spec.ep, "expert_tp": spec.etp or spec.tp}
    terms |= {
        "micro_batch": spec.micro_batch,
        "global_batch": spec.global_batch,
        "seq": spec.seq or request.model.seq,
        "sequence_parallel": spec.sequence_parallel and spec.tp > 1,
        "stages_inside": spec.rank_order == "stages-inside",
    }
    terms |= _stages(request, missing)
    terms |= _sharing(request)
    terms |= _recompute(request, missing)
    if spec.precision.name in _PRECISIONS:
        terms |= _PRECISIONS[spec.precision.name]
    else:
        missing.append(
            Unexpressed(f"--precision {spec.precision.name}", "no such recipe; written as bf16")
        )
    if spec.optimizer in _OPTIMIZERS:
        terms |= _OPTIMIZERS[spec.optimizer]
    else:
        terms |= _OPTIMIZERS["adam"]
        missing.append(
            Unexpressed(
                f"--optimizer {spec.optimizer}",
                "Megatron-LM keeps fp32 weights and moments; written as adam",
            )
        )
    return terms, missing


def _stages(request: Request, missing: list[Unexpressed]) -> Terms:
    spec = request.spec
    rounds = spec.global_batch // (spec.dp * spec.micro_batch)
    if spec.schedule not in ("1f1b", "interleaved") and (spec.pp > 1 or spec.vpp > 1):
        missing.append(
            Unexpressed(
                f"--schedule {spec.schedule}",
                "Megatron-LM has 1F1B, and interleaved 1F1B; written as 1F1B",
            )
        )
        if spec.vpp > 1:  # its chunks are folded, which 1F1B is not
            missing.append(Unexpressed("--stages", "written without chunks, dealt evenly"))
            return _dealt(request)
    elif spec.vpp > 1 and (spec.pp == 1 or rounds % spec.pp):
        missing.append(
            Unexpressed(
                f"--schedule interleaved with {rounds} micro-batches",
                f"Megatron-LM interleaves groups of as many micro-batches as stages, {spec.pp}",
            )
        )
    if request.even:
        return {"vpp": spec.vpp} if spec.vpp > 1 else {}
    found: Terms = {"layout": layout_text(request.chunks)}
    if spec.vpp > 1:
        found["vpp"] = spec.vpp
    return found


def _dealt(request: Request) -> Terms:
    """Give stages of one chunk that are as even as they come."""
    spec, blocks = request.spec, request.model.layers + request.model.encoder_layers
    if blocks % spec.pp == 0:
        return {}
    each, left = divmod(blocks, spec.pp)
    counts = [each + (spec.pp - left <= k < spec.pp) for k in range(spec.pp)]
    parts = [f"t*{count}" if count else "" for count in counts]
    return {"layout": "E" + "|".join(parts) + "L"}


def _sharing(request: Request) -> Terms:
    spec = request.spec
    if spec.dp * spec.cp == 1:
        return {}
    found: Terms = {"overlap_gradients": True}
    if spec.zero:
        found |= {"zero_1": True, "overlap_weights": True}
    if spec.shard is not None and spec.shard < spec.dp:
        found["instances"] = spec.dp // spec.shard
    if spec.zero >= 2:
        found |= {"fsdp": True, "fsdp_strategy": _FSDP[spec.zero]}
    return found


def _recompute(request: Request, missing: list[Unexpressed]) -> Terms:
    full: Terms = {"recompute": "full", "recompute_method": "uniform", "recompute_layers": 1}
    modes = request.modes
    if modes <= {"none"}:
        return {}
    if modes == {"full"}:
        return full
    if request.full_blocks is not None:
        return {**full, "recompute_method": "block", "recompute_layers": request.full_blocks}
    mode = next(iter(modes))
    modules = _modules(request.model, mode) if len(modes) == 1 else None
    if modules is not None:
        return {"recompute": "selective", "recompute_modules": modules}
    said = request.spec.recompute
    missing.append(
        Unexpressed(
            f"--recompute {said if isinstance(said, str) else ','.join(said)}",
            "Megatron-LM recomputes all blocks, the first few of every chunk, or named modules; "
            "written as full, which needs no more memory and takes longer",
        )
    )
    return full


def _modules(model: TransformerModel, mode: str) -> list[str] | None:
    """Give Megatron-Core's names for what a mode recomputes, or None."""
    if mode == "selective":
        return ["core_attn"]
    sets, found = set(mode.split("+")), []
    if sets == {"attention"} and model.attention == "eager":
        return None  # core_attn is read as selective there
    if "attention" in sets:
        found.append("core_attn")
    if "norms" in sets:
        found.append("layernorm")
    act = _activation_sets(model)
    if act and act <= sets:
        found.append("moe_act")
        sets -= act
    return found if sets <= {"attention", "norms"} else None


def _activation_sets(model: TransformerModel) -> set[str]:
    """Give the sets that moe_act recomputes: the experts', where every block has experts."""
    if model.moe is None or model.moe.dense_layers:
        return set()
    return {"activations", "gated-product"} if model.gated else {"activations"}


# ---- read ----


def read_terms(
    terms: Mapping[str, Any],
    model: TransformerModel,
    devices: int | None,
    say: Callable[[str], str],
) -> dict[str, Any]:
    """Read a plan from Megatron-Core's terms.

    Parameters
    ----------
    terms
        Values by what they say.
    model
        What is trained.
    devices
        Of the cluster, where the terms have no nodes.
    say
        Gives the option's name of a term, for messages.

    Returns
    -------
    dict
        Fields of a `phaze_fast.planning.PlanSpec`.
    """
    layers = terms.get("layers")
    if layers is not None and layers != model.layers:
        raise InvalidInputError(
            f"{say('layers')}: {layers} is not accepted; {model.name} has {model.layers}"
        )
    tp, pp, cp = (int(terms.get(name, 1)) for name in ("tp", "pp", "cp"))
    world = int(terms["nodes"]) * int(terms["node_devices"]) if "node_devices" in terms else devices
    if world is None or world % (tp * pp * cp):
        raise InvalidInputError(
            f"{say('node_devices')}: {world} devices are not accepted; expected a multiple of "
            f"tp x pp x cp = {tp} x {pp} x {cp}"
        )
    own = int(terms.get("expert_tp", tp))
    sizes, vpp = _read_stages(terms, model, pp, say)
    dp = world // (tp * pp * cp)
    micro_batch = int(terms.get("micro_batch", 1))
    return {
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "dp": dp,
        "cp_kind": _read_cp_kind(terms, model, cp, say),
        "ep": int(terms.get("ep", 1)),
        "etp": None if own == tp else own,
        "micro_batch": micro_batch,
        "global_batch": int(terms.get("global_batch", dp * micro_batch)),
        "seq": terms.get("seq"),
        **_read_sharing(terms, dp, say),
        "schedule": "interleaved" if vpp > 1 else "1f1b",
        "vpp": vpp,
        "stages": sizes,
        "recompute": _read_recompute(terms, model, say),
        "rank_order": "stages-inside" if terms.get("stages_inside") else "replicas-inside",
        "sequence_parallel": bool(terms.get("sequence_parallel")) or tp == 1,
        "precision": _read_precision(terms, say),
        "optimizer": _read_optimizer(terms, say),
        "idle": "node_devices" in terms,
    }


def _read_stages(
    terms: Mapping[str, Any], model: TransformerModel, pp: int, say: Callable[[str], str]
) -> tuple[tuple[int, ...], int]:
    """Layers of each chunk, and chunks of a stage."""
    blocks = model.layers + model.encoder_layers
    if terms.get("layout"):
        sizes = read_layout(str(terms["layout"]), say("layout"))
        if len(sizes) % pp:
            raise InvalidInputError(
                f"{say('layout')}: {len(sizes)} chunks are not accepted; expected a multiple of "
                f"{say('pp')}, {pp}"
            )
        return tuple(sizes), len(sizes) // pp
    vpp = int(terms.get("vpp") or 1)
    if terms.get("virtual_layers"):
        vpp = max(1, blocks // (pp * int(terms["virtual_layers"])))
    chunks = pp * vpp
    first, last = terms.get("first_stage"), terms.get("last_stage")
    if first is not None or last is not None:
        return sizes_of(_ends_given(blocks, pp, vpp, first, last, say)), vpp
    counted = [bool(terms.get("count_embedding")), bool(terms.get("count_head"))]
    each, left = divmod(blocks + sum(counted), chunks)
    if left:
        raise InvalidInputError(
            f"{say('pp')}: {blocks} blocks in {chunks} chunks is not accepted; expected a divisor, "
            f"or {say('layout')}"
        )
    even = [each] * chunks
    even[0] -= counted[0]
    even[-1] -= counted[1]
    return sizes_of(even), vpp


def _ends_given(
    blocks: int, pp: int, vpp: int, first: Any, last: Any, say: Callable[[str], str]
) -> Sequence[int]:
    """Blocks of each chunk where the first stage's or the last one's are given."""
    ends = {k: int(n) for k, n in ((0, first), (pp - 1, last)) if n is not None}
    others = pp - len(ends)
    each, left = divmod(blocks - sum(ends.values()), others) if others else (0, 0)
    per_stage = [ends.get(k, each) for k in range(pp)]
    if left or sum(per_stage) != blocks or any(n % vpp for n in per_stage):
        raise InvalidInputError(
            f"{say('first_stage')}, {say('last_stage')}: {first} and {last} of {blocks} blocks are "
            f"not accepted; expected the other stages to be even"
        )
    return [per_stage[k % pp] // vpp for k in range(pp * vpp)]


def _read_cp_kind(
    terms: Mapping[str, Any], model: TransformerModel, cp: int, say: Callable[[str], str]
) -> str:
    """How a sequence is attended to: Megatron-Core has a ring unless told otherwise."""
    kinds = {word: kind for kind, word in _CP_KINDS.items()}
    word = str(terms.get("cp_kind", "p2p" if model.attention == "flash" else "allgather"))
    if cp > 1 and word not in kinds:
        raise InvalidInputError(
            f"{say('cp_kind')}: {word!r} is not accepted; expected {', '.join(kinds)}"
        )
    return kinds[word] if cp > 1 else "all-gather"


def _read_sharing(
    terms: Mapping[str, Any], dp: int, say: Callable[[str], str]
) -> dict[str, int | None]:
    """ZeRO stage, and the replicas that share."""
    zero, groups = _read_zero(terms, say), int(terms.get("instances") or 1)
    if groups > 1 and dp % groups:
        raise InvalidInputError(
            f"{say('instances')}: {groups} is not accepted; expected a divisor of {dp} replicas"
        )
    return {"zero": zero, "shard": dp // groups if zero and groups > 1 else None}


def _read_zero(terms: Mapping[str, Any], say: Callable[[str], str]) -> int:
    if terms.get("fsdp"):
        word = str(terms.get("fsdp_strategy", "optim_grads_params"))
        if word not in _SHARED:
            raise InvalidInputError(
                f"{say('fsdp_strategy')}: {word!r} is not accepted; expected one of "
                f"{', '.join(_SHARED)}"
            )
        return _SHARED[word]
    return 1 if terms.get("zero_1") else 0


def _read_recompute(
    terms: Mapping[str, Any], model: TransformerModel, say: Callable[[str], str]
) -> str:
    kind = terms.get("recompute") or ("selective" if terms.get("recompute_selective") else None)
    if kind is None:
        return "none"
    if kind == "full":
        if terms.get("recompute_method") == "block":
            number = int(terms.get("recompute_layers") or 1)
            return f"full:{number}" if number else "none"
        return "full"
    modules = list(terms.get("recompute_modules") or ["core_attn"])
    if modules == ["core_attn"]:
        return "attention" if model.attention == "flash" else "selective"
    act = _activation_sets(model)
    names = {"core_attn": "attention", "layernorm": "norms"}
    if act:
        names["moe_act"] = "+".join(sorted(act))
    unknown = [word for word in modules if word not in names]
    if unknown:
        raise InvalidInputError(
            f"{say('recompute_modules')}: {unknown[0]!r} is not accepted; expected some of "
            f"{', '.join(names)}"
        )
    return "+".join(names[word] for word in modules)


def _read_precision(terms: Mapping[str, Any], say: Callable[[str], str]) -> str:
    """Read the number format of products; fp8 without a recipe is delayed scaling."""
    if terms.get("fp4_format"):
        return "nvfp4"
    if not terms.get("fp8_format"):
        return "bf16"
    recipe = str(terms.get("fp8_recipe") or "delayed")
    for name, said in _PRECISIONS.items():
        if said.get("fp8_recipe") == recipe:
            return name
    known = ", ".join(s["fp8_recipe"] for s in _PRECISIONS.values() if "fp8_recipe" in s)
    raise InvalidInputError(f"{say('fp8_recipe')}: {recipe!r} is not accepted; expected {known}")


def _read_optimizer(terms: Mapping[str, Any], say: Callable[[str], str]) -> str:
    name, mixed = str(terms.get("optimizer", "adam")), bool(terms.get("bf16"))
    if name == "adam":
        half = "adam-bf16-grad" if terms.get("gradients_bf16") else "adam"
        return half if mixed else "adam-fp32"
    if name == "sgd" and mixed and not terms.get("gradients_bf16"):
        return "sgd-momentum" if float(terms.get("sgd_momentum", 0.9)) else "sgd"
    raise InvalidInputError(
        f"{say('optimizer')}: {name!r} is not accepted; expected adam, or sgd with bf16"
    )
