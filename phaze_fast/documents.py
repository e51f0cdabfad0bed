"""Plain data as YAML and JSON text, the hash of its content, presets by name, rows of CSV files.

Faults are an `InvalidInputError` with the file and the line. No pickle is ever loaded.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import json
import os
import re
import tempfile
import zlib
from collections.abc import Callable, Hashable, Mapping
from functools import cache, cached_property
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml

from phaze_fast.errors import InvalidInputError, nearest

_MOST_BYTES = 2**28
_MOST_VALUES = 10**7
"""Most values in a document; values repeated by an alias count each time."""
_MOST_MERGED = 1000
_MOST_BITS = 14_000  # longest integer; Python converts at most 4,300 decimal digits
_LONGEST_KEY = 60


class _Rules(yaml.constructor.SafeConstructor):
    """YAML 1.1 as PyYAML reads it, but `1.2e12` is a number and a repeated key is a fault."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Expand ``<<`` merges; refuse too many keys: levels of a hostile file double them."""
        merged = [value for key, value in node.value if key.tag == "tag:yaml.org,2002:merge"]
        many = any(len(value.value) > _MOST_MERGED for value in merged)
        if not many:
            super().flatten_mapping(node)
        if many or (merged and len(node.value) > _MOST_MERGED):
            raise yaml.constructor.ConstructorError(
                None, None, f"more than {_MOST_MERGED} keys are merged", node.start_mark
            )

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key must be text or a number", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> Any:
        """Read an integer; a very long one becomes a `_LongInteger`, which field checks refuse."""
        text = str(self.construct_scalar(node)).replace("_", "")
        try:
            number = super().construct_yaml_int(node)
        except ValueError:  # longer than the interpreter's limit
            return _LongInteger(text)
        return number if number.bit_length() <= _MOST_BITS else _LongInteger(text)


_Rules.add_constructor("tag:yaml.org,2002:int", _Rules.construct_yaml_int)  # type: ignore[type-var]


class _Loader(_Rules, yaml.SafeLoader):
    """Reads any file: whatever is in it, its faults are found and said."""


