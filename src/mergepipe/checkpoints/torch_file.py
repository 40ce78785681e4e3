"""Files written by `torch.save`, as inert values and byte ranges: no tensor byte is read, nothing is executed."""

from __future__ import annotations

import struct
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from blake3 import blake3

from mergepipe.checkpoints.contract import TensorEntry, WeightHeader
from mergepipe.checkpoints.inert_pickle import PickledTensor, Record, load_inert
from mergepipe.core.blocks import element_count
from mergepipe.core.strict_json import canonical_json, shown
from mergepipe.errors import MergePipeError, UnsupportedError, damaged, unsupported
from mergepipe.storage.contract import PICKLE_BYTES, ZIP_DIRECTORY_BYTES, Store, map_at_once
from mergepipe.storage.location import Location

# --- the directory of a zip file whose members are stored plain, read strictly and without reading a member ---
#
# `zipfile` is not used: it trusts the central directory's sizes, looks for an archive behind leading bytes, and
# cannot say where a checksum is. A file that an honest writer of stored members would not produce is refused.


_Read: TypeAlias = Callable[[Location, int, int], bytes]  # `Store.read_metadata`, or of what was read already
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR64 = struct.Struct("<4sIQI")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_LOCAL = struct.Struct("<4s5H3I2H")
_MAX_NAME_BYTES = 1024
_NEAR_BYTES = 80  # a header's padding, and one number
_SMALL_ARCHIVE_BYTES = 4096
_ALL_ONES_16, _ALL_ONES_32 = 0xFFFF, 0xFFFFFFFF
_FLAG_DESCRIPTOR, _FLAG_UTF8 = 0x0008, 0x0800


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
    return _read_directory(store, _reader(store, window), window)[0]


def _read_directory(store: Store, read: _Read, window: Window) -> tuple[Mapping[str, ZipMember], _Read]:
    """Return the members, and a reader that holds what stands between them and small members."""
    directory = _Directory(read, window)
    start, stop, count = directory.locate()
    listed = sorted(directory.listed(start, stop, count), key=lambda m: m.header_offset)
    if window.nbytes > _SMALL_ARCHIVE_BYTES:
        edges = [(m.header_offset, m.header_offset + _LOCAL.size + len(m.name)) for m in listed] + [(start, start)]
        behind = ((at - (24 if at > _ALL_ONES_32 else 16), end) for at, end in edges)  # the descriptor of a member
        ranges = [(window.start + max(a, 0), window.start + min(b, start)) for a, b in behind if a < start]
        read = _read_ahead(store, window.path, ranges)
    return _Directory(read, window).members(listed, start), read


def _reader(store: Store, window: Window) -> _Read:
    """Return a reader of a window; a small one is read at once: one request instead of twenty for a scalar."""
    is_small = window.nbytes <= _SMALL_ARCHIVE_BYTES
    everything = [(window.start, window.start + window.nbytes)]
    return _read_ahead(store, window.path, everything) if is_small else store.read_metadata


def _read_ahead(store: Store, path: Location, ranges: Sequence[tuple[int, int]]) -> _Read:
    """Read ranges, which are in order, near ones at once; of a store that is slow to answer, many at a time."""
    runs: list[tuple[int, int]] = []
    for start, stop in ranges:
        if runs and start - runs[-1][1] <= _NEAR_BYTES:
            start, stop = runs[-1][0], max(stop, runs.pop()[1])
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

    def __init__(self, read: _Read, window: Window) -> None:
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
                value, wide = int.from_bytes(wide[:8], "little"), wide[8:]
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


# --- files written by `torch.save`, as inert values and byte ranges: no tensor byte is read, nothing is executed ---


_ZIP_START, _END_START = b"PK\x03\x04", b"PK\x05\x06"


