"""A model by its configuration and by a trace of transformers' module: the same operators."""

from functools import cache

import pytest
from golden_files import golden_yaml

from phaze_fast import models
from phaze_fast.hardware import Cluster, presets
from phaze_fast.models.families import code_of
from phaze_fast.models.huggingface import architecture, architectures
from phaze_fast.planning import predict

torch = pytest.importorskip("torch", reason="the extra torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
# transformers compiles parts of a few models in a way that PyTorch calls deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")

SEQ = 16
CONFIGURATIONS = golden_yaml("hf_families.yaml")["configurations"]
EXPLICIT = ("llama", "gemma2", "gpt2", "bert", "t5")  # attention operator by operator as well
CONFIGURATIONS |= {
    f"{name} explicit": {**CONFIGURATIONS[name], "_attn_implementation": "eager"}
    for name in EXPLICIT
}


@cache
def pair(name):
    """The graph of a configuration, and that of a trace of its module."""
    from phaze_fast.models.huggingface import trace_hf

    fields = {"model_type": name.split()[0], **CONFIGURATIONS[name]}
    kernel = "eager" if name.endswith("explicit") else "flash"
    model = models.from_hf(fields).replace(name=name, attention=kernel)
    model = model if model.patches else model.replace(seq=SEQ)
    return model, models.expanded(model), trace_hf(fields, name, seq=model.seq)


def test_every_family_is_compared_and_its_module_names_attributes_of_its_code():
    assert {name.split()[0] for name in CONFIGURATIONS} == set(architectures())
    for name in architectures():
        named = architecture(name)["module"].keys() - {"code"}
        assert {attribute for attribute in named if hasattr(code_of(name), attribute)} == named


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_configuration_has_the_operators_of_its_module(name):
    """Names, sizes, bytes, order, gradients and stored tensors of every operator."""
    _, built, traced = pair(name)
    assert built.parameters() == traced.parameters()
    for ours, theirs in zip(built.layers, traced.layers, strict=True):
        for part in ("forward", "backward", "saved"):
            for one, two in zip(getattr(ours, part), getattr(theirs, part), strict=True):
                assert one == two
    assert built == traced.replace(as_traced=True, notes=built.notes, compiled=None)


# Compiled, constants such as masks and tables of positions differ by some bytes, in T5 by a kernel.
OTHER_CONSTANTS = {"gptj", "codegen", "gpt_neo", "mpt", "bloom", "mixtral", "glm4_moe"}
OTHER_CONSTANTS |= {"deepseek_v2", "deepseek_v3", "t5", "mt5"}


@pytest.mark.parametrize(
    ("name", "software"),
    [
        *((name, "huggingface-eager") for name in architectures()),
        *((name, "pytorch-compiled") for name in sorted({*architectures()} - OTHER_CONSTANTS)),
    ],
)
def test_a_configuration_takes_the_seconds_and_bytes_of_its_trace(name, software):
    model, _, traced = pair(name)
    cluster = Cluster(devices=1, chip=presets.chip("h200"), fabric=presets.fabric("dgx-h100"))
    for recompute in ("none", "full"):
        plan = {"software": software, "global_batch": 8, "micro_batch": 4, "recompute": recompute}
        one, two = (predict(each, cluster, plan) for each in (model, traced))
        assert (one.time_s, one.memory_bytes) == (two.time_s, two.memory_bytes)
