"""The directory of a sweep: nothing is lost, whatever happens to the process."""

import errno
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from sweep_points import counted, counts, fake, many, point, refuses

import phaze_fast as pf
from phaze_fast.errors import InvalidInputError
from phaze_fast.runs import journal
from phaze_fast.runs.sweep import sweep

# ---- the directory --------------------------------------------------------------------------------


def test_a_directory_is_taken_up_again(tmp_path):
    evaluate = functools.partial(counted, tmp_path / "n")
    out = tmp_path / "a" / "out"
    first = sweep(many(4), out=out, evaluate=evaluate)
    again = sweep(many(4), out=out, evaluate=evaluate)
    assert (first.resumed, again.resumed) == (0, 4)
    assert again.rows == first.rows
    more = sweep([*many(6), point(4)], out=out, evaluate=evaluate)
    assert (more.resumed, more.repeated, len(more)) == (4, 1, 7)
    assert set(counts(tmp_path / "n").values()) == {1}
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["points"] == 6
    assert manifest["phaze_fast"] == pf.__version__
    assert manifest["asked"] == journal.manifest([p.key for p in many(6)], "")["asked"]
    for line in (out / "results.jsonl").read_text().splitlines():
        assert json.loads(line)["row"]["status"] == "optimal"


def test_errors_are_kept_unless_asked_again(tmp_path):
    fails = {"now": True}

    def evaluate(point):
        if fails["now"] and point.training.global_batch == 8:
            raise RuntimeError("lost")
        return fake(point)

    assert sweep(many(3), tmp_path, evaluate=evaluate)["status"].tolist()[1] == "error"
    fails["now"] = False
    assert sweep(many(3), tmp_path, evaluate=evaluate)["status"].tolist()[1] == "error"
    table = sweep(many(3), tmp_path, evaluate=evaluate, retry_errors=True)
    assert (set(table["status"]), table.resumed) == ({"optimal"}, 2)
    assert set(sweep(many(3), tmp_path, evaluate=evaluate)["status"]) == {"optimal"}


@pytest.mark.parametrize("cut", [1, 2, 40, 300])
def test_a_torn_line_is_cut_off_and_kept_aside(tmp_path, cut):
    evaluate = functools.partial(counted, tmp_path / "n")
    out = tmp_path / "out"
    whole = sweep(many(4), out=out, evaluate=evaluate)
    results = out / "results.jsonl"
    data = results.read_bytes()
    results.write_bytes(data[:-cut])
    table = sweep(many(4), out=out, evaluate=evaluate)
    assert table.rows == whole.rows
    if cut == 1:  # only the end of the line was missing: the row is whole
        assert (table.resumed, table.notes) == (4, ())
        assert not (out / "results.torn").exists()
    else:
        assert table.resumed == 3
        assert "torn" in table.notes[0]
        last = data.splitlines()[-1]
        assert (out / "results.torn").read_bytes() == last[: 1 - cut] + b"\n"
    assert results.read_bytes() == data
    assert sweep(many(4), out=out, evaluate=evaluate).notes == ()


def test_a_damaged_line_is_put_aside_and_its_point_evaluated_again(tmp_path):
    evaluate = functools.partial(counted, tmp_path / "n")
    out = tmp_path / "out"
    whole = sweep(many(5), out=out, evaluate=evaluate)
    results = out / "results.jsonl"
    lines = results.read_bytes().splitlines()  # in the order in which points ended
    lost = [p.key for p in many(5) if any(p.key.encode() in lines[k] for k in (1, 3))]
    lines[1] = lines[1].replace(b"optimal", b"optimam")
    lines[3] = b"\x00\xff not JSON"
    results.write_bytes(b"\n".join(lines) + b"\n")
    table = sweep(many(5), out=out, evaluate=evaluate)
    assert table.rows == whole.rows
    assert table.resumed == 3
    assert "2 damaged lines" in table.notes[0]
    assert (out / "results.damaged.jsonl").read_bytes().splitlines() == [lines[1], lines[3]]
    seen = counts(tmp_path / "n")
    assert len(lost) == 2
    assert seen == {p.key: 2 if p.key in lost else 1 for p in many(5)}
    assert sweep(many(5), out=out, evaluate=evaluate).notes == ()


