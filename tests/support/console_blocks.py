"""Runs the console blocks of pages: compares what they show with what is printed, or writes the pages anew.

A line `...` is output that the page leaves out, and so is the rest of a line that ends in ` ...`; of a command without
any output below it nothing is compared. A block with a title is a file: it is written before the commands below it, or
compared with the file of that name. A block below `<!-- not run: REASON -->` needs more than the demo files.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from mergepipe.cli import main, mergekit_main

WIDTH = "120"
PAGE_WIDTH = 110
SHOWN_FOLDER = "/srv/mergepipe"
"""What pages write for the folder in which commands run."""
SHOWN_HOME = "/home/ada/.local/share/mergepipe"
"""What pages write for `$MERGEPIPE_HOME`."""

_FENCE = re.compile(r"^(`{3,})([\w-]*)(?: title=\"([^\"]+)\")?$")
_NOT_RUN = re.compile(r"^<!-- not run: .+ -->$")
_SHELL_SYNTAX = re.compile(r"[|&;<>]")
_PROGRAMS = {"mergepipe": main, "mergepipe-yaml": mergekit_main}
_PROGRESS = re.compile(r"^\w+: \d+%, .*\n", re.MULTILINE)
_LEFT_OUT = "..."
_VARYING = (
    (re.compile(r"^(peak memory +).*"), r"\1MEMORY"),
    (re.compile(r"\b[0-9a-f]{12,64}\b"), "ID"),
    (re.compile(r"\d[\d.]* [kMG]?B/s"), "SPEED"),
    (re.compile(r"\d[\d.]* [kMGT]?B free"), "FREE"),
    (re.compile(r"\b\d[\d.]* ?(?:ms|s|min)\b"), "TIME"),
    (re.compile(r"\d{4}-\d\d-\d\d(?: \d\d:\d\d(?::\d\d)?)?"), "DATE"),
)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a page: its lines, and the number of the first in the page, from 0."""

    language: str
    title: str
    first: int
    lines: tuple[str, ...]
    is_run: bool


@dataclass(frozen=True, slots=True)
class Command:
    """A command of a console block, and the lines that the page shows below it."""

    line: str
    first: int
    shown: tuple[str, ...]

    @property
    def fails(self) -> bool:
        """Whether the page shows a failure."""
        marks = ("DAMAGED", "  not applied: ", "  not as the adapter says: ")
        return any(line.startswith("error:") or any(mark in line for mark in marks) for line in self.shown)


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page."""
    lines = page.read_text(encoding="utf-8").splitlines()
    result = []
    number = 0
    while number < len(lines):
        opening = _FENCE.match(lines[number])
        if opening:
            end = lines.index(opening[1], number + 1)
            is_run = number == 0 or not _NOT_RUN.match(lines[number - 1])
            content = tuple(lines[number + 1 : end])
            result.append(Block(opening[2], opening[3] or "", number + 1, content, is_run))
            number = end
        number += 1
    return result


def commands(block: Block) -> list[Command]:
    """Return the commands of a console block."""
    starts = [number for number, line in enumerate(block.lines) if line.startswith("$ ")]
    result = []
    for start, end in zip(starts, [*starts[1:], len(block.lines)], strict=True):
        while not block.lines[end - 1]:
            end -= 1
        line = block.lines[start].removeprefix("$ ")
        result.append(Command(line, block.first + start + 1, block.lines[start + 1 : end]))
    return result


class PageRun:
    """Runs the blocks of pages in the working folder, in order."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *, is_rewritten: bool) -> None:
        self._capsys = capsys
        self._is_rewritten = is_rewritten
        self._folder = str(Path.cwd())

    def run(self, page: Path) -> list[str]:
        """Run a page; return where it does not show what is printed. With `is_rewritten` correct the page."""
        problems: list[str] = []
        changes: list[tuple[Command, list[str]]] = []
        for block in blocks(page):
            if not block.is_run:
                continue
            if block.title:
                problems += _file_problems(block)
            if block.language != "console":
                continue
            for command in commands(block):
                exit_code, printed = self._printed(command)
                if (exit_code != 0) != command.fails:
                    problems.append(f"{page.name}: $ {command.line}: exit code {exit_code}: {printed}")
                elif command.shown and not _is_shown(command.shown, printed):
                    new = _refreshed(command.shown, printed)
                    changes.append((command, new))
                    if not (self._is_rewritten and _is_shown(new, printed)):
                        problems.append(f"{page.name}: $ {command.line}\nprints:\n" + "\n".join(printed))
        if self._is_rewritten:
            _rewrite(page, changes)
        return problems

    def _printed(self, command: Command) -> tuple[int, list[str]]:
        """Run a command; return its exit code and the lines of its output, or of its errors if it has no output."""
        words = list(_words(command.line))
        if words[0] in _PROGRAMS and not _SHELL_SYNTAX.search(command.line):
            self._capsys.readouterr()
            exit_code = _PROGRAMS[words[0]](words[1:])
            output, errors = self._capsys.readouterr()
        else:
            exit_code, output, errors = _by_shell(command.line)
        text = output or _PROGRESS.sub("", errors)
        text = text.replace(self._folder, SHOWN_FOLDER).replace(os.environ["MERGEPIPE_HOME"], SHOWN_HOME)
        return exit_code, _unwrapped([line.rstrip() for line in text.rstrip().splitlines()])


