"""Traced models as plain records: no PyTorch is needed to hold one or to lay it out."""

import builtins

import pytest

from phaze_fast import models, opgraph
from phaze_fast.errors import MissingExtraError
from phaze_fast.models.traced import TracedLayer, TracedModel, TracedOp
from phaze_fast.opgraph import UNITS


def test_without_torch(monkeypatch):
    real = builtins.__import__

    def absent(name, *rest):
        if name == "torch":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(MissingExtraError, match=r"pip install 'phaze-fast\[torch\]'"):
        models.from_torch(object(), ())


def test_a_traced_model_lays_out_without_torch():
    fc = TracedOp("fc", "gemm", (-1,), 1, 4, 8, 16, 64, 1024.0, 8 * 16 + 16)
    experts = TracedOp("experts", "gemm", (0,), 3, 4, 16, 8, 96, 3072.0, 3 * 16 * 8)
    mixed = TracedOp("mixed", "batched-gemm", (0, 1, -1), 3, 4, 8, 4, 48, 768.0, 0)
    scaled = TracedOp("scaled", "elementwise", (2, -1), 1, 12, 0, 4, 48, 0.0, 0)
    layer = TracedLayer("0", 2, (fc, experts, mixed, scaled))
    (graph,) = opgraph.from_traced(TracedModel("m", (layer,), (0, 0), ((0, 1),), 1))
    assert graph.names == ("fc", "experts", "mixed", "scaled")
    assert graph.edges() == [(0, 1), (0, 2), (1, 2), (2, 3)]
    assert [UNITS[unit] for unit in graph.ops["unit"]] == ["TC+VC", "TC", "TC", "VC"]
    assert graph.gemms() == [(1, 4, 8, 16), (3, 4, 16, 8), (3, 4, 8, 4)]
    assert graph.flops == layer.flops == 1024 + 3072 + 768
    assert graph.ops["write_bytes"].tolist() == [2.0 * op.elements for op in layer.ops]
    assert graph.ops["read_bytes"][3] == 2 * 2 * 48
