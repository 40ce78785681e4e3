"""Add commands to the command line: options in groups, help with sections and examples."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

if TYPE_CHECKING:
    from typer._click import Context, HelpFormatter

WIDEST_HELP = 200
OTHER_OPTIONS = "Options"
SECTIONS = ("Merging", "Budgets", "Snapshots", "Experts", "Training", "Maintenance")


def add_command(
    app: typer.Typer,
    function: Callable[..., None],
    *,
    name: str | None = None,
    section: str = "",
    examples: Sequence[str] = (),
) -> None:
    """Add `function` as a command under a section of the help, with examples at the end of its own help.

    A parameter annotated with a dataclass stands for one option for each field; the function takes the value.
    """
    app.command(
        name or function.__name__, cls=SectionedCommand, rich_help_panel=section or None, epilog="\n".join(examples)
    )(with_option_groups(function))


def with_option_groups(function: Callable[..., None]) -> Callable[..., None]:
    """Return `function` with each parameter that is a dataclass replaced by the dataclass's fields."""
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type] = {}
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        if isinstance(parameter.annotation, type) and is_dataclass(parameter.annotation):
            groups[parameter.name] = parameter.annotation
            parameters.extend(_field_parameters(parameter.annotation))
        else:
            parameters.append(parameter)

    @wraps(function)
    def command(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        function(**values)

    del command.__wrapped__  # its signature is not that of the command
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def _field_parameters(group: type) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in fields(group)
    ]


@dataclass(frozen=True, slots=True)
class PlainValues:
    """Takes values of an option that have its type already; typer checks all others, by loading pydantic first."""

    annotation: object
    checked: Callable[[], Any]

    def coerce(self, value: Any, param: Any, ctx: Context) -> Any:
        """Return the value of an option for the command's function."""
        is_many = param.multiple or param.nargs == -1
        if value is None:
            return () if is_many else None
        if is_many and self.annotation == list[str] and all(type(item) is str for item in value):
            return list(value)
        if not is_many and type(value) is self.annotation:
            return value
        return self.checked().coerce(value, param=param, ctx=ctx)


def take_plain_values(params: Sequence[Any]) -> None:
    """Let parameters take values that have their type already without loading pydantic, where typer allows that."""
    for param in params:
        described, checked = getattr(param, "type_descriptor", None), getattr(param, "get_runtime_param", None)
        if described is not None and checked is not None:
            param.get_runtime_param = lambda plain=PlainValues(described.annotation, checked): plain


class SectionedCommand(TyperCommand):
    """A command whose help lists options by `rich_help_panel`, and examples at the end as they are written."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """Read the arguments."""
        take_plain_values(self.get_params(ctx))
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Context) -> list[str]:
        """Return the arguments under the names that their help has."""
        arguments = [param for param in self.get_params(ctx) if param.param_type_name == "argument"]
        return [self.options_metavar or "", *(str(getattr(param, "metavar", None)) for param in arguments)]

    def format_options(self, ctx: Context, formatter: HelpFormatter) -> None:
        """Write arguments, options without a panel, then panel by panel; `--help` goes to the last."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], OTHER_OPTIONS: []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                is_argument = param.param_type_name == "argument"
                panel = getattr(param, "rich_help_panel", None) or ("Arguments" if is_argument else OTHER_OPTIONS)
                record = (str(getattr(param, "metavar", None) or record[0]), record[1]) if is_argument else record
                section = list(sections)[-1] if param.name == "help" else panel
                sections.setdefault(section, []).append(record)
        width = min(max((len(name) for rows in sections.values() for name, _ in rows), default=0), 30)
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl([(name.ljust(width), text) for name, text in rows])

    def format_epilog(self, ctx: Context, formatter: HelpFormatter) -> None:
        """Write the examples, one a line."""
        if self.epilog:
            with formatter.section("Examples"):
                for line in self.epilog.splitlines():
                    formatter.write(f"{'':>{formatter.current_indent}}{line}\n")


class SectionedGroup(TyperGroup):
    """A group of commands whose help lists them by `rich_help_panel`."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """Read the arguments up to the command's name."""
        take_plain_values(self.get_params(ctx))
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: Context, formatter: HelpFormatter) -> None:
        """Write the commands section by section."""
        sections: dict[str, list[tuple[str, str]]] = {title: [] for title in SECTIONS}
        width = max((len(name) for name in self.commands), default=0)
        for name, command in self.commands.items():
            if not command.hidden:
                panel = getattr(command, "rich_help_panel", None)
                title = panel if isinstance(panel, str) else "Commands"
                row = (name.ljust(width), command.get_short_help_str(WIDEST_HELP))
                sections.setdefault(title, []).append(row)
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)
