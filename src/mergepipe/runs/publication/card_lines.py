"""Lines of a model card in the Hub's form: metadata in YAML, then Markdown, with text from inputs escaped for each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from mergepipe.core.escaping import markdown_code, markdown_text, yaml_scalar
from mergepipe.core.units import format_bytes

if TYPE_CHECKING:
    from mergepipe.reports import BudgetVerdict
    from mergepipe.runs.publication.model_card import Origins
    from mergepipe.snapshots.manifest import Manifest

_BACKTICKS = re.compile("`+")


def metadata_lines(manifest: Manifest, origins: Origins, tags: Sequence[str]) -> Iterator[str]:
    """Yield the metadata that the Hub reads, between its marks."""
    card = origins.card
    yield "---"
    if origins.base_models:
        yield "base_model:"
        yield from (f"- {yaml_scalar(model)}" for model in origins.base_models)
        yield "base_model_relation: merge"
    licenses = ("license", card.license), ("license_name", card.license_name), ("license_link", card.license_link)
    yield from (f"{key}: {yaml_scalar(value)}" for key, value in licenses if value)
    if card.languages:
        yield "language:"
        yield from (f"- {yaml_scalar(language)}" for language in card.languages)
    yield f"library_name: {yaml_scalar(origins.library)}"
    if card.pipeline_tag:
        yield f"pipeline_tag: {yaml_scalar(card.pipeline_tag)}"
    yield "tags:"
    yield from (f"- {yaml_scalar(tag)}" for tag in tags)
    yield "merge:"
    yield f"  method: {yaml_scalar(manifest.operator)}"
    yield f"  tool: {yaml_scalar(f'mergepipe {manifest.version}')}"
    yield f"  snapshot: {yaml_scalar(manifest.sid)}"
    if manifest.plan is not None:
        yield f"  plan: {yaml_scalar(str(manifest.plan_digest))}"
        yield f"  budget: {yaml_scalar(_size(manifest.plan['budget_bytes']))}"
    yield "---"


def body_lines(manifest: Manifest, origins: Origins, verdict: BudgetVerdict | None) -> Iterator[str]:
    """Yield what the card tells: inputs, usage, budget, recipe."""
    n_models = len(manifest.inputs)
    yield f"# Merge by {markdown_text(manifest.operator)}"
    yield ""
    yield (
        f"Made by MergePipe {manifest.version} from {n_models} model{'' if n_models == 1 else 's'}; "
        f"snapshot `{manifest.sid}`."
    )
    yield ""
    yield from _input_lines(manifest, origins)
    yield ""
    if origins.licenses:
        yield "The models state different licences; this card states the base's:"
        yield ""
        yield from (f"- {markdown_code(name)}: {markdown_text(license_)}" for name, license_ in origins.licenses)
        yield ""
    yield from _usage_lines(origins.usage)
    if manifest.plan is not None:
        planned, full = (_size(manifest.plan[key]) for key in ("planned_bytes", "full_cost_bytes"))
        yield f"Made under a budget: plan `{manifest.plan_digest}` reads {planned} of the"
        yield f"{full} that reading every expert in full takes."
        yield ""
    if verdict is not None:
        yield from _verdict_lines(verdict)
    rounding = f"{len(manifest.tensors)} tensors; arithmetic in float32, one rounding."
    yield f"{rounding} Every input, digest and dropped tensor is"
    yield "listed in `mergepipe.json`."
    yield ""
    yield from _recipe_lines(manifest, origins.recipe)


def _input_lines(manifest: Manifest, origins: Origins) -> Iterator[str]:
    has_revisions = any(origins.revisions)
    yield "| role | model | revision |" if has_revisions else "| role | model |"
    yield "|---|---|---|" if has_revisions else "|---|---|"
    for record, name, revision in zip(manifest.inputs, origins.names, origins.revisions, strict=True):
        last = f" {markdown_code(revision) if revision else ''} |" if has_revisions else ""
        yield f"| {record.role} | {markdown_code(name)} |{last}"


def _usage_lines(usage: Sequence[str]) -> Iterator[str]:
    if usage:
        yield "## Use"
        yield ""
        yield "```python"
        yield from usage
        yield "```"
        yield ""


def _size(nbytes: object) -> str:
    return format_bytes(nbytes) if isinstance(nbytes, int) else str(nbytes)


def _verdict_lines(verdict: BudgetVerdict) -> Iterator[str]:
    yield "## Budget"
    yield ""
    if verdict.is_full:
        yield "Everything of the experts was read: this is the full merge."
    else:
        share = f"{_size(verdict.planned_bytes)} of {_size(verdict.full_bytes)}"
        yield f"Read of the experts, by policy `{verdict.policy}`: {share}. What such merges kept of a gain was"
        yield f"measured in MergePipe's {verdict.measured}; nothing is known of this one."
    yield ""
    yield "| expert | share of the blocks that it changes in the merge |"
    yield "|---|---|"
    yield from (f"| {markdown_code(expert.model)} | {100 * expert.share:.1f} % |" for expert in verdict.experts)
    yield ""
    for expert in verdict.unread:
        yield f"Warning: nothing was read of {markdown_text(expert)}."
        yield ""


def _recipe_lines(manifest: Manifest, recipe: str) -> Iterator[str]:
    yield "## Recipe"
    yield ""
    if "recipe_notices" in manifest.run:
        yield "What has no effect in it, or another one than it asks for:"
        yield ""
        yield from (f"- {markdown_text(notice)}" for notice in str(manifest.run["recipe_notices"]).splitlines())
        yield ""
    fence = _fence(recipe)
    yield f"{fence}yaml"
    yield from recipe.expandtabs().splitlines()
    yield fence


def _fence(text: str) -> str:
    """Return a fence longer than every run of backticks in `text`."""
    return "`" * max(3, 1 + max(map(len, _BACKTICKS.findall(text)), default=0))
