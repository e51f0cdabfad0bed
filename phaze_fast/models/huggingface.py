"""Transformers read from a HuggingFace ``config.json``; features not modelled are refused.

Every field of a configuration is either used, known to change no operator, or refused: none is
ignored silently. A field that is absent has the default of its architecture, as in transformers;
``data/hf_defaults.json`` lists those that operators depend on. ``data/hf_aliases.json`` lists the
fields that transformers also takes by a second name (``attribute_map`` of its configurations). An
architecture without a reader of its own is built on the meta device and traced.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from phaze_fast.documents import package_data, read_document
from phaze_fast.errors import InvalidInputError, MissingExtraError, nearest, not_accepted
from phaze_fast.models.graph_model import GraphModel
from phaze_fast.models.torch_import import from_torch
from phaze_fast.models.transformer import RotaryEmbedding, TransformerModel
from phaze_fast.tables import needed

# ---- configurations ----

_ACTIVATIONS = {
    **dict.fromkeys(("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "quick_gelu"), "gelu"),
    **dict.fromkeys(("relu", "relu2"), "relu"),
    **dict.fromkeys(("silu", "swish"), "silu"),
}
_FULL, _WINDOWED = "full_attention", "sliding_attention"


class NotModelledError(InvalidInputError):
    """A feature that no field of the record describes; tracing with PyTorch may support it."""


_data = partial(package_data, __package__)


class Fields:
    """A configuration that records which of its fields were used."""

    def __init__(self, data: Mapping[str, Any], source: str) -> None:
        self.data = dict(data)
        self.source = source
        self.used = {"model_type"}
        self.activations: list[str] = []
        self.dropouts: tuple[str, ...] = ()
        self.defaults: Mapping[str, Any] = _data("hf_defaults.json").get(data["model_type"], {})
        spellings = _data("hf_aliases.json").get(data["model_type"], {})
        self._other = spellings | {native: alias for alias, native in spellings.items()}
        """Alternative names of fields that transformers accepts, in both directions."""

    def take(self, name: str, default: Any = ...) -> Any:
        """Value of a field, or its default; a field without a default must be given."""
        other = self._other.get(name, name)
        self.used.update((name, other))
        at = name if name in self.data or other not in self.data else other
        value = self.data[at] if at in self.data else self.defaults.get(name)
        if value is not None:
            return value
        if default is ...:
            raise InvalidInputError(f"{self.source}: {name}: is missing and has no default")
        return default

    def first(self, *names: str) -> str:
        """Return the first of several spellings of a field that the configuration has."""
        self.used.update(names)
        return next((name for name in names if self.data.get(name) is not None), names[0])

    def whole(self, name: str, default: Any = ...) -> int:
        """Value of a field, checked to be a whole number of at least 0."""
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise not_accepted(f"{self.source}: {name}", value, "a whole number")
        return value

    def setting(self, name: str, default: Any) -> bool | int | str:
        """Value of a flag, integer or text that changes operators, or whether another is set."""
        value = self.take(name, default)
        return value if isinstance(value, bool | int | str) else bool(value)

    def sizes(self, names: Mapping[str, str], known: Mapping[str, Any]) -> dict[str, Any]:
        """Whole numbers that an entry of the data file lists; defaults may name other fields."""
        sizes: dict[str, Any] = {}
        for field, line in names.items():
            spellings, given, text = (part.strip() for part in line.partition("="))
            default: Any = ...
            if text == "none":
                default = None
            elif given:
                factor, _, other = text.rpartition("*")
                size = other.strip()
                default = int(size) if size.isdigit() else {**known, **sizes}[size]
                default *= int(factor or 1)
            name = self.first(*spellings.split()) if spellings else ""
            absent = name and default is None and self.take(name, None) is None
            sizes[field] = default if absent or not name else self.whole(name, default)
        return sizes

    def flag(self, line: str) -> bool:
        """Value of a boolean field, given its name and default as ``name = true``."""
        name, _, default = line.partition(" = ")
        value = self.take(name, default == "true")
        if not isinstance(value, bool):
            raise not_accepted(f"{self.source}: {name}", value, "true or false")
        return value

    def require(self, name: str, wanted: Any, why: str) -> None:
        """Accept a field only at the one value that is modelled."""
        value = self.take(name, wanted)
        if value != wanted:
            raise NotModelledError(
                f"{self.source}: {name}: {value!r} is not modelled; expected {wanted!r} ({why})"
            )

    def activation(self, name: str, default: Any = ...) -> str:
        """Return the non-linearity that a field names."""
        return self.named_activation(name, self.take(name, default))

    def named_activation(self, name: str, value: Any, shown: Any = None) -> str:
        """Return the non-linearity named `value`; messages quote it as `shown`."""
        if value not in _ACTIVATIONS:
            raise NotModelledError(
                f"{self.source}: {name}: activation {shown or value!r} is not modelled; "
                f"{nearest(str(value), _ACTIVATIONS)}"
            )
        self.activations.append(value)
        return _ACTIVATIONS[value]

    def drops(self, *names: str) -> bool:
        """Whether any of several dropouts is on."""
        self.dropouts = tuple(name for name in names if self.take(name, 0.0))
        return bool(self.dropouts)

    def windows(self, layers: int, every: int | None = None) -> dict[str, Any]:
        """Return the attention window and the layers without it (listed, or every `every`-th)."""
        window, kinds = self.take("sliding_window", None), self.take("layer_types", None)
        pattern = self.take(self.first("sliding_window_pattern", "_sliding_window_pattern"), None)
        listed = kinds or []
        for kind in listed:
            if kind not in (_FULL, _WINDOWED):
                raise NotModelledError(
                    f"{self.source}: layer_types: {kind!r} is not modelled; expected {_FULL!r} or "
                    f"{_WINDOWED!r}"
                )
        used, first = self.take("use_sliding_window", True), self.take("max_window_layers", 0)
        if not window or not used:
            return {}
        window = self.whole("sliding_window")
        if kinds is not None:
            full = [at for at, kind in enumerate(listed[:layers]) if kind == _FULL]
        elif isinstance(pattern or every, int):
            step = int(pattern or every or 1)
            full = [at for at in range(layers) if (at + 1) % step == 0]
        else:
            full = list(range(min(first, layers)))
        return {"window": window, "full_attention_layers": tuple(full)}

    def no_windows(self) -> None:
        """Refuse a configuration that limits attention to a window shorter than the context."""
        window, longest = self.take("sliding_window", None), self.take("max_position_embeddings", 0)
        if window is not None and self.take("use_sliding_window", True) and window < longest:
            raise InvalidInputError(
                f"{self.source}: sliding_window: {window!r} is not modelled; attention over a "
                "window of a sequence (null or use_sliding_window: false is accepted)"
            )
        for kind in self.take("layer_types", ()):
            if kind != _FULL:
                raise InvalidInputError(
                    f"{self.source}: layer_types: {kind!r} is not modelled; expected {_FULL!r}"
                )

    def finish(self) -> None:
        """Refuse fields that were not used and are not known to be irrelevant."""
        idle = set(_data("hf_idle.txt").splitlines())
        for name, value in self.data.items():
            if name not in self.used and name not in idle and value not in (None, False):
                raise InvalidInputError(
                    f"{self.source}: {name}: {value!r} is not modelled; remove it, or set it to "
                    "null if it does not matter"
                )


# ---- architectures ----


_SECTIONS = "sizes flags choices given fixed requires experts latent module"


@cache
def architecture(name: str) -> Mapping[str, Any]:
    """Return an entry of ``data/hf_architectures.yaml`` merged with those it inherits from."""
    own = dict(_data("hf_architectures.yaml")[name])
    base = architecture(own.pop("like")) if "like" in own else {}
    unused = {*base.get("unused", ()), *own.get("unused", ())}
    for section in ("sizes", "flags"):  # overrides may read a field of another name
        for field in own.get(section, {}).keys() & base.get(section, {}).keys():
            unused.update(base[section][field].partition("=")[0].split())
    merged = {s: {**base.get(s, {}), **own.get(s, {})} for s in _SECTIONS.split()}
    return {**base, **own, **merged, "unused": unused, "hidden": own.get("hidden", False)}


@cache
def architectures() -> tuple[str, ...]:
    """Return every ``model_type`` that has a reader and forward code."""
    names = _data("hf_architectures.yaml")
    return tuple(name for name in names if not architecture(name)["hidden"])


def _read(f: Fields, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a model that an entry describes."""
    f.used |= entry["unused"]
    for name, (value, why) in entry["requires"].items():
        f.require(name, value, why)
    fields = f.sizes(entry["sizes"], {})
    for field, text in entry["flags"].items():
        fields[field] = f.flag(text)
    for field, (text, yes, no) in entry["choices"].items():
        fields[field] = yes if f.flag(text) else no
    for field, name in entry["given"].items():
        fields[field] = bool(f.take(name, None))
    if "activation" in entry:
        names, _, default = entry["activation"].partition(" = ")
        fields["activation"] = f.activation(f.first(*names.split()), default)
    windows = entry.get("windows", False)
    if windows == "refused":
        f.no_windows()
    elif windows:
        fields |= f.windows(fields["layers"], None if windows is True else windows)
    for field, section in (("moe", "experts"), ("latent", "latent")):
        if entry[section]:
            fields[field] = f.sizes(entry[section], fields)
    return {**fields, "dropout": f.drops(*entry["dropouts"]), **entry["fixed"]}


