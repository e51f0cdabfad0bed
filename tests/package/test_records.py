"""Reading and refusing files: every fault is one line that names field, value and what is accepted."""

import copy
import json
import pickle

import pytest
import yaml
from refusals import refusal

from phaze_fast import models
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

CHIP = {
    "name": "mine",
    "clock_hz": "1.05 GHz",
    "tensor_core": {"count": 8, "width": 128, "depth": 128},
    "vector_core": {"count": 2, "lanes": 128},
    "buffer": {"capacity_bytes": "128 MiB", "bytes_per_cycle": 4096.0},
    "hbm": {"capacity_bytes": "32 GiB", "bandwidth_bytes_per_s": "1.2 TB/s"},
}


NAN, GONE = float("nan"), object()


def changed(path, value):
    data = copy.deepcopy(CHIP)
    *parents, leaf = path.split(".")
    place = data
    for parent in parents:
        place = place[parent]
    place[leaf] = value
    if value is GONE:
        del place[leaf]
    return data


FAULTS = [
    ("tensor_core.width", -128, "-128 is not accepted; expected a number >= 1"),
    ("tensor_core.width", 0, "0 is not accepted; expected a number >= 1"),
    ("tensor_core.width", 1.5, "1.5 is not accepted; expected a whole number"),
    ("tensor_core.width", True, "True is not accepted; expected a whole number"),
    ("tensor_core.width", "128", "'128' is not accepted; expected a whole number"),
    ("clock_hz", NAN, "nan is not accepted; expected a finite number"),
    ("clock_hz", float("inf"), "inf is not accepted; expected a finite number"),
    ("clock_hz", "1.05 GB", "'1.05 GB' is not accepted: no unit 'GB' of Hz; write '1.05 GHz'"),
    ("clock_hz", 0, "0 is not accepted; expected a number > 0"),
    ("buffer.capacity_bytes", -1, "-1 is not accepted; expected a number >= 0"),
    ("buffer.capacity_bytes", 0.5, "0.5 is not a whole number of bytes"),
    ("buffer.capacity_bytes", NAN, "nan is not accepted; expected a finite number"),
    ("buffer.bytes_per_cycle", 0.0, "0 is not accepted; expected a number > 0"),
    ("hbm", 7, "7 is not accepted; expected a mapping of keys to values"),
    ("name", "", "'' is not accepted; expected at least 1 character"),
    ("clock_hz", GONE, "is missing and has no default"),
    ("tensor_core.count", GONE, "is missing and has no default"),
]


@pytest.mark.parametrize(
    ("data", "line"),
    [
        *((changed(path, value), f"{path}: {said}") for path, value, said in FAULTS),
        (
            changed("tensor_core.widht", 1),
            "tensor_core: unknown key 'widht'; did you mean 'width'?",
        ),
        (changed("colour", 1), "chip: unknown key 'colour'; accepted: name, clock_hz"),
        (changed("tensor_core.rates", {"fp7": 1.0}), "'fp7' is not accepted; did you mean 'fp8'?"),
        ([1, 2], "chip: [1, 2] is not accepted; expected a mapping of keys to values"),
        (None, "chip: None is not accepted; expected a mapping of keys to values"),
    ],
)
def test_one_fault_is_one_line(data, line):
    message = refusal(Accelerator.from_dict, data, "chip.yaml", error=InvalidInputError)
    assert message.startswith("chip.yaml: ")
    assert line in message


