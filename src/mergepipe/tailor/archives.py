"""Plan torch.save archives whose pickle and tensors change: literal headers, members from any source, checksums."""

from __future__ import annotations

import pickletools
import struct
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mergepipe.checkpoints.inert_values import PickledStorage, PickledTensor
from mergepipe.checkpoints.torch_file import (
    TorchArchive,
    Window,
    ZipMember,
    read_torch_zip,
    read_zip_directory,
    walk_tensors,
)
from mergepipe.core.blocks import ByteRange, DType, element_count
from mergepipe.errors import CorruptError, MergePipeError, UnsupportedError
from mergepipe.storage.contract import Store
from mergepipe.storage.location import Location
from mergepipe.tailor.copy_plan import Checksum, CopyRange, FilePlan, Literal, Patch, Segment, joined
from mergepipe.tailor.formats.pickle_node import PicklePath
from mergepipe.tailor.sources import SkeletonFile
from mergepipe.tailor.torch_writer import InertPickler

# --- lay out a torch.save archive as segments of a file plan: literal headers, members from any source, zip64 ---


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


# --- find the checksums inside torch.save archives that a set of patches makes stale ---


_ZIP_START = b"PK\x03\x04"


def stale_checksums(
    store: Store, file: Location, patched: Iterable[ByteRange], windows: Sequence[Window] = ()
) -> tuple[Checksum, ...]:
    """Return the checksums of the members that any patched range touches; none for files that have none.

    `windows` are the archives inside a file that is not one archive itself.
    """
    ranges = sorted(((r.start, r.stop) for r in patched if r.nbytes), key=lambda r: r[0])
    if not ranges:
        return ()
    if not windows:
        if store.read_metadata(file, 0, len(_ZIP_START)) != _ZIP_START:
            return ()
        windows = (Window(file, 0, store.size_bytes(file)),)
    stale = []
    for window in windows:
        for member in read_zip_directory(store, window).values():
            if _touches(ranges, member.offset, member.offset + member.nbytes):
                stale.append(Checksum(member.offset, member.offset + member.nbytes, member.crc_offsets))
                if min(member.crc_offsets) < member.offset + member.nbytes:
                    raise UnsupportedError.of(
                        "checkpoint.unsupported", file, f"the checksum of {member.name!r} is stored before its bytes",
                        "save it again with torch.save",
                    )  # fmt: skip
    return tuple(stale)


def _touches(ranges: Sequence[tuple[int, int]], start: int, stop: int) -> bool:
    """Whether any of the sorted, disjoint ranges has a byte in `[start, stop)`."""
    index = bisect_left(ranges, start, key=lambda r: r[1])
    while index < len(ranges) and ranges[index][0] < stop:
        if ranges[index][1] > start:
            return True
        index += 1
    return False


# --- edit single values inside a pickle without executing it; all other bytes stay the same ---


_PUTS = ("BINPUT", "LONG_BINPUT", "PUT", "MEMOIZE")
_GETS = ("BINGET", "LONG_BINGET", "GET")
_MARKED = ("TUPLE", "LIST", "DICT", "FROZENSET", "SETITEMS", "APPENDS", "ADDITEMS")


def edit_pickle(raw: bytes, edits: Mapping[PicklePath, object], where: str) -> bytes:
    """Return `raw` with new values at some paths: keys of mappings and places in lists; the last step is a key.

    The key is stored once more behind its old value, as a mapping may: so nothing that refers to the old value, or
    to a part of it, breaks. `raw` must be a pickle that `load_inert` accepted.

    Law: `load_inert(edit_pickle(raw, {p: v}))` is `load_inert(raw)` with v at p.
    """
    if not edits:
        return raw
    root = _Outline(raw).root()
    pieces: list[tuple[int, bytes]] = []
    for path, value in edits.items():
        holder = _find(root, path[:-1])
        entry = holder.entries.get(path[-1]) if holder is not None else None
        if entry is None or entry.closing is None:
            shown = ".".join(map(str, path))[:200]
            raise CorruptError.of("checkpoint.damaged", where, f"holds no {shown!r} that could be changed")
        pickler = InertPickler()
        pieces.append((entry.stop, pickler.fragment(path[-1]) + pickler.fragment(value) + entry.closing))
    out, position = [], 0
    for stop, inserted in sorted(pieces, key=lambda piece: piece[0]):
        out += [raw[position:stop], inserted]
        position = stop
    return b"".join([*out, raw[position:]])


