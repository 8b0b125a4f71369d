"""The command line. `main` is the console script; `run` is the same, returning the exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import typer

from .exits import Exit, complain
from .program import program

__all__ = ["main", "run"]


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; an expected error has become a line on stderr."""
    try:
        code = typer.main.get_command(program)(
            list(arguments) if arguments is not None else None,
            prog_name="fanout",
            standalone_mode=False,
        )
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        return Exit.INTERRUPTED
    except BrokenPipeError:
        # The reader left: nothing to say, and nothing to flush at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.BROKEN_PIPE
    except Exception as error:  # noqa: BLE001 - the outermost frame: a defect is told too
        return complain(error)
    return code if isinstance(code, int) else Exit.FINE


def main() -> None:
    """The console script."""
    sys.exit(run())
