"""What commands say of wrong arguments and of files that lie: exit code, error codes and lines, as they were recorded.

The records are tests/golden/surface/bad-inputs/COMMAND.txt: the command line, its exit code, and its lines on standard
error. A case is added by a line `COMMAND ARGUMENTS: 0`. Where a change of them is meant, write them anew and read the
diff:

    pytest tests/surface --update-goldens && git diff tests/golden/surface
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from bad_inputs import RECIPES, TAILOR_RECIPES, write_odd_models, write_outputs, write_recipes, write_tailor_inputs
from workplace import command_names, workplace

from mergepipe import errors
from mergepipe.errors import MergePipeError
from support.command_line import run_command
from support.goldens import Goldens, steady_text

RECORDS = Path(__file__).parents[1] / "golden/surface/bad-inputs"
N_CASES = 326
PROGRESS = re.compile(r"\w+: +\d+%, ")
FAULTS: Mapping[str, Callable[[int], BaseException | None]] = {
    "no-space": lambda _: OSError(errno.ENOSPC, "No space left on device"),
    "published": lambda fd: OSError(errno.EIO, "I/O error") if _is_beside("published", fd) else None,
    "interrupted": lambda _: KeyboardInterrupt(),
    "defect": lambda _: KeyError("x"),
}
"""What `os.fsync` raises while an output of this name is made."""


def _is_beside(name: str, fd: int) -> bool:
    return Path(name).exists() and os.path.samestat(os.fstat(fd), Path().stat())


def recorded_cases() -> dict[str, list[str]]:
    """The command lines that are recorded, by the name of the file: each fails, or says what is wrong."""
    texts = {path.stem: path.read_text() for path in RECORDS.glob("*.txt") if path.stem != "faults"}
    return {name: re.findall(r"^((?! ).*): \d+$", text, re.MULTILINE) for name, text in texts.items()}


def failure_text(arguments: list[str], places: Mapping[str, str]) -> str:
    """Run a command that is to fail; its exit code and its lines."""
    ran = run_command(arguments)
    assert ran.exit_code != 0, arguments
    lines = [line for line in steady_text(ran.err, places).splitlines() if not PROGRESS.match(line)]
    return "".join([f"{' '.join(arguments)}: {ran.exit_code}\n", *(f"    {line}\n" for line in lines)])


def fault_text(arguments: list[str], error_of: Callable[[int], BaseException | None], places: Mapping[str, str]) -> str:
    """The same where `os.fsync` fails."""

    def fail(fd: int) -> None:
        error = error_of(fd)
        if error is not None:
            raise error

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        return failure_text(arguments, places)


def test_bad_inputs__fail_as_was_recorded(tmp_path: Path, goldens: Goldens) -> None:
    texts: dict[str, str] = {}
    cases = recorded_cases()
    with workplace(tmp_path):
        write_recipes(tmp_path)
        write_odd_models(tmp_path)
        write_tailor_inputs(tmp_path)
        write_outputs(tmp_path)
        before = {path.name for path in tmp_path.iterdir()}
        places = {str(tmp_path): "<root>"}
        for title, lines in cases.items():
            texts[title] = "\n".join(failure_text(line.split(), places) for line in lines)
        assert {path.name for path in tmp_path.iterdir()} - before == set()
        texts["faults"] = "\n".join(
            fault_text(["merge", "linear.yml", name, "-q"], error_of, places) for name, error_of in FAULTS.items()
        )
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, MergePipeError)]
    exit_codes = re.findall(r"^\S.*: (\d+)$", "\n".join(texts.values()), re.MULTILINE)
    assert len(exit_codes) >= N_CASES
    words = {word for lines in cases.values() for line in lines for word in line.split()}
    assert {*(f"bad-{name}.yml" for name in RECIPES), *(f"tailor-{name}.yml" for name in TAILOR_RECIPES)} <= words
    assert {str(kind.exit_code) for kind in kinds} - {str(MergePipeError.exit_code)} <= set(exit_codes)
    assert {*(name.replace(" ", "-") for name in command_names()), "mergepipe"} == set(cases)
    goldens.check("bad-inputs", texts)