def _find(value: _Value, path: PicklePath) -> _Value | None:
    for step in path:
        entry = value.entries.get(step)
        if entry is None:
            return None
        value = entry.value
    return value


@dataclass(slots=True, eq=False)
class _Value:
    """The outline of one value: the value itself if it can be a key, and the positions of a container's entries."""

    key: str | int | None = None
    entries: dict[str | int, _Entry] = field(default_factory=dict)
    n_items: int = 0


@dataclass(frozen=True, slots=True)
class _Entry:
    """One entry: behind byte `stop` a new one may follow, which `closing` must end; None for an item of a sequence."""

    value: _Value
    stop: int
    closing: bytes | None


@dataclass(frozen=True, slots=True)
class _Pushed:
    """A value on the stack, and the byte offset of its first instruction. A mark has no value."""

    start: int
    value: _Value | None


class _Outline:
    """Interprets a pickle's instructions on outlines instead of values."""

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._stack: list[_Pushed] = []
        self._memo: dict[int, _Value] = {}

    def root(self) -> _Value:
        for opcode, argument, position in pickletools.genops(self._raw):
            if opcode.name == "STOP":
                break
            self._follow(opcode, argument, position or 0)
        return self._pop()

    def _pop(self) -> _Value:
        value = self._stack.pop().value
        if value is None:
            raise _unreadable()
        return value

    def _top(self) -> _Value:
        value = self._stack[-1].value
        if value is None:
            raise _unreadable()
        return value

    def _follow(self, opcode: pickletools.OpcodeInfo, argument: object, position: int) -> None:
        name = opcode.name
        if name in _PUTS:
            self._memo[len(self._memo) if name == "MEMOIZE" else _index(argument)] = self._top()
        elif name in _GETS:
            self._stack.append(_Pushed(position, self._memo[_index(argument)]))
        elif name == "MARK":
            self._stack.append(_Pushed(position, None))
        elif name == "SETITEM":
            value, key = self._pop(), self._pop()
            self._store(key, value, position + 1, b"s")
        elif name == "APPEND":
            self._add(self._pop(), position)
        elif name == "BUILD":
            self._pop()
        elif name in _MARKED:
            self._close(name, position)
        else:
            self._apply(opcode, argument, position)

    def _close(self, name: str, position: int) -> None:
        """Close the container that a mark opened; an item ends where the next one begins."""
        at = next(i for i in reversed(range(len(self._stack))) if self._stack[i].value is None)
        mark, items = self._stack[at], self._stack[at + 1 :]
        del self._stack[at:]
        if name in ("TUPLE", "LIST", "DICT", "FROZENSET"):
            self._stack.append(_Pushed(mark.start, _Value()))
        stops = [*(item.start for item in items[1:]), position][: len(items)]
        values = [item.value for item in items if item.value is not None]
        if name in ("SETITEMS", "DICT"):
            for key, value, stop in zip(values[::2], values[1::2], stops[1::2], strict=True):
                self._store(key, value, stop, b"")
        else:
            for value, stop in zip(values, stops, strict=True):
                self._add(value, stop)

    def _store(self, key: _Value, value: _Value, stop: int, closing: bytes) -> None:
        if key.key is not None:
            self._top().entries[key.key] = _Entry(value, stop, closing)

    def _add(self, value: _Value, stop: int) -> None:
        """Add an item of a sequence: addressed by index, never replaced itself."""
        target = self._top()
        target.entries[target.n_items] = _Entry(value, stop, None)
        target.n_items += 1

    def _apply(self, opcode: pickletools.OpcodeInfo, argument: object, position: int) -> None:
        """Apply any other instruction: pop its arguments, push at most one value."""
        start = position
        for _ in opcode.stack_before:
            start = self._stack[-1].start
            self._pop()
        if opcode.stack_after:
            is_plain = not opcode.stack_before and opcode.name != "GLOBAL"
            key = argument if is_plain and isinstance(argument, str | int) else None
            self._stack.append(_Pushed(start, _Value(key)))


def _index(argument: object) -> int:
    if not isinstance(argument, int):
        raise _unreadable()
    return argument


