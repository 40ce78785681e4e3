"""The settings of a run, and how the options of a call give them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from mergepipe.engine.work import EngineOptions
from mergepipe.errors import OutputError
from mergepipe.options import MergeOptions, OutputOptions, PathStyle, catalog_home, check_seed, engine_options, home_of
from mergepipe.recipes.fields import USUAL, Strictness
from mergepipe.runs.model_card import BaseModelIds, parse_base_model_ids
from mergepipe.runs.progress import Resume
from mergepipe.runs.small_files import EVERY_SMALL_FILE, SmallFileChoice
from mergepipe.snapshots.manifest import BESIDE, FILE_SUFFIXES
from mergepipe.snapshots.shards import SINGLE_NAME, index_name
from mergepipe.storage.location import Location

_OTHER_SUFFIXES: Final = (*FILE_SUFFIXES, ".bin", ".pt", ".pth", ".ckpt", ".onnx")
NO_IDS = BaseModelIds()


@dataclass(frozen=True, slots=True)
class MergeSettings:
    """Settings of one merge run. `home` is the catalog's directory; None runs without a catalog.

    `strictness` says whether what has no effect in a recipe is refused, and what an interrupted run leaves to be read
    beyond the budget. With a `plan_key` the plan is kept beside the unfinished output, see `stored_plan`. With a
    `destination` in a bucket the output goes there, and is staged on this machine. With `absolute_paths` the snapshot's
    files name inputs by their absolute paths. `base_model_ids` are ids on the Hub that the user states.
    `tried_expert_bytes` were read under budgets of which the result was not good enough. `file` is the name of an
    output that is one file.
    """

    engine: EngineOptions
    seed: int
    force: bool
    shard_bytes: int | None
    home: Path | None
    resume: Resume = Resume.AUTO
    allow_dropped: tuple[str, ...] = ()
    small_files: SmallFileChoice = EVERY_SMALL_FILE
    strictness: Strictness = USUAL
    plan_key: str = ""
    destination: Location | None = None
    absolute_paths: bool = False
    base_model_ids: BaseModelIds = NO_IDS
    tried_expert_bytes: int = 0
    file: str = ""

    @property
    def beside(self) -> str:
        """How the manifest names weight files before their own names."""
        return BESIDE if self.file else ""


def merge_settings(options: MergeOptions) -> MergeSettings:
    """Return the settings of a merge."""
    return replace(
        run_settings(options, options.seed),
        allow_dropped=options.allow_dropped,
        small_files=SmallFileChoice(options.card, options.tokenizer, options.mergekit_config),
        strictness=Strictness(options.strict, options.lenient),
    )


def run_settings(options: OutputOptions, seed: int) -> MergeSettings:
    """Return the settings of a run whose plan or manifest says what is merged. Raises as `merge_settings`."""
    return MergeSettings(
        engine=engine_options(options),
        seed=check_seed(seed),
        force=options.force,
        shard_bytes=options.shard_bytes,
        home=catalog_home(options),
        resume=resume_of(options.resume),
        strictness=Strictness(strict=options.strict),
        absolute_paths=options.paths == PathStyle.ABSOLUTE,
        base_model_ids=parse_base_model_ids(options.base_model_ids),
    )


def resume_of(resume: bool | None) -> Resume:
    """Return what to do about an interrupted run: resume it if there is one (None), require one, or begin anew."""
    if resume is None:
        return Resume.AUTO
    return Resume.REQUIRED if resume else Resume.NEVER


def output_place(
    out: str | Path | Location, settings: MergeSettings, home: str | Path | None
) -> tuple[Path, MergeSettings]:
    """Return where an output is staged or published on this machine; settings name the bucket it goes to, if any."""
    location = Location.of(out)
    if location.suffix in FILE_SUFFIXES and location.is_local and not index_name(location.name):
        return location.without_detours().local_path, replace(settings, file=location.name)
    if location.suffix in _OTHER_SUFFIXES:
        message = f"is the name of a file; the output is a folder that holds {SINGLE_NAME}"
        raise OutputError.of("output.place", location, message, f"write {location.parent / location.stem}")
    if location.is_local:
        return location.without_detours().local_path, settings
    from mergepipe.snapshots.object_upload import check_destination, staging_place

    check_destination(location, force=settings.force)
    return staging_place(location, home_of(home)), replace(settings, destination=location)