# ---- what the lines of an entry cannot express ----


Finish = Callable[[Fields, dict[str, Any]], dict[str, Any]]
"""Takes a configuration and the model's fields read so far; returns fields to change or add."""


def _gemma(f: Fields, _: Any) -> dict[str, Any]:
    if f.data.get("hidden_act") not in (None, "gelu"):
        return {}
    f.data["hidden_act"] = None  # hidden_activation takes precedence
    return {"activation": f.activation("hidden_activation", "gelu_pytorch_tanh")}


def _falcon(f: Fields, fields: Mapping[str, Any]) -> dict[str, Any]:
    grouped = f.flag("new_decoder_architecture = false")
    multi, together = f.flag("multi_query = true"), f.flag("parallel_attn = true")
    norms = f.take("num_ln_in_parallel_attn", None) or (2 if grouped else 1)
    parallel = "no"
    if grouped or together:
        parallel = "two-norms" if grouped and norms == 2 else "one-norm"
    kv_heads = fields["kv_heads"] if grouped else 1 if multi else fields["heads"]
    return {"kv_heads": kv_heads, "parallel": parallel}


def _mpt(f: Fields, fields: Mapping[str, Any]) -> dict[str, Any]:
    inner = f.take("attn_config", {})
    for name in ("qk_ln", "clip_qkv", "prefix_lm"):
        if inner.get(name):
            raise NotModelledError(f"{f.source}: attn_config.{name}: is not modelled")
    f.dropouts = ("attn_pdrop",) if inner.get("attn_pdrop") else ()
    return {
        "ffn": fields["ffn"] * fields["hidden"],
        "positions": "alibi" if inner.get("alibi", True) else "none",
        "dropout": fields["dropout"] or bool(inner.get("attn_pdrop")),
    }


