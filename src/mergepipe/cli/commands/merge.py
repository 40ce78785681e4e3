"""`mergepipe merge`: merge as a recipe says, in full or under a budget, with progress, and report."""

from __future__ import annotations

from collections.abc import Mapping
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
    Lenient,
    Memory,
    MinDensity,
    NoCatalog,
    NoReuse,
    OnOmit,
    OutPath,
    PackAlong,
    Price,
    Quiet,
    RecipePath,
    Resume,
    Seed,
    Select,
    ShardSize,
    StorageSpeed,
    Strict,
    TargetError,
    Threads,
    adjust_min_density,
    plan_options,
)
from mergepipe.cli.running import optional_size, print_merge_report, progress_shown, truthful_about
from mergepipe.options import DEFAULT_SHARD_BYTES, MergeOptions

Budget = Annotated[
    str | None, typer.Option("--budget", metavar="BUDGET", help=BUDGET_HELP + "  [default: everything is read]")
]
Statistics = Annotated[
    bool | None,
    typer.Option(
        "--gather/--no-gather",
        help="Let a full merge gather what `analyze` would.  [default: with 4 compute threads or more]",
        show_default=False,
    ),
]
KeepAccumulators = Annotated[
    bool,
    typer.Option(
        "--keep-accumulators",
        help="Keep the sums of additive operators (4 bytes a parameter): experts added later are read alone.",
    ),
]
Overlay = Annotated[
    bool,
    typer.Option(
        "--overlay", help="Store only blocks that differ from the base; `materialise` makes the whole model from them."
    ),
]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command("merge")(merge)


def merge(
    context: typer.Context,
    recipe: RecipePath,
    out: OutPath,
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
    home: Home = None,
    no_catalog: NoCatalog = False,
    statistics: Statistics = None,
    allow_dropped: AllowDropped = None,
    strict: Strict = False,
    lenient: Lenient = False,
    resume: Resume = None,
    no_reuse: NoReuse = False,
    keep_accumulators: KeepAccumulators = False,
    overlay: Overlay = False,
    pack: PackAlong = None,
    threads: Threads = None,
    memory: Memory = None,
    seed: Seed = 0,
    force: Force = False,
    shard_size: ShardSize = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001 - for the help; the guard reads it, before there is a command
) -> None:
    """Merge the models of RECIPE into the directory OUT.

    OUT appears when it is complete, or not at all. An interrupted run is resumed.
    """
    session: Session = context.obj
    memory_bytes = optional_size(memory, "--memory")
    shard_bytes = optional_size(shard_size, "--shard-size")
    lowest_density = adjust_min_density(adjust_operator=adjust_operator, min_density=min_density)
    if budget is None and target_error is None:
        _refuse_without_budget(
            {
                "--select": select,
                "--on-omit": on_omit,
                "--adjust-operator": adjust_operator or None,
                "--block-elements": block_elements,
            }
        )
    options = MergeOptions(
        threads=threads,
        memory_bytes=memory_bytes,
        home=home,
        catalog=not no_catalog,
        plan=plan_options(
            select=select,
            on_omit=on_omit,
            adjust_min_density=lowest_density,
            block_elements=block_elements,
            price=price,
            storage_speed=storage_speed,
        ),
        shard_bytes=DEFAULT_SHARD_BYTES if shard_bytes is None else shard_bytes,
        statistics=statistics,
        resume=resume,
        reuse=not no_reuse,
        keep_accumulators=keep_accumulators,
        overlay=overlay,
        pack=pack,
        allow_dropped=tuple(allow_dropped or ()),
        strict=strict,
        lenient=lenient,
    )
    from mergepipe import api

    with truthful_about(Path(out)), progress_shown(session, silent=quiet or as_json) as on_progress:
        report = api.merge(
            recipe,
            out,
            budget=budget,
            target_error=target_error,
            force=force,
            seed=seed,
            options=options,
            on_progress=on_progress,
        )
    print_merge_report(report, as_json=as_json, quiet=quiet)


def _refuse_without_budget(given: Mapping[str, object]) -> None:
    """Refuse options that only a budget gives a meaning, rather than ignore them."""
    without_meaning = [option for option, value in given.items() if value is not None]
    if without_meaning:
        from mergepipe.errors import RecipeError

        raise RecipeError.of("option.pair", without_meaning[0], "it has no meaning by itself", "add --budget")
