"""Measured steps on one device: both kinds of file, and rows that are not right."""

import json

import pytest

from phaze_fast.calibration import validate_steps
from phaze_fast.cli.main import main
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import presets

H200 = presets.chip("h200")
# Four of this project's measurements on one H200, PyTorch 2.11, 2026.
STEPS = """model,layers,seq,mbs,accum,recompute,step_ms,peak_bytes,params
opt1.3b,24,2048,4,1,False,137.043,24010001408,1414516736
opt1.3b,24,2048,4,1,True,167.316,11901545472,1414516736
llama2-7b,8,4096,1,1,False,87.305,17247788032,1881219072
nobody,8,4096,1,1,False,87.305,17247788032,1881219072
"""
HF = """model,seq,mbs,recompute,mode,step_ms,peak_bytes,params
gpt2-medium,1024,8,none,eager,86.355,19345397248,357968896
gpt2-medium,1024,8,full,eager,113.821,8460217856,357968896
"""
CONFIGS = {
    "gpt2-medium": {
        "architecture": "GPT2", "n_embd": 1024, "n_layer": 24, "n_head": 16, "vocab_size": 50257,
        "n_positions": 4096, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    }
}  # fmt: skip


def test_steps_written_by_hand(tmp_path):
    path = tmp_path / "steps.csv"
    path.write_text(STEPS)
    found = validate_steps(path, H200)
    assert found.columns["step_ms"].rows == 3
    assert found.columns["step_ms"].mean_abs_err < 0.08
    assert len(found.refused) == 1
    assert "row 5: model: 'nobody'" in found.refused[0]


def test_huggingface_steps_and_their_configurations(tmp_path, capsys):
    path = tmp_path / "hf.csv"
    path.write_text(HF)
    with pytest.raises(InvalidInputError, match=r"hf_configs.json.*--configs"):
        validate_steps(path, H200)
    (tmp_path / "hf_configs.json").write_text(json.dumps(CONFIGS))
    beside = validate_steps(path, H200)
    assert beside.columns["step_ms"].mean_abs_err < 0.12
    elsewhere = tmp_path / "other.json"
    (tmp_path / "hf_configs.json").rename(elsewhere)
    arguments = ["study", "validate", str(path), "--configs", str(elsewhere), "--json"]
    assert main(arguments) == 0
    columns = json.loads(capsys.readouterr().out)["columns"]
    assert set(columns) == {"step_ms", "peak_bytes"}
    assert columns["step_ms"]["rows"] == 2
    assert columns["step_ms"]["mean_abs_err"] == beside.columns["step_ms"].mean_abs_err


def test_a_file_without_a_good_row_is_refused(tmp_path):
    path = tmp_path / "steps.csv"
    path.write_text("\n".join([STEPS.splitlines()[0], STEPS.splitlines()[-1]]))
    with pytest.raises(InvalidInputError, match="no row is accepted"):
        validate_steps(path, H200)
