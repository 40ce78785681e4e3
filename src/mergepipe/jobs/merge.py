"""Merge by a recipe, and publish the snapshot."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from mergepipe.recipes.yaml_source import RecipeText
from mergepipe.reports import MergeReport, ProgressCallback
from mergepipe.runs.inputs.opened import open_inputs
from mergepipe.runs.merge_run import IntermediateWriter, MergeSettings, publish_merge
from mergepipe.runs.records.catalog_link import CatalogLink
from mergepipe.storage.location import Location
from mergepipe.storage.stores import Stores


def run_merge(
    recipe: Location | RecipeText,
    out: Path,
    settings: MergeSettings,
    *,
    started: float,
    on_progress: ProgressCallback | None,
) -> MergeReport:
    """Merge and publish; see `api.merge`. `started` is the `perf_counter` reading that time is taken from."""
    store = Stores(settings=settings.engine.remote)
    with closing(CatalogLink(settings.home)) as link, IntermediateWriter(out, settings, store) as intermediates:
        inputs = open_inputs(
            recipe, store, settings.allow_dropped, intermediates.write, settings.strictness,
            keeps_absolute_paths=settings.absolute_paths,
        )  # fmt: skip
        settings.base_model_ids.check_names(inputs.leaf_models)
        return publish_merge(inputs, None, out, settings, store, link, started, on_progress)
