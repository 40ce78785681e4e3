"""For the tests of the command line: a directory with a tiny family and a recipe, and ways to run commands in it."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest

from mergepipe.cli import main
from mergepipe.cli.app import build_command
from support.families import TINY, FamilyPaths, write_family

RECIPE = """\
merge_method: {operator}
base_model: family/base
models:
  - model: family/expert-1
    parameters: {{weight: 0.6}}
  - model: family/expert-2
    parameters: {{weight: 0.4}}
dtype: bfloat16
"""

# Runs the command line and sends a signal to itself when the interpreter reports an event about something.
SIGNAL_AT_EVENT = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have told its children to ignore it
number, event, about = int(sys.argv[1]), sys.argv[2], sys.argv[3]
sent = []
def hook(name, arguments):
    if name == event and not sent and any(about in str(each) for each in arguments):
        sent.append(True)
        os.kill(os.getpid(), number)
from mergepipe.cli import main
sys.addaudithook(hook)
exit_code = main(sys.argv[4:])
print("sent" if sent else "not sent")
sys.exit(exit_code)
"""


@dataclass(frozen=True, slots=True)
class Ran:
    """What a command left: exit code, standard output and standard error."""

    exit_code: int
    out: str
    err: str

    def json(self) -> dict[str, Any]:
        """Standard output as the one JSON object it must be."""
        content: dict[str, Any] = json.loads(self.out)
        return content

    @property
    def error_lines(self) -> list[str]:
        return self.err.splitlines()

    @property
    def codes(self) -> list[str]:
        """Codes of all problems told on standard error."""
        return re.findall(r"\[([a-z._-]+)\]$", self.err, re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Workplace:
    """A directory with a family and a recipe for it."""

    root: Path
    family: FamilyPaths

    @property
    def recipe(self) -> Path:
        return self.root / "recipe.yml"

    @property
    def out(self) -> Path:
        return self.root / "out"

    def write_recipe(self, operator: str = "linear") -> Path:
        """Write the recipe anew for another operator."""
        self.recipe.write_text(RECIPE.format(operator=operator), encoding="utf-8")
        return self.recipe

    def names(self) -> set[str]:
        """Everything that lies in the directory, hidden or not."""
        return {path.name for path in self.root.iterdir()}


def make_workplace(root: Path) -> Workplace:
    """Write the family and the recipe under `root`."""
    workplace = Workplace(root, write_family(root / "family", TINY, 2))
    workplace.write_recipe()
    return workplace


class Runner:
    """Runs commands in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str], main: Callable[[list[str]], int] = main) -> None:
        self._capsys, self._main = capsys, main

    def __call__(self, *arguments: object) -> Ran:
        self._capsys.readouterr()
        exit_code = self._main([str(each) for each in arguments])
        captured = self._capsys.readouterr()
        return Ran(exit_code, captured.out, captured.err)


def run_command(arguments: list[str], program: Callable[[list[str]], int] = main) -> Ran:
    """Run one command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        exit_code = program(arguments)
    return Ran(exit_code, out.getvalue(), err.getvalue())


def start_python(code: str, *arguments: object, **streams: Any) -> subprocess.Popen[str]:
    """Start Python on `code` with its streams piped, unless `streams` says otherwise."""
    command = [sys.executable, "-c", code, *(str(each) for each in arguments)]
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, env=dict(os.environ), **(piped | streams))


def start_command(*arguments: object, **streams: Any) -> subprocess.Popen[str]:
    """Start the command line in a process of its own."""
    return start_python("import sys; from mergepipe.cli import main; sys.exit(main())", *arguments, **streams)


def finish(process: subprocess.Popen[str]) -> Ran:
    """Wait for the end of a process."""
    out, err = process.communicate(timeout=120)
    return Ran(process.returncode, out or "", err or "")


def file_bytes(directory: Path) -> Mapping[str, bytes]:
    """Name and content of every file of a directory."""
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def command_tree() -> click.Group:
    """The program's commands, each with its options."""
    return build_command()


def command_names() -> list[str]:
    """All commands, with those of `tailor` and `catalog`."""
    names, commands = [], [("", build_command())]
    while commands:
        name, command = commands.pop()
        below = getattr(command, "commands", {})
        commands += [(f"{name} {each}".strip(), below[each]) for each in below]
        if not below:
            names.append(name)
    return sorted(names)
