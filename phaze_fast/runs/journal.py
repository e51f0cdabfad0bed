"""A directory of finished rows that survives the death of the process that writes them.

``results.jsonl`` has one JSON object per line, with a row and its checksum; ``manifest.json``
describes the run. Lines are appended and synced batch by batch, so that a kill loses at most the
batch in flight. Nothing in the directory is executed or unpickled.
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
from phaze_fast.runs.store import pricing_fingerprint

try:
    import fcntl
except ImportError:  # no file locks on this system: the user gives each run its own directory
    fcntl = None  # type: ignore[assignment]


Row = dict[str, Any]

FORMAT = "phaze-fast sweep 1"
RESULTS, MANIFEST, LOCK = "results.jsonl", "manifest.json", "lock"
DAMAGED, TORN = "results.damaged.jsonl", "results.torn"

_DIGEST = 16
_HEAD, _MIDDLE, _TAIL = b'{"sum":"', b'","row":', b"}"
_BODY = len(_HEAD) + 2 * _DIGEST + len(_MIDDLE)


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
    """Read a line, given without its line break; None where the line is damaged."""
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
    """Describe a run: the set of its points, and the function that evaluates them.

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


def _sync_directory(path: Path) -> None:
    with contextlib.suppress(OSError):  # not every system can open or sync a directory
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _replace(path: Path, chunks: Iterator[bytes]) -> None:
    """Replace a file atomically: a kill leaves the old file or the new one."""
    new_file = path.with_name(path.name + ".new")
    try:
        with new_file.open("wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        new_file.replace(path)
    except OSError:
        new_file.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def _append(path: Path, lines: Sequence[bytes]) -> None:
    with path.open("ab") as file:
        file.write(b"".join(line + b"\n" for line in lines))
        file.flush()
        os.fsync(file.fileno())


@dataclass
class _Results:
    """The contents of a results file."""

    rows: dict[str, Row] = field(default_factory=dict)
    damaged: list[bytes] = field(default_factory=list)
    """Complete lines whose checksum does not match."""
    tail: bytes = b""
    """Bytes after the last complete line."""

    @classmethod
    def of(cls, path: Path) -> _Results:
        results = cls()
        if not path.exists():
            return results
        with path.open("rb") as file:
            for line in file:
                row = decode_line(line.rstrip(b"\n"))
                if row is not None:
                    # A point that was evaluated again has two lines; the later one counts.
                    results.rows[row["key"]] = row
                if not line.endswith(b"\n"):
                    results.tail = line
                elif row is None:
                    results.damaged.append(line.rstrip(b"\n"))
        return results


def read_rows(path: Path) -> dict[str, Row]:
    """Read the rows of a results file by key; damaged lines are skipped."""
    return _Results.of(path).rows


class Journal:
    """The results directory of one run, locked while it is open.

    Parameters
    ----------
    out
        Directory, created where it is absent.
    description
        The run, as `manifest` returns it.
    keys
        Keys of all points of the run. A directory may already have rows of some of these points,
        but of no others. None where the keys are not known in advance.
    option
        The option that names the directory, for messages.
    run
        What the run is called in messages.

    Raises
    ------
    InvalidInputError
        Where the directory cannot be used, is in use, or has results of another run.

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
        self,
        out: Path | str,
        description: Mapping[str, Any],
        keys: Collection[str] | None = None,
        option: str = "out",
        run: str = "sweep",
    ) -> None:
        self.path = Path(out)
        self.rows: dict[str, Row] = {}
        """Rows that the directory had when it was opened, by key."""
        self.notes: list[str] = []
        self._option, self._run = option, run
        self._total, self._safe = int(description["points"]), 0
        try:
            with contextlib.ExitStack() as stack:
                self.path.mkdir(parents=True, exist_ok=True)
                stack.enter_context(self._locked())
                self._check_manifest(description)
                self._read_results(keys, description)
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
                self._file = os.open(self.path / RESULTS, flags, 0o644)
                stack.callback(os.close, self._file)
                _sync_directory(self.path)
                self._size = os.fstat(self._file).st_size
                self._stack = stack.pop_all()
        except OSError as error:
            raise InvalidInputError(
                f"{option}: {self.path} cannot be used: {error.strerror or error}; expected a "
                "directory that can be read and written"
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the results file and unlock the directory."""
        self._stack.close()

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write rows and wait until they are on disk.

        Raises
        ------
        InvalidInputError
            Where a row cannot be written; the file then ends with the row before it.
        """
        lines = [encode_line(row) for row in rows]
        data, written = b"".join(lines), 0
        try:
            while written < len(data):
                written += os.write(self._file, data[written:])
            os.fsync(self._file)
        except OSError as error:
            # After a failed write the earlier lines are complete; after a failed sync none may be.
            whole = data[:written].rfind(b"\n") + 1 if written < len(data) else 0
            self._cut_back(whole, data[:whole].count(b"\n"), error)
        self._size += len(data)
        self._safe += len(lines)

    def _cut_back(self, whole: int, lines: int, error: OSError) -> None:
        with contextlib.suppress(OSError):  # if this fails, the next run removes the torn line
            os.ftruncate(self._file, self._size + whole)
            os.fsync(self._file)
        self._size += whole
        self._safe += lines
        cause = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "it failed"
        raise InvalidInputError(
            f"{self._option}: {self.path / RESULTS} cannot be written, {cause} "
            f"({error.strerror or error}); "
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
                        holder = (self.path / LOCK).read_text("ascii", "replace")[:20]
                        raise InvalidInputError(
                            f"{self._option}: {self.path} is in use by another {self._run} "
                            f"(process {holder or 'unknown'}); expected a directory of its own, or "
                            f"that {self._run} ended"
                        ) from None
            file.truncate(0)
            file.write(str(os.getpid()).encode())
            file.flush()
            yield

    def _refused(self, reason: str) -> InvalidInputError:
        return InvalidInputError(
            f"{self._option}: {reason}; expected a new or empty directory, or one that this "
            f"{self._run} has written"
        )

    def _check_manifest(self, description: Mapping[str, Any]) -> None:
        path, results = self.path / MANIFEST, self.path / RESULTS
        if not path.exists():
            if results.exists() and results.stat().st_size:
                raise self._refused(f"{results} exists without {MANIFEST}")
            return
        try:
            there = parse_text(path.read_text("utf-8", "replace"), str(path), json_only=True)
        except InvalidInputError as error:
            raise self._refused(str(error)) from None
        # Rows that other code or data computed must not be mixed with new ones.
        for name in ("format", "phaze_fast", "pricing", "evaluate"):
            value = there.get(name) if isinstance(there, dict) else None
            if value != description[name]:
                raise self._refused(
                    f"{path} has {name} {str(value)[:80]!r}, this {self._run} {description[name]!r}"
                )

    def _read_results(self, keys: Collection[str] | None, description: Mapping[str, Any]) -> None:
        """Read the rows, write the manifest, and move damaged lines to other files."""
        file = self.path / RESULTS
        results = _Results.of(file)
        others = len(results.rows.keys() - set(keys)) if keys is not None else 0
        if others:
            raise self._refused(f"{file} holds {others} results of points that are not requested")
        # The manifest is on disk before the first result, so that results can always be identified.
        text = json.dumps(description, indent=2) + "\n"
        _replace(self.path / MANIFEST, iter((text.encode(),)))
        self.rows, self._safe, tail = results.rows, len(results.rows), results.tail
        if tail and decode_line(tail) is None:
            _append(self.path / TORN, [tail])
            self.notes.append(
                f"{file}: the last line was torn and is cut off; its {len(tail)} bytes are in "
                f"{TORN}"
            )
        if results.damaged:
            _append(self.path / DAMAGED, results.damaged)
            self.notes.append(
                f"{file}: {len(results.damaged)} damaged lines are moved to {DAMAGED} and their "
                "points evaluated again"
            )
        if tail or results.damaged:
            _replace(file, (encode_line(row) for row in results.rows.values()))
