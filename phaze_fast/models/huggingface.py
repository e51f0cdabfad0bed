"""Transformers read from a HuggingFace ``config.json``; features not modelled are refused.

Every field of a configuration is either used, known to change no operator, or refused: none is
ignored silently. An architecture without a record of its own is built on the meta device and
traced.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from phaze_fast.documents import read_document
from phaze_fast.errors import InvalidInputError, MissingExtraError, nearest
from phaze_fast.models.graph_model import GraphModel
from phaze_fast.models.hf_architectures import DECODERS, ENCODERS, EXPERTS, Fields, NotModelledError
from phaze_fast.models.torch_import import from_torch
from phaze_fast.models.transformer import TransformerModel

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
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise InvalidInputError(
            f"{source}: model_type: transformers cannot read it: {reason}"
        ) from None
    makers = (
        transformers.AutoModelForCausalLM,
        transformers.AutoModelForMaskedLM,
        transformers.AutoModelForSeq2SeqLM,
    )
    encoder = not getattr(config, "is_decoder", False) and type(config) in makers[1]._model_mapping
    for maker in (makers[1], *makers) if encoder else makers:
        if type(config) in maker._model_mapping:
            try:
                with torch.device("meta"), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    return maker.from_config(config)
            except Exception as error:
                reason = next(iter(str(error).splitlines()), type(error).__name__)
                raise InvalidInputError(
                    f"{source}: transformers cannot build it: {reason}"
                ) from None
    raise InvalidInputError(
        f"{source}: model_type: {data.get('model_type')!r} is no causal, masked or "
        "sequence-to-sequence language model of transformers"
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
    if getattr(config, "is_encoder_decoder", False):  # any start token will do
        for field in ("pad_token_id", "decoder_start_token_id"):
            if getattr(config, field, None) is None:
                setattr(config, field, 0)
    kwargs: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if "use_cache" in getattr(config, "to_dict", dict)():
        kwargs["use_cache"] = False
    graph = from_torch(module, (), kwargs, name=name)
    if window > tokens and seq is None:
        note = f"seq {tokens}: the smaller of the context window of {window} and {longest}"
        return graph.replace(notes="; ".join(filter(None, (note, graph.notes))))
    return graph


LONGEST = 4096
"""Default sequence length where a model's context window is longer."""

_READERS: dict[str, Callable[[Fields], dict[str, Any]]] = {**DECODERS, **ENCODERS, **EXPERTS}


def _record(data: Mapping[str, Any], source: str, name: str) -> TransformerModel:
    kind = data.get("model_type")
    if kind not in _READERS:
        raise NotModelledError(
            f"{source}: model_type: {kind!r} is not modelled; {nearest(str(kind), _READERS)}"
        )
    fields = Fields(data, source)
    built = _READERS[kind](fields)
    fields.finish()
    if fields.gelu_by_steps:
        built["gelu_new"] = True
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
    try:
        from huggingface_hub import hf_hub_download  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise MissingExtraError(
            f"{repository!r} is no file, and reading it from the hub needs: "
            "pip install 'phaze-fast[hf]'"
        ) from None
    try:
        return Path(hf_hub_download(repository, "config.json"))
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InvalidInputError(f"{repository}: config.json cannot be fetched: {reason}") from None


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
