"""A directory that holds finished rows, whatever happens to the process that writes them.

``results.jsonl`` has one JSON object per line with a checksum of its row; ``manifest.json`` says
what was asked. Lines are appended and synced batch by batch, so a kill costs at most what was in
flight. Nothing in the directory is executed or unpickled.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import platform
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from phaze_fast.documents import digest, parse_text
from phaze_fast.errors import InvalidInputError
from phaze_fast.runs.fingerprint import pricing_fingerprint

try:
    import fcntl
except ImportError:  # no such locks on this system: one sweep per directory is up to the user
    fcntl = None  # type: ignore[assignment]

__all__ = ["Journal", "decode_line", "encode_line", "manifest"]

Row = dict[str, Any]

FORMAT = "phaze-fast sweep 1"
RESULTS, MANIFEST, LOCK = "results.jsonl", "manifest.json", "lock"
DAMAGED, TORN = "results.damaged.jsonl", "results.torn"

_DIGEST = 16
_HEAD, _MIDDLE, _TAIL = b'{"sum":"', b'","row":', b"}"
_BODY = len(_HEAD) + 2 * _DIGEST + len(_MIDDLE)
_EXPECTED = "expected a new or empty directory, or one that this sweep has written"


def _checksum(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST).hexdigest().encode()


def encode_line(row: Mapping[str, Any]) -> bytes:
    """Write a row as one line: a JSON object of the row and its checksum.

    Examples
    --------
    >>> decode_line(encode_line({"key": "a", "status": "optimal", "time_s": 0.1}).strip())
    {'key': 'a', 'status': 'optimal', 'time_s': 0.1}
    """
    body = json.dumps(row, separators=(",", ":"), allow_nan=False).encode()
    return b"".join((_HEAD, _checksum(body), _MIDDLE, body, _TAIL, b"\n"))


def decode_line(line: bytes) -> Row | None:
    """Read a line without its end; None where it is not as it was written."""
    body = line[_BODY:-1]
    if line != b"".join((_HEAD, _checksum(body), _MIDDLE, body, _TAIL)):
        return None
    try:
        row = json.loads(body)
    except ValueError:
        return None
    good = isinstance(row, dict) and isinstance(row.get("key"), str) and "status" in row
    return row if good else None


def manifest(keys: Collection[str], evaluate: str) -> dict[str, Any]:
    """Describe a sweep: the set of its points, and with what they are evaluated.

    Examples
    --------
    >>> manifest({"b", "a"}, "plan")["asked"] == manifest(["a", "b"], "plan")["asked"]
    True
    """
    from importlib.metadata import version

    return {
        "format": FORMAT,
        "phaze_fast": version("phaze-fast"),
        "python": platform.python_version(),
        "pricing": pricing_fingerprint().hex(),
        "evaluate": evaluate,
        "points": len(set(keys)),
        "asked": digest(sorted(set(keys))),
    }


@contextlib.contextmanager
def _explained(out: Path) -> Iterator[None]:
    """Turn what the file system says into one line that names the directory."""
    try:
        yield
    except OSError as error:
        raise InvalidInputError(
            f"out: {out} cannot be used: {error.strerror or error}; expected a directory that can "
            "be read and written"
        ) from None


def _sync_directory(path: Path) -> None:
    with contextlib.suppress(OSError):  # not every system can open or sync a directory
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _replace(path: Path, chunks: Iterator[bytes]) -> None:
    """Write a whole file so that a kill leaves the old one or the new one."""
    beside = path.with_name(path.name + ".new")
    try:
        with beside.open("wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def _keep_aside(path: Path, pieces: Sequence[bytes]) -> None:
    with path.open("ab") as file:
        for piece in pieces:
            file.write(piece + b"\n")
        file.flush()
        os.fsync(file.fileno())


@dataclass
class _Reading:
    """What a results file holds."""

    rows: dict[str, Row] = field(default_factory=dict)
    damaged: list[bytes] = field(default_factory=list)
    """Whole lines that are not as they were written."""
    tail: bytes = b""
    """What follows the last whole line."""

    @classmethod
    def of(cls, path: Path) -> _Reading:
        found = cls()
        if not path.exists():
            return found
        with path.open("rb") as file:
            for line in file:
                row = decode_line(line.rstrip(b"\n"))
                if row is not None:
                    # A point that was tried again stands twice; the later line counts.
                    found.rows[row["key"]] = row
                if not line.endswith(b"\n"):
                    found.tail = line
                elif row is None:
                    found.damaged.append(line.rstrip(b"\n"))
        return found


class Journal:
    """The results directory of one sweep, locked while it is open.

    Parameters
    ----------
    out
        Directory, made where it is absent.
    asked
        What `manifest` gives.
    keys
        Keys of all points asked for. A directory may hold some of them already, and no others. None
        where they are not known beforehand.

    Raises
    ------
    InvalidInputError
        Where the directory cannot be used, is in use, or holds results of something else.

    Examples
    --------
    >>> import tempfile
    >>> keys = {"a", "b"}
    >>> with tempfile.TemporaryDirectory() as out:
    ...     with Journal(out, manifest(keys, "plan"), keys) as journal:
    ...         journal.append([{"key": "a", "status": "optimal", "time_s": 0.1}])
    ...     with Journal(out, manifest(keys, "plan"), keys) as journal:
    ...         list(journal.rows)
    ['a']
    """

    def __init__(
        self, out: Path | str, asked: Mapping[str, Any], keys: Collection[str] | None = None
    ) -> None:
        self.path = Path(out)
        self.rows: dict[str, Row] = {}
        """Rows that were there already, by key."""
        self.notes: list[str] = []
        self._total, self._safe = int(asked["points"]), 0
        with contextlib.ExitStack() as stack, _explained(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            stack.enter_context(self._locked())
            self._check_manifest(asked)
            found = _Reading.of(self.path / RESULTS)
            if keys is not None:
                self._check_keys(found.rows, keys)
            # What is asked is on disk before the first result, so that results are never nameless.
            text = json.dumps(asked, indent=2) + "\n"
            _replace(self.path / MANIFEST, iter((text.encode(),)))
            self._mend(found)
            self.rows, self._safe = found.rows, len(found.rows)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
            self._file = os.open(self.path / RESULTS, flags, 0o644)
            stack.callback(os.close, self._file)
            _sync_directory(self.path)
            self._size = os.fstat(self._file).st_size
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the directory."""
        self._stack.close()

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write rows and wait until they are on disk.

        Raises
        ------
        InvalidInputError
            Where they cannot be written: the file then ends with the last row that could.
        """
        lines = [encode_line(row) for row in rows]
        data, written = b"".join(lines), 0
        try:
            while written < len(data):
                written += os.write(self._file, data[written:])
            os.fsync(self._file)
        except OSError as error:
            # After a failed sync nothing is known of what was written; after a failed write the
            # lines before it are whole.
            whole = data[:written].rfind(b"\n") + 1 if written < len(data) else 0
            self._cut_back(whole, data[:whole].count(b"\n"), error)
        self._size += len(data)
        self._safe += len(lines)

    def _cut_back(self, whole: int, lines: int, error: OSError) -> None:
        with contextlib.suppress(OSError):  # a torn end is cut off when the sweep goes on
            os.ftruncate(self._file, self._size + whole)
            os.fsync(self._file)
        self._size += whole
        self._safe += lines
        cause = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "it failed"
        raise InvalidInputError(
            f"out: {self.path / RESULTS} cannot be written, {cause} ({error.strerror or error}); "
            f"{self._safe} of {self._total or 'all'} points are safe, and the same run "
            "goes on from them"
        ) from None

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.path / LOCK).open("a+b") as file:
            if fcntl is not None:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    if error.errno not in (errno.EAGAIN, errno.EACCES):
                        self.notes.append(f"{self.path} was not locked: {error.strerror}")
                    else:
                        raise InvalidInputError(self._in_use()) from None
            file.truncate(0)
            file.write(str(os.getpid()).encode())
            file.flush()
            yield

    def _in_use(self) -> str:
        holder = (self.path / LOCK).read_text("ascii", "replace")[:20]
        return (
            f"out: {self.path} is in use by another sweep (process {holder or 'unknown'}); "
            "expected a directory of its own, or that sweep ended"
        )

    def _check_manifest(self, asked: Mapping[str, Any]) -> None:
        path, results = self.path / MANIFEST, self.path / RESULTS
        if not path.exists():
            if results.exists() and results.stat().st_size:
                raise InvalidInputError(f"out: {results} stands without {MANIFEST}; {_EXPECTED}")
            return
        try:
            found = parse_text(path.read_text("utf-8", "replace"), str(path), json_only=True)
        except InvalidInputError as error:
            raise InvalidInputError(f"out: {error}; {_EXPECTED}") from None
        # Rows that other code or data has priced must not stand beside new ones.
        for name in ("format", "phaze_fast", "pricing", "evaluate"):
            there = found.get(name) if isinstance(found, dict) else None
            if there != asked[name]:
                raise InvalidInputError(
                    f"out: {path} has {name} {str(there)[:80]!r}, this sweep {asked[name]!r}; "
                    f"{_EXPECTED}"
                )

    def _check_keys(self, rows: Mapping[str, Row], keys: Collection[str]) -> None:
        others = len(rows.keys() - set(keys))
        if others:
            raise InvalidInputError(
                f"out: {self.path / RESULTS} holds {others} results of points that are not asked "
                f"for; {_EXPECTED}"
            )

    def _mend(self, found: _Reading) -> None:
        """Cut off a torn end, and take damaged lines out; the bytes of both are kept aside."""
        results = self.path / RESULTS
        tail = found.tail
        if tail and decode_line(tail) is None:
            _keep_aside(self.path / TORN, [tail])
            self.notes.append(
                f"{results}: the last line was torn and is cut off; its {len(tail)} bytes are in "
                f"{TORN}"
            )
        if found.damaged:
            _keep_aside(self.path / DAMAGED, found.damaged)
            self.notes.append(
                f"{results}: {len(found.damaged)} damaged lines are moved to {DAMAGED} and their "
                "points evaluated again"
            )
        if tail or found.damaged:
            _replace(results, (encode_line(row) for row in found.rows.values()))
