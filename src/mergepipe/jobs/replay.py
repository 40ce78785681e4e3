"""Recompute a snapshot, or some of its tensors, from its recorded inputs, given its manifest alone."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mergepipe
from mergepipe.checkpoints.contract import GGUF_SUFFIX
from mergepipe.checkpoints.open_files import check_unchanged
from mergepipe.core.blocks import DTYPES, element_count
from mergepipe.core.flags import public_call
from mergepipe.core.linear_algebra import linear_algebra_build
from mergepipe.core.outcome import Notice
from mergepipe.core.units import first_names
from mergepipe.engine.make_part import make_part
from mergepipe.engine.output_parts import whole
from mergepipe.engine.work import EngineOptions, plan_output
from mergepipe.errors import ConflictError, NotFoundError, OutputError, Problem, UnsupportedError
from mergepipe.jobs.merge_run import MergeRun, intermediate_writer
from mergepipe.jobs.snapshots import find_snapshot, read_manifest_value, with_inputs_found
from mergepipe.options import MergeOptions, OutputOptions, RunOptions
from mergepipe.recipes.fields import LENIENT
from mergepipe.recipes.recipe_files import reload_recipes
from mergepipe.recipes.references import reference_text, referenced_paths
from mergepipe.reports import MergeReport, ProgressCallback
from mergepipe.runs.catalog_link import CatalogLink
from mergepipe.runs.inputs import Inputs, Stage, open_recipes, with_parameters
from mergepipe.runs.merge_settings import MergeSettings, merge_settings
from mergepipe.runs.model_card import BaseModelIds
from mergepipe.runs.stored_plan import changed_files, plan_of
from mergepipe.runs.work import ONE_FILE_BYTES, merge_work
from mergepipe.snapshots.layout import layout_of
from mergepipe.snapshots.manifest import LINEAR_ALGEBRA_KEY, NOTICES_KEY, Manifest
from mergepipe.snapshots.shards import TensorDigest
from mergepipe.storage.contract import BESIDE, Store
from mergepipe.storage.location import Location
from mergepipe.storage.stores import Stores

_HINT = "restore the input unchanged"
_GONE_HINT = "put it there: a snapshot names its inputs relative to its own folder, so move both together"


@dataclass(frozen=True, slots=True)
class RebuiltTensor:
    """A recomputed tensor: its digests, and the location of its bytes."""

    digest: TensorDigest
    file: Path
    offset: int


def open_recorded(manifest: Manifest, store: Store, stage: Stage | None = None) -> Inputs:
    """Open the inputs of a snapshot at their recorded paths; `stage` writes intermediates that must be complete."""
    if manifest.is_adapter:
        message = f"is an adapter made by `mergepipe {manifest.operator}`, which cannot be replayed from its record"
        hint = "run that command again: the recipe in its record has the options"
        raise UnsupportedError.of("model.unsupported", manifest.sid, message, hint)
    gone = [
        Problem("input.not-found", str(path), f"the input {record.model} does not exist any more", _GONE_HINT)
        for record in manifest.inputs
        for path in referenced_paths(record.path, store)
        if store.stat(path) is None
    ]
    if gone:
        raise NotFoundError(*gone)
    recipes = reload_recipes(manifest.recipe, store, {record.model: record.path for record in manifest.inputs})
    inputs = open_recipes(recipes, store, ("*",), stage, LENIENT)  # the original merge accepted whatever is odd
    sources = tuple(inputs.sources())
    if [reference_text(model) for _, model, _ in sources] != [record.path for record in manifest.inputs]:
        message = "its inputs are not those of its recipe"
        raise NotFoundError.of("input.not-found", "the manifest", message, "merge again with the recipe")
    changed = [
        Problem("input.changed", f"{record.path}/{name}", "is not what the snapshot was made from", _HINT)
        for record, (_, _, checkpoint) in zip(manifest.inputs, sources, strict=True)
        for name in changed_files(record.files, checkpoint.file_ids, by_version=False)
    ]
    if changed:
        raise ConflictError(*changed)
    recorded = str(manifest.run.get(NOTICES_KEY, ""))  # they name lines of a recipe that need not be there any more
    notices = tuple(Notice("recipe.recorded", "", 0, "", text) for text in recorded.split("\n") if text)
    plan, inputs = plan_of(manifest, "the manifest's plan"), replace(inputs, notices=notices)
    return inputs if plan is None else with_parameters(inputs, plan)


def sampled_tensors(manifest: Manifest, fraction: float) -> tuple[str, ...]:
    """Sample tensors that make up at least `fraction` of the bytes, at least one per action; seeded by the sid."""
    order = random.Random(manifest.sid).sample(manifest.tensors, len(manifest.tensors))
    sizes = {t.name: element_count(t.shape) * DTYPES[t.dtype].itemsize for t in manifest.tensors}
    wanted = fraction * sum(sizes.values())
    chosen: dict[str, int] = {}
    kinds: set[str] = set()
    for tensor in order:
        if tensor.action not in kinds or sum(chosen.values()) < wanted:
            chosen[tensor.name] = sizes[tensor.name]
            kinds.add(tensor.action)
    return tuple(tensor.name for tensor in manifest.tensors if tensor.name in chosen)


def rebuild_tensors(
    store: Store, manifest: Manifest, names: Collection[str], directory: Path, engine: EngineOptions
) -> tuple[RebuiltTensor, ...]:
    """Recompute the named tensors into one file in `directory`."""
    options = MergeOptions(catalog=False, seed=manifest.seed, shard_bytes=ONE_FILE_BYTES)
    settings = MergeSettings(options, engine, out=directory / "made")
    with intermediate_writer(settings, store) as write_intermediate:
        inputs = open_recorded(manifest, store, write_intermediate)
        wanted = set(names)
        output = plan_output([task for task in inputs.resolution.tasks if task.name in wanted], ONE_FILE_BYTES)
        missing = sorted(wanted - {task.name for task in output.tasks})
        if missing:
            message = "by its recipe the inputs have no such tensor"
            raise ConflictError(*(Problem("input.changed", name, message, _HINT) for name in missing))
        checkpoints = [checkpoint for _, _, checkpoint in inputs.leaves()]
        work = merge_work(
            inputs, output, plan_of(manifest, "the manifest's plan"), manifest.seed, store, CatalogLink(None)
        )
        digests = make_part(work, whole(output), directory, store, engine).digests
        check_unchanged(store, checkpoints)
    (shard,) = output.shards
    rebuilt, offset = [], len(shard.header)
    for digest, spec in zip(digests, shard.tensors, strict=True):
        rebuilt.append(RebuiltTensor(digest, directory / shard.name, offset))
        offset += spec.nbytes
    return tuple(rebuilt)


# --- replay a snapshot; publish the result only if it is byte-identical ---


@public_call(OutputOptions)
def replay(
    snapshot: str | Path,
    out: str | Path,
    *,
    options: RunOptions | None = None,
    on_progress: ProgressCallback | None = None,
    **fields: Any,
) -> MergeReport:
    """Make a snapshot again at `out` from its manifest alone: the same bytes, or an error that says why not.

    Args:
        snapshot: see `verify`.
        options: `OutputOptions`: threads, memory and the catalog, and `force`.
    """
    made = OutputOptions.of(options, fields)
    settings = merge_settings(made.common(MergeOptions), out, on_progress)
    store = Stores(settings.engine.connections)
    path = find_snapshot(snapshot, made.home)
    manifest = with_inputs_found(read_manifest_value(store, path), store, settings.home)
    if settings.file.endswith(GGUF_SUFFIX) and manifest.files:
        message = "is the name of a GGUF file, and the recorded bytes are of no such file"
        raise OutputError.of("output.place", settings.place, message, "name a folder, or a .safetensors file")
    decided = replace(settings.options, seed=manifest.seed, shard_bytes=shard_bytes_of(manifest, path))
    settings = replace(settings, options=decided, base_model_ids=BaseModelIds.recorded(manifest))
    with intermediate_writer(settings, store) as write_intermediate:
        inputs = open_recorded(manifest, store, write_intermediate)
        run = MergeRun(inputs, plan_of(manifest, "the manifest's plan"), settings, store, CatalogLink(settings.home))
        return run.publish(lambda made, _: _check_same(manifest, made, settings.place))


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
    shown = first_names(different) or "no tensor, but how they are cut into files"
    message = f"{len(different)} tensors are not what was recorded ({shown}): nothing was published"
    problems = [Problem("input.changed", str(out), message, cause_of_change(recorded))]
    for before, after in zip(recorded.inputs, made.inputs, strict=True):
        versions = {file.name: file.version for file in before.files}
        touched = [file for file in after.files if versions.get(file.name) != file.version]
        message = "was written to since the snapshot was made"
        problems += [
            Problem("input.changed", f"{after.path}/{file.name.removeprefix(BESIDE)}", message) for file in touched
        ]
    raise ConflictError(*problems)


def cause_of_change(recorded: Manifest) -> str:
    """Name what makes tensors differ from their record when they are made again."""
    if recorded.version != mergepipe.__version__:
        return f"it was made by version {recorded.version}, this is {mergepipe.__version__}"
    used = recorded.run.get(LINEAR_ALGEBRA_KEY)
    build = linear_algebra_build()
    if used is not None and used != build:
        builds = f"it was made with {used}; this is {build}"
        return f"{builds}: the last bits of a spectral step depend on that; or the values of an input have changed"
    return "the values of an input have changed"