def _unreadable() -> MergePipeError:
    return CorruptError.of("checkpoint.damaged", "a pickle", "its instructions do not fit together")


# --- plan torch.save archives with an edited pickle: members are laid out again, tensors copied byte for byte ---


def plan_edited(
    store: Store, file: SkeletonFile, patches: Sequence[Patch], edits: Mapping[PicklePath, object]
) -> FilePlan:
    """Plan a copy of one archive with `edits` in its pickle and `patches` (by offsets of the original) in its tensors.

    The empty path stands for all of the pickle.
    """
    archive = read_torch_zip(store, file.path)
    pickle = archive.pickle
    raw = store.read_metadata(file.path, pickle.offset, pickle.nbytes)
    ordered = sorted(patches, key=lambda patch: patch.offset)
    members = []
    for member in archive.members.values():
        name = member.name.removeprefix(f"{archive.stem}/")
        if member.offset == pickle.offset:
            content = InertPickler().dump(edits[()]) if () in edits else edit_pickle(raw, edits, file.name)
            members.append(literal_member(name, content))
        else:
            members.append(_member(name, member, file, ordered))
    plan = lay_out_archive(file.name, archive.stem, members)
    return replace(plan, segments=tuple(joined(plan.segments)))


def _member(name: str, member: ZipMember, file: SkeletonFile, patches: Sequence[Patch]) -> MemberPlan:
    """Plan one member with the patches inside it."""
    segments: list[Segment] = []
    position, stop = member.offset, member.offset + member.nbytes
    first = bisect_left(patches, position, key=lambda patch: patch.offset)
    inside = patches[first : bisect_left(patches, stop, key=lambda patch: patch.offset)]
    for patch in inside:
        segments += [CopyRange(file.path, position, patch.offset - position, is_skeleton=True), patch.segment]
        position = patch.stop
    segments.append(CopyRange(file.path, position, stop - position, is_skeleton=True))
    return MemberPlan(name, tuple(s for s in segments if s.nbytes), None if inside else member.crc32)


# --- plan torch.save archives whose pickle and tensors are changed: new tensors from any source, the others copied ---


class ArchiveRewrite:
    """Collects the new tensors of an archive whose inert `root` the caller changes in place."""

    def __init__(self, archive: TorchArchive) -> None:
        keys = [tensor.storage.key for _, tensor in walk_tensors(archive.root)]
        self._archive = archive
        self._next = 1 + max((int(key) for key in keys if key.isdecimal()), default=-1)
        self._new: dict[str, MemberPlan] = {}

    def tensor(self, segments: Sequence[Segment], dtype: DType, shape: tuple[int, ...]) -> PickledTensor:
        """Add a contiguous tensor of these bytes, and return its value for the pickle."""
        key = str(self._next)
        self._next += 1
        self._new[key] = MemberPlan(f"data/{key}", tuple(segments))
        return new_tensor(key, dtype, shape)

    def plan(self, name: str) -> FilePlan:
        """Plan the archive with the tensors that its pickle still holds."""
        archive = self._archive
        members: dict[str, MemberPlan] = {}
        for _, tensor in walk_tensors(archive.root):
            key = tensor.storage.key
            if key in self._new:
                members[key] = self._new[key]
            elif key not in members:
                old = archive.storage(tensor)
                segments = (CopyRange(archive.file, old.offset, old.nbytes, is_skeleton=True),) if old.nbytes else ()
                members[key] = MemberPlan(f"data/{key}", segments, old.crc32)
        return new_archive(name, archive.stem, archive.root, members.values())


def new_archive(name: str, stem: str, root: object, members: Iterable[MemberPlan]) -> FilePlan:
    """Plan a torch.save archive of `root`, whose tensors' storages are `members`."""
    head = [literal_member("data.pkl", InertPickler().dump(root)), literal_member("byteorder", b"little")]
    return lay_out_archive(name, stem, [*head, *members, literal_member("version", b"3\n")])


def new_tensor(key: str, dtype: DType, shape: tuple[int, ...]) -> PickledTensor:
    """Make the value of a contiguous tensor with a storage of its own."""
    stride = tuple(element_count(shape[place + 1 :]) for place in range(len(shape)))
    return PickledTensor(PickledStorage(key, dtype, element_count(shape)), dtype, 0, shape, stride)
