"""Takes the command line, gives an exit code: 0 done, 1 infeasible, 2 bad input."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Annotated

import typer

from phaze_fast.cli import hardware, models, questions, show
from phaze_fast.errors import InfeasibleError, PhazeError

__all__ = ["app", "main"]

DONE, INFEASIBLE, BAD_INPUT, BUG, INTERRUPTED = 0, 1, 2, 70, 130

app = typer.Typer(
    name="phaze-fast",
    help="Accelerator, operator schedule and device placement for training, searched together.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        from phaze_fast import __version__

        sys.stdout.write(f"phaze-fast {__version__}\n")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Accelerator, operator schedule and device placement for training, searched together."""


models.add_commands(app)
show.add_commands(app)
hardware.add_commands(app)
questions.add_commands(app)


def _say(message: str) -> None:
    for line in message.splitlines() or [""]:
        sys.stderr.write(f"phaze-fast: {line}\n")


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
        outcome = app(args=arguments, standalone_mode=False)
        sys.stdout.flush()
        return outcome if isinstance(outcome, int) else DONE
    except typer.Exit as done:
        return done.exit_code
    except (typer.Abort, KeyboardInterrupt):
        _say("interrupted")
        return INTERRUPTED
    except InfeasibleError as error:
        _say(f"infeasible: {error}")
        return INFEASIBLE
    except PhazeError as error:
        _say(str(error))
        return BAD_INPUT
    except BrokenPipeError:
        # The reader went away (`| head`); leave quietly, and keep the exit from flushing again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except Exception as error:
        return _usage_or_bug(error)


def _usage_or_bug(error: Exception) -> int:
    say_it = getattr(error, "format_message", None)  # the option parser's own errors
    if callable(say_it):
        message = str(say_it()).replace("\n", " ")
        if message:  # asked for nothing, the program has printed its help already
            _say(message)
        return BAD_INPUT
    if os.environ.get("PHAZE_FAST_DEBUG"):
        traceback.print_exc()
    _say(f"internal error: {type(error).__name__}: {error} (set PHAZE_FAST_DEBUG=1 for the trace)")
    return BUG


if __name__ == "__main__":
    sys.exit(main())
