"""Models read from a configuration as the operators that their modules run.

The forward code of each family (`phaze_fast.models.families`) is recorded on a tape for 2 and for
4 samples and cut into layers as a traced module is: the result equals the graph that PyTorch's own
run of the module gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from phaze_fast.errors import InfeasibleError, InvalidInputError
from phaze_fast.models.compiled import code_of_class, compiled
from phaze_fast.models.families import code_of
from phaze_fast.models.graph_model import GraphModel, Kernels
from phaze_fast.models.huggingface import architecture, architectures
from phaze_fast.models.tape import Tape
from phaze_fast.models.torch_import import GROUPED, layered
from phaze_fast.models.transformer import TransformerModel


def _family(model: TransformerModel) -> str:
    family = "" if model.module is None else model.module.family
    if family not in architectures():
        raise InvalidInputError(
            f"{model.name}: the operators of {family or 'a model without a module'} are not known; "
            "trace the module (phaze-fast trace), or use a software profile with fused kernels"
        )
    return family


def record_model(
    model: TransformerModel, samples: int, layers: Sequence[int] | None = None
) -> Tape:
    """Record one training step of a model's module on some samples.

    Parameters
    ----------
    model
        A model with a `module`.
    samples
        Number of sequences.
    layers
        Blocks to run, by position; by default all of them.

    Raises
    ------
    InvalidInputError
        Where the family of the module has no forward code.
    """
    tape = Tape(model.lora)
    with tape.module(""):
        blocks = range(model.layers) if layers is None else layers
        loss = code_of(_family(model))(tape, model, samples, blocks).forward()
    tape.run_backward(loss)
    return tape


def _alike(model: TransformerModel) -> dict[Any, list[int]]:
    """Group the blocks of a model by window, experts and rotation: each group runs one code."""
    groups: dict[Any, list[int]] = {}
    for at in range(model.layers):
        turns = model.module is None or at not in model.module.unrotated
        full = at in model.full_attention_layers
        key = (model.is_windowed(at, model.seq), full, model.has_experts(at), turns)
        groups.setdefault(key, []).append(at)
    return groups


def layers_graph(
    model: TransformerModel, layers: Sequence[int], kernels: Kernels = "eager"
) -> GraphModel:
    """Return the graph of a model that has only some of its blocks."""
    small, large = record_model(model, 2, layers), record_model(model, 4, layers)
    steps: tuple[Any, Any] = (small, large)
    if kernels == "compiled":
        steps = compiled(small, large, code=code_of_class(code_of(_family(model)).__name__))
    images = {"sample": "image", "seq": 1} if model.patches is not None else {}
    graph = layered(model.name, *steps, small.modules, model.seq)
    return graph.replace(kernels=kernels, **images)


def _graph(model: TransformerModel, kernels: Kernels) -> GraphModel:
    """Return the graph of a model; of blocks that are alike, the first and last two are run."""
    everything = range(model.layers)
    if model.encoder_layers or architecture(_family(model))["module"].get("table_per_layer"):
        return layers_graph(model, everything, kernels)  # blocks read other layers too
    groups = _alike(model).values()
    run = sorted({at for group in groups for at in (*group[:2], *group[-2:])})
    graph = layers_graph(model, run, kernels)
    if len(run) == model.layers:
        return graph
    if not graph.is_chain or len(graph.order) != len(run) + 2:
        return layers_graph(model, everything, kernels)
    kinds = dict(zip(run, graph.order[1:-1], strict=True))
    for group in groups:
        inner = kinds[group[min(1, len(group) - 1)]]
        kinds |= {at: inner for at in group if at not in kinds}
    order = (graph.order[0], *(kinds[at] for at in everything), graph.order[-1])
    counted = [layer.replace(count=order.count(at)) for at, layer in enumerate(graph.layers)]
    edges = tuple((at, at + 1) for at in range(len(order) - 1))
    return graph.replace(layers=tuple(counted), order=order, edges=edges)


@lru_cache(maxsize=64)
def expanded(model: TransformerModel, seq: int | None = None, compiles: bool = False) -> GraphModel:
    """Return the operators that the module of a model runs, forward and backward, as a graph.

    Parameters
    ----------
    model
        A model with a `module`, as `phaze_fast.models.from_hf` reads it.
    seq
        Sequence length in tokens; by default that of the model.
    compiles
        Whether torch.compile makes kernels of the operators.

    Raises
    ------
    InfeasibleError
        Where the sequence is longer than the model has positions.
    InvalidInputError
        Where the family of the module has no forward code.

    Examples
    --------
    >>> from phaze_fast.models import load
    >>> graph = expanded(load("gpt2"), 1024)
    >>> [(layer.name, layer.count) for layer in graph.layers]
    [('embedding', 1), ('transformer.h.0', 48), ('head', 1)]
    """
    tokens = seq or model.seq
    if model.patches is not None and tokens != model.seq:
        raise InvalidInputError(
            f"{model.name}: seq: {tokens} is not accepted; its images have {model.seq} tokens"
        )
    if model.lora is not None and (model.lora.bits == 4 or "experts" in model.lora.targets):
        what = "experts" if model.lora.bits == 16 else "4-bit weights"
        raise InvalidInputError(
            f"lora: {model.name}: operators of {what} are not known; trace the module with its "
            "adapters (phaze-fast trace), or use a software profile with fused kernels"
        )
    if model.max_positions is not None and tokens > model.max_positions:
        raise InfeasibleError(
            f"{model.name}: seq: {tokens} is more than the {model.max_positions} positions of "
            f"{model.name}"
        )
    own = model.replace(seq=tokens, mtp_layers=0)  # transformers predicts one token
    graph = _graph(own, "compiled" if compiles else "eager")
    if model.lora is not None and graph.trained_parameters() != model.trained_parameters():
        raise InvalidInputError(
            f"lora: {model.name}: not all adapters of {_family(model)} are known; trace the module "
            "with its adapters (phaze-fast trace), or use a software profile with fused kernels"
        )
    notes = "; ".join(filter(None, (model.notes, GROUPED if model.moe is not None else "")))
    return graph.replace(as_traced=True, notes=notes)
