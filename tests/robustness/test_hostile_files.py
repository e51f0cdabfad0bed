"""Files meant to break their readers: each is refused in one line, soon and without much memory."""

import gzip
import json
import zlib

import pytest
from golden_files import refused_calls
from robustness.fuzz import ON, QUICK, READ_BY, WAFER, command

OP = {"id": 0, "type": "TC", "lat_single": 8.0}
LAYER = {"name": "x", "ops": [OP], "edges": [], "num_tc": 2, "num_vc": 1}
MODEL = (
    "{name: m, layers: 2, hidden: 64, heads: 4, ffn: 128, vocab: 100, seq: 32, positions: rotary}"
)


def run(*words):
    return command([str(word) for word in words])


MEASURED = [["study", verb, "--chip", "h200"] for verb in ("validate", "calibrate")]
OTHERS_READ = [["search", *QUICK], ["wafer", "bertlarge", *WAFER, "--encoding"], *MEASURED]
READERS = {
    " ".join(words): words
    for words in [*(words for kind in READ_BY.values() for words in kind), *OTHERS_READ]
    if "{" not in "".join(words)
}
"""Words before the file of every command that reads one."""


def refused(*words):
    """What is said of a file that is not accepted: few lines, none of them long."""
    code, out, err = run(*words)
    assert (code, out) == (2, ""), (words, code, err)
    assert 1 <= len(err.splitlines()) <= 9, err
    assert max(map(len, err.splitlines())) < 700
    assert "Traceback" not in err
    assert "Warning" not in err
    return err


BOMB = "a: &a [1, 1]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdefghijklmnopqrstuvwxy", "bcdefghijklmnopqrstuvwxyz", strict=True))  # fmt: skip
MERGES = "a: &a {k: 1}\n" + "".join(
    f"m{i}: &m{i} {{<<: [{', '.join(f'*{name}' for name in [prior] * 9)}], k{i}: 1}}\n"
    for i, prior in enumerate(["a", *(f"m{i}" for i in range(11))])
)
HOSTILE = {
    "empty": b"",
    "null": b"null",
    "nothing but a comment": b"# none\n",
    "a zero byte": b"\x00",
    "not UTF-8": b"\xff\xfe\x00a",
    "a list": b"[1, 2]",
    "a number": b"7",
    "a text": b"text",
    "a key twice": b'{"name": "x", "name": "y"}',
    "deep lists": b"[" * 20_000,
    "deep objects": b'{"a":' * 30_000 + b"1" + b"}" * 30_000,
    "digits": b'{"name": "x", "layers": ' + b"9" * 5000 + b', "clock_hz": ' + b"9" * 5000 + b"}",
    "a hexadecimal number": b"{name: x, layers: 0x" + b"f" * 5000 + b"}",
    "NaN": b'{"name": "x", "layers": NaN, "clock_hz": Infinity}',
    "a tag": b"name: !!python/object/apply:os.system ['false']\n",
    "a foreign tag": b"name: !mine x\n",
    "aliases that double": BOMB.encode(),
    "merges that multiply": MERGES.encode(),
    "an alias inside itself": b"name: &a [*a]\n",
    "a key that is a list": b"? [a, b]\n: 1\n",
    "a date that is none": b"name: 2001-99-99\n",
    "a long line": b'{"name": "' + b"x" * 100_000 + b'", "nonsense": 1}',
    "control characters": b'{"name": "\\u0007\\u001b[31m", "nonsense": 1}',
}


EACH_KIND = tuple(
    next(name for name in READERS if name.startswith(begin))
    for begin in ("predict", "show model", "schedule", "study calibrate")
)
"""One reader of each kind of file: plain data, records, JSON lines, tables."""
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in READERS if name not in EACH_KIND]


@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_a_hostile_file_is_refused_by_each_kind_of_reader(suffix, what, tmp_path):
    file = tmp_path / f"file{suffix}"
    file.write_bytes(HOSTILE[what])
    for reader in EACH_KIND[:1] if suffix == ".json" else EACH_KIND[1:]:
        assert "\x1b" not in refused(*READERS[reader], file)


@pytest.mark.parametrize("reader", OTHERS)
def test_a_hostile_file_is_refused_by_every_reader(reader, tmp_path):
    file = tmp_path / "file.yaml"
    first = sorted(READERS).index(reader) % 4
    for data in list(HOSTILE.values())[first::4]:
        file.write_bytes(data)
        assert "\x1b" not in refused(*READERS[reader], file)


