"""Models: parameter counts as published, HuggingFace configurations read or refused by name."""

import json
import math
import re
import sys
from types import SimpleNamespace

import pytest
from golden_files import golden_yaml, hf_entries
from refusals import refusal

from phaze_fast import models
from phaze_fast.errors import InvalidInputError, MissingExtraError

PHAZE = {  # name: layers, hidden, heads, sequence length
    "bertlarge": (24, 1024, 16, 512),
    "megatronbert": (24, 1024, 16, 512),
    "opt": (24, 2048, 32, 2048),
    "gpt2": (48, 1600, 25, 1024),
    "megatrongpt2-54": (54, 1920, 20, 1024),
    "megatrongpt2-72": (72, 3072, 24, 1024),
    "llama2": (32, 4096, 32, 4096),
    "megatrongpt3": (96, 12288, 96, 2048),
}


def rounded(value, digits):
    """The first digits of a whole number, the rest zero."""
    scale = 10 ** (len(str(value)) - digits)
    return math.floor(value / scale + 0.5) * scale


def test_parameter_counts_are_the_published_ones():
    found, published = {}, {}
    for name in models.names():
        model = models.load(name)
        assert model.name == name
        assert model.sources, name
        if model.published_parameters is None:
            assert name == "megatronbert"
            continue
        digits, count = model.published_digits, model.parameters()
        found[name] = count if digits is None else rounded(count, digits)
        published[name] = model.published_parameters
    assert found == published


@pytest.mark.parametrize("name", PHAZE)
def test_the_eight_models_of_the_paper(name):
    model = models.load(name)
    assert (model.layers, model.hidden, model.heads, model.seq) == PHAZE[name]
    assert name in models.names()[:8]


@pytest.mark.parametrize("name", [n for n in models.names() if re.match(r"gpt-\d", n)])
def test_gpt_counts_follow_narayanan_equation_2(name):
    """P = 12 l h^2 (1 + 13/(12 h) + (V + s)/(12 l h)), and the final norm's 2 h on top."""
    m = models.load(name)
    expected = 12 * m.layers * m.hidden**2 + 13 * m.layers * m.hidden + (m.vocab + m.seq) * m.hidden
    assert m.parameters() == expected + 2 * m.hidden


def test_parts_add_up_and_print():
    exact = 0
    for name in models.names():
        model = models.load(name)
        assert sum(model.parameters_by_part().values()) == model.parameters()
        assert (model.active_parameters() < model.parameters()) == (model.moe is not None)
        assert str(model).startswith(f"{name}: ")
        exact += bool(model.published_parameters and not model.published_digits)
    assert exact >= 25


def test_a_dense_mixture_is_the_dense_model_and_its_router():
    dense = models.load("llama2-7b")
    one = dense.replace(moe={"experts": 1, "top_k": 1, "expert_ffn": dense.ffn})
    assert one.parameters() == dense.parameters() + dense.layers * dense.hidden
    late = one.replace(moe={"experts": 1, "top_k": 1, "expert_ffn": dense.ffn, "dense_layers": 30})
    assert late.parameters() == dense.parameters() + 2 * dense.hidden
    shared = one.replace(moe={"experts": 1, "top_k": 1, "expert_ffn": 64, "shared_experts": 2})
    assert shared.moe_parameters == dense.hidden + 3 * 3 * dense.hidden * 64


# ---- HuggingFace ----

REFUSED = golden_yaml("hf_refused.yaml")
LLAMA, T5, BERT, OPT = REFUSED["configurations"].values()


def test_a_config_from_a_mapping_a_file_and_a_folder(tmp_path):
    wanted = models.from_hf(LLAMA)
    assert (wanted.kv_heads, wanted.gated) == (2, True)
    assert (wanted.norm, wanted.positions) == ("rmsnorm", "rotary")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    named = wanted.replace(name=tmp_path.name)  # the folder's
    assert models.from_hf(tmp_path) == named
    assert models.from_hf(tmp_path / "config.json") == named
    assert models.load(tmp_path / "config.json") == named
    assert models.load(tmp_path) == models.load(str(tmp_path)) == named
    (tmp_path / "small-llama.json").write_text(json.dumps(LLAMA))
    assert models.load(tmp_path / "small-llama.json") == wanted.replace(name="small-llama")


def test_fields_that_change_nothing_are_passed_over():
    extra = {"rope_theta": 1e4, "torch_dtype": "bfloat16", "use_cache": True, "bos_token_id": 1}
    assert models.from_hf({**LLAMA, **extra}) == models.from_hf(LLAMA)
    whole = {"layer_types": ["full_attention"] * 2}
    assert models.from_hf({**LLAMA, **whole}) == models.from_hf(LLAMA)
    assert models.from_hf({**OPT, "init_std": 0.02}) == models.from_hf(OPT)
    assert models.from_hf({**T5, "scale_decoder_outputs": True}) == models.from_hf(T5)
    absent = {"attn_logit_softcapping": None, "sliding_window": None}
    assert models.from_hf({**LLAMA, **absent}) == models.from_hf(LLAMA)
    assert models.from_hf({**BERT, "is_decoder": False}) == models.from_hf(BERT)
    as_long = {"sliding_window": LLAMA["max_position_embeddings"]}
    assert models.from_hf({**LLAMA, **as_long}) == models.from_hf(LLAMA)


