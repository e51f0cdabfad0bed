"""Models at the command line: folders, graphs, and the sequence length that nobody chose."""

import json
from pathlib import Path

import pytest

from phaze_fast.cli.main import main

GRAPH = Path(__file__).parents[1] / "golden" / "traced_llama.json"
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 131072,
}


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "my-llama"
    place.mkdir()
    (place / "config.json").write_text(json.dumps(LLAMA))
    return place


def test_a_default_sequence_length_is_said(folder, capsys):
    assert main(["show", "model", "--operators", str(folder), "--json"]) == 0
    said = capsys.readouterr()
    assert "my-llama: seq 4096: the smaller of the context window of 131072" in said.err
    assert json.loads(said.out)["model"] == "my-llama"
    assert main(["show", "model", "--operators", str(folder), "--seq", "512", "--json"]) == 0
    assert "context window" not in capsys.readouterr().err


def test_a_graph_is_shown_and_refused_where_there_is_no_rule(capsys, tmp_path):
    assert main(["show", "model", str(GRAPH)]) == 0
    shown = capsys.readouterr().out
    assert "model.layers.0" in shown
    assert "a transformer of 4 blocks of 512, 8 heads" in shown
    assert (
        main(
            [
                "show",
                "model",
                "--operators",
                str(GRAPH),
                "--tp",
                "2",
                "--sequence-parallel",
                "--json",
            ]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["parameters"] > 0
    raw = tmp_path / "raw.json"
    raw.write_text(json.dumps({**json.loads(GRAPH.read_text()), "as_traced": True}))
    assert main(["wafer", str(raw)]) == 2
    assert "llama is a traced graph" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("target", "line"),
    [
        ("nothing", "target: 'nothing' is not accepted; expected package.module:function"),
        ("no.such.module:f", "target: 'no.such.module:f': No module named"),
        ("missing.py:f", "missing.py: there is no such file"),
        ("json:dumps2", "target: 'json:dumps2':"),
    ],
)
def test_bad_targets_of_trace(target, line, capsys):
    assert main(["trace", target]) == 2
    said = capsys.readouterr().err
    assert line in said
    assert len(said.splitlines()) == 1
