"""The manifest of a composite, `mergepipe.json` too: a training checkpoint of parts of several, or an average."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from mergepipe.checkpoints.directory import is_contained
from mergepipe.core.records import RecordFormat, Size, decode, encode
from mergepipe.core.strict_json import digest_of, shown
from mergepipe.errors import MergePipeError
from mergepipe.snapshots.manifest import MANIFEST_FORMAT_NAME, MANIFEST_NAME, MANIFEST_VERSION, record_without_paths
from mergepipe.storage.contract import Store
from mergepipe.storage.file_version import Digested, FileId
from mergepipe.storage.limits import MANIFEST_BYTES
from mergepipe.storage.location import Location

_HEAD_BYTES = 96  # a manifest's format and kind are its first keys


class StepPolicy(StrEnum):
    """The rule that chose a step counter."""

    EXACT = "exact"  # the counter's parameters come from one source: that source's value
    NEWEST = "newest"  # one counter serves parameters of several sources: the largest of their values


class Thoroughness(StrEnum):
    """The extent to which a composite is read back."""

    SAMPLED = "sampled"  # both ends of every contiguous piece
    FULL = "full"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """Counts of compared states, elements, and copies of weights."""

    thoroughness: Thoroughness
    states: Size
    elements: Size
    copies: Size


@dataclass(frozen=True, slots=True)
class UnitSource:
    """A source of a unit. Ages are in steps behind the one training resumes at; a negative one is of a newer part."""

    path: str
    step: int
    age: int


@dataclass(frozen=True, slots=True)
class UnitStaleness:
    """One unit: its sources, and the step counters it resumes with.

    `origin` is the unit that it is in its sources, where that is another: a layer in another place.
    """

    unit: str
    parameters: Size
    sources: tuple[UnitSource, ...]
    adam_steps: tuple[float, ...]
    step_policies: tuple[StepPolicy, ...]
    origin: str = ""


@dataclass(frozen=True, slots=True)
class CompositeInput:
    """One source: its step, the files read and the bytes taken. `role` is skeleton or part."""

    path: str
    step: int
    role: str
    files: tuple[FileId, ...]
    read_bytes: Size


@dataclass(frozen=True, slots=True)
class AverageRecord:
    """How checkpoints were averaged: the scheme's name, each one's weight and step, and the optimizer's state.

    Records of earlier versions have no `steps`.
    """

    scheme: str
    weights: tuple[float, ...]
    optimizer: str
    steps: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ComposedCheckpoint:
    """The format and layout of a composed training checkpoint, its step, and the source of its state."""

    format: str
    framework: str
    stage: int | None
    world_size: Size
    step: int
    state_from: str


@dataclass(frozen=True, slots=True)
class CompositeManifest:
    """The immutable record of one composition or average; `files` are digested as a whole.

    Law: `sid` is the same for the same recipe, version and bytes written.
    """

    version: str
    recipe: str
    checkpoint: ComposedCheckpoint
    inputs: tuple[CompositeInput, ...]
    units: tuple[UnitStaleness, ...]
    files: tuple[Digested, ...]
    self_check: SelfCheck
    realized: Mapping[str, int]
    run: Mapping[str, float]
    average: AverageRecord | None = None

    def __post_init__(self) -> None:
        for file in self.files:
            if not is_contained(file.name):
                raise ValueError(f"the file {shown(file.name)} is not in the folder of the composite")

    @property
    def is_model(self) -> bool:
        """Whether it is an average of weights alone, with no state of an optimizer."""
        return self.average is not None and self.average.optimizer == "none"

    @property
    def sid(self) -> str:
        """32 hex digits: BLAKE3-128 of the recipe, the version and the files' digests."""
        return digest_of({"version": self.version, "recipe": self.recipe, "files": encode(self.files)})

    def to_json(self) -> bytes:
        """Encode as readable JSON with a stable order of keys."""
        return COMPOSITE_FORMAT.to_json(self)

    def without_paths(self, folder: Path | None) -> CompositeManifest:
        """Return the manifest with paths relative to its folder; without one only their last names are left."""
        return decode(CompositeManifest, record_without_paths(encode(self), folder))


COMPOSITE_FORMAT: Final = RecordFormat(
    MANIFEST_FORMAT_NAME, MANIFEST_VERSION, CompositeManifest, "compose it again", stated=("sid",), variant="composite"
)


def is_composite(store: Store, path: Location) -> bool:
    """Whether a directory holds the manifest of a composite."""
    try:
        return COMPOSITE_FORMAT.recognises(store.read_metadata(path / MANIFEST_NAME, 0, _HEAD_BYTES))
    except MergePipeError:
        return False


def read_composite(store: Store, path: Location) -> CompositeManifest:
    """Read the manifest of a composite."""
    manifest = path / MANIFEST_NAME
    return COMPOSITE_FORMAT.parse(store.read_small(manifest, MANIFEST_BYTES), manifest)
