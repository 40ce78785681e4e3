"""A folder of a bucket that an output is written to: its objects by their names below it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from mergepipe.errors import ConflictError, MergePipeError, NotFoundError, StorageError
from mergepipe.storage.location import OBJECT_SCHEMES, Location
from mergepipe.storage.remote.retry import Failure, FailureKind, RequestFailed

if TYPE_CHECKING:
    from mergepipe.storage.remote.objects import BucketWriter, ObjectFacts

_IS_THERE: Final = (409, 412)
_OWN_MARK: Final = ".mergepipe-"  # of objects that no user named

T = TypeVar("T")


class BucketFolder:
    """Reads and writes the objects below a prefix as they are now: nothing is pinned or kept in memory.

    Every method raises NotFoundError where there is no such bucket, and StorageError where the store refuses or cannot
    be reached.
    """

    def __init__(self, location: Location, writer: BucketWriter | None = None) -> None:
        """Open the folder; makes no request."""
        if location.scheme not in OBJECT_SCHEMES:
            raise ValueError(f"no object store has the scheme {location.scheme}")
        from mergepipe.storage.remote.objects import open_writer

        self.location = location
        self._writer = writer or open_writer(location)

    def create(self, name: str, content: bytes | Path, digest: str = "") -> bool:
        """Write an object of which there is none; False where there is one, which stays."""
        return self._unless_there(name, lambda: self._writer.create(self._key(name), content, digest))

    def overwrite(self, name: str, content: bytes | Path, digest: str = "") -> None:
        """Write an object, whatever is there."""
        self._asked(name, lambda: self._writer.overwrite(self._key(name), content, digest))

    def exchange(self, name: str, content: bytes, facts: ObjectFacts) -> bool:
        """Replace an object if it is still the one that `facts` describe; False where it is not."""
        return self._unless_there(name, lambda: self._writer.exchange(facts, content, ""))

    def look(self, name: str) -> ObjectFacts | None:
        """Describe an object; None where there is none."""
        return self._asked(name, lambda: self._writer.look(self._key(name)))

    def read(self, name: str, limit_bytes: int) -> bytes | None:
        """The first bytes of an object, at most `limit_bytes` of them; None where there is none."""
        try:
            return self._asked(name, lambda: self._writer.read(self._key(name), limit_bytes))
        except NotFoundError:
            return None

    def list_all(self) -> dict[str, ObjectFacts]:
        """All objects by name, at any depth; their digests are not told."""
        objects = self._asked("", lambda: self._writer.list_all(self.location.key))
        return {self.name_of(facts.key): facts for facts in objects}

    def delete(self, name: str) -> None:
        """Delete an object; it may be gone already."""
        self._asked(name, lambda: self._writer.delete(self._key(name)))

    def name_of(self, key: str) -> str:
        """The name of an object below it."""
        return key[len(self.location.key) + 1 :] if self.location.key else key

    def below(self, name: str) -> BucketFolder:
        """A folder below this one."""
        return BucketFolder(self.location / name if name else self.location, self._writer)

    def _key(self, name: str) -> str:
        return (self.location / name).key

    def _unless_there(self, name: str, request: Callable[[], None]) -> bool:
        try:
            request()
        except RequestFailed as error:
            if error.failure.status in _IS_THERE:
                return False
            raise self._error(error.failure, name) from None
        return True

    def _asked(self, name: str, request: Callable[[], T]) -> T:
        try:
            return request()
        except RequestFailed as error:
            raise self._error(error.failure, name) from None

    def _error(self, failure: Failure, name: str) -> MergePipeError:
        is_named = bool(name) and not name.startswith(_OWN_MARK)
        place = self.location / name if is_named else self.location
        detail = failure.detail
        if failure.kind is FailureKind.STATUS and failure.status == 404:  # missing objects are no errors here
            bucket, hint = f"{self.location.scheme}://{self.location.root}", "check the name, or create it"
            return NotFoundError.of("storage.not-found", bucket, f"there is no such bucket: {detail}", hint)
        if failure.status == 401:
            message = f"credentials are needed, or those in use are not valid: {detail}"
            return StorageError.of("storage.credentials", place, message, "log in as the store's own tools ask for")
        if failure.status == 403:
            message = f"writing there is not allowed: {detail}"
            return StorageError.of("storage.permission", place, message, "check the credentials and their permissions")
        if failure.status in _IS_THERE:
            return ConflictError.of("output.changed", place, f"was written meanwhile: {detail}", "run again")
        message = f"could not be written: {detail}"
        return StorageError.of("storage.unavailable", place, message, "run again: what is uploaded already stays")


def age_seconds(facts: ObjectFacts, now: datetime) -> float:
    """Return how long ago an object was written."""
    return max(0.0, (now - facts.modified).total_seconds())
