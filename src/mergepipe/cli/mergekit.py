"""`mergepipe-yaml CONFIG OUT`: accepts the command lines of mergekit-yaml; no flag is ignored without a notice."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import click

from mergepipe.cli.app import CONTEXT_SETTINGS, SectionedCommand, Without, make_command
from mergepipe.cli.commands.merging import RECIPE_ENDINGS, refuse_swapped
from mergepipe.cli.printing import DEBUG, ReportOptions, print_report, print_warnings, tell
from mergepipe.cli.progress import progress_shown
from mergepipe.core.flags import Argument, Flag, declared_options, option
from mergepipe.core.units import parse_size
from mergepipe.errors import Problem, UnsupportedError
from mergepipe.options import DEFAULT_SHARD_BYTES, FORCE, MergeOptions, RecipeOptions
from mergepipe.storage.location import Location
from mergepipe.storage.stores import Stores

PROGRAM = "mergepipe-yaml"
DONE, ALWAYS, NOTICED, REFUSED = (
    "Supported",
    "Always on",
    "Accepted without effect, with a notice",
    "Refused if set",
)
_done, _always, _noticed, _refused = (partial(Flag, panel=panel) for panel in (DONE, ALWAYS, NOTICED, REFUSED))
_NO_GPU = "The processor merges, in bounded memory; no GPU is used."
_PROCESSORS = ("cpu", "auto")  # as devices
_COUNT_UNITS = {"k": 10**3, "m": 10**6, "b": 10**9}


@dataclass(frozen=True, slots=True, kw_only=True)
class MergekitFlags:
    """The flags of mergekit-yaml, grouped by how they are handled: the sections of the help."""

    random_seed: int = option(0, _done("Seed of the random operators.", metavar="N"))
    out_shard_size: int | None = option(
        None,
        _done("Largest output file: 5B, 5GB.", metavar="SIZE", default="5B", read=lambda text, _: shard_bytes_of(text)),
    )
    num_threads: int | None = option(
        None, _done("Compute threads.", short="-j", metavar="N", default="one per processor")
    )
    quiet: bool | None = option(None, _done("Print only errors and warnings.", default="off"))
    write_model_card: bool | None = option(None, _done("Write README.md.", default="on"))
    copy_tokenizer: bool | None = option(
        None, _done("Copy the tokenizer; a tokenizer that the recipe sets is always written.", default="on")
    )
    lazy_unpickle: bool | None = option(None, _always("Nothing is unpickled; tensors are streamed."))
    clone_tensors: bool | None = option(None, _always("Output tensors never share memory."))
    async_write: bool | None = option(None, _always("Reading, merging and writing overlap."))
    write_threads: int | None = option(None, _always("One thread writes, at the disk's speed.", metavar="N"))
    cuda: bool | None = option(None, _noticed(_NO_GPU))
    device: str | None = option(None, _noticed(_NO_GPU, metavar="NAME"))
    low_cpu_memory: bool | None = option(None, _noticed(_NO_GPU))
    read_to_gpu: bool | None = option(None, _noticed(_NO_GPU))
    multi_gpu: bool | None = option(None, _noticed(_NO_GPU))
    gpu_rich: bool = option(False, _noticed(_NO_GPU))
    trust_remote_code: bool | None = option(None, _noticed("No code of a model is ever run, and none is needed."))
    allow_crimes: bool | None = option(
        None, _noticed("Names and shapes of tensors decide what can be merged, with or without it.")
    )
    transformers_cache: str | None = option(
        None, _noticed("Models are found in the Hub's own cache; set HF_HUB_CACHE to choose it.", metavar="DIR")
    )
    lora_merge_cache: str | None = option(
        None, _noticed("No merged LoRAs are stored: they are applied while they are read.", metavar="DIR")
    )
    unsafe_truncate_embeddings: bool | None = option(
        None, _noticed("All rows of the base are kept; `tokenizer_source` in the recipe matches rows by token.")
    )
    safe_serialization: bool | None = option(None, _refused("Safetensors are written; pickles are refused."))
    lora_merge_dtype: str | None = option(None, _refused("LoRAs are applied in float32.", metavar="DTYPE"))

    def check(self) -> None:
        """Refuse flags that were set and cannot be honoured, all at once."""
        refused = {}
        if self.safe_serialization is False:
            refused["--no-safe-serialization"] = "safetensors are written, no pickles"
        if self.lora_merge_dtype is not None:
            refused["--lora-merge-dtype"] = "LoRAs are applied in float32 and rounded once"
        if refused:
            raise UnsupportedError(*(Problem("option.unsupported", *told, "leave it out") for told in refused.items()))

    def notices(self) -> tuple[str, ...]:
        """Return a line for each flag that was set and has no effect here."""
        flags: dict[str, list[str]] = {}
        for declared in declared_options(type(self)):
            value, text = getattr(self, declared.field), declared.flag.help
            is_held = declared.field == "device" and value in _PROCESSORS
            if declared.flag.panel == NOTICED and value not in (None, False) and not is_held:
                flags.setdefault(f"{text[0].lower()}{text[1:-1]}", []).append(declared.name)
        return tuple(f"{', '.join(named)}: {text}" for text, named in flags.items())


@dataclass(frozen=True, kw_only=True)
class OwnOptions(RecipeOptions):
    """Options of `mergepipe merge` that mergekit lacks. The guard reads `--debug` before there is a command."""

    force: bool = option(False, FORCE)
    debug: bool = option(False, DEBUG)


def build_command() -> SectionedCommand:
    """Build the command line of the program."""
    command = make_command(PROGRAM, merge_as_mergekit, f"{PROGRAM} config.yml merged/ --random-seed 7")
    command.context_settings = CONTEXT_SETTINGS
    return command


def merge_as_mergekit(
    context: click.Context,
    config: Annotated[str, Argument("CONFIG", "The recipe, a YAML file.")],
    out: Annotated[str, Argument("OUT", "The directory to create.")],
    *,
    verbose: Annotated[bool, Flag("Also print the report of the merge.", name="-v", panel=DONE)] = False,
    flags: MergekitFlags,
    own: Annotated[OwnOptions, Without("allow_dropped")],
) -> None:
    """Merge the models of CONFIG into the directory OUT, with the command line of mergekit-yaml.

    Relative paths of models in CONFIG start at the working folder. Also writes `mergekit_config.yml` into OUT.
    For budgets, which mergekit does not have, use `mergepipe merge`.
    """
    flags.check()
    refuse_swapped(config, out, RECIPE_ENDINGS)
    from mergepipe.snapshots.manifest import FILE_SUFFIXES

    shard_bytes = flags.out_shard_size
    if shard_bytes is None and not out.endswith(FILE_SUFFIXES):
        shard_bytes = DEFAULT_SHARD_BYTES
    options = MergeOptions(
        threads=flags.num_threads,
        shard_bytes=shard_bytes,
        card=flags.write_model_card is not False,
        tokenizer=flags.copy_tokenizer is not False,
        seed=flags.random_seed,
        force=own.force,
        strict=own.strict,
        lenient=own.lenient,
    )
    printing = ReportOptions(quiet=bool(flags.quiet))
    if not printing.quiet:
        tell(f"notice: {notice}" for notice in flags.notices())
    from mergepipe.jobs.merge_run import run_merge
    from mergepipe.recipes.yaml_source import read_recipe
    from mergepipe.runs.merge_settings import merge_settings

    working_folder = Location.local(Path.cwd())  # which paths are relative to, as in mergekit
    with progress_shown(context.obj, silent=printing.quiet) as on_progress:
        settings = merge_settings(options, out, on_progress)
        recipe = read_recipe(Location.of(config), Stores(), working_folder)
        report = run_merge(recipe, settings)
    if verbose or printing.quiet:
        print_report(report, printing)
    else:
        harmless = (notice for notice in report.recipe_notices if not notice.changes_result)
        tell(f"notice: {notice}" for notice in (*harmless, *report.notices))
        print_warnings(report.recipe_notices)


def shard_bytes_of(text: str) -> int:
    """Return the bytes of mergekit's shard sizes: `5B` are 5 * 10**9, as it counts; other sizes as everywhere here."""
    number, unit = text[:-1], text[-1:].lower()
    if unit in _COUNT_UNITS and number.isdecimal():
        return int(number) * _COUNT_UNITS[unit]
    return parse_size(text, "--out-shard-size")
