"""Merge by a recipe, and publish the snapshot."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from mergepipe.reports import MergeReport, ProgressCallback
from mergepipe.runs.catalog_link import CatalogLink
from mergepipe.runs.inputs import open_inputs
from mergepipe.runs.merge_run import IntermediateWriter, MergeSettings, publish_merge
from mergepipe.storage.local import LocalStore


def run_merge(
    recipe: Path, out: Path, settings: MergeSettings, *, started: float, on_progress: ProgressCallback | None
) -> MergeReport:
    """Merge and publish; see `api.merge`. `started` is the `perf_counter` reading that time is taken from."""
    store = LocalStore()
    with closing(CatalogLink(settings.home)) as link, IntermediateWriter(out, settings, store) as intermediates:
        inputs = open_inputs(recipe, store, settings.allow_dropped, intermediates.write, settings.strictness)
        return publish_merge(inputs, None, out, settings, store, link, started, on_progress)
