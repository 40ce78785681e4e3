"""The manifest of a snapshot, `mergepipe.json`: a frozen value with its canonical JSON and its id (sid)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from blake3 import blake3

from mergepipe.core.canonical_json import digest_of

MANIFEST_NAME = "mergepipe.json"
CARD_NAME = "README.md"
MANIFEST_VERSION = 4
MANIFEST_FORMAT = f"mergepipe-manifest/{MANIFEST_VERSION}"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file of an input, in the state in which it was read; a `sha256` that was unknown is None, and not written."""

    name: str
    size_bytes: int
    version: str
    header_blake3: str
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class InputRecord:
    """One model that was read: `role` is base or expert; `read_bytes` are the requested bytes of tensor data.

    `path` is absolute here and, unless asked otherwise, relative to the snapshot in its file: see `recorded_paths`.
    `hub_id` is `org/name` or `org/name@commit` where the model is known to be one of the Hub.
    """

    role: str
    model: str
    path: str
    files: tuple[FileRecord, ...]
    content_id: str | None
    read_bytes: int
    hub_id: str | None = None


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One tensor as written: the digest of its blocks, and how it was computed."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    blake3: str
    action: str
    reason: str


@dataclass(frozen=True, slots=True)
class OutputFileRecord:
    """One weight file as written: `blake3` digests the names, dtypes, shapes and digests of its tensors in order."""

    name: str
    size_bytes: int
    blake3: str


@dataclass(frozen=True, slots=True)
class SmallFileRecord:
    """A file of the snapshot that holds no tensors; `blake3` digests its bytes."""

    name: str
    size_bytes: int
    blake3: str


def record_of(name: str, content: bytes) -> SmallFileRecord:
    """The record of a small file's content."""
    return SmallFileRecord(name, len(content), blake3(content).hexdigest(16))


@dataclass(frozen=True, slots=True)
class DroppedRecord:
    """A tensor of an expert that is not in the output."""

    model: str
    tensor: str
    reason: str


@dataclass(frozen=True, slots=True)
class LeftOutFile:
    """A file of the model that lends configuration and tokenizer that is not copied into the snapshot."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class RealizedBytes:
    """Bytes requested from and written to storage."""

    base: int
    expert: int
    analysis: int
    metadata: int
    output: int


@dataclass(frozen=True, slots=True)
class Coverage:
    """The coverage of a planned merge: blocks of the merged tensors in total, blocks read from any expert, per expert.

    `free` blocks equal the base's and need no read; `shared` ones were served by another expert's bytes.
    """

    blocks: int
    touched: int
    read: tuple[int, ...]
    shared: tuple[int, ...]
    free: tuple[int, ...]


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
    seed: int
    inputs: tuple[InputRecord, ...]
    files: tuple[OutputFileRecord, ...]
    tensors: tuple[OutputTensor, ...]
    dropped: tuple[DroppedRecord, ...]
    realized: RealizedBytes
    plan_digest: str | None
    plan: Mapping[str, object] | None
    coverage: Coverage | None
    run: Mapping[str, float | int | str]
    blocks: SmallFileRecord
    sidecars: tuple[SmallFileRecord, ...] = ()
    left_out: tuple[LeftOutFile, ...] = ()

    @property
    def sid(self) -> str:
        """32 hex digits: BLAKE3-128 of the recipe, the seed, the version and the output's digests."""
        identity = {
            "version": self.version,
            "recipe": self.recipe,
            "seed": self.seed,
            "files": [asdict(file) for file in self.files],
        }
        return digest_of(identity)

    def to_json(self) -> bytes:
        """Encode as readable JSON with a stable order of keys."""
        content = {"format": MANIFEST_FORMAT, "sid": self.sid, **asdict(replace(self, plan=None)), "plan": self.plan}
        for file in (file for source in content["inputs"] for file in source["files"]):
            if file["sha256"] is None:
                del file["sha256"]
        content["digest"] = digest_of(content)
        return (json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()
