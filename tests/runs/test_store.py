"""The store of results: what is found, what is not, and what no fault of its file may do."""

import contextlib
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

import phaze_fast as pf
from phaze_fast.errors import InvalidInputError
from phaze_fast.hardware import ArchitectureSpace
from phaze_fast.runs import store
from phaze_fast.runs.store import ResultStore, ScheduleCache


@pytest.fixture
def path(tmp_path):
    return tmp_path / "results.sqlite"


def filled(path, count=3, kind="kind"):
    """A closed store of some results."""
    results = {f"input {k}".encode(): f"result {k}".encode() * 50 for k in range(count)}
    with ResultStore(path, kind) as opened:
        opened.put_many(results)
    return results


def found_in(path, keys, kind="kind"):
    with ResultStore(path, kind) as opened:
        return opened.get_many(keys)


def changed(path, statement):
    with contextlib.closing(sqlite3.connect(path)) as file, file:
        file.execute(statement)


def test_what_is_kept_is_found_by_others_of_its_kind(path):
    results = filled(path, 1200)
    assert found_in(path, [*results, b"unknown"]) == results
    assert found_in(path, results, "another kind") == {}
    with ResultStore(path, "kind") as opened:
        opened.put_many({b"input 0": b"better"})
        opened.put_many({})
        assert opened.get_many([b"input 0"]) == {b"input 0": b"better"}
        assert (opened.notes, opened.rejected) == ([], 0)
    opened.put_many(results)  # closed: nothing is kept, and nothing breaks
    assert opened.get_many(results) == {}


def test_a_changed_fingerprint_finds_nothing(path, monkeypatch):
    results = filled(path)
    with monkeypatch.context() as patch:
        patch.setattr(store, "pricing_fingerprint", lambda: b"a changed cost model")
        assert found_in(path, results) == {}
        filled(path, 1)
        assert len(found_in(path, results)) == 1
    assert found_in(path, results) == results


def layer_costs():
    chips = ArchitectureSpace.tpuv4_area().chips[:20]
    return pf.estimate_costs(pf.layer_graph(pf.models.load("bertlarge")), chips)


def test_schedules_are_kept_in_a_file_and_not_for_other_code(path, monkeypatch):
    costs = layer_costs()
    plain = pf.schedule_layers(costs)

    def counted():
        cache = ScheduleCache(path)
        with contextlib.closing(cache):
            times = pf.schedule_layers(costs, cache=cache)
            assert times.makespan_s.tobytes() == plain.makespan_s.tobytes()
            assert times.proved_by.tobytes() == plain.proved_by.tobytes()
            return cache.info()[:4]

    _, _, asked, _ = counted()
    assert asked > 0
    assert counted() == (0, asked, 0, 0)
    with monkeypatch.context() as patch:
        patch.setattr(store, "pricing_fingerprint", lambda: b"a changed cost model")
        assert counted() == (0, 0, asked, 0)
    changed(path, "UPDATE results SET value = substr(value, 1, 20)")
    assert counted() == (0, 0, asked, asked)
    assert counted() == (0, asked, 0, 0)


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE results SET value = substr(value, 2)",
        "UPDATE results SET value = value || x'00'",
        "UPDATE results SET value = 'text'",
        "UPDATE results SET value = CAST(x'fffe' AS TEXT), sum = CAST(x'fffe' AS TEXT)",
        "UPDATE results SET value = 7, sum = NULL",
        "UPDATE results SET sum = x'00'",
        "UPDATE results SET value = (SELECT value FROM results LIMIT 1 OFFSET 1), "
        "sum = (SELECT sum FROM results LIMIT 1 OFFSET 1)",
    ],
)
def test_damaged_rows_are_unknown(path, damage):
    results = filled(path)
    changed(path, damage)
    with ResultStore(path, "kind") as opened:
        found = opened.get_many(results)
        assert all(results[key] == value for key, value in found.items())
        assert opened.rejected == 3 - len(found) >= 2
        opened.put_many(results)
        assert opened.get_many(results) == results


