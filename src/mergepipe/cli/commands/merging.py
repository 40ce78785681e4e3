"""Commands that check recipes and merge: `merge`, `moe`, `check`, `run`, `status`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import click

import mergepipe
from mergepipe.cli.app import OUT_HELP, OutPath, RecipePath, command
from mergepipe.cli.progress import OnProgress
from mergepipe.core.display import Displayed
from mergepipe.core.flags import Argument, Flag, declared_options
from mergepipe.errors import RecipeError
from mergepipe.options import (
    FORCE,
    PARTS_PANEL,
    CheckOptions,
    MachineOptions,
    MergeOptions,
    OutputOptions,
    PlanOptions,
    RecipeOptions,
)

RECIPE_ENDINGS, PLAN_ENDINGS = (".yml", ".yaml"), (".json",)
_OF_OUTPUTS, _OF_RECIPES = (
    tuple(option.field for option in declared_options(kind)) for kind in (OutputOptions, RecipeOptions)
)
DECIDED_BY_PLANS = tuple(option.field for option in declared_options(MergeOptions) if option.field not in _OF_OUTPUTS)
FOR_BUDGETS = tuple(
    option.field for option in declared_options(PlanOptions) if option.field not in (*_OF_OUTPUTS, *_OF_RECIPES, "seed")
)


@command(
    "mergepipe merge recipe.yml merged/",
    "mergepipe merge recipe.yml merged/ --budget 25%",
    "mergepipe merge recipe.yml merged/ --target-loss 2.3 --evaluate ./loss.sh",
    "mergepipe merge --plan plan.json merged/",
    "mergepipe merge recipe.yml /shared/merged --executor ray",
)
def merge(
    context: click.Context,
    recipe: Annotated[
        str,
        Argument("RECIPE", "The recipe, a YAML file. Relative paths start at its folder. Not with --plan."),
    ],
    out: Annotated[
        str | None,
        Argument(
            "OUT",
            f"{OUT_HELP} Or one file: merged.safetensors, merged-Q8_0.gguf.",
        ),
    ] = None,
    *,
    plan: Annotated[str | None, Flag("Run this stored plan instead of a recipe (see `plan`).", metavar="PLAN")] = None,
    options: MergeOptions,
    on_progress: OnProgress,
) -> Displayed:
    """Merge the models of RECIPE into OUT.

    OUT appears when it is complete, or not at all. An interrupted run is resumed.
    With --plan, a stored plan replaces RECIPE and the options that the plan already fixes.
    """
    target = _checked_output(recipe, out, plan)
    if plan is not None:
        _refuse_options(context, DECIDED_BY_PLANS, "leave it out: the plan already fixes it")
    elif options.budget is None and options.target_loss is None:
        _refuse_options(context, FOR_BUDGETS, "add --budget")
    if plan is None:
        return mergepipe.merge(recipe, target, options=options, on_progress=on_progress)
    return mergepipe.run(plan, target, options=options, on_progress=on_progress)


@command("mergepipe moe mixture.yml moe/")
def moe(
    recipe: RecipePath,
    out: OutPath,
    *,
    force: Annotated[bool, FORCE] = False,
    options: MachineOptions,
    on_progress: OnProgress,
) -> Displayed:
    """Build the mixture of experts of RECIPE in OUT.

    `merge` does the same and has more options; recipes of other kinds are refused.
    """
    from mergepipe.recipes.recipe_files import load_recipes
    from mergepipe.storage.location import Location
    from mergepipe.storage.stores import Stores

    refuse_swapped(recipe, out, RECIPE_ENDINGS)
    if load_recipes(Location.parse(recipe), Stores())[-1].mixture is None:
        message = "makes no mixture: it has merge_method, or neither experts nor gate_mode"
        raise RecipeError.of("recipe.unsupported", recipe, message, f"mergepipe merge {recipe} {out}")
    return mergepipe.merge(recipe, out, options=MergeOptions(force=force, **asdict(options)), on_progress=on_progress)


def _checked_output(recipe: str, out: str | None, plan: str | None) -> str:
    """Return where the output goes; with a plan it is the only argument."""
    if plan is not None:
        if out is not None:
            raise RecipeError.of("option.conflict", "--plan", f"the plan replaces {recipe}", "give only OUT")
        return recipe
    if out is None:
        raise RecipeError.of(
            "option.invalid", "", "Missing argument 'OUT'", "as in: mergepipe merge recipe.yml merged/"
        )
    refuse_swapped(recipe, out, RECIPE_ENDINGS)
    return out


def _refuse_options(context: click.Context, names: tuple[str, ...], hint: str) -> None:
    """Refuse options that were given and have no meaning here, rather than ignore them."""
    for option in declared_options(MergeOptions):
        source = context.get_parameter_source(option.field)
        if option.field in names and source is not None and source.name == "COMMANDLINE":
            raise RecipeError.of("option.conflict", option.name, "it has no effect here", hint)


def refuse_swapped(first: str, second: str, endings: tuple[str, ...]) -> None:
    """Refuse two arguments of which the second is named as the first should be."""
    if second.endswith(endings) and not first.endswith(endings):
        message = f"is in the place of the output, and {first} in the place of the input"
        raise RecipeError.of("option.conflict", second, message, f"swap the two: {second} {first}")


@command("mergepipe check recipe.yml")
def check(recipe: RecipePath, *, options: CheckOptions) -> Displayed:
    """Check RECIPE, and print what its merge would read and write.

    Reads no tensor data. Lists all problems at once.
    """
    return mergepipe.check(recipe, options=options)


@command("mergepipe run plan.json merged/", "mergepipe run plan.json merged/ --part 2/7")
def run(
    plan: Annotated[str, Argument("PLAN", "A plan that `mergepipe plan` stored.")],
    out: OutPath,
    *,
    part: Annotated[
        str | None,
        Flag(
            "Make only part I of N, on any machine that reaches the inputs and OUT. The last one publishes OUT.",
            metavar="I/N",
            panel=PARTS_PANEL,
        ),
    ] = None,
    finish: Annotated[bool, Flag("Publish OUT from its parts; fails if one is missing.", panel=PARTS_PANEL)] = False,
    options: OutputOptions,
    on_progress: OnProgress,
) -> Displayed:
    """Run the merge of PLAN into OUT.

    Refused if an input has changed since the plan was made. OUT appears when it is complete, or not at all.
    An interrupted run is resumed.
    """
    refuse_swapped(plan, out, PLAN_ENDINGS)
    if finish and part is not None:
        message = "publishes parts that are already made, and --part makes one: the last part publishes by itself"
        raise RecipeError.of("option.conflict", "--finish", message, "leave out --finish, or --part")
    if part is None and not finish:
        return mergepipe.run(plan, out, options=options, on_progress=on_progress)
    return mergepipe.run_part(plan, out, part, options=options, on_progress=on_progress)


@command("mergepipe status plan.json merged/ --parts 7")
def status(
    plan: Annotated[str, Argument("PLAN", "The plan of OUT.")],
    out: Annotated[str, Argument("OUT", "The output of `run --part`.")],
    *,
    parts: Annotated[int | None, Flag("List which of N parts are missing.", metavar="N")] = None,
) -> Displayed:
    """Print the progress of an OUT that is made in parts.

    Reads only the records of the parts next to OUT, no inputs.
    """
    refuse_swapped(plan, out, PLAN_ENDINGS)
    return mergepipe.parts_status(plan, out, n_parts=parts)
