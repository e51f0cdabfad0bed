"""The exceptions of the package: bad input, infeasible, undecided, misuse of threads.

Anything that is not one of these is a bug. Inside a batch, infeasible and invalid rows are
statuses, never exceptions.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable
from types import UnionType

_MOST_LISTED = 28
"""A message lists all accepted names up to this many, else only the nearest three."""


class PhazeError(Exception):
    """Base of every exception that phaze_fast raises on purpose."""


class InvalidInputError(PhazeError, ValueError):
    """A field has a value that is not accepted; the message names field, value and alternatives."""


class InvalidTypeError(InvalidInputError, TypeError):
    """An argument has a type or dtype that is not accepted."""


class InfeasibleError(PhazeError):
    """The problem is well posed and has no answer; the message says which constraint binds."""


class UndecidedError(PhazeError):
    """A search ended with neither an answer nor a proof that there is none."""


class InUseError(PhazeError, RuntimeError):
    """An object that serves one thread at a time was called while another thread was using it."""


class MissingExtraError(PhazeError, ImportError):
    """An optional dependency is needed; the message names the extra that installs it."""


def not_accepted(field: str, value: object, expected: str) -> InvalidInputError:
    """Return the error for a value that a field does not accept.

    Examples
    --------
    >>> not_accepted("threads", 0, "1 or more")
    InvalidInputError('threads: 0 is not accepted; expected 1 or more')
    """
    return InvalidInputError(f"{field}: {value!r} is not accepted; expected {expected}")


_BRIEF = reprlib.Repr()
"""A repr that stops at a limit of length, so that a huge value is never written out in full."""
_BRIEF.maxlist = _BRIEF.maxdict = _BRIEF.maxtuple = 4
_BRIEF.maxstring = _BRIEF.maxother = _BRIEF.maxlong = 60
_BRIEF.maxlevel = 2


def brief(value: object) -> str:
    """Show a value of any size in at most 80 characters.

    Examples
    --------
    >>> brief({"a": list(range(1000))})
    "{'a': [0, 1, 2, 3, ...]}"
    """
    try:
        text = " ".join(_BRIEF.repr(value).split())
    except ValueError:  # more digits than the interpreter writes
        text = f"a value of type {type(value).__name__} that is too long to show"
    return text if len(text) <= 80 else text[:77] + "..."


def printable(text: str) -> str:
    r"""Escape control characters, so that the text stays on one line of a terminal.

    Examples
    --------
    >>> print(printable("a\nb\x1b[2J"))
    a\nb\x1b[2J
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def nearest(word: str, accepted: Iterable[str]) -> str:
    """Return a hint about a name that is not accepted.

    Parameters
    ----------
    word
        The name as the user wrote it.
    accepted
        Every accepted name, in the order they should be listed.

    Returns
    -------
    str
        A clause for the end of a message.

    Examples
    --------
    >>> nearest("widht", ["count", "width", "depth"])
    "did you mean 'width'? accepted: count, width, depth"
    >>> nearest("a100", ["h100", "a100-40"])
    "did you mean 'a100-40'? accepted: h100, a100-40"
    >>> nearest("x", ["a", "b"])
    'accepted: a, b'
    >>> nearest("owner/n12-base", [f"n{i}" for i in range(30)]).partition(",")[0]
    "did you mean 'n12'"
    >>> nearest("n7", [f"n{i}" for i in range(30)])
    "did you mean 'n7', 'n27' or 'n17'? (of 30 names)"
    """
    names = list(accepted)
    if len(names) > _MOST_LISTED:
        first, second, third = _closest(word.lower().rpartition("/")[2], names)[:3]
        return f"did you mean '{first}', '{second}' or '{third}'? (of {len(names)} names)"
    listed = "accepted: " + ", ".join(names)
    begun = [name for name in names if len(word) > 2 and name.startswith(word.lower())]
    close = begun or difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    return f"did you mean '{close[0]}'? {listed}" if close else listed


def _closest(word: str, names: list[str]) -> list[str]:
    """Sort names: the longest that begins the word, those that the word begins, by likeness."""
    begins = sorted((name for name in names if word.startswith(name)), key=len)[-1:]
    begun = begins + [name for name in names if len(word) > 2 and name.startswith(word)]
    others = [name for name in names if name not in begun]
    return begun + difflib.get_close_matches(word, others, n=3, cutoff=0.0)


def check_one_of(field: str, value: object, accepted: Iterable[str]) -> None:
    """Raise an InvalidInputError where a value is none of the accepted names.

    Examples
    --------
    >>> check_one_of("rule", "exclusive", ("exclusive", "overlap"))
    """
    names = list(accepted)
    if value not in names:
        raise InvalidInputError(f"{field}: {value!r} is not accepted; {nearest(str(value), names)}")


def check_type(
    field: str, value: object, kinds: type | UnionType | tuple[type, ...], expected: str
) -> None:
    """Raise an InvalidTypeError where a value is of no accepted type.

    Examples
    --------
    >>> check_type("training", 1, int, "a whole number")
    """
    if not isinstance(value, kinds):
        raise InvalidTypeError(
            f"{field}: {type(value).__name__} is not accepted; expected {expected}"
        )
