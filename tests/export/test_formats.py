"""What the files say, by hand: flags, layouts, published runs, faults."""

import json
import tomllib

import pytest
from export_cases import SUFFIX
from golden_files import GOLDEN, golden_rows, golden_yaml

import phaze_fast as pf
from phaze_fast import export, models
from phaze_fast.errors import InvalidInputError
from phaze_fast.export.megatron import layout_text, read_layout
from phaze_fast.export.request import Chunk, options_of, settings_of, whole_number
from phaze_fast.planning.frameworks import inexpressible

LLAMA = models.load("llama2-7b")


@pytest.mark.parametrize("format_", export.FORMATS)
def test_the_frameworks_know_every_name(format_):
    known = set(golden_yaml("framework_flags.yaml")[format_]["names"].split())
    names = export.flag_names(format_)
    assert set(names.names.values()) <= known
    assert names.version
    assert names.read_from


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("Et*3|t*4|t*3L", [4, 4, 4]),
        ("E|(t|)*3,t||L", [1, 1, 1, 1, 1, 0, 1]),
        ("Ettt|(tt|)*2 tL", [4, 2, 2, 2]),
        ("EtL|", [3]),
    ],
)
def test_layouts_by_hand(text, sizes):
    assert read_layout(text, "--layout") == sizes


def test_a_layout_repeats_blocks_by_a_star():
    chunks = [Chunk(k == 0, range(k, k + k), k == 3, "none") for k in range(4)]
    assert layout_text(chunks) == "E|t|t*2|t*3L"


def test_a_layout_has_at_most_100000_layers_and_counts_of_six_digits():
    assert read_layout("Et*100000|t*000003L", "--layout") == [100001, 4]
    for text in ("Et*100001L", "Et*0000003L", "E(tt)*050001L"):
        with pytest.raises(InvalidInputError, match="it is too long"):
            read_layout(text, "--layout")


@pytest.mark.parametrize("text", ["", "t|t", "EtL|t", "tE|L", "Etm|L", "E(t*2|L", "Et*9999999|L"])
def test_layouts_that_are_none(text):
    with pytest.raises(InvalidInputError, match="--layout: "):
        read_layout(text, "--layout")


def test_a_layout_is_refused_before_it_is_written_out():
    with pytest.raises(InvalidInputError, match="it is too long"):
        read_layout("E" + "(" + "t" * 50 + "|)*9999t*2L", "--layout")


def test_words_of_another_framework_do_not_change_whose_file_it_is(tmp_path):
    file = tmp_path / "run.sh"
    file.write_text(
        "torchrun --nnodes 1 --nproc-per-node 8 pretrain_gpt.py --micro-batch-size 2 "
        "--global-batch-size 32 --data-path ici_corpus --tensor-model-parallel-size 2\n"
    )
    assert export.read_plan(file, "gpt2-small", 8).spec.tp == 2


def test_an_uneven_pipeline_for_megatron():
    plan = {"pp": 4, "dp": 2, "global_batch": 32, "recompute": "none", "stages": (7, 9, 9, 9)}
    text = export.export_plan(plan, LLAMA, "megatron").text
    flags = options_of(text)
    assert flags["--pipeline-model-parallel-layout"] == ["Et*6|t*9|t*9|t*8L"]
    assert flags["--nnodes"] == ["1"]
    assert flags["--nproc-per-node"][0] == "8"
    assert "--use-distributed-optimizer" not in flags
    assert "pretrain_gpt.py" in text
    plan = {"pp": 2, "dp": 4, "global_batch": 32, "recompute": "none", "stages": (12, 14)}
    found = export.export_plan(plan, models.load("t5-base"), "megatron")
    other = export.export_plan(plan, models.load("t5-base"), "maxtext")
    assert found.unexpressed[0].what == "t5-base: encoder"
    assert other.unexpressed[-1].what == "t5-base: architecture"
    assert options_of(found.text)["--pipeline-model-parallel-layout"] == ["Et*11|t*13L"]
    bert = export.export_plan(
        {"global_batch": 8, "recompute": "none"}, models.load("bert-large"), "megatron"
    )
    assert "pretrain_bert.py" in bert.text


@pytest.mark.parametrize(
    ("recompute", "flags"),
    [
        ("full", {"granularity": ["full"], "method": ["uniform"], "num-layers": ["1"]}),
        ("full:3", {"granularity": ["full"], "method": ["block"], "num-layers": ["3"]}),
        ("full:16", {"granularity": ["full"], "method": ["uniform"], "num-layers": ["1"]}),
        ("full:99", {"granularity": ["full"], "method": ["uniform"], "num-layers": ["1"]}),
        ("attention", {"granularity": ["selective"], "modules": ["core_attn"]}),
        ("norms+attention", {"granularity": ["selective"], "modules": ["core_attn", "layernorm"]}),
        ("none", {}),
        ("selective", {}),  # fused attention has no scores to compute again
    ],
)
def test_recomputation_for_megatron(recompute, flags):
    plan = {"pp": 2, "dp": 4, "global_batch": 32, "recompute": recompute}
    found = export.export_plan(plan, LLAMA, "megatron")
    said = options_of(found.text)
    kept = {k.removeprefix("--recompute-"): v for k, v in said.items() if "recompute" in k}
    assert kept == flags
    assert found.complete


