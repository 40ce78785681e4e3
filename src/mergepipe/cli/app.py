"""The command line as one object: commands, added in the order in which the help lists them."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, is_dataclass
from importlib import import_module
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar, get_args, get_origin

import click

from mergepipe.cli.printing import PRINT_PANEL, PrintOptions, ReportOptions, print_report
from mergepipe.cli.progress import progress_shown
from mergepipe.core.display import Displayed
from mergepipe.core.flags import Argument, Flag, Option, declared_options
from mergepipe.core.units import one_of
from mergepipe.options import BUDGET_PANEL, MACHINE_PANEL, PARTS_PANEL, PUBLISHING_PANEL, RARE_PANEL, WORK_PANEL

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


@dataclass(frozen=True, slots=True)
class Without:
    """Stands in `Annotated[Options, Without(name)]` for a field that a command has no option for."""

    name: str


KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
WIDEST_HELP = 200
CONTEXT_SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": WIDEST_HELP}
"""Of both programs."""
_SHOWS_ALL = "mergepipe.shows_all"  # in a context: the help describes commands and options that are rarely needed
ARGUMENTS = "Arguments"
OTHER_OPTIONS = "Options"
PANELS = (
    ARGUMENTS, OTHER_OPTIONS, BUDGET_PANEL, WORK_PANEL, PUBLISHING_PANEL, MACHINE_PANEL, PARTS_PANEL, PRINT_PANEL,
    RARE_PANEL,
)  # fmt: skip
"""The sections of a command's help, in order. Of the last one `--help` has the names of the options alone."""
OUT_HELP = "The directory to create, hf://org/name, or a prefix of a bucket: s3://bucket/prefix, gs://, az://."
RecipePath: TypeAlias = Annotated[
    str, Argument("RECIPE", "The recipe, a YAML file. Relative paths start at its folder.")
]
OutDirectory: TypeAlias = Annotated[str, Flag("The directory to create.", name="--out", short="-o", metavar="DIR")]
OutOption: TypeAlias = Annotated[str, Flag(OUT_HELP, name="--out", short="-o", metavar="OUT")]
SnapshotName: TypeAlias = Annotated[
    str,
    Argument(
        "SID|PATH",
        "A snapshot's directory or address (s3://, hf://org/name), its sid, or the first digits of it.",
    ),
]
SnapshotHere: TypeAlias = Annotated[
    str,
    Argument("SID|PATH", "A snapshot's directory, its sid, or the first four or more digits of it."),
]
OutPath: TypeAlias = Annotated[str, Argument("OUT", OUT_HELP)]
EXPERT_PART = Flag(
    "Process only part I of N of the experts: every N-th, from the I-th on.", metavar="I/N", panel=PARTS_PANEL
)
SECTIONS = ("Merging", "Budgets", "Snapshots", "Experts", "Training", "Maintenance")
"""The sections of the help: each has the commands of one module of `cli.commands`."""
GROUPS = {
    "lora": "Apply, check, merge, convert or extract LoRA adapters.",
    "tailor": "Export models from training checkpoints, or compose a resumable one from parts of several.",
    "catalog": "Rebuild the catalog, or print its contents.",
}
"""Commands of two words, by the first: what they are about."""
F = TypeVar("F", bound=Callable[..., Displayed | None])
_REGISTERED: dict[str, list[tuple[str, Callable[..., object], str]]] = {}  # by module: name, function, examples


def command(*examples: str, name: str = "") -> Callable[[F], F]:
    """Make a function a command, under its own name unless `name` is given, with examples at the end of its help.

    A parameter that is annotated with an `Argument` is an argument, one with a `Flag` an option. One that is annotated
    with a class of options stands for one option for each field; the function takes the value. `on_progress` is shown
    while the function runs. A report that it returns is printed, as the options of printing say, which every such
    command has.
    """

    def register(function: F) -> F:
        entry = name or function.__name__, function, "\n".join(examples)
        _REGISTERED.setdefault(function.__module__.rpartition(".")[2], []).append(entry)
        return function

    return register


