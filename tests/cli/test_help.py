"""What the help says, how wide it is, and what shells complete."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest

from mergepipe.cli.app import build_command
from support.command_line import Runner, finish, start_command


def every_command(command: Any, *path: str) -> list[tuple[tuple[str, ...], Any]]:
    if not hasattr(command, "commands"):
        return [(path, command)]
    return [leaf for name, inner in command.commands.items() for leaf in every_command(inner, *path, name)]


def test_help__of_every_command_shows_examples_with_options_that_exist() -> None:
    for path, command in every_command(build_command()):
        assert command.epilog, path
        known = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
        for example in command.epilog.splitlines():
            words = shlex.split(example)
            words = words[: next((i for i, word in enumerate(words) if word in (">", "|")), len(words))]
            assert words[: len(path) + 1] == ["mergepipe", *path]
            assert {word for word in words if word.startswith("-")} <= known


def test_help__lists_options_in_sections(run: Runner) -> None:
    lines = run("merge", "--help").out.splitlines()
    assert lines[0] == "Usage: mergepipe merge [OPTIONS] RECIPE OUT"
    titles = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert titles == [
        "Arguments:", "Options:", "Under a budget:", "Catalog and earlier work:",
        "What the output says of its inputs:", "Machine:", "Many machines:", "Printing:", "Examples:",
    ]  # fmt: skip
    assert lines[-1] == "  mergepipe merge recipe.yml /shared/merged --executor ray"


def test_help__names_rarely_needed_options_and_describes_them_where_that_is_asked(run: Runner) -> None:
    short, full = run("merge", "--help").out, run("merge", "--help-all").out
    named = re.split(r"[,\s]+", short.split("Options that are rarely needed: ")[1].split(";")[0])
    assert "--min-density" in named
    assert [name for name in named if f"  {name} " in short or f"  {name} " not in full] == []
    assert "Options that are rarely needed" not in full
    assert "rarely needed" not in run("status", "--help").out


@pytest.mark.parametrize("columns", [80, 200])
def test_help__is_as_wide_as_the_terminal(run: Runner, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    widest = max(map(len, run("merge", "--help").out.splitlines()))
    assert columns * 0.7 < widest <= columns


def test_completion__prints_scripts_of_the_shells_that_are_known(run: Runner) -> None:
    for shell in ("bash", "zsh", "fish"):
        assert "_MERGEPIPE_COMPLETE" in run("--completion", shell).out
    ran = run("--completion", "bahs")
    assert (ran.exit_code, "did you mean 'bash'?" in ran.err) == (2, True)


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("me", ["merge"]),
        ("re", ["repair", "replay"]),
        ("merge --bud", ["--budget"]),
        ("catalog s", ["stats"]),
        ("plan --select con", ["conflict"]),
        ("merge --paths a", ["absolute"]),
        ("--completion z", ["zsh"]),
    ],
)
def test_completion__names_commands_and_options(
    run: Runner, monkeypatch: pytest.MonkeyPatch, words: str, completed: list[str]
) -> None:
    monkeypatch.setenv("_MERGEPIPE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"mergepipe {words}")
    monkeypatch.setenv("COMP_CWORD", str(len(words.split())))
    ran = run()
    assert (ran.exit_code, ran.out.split()) == (0, completed)


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_completion__answers_the_scripts_of_other_shells(
    run: Runner, monkeypatch: pytest.MonkeyPatch, shell: str
) -> None:
    monkeypatch.setenv("_MERGEPIPE_COMPLETE", f"complete_{shell}")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "mergepipe plan --select con")
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    ran = run()
    assert (ran.exit_code, "conflict" in ran.out, "random" in ran.out) == (0, True, False)


def test_completion__works_in_bash() -> None:
    script = finish(start_command("--completion", "bash")).out
    assert "complete -o default -F _mergepipe_completion mergepipe" in script
