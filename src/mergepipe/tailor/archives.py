"""Plan torch.save archives whose pickle and tensors change: literal headers, members from any source, checksums."""

from __future__ import annotations

import struct
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from mergepipe.checkpoints.inert_pickle import (
    STORAGE_DTYPES,
    Global,
    PickledStorage,
    PickledTensor,
    Record,
    load_with_memo,
)
from mergepipe.checkpoints.torch_file import TorchArchive, Window, read_torch_zip, read_zip_directory, walk_tensors
from mergepipe.core.blocks import DType, element_count
from mergepipe.errors import damaged, unsupported
from mergepipe.storage.contract import Store
from mergepipe.storage.location import Location
from mergepipe.tailor.checkpoint import PicklePath
from mergepipe.tailor.copy_plan import Checksum, CopyRange, FilePlan, Literal, Patch, Segment, joined, patched_range

_STORAGES = {dtype: name for name, dtype in STORAGE_DTYPES.items() if dtype}
_REBUILD = Global("torch._utils", "_rebuild_tensor_v2")
_ORDERED = Global("collections", "OrderedDict")
_SIZE = Global("torch", "Size")
_I32_LIMIT = 1 << 31


def torch_size(shape: tuple[int, ...]) -> Record:
    """Return the value of a shape that must come back as a `torch.Size`."""
    return Record(_SIZE, (shape,))


class InertPickler:
    """Writes one value as protocol 2: None, bool, int, float, str, bytes, tuple, list, dict and inert values.

    Records without arguments are written as objects, others as calls: what `copyreg` and enumerations do. Sharing is
    kept for texts and names only. What can be recalled, texts, names and containers, is numbered from `first_number`
    on. Memory: a small multiple of the result.
    """

    def __init__(self, first_number: int = 0) -> None:
        self._out: list[bytes] = []
        self._memo: dict[str | Global, int] = {}
        self._next_number = first_number

    def dump(self, value: object) -> bytes:
        """Return the whole pickle."""
        return b"\x80\x02" + self.fragment(value) + b"."

    def fragment(self, value: object) -> bytes:
        """Return the instructions that push a value, to be put inside a pickle behind earlier fragments."""
        self._out = []
        self._put(value)
        return b"".join(self._out)

    @staticmethod
    def recall(number: int) -> bytes:
        """Return the instruction that pushes a value which the pickle has numbered."""
        return b"j" + struct.pack("<I", number)

    def _put(self, value: object) -> None:
        match value:
            case None | True | False:
                self._out.append({None: b"N", True: b"\x88", False: b"\x89"}[value])
            case int():
                self._out.append(_integer(value))
            case float():
                self._out.append(b"G" + struct.pack(">d", value))
            case str() | Global():
                self._named(value)
            case dict():
                self._out.append(b"}" + self._number(self._next_number) + b"(")
                for key, item in value.items():
                    self._put(key)
                    self._put(item)
                self._out.append(b"u")
            case list():
                self._out.append(b"]" + self._number(self._next_number))
                self._many(value, b"e")
            case tuple():
                self._many(value, b"t")
            case Record():
                self._put(value.kind)
                self._put(value.args)
                self._out.append(b"R" if value.args else b"\x81")
                if value.state is not None:
                    self._put(value.state)
                    self._out.append(b"b")
            case PickledTensor():
                self._tensor(value)
            case bytes():
                self._call(Global("_codecs", "encode"), (value.decode("latin-1"), "latin1"))
            case _:
                raise TypeError(f"a {type(value).__name__} is not written")

    def _number(self, number: int) -> bytes:
        """Return the instruction that gives the value that was put last this number, the next one."""
        self._next_number = number + 1
        return b"r" + struct.pack("<I", number)

    def _many(self, values: Iterable[object], after: bytes) -> None:
        self._out.append(b"(")
        for value in values:
            self._put(value)
        self._out.append(after)

    def _named(self, value: str | Global) -> None:
        """A text or a global name: in full the first time, by number afterwards."""
        if value in self._memo:
            self._out.append(self.recall(self._memo[value]))
            return
        raw = value.encode() if isinstance(value, str) else f"c{value.module}\n{value.name}\n".encode()
        self._out.append(b"X" + struct.pack("<I", len(raw)) + raw if isinstance(value, str) else raw)
        self._memo[value] = self._next_number
        self._out.append(self._number(self._next_number))

    def _call(self, kind: Global, args: tuple[object, ...]) -> None:
        self._put(kind)
        self._put(args)
        self._out.append(b"R")

    def _tensor(self, tensor: PickledTensor) -> None:
        storage, dtype = tensor.storage, tensor.storage.dtype
        if dtype not in _STORAGES:
            raise TypeError(f"a storage of {dtype.name if dtype else 'no dtype'} is not written")
        self._put(_REBUILD)
        self._out.append(b"(")
        self._put(("storage", Global("torch", _STORAGES[dtype]), storage.key, "cpu", storage.n_elements))
        self._out.append(b"Q")
        for value in (tensor.storage_offset, tensor.shape, tensor.stride, False):
            self._put(value)
        self._call(_ORDERED, ())
        self._out.append(b"tR")