def _by_shell(line: str) -> tuple[int, str, str]:
    """Run a line by a shell that finds the installed commands; return its exit code, output and errors."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path}
    done = subprocess.run(["bash", "-c", line], env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def _words(line: str) -> Iterator[str]:
    """Yield the words of a command line, with the names that its patterns match here."""
    for word in shlex.split(line, comments=True):
        names = sorted(map(str, Path().glob(word))) if "*" in word else []
        yield from names or [word]


def _file_problems(block: Block) -> list[str]:
    """Write the file that a block shows; if it is there, say where it differs."""
    file = Path(block.title)
    text = "".join(f"{line}\n" for line in block.lines)
    if not file.exists():
        file.write_text(text, encoding="utf-8")
    elif file.read_text(encoding="utf-8") != text:
        return [f"{file} is shown with other lines than it has"]
    return []


def _unwrapped(lines: Sequence[str]) -> list[str]:
    """Join lines that were wrapped, which are indented far, with the line that they continue."""
    result: list[str] = []
    for line in lines:
        if line.startswith("    ") and result and result[-1]:
            result[-1] += f" {line.strip()}"
        else:
            result.append(line)
    return result


def _wrapped(line: str) -> list[str]:
    """Wrap a line of a report for a page, below its text."""
    label = re.match(r"\S+( \S+)*  +", line)
    indent = " " * (len(label[0]) if label else 4)
    return textwrap.wrap(line, PAGE_WIDTH, subsequent_indent=indent, break_on_hyphens=False)


def _without_what_varies(line: str) -> str:
    for pattern, replacement in _VARYING:
        line = pattern.sub(replacement, line)
    return " ".join(line.split())


def _is_same(shown: str, printed: str) -> bool:
    start = shown.removesuffix(f" {_LEFT_OUT}")
    if start != shown:
        return _without_what_varies(printed).startswith(_without_what_varies(start))
    return _without_what_varies(shown) == _without_what_varies(printed)


def _is_shown(shown: Sequence[str], printed: list[str]) -> bool:
    """Whether the shown lines are the printed ones, in order, with gaps only where lines are left out."""
    lines = [line for line in _unwrapped(shown) if line]
    output = [line for line in printed if line]
    position = 0
    may_skip = False
    for line in lines:
        if line == _LEFT_OUT:
            may_skip = True
            continue
        while may_skip and position < len(output) and not _is_same(line, output[position]):
            position += 1
        if position == len(output) or not _is_same(line, output[position]):
            return False
        position += 1
        may_skip = False
    return may_skip or position == len(output)


def _refreshed(shown: Sequence[str], printed: list[str]) -> list[str]:
    """Return the shown lines as they are printed now; lines are found by their first column."""
    if _LEFT_OUT not in shown:
        return printed
    result: list[str] = []
    position = 0
    for line in _unwrapped(shown):
        if line in (_LEFT_OUT, ""):
            result.append(line)
            continue
        later = range(position, len(printed))
        matches = [number for number in later if _is_same(line, printed[number])]
        matches += [number for number in later if _label(printed[number]) == _label(line)]
        if matches:
            is_unchanged = _is_same(line, printed[matches[0]])
            result.append(line if is_unchanged else printed[matches[0]])
            position = matches[0] + 1
    return result


def _label(line: str) -> str:
    """Return the first column of a line of a report or a table."""
    return line.partition("  ")[0]


def _rewrite(page: Path, changes: list[tuple[Command, list[str]]]) -> None:
    """Replace what a page shows below commands, from the last to the first."""
    lines = page.read_text(encoding="utf-8").splitlines()
    for command, new in reversed(changes):
        wrapped = [part for line in new for part in (_wrapped(line) or [""])]
        lines[command.first : command.first + len(command.shown)] = wrapped
    page.write_text("\n".join(lines) + "\n", encoding="utf-8")
