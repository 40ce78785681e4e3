"""`mergepipe plan` and `mergepipe run`: decide what a merge reads under a budget, and merge as decided."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mergepipe.cli.guard import Session
from mergepipe.cli.options import (
    BUDGET_HELP,
    AdjustOperator,
    AllowDropped,
    AsJson,
    BlockElements,
    Debug,
    Force,
    Home,
    Memory,
    MinDensity,
    NoCatalog,
    NoReuse,
    OnOmit,
    OutPath,
    Price,
    Quiet,
    RecipePath,
    Resume,
    Seed,
    Select,
    ShardSize,
    StorageSpeed,
    TargetError,
    Threads,
    adjust_min_density,
)
from mergepipe.cli.running import optional_size, print_merge_report, progress_shown, truthful_about
from mergepipe.core.escaping import json_line, printable_lines
from mergepipe.core.outcome import note_committed

Budget = Annotated[
    str | None,
    typer.Option("--budget", metavar="BUDGET", help=BUDGET_HELP + "  [needed, but with --target-error]"),
]
PlanOut = Annotated[
    str | None, typer.Option("--out", "-o", metavar="FILE", help="Store the plan there, for `mergepipe run`.")
]
PlanPath = Annotated[str, typer.Argument(metavar="PLAN", help="A plan that `mergepipe plan` stored.")]
PlanAsJson = Annotated[bool, typer.Option("--json", help="Print the plan itself, as it would be stored.")]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("plan")(plan)
    app.command("run")(run)


def plan(
    recipe: RecipePath,
    *,
    budget: Budget = None,
    target_error: TargetError = None,
    select: Select = None,
    on_omit: OnOmit = None,
    adjust_operator: AdjustOperator = False,
    min_density: MinDensity = None,
    block_elements: BlockElements = None,
    price: Price = None,
    storage_speed: StorageSpeed = None,
    seed: Seed = 0,
    home: Home = None,
    allow_dropped: AllowDropped = None,
    no_reuse: NoReuse = False,
    plan_out: PlanOut = None,
    as_json: PlanAsJson = False,
    debug: Debug = False,  # noqa: ARG001 - for the help; the guard reads it, before there is a command
) -> None:
    """Decide what a merge of RECIPE reads under a budget.

    Says what of each expert is read, and what the omission costs at most. Reads no tensor data:
    what is known of the experts comes from the catalog, and from the indices of packed ones.
    """
    lowest_density = adjust_min_density(adjust_operator=adjust_operator, min_density=min_density)
    from mergepipe import api

    decided = api.plan(
        recipe,
        budget,
        target_error=target_error,
        select=select or api.DEFAULT_POLICY,
        on_omit=on_omit or api.DEFAULT_ON_OMIT,
        adjust_min_density=lowest_density,
        block_elements=block_elements,
        price=price or api.DEFAULT_PRICE,
        storage_speed=storage_speed,
        seed=seed,
        home=home,
        reuse=not no_reuse,
        allow_dropped=allow_dropped or (),
    )
    if plan_out is not None:
        api.store_plan(decided, plan_out)
        note_committed(Path(plan_out))
    if as_json:
        print(json_line(decided.content(), indent=1))
    else:
        from mergepipe.cli.render.plans import plan_table

        print(printable_lines(plan_table(decided, None if plan_out is None else Path(plan_out))))


def run(
    context: typer.Context,
    plan: PlanPath,
    out: OutPath,
    *,
    home: Home = None,
    no_catalog: NoCatalog = False,
    resume: Resume = None,
    threads: Threads = None,
    memory: Memory = None,
    force: Force = False,
    shard_size: ShardSize = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001 - for the help; the guard reads it, before there is a command
) -> None:
    """Merge as PLAN says into the directory OUT.

    Refused if an input is not what it was when the plan was made. OUT appears when it is complete, or not at all.
    An interrupted run is gone on with where it was.
    """
    session: Session = context.obj
    memory_bytes = optional_size(memory, "--memory")
    shard_bytes = optional_size(shard_size, "--shard-size")
    from mergepipe import api

    with truthful_about(Path(out)), progress_shown(session, silent=quiet or as_json) as on_progress:
        report = api.run(
            plan,
            out,
            threads=threads,
            memory_bytes=memory_bytes,
            force=force,
            shard_bytes=api.DEFAULT_SHARD_BYTES if shard_bytes is None else shard_bytes,
            home=home,
            catalog=not no_catalog,
            resume=resume,
            on_progress=on_progress,
        )
    print_merge_report(report, as_json=as_json, quiet=quiet)
