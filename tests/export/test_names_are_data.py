"""Names that come from files are data: no exported file, table or CSV lets one act."""

import csv
import io
import shlex
import tomllib
from dataclasses import dataclass

import pytest

import phaze_fast as pf
from phaze_fast import export
from phaze_fast.errors import InvalidInputError, printable
from phaze_fast.tables import Table

PLAN = {"tp": 2, "global_batch": 8, "recompute": "none"}
QUOTED = ["it's", 'a "b"', "$(touch owned)", "`id`", "a; rm -rf .", "#", "x\\", "=1+1", "日本"]
UNPRINTABLE = ["a\ntouch owned", "a\r\nb", "\x1b[2J", "a\x00b", "a\u2028b", "a\tb", "a\x7f"]


@pytest.mark.parametrize("name", UNPRINTABLE)
def test_a_name_with_control_characters_is_refused(name):
    with pytest.raises(InvalidInputError, match=r"name: .* is not accepted; expected printable"):
        pf.models.load("llama2-7b").replace(name=name)
    with pytest.raises(InvalidInputError, match="name: "):
        pf.presets.chip("h100").replace(name=name)


@pytest.mark.parametrize("name", QUOTED)
@pytest.mark.parametrize("format_", export.FORMATS)
def test_a_name_stays_data_in_an_exported_file(format_, name):
    usual = pf.models.load("llama2-7b").replace(name="plain")
    texts = [export.export_plan(PLAN, m, format_).text for m in (usual, usual.replace(name=name))]
    if format_ == "torchtitan":
        plain, named = map(tomllib.loads, texts)
        assert plain == _renamed(named, name)
    else:  # a shell sees the same words
        plain, named = (shlex.split(t.replace("\\\n", " "), comments=True) for t in texts)
        assert plain == [word.replace(name, "plain") for word in named]


def _renamed(value, name):
    if isinstance(value, dict):
        return {k: _renamed(v, name) for k, v in value.items()}
    return value.replace(name, "plain") if isinstance(value, str) else value


def test_writers_escape_what_records_refuse():
    assert printable("a\nb\x1b") == r"a\nb\x1b"
    model = pf.models.load("llama2-7b").model_copy(update={"name": "a\ntouch owned"})
    for format_ in export.FORMATS:
        text = export.export_plan(PLAN, model, format_).text
        assert "\ntouch owned" not in text


@dataclass(frozen=True)
class Cells(Table):
    cells: tuple[object, ...]

    def to_columns(self):
        return {"cell": self.cells}


def test_a_spreadsheet_runs_no_cell(tmp_path):
    risky = ["=HYPERLINK(1)", "+1", "-2+3", "@x"]
    Cells((*risky, "-", "plain", -1.5)).to_csv(tmp_path / "cells.csv")
    rows = list(csv.reader(io.StringIO((tmp_path / "cells.csv").read_text())))[1:]
    assert [row[0] for row in rows] == [*(f"'{text}" for text in risky), "-", "plain", "-1.5"]