def _integer(value: int) -> bytes:
    if 0 <= value < 256:
        return b"K" + bytes([value])
    if -_I32_LIMIT <= value < _I32_LIMIT:
        return b"J" + struct.pack("<i", value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


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
    position = n_record_bytes = 0
    for member in members:
        name, header = f"{stem}/{member.name}".encode(), position
        n_pad = -(header + _LOCAL_BYTES + len(name) + 4) % _ALIGNMENT
        extra = b"FB" + struct.pack("<H", n_pad) + bytes(n_pad)
        local = struct.pack("<4s5H3I2H", b"PK\x03\x04", 0, _FLAGS, 0, 0, 0, 0, 0, 0, len(name), len(extra))
        start = header + len(local) + len(name) + len(extra)
        stop = start + member.nbytes
        sizes = struct.pack("<2Q" if member.nbytes >= _ALL_ONES_32 else "<2I", member.nbytes, member.nbytes)
        behind = b"PK\x07\x08" + struct.pack("<I", member.crc32 or 0) + sizes
        segments += (Literal(local + name + extra), *(s for s in member.segments if s.nbytes), Literal(behind))
        if member.crc32 is None:
            unknown.append((start, stop, n_record_bytes))
        records.append(_central(name, header, member.nbytes, member.crc32 or 0))
        n_record_bytes += len(records[-1])
        position = stop + len(behind)
    count, end = len(records), b""
    if position + n_record_bytes > _ALL_ONES_32 or count >= _ALL_ONES_16:
        end += struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, n_record_bytes, position)
        end += struct.pack("<4sIQI", b"PK\x06\x07", 0, position + n_record_bytes, 1)
    short = [min(count, _ALL_ONES_16)] * 2 + [min(n_record_bytes, _ALL_ONES_32), min(position, _ALL_ONES_32)]
    end += struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, *short, 0)
    # behind its member and in the directory
    checksums = (Checksum(start, stop, (stop + 4, position + record + 16)) for start, stop, record in unknown)
    return FilePlan(file, (*segments, Literal(b"".join(records) + end)), tuple(checksums))


def _central(name: bytes, header: int, nbytes: int, crc: int) -> bytes:
    """Build a directory record; values over 32 bits go to a zip64 field, sizes before the offset."""
    wide = b""
    if nbytes >= _ALL_ONES_32:
        wide += struct.pack("<2Q", nbytes, nbytes)
    if header >= _ALL_ONES_32:
        wide += struct.pack("<Q", header)
    extra = struct.pack("<2H", 1, len(wide)) + wide if wide else b""
    size, at = min(nbytes, _ALL_ONES_32), min(header, _ALL_ONES_32)
    numbers = (45, 45, _FLAGS, 0, 0, 0, crc, size, size, len(name), len(extra), 0, 0, 0, 0, at)
    return struct.pack("<4s6H3I5H2I", b"PK\x01\x02", *numbers) + name + extra


# --- find the checksums inside torch.save archives that a set of patches makes stale ---


_ZIP_START = b"PK\x03\x04"


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
            start, stop = member.offset, member.offset + member.nbytes
            following = bisect_right(ranges, start, key=lambda r: r[1])
            if following < len(ranges) and ranges[following][0] < stop:
                stale.append(Checksum(start, stop, member.crc_offsets))
                if min(member.crc_offsets) < stop:
                    message = f"the checksum of {member.name!r} is stored before its bytes"
                    raise unsupported(file, message, "save it again with torch.save")
    return tuple(stale)


# --- edit single values inside a pickle without executing it; all other bytes stay the same ---


_STOP = b"."
_MARK, _TUPLE, _SET_ITEM = b"(", b"t", b"s"


