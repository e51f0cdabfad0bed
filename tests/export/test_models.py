"""Files of frameworks are of the model: architecture in each framework's terms, and read back."""

import ast
import json
import re

import pytest
from export_cases import FABRIC, SUFFIX
from golden_files import GOLDEN

import phaze_fast as pf
from phaze_fast import export, models
from phaze_fast.errors import InvalidInputError
from phaze_fast.export.request import options_of, settings_of, shipped_name

CONFIGURATIONS = {
    entry["name"]: entry["config"]
    for entry in json.loads((GOLDEN / "hf_parameters.json").read_text())["models"]
}
THOROUGH = [pytest.mark.slow, pytest.mark.thorough]
QUICK = (
    *("deepseek-v3", "deepseek-v2-lite", "qwen3-8b", "qwen3-30b-a3b", "mixtral-8x22b"),
    *("gpt-oss-20b", "gemma2-9b", "gemma3-1b", "glm-4.5-air", "olmo2-7b"),
)
STRETCHED = {"scaling": "llama3", "factor": 8.0}
PLAN = {"tp": 1, "dp": 8, "zero": 3, "global_batch": 8, "recompute": "none"}


def of(name):
    """The model of a configuration."""
    return models.from_hf(CONFIGURATIONS[name]).replace(name=name)


def pattern(text):
    """What Megatron-LM makes of a pattern: a sum of lists times numbers."""
    assert re.fullmatch(r"[\[\]()\d*+,]+", text)
    runs = re.findall(r"\[(\d)\]\*(\d+)", text)
    return [int(number) for number, count in runs for _ in range(int(count))]


def counted_by_flags(flags):
    """Parameters that Megatron-Core allocates for these options, added up by hand."""

    def size(name, default=0):
        return int(flags[name][0]) if name in flags else default

    hidden, layers, heads = (
        size("--hidden-size"),
        size("--num-layers"),
        size("--num-attention-heads"),
    )
    bias, gated = "--disable-bias-linear" not in flags, "--swiglu" in flags
    norm = hidden * (1 if flags["--normalization"] == ["RMSNorm"] else 2)

    def feed_forward(width):
        inward = (2 if gated else 1) * width
        return hidden * (inward + width) + bias * (inward + hidden)

    if "--multi-latent-attention" in flags:
        rank, kv = size("--q-lora-rank"), size("--kv-lora-rank")
        plain, turned, value = (
            size("--qk-head-dim"),
            size("--qk-pos-emb-head-dim"),
            size("--v-head-dim"),
        )
        queries = heads * (plain + turned)
        attention = rank * (hidden + queries) + rank if rank else hidden * queries
        attention += hidden * (kv + turned) + kv + kv * heads * (plain + value)
        attention += heads * value * hidden
    else:
        width, groups = size("--kv-channels"), size("--num-query-groups", heads)
        projected = (heads + 2 * groups) * width
        attention = hidden * projected + heads * width * hidden + bias * hidden
        attention += (bias or "--add-qkv-bias" in flags) * projected
        attention += 2 * width * ("--qk-layernorm" in flags)
        attention += heads * (flags.get("--softmax-type") == ["learnable"])
    moe = [0] * layers
    if "--num-experts" in flags:
        text = flags["--moe-layer-freq"][0]
        moe = [1] * layers if text == "1" else pattern(text)
    experts, shared = size("--num-experts"), size("--moe-shared-expert-intermediate-size")
    mixture = experts * (feed_forward(size("--moe-ffn-hidden-size")) + hidden + bias)
    mixture += feed_forward(shared) * (shared > 0) + hidden * ("--moe-shared-expert-gate" in flags)
    assert len(moe) == layers
    total = norm + sum(
        attention + 2 * norm + (mixture if own else feed_forward(size("--ffn-hidden-size")))
        for own in moe
    )
    vocabulary = (size("--vocab-size") + 1) * hidden
    if flags["--position-embedding-type"] == ["learned_absolute"]:
        total += size("--max-position-embeddings") * hidden
    return total + vocabulary * (2 if "--untie-embeddings-and-output-weights" in flags else 1)


def test_megatron_allocates_the_parameters_of_the_model():
    for name in CONFIGURATIONS:
        model = of(name)
        written = export.export_plan(PLAN, model, "megatron")
        of_model = [str(item) for item in written.unexpressed if item.of == "model"]
        assert all(line in written.text for line in of_model)
        if of_model or model.head != "lm":
            continue
        assert counted_by_flags(options_of(written.text)) == model.parameters()


