"""A file that is read by ranges, as every store opens it, and the refusal of one that is too large to read whole."""

from __future__ import annotations

from typing import Protocol

from mergepipe.errors import CorruptError, MergePipeError
from mergepipe.storage.ledger import Purpose
from mergepipe.storage.location import Location


class RangeFile(Protocol):
    """One immutable file, open for positional reads from many threads.

    `alignment` is the granularity of requests in bytes (1: any): an engine that plans a read rounds it outwards
    itself, so that what is charged is what the operating system is asked for.
    """

    @property
    def location(self) -> Location: ...

    @property
    def size_bytes(self) -> int: ...

    @property
    def alignment(self) -> int: ...

    @property
    def version(self) -> str:
        """The version of what was opened, whatever its location leads to by now."""
        ...

    def read_into(self, offset: int, buffer: memoryview, purpose: Purpose) -> int:
        """Fill `buffer` from `offset`; return the bytes read, fewer only where the file ends inside the buffer.

        `offset`, `len(buffer)` and the buffer's address must be multiples of `alignment`.

        Raises:
            StorageError: the read failed.
            ConflictError: `input.changed`, another version of the file is in its place.
        """
        ...

    def close(self) -> None: ...


def too_large(path: object, size_bytes: int, limit_bytes: int) -> MergePipeError:
    """Make the error for a small file that is larger than any of its kind."""
    message = f"has {size_bytes} bytes, at most {limit_bytes} are read of a file of this kind"
    return CorruptError.of("storage.too-large", path, message, "put the right file in its place")