@pytest.mark.parametrize(
    ("words", "stages", "blocks"),
    [
        (("full:3", "full:3"), (4, 30), "3"),  # all of the first stage, some of the second
        (("full:3", "full:3"), (3, 31), "3"),
        (("full:2", "full"), (30, 4), None),  # the second has more than the two of the first
        (("full:2", "full:3"), (17, 17), None),
        (("full", "full", "full:3"), (6, 2, 26), None),
        (("full", "none"), (3, 31), None),
        (("none", "full:5"), (17, 17), None),
        (("full:4", "full:4/norms"), (17, 17), None),
    ],
)
def test_megatron_recomputes_as_many_first_blocks_of_every_chunk(words, stages, blocks):
    plan = {"pp": len(words), "dp": 4, "global_batch": 32, "recompute": words, "stages": stages}
    found = export.export_plan(plan, LLAMA, "megatron")
    said = options_of(found.text)
    assert found.complete == (blocks is not None)
    assert said["--recompute-granularity"] == ["full"]
    assert said["--recompute-num-layers"] == [blocks or "1"]
    assert said["--recompute-method"] == ["block" if blocks else "uniform"]


AGAIN = "norms+activations+gated-product"


@pytest.mark.parametrize(
    ("more", "policy", "kept"),
    [
        ("", "minimal_with_context", set()),
        ("+up-projection+attention", "save_dot_except_mlpwi", set()),
        ("+output-projection", "custom", {"context", "mlpwi", "mlpwi_0", "mlpwi_1"}),
        ("+attention+output-projection", "custom", {"mlpwi", "mlpwi_0", "mlpwi_1"}),
        ("+attention+output-projection+up-projection", "custom", set()),
    ],
)
def test_recomputation_for_maxtext(more, policy, kept, tmp_path):
    plan = {"dp": 8, "global_batch": 32, "recompute": AGAIN + more, "zero": 3}
    found = export.export_plan(plan, LLAMA, "maxtext")
    said = settings_of(found.text)
    assert found.complete
    assert (said["model_name"], "base_emb_dim" in said) == ("llama2-7b", False)
    own = settings_of(export.export_plan(plan, LLAMA.replace(ffn=11264), "maxtext").text)
    assert (own["model_name"], own["base_emb_dim"]) == ("default", "4096")
    assert said["remat_policy"] == policy
    always = {"query_proj", "key_proj", "value_proj", "qkv_proj", "mlpwo"}
    device = {name for name, value in said.items() if value == "device"}
    assert device == (kept | always if policy == "custom" else set())
    path = tmp_path / "run.sh"
    path.write_text(found.text)
    read = export.read_plan(path, LLAMA)
    assert set(str(read.spec.recompute).split("+")) == set((AGAIN + more).split("+"))
    assert not read.notes


