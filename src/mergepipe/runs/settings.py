"""Turns the options of a call into the settings of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mergepipe.options import (
    DEFAULT_SHARD_BYTES,
    ExecutorName,
    MergeOptions,
    PathStyle,
    RunOptions,
    catalog_home,
    check_seed,
    choice,
    engine_options,
    executor_of,
    home_of,
)
from mergepipe.recipes.fields import Strictness
from mergepipe.runs.merge_run import MergeSettings
from mergepipe.runs.output_place import check_destination, refuse_file_name
from mergepipe.runs.publication.hub_ids import parse_base_model_ids
from mergepipe.runs.recovery.resume import Resume
from mergepipe.runs.sidecars import SmallFileChoice
from mergepipe.snapshots.object_upload import staging_place
from mergepipe.storage.location import Location


def merge_settings(options: MergeOptions, seed: int, *, force: bool) -> MergeSettings:
    """Return the settings of a merge.

    Raises:
        RecipeError: `option.seed`.
        LimitError: `memory.address-space`.
    """
    resume = resume_of(options.resume)
    engine = engine_options(options)
    return MergeSettings(
        engine=engine,
        seed=check_seed(seed),
        force=force,
        shard_bytes=DEFAULT_SHARD_BYTES if options.shard_bytes is None else options.shard_bytes,
        home=catalog_home(options),
        resume=resume,
        allow_dropped=options.allow_dropped,
        small_files=SmallFileChoice(options.card, options.tokenizer, options.mergekit_config),
        strictness=Strictness(options.strict, options.lenient),
        absolute_paths=choice("--paths", options.paths, PathStyle) is PathStyle.ABSOLUTE,
        base_model_ids=parse_base_model_ids(options.base_model_ids),
    )


def run_settings(
    options: RunOptions,
    seed: int = 0,
    *,
    force: bool = False,
    shard_bytes: int | None = None,
    resume: bool | None = None,
    paths: str = PathStyle.RELATIVE.value,
    base_model_ids: Sequence[str] = (),
) -> MergeSettings:
    """Return the settings of a run whose plan or manifest says what is merged.

    Raises:
        RecipeError: `option.seed`, `option.choice`, `option.base-model-id`.
        LimitError: `memory.address-space`.
    """
    return MergeSettings(
        engine=engine_options(options),
        seed=check_seed(seed),
        force=force,
        shard_bytes=DEFAULT_SHARD_BYTES if shard_bytes is None else shard_bytes,
        home=catalog_home(options),
        resume=resume_of(resume),
        absolute_paths=choice("--paths", paths, PathStyle) is PathStyle.ABSOLUTE,
        base_model_ids=parse_base_model_ids(base_model_ids),
    )


def resume_of(resume: bool | None) -> Resume:
    """Return what to do about an interrupted run: resume it if there is one (None), require one, or begin anew."""
    if resume is None:
        return Resume.AUTO
    return Resume.REQUIRED if resume else Resume.NEVER


@dataclass(frozen=True, slots=True)
class ClusterRequest:
    """A Ray cluster that makes an output, and what the user chose for each task and file; None follows the cluster.

    `home` is the folder of each node in which files grow that go into a bucket; None is that of the node's user.
    """

    address: str | None
    threads: int | None
    memory_bytes: int | None
    shard_bytes: int | None
    home: str | Path | None = None


def cluster_request(
    executor: str, address: str | None, options: RunOptions | MergeOptions, shard_bytes: int | None
) -> ClusterRequest | None:
    """Return the cluster that makes an output; None if this process does.

    Raises:
        RecipeError: `option.choice`, `option.pair`.
    """
    if executor_of(executor, address) is ExecutorName.THREADS:
        return None
    return ClusterRequest(address, options.threads, options.memory_bytes, shard_bytes, options.home)


def output_place(
    out: str | Path | Location, settings: MergeSettings, home: str | Path | None
) -> tuple[Path, MergeSettings]:
    """Return where an output is staged or published on this machine; the settings name the bucket it goes to, if any.

    Raises:
        RecipeError: `location.malformed`; `option.pair`, an option that has no meaning for a bucket.
        OutputError: `output.store`, a store that takes no outputs; `output.single-file`, the name of a file.
    """
    location = Location.of(out)
    refuse_file_name(location)
    if location.is_local:
        return location.without_detours().local_path, settings
    options = {"--force": settings.force}
    check_destination(location, options)
    return staging_place(location, home_of(home)), replace(settings, destination=location)
