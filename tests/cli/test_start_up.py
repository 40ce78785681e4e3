"""The root command, its help and completion, how little it imports, and what happens to its streams."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

import mergepipe
from support.command_line import Runner, command_tree, finish, make_workplace, start_command, start_python

COMMANDS = (
    *([name] for name in ("merge", "check", "analyze", "plan", "run", "explain", "sweep", "ls", "show", "lineage")),
    *([name] for name in ("verify", "repair", "replay", "diff", "gc")),
    *(["catalog", name] for name in ("rebuild", "stats")),
)
OF_OTHERS = ("numpy", "yaml", "jinja2", "torch", "transformers", "numpy.ma")
HEAVY = (*OF_OTHERS, "mergepipe.jobs.merge")
LOADED = f"""
import sys
from mergepipe.cli import main
exit_code = main(sys.argv[1:])
print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
sys.exit(exit_code)
"""
LOADED_ONE_BY_ONE = f"""
import json, sys
from mergepipe.cli import main
for command in json.loads(sys.argv[1]):
    exit_code = main(command)
    print(json.dumps([command, exit_code, [name for name in {HEAVY!r} if name in sys.modules]]), file=sys.stderr)
"""


def loaded_by(*arguments: object) -> set[str]:
    """Which of the heavy packages a successful command imports."""
    ran = finish(start_python(LOADED, *arguments))
    assert ran.exit_code == 0
    names: list[str] = ast.literal_eval(ran.err.splitlines()[-1])
    return set(names)


def test_help__imports_nothing_heavy() -> None:
    assert loaded_by("--help") == set()


def test_help__of_commands_imports_nothing_heavy() -> None:
    commands = [["--version"], ["check", "-h"], *([*each, "--help"] for each in COMMANDS)]
    ran = finish(start_python(LOADED_ONE_BY_ONE, json.dumps(commands)))
    assert ran.exit_code == 0
    told = [json.loads(line) for line in ran.err.splitlines()]
    assert [command for command, _, _ in told] == commands
    assert [(command, code, loaded) for command, code, loaded in told if code or loaded] == []


def test_check__loads_nothing_that_merges(tmp_path: Path) -> None:
    loaded = loaded_by("check", make_workplace(tmp_path).recipe)
    assert "yaml" in loaded
    assert loaded.isdisjoint({"torch", "transformers"})


def test_plan_and_ls__load_nothing_that_merges(tmp_path: Path) -> None:
    recipe = make_workplace(tmp_path).recipe
    plan = ("plan", recipe, "--budget", "50%", "--home", tmp_path / "home")
    for command in (plan, plan, ["ls"]):
        assert loaded_by(*command) <= {"numpy", "yaml"}


def test_root__lists_all_commands_where_that_is_asked(run: Runner) -> None:
    text = run("--help-all").out
    assert text.startswith("Usage: mergepipe ")
    sections = text.split("Merging:\n")[1]
    assert "..." not in sections
    listed = dict(line.split(maxsplit=1) for line in sections.splitlines() if line.startswith("  "))
    titles = [line for line in sections.splitlines() if line.endswith(":")]
    assert titles == ["Budgets:", "Snapshots:", "Experts:", "Training:", "Maintenance:"]
    assert listed["merge"] == "Merge the models of RECIPE into OUT."
    assert listed["check"] == "Check RECIPE, and print what its merge would read and write."
    assert {command[0] for command in COMMANDS} <= listed.keys()


def test_root__describes_at_most_14_commands_and_names_the_others(run: Runner) -> None:
    text = run("--help").out
    lines = text.split("Merging:\n")[1].splitlines()
    described = [line.split()[0] for line in lines if re.match(r"  [a-z-]+  +[A-Z]", line)]
    named = re.split(r"[,\s]+", text.split("Commands that are rarely needed: ")[1].split(";")[0])
    assert 10 <= len(described) <= 14
    assert sorted((*described, *named)) == sorted(command_tree().commands)


def test_root__without_a_command_it_helps(run: Runner) -> None:
    ran = run()
    assert (ran.exit_code, ran.err) == (2, "")
    assert ran.out == run("--help").out


def test_root__version(run: Runner) -> None:
    assert run("--version").out == f"mergepipe {mergepipe.__version__}\n"


def test_output__a_closed_pipe_ends_the_command_quietly() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    ran = finish(start_command("--help", stdout=writing))
    os.close(writing)
    assert (ran.exit_code, ran.err) == (141, "")


def test_output__names_the_terminal_cannot_show_are_escaped(tmp_path: Path) -> None:
    code = "import os, sys; os.environ['PYTHONIOENCODING'] = 'ascii'; os.execv(sys.executable, sys.argv[1:])"
    missing = tmp_path / "modèle.yml"
    ran = finish(start_python(code, sys.executable, "-m", "mergepipe", "check", missing, "--json"))
    assert ran.exit_code == 3
    assert "mod\\xe8le.yml" in ran.err
    assert ran.json()["error"]["problems"][0]["where"] == str(missing)


def every_command(command: Any, *path: str) -> list[tuple[tuple[str, ...], Any]]:
    if not hasattr(command, "commands"):
        return [(path, command)]
    return [leaf for name, inner in command.commands.items() for leaf in every_command(inner, *path, name)]


def test_help__of_every_command_shows_examples_with_options_that_exist() -> None:
    for path, command in every_command(command_tree()):
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
        "What the output says about its inputs:", "Machine:", "Many machines:", "Printing:", "Examples:",
    ]  # fmt: skip
    assert lines[-1] == "  mergepipe merge recipe.yml /shared/merged --executor ray"


def test_help__names_rarely_needed_options_and_describes_them_where_that_is_asked(run: Runner) -> None:
    short, full = run("merge", "--help").out, run("merge", "--help-all").out
    named = re.split(r"[,\s]+", short.split("Options that are rarely needed: ")[1].split(";")[0])
    assert "--min-density" in named
    assert [name for name in named if f"  {name} " in short or f"  {name} " not in full] == []
    assert "Options that are rarely needed" not in full
    assert run("status", "--help-all").out == run("status", "--help").out != ""
    assert "rarely needed" not in run("status", "--help").out


@pytest.mark.parametrize("columns", [80, 200])
def test_help__is_as_wide_as_the_terminal(run: Runner, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    widest = max(map(len, run("merge", "--help").out.splitlines()))
    assert columns * 0.7 < widest <= columns


def test_arguments__every_option_with_a_value_refuses_none(run: Runner) -> None:
    for path, command in every_command(command_tree()):
        for option in command.params:
            if option.param_type_name == "option" and not option.is_flag:
                ran = run(*path, option.opts[0])
                assert (ran.exit_code, f"Option '{option.opts[0]}' requires an argument" in ran.err) == (2, True)


def test_completion__prints_scripts_of_the_shells_that_are_known(run: Runner) -> None:
    for shell in ("bash", "zsh", "fish"):
        assert "_MERGEPIPE_COMPLETE" in run("--completion", shell).out
    assert "-F _mergepipe_completion mergepipe" in run("--completion", "bash").out
    ran = run("--completion", "bahs")
    assert (ran.exit_code, "did you mean 'bash'?" in ran.err) == (2, True)


def completions(run: Runner, monkeypatch: pytest.MonkeyPatch, shell: str, words: str) -> list[str]:
    """Return what a shell's script is answered for the last of the words after the program's name."""
    monkeypatch.setenv("_MERGEPIPE_COMPLETE", f"{shell}_complete")
    monkeypatch.setenv("COMP_WORDS", f"mergepipe {words}")
    last_word = words.split()[-1]
    monkeypatch.setenv("COMP_CWORD", last_word if shell == "fish" else str(len(words.split())))
    ran = run()
    assert ran.exit_code == 0
    return ran.out.splitlines()


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
def test_completion__names_commands_options_and_choices(
    run: Runner, monkeypatch: pytest.MonkeyPatch, words: str, completed: list[str]
) -> None:
    assert completions(run, monkeypatch, "bash", words) == [f"plain,{name}" for name in completed]


@pytest.mark.parametrize("words", ["merge rec", "merge recipe.yml out --home ho", "tailor inspect run/a run/b"])
def test_completion__leaves_names_of_files_to_the_shell(
    run: Runner, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    assert completions(run, monkeypatch, "bash", words) == [f"file,{words.split()[-1]}"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_completion__answers_the_scripts_of_other_shells(
    run: Runner, monkeypatch: pytest.MonkeyPatch, shell: str
) -> None:
    answer = "\n".join(completions(run, monkeypatch, shell, "plan --select con"))
    assert "conflict" in answer
    assert "random" not in answer
