"""Reading and refusing files: every fault is one line that names field, value and what is accepted."""

import json
import pickle
from pathlib import Path

import pytest
import yaml
from golden_files import GOLDEN, golden_yaml, refused_calls
from refusals import refusal

from phaze_fast import documents, models
from phaze_fast.documents import digest, parse_text, read_document
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import (
    Accelerator,
    Cluster,
    FlatFabric,
    SpaceSpec,
    TensorCore,
    fabric_record,
    presets,
)
from phaze_fast.schemas import parse_as

REFUSED = golden_yaml("refused_files.yaml")
GOOD = {kind: entry["base"] for kind, entry in REFUSED.items()}
GOOD["model"] = models.load(GOOD["model"]).to_dict()
GOOD["graph"] = models.load(GOLDEN / GOOD["graph"]).to_dict()


def changed(data, changes):
    """Return plain data with some values changed, at any depth, or left out."""
    if not isinstance(data, dict) or not isinstance(changes, dict):
        return changes
    whole = {**data, **{key: changed(data.get(key), value) for key, value in changes.items()}}
    return {key: value for key, value in whole.items() if value != "<absent>"}


@pytest.mark.parametrize(
    ("kind", "changes", "line"),
    [(kind, *case) for kind, entry in REFUSED.items() for case in entry["refused"]],
)
def test_every_kind_of_file_says_in_one_line_what_is_wrong(kind, changes, line):
    data = changed(GOOD[kind], changes)
    message = refusal(parse_as, kind, data, "file.yaml", error=InvalidInputError)
    assert message.startswith("file.yaml: ")
    assert line in message


@pytest.mark.parametrize("data", [[1, 2], None])
def test_what_is_no_mapping_is_refused(data):
    message = refusal(parse_as, "chip", data, "chip.yaml", error=InvalidInputError)
    wanted = "expected a mapping of keys to values"
    assert message == f"chip.yaml: chip: {data} is not accepted; {wanted}"
    assert "kind: 'chap' is not accepted; did you mean 'chip'?" in refusal(parse_as, "chap", {}, "")


def test_constructing_and_replacing_by_hand_are_checked_the_same_way():
    h100, fabric = presets.chip("h100"), presets.fabric("dgx-a100")
    for call, fields, line in (
        (TensorCore, {"count": 1, "width": -1, "depth": 1}, "width: -1 is not accepted"),
        (Cluster, {"devices": 0, "fabric": fabric}, "devices: 0 is not accepted"),
        (h100.replace, {"clock_hz": -1.0}, "clock_hz: -1.0 is not accepted"),
        (h100.replace, {"clok_hz": 1.0}, "unknown key 'clok_hz'"),
    ):
        assert line in refusal(call, **fields, error=InvalidInputError)


# ---- documents ----


@pytest.mark.parametrize(("name", "text", "line"), refused_calls("texts of documents"))
def test_malformed_documents(tmp_path, name, text, line):
    file = tmp_path / name
    file.write_text(text)
    message = refusal(read_document, file, error=InvalidInputError)
    assert message.startswith(str(file))
    assert line in message


@pytest.mark.parametrize("text", ["1.2e12", "1.2e+12", "12e11", "1_200_000_000_000.0", "1.2E12"])
def test_yaml_reads_numbers_as_people_write_them(text):
    assert parse_text(f"x: {text}", "t") == {"x": 1.2e12}


@pytest.mark.parametrize("name", ["1e9", "1.2e3", "yes", "null", "017", "a: b", "x\u2028y", "\x85"])
def test_text_survives_being_written(tmp_path, name):
    own = name if name.isprintable() else "own"
    fabric = FlatFabric(name=own, bandwidth_bytes_per_s=1e9, notes=name)
    file = tmp_path / "f.yaml"
    file.write_text(fabric.to_yaml(), encoding="utf-8")
    assert presets.fabric(file) == fabric


def test_equal_records_hash_alike():
    a, b = ({"bf16": 1.0, "fp8": 2.0}, {"fp8": 2.0, "bf16": 1.0})
    cores = [TensorCore(count=1, width=1, depth=1, rates=r) for r in (a, b)]
    assert cores[0] == cores[1]
    assert len(set(cores)) == 1


