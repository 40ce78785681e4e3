"""`mergepipe pack`: keep experts as what they change of their base."""

from __future__ import annotations

from typing import Annotated

import typer

from mergepipe.cli.guard import Session
from mergepipe.cli.options import ExpertPart, Home, ReportFlags, Threads
from mergepipe.cli.outcomes import tell_what_is_published
from mergepipe.cli.printing import print_report
from mergepipe.cli.progress import progress_shown
from mergepipe.cli.registration import add_command
from mergepipe.errors import RecipeError

Models = Annotated[
    list[str],
    typer.Argument(
        metavar="[BASE] EXPERT...",
        help="The base and models fine-tuned from it; with --base only those; or one model alone.",
    ),
]
Bases = Annotated[
    list[str] | None,
    typer.Option(
        "--base", metavar="BASE", help="A base that EXPERTs may have: each takes the nearest. May be given again."
    ),
]
Chain = Annotated[
    int | None,
    typer.Option(
        "--chain",
        metavar="N",
        help="EXPERTs are checkpoints of one run in order: pack each on the one before, every N-th on BASE.",
    ),
]
Strict = Annotated[bool, typer.Option("--strict", help="Refuse a base that is hardly an expert's, or one of several.")]
PackOut = Annotated[
    str,
    typer.Option(
        "--out",
        "-o",
        metavar="DIR",
        help="Where the stores go: DIR/NAME for an expert named NAME. A folder, or a prefix of a bucket.",
    ),
]
Replace = Annotated[
    bool, typer.Option("--replace", help="Remove each expert's files once its store was read back and compared.")
]


EXAMPLES = (
    "mergepipe pack base/ expert-1/ expert-2/ --out packed/",
    "mergepipe pack expert-1/ expert-2/ --base base/ --base other/ --out packed/",
    "mergepipe pack base/ step-100/ step-200/ step-300/ --chain 8 --out packed/",
    "mergepipe pack base/ expert-1/ --out s3://bucket/packed",
    "mergepipe pack base/ expert-*/ --out packed/ --part 2/4",
    "mergepipe pack model/ --out packed/",
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(app, pack, section="Experts", examples=EXAMPLES)


def pack(
    context: typer.Context,
    models: Models,
    *,
    out: PackOut,
    base: Bases = None,
    chain: Chain = None,
    strict: Strict = False,
    replace: Replace = False,
    part: ExpertPart = None,
    threads: Threads = None,
    home: Home = None,
    printing: ReportFlags,
) -> None:
    """Keep each EXPERT as what it changes of BASE, bit for bit.

    Of several bases each EXPERT takes the nearest one, told from samples. One model alone is
    packed on its own, to about two thirds. Every element is checked while it is packed. All
    experts are read in one pass with BASE. An interrupted pack is resumed.
    """
    session: Session = context.obj
    from mergepipe import api
    from mergepipe.jobs.parts import experts_of_part

    if chain is not None and part is not None:
        raise RecipeError.of("option.pair", "--part", "a chain is packed by one machine", "leave it out")
    has_bases = base or len(models) == 1  # one model alone is packed on its own
    bases, experts = (base, models) if has_bases else (models[:1], models[1:])
    part_experts = experts_of_part(experts, part)
    with tell_what_is_published(), progress_shown(session, silent=printing.silent) as on_progress:
        report = api.pack(
            bases, part_experts, out, replace=replace, chain=chain, strict=strict, threads=threads, home=home,
            on_progress=on_progress,
        )  # fmt: skip
    from mergepipe.cli.render.packing import pack_table

    print_report(report, pack_table, as_json=printing.as_json, quiet=printing.quiet)