def test_families_that_megatron_has_whole():
    whole = {
        name
        for name in CONFIGURATIONS
        if export.export_plan(PLAN, of(name), "megatron").complete and of(name).head == "lm"
    }
    assert {"deepseek-v3", "deepseek-v2", "deepseek-v2-lite", "gpt-oss-20b", "glm-4.5-air"} <= whole
    assert {"qwen3-8b", "qwen3-30b-a3b", "mixtral-8x22b", "mistral-7b-v0.1", "glm-4-9b"} <= whole
    assert not {"gemma2-9b", "gemma3-1b", "olmo2-7b", "falcon-7b", "bloom"} & whole


def test_the_options_of_deepseek_v3():
    config = {"rope_theta": 10000.0}
    config["rope_scaling"] = {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
    }
    model = models.from_hf({**CONFIGURATIONS["deepseek-v3"], **config})
    written = export.export_plan(PLAN, model, "megatron")
    assert written.complete
    flags = options_of(written.text)
    expected = {
        "--q-lora-rank": "1536", "--kv-lora-rank": "512", "--qk-head-dim": "128",
        "--qk-pos-emb-head-dim": "64", "--v-head-dim": "128", "--moe-layer-freq": "([0]*3+[1]*58)",
        "--moe-shared-expert-intermediate-size": "2048", "--moe-router-score-function": "sigmoid",
        "--moe-router-topk-scaling-factor": "2.5", "--moe-router-num-groups": "8",
        "--moe-router-group-topk": "4", "--rope-type": "yarn", "--rotary-scaling-factor": "40.0",
        "--vocab-size": "129279", "--make-vocab-size-divisible-by": "1",
    }  # fmt: skip
    assert {name: flags[name][0] for name in expected} == expected
    for name in ("--multi-latent-attention", "--qk-layernorm", "--moe-router-enable-expert-bias"):
        assert flags[name] == []
    assert "--kv-channels" not in flags
    assert "--num-query-groups" not in flags


@pytest.mark.parametrize(("name", "share"), [("glm-4-9b", ["0.5"]), ("deepseek-v3", None)])
def test_rotated_share_of_a_head_for_megatron(name, share):
    flags = options_of(export.export_plan(PLAN, of(name), "megatron").text)
    assert flags.get("--rotary-percent") == share
    assert "--sequence-parallel" not in flags  # one tensor-parallel device has all rows


@pytest.mark.parametrize(
    ("top_k", "normalised", "scores", "before"),
    [
        (2, True, "softmax", False),
        (2, False, "softmax", True),
        (1, True, "softmax", True),  # Megatron-Core refuses the softmax of one score
        (1, False, "softmax", True),
        (1, True, "sigmoid", False),
        (2, False, "sigmoid", False),
    ],
)
def test_the_softmax_of_a_router_for_megatron(top_k, normalised, scores, before):
    model = models.load("mixtral-8x7b")
    moe = model.moe.replace(top_k=top_k, scores_normalised=normalised, scores=scores)
    for format_, name in (
        ("megatron", "--moe-router-pre-softmax"),
        ("bridge", "model.moe_router_pre_softmax=true"),
    ):
        text = export.export_plan(PLAN, model.replace(moe=moe), format_).text
        assert (name in text) == before


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("gpt2-small", {}, {"normalization": ["LayerNorm"], "max-position-embeddings": ["1024"]}),
        ("gpt2-small", {"max_positions": 4096}, {"max-position-embeddings": ["4096"]}),
        ("llama3-8b", {"max_positions": None, "seq": 8192}, {"max-position-embeddings": ["8192"]}),
        ("llama3-8b", {}, {"normalization": ["RMSNorm"], "use-rope-scaling": None}),
        ("llama3-8b", {"rotary": {}}, {"rotary-percent": None, "rope-scaling-factor": None}),
        ("llama3-8b", {"rotary": {"share": 0.5}}, {"rotary-percent": ["0.5"]}),
        (
            "llama3-8b",
            {"rotary": STRETCHED},
            {"use-rope-scaling": [], "rope-scaling-factor": ["8.0"], "rotary-percent": None},
        ),
        ("llama3-8b", {"window": 64}, {"window-attn-skip-freq": None}),
        (
            "llama3-8b",
            {"window": 64, "layers": 4, "full_attention_layers": (0, 1, 2, 3)},
            {"window-size": ["63,0"], "window-attn-skip-freq": ["([0]*4)"]},
        ),
    ],
)
def test_options_of_a_model_for_megatron(name, changes, said):
    model = models.load(name).replace(**changes)
    flags = options_of(export.export_plan(PLAN, model, "megatron").text)
    assert {key: flags.get(f"--{key}") for key in said} == said


