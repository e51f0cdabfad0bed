"""What takes a plan's file: `export`, and `explain` alone, against a plan, a wish or a profile."""

import json

import pytest
from golden_files import refused_calls

PREDICT = "predict Llama2-7B --chip H100 --devices 16"


@pytest.fixture
def plan(run, tmp_path):
    path = tmp_path / "plan.json"
    line = f"{PREDICT} --global-batch 32 --tp 2 --pp 4 --dp 2 --zero 1 --recompute full -o {path}"
    assert run(line)[0] == 0
    data = json.loads(path.read_text())
    assert data["model"]["name"] == "llama2-7b"
    assert data["cluster"]["devices"] == 16
    assert data["plan"]["tp"] == 2
    return path


@pytest.mark.parametrize("to", ["megatron", "Bridge", "deepspeed", "torchtitan", "maxtext"])
def test_export_writes_a_file_that_predict_reads(run, refused, document, plan, to, tmp_path):
    suffix = {"torchtitan": "toml", "deepspeed": "json"}.get(to, "sh")
    path = tmp_path / f"run.{suffix}"
    code, _, said = run("export", plan, "--to", to, "-o", path)
    assert code == 0
    assert f"wrote {path}" in said
    found = document(f"{PREDICT} --plan {path}")
    if "not expressed" not in said:
        first = json.loads(plan.read_text())
        assert found["time_s"] == pytest.approx(first["time_s"], rel=1e-12)
    assert ("not expressed" not in said) == (to in ("megatron", "Bridge"))
    before = plan.read_bytes()
    assert "-o: " in refused("export", plan, "--to", to, "-o", plan)
    assert plan.read_bytes() == before


def test_export_to_traces(run, refused, plan, tmp_path):
    code, out, _ = run("export", plan, "--to", "perfetto")
    assert code == 0
    assert json.loads(out)["traceEvents"]
    pytest.importorskip("google.protobuf")
    folder = tmp_path / "et"
    assert run("export", plan, "--to", "chakra", "-o", folder, "--ranks", "0-2,9")[0] == 0
    names = sorted(p.name for p in folder.iterdir())
    assert names == ["comm_group.json", *(f"plan.{k}.et" for k in (0, 1, 2, 9))]
    assert "-o: missing" in refused("export", plan, "--to", "chakra")
    said = refused("export", plan, "--to", "chakra", "-o", folder, "--ranks", "a")
    assert "--ranks: 'a' is not accepted" in said
    assert "'5-2' is not accepted" in refused(
        "export", plan, "--to", "chakra", "-o", folder / "new", "--ranks", "5-2"
    )
    said = refused("export", plan, "--to", "chakra", "-o", folder / "new", "--ranks", "0-99")
    assert "rank: 99 is not accepted" in said
    assert not (folder / "new").exists()


def test_explain_alone_and_against_another_plan(run, document, plan, tmp_path):
    found = document("explain", plan)
    assert found["binds"]
    assert {"what", "elasticity", "doubled"} <= set(found["worth"][0])
    other, page = tmp_path / "b.json", tmp_path / "diff.html"
    line = f"{PREDICT} --global-batch 32 --tp 4 --pp 2 --dp 2 --recompute full -o {other}"
    assert run(line)[0] == 0
    found = document("explain", plan, "--against", other, "--report", page)
    assert found["fields"]["tp"] == [2, 4]
    assert "model" not in found["fields"]
    elsewhere = f"predict gpt2-small --chip a100-80 --devices 8 --global-batch 32 --dp 8 -o {other}"
    assert run(elsewhere)[0] == 0
    fields = document("explain", plan, "--against", other)["fields"]
    assert fields["chip"] == ["h100", "a100-80"]
    assert fields["model"][1] == "gpt2-small" != fields["model"][0]
    assert page.read_text().startswith("<!doctype html>")


def test_why_not_some_other_plan_of_the_same_step(run, document, tmp_path):
    path = tmp_path / "plan.json"
    line = "plan gpt2-small --chip h100 --devices 4 --global-batch 8 --why-not tp=2"
    assert run(line, "-o", path)[0] == 0
    first = json.loads(path.read_text())["why_not"]
    again = document("explain", path, "--why-not", "tp=2")
    assert again == first
    assert again["slower_by"] > 0
    assert "takes" in run("explain", path, "--why-not", "tp=2")[1]


def test_a_profile_against_the_prediction(document, refused, plan, tmp_path):
    profile = tmp_path / "profile.json"
    events = [{"ph": "X", "cat": "kernel", "name": "sm90_gemm", "ts": 0.0, "dur": 1000.0}]
    profile.write_text(json.dumps({"traceEvents": events}))
    found = document("explain", plan, "--trace", profile)
    assert found["measured_step_s"] == pytest.approx(1e-3)
    said = refused("explain", plan, "--trace", profile, "--stage", "9")
    assert "--stage: 9 is not accepted" in said


@pytest.mark.parametrize(("line", "said"), refused_calls("explain and export commands"))
def test_what_is_refused(refused, line, said):
    assert said in refused(line)
