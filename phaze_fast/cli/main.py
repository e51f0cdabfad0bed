"""The entry point of the program, and its exit codes: 0 done, 1 infeasible, 2 bad input.

The commands are loaded inside `main`, so that even an interrupt while they load is a plain line.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys

from phaze_fast.errors import InfeasibleError, PhazeError

__all__ = ["main"]

DONE, INFEASIBLE, BAD_INPUT, BUG, INTERRUPTED = 0, 1, 2, 70, 130
_LONGEST_LINE = 600


def _say(message: str) -> None:
    """Write to standard error, one prefixed line each, if anyone listens."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        for line in message.splitlines() or [""]:
            shown = line if len(line) <= _LONGEST_LINE else line[: _LONGEST_LINE - 3] + "..."
            sys.stderr.write(f"phaze-fast: {shown}\n")


def main(arguments: list[str] | None = None) -> int:
    """Run one command.

    Parameters
    ----------
    arguments
        The words after the program's name; by default those it was started with.

    Returns
    -------
    int
        0 done, 1 infeasible, 2 bad input, 70 a bug of this program, 130 interrupted.
    """
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        _say("interrupted")
        return INTERRUPTED
    except InfeasibleError as error:
        _say(f"infeasible: {error}")
        return INFEASIBLE
    except PhazeError as error:
        _say(_with_options(str(error), arguments))
        return BAD_INPUT
    except OSError as error:
        return _output_failed(error)
    except SystemExit as left:  # the option parser leaves this way when its reader goes away
        if isinstance(left.__context__, OSError):
            return _output_failed(left.__context__)
        return left.code if isinstance(left.code, int) else BUG
    except Exception as error:
        return _usage_or_bug(error)


_FIELDS = {
    "reserved_bytes": "reserve",
    "time_limit_s": "time_limit",
}
"""Fields of records that options of other names give."""


def _with_options(message: str, arguments: list[str] | None) -> str:
    """Name the option that was typed where a message begins with the field it gave."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        from phaze_fast.cli.app import program

        command = program(words[0]).commands[words[0]]
        options = {
            str(each.name): each.opts[0] for each in command.params if each.opts[0].startswith("-")
        }
    except (IndexError, KeyError, AttributeError):
        return message

    def named(line: str) -> str:
        found = re.match(r"([a-z_]+)(?:\.\d+)*(?=: )", line)
        if found is None:
            return line
        option = options.get(_FIELDS.get(found[1], found[1]))
        return line if option is None else option + line[found.end() :]

    return "\n".join(named(line) for line in message.splitlines())


def _run(arguments: list[str] | None) -> int:
    import typer

    from phaze_fast.cli.app import program

    words = sys.argv[1:] if arguments is None else arguments
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    try:
        outcome = program(*words[:1]).main(args=arguments, standalone_mode=False)
        if sys.stdout is not None:  # it was closed
            sys.stdout.flush()
    except typer.Exit as done:
        return done.exit_code
    except typer.Abort:
        raise KeyboardInterrupt from None
    if outcome == INTERRUPTED:  # how the option parser passes an interrupt on
        raise KeyboardInterrupt
    if not words:
        return BAD_INPUT  # help that nobody asked for, which older parsers call done
    return outcome if isinstance(outcome, int) else DONE


def _output_failed(error: OSError) -> int:
    """Say that the answer could not be delivered; a reader that went away (`| head`) is fine."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        # What is still buffered cannot be written either; keep the exit from trying.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.errno == errno.EPIPE:
        return DONE
    _say(f"standard output: cannot be written: {error.strerror}")
    return BAD_INPUT


def _usage_or_bug(error: Exception) -> int:
    say_it = getattr(error, "format_message", None)  # the option parser's own errors
    if callable(say_it):
        message = str(say_it()).replace("\n", " ")
        if message:  # asked for nothing, the program has printed its help already
            _say(message)
        return BAD_INPUT
    if os.environ.get("PHAZE_FAST_DEBUG"):
        import traceback

        traceback.print_exc()
    _say(f"internal error: {type(error).__name__}: {error} (set PHAZE_FAST_DEBUG=1 for the trace)")
    return BUG


if __name__ == "__main__":
    sys.exit(main())
