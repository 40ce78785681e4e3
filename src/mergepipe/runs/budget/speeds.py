"""Measure how fast this machine reads storage and decodes packed blocks; cache the speeds in the catalog's home."""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import mergepipe
from mergepipe.checkpoints.contract import files_of
from mergepipe.errors import MergePipeError
from mergepipe.runs.inputs.opened import Inputs
from mergepipe.storage import owned
from mergepipe.storage.contract import Store
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.limits import SPEEDS_BYTES
from mergepipe.storage.local import DIRECT_ALIGNMENT_BYTES, LOCAL_TERMS
from mergepipe.storage.location import Location
from mergepipe.storage.prices import NO_DECODING, DecodingPrices, Price, Speeds, two_digits
from mergepipe.storage.read_speed import MOST_BYTES, measure_reading
from mergepipe.storage.regular import read_small

SPEEDS_NAME = "speeds.json"
SPEEDS_FORMAT = "mergepipe-speeds/1"


@dataclass(frozen=True, slots=True)
class _ReadMeasurement:
    bytes_per_second: float
    date: str
    measured_bytes: int  # of a few it says how long a request takes, not how fast a model is read


@dataclass(frozen=True, slots=True)
class _DecodeMeasurement:
    prices: DecodingPrices
    date: str


@dataclass(frozen=True, slots=True)
class PriceRequest:
    """The unit that the planner prices reads in. With a `storage_speed` (bytes a second) storage is not measured."""

    price: Price = Price.BYTES
    storage_speed: float | None = None

    def speeds(self, inputs: Inputs, store: Store, home: Path | None, threads: int) -> Speeds | None:
        """Return the speeds to price with; None where reads are priced in bytes."""
        if self.price is Price.BYTES:
            return None
        return find_speeds(inputs, store, home, threads, self.storage_speed)


BY_BYTES = PriceRequest()


def find_speeds(inputs: Inputs, store: Store, home: Path | None, threads: int, storage_speed: float | None) -> Speeds:
    """Find or measure the speeds for plans by time; with a `storage_speed` (bytes a second) storage is not measured.

    What is not known of this machine and of the place where the base lies is measured: at most 64 MiB of the base are
    read, charged as the base's. It is rounded to two digits and kept in `home`, where there is one, until a larger file
    can be measured.

    Raises:
        StorageError, NotFoundError: the base cannot be read.
    """
    kept = _SpeedCache(home)
    decoding = _measured_decode_speed(kept) if any(each.encoded is not None for each in inputs.checkpoints) else None
    prices = NO_DECODING if decoding is None else decoding.prices
    words = [] if decoding is None else [f"decoding measured on {decoding.date}"]
    if storage_speed is None:
        reading = _measured_read_speed(kept, inputs, store)
        storage_speed, words = reading.bytes_per_second, [f"storage measured on {reading.date}", *words]
    else:
        words = ["storage as given", *words]
    return Speeds(storage_speed, prices, min(threads, LOCAL_TERMS.most_requests), ", ".join(words))


def _measured_read_speed(kept: _SpeedCache, inputs: Inputs, store: Store) -> _ReadMeasurement:
    sized = [(store.size_bytes(path), path) for path in sorted(files_of(inputs.base.tensors.values()))]
    size_bytes, path = max(sized, key=lambda each: each[0], default=(0, inputs.base.path))
    if size_bytes < DIRECT_ALIGNMENT_BYTES:
        return _ReadMeasurement(two_digits(1e9), _utc_date(), 0)  # too small to measure, and to matter
    place, measured_bytes = mount_of(path), min(size_bytes, MOST_BYTES)
    found = kept.reading(place)
    if found is None or found.measured_bytes < measured_bytes:
        found = _ReadMeasurement(two_digits(measure_reading(store, path, Purpose.BASE)), _utc_date(), measured_bytes)
        kept.keep_reading(place, found)
    return found


