"""What tests of `phaze-fast wafer` start from: files of wafers, and a cache of each test's own."""

import json

import pytest
from wafer_cli_cases import DRAM, SMALL

from phaze_fast.cli.main import main
from phaze_fast.wafer import load_wafer_space


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("PHAZE_FAST_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def run(capsys):
    def call(*words):
        code = main([str(word) for word in ("wafer", *words)])
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files of a small wafer, a tiny one, and a space of wafers."""
    place = tmp_path_factory.mktemp("wafers")
    (place / "small.yaml").write_text(SMALL.to_yaml())
    (place / "two.yaml").write_text(DRAM.replace(name="two", columns=2, rows=1).to_yaml())
    (place / "dead.yaml").write_text(SMALL.replace(dead=((2, 1),)).to_yaml())
    space = load_wafer_space("wafer-space").replace(
        base=DRAM.replace(columns=2, rows=2),
        axes={"die.hbm_stacks": [1, 2], "die.d2d_modules_x": [4, 14]},
        ties={},
    )
    (place / "space.json").write_text(json.dumps(space.to_dict()))
    return place


@pytest.fixture
def small(folder):
    return folder / "small.yaml"


@pytest.fixture
def two(folder):
    return folder / "two.yaml"