def test_any_changed_byte_and_any_torn_length_is_noticed():
    line = journal.encode_line({"key": "a", "status": "optimal", "time_s": 0.25})[:-1]
    assert journal.decode_line(line) == {"key": "a", "status": "optimal", "time_s": 0.25}
    for at in range(len(line)):
        changed = line[:at] + bytes([line[at] ^ 1]) + line[at + 1 :]
        assert journal.decode_line(changed) is None
    for odd in (b"{}", line + b"}", *(line[:size] for size in range(len(line)))):
        assert journal.decode_line(odd) is None


def test_a_directory_of_something_else_is_refused_and_left_as_it_is(tmp_path):
    out = tmp_path / "out"
    sweep(many(3), out=out, evaluate=fake)
    before = {f.name: f.read_bytes() for f in out.iterdir() if f.name != "lock"}
    for words, said in (
        ({"points": many(2)}, "holds 1 results of points that are not requested"),
        ({"points": many(3), "evaluate": refuses}, "has evaluate"),
    ):
        with pytest.raises(InvalidInputError, match=said) as caught:
            sweep(out=out, **{"evaluate": fake, **words})
        assert str(out) in str(caught.value)
        assert "expected a new or empty directory" in str(caught.value)
    assert {f.name: f.read_bytes() for f in out.iterdir() if f.name != "lock"} == before
    manifest = json.loads(before["manifest.json"])
    for text, said in (
        (json.dumps({**manifest, "phaze_fast": "0.0.1"}), "has phaze_fast '0.0.1'"),
        (json.dumps({**manifest, "pricing": "00"}), "has pricing .* expected a new or empty"),
        ("[]", "has format"),
        ("{", "manifest.json"),
    ):
        (out / "manifest.json").write_text(text)
        with pytest.raises(InvalidInputError, match=said):
            sweep(many(3), out=out, evaluate=fake)
    (out / "manifest.json").unlink()
    with pytest.raises(InvalidInputError, match="exists without manifest.json"):
        sweep(many(3), out=out, evaluate=fake)
    assert (out / "results.jsonl").read_bytes() == before["results.jsonl"]


