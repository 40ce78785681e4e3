"""The front door of the command line: arguments in, exit code out, whatever happens."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Sequence

from mergepipe.cli.interrupts import Interrupts
from mergepipe.errors import UnsupportedError, check_platform


def mergekit_main(argv: Sequence[str] | None = None) -> int:
    """Run `mergepipe-yaml`, which takes the flags of mergekit-yaml, and return its exit code."""
    return _run_program("mergepipe-yaml", argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; `argv` is without the program's name, by default the process's."""
    return _run_program("mergepipe", argv)


def _run_program(program: str, argv: Sequence[str] | None) -> int:
    exit_code = _run_arguments(program, list(sys.argv[1:] if argv is None else argv))
    if argv is None:
        gc.freeze()  # the process ends: its end would look through all that was imported, a fifth of a short command
    return exit_code


def _run_arguments(program: str, arguments: list[str]) -> int:
    try:
        check_platform()
    except UnsupportedError as error:
        print(f"error: {error} [{error.code}]", file=sys.stderr)
        return error.exit_code
    gc.set_threshold(200_000, 20, 20)  # what is imported stays: looking it through takes a tenth of the start
    _occupy_standard_descriptors()
    try:
        interrupts = Interrupts()
    except KeyboardInterrupt:
        return _interrupted(130)
    try:
        with interrupts:
            from mergepipe.cli.guard import run_guarded

            return run_guarded(arguments, interrupts, program)
    except KeyboardInterrupt:  # it came before the guard stood
        return _interrupted(interrupts.exit_code)


def _occupy_standard_descriptors() -> None:
    """Put /dev/null where a standard stream is closed: no file of ours may get its number, and a library's messages."""
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor <= 2:
        os.set_inheritable(descriptor, True)
        descriptor = os.open(os.devnull, os.O_RDWR)
    os.close(descriptor)


def _interrupted(exit_code: int) -> int:
    with contextlib.suppress(OSError):
        print("interrupted: nothing was published", file=sys.stderr)
    return exit_code
