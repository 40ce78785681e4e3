"""What a home folder has on record of experts against their base."""

from __future__ import annotations

from pathlib import Path

from mergepipe import Catalog
from mergepipe.catalog.statistics_file import StatisticsFile
from mergepipe.checkpoints.contract import Checkpoint
from mergepipe.runs.inputs import open_path
from mergepipe.runs.known_statistics import KnownStatistics
from mergepipe.storage.local import LocalStore
from mergepipe.storage.location import Location


def opened_with_digests(home: Path, place: Path, base: Checkpoint | None = None) -> Checkpoint:
    """A model with the digests of its files that the home folder knows."""
    return Catalog(home).with_known_digests(open_path(LocalStore(), Location.local(place), base))


def statistics_on_record(home: Path, base: Path, expert: Path) -> StatisticsFile | None:
    """The file of statistics of an expert against a base; None where there is none, or a digest is not known."""
    opened = opened_with_digests(home, base)
    notices: list[str] = []
    file = KnownStatistics(LocalStore(), home, notices, beside=False).file(
        opened_with_digests(home, expert, opened), opened
    )
    assert not notices
    return file
