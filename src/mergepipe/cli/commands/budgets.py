"""Commands that plan what is read under a budget: `plan`, `explain`, `analyze`, `sweep`, `search`."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import mergepipe
from mergepipe.cli.app import EXPERT_PART, RecipePath, command
from mergepipe.cli.printing import PrintOptions, print_report
from mergepipe.cli.progress import OnProgress
from mergepipe.core.display import Displayed, json_line
from mergepipe.core.flags import Argument, Flag
from mergepipe.core.outcome import note_committed
from mergepipe.options import (
    BUDGET,
    BUDGET_PANEL,
    HOME,
    SWEEP_BUDGETS,
    AnalyzeOptions,
    PlanOptions,
    SearchOptions,
    SweepOptions,
)
from mergepipe.storage.output_places import output_place


@command("mergepipe plan recipe.yml --budget 25% --out plan.json", "mergepipe plan recipe.yml --all --out plan.json")
def plan(
    recipe: RecipePath,
    *,
    budget: Annotated[
        str | None, Flag(f"{BUDGET.help}  [needed without --all]", metavar="BUDGET", panel=BUDGET_PANEL)
    ] = None,
    everything: Annotated[
        bool, Flag("Plan the full merge, without a budget, for `run --part`.", name="--all", panel=BUDGET_PANEL)
    ] = False,
    options: PlanOptions,
    out: Annotated[str | None, Flag("Store the plan in FILE, for `mergepipe run`.", short="-o", metavar="FILE")] = None,
    printing: PrintOptions,
) -> None:
    """Plan what a merge of RECIPE will read under a budget.

    Prints the share of each expert that is read. Policies other than `sample` use statistics of experts that were
    analyzed, or the indices of packed experts.
    """
    path = None if out is None else output_place(out).local_path
    decided = mergepipe.plan(recipe, budget, everything=everything, options=options)
    if path is not None:
        mergepipe.store_plan(decided, path)
        note_committed(path)
    if printing.as_json:  # the plan itself, with the content that is stored
        from mergepipe.planning.plan import PLAN_FORMAT

        print(json_line(PLAN_FORMAT.content(decided)))
    else:
        print_report(replace(mergepipe.explain(decided), path=path or Path()), printing)


@command(
    "mergepipe explain plan.json",
    "mergepipe explain merged/ --html merged.html",
    "mergepipe explain merged/ --tensor 'model.layers.0.*'",
    "mergepipe explain merged/ --masks masks/",
)
def explain(
    subject: Annotated[str, Argument("SNAPSHOT|PLAN", "A snapshot's directory or sid, or a stored plan.")],
    *,
    tensor: Annotated[
        str | None, Flag("Explain these tensors block by block: 'model.layers.0.*'.", metavar="GLOB")
    ] = None,
    html: Annotated[str | None, Flag("Also write an HTML page with charts.", metavar="FILE")] = None,
    masks: Annotated[
        str | None, Flag("Create DIR with a mask for each expert, to restore the expert with.", metavar="DIR")
    ] = None,
    home: Annotated[str | None, HOME] = None,
) -> Displayed:
    """Print which experts a snapshot or plan contains, and why.

    Reads no tensor data, only a snapshot's mergepipe.json. Only --masks reads all tensors.
    """
    if html is not None:
        page = checked_page(html)
    explanation = mergepipe.explain(subject, tensor=tensor, masks=masks, home=home)
    if html is not None:
        from mergepipe.cli.pages import explain_page

        write_page(page, explain_page(explanation, datetime.now(UTC)))
    return explanation


@command(
    "mergepipe analyze base/ expert-1/ expert-2/",
    "mergepipe analyze base/ math/ --text some.txt --importance-out importance.json",
    "mergepipe analyze base/ expert-*/ --part 2/4 --home /shared/home",
)
def analyze(
    base: Annotated[str, Argument("BASE", "The base model: a directory or a .safetensors file.")],
    experts: Annotated[list[str], Argument("EXPERT...", "Models fine-tuned from it.")],
    *,
    part: Annotated[str | None, EXPERT_PART] = None,
    options: AnalyzeOptions,
    on_progress: OnProgress,
) -> Displayed:
    """Read each EXPERT once, and store statistics for plans.

    An expert that was analyzed before is not read again unless its content changed. The report names one file
    of statistics for each expert; copy it into the home folder of another machine to use it there.
    """
    from mergepipe.jobs.parts import experts_of_part

    return mergepipe.analyze(base, experts_of_part(experts, part), options=options, on_progress=on_progress)


@command(
    "mergepipe sweep recipe.yml --html sweep.html",
    "mergepipe sweep recipe.yml --budgets 5%,10%,20%",
    "mergepipe sweep recipe.yml --budgets 0,10% --evaluate 'python loss.py {}'",
)
def sweep(
    recipe: RecipePath,
    *,
    budgets: Annotated[str | None, Flag("Budgets to try.", metavar="LIST", default="5%,10%,25%,50%,75%,100%")] = None,
    html: Annotated[str | None, Flag("Also write an HTML page with the curves.", metavar="FILE")] = None,
    options: SweepOptions,
    on_progress: OnProgress,
) -> Displayed:
    """Measure bytes, time and losses of RECIPE under several budgets.

    RECIPE is merged in full once, then under each budget; the merged models are not kept. With --evaluate
    the table shows the loss that the command prints. Without it, the table shows the distance from the full merge,
    for the chosen policy and for `random`; the distance of a sample is meaningless and is not measured.
    """
    if html is not None:
        page = checked_page(html)
    tried = SWEEP_BUDGETS if budgets is None else budgets.split(",")
    report = mergepipe.sweep(recipe, tried, options=options, on_progress=on_progress)
    if html is not None:
        from mergepipe.cli.pages import sweep_page

        write_page(page, sweep_page(report, datetime.now(UTC)))
    return report


@command(
    "mergepipe search recipe.yml --out best/ --evaluate 'python loss.py {}' --trials 100",
    "mergepipe search recipe.yml --out best/ --evaluate 'python loss.py {}' --rung 5% --rung 25% --rung 100%",
    "mergepipe search recipe.yml --out best/ --evaluate 'python score.py {}' --objective accuracy:max --resume",
)
def search(
    recipe: RecipePath,
    *,
    out: Annotated[str, Flag("The directory to create for the best merge.", short="-o", metavar="DIR")],
    options: SearchOptions,
    on_progress: OnProgress,
) -> Displayed:
    """Try values of RECIPE, and publish the best merge.

    RECIPE marks the values to search with {search: [low, high]}, optionally with log: true, or with
    {search: [a, b, c]}. optuna proposes values, and --evaluate measures each merge. The study is stored in
    OUT.study, a journal of optuna; --resume continues a search that was stopped.
    """
    return mergepipe.search(recipe, out, options=options, on_progress=on_progress)


def checked_page(name: str) -> Path:
    """Return the path of a page; one that could not be written is refused before anything is done."""
    from mergepipe.errors import NotFoundError, OutputError

    path = output_place(name).local_path
    if not path.absolute().parent.is_dir():
        raise NotFoundError.of("storage.not-found", path.parent, "no such directory", "make it, or choose another")
    if path.is_symlink():
        message = "is a link, and nothing is written through links"
        raise OutputError.of("output.link", path, message, "name the file itself")
    if path.exists() and (not path.is_file() or path.suffix not in (".html", ".htm")):
        raise OutputError.of("output.not-ours", path, "exists, and is not an HTML file", "choose another name")
    return path


def write_page(path: Path, page: str) -> None:
    """Write a page in one step: what is there is replaced, or stays as it is."""
    from mergepipe.storage.ledger import Ledger
    from mergepipe.storage.output import replace_durably

    replace_durably(path, page.encode(), Ledger())