class _OwnLoader(_Rules, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Reads the package's own files ten times as fast, where PyYAML came with libyaml."""


class _Dumper(yaml.SafeDumper):
    """Quotes text that `_Loader` would read back as another type."""


_FLOAT = re.compile(
    r"^(?:[-+]?(?:\d[\d_]*\.[\d_]*(?:[eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+|\.\d[\d_]*"
    r"(?:[eE][-+]?\d+)?)|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
for _class in (_Loader, _OwnLoader, _Dumper):
    _class.yaml_implicit_resolvers = {
        first: [pair for pair in pairs if pair[0] != "tag:yaml.org,2002:float"]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key, value in pairs:
        if key in mapping:
            raise ValueError(f"key {key[:_LONGEST_KEY]!r} is given twice")
        mapping[key] = value
    return mapping


class _LongInteger(float):
    """Represents an integer too long for Python: infinite, printed as its number of digits."""

    def __new__(cls, text: str) -> _LongInteger:
        number = super().__new__(cls, "-inf" if text.startswith("-") else "inf")
        number.digits = len(text.lstrip("-"))
        return number

    digits: int

    def __repr__(self) -> str:
        return f"an integer of {self.digits} digits"


def _integer(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:  # longer than the interpreter's limit
        return _LongInteger(text)


def parse_json(text: str) -> Any:
    """Parse JSON; a key that is given twice is a fault.

    Integers of any length and the constants NaN and Infinity are accepted here; the checks of the
    fields refuse them later with the name of the field.

    Raises
    ------
    InvalidInputError
        The message has the column and the fault; the caller adds the file and the line.

    Examples
    --------
    >>> parse_json('{"a": [1, 2.5]}')
    {'a': [1, 2.5]}
    """
    try:
        return json.loads(text, object_pairs_hook=_no_repeats, parse_int=_integer)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if "\n" in text.strip() else ""
        raise InvalidInputError(f"not JSON: {error.msg} at {line}column {error.colno}") from None
    except RecursionError:
        raise InvalidInputError("nested too deeply") from None
    except ValueError as error:
        raise InvalidInputError(str(error)) from None


def _count(value: Any, known: dict[int, int], open_: set[int]) -> int:
    """Count the values in plain data; an aliased value counts at each use."""
    if not isinstance(value, dict | list):
        return 1
    if id(value) in open_:
        raise ValueError("a YAML alias refers to a value that contains it")
    if id(value) not in known:
        open_.add(id(value))
        inner = value.values() if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_count(item, known, open_) for item in inner)
        open_.discard(id(value))
    return known[id(value)]


def _parse_yaml(text: str) -> Any:
    data = yaml.load(text, _Loader)  # a SafeLoader with corrections
    if "*" in text and _count(data, {}, set()) > _MOST_VALUES:
        raise ValueError(f"its YAML aliases expand to more than {_MOST_VALUES} values")
    return data


def parse_text(text: str, source: str, json_only: bool = False) -> Any:
    """Parse YAML, which includes JSON, into plain data.

    Raises
    ------
    InvalidInputError
        The message has the line and the fault.
    """
    try:
        return parse_json(text) if json_only else _parse_yaml(text)
    except yaml.MarkedYAMLError as error:
        where = f" line {error.problem_mark.line + 1}:" if error.problem_mark else ""
        raise InvalidInputError(f"{source}:{where} {error.problem}") from None
    except RecursionError:
        raise InvalidInputError(f"{source}: nested too deeply") from None
    except (yaml.YAMLError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise InvalidInputError(f"{source}: {reason}") from None


def read_text(path: str | Path, compressed: bool = False) -> str:
    """Read a text file of at most 256 MiB.

    Parameters
    ----------
    path
        The file.
    compressed
        Whether the file is gzip-compressed; the limit applies to the unpacked text as well.

    Raises
    ------
    InvalidInputError
        Where the file is missing, unreadable, too long or not UTF-8.
    """
    path = Path(path)
    if path.is_fifo() and path.resolve().is_fifo():  # a shell's <(command) has no path
        raise InvalidInputError(f"{path}: a named pipe is not accepted; expected a file")
    try:
        with gzip.open(path) if compressed else path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise InvalidInputError(f"{path}: too long; expected at most 256 MiB")
        return data.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except FileNotFoundError:
        raise InvalidInputError(f"{path}: no such file") from None
    except UnicodeDecodeError:
        raise InvalidInputError(f"{path}: not a text file in UTF-8") from None
    except (OSError, EOFError, zlib.error, ValueError) as error:
        if isinstance(error, InvalidInputError):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidInputError(f"{path}: cannot be read: {reason}") from None


def read_document(path: str | Path) -> Any:
    """Read a YAML or JSON file into plain data.

    Raises
    ------
    InvalidInputError
        Where the file is missing, unreadable, not UTF-8 or malformed.
    """
    path = Path(path)
    return parse_text(read_text(path), str(path), json_only=path.suffix == ".json")


@cache
def package_data(package: str, name: str) -> Any:
    """Return a file of a package's ``data``: plain data of YAML and JSON, the text of others.

    Examples
    --------
    >>> list(package_data("phaze_fast.models", "routing.yaml"))
    ['auxiliary-loss', 'bias']
    """
    text = (resources.files(package) / "data" / name).read_text("utf-8")
    if name.endswith(".yaml"):
        return yaml.load(text, _OwnLoader)
    return text if name.endswith(".txt") else parse_json(text)


T = TypeVar("T")


class Presets(Generic[T]):
    """Records of one kind by preset name, or read from a file of the user.

    Each preset is one YAML file in a folder of the package: adding a file adds a preset. Names are
    case-insensitive. Records are frozen, so each file is read once.

    Parameters
    ----------
    what
        Noun for one record in messages, such as ``chip``.
    folder
        Package and path of the folder, such as ``phaze_fast.hardware/data/chips``.
    read
        Builds a record from plain data and the name of their source, like `Record.from_dict`.
    """

    def __init__(self, what: str, folder: str, read: Callable[[Any, str], T]) -> None:
        self._what, self._folder, self._read = what, folder, read
        self._records: dict[str, T] = {}

    def file(self, name: str) -> Traversable:
        """Return a file of the folder."""
        package, _, path = self._folder.partition("/")
        return resources.files(package) / path / name

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of all presets, sorted."""
        files = (file.name for file in self.file("").iterdir())
        return tuple(sorted(name[:-5] for name in files if name.endswith(".yaml")))

    def load(self, name_or_path: str | Path) -> T:
        """Return a preset by its name, or read a YAML or JSON file.

        Raises
        ------
        InvalidInputError
            Where there is no such preset or file, or the file is not accepted.
        """
        text = str(name_or_path)
        path = isinstance(name_or_path, Path) or text.endswith((".yaml", ".yml", ".json"))
        if path or "/" in text:
            return self.from_file(name_or_path)
        name = text.lower()
        if name not in self._records:
            self._records[name] = self.preset(name)
        return self._records[name]

    def from_file(self, path: str | Path) -> T:
        """Read a file of the user: a record, or a calibration that contains such a record."""
        document = read_document(path)
        if isinstance(document, Mapping) and "calibration" in document and self._what in document:
            inside = document[self._what]
            return self.load(inside) if isinstance(inside, str) else self._read(inside, str(path))
        return self._read(document, str(path))

    def preset(self, name: str) -> T:
        """Read a preset from its YAML file; subclasses may override this method."""
        self.check(name)
        return self._read(self._document(name), name)

    def _document(self, name: str) -> Any:
        return yaml.load(self.file(f"{name}.yaml").read_text("utf-8"), _OwnLoader)

    def check(self, name: str) -> None:
        """Raise an `InvalidInputError` with the nearest name where the preset is unknown."""
        if name not in self.names:
            raise InvalidInputError(
                f"{self._what}: {name!r} is neither a preset nor a .yaml or .json file; "
                f"{nearest(name, self.names)}"
            )


def to_yaml(data: object) -> str:
    """Write plain data as YAML, keys in the order given."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=False, width=96)


def digest(data: object) -> str:
    """Hash plain data by content.

    Examples
    --------
    >>> digest({"b": 1, "a": 2}) == digest({"a": 2, "b": 1})
    True
    """
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def write_whole(path: str | Path, text: str, name: str | None = None) -> None:
    """Write a file atomically, so that a full disk never leaves half of it.

    Parameters
    ----------
    path
        The file; a pipe or a device is written directly.
    text
        What to write.
    name
        Name of the file in error messages; by default the path.

    Raises
    ------
    InvalidInputError
        Where the file cannot be written.
    """
    try:
        target = Path(path).resolve()
        if str(path).startswith("/dev/") or (target.exists() and not target.is_file()):
            Path(path).write_text(text, encoding="utf-8")
            return
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=".phaze-fast-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            umask = os.umask(0)
            os.umask(umask)
            Path(temporary).chmod(target.stat().st_mode if target.exists() else 0o666 & ~umask)
            Path(temporary).replace(target)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidInputError(f"{name or path}: cannot be written: {reason}") from None


# ---- rows of CSV files ----


def csv_rows(path: Path | str) -> tuple[list[str], list[tuple[int, dict[str, str]]]]:
    """Read a CSV file: its header, and its rows, each with the line that it begins on.

    Blank lines and lines that begin with ``#`` are skipped.

    Raises
    ------
    InvalidInputError
        Where the file cannot be read or is not CSV.
    """
    text = read_text(path).removeprefix("\ufeff")  # spreadsheets begin with a byte-order mark
    reader = csv.reader(text.splitlines(keepends=True), strict=True)
    rows: list[tuple[int, dict[str, str]]] = []
    header: list[str] = []
    begins = 1
    try:
        for cells in reader:
            if any(cell.strip() for cell in cells) and not cells[0].startswith("#"):
                if not header:
                    header = [name.strip() for name in cells]
                else:
                    rows.append((begins, dict(zip(header, cells, strict=False))))
            begins = reader.line_num + 1
    except csv.Error as error:
        raise InvalidInputError(f"{path}: not a CSV file: {error}") from None
    return header, rows


class CsvRow:
    """The cells of one row by column; errors name the row and the column.

    Parameters
    ----------
    where
        Name of the row in messages, such as ``mine.csv, line 3``; may be empty.
    cells
        Text by column.
    error
        Type of the exception where a cell is not accepted.

    Examples
    --------
    >>> row = CsvRow("mine.csv, line 3", {"tp": "4", "dp": ""})
    >>> row.whole("tp"), row.whole("dp", default=1)
    (4, 1)
    """

    def __init__(
        self,
        where: str,
        cells: Mapping[str, str],
        error: type[InvalidInputError] = InvalidInputError,
    ) -> None:
        self.where, self.cells, self._error = where, cells, error

    def fault(self, column: str, wanted: str) -> InvalidInputError:
        """Return the error for a cell that is missing or not accepted."""
        value = self.text(column)
        problem = f"{value!r} is not accepted" if value else "is missing"
        where = f"{self.where}: " if self.where else ""
        return self._error(f"{where}{column}: {problem}; expected {wanted}")

    def text(self, column: str) -> str:
        """Return a cell without leading and trailing blanks; empty where the column is missing."""
        return (self.cells.get(column) or "").strip()

    def _number(self, column: str) -> float:
        try:
            return float(self.text(column))
        except ValueError:
            return 0.0

    def whole(self, column: str, default: int | None = None) -> int:
        """Return a whole number from 1 to 2^40."""
        if default is not None and not self.text(column):
            return default
        value = self._number(column)
        if not 1 <= value <= 2**40 or value != int(value):
            raise self.fault(column, "a whole number from 1 to 2^40")
        return int(value)

    def positive(self, column: str, default: float | None = None) -> float:
        """Return a number greater than 0."""
        if default is not None and not self.text(column):
            return default
        value = self._number(column)
        if not 1e-9 <= value <= 1e18:
            raise self.fault(column, "a number from 1e-9 to 1e18")
        return value

    def flag(self, column: str, default: bool | None = None) -> bool:
        """Return True or False."""
        text = self.text(column) or str(default)
        if text not in ("True", "False"):
            raise self.fault(column, "True or False")
        return text == "True"
