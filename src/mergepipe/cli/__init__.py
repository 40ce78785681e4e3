"""The front door of the command line: arguments in, exit code out, whatever happens."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; `argv` is without the program's name, by default the process's."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        from mergepipe.cli.interrupts import Interrupts

        interrupts = Interrupts()
    except KeyboardInterrupt:
        return _interrupted(130)
    try:
        with interrupts:
            from mergepipe.cli.guard import run_guarded

            return run_guarded(arguments, interrupts)
    except KeyboardInterrupt:  # it came before the guard stood
        return _interrupted(interrupts.exit_code)


def _interrupted(exit_code: int) -> int:
    print("interrupted: nothing was published", file=sys.stderr)
    return exit_code
