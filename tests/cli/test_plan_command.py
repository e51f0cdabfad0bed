"""`phaze-fast plan`: what it shows, writes and refuses."""

import json

from phaze_fast.cli.main import main


def test_the_command_line(capsys, tmp_path):
    words = ["plan", "gpt2-small", "--chip", "h100", "--devices", "8", "--global-batch", "32"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    for word in ("tokens/s", "MFU", "stage by stage", "activations", "Where the fastest"):
        assert word in shown
    out = tmp_path / "plan.json"
    assert main([*words, "--json", "-o", str(out)]) == 0
    data = json.loads(out.read_text())
    keys = {"tp", "pp", "dp", "cp", "ep", "zero", "microbatch", "recompute", "time_s"}
    keys |= {"memory_bytes", "tokens_per_s", "mfu", "stages"}
    assert keys <= set(data["plans"][0])
    assert isinstance(data["rejected"], dict)
    capsys.readouterr()
    for bad, said in (
        (["--tp", "x"], "tp: 'x' is not accepted"),
        (["--schedule", "best"], "schedule"),
        (["--recompute", "some"], "recompute"),
        (["--optimizer", "lion"], "optimizer"),
        (["--zero", "4"], "zero"),
        (["--devices", "0"], "devices"),
        (["--fabric", "none"], "fabric"),
    ):
        assert main([*words, *bad]) == 2
        assert said in capsys.readouterr().err
    large = ["plan", "gpt3-175b", "--chip", "h100", "--devices", "8", "--microbatch", "1"]
    assert main([*large, "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["status"] == "infeasible"
    assert answer["plans"] == []
    assert answer["rejected"]
