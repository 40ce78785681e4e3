"""The command line as one object: commands, added in the order in which the help lists them."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, is_dataclass
from functools import wraps
from importlib import import_module
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

from mergepipe.cli.printing import PRINT_PANEL, PrintOptions, ReportOptions, print_report
from mergepipe.cli.progress import progress_shown
from mergepipe.core.display import Displayed
from mergepipe.core.flags import Flag, Option, declared_options
from mergepipe.core.units import one_of
from mergepipe.options import BUDGET_PANEL, MACHINE_PANEL, PARTS_PANEL, PUBLISHING_PANEL, RARE_PANEL, WORK_PANEL

if TYPE_CHECKING:
    from typer._click import Context, HelpFormatter


@dataclass(frozen=True, slots=True)
class Without:
    """Stands in `Annotated[Options, Without(name)]` for a field that a command has no option for."""

    name: str


KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
WIDEST_HELP = 200
PROGRAM_SETTINGS: dict[str, Any] = {
    "add_completion": False,
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"], "max_content_width": WIDEST_HELP},
}
"""Of both programs."""
_SHOWS_ALL = "mergepipe.shows_all"  # in a context: the help describes commands and options that are rarely needed
OTHER_OPTIONS = "Options"
PANELS = (
    "Arguments", OTHER_OPTIONS, BUDGET_PANEL, WORK_PANEL, PUBLISHING_PANEL, MACHINE_PANEL, PARTS_PANEL, PRINT_PANEL,
    RARE_PANEL,
)  # fmt: skip
"""The sections of a command's help, in order. Of the last one `--help` has the names of the options alone."""
OUT_HELP = "The directory to create, hf://org/name, or a prefix of a bucket: s3://bucket/prefix, gs://, az://."
RecipePath: TypeAlias = Annotated[
    str, typer.Argument(metavar="RECIPE", help="The recipe, a YAML file. Paths in it are relative to it.")
]
OutDirectory: TypeAlias = Annotated[str, Flag("The directory to create.", name="--out", short="-o", metavar="DIR")]
OutOption: TypeAlias = Annotated[str, Flag(OUT_HELP, name="--out", short="-o", metavar="OUT")]
SnapshotName: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="SID|PATH", help="A snapshot's directory or address (s3://, hf://org/name), its sid, or digits of it."
    ),
]
SnapshotHere: TypeAlias = Annotated[
    str, typer.Argument(metavar="SID|PATH", help="A snapshot's directory, its sid, or four or more first digits of it.")
]
OutPath: TypeAlias = Annotated[str, typer.Argument(metavar="OUT", help=OUT_HELP)]
EXPERT_PART = Flag(
    "Take part I of N of the experts only: every N-th of them, from the I-th on.", metavar="I/N", panel=PARTS_PANEL
)
SECTIONS = ("Merging", "Budgets", "Snapshots", "Experts", "Training", "Maintenance")
"""The sections of the help: each has the commands of one module of `cli.commands`."""
GROUPS = {
    "lora": "Apply LoRA adapters to a base, merge them, extract them.",
    "tailor": "Make a model of training checkpoints, or compose a resumable one of parts of several.",
    "catalog": "Look after the catalog.",
}
"""Commands of two words, by the first: what they are about."""
F = TypeVar("F", bound=Callable[..., Displayed | None])
_REGISTERED: dict[str, list[tuple[str, Callable[..., object], str]]] = {}  # by module: name, function, examples


def command(*examples: str, name: str = "") -> Callable[[F], F]:
    """Make a function a command, under its own name unless `name` is given, with examples at the end of its help.

    A parameter that is annotated with a class of options stands for one option for each field; the function takes the
    value. One that is annotated with a `Flag` is an option by itself. `on_progress` is shown while the function runs. A
    report that it returns is printed, as the options of printing say, which every such command has.
    """

    def register(function: F) -> F:
        entry = name or function.__name__, function, "\n".join(examples)
        _REGISTERED.setdefault(function.__module__.rpartition(".")[2], []).append(entry)
        return function

    return register


