"""A store of results by the content of their inputs: one SQLite file that processes may share.

A row's key is a digest of the kind of result, of its inputs and of `pricing_fingerprint`, so that a
result of another cost model is never returned. Each row has a checksum; a row that fails it
counts as missing. Nothing is unpickled.

Once a store is open, faults of its file raise no error. A damaged file is renamed, a row that
cannot be written is computed again next time, and `notes` lists such faults.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote

from phaze_fast import schedule
from phaze_fast.errors import InvalidInputError, PhazeError

STORE = "results.sqlite"
"""Name of the file of results in a cache directory."""

_MAGIC = b"SQLite format 3\0"
_APPLICATION = 0x70684661  # "phFa", the application id in the header of our files
_APPLICATION_AT = 68
_HEADER = 100
_DIGEST = 16
_BUSY_S = 30.0
_AT_ONCE = 500
"""Keys of one query; SQLite takes at least 999 parameters."""
_TABLE = "CREATE TABLE IF NOT EXISTS results (key BLOB PRIMARY KEY, value BLOB, sum BLOB)"


_PACKAGE = Path(__file__).resolve().parents[1]
_CORE = "phaze_fast._core"
_SUFFIXES = {".py", ".yaml", ".json", ".txt"}
_AFTER_THE_SEARCH = {"papers", "cli", "report", "pipeline.py", "__init__.py", "__main__.py"}
"""Parts of the package on which stored results do not depend."""
_LOADED_AT_S = time.time()


def _sources(package: Path) -> list[Path]:
    """Return the files on which results depend, in the order of their names."""
    sources = []
    for part in package.iterdir():
        if part.name not in _AFTER_THE_SEARCH:
            files = part.rglob("*") if part.is_dir() else [part]
            sources += [file for file in files if file.suffix in _SUFFIXES]
    return sorted(sources)


@lru_cache(maxsize=1)
def pricing_fingerprint() -> bytes:
    """Hash the code and data of the package up to the search, and the compiled core.

    A stored result is the result of the code and data that computed it, so its key contains this
    hash. The hash is computed once in a process. A file that was written after this process loaded
    the package may differ from what runs here: then the hash is unique to this process.

    Examples
    --------
    >>> len(pricing_fingerprint())
    16
    """
    core = find_spec(_CORE)
    if core is None or core.origin is None:
        raise PhazeError("the compiled core of phaze_fast is missing; install the package again")
    files = {file.relative_to(_PACKAGE).as_posix(): file for file in _sources(_PACKAGE)}
    files[_CORE] = Path(core.origin)
    state = hashlib.blake2b(digest_size=_DIGEST)
    newest_s = 0.0
    for name, file in files.items():
        content = file.read_bytes()
        newest_s = max(newest_s, file.stat().st_mtime)
        state.update(f"{name}\n{len(content)}\n".encode())
        state.update(content)
    if newest_s > _LOADED_AT_S:
        state.update(os.urandom(_DIGEST))
    return state.digest()


def _hashed(*parts: bytes) -> bytes:
    state = hashlib.blake2b(digest_size=_DIGEST)
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.digest()


def _origin(path: Path) -> str:
    """Return ``absent`` (or empty), ``ours`` or ``other`` (not a cache); may raise OSError."""
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER)
    except FileNotFoundError:
        return "absent"
    if not header:
        return "absent"
    mark = header[_APPLICATION_AT : _APPLICATION_AT + 4]
    ours = header.startswith(_MAGIC) and mark == _APPLICATION.to_bytes(4, "big")
    return "ours" if ours else "other"


def _is_damage(error: sqlite3.Error) -> bool:
    """Whether a file is damaged, rather than locked, full or unreadable."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)


def _connected(path: Path, read_only: bool) -> sqlite3.Connection:
    """Open a database and read from it, so that a file that is no database fails here."""
    # Without permission to write, the file is read as it is, without locks.
    options = "mode=ro&immutable=1" if read_only else "mode=rwc"
    uri = f"file:{quote(os.fsencode(path))}?{options}"
    file = sqlite3.connect(uri, timeout=_BUSY_S, check_same_thread=False, uri=True)
    try:
        file.text_factory = bytes  # invalid UTF-8 must not raise: such a row fails its checksum
        if not read_only:
            _prepare(file)
        file.execute("SELECT key, value, sum FROM results LIMIT 1").fetchall()
    except sqlite3.Error:
        file.close()
        raise
    return file


def _prepare(file: sqlite3.Connection) -> None:
    """Create the table where it is absent, and let readers work while one process writes."""
    if file.execute("PRAGMA application_id").fetchone()[0] != _APPLICATION:
        with file:  # before the write-ahead log is on, so that the id goes into the header itself
            file.execute("BEGIN IMMEDIATE")
            file.execute(f"PRAGMA application_id={_APPLICATION}")
            file.execute(_TABLE)
    with contextlib.suppress(sqlite3.OperationalError):  # another process may be setting it now
        file.execute("PRAGMA journal_mode=WAL")
    with file:
        file.execute("BEGIN IMMEDIATE")  # fails where the file cannot be written