@pytest.mark.parametrize(
    ("kind", "data", "line"),
    [
        ("fabric", {"kind": "torrus", "name": "x"}, "'torrus' is not accepted; did you mean 'torus'?"),
        ("fabric", {"name": "x"}, "'kind' is missing"),
        ("fabric", {"kind": "torus", "name": "x", "dims": [2, 0], "link_bandwidth_bytes_per_s": 1}, "dims.1: 0 is not accepted"),
        ("fabric", {"kind": "torus", "name": "x", "dims": [], "link_bandwidth_bytes_per_s": 1}, "dims: 0 entries; expected at least 1"),
        ("fabric", {"kind": "tiered", "name": "x", "tiers": [{"name": "a", "bandwidth_bytes_per_s": 1}, {"name": "b", "bandwidth_bytes_per_s": 1}]}, "tiers.0.size: is missing; only the last tier may have none"),
        ("fabric", {"kind": "tiered", "name": "x", "tiers": [{"name": "a", "bandwidth_bytes_per_s": -1}]}, "tiers.0.bandwidth_bytes_per_s: -1 is not accepted; expected a number > 0"),
        ("cluster", {"devices": 0, "fabric": "dgx-a100"}, "devices: 0 is not accepted; expected a number >= 1"),
        ("cluster", {"devices": 8, "fabric": "dgx-a10"}, "did you mean 'dgx-a100'?"),
        ("cluster", {"devices": 5000, "fabric": "tpuv4-pod"}, "devices: 5000 is not accepted; tpuv4-pod holds 4096"),
        ("cluster", {"devices": 67, "fabric": "tpuv4-pod"}, "devices: 67 is not accepted by tpuv4-pod"),
        ("cluster", {"devices": 8, "fabric": {"kind": "flat", "name": "f", "bandwith_bytes_per_s": 1}}, "fabric: unknown key 'bandwith_bytes_per_s'; did you mean 'bandwidth_bytes_per_s'?"),
        ("space", {"name": "s", "base": "tpuv4", "axes": {"tensor_core.widht": [1]}}, "unknown field 'tensor_core.widht'; did you mean 'tensor_core.width'?"),
        ("space", {"name": "s", "base": "tpuv4", "axes": {"tensor_core.width": [0]}}, "axes.tensor_core.width: 0 is not accepted; expected a whole number >= 1"),
        ("space", {"name": "s", "base": "tpuv4", "axes": {"tensor_core.width": [8, 8]}}, "axes.tensor_core.width: a value is given twice"),
        ("space", {"name": "s", "base": "tpuv4", "axes": {"tensor_core.width": {"powers": 3}}}, "expected a list of numbers, {powers_of_two: [first, last]}"),
        ("space", {"name": "s", "base": "tpuv4", "axes": {"clock_hz": [float("nan")]}}, "axes.clock_hz: nan is not accepted; expected a finite number > 0"),
        ("space", {"name": "s", "base": "wse-2", "axes": {"hbm.stacks": [1]}}, "wse-2 has no hbm to vary"),
        ("space", {"name": "s", "base": "tpuv4", "axes": {"vector_core.lanes": [8]}, "ties": {"vector_core.lanes": "tensor_core.width"}}, "ties.vector_core.lanes: a tied field cannot be an axis too"),
        ("chap", {}, "kind: 'chap' is not accepted; did you mean 'chip'?"),
    ],
)  # fmt: skip
def test_every_kind_of_file_says_what_is_wrong(kind, data, line):
    assert line in refusal(parse_as, kind, data, "file.yaml", error=InvalidInputError)


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


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("a.yaml", "a: b: c", "line 1: mapping values are not allowed here"),
        ("a.yaml", "name: x\nname: y\n", "line 2: key 'name' is given twice"),
        ("a.json", '{"a": 1, "a": 2}', "key 'a' is given twice"),
        ("a.json", '{"a": 1', "delimiter"),
        ("a.json", "", "Expecting value"),
        ("a.yaml", "a: !!python/object:os.system {}", "could not determine a constructor"),
        ("a.yaml", "a: [1, 2", "line"),
    ],
)
def test_malformed_documents(tmp_path, name, text, line):
    file = tmp_path / name
    file.write_text(text)
    message = refusal(read_document, file, error=InvalidInputError)
    assert message.startswith(str(file))
    assert line in message


def test_unreadable_documents(tmp_path):
    binary = tmp_path / "b.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    absent = tmp_path / "none.yaml"
    for path, line in ((absent, "no such file"), (tmp_path, "cannot be read"), (binary, "UTF-8")):
        assert line in refusal(read_document, path, error=InvalidInputError)


@pytest.mark.parametrize("text", ["1.2e12", "1.2e+12", "12e11", "1_200_000_000_000.0", "1.2E12"])
def test_yaml_reads_numbers_as_people_write_them(text):
    assert parse_text(f"x: {text}", "t") == {"x": 1.2e12}


@pytest.mark.parametrize("name", ["1e9", "1.2e3", "yes", "null", "017", "a: b", "x\u2028y", "\x85"])
def test_text_survives_being_written(tmp_path, name):
    fabric = FlatFabric(name=name, bandwidth_bytes_per_s=1e9, notes=name)
    file = tmp_path / "f.yaml"
    file.write_text(fabric.to_yaml(), encoding="utf-8")
    assert presets.fabric(file) == fabric


def test_equal_records_hash_alike():
    a, b = ({"bf16": 1.0, "fp8": 2.0}, {"fp8": 2.0, "bf16": 1.0})
    cores = [TensorCore(count=1, width=1, depth=1, rates=r) for r in (a, b)]
    assert cores[0] == cores[1]
    assert len(set(cores)) == 1


def test_messages_stay_short():
    long = changed("name", [[list(range(100))] * 100] * 1000)
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


# ---- identity ----


PRESETS = [
    *((presets.chip, name) for name in presets.chip_names()),
    *((presets.fabric, name) for name in presets.fabric_names()),
    *((models.load, name) for name in models.names()),
]


@pytest.mark.parametrize(("load", "name"), PRESETS)
def test_presets_survive_a_round_trip(tmp_path, load, name):
    preset = load(name)
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
