"""`mergepipe merge`: merge as a recipe or a stored plan says, in full or under a budget, with progress, and report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated

import typer

from mergepipe.cli.guard import Session
from mergepipe.cli.options import (
    BUDGET_HELP,
    BUDGET_PANEL,
    EVALUATE_HELP,
    OUT_HELP,
    RECIPE_ENDINGS,
    AllowDropped,
    ClusterFlags,
    Force,
    Lenient,
    NoCatalog,
    PlanFlags,
    PublishingFlags,
    ReportFlags,
    Resume,
    RunFlags,
    Seed,
    ShardSize,
    Strict,
    refuse_swapped,
)
from mergepipe.cli.outcomes import tell_if_published
from mergepipe.cli.printing import print_merge_report
from mergepipe.cli.progress import progress_shown
from mergepipe.cli.registration import add_command
from mergepipe.cli.sizes import optional_size
from mergepipe.options import MergeOptions
from mergepipe.storage.location import Location

if TYPE_CHECKING:
    from mergepipe.reports import MergeReport, ProgressCallback

RecipeOrOut = Annotated[
    str,
    typer.Argument(metavar="RECIPE", help="The recipe, a YAML file. Paths in it are relative to it. Not with --plan."),
]
MergeOut = Annotated[str | None, typer.Argument(metavar="OUT", help=OUT_HELP, show_default=False)]
StoredPlan = Annotated[
    str | None,
    typer.Option("--plan", metavar="PLAN", help="Merge as this stored plan says, instead of a recipe: see `plan`."),
]
Budget = Annotated[
    str | None,
    typer.Option(
        "--budget",
        metavar="BUDGET",
        help=BUDGET_HELP + "  [default: everything is read]",
        rich_help_panel=BUDGET_PANEL,
    ),
]
TargetLoss = Annotated[
    float | None,
    typer.Option(
        "--target-loss",
        metavar="X",
        help="Merge under 5, 10, 25, 50 and 100 % in turn, until the loss that --evaluate prints is at most X; "
        "publish that merge alone.",
        rich_help_panel=BUDGET_PANEL,
    ),
]
Evaluate = Annotated[
    str | None,
    typer.Option("--evaluate", metavar="CMD", help="For --target-loss. " + EVALUATE_HELP, rich_help_panel=BUDGET_PANEL),
]
_FOR_BUDGETS = (
    "select",
    "where_omitted",
    "min_density",
    "block_elements",
    "request_cost",
    "importance",
)
EXAMPLES = (
    "mergepipe merge recipe.yml merged/",
    "mergepipe merge recipe.yml merged/ --budget 25%",
    "mergepipe merge recipe.yml merged/ --target-loss 2.3 --evaluate ./loss.sh",
    "mergepipe merge --plan plan.json merged/",
    "mergepipe merge recipe.yml /shared/merged --executor ray",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeFlags:
    """Options of a merge that a stored plan has decided already."""

    budget: Budget = None
    target_loss: TargetLoss = None
    evaluate: Evaluate = None
    allow_dropped: AllowDropped = None
    seed: Seed = 0


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    add_command(app, merge, section="Merging", examples=EXAMPLES)


def merge(
    context: typer.Context,
    recipe: RecipeOrOut,
    out: MergeOut = None,
    *,
    plan: StoredPlan = None,
    force: Force = False,
    shard_size: ShardSize = None,
    settings: RecipeFlags,
    planning: PlanFlags,
    publishing: PublishingFlags,
    strict: Strict = False,
    lenient: Lenient = False,
    no_catalog: NoCatalog = False,
    resume: Resume = None,
    machine: RunFlags,
    cluster: ClusterFlags,
    printing: ReportFlags,
) -> None:
    """Merge the models of RECIPE into OUT.

    OUT appears when it is complete, or not at all. An interrupted run is resumed.
    With --plan, a stored plan takes the place of RECIPE and of the options that it has decided.
    """
    session: Session = context.obj
    target = _check_arguments(recipe, out, plan, settings, planning)
    options = MergeOptions(
        threads=machine.threads,
        memory_bytes=optional_size(machine.memory, "--memory"),
        home=machine.home,
        catalog=not no_catalog,
        connections=machine.n_connections,
        plan=planning.options(strict=strict, lenient=lenient),
        shard_bytes=optional_size(shard_size, "--shard-size"),
        resume=resume,
        paths=publishing.paths,
        base_model_ids=publishing.base_model_ids,
        allow_dropped=tuple(settings.allow_dropped or ()),
        strict=strict,
        lenient=lenient,
        executor=cluster.executor_name,
        address=cluster.address,
    )
    run_options = machine.options(catalog=not no_catalog)
    from mergepipe import api

    def run(on_progress: ProgressCallback) -> MergeReport:
        if plan is not None:
            return api.run(
                plan, target, force=force, shard_bytes=options.shard_bytes, resume=resume, executor=options.executor,
                address=options.address, paths=options.paths, base_model_ids=options.base_model_ids,
                options=run_options, on_progress=on_progress,
            )  # fmt: skip
        return api.merge(
            recipe, target, budget=settings.budget,
            target_loss=settings.target_loss, evaluate=settings.evaluate, force=force, seed=settings.seed,
            options=options, on_progress=on_progress,
        )  # fmt: skip

    with tell_if_published(Location.of(target)), progress_shown(session, silent=printing.silent) as on_progress:
        report = run(on_progress)
    print_merge_report(report, as_json=printing.as_json, quiet=printing.quiet)


def _check_arguments(recipe: str, out: str | None, plan: str | None, settings: RecipeFlags, planning: PlanFlags) -> str:
    """Return where the output goes; with a plan it is the only argument.

    Raises:
        RecipeError: an argument too many or too few, or an option that has no meaning without a budget or with a plan.
    """
    from mergepipe.errors import RecipeError

    if plan is None:
        if out is None:
            raise RecipeError.of("option.invalid", "", "Missing argument 'OUT'", "see 'mergepipe merge --help'")
        refuse_swapped(recipe, out, RECIPE_ENDINGS)
        if settings.budget is None and settings.target_loss is None:
            _refuse(_options_set(planning, _FOR_BUDGETS), "add --budget")
        return out
    if out is not None:
        raise RecipeError.of("option.pair", "--plan", f"the plan takes the place of {recipe}", "give OUT alone")
    options = _options_set(settings) | _options_set(planning)
    _refuse(options, "leave it out: the plan has decided it")
    return recipe


def _options_set(flags: RecipeFlags | PlanFlags, names: tuple[str, ...] | None = None) -> dict[str, object]:
    """Return the options of a group that differ from their defaults."""
    defaults = type(flags)()
    return {
        f"--{field.name.rstrip('_').replace('_', '-')}": getattr(flags, field.name)
        for field in fields(flags)
        if (names is None or field.name in names) and getattr(flags, field.name) != getattr(defaults, field.name)
    }


def _refuse(options: Mapping[str, object], hint: str) -> None:
    """Refuse options that have no meaning here, rather than ignore them."""
    for option in options:
        from mergepipe.errors import RecipeError

        raise RecipeError.of("option.pair", option, "it has no meaning by itself", hint)
