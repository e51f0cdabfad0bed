"""Published figures beside ours: what is missing is said, tables come out in three forms."""

import json

import pytest

from phaze_fast.cli.main import main
from phaze_fast.errors import InvalidInputError
from phaze_fast.reproduce import Reproduced, Row, reproduce


def test_a_table_in_latex_and_csv(tmp_path):
    rows = (Row("a, 50%", None, 2.0, None, "why"), Row("b", 1.5, 1.25, 1.0, "why"))
    found = Reproduced("tmac", "source", "measure", rows)
    text = found.to_latex()
    assert r"a, 50\% & -- & 2.00 & -- \\" in text
    assert text.startswith(r"\begin{tabular}")
    found.to_csv(tmp_path / "t.csv")
    assert (tmp_path / "t.csv").read_text().splitlines()[0] == "case,published,ours,honest,why"


def test_unknown_papers_and_models():
    with pytest.raises(InvalidInputError, match="did you mean 'phaze'"):
        reproduce("phase")
    with pytest.raises(InvalidInputError, match="models: 'gpt2' is not accepted"):
        reproduce("nest", models=["gpt2"])


def test_a_case_of_nest(capsys):
    assert main(["study", "reproduce", "nest", "--models", "llama3-70b", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"][0]["published"] == pytest.approx(20.51 / 9.92)
    assert found["rows"][0]["ours"] is None
    assert found["rows"][0]["honest"] >= 1.0
    assert "not in this package" in found["rows"][0]["why"]
