"""The entry point of the program, and its exit codes: 0 done, 1 infeasible, 2 bad input, 3 unknown.

The commands are loaded inside `main`, so that an interrupt during loading prints a plain line too.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from typing import Any

from phaze_fast.errors import InfeasibleError, PhazeError, UndecidedError, printable

DONE, INFEASIBLE, BAD_INPUT, UNDECIDED, BUG, INTERRUPTED = 0, 1, 2, 3, 70, 130
_LONGEST_LINE = 600


class _ClosedOutput(io.TextIOBase):
    """Replaces a closed standard output: writes fail, so that no answer is lost silently."""

    def write(self, _: str, /) -> int:
        """Refuse the text as the operating system would.

        Raises
        ------
        OSError
            Always.
        """
        raise OSError(errno.EBADF, "it is closed")


def _say(message: str) -> None:
    """Write lines to standard error, each with the prefix of the program, unless it is closed."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        for line in message.splitlines() or [""]:
            shown = line if len(line) <= _LONGEST_LINE else line[: _LONGEST_LINE - 3] + "..."
            sys.stderr.write(f"phaze-fast: {printable(shown)}\n")


def main(arguments: list[str] | None = None) -> int:
    """Run one command.

    Parameters
    ----------
    arguments
        The words after the program's name; by default those it was started with.

    Returns
    -------
    int
        0 done, 1 infeasible, 2 bad input, 3 a search that ended with neither an answer nor a proof
        that there is none, 70 a bug of this program, 130 interrupted.
    """
    try:
        return _run(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        _say("interrupted")
        return INTERRUPTED
    except InfeasibleError as error:
        _say(f"infeasible: {error}")
        return INFEASIBLE
    except UndecidedError as error:
        _say(f"unknown: {error}")
        return UNDECIDED
    except PhazeError as error:
        _say(str(error))
        return BAD_INPUT
    except OSError as error:
        return _output_failed(error)
    except SystemExit as left:  # raised by the option parser when standard output is closed
        if isinstance(left.__context__, OSError):
            return _output_failed(left.__context__)
        return left.code if isinstance(left.code, int) else BUG
    except Exception as error:
        return _usage_or_bug(error)


def _run(words: list[str]) -> int:
    if sys.stdout is None:
        sys.stdout = _ClosedOutput()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    if words == ["--version"]:  # answered without loading any command
        from phaze_fast import __version__

        sys.stdout.write(f"phaze-fast {__version__}\n")
        sys.stdout.flush()
        return DONE
    import typer

    from phaze_fast.cli.app import program

    try:
        outcome = program(*words).main(args=words, prog_name="phaze-fast", standalone_mode=False)
        sys.stdout.flush()
    except typer.Exit as done:
        return done.exit_code
    except typer.Abort:
        raise KeyboardInterrupt from None
    if outcome == INTERRUPTED:  # the option parser's code for an interrupt
        raise KeyboardInterrupt
    if not words:
        return BAD_INPUT  # help shown for lack of arguments, where older parsers return 0
    return outcome if isinstance(outcome, int) else DONE


def _output_failed(error: OSError) -> int:
    """Report that the output could not be written; a closed pipe (`| head`) is no error."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        # Discard the buffered output, so that flushing it at exit does not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.errno == errno.EPIPE:
        return DONE
    _say(f"standard output: cannot be written: {error.strerror}")
    return BAD_INPUT


def _usage(error: Any) -> str:
    """Return the option parser's message, with the value and what would be accepted."""
    message = str(error.format_message())
    refused = getattr(error.__cause__, "errors", None)  # pydantic's faults of the value, if any
    if callable(refused) and getattr(error, "param", None) is not None:
        value, text = refused()[0]["input"], refused()[0]["msg"]
        expected = text.partition("Input should be ")[2].partition(",")[0] or text
        return f"{max(error.param.opts, key=len)}: {value!r} is not accepted; expected {expected}"
    if message.startswith("No such command"):
        return f"{message.rstrip('.')}; accepted: {', '.join(error.ctx.command.commands)}"
    return message


def _usage_or_bug(error: Exception) -> int:
    if hasattr(error, "format_message"):  # the option parser's own errors
        if type(error).__name__ == "NoArgsIsHelpError":  # a group of commands, and no command
            sys.stderr.write(f"{error.format_message()}\n")
        else:
            _say(_usage(error).replace("\n", " "))
        return BAD_INPUT
    if os.environ.get("PHAZE_FAST_DEBUG"):
        import traceback

        traceback.print_exc()
    _say(f"internal error: {type(error).__name__}: {error} (set PHAZE_FAST_DEBUG=1 for the trace)")
    return BUG


if __name__ == "__main__":
    sys.exit(main())
