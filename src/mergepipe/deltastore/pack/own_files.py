"""Give large tensors of a finished store files of their own, shared with library members that have them already."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from blake3 import blake3

from mergepipe.core.values import dataclass
from mergepipe.deltastore.codec.levels import Piece
from mergepipe.deltastore.header import PIECE_NAMES, tensor_file_name
from mergepipe.deltastore.index import StoreIndex
from mergepipe.errors import MergePipeError
from mergepipe.storage import owned
from mergepipe.storage.ledger import Ledger, Purpose
from mergepipe.storage.local import os_error
from mergepipe.storage.ranges import read_descriptor_range

OWN_FILE_BYTES: Final = 1 << 20
"""Tensors that are stored in fewer bytes are not worth a file."""
OWN_FILE_SHARE: Final = 1 / 512
"""Nor are those with a smaller share of the expert: a store has a few hundred files at most."""
_PART_BYTES = 8 << 20
_NEW_SUFFIX = ".new"


@dataclass(frozen=True, slots=True)
class _Source:
    """A stretch of an open file."""

    descriptor: int
    path: Path
    start: int
    stop: int

    def parts(self) -> Iterator[bytes]:
        for start in range(self.start, self.stop, _PART_BYTES):
            size = min(_PART_BYTES, self.stop - start)
            yield read_descriptor_range(self.descriptor, self.path, start, size)


def large_tensors(index: StoreIndex, rows: Sequence[tuple[int, int]], sizes: Sequence[int]) -> list[int]:
    """The numbers of the tensors that get files of their own: `rows` in the index, and bytes unpacked, by number."""
    least_bytes = sum(sizes) * OWN_FILE_SHARE
    stored = [int(index.rows["lengths"][first:stop].sum()) for first, stop in rows]
    return [n for n, size in enumerate(sizes) if size >= least_bytes and stored[n] >= OWN_FILE_BYTES]


def move_to_own_files(
    directory: Path, index: StoreIndex, rows: Mapping[int, tuple[int, int]], library: Path, ledger: Ledger
) -> dict[int, str]:
    """Move the pieces of the tensors with these rows to files of their own; return their names, by number of tensor.

    The name tells the content, so a member of `library` with a file of that name and the same bytes shares it: the new
    name is a hard link. What cannot be linked is a file of this store alone. `directory` is in staging and holds the
    common files, complete; where this is interrupted, they cannot be used any more.

    Raises:
        StorageError: the operating system refused.
    """
    names = {
        number: tensor_file_name(blake3(index.rows[first:stop].tobytes()).hexdigest(16))
        for number, (first, stop) in rows.items()
    }
    try:
        with contextlib.ExitStack() as stack:
            common: dict[Piece, int] = {}
            for piece in Piece:
                common[piece] = owned.open_file(directory / PIECE_NAMES[piece], flags=os.O_RDONLY)
                stack.callback(os.close, common[piece])

            def sources(piece: Piece, first: int, stop: int) -> _Source:
                start, end = index.piece_range(piece, first, stop)
                return _Source(common[piece], directory / PIECE_NAMES[piece], start, end)

            for number in sorted(rows):
                if not owned.is_there(directory / names[number]):  # else another tensor of this expert has its content
                    content = [sources(piece, *rows[number]) for piece in Piece]
                    if not _share(directory / names[number], content, library):
                        _write(directory / names[number], content, ledger)
            for piece in Piece:
                rest = [sources(piece, *kept) for kept in _gaps(sorted(rows.values()), len(index.rows))]
                path = directory / PIECE_NAMES[piece]
                new = path.with_name(path.name + _NEW_SUFFIX)
                _write(new, rest, ledger)
                owned.rename(new, path)
    except OSError as error:
        raise os_error(error, directory, "giving tensors files of their own") from error
    return names


def _gaps(ranges: Sequence[tuple[int, int]], n_rows: int) -> Iterator[tuple[int, int]]:
    """The ranges of rows between sorted ranges."""
    at = 0
    for first, stop in (*ranges, (n_rows, n_rows)):
        if first > at:
            yield at, first
        at = stop


def _write(path: Path, content: Sequence[_Source], ledger: Ledger) -> None:
    descriptor = owned.create_file(path)
    try:
        for source in content:
            for part in source.parts():
                owned.write_all(descriptor, part)
        owned.sync_file(descriptor)
    finally:
        os.close(descriptor)
    ledger.charge(str(path), Purpose.OUTPUT, sum(source.stop - source.start for source in content))


def _share(path: Path, content: Sequence[_Source], library: Path) -> bool:
    """Make `path` another name of a member's file with this content; whether there is one."""
    with contextlib.suppress(OSError):
        for member in sorted(path.name for path in library.iterdir() if path.is_dir() and path.name[0] != "."):
            with contextlib.suppress(OSError, MergePipeError):  # another member is tried, or the content written
                if _share_with(library / member, path, content):
                    return True
    return False


def _share_with(member: Path, path: Path, content: Sequence[_Source]) -> bool:
    descriptor = owned.open_file(member / path.name, member, flags=os.O_RDONLY)
    try:
        status = os.fstat(descriptor)
        if not _is_equal(_Source(descriptor, member / path.name, 0, status.st_size), content):
            return False
        owned.link_file(member / path.name, path, member)
        linked = path.lstat()
        if os.path.samestat(linked, status) and stat.S_ISREG(linked.st_mode):
            return True
        owned.remove_file(path)  # the member's file was replaced after it had been compared
        return False
    finally:
        os.close(descriptor)


def _is_equal(whole: _Source, content: Sequence[_Source]) -> bool:
    if whole.stop != sum(source.stop - source.start for source in content):
        return False
    at = 0
    for source in content:
        for part in source.parts():
            if read_descriptor_range(whole.descriptor, whole.path, at, len(part)) != part:
                return False
            at += len(part)
    return True
