"""The manifest of a composite: its inputs, the staleness of each unit, digests of every file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from blake3 import blake3

from mergepipe.core.canonical_json import digest_of
from mergepipe.core.strict_json import JsonValue
from mergepipe.errors import NotFoundError
from mergepipe.snapshots.manifest_json import COMPOSITE_NAME
from mergepipe.snapshots.recorded_paths import record_without_paths
from mergepipe.storage.contract import Store
from mergepipe.storage.location import Location
from mergepipe.tailor.assignment import Assignment, UnitStaleness
from mergepipe.tailor.copy_writer import WrittenFile
from mergepipe.tailor.self_check import SelfCheck

COMPOSITE_FORMAT = f"{COMPOSITE_NAME}/1"
_HEAD_BYTES = 4096
_TAIL_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A source file as it was found.

    `version` is as `version_of` makes it. `edges_blake3` digests its first 4 KiB and its last 64 KiB, which in
    torch.save archives hold the checksum of every tensor.
    """

    name: str
    size_bytes: int
    version: str
    edges_blake3: str


def fingerprint(store: Store, base: Location, path: Location) -> Fingerprint:
    """Fingerprint one file; `base` is the checkpoint its name is relative to."""
    status = store.stat(path)
    if status is None:
        raise NotFoundError.of("storage.not-found", path, "no such file", "check the path")
    digest = blake3(store.read_metadata(path, 0, _HEAD_BYTES))
    if status.size_bytes > _HEAD_BYTES:
        digest.update(store.read_metadata(path, max(_HEAD_BYTES, status.size_bytes - _TAIL_BYTES), _TAIL_BYTES))
    name = path.relative_to(base).as_posix() if path.is_relative_to(base) else str(path)
    return Fingerprint(name, status.size_bytes, status.version, digest.hexdigest(16))


@dataclass(frozen=True, slots=True)
class CompositeInput:
    """One source: its step, the files read and the bytes taken."""

    path: Location
    step: int
    is_skeleton: bool
    files: tuple[Fingerprint, ...]
    read_bytes: int


@dataclass(frozen=True, slots=True)
class AverageRecord:
    """How checkpoints were averaged: the scheme's name, each one's weight, and what became of the optimizer's state."""

    scheme: str
    weights: tuple[float, ...]
    optimizer: str


@dataclass(frozen=True, slots=True)
class CompositeManifest:
    """The immutable record of one composition.

    Law: `sid` is the same for the same recipe, version and bytes written.
    """

    version: str
    recipe: str
    assignment: Assignment
    inputs: tuple[CompositeInput, ...]
    units: tuple[UnitStaleness, ...]
    files: tuple[WrittenFile, ...]
    self_check: SelfCheck
    realized: Mapping[str, int]
    seconds: float
    average: AverageRecord | None = None

    @property
    def sid(self) -> str:
        """32 hex digits: BLAKE3-128 of the recipe, the version and the files' digests."""
        return digest_of({"version": self.version, "recipe": self.recipe, "files": [asdict(f) for f in self.files]})

    @property
    def _kind(self) -> str:
        if self.average is None:
            return "composite"
        return "averaged-model" if self.average.optimizer == "none" else "averaged-checkpoint"

    def to_json(self, out: Path) -> bytes:
        """Readable JSON with a stable order of keys; paths are relative to the composite's folder `out`."""
        skeleton = self.assignment.skeleton
        content: dict[str, JsonValue] = {
            "format": COMPOSITE_FORMAT,
            "kind": self._kind,
            "sid": self.sid,
            "version": self.version,
            "recipe": self.recipe,
            "checkpoint": {
                "format": skeleton.format,
                "framework": skeleton.framework.value,
                "stage": skeleton.stage,
                "world_size": skeleton.world_size,
                "step": self.assignment.state.step,
                "state_from": str(self.assignment.state.path),
            },
            **({"average": asdict(self.average)} if self.average is not None else {}),
            "inputs": [_input_json(checkpoint) for checkpoint in self.inputs],
            "units": [unit.to_json() for unit in self.units],
            "files": [asdict(file) for file in self.files],
            "self_check": {**asdict(self.self_check), "thoroughness": self.self_check.thoroughness.value},
            "realized": dict(self.realized),
            "run": {"seconds": self.seconds},
        }
        recorded = record_without_paths(content, out)
        return (json.dumps(recorded, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _input_json(source: CompositeInput) -> JsonValue:
    return {
        "path": str(source.path),
        "step": source.step,
        "role": "skeleton" if source.is_skeleton else "part",
        "read_bytes": source.read_bytes,
        "files": [asdict(file) for file in source.files],
    }