@pytest.mark.parametrize(("kv_heads", "groups"), [(None, None), (32, None), (8, ["8"])])
def test_groups_of_queries_for_megatron(kv_heads, groups):
    model = models.load("llama2-7b").replace(kv_heads=kv_heads)
    flags = options_of(export.export_plan(PLAN, model, "megatron").text)
    assert flags.get("--num-query-groups") == groups
    assert ("--group-query-attention" in flags) == (groups is not None)


def test_windows_and_sinks_for_megatron():
    flags = options_of(export.export_plan(PLAN, of("gpt-oss-20b"), "megatron").text)
    assert (flags["--window-size"], flags["--window-attn-skip-freq"]) == (["127,0"], ["2"])
    assert flags["--softmax-type"] == ["learnable"]
    flags = options_of(export.export_plan(PLAN, of("gpt-neo-2.7b"), "megatron").text)
    assert flags["--window-attn-skip-freq"] == ["(" + "+".join(["[0]*1", "[1]*1"] * 16) + ")"]
    first = of("gpt-oss-20b").replace(full_attention_layers=(0, 1, 5))
    flags = options_of(export.export_plan(PLAN, first, "megatron").text)
    assert pattern(flags["--window-attn-skip-freq"][0]) == [0, 0, 1, 1, 1, 0] + [1] * 18
    irregular = of("gpt-oss-20b").replace(full_attention_layers=(1, 5))
    flags = options_of(export.export_plan(PLAN, irregular, "megatron").text)
    assert pattern(flags["--window-attn-skip-freq"][0]) == [1, 0, 1, 1, 1, 0] + [1] * 18
    whole = options_of(export.export_plan(PLAN, of("mistral-7b-v0.1"), "megatron").text)
    assert whole["--window-size"] == ["4095,0"]
    assert "--window-attn-skip-freq" not in whole


def test_recipes_flavours_and_files_of_frameworks():
    names = {
        "deepseek-v3": (["deepseek_v3", "671B"], "deepseek3-671b", "deepseek_v3_pretrain_config"),
        "qwen3-30b-a3b": (["qwen3", "30B-A3B"], "qwen3-30b-a3b", "qwen3_30b_a3b_pretrain_config"),
        "gpt-oss-20b": (["gpt_oss", "20b"], "gpt-oss-20b", "gpt_oss_20b_pretrain_config"),
    }
    for name, (flavour, file, recipe) in names.items():
        job = export.export_plan(PLAN, of(name), "torchtitan")
        assert job.complete
        assert f'name = "{flavour[0]}"\nflavor = "{flavour[1]}"' in job.text
        assert settings_of(export.export_plan(PLAN, of(name), "maxtext").text)["model_name"] == file
        bridge = export.export_plan(PLAN, of(name), "bridge").text
        assert options_of(bridge)["--recipe"][0] == recipe
        assert "model.activation_func" not in settings_of(bridge)
    changed = of("deepseek-v3").replace(layers=62)
    assert not export.export_plan(PLAN, changed, "torchtitan").complete
    text = export.export_plan(PLAN, changed, "bridge").text
    assert "There is no recipe of this model" in text
    settings = settings_of(text)
    assert ast.literal_eval(settings["model.moe_layer_freq"]) == [0] * 3 + [1] * 59
    assert (settings["model.vocab_size"], settings["model.activation_func"]) == ("129280", "silu")
    settings = settings_of(export.export_plan(PLAN, changed, "maxtext").text)
    assert (settings["decoder_block"], settings["attention_type"]) == ("deepseek", "mla")
    assert (settings["first_num_dense_layers"], settings["routed_score_func"]) == ("3", "sigmoid")
    assert (settings["q_lora_rank"], settings["kv_lora_rank"]) == ("1536", "512")
    grouped = of("qwen3-30b-a3b").replace(layers=47)
    settings = settings_of(export.export_plan(PLAN, grouped, "maxtext").text)
    assert (settings["base_num_query_heads"], settings["base_num_kv_heads"]) == ("32", "4")
    more = changed.replace(mtp_layers=1)
    settings = settings_of(export.export_plan(PLAN, more, "bridge").text)
    assert settings["model.mtp_num_layers"] == "1"


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama2-7b", {"kv_heads": 8}),
        ("llama3-8b", {"head_dim": 64}),
        ("llama3-8b", {"parallel": "one-norm"}),
        ("llama3-8b", {"dropout": True}),
        ("llama3-8b", {"rotary": {**STRETCHED, "scaling": "yarn"}}),
        ("qwen3-8b", {"rotary": STRETCHED}),
        ("qwen3-30b-a3b", {"window": 1024}),
        ("gpt-oss-20b", {"out_bias": False}),
        ("gpt-oss-20b", {"full_attention_layers": (1, 5)}),
        ("deepseek-v3", {"qkv_bias": True}),
        ("deepseek-v3", {"mtp_layers": 1}),
    ],
)
def test_a_model_that_differs_from_that_of_a_framework_has_not_its_name(name, changes):
    formats = ("torchtitan", "maxtext", "bridge")
    model = models.load(name)
    assert any(shipped_name(model, format_) for format_ in formats)
    changed = model.replace(**changes)
    assert [shipped_name(changed, format_) for format_ in formats] == [None] * 3


