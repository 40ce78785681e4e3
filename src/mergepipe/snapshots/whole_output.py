"""Write an output whole on this machine, then publish it in its place: a folder, a bucket, or the Hub."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from mergepipe.errors import OutputError
from mergepipe.snapshots.manifest import FILE_SUFFIXES
from mergepipe.snapshots.object_upload import (
    OutputContent,
    Upload,
    check_apart,
    check_replaceable,
    open_upload,
    staging_place,
)
from mergepipe.snapshots.staging import Staging, check_target
from mergepipe.storage.location import Location


def check_place(place: Location, inputs: Iterable[Location], *, force: bool) -> None:
    """Refuse a place that is none for an output, or where something is; of a bucket or the Hub, without a request."""
    if place.suffix in FILE_SUFFIXES:
        hint = f"write {place.parent / place.stem}"
        raise OutputError.of("output.place", place, "is the name of a file; the output is a folder", hint)
    if place.is_local:
        check_target(place.local_path, inputs, force=force)
        return
    check_replaceable(place, force=force)
    check_apart(place, inputs)


def staged_beside(place: Location, home: Path) -> Path:
    """Return the output of this machine next to which the one for `place` is staged: itself, or one in `home`."""
    return place.local_path if place.is_local else staging_place(place, home)


@dataclass(frozen=True, slots=True)
class WholeOutput:
    """An output that grows in the folder `path`; without an `upload` it is published on this machine."""

    staging: Staging
    upload: Upload | None

    @property
    def path(self) -> Path:
        """The folder to write the files into."""
        return self.staging.path

    def publish(self, content: OutputContent | None, on_upload: Callable[[int, int], None] = lambda *_: None) -> None:
        """Make the finished output visible.

        `content` is what a bucket or the Hub gets; None for a folder of this machine, which is published as it is
        staged. `on_upload` is called with the bytes uploaded so far, and with those of all objects.
        """
        upload = self.upload
        if upload is None or content is None:
            self.staging.publish()
            return
        total_bytes = content.total_bytes
        content.send_by(upload, lambda _: on_upload(upload.sent_bytes, total_bytes))


@contextmanager
def open_output(place: Location, *, force: bool, home: Path, message: str = "") -> Iterator[WholeOutput]:
    """Open an output at a place that `check_place` allows; left without `publish`, nothing is visible.

    A folder becomes visible in one atomic step. An output for a bucket or the Hub is staged in `home` and uploaded when
    it is complete, its record last; the staging directory then goes, and the same command sends again only what is
    missing there. `message` is that of the Hub's commit.
    """
    with ExitStack() as stack:
        upload = None
        if not place.is_local:
            upload = open_upload(place, force=force, message=message)
            stack.enter_context(upload)
        staging = stack.enter_context(Staging(staged_beside(place, home), force=force))
        yield WholeOutput(staging, upload)