def add_commands(app: typer.Typer, module: str) -> None:
    """Add the commands of a module of `cli.commands` to their section of the help."""
    import_module(f"mergepipe.cli.commands.{module}")
    section = module.capitalize()
    groups: dict[str, typer.Typer] = {}
    for full_name, function, examples in _REGISTERED[module]:
        group, _, name = full_name.rpartition(" ")
        if group and group not in groups:
            groups[group] = typer.Typer(cls=SectionedGroup, rich_markup_mode=None)
            app.add_typer(groups[group], name=group, help=GROUPS[group], rich_help_panel=section)
        place = groups[group] if group else app
        panel = None if group else section
        place.command(name, cls=SectionedCommand, rich_help_panel=panel, epilog=examples)(with_option_groups(function))


def with_option_groups(function: Callable[..., object]) -> Callable[..., None]:
    """Return `function` as a command, with the options that its parameters declare; see `command`."""
    parameters: dict[str, inspect.Parameter] = {}
    options: dict[str, Option] = {}
    groups: dict[str, type] = {}
    signature = inspect.signature(function, eval_str=True)
    declared_parameters = dict(signature.parameters)
    has_progress = declared_parameters.pop("on_progress", None) is not None
    is_printed = issubclass(signature.return_annotation or type(None), Displayed)
    if is_printed:
        kind = ReportOptions if has_progress else PrintOptions
        declared_parameters["printing"] = inspect.Parameter("printing", KEYWORD_ONLY, annotation=kind)
    takes_context = declared_parameters.pop("context", None) is not None
    context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    for parameter in (context, *declared_parameters.values()):
        kind, *marks = (
            get_args(parameter.annotation) if get_origin(parameter.annotation) is Annotated else (parameter.annotation,)
        )
        flags = [mark for mark in marks if isinstance(mark, Flag)]
        declared: list[Option] = []
        if isinstance(kind, type) and is_dataclass(kind):
            omitted = {mark.name for mark in marks if isinstance(mark, Without)}
            declared = [option for option in declared_options(kind) if option.field not in omitted]
            groups[parameter.name] = kind
        elif flags:
            declared = [Option(parameter.name, getattr(kind, "__name__", str(kind)), parameter.default, flags[0])]
        else:
            parameters[parameter.name] = parameter
        options |= {option.field: option for option in declared}
        parameters |= {option.field: _parameter(option) for option in declared}

    parameters["help_all"] = inspect.Parameter("help_all", KEYWORD_ONLY, default=False, annotation=HELP_ALL)

    @wraps(function)
    def run(context: typer.Context, **texts: Any) -> None:
        del texts["help_all"]  # `show_all` has seen to it
        values = {name: _value(options[name], text) if name in options else text for name, text in texts.items()}
        for name, kind in groups.items():
            fields = [option.field for option in declared_options(kind) if option.field in values]
            values[name] = kind(**{field: values.pop(field) for field in fields})
        printing: Any = values.pop("printing") if is_printed else values.get("printing")
        if takes_context:
            values["context"] = context
        with ExitStack() as shown:
            if has_progress:
                values["on_progress"] = shown.enter_context(progress_shown(context.obj, silent=printing.silent))
            report = function(**values)
        if isinstance(report, Displayed):
            print_report(report, printing)

    del run.__wrapped__  # its signature is not that of the command
    panels = {name: option.flag.panel or OTHER_OPTIONS for name, option in options.items()}
    ordered = sorted(parameters.values(), key=lambda parameter: _place(panels.get(parameter.name, OTHER_OPTIONS)))
    run.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in ordered}
    return run


def _place(panel: str) -> int:
    """Return the place of a section in a command's help: those that are not known come last."""
    return PANELS.index(panel) if panel in PANELS else len(PANELS)


def _parameter(option: Option) -> inspect.Parameter:
    """Return the parameter of a command that typer makes an option of. None stands for the default of the field."""
    kind, default, flag = _text_kind(option), option.default, option.flag
    name = f"{option.name}/--no-{option.name[2:]}" if kind is bool and default is None else option.name
    if kind is bool and default is True:
        default = False  # the option is then `--no-...`
    elif flag.default or kind == list[str] or (kind is str and not isinstance(default, str)):
        default = inspect.Parameter.empty if default is inspect.Parameter.empty else None
    made = typer.Option(
        *filter(None, (name, flag.short)),
        metavar=flag.metavar or None,
        help=flag.help + (f"  [default: {flag.default}]" if flag.default else ""),
        autocompletion=choices(*flag.choices) if flag.choices else None,
        rich_help_panel=flag.panel or None,
        show_default=not isinstance(default, bool | None),
    )
    annotation = kind | None if default is None else kind
    return inspect.Parameter(option.field, KEYWORD_ONLY, default=default, annotation=Annotated[annotation, made])


