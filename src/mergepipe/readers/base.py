"""What every reader yields: a checkpoint as named tensors, each one byte range of one file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mergepipe.blocks import DType, element_count


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One stored tensor: `nbytes` bytes at absolute `offset` of `file`, row-major, little-endian."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int

    def __post_init__(self) -> None:
        if self.nbytes != self.n_elements * self.dtype.itemsize:
            raise ValueError(f"{self.name}: {self.shape} {self.dtype.name} is not {self.nbytes} bytes")

    @property
    def n_elements(self) -> int:
        return element_count(self.shape)


@dataclass(frozen=True, slots=True)
class FileFingerprint:
    """What tells that a file is still the one that was looked at; `name` is relative to the checkpoint."""

    name: str
    size_bytes: int
    mtime_ns: int
    header_digest: str  # BLAKE3-128 (32 hex digits) of the safetensors length prefix + header


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Named tensors on storage. `tensors` is in storage order: file by file in order, by offset inside a file.

    `root` is the directory, or the directory that holds a bare file; `sidecars` are the names (relative to `root`,
    sorted) of configuration, tokenizer and chat-template files that belong to the model. A bare file has none.
    """

    path: Path
    root: Path
    tensors: Mapping[str, TensorEntry]
    files: tuple[FileFingerprint, ...]
    sidecars: tuple[str, ...]

    @property
    def tensor_bytes(self) -> int:
        return sum(t.nbytes for t in self.tensors.values())
