"""Write sharded safetensors: lay out every shard, write and digest the tensors in one pass, keep all block digests."""

from __future__ import annotations

import base64
import json
import re
import struct
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, NoReturn, Protocol

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from mergepipe.checkpoints.directory import component_of, stored_name
from mergepipe.core.blocks import BF16, DEFAULT_BLOCK_ELEMENTS, F8_E4M3, F8_E5M2, F16, F32, F64, DType, element_count
from mergepipe.core.records import AsText, Size
from mergepipe.core.rounding import NOTHING_MEASURED, Survival
from mergepipe.core.strict_json import digest_of
from mergepipe.errors import CorruptError, UnsupportedError
from mergepipe.storage.ledger import Ledger
from mergepipe.storage.output import OutputFile, make_folders
from mergepipe.storage.ranges import round_up

BLOCKS_NAME = "mergepipe.blocks"
BLOCKS_VERSION = 1
DIGEST_BYTES = 16
_MAGIC = b"MPBLOCKS"
_HEAD = struct.Struct("<8sIIII")  # magic, version, bytes of a digest, files, blocks
_BLOCK_ELEMENTS = struct.Struct("<Q")
_HINT = "`mergepipe repair` makes it again"


def block_digest(content: object) -> bytes:
    """BLAKE3-128 of a buffer."""
    return blake3(content).digest(DIGEST_BYTES)  # type: ignore[arg-type] # any contiguous buffer of bytes


def root_of(blocks: Sequence[bytes]) -> str:
    """The Merkle root of a tensor: BLAKE3-128 of its concatenated block digests, 32 hex digits."""
    return blake3(b"".join(blocks)).hexdigest(DIGEST_BYTES)


def packed_digests(blocks: Sequence[bytes]) -> str:
    """Encode block digests for a record."""
    return base64.b64encode(b"".join(blocks)).decode()


def unpacked_digests(packed: str) -> tuple[bytes, ...]:
    """Decode block digests. Law: `unpacked_digests(packed_digests(b)) == b`; raises ValueError for anything else."""
    content = base64.b64decode(packed, validate=True)
    if len(content) % DIGEST_BYTES:
        raise ValueError("is cut within a digest")
    return tuple(content[at : at + DIGEST_BYTES] for at in range(0, len(content), DIGEST_BYTES))


# Values with all of these bits set are not finite: the exponent's, or all but the sign in formats without infinities.
_NOT_FINITE: dict[DType, int] = {
    F64: 0x7FF0 << 48, F32: 0x7F800000, F16: 0x7C00, BF16: 0x7F80, F8_E4M3: 0x7F, F8_E5M2: 0x7C,
}  # fmt: skip


def count_not_finite(content: NDArray[np.uint8], dtype: DType) -> int:
    """Count the infinities and NaN among stored values; 0 if they are not floats."""
    mask = _NOT_FINITE.get(dtype)
    if mask is None or not len(content):
        return 0
    bits_N = content.view(np.dtype(f"<u{dtype.itemsize}"))
    exponents_N = bits_N & bits_N.dtype.type(mask)
    return int(np.count_nonzero(exponents_N == mask)) if int(exponents_N.max()) == mask else 0


@dataclass(frozen=True, slots=True)
class BlockTable:
    """Digests of the headers of all weight files, then of all blocks of all tensors, in the manifest's order.

    Law: `block_table_of(t.to_bytes(), ...) == t` for the counts of blocks of `t`.
    """

    block_elements: int
    headers: tuple[bytes, ...]
    tensors: tuple[tuple[bytes, ...], ...]

    def to_bytes(self) -> bytes:
        """Encode the side file ("Block digests" in docs/internals/formats/manifest.md)."""
        blocks = [block for tensor in self.tensors for block in tensor]
        head = _HEAD.pack(_MAGIC, BLOCKS_VERSION, DIGEST_BYTES, len(self.headers), len(blocks))
        return b"".join((head, _BLOCK_ELEMENTS.pack(self.block_elements), *self.headers, *blocks))