@dataclass(frozen=True, slots=True)
class TorchArchive:
    """A parsed `torch.save` file: `root` is what was saved, with every tensor a `PickledTensor`."""

    file: Location
    stem: str
    root: object
    pickle: ZipMember
    members: Mapping[str, ZipMember]
    read: _Read  # `Store.read_metadata`, of small members without asking again

    def locate(self, tensor: PickledTensor, path: str) -> TensorEntry:
        """Return the byte range of `tensor`, named by its place in the pickle, as `state.fp32_flat_groups[0]`.

        Several tensors may share bytes. A transposed or strided view has no byte range of its own, and is refused.
        """
        member = self.storage(tensor)
        where = f"{self.file}: {path}"
        if element_count(tensor.shape) and not _is_contiguous(tensor):
            message = f"shape {tensor.shape} with strides {tensor.stride} is not contiguous"
            raise unsupported(where, message, "call .contiguous() on it and save again")
        offset = tensor.storage_offset * tensor.dtype.itemsize
        nbytes = element_count(tensor.shape) * tensor.dtype.itemsize
        if offset + nbytes > member.nbytes:
            raise damaged(where, f"bytes [{offset}, {offset + nbytes}) of a storage of {member.nbytes}")
        return TensorEntry(path, tensor.dtype, tensor.shape, self.file, member.offset + offset, nbytes)

    def storage(self, tensor: PickledTensor) -> ZipMember:
        """Return the member that holds the tensor's storage."""
        storage = tensor.storage
        member = self.members.get(f"{self.stem}/data/{storage.key}")
        if member is None:
            raise damaged(self.file, f"storage {storage.key[:40]!r} is not in the file")
        itemsize = storage.dtype.itemsize if storage.dtype is not None else 1
        if storage.n_elements * itemsize != member.nbytes:
            stated = f"{storage.n_elements * itemsize} are announced"
            raise damaged(self.file, f"storage {storage.key[:40]!r} has {member.nbytes} bytes, {stated}")
        return member

    def tensors(self) -> dict[str, TensorEntry]:
        """Every tensor of the file by its path, each object once."""
        return {path: self.locate(tensor, path) for path, tensor in walk_tensors(self.root)}


def read_torch_zip(store: Store, path: Location, window: Window | None = None) -> TorchArchive:
    """Read the structure of a `torch.save` file, or of one that lies in a `window` of a larger file.

    Memory: a small multiple of the pickle (at most 256 MiB).
    """
    window = window or Window(path, 0, store.size_bytes(path))
    read = _reader(store, window)
    start = read(path, window.start, 4)
    if start[:1] == b"\x80":
        message = "written by torch.save in its older, unzipped format"
        raise unsupported(path, message, "load and save it again with torch 1.6 or later")
    if start not in (_ZIP_START, _END_START):
        raise damaged(path, "not a file written by torch.save")
    members, read = _read_directory(store, read, window)
    stems = {name.partition("/")[0] for name in members}
    stem = next(iter(stems), "")
    if len(stems) != 1 or f"{stem}/data.pkl" not in members:
        raise damaged(path, "a zip file, but not one written by torch.save (no data.pkl)")
    if (order := members.get(f"{stem}/byteorder")) is not None:
        content = read(path, order.offset, min(order.nbytes, 16))
        if content != b"little":
            raise unsupported(path, f"the byte order is {content!r}; only little-endian is read")
    pickle = members[f"{stem}/data.pkl"]
    if pickle.nbytes > PICKLE_BYTES:
        message = f"the pickle has {pickle.nbytes} bytes; at most {PICKLE_BYTES} are read"
        raise UnsupportedError.of("pickle.refused", path, message)
    raw = read(path, pickle.offset, pickle.nbytes)
    if len(raw) != pickle.nbytes or zlib.crc32(raw) != pickle.crc32:
        raise damaged(path, "the checksum of data.pkl does not match; the file is damaged")
    return TorchArchive(path, stem, load_inert(raw, str(path)), pickle, members, read)