class ResultStore:
    """Results of one kind in a file that several processes may share.

    Parameters
    ----------
    path
        The file; created, with its folder, where it is absent.
    kind
        Kind of the results; results of different kinds have different keys.

    Raises
    ------
    InvalidInputError
        Where the path is not a store, or cannot be read or created.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with ResultStore(Path(folder) / "results.sqlite", "example") as store:
    ...         store.put_many({b"inputs": b"result"})
    ...         store.get_many([b"inputs", b"others"])
    {b'inputs': b'result'}
    """

    def __init__(self, path: Path | str, kind: str) -> None:
        self.path = Path(path).absolute()
        self.notes: list[str] = []
        """Faults of the file, and what was done about them."""
        self.rejected = 0
        """Number of damaged rows, which are not used."""
        self._kind, self._lock = kind.encode(), threading.Lock()
        self._read_only, self._inode = False, 0
        self._file: sqlite3.Connection | None = None
        self._file = self._opened()

    def __enter__(self) -> ResultStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get_many(self, keys: Iterable[bytes]) -> dict[bytes, bytes]:
        """Look up results by their inputs; only those of this code and data are returned."""
        wanted = {self._key(key): key for key in keys}
        listed = list(wanted)
        results: dict[bytes, bytes] = {}
        for at in range(0, len(listed), _AT_ONCE):
            for full, value, checksum in self._rows(listed[at : at + _AT_ONCE]):
                if isinstance(value, bytes) and checksum == _hashed(full, value):
                    results[wanted[full]] = value
                else:
                    self.rejected += 1
        return results

    def put_many(self, results: Mapping[bytes, bytes]) -> None:
        """Store results by their inputs; where that fails, `notes` gets an entry."""
        if not results or self._file is None:
            return
        if self._read_only:
            self._note(f"{self.path} cannot be written; results are not kept")
            return
        keyed = [(self._key(key), value) for key, value in results.items()]
        rows = [(full, value, _hashed(full, value)) for full, value in keyed]
        with self._guarded("written") as file:
            if file is not None:
                with file:
                    file.executemany("INSERT OR REPLACE INTO results VALUES (?, ?, ?)", rows)

    def close(self) -> None:
        """Close the file; later look-ups return nothing and later results are not stored."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _key(self, key: bytes) -> bytes:
        return _hashed(self._kind, pricing_fingerprint(), key)

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _rows(self, keys: list[bytes]) -> list[tuple[bytes, object, object]]:
        marks = ",".join("?" * len(keys))
        rows: list[tuple[bytes, object, object]] = []
        with self._guarded("read") as file:
            if file is not None:
                query = f"SELECT key, value, sum FROM results WHERE key IN ({marks})"
                rows = file.execute(query, keys).fetchall()
        return rows

    @contextlib.contextmanager
    def _guarded(self, done: str) -> Iterator[sqlite3.Connection | None]:
        """Yield the open file; its errors become entries of `notes`."""
        with self._lock:
            try:
                yield self._file
            except sqlite3.Error as error:
                if _is_damage(error):
                    self._file = self._renewed(error)
                else:  # the file is locked, the disk full, or permission missing
                    self._note(f"{self.path} cannot be {done}: {error}")

    def _opened(self) -> sqlite3.Connection | None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            origin = _origin(self.path)
        except FileExistsError:
            raise self._refused(f"{self.path.parent} is not a directory") from None
        except (OSError, ValueError) as error:
            raise self._refused(error) from None
        if origin == "other":
            raise self._refused("it is another program's file")
        try:
            return self._connect(read_only=False)
        except sqlite3.Error as error:
            if _is_damage(error):
                return self._renewed(error)
            if origin == "absent":
                raise self._refused(error) from None
        try:
            return self._connect(read_only=True)
        except sqlite3.Error as error:
            raise self._refused(error) from None

    def _connect(self, read_only: bool) -> sqlite3.Connection:
        file = _connected(self.path, read_only)
        self._read_only = read_only
        with contextlib.suppress(OSError):
            self._inode = self.path.stat().st_ino
        return file

    def _renewed(self, error: sqlite3.Error) -> sqlite3.Connection | None:
        """Rename a damaged file and create a new one, unless another process has done so."""
        if self._file is not None:
            self._file.close()
        try:
            if _origin(self.path) == "other":
                raise OSError("another file is in its place")
            with contextlib.suppress(FileNotFoundError):
                if self._inode in (0, self.path.stat().st_ino):
                    self._rename()
            file = self._connect(read_only=False)
        except (OSError, sqlite3.Error):
            self._note(f"{self.path} is damaged ({error}); it is not used")
            return None
        self._note(f"{self.path} was damaged ({error}); it is now {self.path.name}.damaged")
        return file

    def _rename(self) -> None:
        for end in ("", "-wal", "-shm"):  # an old log would be applied to the new file
            with contextlib.suppress(FileNotFoundError):
                Path(f"{self.path}{end}").replace(f"{self.path}.damaged{end}")

    def _refused(self, reason: str | Exception) -> InvalidInputError:
        said = getattr(reason, "strerror", None) or str(reason)
        return InvalidInputError(
            f"cache: {self.path} cannot be used: {said}; expected a new file, or one that "
            "phaze_fast has written as a cache"
        )


class ScheduleCache(schedule.ScheduleCache):
    """Proven schedules by the content of the layer, in memory and in a file.

    Parameters
    ----------
    path
        SQLite file that processes may share; by default only memory is used. Schedules computed by
        another version of the code or its data are ignored.
    limit
        Entries in memory; the least recently used are dropped first.

    Raises
    ------
    InvalidInputError
        Where the path is not a store of this package, or cannot be read or created.

    Examples
    --------
    >>> ScheduleCache().info().entries
    0
    """

    def __init__(self, path: Path | str | None = None, limit: int = 100_000) -> None:
        store = None if path is None else ResultStore(path, "layer schedules")
        super().__init__(store, limit)
