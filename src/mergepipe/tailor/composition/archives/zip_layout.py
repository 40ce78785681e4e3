"""Lay out a torch.save archive as segments of a file plan: literal headers, members from any source, zip64."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mergepipe.tailor.composition.copy.plan import Checksum, FilePlan, Literal, Segment

_ALIGNMENT = 64
_LOCAL_BYTES = 30
_FLAGS = 0x0808  # sizes and checksum follow the member; names are UTF-8
_ALL_ONES_16, _ALL_ONES_32 = 0xFFFF, 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class MemberPlan:
    """One member: its name without the archive's stem, its content, and the content's checksum where it is known."""

    name: str
    segments: tuple[Segment, ...]
    crc32: int | None = None

    @property
    def nbytes(self) -> int:
        return sum(segment.nbytes for segment in self.segments)


def lay_out_archive(file: str, stem: str, members: Iterable[MemberPlan]) -> FilePlan:
    """Plan the archive `file`. Data of every member starts on a multiple of 64 bytes, as torch writes it.

    Law: `zipfile` and torch read back what the members hold; checksums not known are taken as the file is written.
    """
    layout = _Layout(stem)
    for member in members:
        layout.add(member)
    return FilePlan(file, (*layout.segments, Literal(layout.directory())), tuple(layout.checksums))


def literal_member(name: str, content: bytes) -> MemberPlan:
    """Make a member of constant bytes."""
    return MemberPlan(name, (Literal(content),), zlib.crc32(content))


class _Layout:
    """Places members one after another."""

    def __init__(self, stem: str) -> None:
        self.segments: list[Segment] = []
        self._entries: list[tuple[str, int, int, int]] = []  # name, header offset, bytes, checksum if known
        self._ranges: list[tuple[int, int, int] | None] = []  # start, stop, place of the first checksum; if unknown
        self._stem = stem
        self._position = 0

    def add(self, member: MemberPlan) -> None:
        name = f"{self._stem}/{member.name}".encode()
        header = self._position
        n_pad = -(header + _LOCAL_BYTES + len(name) + 4) % _ALIGNMENT
        extra = b"FB" + struct.pack("<H", n_pad) + bytes(n_pad)
        local = struct.pack("<4s5H3I2H", b"PK\x03\x04", 0, _FLAGS, 0, 0, 0, 0, 0, 0, len(name), len(extra))
        self._append(Literal(local + name + extra))
        start = self._position
        for segment in member.segments:
            self._append(segment)
        crc = member.crc32 or 0
        self._append(Literal(b"PK\x07\x08" + struct.pack("<I", crc) + _sizes(member.nbytes)))
        self._entries.append((name.decode(), header, member.nbytes, crc))
        behind = (start, start + member.nbytes, start + member.nbytes + 4)
        self._ranges.append(behind if member.crc32 is None else None)

    def _append(self, segment: Segment) -> None:
        if segment.nbytes:
            self.segments.append(segment)
            self._position += segment.nbytes

    def directory(self) -> bytes:
        """Append the central directory and its end records, after all members."""
        records = [_central(*entry) for entry in self._entries]
        nbytes, count, start = sum(map(len, records)), len(records), self._position
        end = b""
        if start + nbytes > _ALL_ONES_32 or count >= _ALL_ONES_16:
            end += struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, nbytes, start)
            end += struct.pack("<4sIQI", b"PK\x06\x07", 0, start + nbytes, 1)
        short = (
            min(count, _ALL_ONES_16),
            min(count, _ALL_ONES_16),
            min(nbytes, _ALL_ONES_32),
            min(start, _ALL_ONES_32),
        )
        return b"".join(records) + end + struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, *short, 0)

    @property
    def checksums(self) -> Sequence[Checksum]:
        """List every unknown checksum with its places: behind its member and in the directory."""
        checksums, place = [], self._position
        for unknown, entry in zip(self._ranges, self._entries, strict=True):
            if unknown is not None:
                start, stop, behind = unknown
                checksums.append(Checksum(start, stop, (behind, place + 16)))
            place += len(_central(*entry))
        return checksums


def _sizes(nbytes: int) -> bytes:
    return struct.pack("<2Q" if nbytes >= _ALL_ONES_32 else "<2I", nbytes, nbytes)


def _central(name: str, header: int, nbytes: int, crc: int) -> bytes:
    """Build a directory record; values over 32 bits go to a zip64 field, sizes before the offset."""
    wide = b""
    if nbytes >= _ALL_ONES_32:
        wide += struct.pack("<2Q", nbytes, nbytes)
    if header >= _ALL_ONES_32:
        wide += struct.pack("<Q", header)
    extra = struct.pack("<2H", 1, len(wide)) + wide if wide else b""
    size, at, raw = min(nbytes, _ALL_ONES_32), min(header, _ALL_ONES_32), name.encode()
    numbers = (45, 45, _FLAGS, 0, 0, 0, crc, size, size, len(raw), len(extra), 0, 0, 0, 0, at)
    return struct.pack("<4s6H3I5H2I", b"PK\x01\x02", *numbers) + raw + extra
