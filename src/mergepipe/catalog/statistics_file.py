"""Statistics of one expert's content against one base's as a file: in the home folder by content, or beside a model.

Format: docs/internals/formats/stats.md. Law: `parse_statistics(file.to_bytes(), where).to_bytes() == file.to_bytes()`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from operator import lt
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Final

import numpy as np
from blake3 import blake3

from mergepipe.checkpoints.content_id import content_digest, digest_of_files
from mergepipe.checkpoints.contract import Checkpoint, CheckpointKind
from mergepipe.core.blocks import BlockGrid
from mergepipe.core.records import RecordFormat, Size, Within
from mergepipe.core.strict_json import canonical_json
from mergepipe.errors import CorruptError, LimitError, MergePipeError
from mergepipe.operators.statistics import BLOCK_RECORD, TensorStatistics
from mergepipe.storage.contract import BESIDE, STATISTICS_BYTES, FileId
from mergepipe.storage.ledger import Ledger
from mergepipe.storage.output import make_folders, replace_durably
from mergepipe.storage.ranges import os_errors

STATISTICS_NAME: Final = "mergepipe.stats"
"""The name of the file beside a model."""
MAGIC: Final = b"MPSTATS\n"
SEAL_BYTES: Final = 32
_LENGTH_BYTES = 8
_PRODUCTS_BYTES = 3 * 8
_CUT_BYTES = 8 + 3 * 4  # a density and its cut
_HEX = frozenset("0123456789abcdef")
_HINT = "get the file again, or make it with `mergepipe analyze`"


@dataclass(frozen=True, slots=True)
class PortableFile:
    """A file of a content. `is_outside`: it lies outside the folder of its model, as those of an applied adapter do.

    `sha256` is that of its bytes, and `header` the digest of what describes them, see `FileId`.
    """

    sha256: str
    size_bytes: Size
    header: str
    is_outside: bool

    def __post_init__(self) -> None:
        if not _is_hex(self.sha256, 64) or not _is_hex(self.header, 32):
            raise ValueError("the digest of a file is malformed")


@dataclass(frozen=True, slots=True)
class PortableContent:
    """The content of a model, wherever it lies; files sorted. `content_id` is the sampled one.

    `digest` is the content digest, see `checkpoints.content_id.content_digest`.
    """

    kind: CheckpointKind
    files: tuple[PortableFile, ...]
    content_id: str
    digest: str

    @classmethod
    def of(cls, kind: CheckpointKind, files: tuple[PortableFile, ...], content_id: str) -> PortableContent:
        """Describe a content with its digest."""
        return cls(kind, files, content_id, _digest_of(kind, files) or "")

    def __post_init__(self) -> None:
        if not _is_hex(self.content_id, 32):
            raise ValueError("its content id is not 32 hex digits")
        if self.digest != _digest_of(self.kind, self.files):
            raise ValueError("its digest is not that of the files")


def _is_hex(text: str, n_digits: int) -> bool:
    return len(text) == n_digits and _HEX.issuperset(text)


def _digest_of(kind: CheckpointKind, files: tuple[PortableFile, ...]) -> str | None:
    """Return the content digest of files; None where there are none."""
    named = [
        FileId(f"{BESIDE}{i}" if file.is_outside else str(i), file.size_bytes, "", file.header, file.sha256)
        for i, file in enumerate(files)
    ]
    return digest_of_files(kind, named)


def portable_content(checkpoint: Checkpoint, content_id: str) -> PortableContent:
    """Describe what a checkpoint holds; the digest of every file must be known."""
    if content_digest(checkpoint) is None:
        raise ValueError(f"a digest of {checkpoint.path} is unknown")
    files = [
        PortableFile(file.sha256 or "", file.size_bytes, file.header_digest, file.is_outside)
        for file in checkpoint.file_ids
    ]
    ordered = sorted(files, key=lambda file: (file.is_outside, file.sha256, file.header))
    return PortableContent.of(checkpoint.kind, tuple(ordered), content_id)


@dataclass(frozen=True, slots=True, eq=False)
class StatisticsFile:
    """The statistics of all tensors of an expert's content that can be compared with the base's, on one grid.

    `densities` are those whose exact cuts every tensor has; a tensor may have others beside them.
    """

    expert: PortableContent
    base: PortableContent
    block_elements: int
    densities: tuple[float, ...]
    tensors: Mapping[str, TensorStatistics]

    def covers(self, names: Iterable[str], block_elements: int, densities: Iterable[float]) -> bool:
        """Whether all these tensors are there, on this grid, with the cuts of all these densities."""
        has_cuts = set(densities) <= set(self.densities)
        return has_cuts and block_elements == self.block_elements and set(names) <= self.tensors.keys()

    def to_bytes(self) -> bytes:
        """Encode the file."""
        tensors = sorted(self.tensors.items())
        header = canonical_json(
            _FORMAT.content(
                _Header(
                    expert=self.expert,
                    base=self.base,
                    block_elements=self.block_elements,
                    densities=self.densities,
                    tensors=tuple(name for name, _ in tensors),
                    elements=tuple(statistics.grid.n_elements for _, statistics in tensors),
                    cuts=tuple(len(statistics.densities_D) for _, statistics in tensors),
                )
            )
        )
        arrays = (part for _, statistics in tensors for part in _encoded(statistics))
        content = b"".join((MAGIC, len(header).to_bytes(_LENGTH_BYTES, "little"), header, *arrays))
        if len(content) + SEAL_BYTES > STATISTICS_BYTES:
            message = f"{len(content)} bytes of statistics, at most {STATISTICS_BYTES} go into one file"
            raise LimitError.of(
                "statistics.too-large", STATISTICS_NAME, message, "analyze with larger --block-elements"
            )
        return content + blake3(content).digest()


@dataclass(frozen=True, slots=True)
class _Header:
    """The header: the two contents, the block size, and the name, size and cuts of each tensor."""

    expert: PortableContent
    base: PortableContent
    block_elements: Annotated[int, Within(1)]
    densities: tuple[float, ...]
    tensors: tuple[str, ...]
    elements: tuple[Size, ...]
    cuts: tuple[Size, ...]

    def __post_init__(self) -> None:
        if not len(set(self.tensors)) == len(self.tensors) == len(self.elements) == len(self.cuts):
            raise ValueError("tensors are not one name, one size and one count of cuts each")


_FORMAT: Final = RecordFormat("mergepipe-statistics", 4, _Header, _HINT, is_sealed=False)


def _encoded(statistics: TensorStatistics) -> Iterator[bytes]:
    """Encode the arrays of one tensor; nothing is compressed: hashes, norms and sketches are close to random bytes."""
    yield statistics.products_3.astype("<f8").tobytes()
    yield statistics.densities_D.astype("<f8").tobytes()
    yield statistics.cuts_D3.astype("<u4").tobytes()
    yield statistics.blocks_B.tobytes()


# --- parsing ---


def parse_statistics(raw: bytes, where: object) -> StatisticsFile:
    """Parse and check a file; the arrays are views of `raw`."""
    start = len(MAGIC) + _LENGTH_BYTES
    if len(raw) < start + SEAL_BYTES or not raw.startswith(MAGIC):
        raise _corrupt(where, "is not a file of statistics")
    if blake3(memoryview(raw)[:-SEAL_BYTES]).digest() != raw[-SEAL_BYTES:]:
        raise _corrupt(where, "is damaged: its checksum does not fit")
    stop = start + int.from_bytes(raw[len(MAGIC) : start], "little")
    if stop > len(raw) - SEAL_BYTES:
        raise _corrupt(where, f"its header ends at byte {stop}, the file has {len(raw)}")

    header = _FORMAT.parse(raw[start:stop], where)
    grids = [BlockGrid(n, header.block_elements) for n in header.elements]
    sizes = [
        _PRODUCTS_BYTES + _CUT_BYTES * n_cuts + BLOCK_RECORD.itemsize * grid.n_blocks
        for grid, n_cuts in zip(grids, header.cuts, strict=True)
    ]
    content = memoryview(raw)[stop:-SEAL_BYTES]
    if sum(sizes) != len(content):
        raise _corrupt(where, f"its header tells of {sum(sizes)} bytes of arrays, the file has {len(content)}")
    ends = accumulate(sizes)
    tensors = {
        name: _decoded(content[end - nbytes : end], grid, n_cuts)
        for name, grid, n_cuts, nbytes, end in zip(header.tensors, grids, header.cuts, sizes, ends, strict=True)
    }
    for name, statistics in tensors.items():
        listed = statistics.densities_D.tolist()
        bounds = 0.0, *listed
        is_ascending = all(map(lt, bounds, listed)) and bounds[-1] <= 1
        if not is_ascending or not set(header.densities) <= set(listed):
            raise _corrupt(where, f"tensor {name[:80]!r} has densities that are no ascending shares, or lacks some")
    return StatisticsFile(header.expert, header.base, header.block_elements, header.densities, tensors)


def _decoded(raw: memoryview, grid: BlockGrid, n_cuts: int) -> TensorStatistics:
    """Decode the arrays of one tensor, in the order in which `_encoded` writes them."""
    return TensorStatistics(
        grid=grid,
        products_3=np.frombuffer(raw, "<f8", 3),
        densities_D=np.frombuffer(raw, "<f8", n_cuts, _PRODUCTS_BYTES),
        cuts_D3=np.frombuffer(raw, "<u4", 3 * n_cuts, _PRODUCTS_BYTES + 8 * n_cuts).reshape(-1, 3),
        blocks_B=np.frombuffer(raw, BLOCK_RECORD, grid.n_blocks, _PRODUCTS_BYTES + _CUT_BYTES * n_cuts),
    )


def _corrupt(where: object, message: str) -> MergePipeError:
    return CorruptError.of("format.damaged", where, message, _HINT)


# --- files of the home folder ---


def statistics_folder(home: Path) -> Path:
    """Return the folder that holds statistics by content."""
    return home / "statistics"


def statistics_path(home: Path, expert_digest: str, base_digest: str) -> Path:
    """Return where the home folder holds the statistics of an expert's content against a base's."""
    return statistics_folder(home) / f"{expert_digest}-{base_digest}.stats"


def make_statistics_folder(home: Path) -> None:
    """Make the folder of statistics, and check that files can be made in it: before hours of reading for them."""
    folder = statistics_folder(home)
    make_folders(folder)
    with os_errors(folder, "writing into it"), TemporaryFile(dir=folder):
        pass


def write_statistics(home: Path, file: StatisticsFile) -> Path:
    """Write a file under its contents' name in one step, in place of what was there; return its path.

    Any number of processes may do so at once: what they write of equal contents is equal.
    """
    path, content = statistics_path(home, file.expert.digest, file.base.digest), file.to_bytes()
    make_folders(path.parent)
    replace_durably(path, content, Ledger())
    return path
