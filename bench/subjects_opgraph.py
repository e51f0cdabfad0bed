"""Subjects of the opgraph stage: graphs of the eight published models at four widths."""

from __future__ import annotations

from registry import Subject, register

from phaze_fast import models
from phaze_fast.opgraph import LayerGraph, Strategy, layer_graph, reasons


def _questions() -> list[tuple[models.TransformerModel, Strategy]]:
    widths = [Strategy(tp=t) for t in (1, 2, 4, 8)]
    eight = [models.load(name) for name in models.names()[:8]]
    return [(m, s) for m in eight for s in widths if not reasons(m, s)]


def _build(questions: list[tuple[models.TransformerModel, Strategy]]) -> list[LayerGraph]:
    return [layer_graph(model, strategy) for model, strategy in questions]


def _check(
    questions: list[tuple[models.TransformerModel, Strategy]], graphs: list[LayerGraph]
) -> None:
    assert len(graphs) == len(questions) == 28
    for (model, _), graph in zip(questions, graphs, strict=True):
        assert sum(x.count * x.parameters for x in graph.layers) == model.parameters()


register(
    Subject(
        name="eight-models-four-widths",
        stage="opgraph",
        items=28,
        build=_questions,
        run=_build,
        check=_check,
    )
)
