"""The file that carries statistics to another machine, `mergepipe.stats`: contents, and packed rows of their pairs.

Format: docs/internals/formats/stats.md. Law: `parse_statistics(file.to_bytes(), where) == file`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

import numpy as np
from blake3 import blake3

from mergepipe.catalog.statistics_bytes import pack, unpack
from mergepipe.checkpoints.contract import Checkpoint, CheckpointKind, FileFingerprint
from mergepipe.checkpoints.file_digests import content_digest, digest_of_files, is_outside
from mergepipe.core.canonical_json import canonical_json, parse_digestible
from mergepipe.core.json_fields import FieldCodes, JsonFields
from mergepipe.errors import CorruptError, LimitError, MergePipeError, OutputError, UnsupportedError
from mergepipe.operators.statistics import TensorStatistics
from mergepipe.storage.ledger import Ledger
from mergepipe.storage.limits import STATISTICS_BYTES
from mergepipe.storage.output import replace_durably
from mergepipe.storage.regular import read_head

STATISTICS_NAME: Final = "mergepipe.stats"
MAGIC: Final = b"MPSTATS\n"
FORMAT_NAME: Final = "mergepipe-statistics"
FORMAT_VERSION: Final = 3
SEAL_BYTES: Final = 32
_LENGTH_BYTES = 8
_HEX = frozenset("0123456789abcdef")
_HINT = "get the file again, or make it with `mergepipe analyze --export`"
_CODES = FieldCodes("stats.key", "stats.type", "stats.value", _HINT)


@dataclass(frozen=True, slots=True)
class PortableFile:
    """A file of a content. `is_outside`: it lies outside the folder of its model, as those of an applied adapter do."""

    sha256: str
    size_bytes: int
    header_digest: str
    is_outside: bool


@dataclass(frozen=True, slots=True)
class PortableContent:
    """The content of a model, wherever it lies; files sorted. `content_id` is the sampled one, None where unknown."""

    kind: CheckpointKind
    files: tuple[PortableFile, ...]
    content_id: str | None

    @property
    def fingerprints(self) -> tuple[FileFingerprint, ...]:
        """The files as fingerprints whose versions are their digests, named by number."""
        return tuple(
            FileFingerprint(f"/{i}" if f.is_outside else str(i), f.size_bytes, f"sha256:{f.sha256}", f.header_digest)
            for i, f in enumerate(self.files)
        )

    @property
    def digest(self) -> str:
        """The content digest, see `checkpoints.file_digests.content_digest`."""
        digest = digest_of_files(self.kind, self.fingerprints)
        if digest is None:
            raise ValueError("a content without files")
        return digest


def portable_content(checkpoint: Checkpoint, content_id: str | None) -> PortableContent | None:
    """Describe what a checkpoint holds; None unless the digest of every file is known."""
    if content_digest(checkpoint) is None:
        return None
    files = [
        PortableFile(file.sha256 or "", file.size_bytes, file.header_digest, is_outside(file))
        for file in checkpoint.files
    ]
    ordered = sorted(files, key=lambda file: (file.is_outside, file.sha256, file.header_digest))
    return PortableContent(checkpoint.kind, tuple(ordered), content_id)


@dataclass(frozen=True, slots=True)
class PortableRow:
    """The packed statistics of one tensor: what `pack` makes of them, bound to the digests of the two contents."""

    tensor: str
    packed: bytes


@dataclass(frozen=True, slots=True)
class PortablePair:
    """The rows of an expert's content against a base's, which are named by their digests."""

    expert: str
    base: str
    rows: tuple[PortableRow, ...]

    def statistics(self, where: object) -> Mapping[str, TensorStatistics]:
        """Unpack the rows, by tensor. `where` names the file in errors.

        Raises:
            CorruptError: `stats.row`, one is damaged, or cannot be what an analysis made.
            UnsupportedError: `stats.version`, rows of a newer version.
        """
        return {row.tensor: self._unpacked(row, where) for row in self.rows}

    def _unpacked(self, row: PortableRow, where: object) -> TensorStatistics:
        try:
            statistics = unpack(row.packed, row_subject(row.tensor, self.expert, self.base))
        except CorruptError as error:
            raise _corrupt("stats.row", where, error.problems[0].message) from error
        except UnsupportedError as error:
            raise _too_new(where, error.problems[0].message) from error
        densities_D = statistics.densities_D
        if not ((densities_D > 0) & (densities_D <= 1)).all() or (np.diff(densities_D) <= 0).any():
            raise _corrupt("stats.row", where, f"tensor {row.tensor[:80]!r} has densities that are no ascending shares")
        return statistics


@dataclass(frozen=True, slots=True)
class StatisticsFile:
    """The content of a file: contents by their order, pairs of them with their rows."""

    contents: tuple[PortableContent, ...]
    pairs: tuple[PortablePair, ...]

    @property
    def n_rows(self) -> int:
        return sum(len(pair.rows) for pair in self.pairs)

    def pair(self, expert: str, base: str) -> PortablePair | None:
        """Find the rows of two contents by their digests."""
        return next((pair for pair in self.pairs if (pair.expert, pair.base) == (expert, base)), None)

    def content(self, digest: str) -> PortableContent | None:
        """Find a content by its digest."""
        return next((content for content in self.contents if content.digest == digest), None)

    def to_bytes(self) -> bytes:
        """Encode the file.

        Raises:
            LimitError: `stats.too-large`, no reader would take it.
        """
        numbers = {content.digest: number for number, content in enumerate(self.contents)}
        header = canonical_json({
            "format": f"{FORMAT_NAME}/{FORMAT_VERSION}",
            "contents": [_content_json(content) for content in self.contents],
            "pairs": [
                {
                    "expert": numbers[pair.expert],
                    "base": numbers[pair.base],
                    "tensors": [row.tensor for row in pair.rows],
                    "sizes": [len(row.packed) for row in pair.rows],
                }
                for pair in self.pairs
            ],
        })  # fmt: skip
        rows = (row.packed for pair in self.pairs for row in pair.rows)
        content = b"".join((MAGIC, len(header).to_bytes(_LENGTH_BYTES, "little"), header, *rows))
        if len(content) + SEAL_BYTES > STATISTICS_BYTES:
            message = f"{len(content)} bytes of statistics, at most {STATISTICS_BYTES} go into one file"
            raise LimitError.of("stats.too-large", STATISTICS_NAME, message, "export fewer experts at once")
        return content + blake3(content).digest()


def row_subject(tensor: str, expert: str, base: str) -> str:
    """Describe whose statistics a row holds, by the digests of the contents: the key of its checksum."""
    return f"tensor {tensor} of content {expert} against {base}"


def pack_row(tensor: str, statistics: TensorStatistics, expert: str, base: str) -> PortableRow:
    """Pack the statistics of one tensor, bound to the digests of the contents."""
    return PortableRow(tensor, pack(statistics, row_subject(tensor, expert, base)))


def _content_json(content: PortableContent) -> dict[str, object]:
    files = [
        {"sha256": f.sha256, "size_bytes": f.size_bytes, "header": f.header_digest, "is_outside": f.is_outside}
        for f in content.files
    ]
    return {"kind": content.kind.value, "content_id": content.content_id, "digest": content.digest, "files": files}


# --- parsing ---


def parse_statistics(raw: bytes, where: object) -> StatisticsFile:
    """Parse and check a file; rows are unpacked, and their own checksums compared, when they are used.

    Raises:
        CorruptError: it is damaged or contradicts the format.
        UnsupportedError: `stats.version`, it is of a newer version.
    """
    start = len(MAGIC) + _LENGTH_BYTES
    if len(raw) < start + SEAL_BYTES or not raw.startswith(MAGIC):
        raise _corrupt("stats.magic", where, "is not a file of statistics")
    if blake3(memoryview(raw)[:-SEAL_BYTES]).digest() != raw[-SEAL_BYTES:]:
        raise _corrupt("stats.checksum", where, "is damaged: its checksum does not fit")
    stop = start + int.from_bytes(raw[len(MAGIC) : start], "little")
    if stop > len(raw) - SEAL_BYTES:
        raise _corrupt("stats.length", where, f"its header ends at byte {stop}, the file has {len(raw)}")

    def refuse(reason: str) -> NoReturn:
        raise _corrupt("stats.json", where, reason)

    fields = JsonFields(parse_digestible(raw[start:stop], refuse), _CODES, where)
    _check_version(fields, where)
    contents = fields.each("contents", _content)
    digests = [content.digest for content in contents]
    if len(set(digests)) != len(digests):
        fields.refuse("two contents are the same")
    cut = _RowCutter(raw, stop, len(raw) - SEAL_BYTES)
    pairs = fields.each("pairs", lambda pair: _pair(pair, digests, cut))
    fields.done()
    if cut.at != cut.stop:
        fields.refuse("there are bytes behind the last row")
    if len({(pair.expert, pair.base) for pair in pairs}) != len(pairs):
        fields.refuse("two pairs are the same")
    return StatisticsFile(contents, pairs)


def _check_version(fields: JsonFields, where: object) -> None:
    name, _, version = fields.text("format").partition("/")
    if name != FORMAT_NAME or not (version.isascii() and version.isdecimal()):
        fields.refuse("the format is not that of statistics")
    if version != str(FORMAT_VERSION):
        raise _too_new(where, f"statistics of version {version[:20]}, {FORMAT_VERSION} is known")


def _content(fields: JsonFields) -> PortableContent:
    kind, content_id = fields.text("kind"), fields.optional_text("content_id")
    if kind not in set(CheckpointKind):
        fields.refuse("'kind' has an unknown value")
    if content_id is not None and not _is_hex(content_id, 32):
        fields.refuse("'content_id' is not 32 hex digits")
    content = PortableContent(CheckpointKind(kind), fields.each("files", _file), content_id)
    if not content.files or fields.text("digest") != content.digest:
        fields.refuse("'digest' is not that of the files")
    return content


def _file(fields: JsonFields) -> PortableFile:
    file = PortableFile(
        fields.text("sha256"), fields.size("size_bytes"), fields.text("header"), fields.flag("is_outside")
    )
    if not _is_hex(file.sha256, 64) or not _is_hex(file.header_digest, 32):
        fields.refuse("the digest of a file is malformed")
    return file


class _RowCutter:
    """Cuts rows off a file's bytes, one after another."""

    def __init__(self, raw: bytes, start: int, stop: int) -> None:
        self._raw = raw
        self.at = start
        self.stop = stop

    def cut(self, nbytes: int) -> bytes | None:
        """Return the next `nbytes`, None where the file has fewer."""
        if nbytes > self.stop - self.at:
            return None
        self.at += nbytes
        return self._raw[self.at - nbytes : self.at]


