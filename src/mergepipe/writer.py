"""Sharded safetensors output: the layout of every shard first, then one pass that writes and digests it."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from mergepipe.blocks import DEFAULT_BLOCK_ELEMENTS, DType, element_count
from mergepipe.budget import Ledger
from mergepipe.storage.buffers import round_up
from mergepipe.storage.output import OutputFile

DATA_ALIGNMENT_BYTES = 4096
DIGEST_BYTES = 16
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to be written."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return element_count(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """One output file: its name, its tensors in file order, and its header (length prefix included).

    Tensors stand by descending element size, so that each is aligned to its own elements without holes; the header is
    padded so that the data starts on a page.
    """

    name: str
    tensors: tuple[TensorSpec, ...]
    header: bytes

    @property
    def file_bytes(self) -> int:
        return len(self.header) + sum(t.nbytes for t in self.tensors)


def plan_shards(specs: Sequence[TensorSpec], shard_bytes: int) -> tuple[ShardLayout, ...]:
    """Fill shards of at most `shard_bytes` of tensor data in the given order; a larger tensor gets a shard of its own.

    Law: the tensors of all shards are exactly `specs`, each once.
    """
    groups: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in specs:
        if groups[-1] and filled + spec.nbytes > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(spec)
        filled += spec.nbytes
    n = len(groups)
    names = [SINGLE_NAME] if n == 1 else [f"model-{i + 1:05d}-of-{n:05d}.safetensors" for i in range(n)]
    shards = []
    for name, group in zip(names, groups, strict=True):
        ordered = tuple(sorted(group, key=lambda spec: -spec.dtype.itemsize))
        shards.append(ShardLayout(name, ordered, _header(ordered)))
    return tuple(shards)


def _header(specs: Sequence[TensorSpec]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        entries[spec.name] = {
            "dtype": spec.dtype.name,
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
        offset += spec.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    padded = text.ljust(round_up(len(text) + 8, DATA_ALIGNMENT_BYTES) - 8)
    return len(padded).to_bytes(8, "little") + padded


def index_json(shards: Sequence[ShardLayout]) -> bytes:
    """The Hugging Face index of a sharded checkpoint."""
    weight_map = {spec.name: shard.name for shard in shards for spec in shard.tensors}
    total = sum(spec.nbytes for shard in shards for spec in shard.tensors)
    content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(content, indent=2) + "\n").encode()


@dataclass(frozen=True, slots=True)
class TensorDigest:
    """BLAKE3-128 of a tensor's block digests, and those; blocks are of `DEFAULT_BLOCK_ELEMENTS` elements."""

    name: str
    root: str
    blocks: tuple[bytes, ...]


class ShardWriter:
    """Writes the shards of one output from start to end, digesting every block on the way. A context manager.

    Memory: one write chunk of 8 MiB.
    """

    def __init__(self, directory: Path, shards: Sequence[ShardLayout], ledger: Ledger) -> None:
        self._directory = directory
        self._ledger = ledger
        self._shards = iter(shards)
        self._specs: deque[TensorSpec] = deque()
        self._file: OutputFile | None = None
        self._hasher = _BlockHasher()
        self.digests: list[TensorDigest] = []
        self._next_shard()

    def append(self, content: NDArray[np.uint8]) -> None:
        """Write the next bytes (uint8) of the current tensor; they may not reach into the next one."""
        self._skip_empty()
        if not self._specs or self._file is None:
            raise ValueError("more bytes than the layout has tensors")
        self._hasher.begin(self._specs[0])
        self._file.append(content)
        self._hasher.update(content)
        if self._hasher.complete:
            self._end_tensor()

    def finish(self) -> None:
        """Close the last file.

        Raises:
            ValueError: not all tensors were written.
        """
        self._skip_empty()
        if self._specs or self._file is not None or next(self._shards, None) is not None:
            raise ValueError("the output was closed before all tensors were written")

    def _skip_empty(self) -> None:
        while self._specs and self._specs[0].nbytes == 0:
            self._hasher.begin(self._specs[0])
            self._end_tensor()

    def _end_tensor(self) -> None:
        self.digests.append(self._hasher.end())
        self._specs.popleft()
        if not self._specs and self._file is not None:
            self._file.close()
            self._file = None
            self._next_shard()

    def _next_shard(self) -> None:
        shard = next(self._shards, None)
        if shard is not None:
            self._specs = deque(shard.tensors)
            self._file = OutputFile(self._directory / shard.name, shard.file_bytes, self._ledger)
            self._file.append(shard.header)
            if not self._specs:
                self._file.close()
                self._file = None
                self._next_shard()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.__exit__(kind, error, trace)


class _BlockHasher:
    """Digests one tensor at a time, block by block."""

    def __init__(self) -> None:
        self._spec: TensorSpec | None = None
        self._digests: list[bytes] = []
        self._hasher = blake3()
        self._in_block = 0
        self._left = 0

    @property
    def complete(self) -> bool:
        return self._left == 0

    def begin(self, spec: TensorSpec) -> None:
        if self._spec is None:
            self._spec = spec
            self._left = spec.nbytes

    def update(self, content: NDArray[np.uint8]) -> None:
        assert self._spec is not None
        if len(content) > self._left:
            raise ValueError(f"{self._spec.name}: more bytes than the tensor has")
        block_bytes = DEFAULT_BLOCK_ELEMENTS * self._spec.dtype.itemsize
        done = 0
        while done < len(content):
            count = min(block_bytes - self._in_block, len(content) - done)
            self._hasher.update(content.data[done : done + count])
            self._in_block += count
            self._left -= count
            done += count
            if self._in_block == block_bytes or self._left == 0:
                self._digests.append(self._hasher.digest(DIGEST_BYTES))
                self._hasher.reset()
                self._in_block = 0

    def end(self) -> TensorDigest:
        assert self._spec is not None
        blocks = tuple(self._digests)
        root = blake3(b"".join(blocks)).hexdigest(DIGEST_BYTES)
        digest = TensorDigest(self._spec.name, root, blocks)
        self._spec = None
        self._digests = []
        return digest
