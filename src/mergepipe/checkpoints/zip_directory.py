"""Read the directory of a zip file whose members are stored plain, strictly and without reading a member."""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from mergepipe.errors import MergePipeError, damaged, unsupported
from mergepipe.storage.contract import ZIP_DIRECTORY_BYTES, Store, map_at_once
from mergepipe.storage.location import Location

Read: TypeAlias = Callable[[Location, int, int], bytes]  # `Store.read_metadata`, or of what was read already
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR64 = struct.Struct("<4sIQI")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_ALL_ONES_16 = 0xFFFF
_ALL_ONES_32 = 0xFFFFFFFF
_FLAG_DESCRIPTOR = 0x0008
_FLAG_UTF8 = 0x0800
_MAX_NAME_BYTES = 1024
_NEAR_BYTES = 80  # a header's padding, and one number
_SMALL_ARCHIVE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ZipMember:
    """One stored member: `nbytes` bytes at absolute `offset`. `crc_offsets` are where its CRC-32 is written (u32)."""

    name: str
    offset: int
    nbytes: int
    crc32: int
    crc_offsets: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Listed:
    """One entry of the central directory, before its local header was seen."""

    name: str
    flags: int
    crc32: int
    nbytes: int
    header_offset: int
    crc_offset: int


@dataclass(frozen=True, slots=True)
class Window:
    """The range of a file that holds an archive."""

    path: Location
    start: int
    nbytes: int


def read_zip_directory(store: Store, window: Window) -> Mapping[str, ZipMember]:
    """Return the members in the order of their bytes.

    Laws: members lie inside the window, overlap neither each other nor any header, and no two have one name.
    """
    return read_ahead_directory(store, reader_of(store, window), window)[0]


def read_ahead_directory(store: Store, read: Read, window: Window) -> tuple[Mapping[str, ZipMember], Read]:
    """Return the members, and a reader that holds what stands between them and small members."""
    directory = _Directory(read, window)
    start, stop, count = directory.locate()
    listed = sorted(directory.listed(start, stop, count), key=lambda m: m.header_offset)
    if window.nbytes > _SMALL_ARCHIVE_BYTES:
        headers = [(m.header_offset, m.header_offset + _LOCAL.size + len(m.name)) for m in listed]
        ranges = []
        for at, end in (*headers, (start, start)):
            first = at - (24 if at > _ALL_ONES_32 else 16)  # the descriptor of the member before
            if first < start:
                ranges.append((window.start + max(first, 0), window.start + min(end, start)))
        read = _read_ahead(store, window.path, ranges)
    return _Directory(read, window).members(listed, start), read


def reader_of(store: Store, window: Window) -> Read:
    """Return a reader of a window; a small one is read at once: one request instead of twenty for a scalar."""
    is_small = window.nbytes <= _SMALL_ARCHIVE_BYTES
    everything = [(window.start, window.start + window.nbytes)]
    return _read_ahead(store, window.path, everything) if is_small else store.read_metadata


def _read_ahead(store: Store, path: Location, ranges: Sequence[tuple[int, int]]) -> Read:
    """Read ranges, which are in order, near ones at once; of a store that is slow to answer, many at a time."""
    runs: list[tuple[int, int]] = []
    for start, stop in ranges:
        if runs and start - runs[-1][1] <= _NEAR_BYTES:
            start, before = runs.pop()
            stop = max(stop, before)
        runs.append((start, stop))
    held = map_at_once(store, [path], lambda run: store.read_metadata(path, run[0], run[1] - run[0]), runs)

    def read(file: Location, offset: int, nbytes: int) -> bytes:
        place = bisect_right(runs, offset, key=lambda run: run[0]) - 1
        ahead = offset - runs[place][0]
        content = held[place][ahead : ahead + nbytes] if place >= 0 else b""
        return content if len(content) == nbytes else store.read_metadata(file, offset, nbytes)

    return read