def test_what_is_no_directory_is_refused(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    for out in (file, file / "below"):
        with pytest.raises(InvalidInputError, match="expected a directory that can be read"):
            sweep(many(1), out=out, evaluate=fake)
    (tmp_path / "odd" / "results.jsonl").mkdir(parents=True)
    with pytest.raises(InvalidInputError, match="odd"):
        sweep(many(1), out=tmp_path / "odd", evaluate=fake)
    shut = tmp_path / "shut"
    shut.mkdir()

    opened = Path.open

    def refused(self, *args, **kwargs):
        if shut in (self, *self.parents):
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(InvalidInputError, match="shut cannot be used: Permission denied"):
        sweep(many(1), out=shut, evaluate=fake)


@pytest.mark.parametrize("room", [0, 10, 700, 1500])
def test_a_full_disk_loses_nothing(tmp_path, monkeypatch, room):
    evaluate = functools.partial(counted, tmp_path / "n")
    out = tmp_path / "out"
    sweep(many(2), out=out, evaluate=evaluate)
    left = {"bytes": room}
    write = os.write

    def full(handle, data):
        if not left["bytes"]:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write(handle, data[: left["bytes"]])
        left["bytes"] -= written
        return written

    with monkeypatch.context() as patch:
        patch.setattr(journal.os, "write", full)
        with pytest.raises(InvalidInputError, match="the disk is full") as caught:
            sweep(many(8), out=out, evaluate=evaluate, chunk=3)
    lines = (out / "results.jsonl").read_bytes()
    rows = [journal.decode_line(line) for line in lines.splitlines()]
    assert lines.endswith(b"\n")
    assert None not in rows
    assert f"{len(rows)} of 8 points are safe" in str(caught.value)
    size = len(lines) // len(rows)
    assert len(rows) - 2 in (room // size, room // size - 1, room // size + 1)
    table = sweep(many(8), out=out, evaluate=evaluate)
    assert (table.resumed, table.notes) == (len(rows), ())
    assert table.rows == sweep(many(8), evaluate=fake).rows


def test_a_sync_that_fails_counts_nothing_of_its_batch(tmp_path, monkeypatch):
    out = tmp_path / "out"
    sweep(many(2), out=out, evaluate=fake)
    before = (out / "results.jsonl").read_bytes()
    sync, calls = os.fsync, []

    def fails(handle):
        calls.append(handle)
        if os.fstat(handle).st_size > len(before):
            raise OSError(errno.EIO, "Input/output error")
        return sync(handle)

    with monkeypatch.context() as patch:
        patch.setattr(journal.os, "fsync", fails)
        with pytest.raises(InvalidInputError, match="2 of 4 points are safe"):
            sweep(many(4), out=out, evaluate=fake)
    assert calls
    assert (out / "results.jsonl").read_bytes() == before


def test_two_sweeps_do_not_share_a_directory(tmp_path):
    pytest.importorskip("fcntl")
    started, go = threading.Event(), threading.Event()

    def waits(point):
        started.set()
        assert go.wait(30)
        return fake(point)

    tables = []
    other = threading.Thread(
        target=lambda: tables.append(sweep(many(2), out=tmp_path, evaluate=waits))
    )
    other.start()
    assert started.wait(30)
    try:
        with pytest.raises(InvalidInputError, match=f"in use by another .*process {os.getpid()}"):
            sweep(many(2), out=tmp_path, evaluate=waits)
    finally:
        go.set()
        other.join()
    assert sweep(many(2), out=tmp_path, evaluate=waits).rows == tables[0].rows


# ---- processes that end badly ---------------------------------------------------------------------

SCRIPT = """
import functools, json, sys, time
from pathlib import Path

sys.path.insert(0, {tests!r})
import sweep_points
from phaze_fast.runs.sweep import sweep

def evaluate(point):
    time.sleep(0.01)
    return sweep_points.counted("counts", point)

if __name__ == "__main__":
    {before}
    table = sweep(sweep_points.many(60), out="out", evaluate=evaluate, chunk=1, {how})
    table.to_json("table.json")
"""


def script(folder, how="", before=""):
    text = SCRIPT.format(tests=str(Path(__file__).parents[1] / "cases"), how=how, before=before)
    (folder / "script.py").write_text(text)
    return [sys.executable, "script.py"]


def kill_after(command, folder, lines):
    """Start, wait until so many results are on disk, kill -9; the keys that were safe."""
    results = folder / "out" / "results.jsonl"
    process = subprocess.Popen(command, cwd=folder)
    try:
        deadline = time.monotonic() + 60
        while not results.exists() or results.read_bytes().count(b"\n") < lines:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.005)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    rows = [journal.decode_line(line) for line in results.read_bytes().split(b"\n")]
    return {row["key"] for row in rows if row is not None}


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no such signal here")
@pytest.mark.parametrize(("how", "flying"), [("", 1), ("threads=2", 4)])
def test_killed_twice_it_goes_on_where_it_was(tmp_path, how, flying):
    command, seen = script(tmp_path, how), tmp_path / "counts"
    for lines in (8, 25):
        safe = kill_after(command, tmp_path, lines)
        done = counts(seen)
        assert len(safe) >= lines
        assert len(safe) < 60
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
    data = json.loads((tmp_path / "table.json").read_text())
    assert data["rows"] == sweep(many(60), evaluate=fake).rows
    assert data["resumed"] >= len(safe)
    total = counts(seen)
    assert all(total[key] == done[key] for key in safe)
    assert sum(total.values()) <= 60 + 2 * flying
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
    assert counts(seen) == total


def test_a_limit_on_the_size_of_files_leaves_whole_lines(tmp_path):
    pytest.importorskip("resource")
    before = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))"
    command = script(tmp_path, before=before)
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    data = (tmp_path / "out" / "results.jsonl").read_bytes()
    rows = [journal.decode_line(line) for line in data.splitlines()]
    assert len(rows) > 2
    assert None not in rows
    assert data.endswith(b"\n")
    assert f"{len(rows)} of 60 points are safe" in done.stderr


def test_a_sweep_stopped_by_hand_keeps_what_is_done(tmp_path):
    def stop(done, total):
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(many(6), out=tmp_path, evaluate=fake, chunk=1, progress=stop)
    assert sweep(many(6), out=tmp_path, evaluate=fake).resumed == 3


def test_a_system_without_locks_works_too(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "fcntl", None)
    assert len(sweep(many(2), out=tmp_path, evaluate=fake)) == 2
