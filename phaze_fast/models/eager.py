"""Models read from a configuration as the operators that their modules run."""

from __future__ import annotations

from functools import lru_cache

from phaze_fast.errors import InvalidInputError
from phaze_fast.models.graph_model import GraphModel
from phaze_fast.models.families import FAMILIES
from phaze_fast.models.tape import Tape
from phaze_fast.models.torch_import import GROUPED, layered
from phaze_fast.models.transformer import TransformerModel


def recorded(model: TransformerModel, samples: int) -> Tape:
    """Record one training step of a model's module on some samples."""
    tape = Tape()
    family = FAMILIES[model.module.family]
    with tape.module(""):
        loss = family(tape, model, samples).forward()
    tape.run_backward(loss)
    return tape


@lru_cache(maxsize=64)
def expanded(model: TransformerModel) -> GraphModel:
    """Return the graph of the operators that a model's module runs."""
    small, large = recorded(model, 2), recorded(model, 4)
    return layered(model.name, small, large, small.modules, model.seq)