@pytest.mark.parametrize(
    ("name", "rotary"),
    [
        ("llama3-8b", STRETCHED),
        ("deepseek-v3", {**STRETCHED, "scaling": "yarn"}),
        ("gpt-oss-20b", {**STRETCHED, "scaling": "yarn"}),
    ],
)
def test_rotary_embeddings_of_a_framework_s_model_may_be_scaled_as_it_does(name, rotary):
    changed = models.load(name).replace(rotary=rotary)
    own = shipped_name(models.load(name), "maxtext")
    assert own is not None
    assert shipped_name(changed, "maxtext") == own


def test_decoders_of_maxtext():
    lacking = {}
    for name in ("llama3-8b", "deepseek-v3", "bert-large", "t5-small", "vit-b16"):
        found = export.export_plan(PLAN, models.load(name), "maxtext")
        lacking[name] = [item.why for item in found.unexpressed if "architecture" in item.what]
    assert lacking["llama3-8b"] == lacking["deepseek-v3"] == []
    assert all(lacking[name] == ["MaxText has decoders of text"] for name in list(lacking)[2:])
    for positions in (4096, None):
        turned = {"scaling": "yarn", "factor": 8.0, "original_positions": positions}
        own = models.load("llama3-8b").replace(hidden=1024, rotary=turned)
        said = settings_of(export.export_plan(PLAN, own, "maxtext").text)
        assert said["rope_type"] == "yarn"
        assert said.get("original_max_position_embeddings") == (positions and str(positions))


ALL_BIASES = {"qkv_bias": True, "out_bias": True, "ffn_bias": True}


@pytest.mark.parametrize(
    ("name", "changes", "lacking", "in_bridge"),
    [
        ("t5-small", {}, ["encoder", "relative positions", "ReLU"], 2),
        ("gpt2-small", {"head": "classifier", "classes": 10}, ["images"], 1),
        ("gpt2-small", {"positions": "alibi", "max_positions": None}, ["alibi positions"], 1),
        ("gpt2-small", {"activation": "relu"}, ["ReLU"], 0),
        ("llama2-7b", {"activation": "relu"}, ["gated relu"], 0),
        ("llama2-7b", {"activation": "gelu", "gated": False}, [], 0),
        ("llama3-8b", {"rotary": STRETCHED, "layers": 4}, [], 0),
        ("llama3-8b", {"rotary": {**STRETCHED, "scaling": "yarn"}}, ["rotary scaling yarn"], 1),
        ("deepseek-v3", {"rotary": STRETCHED, "layers": 4}, ["rotary scaling llama3"], 1),
        ("deepseek-v3", {"rotary": {**STRETCHED, "scaling": "yarn"}}, [], 0),
        ("deepseek-v3", {"qkv_bias": True, "layers": 4}, ["qkv_bias True, out_bias False, ffn"], 1),
        ("deepseek-v3", {**ALL_BIASES, "layers": 4}, ["bias of the router"], 1),
    ],
)
def test_what_of_a_model_megatron_core_has_no_option_for(name, changes, lacking, in_bridge):
    """Bridge takes any activation, and a recipe of the model where it has one."""
    for format_, expected in (("megatron", lacking), ("bridge", lacking[:in_bridge])):
        found = export.export_plan(PLAN, models.load(name).replace(**changes), format_).unexpressed
        assert len(found) == len(expected)
        for item, what in zip(found, expected, strict=True):
            assert item.what.startswith(f"{name}: {what}")


