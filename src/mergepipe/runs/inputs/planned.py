"""Open the inputs of a stored plan, and refuse those that changed since it was made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mergepipe.checkpoints.contract import Checkpoint
from mergepipe.errors import ConflictError, NotFoundError, Problem
from mergepipe.planning.plan import Plan, PlannedModel
from mergepipe.recipes.fields import LENIENT
from mergepipe.recipes.recipe_files import reload_recipe
from mergepipe.recipes.references import reference_text
from mergepipe.runs.inputs.opened import Inputs, open_recipes, with_known_digests
from mergepipe.runs.records.catalog_link import CatalogLink
from mergepipe.storage.contract import Store


def open_planned(plan: Plan, store: Store, link: CatalogLink) -> Inputs:
    """Open the inputs that a plan was made for."""
    recipe = reload_recipe(plan.recipe, store, {model.model: model.path for model in plan.models})
    if [reference_text(model) for model in recipe.inputs()] != [model.path for model in plan.models]:
        raise NotFoundError.of(
            "input.not-found", "plan", "its models are not those of its recipe", "make the plan again"
        )
    inputs = open_recipes((recipe,), store, ("*",), strictness=LENIENT)  # it was accepted when the plan was made
    inputs = with_known_digests(inputs, link)
    bound = zip(plan.models, inputs.checkpoints, strict=True)
    problems = [problem for model, checkpoint in bound for problem in _changes(model, checkpoint)]
    if vocabulary_of(inputs) != plan.vocabulary:
        message = "the tokenizers of its models are not those that it was made for"
        problems.append(Problem("input.changed", "tokenizer", message, "make the plan again"))
    if problems:
        raise ConflictError(*problems)
    return replace(inputs, notices=plan.recipe_notices)  # of the recipe as it was written


def vocabulary_of(inputs: Inputs) -> str | None:
    """Return the digest of how tokens are aligned; None where a recipe asks for no tokenizer."""
    return None if inputs.alignment is None else inputs.alignment.digest


def _changes(model: PlannedModel, checkpoint: Checkpoint) -> Sequence[Problem]:
    """List the files that changed since the plan was made. Equal SHA-256 digests say that one did not."""
    then = {file.name: file for file in model.files}
    now = {file.name: file for file in checkpoint.files}
    same = {
        name
        for name in now.keys() & then.keys()
        if (now[name].size_bytes, now[name].header_digest) == (then[name].size_bytes, then[name].header_digest)
        and (now[name].version == then[name].version or now[name].sha256 == then[name].sha256 is not None)
    }
    hint = "make the plan again (`mergepipe analyze`, then `mergepipe plan`)"
    return [
        Problem("input.changed", f"{model.path}/{name}", "changed since the plan was made", hint)
        for name in sorted((now.keys() | then.keys()) - same)
    ]
