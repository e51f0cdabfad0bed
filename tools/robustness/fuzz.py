"""Random files and command lines: the program exits with 0, 1, 2 or 130 and a message, in time.

    python3 dev.py fuzz --minutes 10 --seed 1

Files are valid documents with a few values changed; command lines have options of the program with
values from a list of unusual ones. Each case runs in a child process with limited memory.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from robustness.children import in_a_child

from phaze_fast.cli.app import program
from phaze_fast.cli.main import main
from phaze_fast.hardware import presets
from phaze_fast.software import load_software
from phaze_fast.wafer import load_wafer

GOLDEN = Path(__file__).parents[2] / "tests" / "golden"
ALLOWED = (0, 1, 2, 130)
SECONDS, GIBIBYTES, MOST_LINES = 120, 8, 12
VALUES = [
    None, True, False, 0, 1, -1, 2, 3, 7, 2**31, 2**53, 2**62, 2**63, -(2**31), 10**30, 10**400,
    0.0, -0.0, 0.5, 1.5, -1.0, 1e-300, 5e-324, 1e24, 1e300, 1.8e308, float("inf"), float("nan"),
    "", " ", "x", "0", "-1", "1e400", "nan", "128 MiB", "1 GHz", "2 us", "1.2 TB/s", "9" * 5000,
    "h100", "tpuv4", "dgx-h100", "/", "../x", "a\nb", "\x1b[31m", "²", "\ud800", "x" * 3000,
    [], [0], [[]], [1, 2], ["x"], [None], [-1] * 40, {}, {"a": 1}, {"": {}}, {"1": 1, "01": 2},
]  # fmt: skip
TEXTS = [
    "", " ", "0", "1", "-1", "2", "3", "8", "7,8", "1,1", ",", "1e400", "nan", "inf", "-inf", "0.5",
    "999999999999999999999", "9" * 5000, "x", "none", "auto", "full", "1f1b", "interleaved", "adam",
    "h100", "tpuv4", "dgx-h100", "wafer-mesh", "gpt2-small", "time,energy", "64x64", "1 GiB", "a\nb",
    "\x1b[31m", "²", "../x", "/dev/null", "default", "all", "bf16", "ws", "1-3", "0:1", "{}", "[]",
]  # fmt: skip
MODEL = {
    "name": "m", "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 128, "vocab": 100,
    "seq": 32, "positions": "rotary", "gated": True,
    "moe": {"experts": 4, "top_k": 2, "expert_ffn": 64},
}  # fmt: skip
ON = ["--chip", "h100", "--devices", "2", "--global-batch", "4"]
QUICK = ["--devices", "2", "--global-batch", "4", "--time-limit-s", "2", "--no-cache", "--quiet"]
WAFER = ["--wafer", "dram-wafer", "--global-batch", "8", "--no-cache", "--quiet", "--budget", "1"]
WAFER += ["--seeds", "1", "--steps", "20", "--promising", "1"]
COMMANDS = {
    "search": ["search", "gpt2-small", "--space", "{space}", *QUICK],
    "wafer": ["wafer", "bertlarge", *WAFER],
    "models": ["show", "model"],
    "show": ["show", "model", "--operators", "gpt2-small"],
    "chips": ["show", "chip"],
    "fabrics": ["show", "interconnect"],
    "wafers": ["show", "wafer"],
    "space": ["show", "space", "{space}"],
    "check": ["check", "{chip}"],
    "schema": ["check"],
    "estimate": ["estimate", "--chip", "h200", "--gemm", "64x64x64"],
    "validate": ["study", "validate", "{gemm}", "--chip", "h200"],
    "calibrate": ["study", "calibrate", "{gemm}", "--chip", "h200"],
    "schedule": ["schedule", "{layers}", "--time-limit-s", "1"],
    "place": ["place", "{problem}"],
    "plan": ["plan", "gpt2-small", *ON],
    "predict": ["predict", "gpt2-small", *ON, "--dp", "2"],
    "export": ["export", "{plan}", "--to", "megatron"],
    "explain": ["explain", "{plan}"],
    "diff": ["explain", "{plan}", "--against", "{plan}"],
    "trace-compare": ["explain", "{plan}", "--trace", "{trace}"],
    "collective": ["estimate", "--collective", "all-reduce", "--bytes", "8", "--ranks", "2", "--fabric", "dgx-h100"],
}  # fmt: skip
READ_BY = {
    "model": [["show", "model"], ["show", "model", "--operators"], ["plan", *ON], ["wafer", *WAFER]],
    "chip": [["show", "chip"], ["check"], ["estimate", "--gemm", "64x64x64", "--chip"], ["plan", "gpt2-small", "--devices", "2", "--global-batch", "4", "--chip"]],
    "fabric": [["show", "interconnect"], ["check"], ["plan", "gpt2-small", *ON, "--fabric"]],
    "space": [["show", "space"], ["search", "gpt2-small", *QUICK, "--space"]],
    "wafer": [["show", "wafer"], ["wafer", "bertlarge", *WAFER, "--wafer"]],
    "faults": [["wafer", "bertlarge", *WAFER, "--faults"]],
    "software": [["plan", "gpt2-small", *ON, "--software"]],
    "layers": [["schedule", "--time-limit-s", "1"]],
    "problem": [["place"], ["place", "--objective", "nest"]],
    "plan": [["explain"], ["export", "--to", "megatron"], ["export", "--to", "perfetto"], ["predict", "gpt2-small", *ON, "--plan"]],
    "trace": [["explain", "{plan}", "--trace"]],
    "uncertainty": [["search", "gpt2-small", *QUICK, "--space", "{space}", "--uncertainty"]],
}  # fmt: skip


@dataclass
class Case:
    """A command line, and the files that ``{name}`` in it stands for."""

    words: list[str]
    files: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps({"words": self.words, "files": self.files})


def command(words):
    """Run the program in this process: exit code, standard output, standard error."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    return code, out.getvalue(), err.getvalue()