def add_commands(root: SectionedGroup, module: str) -> None:
    """Add the commands of a module of `cli.commands` to their section of the help."""
    import_module(f"mergepipe.cli.commands.{module}")
    section = module.capitalize()
    groups: dict[str, SectionedGroup] = {}
    for full_name, function, examples in _REGISTERED[module]:
        group, _, name = full_name.rpartition(" ")
        if not group:
            root.add_command(make_command(name, function, examples, section))
            continue
        if group not in groups:
            groups[group] = SectionedGroup(group, help=GROUPS[group], panel=section, no_args_is_help=False)
            root.add_command(groups[group])
        groups[group].add_command(make_command(name, function, examples))


def make_command(name: str, function: Callable[..., object], examples: str, panel: str = "") -> SectionedCommand:
    """Return `function` as a command, with the arguments and options that its parameters declare; see `command`."""
    arguments: list[click.Parameter] = []
    options: dict[str, Option] = {}
    groups: dict[str, type] = {}
    signature = inspect.signature(function, eval_str=True)
    declared_parameters = dict(signature.parameters)
    takes_context = declared_parameters.pop("context", None) is not None
    has_progress = declared_parameters.pop("on_progress", None) is not None
    is_printed = issubclass(signature.return_annotation or type(None), Displayed)
    if is_printed:
        kind = ReportOptions if has_progress else PrintOptions
        declared_parameters["printing"] = inspect.Parameter("printing", KEYWORD_ONLY, annotation=kind)
    for parameter in declared_parameters.values():
        kind, *marks = (
            get_args(parameter.annotation) if get_origin(parameter.annotation) is Annotated else (parameter.annotation,)
        )
        kind_name = getattr(kind, "__name__", str(kind))
        declared: list[Option] = []
        if isinstance(kind, type) and is_dataclass(kind):
            omitted = {mark.name for mark in marks if isinstance(mark, Without)}
            declared = [option for option in declared_options(kind) if option.field not in omitted]
            groups[parameter.name] = kind
        for mark in marks:
            if isinstance(mark, Argument):
                is_required = parameter.default is inspect.Parameter.empty
                is_many = kind_name.startswith("list")
                arguments.append(CommandArgument(parameter.name, mark, is_required=is_required, is_many=is_many))
            elif isinstance(mark, Flag):
                declared = [Option(parameter.name, kind_name, parameter.default, mark)]
        options |= {option.field: option for option in declared}

    @click.pass_context
    def run(context: click.Context, /, **texts: Any) -> None:
        values: dict[str, Any] = {}
        for name, text in texts.items():
            if name in options:
                values[name] = _value(options[name], text)
            else:
                values[name] = list(text) if isinstance(text, tuple) else text
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

    made = sorted(map(_option_parameter, options.values()), key=lambda option: _place(option.panel))
    return SectionedCommand(
        name,
        callback=run,
        params=[*arguments, *made, help_all_option(hidden=True)],
        help=inspect.getdoc(function),
        epilog=examples,
        panel=panel,
    )


def _place(panel: str) -> int:
    """Return the place of a section in a command's help: those that are not known come last."""
    return PANELS.index(panel) if panel in PANELS else len(PANELS)


def _option_parameter(option: Option) -> CommandOption:
    """Return the option of a command. A default of None stands for that of the field."""
    flag = option.flag
    kind = _text_kind(option)
    name = f"{option.name}/--no-{option.name[2:]}" if kind is bool and option.default is None else option.name
    names = [text for text in (name, flag.short, option.field) if text]
    form: dict[str, Any] = {}
    if option.default is inspect.Parameter.empty:
        form["required"] = True
    elif kind is bool and option.default is True:
        form["default"] = False  # the option is then `--no-...`
    elif option.is_many:
        form["default"] = ()
    elif flag.default or (kind is str and not isinstance(option.default, str)):
        form["default"] = None
    else:
        form["default"] = option.default
    return CommandOption(
        names,
        type=kind,
        is_flag=True if kind is bool else None,  # False would let an option without a default have no value
        multiple=option.is_many,
        metavar=flag.metavar or None,
        help=flag.help + (f"  [default: {flag.default}]" if flag.default else ""),
        show_default=not isinstance(form.get("default"), bool | None) and not option.is_many,
        panel=flag.panel or OTHER_OPTIONS,
        choices=flag.choices,
        **form,
    )


