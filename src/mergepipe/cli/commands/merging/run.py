"""`mergepipe run`: merge as a stored plan says, whole or a part of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from mergepipe.cli.guard import Session
from mergepipe.cli.options import (
    PARTS_PANEL,
    PLAN_ENDINGS,
    ClusterFlags,
    Force,
    NoCatalog,
    OutPath,
    PublishingFlags,
    ReportFlags,
    Resume,
    RunFlags,
    ShardSize,
    refuse_swapped,
)
from mergepipe.cli.outcomes import tell_if_published
from mergepipe.cli.printing import print_merge_report, print_report
from mergepipe.cli.progress import progress_shown
from mergepipe.cli.registration import add_command
from mergepipe.cli.sizes import optional_size
from mergepipe.errors import RecipeError
from mergepipe.options import DEFAULT_SHARD_BYTES
from mergepipe.storage.location import Location

PlanPath = Annotated[str, typer.Argument(metavar="PLAN", help="A plan that `mergepipe plan` stored.")]
Part = Annotated[
    str | None,
    typer.Option(
        "--part",
        metavar="I/N",
        help="Make part I of N only, on any machine that reaches the inputs and OUT. The last one finishes OUT.",
        rich_help_panel=PARTS_PANEL,
    ),
]
Finish = Annotated[
    bool,
    typer.Option(
        "--finish", help="Finish OUT from its parts; an error if one is missing.", rich_help_panel=PARTS_PANEL
    ),
]


EXAMPLES = ("mergepipe run plan.json merged/", "mergepipe run plan.json merged/ --part 2/7")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFlags:
    """Options that choose the part of the output that a worker makes."""

    part: Part = None
    finish: Finish = False


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(app, run, section="Merging", examples=EXAMPLES)


def run(
    context: typer.Context,
    plan: PlanPath,
    out: OutPath,
    *,
    parts: PartFlags,
    cluster: ClusterFlags,
    publishing: PublishingFlags,
    no_catalog: NoCatalog = False,
    resume: Resume = None,
    machine: RunFlags,
    force: Force = False,
    shard_size: ShardSize = None,
    printing: ReportFlags,
) -> None:
    """Merge as PLAN says into OUT.

    Refused if an input is not what it was when the plan was made. OUT appears when it is complete, or not at all.
    An interrupted run is resumed.
    """
    session: Session = context.obj
    refuse_swapped(plan, out, PLAN_ENDINGS)
    options = machine.options(catalog=not no_catalog)
    shard_bytes = optional_size(shard_size, "--shard-size")
    is_part = parts.part is not None or parts.finish
    if is_part and (cluster.executor is not None or cluster.address is not None):
        option = "--executor" if cluster.address is None else "--address"
        hint = "give one of the two: a cluster makes all parts"
        raise RecipeError.of("option.pair", option, "a part is made by this process", hint)
    from mergepipe import api

    with tell_if_published(Location.of(out)), progress_shown(session, silent=printing.silent) as on_progress:
        if not is_part:
            report = api.run(
                plan, out, force=force, shard_bytes=shard_bytes, resume=resume, executor=cluster.executor_name,
                address=cluster.address, paths=publishing.paths, base_model_ids=publishing.base_model_ids,
                options=options, on_progress=on_progress,
            )  # fmt: skip
            part_report = None
        else:
            from mergepipe.jobs.parts import parse_part

            part_report = api.run_part(
                plan, out, None if parts.part is None else parse_part(parts.part), finish=parts.finish, force=force,
                shard_bytes=shard_bytes or DEFAULT_SHARD_BYTES, resume=resume, paths=publishing.paths,
                base_model_ids=publishing.base_model_ids, options=options, on_progress=on_progress,
            )  # fmt: skip
    if part_report is None:
        print_merge_report(report, as_json=printing.as_json, quiet=printing.quiet)
        return
    from mergepipe.cli.render.parts import part_table

    print_report(part_report, part_table, as_json=printing.as_json, quiet=printing.quiet)
