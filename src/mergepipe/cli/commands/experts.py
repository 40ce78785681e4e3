"""Commands on experts: `pack`, `unpack`, and `lora apply`, `merge` and `extract`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mergepipe.cli.printing import ReportOptions, print_report
from mergepipe.cli.progress import progress_shown
from mergepipe.cli.registration import EXPERT_PART, OUT_HELP, SectionedGroup, Without, add_command
from mergepipe.core.flags import Flag
from mergepipe.core.outcome import tell_if_published, tell_what_is_published
from mergepipe.errors import RecipeError
from mergepipe.options import ApplyLoraOptions, ExtractLoraOptions, MergeLoraOptions, PackOptions, UnpackOptions
from mergepipe.storage.location import Location

SECTION = "Experts"


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    add_command(
        app,
        pack,
        "mergepipe pack base/ expert-1/ expert-2/ --out packed/",
        "mergepipe pack expert-1/ expert-2/ --base base/ --base other/ --out packed/",
        "mergepipe pack base/ step-100/ step-200/ step-300/ --chain 8 --out packed/",
        "mergepipe pack base/ expert-1/ --out s3://bucket/packed",
        "mergepipe pack base/ expert-*/ --out packed/ --part 2/4",
        "mergepipe pack model/ --out packed/",
        section=SECTION,
    )
    add_command(app, unpack, "mergepipe unpack packed/expert-1 --out expert-1/", section=SECTION)
    group = typer.Typer(cls=SectionedGroup, rich_markup_mode=None, no_args_is_help=True)
    add_command(
        group,
        apply_lora,
        "mergepipe lora apply base/ adapter/ -o merged/",
        "mergepipe lora apply org/base org/adapter -o s3://bucket/merged",
        "mergepipe lora apply base/ first/ second/ --weight 0.7 --weight 0.3 -o merged/",
        name="apply",
    )
    add_command(
        group,
        merge_lora,
        "mergepipe lora merge first/ second/ -o both/",
        "mergepipe lora merge first/ second/ --weight 0.7 --weight 0.3 --method svd --rank 16 -o both/",
        "mergepipe lora merge first/ second/ third/ --method ties --density 0.3 -o all/",
        name="merge",
    )
    add_command(
        group,
        extract_lora,
        "mergepipe lora extract base/ fine-tuned/ --out adapter/ --rank 32",
        "mergepipe lora extract base/ fine-tuned/ --out adapter/ --energy 0.9",
        name="extract",
    )
    app.add_typer(
        group, name="lora", help="Apply LoRA adapters to a base, merge them, extract them.", rich_help_panel=SECTION
    )


def pack(
    context: typer.Context,
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="[BASE] EXPERT...",
            help="The base and models fine-tuned from it; with --base only those; or one model alone.",
        ),
    ],
    *,
    out: Annotated[
        str,
        Flag(
            "Where the stores go: DIR/NAME for an expert named NAME. A folder, or a prefix of a bucket.",
            short="-o",
            metavar="DIR",
        ),
    ],
    base: Annotated[
        list[str] | None,
        Flag("A base that EXPERTs may have: each takes the nearest. May be given again.", metavar="BASE"),
    ] = None,
    part: Annotated[str | None, EXPERT_PART] = None,
    options: PackOptions,
    printing: ReportOptions,
) -> None:
    """Keep each EXPERT as what it changes of BASE, bit for bit.

    Of several bases each EXPERT takes the nearest one, told from samples. One model alone is
    packed on its own, to about two thirds. Every element is checked while it is packed. All
    experts are read in one pass with BASE. An interrupted pack is resumed.
    """
    from mergepipe import api
    from mergepipe.jobs.parts import experts_of_part

    if options.chain is not None and part is not None:
        raise RecipeError.of("option.conflict", "--part", "a chain is packed by one machine", "leave it out")
    has_bases = base or len(models) == 1  # one model alone is packed on its own
    bases, experts = (base, models) if has_bases else (models[:1], models[1:])
    part_experts = experts_of_part(experts, part)
    with tell_what_is_published(), progress_shown(context.obj, silent=printing.silent) as on_progress:
        report = api.pack(bases, part_experts, out, options=options, on_progress=on_progress)
    print_report(report, printing)


def unpack(
    context: typer.Context,
    store: Annotated[str, typer.Argument(metavar="STORE", help="A store that pack made.")],
    *,
    out: Annotated[str, Flag("The directory to create.", short="-o", metavar="DIR")],
    options: UnpackOptions,
    printing: ReportOptions,
) -> None:
    """Restore the files that STORE was made from, byte for byte."""
    from mergepipe import api

    with tell_if_published(Path(out)), progress_shown(context.obj, silent=printing.silent) as on_progress:
        report = api.unpack(store, out, options=options, on_progress=on_progress)
    print_report(report, printing)


def apply_lora(
    context: typer.Context,
    base: Annotated[str, typer.Argument(metavar="BASE", help="The base: a directory, in a bucket, or on the Hub.")],
    adapters: Annotated[list[str], typer.Argument(metavar="ADAPTER...", help="LoRA adapters of BASE, as PEFT saves.")],
    *,
    out: Annotated[str, Flag(OUT_HELP, short="-o", metavar="OUT")],
    options: Annotated[ApplyLoraOptions, Without("executor"), Without("address")],
    printing: ReportOptions,
) -> None:
    """Add the deltas of each ADAPTER to BASE.

    OUT appears when it is complete, or not at all. An interrupted run is resumed. A module of an ADAPTER that BASE
    lacks is an error.
    """
    from mergepipe import api

    with tell_if_published(Location.of(out)), progress_shown(context.obj, silent=printing.silent) as on_progress:
        report = api.apply_lora(base, adapters, out, options=options, on_progress=on_progress)
    print_report(report, printing)


def merge_lora(
    adapters: Annotated[
        list[str],
        typer.Argument(metavar="ADAPTER...", help="LoRA adapters of one base, or a recipe with `output: adapter`."),
    ],
    *,
    out: Annotated[str, Flag("The directory to create.", short="-o", metavar="DIR")],
    options: MergeLoraOptions,
    printing: ReportOptions,
) -> None:
    """Merge each ADAPTER into one adapter.

    Reads no base. Prints the share of the merged deltas that the adapter keeps.
    """
    from mergepipe import api

    with tell_if_published(Path(out)):
        report = api.merge_lora(adapters, out, options=options)
    print_report(report, printing)


def extract_lora(
    context: typer.Context,
    base: Annotated[str, typer.Argument(metavar="BASE", help="The base: a directory, or a model of the Hub.")],
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The model that was fine-tuned from it.")],
    *,
    out: Annotated[str, Flag("The directory to create.", short="-o", metavar="DIR")],
    options: ExtractLoraOptions,
    printing: ReportOptions,
) -> None:
    """Write the difference of MODEL from BASE as a LoRA adapter.

    Prints the share of the difference that the adapter lacks, and the tensors that no LoRA can hold.
    """
    from mergepipe import api

    with tell_if_published(Path(out)), progress_shown(context.obj, silent=printing.silent) as on_progress:
        report = api.extract_lora(base, model, out, options=options, on_progress=on_progress)
    print_report(report, printing)