@cache
def seeds():
    """A valid document of every kind, as text, by the kind's name."""
    space = {"name": "s", "base": "tpuv4", "axes": {"tensor_core.count": [1, 2, 4]}}
    event = {"name": "gemm", "cat": "kernel", "ph": "X", "ts": 1.0, "dur": 5.0, "args": {}}
    found = {
        "model": MODEL,
        "chip": presets.chip("h200").to_dict(),
        "fabric": presets.fabric("dgx-h100").to_dict(),
        "space": space,
        "wafer": load_wafer("dram-wafer").replace(columns=3, rows=2).to_dict(),
        "faults": {"dead_dies": [[0, 2]], "dead_links": [[[1, 0], [1, 1]]]},
        "software": load_software("megatron-core").to_dict(),
        "trace": {"traceEvents": [event, {**event, "ts": 9.0}]},
        "uncertainty": {"hbm.bandwidth_bytes_per_s": [0.9, 1.1]},
    }
    texts = {kind: json.dumps(data) for kind, data in found.items()}
    for kind, name in (("layers", "layer_golden.jsonl"), ("problem", "dp_golden.jsonl")):
        lines = (GOLDEN / name).read_text().splitlines()
        texts[kind] = min(lines, key=len)
    texts["gemm"] = (GOLDEN / "h200_gemm.csv").read_text()[:4000].rpartition("\n")[0]
    texts["plan"] = command(["plan", "gpt2-small", *ON, "--top", "1", "--json"])[1]
    return texts


def places(data, at=()):
    """Paths to everything in plain data."""
    yield at
    nested = data if isinstance(data, dict | list) else ()
    for key, value in nested.items() if isinstance(nested, dict) else enumerate(nested):
        yield from places(value, (*at, key))


def changed(rng, data):
    """Plain data with one place replaced, removed, renamed or doubled; where, and what is there."""
    path = rng.choice(list(places(data)))
    if not path:
        made = rng.choice(VALUES)
        return made, (path, made)
    made = json.loads(json.dumps(data))
    where = made
    for key in path[:-1]:
        where = where[key]
    change, key = rng.randrange(6), path[-1]
    if change == 0:
        del where[key]
    elif change == 1 and isinstance(where, dict):
        where[rng.choice(["x", "", "name", "kind", str(key) + "s"])] = where.pop(key)
    elif change == 2 and isinstance(where, list):
        where.extend([where[key]] * rng.choice([1, 3, 50]))
    elif change == 3 and type(where[key]) in (int, float) and abs(where[key]) < 1e300:
        where[key] *= rng.choice([0, -1, 2, 0.5, 1e-9, 1e9, 1e200])
    else:
        where[key] = rng.choice(VALUES)
    return made, (path, where.get(key) if isinstance(where, dict) else where)