@pytest.mark.parametrize(
    ("biases", "flag", "complete"),
    [
        ((True, True, True), None, True),
        ((False, False, False), "--disable-bias-linear", True),
        ((True, False, False), "--add-qkv-bias", True),
        ((True, True, False), None, False),
        ((True, False, True), None, False),
        ((False, False, True), None, False),
    ],
)
def test_megatron_has_biases_of_all_projections_or_none_or_of_queries_keys_and_values(
    biases, flag, complete
):
    fields = dict(zip(("qkv_bias", "out_bias", "ffn_bias"), biases, strict=True))
    found = export.export_plan(PLAN, models.load("gpt2-small").replace(**fields), "megatron")
    said = {"--disable-bias-linear", "--add-qkv-bias"} & set(options_of(found.text))
    assert found.complete == complete
    assert said == (set() if flag is None else {flag, "--disable-bias-linear"})


TURNED = {"rope_type": "default", "rope_factor": None}
NO_GROUPS = {"n_routing_groups": None, "topk_routing_group": None, "capacity_factor": None}


@pytest.mark.parametrize(
    ("name", "changes", "lacking", "said"),
    [
        ("gpt2-small", {}, [], {"decoder_block": "gpt3", "mlp_activations": '["gelu"]'}),
        ("llama3-8b", {}, [], {"mlp_activations": '["silu","linear"]', "use_qk_norm": "False"}),
        ("llama3-8b", {}, [], {"base_num_kv_heads": "8", "base_num_query_heads": "32"}),
        (
            "gpt2-small",
            {"positions": "alibi", "max_positions": None},
            ["architecture", "bias of the output", "bias of the feed-forward"],
            {"decoder_block": "llama2"},
        ),
        ("llama2-7b", {"out_bias": True}, ["bias of the output"], {"attention_bias": "False"}),
        ("llama2-7b", {"ffn_bias": True}, ["bias of the feed-forward"], {"mlp_bias": "True"}),
        ("llama3-8b", {"rotary": {"base": 1e6}}, [], {"rope_max_timescale": "1000000.0", **TURNED}),
        (
            "llama3-8b",
            {"rotary": {"scaling": "linear", "factor": 2.0}},
            ["rotary scaling linear"],
            {"rope_type": "default", "rope_factor": "2.0"},
        ),
        ("llama3-8b", {"rotary": {"share": 0.5}}, ["rotary share 0.5"], TURNED),
        ("llama3-8b", {"rotary": STRETCHED}, [], {"rope_type": "llama3.1", "rope_factor": "8.0"}),
        (
            "gpt-oss-20b",
            {"full_attention_layers": (1, 3)},
            [],
            {"sliding_window_size": "128", "inhomogeneous_layer_cycle_interval": "2"},
        ),
        ("gpt-oss-20b", {"full_attention_layers": (1, 3)}, [], {"routed_bias": "True"}),
        ("gpt-oss-20b", {"full_attention_layers": (0, 2)}, ["layers with full attention"], {}),
        ("gpt-oss-20b", {"full_attention_layers": ()}, ["layers with full attention"], {}),
        ("mixtral-8x22b", {}, [], {"decoder_block": "mixtral", "sliding_window_size": None}),
        ("mixtral-8x22b", {}, [], NO_GROUPS),
        ("deepseek-v3", {}, [], {"n_routing_groups": "8", "topk_routing_group": "4"}),
        ("deepseek-v3", {}, [], {"q_lora_rank": "1536", "routed_bias": "True"}),
    ],
)
def test_settings_of_a_model_that_maxtext_has_no_file_of(name, changes, lacking, said):
    model = (of(name) if name in CONFIGURATIONS else models.load(name)).replace(layers=4, **changes)
    found = export.export_plan({**PLAN, "recompute": "full"}, model, "maxtext")
    settings = settings_of(found.text)
    assert {key: settings.get(key) for key in said} == said
    assert len(found.unexpressed) == len(lacking)
    for item, what in zip(found.unexpressed, lacking, strict=True):
        assert item.what.startswith(f"{model.name}: {what}")


def test_capacity_of_experts_is_written_where_a_model_has_one():
    model = of("mixtral-8x22b").replace(layers=4)
    limited = model.replace(moe=model.moe.replace(capacity_factor=1.25))
    for format_, name in (("maxtext", "capacity_factor"), ("megatron", "capacity-factor")):
        texts = [export.export_plan(PLAN, m, format_).text for m in (model, limited)]
        assert [name in text for text in texts] == [False, True]