def test_neither_copies_nor_pickles_have_the_hash_of_a_record():
    chip = presets.chip("tpuv4")
    assert hash(chip) == hash(chip) == hash(pickle.loads(pickle.dumps(chip)))
    assert b"_hash" not in pickle.dumps(chip)  # of text it differs from process to process
    renamed = chip.model_copy(update={"name": "mine"})
    assert hash(renamed) == hash(chip.replace(name="mine")) != hash(chip)


def test_messages_stay_short():
    long = {**GOOD["chip"], "name": [[list(range(100))] * 100] * 1000}
    assert len(refusal(Accelerator.from_dict, long, error=InvalidInputError)) < 400


def test_several_faults_are_several_lines_with_their_paths():
    data = {
        "devices": 4,
        "chip": "h100",
        "fabric": {"kind": "torus", "name": "x", "dims": [4, 0], "link_bandwidth_bytes_per_s": -1},
    }
    with pytest.raises(InvalidInputError) as caught:
        Cluster.from_dict(data, "c.yaml")
    assert [line.split(":")[1].strip() for line in str(caught.value).splitlines()] == [
        "fabric.dims.1", "fabric.link_bandwidth_bytes_per_s",
    ]  # fmt: skip
    message = refusal(Cluster.from_dict, {"devices": 64, "chip": "h100"})
    assert message == "fabric: is missing and has no default"


def test_yaml_still_reads_everything_else():
    text = "base: &b {count: 9}\nmine: {<<: *b, lanes: 8}"
    assert parse_text(text, "t")["mine"] == {"count": 9, "lanes": 8}
    text = "a: 1\nb: yes\nc: 1.2.3\nd: 2026-01-01x\ne: [1, -2.5, .5]\nf: null\ng: 10:30\nh: e5\ni: .nan"
    found, usual = parse_text(text, "t"), yaml.safe_load(text)
    found.pop("i"), usual.pop("i")
    assert found == usual


@pytest.mark.slow
def test_files_of_the_package_are_what_the_reader_of_any_file_makes_of_them():
    files = list(Path(documents.__file__).parent.rglob("*.yaml"))
    assert len(files) > 50
    for file in files:
        text = file.read_text("utf-8")
        assert repr(yaml.load(text, documents._OwnLoader)) == repr(parse_text(text, "t")), file


# ---- identity ----


@pytest.mark.parametrize(
    ("load", "names"),
    [
        (presets.chip, presets.chip_names),
        (presets.fabric, presets.fabric_names),
        (models.load, models.names),
    ],
)
def test_presets_survive_a_round_trip(tmp_path, load, names):
    for preset in map(load, names()):
        for suffix, text in ((".yaml", preset.to_yaml()), (".json", preset.to_json())):
            file = tmp_path / f"preset{suffix}"
            file.write_text(text)
            again = load(file)
            assert again == preset
            assert hash(again) == hash(preset)
            assert again.digest() == preset.digest()
        assert pickle.loads(pickle.dumps(preset)) == preset  # our own bytes, not a file's
        if load is presets.fabric:
            assert fabric_record(preset).tobytes() == fabric_record(again).tobytes()
            cluster = Cluster(devices=16, fabric=preset, chip=presets.chip("h100"))
            assert Cluster.from_dict(json.loads(cluster.to_json())) == cluster


def test_records_are_frozen_all_the_way_down():
    chip = presets.chip("h100")
    with pytest.raises(ValueError, match="frozen"):
        chip.name = "x"
    with pytest.raises(TypeError, match="frozen"):
        chip.tensor_core.rates["bf16"] = 2.0
    spec = SpaceSpec(name="s", base=chip, axes={"clock_hz": (1e9,)})
    for change in (lambda d: d.clear(), lambda d: d.update(a=1), lambda d: d.pop("clock_hz")):
        with pytest.raises(TypeError, match="frozen"):
            change(spec.axes)


def test_digest_depends_on_content_only():
    a = FlatFabric(name="f", bandwidth_bytes_per_s=1e9)
    assert a.digest() == FlatFabric(bandwidth_bytes_per_s=1e9, name="f").digest()
    assert a.digest() != a.replace(latency_s=1e-6).digest()
    assert digest([1, {"a": None}]) == "ee25ad6c7f7c3e2cda3fb8ee7f3e2a5d"  # the same everywhere