def block_table_of(raw: bytes, where: object, n_files: int, element_counts: Sequence[int]) -> BlockTable:
    """Decode `BlockTable.to_bytes`, given the counts of files and blocks from the manifest."""

    def refuse(message: str) -> NoReturn:
        raise CorruptError.of("manifest.damaged", where, message, _HINT)

    fixed = _HEAD.size + _BLOCK_ELEMENTS.size
    if len(raw) < fixed or not raw.startswith(_MAGIC):
        refuse("is not a table of block digests")
    _, version, digest_bytes, files, blocks = _HEAD.unpack_from(raw)
    if version > BLOCKS_VERSION:
        message = f"its version is {version}, {BLOCKS_VERSION} is known"
        raise UnsupportedError.of("format.version", where, message, "use a newer version of MergePipe")
    (block_elements,) = _BLOCK_ELEMENTS.unpack_from(raw, _HEAD.size)
    if version < 1 or digest_bytes != DIGEST_BYTES or not 0 < block_elements < 2**63:
        refuse(f"version {version}, digests of {digest_bytes} bytes, blocks of {block_elements} elements")
    counts = [-(-n // block_elements) for n in element_counts]
    if (files, blocks) != (n_files, sum(counts)) or len(raw) != fixed + DIGEST_BYTES * (files + blocks):
        refuse(f"{blocks} blocks in {files} files in {len(raw)} bytes, the manifest has {sum(counts)} in {n_files}")
    digests = [raw[at : at + DIGEST_BYTES] for at in range(fixed, len(raw), DIGEST_BYTES)]
    tensors, position = [], files
    for count in counts:
        tensors.append(tuple(digests[position : position + count]))
        position += count
    return BlockTable(block_elements, tuple(digests[:files]), tuple(tensors))


DATA_ALIGNMENT_BYTES = 4096
SUFFIX = ".safetensors"
SINGLE_NAME = f"model{SUFFIX}"
_SHARD_NAME = re.compile(rf"(.+)-\d{{5,}}-of-\d{{5,}}{re.escape(SUFFIX)}", re.ASCII)
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


@dataclass(frozen=True)
class ShardLayout:
    """One output file: its name, its tensors in file order, and its header (length prefix included).

    A file in a folder holds the tensors of a component: their names begin with the folder, in the header they do not.
    Tensors stand by descending element size, so that each is aligned to its own elements without holes; the header is
    padded so that the data starts on a page.
    """

    name: str
    tensors: tuple[TensorSpec, ...]
    header: bytes

    @cached_property
    def file_bytes(self) -> int:
        return len(self.header) + sum(t.nbytes for t in self.tensors)


def plan_shards(
    specs: Sequence[TensorSpec],
    shard_bytes: int,
    components: Mapping[str, str] = MappingProxyType({}),
    single: str = SINGLE_NAME,
) -> tuple[ShardLayout, ...]:
    """Fill shards of at most `shard_bytes` of tensor data in the given order; a larger tensor gets a shard of its own.

    `components` are the folders that get weight files of their own, for tensors whose names begin with them, and the
    stems of these files; they follow the files of the output's folder.
    `single` is the name of a file that is all of a folder's weights.

    Law: the tensors of all shards are exactly `specs`, each once.
    """
    of_folder: dict[str, list[TensorSpec]] = {folder: [] for folder in ("", *components)}
    for spec in specs:
        of_folder[component_of(spec.name, components)].append(spec)
    shards = []
    for folder, own in of_folder.items():
        if own or not components:
            stem = f"{folder}/{components[folder]}" if folder else single.removesuffix(SUFFIX)
            groups = _filled(own, shard_bytes)
            for number, group in enumerate(groups, start=1):
                of_all = f"-{number:05d}-of-{len(groups):05d}" if len(groups) > 1 else ""
                name = f"{stem}{of_all}{SUFFIX}"
                ordered = tuple(sorted(group, key=lambda spec: -spec.dtype.itemsize))
                shards.append(ShardLayout(name, ordered, header_of(ordered, name)))
    return tuple(shards)


def _filled(specs: Sequence[TensorSpec], shard_bytes: int) -> list[list[TensorSpec]]:
    """Cut tensors into groups of at most `shard_bytes`, or of one."""
    groups: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in specs:
        if groups[-1] and filled + spec.nbytes > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(spec)
        filled += spec.nbytes
    return groups


def header_of(specs: Sequence[TensorSpec], file: str) -> bytes:
    """Length prefix and header of `file`, which holds `specs` in this order."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        entries[stored_name(spec.name, file)] = {
            "dtype": spec.dtype.name,
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + spec.nbytes],
        }
        offset += spec.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    padded = text.ljust(round_up(len(text) + 8, DATA_ALIGNMENT_BYTES) - 8)
    return len(padded).to_bytes(8, "little") + padded


def index_files(shards: Sequence[ShardLayout]) -> dict[str, bytes]:
    """The Hugging Face indices of a checkpoint, by name: one of each folder that has several shards."""
    sharded: dict[str, list[ShardLayout]] = {}
    for shard in shards:
        if index_name(shard.name):
            sharded.setdefault(index_name(shard.name), []).append(shard)
    files = {}
    for name, of_index in sharded.items():
        specs = [(spec, shard.name) for shard in of_index for spec in shard.tensors]
        weight_map = index_map((spec.name, file) for spec, file in specs)
        content = {"metadata": {"total_size": sum(spec.nbytes for spec, _ in specs)}, "weight_map": weight_map}
        files[name] = (json.dumps(content, indent=2, allow_nan=False) + "\n").encode()
    return files


def index_name(file: str) -> str:
    """The name of the index that lists a shard; empty for a file that is all of its folder's weights."""
    match = _SHARD_NAME.fullmatch(file)
    return f"{match[1]}{SUFFIX}.index.json" if match else ""


def index_map(tensors: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the weight map of an index, of pairs (tensor, file): both lose the folder of a component."""
    return {stored_name(tensor, file): file.rpartition("/")[2] for tensor, file in sorted(tensors)}


@dataclass(frozen=True, slots=True)
class TensorDigest:
    """A tensor that is written: the digests of its blocks, and how many of its numbers are infinite or none.

    Blocks are of `DEFAULT_BLOCK_ELEMENTS` elements. `survival`: what rounding kept of its change.
    """

    name: str
    blocks: Annotated[tuple[bytes, ...], AsText(packed_digests, unpacked_digests)]
    not_finite: Size = 0
    survival: Survival = NOTHING_MEASURED

    @property
    def root(self) -> str:
        """The Merkle root of its blocks."""
        return root_of(self.blocks)


def table_of(shards: Sequence[ShardLayout], digests: Sequence[TensorDigest]) -> BlockTable:
    """All digests of an output; `digests` are in output order."""
    headers = tuple(block_digest(shard.header) for shard in shards)
    return BlockTable(DEFAULT_BLOCK_ELEMENTS, headers, tuple(digest.blocks for digest in digests))


def file_digest_of(shard: ShardLayout, root_of: Mapping[str, str]) -> str:
    """The digest of a weight file, from the digests of its tensors."""
    return digest_of([[s.name, s.dtype.name, list(s.shape), root_of[s.name]] for s in shard.tensors])


class DurableProgress(Protocol):
    """The durable part of an interrupted output, and the recording of further progress."""

    @property
    def done(self) -> tuple[TensorDigest, ...]:
        """The tensors that are durable already, in output order."""
        ...

    def is_due(self, pending_bytes: int) -> bool:
        """Whether to record now, with `pending_bytes` written since the last record."""
        ...

    def note(self, digests: Sequence[TensorDigest]) -> None:
        """Record that the next tensors in output order are durable; the callee makes their files' names durable."""
        ...


class ShardWriter:
    """Writes the shards of one output sequentially, digesting every block. A context manager.

    With a `progress`, durable tensors are skipped, and progress is recorded whenever it `is_due`. What rounding kept of
    a tensor that is complete is asked of `survival_of`, by its name.
    Memory: one write chunk of 8 MiB.
    """

    def __init__(
        self,
        directory: Path,
        shards: Sequence[ShardLayout],
        ledger: Ledger,
        progress: DurableProgress | None = None,
        survival_of: Callable[[str], Survival] = lambda _: NOTHING_MEASURED,
    ) -> None:
        self._directory = directory
        self._ledger = ledger
        self._shards = iter(shards)
        self._progress = progress
        self._survival_of = survival_of
        self._specs: deque[TensorSpec] = deque()
        self._file: OutputFile | None = None
        self._hasher = _BlockHasher()
        self.digests: list[TensorDigest] = []
        self._ends: deque[int] = deque()  # of the tensors in the file that are complete and not noted as durable
        self._position = 0
        self._noted = 0
        self._unnoted_bytes = 0  # in files that are closed, hence durable
        self._next_shard()

    def append(self, content: NDArray[np.uint8]) -> None:
        """Write the next bytes (uint8) of the current tensor; they may not reach into the next one."""
        self._skip_empty()
        if not self._specs or self._file is None:
            raise ValueError("more bytes than the layout has tensors")
        self._hasher.begin(self._specs[0])
        self._file.append(content)
        self._position += len(content)
        self._hasher.update(content)
        if self._hasher.complete:
            self._end_tensor()
        self._note_if_due()

    def finish(self) -> None:
        """Close the last file."""
        self._skip_empty()
        if self._specs or self._file is not None or next(self._shards, None) is not None:
            raise ValueError("the output was closed before all tensors were written")

    def _skip_empty(self) -> None:
        while self._specs and self._specs[0].nbytes == 0:
            self._hasher.begin(self._specs[0])
            self._end_tensor()

    def _end_tensor(self) -> None:
        digest = self._hasher.end()
        self.digests.append(replace(digest, survival=self._survival_of(digest.name)))
        self._ends.append(self._position)
        self._specs.popleft()
        if not self._specs and self._file is not None:
            self._close_file(self._file)
            self._note_if_due()  # before the next file takes space
            self._next_shard()

    def _close_file(self, file: OutputFile) -> None:
        file.close()
        self._file = None
        self._ends.clear()
        self._unnoted_bytes += self._position

    def _next_shard(self) -> None:
        shard = next(self._shards, None)
        while shard is not None:
            self._position = self._resume_in(shard)
            if self._position < shard.file_bytes:
                break
            shard = next(self._shards, None)
        if shard is None:
            return
        path = self._directory / shard.name
        if "/" in shard.name and not self._position:
            make_folders(path.parent)
        self._file = OutputFile(path, shard.file_bytes, self._ledger, self._position)
        if not self._position:
            self._file.append(shard.header)
            self._position = len(shard.header)
        if not self._specs:
            self._close_file(self._file)
            self._next_shard()

    def _resume_in(self, shard: ShardLayout) -> int:
        """Set the tensors to be written; return how many bytes of the file are there, 0 if it is to be made."""
        done = () if self._progress is None else self._progress.done[len(self.digests) :]
        skipped = [digest for digest, spec in zip(done, shard.tensors, strict=False) if digest.name == spec.name]
        self.digests.extend(skipped)
        self._noted += len(skipped)
        self._specs = deque(shard.tensors[len(skipped) :])
        written = sum(spec.nbytes for spec in shard.tensors[: len(skipped)])
        return len(shard.header) + written if skipped else 0

    def _note_if_due(self) -> None:
        """Record progress: closed files, and the open one after synchronising it."""
        progress = self._progress
        if progress is None or not self._has_whole_tensor():
            return
        in_file = 0 if self._file is None else self._file.unsynced_bytes
        if not progress.is_due(self._unnoted_bytes + in_file):
            return
        if self._file is not None and self._ends:
            durable = self._file.sync()
            while self._ends and self._ends[0] <= durable:
                self._ends.popleft()
        first, self._noted = self._noted, len(self.digests) - len(self._ends)
        if self._noted > first:
            self._unnoted_bytes = 0
            progress.note(self.digests[first : self._noted])

    def _has_whole_tensor(self) -> bool:
        """Whether a tensor that is not noted would be durable after synchronising the open file."""
        if len(self.digests) - len(self._ends) > self._noted:
            return True
        return self._file is not None and bool(self._ends) and self._ends[0] <= self._file.flushed_bytes

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.__exit__(*error)


class _BlockHasher:
    """Digests one tensor at a time, block by block."""

    def __init__(self) -> None:
        self._spec: TensorSpec | None = None
        self._digests: list[bytes] = []
        self._hasher = blake3()
        self._in_block = 0
        self._left = 0
        self._not_finite = 0

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
            self._not_finite += count_not_finite(content[done : done + count], self._spec.dtype)
            self._in_block += count
            self._left -= count
            done += count
            if self._in_block == block_bytes or self._left == 0:
                self._digests.append(self._hasher.digest(DIGEST_BYTES))
                self._hasher.reset()
                self._in_block = 0

    def end(self) -> TensorDigest:
        assert self._spec is not None
        digest = TensorDigest(self._spec.name, tuple(self._digests), self._not_finite)
        self._spec, self._digests, self._not_finite = None, [], 0
        return digest