def _measured_decode_speed(kept: _SpeedCache) -> _DecodeMeasurement:
    found = kept.decoding()
    if found is None:
        from mergepipe.deltastore.decode_speed import measure_decoding  # compiled: imported only when needed

        found = _DecodeMeasurement(measure_decoding(), _utc_date())
        kept.keep_decoding(found)
    return found


def mount_of(location: Location) -> str:
    """Name what is measured as one: the mount point of a local file's file system, elsewhere the bucket or host."""
    if not location.is_local:
        return f"{location.scheme}://{location.root}"
    real = location.local_path.resolve()
    return str(next((parent for parent in real.parents if os.path.ismount(parent)), real.parent))


def _utc_date() -> str:
    return datetime.now(UTC).date().isoformat()


class _SpeedCache:
    """A cache file of measured speeds by machine. It may be deleted; what cannot be parsed is measured again."""

    def __init__(self, home: Path | None) -> None:
        self._path = None if home is None else home / SPEEDS_NAME
        self._machine = platform.node() or "this machine"

    def reading(self, place: str) -> _ReadMeasurement | None:
        """Look up the read speed of a mount point; None if it is missing."""
        found = _inside(self._of_machine(), "storage", place)
        try:
            speed, size = float(str(found["bytes_per_second"])), int(str(found["measured_bytes"]))
            reading = _ReadMeasurement(speed, str(found["measured"]), size)
            Speeds(reading.bytes_per_second, NO_DECODING, 1, "")
        except (KeyError, ValueError):
            return None
        return reading

    def decoding(self) -> _DecodeMeasurement | None:
        """Look up the decoding speeds of this version of the program; None if they are missing."""
        found = _inside(self._of_machine(), "decoding", mergepipe.__version__)
        try:
            prices = DecodingPrices(
                {
                    kind: tuple(float(str(value)) for value in each)
                    for kind, each in _inside(found, "nanoseconds").items()
                    if isinstance(each, list)
                }
            )
            return _DecodeMeasurement(prices, str(found["measured"])) if prices.nanoseconds else None
        except (KeyError, ValueError):
            return None

    def keep_reading(self, place: str, reading: _ReadMeasurement) -> None:
        """Store a read speed, if there is a cache file."""
        said = {
            "bytes_per_second": reading.bytes_per_second,
            "measured": reading.date,
            "measured_bytes": reading.measured_bytes,
        }
        self._keep("storage", place, said)

    def keep_decoding(self, decoding: _DecodeMeasurement) -> None:
        """Store decoding speeds, if there is a cache file, in place of those of other versions."""
        table = {kind: list(each) for kind, each in decoding.prices.nanoseconds.items()}
        self._keep("decoding", mergepipe.__version__, {"nanoseconds": table, "measured": decoding.date}, alone=True)

    def _keep(self, part: str, key: str, said: Mapping[str, object], *, alone: bool = False) -> None:
        if self._path is None:
            return
        machines = dict(_inside(self._document(), "machines"))
        own = dict(_inside(machines, self._machine))
        own[part] = {key: said} if alone else {**_inside(own, part), key: said}
        content = {"format": SPEEDS_FORMAT, "machines": {**machines, self._machine: own}}
        with contextlib.suppress(OSError, MergePipeError):  # the next run measures again
            owned.make_folders(self._path.parent)
            owned.replace_file(
                self._path, (json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()
            )

    def _of_machine(self) -> Mapping[str, object]:
        return _inside(self._document(), "machines", self._machine)

    def _document(self) -> Mapping[str, object]:
        if self._path is None:
            return {}
        try:
            document = json.loads(read_small(self._path, SPEEDS_BYTES))
        except (MergePipeError, ValueError, RecursionError):
            return {}
        is_known = isinstance(document, dict) and document.get("format") == SPEEDS_FORMAT
        return document if is_known else {}


def _inside(document: Mapping[str, object], *keys: str) -> Mapping[str, object]:
    """Return the JSON object at a path of keys; empty where there is none."""
    for key in keys:
        found = document.get(key)
        document = found if isinstance(found, dict) else {}
    return document