def _text_kind(option: Option) -> Any:
    """Return the type that typer reads an option as."""
    if option.kind.startswith(("tuple", "list")):
        return list[str]
    kinds = {"bool": bool, "int": int, "float": float}
    return str if option.is_read_here else kinds.get(option.kind.partition(" |")[0], str)


def _value(option: Option, text: Any) -> Any:
    """Return the value of what typer took for an option."""
    if text is None:
        return option.default
    if isinstance(text, str):
        return option.read(text)
    if isinstance(text, list | tuple):
        return tuple(option.read(item) for item in text)
    return not text if option.default is True else text


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


def show_all(context: typer.Context, value: bool) -> None:
    """Print the help with the commands or options that `--help` only names, and exit."""
    if value and not context.resilient_parsing:
        context.meta[_SHOWS_ALL] = True
        print(context.get_help())
        raise typer.Exit(0)


HELP_ALL = Annotated[bool, typer.Option("--help-all", is_eager=True, callback=show_all, hidden=True)]
"""The option of every command. The line of `--help` that names rarely needed options is its help."""


def write_names(formatter: HelpFormatter, names: Sequence[str], kind: str) -> None:
    """Write the names of the commands or options that this help does not describe, if there are any."""
    if names:
        text = f"{kind} that are rarely needed: {', '.join(names)}; --help-all describes them."
        formatter.write_paragraph()
        formatter.write("\n".join(wrap(text, formatter.width, break_on_hyphens=False)) + "\n")


class SectionedCommand(TyperCommand):
    """A command whose help lists options by `rich_help_panel`, and examples at the end as they are written."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """Read the arguments."""
        take_plain_values(self.get_params(ctx))
        try:
            return super().parse_args(ctx, args)
        except typer.TyperException as error:
            vars(error)["ctx"] = vars(error).get("ctx") or ctx  # its help is what the error names
            raise

    def collect_usage_pieces(self, ctx: Context) -> list[str]:
        """Return the arguments under the names that their help has."""
        arguments = [param for param in self.get_params(ctx) if param.param_type_name == "argument"]
        return [self.options_metavar or "", *(str(getattr(param, "metavar", None)) for param in arguments)]

    def format_options(self, ctx: Context, formatter: HelpFormatter) -> None:
        """Write arguments, options without a panel, then panel by panel."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                is_argument = param.param_type_name == "argument"
                panel = getattr(param, "rich_help_panel", None) or ("Arguments" if is_argument else OTHER_OPTIONS)
                record = (str(getattr(param, "metavar", None) or record[0]), record[1]) if is_argument else record
                sections.setdefault(panel, []).append(record)
        rare = [] if ctx.meta.get(_SHOWS_ALL) else [name.split()[0] for name, _ in sections.pop(RARE_PANEL, ())]
        width = min(max((len(name) for rows in sections.values() for name, _ in rows), default=0), 30)
        for title in sorted(sections, key=_place):
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), text) for name, text in sections[title]])
        write_names(formatter, rare, "Options")

    def format_epilog(self, ctx: Context, formatter: HelpFormatter) -> None:
        """Write the examples, one a line."""
        if self.epilog:
            with formatter.section("Examples"):
                for line in self.epilog.splitlines():
                    formatter.write(f"{'':>{formatter.current_indent}}{line}\n")


