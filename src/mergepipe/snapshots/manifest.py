"""The manifest of a snapshot, `mergepipe.json`: a frozen value with its canonical JSON and its id (sid)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final

from mergepipe.core.canonical_json import digest_of
from mergepipe.core.notices import DroppedTensor
from mergepipe.core.records import RecordFormat, Seed, Size, encode
from mergepipe.storage.file_version import Digested, FileId
from mergepipe.storage.ledger import Purpose, Usage

MANIFEST_NAME = "mergepipe.json"
CARD_NAME = "README.md"
MANIFEST_FORMAT_NAME = "mergepipe-manifest"
MANIFEST_VERSION = 5
"""Of the one format of manifests, of which each `kind` has its own record: snapshot, composite, pack, partial."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One model that a snapshot was made from: `role` is base or expert, `read_bytes` of its tensors were requested.

    `path` is as recorded; `sid` is set where the model was a snapshot itself, and that is known.
    """

    role: str
    model: str
    path: str
    content_id: str | None
    read_bytes: Size
    sid: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRecord(Input):
    """An input in a manifest, with its files as they were read.

    `path` is absolute here and, unless asked otherwise, relative to the snapshot in its file: see `recorded_paths`.
    `hub_id` is `org/name` or `org/name@commit` where the model is known to be one of the Hub.
    """

    files: tuple[FileId, ...]
    hub_id: str | None = None


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One tensor as written: the digest of its blocks, and how it was computed."""

    name: str
    dtype: str
    shape: tuple[Size, ...]
    file: str
    blake3: str
    action: str
    reason: str


@dataclass(frozen=True, slots=True)
class LeftOutFile:
    """A file of the model that lends configuration and tokenizer that is not copied into the snapshot."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class RealizedBytes:
    """Bytes requested from and written to storage."""

    base: Size
    expert: Size
    analysis: Size
    metadata: Size
    output: Size

    @classmethod
    def of(cls, usage: Usage) -> RealizedBytes:
        """Sum what was used by purpose."""
        return cls(**{field.name: usage[Purpose(field.name)] for field in fields(cls)})


@dataclass(frozen=True, slots=True)
class Coverage:
    """The coverage of a planned merge: blocks of the merged tensors in total, blocks read from any expert, per expert.

    `free` blocks equal the base's and need no read.
    """

    blocks: Size
    touched: Size
    read: tuple[Size, ...]
    free: tuple[Size, ...]


NOTICES_KEY = "recipe_notices"  # in `Manifest.run`: what has no effect in the recipe, a line each

BASE_MODEL_IDS_KEY = "base_model_ids"  # in `Manifest.run`: Hub ids that were stated of the merge, between spaces


@dataclass(frozen=True, slots=True)
class Manifest:
    """The immutable record of one merge. `sid` identifies the result; `run` describes the run and is not part of it.

    `plan` is the whole plan of a merge under a budget: its runs of blocks are the touch map.
    `blocks` is the table of block digests and `sidecars` are the other small files,
    `left_out` those of the base that were not copied.

    Law: `Manifest.sid` is the same for the same recipe, seed, inputs and version, whatever the run.
    """

    version: str
    operator: str
    recipe: str
    seed: Seed
    inputs: tuple[InputRecord, ...]
    files: tuple[Digested, ...]
    tensors: tuple[OutputTensor, ...]
    dropped: tuple[DroppedTensor, ...]
    realized: RealizedBytes
    plan_digest: str | None
    plan: Mapping[str, object] | None
    coverage: Coverage | None
    run: Mapping[str, float | int | str]
    blocks: Digested
    sidecars: tuple[Digested, ...] = ()
    left_out: tuple[LeftOutFile, ...] = ()

    @property
    def sid(self) -> str:
        """32 hex digits: BLAKE3-128 of the recipe, the seed, the version and the output's digests."""
        identity = {
            "version": self.version,
            "recipe": self.recipe,
            "seed": self.seed,
            "files": encode(self.files),
        }
        return digest_of(identity)

    def to_json(self) -> bytes:
        """Encode as readable JSON with a stable order of keys. Law: `parse_manifest(m.to_json(), where) == m`."""
        return MANIFEST_FORMAT.to_json(self)


MANIFEST_FORMAT: Final = RecordFormat(
    MANIFEST_FORMAT_NAME,
    MANIFEST_VERSION,
    Manifest,
    "merge again",
    stated=("sid",),
    variant="snapshot",
    elsewhere="`mergepipe tailor inspect` says what a composite holds",
)


def parse_manifest(raw: bytes, where: object = "manifest") -> Manifest:
    """Parse the output of `Manifest.to_json`.

    Raises:
        CorruptError: `format.damaged`, it is damaged, or another kind of file.
        UnsupportedError: `format.version`.
    """
    return MANIFEST_FORMAT.parse(raw, where)