@pytest.mark.parametrize("step", [397, pytest.param(97, marks=pytest.mark.slow)])
def test_bytes_changed_anywhere_are_never_an_error_nor_a_wrong_result(path, step):
    results = filled(path, 40)
    good = path.read_bytes()
    for at in [*range(0, 100, 7), *range(100, len(good), step)]:
        for beside in path.parent.iterdir():
            beside.unlink()
        path.write_bytes(good[:at] + bytes([good[at] ^ 0x5A]) + good[at + 1 :])
        if at in range(16) or at in range(68, 72):  # the marks that say it is ours
            with pytest.raises(InvalidInputError, match="another program"):
                ResultStore(path, "kind")
            continue
        opened = ResultStore(path, "kind")
        with opened:
            found = opened.get_many(results)
            assert all(results[key] == value for key, value in found.items())
            opened.put_many(results)
            opened.get_many(results)


def test_a_damaged_file_is_renamed_and_a_new_one_begun(path):
    results = filled(path, 500)
    path.write_bytes(path.read_bytes()[:4096] + b"\xff" * 9000)
    with ResultStore(path, "kind") as opened:
        opened.get_many(results)
        opened.put_many(results)
        opened.put_many(results)
        assert opened.get_many(results) == results
        assert "was damaged" in opened.notes[0]
    assert path.with_name("results.sqlite.damaged").read_bytes().endswith(b"\xff" * 9000)
    assert found_in(path, results) == results


def test_a_new_file_in_the_place_of_a_damaged_one_is_left_there(path):
    results = filled(path, 500)
    with ResultStore(path, "kind") as late:
        for end in ("-wal", "-shm"):
            Path(f"{path}{end}").unlink(missing_ok=True)
        path.rename(path.with_name("damaged"))  # as another process does it
        filled(path, 1)
        late._file = late._renewed(sqlite3.DatabaseError("malformed"))
        assert len(late.get_many(results)) == 1
    assert not path.with_name("results.sqlite.damaged").exists()


@pytest.mark.parametrize("content", [b"hello " * 1000, b"\xff\xfe\x00", b"SQLite format 3\0", ""])
def test_files_of_others_are_refused_and_left_as_they_are(path, content):
    if content:
        path.write_bytes(content)
    else:  # a database with the same table
        changed(path, "CREATE TABLE results (key BLOB PRIMARY KEY, value BLOB, sum BLOB)")
        content = path.read_bytes()
    with pytest.raises(InvalidInputError, match="another program's file; expected a new file"):
        ResultStore(path, "kind")
    with pytest.raises(InvalidInputError, match="cannot be used"):
        ScheduleCache(path)
    assert path.read_bytes() == content
    assert list(path.parent.iterdir()) == [path]


def test_a_file_of_ours_without_its_table_is_begun_anew(path):
    results = filled(path)
    changed(path, "ALTER TABLE results RENAME COLUMN sum TO total")
    with ResultStore(path, "kind") as opened:
        opened.put_many(results)
        assert opened.get_many(results) == results
    assert path.with_name("results.sqlite.damaged").exists()


def test_what_is_no_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for odd, said in (
        (tmp_path, "Is a directory"),
        (tmp_path / "file" / "below", "file is not a directory"),
        (f"{tmp_path}/a\0b", "null"),
    ):
        with pytest.raises(InvalidInputError, match=said):
            ResultStore(odd, "kind")
    filled(tmp_path / "file")  # an empty file is as good as none
    filled(tmp_path / "made" / "below" / "x?y#z%20.sqlite")
    assert (tmp_path / "made" / "below" / "x?y#z%20.sqlite").exists()


def refuse_to_write(monkeypatch):
    """SQLite without permission to write, for whoever runs the tests."""

    class Denied(sqlite3.OperationalError):
        sqlite_errorcode = sqlite3.SQLITE_READONLY

    def denied(file):
        raise Denied("attempt to write a readonly database")

    monkeypatch.setattr(store, "_prepare", denied)


def test_a_folder_without_permission_to_write_is_read(path, monkeypatch):
    results = filled(path)
    refuse_to_write(monkeypatch)
    with ResultStore(path, "kind") as opened:
        assert opened.get_many(results) == results
        opened.put_many({b"more": b"results"})
        opened.put_many({b"more": b"results"})
        assert opened.get_many([b"more"]) == {}
        assert opened.notes == [f"{path} cannot be written; results are not kept"]
    with pytest.raises(InvalidInputError, match="readonly database"):
        ResultStore(path.with_name("new"), "kind")