def test_what_cannot_be_said_is_said():
    plan = {"pp": 2, "dp": 4, "global_batch": 32, "recompute": ("full", "norms")}
    plan |= {"schedule": "zb-h1", "optimizer": "sgd-bf16", "zero": 1}
    found = export.export_plan(plan, LLAMA, "megatron")
    assert [item.what for item in found.unexpressed] == [
        "--schedule zb-h1",
        "--recompute full,norms",
        "--optimizer sgd-bf16",
    ]
    assert not found.complete
    assert found.text.count("# Not expressed: ") == 3
    plan = {"pp": 2, "dp": 4, "schedule": "gpipe", "recompute": "full", "zero": 3}
    for batch, extra in ((32, []), (12, ["--stages 17,17, 3 micro-batches"])):
        found = export.export_plan({**plan, "global_batch": batch}, LLAMA, "maxtext")
        assert [item.what for item in found.unexpressed] == [*extra, "--stages"]
    plan = {"schedule": "interleaved", "vpp": 2, "recompute": "none", "global_batch": 32}
    for pp, what in ((1, "--vpp 2"), (2, "--pp 2, --schedule interleaved, --stages")):
        found = export.export_plan({**plan, "pp": pp, "dp": 8 // pp}, LLAMA, "deepspeed")
        assert [item.what for item in found.unexpressed] == [what, "llama2-7b: architecture"]


def published(framework):
    """Runs of a framework whose plan is stated: rows, and their plans without the batch."""
    rows = golden_rows("published_plans.csv")
    for row in (row for row in rows if framework in row["framework"]):
        plan = {name: int(row[name] or 1) for name in ("tp", "pp", "dp", "cp", "global_batch")}
        plan["recompute"] = row["recompute"] if row["recompute"] in ("none", "full") else "none"
        yield row, plan, LLAMA.replace(name=row["model"], layers=int(row["layers"]))


def test_published_plans_of_maxtext_come_out_as_their_flags():
    rows, checked = list(published("MaxText")), 0
    for row, plan, model in rows:
        devices, replicas = int(row["n_gpus"]), plan["dp"]
        sharing = int(row["fsdp"] or replicas)
        used = plan["cp"] * replicas * plan["tp"]
        if plan["pp"] > 1 or int(row["ep"] or 1) > 1 or used != devices:
            continue
        plan |= {"micro_batch": plan["global_batch"] // replicas, "zero": 3, "seq": int(row["seq"])}
        plan |= {"shard": sharing if sharing < replicas else None, "precision": row["precision"]}
        checked += 1
        model = model.replace(seq=plan["seq"])
        flags = settings_of(export.export_plan(plan, model, "maxtext").text)
        assert flags["ici_fsdp_parallelism"] == str(sharing)
        assert flags["ici_data_parallelism"] == str(replicas // sharing)
        assert flags["ici_context_parallelism"] == str(plan["cp"])
        width = int(flags.get("ici_tensor_parallelism", 1))
        assert width * int(flags.get("ici_tensor_sequence_parallelism", 1)) == plan["tp"]
        assert float(flags["per_device_batch_size"]) == plan["global_batch"] / devices
        assert flags["max_target_length"] == row["seq"]
        assert flags.get("quantization", "bf16") == row["precision"]
        assert (flags["remat_policy"] == "full") >= (row["recompute"] == "full")
    assert checked > len(rows) / 2


@pytest.mark.parametrize(
    ("devices", "node_devices", "nodes", "used"),
    [(16, 8, 2, 8), (4, 8, 1, 4), (12, 8, 3, 4), (9, 8, 9, 1), (2, 1, 2, 1)],
)
def test_nodes_are_filled_alike(devices, node_devices, nodes, used):
    plan = {"dp": devices, "global_batch": devices, "recompute": "none"}
    text = export.export_plan(plan, LLAMA, "megatron", node_devices).text
    assert f"torchrun --nnodes {nodes} --nproc-per-node {used} " in text


def test_a_recorded_graph_is_exported_as_the_transformer_that_it_is():
    graph = models.load(GOLDEN / "traced_llama.json")
    plan = {"tp": 2, "global_batch": 8, "recompute": "none"}
    texts = [
        export.export_plan(plan, m, "megatron").text for m in (graph, models.recognised(graph))
    ]
    assert texts[0] == texts[1]
    with pytest.raises(InvalidInputError, match="model: llama is a graph and not accepted"):
        export.export_plan(plan, graph.replace(as_traced=True), "megatron")


def test_a_node_has_a_device():
    with pytest.raises(InvalidInputError, match="node_devices: 0 is not accepted; expected 1"):
        export.export_plan({"global_batch": 1, "recompute": "none"}, LLAMA, "megatron", 0)


@pytest.mark.parametrize("format_", export.FORMATS)
def test_state_that_all_replicas_share_is_the_default(format_):
    plan = {"dp": 8, "global_batch": 8, "recompute": "none", "zero": 3}
    spec = pf.PlanSpec(**plan, shard=8)
    texts = [export.export_plan(given, LLAMA, format_).text for given in (plan, spec)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("widths", "degrees"),
    [
        ({}, [4, 1]),
        ({"tp": 2, "pp": 2}, [1, 4]),
        ({"tp": 2, "cp": 2}, [1, 4]),
        ({"zero": 2}, [1, 4]),
    ],
)
def test_torchtitan_replicates_weights_where_there_is_one_axis_alone(widths, degrees):
    plan = {"dp": 4, "global_batch": 8, "recompute": "none", **widths}
    job = tomllib.loads(export.export_plan(plan, LLAMA, "torchtitan").text)["parallelism"]
    assert [job[f"data_parallel_{name}_degree"] for name in ("replicate", "shard")] == degrees


def test_published_plans_come_out_as_their_flags():
    checked = 0
    for row, plan, model in published("egatron"):  # Megatron stands for NeMo too
        vpp = int(row["vp"] or 1)
        if model.layers % (plan["pp"] * vpp):
            continue
        plan |= {"micro_batch": int(row["micro_batch"]), "vpp": vpp}
        plan |= {"schedule": "interleaved" if vpp > 1 else "1f1b"}
        plan |= {"zero": 1 if "distributed optimizer" in row["zero_or_dist_opt"] else 0}
        plan |= {"sequence_parallel": row["sp"] == "1"}
        try:
            flags = options_of(export.export_plan(plan, model, "megatron").text)
        except InvalidInputError:
            continue  # widths in the table that do not divide its batch
        checked += 1
        assert flags["--tensor-model-parallel-size"] == [row["tp"]]
        assert flags["--pipeline-model-parallel-size"] == [row["pp"]]
        assert flags["--context-parallel-size"] == [row["cp"] or "1"]
        assert flags["--micro-batch-size"] == [row["micro_batch"]]
        assert flags["--global-batch-size"] == [row["global_batch"]]
        assert flags.get("--num-virtual-stages-per-pipeline-rank", ["1"]) == [str(vpp)]
        world = int(flags["--nnodes"][0]) * int(flags["--nproc-per-node"][0])
        assert world == plan["tp"] * plan["pp"] * plan["cp"] * plan["dp"]
        sequence = plan["sequence_parallel"] and plan["tp"] > 1
        assert ("--sequence-parallel" in flags) == sequence
    assert checked > 50


MEGATRON = """
GPUS=8  # a comment
torchrun --nproc_per_node 8 --nnodes=4 pretrain_gpt.py --num-layers 32 \\
  --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 \\
  --num-layers-per-virtual-pipeline-stage 4 --micro-batch-size 1 --global-batch-size 64 \\
  --sequence-parallel --use-distributed-optimizer --bf16 --lr 1e-4 --tp-comm-overlap
"""


def test_a_script_of_ones_own(tmp_path):
    path = tmp_path / "train.sh"
    path.write_text(MEGATRON)
    found = export.read_plan(path, LLAMA)
    spec = found.spec
    assert (spec.tp, spec.pp, spec.dp, spec.vpp, spec.zero) == (2, 4, 4, 2, 1)
    assert spec.stages == (5, 4, 4, 4, 4, 4, 4, 5)
    assert "--tp-comm-overlap" in found.notes[0]
    assert "--lr" in found.notes[0]


def test_embedding_and_loss_can_count_as_blocks_of_a_pipeline(tmp_path):
    path, model = tmp_path / "train.sh", LLAMA.replace(layers=30)
    words = "torchrun --nproc-per-node 4 pretrain_gpt.py --pipeline-model-parallel-size 4 "
    path.write_text(words + "--account-for-embedding-in-pipeline-split")
    with pytest.raises(InvalidInputError, match="30 blocks in 4 chunks is not accepted"):
        export.read_plan(path, model)
    path.write_text(f"{path.read_text()} --account-for-loss-in-pipeline-split")
    assert export.read_plan(path, model).spec.stages == (8, 8, 8, 8)


def test_maxtext_shards_among_the_devices_that_other_axes_leave(tmp_path):
    path = tmp_path / "train.sh"
    path.write_text(
        "python3 -m MaxText.train base.yml ici_tensor_parallelism=2 ici_expert_parallelism=4 "
        "per_device_batch_size=1 num_pipeline_repeats=2\n"
    )
    spec = export.read_plan(path, "mixtral-8x7b", 32).spec
    assert (spec.tp, spec.ep, spec.dp, spec.zero) == (2, 4, 16, 3)
    assert (spec.pp, spec.vpp) == (1, 1)  # repeats are of a pipeline


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            ("--tensor-model-parallel-size 2", "--tensor-model-parallel-size $TP"),
            "'$TP' is not accepted; expected a whole number (shell variables are not expanded)",
        ),
        (("--num-layers 32", "--num-layers 40"), "--num-layers: 40 is not accepted"),
        (("--nnodes=4", "--nnodes=1 --context-parallel-size 3"), "8 devices are not accepted"),
        (
            ("--nnodes=4", "--nnodes=1 --context-parallel-size 4"),
            "8 devices are not accepted; expected a multiple of tp x pp x cp = 2 x 4 x 4",
        ),
        (("--bf16", "--optimizer muon"), "--optimizer: 'muon' is not accepted"),
        (
            ("--bf16", "--bf16 --recompute-granularity selective --recompute-modules mlp"),
            "'mlp' is not accepted; expected some of core_attn, layernorm",
        ),
        (("--lr", "--lr '"), "not a shell command"),
    ],
)
def test_scripts_that_cannot_be_read(change, said, tmp_path):
    path = tmp_path / "train.sh"
    path.write_text(MEGATRON.replace(*change))
    with pytest.raises(InvalidInputError) as error:
        export.read_plan(path, LLAMA)
    assert said in str(error.value)
    assert str(error.value).startswith((str(path), "--"))
    assert "\n" not in str(error.value)


def test_two_dashes_alone_are_no_option():
    assert options_of("torchrun -- train.py --fast") == {"--fast": []}


def test_stages_of_an_encoder_and_a_decoder_without_chunks():
    plan = {"pp": 2, "vpp": 2, "dp": 1, "schedule": "zb-v", "global_batch": 8, "recompute": "none"}
    for layers, layout in ((6, None), (7, "Et*6|t*7L")):
        model = models.load("t5-small").replace(layers=layers)
        stages = (4, 3, 3, layers - 2)
        found = export.export_plan({**plan, "stages": stages}, model, "megatron")
        said = options_of(found.text).get("--pipeline-model-parallel-layout")
        assert said == (layout and [layout])
        assert "--num-virtual-stages-per-pipeline-rank" not in found.text


def test_whole_numbers_have_at_most_twelve_digits():
    assert whole_number("--seq-length", "9" * 12) == 10**12 - 1
    assert whole_number("--offset", "-1", least=-1) == -1
    for text in ("9" * 13, "-1", "1.0", ""):
        with pytest.raises(InvalidInputError, match="--seq-length: .* expected a whole number"):
            whole_number("--seq-length", text)


def test_files_are_told_apart(tmp_path):
    files = {
        "a.json": json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": 3}}),
        "b.json": json.dumps({"tp": 4, "global_batch": 8}),
        "c.yaml": "tp: 4\nglobal_batch: 8\n",
        "d.yaml": "model:\n  tensor_model_parallel_size: 2\ntrain:\n  global_batch_size: 8\n",
        "e.toml": "[training]\n",
        "f.sh": "python3 -m MaxText.train base.yml ici_tensor_parallelism=4\n",
        "g.sh": "python3 -m MaxText.train base.yml\n",
        "h.sh": "python3 -m maxtext.trainers.pre_train base.yml ici_tensor_parallelism=4\n",
        "i.sh": "torchrun pretrain_gpt.py\n",
        "j.sh": "torchrun train.py --tensor-model-parallel-size 2\n",
        "k.sh": "torchrun train.py\n",
        "l.yaml": "model:\n  hidden_size: 8\n",
        "m.yml": "model: tensor_model_parallel_size\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    found = [export.is_framework_file(tmp_path / name) for name in files]
    assert found == [True, False, False, *[True] * 7, False, False, False]
    assert export.read_plan(tmp_path / "g.sh", LLAMA, 8).spec.zero == 3
    assert export.read_plan(tmp_path / "h.sh", LLAMA, 8).spec.tp == 4
    read = export.read_plan(tmp_path / "d.yaml", LLAMA, devices=8).spec
    assert (read.tp, read.dp, read.global_batch) == (2, 4, 8)
    assert export.read_plan(tmp_path / "a.json", LLAMA).spec.zero == 3
    with pytest.raises(InvalidInputError, match="no file of a training framework"):
        export.read_plan(tmp_path / "b.json", LLAMA)


@pytest.mark.parametrize(("pp", "batch", "rounds"), [(2, 64, 4), (2, 16, 1), (1, 64, 1)])
def test_torchtitan_fills_the_pipeline_once_for_every_local_batch(pp, batch, rounds, tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(
        f"[training]\nlocal_batch_size = 8\nglobal_batch_size = {batch}\n"
        f"[parallelism]\npipeline_parallel_degree = {pp}\ndata_parallel_shard_degree = 2\n"
        '[activation_checkpoint]\nmode = "none"\n'
    )
    notes = export.read_plan(path, LLAMA).notes
    assert len(notes) == (rounds > 1)
    assert all(f"filled and drained {rounds} times a step" in note for note in notes)


@pytest.mark.parametrize(
    ("parallelism", "training", "found"),
    [
        ("shard = 2", "", (2, 3, None, 16)),
        ("shard = 2", "global = -1", (2, 3, None, 16)),
        ("shard = 2", "global = 32", (2, 3, None, 32)),
        ("replicate = 2, shard = 1", "", (2, 0, None, 16)),
        ("replicate = 2, shard = 2", "", (4, 3, 2, 32)),
        ("replicate = 2", "", (8, 3, 4, 64)),  # what the devices leave
        ("shard = 0", "", "dp: 0 is not accepted"),
        ("shard = -2", "", "shard_degree: -2 is not accepted"),
        ("shard = 2", "global = 0", "global_batch: 0 is not accepted"),
        ("shard = 2", "local = 0", "global_batch: 0 is not accepted"),
        ("replicate = 16", "", "8 devices are not a multiple of 1 x 1 x 1 x 16"),
    ],
)
def test_replicas_and_batches_of_torchtitan(parallelism, training, found, tmp_path):
    path = tmp_path / "job.toml"
    widths = parallelism.replace(" = ", "_degree = ").replace(", ", "\ndata_parallel_")
    batches = training.replace(" = ", "_batch_size = ")
    path.write_text(
        f"[parallelism]\ndata_parallel_{widths}\n[training]\n{batches}\n"
        '[activation_checkpoint]\nmode = "none"\n'
    )
    if isinstance(found, str):
        with pytest.raises(InvalidInputError, match=found):
            export.read_plan(path, LLAMA, 8)
        return
    spec = export.read_plan(path, LLAMA, 8).spec
    assert (spec.dp, spec.zero, spec.shard, spec.global_batch) == found


@pytest.mark.parametrize("axes", ["tensor pipeline", "tensor context", "context pipeline"])
def test_torchtitan_shards_among_the_devices_that_other_axes_leave(axes, tmp_path):
    path = tmp_path / "job.toml"
    widths = "".join(f"{axis}_parallel_degree = 2\n" for axis in axes.split())
    path.write_text(f'[activation_checkpoint]\nmode = "none"\n[parallelism]\n{widths}')
    spec = export.read_plan(path, LLAMA, 8).spec
    assert (spec.dp, spec.zero, spec.shard) == (2, 2 if "pipeline" in axes else 3, None)
    with pytest.raises(InvalidInputError, match="10 devices are not a multiple of"):
        export.read_plan(path, LLAMA, 10)
    path.write_text(f"{path.read_text()}data_parallel_replicate_degree = 2\n")
    spec = export.read_plan(path, LLAMA, 16).spec
    assert (spec.dp, spec.shard) == (4, 2)


def test_torchtitan_is_told_of_an_axis_only_where_it_is_wider_than_one():
    plan = {"dp": 2, "zero": 3, "global_batch": 8, "recompute": "none"}
    several = {**plan, "pp": 2, "cp": 2, "ep": 2}
    jobs = [
        tomllib.loads(export.export_plan(given, models.load("mixtral-8x7b"), "torchtitan").text)
        for given in (plan, several)
    ]
    alone, more = (set(job["parallelism"]) for job in jobs)
    assert more - alone == {
        "context_parallel_rotate_method",
        "expert_tensor_parallel_degree",
        "pipeline_parallel_schedule",
        "pipeline_parallel_microbatch_size",
        "module_fqns_per_model_part",
    }
    assert alone < more


def test_fp8_of_experts_reads_back_from_torchtitan(tmp_path):
    model, path = models.load("mixtral-8x7b"), tmp_path / "job.toml"
    plan = {"dp": 8, "zero": 3, "global_batch": 8, "recompute": "none", "precision": "fp8-rowwise"}
    path.write_text(export.export_plan(plan, model, "torchtitan").text)
    assert export.read_plan(path, model).spec.precision.name == "fp8-rowwise"


def test_a_plan_has_to_say_its_stages():
    for given, said in (
        ({"recompute": "auto"}, "recompute: auto is not accepted"),
        ({"recompute": "none", "pp": 3}, "stages: missing"),
        ({"recompute": "none", "stages": (30,)}, "stages: 30 layers are not accepted"),
    ):
        with pytest.raises(InvalidInputError, match=said):
            export.export_plan({"global_batch": 8, **given}, LLAMA, "megatron")
    with pytest.raises(InvalidInputError, match="did you mean 'megatron'"):
        export.export_plan({"global_batch": 8}, LLAMA, "megatrn")


def test_the_formats_of_a_mixture_of_experts():
    model = models.load("mixtral-8x7b")
    plan = {"tp": 2, "ep": 4, "dp": 4, "global_batch": 8, "recompute": "activations+gated-product"}
    flags = options_of(export.export_plan(plan, model, "megatron").text)
    assert flags["--num-experts"] == ["8"]
    assert flags["--expert-model-parallel-size"] == ["4"]
    assert flags["--recompute-modules"] == ["moe_act"]
    cluster = pf.Cluster(devices=8, fabric="dgx-h100", chip="h100")
    assert pf.predict(model, cluster, plan).ep == 4


def test_experts_beyond_the_replicas_are_not_a_mesh_of_maxtext():
    """Experts folded over context-parallel devices: MaxText's are groups of replicas."""
    model = models.load("mixtral-8x7b")
    cluster = pf.Cluster(devices=8, fabric="dgx-h100", chip="h100")
    given = {"cp": 8, "ep": 8, "global_batch": 8, "zero": 3, "recompute": "full"}
    plan = pf.predict(model, cluster, given)
    words = [item.what for item in export.export_plan(plan, model, "maxtext").unexpressed]
    assert words == ["--ep 8"]
    assert "ep" not in [
        item.what for item in export.export_plan(plan, model, "megatron").unexpressed
    ]


@pytest.mark.parametrize(
    ("widths", "gathered"),
    [({"dp": 8, "ep": 2}, True), ({"dp": 8}, False), ({"dp": 1, "cp": 8, "ep": 8}, False)],
)
def test_maxtext_gathers_rows_of_expert_groups_that_it_has(widths, gathered):
    given = {"global_batch": 8, "zero": 3, "recompute": "full", "dispatcher": "all-gather"}
    text = export.export_plan({**given, **widths}, models.load("mixtral-8x7b"), "maxtext").text
    assert ("use_ring_of_experts=True" in text) == gathered


@pytest.mark.parametrize(
    ("zero", "shard", "size"), [(3, 4, 4), (3, None, None), (1, 4, None), (2, 4, None)]
)
def test_deepspeed_shards_weights_among_some_replicas(zero, shard, size):
    plan = {"dp": 8, "global_batch": 8, "recompute": "none", "zero": zero, "shard": shard}
    said = json.loads(export.export_plan(plan, LLAMA, "deepspeed").text)["zero_optimization"]
    assert (said["stage"], said.get("mics_shard_size")) == (zero, size)


@pytest.mark.parametrize("ep", [1, 2])
def test_the_load_of_experts_is_of_groups_of_several_devices(ep):
    plan = {"dp": 8, "ep": ep, "global_batch": 8, "recompute": "none", "expert_imbalance": 1.5}
    found = export.export_plan(plan, models.load("mixtral-8x7b"), "megatron").unexpressed
    assert [item.what for item in found] == ["--expert-imbalance 1.5"] * (ep - 1)


def test_a_switch_that_is_off_is_named_as_one():
    plan = {"tp": 2, "dp": 4, "global_batch": 8, "zero": 2, "recompute": "none"}
    for to, on in (("torchtitan", False), ("deepspeed", True)):
        found = export.export_plan({**plan, "sequence_parallel": on}, LLAMA, to)
        option = "--sequence-parallel" if on else "--no-sequence-parallel"
        assert option in [item.what for item in found.unexpressed]


@pytest.mark.parametrize("etp", [None, 1])
def test_torchtitan_is_told_the_width_of_experts(etp, tmp_path):
    model, path = models.load("mixtral-8x7b"), tmp_path / "job.toml"
    plan = {
        "tp": 2,
        "dp": 4,
        "ep": 4,
        "etp": etp,
        "global_batch": 8,
        "zero": 2,
        "recompute": "none",
    }
    found = export.export_plan(plan, model, "torchtitan")
    path.write_text(found.text)
    spec = export.read_plan(path, model).spec
    assert (spec.ep, spec.etp or spec.tp) == (4, etp or 2)
    dense = export.export_plan({**plan, "ep": 1, "etp": None}, LLAMA, "torchtitan").text
    assert ("expert_tensor_parallel_degree" in found.text, "expert_tensor" in dense) == (
        True,
        False,
    )


@pytest.mark.parametrize(("name", "experts"), [("llama2-7b", False), ("mixtral-8x7b", True)])
def test_torchtitan_converts_linear_layers_and_experts_apart(name, experts):
    plan = {"dp": 8, "global_batch": 8, "zero": 3, "recompute": "none", "precision": "fp8-rowwise"}
    job = tomllib.loads(export.export_plan(plan, models.load(name), "torchtitan").text)
    sections = ["quantize.linear.float8", "quantize.grouped_mm.float8"][: 1 + experts]
    assert job["model"]["converters"] == sections
    assert job["quantize"]["linear"]["float8"]["recipe_name"] == "rowwise"
    assert ("grouped_mm" in job["quantize"]) == experts


def test_megatron_fsdp_is_told_its_format_of_checkpoints_and_its_order_of_ranks():
    plan = {"pp": 2, "dp": 4, "global_batch": 8, "recompute": "none", **STAGES_INSIDE}
    for zero in range(4):
        found = export.export_plan({**plan, "zero": zero}, LLAMA, "megatron")
        assert ("--use-tp-pp-dp-mapping" in found.text) == (zero < 2)
        assert ("--ckpt-format fsdp_dtensor" in found.text) == (zero >= 2)
        named = {item.what.split()[0] for item in found.unexpressed}
        assert ("--rank-order" in named) == (zero >= 2)


SHARED, OFFLOADED, FSDP = (
    f"--{name}"
    for name in ("use-distributed-optimizer", "optimizer-cpu-offload", "use-megatron-fsdp")
)


@pytest.mark.parametrize(
    ("plan", "switches", "instances"),
    [
        ({"dp": 8}, set(), None),
        ({"dp": 8, "zero": 1}, {SHARED}, None),
        ({"dp": 8, "zero": 1, "shard": 4}, {SHARED}, ["2"]),
        ({"dp": 8, "zero": 2}, {SHARED, FSDP}, None),
        ({"dp": 8, "zero": 3, "shard": 2}, {SHARED, FSDP}, ["4"]),
        ({"dp": 8, "zero": 1, "offload_optimizer": True}, {SHARED, OFFLOADED}, None),
        ({"dp": 8, "zero": 3, "offload_optimizer": True}, {SHARED, FSDP}, None),
        ({"tp": 2, "zero": 1}, set(), None),
        ({"tp": 2, "zero": 1, "offload_optimizer": True}, {SHARED, OFFLOADED}, None),
    ],
)
def test_where_megatron_keeps_the_state_of_the_optimiser(plan, switches, instances):
    given = {"global_batch": 8, "recompute": "none", **plan}
    said = options_of(export.export_plan(given, LLAMA, "megatron").text)
    assert {SHARED, OFFLOADED, FSDP} & set(said) == switches
    assert said.get("--num-distributed-optimizer-instances") == instances


@pytest.mark.parametrize(
    ("widths", "reduced"),
    [
        ({"tp": 4, "etp": 1, "ep": 4}, False),
        ({"tp": 4, "etp": 1, "ep": 2}, True),  # two devices have the same experts
        ({"tp": 4}, False),
        ({"tp": 2, "dp": 2}, True),
        ({"tp": 2, "cp": 2}, True),
        ({"dp": 2, "cp": 2}, True),
    ],
)
def test_gradients_are_reduced_where_two_devices_have_the_same_weights(widths, reduced):
    plan = {"global_batch": 8, "recompute": "none", **widths}
    for name in ("mixtral-8x7b", "llama2-7b"):
        if name == "mixtral-8x7b" or "ep" not in widths:
            text = export.export_plan(plan, models.load(name), "megatron").text
            assert ("--overlap-grad-reduce" in text) == reduced


STAGES_INSIDE = {"rank_order": "stages-inside"}


@pytest.mark.parametrize(
    ("framework", "widths", "layout", "cases"),
    [
        ("megatron", {}, {"dp": 4, "pp": 2, "zero": 2, **STAGES_INSIDE}, {"rank_order"}),
        ("megatron", {}, {"dp": 4, "pp": 2, "zero": 1, **STAGES_INSIDE}, set()),
        ("maxtext", {"tp": 2, "ep": 4, "etp": 1}, {"dp": 2, "zero": 3}, {"etp", "ep"}),
        ("maxtext", {"ep": 4}, {"dp": 8, "zero": 3}, set()),
        ("megatron", {}, {"dp": 4, "zero": 1, "schedule": "zb-h1"}, set()),
        ("torchtitan", {}, {"dp": 4, "zero": 3, "schedule": "zb-h1"}, set()),
        ("torchtitan", {}, {"pp": 2, "dp": 4, "zero": 3, "schedule": "zb-h1"}, {"schedule"}),
        ("maxtext", {}, {"dp": 4, "zero": 3, "schedule": "zb-h1"}, set()),
        ("maxtext", {"ep": 4}, {"dp": 8, "zero": 3, "shard": 4}, set()),
        ("torchtitan", {"tp": 2, "ep": 4, "etp": 1}, {"dp": 4, "zero": 3}, set()),
        ("torchtitan", {"tp": 4, "etp": 2}, {"dp": 4, "zero": 3}, {"etp"}),
        ("torchtitan", {"tp": 4, "etp": 1}, {"dp": 4, "zero": 3}, {"etp"}),
    ],
)
def test_what_a_framework_cannot_express_by_hand(framework, widths, layout, cases):
    strategy = {"tp": 1, "cp": 1, "cp_kind": "all-gather", "ep": 1, "etp": None} | widths
    spec = pf.PlanSpec(**strategy, **layout, global_batch=8 * layout["dp"])
    found = inexpressible(framework, spec.strategy, spec.layout)
    assert {case for case, applies in found.items() if applies.any()} == cases


@pytest.mark.parametrize(
    ("format_", "plan", "words"),
    [
        ("megatron", {"zero": 1, "offload_optimizer": True}, ["--optimizer-cpu-offload"]),
        ("bridge", {"zero": 1, "offload_optimizer": True}, ["optimizer.optimizer_cpu_offload=true"]),
        ("deepspeed", {"zero": 3, "offload_optimizer": True}, ['"device": "cpu"']),
        ("megatron", {"recompute": "offload:3"}, ["--cpu-offloading-num-layers 3"]),
        ("bridge", {"recompute": "offload:3"}, ["model.cpu_offloading_num_layers=3"]),
        ("maxtext", {"zero": 3, "recompute": f"{AGAIN}+offload"}, ["decoder_layer_input=offload"]),
        ("megatron", {"cp": 4, "cp_kind": "ulysses:2/ring"},
         ["--cp-comm-type a2a+p2p", "--hierarchical-context-parallel-sizes 2 2"]),
        ("bridge", {"cp": 4, "cp_kind": "ulysses:2/ring"},
         ["model.cp_comm_type=a2a+p2p", "context_parallel_sizes=[2, 2]"]),
    ],
)  # fmt: skip
def test_offloading_and_mixed_context_kinds_are_written_and_read(format_, plan, words, tmp_path):
    given = {"dp": 4, "global_batch": 32, "recompute": "none", **plan}
    written = export.export_plan(given, LLAMA, format_)
    assert written.plan_complete, written.text
    text = written.text.replace("'", "")
    assert all(word in text for word in words), written.text
    path = tmp_path / f"run{SUFFIX.get(format_, '.sh')}"
    path.write_text(written.text)
    spec = export.read_plan(path, LLAMA, 4 * given.get("cp", 1)).spec
    cluster = pf.Cluster(devices=spec.devices, fabric="dgx-h100", chip="h100")
    both = [pf.predict(LLAMA, cluster, one) for one in (given, spec.replace(idle=False))]
    assert both[0].time_s == pytest.approx(both[1].time_s, rel=1e-12)
    assert both[0].memory_bytes == pytest.approx(both[1].memory_bytes, rel=1e-12)


@pytest.mark.parametrize("format_", ["megatron", "bridge", "maxtext", "torchtitan"])
def test_how_rows_reach_experts_is_written_and_read(format_, tmp_path):
    model = models.load("mixtral-8x7b")
    given = {"dp": 8, "ep": 2, "global_batch": 32, "zero": 3, "recompute": "full"}
    for dispatcher in ("all-to-all", "all-gather"):
        plan = {**given, "dispatcher": dispatcher}
        written = export.export_plan(plan, model, format_)
        complete = format_ != "torchtitan" or dispatcher == "all-to-all"
        assert written.plan_complete == complete
        path = tmp_path / f"run{SUFFIX.get(format_, '.sh')}"
        path.write_text(written.text)
        read = export.read_plan(path, model, 8).spec
        assert (read.dispatcher == dispatcher) == complete
    for ep, said in ((2, True), (1, False)):
        hidden = export.export_plan({**given, "ep": ep, "expert_overlap": 0.5}, model, format_)
        assert ("--expert-overlap 0.5" in [item.what for item in hidden.unexpressed]) == said
    silent = "pretrain_gpt.py --tensor-model-parallel-size 1 --expert-model-parallel-size 2"
    (tmp_path / "own.sh").write_text(f"torchrun --nproc-per-node 8 {silent}")
    assert export.read_plan(tmp_path / "own.sh", model).spec.dispatcher == "all-gather"
