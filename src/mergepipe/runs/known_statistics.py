"""The statistics on record of experts, found by the content of an expert and of its base."""

from __future__ import annotations

from pathlib import Path

from mergepipe.catalog.statistics_file import STATISTICS_NAME, StatisticsFile, parse_statistics, statistics_path
from mergepipe.checkpoints.content_id import content_digest
from mergepipe.checkpoints.contract import Checkpoint
from mergepipe.errors import MergePipeError
from mergepipe.operators.statistics import TensorStatistics
from mergepipe.recipes.tasks import MergeTask
from mergepipe.runs.inputs import Inputs
from mergepipe.storage.contract import STATISTICS_BYTES, Store, is_file
from mergepipe.storage.location import Location


class KnownStatistics:
    """The statistics on record of experts whose content, and their base's, is known; digests are not taken here.

    Those of the `home` folder are an analysis made there, or a file that its owner put there. With `beside`, a file
    `mergepipe.stats` in an expert's folder counts too, for the content that this very expert has: of other models such
    a file proves nothing. What is wrong with a file becomes one of `notices`, and the file is not used.
    """

    def __init__(self, store: Store, home: Path | None, notices: list[str], *, beside: bool) -> None:
        self._store = store
        self._home = home
        self._notices = notices
        self._beside = beside
        self._files: dict[Location, StatisticsFile | None] = {}
        self._pairs: dict[tuple[int, int], tuple[StatisticsFile | None, Checkpoint, Checkpoint]] = {}

    def file(self, expert: Checkpoint, base: Checkpoint) -> StatisticsFile | None:
        """Return what is on record of an expert against a base; None if nothing is."""
        pair = id(expert), id(base)
        if pair not in self._pairs:
            place = expert.root / STATISTICS_NAME if self._beside else None
            file = self.of_contents(content_digest(expert), content_digest(base), place)
            self._pairs[pair] = file, expert, base  # which live as long as their ids are keys
        return self._pairs[pair][0]

    def of_task(self, inputs: Inputs, task: MergeTask, slot: int) -> TensorStatistics | None:
        """Return what is on record of one expert of a task."""
        name = inputs.pair_name(task, slot)
        models = (task.expert_models[slot], task.base_model)
        file = None if name is None else self.file(*(inputs.checkpoints[model] for model in models))
        statistics = None if file is None or name is None else file.tensors.get(name)
        fits = statistics is not None and statistics.grid.n_elements == task.base.n_elements
        return statistics if fits else None

    def of_contents(self, expert: str | None, base: str | None, place: Location | None = None) -> StatisticsFile | None:
        """Return what is on record of a content against a base's, by their digests; None if nothing is."""
        if expert is None or base is None:
            return None
        home = None if self._home is None else Location.local(statistics_path(self._home, expert, base))
        files = (self._read(where) for where in (home, place) if where is not None)
        return next((f for f in files if f is not None and (f.expert.digest, f.base.digest) == (expert, base)), None)

    def _read(self, place: Location) -> StatisticsFile | None:
        if place not in self._files:
            self._files[place] = None
            try:
                if is_file(self._store, place):
                    self._files[place] = parse_statistics(self._store.read_small(place, STATISTICS_BYTES), place)
            except MergePipeError as error:
                self._notices.append(f"statistics are not used: {error}")
        return self._files[place]