def _text_kind(option: Option) -> Any:
    """Return the type that click reads a value of an option as."""
    if option.is_many or option.is_read_here:
        return str
    kinds = {"bool": bool, "int": int, "float": float}
    return kinds.get(option.kind.partition(" |")[0], str)


def _value(option: Option, text: Any) -> Any:
    """Return the value of an option as click has read it."""
    if text is None or text == ():
        return option.default
    if isinstance(text, str):
        return option.read(text)
    if isinstance(text, tuple):
        return tuple(option.read(item) for item in text)
    return not text if option.default is True else text


class CommandArgument(click.Argument):
    """An argument, named in help and errors as it is declared."""

    def __init__(self, name: str, declared: Argument, *, is_required: bool, is_many: bool) -> None:
        default: dict[str, Any] = {} if is_required or is_many else {"default": None}
        n_values = -1 if is_many else 1
        super().__init__([name], type=str, required=is_required, nargs=n_values, metavar=declared.metavar, **default)
        self.help = declared.help

    def make_metavar(self, ctx: click.Context) -> str:
        """Return the name as it is declared."""
        return str(self.metavar)

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        """Return the name and what it is."""
        return self.make_metavar(ctx), f"{self.help}{'  [required]' if self.required else ''}"

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete names of files."""
        return file_names(incomplete)


class CommandOption(click.Option):
    """An option of a section of the help; its value is completed as one of `choices`, or as the name of a file."""

    def __init__(self, *names: Any, panel: str = OTHER_OPTIONS, choices: Sequence[str] = (), **form: Any) -> None:
        super().__init__(*names, **form)
        self.panel = panel
        self.choices = choices

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete the value."""
        from click.shell_completion import CompletionItem

        if self.choices:
            return [CompletionItem(name) for name in self.choices if name.startswith(incomplete)]
        return file_names(incomplete)


def file_names(incomplete: str) -> list[CompletionItem]:
    """Let the shell complete the name of a file."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


def show_all(context: click.Context, _: click.Parameter, value: bool) -> None:
    """Print the help with the commands or options that `--help` only names, and exit."""
    if value and not context.resilient_parsing:
        context.meta[_SHOWS_ALL] = True
        print(context.get_help())
        context.exit()


def help_all_option(*, hidden: bool = False) -> CommandOption:
    """Return the option of every command. The line of `--help` that names rarely needed options is its help."""
    return CommandOption(
        ["--help-all"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show_all,
        hidden=hidden,
        help="Show all commands and exit.",
    )


def write_names(formatter: click.HelpFormatter, names: Sequence[str], kind: str) -> None:
    """Write the names of the commands or options that this help does not describe, if there are any."""
    if names:
        text = f"{kind} that are rarely needed: {', '.join(names)}; --help-all describes them."
        formatter.write_paragraph()
        formatter.write("\n".join(wrap(text, formatter.width, break_on_hyphens=False)) + "\n")


class SectionedCommand(click.Command):
    """A command whose help lists options by their sections, and examples at the end as they are written."""

    def __init__(self, name: str, *, panel: str = "", **form: Any) -> None:
        super().__init__(name, **form)
        self.panel = panel

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx  # its help is what the error names
            raise

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Return the arguments under the names that their help has."""
        arguments = [param.make_metavar(ctx) for param in self.get_params(ctx) if isinstance(param, CommandArgument)]
        return [self.options_metavar or "", *arguments]

    def format_arguments(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write nothing: `format_options` lists the arguments, with texts in the same column."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write arguments, options without a panel, then panel by panel."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                panel = ARGUMENTS if isinstance(param, CommandArgument) else getattr(param, "panel", OTHER_OPTIONS)
                sections.setdefault(panel, []).append(record)
        rare = [] if ctx.meta.get(_SHOWS_ALL) else [name.split()[0] for name, _ in sections.pop(RARE_PANEL, ())]
        width = min(max((len(name) for rows in sections.values() for name, _ in rows), default=0), 30)
        for title in sorted(sections, key=_place):
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), text) for name, text in sections[title]])
        write_names(formatter, rare, "Options")

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples, one a line."""
        if self.epilog:
            with formatter.section("Examples"):
                for line in self.epilog.splitlines():
                    formatter.write(f"{'':>{formatter.current_indent}}{line}\n")


class SectionedGroup(click.Group):
    """A group of commands whose help lists them by their sections, and only names the `rare_commands`."""

    rare_commands: tuple[str, ...] = ()

    def __init__(self, name: str, *, panel: str = "", **form: Any) -> None:
        super().__init__(name, **form)
        self.panel = panel

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order in which the commands were added."""
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands section by section."""
        sections: dict[str, list[tuple[str, str]]] = {title: [] for title in SECTIONS}
        rare = () if ctx.meta.get(_SHOWS_ALL) else self.rare_commands
        width = max((len(name) for name in self.commands), default=0)
        for name, command in self.commands.items():
            if not command.hidden and name not in rare:
                title = getattr(command, "panel", "") or "Commands"
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
    from click.shell_completion import get_completion_class

    one_of("--completion", shell, SHELLS)
    kind = get_completion_class(shell)
    assert kind is not None
    completion = kind(build_command(), {}, PROGRAM, VARIABLE)
    return completion.source_template % completion.source_vars()


def asks_for_completions() -> bool:
    """Whether a shell's completion script runs this program."""
    return bool(os.environ.get(VARIABLE))