def test_norms_without_a_bias_are_what_megatron_lacks():
    model = models.load("gpt2-small")
    assert export.export_plan(PLAN, model, "megatron").complete
    assert not export.export_plan(PLAN, model.replace(norm_bias=False), "megatron").complete
    plain = of("qwen3-8b")
    assert export.export_plan(PLAN, plain.replace(norm_bias=False), "megatron").complete


@pytest.mark.parametrize("format_", export.FORMATS)
@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(n, marks=THOROUGH) for n in CONFIGURATIONS if n not in QUICK)]
)
def test_every_family_reads_back_the_same(name, format_, tmp_path):
    model = of(name).replace(seq=512) if of(name).positions == "rotary" else of(name)
    cluster = pf.Cluster(devices=8, **FABRIC)
    recompute = "full" if format_ == "maxtext" else "none"
    plan = pf.predict(model, cluster, {**PLAN, "recompute": recompute})
    written = export.export_plan(plan, model, format_)
    path = tmp_path / f"run{SUFFIX.get(format_, '.sh')}"
    path.write_text(written.text)
    again = pf.predict(model, cluster, export.read_plan(path, model, 8).spec)
    assert written.plan_complete
    assert again.time_s == pytest.approx(plan.time_s, rel=1e-12)
    assert again.memory_bytes == pytest.approx(plan.memory_bytes, rel=1e-12)


def test_a_file_of_another_model_is_refused(tmp_path):
    path = tmp_path / "run.sh"
    for format_, option in (("megatron", "--q-lora-rank"), ("bridge", "model.q_lora_rank")):
        path.write_text(export.export_plan(PLAN, of("deepseek-v3"), format_).text)
        latent = of("deepseek-v3").latent.replace(query_rank=1024)
        with pytest.raises(
            InvalidInputError, match=rf"{option}: 1536 is not accepted; .* has 1024"
        ):
            export.read_plan(path, of("deepseek-v3").replace(latent=latent), 8)
    text = export.export_plan(PLAN, of("mixtral-8x22b"), "megatron").text
    path.write_text(f"{text.rstrip()} --ffn-hidden-size 1\n")
    export.read_plan(path, of("mixtral-8x22b"), 8)  # no layer has it
    path.write_text(text)
    for model, said in (
        (of("mixtral-8x22b").replace(hidden=12288), "--hidden-size: 6144 .* has 12288"),
        (of("mixtral-8x22b").replace(moe=None, ffn=128), "--ffn-hidden-size: .* has 128"),
    ):
        with pytest.raises(InvalidInputError, match=said):
            export.read_plan(path, model, 8)
    path.write_text(export.export_plan(PLAN, of("phi-4"), "maxtext").text)
    with pytest.raises(InvalidInputError, match="base_emb_dim: 5120 is not accepted; .* has 4096"):
        export.read_plan(path, of("phi-4").replace(hidden=4096, head_dim=128), 8)


@pytest.mark.parametrize(
    ("pp", "vpp", "layers"), [(4, 2, 9), (4, 2, 7), (2, 3, 7), (3, 2, 6), (2, 2, 9)]
)
def test_uneven_pipelines_of_maxtext_read_back(pp, vpp, layers, tmp_path):
    model = models.load("llama2-7b").replace(layers=layers)
    least, more = divmod(layers + 2, pp * vpp)
    plan = {"pp": pp, "vpp": vpp, "dp": 1, "global_batch": 4 * pp, "schedule": "interleaved"}
    plan |= {"recompute": "full", "stages": tuple(least + (k < more) for k in range(pp * vpp))}
    path = tmp_path / "run.sh"
    path.write_text(export.export_plan(plan, model, "maxtext").text)
    read = export.read_plan(path, model, pp).spec
    repeats = vpp if layers >= pp * vpp else 1
    assert (read.pp, read.vpp, sum(read.stages)) == (pp, repeats, layers + 2)
    assert pf.predict(model, pf.Cluster(devices=pp, **FABRIC), read).time_s > 0


def test_torchtitan_counts_the_layers_of_an_encoder(tmp_path):
    model = models.load("t5-small")
    plan = {"pp": 2, "dp": 1, "global_batch": 4, "recompute": "none", "stages": (7, 7)}
    text = export.export_plan(plan, model, "torchtitan").text
    path = tmp_path / "job.toml"
    path.write_text(text.replace('"layers.0", ', ""))
    with pytest.raises(InvalidInputError, match="13 modules are not accepted; t5-small has 14"):
        export.read_plan(path, model, 2)
