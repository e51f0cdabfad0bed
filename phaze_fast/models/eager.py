"""Models read from a configuration as the operators that their modules run.

The forward code of each family (`phaze_fast.models.families`) is recorded on a tape for 2 and for
4 samples and cut into layers as a traced module is: the result equals the graph that PyTorch's own
run of the module gives.
"""

from __future__ import annotations

from functools import lru_cache

from phaze_fast.errors import InfeasibleError, InvalidInputError
from phaze_fast.models.families import FAMILIES
from phaze_fast.models.graph_model import GraphModel
from phaze_fast.models.tape import Tape
from phaze_fast.models.torch_import import GROUPED, layered
from phaze_fast.models.transformer import TransformerModel


def record_model(model: TransformerModel, samples: int) -> Tape:
    """Record one training step of a model's module on some samples.

    Raises
    ------
    InvalidInputError
        Where the family of the module has no forward code.
    """
    family = "" if model.module is None else model.module.family
    if family not in FAMILIES:
        raise InvalidInputError(
            f"{model.name}: the operators of {family or 'a model without a module'} are not known; "
            "trace the module (phaze-fast trace), or use a software profile with fused kernels"
        )
    tape = Tape()
    with tape.module(""):
        loss = FAMILIES[family](tape, model, samples).forward()
    tape.run_backward(loss)
    return tape


@lru_cache(maxsize=64)
def expanded(model: TransformerModel, seq: int | None = None) -> GraphModel:
    """Return the operators that the module of a model runs, forward and backward, as a graph.

    Parameters
    ----------
    model
        A model with a `module`, as `phaze_fast.models.from_hf` reads it.
    seq
        Sequence length in tokens; by default that of the model.

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
    if model.max_positions is not None and tokens > model.max_positions:
        raise InfeasibleError(
            f"{model.name}: seq: {tokens} is more than the {model.max_positions} positions of "
            f"{model.name}"
        )
    sized = model.replace(seq=tokens)
    small, large = record_model(sized, 2), record_model(sized, 4)
    graph = layered(model.name, small, large, small.modules, tokens)
    notes = "; ".join(filter(None, (model.notes, GROUPED if model.moe is not None else "")))
    return graph.replace(as_traced=True, notes=notes)