def complete(command: SectionedGroup) -> int:
    """Print the completions that a shell's completion script asks for; return the exit code."""
    from click.shell_completion import get_completion_class

    shell, _, action = os.environ[VARIABLE].partition("_")
    kind = get_completion_class(shell)
    if kind is None or action != "complete":
        return 1
    print(kind(command, {}, PROGRAM, VARIABLE).complete())
    return 0


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

They import nothing but click and the standard library until a command runs.
"""
_RARE_COMMANDS = {
    "merging": ("moe", "status"),
    "budgets": ("sweep", "search"),
    "snapshots": ("show", "lineage", "diff", "repair", "replay", "without"),
    "maintenance": ("catalog",),
}
"""The other commands of these modules: `--help` names them, `--help-all` describes them."""


def build_command(arguments: Sequence[str] = ()) -> SectionedGroup:
    """Build the command line: the commands of the module with that which `arguments` begin with, or all."""
    commands = {module: (*names, *_RARE_COMMANDS.get(module, ())) for module, names in _COMMANDS.items()}
    named = [module for module, names in commands.items() if arguments and arguments[0] in names]
    root = SectionedGroup(
        PROGRAM,
        callback=_root,
        params=[
            CommandOption(["--version"], is_flag=True, help="Print the version and exit."),
            CommandOption(
                ["--completion"],
                metavar="SHELL",
                choices=SHELLS,
                default=None,
                help="Print a script for bash, zsh or fish, and exit.",
            ),
            help_all_option(),
        ],
        help=(
            "Fold adapters, merge experts and compose training checkpoints of large models; outputs are complete or "
            "absent."
        ),
        context_settings=CONTEXT_SETTINGS,
        subcommand_metavar="COMMAND [ARGS]...",
        invoke_without_command=True,
    )
    for module in named or _COMMANDS:
        add_commands(root, module)
    root.rare_commands = tuple(name for names in _RARE_COMMANDS.values() for name in names)
    return root


@click.pass_context
def _root(context: click.Context, *, version: bool, completion: str | None) -> None:
    """Do what the options ask for that need no command."""
    if version:
        from mergepipe import __version__

        print(f"mergepipe {__version__}")
        context.exit()
    if completion is not None:
        print(completion_script(completion))
        context.exit()
    if context.invoked_subcommand is None:
        print(context.get_help())
        context.exit(2)