class SectionedGroup(TyperGroup):
    """A group of commands whose help lists them by `rich_help_panel`, and only names the `rare_commands`."""

    rare_commands: tuple[str, ...] = ()

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        """Read the arguments up to the command's name."""
        take_plain_values(self.get_params(ctx))
        return super().parse_args(ctx, args)

    def format_commands(self, ctx: Context, formatter: HelpFormatter) -> None:
        """Write the commands section by section."""
        sections: dict[str, list[tuple[str, str]]] = {title: [] for title in SECTIONS}
        rare = () if ctx.meta.get(_SHOWS_ALL) else self.rare_commands
        width = max((len(name) for name in self.commands), default=0)
        for name, command in self.commands.items():
            if not command.hidden and name not in rare:
                panel = getattr(command, "rich_help_panel", None)
                title = panel if isinstance(panel, str) else "Commands"
                row = (name.ljust(width), command.get_short_help_str(WIDEST_HELP))
                sections.setdefault(title, []).append(row)
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)
        write_names(formatter, rare, "Commands")


# --- completion of commands, options and their choices in shells ---

PROGRAM = "mergepipe"
VARIABLE = "_MERGEPIPE_COMPLETE"
SHELLS = ("bash", "zsh", "fish")


def completion_script(shell: str) -> str:
    """Return the script that a shell evaluates to complete the program's arguments."""
    one_of("--completion", shell, SHELLS)
    from typer._completion_shared import get_completion_script

    return get_completion_script(prog_name=PROGRAM, complete_var=VARIABLE, shell=shell)


def choices(*names: str) -> Callable[[str], list[str]]:
    """Return what completes the value of an option that takes one of `names`."""

    def begin_with(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return begin_with


def asks_for_completions() -> bool:
    """Whether a shell's completion script runs this program."""
    return bool(os.environ.get(VARIABLE))


def complete(command: TyperGroup) -> int:
    """Print the completions that a shell's completion script asks for; return the exit code."""
    from typer._completion_classes import completion_init
    from typer.completion import shell_complete

    completion_init()
    return shell_complete(command, {}, PROGRAM, VARIABLE, os.environ[VARIABLE])


# --- all commands, in the order in which the help lists them ---


_COMMANDS = {
    "merging": ("merge", "check", "run"),
    "budgets": ("plan", "explain", "analyze"),
    "snapshots": ("ls", "verify", "push"),
    "experts": ("pack", "unpack", "lora"),
    "training": ("tailor",),
    "maintenance": ("gc",),
}
"""Modules of `cli.commands`, and the commands of each that `--help` describes.

They import nothing but typer and the standard library until a command runs.
"""
_RARE_COMMANDS = {
    "merging": ("moe", "status"),
    "budgets": ("sweep", "search"),
    "snapshots": ("show", "lineage", "diff", "repair", "replay"),
    "maintenance": ("catalog",),
}
"""The other commands of these modules: `--help` names them, `--help-all` describes them."""


def build_command(arguments: Sequence[str] = ()) -> TyperGroup:
    """Build the command line: the commands of the module with that which `arguments` begin with, or all."""
    commands = {module: (*names, *_RARE_COMMANDS.get(module, ())) for module, names in _COMMANDS.items()}
    named = [module for module, names in commands.items() if arguments and arguments[0] in names]
    app = typer.Typer(name="mergepipe", cls=SectionedGroup, **PROGRAM_SETTINGS)
    app.callback(invoke_without_command=True)(_root)
    for module in named or _COMMANDS:
        add_commands(app, module)
    command: TyperGroup = typer.main.get_group(app)
    assert isinstance(command, SectionedGroup)
    command.rare_commands = tuple(name for names in _RARE_COMMANDS.values() for name in names)
    return command


def _root(
    context: typer.Context,
    *,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    completion: Annotated[
        str | None,
        typer.Option(
            "--completion",
            metavar="SHELL",
            autocompletion=choices(*SHELLS),
            help="Print a script for bash, zsh or fish, and exit.",
        ),
    ] = None,
    help_all: Annotated[
        bool, typer.Option("--help-all", is_eager=True, callback=show_all, help="Show all commands and exit.")
    ] = False,
) -> None:
    """Fold adapters, merge experts and compose training checkpoints of large models, all or nothing."""
    del help_all  # `show_all` has seen to it
    if version:
        from mergepipe import __version__

        print(f"mergepipe {__version__}")
        raise typer.Exit(0)
    if completion is not None:
        print(completion_script(completion))
        raise typer.Exit(0)
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(2)
