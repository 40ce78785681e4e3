"""Find the checksums inside torch.save archives that a set of patches makes stale."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from mergepipe.checkpoints.formats.zip_directory import Window, read_zip_directory
from mergepipe.core.blocks import ByteRange
from mergepipe.errors import UnsupportedError
from mergepipe.storage.contract import Store
from mergepipe.storage.location import Location
from mergepipe.tailor.composition.copy.plan import Checksum

_ZIP_START = b"PK\x03\x04"


def stale_checksums(
    store: Store, file: Location, patched: Iterable[ByteRange], windows: Sequence[Window] = ()
) -> tuple[Checksum, ...]:
    """Return the checksums of the members that any patched range touches; none for files that have none.

    `windows` are the archives inside a file that is not one archive itself.

    Raises:
        CorruptError: an archive contradicts itself.
        UnsupportedError: a checksum stands before its member, where a stream cannot write it.
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
                        "tailor.checksum", file, f"the checksum of {member.name!r} is stored before its bytes",
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