@pytest.mark.parametrize(("name", "changes", "line"), REFUSED["refused"])
def test_what_is_not_modelled_is_refused_by_name(name, changes, line, monkeypatch):
    """Where PyTorch is not there to trace it."""
    monkeypatch.setitem(sys.modules, "torch", None)
    config = {**REFUSED["configurations"][name], **changes}
    assert line in refusal(models.from_hf, config, error=InvalidInputError)


def test_a_long_context_window_is_no_sequence_length():
    """The default is stated, and never more than 4,096 tokens."""
    long = models.from_hf({**LLAMA, "max_position_embeddings": 131072})
    assert long.seq == 4096
    assert long.notes == "seq 4096: the smaller of the context window of 131072 and 4096"
    assert models.from_hf(LLAMA).seq == 32
    assert models.from_hf(LLAMA).notes == ""


@pytest.mark.parametrize(
    "native",
    [
        {"model_type": "mpt", "d_model": 64, "n_heads": 4, "n_layers": 2},
        {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2},
    ],
)
def test_second_names_of_fields_are_those_of_transformers(native):
    names = ("model_type", "hidden_size", "num_attention_heads", "num_hidden_layers")
    second = dict(zip(names, native.values(), strict=True))
    assert models.from_hf(native) == models.from_hf(second)


def test_a_hub_id_with_and_without_the_extra(monkeypatch, tmp_path):
    """The hub is asked for config.json, and its faults become one line."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    message = refusal(models.from_hf, "someone/some-model", error=MissingExtraError)
    assert "pip install 'phaze-fast[hf]'" in message
    asked = []
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))

    def fetch(repository, name):
        asked.append((repository, name))
        if repository == "no/thing":
            raise OSError("404\nlong explanation")
        return str(file)

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(hf_hub_download=fetch))
    assert models.from_hf("some/model") == models.from_hf(LLAMA).replace(name="model")
    assert asked == [("some/model", "config.json")]
    message = refusal(models.from_hf, "no/thing", error=InvalidInputError)
    assert message == "no/thing: config.json cannot be fetched: 404"
    assert "no such file" in refusal(models.from_hf, "none.json", error=InvalidInputError)


# ---- architectures ----


def test_parameters_are_those_of_transformers():
    """Distinct parameters, tied ones once; tests/models/test_torch.py recomputes the counts."""
    found = {e["name"]: models.from_hf(e["config"]).parameters() for e in hf_entries()}
    assert found == {e["name"]: e["parameters"] for e in hf_entries()}


def test_the_architectures_that_are_covered():
    kinds = {entry["config"]["model_type"] for entry in hf_entries()}
    named = "qwen2 qwen3 qwen3_moe gemma2 gemma3_text phi3 gpt_oss olmo2 gpt_neox falcon mistral "
    named += "deepseek_v2 deepseek_v3 glm4 granite cohere starcoder2 bloom mpt nemotron phi t5 "
    named += "stablelm mixtral"
    assert set(named.split()) <= kinds
    assert models.from_hf({"model_type": "deepseek_v3"}).parameters() == 671_026_404_352


def windowed(**fields):
    return models.from_hf(
        {**LLAMA, "num_hidden_layers": 6, "sliding_window": 8, "max_window_layers": 2, **fields}
    )


def test_which_layers_have_a_window():
    """The rules of the architectures, where a configuration does not list its layers."""
    assert windowed(model_type="mistral", max_window_layers=None).full_attention_layers == ()
    assert windowed(model_type="qwen2", use_sliding_window=True).full_attention_layers == (0, 1)
    assert windowed(model_type="qwen2").window is None
    assert windowed(model_type="gemma2").full_attention_layers == (1, 3, 5)
    assert windowed(model_type="gemma3_text").full_attention_layers == (5,)
    listed = ["full_attention"] + ["sliding_attention"] * 5
    found = windowed(model_type="gemma3_text", layer_types=listed)
    assert found.full_attention_layers == (0,)
    assert [found.is_windowed(layer, 32) for layer in range(3)] == [False, True, True]
    assert not any(found.is_windowed(layer, 8) for layer in range(6))


def test_further_tokens_are_read_from_a_configuration_and_counted():
    config = next(entry for entry in hf_entries() if entry["name"] == "deepseek-v3")["config"]
    model, alone = models.from_hf({**config, "num_nextn_predict_layers": 1}), models.from_hf(config)
    assert (model.mtp_layers, alone.mtp_layers) == (1, 0)
    # DeepSeek-V3, README_WEIGHTS: 685 B on the hub with a second embedding and head
    whole = model.parameters() + 2 * model.vocab * model.hidden
    assert f"{whole / 1e9:.0f}" == "684"
    assert model.parameters_by_part()["further tokens"] == model.parameters() - alone.parameters()
    assert models.expanded(model, 64).parameters() == alone.parameters()  # transformers runs none
    with pytest.raises(InvalidInputError, match="mtp_layers: is not accepted with"):
        model.replace(lora={"rank": 8, "targets": ["o"]})
