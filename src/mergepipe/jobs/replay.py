"""Replay a snapshot from its manifest alone; publish the result only if it is byte-identical."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

from mergepipe.errors import ConflictError, Problem
from mergepipe.jobs.merge import IntermediateWriter, MergeRun
from mergepipe.jobs.rebuild import open_recorded, recorded_plan
from mergepipe.reports import MergeReport, ProgressCallback
from mergepipe.runs.catalog_link import CatalogLink
from mergepipe.runs.model_card import BaseModelIds
from mergepipe.runs.settings import MergeSettings
from mergepipe.runs.snapshots import read_manifest_value, with_inputs_found
from mergepipe.snapshots.layout import layout_of
from mergepipe.snapshots.manifest import InputRecord, Manifest
from mergepipe.storage.location import Location
from mergepipe.storage.stores import Stores

_MOST_NAMED = 5


def replay_snapshot(
    path: Location, out: Path, settings: MergeSettings, *, started: float, on_progress: ProgressCallback | None
) -> MergeReport:
    """Recompute the snapshot at `path` into `out`; seed and shard sizes come from the manifest, not `settings`."""
    store = Stores(settings=settings.engine.remote)
    manifest = with_inputs_found(read_manifest_value(store, path), store, settings.home)
    settings = replace(
        settings,
        seed=manifest.seed,
        shard_bytes=shard_bytes_of(manifest, path),
        base_model_ids=BaseModelIds.recorded(manifest),
    )
    with closing(CatalogLink(settings.home)) as link, IntermediateWriter(out, settings, store) as intermediates:
        inputs = open_recorded(manifest, store, intermediates.write)
        run = MergeRun(inputs, recorded_plan(manifest), settings, store, link, started, on_progress)
        return run.publish(out, lambda made, _: _check_same(manifest, made, settings.destination or out))


def shard_bytes_of(manifest: Manifest, where: object) -> int:
    """Find a shard size limit that reproduces the snapshot's distribution of tensors over files."""
    files = layout_of(manifest, where).files
    shared = [file.size_bytes - file.data_start for file in files if len(file.tensors) > 1]
    return max([1, *shared])


def _check_same(recorded: Manifest, made: Manifest, out: Path | Location) -> None:
    """Refuse a result that differs from the record, naming tensors and possible causes."""
    if made.in_folder().files == recorded.in_folder().files:
        return
    then = {tensor.name: tensor.blake3 for tensor in recorded.tensors}
    now = {tensor.name: tensor.blake3 for tensor in made.tensors}
    different = [name for name in sorted(then.keys() | now.keys()) if then.get(name) != now.get(name)]
    shown = ", ".join(different[:_MOST_NAMED]) or "no tensor, but how they are cut into files"
    message = f"{len(different)} tensors are not what was recorded ({shown}): nothing was published"
    problems = [Problem("input.changed", str(out), message, _blame(recorded, made))]
    pairs = zip(recorded.inputs, made.inputs, strict=True)
    problems.extend(problem for before, after in pairs for problem in _touched(before, after))
    raise ConflictError(*problems)


def _blame(recorded: Manifest, made: Manifest) -> str:
    if recorded.version != made.version:
        return f"it was made by version {recorded.version}, this is {made.version}"
    return "the values of an input have changed"


def _touched(before: InputRecord, after: InputRecord) -> list[Problem]:
    """List the files of an input that were modified since."""
    versions = {file.name: file.version for file in before.files}
    return [
        Problem("input.changed", f"{after.path}/{file.name}", "was written to since the snapshot was made")
        for file in after.files
        if versions.get(file.name) != file.version
    ]
