"""HuggingFace configurations without a record of their own, built on the meta device and traced."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from phaze_fast.errors import InvalidInputError, MissingExtraError
from phaze_fast.models.graph_model import GraphModel
from phaze_fast.models.torch_import import from_torch

__all__ = ["hf_module", "trace_hf"]

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
        said = next(iter(str(error).splitlines()), type(error).__name__)
        raise InvalidInputError(
            f"{source}: model_type: transformers cannot read it: {said}"
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
                said = next(iter(str(error).splitlines()), type(error).__name__)
                raise InvalidInputError(f"{source}: transformers cannot build it: {said}") from None
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
        What to call it.
    source
        Where it comes from, for messages.
    seq
        Tokens of a sequence; by default the context window, at most `longest`.
    longest
        See `seq`.
    """
    module = hf_module(data, source)
    import torch

    config = module.config
    given = (getattr(config, name, None) for name in _WINDOWS)
    window = next((size for size in given if isinstance(size, int) and size > 0), longest)
    tokens = seq if seq is not None else min(int(window), longest)
    ids = torch.empty((2, tokens), dtype=torch.long, device="meta")
    module.train()
    if getattr(config, "is_encoder_decoder", False):  # any token will do to start with
        for field in ("pad_token_id", "decoder_start_token_id"):
            if getattr(config, field, None) is None:
                setattr(config, field, 0)
    kwargs: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if "use_cache" in getattr(config, "to_dict", dict)():
        kwargs["use_cache"] = False
    found = from_torch(module, (), kwargs, name=name)
    if window > tokens and seq is None:
        note = f"seq {tokens}: the smaller of the context window of {window} and {longest}"
        return found.replace(notes="; ".join(filter(None, (note, found.notes))))
    return found
