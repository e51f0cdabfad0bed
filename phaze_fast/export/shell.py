"""Shell commands: written one option a line, and read back word by word."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence

from phaze_fast.errors import InvalidInputError

__all__ = ["Options", "command", "options_of", "settings_of", "whole"]

Options = dict[str, list[str]]
"""Values by option; an option that stands alone has none."""


def command(
    comments: Iterable[str], words: Sequence[str], options: Iterable[Sequence[object]]
) -> str:
    r"""Write a command, one option a line.

    Examples
    --------
    >>> print(command(["a run"], ["torchrun", "train.py"], [("--width", 4), ("--fast",)]))
    #!/bin/sh
    # a run
    torchrun train.py \
      --width 4 \
      --fast
    <BLANKLINE>
    """
    lines = [" ".join(words)]
    lines += [" ".join(shlex.quote(str(word)) for word in option) for option in options]
    head = "".join(f"# {line}\n" for line in comments)
    return f"#!/bin/sh\n{head}" + " \\\n  ".join(lines) + "\n"


def _words(text: str, source: str) -> list[str]:
    try:
        return shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise InvalidInputError(f"{source}: not a shell command: {error}") from None


def options_of(text: str, source: str) -> Options:
    """Read the options of a command: what begins with two dashes, and the words after each.

    Examples
    --------
    >>> options_of("torchrun --nnodes 2 train.py --fast --width=4", "run.sh")
    {'--nnodes': ['2', 'train.py'], '--fast': [], '--width': ['4']}
    """
    found: Options = {}
    current: list[str] = []
    for word in _words(text, source):
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word.partition("=")
            current = [value] if equals else []
            found[name] = current
        else:
            current.append(word)
    return found


def settings_of(text: str, source: str) -> dict[str, str]:
    """Read the settings of a command: words of the form key=value.

    Examples
    --------
    >>> settings_of("python train.py base.yml model.width=4 fast=True", "run.sh")
    {'model.width': '4', 'fast': 'True'}
    """
    pairs = (word.partition("=") for word in _words(text, source) if not word.startswith("-"))
    return {key.lstrip("+"): value for key, equals, value in pairs if equals}


def whole(given: Mapping[str, Sequence[str]], name: str, default: int) -> int:
    """Read a whole number that an option gives.

    Raises
    ------
    InvalidInputError
        Where it is none.
    """
    if name not in given:
        return default
    text = given[name][0] if given[name] else ""
    if not text.isdecimal() or len(text) > 12:
        raise InvalidInputError(
            f"{name}: {text!r} is not accepted; expected a whole number (shell variables are not "
            "expanded)"
        )
    return int(text)