def _gpt_neo(f: Fields, fields: Mapping[str, Any]) -> dict[str, Any]:
    kinds = f.take("attention_layers", None)
    if kinds is None:
        pattern = f.take("attention_types", [[["global", "local"], fields["layers"] // 2]])
        kinds = [kind for run, times in pattern for _ in range(times) for kind in run]
    f.used.add("attention_types")
    return {"full_attention_layers": tuple(i for i, k in enumerate(kinds) if k == "global")}


def _opt(f: Fields, fields: Mapping[str, Any]) -> dict[str, Any]:
    f.defaults = {k: v for k, v in f.defaults.items() if k != "word_embed_proj_dim"}
    f.require("word_embed_proj_dim", fields["hidden"], "embeddings narrower than the blocks")
    return {"max_positions": fields["seq"] + 2}  # two rows of the table are for padding


def _qwen_moe(f: Fields, fields: dict[str, Any]) -> dict[str, Any]:
    layers, step = fields["layers"], f.whole("decoder_sparse_step", 1)
    listed = frozenset(f.take("mlp_only_layers", ()))
    dense = [at for at in range(layers) if at in listed or step == 0 or (at + 1) % step]
    moe = {**fields["moe"], "dense_at": tuple(dense)}
    moe["scores_normalised"] = bool(f.take("norm_topk_prob", False))
    shared = f.take("shared_expert_intermediate_size", None)
    if shared:
        moe |= {"shared_ffn": shared, "shared_gate": True}
    return {"moe": moe if moe["experts"] and len(dense) < layers else None}


def _routing(f: Fields) -> dict[str, Any]:
    """Return how the router of fine-grained experts scores and groups experts."""
    balanced = f.data["model_type"] != "deepseek_v2"  # routes as DeepSeek-V3 does
    groups = f.whole("n_group", 1)
    return {
        "scores": f.take("scoring_func", "sigmoid" if balanced else "softmax"),
        "scores_normalised": bool(f.take("norm_topk_prob", balanced)),
        "scores_factor": f.take("routed_scaling_factor", 1.0),
        "balancing_bias": balanced,
        **({"groups": groups, "top_groups": f.whole("topk_group", 1)} if groups > 1 else {}),
    }


def _fine_grained(f: Fields, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of fine-grained and shared experts after leading dense layers, which may be all."""
    moe = {
        "experts": f.whole("n_routed_experts"),
        "top_k": f.whole("num_experts_per_tok", 6),  # the published value of DeepSeek-V2
        "expert_ffn": f.whole("moe_intermediate_size"),
        "shared_experts": f.whole("n_shared_experts", 0),
        "dense_layers": min(f.whole("first_k_dense_replace", 0), fields["layers"]),
        **_routing(f),
    }
    return {} if moe["dense_layers"] == fields["layers"] else {"moe": moe}


def _deepseek(f: Fields, fields: Mapping[str, Any]) -> dict[str, Any]:
    return _fine_grained(f, fields) if f.take("n_routed_experts", None) else {}


def _biased(f: Fields, found: dict[str, Any]) -> dict[str, Any]:
    """Balance experts by a bias of their scores (``e_score_correction_bias``).

    These families also predict further tokens, by weights that transformers does not load.
    """
    further = f.whole("num_nextn_predict_layers", 0)
    if "moe" in found:
        found = {**found, "moe": {**found["moe"], "balance": "bias"}}
    return {**found, "mtp_layers": further}


def _glm4_moe(f: Fields, fields: Mapping[str, Any]) -> dict[str, Any]:
    width = fields["head_dim"] or fields["hidden"] // fields["heads"]
    return {**_biased(f, _fine_grained(f, fields)), "head_dim": width}


def _t5(f: Fields, _: Any) -> dict[str, Any]:
    kind = f.take("feed_forward_proj", "relu")
    # transformers uses gelu_new for the gated form.
    name = "gelu_new" if kind == "gated-gelu" else str(kind).removeprefix("gated-")
    activation = f.named_activation("feed_forward_proj", name, kind)
    return {"activation": activation, "gated": str(kind).startswith("gated-")}


def _vit(f: Fields, _: Any) -> dict[str, Any]:
    image, patch = f.whole("image_size"), f.whole("patch_size")
    if patch == 0 or image % patch:
        raise not_accepted(f"{f.source}: patch_size", patch, f"a divisor of {image}")
    tokens = (image // patch) ** 2 + 1
    return {
        "patches": {"size": patch, "channels": f.whole("num_channels", 3)},
        "max_positions": tokens,
        "seq": tokens,
        "classes": f.whole("num_labels", len(f.take("id2label", {})) or 1000),
    }


_FINISH: dict[str, Finish] = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), _gemma),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe"), _qwen_moe),
    "deepseek_v2": _deepseek,
    "deepseek_v3": lambda f, fields: _biased(f, _deepseek(f, fields)),
    # The first two rows of the position table are for padding.
    **dict.fromkeys(
        ("roberta", "xlm-roberta"), lambda _, x: {"seq": max(1, x["max_positions"] - 2)}
    ),
    **dict.fromkeys(("t5", "mt5"), _t5),
    "falcon": _falcon,
    "mpt": _mpt,
    "gpt_bigcode": lambda f, x: {"kv_heads": 1 if f.flag("multi_query = true") else x["heads"]},
    "gpt_neo": _gpt_neo,
    "opt": _opt,
    "gpt_oss": lambda _, fields: {"moe": {**fields["moe"], "router_bias": True}},
    "glm4_moe": _glm4_moe,
    "vit": _vit,
}


def _rotary(f: Fields) -> dict[str, Any]:
    """Return the angles of a rotary embedding, where they are not the defaults of its record."""
    scaling = f.take("rope_scaling", None) or f.take("rope_parameters", None)
    scaling = scaling if isinstance(scaling, Mapping) else {}
    given = {
        "base": scaling.get("rope_theta", f.take(f.first("rope_theta", "rotary_emb_base"), None)),
        "share": f.take(f.first("partial_rotary_factor", "rotary_pct", "rope_pct"), None),
        "factor": scaling.get("factor"),
        "original_positions": scaling.get("original_max_position_embeddings"),
    }
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind not in (None, "default"):
        given["scaling"] = str(kind)
    usual = RotaryEmbedding().model_dump()
    known = {name: value for name, value in given.items() if value not in (None, usual.get(name))}
    return {"rotary": known} if known else {}


# ---- reading and tracing ----


_WINDOWS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")


def _transformers() -> Any:
    try:
        import torch  # type: ignore[import-not-found, unused-ignore] # noqa: F401
        import transformers  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise MissingExtraError(
            "other architectures are built and traced, which needs: "
            "pip install 'phaze-fast[torch]' transformers"
        ) from None
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call, unused-ignore]
    return transformers


def _reason(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def hf_module(data: Mapping[str, Any], source: str = "config") -> Any:
    """Build the module of a configuration on the meta device: a causal, masked or seq2seq LM.

    Raises
    ------
    InvalidInputError
        Where transformers does not know the architecture, or cannot build it.
    """
    transformers = _transformers()
    import torch

    fields = {key: value for key, value in data.items() if key != "torch_dtype"}
    try:
        config = transformers.AutoConfig.for_model(**fields)
    except Exception as error:
        raise InvalidInputError(
            f"{source}: model_type: transformers cannot read it: {_reason(error)}"
        ) from None
    makers = (
        transformers.AutoModelForCausalLM,
        transformers.AutoModelForMaskedLM,
        transformers.AutoModelForSeq2SeqLM,
        transformers.AutoModelForImageClassification,
    )
    encoder = not getattr(config, "is_decoder", False) and type(config) in makers[1]._model_mapping
    for maker in (makers[1], *makers) if encoder else makers:
        if type(config) in maker._model_mapping:
            try:
                with torch.device("meta"), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    return maker.from_config(config)
            except Exception as error:
                raise InvalidInputError(
                    f"{source}: transformers cannot build it: {_reason(error)}"
                ) from None
    raise InvalidInputError(
        f"{source}: model_type: {data.get('model_type')!r} is no causal, masked or "
        "sequence-to-sequence language model and no classifier of images of transformers"
    )


def trace_hf(
    data: Mapping[str, Any], name: str, source: str = "config", seq: int | None = None,
    longest: int = 4096,
) -> GraphModel:  # fmt: skip
    """Build the module of a configuration and trace one training step of it.

    Parameters
    ----------
    data
        The configuration.
    name
        Name of the model.
    source
        Origin of the configuration, for messages.
    seq
        Sequence length in tokens; by default the context window, at most `longest`.
    longest
        Upper limit of the default of `seq`.
    """
    module = hf_module(data, source)
    import torch

    config = module.config
    windows = (getattr(config, name, None) for name in _WINDOWS)
    window = next((size for size in windows if isinstance(size, int) and size > 0), longest)
    tokens = seq if seq is not None else min(int(window), longest)
    ids = torch.empty((2, tokens), dtype=torch.long, device="meta")
    module.train()
    if getattr(config, "is_encoder_decoder", False):  # any start token gives the same operators
        for field in ("pad_token_id", "decoder_start_token_id"):
            if getattr(config, field, None) is None:
                setattr(config, field, 0)
    kwargs: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if module.main_input_name == "pixel_values":
        shape = (2, config.num_channels, config.image_size, config.image_size)
        kwargs = {"pixel_values": torch.empty(shape, device="meta"), "labels": ids[:, 0]}
    if "use_cache" in getattr(config, "to_dict", dict)():
        kwargs["use_cache"] = False
    graph = from_torch(module, (), kwargs, name=name)
    if window > tokens and seq is None:
        note = f"seq {tokens}: the smaller of the context window of {window} and {longest}"
        return graph.replace(notes="; ".join(filter(None, (note, graph.notes))))
    return graph


LONGEST = 4096
"""Default sequence length where a model's context window is longer."""


def _positions(
    data: Mapping[str, Any], entry: Mapping[str, Any], fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the width of the rotated part of a head, or the layers without rotation."""
    if "unrotated" in entry:
        listed = data.get("no_rope_layers") or ()
        step = data.get("no_rope_layer_interval") or entry["unrotated"]
        flags = listed or [(layer + 1) % step for layer in range(fields["layers"])]
        return {"unrotated": tuple(at for at, flag in enumerate(flags) if not flag)}
    if "rotated" not in entry:
        return {}
    width = fields.get("head_dim") or fields["hidden"] // fields["heads"]
    given = (data.get("rope_parameters") or {}).get("partial_rotary_factor")
    names = ("partial_rotary_factor", "rotary_pct", "rope_pct")
    share = next((data[name] for name in names if data.get(name) is not None), given)
    rotated = int(width * (entry["rotated"] if share is None else share))
    return {"rotary_width": rotated + rotated % 2}


def _record(data: Mapping[str, Any], source: str, name: str) -> TransformerModel:
    kind = data.get("model_type")
    if kind not in architectures():
        raise NotModelledError(
            f"{source}: model_type: {kind!r} is not modelled; {nearest(str(kind), architectures())}"
        )
    fields, entry = Fields(data, source), architecture(kind)
    built = _read(fields, entry)
    if kind in _FINISH:
        built |= _FINISH[kind](fields, built)
    if built.get("positions") == "rotary":
        built |= _rotary(fields)
    activation = fields.activations[-1] if fields.activations else "gelu"
    built["module"] = {
        "family": kind,
        "activation": activation,
        "dropouts": fields.dropouts,
        "settings": {
            name: fields.setting(name, default)
            for name, default in entry.get("settings", {}).items()
        },
        **_positions(data, entry, built),
    }
    fields.finish()
    window = built["seq"]
    if window > LONGEST:
        built |= {
            "seq": LONGEST,
            "notes": f"seq {LONGEST}: the smaller of the context window of {window} and {LONGEST}",
        }
    return TransformerModel.from_dict({"name": name, **built}, source)


def _build(data: object, source: str, name: str = "") -> TransformerModel | GraphModel:
    if not isinstance(data, Mapping):
        raise InvalidInputError(f"{source}: expected a mapping of keys to values")
    named = name or str(data.get("_name_or_path") or data.get("model_type"))
    try:
        return _record(data, source, named)
    except NotModelledError as error:
        try:
            return trace_hf(data, named, source, longest=LONGEST)
        except MissingExtraError as missing:
            raise NotModelledError(f"{error}; {missing}") from None


def _download(repository: str) -> Path:
    purpose = f"{repository!r} is no file, and reading it from the hub"
    hub = needed("huggingface_hub", "hf", purpose)
    try:
        return Path(hub.hf_hub_download(repository, "config.json"))
    except Exception as error:
        raise InvalidInputError(
            f"{repository}: config.json cannot be fetched: {_reason(error)}"
        ) from None


def from_hf(config: str | Path | Mapping[str, Any]) -> TransformerModel | GraphModel:
    """Read a HuggingFace configuration.

    Parameters
    ----------
    config
        A ``config.json`` or the folder that holds it, its content as a mapping, or with the extra
        ``hf`` the id of a repository on the hub.

    Returns
    -------
    TransformerModel or GraphModel
        A record where the architecture has one: with fused attention,
        ``.replace(attention="eager")`` for explicit scores. Any other causal, masked or
        sequence-to-sequence language model of transformers is built on the meta device and traced,
        which needs the extra ``torch`` and transformers.

    Raises
    ------
    InvalidInputError
        Where the architecture, or the value of a field, is not modelled; the message names it.
    MissingExtraError
        Where a hub id is given and the extra is not installed.

    Examples
    --------
    >>> model = from_hf({
    ...     "model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768,
    ...     "n_positions": 1024, "vocab_size": 50257,
    ... })
    >>> model.parameters()
    124439808
    """
    if isinstance(config, Mapping):
        return _build(config, "config")
    path = Path(config)
    if path.is_dir():
        path = path / "config.json"
    if not path.exists() and isinstance(config, str) and config.count("/") == 1:
        return _build(read_document(_download(config)), config, config.split("/")[1])
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    return _build(read_document(path), str(path), name)