@pytest.mark.parametrize("reader", [*EACH_KIND, *OTHERS])
def test_what_is_no_file_is_refused(reader, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    for what in ("folder", "missing.yaml", "loop.yaml", "no\x07name"):
        refused(*READERS[reader], what)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["folder", "loop.yaml"]


@pytest.mark.parametrize("reader", EACH_KIND[:3])
def test_an_endless_file_is_refused(reader):
    assert "too long; expected at most 256 MiB" in refused(*READERS[reader], "/dev/zero")


def test_an_empty_directory_name_is_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for option in ("--resume", "--cache"):
        for words in (["search", "gpt2-small"], ["wafer", "bertlarge"]):
            said = refused(*words, option, "")
            assert option in said
            assert "expected the name of a directory" in said
    assert not list(tmp_path.iterdir())


def test_limits_before_work_that_would_take_hours():
    said = refused("plan", "gpt2-small", "--chip", "h100", "--devices", 10**9)
    assert "--devices: 1000000000 is not accepted; expected a number <= 1048576" in said
    words = ["--chip", "h100", "--devices", "8", "--global-batch", 2**31, "--top", "1"]
    assert run("plan", "gpt2-small", *words)[0] == 0  # divisors without trying all numbers


def test_a_schedule_on_some_cores_that_is_not_proven_in_time_is_kept(tmp_path):
    ops = [
        {"id": i, "type": "TC", "lat_single": 7.0 + i % 5, "lat_cores": {"2": 5.0 + i % 3}}
        for i in range(40)
    ]
    file = tmp_path / "layers.jsonl"
    file.write_text(json.dumps({**LAYER, "ops": ops, "num_tc": 3}))
    code, out, err = run("schedule", file, "--time-limit-s", "0.05", "--json")
    assert code == 0, err
    (found,) = json.loads(out)
    assert 0 < found["bound"] <= found["makespan"]


def test_a_chip_without_constants_runs_in_one_dataflow():
    words = ["estimate", "--chip", "tpuv4", "--gemm", "512x512x512", "--json", "--dataflow"]
    for dataflow in ("os", "ws", "is"):
        code, out, _ = run(*words, dataflow)
        assert (code, json.loads(out)[0]["dataflow"]) == (0, dataflow)


def test_experts_have_room_for_a_token_however_small_their_capacity(tmp_path):
    file = tmp_path / "model.yaml"
    moe = "seq: 4, moe: {experts: 64, top_k: 1, expert_ffn: 64, capacity_factor: 0.01}"
    file.write_text(MODEL.replace("seq: 32", moe))
    assert run("plan", file, *ON, "--top", "1")[0] == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        *refused_calls("fields of a layer"),
        ({"num_tc": 10**400}, "num_tc"),
        ({"ops": [{"id": 0, "type": "TC", "lat_single": 10**400}]}, "lat_single"),
    ],
)
def test_layers_that_cannot_be(change, said, tmp_path):
    file = tmp_path / "layers.jsonl"
    file.write_text(json.dumps({**LAYER, **change}))
    assert said in refused("schedule", file)


def test_digits_beyond_the_interpreters_limit_are_named(tmp_path):
    file = tmp_path / "layers.jsonl"
    file.write_text(json.dumps(LAYER).replace('"num_tc": 2', '"num_tc": ' + "9" * 5000))
    assert "num_tc: an integer of 5000 digits is not accepted" in refused("schedule", file)
    for name, number in (("m.yaml", "9" * 5000), ("h.yaml", "0x" + "f" * 5000)):
        file = tmp_path / name
        file.write_text(MODEL.replace("layers: 2", f"layers: {number}"))
        assert "layers: an integer of 500" in refused("show", "model", file)


@pytest.mark.parametrize("value", ["1" + "0" * 400, "'1e400 Hz'", "'1e99999999999999999999 Hz'"])
def test_an_axis_beyond_any_float(value, tmp_path):
    file = tmp_path / "space.yaml"
    file.write_text(f"{{name: s, base: tpuv4, axes: {{clock_hz: [{value}]}}}}")
    assert "axes.clock_hz" in refused("show", "space", file)


@pytest.mark.parametrize("layers", [4095, 2**31, pytest.param(10**400, id="many digits")])
def test_a_model_of_too_many_layers(layers, tmp_path):
    file = tmp_path / "model.yaml"
    file.write_text(MODEL.replace("layers: 2", f"layers: {layers}"))
    for words in (["show", "model"], ["show", "model", "--operators"], ["plan", *ON]):
        assert "layers: " in refused(*words, file)
    file.write_text(MODEL.replace("layers: 2", "layers: 4094, encoder_layers: 1"))
    assert "4094 or fewer together" in refused("show", "model", file)
    file.write_text(MODEL.replace("layers: 2", "layers: 4094"))
    assert run("show", "model", file)[0] == 0


def test_hundreds_of_faults_are_a_few_lines(tmp_path):
    file = tmp_path / "faults.yaml"
    file.write_text(json.dumps({"dead_dies": [[-1, -1]] * 300}))
    said = refused("wafer", "bertlarge", "--wafer", "dram-wafer", "--faults", file)
    assert "593 more faults" in said


def test_a_packed_trace_that_swells_or_is_torn(tmp_path):
    trace, bomb = tmp_path / "trace.json.gz", zlib.compressobj(1, zlib.DEFLATED, 31)
    with trace.open("wb") as file:
        for _ in range(257):
            file.write(bomb.compress(b" " * 2**20))
        file.write(bomb.flush())
    plan = tmp_path / "plan.json"
    words = ["plan", "gpt2-small", *ON, "--top", "1", "-o", plan]
    assert run(*words)[0] == 0
    assert "too long; expected at most 256 MiB" in refused("explain", plan, "--trace", trace)
    for data in (gzip.compress(b"{}")[:-6], gzip.compress(b"{}") + b"x", b"\x1f\x8b\x08\x00no"):
        trace.write_bytes(data)
        refused("explain", plan, "--trace", trace)