def edit_pickle(raw: bytes, edits: Mapping[PicklePath, object], where: str) -> bytes:
    """Return `raw` with new values at some paths: keys of mappings and places in lists; the last step is a key.

    A pickle is a program, which ends with the mapping that it makes on the stack. Instructions before its end recall
    the mapping that holds a value by its number, and store the new value there. So nothing that refers to the old
    value, or to a part of it, breaks. `raw` must be a pickle that `load_inert` accepted.

    Law: `load_inert(edit_pickle(raw, {p: v}))` is `load_inert(raw)` with v at p.
    """
    if not edits:
        return raw
    root, memo = load_with_memo(raw, where)
    number_of = {id(value): number for number, value in memo.items()}
    recall, put = InertPickler.recall, InertPickler(1 + max(memo, default=-1)).fragment
    pieces = [raw[:-1]]
    for path, value in edits.items():
        try:
            first, holder = _item(root, path[0]), root
            for step in path[:-1]:
                holder = _item(holder, step)
            _item(holder if isinstance(holder, dict) else {}, path[-1])
            if holder is root:
                pieces += [put(path[-1]), put(value), _SET_ITEM]
                continue
            # what holds it is consumed as a value of the root's first key, which then is as it was
            pieces += [put(path[0]), _MARK, recall(number_of[id(holder)]), put(path[-1]), put(value), _SET_ITEM]
            pieces += [_TUPLE, _SET_ITEM, put(path[0]), recall(number_of[id(first)]), _SET_ITEM]
        except KeyError:
            shown = ".".join(map(str, path))[:200]
            raise damaged(where, f"holds no {shown!r} that could be changed") from None
    return b"".join([*pieces, _STOP])


def _item(holder: object, step: str | int) -> object:
    items = dict(enumerate(holder)) if isinstance(holder, list) else holder
    if not isinstance(items, dict):
        raise KeyError(step)
    return items[step]


# --- plan torch.save archives with an edited pickle: members are laid out again, tensors copied byte for byte ---


def plan_edited(
    store: Store, file: str, path: Location, patches: Sequence[Patch], edits: Mapping[PicklePath, object]
) -> FilePlan:
    """Plan a copy of one archive with `edits` in its pickle and `patches` (by offsets in the original) of tensors.

    The empty path stands for all of the pickle.
    """
    archive = read_torch_zip(store, path)
    pickle = archive.pickle
    raw = store.read_metadata(path, pickle.offset, pickle.nbytes)
    ordered = sorted(patches, key=lambda patch: patch.offset)
    members = []
    for member in archive.members.values():
        name = member.name.removeprefix(f"{archive.stem}/")
        if member.offset == pickle.offset:
            content = InertPickler().dump(edits[()]) if () in edits else edit_pickle(raw, edits, file)
            members.append(literal_member(name, content))
        else:
            start, stop = member.offset, member.offset + member.nbytes
            first = bisect_left(ordered, start, key=lambda patch: patch.offset)
            inside = ordered[first : bisect_left(ordered, stop, key=lambda patch: patch.offset)]
            segments = patched_range(path, start, stop, inside)
            members.append(MemberPlan(name, tuple(segments), None if inside else member.crc32))
    plan = lay_out_archive(file, archive.stem, members)
    return replace(plan, segments=tuple(joined(plan.segments)))


# --- plan torch.save archives of another value: some tensors new, from any source, the others copied ---


def plan_rewritten(name: str, archive: TorchArchive, root: object, new: Mapping[str, MemberPlan]) -> FilePlan:
    """Plan an archive of `root`, whose tensors' storages are in `new`, by their keys, or in `archive`."""
    members: dict[str, MemberPlan] = {}
    for _, tensor in walk_tensors(root):
        key = tensor.storage.key
        if key in new:
            members[key] = new[key]
        elif key not in members:
            old = archive.storage(tensor)
            segments = (CopyRange(archive.file, old.offset, old.nbytes, is_skeleton=True),) if old.nbytes else ()
            members[key] = MemberPlan(f"data/{key}", segments, old.crc32)
    return new_archive(name, archive.stem, root, members.values())


def new_archive(name: str, stem: str, root: object, members: Iterable[MemberPlan]) -> FilePlan:
    """Plan a torch.save archive of `root`, whose tensors' storages are `members`."""
    head = [literal_member("data.pkl", InertPickler().dump(root)), literal_member("byteorder", b"little")]
    return lay_out_archive(name, stem, [*head, *members, literal_member("version", b"3\n")])


def new_tensor(key: str, dtype: DType, shape: tuple[int, ...]) -> PickledTensor:
    """Make the value of a contiguous tensor with a storage of its own."""
    stride = tuple(element_count(shape[place + 1 :]) for place in range(len(shape)))
    return PickledTensor(PickledStorage(key, dtype, element_count(shape)), dtype, 0, shape, stride)