def test_a_locked_file_is_a_note(path, monkeypatch):
    results = filled(path)
    monkeypatch.setattr(store, "_BUSY_S", 0.05)
    with ResultStore(path, "kind") as opened:
        with contextlib.closing(sqlite3.connect(path)) as other, other:
            other.execute("BEGIN IMMEDIATE")
            opened.put_many({b"more": b"results"})
            assert opened.get_many(results) == results
        assert "cannot be written: database is locked" in opened.notes[0]
        opened.put_many({b"more": b"results"})
        assert opened.get_many([b"more"]) == {b"more": b"results"}


WRITER = """
import sys
from phaze_fast.runs.store import ResultStore, ScheduleCache
who = sys.argv[2]
for k in range(60):
    with ResultStore(sys.argv[1], "kind") as store:
        store.put_many({f"{who} {k} {n}".encode(): b"v" * 100 for n in range(20)})
        store.put_many({b"shared": who.encode()})
        assert store.get_many([b"shared"])[b"shared"] in (b"a", b"b"), store.notes
        assert store.notes == [], store.notes
"""


@pytest.mark.slow
def test_two_processes_write_at_once(path):
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), who], stderr=subprocess.PIPE)
        for who in "ab"
    ]
    for writer in writers:
        _, said = writer.communicate(timeout=120)
        assert writer.returncode == 0, said.decode()
    keys = [f"{who} {k} {n}".encode() for who in "ab" for k in range(60) for n in range(20)]
    with ResultStore(path, "kind") as store:
        assert (len(store.get_many(keys)), store.notes) == (2400, [])


def test_a_process_that_is_killed_leaves_what_it_kept(path):
    code = (
        "import os, sys; from phaze_fast.runs.store import ResultStore; "
        "ResultStore(sys.argv[1], 'kind').put_many({b'a': b'b'}); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert found_in(path, [b"a"]) == {b"a": b"b"}


# ---- the fingerprint ----


def test_the_fingerprint_is_the_same_in_other_processes():
    code = "from phaze_fast.runs.store import pricing_fingerprint as f; print(f().hex())"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == store.pricing_fingerprint().hex()


def test_the_fingerprint_covers_all_that_prices_an_answer():
    names = {f.relative_to(store._PACKAGE).as_posix() for f in store._sources(store._PACKAGE)}
    assert {"cost/engine.py", "explore/find.py", "documents.py", "schedule/highs.py"} <= names
    assert {"hardware/data/chips/h100.yaml", "models/data/presets.yaml"} <= names
    assert not {n for n in names if n.split("/")[0] in ("cli", "report", "pipeline.py")}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of three files and a core, loaded a second after they were written."""
    root = tmp_path / "package"
    (root / "cost").mkdir(parents=True)
    (root / "cli").mkdir()
    (root / "cost" / "engine.py").write_text("price = 1")
    (root / "cost" / "data.yaml").write_text("price: 1")
    (root / "cli" / "main.py").write_text("shown = 1")
    monkeypatch.setattr(store, "_PACKAGE", root)
    monkeypatch.setattr(store, "_LOADED_AT_S", time.time() + 1000.0)
    yield root
    store.pricing_fingerprint.cache_clear()


def computed():
    store.pricing_fingerprint.cache_clear()
    return store.pricing_fingerprint()


def test_any_change_of_code_or_data_changes_the_fingerprint(package, monkeypatch):
    before = computed()
    (package / "cli" / "main.py").write_text("shown = 2")
    assert computed() == before
    (package / "cost" / "engine.py").write_text("price = 2")
    code = computed()
    (package / "cost" / "data.yaml").write_text("price: 2")
    data = computed()
    (package / "cost" / "data.yaml").rename(package / "cost" / "other.yaml")
    assert len({before, code, data, computed()}) == 4


def test_code_that_changed_after_it_was_loaded_answers_for_nobody(package, monkeypatch):
    monkeypatch.setattr(store, "_LOADED_AT_S", time.time() - 1000.0)
    once = computed()
    assert store.pricing_fingerprint() == once  # within a process it stays
    assert computed() != once
