"""`mergepipe plan`: decide what a merge reads under a budget."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mergepipe.cli.options import (
    BUDGET_HELP,
    BUDGET_PANEL,
    PRINT_PANEL,
    AllowDropped,
    Debug,
    Home,
    Lenient,
    PlanFlags,
    RecipePath,
    Seed,
    Strict,
)
from mergepipe.cli.printing import print_text
from mergepipe.cli.registration import add_command
from mergepipe.core.escaping import json_line
from mergepipe.core.outcome import note_committed

Budget = Annotated[
    str | None,
    typer.Option(
        "--budget",
        metavar="BUDGET",
        help=BUDGET_HELP + "  [needed without --all]",
        rich_help_panel=BUDGET_PANEL,
    ),
]
Everything = Annotated[
    bool,
    typer.Option(
        "--all", help="Plan the full merge, without a budget, for `run --part`.", rich_help_panel=BUDGET_PANEL
    ),
]
PlanOut = Annotated[
    str | None, typer.Option("--out", "-o", metavar="FILE", help="Store the plan there, for `mergepipe run`.")
]
PlanAsJson = Annotated[
    bool, typer.Option("--json", help="Print the plan itself, as it would be stored.", rich_help_panel=PRINT_PANEL)
]


EXAMPLES = (
    "mergepipe plan recipe.yml --budget 25% --out plan.json",
    "mergepipe plan recipe.yml --all --out plan.json",
)


def register(app: typer.Typer) -> None:
    """Add the command."""
    add_command(app, plan, section="Budgets", examples=EXAMPLES)


def plan(
    recipe: RecipePath,
    *,
    budget: Budget = None,
    everything: Everything = False,
    planning: PlanFlags,
    seed: Seed = 0,
    home: Home = None,
    allow_dropped: AllowDropped = None,
    strict: Strict = False,
    lenient: Lenient = False,
    plan_out: PlanOut = None,
    as_json: PlanAsJson = False,
    debug: Debug = False,  # noqa: ARG001 - for the help; the guard reads it, before there is a command
) -> None:
    """Decide what a merge of RECIPE reads under a budget.

    Says what of each expert is read. What is known of the experts comes
    from the catalog and from the indices of packed ones.
    """
    options = planning.options(strict=strict, lenient=lenient)
    from mergepipe import api

    decided = api.plan(
        recipe,
        budget,
        everything=everything,
        seed=seed,
        home=home,
        allow_dropped=allow_dropped or (),
        options=options,
    )
    if plan_out is not None:
        api.store_plan(decided, plan_out)
        note_committed(Path(plan_out))
    if as_json:
        print(json_line(decided.content(), indent=1))
    else:
        from mergepipe.cli.render.plans import plan_table

        print_text(plan_table(decided, None if plan_out is None else Path(plan_out)))