class _Directory:
    """Reads one archive's directory; offsets are relative to the window until `members` makes them absolute."""

    def __init__(self, read: Read, window: Window) -> None:
        self._read_at = read
        self._window = window

    def _read(self, offset: int, nbytes: int) -> bytes:
        if offset < 0 or nbytes < 0 or offset + nbytes > self._window.nbytes:
            raise self._error(f"bytes [{offset}, {offset + nbytes}) of {self._window.nbytes} are needed")
        content = self._read_at(self._window.path, self._window.start + offset, nbytes)
        if len(content) != nbytes:
            raise self._error(f"{nbytes} bytes at {offset} are needed, {len(content)} are there")
        return content

    def _error(self, message: str) -> MergePipeError:
        return damaged(self._window.path, message)

    def locate(self) -> tuple[int, int, int]:
        """Find the central directory: (start, stop, number of members)."""
        end_offset = self._window.nbytes - _END.size
        if end_offset < 0:
            raise self._error(f"{self._window.nbytes} bytes are too few for a zip file")
        end = _END.unpack(self._read(end_offset, _END.size))
        if end[0] != b"PK\x05\x06" or end[7] != 0:
            raise self._error("the file does not end with a zip directory; it is cut, or bytes follow it")
        _, disk, first_disk, disk_count, count, nbytes, start, _ = end
        stop = end_offset
        locator_offset = end_offset - _LOCATOR64.size
        if locator_offset >= 0 and self._read(locator_offset, 4) == b"PK\x06\x07":
            stop, disk, first_disk, disk_count, count, nbytes, start = self._end64(
                end_offset, (disk_count, count, nbytes, start)
            )
        if disk or first_disk or disk_count != count:
            raise unsupported(self._window.path, "the archive has several volumes")
        if start + nbytes != stop or nbytes > ZIP_DIRECTORY_BYTES or count * _CENTRAL.size > nbytes:
            raise self._error(f"a directory of {nbytes} bytes at {start} does not end at {stop}")
        return start, stop, count

    def _end64(self, end_offset: int, short: tuple[int, int, int, int]) -> tuple[int, int, int, int, int, int, int]:
        """Read the zip64 end record, which must agree with the short one wherever that is not saturated."""
        locator_offset = end_offset - _LOCATOR64.size
        _, disk, at, disks = _LOCATOR64.unpack(self._read(locator_offset, _LOCATOR64.size))
        if at + _END64.size != locator_offset or disk or disks > 1:
            raise self._error("the zip64 end record is not where its locator says")
        signature, size, _, _, disk, first_disk, disk_count, count, nbytes, start = _END64.unpack(
            self._read(at, _END64.size)
        )  # fmt: skip
        if signature != b"PK\x06\x06" or size != _END64.size - 12:
            raise self._error("the zip64 end record is malformed")
        limits = (_ALL_ONES_16, _ALL_ONES_16, _ALL_ONES_32, _ALL_ONES_32)
        for value, full, limit in zip(short, (disk_count, count, nbytes, start), limits, strict=True):
            if value not in (full, limit):
                raise self._error(f"the two end records disagree: {value} and {full}")
        return at, disk, first_disk, disk_count, count, nbytes, start

    def listed(self, start: int, stop: int, count: int) -> list[_Listed]:
        """Parse the central directory, which must hold exactly `count` entries."""
        raw = self._read(start, stop - start)
        listed_members: dict[str, _Listed] = {}
        position = 0
        for _ in range(count):
            entry, position = self._entry(raw, position, start)
            if entry.name in listed_members:
                raise self._error(f"two members are called {entry.name!r}")
            listed_members[entry.name] = entry
        if position != len(raw):
            raise self._error(f"{len(raw) - position} bytes follow the last of {count} entries")
        return list(listed_members.values())

    def _entry(self, raw: bytes, position: int, start: int) -> tuple[_Listed, int]:
        names_at = position + _CENTRAL.size
        if names_at > len(raw):
            raise self._error("the directory ends inside an entry")
        fields = _CENTRAL.unpack_from(raw, position)
        signature, _, _, flags, method, _, _, crc32, packed, nbytes, n_name, n_extra, n_comment, disk, _, _, header = (
            fields
        )
        end = names_at + n_name + n_extra + n_comment
        if signature != b"PK\x01\x02" or end > len(raw) or disk not in (0, _ALL_ONES_16):
            raise self._error(f"the entry at byte {start + position} is malformed")
        name = self._name(raw[names_at : names_at + n_name])
        extra = raw[names_at + n_name : names_at + n_name + n_extra]
        nbytes, packed, header = self._wide(extra, (nbytes, packed, header), name)
        if method != 0 or flags & ~(_FLAG_DESCRIPTOR | _FLAG_UTF8):
            hint = "only members stored plain, as torch.save writes them, are read"
            raise unsupported(self._window.path, f"member {name!r} is compressed or encrypted", hint)
        if packed != nbytes:
            raise self._error(f"member {name!r} is stored plain with two sizes: {packed} and {nbytes}")
        return _Listed(name, flags, crc32, nbytes, header, start + position + 16), end

    def _name(self, raw: bytes) -> str:
        if not 0 < len(raw) <= _MAX_NAME_BYTES or not raw.isascii() or any(b < 32 or b == 127 for b in raw):
            raise self._error("a member's name is empty, too long or not plain text")
        name = raw.decode("ascii")
        parts = name.split("/")
        if "\\" in name or ":" in name or any(p in ("", ".", "..") for p in parts):
            raise self._error(f"a member is called {name[:100]!r}")
        return name

    def _wide(self, extra: bytes, short: tuple[int, int, int], name: str) -> tuple[int, int, int]:
        """Replace saturated 32-bit (size, packed size, header offset) by the zip64 extra field's values, in order."""
        if _ALL_ONES_32 not in short:
            return short
        wide = self._zip64_extra(extra, name)
        values = []
        for value in short:
            if value == _ALL_ONES_32:
                if len(wide) < 8:
                    raise self._error(f"member {name!r} is large and has no 64-bit size")
                value = int.from_bytes(wide[:8], "little")
                wide = wide[8:]
            values.append(value)
        return values[0], values[1], values[2]

    def _zip64_extra(self, extra: bytes, name: str) -> bytes:
        position = 0
        while position + 4 <= len(extra):
            kind, nbytes = struct.unpack_from("<2H", extra, position)
            position += 4
            if position + nbytes > len(extra):
                break
            if kind == 1:
                return extra[position : position + nbytes]
            position += nbytes
        raise self._error(f"member {name!r} is large and has no 64-bit size")

    def members(self, listed: list[_Listed], directory_start: int) -> dict[str, ZipMember]:
        """Check every local header and that members follow each other without overlap."""
        zip_members: dict[str, ZipMember] = {}
        limits = [*(m.header_offset for m in listed[1:]), directory_start][: len(listed)]
        for entry, limit in zip(listed, limits, strict=True):
            zip_members[entry.name] = self._member(entry, limit)
        return zip_members

    def _member(self, entry: _Listed, limit: int) -> ZipMember:
        name = entry.name.encode("ascii")
        header = self._read(entry.header_offset, _LOCAL.size + len(name))
        signature, _, flags, method, _, _, crc32, packed, nbytes, n_name, n_extra = _LOCAL.unpack_from(header)
        same = (flags, method, n_name, header[_LOCAL.size :]) == (entry.flags, 0, len(name), name)
        if signature != b"PK\x03\x04" or not same:
            raise self._error(f"the header of member {entry.name!r} contradicts the directory")
        start = entry.header_offset + len(header) + n_extra
        stop = start + entry.nbytes
        if stop > limit:
            raise self._error(f"member {entry.name!r} ends at {stop}, beyond byte {limit}")
        crc_offset = entry.header_offset + 14
        if flags & _FLAG_DESCRIPTOR:
            crc32, crc_offset = self._descriptor(entry, stop, limit)
        elif (packed, nbytes) not in ((entry.nbytes, entry.nbytes), (_ALL_ONES_32, _ALL_ONES_32)):
            raise self._error(f"member {entry.name!r} has another size in its header")
        if crc32 != entry.crc32:
            raise self._error(f"member {entry.name!r} has two checksums")
        base = self._window.start
        return ZipMember(entry.name, base + start, entry.nbytes, crc32, (base + crc_offset, base + entry.crc_offset))

    def _descriptor(self, entry: _Listed, stop: int, limit: int) -> tuple[int, int]:
        """Read the data descriptor behind the member: its CRC-32, and where that is written."""
        room = min(limit - stop, 24)
        raw = self._read(stop, room)
        sizes = {struct.pack("<2I", entry.nbytes, entry.nbytes)} if entry.nbytes < 1 << 32 else set()
        sizes.add(struct.pack("<2Q", entry.nbytes, entry.nbytes))
        if raw[:4] == b"PK\x07\x08" and any(raw[8:].startswith(s) for s in sizes):
            return int.from_bytes(raw[4:8], "little"), stop + 4
        raise self._error(f"the descriptor behind member {entry.name!r} contradicts the directory")