def text_of(rng, kind):
    """A file of a kind with a few values or bytes changed."""
    text = seeds()[kind]
    if kind == "gemm" or rng.random() < 0.15:
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(text) + 1)
            text = (
                text[:at]
                + rng.choice(["", ",", "{", "]", "0", "-", "&a ", "\x00", "\n", "é"])
                + text[at + rng.randint(0, 3) :]
            )
        return text
    data = json.loads(text)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        data, _ = changed(rng, data)
    return json.dumps(data)


@cache
def options_of(*words):
    """Options of a command as the program itself lists them: (words, whether it takes a value)."""
    found = program(*words).commands[words[0]]
    found = found.commands[words[1]] if words[0] in ("show", "study") else found
    skipped = {"--help", "--executor", "--output", "--resume", "--cache", "--report", "--parquet"}
    skipped |= {"--emit-benchmark", "--csv", "--latex", "--write", "--samples"}
    return [
        (each.opts[0], not getattr(each, "is_flag", False))
        for each in found.params
        if each.opts[0].startswith("-") and not skipped & set(each.opts)
    ]


def random_case(rng):
    if rng.random() < 0.5:
        kind = rng.choice(list(READ_BY))
        words = [*rng.choice(READ_BY[kind]), "{fuzzed}"]
        files = {"fuzzed" + rng.choice([".json", ".yaml", ".jsonl"]): text_of(rng, kind)}
    else:
        words, files = list(COMMANDS[rng.choice(list(COMMANDS))]), {}
        options = options_of(*words[:2])
        for option, valued in rng.sample(options, min(2, len(options))):
            words += [option, rng.choice(TEXTS)] if valued else [option]
        if rng.random() < 0.1:
            words.insert(rng.randrange(len(words)), rng.choice(TEXTS))
    words += ["--json"] * (rng.random() < 0.3)
    return Case(words, files)


def given_words(case, folder):
    """Write the case's files, and name them in its words."""
    paths = {}
    for kind in ("space", "chip", "layers", "problem", "plan", "trace", "gemm"):
        if any(f"{{{kind}}}" in word for word in case.words):
            paths[kind] = folder / f"{kind}{'.csv' if kind == 'gemm' else '.json'}"
            paths[kind].write_text(seeds()[kind])
    for name, text in case.files.items():
        paths[name.partition(".")[0]] = folder / name
        (folder / name).write_text(text, encoding="utf-8", errors="surrogateescape")
    return [str(paths.get(word[1:-1], word)) if word[:1] == "{" else word for word in case.words]


def finding(case):
    """What the program did wrong with a case; empty where nothing."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        before = sorted(case.files)
        words = given_words(case, folder)
        os.chdir(folder)
        made = {each.name for each in folder.iterdir()}
        code, _, err = command(words)
        os.chdir("/")
        left = {each.name for each in folder.iterdir()} - made
    lines = err.splitlines()
    if code not in ALLOWED:
        return f"exit {code}: {lines[-1:]}"
    if "Traceback" in err or "Warning" in err:
        return f"standard error: {err[:300]!r}"
    if code == 2 and not 1 <= len(lines) <= MOST_LINES:
        return f"{len(lines)} lines for bad input"
    return f"left {sorted(left)} beside {before}" if left else ""


def commands(rng):
    """One random command with its finding, as the kinds of problems of `attack.py` have them."""
    seeds()  # computed once, before any child
    case = random_case(rng)
    said, status = in_a_child(lambda: finding(case), SECONDS, **{"as": GIBIBYTES * 2**30})
    if os.WIFSIGNALED(status):
        said = f"ended by signal {os.WTERMSIG(status)}, in {SECONDS} s at most"
    yield [said] if said else [], case.to_json()
