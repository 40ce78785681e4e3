"""Use the catalog where there is one: its first failure becomes a notice; look up statistics by content."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from mergepipe.catalog.catalog import Catalog
from mergepipe.catalog.database import is_catalog_error
from mergepipe.catalog.statistics_file import STATISTICS_NAME, StatisticsFile, parse_statistics, statistics_path
from mergepipe.checkpoints.content_id import content_digest
from mergepipe.checkpoints.contract import Checkpoint
from mergepipe.errors import MergePipeError
from mergepipe.operators.statistics import TensorStatistics
from mergepipe.storage.contract import Store, is_file
from mergepipe.storage.limits import STATISTICS_BYTES
from mergepipe.storage.location import Location

T = TypeVar("T")


class CatalogLink:
    """An optional catalog: its first failure becomes a notice, and from then on it is not used.

    Where it is `required`, trouble is an error.
    """

    def __init__(self, home: Path | None, *, required: bool = False) -> None:
        self.notices: list[str] = []
        self._home = home
        self._required = required
        self._catalog: Catalog | None = None

    @property
    def home(self) -> Path | None:
        """The catalog's directory; None where it is not used."""
        return self._home

    def use(self, action: Callable[[Catalog], T]) -> T | None:
        """Call `action` with the catalog, opening it on first use; return None where no catalog is usable."""
        if self._home is None:
            return None
        try:
            if self._catalog is None:
                self._catalog = Catalog.open(self._home)
            return action(self._catalog)
        except MergePipeError as error:
            if self._required or not is_catalog_error(error):
                raise
            self.notices.append(f"the catalog is not used: {error}")
            self.close()
            return None

    def close(self) -> None:
        """Close the catalog; nothing is recorded afterwards."""
        self._home = None
        if self._catalog is not None:
            catalog, self._catalog = self._catalog, None
            catalog.close()


_NOTHING: Mapping[str, TensorStatistics] = {}


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

    def file(self, expert: Checkpoint, base: Checkpoint) -> StatisticsFile | None:
        """Return what is on record of an expert against a base; None if nothing is."""
        place = expert.root / STATISTICS_NAME if self._beside else None
        return self.of_contents(content_digest(expert), content_digest(base), place)

    def of_contents(self, expert: str | None, base: str | None, place: Location | None = None) -> StatisticsFile | None:
        """Return what is on record of a content against a base's, by their digests; None if nothing is."""
        if expert is None or base is None:
            return None
        home = None if self._home is None else Location.local(statistics_path(self._home, expert, base))
        files = (self._read(where) for where in (home, place) if where is not None)
        return next((f for f in files if f is not None and (f.expert.digest, f.base.digest) == (expert, base)), None)

    def tensors(self, expert: Checkpoint, base: Checkpoint) -> Mapping[str, TensorStatistics]:
        """Return the statistics of an expert's tensors against a base's, by name."""
        file = self.file(expert, base)
        return _NOTHING if file is None else file.tensors

    def _read(self, place: Location) -> StatisticsFile | None:
        if place not in self._files:
            self._files[place] = None
            try:
                if is_file(self._store, place):
                    self._files[place] = parse_statistics(self._store.read_small(place, STATISTICS_BYTES), place)
            except MergePipeError as error:
                self._notices.append(f"statistics are not used: {error}")
        return self._files[place]
