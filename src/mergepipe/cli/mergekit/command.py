"""`mergepipe-yaml CONFIG OUT`: merge as mergekit-yaml is called; every flag does what it says, or says what holds."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from mergepipe.cli.guard import Session
from mergepipe.cli.options import RECIPE_ENDINGS, Debug, Force, Lenient, Strict, refuse_swapped
from mergepipe.cli.outcomes import tell_if_published
from mergepipe.cli.printing import print_merge_report, print_warnings
from mergepipe.cli.progress import progress_shown
from mergepipe.cli.registration import WIDEST_HELP, SectionedCommand, with_option_groups
from mergepipe.cli.sizes import parse_size
from mergepipe.core.escaping import printable
from mergepipe.errors import Problem, UnsupportedError
from mergepipe.options import MergeOptions
from mergepipe.storage.location import Location

if TYPE_CHECKING:
    from typer.core import TyperCommand

PROGRAM = "mergepipe-yaml"
DONE, ALWAYS, NOTICED, REFUSED = (
    "What these say is done",
    "Always so here",
    "Taken, with a notice of what holds here",
    "Refused if they are set",
)
_done, _always, _noticed, _refused = (
    partial(typer.Option, rich_help_panel=panel) for panel in (DONE, ALWAYS, NOTICED, REFUSED)
)
_COUNT_UNITS = {"k": 10**3, "m": 10**6, "b": 10**9}

Config = Annotated[str, typer.Argument(metavar="CONFIG", help="The recipe, a YAML file.")]
Out = Annotated[str, typer.Argument(metavar="OUT", help="The directory to create.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class HonouredFlags:
    """Flags that do what they say."""

    random_seed: Annotated[
        int | None,
        _done("--random-seed", metavar="N", help="Seed of the random operators.  [default: 0]"),
    ] = None
    out_shard_size: Annotated[
        str,
        _done("--out-shard-size", metavar="SIZE", help="Largest output file: 5B, 5GB."),
    ] = "5B"
    num_threads: Annotated[
        int | None,
        typer.Option(
            "--num-threads",
            "-j",
            metavar="N",
            help="Compute threads.  [default: one per processor]",
            rich_help_panel=DONE,
        ),
    ] = None
    verbose: Annotated[
        int,
        _done("-v", count=True, help="Print the report of the merge as well.", show_default=False),
    ] = 0
    quiet: Annotated[bool, _done("--quiet/--no-quiet", help="No progress, no notices: errors and warnings.")] = False
    write_model_card: Annotated[bool, _done("--write-model-card/--no-write-model-card", help="Write README.md.")] = True
    copy_tokenizer: Annotated[
        bool,
        typer.Option(
            "--copy-tokenizer/--no-copy-tokenizer",
            help="Copy the tokenizer; one that the recipe asks for is written in any case.",
            rich_help_panel=DONE,
        ),
    ] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class StandingFlags:
    """Flags that ask for what is always so; their opposites, too, change nothing of the result."""

    lazy_unpickle: Annotated[
        bool,
        typer.Option(
            "--lazy-unpickle/--no-lazy-unpickle",
            help="Nothing is unpickled; tensors are streamed.",
            rich_help_panel=ALWAYS,
        ),
    ] = True
    clone_tensors: Annotated[
        bool,
        typer.Option(
            "--clone-tensors/--no-clone-tensors",
            help="Every output tensor is written by itself.",
            rich_help_panel=ALWAYS,
        ),
    ] = True
    async_write: Annotated[
        bool,
        _always("--async-write/--no-async-write", help="Reading, merging and writing overlap."),
    ] = True
    write_threads: Annotated[
        int | None,
        _always("--write-threads", metavar="N", help="One thread writes, at the disk's speed."),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticedFlags:
    """Flags that are taken, with a notice of what holds here."""

    cuda: Annotated[
        bool,
        _noticed("--cuda/--no-cuda", help="The processor merges, as fast as disks read."),
    ] = False
    device: Annotated[str | None, _noticed("--device", metavar="NAME", help="As --cuda.")] = None
    low_cpu_memory: Annotated[
        bool,
        _noticed("--low-cpu-memory/--no-low-cpu-memory", help="Memory is bounded anyway."),
    ] = False
    read_to_gpu: Annotated[bool, _noticed("--read-to-gpu/--no-read-to-gpu", help="As --cuda.")] = False
    multi_gpu: Annotated[bool, _noticed("--multi-gpu/--no-multi-gpu", help="As --cuda.")] = False
    gpu_rich: Annotated[bool, _noticed("--gpu-rich", help="As --cuda.")] = False
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code/--no-trust-remote-code",
            help="No code of a model is ever run.",
            rich_help_panel=NOTICED,
        ),
    ] = False
    allow_crimes: Annotated[
        bool,
        typer.Option(
            "--allow-crimes/--no-allow-crimes",
            help="Names and shapes of tensors decide what can be merged.",
            rich_help_panel=NOTICED,
        ),
    ] = False
    transformers_cache: Annotated[
        str | None,
        typer.Option(
            "--transformers-cache",
            metavar="DIR",
            help="The Hub's own cache is used: $HF_HUB_CACHE.",
            rich_help_panel=NOTICED,
        ),
    ] = None
    lora_merge_cache: Annotated[
        str | None,
        typer.Option(
            "--lora-merge-cache",
            metavar="DIR",
            help="LoRAs are applied while they are read.",
            rich_help_panel=NOTICED,
        ),
    ] = None

    unsafe_truncate_embeddings: Annotated[
        bool,
        typer.Option(
            "--unsafe-truncate-embeddings/--no-unsafe-truncate-embeddings",
            help="The base's rows are kept, all of them.",
            rich_help_panel=NOTICED,
        ),
    ] = False

    def notices(self) -> tuple[str, ...]:
        """Return a line for each thing that was asked for and that holds otherwise here."""
        gpu = {
            "--cuda": self.cuda,
            "--device": self.device not in (None, "cpu", "auto"),
            "--low-cpu-memory": self.low_cpu_memory,
            "--read-to-gpu": self.read_to_gpu,
            "--multi-gpu": self.multi_gpu,
            "--gpu-rich": self.gpu_rich,
        }
        explained_flags = {
            "--trust-remote-code": (self.trust_remote_code, "no code of a model is ever run, and none is needed"),
            "--allow-crimes": (
                self.allow_crimes,
                "names and shapes of tensors decide what can be merged, with it or not",
            ),
            "--transformers-cache": (
                self.transformers_cache is not None,
                "models are found in the Hub's own cache; set HF_HUB_CACHE to choose it",
            ),
            "--lora-merge-cache": (
                self.lora_merge_cache is not None,
                "LoRAs are applied while they are read; nothing is kept of them",
            ),
            "--unsafe-truncate-embeddings": (
                self.unsafe_truncate_embeddings,
                "embeddings keep the base's rows, which stand in where a model has fewer; `tokenizer_source` in the "
                "recipe matches rows by token",
            ),
        }
        named = ", ".join(flag for flag, is_set in gpu.items() if is_set)
        on_gpu = (f"{named}: the processor merges, in bounded memory; no GPU is used",) if named else ()
        return (*on_gpu, *(f"{flag}: {text}" for flag, (is_set, text) in explained_flags.items() if is_set))


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedFlags:
    """Flags that would need what this program does not do."""

    safe_serialization: Annotated[
        bool,
        typer.Option(
            "--safe-serialization/--no-safe-serialization",
            help="Safetensors are written; pickles are refused.",
            rich_help_panel=REFUSED,
        ),
    ] = True
    lora_merge_dtype: Annotated[
        str | None,
        _refused("--lora-merge-dtype", metavar="DTYPE", help="LoRAs are applied in float32."),
    ] = None

    def check(self) -> None:
        """Refuse what was asked for and cannot be done, all at once.

        Raises:
            UnsupportedError: `mergekit.flag`.
        """
        refusals = {
            "--no-safe-serialization": (
                not self.safe_serialization,
                "pickled weights are not written",
                "leave it out: the output is safetensors",
            ),
            "--lora-merge-dtype": (
                self.lora_merge_dtype is not None,
                "LoRAs are applied in float32 and rounded once",
                "leave it out",
            ),
        }
        problems = [
            Problem("mergekit.flag", flag, message, hint)
            for flag, (is_set, message, hint) in refusals.items()
            if is_set
        ]
        if problems:
            raise UnsupportedError(*problems)


def build_command() -> TyperCommand:
    """Build the command line of the program."""
    app = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": WIDEST_HELP},
    )
    app.command(PROGRAM, cls=SectionedCommand, epilog=f"{PROGRAM} config.yml merged/ --random-seed 7")(
        with_option_groups(merge_as_mergekit)
    )
    command: TyperCommand = typer.main.get_command(app)  # type: ignore[assignment]
    return command


def merge_as_mergekit(
    context: typer.Context,
    config: Config,
    out: Out,
    *,
    honoured: HonouredFlags,
    standing: StandingFlags,  # noqa: ARG001 - always so
    noticed: NoticedFlags,
    refused: RefusedFlags,
    force: Force = False,
    strict: Strict = False,
    lenient: Lenient = False,
    debug: Debug = False,  # noqa: ARG001 - for the help; the guard reads it, before there is a command
) -> None:
    """Merge as mergekit-yaml is called: the models of CONFIG into the directory OUT.

    `mergekit_config.yml` is written beside the model. `mergepipe merge` has what mergekit has not: budgets, reuse.
    """
    session: Session = context.obj
    refused.check()
    refuse_swapped(config, out, RECIPE_ENDINGS)
    shard_bytes = shard_bytes_of(honoured.out_shard_size)
    options = MergeOptions(
        threads=honoured.num_threads,
        shard_bytes=shard_bytes,
        card=honoured.write_model_card,
        tokenizer=honoured.copy_tokenizer,
        mergekit_config=True,
        strict=strict,
        lenient=lenient,
    )
    if not honoured.quiet:
        _print_notices(noticed.notices())
    from mergepipe import api

    with tell_if_published(Location.of(out)), progress_shown(session, silent=honoured.quiet) as on_progress:
        report = api.merge(
            config, out, force=force, seed=honoured.random_seed or 0, options=options, on_progress=on_progress
        )
    if honoured.verbose or honoured.quiet:
        print_merge_report(report, as_json=False, quiet=honoured.quiet)
    else:
        _print_notices((*(notice for notice in report.recipe_notices if not notice.changes_result), *report.notices))
        print_warnings(report.recipe_notices)


def _print_notices(notices: Iterable[object]) -> None:
    """Tell on standard error what holds otherwise than it may seem."""
    if sys.stderr is not None:
        for notice in notices:
            print(f"notice: {printable(str(notice))}", file=sys.stderr)


def shard_bytes_of(text: str) -> int:
    """Return the bytes of mergekit's shard sizes: `5B` are 5 * 10**9, as it counts; other sizes as everywhere here.

    Raises:
        RecipeError: `option.size`.
    """
    number, unit = text[:-1], text[-1:].lower()
    if unit in _COUNT_UNITS and number.isdecimal():
        return int(number) * _COUNT_UNITS[unit]
    return parse_size(text, "--out-shard-size")
