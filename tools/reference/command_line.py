"""The page of the command line: every command with its arguments and options."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from tools.reference import cell, row, table

_HEAD = """# Command line

Every command has `--help`; `--help-all` describes rarely needed commands and options, too. Paths in a recipe are
relative to the recipe. Errors are lines on standard error with a stable code in brackets ([errors](errors.md)), and the
exit code tells their class.

With `--json` a command prints one JSON object, on success and on failure (then with the key `error`). Its first field,
`format`, is `REPORT_FORMAT`: the number grows when a field goes away or changes its meaning; new fields may come at any
time. `plan --json` prints the plan itself ([its format](../internals/formats/plan.md)).

"""
_COMMON = """## Common options

These mean the same wherever a command has them.
"""
_FEWEST_USERS = 7
"""Commands that have an option with one default and one meaning, for which it is told once."""
_DEFAULT = re.compile(r"\s*\[(default: .*|required)\]$")


def command_line_page() -> str:
    """Return the page, one section a command, in the order of `mergepipe --help`."""
    from mergepipe.cli.app import build_command
    from mergepipe.cli.printing import REPORT_FORMAT

    commands = list(_commands(build_command(), "mergepipe"))
    users = Counter(row for _, command in commands for row in map(_option, _shown(command, "option")))
    common = [row for row, n_users in users.items() if n_users >= _FEWEST_USERS]
    contents = [f"- [`{path}`](#{path.replace(' ', '-')}): {_summary(command)}" for path, command in commands]
    return _HEAD.replace("REPORT_FORMAT", REPORT_FORMAT) + "\n".join(
        [
            *contents, "", _COMMON, *table("option", "default", "meaning"), *common, "",
            *(line for each in commands for line in _section(*each, common)),
        ]
    )  # fmt: skip


def _commands(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{path} {name}")
        elif not command.hidden:
            yield f"{path} {name}", command


def _summary(command: Any) -> str:
    return str(command.help).split("\n\n")[0].replace("\n", " ").strip()


def _shown(command: Any, kind: str) -> list[Any]:
    return [each for each in command.params if each.param_type_name == kind and not getattr(each, "hidden", False)]


def _section(path: str, command: Any, common: Sequence[str]) -> list[str]:
    arguments, options = _shown(command, "argument"), _shown(command, "option")
    usage = " ".join([path, *(_argument_name(each) for each in arguments), "[OPTIONS]" if options else ""]).strip()
    lines = [f"## {path}", "", "```text", usage, "```", "", *_paragraphs(command), ""]
    if arguments:
        lines += [*table("argument", "meaning"), *(_argument(each) for each in arguments), ""]
    own = [line for line in map(_option, options) if line not in common]
    if own:
        lines += [*table("option", "default", "meaning"), *own, ""]
    shared = [f"`{'/'.join([*each.opts, *each.secondary_opts])}`" for each in options if _option(each) in common]
    if shared:
        lines += [f"And, of the [common options](#common-options), {', '.join(shared)}.", ""]
    return lines


def _paragraphs(command: Any) -> list[str]:
    paragraphs = str(command.help).strip().split("\n\n")
    return "\n\n".join(" ".join(each.split()) for each in paragraphs).splitlines()


def _argument_name(argument: Any) -> str:
    name = str(argument.metavar or argument.name).upper().rstrip(".") + ("..." if argument.nargs == -1 else "")
    return name if argument.required or name.startswith("[") else f"[{name}]"


def _argument(argument: Any) -> str:
    return row(f"`{_argument_name(argument)}`", cell(_DEFAULT.sub("", argument.help or "")))


def _option(option: Any) -> str:
    names = "/".join([*option.opts, *option.secondary_opts])
    value = "" if option.is_flag else f" {option.metavar or option.name.upper()}"
    return row(f"`{names}{value}`", _default(option), cell(_DEFAULT.sub("", option.help or "")))


def _default(option: Any) -> str:
    written = _DEFAULT.search(option.help or "")
    if written:
        return cell(written[1].removeprefix("default: "))
    if option.required:
        return "required"
    if option.is_flag:
        return "on" if option.default is True else "off" if option.default is False else ""
    if option.multiple or option.default is None or callable(option.default):
        return "may be repeated" if option.multiple else ""
    return f"`{option.default}`"
