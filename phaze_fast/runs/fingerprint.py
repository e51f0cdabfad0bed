"""A digest of all code and data that price an answer.

A result that was kept is an answer of the code and data that computed it, and of no other. Its key
therefore holds this digest: after any change to the cost model it is not found.
"""

from __future__ import annotations

import hashlib
import os
import time
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from phaze_fast.errors import PhazeError

__all__ = ["pricing_fingerprint"]

_PACKAGE = Path(__file__).resolve().parents[1]
_CORE = "phaze_fast._core"
_SUFFIXES = {".py", ".yaml", ".json", ".txt"}
_AFTER_THE_SEARCH = {"papers", "cli", "report", "pipeline.py", "__init__.py", "__main__.py"}
"""Parts of the package that show answers and change none."""
_DIGEST = 16
_LOADED_AT_S = time.time()


def _sources(package: Path) -> list[Path]:
    """Files that price an answer, in the order of their names."""
    found = []
    for part in package.iterdir():
        if part.name not in _AFTER_THE_SEARCH:
            files = part.rglob("*") if part.is_dir() else [part]
            found += [file for file in files if file.suffix in _SUFFIXES]
    return sorted(found)


@lru_cache(maxsize=1)
def pricing_fingerprint() -> bytes:
    """Hash the code and data of the package up to the search, and the compiled core.

    It is computed once in a process. A file that was written after this process loaded the package
    may not be what runs here: then the digest is one that no other process has, so that nothing is
    found and nothing is kept for others.

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