def _pair(fields: JsonFields, digests: list[str], rows: _RowCutter) -> PortablePair:
    expert, base = fields.size("expert"), fields.size("base")
    if max(expert, base) >= len(digests):
        fields.refuse("it names a content that the file does not list")
    names, sizes = fields.array("tensors"), fields.sizes("sizes")
    tensors = [name for name in names if isinstance(name, str)]
    if not len(set(tensors)) == len(names) == len(sizes):
        fields.refuse("its tensors are not one name and one size each")
    made = []
    for tensor, nbytes in zip(tensors, sizes, strict=True):
        packed = rows.cut(nbytes)
        if packed is None:
            fields.refuse("it has more rows than the file")
        made.append(PortableRow(tensor, packed))
    return PortablePair(digests[expert], digests[base], tuple(made))


def _is_hex(text: str, n_digits: int) -> bool:
    return len(text) == n_digits and _HEX.issuperset(text)


def _corrupt(code: str, where: object, message: str) -> MergePipeError:
    return CorruptError.of(code, where, message, _HINT)


def _too_new(where: object, message: str) -> MergePipeError:
    return UnsupportedError.of("stats.version", where, message, "update mergepipe")


# --- files of this machine ---


def write_statistics(file: StatisticsFile, path: Path) -> int:
    """Write a file in one step, and return its size; refuse to replace one that holds no statistics.

    Raises:
        LimitError: `stats.too-large`.
        OutputError: `output.link`, `stats.not-ours`.
        StorageError, NotFoundError: it cannot be written there.
    """
    content = file.to_bytes()
    if path.is_symlink():
        message = "is a link, and nothing is written through links"
        raise OutputError.of("output.link", path, message, "name the file itself")
    if path.exists() and not (path.is_file() and read_head(path, len(MAGIC)) == MAGIC):
        message = "exists, and holds no statistics of mergepipe"
        raise OutputError.of("stats.not-ours", path, message, "choose another name")
    replace_durably(path, content, Ledger())
    return len(content)
