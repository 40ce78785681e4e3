"""Lay out torch.save archives as segments of a file plan: headers, members, zip64 records, checksums."""

from __future__ import annotations

import struct
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mergepipe.checkpoints.zip_directory import Window, read_zip_directory
from mergepipe.errors import unsupported
from mergepipe.storage.contract import Store
from mergepipe.storage.location import Location
from mergepipe.tailor.copy_plan import Checksum, FilePlan, Literal, Segment

_ALIGNMENT = 64
_LOCAL_BYTES = 30
_FLAGS = 0x0808  # sizes and checksum follow the member; names are UTF-8
_ALL_ONES_16 = 0xFFFF
_ALL_ONES_32 = 0xFFFFFFFF
_ZIP_START = b"PK\x03\x04"


@dataclass(frozen=True, slots=True)
class MemberPlan:
    """One member: its name without the archive's stem, its content, and the content's checksum where it is known."""

    name: str
    segments: tuple[Segment, ...]
    crc32: int | None = None

    @property
    def nbytes(self) -> int:
        return sum(segment.nbytes for segment in self.segments)


def literal_member(name: str, content: bytes) -> MemberPlan:
    """Make a member of constant bytes."""
    return MemberPlan(name, (Literal(content),), zlib.crc32(content))


def lay_out_archive(file: str, stem: str, members: Iterable[MemberPlan]) -> FilePlan:
    """Plan the archive `file`. Data of every member starts on a multiple of 64 bytes, as torch writes it.

    Law: `zipfile` and torch read back what the members hold; checksums not known are taken as the file is written.
    """
    segments: list[Segment] = []
    records: list[bytes] = []  # of the central directory
    unknown: list[tuple[int, int, int]] = []  # start and stop of a member without a checksum, offset of its record
    position = 0
    n_record_bytes = 0
    for member in members:
        name = f"{stem}/{member.name}".encode()
        header = position
        n_pad = -(header + _LOCAL_BYTES + len(name) + 4) % _ALIGNMENT
        extra = b"FB" + struct.pack("<H", n_pad) + bytes(n_pad)
        local = struct.pack("<4s5H3I2H", b"PK\x03\x04", 0, _FLAGS, 0, 0, 0, 0, 0, 0, len(name), len(extra))
        start = header + len(local) + len(name) + len(extra)
        stop = start + member.nbytes
        is_wide = member.nbytes >= _ALL_ONES_32
        sizes = struct.pack("<2Q" if is_wide else "<2I", member.nbytes, member.nbytes)
        descriptor = b"PK\x07\x08" + struct.pack("<I", member.crc32 or 0) + sizes
        segments.append(Literal(local + name + extra))
        segments.extend(segment for segment in member.segments if segment.nbytes)
        segments.append(Literal(descriptor))
        if member.crc32 is None:
            unknown.append((start, stop, n_record_bytes))
        records.append(_central(name, header, member.nbytes, member.crc32 or 0))
        n_record_bytes += len(records[-1])
        position = stop + len(descriptor)

    segments.append(Literal(b"".join(records) + _end_of_directory(position, n_record_bytes, len(records))))
    # Each checksum is stored twice: in the descriptor after its member, and in the directory.
    checksums = (Checksum(start, stop, (stop + 4, position + record + 16)) for start, stop, record in unknown)
    return FilePlan(file, tuple(segments), tuple(checksums))


def _end_of_directory(position: int, nbytes: int, count: int) -> bytes:
    """Build the records that end an archive, whose directory of `count` records begins at `position`."""
    end = b""
    if position + nbytes > _ALL_ONES_32 or count >= _ALL_ONES_16:
        end += struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, nbytes, position)
        end += struct.pack("<4sIQI", b"PK\x06\x07", 0, position + nbytes, 1)
    short_count = min(count, _ALL_ONES_16)
    short_nbytes = min(nbytes, _ALL_ONES_32)
    short_position = min(position, _ALL_ONES_32)
    return end + struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, short_count, short_count, short_nbytes, short_position, 0)


def _central(name: bytes, header: int, nbytes: int, crc: int) -> bytes:
    """Build a directory record; values over 32 bits go to a zip64 field, sizes before the offset."""
    wide = b""
    if nbytes >= _ALL_ONES_32:
        wide += struct.pack("<2Q", nbytes, nbytes)
    if header >= _ALL_ONES_32:
        wide += struct.pack("<Q", header)
    extra = struct.pack("<2H", 1, len(wide)) + wide if wide else b""
    size = min(nbytes, _ALL_ONES_32)
    at = min(header, _ALL_ONES_32)
    numbers = (45, 45, _FLAGS, 0, 0, 0, crc, size, size, len(name), len(extra), 0, 0, 0, 0, at)
    return struct.pack("<4s6H3I5H2I", b"PK\x01\x02", *numbers) + name + extra


def stale_checksums(
    store: Store, file: Location, patched: Iterable[range], windows: Sequence[Window] = ()
) -> tuple[Checksum, ...]:
    """Return the checksums of the members that any patched range touches; none for files that have none.

    `windows` are the archives inside a file that is not one archive itself.
    """
    ranges = sorted(((r.start, r.stop) for r in patched if r), key=lambda r: r[0])
    if not ranges:
        return ()
    if not windows:
        if store.read_metadata(file, 0, len(_ZIP_START)) != _ZIP_START:
            return ()
        windows = (Window(file, 0, store.size_bytes(file)),)
    stale = []
    for window in windows:
        for member in read_zip_directory(store, window).values():
            start = member.offset
            stop = start + member.nbytes
            following = bisect_right(ranges, start, key=lambda r: r[1])
            if following < len(ranges) and ranges[following][0] < stop:
                stale.append(Checksum(start, stop, member.crc_offsets))
                if min(member.crc_offsets) < stop:
                    message = f"the checksum of {member.name!r} is stored before its bytes"
                    raise unsupported(file, message, "save it again with torch.save")
    return tuple(stale)
