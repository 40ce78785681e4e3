"""Options: absurd numbers end in typed errors, and errors name options that there are."""

from __future__ import annotations

import ast
import inspect
import re
import resource
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import mergepipe
from mergepipe import options
from mergepipe.cli.guard import failure_of
from mergepipe.core.flags import Options
from mergepipe.errors import KEYWORD_OF_OPTION, LimitError, MergePipeError, RecipeError, with_keywords
from mergepipe.options import MergeOptions, OutputOptions, PlanOptions, RunOptions
from mergepipe.tailor import api as tailor
from support.command_line import command_tree
from support.source_code import trees_with

TOO_MANY = 99999999999999999999
THREADS = [(0, "option.out-of-range"), (-1, "option.out-of-range"), (options.MAX_THREADS + 1, "option.invalid"),
           *((value, "option.invalid") for value in (TOO_MANY, 10**5000, 1.5, float("nan")))]  # fmt: skip
SIZES = [(0, "option.out-of-range"), (-1, "option.out-of-range"), (2**63, "option.invalid"),
         (2**64, "option.invalid"), (10**5000, "option.invalid")]  # fmt: skip
SEEDS = [(value, "option.invalid") for value in (-(2**63) - 1, 2**64, 10**5000, -(10**5000), 0.5)]
BLOCKS = [(value, "option.out-of-range") for value in (0, -16384, 1, 2**63, 2**41, 2**64 * 16384, 10**5000)]
NAN, INFINITY = float("nan"), float("inf")
SHARES = (-1.0, NAN, INFINITY, -INFINITY, 1.5, 1e308)
X = Path("nothing/is/looked/at")

Call = Callable[..., object]
Row = tuple[str, Call, str, list[tuple[int, str]] | list[tuple[float, str]]]
TABLE: list[Row] = [
    ("RunOptions", RunOptions, "threads", THREADS),
    ("RunOptions", RunOptions, "memory_bytes", SIZES),
    ("MergeOptions", MergeOptions, "threads", THREADS),
    ("MergeOptions", MergeOptions, "memory_bytes", SIZES),
    ("MergeOptions", MergeOptions, "shard_bytes", SIZES),
    ("RunOptions", RunOptions, "connections", [(0, "option.out-of-range"), (257, "option.invalid")]),
    ("PlanOptions", PlanOptions, "block_elements", BLOCKS),
    ("PlanOptions", PlanOptions, "min_density", [(v, "option.invalid") for v in (0.0, *SHARES)]),
    ("merge", partial(mergepipe.merge, X, X), "seed", SEEDS),
    ("plan", partial(mergepipe.plan, X, "1%"), "seed", SEEDS),
    ("check", partial(mergepipe.check, X), "shard_bytes", SIZES),
    ("OutputOptions", OutputOptions, "shard_bytes", SIZES),
    ("analyze", partial(mergepipe.analyze, X, [X]), "block_elements", BLOCKS),
    ("sweep", partial(mergepipe.sweep, X, ["1%"]), "seed", SEEDS),
    ("verify", partial(mergepipe.verify, X), "deep_fraction", [(v, "option.out-of-range") for v in SHARES]),
    ("pack", partial(mergepipe.pack, X, [X], X), "threads", THREADS),
    ("unpack", partial(mergepipe.unpack, X, X), "threads", THREADS),
    ("check_lora", partial(mergepipe.check_lora, X, X), "threads", THREADS),
    ("extract_lora", partial(mergepipe.extract_lora, X, X, X), "energy",
     [(v, "option.invalid") for v in (0.0, *SHARES)]),
    ("tailor", partial(tailor.compose, X, X), "memory_bytes", SIZES),
    ("tailor", partial(tailor.recipe, X, strategy="filter"), "ends",
     [(v, "option.out-of-range") for v in (-1, -(10**5000))]),
]  # fmt: skip


@pytest.mark.parametrize("row", TABLE, ids=[f"{row[0]}-{row[2]}" for row in TABLE])
def test_api__absurd_numbers_end_in_a_typed_error_before_anything_is_opened(row: Row) -> None:
    _, call, name, values = row
    codes = []
    for value, _ in values:
        with pytest.raises(MergePipeError) as caught:
            call(**{name: value})
        codes.append(caught.value.code)
        assert len(str(caught.value)) < 300
    assert codes == [code for _, code in values]


def test_options__are_checked_again_when_they_are_changed() -> None:
    for value in (RunOptions(), MergeOptions(seed=-(2**63)), MergeOptions(seed=2**64 - 1)):
        assert replace(value, threads=options.MAX_THREADS).threads == options.MAX_THREADS
        with pytest.raises(LimitError):
            replace(value, threads=0)
        with pytest.raises(FrozenInstanceError):
            value.threads = 0  # type: ignore[misc]


def test_failure_of__a_library_that_does_not_fit_the_address_space_is_lack_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 20, 1 << 20))
    failure = failure_of(OSError("Could not find/load shared object file 'libscipy_openblas64_.so'"), 130)
    assert failure.problems[0].code == "storage.exhausted"


OF_OTHER_PROGRAMS = {"--revision", "--local-dir", "--model", "--tasks"}
OPTION = re.compile(r"(?<![\w/.-])--[a-z]+(?:-[a-z]+)*(?![\w-])")


def _texts() -> Iterator[str]:
    """Yield the texts of the modules below the command line: docstrings and commands in backticks left out."""
    for place, tree in trees_with("--"):
        if place.startswith("cli/") or place.endswith("errors.py"):
            continue
        docstrings = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) for part in node.values if isinstance(part, ast.Constant))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                yield node.value


def _named_options() -> set[str]:
    texts = [re.sub(r"`(?:mergepipe|hf) [^`]*`?", "", text) for text in _texts()]
    return {option for text in texts for option in OPTION.findall(text)} - OF_OTHER_PROGRAMS


def test_errors__name_options_that_have_a_keyword_argument() -> None:
    named = _named_options()
    assert {"--budget", "--resume", "--rank"} <= named
    assert named - set(KEYWORD_OF_OPTION) == set()


def test_errors__name_options_that_a_command_has() -> None:
    commands: list[Any] = [command_tree()]
    declared: set[str] = set()
    while commands:
        command = commands.pop()
        commands += getattr(command, "commands", {}).values()
        declared |= {text for each in command.params for text in (*each.opts, *each.secondary_opts)}
    assert set(KEYWORD_OF_OPTION) - declared == set()


def test_errors__keyword_arguments_are_parameters_or_options() -> None:
    calls = [each for module in (mergepipe, tailor) for _, each in inspect.getmembers(module, inspect.isfunction)]
    kinds: list[Any] = [each for _, each in inspect.getmembers(options, inspect.isclass) if issubclass(each, Options)]
    names = {name for each in (*calls, *kinds) for name in inspect.signature(each).parameters}
    assert {keyword.partition("=")[0] for keyword in KEYWORD_OF_OPTION.values()} - names == set()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("give --rank 32 or --energy 0.9", "give rank 32 or energy 0.9"),
        ("run without --resume to start over", "run without resume=True to start over"),
        ("make it with `mergepipe analyze --export`", "make it with `mergepipe analyze --export`"),
        ("a path /a/--force/b", "a path /a/--force/b"),
    ],
)
def test_with_keywords__replaces_options_but_for_commands_and_paths(text: str, wanted: str) -> None:
    assert with_keywords(text) == wanted
    assert str(RecipeError.of("option.conflict", "", "is wrong", text)) == f"is wrong; {wanted}"
