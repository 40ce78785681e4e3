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
from mergepipe.storage.location import HUB_SCHEME, Location
from mergepipe.storage.prices import NO_DECODING, DecodingPrices, Price, Speeds, two_digits
from mergepipe.storage.read_speed import MOST_BYTES, measure_reading
from mergepipe.storage.regular import read_small
from mergepipe.storage.traffic import host_of

SPEEDS_NAME = "speeds.json"
HUB_PLACE = f"{HUB_SCHEME}://"
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
    """The unit that the planner prices reads in, and what a request is worth in bytes.

    With a `storage_speed` (bytes a second) storage is not measured, with `request_cost_bytes` requests are not.
    """

    price: Price = Price.BYTES
    storage_speed: float | None = None
    request_cost_bytes: int | None = None

    def speeds(self, inputs: Inputs, store: Store, home: Path | None, threads: int) -> Speeds | None:
        """Return the speeds to price with; None where reads are priced in bytes."""
        if self.price is Price.BYTES:
            return None
        return find_speeds(inputs, store, home, threads, self.storage_speed)

    def request_bytes(self, inputs: Inputs, store: Store) -> tuple[int, ...]:
        """Return the bytes that a request of each expert's files is worth: 0 where they are local.

        Where it was not given the store's terms say it, so that plans do not depend on how fast a link is today.
        """
        costs = [store.terms(inputs.checkpoints[model].path).request_cost_bytes for model in inputs.expert_models]
        given_bytes = self.request_cost_bytes
        return tuple(cost if given_bytes is None or not cost else given_bytes for cost in costs)


BY_BYTES = PriceRequest()


def find_speeds(inputs: Inputs, store: Store, home: Path | None, threads: int, storage_speed: float | None) -> Speeds:
    """Find or measure the speeds for plans by time; with a `storage_speed` (bytes a second) storage is not measured.

    What is not known of this machine and of the place where the base lies is measured: at most 64 MiB of the base are
    read, charged as the base's. It is rounded to two digits and kept in `home`, where there is one, until a larger file
    can be measured.

    Raises:
        StorageError, NotFoundError: the base cannot be read.
    """
    cache = _SpeedCache(home)
    are_packed = any(checkpoint.encoded is not None for checkpoint in inputs.checkpoints)
    decoding = _measured_decode_speed(cache) if are_packed else None
    prices = NO_DECODING if decoding is None else decoding.prices
    words = [] if decoding is None else [f"decoding measured on {decoding.date}"]
    if storage_speed is None:
        reading = _measured_read_speed(cache, inputs, store)
        storage_speed, words = reading.bytes_per_second, [f"storage measured on {reading.date}", *words]
    else:
        words = ["storage as given", *words]
    return Speeds(storage_speed, prices, min(threads, LOCAL_TERMS.most_requests), ", ".join(words))


def _measured_read_speed(cache: _SpeedCache, inputs: Inputs, store: Store) -> _ReadMeasurement:
    sized = [(store.size_bytes(path), path) for path in sorted(files_of(inputs.base.tensors.values()))]
    size_bytes, path = max(sized, key=lambda pair: pair[0], default=(0, inputs.base.path))
    if size_bytes < DIRECT_ALIGNMENT_BYTES:
        return _ReadMeasurement(two_digits(1e9), _utc_date(), 0)  # too small to measure, and to matter
    place, measured_bytes = mount_of(path), min(size_bytes, MOST_BYTES)
    measurement = cache.read_speed(place)
    if measurement is None or measurement.measured_bytes < measured_bytes:
        bytes_per_second = two_digits(measure_reading(store, path, Purpose.BASE))
        measurement = _ReadMeasurement(bytes_per_second, _utc_date(), measured_bytes)
        cache.keep_read_speed(place, measurement)
    return measurement


def _measured_decode_speed(cache: _SpeedCache) -> _DecodeMeasurement:
    measurement = cache.decode_speed()
    if measurement is None:
        from mergepipe.deltastore.decode_speed import measure_decoding  # compiled: imported only when needed

        measurement = _DecodeMeasurement(measure_decoding(), _utc_date())
        cache.keep_decode_speed(measurement)
    return measurement


def mount_of(location: Location) -> str:
    """Name what is measured as one: the mount point of a local file's file system, elsewhere the bucket or host.

    All models of the Hub come from the same hosts.
    """
    if not location.is_local:
        return HUB_PLACE if location.scheme == HUB_SCHEME else host_of(location)
    real = location.local_path.resolve()
    return str(next((parent for parent in real.parents if os.path.ismount(parent)), real.parent))


def _utc_date() -> str:
    return datetime.now(UTC).date().isoformat()


class _SpeedCache:
    """A cache file of measured speeds by machine. It may be deleted; what cannot be parsed is measured again."""

    def __init__(self, home: Path | None) -> None:
        self._path = None if home is None else home / SPEEDS_NAME
        self._machine = platform.node() or "this machine"

    def read_speed(self, place: str) -> _ReadMeasurement | None:
        """Look up the read speed of a mount point; None if it is missing."""
        record = _inside(self._of_machine(), "storage", place)
        try:
            speed, size = float(str(record["bytes_per_second"])), int(str(record["measured_bytes"]))
            reading = _ReadMeasurement(speed, str(record["measured"]), size)
            Speeds(reading.bytes_per_second, NO_DECODING, 1, "")
        except (KeyError, ValueError):
            return None
        return reading

    def decode_speed(self) -> _DecodeMeasurement | None:
        """Look up the decoding speeds of this version of the program; None if they are missing."""
        record = _inside(self._of_machine(), "decoding", mergepipe.__version__)
        try:
            prices = DecodingPrices(
                {
                    kind: tuple(float(str(value)) for value in nanoseconds)
                    for kind, nanoseconds in _inside(record, "nanoseconds").items()
                    if isinstance(nanoseconds, list)
                }
            )
            return _DecodeMeasurement(prices, str(record["measured"])) if prices.nanoseconds else None
        except (KeyError, ValueError):
            return None

    def keep_read_speed(self, place: str, reading: _ReadMeasurement) -> None:
        """Store a read speed, if there is a cache file."""
        said = {
            "bytes_per_second": reading.bytes_per_second,
            "measured": reading.date,
            "measured_bytes": reading.measured_bytes,
        }
        self._keep("storage", place, said)

    def keep_decode_speed(self, decoding: _DecodeMeasurement) -> None:
        """Store decoding speeds, if there is a cache file, in place of those of other versions."""
        table = {kind: list(nanoseconds) for kind, nanoseconds in decoding.prices.nanoseconds.items()}
        self._keep("decoding", mergepipe.__version__, {"nanoseconds": table, "measured": decoding.date}, alone=True)

    def _keep(self, part: str, key: str, said: Mapping[str, object], *, alone: bool = False) -> None:
        if self._path is None:
            return
        machines = dict(_inside(self._document(), "machines"))
        machine = dict(_inside(machines, self._machine))
        machine[part] = {key: said} if alone else {**_inside(machine, part), key: said}
        content = {"format": SPEEDS_FORMAT, "machines": {**machines, self._machine: machine}}
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
        value = document.get(key)
        document = value if isinstance(value, dict) else {}
    return document