def walk_tensors(root: object) -> Iterator[tuple[str, PickledTensor]]:
    """Yield every tensor below `root` with its path, in the order of the pickle."""
    return ((path, value) for path, value in walk(root) if isinstance(value, PickledTensor))


def walk(root: object) -> Iterator[tuple[str, object]]:
    """Yield every value below `root` with its path, in the order of the pickle; each container is visited once."""
    seen: set[int] = set()
    waiting: list[tuple[str, object]] = [("", root)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, dict | list | tuple | Record):
            if id(value) in seen:
                continue
            seen.add(id(value))
            waiting.extend(reversed(list(_children(path, value))))
        yield path, value


def _children(path: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for key, item in value.items():
            if isinstance(key, Record):
                yield path, key
            yield _joined(path, key), item
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield f"{path}[{index}]", item
    elif isinstance(value, Record):
        yield f"{path}.args", value.args
        yield f"{path}.state", value.state


def _joined(path: str, key: object) -> str:
    if isinstance(key, str):
        return f"{path}.{key}" if path else key
    return f"{path}[{key}]" if isinstance(key, int) else f"{path}[{type(key).__name__}]"


def _is_contiguous(tensor: PickledTensor) -> bool:
    expected = 1
    for length, stride in zip(reversed(tensor.shape), reversed(tensor.stride), strict=True):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


# --- the weights in one file of `torch.save`, as tensors stored in byte ranges: no tensor byte is read ---


SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
# Where trainers put the weights beside their own state, in the order in which they are looked for.
WRAPPERS = ("state_dict", "model_state_dict", "module", "model")
_MOST_WRAPPERS = 3


def read_torch_weights(store: Store, path: Location) -> WeightHeader:
    """Read names, dtypes, shapes and places of the tensors in `path`; nothing is executed.

    Tied tensors share their bytes. The digest is that of the pickle's checksum and of each member's place and checksum.
    """
    archive = read_torch_zip(store, path)
    state = _state_of(archive)
    entries = [_entry(archive, name, value) for name, value in state.items() if not _is_nothing(value)]
    granularity = store.terms(path).granularity_bytes
    entries = [replace(entry, granularity_bytes=granularity) for entry in entries]
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes, entry.name))
    return WeightHeader(tuple(entries), store.size_bytes(path), _digest(archive))


def _state_of(archive: TorchArchive) -> Mapping[object, object]:
    """The mapping of names to tensors: what was saved, or what a trainer wrapped it in."""
    state = archive.root
    for _ in range(_MOST_WRAPPERS):
        if isinstance(state, dict) and any(isinstance(value, PickledTensor) for value in state.values()):
            return state
        if not isinstance(state, dict):
            break
        state = next((state[key] for key in WRAPPERS if isinstance(state.get(key), dict)), None)
    message = f"has no mapping of names to tensors, neither at the top nor under {', '.join(WRAPPERS)}"
    raise unsupported(archive.file, message, "save the model's state_dict")


def _is_nothing(value: object) -> bool:
    """Whether an entry of a state dict stands for no content, as `_extra_state` mostly does."""
    return value is None or (isinstance(value, dict | list | tuple | str | bytes) and not value)


def _entry(archive: TorchArchive, name: object, value: object) -> TensorEntry:
    if not isinstance(name, str) or not name or not name.isprintable():
        raise damaged(archive.file, f"{shown(name)} cannot be a tensor's name")
    if not isinstance(value, PickledTensor):
        kind = str(value.kind) if isinstance(value, Record) else type(value).__name__
        message = f"{shown(name)} holds a {shown(kind)}, which is not a tensor"
        raise unsupported(archive.file, message, "save the state_dict without it")
    return archive.locate(value, name)


def _digest(archive: TorchArchive) -> str:
    members = sorted((m.offset, m.nbytes, m.crc32) for m in archive.members.values())
    return blake3(canonical_json([archive.pickle.crc32, [list(member) for member in members]])).hexdigest(length=16)
