"""The entry point of the program, and its exit codes: 0 done, 1 infeasible, 2 bad input.

The commands are loaded inside `main`, so that even an interrupt while they load is a plain line.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys

from phaze_fast.errors import InfeasibleError, PhazeError, printable

DONE, INFEASIBLE, BAD_INPUT, BUG, INTERRUPTED = 0, 1, 2, 70, 130
_LONGEST_LINE = 600


class _ClosedOutput(io.TextIOBase):
    """Standard output where the program was started without one: no answer is lost silently."""

    def write(self, _: str, /) -> int:
        """Refuse the text as the operating system would.

        Raises
        ------
        OSError
            Always.
        """
        raise OSError(errno.EBADF, "it is closed")


def _say(message: str) -> None:
    """Write to standard error, one prefixed line each, unless it was closed."""
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
        0 done, 1 infeasible, 2 bad input, 70 a bug of this program, 130 interrupted.
    """
    try:
        return _run(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        _say("interrupted")
        return INTERRUPTED
    except InfeasibleError as error:
        _say(f"infeasible: {error}")
        return INFEASIBLE
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
    if outcome == INTERRUPTED:  # how the option parser passes an interrupt on
        raise KeyboardInterrupt
    if not words:
        return BAD_INPUT  # help shown for lack of arguments, where older parsers return 0
    return outcome if isinstance(outcome, int) else DONE


def _output_failed(error: OSError) -> int:
    """Report that the output could not be written; a closed pipe (`| head`) is no error."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        # What is still buffered cannot be written either; keep the exit from trying.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.errno == errno.EPIPE:
        return DONE
    _say(f"standard output: cannot be written: {error.strerror}")
    return BAD_INPUT


def _usage_or_bug(error: Exception) -> int:
    format_message = getattr(error, "format_message", None)  # the option parser's own errors
    if callable(format_message):
        message = str(format_message())
        if type(error).__name__ == "NoArgsIsHelpError":  # a group of commands, and no command
            sys.stderr.write(f"{message}\n")
        else:
            _say(message.replace("\n", " "))
        return BAD_INPUT
    if os.environ.get("PHAZE_FAST_DEBUG"):
        import traceback

        traceback.print_exc()
    _say(f"internal error: {type(error).__name__}: {error} (set PHAZE_FAST_DEBUG=1 for the trace)")
    return BUG


if __name__ == "__main__":
    sys.exit(main())
