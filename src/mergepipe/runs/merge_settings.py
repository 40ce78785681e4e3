"""The settings of a run of a merge, and how the options of a call give them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from mergepipe.engine.work import EngineOptions
from mergepipe.errors import RecipeError
from mergepipe.options import MergeOptions, catalog_home, engine_options, home_of
from mergepipe.reports import ProgressCallback
from mergepipe.runs.model_card import BaseModelIds, parse_base_model_ids
from mergepipe.snapshots.manifest import FILE_SUFFIXES
from mergepipe.snapshots.shards import index_name
from mergepipe.storage.contract import BESIDE
from mergepipe.storage.location import Location
from mergepipe.storage.output_places import ANYWHERE, output_place, refuse_file_name

NO_IDS = BaseModelIds()


@dataclass(frozen=True, slots=True)
class MergeSettings:
    """One merge run: its options, and where it publishes: at `out`; for a remote `destination` it stages there.

    `base_model_ids` are ids on the Hub that the user states. `file` is the name of an output that is one file. With a
    `plan_key` the plan is kept beside the unfinished output, see `stored_plan`. `tried_expert_bytes` were read under
    budgets of which the result was not good enough. `started` is when the run began, by `perf_counter`.
    """

    options: MergeOptions
    engine: EngineOptions
    base_model_ids: BaseModelIds = NO_IDS
    on_progress: ProgressCallback | None = None
    out: Path = Path()
    destination: Location | None = None
    file: str = ""
    plan_key: str = ""
    tried_expert_bytes: int = 0
    started: float = field(default_factory=time.perf_counter)

    @property
    def home(self) -> Path | None:
        """The catalog's directory; None runs without a catalog."""
        return catalog_home(self.options)

    @property
    def begun_anew(self) -> MergeSettings:
        """The settings of a run that resumes none."""
        return replace(self, options=replace(self.options, resume=False))

    @property
    def place(self) -> Path | Location:
        """Where the output is published."""
        return self.destination or self.out

    @property
    def beside(self) -> str:
        """How the manifest names weight files before their own names."""
        return BESIDE if self.file else ""


def settings_without_output(options: MergeOptions, on_progress: ProgressCallback | None = None) -> MergeSettings:
    """Return the settings of a merge, which begins now, into a place that the caller adds."""
    return MergeSettings(options, engine_options(options), parse_base_model_ids(options.base_model_ids), on_progress)


def merge_settings(
    options: MergeOptions, out: str | Path, on_progress: ProgressCallback | None = None
) -> MergeSettings:
    """Return the settings of a merge into `out`, which begins now; an output in a bucket is staged on this machine."""
    settings = settings_without_output(options, on_progress)
    location = output_place(out, ANYWHERE)
    is_file_name = location.suffix in FILE_SUFFIXES and location.is_local and not index_name(location.name)
    if not is_file_name:
        refuse_file_name(location)
    elif settings.options.shard_bytes is not None:
        message = "is one file, and a size of shards is given"
        raise RecipeError.of("option.conflict", location, message, "leave the size out, or name a folder")
    if location.is_local:
        return replace(settings, out=location.without_detours().local_path, file=location.name if is_file_name else "")
    from mergepipe.snapshots.object_upload import check_replaceable, staging_place

    check_replaceable(location, force=settings.options.force)
    return replace(settings, out=staging_place(location, home_of(settings.options.home)), destination=location)
